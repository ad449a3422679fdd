"""Arrays of a version: their documents, small ones, and impossible ones, which are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache.errors import StoreError
from precache.storage.local import LocalFolder
from precache.store import arrays
from precache.store.arrays import parse_json, version_arrays
from precache.store.small_arrays import read_small, small_array
from tests.conftest import BuiltStore

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "no such codec": ({"codec": "gzip"}, "codec 'gzip'; there are raw, zstd"),
    "filtered floats": ({"codec": "image", "dtype": "float32"}, "no uint8 images"),
    "filtered labels": ({"codec": "image", "shape": (5,)}, "no uint8 images"),
    "files of one shape": ({"codec": "jpeg"}, "stores ragged rows alone"),
    "half colours of one shape": ({"codec": "raw420"}, "stores ragged rows alone"),
    "rows of nothing": ({"shape": (3, 0, 8)}, r"rows are \(3, 0, 8\)"),
    "ragged rows without axes": ({"shape": (), "ragged": True}, r"rows are \(\)"),
    "more bytes than numbers count": ({"codec": "raw", "shape": (2**62, 2)}, "bytes; precache"),
    "more chunks than any shard has": ({}, "chunks in each shard"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_no_version_has_is_refused_with_its_place(case: str, image_store: BuiltStore) -> None:
    changes, words = IMPOSSIBLE[case]
    attributes = image_store.open().attributes
    field = attributes.fields["image"].model_copy(update=changes)
    forged: dict[str, Any] = {"fields": {"image": field}}
    if not changes:
        forged["rows_per_shard"] = 2**31 + 1
    with pytest.raises(StoreError, match=f"somewhere.*{words}"):
        version_arrays(attributes.model_copy(update=forged), "somewhere")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"1" * 5000, b"[" * 100_000, b'{"a":' * 50_000]
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="is not"):
        parse_json(data, "group/zarr.json")


def test_every_array_of_a_version_has_a_document(store: BuiltStore) -> None:
    documents = sorted(store.version_folder.rglob("zarr.json"))
    names = {path.parent.relative_to(store.version_folder).as_posix() for path in documents}
    groups = {".", "shards", "_checks", "_sums", "rows"}
    columns = {f"rows/{name}" for name in ("size", "mtime_ns", "etag", "removed", "content")}
    small = {"label", "valid", "key", "holes", "_spare", *columns}
    assert names == groups | small | {"image", "shards/image", "_checks/image", "_sums/image"}
    kinds = [parse_json(path.read_bytes(), str(path))["node_type"] for path in documents]
    assert kinds.count("array") == len(names - groups)


@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("dtype", ["bool", "uint64"])
def test_small_arrays_round_trip_over_several_chunks(
    rows: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", 8)
    values = (np.arange(rows * 2).reshape(rows, 2) % 3).astype(dtype)
    folder = LocalFolder(tmp_path)
    for name, data in small_array(values, ["row", "pair"]).items():
        folder.put(f"x/{name}", [data])
    array = arrays.small(values.shape, dtype)
    read = read_small(array, "x", lambda names: {name: folder.read(name) for name in names}, "")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    assert len(folder.names("x/c")) == -(-rows // 8)
