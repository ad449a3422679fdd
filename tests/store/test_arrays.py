"""Arrays of a version: their documents are for other software, and impossible ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from precache.errors import StoreError
from precache.store.arrays import parse_json, version_arrays
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
    groups = {".", "shards", "_checks", "_sums"}
    small = {"label", "valid", "key", "rows", "holes", "_spare"}
    assert names == groups | small | {"image", "shards/image", "_checks/image", "_sums/image"}
    kinds = [parse_json(path.read_bytes(), str(path))["node_type"] for path in documents]
    assert kinds.count("array") == len(names - groups)
