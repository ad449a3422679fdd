"""Stores that other libraries wrote, read through their own datasets by ``python:``."""

from __future__ import annotations

import importlib
import io
import re
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

GUIDE = (Path(__file__).parents[2] / "docs/guides/sources.md").read_text("utf-8")


def example(module: str, path: Path) -> str:
    """The code of a module in the guide, but for the path."""
    [code] = re.findall(rf"# {module}\.py\n(.*?)```", GUIDE, re.DOTALL)
    return re.sub(r'"photos\.\w+"', repr(str(path)), code)


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
    ("library", "write", "module"),
    [
        ("streaming", write_mds, "mds_photos"),
        ("litdata", write_litdata, "litdata_photos"),
        ("ffcv", write_ffcv, "ffcv_photos"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of those libraries
def test_a_store_of_another_library_gives_the_same_rows(
    library: str,
    write: Callable[[Path, Path], None],
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = example(module, tmp_path / "peer")
    compile(code, module, "exec")
    pytest.importorskip(library)
    write_jpegs(tmp_path / "photos", 20)
    for path in photos_of(tmp_path / "photos"):  # without loss, as FFCV stores pixels
        Image.open(path).save(path, "PNG")
    write(tmp_path / "photos", tmp_path / "peer")
    (tmp_path / f"{module}.py").write_text(code, "utf-8")
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
