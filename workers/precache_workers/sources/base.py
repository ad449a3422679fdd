"""Sources, which list and fetch samples.

A source fetches only samples of its own, whatever key it is given: keys may come out of a store.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from precache.errors import (
    FetchError,
    SampleError,
    SourceError,
    StorageError,
)
from precache.storage.base import FileInfo, Folder, left_out_text
from precache.storage.open import StorageOptions, open_folder
from precache.store.row_table import RowTable
from precache.units import size as in_units
from precache_workers.runtime.time_limit import FETCHING, notes
from precache_workers.sources.code_digest import code_digest
from precache_workers.sources.user_code import load_object

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
)
MOST_SAMPLE_BYTES = 512 << 20

CONTAINERS = {
    ".csv": "a CSV table", ".tsv": "a table", ".parquet": "a Parquet table",
    ".arrow": "an Arrow table", ".tar": "a tar archive", ".tgz": "a tar archive",
    ".tar.gz": "a tar archive", ".zip": "a zip archive", ".h5": "an HDF5 file",
    ".hdf5": "an HDF5 file", ".npz": "a NumPy archive", ".npy": "a NumPy array",
    ".tfrecord": "a TFRecord file", ".lmdb": "an LMDB database", ".mdb": "an LMDB database",
    ".beton": "an FFCV dataset", ".mds": "an MDS shard", ".jsonl": "JSON lines",
}  # fmt: skip
"""Suffixes of files that hold many samples, which no source here reads."""

BY_DATASET = (
    "read it by a torch map-style Dataset: write a function that returns one, such as "
    "`def photos(): return MyDataset(...)` in mydata.py, and give python:mydata:photos as the "
    "source"
)
TICK = 1000
"""Files between two reports of their number."""

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Sample:
    """One raw sample: the inputs of its fields, its label if only it has one, its content hash.

    `inputs` maps names to bytes, arrays or Pillow images; the first is the default input.
    """

    inputs: Mapping[str | int, Any]
    label: int | None = None
    content: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes, as far as known: those of a Pillow image are not."""
        values = self.inputs.values()
        return sum(len(v) if isinstance(v, bytes) else getattr(v, "nbytes", 0) for v in values)


Fetched = Sample | FetchError | SampleError
"""A sample, or the error: after a FetchError it is tried again, after a SampleError a hole."""


@dataclass(frozen=True)
class Listing:
    """The samples of a source, sorted by key; `ignored` files are not images by suffix.

    It is not `complete` if the time was up before the end. `left_out` counts other files by the
    reason that a walk of a folder gives.
    """

    table: RowTable
    ignored: int = 0
    complete: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict)


class Source(Protocol):
    """Lists samples and fetches them; travels to the workers as a pickle."""

    @property
    def labels_with_samples(self) -> bool:
        """True if labels are known only once samples are fetched."""

    @property
    def content_decides(self) -> bool:
        """True if samples of one content hash are the same, in shape and type as well."""

    @property
    def fetch_threads(self) -> int:
        """Number of threads of a task that may fetch at a time."""

    def list(self, tick: Tick, seconds: float = math.inf) -> Listing:
        """List all samples, or those found in `seconds`; `tick` is called with their number."""

    def fetch(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Fetched]:
        """Fetch samples, in order, or the errors of those that cannot be had or used.

        Parameters
        ----------
        sizes
            As listed, -1 for unknown.
        """


@dataclass(frozen=True)
class FolderSource:
    """Image files below a folder; the class is the first folder of the path, none where flat."""

    folder: Folder
    labels_with_samples: bool = False
    content_decides: bool = True
    most_bytes: int = MOST_SAMPLE_BYTES
    """Limit of a sample; larger ones are not fetched."""

    @property
    def fetch_threads(self) -> int:
        return 2 if self.folder.local("") else 4  # a network answers late

    def list(self, tick: Tick, seconds: float = math.inf) -> Listing:
        until = time.monotonic() + seconds
        if (kind := self.folder.kind()) != "folder":
            raise SourceError(f"the source {self.folder} {_no_folder(self.folder.name, kind)}")
        files = _Files()
        ignored, complete, left_out = 0, True, Counter[str]()
        container = ""

        def leave_out(name: str, reason: str) -> None:
            nonlocal ignored
            if name.endswith("/") or _is_image(name):
                left_out[reason] += 1
            else:
                ignored += 1

        for file in self.folder.walk(leave_out):
            if files.keys and time.monotonic() > until:
                complete = False
                break
            if _is_image(file.name):
                files.add(file)
                if len(files.keys) % TICK == 0:
                    tick(len(files.keys))
            else:
                ignored += 1
                container = container or (file.name if _container(file.name) else "")
        if not files.keys:
            images = f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}{left_out_text(left_out)}"
            how = f"{container} is {_container(container)}: {BY_DATASET}" if container else images
            what = f"the source {self.folder} has no image ({ignored} other files)"
            raise SourceError(f"{what}; {how}")
        tick(len(files.keys))
        _require_utf8(files.keys)
        return Listing(files.table(), ignored, complete, dict(left_out))

    def fetch(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Fetched]:
        if self.folder.local("") is None:
            return self._fetch(keys, sizes)
        return [fetched for pair in zip(keys, sizes, strict=True) for fetched in self._alone(*pair)]

    def _alone(self, key: str, size: int) -> Sequence[Fetched]:
        if size < 0:
            with contextlib.suppress(StorageError):  # as reading it will say
                size = self.folder.size(key) or -1
        return self._fetch([key], [size])

    def _fetch(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Fetched]:
        """Fetch as many at a time as the service allows; one by one if memory is short."""
        wanted = [n for n, size in enumerate(sizes) if size <= self.most_bytes]
        try:
            some, expected = [keys[n] for n in wanted], [sizes[n] for n in wanted]
            read = dict(zip(wanted, self._read(some, expected), strict=True))
        except MemoryError:
            if len(keys) == 1:
                nbytes = in_units(sizes[0])
                return [SampleError(f"has {nbytes}, for which memory does not suffice")]
            return [
                fetched for pair in zip(keys, sizes, strict=True) for fetched in self._alone(*pair)
            ]
        return [self._sample(key, sizes[n], read.get(n)) for n, key in enumerate(keys)]

    def _read(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[bytes | StorageError]:
        """Read files of a known size together; of others no more than a sample may have."""
        known = [n for n, size in enumerate(sizes) if size >= 0]
        notes().begin(FETCHING, *(keys[n] for n in known), foreign=False)
        contents = self.folder.read_many([keys[n] for n in known], [sizes[n] for n in known])
        read: dict[int, bytes | StorageError] = dict(zip(known, contents, strict=True))
        for number in range(len(keys)):
            if number not in read:
                notes().begin(FETCHING, keys[number], foreign=False)
                try:
                    read[number] = self.folder.read_first(keys[number], self.most_bytes + 1)
                except StorageError as error:
                    read[number] = error
        return [read[number] for number in range(len(keys))]

    def _sample(self, key: str, nbytes: int, data: bytes | StorageError | None) -> Fetched:
        if data is None or (isinstance(data, bytes) and len(data) > self.most_bytes):
            has = "more" if nbytes < 0 else in_units(nbytes)
            return SampleError(
                f"has {has}, over the limit of {in_units(self.most_bytes)} (--max-sample-bytes)"
            )
        if isinstance(data, StorageError):
            return FetchError(str(data))
        if nbytes not in (-1, len(data)):
            now = f"more than {nbytes}" if len(data) > nbytes else str(len(data))
            return FetchError(
                f"{self.folder.path(key)} has {now} bytes and had {nbytes} when it was listed; "
                "build again to list it anew"
            )
        return Sample({"bytes": data}, content=xxhash.xxh3_128_hexdigest(data))


class _Files:
    """Files in the order of a walk, column by column: a million must take little memory."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._sizes = array("q")
        self._mtimes = array("q")
        self._etags: list[str] = []

    def add(self, file: FileInfo) -> None:
        self.keys.append(file.name)
        self._sizes.append(file.size)
        self._mtimes.append(file.mtime_ns)
        self._etags.append(file.etag)

    def table(self) -> RowTable:
        """Return the files sorted by name, with the first folder of each as its class."""
        labels, classes = _classes(self.keys)
        sizes, mtimes = np.array(self._sizes, np.int64), np.array(self._mtimes, np.int64)
        table = RowTable(self.keys, sizes, mtimes, self._etags, labels, classes)
        return table.take(sorted(range(len(table)), key=self.keys.__getitem__))


def _is_image(name: str) -> bool:
    stem, _, suffix = name.rpartition(".")
    return stem[-1:] not in ("", "/") and f".{suffix.lower()}" in IMAGE_SUFFIXES


def _container(name: str) -> str:
    """Name the kind of a file that holds many samples; empty for any other file."""
    kinds = (kind for suffix, kind in CONTAINERS.items() if name.lower().endswith(suffix))
    return next(kinds, "")


def _no_folder(name: str, kind: str | None) -> str:
    """Describe a source that is no folder."""
    if kind and (container := _container(name)):
        return f"is {container}, not a folder of images; {BY_DATASET}"
    return f"{'is not a folder' if kind else 'does not exist'}; give a folder of images"


def _require_utf8(names: Sequence[str]) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"the file name {name!r} is not UTF-8, and keys are; rename it"
            ) from None


def _classes(keys: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number of each key's first folder, -1 for none, and the folders' names."""
    names = [key.partition("/")[0] if "/" in key else None for key in keys]
    classes = tuple(sorted({name for name in names if name is not None}))
    numbers: dict[str | None, int] = {name: i for i, name in enumerate(classes)}
    return np.array([numbers.get(name, -1) for name in names], np.int64), classes


@dataclass(frozen=True)
class DatasetSource:
    """A torch map-style `Dataset` that ``module:factory()`` returns.

    Keys are indices. Its samples are tuples (input, label) or dicts with a `label`; `targets` and
    `classes`, as torchvision names them, are used where it has them. The source counts as changed
    when the factory's code, or what that reaches, does.

    A dataset may have methods ``key(i)``, a name for sample i, by which it keeps its row wherever
    it stands, and ``fingerprint(i)``, text that changes if and only if the sample does: then the
    code does not count, and labels are the `targets`, where it has them.

    Attributes
    ----------
    code
        Digest that the factory's code must have.
    """

    factory: str
    code: str
    content_decides: bool = False  # of an array or an image its plain bytes are hashed
    fetch_threads: int = 1  # a Dataset promises nothing about threads

    @property
    def labels_with_samples(self) -> bool:
        """False if it has fingerprints and `targets`: then rows can be reused unseen."""
        dataset = _dataset(self.factory, self.code)
        return not (hasattr(dataset, "fingerprint") and hasattr(dataset, "targets"))

    @property
    def etag(self) -> str:
        """Identity of all samples: two factories of one module may return different ones."""
        return xxhash.xxh3_128_hexdigest(f"{self.factory} {self.code}".encode())

    def list(self, tick: Tick, seconds: float = math.inf) -> Listing:
        with _lock:
            _datasets.pop(self.factory, None)  # it may have grown
        dataset = _dataset(self.factory, self.code)
        count = self._count(dataset)
        if not count:
            raise SourceError(f"the dataset of {self.factory} is empty")
        tick(count)
        targets = getattr(dataset, "targets", None)
        labels = np.full(count, -1, np.int64) if targets is None else _labels(targets, count)
        unknown = np.full(count, -1, np.int64)
        classes = tuple(map(str, getattr(dataset, "classes", ())))
        keys = list(_indices(dataset, self.factory))
        etags = [self.etag] * count
        if hasattr(dataset, "fingerprint"):
            texts = _texts(dataset.fingerprint, count, f"{self.factory}: fingerprint")
            etags = [xxhash.xxh3_128_hexdigest(f"{self.factory} {text}".encode()) for text in texts]
        return Listing(RowTable(keys, unknown, unknown, etags, labels, classes))

    def fetch(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Fetched]:
        dataset = _dataset(self.factory, self.code)
        self._count(dataset)
        indices = _indices(dataset, self.factory)
        fetched: list[Fetched] = []
        for key in keys:
            if key not in indices:
                why = f"{key!r} is no key of {self.factory}, which has {len(indices)} samples"
                fetched.append(FetchError(why))
                continue
            notes().begin(FETCHING, key)
            try:
                fetched.append(_dataset_sample(dataset[indices[key]]))
            except MemoryError:
                fetched.append(SampleError("making it takes more memory than there is"))
            except (Exception, SystemExit) as error:
                fetched.append(FetchError(f"sample {key} of {self.factory}: {error!r}"))
        return fetched

    def _count(self, dataset: Any) -> int:
        try:
            return len(dataset)
        except TypeError:
            raise SourceError(f"{self.factory} gives a dataset without a length") from None


class _Numbers(Mapping[str, int]):
    """Keys of a dataset without names of samples: their numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, key: str) -> int:
        if not re.fullmatch("0|[1-9][0-9]{0,17}", key) or int(key) >= self._count:
            raise KeyError(key)
        return int(key)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._count))


def _indices(dataset: Any, factory: str) -> Mapping[str, int]:
    """Return key -> number of each sample of a dataset, in order."""
    if not hasattr(dataset, "key"):
        return _Numbers(len(dataset))
    held = _named.get(factory)
    if held is None or held[0] is not dataset:
        keys = _texts(dataset.key, len(dataset), f"{factory}: key")
        numbers = {key: number for number, key in enumerate(keys)}
        if len(numbers) < len(keys) or "" in numbers:
            twice = next(key for key, count in Counter(["", *keys]).items() if count > 1)
            raise SourceError(f"{factory}: key gives {twice!r} to several samples, or to one ''")
        held = _named[factory] = dataset, numbers
    return held[1]


def _texts(method: Any, count: int, what: str) -> list[str]:
    """Return the text that a method of a dataset has for each of its samples."""
    try:
        texts = [method(number) for number in range(count)]
    except Exception as error:
        raise SourceError(f"{what} failed: {error!r}") from error
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise SourceError(f"{what}({number}) is {text!r}; it is to be text")
    return texts


_named: dict[str, tuple[Any, Mapping[str, int]]] = {}
_datasets: dict[str, tuple[str, Any]] = {}
_lock = threading.Lock()


def _dataset(factory: str, code: str) -> Any:
    """Return the dataset of a factory, created once for each state of its code."""
    with _lock:
        held = _datasets.get(factory)
        if held is None or held[0] != code:
            make = load_object(factory, code)
            try:
                held = _datasets[factory] = code, make()
            except Exception as error:
                raise SourceError(f"{factory}() failed: {error!r}") from error
        return held[1]


def _labels(targets: Any, count: int) -> np.ndarray:
    labels = np.asarray(targets)
    whole = labels.shape == (count,) and labels.dtype.kind in "iub"
    if not whole or labels.min() < -1:
        raise SourceError(
            f"the dataset's targets are {labels.dtype} {labels.shape}; they are to be {count} "
            "whole numbers from -1 up, one for each sample"
        )
    return labels.astype(np.int64)


def _number(label: Any) -> int | None:
    if label is None or np.ndim(label):
        return None
    try:
        number = int(label)
        whole = number == label and number >= -1
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise SourceError(f"a sample's label is {label!r}; a Dataset's are numbers from -1 up")
    return number


def _dataset_sample(item: Any) -> Sample:
    inputs: dict[str | int, Any]
    if isinstance(item, Mapping):
        label = next((item[n] for n in ("label", "target") if n in item), None)
        inputs = {name: value for name, value in item.items() if name not in ("label", "target")}
    elif isinstance(item, tuple | list):
        label = item[1] if len(item) > 1 else None
        inputs = dict(enumerate(item))
    else:
        label, inputs = None, {0: item}
    digest = xxhash.xxh3_128()
    for value in inputs.values():
        if isinstance(value, bytes):
            digest.update(value)
        elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
            array = np.asarray(value)
            digest.update(repr(value).encode() if array.dtype.hasobject else array.tobytes())
        else:
            digest.update(repr(value).encode())
    return Sample(inputs, _number(label), digest.hexdigest())


def open_source(
    source: str,
    storage_options: StorageOptions = None,
    *,
    follow_links: bool = False,
    most_bytes: int = MOST_SAMPLE_BYTES,
) -> Source:
    """Open the source that a path, a URL or ``python:module:factory`` names.

    Parameters
    ----------
    most_bytes
        Of a file that is fetched.
    """
    if source.startswith("python:"):
        factory = source.removeprefix("python:")
        load_object(factory)
        return DatasetSource(factory, code_digest(factory))
    folder = open_folder(source, storage_options, follow_links=follow_links)
    return FolderSource(folder, most_bytes=most_bytes)
