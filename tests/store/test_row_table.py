"""Row tables round-trip, and their digest tells any two apart."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import StoreError
from precache.store.row_table import RowTable, read_contents, read_parts

I64 = st.integers(-1, 2**62)
ROWS = st.tuples(st.text(), I64, I64, st.text(max_size=5), st.integers(-1, 1000))


@st.composite
def tables(draw: st.DrawFn) -> RowTable:
    rows = draw(st.lists(ROWS, min_size=1, max_size=20))
    keys, sizes, mtimes, etags, labels = map(list, zip(*rows, strict=True))
    numbers = [np.array(column, np.int64) for column in (sizes, mtimes, labels)]
    classes = tuple(draw(st.lists(st.text(), max_size=4)))
    return RowTable(
        keys=keys,
        sizes=numbers[0],
        mtimes=numbers[1],
        etags=etags,
        labels=numbers[2],
        classes=classes,
    )


@settings(max_examples=20)
@given(tables())
def test_a_table_round_trips_through_parquet(table: RowTable) -> None:
    again = RowTable.from_parquet(table.to_parquet(), "rows.parquet")
    assert again.digest == table.digest


OTHER_LABELS = [
    np.array([0.5, np.nan, -3, 1e30], np.float32),
    np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]], np.uint8),
    np.zeros((3, 2), np.uint8),
    np.ones((1, 1), np.uint8),
]


def _with_labels(labels: np.ndarray) -> RowTable:
    numbers = np.arange(len(labels))
    names = [str(number) for number in numbers]
    return RowTable(
        keys=names, sizes=numbers, mtimes=numbers + 1, etags=names[::-1], labels=labels, classes=()
    )


@pytest.mark.parametrize("labels", [np.arange(-1, 9), *OTHER_LABELS])
def test_a_table_is_written_in_parts_with_labels_of_every_kind(
    labels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.store.row_table.ROWS_PER_GROUP", 3)
    table, count = _with_labels(labels), len(labels)
    contents, parts = [f"c{n}" for n in range(count)], [f"p{n}" for n in range(count)]
    data = table.to_parquet(contents)
    assert pq.ParquetFile(io.BytesIO(data)).num_row_groups == -(-count // 3)
    assert pq.read_table(io.BytesIO(data))["content"].to_pylist() == contents
    assert read_contents(data, "rows.parquet") == contents
    assert read_parts(data, "rows.parquet") == []
    assert read_parts(table.to_parquet(contents, parts), "rows.parquet") == parts
    again = RowTable.from_parquet(data, "rows.parquet")
    assert (list(again.keys), again.labels.dtype) == (list(table.keys), labels.dtype)
    np.testing.assert_array_equal(again.labels, labels)
    assert again.digest == table.digest


def _table(**changes: Any) -> RowTable:
    two = np.array([1, 2], np.int64)
    columns = {"sizes": two, "mtimes": two + 2, "etags": ["", "e"], "labels": two - 2}
    return RowTable(**{"keys": ["a", "b"], **columns, "classes": ("cat", "dog"), **changes})


def test_the_digest_is_a_fixed_one_and_tells_tables_apart() -> None:
    several = np.eye(4, dtype=np.uint8)
    tables = [
        _table(),
        _table(keys=["a", "c"]),
        _table(sizes=np.array([1, 3])),
        _table(mtimes=np.array([3, 5])),
        _table(etags=["e", ""]),
        _table(labels=np.array([-1, 1])),
        _table(classes=("cat", "eel")),
        _table().take([1, 0]),
        _table().take([0]),
        _table(removed=frozenset({0})),
        _table(labels_with_samples=True),
        _table(source="ab"),
        _with_labels(np.arange(4)),
        _with_labels(np.arange(4, dtype=np.float32)),
        _with_labels(np.zeros(4, np.float32)),
        _with_labels(several),
        _with_labels(several[::-1]),
        _with_labels(np.eye(4, 5, dtype=np.uint8)),
    ]
    assert tables[0].digest == "0e8b17de22ae76c7c5d77ff34acf4db326f97662e4dc46e67284702c20124ee8"
    assert len({table.digest for table in tables}) == len(tables)
    two, columns = np.array([2, 1]), {"keys": ["b", "a"], "etags": ["e", ""]}
    turned = _table(**columns, sizes=two, mtimes=two + 2, labels=two - 2)
    assert tables[7].digest == turned.digest, "rows are taken with all that is in them"
    assert len(_table().take([])) == 0


@given(keys=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), unique=True))
def test_rows_are_found_by_their_keys(keys: list[str]) -> None:
    table = RowTable.of_keys(keys)
    wanted = [*reversed(keys), "none of these", "\udce9"]
    rows = {key: row for row, key in enumerate(keys)}
    assert table.rows_of(wanted).tolist() == [rows.get(key, -1) for key in wanted]


@given(st.binary(max_size=200))
def test_bytes_that_are_no_table_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match=r"rows\.parquet is no row table"):
        RowTable.from_parquet(data, "rows.parquet")


def _column(name: str, values: list[object]) -> Callable[[Any], Any]:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values))


def _metadata(**changes: str | None) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        metadata = {**table.schema.metadata, **{n.encode(): v for n, v in changes.items()}}
        return table.replace_schema_metadata({n: v for n, v in metadata.items() if v is not None})

    return change


FORGED = [
    *(
        (_table(), _column(name, values), f"its column {name} has values of type")
        for name, values in [
            ("key", ["a", None]),
            ("key", [1, 2]),
            ("key", [b"a", b"b"]),
            ("size", [1.5, 2.0]),
            ("label", [0, None]),
            ("etag", [["x"], []]),
        ]
    ),
    (_table(), lambda table: table.drop(["etag"]), ""),
    *((_table(), _metadata(classes=classes), "") for classes in (None, "[1]", "[" * 10**5)),
    *(
        (_with_labels(OTHER_LABELS[1]), _metadata(label_classes=count), "")
        for count in ("0", "-1", "2", "99999999999", "many", None)
    ),
]


@pytest.mark.parametrize(("table", "change", "words"), FORGED)
def test_a_forged_table_is_refused(table: RowTable, change: Any, words: str) -> None:
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(io.BytesIO(table.to_parquet()))), sink)
    with pytest.raises(StoreError, match=rf"rows\.parquet is no row table: .*{words}"):
        RowTable.from_parquet(sink.getvalue(), "rows.parquet")


@given(st.data())
def test_a_damaged_table_is_refused_or_still_a_table(data: st.DataObject) -> None:
    stored = bytearray(_table().to_parquet())
    for position in data.draw(st.lists(st.integers(0, len(stored) - 1), min_size=1, max_size=4)):
        stored[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(stored), len(stored) // 2]))
    try:
        table = RowTable.from_parquet(bytes(stored[:cut]), "rows.parquet")
    except StoreError:
        return
    assert len(table) == 2


def test_a_few_bytes_are_not_read_as_ten_million_rows() -> None:
    column = pa.DictionaryArray.from_arrays(np.zeros(10_000_000, np.int32), ["x" * 32])
    sink = io.BytesIO()
    pq.write_table(pa.table({"content": column}), sink, store_schema=False)
    assert len(sink.getvalue()) < 100_000
    with pytest.raises(StoreError, match=r"rows/c/0 is no row table: .* cannot be 80000000 bytes"):
        read_contents(sink.getvalue(), "rows/c/0")
