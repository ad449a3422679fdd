"""Samples of a user's torch map-style `Dataset`."""

from __future__ import annotations

import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from precache.errors import FetchError, SampleError, SourceError
from precache.storage.base import Folder
from precache.store.row_table import RowTable
from precache_workers.runtime.time_limit import FETCHING, notes
from precache_workers.sources.base import Doubt, Fetched, Listing, Sample, Tick
from precache_workers.sources.dataset_items import (
    CLASS_NUMBERS,
    KnownLabels,
    LabelError,
    Reading,
    content_of,
    described,
    is_class,
    read_item,
)
from precache_workers.sources.held_files import HeldFiles, held_files
from precache_workers.sources.label_readings import doubts_of_classes, note_of_order, quoted
from precache_workers.sources.labels import Kind, encode_labels, is_nothing, joined, label_of
from precache_workers.sources.user_code import load_object


@dataclass(frozen=True)
class DatasetSource:
    """A torch map-style `Dataset` that ``module:factory()`` returns.

    Keys are indices. Samples are tuples (input, label) or dicts with a `label`, as `read_item`
    describes. If the dataset has the attributes `targets` and `classes` of torchvision, these are
    the labels, and those of samples must agree. The source counts as changed when the code of the
    factory, or code that it uses, changes.

    The dataset's attribute `fetch_threads` is the number of threads of a task that may fetch
    concurrently: 1 by default, as a Dataset need not be thread-safe.

    A dataset may have a method ``key(i)``, which returns a name for sample i: the sample keeps its
    row when its index changes. It may have a method ``fingerprint(i)``, which returns text that
    changes if and only if the sample or its label changes: the code then does not count.

    Attributes
    ----------
    code
        Expected digest of the factory's code.
    fields
        Fields of the recipe, with the part of a sample that they start from, None for a default;
        without them, labels that are not understood are ignored.
    labels_given
        Whether a request gives other labels than the samples.
    compare
        Whether samples are read and compared while they are listed.
    """

    factory: str
    code: str
    fields: tuple[tuple[str, str | int | None], ...] | None = None
    labels_given: bool = False
    compare: bool = False
    index_name: str = ""

    @property
    def labels_with_samples(self) -> bool:
        """True unless the dataset has `targets`, which are the labels then."""
        return _targets(_dataset(self.factory, self.code)) is None

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
        known, classes = self._known_labels(dataset)
        labels = unknown if known is None else known.encoded
        names = classes if known is not None and not _classes(dataset, self.factory) else ()
        keys = list(_indices(dataset, self.factory))
        files: HeldFiles | None = None
        etags: Sequence[str]
        if hasattr(dataset, "fingerprint"):
            texts = _texts(dataset.fingerprint, count, f"{self.factory}: fingerprint")
            etags = [xxhash.xxh3_128_hexdigest(f"{self.factory} {text}".encode()) for text in texts]
        else:
            files = held_files(dataset)
            etags = self._etags(files, count)
        return Listing(
            RowTable(
                keys=keys,
                sizes=unknown,
                mtimes=unknown,
                etags=etags,
                labels=labels,
                classes=classes,
            ),
            notes=(*self._notes(dataset, known, names), *self._comparison(files)),
            doubts=_doubts_of_names(names, f"the attribute `targets` of {self.factory}"),
        )

    @property
    def compares(self) -> bool:
        """True if a change of the data of a sample is seen."""
        return self.compare or hasattr(_dataset(self.factory, self.code), "fingerprint")

    def _etags(self, files: HeldFiles, count: int) -> Sequence[str]:
        """Return the identity of samples by the code, and by the files that the dataset holds."""
        shared = f"{self.etag}:{files.others}" if files.others else self.etag
        if files.of_samples is None:
            return [shared] * count
        return [
            f"{shared}:{xxhash.xxh3_64_hexdigest(os.fsencode(file))}" for file in files.of_samples
        ]

    def _comparison(self, files: HeldFiles | None) -> tuple[str, ...]:
        """Return a line about data whose changes are not seen."""
        if files is None or self.compare:
            return ()
        held = f", and of size or time of {files.count:,} files that its attributes name"
        seen = held if files.count else ""
        line = (
            f"{self.factory}: samples not compared: a later build sees a change of its code{seen}, "
            "but no other change of its data. Give the dataset a method fingerprint(i), or build "
            "with --compare, which reads all samples"
        )
        return (line,)

    def _notes(
        self, dataset: Any, known: KnownLabels | None, names: Sequence[str]
    ) -> tuple[str, ...]:
        """Return lines about the attribute `targets`, and about labels that are not used.

        Parameters
        ----------
        names
            Names of classes that the dataset does not list.
        """
        if self.labels_given:
            return ("Labels are those of --labels: labels that samples bring are not used",)
        if known is not None:
            of_targets = "Labels are the attribute `targets` of the dataset; --labels gives others"
            way = "an attribute `classes` of the dataset lists them in another order"
            return (of_targets, *note_of_order(names, way))
        if getattr(dataset, "targets", None) is not None:
            return ("The attribute `targets` of the dataset has paths of files, and no labels",)
        return ()

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
    ) -> Sequence[Fetched]:
        dataset = _dataset(self.factory, self.code)
        self._count(dataset)
        indices = _indices(dataset, self.factory)
        reading = self._reading(dataset)
        fetched: list[Fetched] = []
        for key in keys:
            if key not in indices:
                why = f"{key!r} is no key of {self.factory}, which has {len(indices)} samples"
                fetched.append(FetchError(why))
                continue
            notes().begin(FETCHING, key)
            number = indices[key]
            try:
                item = dataset[number]
                fetched.append(self._sample(item, number, reading))
            except LabelError as error:  # of all samples, or the next build has another label
                raise SourceError(f"sample {key} of {self.factory}: {error}") from None
            except SampleError as error:
                fetched.append(error)
            except MemoryError:
                fetched.append(SampleError("there is not enough memory to create it"))
            except (Exception, SystemExit) as error:
                fetched.append(FetchError(f"sample {key} of {self.factory}: {error!r}"))
        return fetched

    def _sample(self, item: Any, number: int, reading: Reading) -> Sample:
        try:
            used = read_item(item, number, reading)
        except LabelError:
            if self.fields is not None:
                raise
            used = read_item(item, number, replace(reading, ignores_labels=True))
        if not used.inputs:
            raise SampleError(f"it is {described(item)}, without an item that a field can read")
        return Sample(
            used.inputs, used.label, content_of(used.inputs), used.label_part, used.unread
        )

    def _reading(self, dataset: Any) -> Reading:
        """Return the use of the dataset's items, with its labels as far as they are known."""
        known, classes = self._known_labels(dataset)
        return Reading(self.fields or (), self.labels_given, classes, known)

    def _known_labels(self, dataset: Any) -> tuple[KnownLabels | None, tuple[str, ...]]:
        """Return the labels of `targets`, and the class names; encoded once for each dataset."""
        with _lock:
            held = _labelled.get(self.factory)
            if held is None or held[0] is not dataset:
                known, classes = None, _classes(dataset, self.factory)
                targets = _targets(dataset)
                if targets is not None:
                    encoded, classes = _labels(targets, classes, self._count(dataset))
                    known = KnownLabels(_by_position(targets), encoded)
                held = _labelled[self.factory] = dataset, known, classes
        return held[1:]

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
_labelled: dict[str, tuple[Any, KnownLabels | None, tuple[str, ...]]] = {}
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


def _classes(dataset: Any, factory: str) -> tuple[str, ...]:
    """Return the attribute `classes` of a dataset: names by number; empty if it has none."""
    given = getattr(dataset, "classes", None)
    if given is None:
        return ()
    if isinstance(given, Mapping):
        numbers = (
            dict(given) if all(map(is_class, given)) else {n: name for name, n in given.items()}
        )
        if sorted(numbers) != list(range(len(numbers))):
            raise SourceError(
                f"{factory}: the classes are {described(given)}; a dict of them has the "
                "numbers from 0 up"
            )
        return tuple(str(numbers[number]) for number in range(len(numbers)))
    if isinstance(given, str | bytes | set | frozenset) or not hasattr(given, "__len__"):
        raise SourceError(
            f"{factory}: the classes are {described(given)}; let the attribute `classes` be a "
            "list of the names, by number"
        )
    return tuple(map(str, given))


def _doubts_of_names(names: Sequence[str], where: str) -> tuple[Doubt, ...]:
    """Return the doubts about names of classes that the dataset does not list."""
    doubts = doubts_of_classes(names, where)
    if nothing := list(filter(is_nothing, names)):
        text = (
            f"{where} has {quoted(nothing)}: give None in its place if that stands for no label, "
            "or the dataset an attribute `classes` with the names of all classes if it is one"
        )
        doubts.append(Doubt(text))
    return tuple(doubts)


def _targets(dataset: Any) -> Any:
    """Return the attribute `targets` of a dataset; None if there is none, or it has no labels."""
    targets = getattr(dataset, "targets", None)
    return None if _are_paths(targets) else targets


def _are_paths(targets: Any) -> bool:
    """Return True for paths of files, as datasets of masks have them for targets."""
    if not isinstance(targets, list | tuple) or not targets:
        return False
    ends = (targets[0], targets[-1])
    return all(_is_file(end[0] if isinstance(end, list | tuple) and end else end) for end in ends)


def _is_file(name: Any) -> bool:
    """Return True for the path of a file; a class name has no suffix."""
    if not isinstance(name, str | os.PathLike):
        return False
    try:
        return bool(Path(name).suffix) and Path(name).is_file()
    except (OSError, ValueError):
        return False


def _labels(targets: Any, classes: Sequence[str], count: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Encode the `targets` of a dataset as row table labels; returns them and the class names."""
    where = "the dataset's targets"
    try:
        labels = np.asarray(targets)
    except (TypeError, ValueError):  # lists of different lengths, or a type that NumPy lacks
        labels = np.empty((), object)
    if labels.shape == (count, 1) and labels.dtype.kind in "iub" and hasattr(targets, "dtype"):
        labels = labels[:, 0]  # a column: a list of lists may be several classes
    if labels.shape == (count,) and labels.dtype.kind in "iub":
        if _is_class_number(labels.min()) and _is_class_number(labels.max()):
            _require_class(int(labels.max()), classes, where)
            return labels.astype(np.int64), tuple(classes)
        raise _no_labels(labels, count)
    if _length(targets) != count or isinstance(targets, str | bytes | Mapping | Set):
        raise _no_labels(labels, count)
    # NumPy converts numbers in a list with text to text.
    given = targets if isinstance(targets, list | tuple) else labels.tolist() or targets
    texts = [_text(row, some) for row, some in enumerate(given)]
    kinds = {kind for _, kind in texts if kind}
    without: Kind = "values" if labels.dtype.kind == "f" and labels.ndim == 1 else "several numbers"
    kind = joined(kinds or {without})
    if kind is None:
        raise SourceError(f"{where} are {' and '.join(sorted(kinds))}; make them alike")
    keys = [f"number {row}" for row in range(count)]
    encoded, names = encode_labels([text for text, _ in texts], kind, classes, keys, where)
    if not classes or names == tuple(classes):
        return encoded, names
    return _numbered_by(classes, encoded, names, where), tuple(classes) if names else ()


def _by_position(targets: Any) -> Any:
    """Return targets such that a number is the position of a sample, and no label of an index."""
    if isinstance(targets, list | tuple):
        return targets
    try:
        array = np.asarray(targets)
    except (TypeError, ValueError):
        return list(targets)
    return array if array.ndim else list(targets)


def _numbered_by(
    classes: Sequence[str], labels: np.ndarray, names: Sequence[str], where: str
) -> np.ndarray:
    """Number labels, whose classes are sorted by name, as the dataset numbers its classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    for number, name in enumerate(names):
        if name not in numbers:
            of_class = labels[:, number] if labels.ndim == 2 else labels == number
            row = int(np.flatnonzero(of_class)[0])
            known = ", ".join(map(repr, classes[:10]))
            raise SourceError(
                f"{where}: the target of sample {row} is {name[:60]!r}, which is not among its "
                f"classes: {known}"
            )
    order = [numbers[name] for name in names]
    if labels.ndim == 1:
        return labels if not names else np.array([*order, -1], np.int64)[labels]
    placed = np.zeros((len(labels), len(classes)), labels.dtype)
    placed[:, order] = labels
    return placed


def _require_class(highest: int, classes: Sequence[str], where: str) -> None:
    if classes and highest >= len(classes):
        raise SourceError(
            f"{where} have the class number {highest}, and `classes` names {len(classes)} classes, "
            "numbered from 0"
        )


def _no_labels(labels: np.ndarray, count: int) -> SourceError:
    return SourceError(
        f"the dataset's targets are {labels.dtype} {labels.shape}; they must be {count} "
        f"labels, one for each sample: {CLASS_NUMBERS}, class names, numbers with a fraction, or "
        "lists of classes"
    )


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
        value = some.tolist() if hasattr(some, "tolist") else some
        if isinstance(value, list | tuple):
            value = [part.item() if hasattr(part, "item") else part for part in value]
        return label_of(value)
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"the dataset's target of sample {row} {error}; a target is a class name as text, a "
            "number, or a list of these"
        ) from None
