"""What a version says, and the damage that it names."""

import json
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import StoreError
from precache.store.arrays import parse_json
from tests.conftest import BuiltStore


def test_a_version_tells_what_it_holds(image_store: BuiltStore) -> None:
    version = image_store.open()
    assert version.id == image_store.result.version
    assert version.path == image_store.result.path
    assert version.rows == 23
    assert version.classes == ("cat", "dog", "eel")
    assert version.recipe == image_store.recipe
    assert not version.foreign
    assert version.id[:8] in repr(version)
    field = version.fields["image"]
    assert (field.shape, field.dtype) == ((3, 112, 112), "uint8")
    # Validation fills in the codec.
    assert field.codec == image_store.recipe.fields["image"].codec.name  # type: ignore[union-attr]
    assert field.raw_nbytes == 23 * 3 * 112 * 112
    assert field.stored_nbytes == sum(image_store.shard_path(n).stat().st_size for n in range(3))
    broken = {key for key in version.keys if Path(key).stem in ("0021", "0022")}
    assert {key for key, _ in version.holes.values()} == broken
    assert all(version.keys[row] == key for row, (key, _) in version.holes.items())
    assert all("not an image" in hole.reason for _, hole in version.holes.values())
    assert version.hole_rows.tolist() == sorted(version.holes)
    assert np.flatnonzero(~version.valid).tolist() == sorted(version.holes)
    classes = [version.classes[label] for label in version.labels]
    assert classes == [Path(key).parent.name for key in version.keys]
    assert version.labels.dtype == np.int8
    info = precache.info(image_store.path)
    assert (info.version, info.path, info.rows) == (version.id, version.path, 23)
    assert sorted(info.holes) == sorted(image_store.result.holes)
    assert (info.recipe, info.classes) == (version.recipe, version.classes)
    assert info.fields["image"].shape == (3, 112, 112)
    assert info.mean.keys() == info.std.keys() == {"image"}
    assert info.libraries
    assert info == precache.info(f"{image_store.path}@{info.version[:5]}")


def test_keys_are_a_sequence_of_strings(stores: dict[str, BuiltStore]) -> None:
    keys = stores["raw"].open().keys
    everything = list(keys)
    names = {str(p.relative_to(stores["raw"].source)) for p in stores["raw"].source.rglob("*.png")}
    assert set(everything) == names
    assert len(keys) == len(everything) == 23
    assert all(type(key) is str for key in everything)
    assert keys[-1] == everything[-1]
    assert keys[np.int64(3)] == everything[3]
    assert keys[2:9:3] == everything[2:9:3]
    assert everything[5] in keys
    assert keys.index(everything[7]) == 7
    for index in (23, -24):
        with pytest.raises(IndexError):
            keys[index]


def test_documents_of_small_arrays_are_for_other_software(own: BuiltStore) -> None:
    names = {f"{name}/zarr.json" for name in ("label", "valid", "shards/image", "key")}
    for name in names:
        path = own.version_folder / name
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "shape": [2**50]}))
    assert {each.shard for each in precache.verify(own.path).damage} == names
    assert len(list(precache.open(own.path).keys)) == 23
    with precache.Loader(own.path, batch_size=4, shuffle=False) as loader:
        assert sum(len(batch["row"]) for batch in loader) == 21


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
