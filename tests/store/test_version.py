"""What a version says, and the damage that it names."""

import json
from pathlib import Path

import numpy as np
import pytest

import precache
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


def test_mean_and_deviation_are_those_of_the_valid_rows(store: BuiltStore) -> None:
    version = store.open()
    pixels = store.rows()[version.valid].astype(np.float64)
    np.testing.assert_allclose(version.mean["image"], pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(version.std["image"], pixels.std((0, 2, 3)), rtol=1e-5)


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
