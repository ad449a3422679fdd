"""Samples of a user's torch map-style `Dataset`."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from precache.errors import FetchError, SampleError, SourceError
from precache.storage.base import Folder
from precache.store.labels import are_classes
from precache.store.row_table import RowTable
from precache_workers.runtime.time_limit import FETCHING, notes
from precache_workers.sources.base import Fetched, Listing, Sample, Tick
from precache_workers.sources.labels import Kind, encode_labels, joined, label_of
from precache_workers.sources.user_code import load_object


@dataclass(frozen=True)
class DatasetSource:
    """A torch map-style `Dataset` that ``module:factory()`` returns.

    Keys are indices. Samples are tuples (input, label) or dicts with a `label`. If the dataset has
    the attributes `targets` and `classes` of torchvision, they are used. The source counts as
    changed when the code of the factory, or code that it uses, changes.

    The dataset's attribute `fetch_threads` is the number of threads of a task that may fetch
    concurrently: 1 by default, as a Dataset need not be thread-safe.

    A dataset may have a method ``key(i)``, which returns a name for sample i: the sample keeps its
    row when its index changes. It may have a method ``fingerprint(i)``, which returns text that
    changes if and only if the sample changes: the code then does not count, and labels are the
    `targets`, if the dataset has them.

    Attributes
    ----------
    code
        Expected digest of the factory's code.
    """

    factory: str
    code: str
    content_decides: bool = False  # arrays and images are hashed as raw bytes
    index_name: str = ""

    @property
    def labels_with_samples(self) -> bool:
        """False if `targets` are the labels: with fingerprints, or if they are no class numbers."""
        dataset = _dataset(self.factory, self.code)
        if hasattr(dataset, "targets") and hasattr(dataset, "fingerprint"):
            return False
        targets = getattr(dataset, "targets", None)
        return targets is None or are_classes(_labels(targets, (), len(dataset))[0])

    @property
    def fetch_threads(self) -> int:
        count = getattr(_dataset(self.factory, self.code), "fetch_threads", 1)
        if not isinstance(count, int) or count < 1:
            raise SourceError(
                f"{self.factory}: fetch_threads is {count!r}; it must be a number of threads, 1 or "
                "more"
            )
        return count

    def file_of(self, key: str) -> tuple[Folder, str] | None:
        return None

    @property
    def etag(self) -> str:
        """Identity of all samples: digest of the factory's name and code."""
        return xxhash.xxh3_128_hexdigest(f"{self.factory} {self.code}".encode())

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        with _lock:
            _datasets.pop(self.factory, None)  # it may have grown
        dataset = _dataset(self.factory, self.code)
        count = self._count(dataset)
        if not count:
            raise SourceError(f"the dataset of {self.factory} is empty")
        tick(count)
        unknown = np.full(count, -1, np.int64)
        labels, classes = unknown, tuple(map(str, getattr(dataset, "classes", ())))
        if getattr(dataset, "targets", None) is not None:
            labels, classes = _labels(dataset.targets, classes, count)
        keys = list(_indices(dataset, self.factory))
        etags = [self.etag] * count
        if hasattr(dataset, "fingerprint"):
            texts = _texts(dataset.fingerprint, count, f"{self.factory}: fingerprint")
            etags = [xxhash.xxh3_128_hexdigest(f"{self.factory} {text}".encode()) for text in texts]
        return Listing(
            RowTable(
                keys=keys,
                sizes=unknown,
                mtimes=unknown,
                etags=etags,
                labels=labels,
                classes=classes,
            )
        )

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
    ) -> Sequence[Fetched]:
        dataset = _dataset(self.factory, self.code)
        self._count(dataset)
        indices = _indices(dataset, self.factory)
        known = getattr(dataset, "targets", None) is not None
        fetched: list[Fetched] = []
        for key in keys:
            if key not in indices:
                why = f"{key!r} is no key of {self.factory}, which has {len(indices)} samples"
                fetched.append(FetchError(why))
                continue
            notes().begin(FETCHING, key)
            try:
                fetched.append(_dataset_sample(dataset[indices[key]], known=known))
            except MemoryError:
                fetched.append(SampleError("there is not enough memory to create it"))
            except (Exception, SystemExit) as error:
                fetched.append(FetchError(f"sample {key} of {self.factory}: {error!r}"))
        return fetched

    def _count(self, dataset: Any) -> int:
        try:
            return len(dataset)
        except TypeError:
            raise SourceError(f"{self.factory} gives a dataset without a length") from None


class _Numbers(Mapping[str, int]):
    """Keys of a dataset without a method `key`: the sample numbers as text."""

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
    with _lock:
        held = _named.get(factory)
        if held is None or held[0] is not dataset:
            keys = _texts(dataset.key, len(dataset), f"{factory}: key")
            numbers = {key: number for number, key in enumerate(keys)}
            if len(numbers) < len(keys) or "" in numbers:
                twice = next(key for key, count in Counter(["", *keys]).items() if count > 1)
                raise SourceError(
                    f"{factory}: key returned {twice!r}; keys must be unique and not empty"
                )
            held = _named[factory] = dataset, numbers
    return held[1]


def _texts(method: Any, count: int, what: str) -> list[str]:
    """Call a method of a dataset for each sample and return the texts."""
    try:
        texts = [method(number) for number in range(count)]
    except Exception as error:
        raise SourceError(f"{what} failed: {error!r}") from error
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise SourceError(f"{what}({number}) is {text!r}; it must be a string")
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


def _labels(targets: Any, classes: Sequence[str], count: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Encode the `targets` of a dataset as row table labels; returns them and the class names."""
    try:
        labels = np.asarray(targets)
    except (TypeError, ValueError):  # lists of different lengths, or a type that NumPy lacks
        labels = np.empty((), object)
    whole = labels.shape == (count,) and labels.dtype.kind in "iub"
    if whole and _is_class_number(labels.min()) and _is_class_number(labels.max()):
        return labels.astype(np.int64), tuple(classes)
    without: Kind = "several numbers"  # the kind if no sample has a label
    if labels.shape == (count,) and labels.dtype.kind == "f":
        without = "values"
        texts = [label_of(float(number)) for number in labels]
    elif labels.ndim != 1 and _length(targets) == count:
        # NumPy converts numbers in a list with text to text.
        lists = targets if isinstance(targets, list | tuple) else labels.tolist() or targets
        texts = [_text(row, some) for row, some in enumerate(lists)]
    else:
        raise SourceError(
            f"the dataset's targets are {labels.dtype} {labels.shape}; they must be {count} "
            f"labels, one for each sample: {_CLASS_NUMBERS}, numbers with a fraction, or lists of "
            "classes"
        )
    kinds = {kind for _, kind in texts if kind}
    kind = joined(kinds or {without})
    if kind is None:
        raise SourceError(
            f"the dataset's targets are {' and '.join(sorted(kinds))}; make them alike"
        )
    keys = [f"number {row}" for row in range(count)]
    return encode_labels([text for text, _ in texts], kind, classes, keys, "the dataset's targets")


_CLASS_NUMBERS = "whole numbers from -1 up, below 2**63"


def _is_class_number(number: Any) -> bool:
    return -1 <= int(number) < 1 << 63


def _length(targets: Any) -> int:
    """Return the number of targets; -1 for an object without a length, such as a number."""
    try:
        return len(targets)
    except TypeError:
        return -1


def _text(row: int, some: Any) -> tuple[str, Kind | None]:
    try:
        values = some.tolist() if hasattr(some, "tolist") else list(some)
        return label_of([value.item() if hasattr(value, "item") else value for value in values])
    except (TypeError, ValueError) as error:
        raise SourceError(f"the dataset's target of sample {row} {error}") from None


def _number(label: Any, *, known: bool) -> int | None:
    """Return the class number that came with a sample; None if the label is of another kind.

    An array counts as no label. Other labels that are not class numbers are an error, unless the
    labels are known from `targets`. A change of these rules must change the identity of versions.
    """
    if label is None or np.ndim(label):
        return None
    try:
        number = int(label)
        whole = number == label and _is_class_number(number)
    except (OverflowError, TypeError, ValueError):
        whole = False
    if not whole and not known:
        raise SourceError(
            f"a sample's label is {label!r}; labels of single samples must be class numbers: "
            f"{_CLASS_NUMBERS}. Give the dataset an attribute `targets` with the labels of all "
            "samples, which may be of any kind"
        )
    return number if whole else None


def _dataset_sample(item: Any, *, known: bool) -> Sample:
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
    return Sample(inputs, _number(label, known=known), digest.hexdigest())
