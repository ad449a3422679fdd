"""Row tables round-trip, and their digest tells any two apart; columns of text."""

import io
import json
import tempfile
import zipfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import StoreError
from precache.store import arrays, small_arrays
from precache.store.columns import Texts
from precache.store.row_table import (
    RowTable,
    contents_of,
    digests_of,
    freeze,
    halves_of,
    thaw,
)

I64 = st.integers(-1, 2**62)
ROWS = st.tuples(st.text(), I64, I64, st.text(max_size=5), st.integers(-1, 1000))


@st.composite
def tables(draw: st.DrawFn) -> RowTable:
    rows = draw(st.lists(ROWS, min_size=1, max_size=20))
    keys, sizes, mtimes, etags, labels = map(list, zip(*rows, strict=True))
    numbers = [np.array(column, np.int64) for column in (sizes, mtimes, labels)]
    columns = dict(zip(("sizes", "mtimes", "labels"), numbers, strict=True))
    classes = tuple(draw(st.lists(st.text(), max_size=4)))
    return RowTable(keys=keys, etags=etags, classes=classes, **columns)


@settings(max_examples=20)
@given(tables())
def test_a_frozen_table_is_the_same_and_a_zarr_group(table: RowTable) -> None:
    data = freeze(table)
    assert thaw(data, "rows.zip").digest == table.digest
    with tempfile.NamedTemporaryFile(suffix=".zip") as file:
        file.write(data)
        file.flush()
        group: Any = zarr.open_group(zarr.storage.ZipStore(file.name, mode="r"), mode="r")
        assert [*group["key"][:]] == list(table.keys)
        assert [*group["rows/etag"][:]] == list(table.etags)
        assert group["rows/size"][:].tolist() == table.sizes.tolist()
        assert group["label"][:].tolist() == table.labels.tolist()


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


@pytest.mark.parametrize("labels", [np.arange(-1, 9), np.zeros(6, np.int64), *OTHER_LABELS])
@pytest.mark.parametrize("per_chunk", [3, 1 << 20])
def test_a_table_is_written_in_parts_with_labels_of_every_kind(
    labels: np.ndarray, per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", per_chunk)
    monkeypatch.setattr(small_arrays, "KEYS_PER_CHUNK", per_chunk)
    table = replace(_with_labels(labels), removed=frozenset({0, len(labels) - 1}))
    data = freeze(table)
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    for folder in ("key", "rows/removed", "rows/size"):
        chunks = [name for name in names if name.startswith(f"{folder}/c/")]
        assert len(chunks) == -(-len(labels) // per_chunk)
    again = thaw(data, "rows.zip")
    assert again.labels.dtype == labels.dtype
    assert (again.removed, again.digest) == (table.removed, table.digest)


DIGESTS = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}" if number else "")


@given(st.lists(st.tuples(DIGESTS, st.none() | st.tuples(DIGESTS, DIGESTS)), min_size=1))
def test_contents_are_numbers_and_those_of_parts_the_samples_unless_given(
    rows: list[tuple[str, tuple[str, str] | None]],
) -> None:
    contents = [content for content, _ in rows]
    texts = ["".join(part or "0" * 32 for part in parts or ()) for _, parts in rows]
    halves, of_parts = contents_of(contents, texts)
    assert digests_of(halves) == contents
    pairs = [(content, content) if parts is None else parts for content, parts in rows]
    expected = [[pair[n] for pair in pairs] for n in range(2)] if any(texts) else []
    assert [*map(digests_of, of_parts)] == expected


@pytest.mark.parametrize("text", ["0", "0" * 33, "0" * 64, "x" * 32, "0" * 31 + " "])
def test_what_is_no_content_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"digests each|reshape|hexadecimal"):
        halves_of([text])


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
    assert tables[0].digest == "7408866204268b35341025d58395accbbf3fbc0ba9f767676ab148cdb909e2a9"
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


def _repacked(table: RowTable, **options: Any) -> bytes:
    """A frozen table with other files, by name (None for none), or attributes; or compressed."""
    files, own = options.get("files", {}), options.get("own", {})
    sink = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(freeze(table))) as archive,
        zipfile.ZipFile(sink, "w", options.get("method", zipfile.ZIP_STORED)) as forged,
    ):
        for name in archive.namelist():
            data = files.get(name, archive.read(name))
            if name == "zarr.json":
                document = json.loads(data)
                document["attributes"]["precache"].update(own)
                data = json.dumps(document).encode()
            if data is not None:
                forged.writestr(name, data)
    return sink.getvalue()


def _array(values: Any) -> bytes:
    return small_arrays.small_array(np.array(values), ["row"])["c/0"]


LABELLED = _with_labels(OTHER_LABELS[1])
FORGED: Any = [
    *(
        (_table(), {"files": {name: data}}, words)
        for name, data, words in [
            ("key/c/0", small_arrays.string_array(["a"], "row")["c/0"], "not hold 2 strings"),
            ("key/c/0", _array([1, 2]), "key/c/0 is damaged"),
            ("rows/etag/c/0", b"", "rows/etag/c/0 is damaged"),
            ("rows/etag/c/0", None, "rows/etag/c/0"),
            ("rows/size/c/0", _array([1, 2, 3]), "another size"),
            ("rows/removed/c/0", _array(np.uint8([0, 2])), "neither true nor false"),
        ]
    ),
    *((_table(), {"own": {"classes": classes}}, "classes") for classes in (None, [1], "x")),
    *((_table(), {"own": {"rows": rows}}, "") for rows in (0, -1, 1, 3, 10**12, 2**63, "2")),
    (_table(), {"own": {"rows": 1111111111}}, "cannot be 8888888888 bytes"),
    (_table(), {"method": zipfile.ZIP_DEFLATED}, "its files are compressed"),
    *(
        (LABELLED, {"own": {"label": {"shape": [count], "dtype": "uint8"}}}, "")
        for count in (0, -1, 2, 2**16 + 1, 99999999999, "many")
    ),
    (_table(), {"own": {"label": {"shape": [], "dtype": "object"}}}, "dtype"),
]


@pytest.mark.parametrize(("table", "options", "words"), FORGED)
def test_a_forged_table_is_refused(table: RowTable, options: Any, words: str) -> None:
    with pytest.raises(StoreError, match=rf"rows\.zip is no row table: .*{words}"):
        thaw(_repacked(table, **options), "rows.zip")


@given(st.data())
def test_a_damaged_table_is_refused_or_still_a_table(data: st.DataObject) -> None:
    stored = bytearray(freeze(_table()))
    for position in data.draw(st.lists(st.integers(0, len(stored) - 1), min_size=1, max_size=4)):
        stored[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(stored), len(stored) // 2]))
    try:
        table = thaw(bytes(stored[:cut]), "rows.zip")
    except StoreError:
        return
    assert len(table) == 2


@given(
    st.lists(st.sampled_from(["", "a", "b", "é", "zz", "a\0"]), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_texts_are_repeated_and_iterated_alike_with_and_without_a_dictionary(
    values: list[str], ordered: bool, coded: bool
) -> None:
    values = sorted(values) if ordered else values
    texts = Texts(values)
    texts = Texts(texts.plain.dictionary_encode()) if coded else texts
    assert [*texts] == values
    assert texts.is_repeated.tolist() == [values.count(value) > 1 for value in values]
    assert texts.are_ascending == (values == sorted({*values}))
    assert texts.same(texts).all()
