"""Writers of containers of photographs, each by the format's own public writer."""

import csv
import io
import json
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.store.locations import Container, Locations
from precache_workers.sources.base import Columns, Listing
from precache_workers.sources.kinds import open_source
from tests.support.building import write

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
    paths = photos_of(photos)
    columns = {"path": [*map(str, paths)], "label": [path.parent.name for path in paths]}
    return write_table(to / "list.csv", columns)


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


def in_bucket(folder: Path, url: str, options: dict[str, Any]) -> str:
    """Put the files of a folder where a URL names them."""
    bucket = open_folder(url, options)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.put(path.relative_to(folder).as_posix(), [path.read_bytes()])
    return url


def noted_ranges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read local files as remote ones are; returns the list that lengths of ranges are added to."""
    read: list[int] = []
    ranges = LocalFolder.read_ranges

    def noted(self: LocalFolder, parts: Any) -> Any:
        read.extend(length for _, _, length in parts)
        return ranges(self, parts)

    monkeypatch.setattr(LocalFolder, "open", lambda folder, name: None)
    monkeypatch.setattr(LocalFolder, "read_ranges", noted)
    return read


# --- tables -------------------------------------------------------------------------------------


def write_table(path: Path, columns: Any, **options: Any) -> str:
    """Columns as Parquet, a stream of Arrow, TFRecord, lines of JSON, or CSV, as the name ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, **options)
        return str(path)
    if path.suffix == ".arrow":
        return write_arrow(path, pa.table(columns), **options)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".tfrecord":
        return write_examples(path, *[{n: feature(v) for n, v in row.items()} for row in rows])
    if path.suffix == ".jsonl":
        lines = [json.dumps({name: plain(value) for name, value in row.items()}) for row in rows]
        path.write_text("\n".join(lines))
        return str(path)
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(columns)
        writer.writerows([cell(plain(value)) for value in row.values()] for row in rows)
    return str(path)


def plain(value: Any) -> Any:
    """A value as JSON has it, in which no number is missing."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return None if value != value else value


def cell(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def write_arrow(
    path: Path, table: pa.Table, new: Any = pa.ipc.new_stream, rows: int = 9, **options: Any
) -> str:
    """A stream or a file of Arrow, in batches of so many rows."""
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


Feature = tuple[Any, str]
"""Values, and what TensorFlow calls their type."""


def feature(value: Any) -> Feature:
    """A value as a feature of an example of TensorFlow."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    values = value if isinstance(value, list) else [value]
    if values and isinstance(values[0], str):
        return [text.encode() for text in values], "byte"
    kind = type(values[0]) if values else int
    return values, {bytes: "byte", int: "int", float: "float"}[kind]


def write_examples(path: Path, *examples: Mapping[str, Feature]) -> str:
    """A TFRecord file of examples of TensorFlow."""
    from tfrecord import TFRecordWriter

    writer = TFRecordWriter(str(path))
    for example in examples:
        writer.write(example)
    writer.close()
    return str(path)


# --- containers of members ----------------------------------------------------------------------

Members = Sequence[tuple[str, bytes]]
"""Names and contents; names have surrogates for bytes that are not UTF-8."""


def write_tar(path: Path, members: Members, **options: Any) -> str:
    """A tar archive of members with different times."""
    with tarfile.open(path, "w", errors="surrogateescape", **options) as tar:
        for number, (name, data) in enumerate(members):
            add(tar, name, data, mtime=1000 + number)
    return str(path)


def folder_of(tmp_path: Path, members: Members) -> str:
    """A folder of files, below that of a test."""
    for name, data in members:
        write(tmp_path / "in" / name, data)
    return str(tmp_path / "in")


def tar_of(tmp_path: Path, members: Members) -> str:
    """A tar archive."""
    return write_tar(tmp_path / "a.tar", members)


def zip_of(tmp_path: Path, members: Members) -> str:
    """A zip archive; names may have bytes that are not UTF-8."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice
        for name, data in members:
            archive.writestr(name.replace("\udcff", "ÿ"), data)
    if any("\udcff" in name for name, _ in members):  # flagged as UTF-8
        path.write_bytes(path.read_bytes().replace("ÿ".encode(), b"\xff\xfe"))
    return str(path)


def table_of(suffix: str) -> Callable[[Path, Members], str]:
    """The writer of a table with the images or their paths, and their first folders as labels."""

    def write_members(tmp_path: Path, members: Members) -> str:
        labels = [name.partition("/")[0] for name, _ in members]
        if suffix in ("csv", "jsonl"):
            folder_of(tmp_path, members)
            paths = [f"in/{name}" for name, _ in members]
            return write_table(tmp_path / f"a.{suffix}", {"path": paths, "label": labels})
        names = [os.fsencode(name) for name, _ in members]
        ids: Any = names
        if suffix != "tfrecord":  # text, though not all may be UTF-8
            binary = pa.array(names, pa.binary())
            ids = pa.Array.from_buffers(pa.string(), len(names), binary.buffers())
        columns = {"image": [data for _, data in members], "label": labels, "id": ids}
        form = {"new": pa.ipc.new_file} if suffix == "arrow" else {}
        return write_table(tmp_path / f"a.{suffix}", columns, **form)

    return write_members


def lmdb_of(tmp_path: Path, members: Members) -> str:
    """An LMDB database in a file."""
    import lmdb

    path = str(tmp_path / "a.lmdb")
    with (
        lmdb.open(path, subdir=False, map_size=1 << 32) as database,
        database.begin(write=True) as transaction,
    ):
        for name, data in members:
            transaction.put(os.fsencode(name), data)
    return path


Writer = Callable[[Path, Members], str]
SOURCES: dict[str, Writer] = {
    "folder": folder_of,
    "tar": tar_of,
    "zip": zip_of,
    "csv": table_of("csv"),
    "jsonl": table_of("jsonl"),
    "parquet": table_of("parquet"),
    "arrow": table_of("arrow"),
    "tfrecord": table_of("tfrecord"),
    "lmdb": lmdb_of,
}
KEYED = ("parquet", "arrow", "tfrecord")
"""Kinds whose samples a column names."""


def keys_of(kind: str) -> dict[str, Any]:
    """The option that names samples in a kind of container."""
    return {"key_column": "id"} if kind in KEYED else {}


def listed(source: object, *columns: str | None, **options: Any) -> Listing:
    """The listing of a source, by its columns of images, labels and keys if these are given."""
    options |= {"columns": Columns(*columns)} if columns else {}
    return open_source(str(source), **options).list(lambda count: None)


def fetched(source: object, *columns: str | None, **options: Any) -> list[Any]:
    """All samples of a source, or the errors in place of them."""
    options |= {"columns": Columns(*columns)} if columns else {}
    opened = open_source(str(source), **options)
    table = opened.list(lambda count: None).table
    return [*opened.fetch(table.keys, table.sizes.tolist(), table.locations)]


def class_of(listing: Listing) -> dict[str, str | None]:
    """Key -> name of its class."""
    table = listing.table
    names = [table.classes[n] if n >= 0 else None for n in table.labels.tolist()]
    return dict(zip(table.keys, names, strict=True))


def spread(kind: str) -> Callable[[Path, Path], str]:
    """The writer of several containers of photographs, from that of one of members."""

    def write_all(photos: Path, to: Path) -> str:
        paths = photos_of(photos)
        members = [(path.relative_to(photos).as_posix(), path.read_bytes()) for path in paths]
        for number in range(PARTS):
            (to / f"{number}").mkdir()
            SOURCES[kind](to / f"{number}", members[number::PARTS])
        return str(to / f"?/a.{kind}")

    return write_all


KEY_COLUMNS = {"tfrecord": "id"}
"""What names photographs in containers that give their samples numbers."""

WRITERS: dict[str, Callable[[Path, Path], str]] = {
    "tar": write_tars,
    "compressed tar": write_compressed_tars,
    "webdataset": write_webdataset,
    "parquet": write_parquet,
    "zip": write_zip,
    "csv": write_csv,
    "datasets": write_datasets,
    "tfrecord": spread("tfrecord"),
    "lmdb": spread("lmdb"),
}

ON_DISK = frozenset(("csv", "lmdb"))
"""Sources that are not read from a bucket, or have other paths there."""
