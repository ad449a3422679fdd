"""Read-ahead: have the kernel read the rows of coming batches before they are needed.

One thread calls `madvise`, which releases the interpreter lock; a page fault would hold up a
decoding thread for each row in turn. Once nothing comes from the disk any more, the advice stops,
because looking up cached pages costs a third of copying them.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from precache.reading.array_reader import ArrayReader
from precache.runtime.step_clock import ThreadTime
from precache.runtime.threads import Threads


class ReadAhead:
    """Advises the kernel of coming rows while the process still reads from a disk."""

    def __init__(self, thread_time: ThreadTime) -> None:
        self._thread_time = thread_time
        self._blocks, self._quiet = -1, False

    def advise(self, readers: Sequence[ArrayReader], rows: np.ndarray) -> None:
        """Start reading the stored bytes of rows, unless all seems to be in the page cache."""
        with self._thread_time.counted():
            blocks = _blocks_read()  # also of what the advice before this one began to read
            self._quiet, self._blocks = blocks == self._blocks, blocks
            for reader in readers if not self._quiet else ():
                reader.will_need(rows)

    def around(
        self, readers: Sequence[ArrayReader], batches: Iterable[np.ndarray], ahead: int
    ) -> Generator[np.ndarray, None, None]:
        """Yield the batches that readers read, each advised up to `ahead` batches before.

        The first one does not wait until others are advised.
        """
        waiting: deque[tuple[np.ndarray, Future[None] | None]] = deque()
        distance = 0
        pool = Threads(1, "precache-readahead")
        try:
            for rows in batches:
                due = not self._quiet or _blocks_read() != self._blocks
                advice = pool.submit(self.advise, readers, rows) if due else None
                waiting.append((rows, advice))
                if len(waiting) > distance:
                    yield _advised(*waiting.popleft())
                    distance = min(distance + 1, ahead)
            while waiting:
                yield _advised(*waiting.popleft())
        finally:
            pool.close()


def _advised(rows: np.ndarray, advice: Future[None] | None) -> np.ndarray:
    if advice is not None:
        advice.result()
    return rows


def _blocks_read() -> int:
    """Number of 512-byte blocks that this process has read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock
