"""Samples of a user's torch map-style `Dataset`."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from precache.errors import FetchError, SampleError, SourceError, UsageError
from precache.store.columns import Texts
from precache.store.locations import Locations
from precache.store.row_table import RowTable
from precache_workers.runtime.time_limit import FETCHING, fails_sample, samples_at_work
from precache_workers.sources.base import (
    NO_RULES,
    Fetched,
    LabelRules,
    Listing,
    Sample,
    Source,
    Tick,
    quoted,
)
from precache_workers.sources.dataset_items import (
    CLASS_NUMBERS,
    DatasetLabels,
    ItemUse,
    LabelError,
    Part,
    Starts,
    content_of,
    described,
    hashed,
    in_words,
    is_class,
    read_item,
)
from precache_workers.sources.held_files import HeldData, held_data, held_values
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.labels import (
    Column,
    Label,
    column_of,
    kind_of,
    label_of,
    names_by_number,
)
from precache_workers.user_code.loading import load_object


@dataclass(frozen=True)
class DatasetSource(Source):
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
    starts
        Parts that fields without a part start from; None where they are not known, and are found
        for each sample alone.
    rules
        Readings of the labels of `targets`.
    held
        What the dataset of the process that began the build holds, by `held_values`; that of each
        other process must hold the same. Set as the source travels.
    """

    factory: str
    code: str
    fields: tuple[tuple[str, str | int | None], ...] | None = None
    labels_given: bool = False
    compare: bool = False
    starts: Starts | None = None
    rules: LabelRules = NO_RULES
    held: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        made = _datasets.get(self.factory)
        return {**vars(self), "held": self.held or (made.held if made else {})}

    @property
    def _made(self) -> _Made:
        return _made(self.factory, self.code, self.held)

    @property
    def dataset(self) -> Any:
        """The dataset of this process, made once for each state of its code."""
        return self._made.dataset

    @property
    def leaves_starts_open(self) -> bool:
        """True if it is not known what fields start from, and the recipe does not say it."""
        return self.starts is None and any(part is None for _, part in self.fields or ())

    @property
    def labels_with_samples(self) -> bool:
        """True unless the dataset has `targets`, which are the labels then."""
        return _targets(self.dataset) is None

    @property
    def fetch_threads(self) -> int:
        count = getattr(self.dataset, "fetch_threads", 1)
        if not isinstance(count, int) or count < 1:
            raise SourceError(
                f"{self.factory}: fetch_threads is {count!r}; it must be a number of threads, 1 or "
                "more"
            )
        return count

    @property
    def etag(self) -> str:
        """Identity of all samples: digest of the factory's name and code."""
        return xxhash.xxh3_128_hexdigest(f"{self.factory} {self.code}".encode())

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        with _lock:
            _datasets.pop(self.factory, None)  # it may have grown
        made = self._made
        dataset, count = made.dataset, made.count()
        if not count:
            raise SourceError(f"the dataset of {self.factory} is empty")
        tick(count)
        unknown = np.full(count, -1, np.int64)
        given = made.labels(self.rules)
        rules = replace(self.rules, all_splits=False)  # a dataset has none
        if given.encoded is None and rules != NO_RULES and not self.labels_given:
            raise UsageError(
                f"{self.factory} has no attribute `targets`, and labels that come with samples are "
                "class numbers; leave out --label-kind, --label-separator, --no-label and "
                "--class-order, or give it `targets`"
            )
        keys = [*(map(str, range(count)) if made.numbers is None else made.numbers)]
        held: HeldData | None = None
        etags: Sequence[str]
        if hasattr(dataset, "fingerprint"):
            texts = _texts(dataset.fingerprint, count, f"{self.factory}: fingerprint")
            etags = [xxhash.xxh3_128_hexdigest(f"{self.factory} {text}".encode()) for text in texts]
        else:
            # A label that changes in `targets` alone is seen without reading the sample.
            held = held_data(dataset, () if given.encoded is None else ("targets", "classes"))
            etags = [f"{self.etag}:{held.digest}" if held.digest else self.etag] * count
        return Listing(
            RowTable(
                keys=Texts(keys),
                sizes=unknown,
                mtimes=unknown,
                etags=Texts(etags),
                labels=unknown if given.encoded is None else given.encoded,
                classes=given.classes,
            ),
            notes=(*self._notes(dataset, given), *self._comparison(held)),
            file_states=np.full(count, held.file_states) if held and held.files else None,
            doubts=given.doubts,
        )

    @property
    def compares(self) -> bool:
        """True if a change of the data of a sample is seen."""
        return self.compare or hasattr(self.dataset, "fingerprint")

    def _comparison(self, held: HeldData | None) -> tuple[str, ...]:
        """Return a line about data whose changes are not seen."""
        if held is None or self.compare:
            return ()
        seen = ", of lists and arrays in its attributes" if held.digest else ""
        seen += f", and of {held.files:,} files that these name" if held.files else ""
        unread = "".join(
            f" (its attribute {name!r} could not be searched: {reason[:100]})"
            for name, reason in held.unread.items()
        )
        line = (
            f"{self.factory}: samples not compared: a later build sees a change of its code{seen}, "
            f"and of a few samples, but no other change of its data{unread}. Give the dataset a "
            "method fingerprint(i), or build with --compare, which reads all samples"
        )
        return (line,)

    def _notes(self, dataset: Any, given: DatasetLabels) -> tuple[str, ...]:
        """Return lines about the attribute `targets`, and about labels that are not used."""
        if self.labels_given:
            return ("Labels are those of --labels: labels that samples bring are not used",)
        if given.encoded is not None:
            of_targets = "Labels are the attribute `targets` of the dataset; --labels gives others"
            return (of_targets, *given.notes)
        if getattr(dataset, "targets", None) is not None:
            return ("The attribute `targets` of the dataset has paths of files, and no labels",)
        return ()

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        made = self._made
        dataset, use = made.dataset, self._use_of_items(made)
        fetched: list[Fetched] = []
        for key in keys:
            if (number := made.number_of(key)) is None:
                why = f"{key!r} is no key of {self.factory}, which has {made.count()} samples"
                fetched.append(FetchError(why))
                continue
            try:
                item = samples_at_work().work(FETCHING, key, getitem, dataset, number)
                fetched.append(self._sample(item, number, use))
            except LabelError as error:  # of all samples, or the next build has another label
                raise SourceError(f"sample {key} of {self.factory}: {error}") from None
            except SampleError as error:
                fetched.append(error)
            except MemoryError:
                fetched.append(SampleError("there is not enough memory to create it"))
            except BaseException as error:
                if not fails_sample(error):
                    raise
                fetched.append(FetchError(f"sample {key} of {self.factory}: {error!r}"))
        return fetched

    def _sample(self, item: Any, number: int, use: ItemUse) -> Sample:
        try:
            used = read_item(item, number, use)
        except LabelError:
            if self.fields is not None:
                raise
            used = read_item(item, number, replace(use, ignores_labels=True))
        if use.unread_labels and not used.label_part:
            raise LabelError(
                "it brings no label, and the dataset has an attribute `labels`, which is not read: "
                "call it `targets`. If it has no labels, rename it, or return None as the label"
            )
        if not used.inputs:
            raise SampleError(f"it is {described(item)}, without an item that a field can read")
        of = hashed({}, {part: content_of({part: value}) for part, value in used.inputs.items()})
        inputs = self._started({part: _own(value) for part, value in used.inputs.items()})
        return replace(used, inputs=inputs, content=of.content, contents=of.contents)

    def _started(self, inputs: Mapping[Part, Any]) -> Mapping[Part, Any]:
        """Let fields start from the same parts in all samples; one that lacks them is a hole."""
        started = dict(inputs)
        for field_name, part in self.starts or ():
            if part not in started:
                why = f"it has no {in_words(part)}, from which {field_name} starts in other samples"
                started[part] = SampleError(why)
            if part != field_name:  # the first one, whatever else has the field's name
                started.pop(field_name, None)
                started = {part: started[part], **started}
        return started

    def _use_of_items(self, made: _Made) -> ItemUse:
        """Return the use of the dataset's items, with its labels as far as they are known."""
        given = made.labels(self.rules)
        doubtful = self.fields is not None and not self.labels_given and given.encoded is None
        unread = doubtful and _has_labels(made.dataset, made.count())
        starts = dict(self.starts or ())
        fields = tuple((name, starts.get(name, part)) for name, part in self.fields or ())
        return ItemUse(fields, self.labels_given, given, unread)


def _own(value: Any) -> Any:
    """Copy a part of an item into whose memory a dataset may read the next one."""
    match value:
        case np.ndarray():
            return value.copy(order="K")
        case bytearray() | memoryview():
            return bytes(value)
        case list():
            return [_own(one) if hasattr(one, "shape") else one for one in value]
    return value.detach().clone() if hasattr(value, "untyped_storage") else value


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


class _Made:
    """The dataset of a factory, with what is found out of it once.

    Attributes
    ----------
    code
        Digest of the factory's code.
    held
        What it held as it was made, by `held_values`.
    numbers
        Key -> number of each sample, in order; None if the numbers as text are the keys.
    """

    def __init__(self, factory: str, code: str) -> None:
        self.factory, self.code = factory, code
        self._labels: dict[LabelRules, DatasetLabels] = {}
        make = load_object(factory, code)
        try:
            self.dataset = make()
            self.held = held_values(self.dataset, factory.partition(":")[0])
        except Exception as error:
            raise SourceError(f"{factory}() failed: {error!r}") from error

    def count(self) -> int:
        try:
            return len(self.dataset)
        except TypeError:
            raise SourceError(
                f"{self.factory} gives a dataset without a length, such as an IterableDataset: "
                "return a list of the samples, or a Dataset with __len__ and __getitem__"
            ) from None

    @functools.cached_property
    def numbers(self) -> Mapping[str, int] | None:
        if not hasattr(self.dataset, "key"):
            return None
        keys = _texts(self.dataset.key, self.count(), f"{self.factory}: key")
        numbers = {key: number for number, key in enumerate(keys)}
        if len(numbers) < len(keys) or "" in numbers:
            twice = next(key for key, count in Counter(["", *keys]).items() if count > 1)
            raise SourceError(
                f"{self.factory}: key returned {twice!r}; keys must be unique and not empty"
            )
        return numbers

    def number_of(self, key: str) -> int | None:
        """Return the number of a sample; None for a key that the dataset does not have."""
        if self.numbers is not None:
            return self.numbers.get(key)
        is_number = re.fullmatch("0|[1-9][0-9]{0,17}", key) and int(key) < self.count()
        return int(key) if is_number else None

    def labels(self, rules: LabelRules) -> DatasetLabels:
        """Return the labels of `targets`, and the class names."""
        with _lock:
            if rules not in self._labels:
                self._labels[rules] = self._read_labels(rules)
            return self._labels[rules]

    def _read_labels(self, rules: LabelRules) -> DatasetLabels:
        classes, targets = _classes(self.dataset, self.factory), _targets(self.dataset)
        if targets is None:
            return DatasetLabels(classes)
        labels = _labels(targets, classes, self.count(), rules)
        numbers = getattr(self.dataset, "class_to_idx", None)
        if labels.classes and not classes and isinstance(numbers, Mapping) and numbers:
            raise SourceError(
                f"{self.factory}: `class_to_idx` is {described(numbers)}, without the numbers from "
                "0 up, each once, and `targets` are text: let an attribute `classes` list the "
                "names by number"
            )
        return labels


_datasets: dict[str, _Made] = {}
_lock = threading.RLock()


def _made(factory: str, code: str, held: Mapping[str, str]) -> _Made:
    """Return the dataset of a factory, made once for each state of its code.

    Raises
    ------
    SourceError
        It cannot be made, or holds something else than it is to hold.
    """
    with _lock:
        made = _datasets.get(factory)
        if made is None or made.code != code or _differing(made, held):
            made = _datasets[factory] = _Made(factory, code)
        if where := _differing(made, held):
            raise SourceError(
                f"{factory}: `{where}` is not what it was in the process that began the build, or "
                "has another order. Each process makes the dataset anew, and the order of a set "
                "differs between them: write sorted(set(...)) where a list is made of a set, and "
                "draw random values with a seed. If no sample depends on it, make it in "
                "__getitem__, at its first use"
            )
        return made


def _differing(made: _Made, held: Mapping[str, str]) -> str:
    """Name the first value that a dataset is to hold and does not; empty if there is none."""
    both = (where for where in held if where in made.held)
    return next((where for where in both if held[where] != made.held[where]), "")


def _classes(dataset: Any, factory: str) -> tuple[str, ...]:
    """Return the names of classes by number, by `classes` or `class_to_idx`; empty if unknown.

    Raises
    ------
    SourceError
        `classes` is no list of names, or the two number a class differently.
    """
    if type(dataset).__module__ == "torch.utils.data.dataset":  # Subset and ConcatDataset
        return _classes_of_parts(dataset, factory)
    given, numbers = (getattr(dataset, name, None) for name in ("classes", "class_to_idx"))
    numbers = dict(numbers) if isinstance(numbers, Mapping) else {}
    if given is None:
        return tuple(map(str, names_by_number(numbers) or ()))
    if isinstance(given, Mapping):
        if (by_number := names_by_number(given)) is None:
            raise SourceError(
                f"{factory}: the classes are {described(given)}; a dict of them has the "
                "numbers from 0 up"
            )
        given = by_number
    elif isinstance(given, str | bytes | set | frozenset) or not hasattr(given, "__len__"):
        raise SourceError(
            f"{factory}: the classes are {described(given)}; let the attribute `classes` be a "
            "list of the names, by number"
        )
    names = tuple(map(str, given))
    for number, name in enumerate(names):
        if is_class(numbers.get(name, number)) and int(numbers.get(name, number)) != number:
            raise SourceError(
                f"{factory}: the class {name!r} is number {number} by the attribute `classes`, and "
                f"{numbers[name]} by `class_to_idx`; make them alike, or remove one"
            )
    return names


def _classes_of_parts(dataset: Any, factory: str) -> tuple[str, ...]:
    """Return the names of classes that all datasets in one of torch's own have.

    Raises
    ------
    SourceError
        They have others, and the numbers of one are not those of another.
    """
    parts = getattr(dataset, "datasets", [getattr(dataset, "dataset", None)])
    if len(names := {_classes(part, factory) for part in parts}) < 2:
        return names.pop()
    first, *others = sorted(filter(None, names))
    if others:
        raise SourceError(
            f"{factory}: {type(dataset).__name__} has parts with the classes {quoted(first)}, and "
            f"{quoted(others[0])}, each numbered from 0: let the labels of all be numbered alike, "
            "and the parts have the same `classes`, or none"
        )
    return ()


def _targets(dataset: Any) -> Any:
    """Return the attribute `targets` of a dataset; None if there is none, or it has no labels."""
    targets = getattr(dataset, "targets", None)
    return None if _are_paths(targets) else targets


def _has_labels(dataset: Any, count: int) -> bool:
    """Return True if a dataset has an attribute `labels` with as many as there are samples."""
    labels = getattr(dataset, "labels", None)
    if isinstance(labels, list | tuple):
        return len(labels) == count and not _are_paths(labels)
    shape = getattr(labels, "shape", ())
    return isinstance(shape, tuple) and shape[:1] == (count,)


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


def _labels(targets: Any, classes: tuple[str, ...], count: int, rules: LabelRules) -> DatasetLabels:
    """Read the `targets` of a dataset as the labels of a table are read.

    Parameters
    ----------
    classes
        Names that the dataset lists, by number.
    """
    where = "the dataset's targets"
    try:
        labels = np.asarray(targets)
    except (TypeError, ValueError):  # lists of different lengths, or a type that NumPy lacks
        labels = np.empty((), object)
    # NumPy converts numbers in a list with text to text.
    plain = isinstance(targets, list | tuple)
    values = targets if plain or not labels.ndim else labels.tolist()
    if labels.shape == (count, 1) and labels.dtype.kind in "iub" and hasattr(targets, "shape"):
        labels = labels[:, 0]  # a column: a list of lists may be several classes
    numbers = labels.shape == (count,) and labels.dtype.kind in "iub"
    if numbers and int(labels.max()) >= 1 << 63:
        raise _no_labels(labels, count)
    if _length(targets) != count or isinstance(targets, str | bytes | Mapping | Set):
        raise _no_labels(labels, count)
    listed = classes or _categories(targets)
    column = pa.array(labels.astype(np.int64)) if numbers else None
    if column is None:
        column = column_of([_label(row, some) for row, some in enumerate(values)], where)
    if kind_of(column.type) is None:
        floats = labels.dtype.kind == "f" and labels.ndim == 1
        column = column.cast(pa.float64() if floats else pa.large_list(pa.int64()))
    keys = [f"number {row}" for row in range(count)]
    encoded = read_column(Column(column, keys, where, rules, listed))
    notes = encoded.notes
    if listed and not classes and encoded.classes:
        notes += (f"Classes are numbered as the categories of `targets`: {quoted(listed)}",)
    return DatasetLabels(encoded.classes, values, encoded.values, notes, encoded.doubts)


def _categories(targets: Any) -> tuple[str, ...]:
    """Return the categories of a column of pandas, in their order; empty if there are none."""
    categories = getattr(getattr(targets, "cat", targets), "categories", ())
    return tuple(categories) if all(isinstance(name, str) for name in categories) else ()


def _no_labels(labels: np.ndarray, count: int) -> SourceError:
    return SourceError(
        f"the dataset's targets are {labels.dtype} {labels.shape}; they must be {count} "
        f"labels, one for each sample: {CLASS_NUMBERS}, class names, numbers with a fraction, or "
        "lists of classes"
    )


def _length(targets: Any) -> int:
    """Return the number of targets; -1 for an object without a length, such as a number."""
    try:
        return len(targets)
    except TypeError:
        return -1


def _label(row: int, some: Any) -> Label | None:
    try:
        value = some.tolist() if hasattr(some, "tolist") else some
        if isinstance(value, list | tuple):
            value = [part.item() if hasattr(part, "item") else part for part in value]
        return label_of(value)
    except (TypeError, ValueError) as error:
        raise SourceError(f"the dataset's target of sample {row} {error}") from None
