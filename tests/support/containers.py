"""Writers of containers of photographs, each by the format's own public writer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

PARTS = 3
"""Containers that photographs are spread over."""


def photos_of(folder: Path) -> list[Path]:
    """The photographs of a folder, sorted."""
    return sorted(folder.rglob("*.jpg"))


def write_tars(photos: Path, to: Path) -> str:
    """Tar archives of the files as they lie."""
    paths = photos_of(photos)
    for number in range(PARTS):
        with tarfile.open(to / f"photos-{number:02d}.tar", "w") as tar:
            for path in paths[number::PARTS]:
                tar.add(path, path.relative_to(photos).as_posix())
    return str(to / f"photos-{{00..{PARTS - 1:02d}}}.tar")


def write_webdataset(photos: Path, to: Path) -> str:
    """WebDataset's shards, with a number of the class beside each photograph."""
    paths = photos_of(photos)
    classes = sorted({path.parent.name for path in paths})
    for number in range(PARTS):
        with tarfile.open(to / f"shard-{number:06d}.tar", "w") as tar:
            for path in paths[number::PARTS]:
                add(tar, f"{path.stem}.jpg", path.read_bytes())
                label = classes.index(path.parent.name)
                add(tar, f"{path.stem}.cls", str(label).encode())
                add(tar, f"{path.stem}.json", b"{}")
    return str(to / "shard-*.tar")


def add(tar: tarfile.TarFile, name: str, data: bytes, mtime: float = 1.0) -> None:
    """Add a file to an archive."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), mtime
    tar.addfile(info, io.BytesIO(data))


WRITERS: dict[str, Callable[[Path, Path], str]] = {
    "tar": write_tars,
    "webdataset": write_webdataset,
}
