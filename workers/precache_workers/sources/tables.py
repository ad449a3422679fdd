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
from precache.messages import printable
from precache_workers.sources.base import is_utf8
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


def joined_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches as one; cells of columns that some lack are None."""
    import pyarrow as pa

    names = dict.fromkeys(name for batch in batches for name in batch.columns)
    cells = {
        name: [cell for b in batches for cell in b.columns.get(name, [None] * len(b.lines))]
        for name in names
    }
    lines = [line for batch in batches for line in batch.lines]
    if not batches or batches[0].typed is None:
        return Batch(lines, cells)
    table = pa.Table.from_batches([batch.typed for batch in batches]).unify_dictionaries()
    return Batch(lines, cells, table.combine_chunks().to_batches()[0])


def read_batches(
    stream: BinaryIO,
    name: str,
    where: str,
    wanted: Callable[[Any], Iterable[str]] = lambda schema: schema.names,
) -> Iterator[Batch]:
    """Yield the rows of a table, whose kind follows from its name.

    Parameters
    ----------
    wanted
        Returns the columns of an Arrow schema to read of Parquet; of others, all are read.
    """
    if name.lower().endswith(".parquet"):
        with damaged(where):
            table = open_table(stream)
            names = list(dict.fromkeys(wanted(table.schema_arrow)))
            number = 1
            for batch in table.iter_batches(LISTED_ROWS, columns=names, use_threads=False):
                columns = map(values_of, batch.columns)
                cells = dict(zip(batch.schema.names, columns, strict=True))
                yield Batch(range(number, number + len(batch)), cells, batch)
                number += len(batch)
        return
    if name.lower().endswith(JSON_LINES):
        objects = _json_rows(_lines(stream, where), where)
        while taken := list(itertools.islice(objects, LISTED_ROWS)):
            named = dict.fromkeys(name for _, row in taken for name in row)
            cells = {name: [row.get(name) for _, row in taken] for name in named}
            yield Batch([number for number, _ in taken], cells)
        return
    rows = csv_rows(stream, name, where)
    _, header = next(rows, (1, []))
    while header and not header[-1]:
        del header[-1]
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise SourceError(
            f"{where} has several columns {printable(twice[0])!r}; rename all but one"
        )
    while some := list(itertools.islice(rows, LISTED_ROWS)):
        for number, row in some:
            if len(row) < len(header) or any(row[len(header) :]):
                raise SourceError(
                    f"line {number} of {where} has not as many cells as the first line, which "
                    "names the columns"
                )
        columns = map(list, zip(*(row for _, row in some), strict=False))
        cells = dict(zip(header, columns, strict=False))
        yield Batch([number for number, _ in some], cells)


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


def _json_rows(lines: Iterable[str], where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
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
    text = text_of(value) if isinstance(value, str | dict) else ""
    return text if text.startswith("[") else label_of(text or value)  # it may be a list


def text_of(value: Any) -> str:
    """Return a cell without a type as text, a list as JSON; empty for none.

    Raises
    ------
    ValueError
        The value cannot be a label or a key.
    """
    match value:
        case None:
            return ""
        case str() if is_utf8(value):
            return value.strip()
        case str():
            raise ValueError(
                f"is {printable(repr(value)[:60])}, which is not UTF-8; save it as UTF-8"
            )
        case bool():
            return str(int(value))
        case int() | float():
            return repr(value)
        case list() | dict():
            with contextlib.suppress(TypeError):
                return json.dumps(value)
    raise ValueError(
        f"is {printable(repr(value)[:60])}; a label is a class, a number, or a list of classes"
    )
