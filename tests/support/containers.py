"""Writers of containers of photographs, each by the format's own public writer."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import numpy as np
import pyarrow as pa

from precache.store.locations import Container, Locations

PARTS = 3
"""Containers that photographs are spread over."""


def photos_of(folder: Path) -> list[Path]:
    """The photographs of a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def write_tars(
    photos: Path, to: Path, suffix: str = "tar", mode: Literal["w", "w:gz"] = "w"
) -> str:
    """Tar archives of the files as they lie."""
    paths = photos_of(photos)
    for number in range(PARTS):
        with tarfile.open(to / f"photos-{number:02d}.{suffix}", mode) as tar:
            for path in paths[number::PARTS]:
                tar.add(path, path.relative_to(photos).as_posix())
    return str(to / f"photos-{{00..{PARTS - 1:02d}}}.{suffix}")


def write_compressed_tars(photos: Path, to: Path) -> str:
    """The same, compressed."""
    return write_tars(photos, to, "tar.gz", "w:gz")


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


def tar_index(archive: IO[bytes]) -> str:
    """An index as wds2idx of DALI writes it: in a line the members of a stem."""
    samples: dict[str, list[str]] = {}
    with tarfile.open(fileobj=archive) as tar:
        for member in tar:
            if member.isreg():
                folder, slash, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                samples.setdefault(f"{folder}{slash}{stem}", []).append(
                    f"{suffix} {member.offset_data} {member.size} {member.name}"
                )
    lines = [f"v1.2 {len(samples)}", *(" ".join(members) for members in samples.values())]
    return "\n".join(lines) + "\n"


def add(tar: tarfile.TarFile, name: str, data: bytes, mtime: float = 1.0) -> None:
    """Add a file to an archive."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), mtime
    tar.addfile(info, io.BytesIO(data))


def write_parquet(photos: Path, to: Path) -> str:
    """Tables as Hugging Face's `datasets` writes them: a struct of bytes and path, class names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = photos_of(photos)
    classes = sorted({path.parent.name for path in paths})
    features = {
        "image": {"_type": "Image"},
        "label": {"names": classes, "_type": "ClassLabel"},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"image": image, "label": pa.int64()}, metadata)
    for number in range(PARTS):
        part = paths[number::PARTS]
        columns = [
            [{"bytes": path.read_bytes(), "path": path.name} for path in part],
            [classes.index(path.parent.name) for path in part],
        ]
        arrays = [pa.array(*pair) for pair in zip(columns, schema.types, strict=True)]
        table = pa.table(arrays, schema=schema)
        pq.write_table(table, to / f"train-{number:05d}.parquet", row_group_size=4)
    return str(to / "train-*.parquet")


def write_csv(photos: Path, to: Path) -> str:
    """A table of the photographs, by their absolute paths."""
    with (to / "list.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label"))
        writer.writerows((path, path.parent.name) for path in photos_of(photos))
    return str(to / "list.csv")


def write_zip(photos: Path, to: Path) -> str:
    """Zip archives, one of which compresses."""
    paths = photos_of(photos)
    for number in range(PARTS):
        method = zipfile.ZIP_DEFLATED if number else zipfile.ZIP_STORED
        with zipfile.ZipFile(to / f"photos-{number}.zip", "w", method) as archive:
            for path in paths[number::PARTS]:
                archive.write(path, path.relative_to(photos).as_posix())
    return str(to / "photos-?.zip")


def write_datasets(photos: Path, to: Path) -> str:
    """What `datasets` of Hugging Face saves to disk, in several files of batches of four rows."""
    import datasets

    paths = photos_of(photos)
    classes = sorted({path.parent.name for path in paths})
    features = datasets.Features(
        {"label": datasets.ClassLabel(names=classes), "image": datasets.Image()}
    )
    columns = {
        "label": [path.parent.name for path in paths],
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
    }
    with quiet_datasets():
        datasets.Dataset.from_dict(columns, features).save_to_disk(to / "saved", num_shards=PARTS)
    return str(to / "saved")


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Without bars of progress, and with several batches even of few rows."""
    import datasets

    size = datasets.config.ARROW_RECORD_BATCH_SIZE_FOR_IMAGE_DATASETS
    datasets.config.ARROW_RECORD_BATCH_SIZE_FOR_IMAGE_DATASETS = 4
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.ARROW_RECORD_BATCH_SIZE_FOR_IMAGE_DATASETS = size


def write_tfrecords(photos: Path, to: Path) -> str:
    """TFRecord files of examples, with a number of the class beside each photograph."""
    from tfrecord import TFRecordWriter

    paths = photos_of(photos)
    classes = sorted({path.parent.name for path in paths})
    for number in range(PARTS):
        writer = TFRecordWriter(str(to / f"train-{number}.tfrecord"))
        for path in paths[number::PARTS]:
            label = classes.index(path.parent.name)
            writer.write(
                {
                    "image": (path.read_bytes(), "byte"),
                    "name": (path.stem.encode(), "byte"),
                    "label": (label, "int"),
                }
            )
        writer.close()
    return str(to / "train-*.tfrecord")


def write_lmdb(photos: Path, to: Path) -> str:
    """An LMDB database of the files by their names."""
    import lmdb

    with (
        lmdb.open(str(to / "photos.lmdb"), map_size=1 << 32) as database,
        database.begin(write=True) as transaction,
    ):
        for path in photos_of(photos):
            transaction.put(path.relative_to(photos).as_posix().encode(), path.read_bytes())
    (to / "photos.lmdb/lock.mdb").unlink()
    return str(to / "photos.lmdb")


KEY_COLUMNS = {"tfrecord": "name"}
"""What names photographs in containers that give their samples numbers."""

WRITERS: dict[str, Callable[[Path, Path], str]] = {
    "tar": write_tars,
    "compressed tar": write_compressed_tars,
    "webdataset": write_webdataset,
    "parquet": write_parquet,
    "zip": write_zip,
    "csv": write_csv,
    "datasets": write_datasets,
    "tfrecord": write_tfrecords,
    "lmdb": write_lmdb,
}

ON_DISK = frozenset(("csv", "lmdb"))
"""Sources that are not read from a bucket, or have other paths there."""


def located(files: Sequence[tuple[str, bool]], units: Sequence[int]) -> Locations:
    """Locations of samples by their containers, of which some are read forward; places count."""
    containers = [*dict.fromkeys(files)]
    return Locations(
        places=pa.array(range(len(files)), pa.int64()),
        containers=tuple(Container(name, forward=forward) for name, forward in containers),
        files=np.array([containers.index(file) for file in files], np.int32),
        units=np.array(units, np.int32),
        nbytes=np.zeros(len(files), np.int64),
    )
