"""Columns in memory, held by Arrow or NumPy: no Python object for each value.

Arrays are converted by their buffers: pyarrow's own conversions load pandas wherever that is there,
which takes half a second and 40 MB.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

AT_ONCE = 1 << 16
"""Values that are Python objects at a time while a column is iterated."""

STRINGS = np.dtypes.StringDType()
"""Type of NumPy arrays of texts, for what must not need pyarrow."""


def strings(parts: Iterable[Any]) -> np.ndarray:
    """Return sequences of texts, one after the other, as an array of `STRINGS`."""
    return np.concatenate([np.array([], STRINGS), *(np.array(part, STRINGS) for part in parts)])


def find(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the place in an array of different `STRINGS` of each one of another.

    Returns
    -------
    np.ndarray
        (len(wanted),) int64, -1 where it is not there.
    """
    found, both = np.full(len(wanted), -1), min(len(values), len(wanted))
    same = np.flatnonzero(values[:both] == wanted[:both])
    found[same] = same
    is_left = np.ones(len(values), np.bool_)
    is_left[same] = False
    left, missing = np.flatnonzero(is_left), np.flatnonzero(found < 0)
    places, texts = np.concatenate([left, missing]), np.concatenate([values[left], wanted[missing]])
    order = np.argsort(texts, kind="stable")
    pairs = texts[order[1:]] == texts[order[:-1]]
    pairs &= (order[:-1] < len(left)) & (order[1:] >= len(left))
    first = np.flatnonzero(pairs)
    found[places[order[first + 1]]] = places[order[first]]
    return found


@contextlib.contextmanager
def system_memory() -> Iterator[None]:
    """Let Arrow take memory from the system, and give back what is free in the end.

    Its own allocator keeps as much as large columns take, or twice that, and takes longer.
    """
    import pyarrow as pa

    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.default_memory_pool().release_unused()
        pa.set_memory_pool(before)


def numbers_of(array: Any) -> np.ndarray:
    """Return an Arrow array of numbers or bools without nulls as one of NumPy's."""
    import pyarrow as pa

    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    part, data = slice(array.offset, array.offset + len(array)), array.buffers()[1] or b""
    if pa.types.is_boolean(array.type):
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[part].view(np.bool_)
    return np.frombuffer(data, array.type.to_pandas_dtype())[part]


def filled(array: Any, value: float) -> np.ndarray:
    """Return an Arrow array of numbers as one of NumPy's, with a value in place of nulls."""
    numbers = numbers_of(array)
    return np.where(numbers_of(array.is_valid()), numbers, value) if array.null_count else numbers


def arrow_of(numbers: np.ndarray) -> Any:
    """Return numbers or bools as an Arrow array, which shares the memory of numbers."""
    import pyarrow as pa

    kind, data = pa.from_numpy_dtype(numbers.dtype), np.ascontiguousarray(numbers)
    data = np.packbits(data, bitorder="little") if data.dtype == np.bool_ else data
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(data)])


def texts_or_nulls(values: Sequence[str | None]) -> Any:
    """Return texts as an Arrow array, of nulls for None."""
    return _with_nulls(values, _encoded([value or "" for value in values]))


def numbers_or_nulls(values: Sequence[Any], dtype: type[np.number[Any]]) -> Any:
    """Return numbers as an Arrow array, of nulls for None."""
    numbers = np.array([0 if value is None else value for value in values], dtype)
    return _with_nulls(values, arrow_of(numbers))


def _with_nulls(values: Sequence[Any], array: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    known = np.fromiter((value is not None for value in values), np.bool_, len(values))
    null = pa.nulls(1, array.type)[0]
    return array if known.all() else pc.if_else(arrow_of(known), array, null)


def joined_texts(parts: Sequence[Any], between: str = "") -> Texts:
    """Return columns of texts joined value by value; a text among them stands for all values."""
    import pyarrow.compute as pc

    columns = [Texts([part]).arrow[0] if isinstance(part, str) else part.plain for part in parts]
    return Texts(pc.binary_join_element_wise(*columns, Texts([between]).arrow[0]))


def without_nulls(texts: Any) -> Texts:
    """Return an Arrow array of texts, of empty ones for nulls."""
    return Texts(Texts(texts).plain.fill_null(Texts([""]).arrow[0]))


class Texts(Sequence[str]):
    """A column of text: its Arrow array has the type `large_string`, or a dictionary of texts.

    Parameters
    ----------
    values
        Texts, or an Arrow array of them. A dictionary is kept as it is.

    Raises
    ------
    UnicodeEncodeError
        A text has a surrogate.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("arrow",)

    def __init__(self, values: Iterable[str] | Any) -> None:
        import pyarrow as pa  # only nodes that build have it

        self.arrow: Any
        if isinstance(values, Texts):
            self.arrow = values.arrow
        elif isinstance(values, pa.Array | pa.ChunkedArray):
            if not pa.types.is_dictionary(values.type):
                values = values.cast(pa.large_string())
            if isinstance(values, pa.ChunkedArray):
                values = values.combine_chunks() if len(values) else pa.nulls(0, values.type)
            self.arrow = values
        else:
            self.arrow = _encoded([*values])

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        """Return the values of several columns, one after the other."""
        import pyarrow as pa

        arrays = [part.arrow for part in parts]
        if len({array.type for array in arrays}) > 1:
            arrays = [part.plain for part in parts]
        return cls(pa.concat_arrays(arrays)) if arrays else cls([])

    @classmethod
    def repeated(cls, values: Sequence[str], counts: Sequence[int]) -> Texts:
        """Return a column of runs of equal values, each of which is held once."""
        import pyarrow as pa

        codes = np.repeat(np.arange(len(values), dtype=np.int32), counts)
        known = _encoded(values)
        return cls(pa.DictionaryArray.from_arrays(arrow_of(codes), known))

    @property
    def plain(self) -> Any:
        """The Arrow array, without a dictionary."""
        import pyarrow as pa

        return self.arrow.cast(pa.large_string())

    def __len__(self) -> int:
        return len(self.arrow)

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> Texts: ...

    def __getitem__(self, row: int | slice) -> str | Texts:
        return Texts(self.arrow[row]) if isinstance(row, slice) else str(self.arrow[row])

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.parts())

    def parts(self) -> Iterator[list[str]]:
        """Yield the values, some at a time."""
        for start in range(0, len(self), AT_ONCE):
            yield self[start : start + AT_ONCE].plain.to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Texts):
            return len(self) == len(other) and bool(self.same(other).all())
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Texts({[*self[:3]]}{', …' * (len(self) > 3)})"

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all values; and where each begins, and at last the end: (len + 1,) int64."""
        plain = self.plain
        ends = np.frombuffer(plain.buffers()[1], np.int64)[plain.offset :][: len(plain) + 1]
        data = np.frombuffer(plain.buffers()[2] or b"", np.uint8)
        return data[ends[0] : ends[-1]], ends - ends[0]

    def after_last(self, mark: str) -> np.ndarray:
        """Return where each value goes on after its last mark of ASCII, or else begins."""
        data, ends = self.data
        marks = np.append(-1, np.flatnonzero(data == ord(mark)))
        last = marks[np.searchsorted(marks, ends[1:]) - 1]
        return np.asarray(np.maximum(last + 1, ends[:-1]))

    def cut(self, starts: np.ndarray, ends: np.ndarray) -> Texts:
        """Return a part of each value, by where it begins and ends in `data`."""
        import pyarrow as pa

        data, lengths = self.data[0], ends - starts
        some, change = lengths > 0, np.zeros(len(data) + 1, np.int8)
        change[starts[some]] = 1
        change[ends[some]] -= 1
        kept = data[np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)]
        buffers = map(pa.py_buffer, (np.append(0, np.cumsum(lengths)), kept))
        return Texts(pa.LargeStringArray.from_buffers(len(self), *buffers))

    def mapped(self, change: Callable[[Texts], Texts]) -> Texts:
        """Return what a function makes of the values, some at a time."""
        growing = GrowingTexts()
        for start in range(0, len(self), AT_ONCE):
            growing.extend(change(self[start : start + AT_ONCE]))
        return growing.texts()

    def take(self, rows: np.ndarray | slice) -> Texts:
        """Return the values of some rows: their numbers, or bools for all of the column."""
        if isinstance(rows, slice):
            return self[rows]
        if rows.dtype != np.bool_:
            return Texts(self.arrow.take(arrow_of(rows)))
        return self if rows.all() else Texts(self.arrow.filter(arrow_of(rows)))

    def matching(self, pattern: str, *, ignore_case: bool = False) -> np.ndarray:
        """Search a regular expression of RE2 in each value: (len,) bool."""
        import pyarrow.compute as pc

        return numbers_of(pc.match_substring_regex(self.plain, pattern, ignore_case=ignore_case))

    def between(self, before: str, after: str = "") -> Texts:
        """Return the values with a text before and one after each."""
        return joined_texts([before, self, after])

    @property
    def is_blank(self) -> np.ndarray:
        """Which values are empty: (len,) bool."""
        import pyarrow.compute as pc

        return np.asarray(numbers_of(pc.binary_length(self.plain)) == 0)

    def same(self, other: Texts) -> np.ndarray:
        """Compare values one by one: (len,) bool."""
        import pyarrow.compute as pc

        if self.arrow is other.arrow:  # of dictionaries, all values would be copied
            return np.ones(len(self), np.bool_)
        return numbers_of(pc.equal(self.arrow, other.arrow))

    @property
    def are_ascending(self) -> bool:
        """True if each value is greater than the one before it."""
        import pyarrow.compute as pc

        plain = self.plain
        return bool(pc.all(pc.less(plain[:-1], plain[1:]), min_count=0).as_py())

    @property
    def is_repeated(self) -> np.ndarray:
        """Which values are there more than once: (len,) bool.

        Where none is, this takes far less memory than to number the values.
        """
        import pyarrow as pa

        none = np.zeros(len(self), np.bool_)
        if self.are_ascending:
            return none
        starts = range(0, len(self), AT_ONCE)
        parts = (self[at : at + AT_ONCE].plain.view(pa.large_binary()).to_pylist() for at in starts)
        hashes = np.fromiter(map(hash, itertools.chain.from_iterable(parts)), np.int64, len(self))
        hashes.sort()
        return self.counts() > 1 if (hashes[1:] == hashes[:-1]).any() else none

    def codes(self) -> np.ndarray:
        """Number the different values in the order in which they occur: (len,) int32."""
        return numbers_of(self.plain.dictionary_encode().indices)

    def counts(self) -> np.ndarray:
        """Return how many rows have the value of each: (len,) int64."""
        codes = self.codes()
        counts: np.ndarray = np.bincount(codes)[codes]
        return counts

    def find(self, values: Texts) -> np.ndarray:
        """Return the row of each value: (len,) int64, -1 for those that are not in this column."""
        import pyarrow.compute as pc

        count = len(values)
        if len(self) >= count and self[:count] == values:
            return np.arange(count)
        rows = pc.index_in(values.plain, value_set=self.plain)
        return np.where(numbers_of(rows.is_valid()), numbers_of(rows), np.int64(-1))

    def order(self) -> np.ndarray:
        """Return the rows in alphabetical order, by code points: (len,) int64."""
        import pyarrow.compute as pc

        return numbers_of(pc.sort_indices(self.plain)).view(np.int64)

    def first(self) -> int:
        """Return the row of the first value in alphabetical order."""
        import pyarrow.compute as pc

        return int(pc.index(self.plain, pc.min(self.plain)).as_py())

    def replaced(self, values: Mapping[int, str]) -> Texts:
        """Return the column with other values in some rows."""
        import pyarrow.compute as pc

        if not values:
            return self
        mask = np.zeros(len(self), np.bool_)
        mask[list(values)] = True
        new = _encoded([values[row] for row in sorted(values)])
        return Texts(pc.replace_with_mask(self.plain, arrow_of(mask), new))

    def blanked(self, rows: np.ndarray) -> Texts:
        """Return the column with empty texts in some rows.

        Parameters
        ----------
        rows
            (len,) bool.
        """
        if not rows.any():
            return self
        places = np.where(rows, len(self), np.arange(len(self)))
        return Texts.joined([self, Texts([""])]).take(places)


class GrowingTexts:
    """A column of text that grows, in memory of about its size; those of Arrow take thrice.

    Attributes
    ----------
    wrong
        Rows whose texts have surrogates, for bytes that are not UTF-8: the column has these bytes.
    """

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q", [0])
        self.wrong: list[int] = []

    def extend(self, values: Sequence[str]) -> None:
        """Add values."""
        start, count = len(self._data), len(self._ends) - 1
        if isinstance(values, Texts):
            data, ends = values.data
            self._data += data.data
            self._ends.frombytes((ends[1:] + start).tobytes())
            return
        whole = "".join(values)
        lengths = map(len, values)
        if not whole.isascii():
            parts = [value.encode("utf-8", "surrogateescape") for value in values]
            lengths = map(len, parts)
            rows = enumerate(zip(values, parts, strict=True), count)
            self.wrong += (row for row, pair in rows if pair[1].decode(errors="replace") != pair[0])
        self._data += whole.encode("utf-8", "surrogateescape")
        self._ends.frombytes(
            (np.cumsum(np.fromiter(lengths, np.int64, len(values))) + start).tobytes()
        )

    def texts(self) -> Texts:
        """Return the values, in the same memory: the column can grow no more."""
        import pyarrow as pa

        ends, data = pa.py_buffer(self._ends), pa.py_buffer(self._data)
        return Texts(pa.LargeStringArray.from_buffers(len(self._ends) - 1, ends, data))


def _encoded(values: Sequence[str]) -> Any:
    growing = GrowingTexts()
    growing.extend(values)
    for row in growing.wrong:
        values[row].encode()  # raises
    return growing.texts().arrow
