"""Which rows of a base version are linked, copied by whole chunks, or one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from precache_workers.shards.copied_rows import CopiedRows


class Log:
    """Records what is copied, in order; other rows are appended by `other`."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.rows: list[int] = []
        self.order: list[int] = []

    def copy_chunks(self, rows: range) -> None:
        self.chunks += rows
        self.order += rows

    def copy_rows(self, rows: range) -> None:
        self.rows += rows
        self.order += rows

    def other(self, rows: range) -> None:
        self.order += rows


RUNS = st.lists(st.tuples(st.sampled_from(["link", "copy", "other"]), st.integers(1, 9)))


@given(RUNS, st.integers(1, 5))
def test_chunks_without_another_row_are_copied_whole_and_rows_stay_in_order(
    runs: list[tuple[str, int]], chunk_rows: int
) -> None:
    count = sum(length for _, length in runs)
    log, start, copied = Log(), 0, []
    rows = CopiedRows(count, chunk_rows, log)
    for kind, length in runs:
        run = range(start, start + length)
        if kind == "other":
            rows.interrupt()
            log.other(run)
        else:
            copied += run
            (rows.link if kind == "link" else rows.copy)(run)
        start = run.stop
    rows.finish()
    assert rows.linked == all(kind == "link" for kind, _ in runs)
    if rows.linked:
        assert log.order == []
        return
    assert log.order == list(range(count))
    whole = [
        place
        for first in range(0, count, chunk_rows)
        if all(p in copied for p in range(first, min(first + chunk_rows, count)))
        for place in range(first, min(first + chunk_rows, count))
    ]
    assert log.chunks == whole
    assert log.rows == [place for place in copied if place not in whole]
