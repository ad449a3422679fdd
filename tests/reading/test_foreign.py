"""Arrays of other Zarr software are read by zarr-python, and refused in words."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, GzipCodec, TransposeCodec, ZstdCodec

import precache
from precache.codecs.zarr_plugin import ImageFilter
from precache.errors import PrecacheError, StorageError, StoreError, UsageError
from precache.reading.foreign import ForeignGroup
from precache.reading.version_reader import VersionReader, read_small_field
from tests.support.building import flip

SHAPE = (13, 3, 8, 8)
PIXELS = (np.arange(np.prod(SHAPE)) % 251).reshape(SHAPE)


def write(folder: Path, values: np.ndarray, name: str = "train/pixels", **how: Any) -> None:
    zarr.open_group(folder, mode="a")
    chunks = {"chunks": (4, *values.shape[1:])}
    array = zarr.create_array(
        folder, name=name, shape=values.shape, **{"dtype": values.dtype, **chunks, **how}
    )
    array[: how.get("fill_value") and 6] = values[: how.get("fill_value") and 6]


WAYS: dict[str, dict[str, Any]] = {
    "rows share a chunk": {},
    "sharded": {"chunks": (2, 3, 8, 8), "shards": (6, 3, 8, 8)},
    "sharded along other axes": {"chunks": (1, 3, 2, 8), "shards": (4, 3, 4, 8)},
    "chunks wider than rows": {"chunks": (2, 4, 8, 9)},
    "gzip": {"compressors": GzipCodec()},
    "big-endian": {"serializer": BytesCodec(endian="big")},
    "our filter": {"filters": [ImageFilter()], "dtype": "uint8"},
    "transposed": {"filters": [TransposeCodec(order=(0, 2, 3, 1))]},
    "chunks that were not written": {"fill_value": 9},
    "Zarr v2": {"zarr_format": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_arrays_are_read_as_zarr_python_reads_them(way: str, tmp_path: Path) -> None:
    how = {"dtype": "int32", **WAYS[way]}
    values = PIXELS.astype(how["dtype"])
    write(tmp_path, values, **how)
    if "fill_value" in how:
        values[6:] = how["fill_value"]
    fields = {"image": "train/pixels"}
    for shuffle in (False, True, "block"):
        with precache.Loader(tmp_path, 5, shuffle=shuffle, fields=fields, device="cpu") as loader:
            for batch in loader:
                np.testing.assert_array_equal(batch["image"], values[batch["row"]])
    dataset = precache.CachedDataset(tmp_path, fields=fields)
    again = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(again[[7, 0, 12, 7]]["image"], values[[7, 0, 12, 7]])


def test_arrays_of_a_group_are_read_together_and_by_their_names(tmp_path: Path) -> None:
    values, labels = PIXELS.astype(np.uint8), np.arange(13, dtype=np.int32) - 1
    write(tmp_path, values, "data/pixels")
    write(tmp_path, labels, "data/labels")
    fields = {"image": "data/pixels", "label": "data/labels"}
    with precache.Loader(tmp_path, 4, output="tuple", fields=fields, shuffle=False) as loader:
        parts = zip(*loader, strict=True)
        for part, wanted in zip(parts, (values, labels), strict=True):
            np.testing.assert_array_equal(np.concatenate(part), wanted)
    dataset = precache.CachedDataset(tmp_path, fields=fields)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert dataset.labels.dtype == np.int64
    for shape in ((13,), (13, 10)):  # labels that are no integers stay what they are
        floats = np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        write(tmp_path / str(len(shape)), floats, "label")
        version = ForeignGroup(tmp_path / str(len(shape)), {"label": "label"})
        np.testing.assert_array_equal(read_small_field(version, "label"), floats)


# --- what is refused ----------------------------------------------------------------------------


def test_what_such_arrays_lack_is_said(tmp_path: Path) -> None:
    write(tmp_path, PIXELS)
    version = ForeignGroup(tmp_path, {"image": "train/pixels"})
    assert version.foreign
    assert version.fields["image"].shape == (3, 8, 8)
    assert (version.holes, len(version.hole_rows)) == ({}, 0)
    for ask in ("keys", "labels", "recipe", "valid"):
        with pytest.raises(StoreError, match="was written by other software, and has no keys"):
            list(getattr(version, ask))


REFUSALS: dict[str, tuple[dict[str, str], str]] = {
    "no array": ({}, "name at least one array"),
    "missing": ({"image": "train/nothing"}, "opens no array 'train/nothing' in .*group: "),
    "a group": ({"image": "train"}, "opens no array 'train' in .*group: "),
    "outside": ({"image": "../group/short"}, "opens no array '../group/short'"),
    "other lengths": ({"image": "train/pixels", "label": "short"}, "differ in rows: image: 13"),
    "complex": ({"image": "complex"}, "group/complex has .* data type 'complex64'; precache reads"),
    "one value": (
        {"image": "scalar"},
        r"group/scalar has shape \(\) and .* rows, along a first axis",
    ),
    "a name of ours": ({"row": "train/pixels"}, "row"),
    "chunks of ten terabytes": ({"image": "huge"}, "no memory for .*/huge"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_arrays_that_cannot_be_read_are_refused(case: str, tmp_path: Path) -> None:
    group = tmp_path / "group"
    write(group, PIXELS)
    write(group, np.arange(5), "short")
    write(group, np.ones((13, 40), np.complex64), "complex")
    zarr.create_array(group, name="scalar", shape=(), dtype="uint8")
    zarr.create_array(group, name="huge", shape=(6, 10**13), chunks=(1, 10**13), dtype="uint8")
    fields, words = REFUSALS[case]
    with pytest.raises(PrecacheError, match=words):
        precache.Loader(group, 4, fields=fields)


def test_a_group_without_a_name_of_an_array_or_without_zarr_python_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, PIXELS)
    with pytest.raises(StoreError, match="name its arrays, for example fields="):
        precache.Loader(tmp_path, 4)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(UsageError, match=r"needs zarr: pip install 'precache\[zarr\]'"):
        precache.Loader(tmp_path, 4, fields={"x": "x"})


@pytest.mark.parametrize("lost", [None, "unlink", "empty"])
@pytest.mark.parametrize("way", ["rows share a chunk", "sharded", "Zarr v2"])
def test_objects_that_are_missing_are_said(
    way: str, lost: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, PIXELS.astype(np.uint8), **WAYS[way])
    files = [file for file in (tmp_path / "train/pixels").rglob("*") if file.is_file()]
    objects = [file for file in files if file.name not in ("zarr.json", ".zarray", ".zattrs")]
    if lost == "unlink":
        objects[1].unlink()
    elif lost == "empty":
        objects[1].write_bytes(b"")
    with precache.Loader(tmp_path, 4, fields={"image": "train/pixels"}):
        found = [line for line in caplog.messages if "are read as its fill value 0: copy" in line]
    assert len(found) == bool(lost)
    assert all(f"1 of {len(objects)} objects of {tmp_path}/train/pixels are" in x for x in found)


def test_damage_is_an_error_of_ours(tmp_path: Path) -> None:
    write(tmp_path, PIXELS.astype(np.uint8), compressors=ZstdCodec(checksum=True))
    flip(tmp_path / "train/pixels/c/1/0/0/0", 0.5, 0x55)
    reader = VersionReader(tmp_path, {"image": "train/pixels"})
    np.testing.assert_array_equal(reader.read_whole(np.array([0]))["image"], PIXELS[:1])
    with pytest.raises(StorageError, match=r"zarr-python cannot read .*train/pixels"):
        reader.read_whole(np.array([5]))
