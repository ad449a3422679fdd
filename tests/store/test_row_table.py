"""Row tables round-trip, and their digest tells any two apart."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import StoreError
from precache.store.row_table import RowTable, read_contents, read_parts

COLUMNS = ("sizes", "mtimes", "labels")
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


def _assert_same(one: RowTable, other: RowTable) -> None:
    assert (one.classes, list(one.keys)) == (other.classes, list(other.keys))
    assert list(one.etags) == list(other.etags)
    for name in COLUMNS:
        assert getattr(other, name).dtype == np.int64
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@given(tables())
def test_a_table_round_trips_through_parquet(table: RowTable) -> None:
    again = RowTable.from_parquet(table.to_parquet(), "rows.parquet")
    _assert_same(table, again)
    assert again.digest == table.digest


def test_a_table_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precache.store.row_table.ROWS_PER_GROUP", 3)
    numbers = np.arange(10)
    names = [str(number) for number in numbers]
    table = RowTable(
        keys=names,
        sizes=numbers,
        mtimes=numbers + 1,
        etags=names[::-1],
        labels=numbers - 1,
        classes=("cat",),
    )
    data = table.to_parquet(names)
    assert pq.ParquetFile(io.BytesIO(data)).num_row_groups == 4
    assert pq.read_table(io.BytesIO(data))["content"].to_pylist() == names
    _assert_same(table, RowTable.from_parquet(data, "rows.parquet"))


def test_content_hashes_ride_along(tmp_path_factory: pytest.TempPathFactory) -> None:
    table = _table()
    data = table.to_parquet(["ab", ""])
    path = tmp_path_factory.mktemp("rows") / "table.parquet"
    path.write_bytes(data)
    stored = pq.read_table(path)
    assert stored["content"].to_pylist() == ["ab", ""]
    _assert_same(table, RowTable.from_parquet(data, "rows.parquet"))
    assert read_parts(data, "rows.parquet") == []
    assert read_parts(table.to_parquet(["ab", ""], ["abcd", ""]), "rows.parquet") == ["abcd", ""]


def _table() -> RowTable:
    two = np.array([1, 2], np.int64)
    return RowTable(
        keys=["a", "b"],
        sizes=two,
        mtimes=two + 2,
        etags=["", "e"],
        labels=two - 2,
        classes=("cat", "dog"),
    )


CHANGES: dict[str, RowTable] = {
    "key": dataclasses.replace(_table(), keys=["a", "c"]),
    "size": dataclasses.replace(_table(), sizes=np.array([1, 3])),
    "mtime": dataclasses.replace(_table(), mtimes=np.array([3, 5])),
    "etag": dataclasses.replace(_table(), etags=["e", ""]),
    "label": dataclasses.replace(_table(), labels=np.array([-1, 1])),
    "classes": dataclasses.replace(_table(), classes=("cat", "eel")),
    "order": _table().take([1, 0]),
    "length": _table().take([0]),
    "removed": dataclasses.replace(_table(), removed=frozenset({0})),
    "labels_with_samples": dataclasses.replace(_table(), labels_with_samples=True),
    "source": dataclasses.replace(_table(), source="ab"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_tells_tables_apart(change: str) -> None:
    assert CHANGES[change].digest != _table().digest


def test_the_digest_is_a_fixed_one() -> None:
    assert _table().digest == ("0e8b17de22ae76c7c5d77ff34acf4db326f97662e4dc46e67284702c20124ee8")


@given(keys=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), unique=True))
def test_rows_are_found_by_their_keys(keys: list[str]) -> None:
    table = RowTable.of_keys(keys)
    wanted = [*reversed(keys), "none of these", "\udce9"]
    rows = {key: row for row, key in enumerate(keys)}
    assert table.rows_of(wanted).tolist() == [rows.get(key, -1) for key in wanted]


def test_taking_rows_keeps_every_column_together() -> None:
    taken = _table().take(np.array([1, 0, 1]))
    assert list(taken.keys) == ["b", "a", "b"]
    assert taken.sizes.tolist() == [2, 1, 2]
    assert taken.mtimes.tolist() == [4, 3, 4]
    assert list(taken.etags) == ["e", "", "e"]
    assert taken.labels.tolist() == [0, -1, 0]
    assert len(taken) == 3
    assert len(_table().take([])) == 0


@given(st.binary(max_size=200))
def test_bytes_that_are_no_table_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match=r"rows\.parquet is no row table"):
        RowTable.from_parquet(data, "rows.parquet")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("key", ["a", None]),
        ("key", [1, 2]),
        ("key", [b"a", b"b"]),
        ("size", [1.5, 2.0]),
        ("label", [0, None]),
        ("etag", [["x"], []]),
    ],
)
def test_columns_of_other_types_are_refused(name: str, values: list[object]) -> None:
    table = pq.read_table(io.BytesIO(_table().to_parquet()))
    forged = table.set_column(table.column_names.index(name), name, pa.array(values))
    sink = io.BytesIO()
    pq.write_table(forged, sink)
    with pytest.raises(StoreError, match=f"is no row table: its column {name} has values of type"):
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


# --- labels of other kinds ----------------------------------------------------------------------


def _with_labels(labels: np.ndarray) -> RowTable:
    count = len(labels)
    numbers = np.arange(count)
    keys = [str(number) for number in numbers]
    return RowTable(
        keys=keys, sizes=numbers, mtimes=numbers, etags=[""] * count, labels=labels, classes=()
    )


OTHER_LABELS = [
    np.array([0.5, np.nan, -3, 1e30], np.float32),
    np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]], np.uint8),
    np.zeros((3, 2), np.uint8),
    np.ones((1, 1), np.uint8),
]


@pytest.mark.parametrize("labels", OTHER_LABELS)
def test_labels_of_every_kind_round_trip(
    labels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.store.row_table.ROWS_PER_GROUP", 3)
    table = _with_labels(labels)
    again = RowTable.from_parquet(table.to_parquet(), "rows.parquet")
    assert again.labels.dtype == labels.dtype
    np.testing.assert_array_equal(again.labels, labels)
    assert again.digest == table.digest


def test_the_digest_tells_labels_of_all_kinds_apart() -> None:
    several = np.eye(4, dtype=np.uint8)
    kinds = [
        np.arange(4),
        np.arange(4, dtype=np.float32),
        np.zeros(4, np.float32),
        several,
        several[::-1],
        np.eye(4, 5, dtype=np.uint8),
    ]
    assert len({_with_labels(labels).digest for labels in kinds}) == len(kinds)


@pytest.mark.parametrize("count", [b"0", b"-1", b"2", b"99999999999", b"many", None])
def test_a_forged_number_of_classes_is_refused(count: bytes | None) -> None:
    table = pq.read_table(io.BytesIO(_with_labels(OTHER_LABELS[1]).to_parquet()))
    metadata = dict(table.schema.metadata)
    metadata.pop(b"label_classes")
    if count is not None:
        metadata[b"label_classes"] = count
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    with pytest.raises(StoreError, match=r"rows\.parquet is no row table"):
        RowTable.from_parquet(sink.getvalue(), "rows.parquet")
