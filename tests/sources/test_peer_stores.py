"""Stores that other libraries wrote, read through their own datasets by ``python:``."""

from __future__ import annotations

import importlib
import io
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import precache
from precache_workers.sources.kinds import open_source
from tests.support.building import build_here, labels, pixels, write_jpegs
from tests.support.containers import photos_of
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)

# The examples of docs/guides/sources.md, but for the paths.
MDS = """
    from streaming import LocalDataset

    class Photos:
        def __init__(self):
            self.samples = LocalDataset({path!r})

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, number):
            sample = self.samples[number]
            return sample["image"], sample["label"]
"""
LITDATA = """
    import litdata

    class Photos:
        def __init__(self):
            self.samples = litdata.StreamingDataset({path!r})

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, number):
            sample = self.samples[number]
            return sample["image"], sample["label"]
"""
FFCV = """
    import numpy
    from ffcv.reader import Reader

    class Photos:
        def __init__(self, path={path!r}):
            self.reader = Reader(path)
            self.bytes = numpy.memmap(path, numpy.uint8, "r")
            table = self.reader.alloc_table
            self.sizes = dict(zip(table["ptr"].tolist(), table["size"].tolist()))

        def __len__(self):
            return int(self.reader.num_samples)

        def __getitem__(self, number):
            image, label = self.reader.metadata[number]
            start = int(image["data_ptr"])
            data = self.bytes[start : start + self.sizes[start]]
            if image["mode"] == 1:
                return numpy.array(data).reshape(image["height"], image["width"], 3), int(label)
            return data.tobytes(), int(label)
"""


def numbered(photos: Path) -> list[tuple[bytes, int]]:
    paths = photos_of(photos)
    classes = sorted({path.parent.name for path in paths})
    return [(path.read_bytes(), classes.index(path.parent.name)) for path in paths]


def write_mds(photos: Path, to: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(to), columns=columns, size_limit=1 << 16) as writer:
        for image, label in numbered(photos):
            writer.write({"image": image, "label": label})


def write_litdata(photos: Path, to: Path) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(to), chunk_size=7)
    for number, (image, label) in enumerate(numbered(photos)):
        cache[number] = {"image": image, "label": label}
    cache.done()
    cache.merge()


class Arrays:
    """Photographs as arrays; at the top of a module, as FFCV sends it to processes."""

    def __init__(self, photos: Path) -> None:
        self.samples = numbered(photos)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        image, label = self.samples[number]
        return np.asarray(Image.open(io.BytesIO(image)).convert("RGB")), label


def write_ffcv(photos: Path, to: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(to), fields, num_workers=1).from_indexed_dataset(Arrays(photos))


@pytest.mark.parametrize(
    ("library", "write", "code"),
    [
        ("streaming", write_mds, MDS),
        ("litdata", write_litdata, LITDATA),
        ("ffcv", write_ffcv, FFCV),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of those libraries
def test_a_store_of_another_library_gives_the_same_rows(
    library: str,
    write: Callable[[Path, Path], None],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(library)
    write_jpegs(tmp_path / "photos", 20)
    for path in photos_of(tmp_path / "photos"):  # without loss, as FFCV stores pixels
        Image.open(path).save(path, "PNG")
    write(tmp_path / "photos", tmp_path / "peer")
    module = f"peer_photos_{library}"
    (tmp_path / f"{module}.py").write_text(
        textwrap.dedent(code).format(path=str(tmp_path / "peer")), "utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    source = f"python:{module}:Photos"
    assert len(check_source(open_source(source)).table) == 20
    build_here(tmp_path / "photos", tmp_path / "folder.store", RECIPE)
    precache.build(source, tmp_path / "store", RECIPE, address="serial")
    names = [
        path.relative_to(tmp_path / "photos").as_posix() for path in photos_of(tmp_path / "photos")
    ]
    expected, rows = pixels(tmp_path / "folder.store"), pixels(tmp_path / "store")
    for number, name in enumerate(names):
        np.testing.assert_array_equal(rows[str(number)], expected[name])
    numbers = labels(tmp_path / "folder.store")
    assert [labels(tmp_path / "store")[str(n)] for n in range(20)] == [numbers[n] for n in names]
