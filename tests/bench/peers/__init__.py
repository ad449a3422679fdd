"""The same rows through other loaders, beside np.take, in one table from one run.

``--folder WORKDIR --install`` the first time, without ``--install`` after that. Every peer is given
the same 224 x 224 x 3 uint8 rows, each another crop of a real photograph, writes them in its own
format, and reads them back shuffled, in batches of 256.

What makes the figures fair:

- Each peer runs in a process of its own, in an environment of its own (`environments`), with the
  settings that cost it least here. They stand in the docstring of its module, with the reason.
- Its epochs take turns with `np.take` into a reused buffer, the floor, which runs in another
  process; the ratio is between neighbours in time. What the floor took meanwhile is shown beside
  it, so that drift is seen.
- CPU time is that of the peer's process, its threads and its children, from the end of one epoch to
  the end of the next, so that work ahead counts wherever it happens. Imports do not count.
- Every epoch must yield each row once, in another order than the one before; in an epoch that is
  not measured, pixels are compared with the rows. A peer that fails either has no figures.
- A DataLoader over other datasets is given a collate function that stacks with NumPy:
  `torch.stack` goes to fresh memory page by page and takes three times as long.

Warm figures are medians of the epochs after the first, whose cost has a column of its own: it
opens the store, compiles what the peer compiles, and faults pages in. What was read from the disk
meanwhile is shown, so that a row that was not warm is seen.
"""
