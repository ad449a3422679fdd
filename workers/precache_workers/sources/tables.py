"""Rows of tables, in batches by column: CSV, TSV, JSON Lines and Parquet."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from precache.errors import SourceError
from precache_workers.sources.base import is_utf8, require_distinct
from precache_workers.sources.labels import (
    Label,
    bits_column,
    cell_of,
    column_of,
    label_of,
    typed_column,
    values_of,
)
from precache_workers.sources.parquet_tables import LISTED_ROWS, damaged, open_table

JSON_LINES = (".jsonl", ".ndjson")
LONGEST_LINE = 1 << 20


class Batch(NamedTuple):
    """Rows of a table: the number of each one's line, as an editor shows it, and its cells.

    Rows of Parquet are numbered from 1; their columns have types, as `typed` has them.
    """

    lines: Sequence[int]
    columns: Mapping[str, list[Any]]
    typed: Any = None


def read_batches(
    stream: BinaryIO,
    name: str,
    where: str,
    wanted: Callable[[Any], Iterable[str]] = lambda schema: schema.names,
    *,
    whole: bool = False,
) -> Iterator[Batch]:
    """Yield the rows of a table, whose kind follows from its name.

    Parameters
    ----------
    wanted
        Returns the columns of an Arrow schema to read of Parquet; of others, all are read.
    whole
        Yield all rows of Parquet or JSON lines as one batch.
    """
    if name.lower().endswith(".parquet"):
        with damaged(where):
            table = open_table(stream)
            names = list(dict.fromkeys(wanted(table.schema_arrow)))
            number = 1
            batches = table.iter_batches(LISTED_ROWS, columns=names, use_threads=False)
            if whole:
                read = table.read(names, use_threads=False).unify_dictionaries()
                batches = read.combine_chunks().to_batches()
            for batch in batches:
                columns = map(values_of, batch.columns)
                cells = dict(zip(batch.schema.names, columns, strict=True))
                yield Batch(range(number, number + len(batch)), cells, batch)
                number += len(batch)
        return
    if name.lower().endswith(JSON_LINES):
        objects = _json_rows(_lines(stream, where), where)
        while taken := list(itertools.islice(objects, None if whole else LISTED_ROWS)):
            named = dict.fromkeys(name for _, row in taken for name in row)
            cells = {name: [row.get(name) for _, row in taken] for name in named}
            yield Batch([number for number, _ in taken], cells)
        return
    rows = csv_rows(stream, name, where)
    _, header = next(rows, (1, [""]))
    header = header[: width_of(header)]
    while some := list(itertools.islice(rows, LISTED_ROWS)):
        yield by_column(header, some, where)


def width_of(row: Sequence[str]) -> int:
    """Return the number of cells of a line without blank ones at its end."""
    return max((place for place, cell in enumerate(row, 1) if cell.strip()), default=0)


def by_column(names: Sequence[str], rows: Sequence[tuple[int, list[str]]], where: str) -> Batch:
    """Return lines of CSV by column.

    Raises
    ------
    SourceError
        Two columns have one name, or a line has fewer cells than there are columns, or more that
        are not blank.
    """
    require_distinct(names, f"{where} has several columns")
    for number, row in rows:
        if len(row) < len(names) or width_of(row) > len(names):
            raise SourceError(
                f"line {number} of {where} has {len(row)} cells, and the first line {len(names)}: "
                "name each column there, and give each line as many cells"
            )
    columns = {name: [row[place] for _, row in rows] for place, name in enumerate(names)}
    return Batch([number for number, _ in rows], columns)


def csv_rows(stream: BinaryIO, name: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of CSV or TSV with a cell: the number of each, and its cells.

    Bytes that are not UTF-8 become surrogates.
    """
    lines = _lines(stream, where)
    first = next(lines, "")
    # Spreadsheets of some countries write semicolons.
    mark = "\t" if name.lower().endswith(".tsv") else next((m for m in ",;\t" if m in first), ",")
    text = itertools.chain([first], lines)
    # Without `skipinitialspace`, a quote after a space would be part of the cell.
    reader = csv.reader(text, delimiter=mark, skipinitialspace=True, strict=True)
    end = 0
    try:
        for row in reader:
            end = reader.line_num
            if any(map(str.strip, row)):  # spreadsheets write lines of separators alone
                yield end, row
    except csv.Error as error:  # `line_num` is that of the last line that was read
        raise SourceError(
            f"line {end + 1} of {where} is not CSV: {error}; correct its quotes"
        ) from None


def _lines(stream: BinaryIO, where: str) -> Iterator[str]:
    is_wide = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as of spreadsheets
    stream.seek(0)
    coding = ("utf-16", "surrogatepass") if is_wide else ("utf-8-sig", "surrogateescape")
    text = io.TextIOWrapper(stream, *coding, newline="")
    try:
        while line := text.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise SourceError(f"{where} has a line of more than {LONGEST_LINE:,} characters")
            yield line
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} is damaged: {error}; save it as UTF-8") from None
    finally:
        with contextlib.suppress(ValueError):  # the stream is the caller's, and may be closed
            text.detach()


def parse_json(text: str) -> Any:
    """Parse JSON; raises `ValueError` for an object with a name twice, which would lose one."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has {name!r} {count} times; leave it there once")
    return names


def _json_rows(lines: Iterable[str], where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"line {number} of {where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise SourceError(f"line {number} of {where} is no JSON object; give one a line")
        yield number, row


def read_labels(
    batch: Batch, columns: Sequence[str], where: str, none: Collection[str] = ()
) -> Any:
    """Return the labels of rows as an Arrow array, of the types that `labels.column_of` has.

    Parameters
    ----------
    columns
        None, one, or one for each class.
    none
        Texts of cells of columns for each class that the user takes as no label.
    """
    empty = [None] * len(batch.lines)
    cells = [batch.columns.get(name, empty) for name in columns]
    if len(columns) == 1 and batch.typed is not None:
        with damaged(where):
            return typed_column(batch.typed.column(columns[0]), columns[0])
    rows: list[Any] = []
    of = f"its column {columns[0]} " if len(columns) == 1 else ""
    for line, row in zip(batch.lines, zip(*cells, strict=True), strict=False):
        try:
            if of:
                rows.append(_label_of(row[0]))
            else:
                rows.append([cell_of(*cell, none) for cell in zip(row, columns, strict=True)])
        except ValueError as error:
            raise SourceError(f"line {line} of {where}: {of}{error}") from None
    return bits_column(rows) if len(columns) > 1 else column_of(rows or empty, typed=False)


def _label_of(value: Any) -> Label | None:
    value = text_of(value) if isinstance(value, str | dict) else value
    is_list = isinstance(value, str) and value.startswith("[") and is_utf8(value)  # of any length
    return value if is_list else label_of(value)


def text_of(value: Any) -> str:
    """Return a cell as text, a number or a list as JSON; empty for none."""
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(int(value) if isinstance(value, bool) else value)
