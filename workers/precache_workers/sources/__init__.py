"""Sources, which list and fetch samples; the user's own code and its identity.

`base` has the interface of a source, `kinds` opens one by its name, `contract` checks one. `folder`
and `dataset` are sources of their own. Archives and tables with many samples in a file are formats
of `containers`; `columns` chooses the columns of tables; `manifests` reads tables of URIs; and
`listings` has what all of them say about the samples that they list.

- A listing gives each sample an identity and, if it lies in a container, a location: the unit that
  it is read with, and its place there. Tasks get locations with keys and sizes, so that workers
  need no index. Locations are never stored: a store is not trusted, and a container may
  be packed anew. Without them, as in the viewer, a source lists once to find its samples.
- The identity of a sample is the checksum that its container records, in zip archives and TFRecord
  files; else it is the container's, and content decides what changed.
- Units of containers are shuffled among all, rows within groups of units (`planning.rows`), and a
  task fetches the samples of a unit together (`fetching`).
- `labels` has the kinds of labels, their encoding, and the order and spelling of names of classes.
  `label_evidence` decides once how a column of them is read: as what it plainly is, else as the
  user says, who is offered each reading that fits. `label_readings` finds the folders that are
  classes, by a table of rules, and
  `pairs` files that pair up by name, in folders and in columns. A listing has the doubts beside its
  table: a build refuses them, and the viewer, which needs no labels, does not.
- An index of all containers, kept in the store, spares the next listing those that did not change.
"""
