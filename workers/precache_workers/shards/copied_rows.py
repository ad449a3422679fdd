"""Decide how rows of a base version are copied: by a link, in whole chunks, or one by one. Pure."""

from __future__ import annotations

from typing import Protocol


class Copier(Protocol):
    """Copies rows of the base version."""

    def copy_chunks(self, rows: range) -> None:
        """Append whole chunks as they are stored; the last may be the base version's last."""

    def copy_rows(self, rows: range) -> None:
        """Append rows of a chunk that has other rows, too, and is encoded anew."""


class CopiedRows:
    """Joins the rows that are copied, in order, to what a `Copier` copies at once.

    Rows to be linked are copied only once another row comes between; rows of a chunk only once the
    chunk is complete, or has another row.

    Parameters
    ----------
    base_rows
        Rows that the object of the base version has.
    chunk_rows
        Rows of a chunk; the place of a row is its number in the first chunk, or so many more.
    """

    def __init__(self, base_rows: int, chunk_rows: int, copier: Copier) -> None:
        self._base_rows, self._chunk_rows, self._copier = base_rows, chunk_rows, copier
        self._linked: int | None = 0
        self._pending = range(0)

    @property
    def linked(self) -> bool:
        """True if all rows were linked."""
        return self._linked == self._base_rows

    def link(self, rows: range) -> None:
        """Take rows by a link, if all rows of the object are; else copy them."""
        if self._linked == rows.start:
            self._linked = rows.stop
        else:
            self.copy(rows)

    def copy(self, rows: range) -> None:
        """Copy rows."""
        self._unlink()
        while rows:
            first, place = divmod(rows.start, self._chunk_rows)
            part = rows[: self._chunk_rows - place]
            if place and not self._pending:
                self._copier.copy_rows(part)  # the chunk has another row
            elif len(part) == self._chunk_rows:
                part = rows[: len(rows) // self._chunk_rows * self._chunk_rows]
                self._copier.copy_chunks(part)
            else:
                self._pending = range(first * self._chunk_rows, part.stop)
                if len(self._pending) == self._chunk_rows:
                    self._copy_pending()
            rows = rows[len(part) :]

    def interrupt(self) -> None:
        """Copy what is left before another row is appended."""
        self._unlink()
        if self._pending:
            self._copier.copy_rows(self._pending)
            self._pending = range(0)

    def finish(self) -> None:
        """Copy the last chunk, unless the object is a link."""
        if not self.linked:
            self._unlink()
            self._copy_pending()

    def _unlink(self) -> None:
        linked, self._linked = self._linked, None
        if linked:
            self.copy(range(linked))

    def _copy_pending(self) -> None:
        if self._pending:
            self._copier.copy_chunks(self._pending)
            self._pending = range(0)
