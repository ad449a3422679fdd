"""Items of a torch map-style `Dataset`: their parts, the label among them, their content."""

from __future__ import annotations

import functools
import math
import os
import pickle
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from precache.errors import SampleError
from precache.messages import printable
from precache.store.labels import MOST_CLASSES
from precache.units import size
from precache_workers.sources.base import Doubt, Sample

LABEL_NAMES = ("label", "labels", "target", "targets", "class", "y")
"""Parts of a dict, or of a named tuple, that are its label."""

USUAL_NAMES = (
    "cls", "category", "category_id", "class_id", "class_idx", "class_index", "class_label",
    "label_id", "label_idx",
)  # fmt: skip
"""Parts that are a label if they are the only one of these, and there is none of `LABEL_NAMES`."""

OTHER_NAMES = (
    "id", "idx", "index", "key", "image_id", "image_idx", "img_id", "sample_id", "url", "caption",
    "text", "prompt", "path", "image_path", "img_path", "file", "filename", "file_name", "filepath",
    "file_path", "uid", "uuid", "hash", "md5", "sha256", "width", "height", "w", "h", "size",
    "shape", "original_width", "original_height", "original_size", "split", "fold", "source",
    "dataset", "title", "description", "license", "date", "time", "timestamp",
)  # fmt: skip
"""Parts that tell samples apart or describe them, and are no label."""

CLASS_NUMBERS = "whole numbers from -1 up, below 2**63"

Part = str | int
"""Key of a dict, or position in a tuple."""

Starts = tuple[tuple[str, Part], ...]
"""Fields whose input is not given, with the part that they start from in all samples."""


class LabelError(ValueError):
    """A label that is not understood, or one of several that differ."""


@dataclass(frozen=True)
class DatasetLabels:
    """Names of the classes by number, and the labels of all samples by `targets` of the dataset.

    Attributes
    ----------
    given, encoded
        As the dataset has them, and as a row table has them; None without `targets`.
    notes, doubts
        Lines about their reading, and doubts about others.
    """

    classes: tuple[str, ...] = ()
    given: Any = None
    encoded: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True)
class ItemUse:
    """The use of the parts of an item.

    Attributes
    ----------
    fields
        Field -> the part that it starts from, None for a default.
    ignores_labels
        True if labels come from elsewhere: those of items may be of any kind.
    labels
        Those of the dataset, which those of items must agree with.
    unread_labels
        True if the dataset has labels of all samples that are not read.
    """

    fields: tuple[tuple[str, Part | None], ...]
    ignores_labels: bool = False
    labels: DatasetLabels = DatasetLabels()
    unread_labels: bool = False


def read_item(item: Any, number: int, use: ItemUse) -> Sample:
    """Find the label of an item among its parts; returns the sample, without its content.

    A label is a class number, or the name of one of the classes that the dataset lists. That of a
    dict is what one of `LABEL_NAMES` names, or a single one of `USUAL_NAMES`. That
    of a tuple is what follows the first part; if a field reads that, it is the one class number
    that no field reads.

    Parameters
    ----------
    number
        Index of the item.

    Raises
    ------
    LabelError
        The item has a label that is not understood, or several; the message begins with its part.
    """
    if isinstance(item, Mapping) and {*item} == {*range(len(item))}:  # a tuple in another form
        item = [item[place] for place in range(len(item))]
    named = isinstance(item, Mapping)
    several = item if isinstance(item, tuple | list) else [item]
    parts = dict(item if named else enumerate(several))
    names = None if named else getattr(item, "_fields", ())
    unread_parts, declared, by_name = _layout(tuple(parts), names, use.fields)
    unread = {part: parts[part] for part in unread_parts}
    others = []
    if not by_name:
        others = [
            part
            for part in unread
            if part not in declared
            and not (names and isinstance(part, int) and _is_other(names[part]))
            and is_class(unread[part])
        ]
    if use.labels.encoded is not None or use.ignores_labels:
        label, found = None, _agreeing(unread, declared, number, use)
    else:
        label, found = _number_of(parts, unread, declared, others, use.labels.classes)
    inputs = {part: value for part, value in parts.items() if part not in found}
    # The default input is no label, although a field reads one.
    called = dict(zip(parts, names or parts, strict=False))
    inputs = {part: inputs[part] for part in sorted(inputs, key=lambda p: _is_label(called[p]))}
    unread = {part: value for part, value in unread.items() if part not in found}
    return Sample(inputs, label, "", in_words(found[0]) if found else "", unread)


def may_be_label(part: Part, value: Any) -> bool:
    """Return True for a part of a dict that may be its label, under a name of the user's own."""
    if not isinstance(part, str) or _is_other(part):
        return False
    if isinstance(value, Mapping):
        return any(_is_label(name) and may_be_label(name, value[name]) for name in value)
    if math.prod(getattr(value, "shape", ())) > MOST_CLASSES:
        return False
    plain = _plain(value)
    if isinstance(plain, list):  # of one, one-hot or multi-hot
        return len(plain) == 1 or (bool(plain) and all(bit in (0, 1) for bit in plain))
    return isinstance(plain, str | int | float)


def _is_label(part: Part) -> bool:
    return isinstance(part, str) and part.lower() in (*LABEL_NAMES, *USUAL_NAMES)


def _is_other(name: str) -> bool:
    return name.lower() in OTHER_NAMES


def _labels_among(names: Sequence[Part]) -> list[Part]:
    """Return the names that are those of labels."""
    of_labels = [name for name in names if _is_label(name)]
    certain = [name for name in of_labels if str(name).lower() in LABEL_NAMES]
    return certain or (of_labels if len(of_labels) == 1 else [])


@functools.lru_cache(maxsize=256)
def _layout(
    parts: tuple[Part, ...],
    names: tuple[str, ...] | None,
    fields: tuple[tuple[str, Part | None], ...],
) -> tuple[tuple[Part, ...], tuple[Part, ...], bool]:
    """Return the parts that no field reads, and those of them that are to be the label.

    Parameters
    ----------
    names
        Names of the parts of a named tuple; None for a dict.

    Returns
    -------
    tuple
        Also True if the label is found by its name.
    """
    for field, given in fields:
        if names is not None and isinstance(given, str):
            number = given if given in map(str, parts) else f"0 to {len(parts) - 1}"
            number = str(names.index(given)) if given in names else number
            raise LabelError(
                f'field {field!r} has input = "{given}", and the items of a tuple are numbers: '
                f"write input = {number}, without quotes"
            )
    called = zip(parts, names or parts, strict=False)
    first = next((part for part, name in called if not _is_label(name)), next(iter(parts), None))
    read: set[Part | None] = {given for _, given in fields if given is not None}
    read |= {name if name in parts else first for name, given in fields if given is None}
    read |= set() if fields else {first}
    unread = tuple(part for part in parts if part not in read)
    if names is None:
        return unread, tuple(_labels_among(unread)), True
    of_labels = _labels_among(names)
    named = [place for place, name in enumerate(names) if name in of_labels]
    second = [] if names[1:2] and _is_other(names[1]) else [1]
    return unread, tuple(part for part in unread if part in (named or second)), bool(named)


def _number_of(
    parts: Mapping[Part, Any],
    unread: Mapping[Part, Any],
    declared: Sequence[Part],
    others: Sequence[Part],
    classes: Sequence[str],
) -> tuple[int | None, list[Part]]:
    """Return the class number among the parts of an item, and the parts that have it."""
    labels = {part: unread[part] for part in (*declared, *others) if unread[part] is not None}
    numbers = {
        part: classes.index(value)
        if isinstance(value, str) and classes.count(value) == 1
        else class_number(value)
        for part, value in labels.items()
    }
    for part, known in numbers.items():
        if known is None:
            raise LabelError(_not_understood(parts, part, classes))
    different = dict.fromkeys(numbers.values())
    if len(different) > 1:
        both = " and ".join(f"{in_words(part)} is {known}" for part, known in numbers.items())
        raise LabelError(
            f"{both}, and each may be its label: return one of them, or let fields of the recipe "
            "read the others, by their `input`"
        )
    label = next(iter(different), None)
    if label is not None and classes and label >= len(classes):
        raise LabelError(
            f"{in_words(next(iter(numbers)))} is {label}, which is no number of its "
            f"{len(classes)} classes: they go from 0 to {len(classes) - 1}, and -1 is none"
        )
    return label, [*numbers, *(part for part in declared if part not in numbers)]


def _not_understood(parts: Mapping[Part, Any], part: Part, classes: Sequence[str]) -> str:
    value = described(parts[part])
    if isinstance(parts[part], str) and classes:
        names = printable(reprlib.repr([*classes]))
        return f"{in_words(part)} is {value}, and not one name among its `classes`: {names}"
    if part == 1 and is_class(parts[0]) and _is_picture(parts[1]):
        return (
            f"item 0 is {described(parts[0])} and item 1 is {value}: return (image, label), or "
            "let the recipe's field read the image, by input = 1"
        )
    name = part if isinstance(part, int) else f'"{part}"'
    plain = _plain(parts[part])
    whole = isinstance(plain, float) and plain.is_integer() and plain >= 0
    number = " Return int(label) if it is a class." if whole else ""
    return (
        f"{in_words(part)} is {value}, and a label that comes with a sample is one of the "
        f"{CLASS_NUMBERS}.{number} Give the dataset an attribute `targets` with the labels of all "
        "samples, of any kind (class names, numbers with a fraction, several classes, one-hot), or "
        "give --labels. If it is no label, let a field of the recipe read it, by input = "
        f"{name}, or leave it out of the item"
    )


def _agreeing(
    unread: Mapping[Part, Any], declared: Sequence[Part], number: int, use: ItemUse
) -> list[Part]:
    """Return the parts that are labels, which must agree with the known ones."""
    found = [part for part in declared if _plain(unread[part]) is not _NO_LABEL]
    known = use.labels
    if known.encoded is None or use.ignores_labels:
        return found
    for part in found:
        own, given = _plain(unread[part]), _plain(known.given[number])
        if own is None or _agrees(own, given, known.encoded[number], known.classes):
            continue
        numbered = " (an attribute `classes` numbers them)" if isinstance(given, str) else ""
        raise LabelError(
            f"{in_words(part)} is {described(unread[part])}, and targets[{number}] is "
            f"{described(known.given[number])}{numbered}; make them alike, or remove one: the "
            "attribute `targets`, or the label of the samples"
        )
    return found


def _agrees(own: Any, given: Any, encoded: Any, classes: Sequence[str]) -> bool:
    """Return True if the label of an item is the one that is known.

    Parameters
    ----------
    given, encoded
        The known label, as the dataset has it, and as a row table has it.
    """
    if own == given or (own != own and given != given):
        return True
    values = own if isinstance(own, list) else [own]
    values = [classes.index(value) if value in classes else value for value in values]
    if encoded.dtype.kind == "f":
        scalar = np.ndim(encoded) == 0 and len(values) == 1 and not isinstance(values[0], str)
        return scalar and bool(np.float32(values[0]) == encoded)
    wanted = {int(encoded)} if np.ndim(encoded) == 0 else {*np.flatnonzero(encoded).tolist()}
    ones = {number for number, value in enumerate(values) if value == 1}
    is_hot = len(values) > 1 and {*values} <= {0, 1}
    named = len(values) == len(wanted) and {*values} == wanted
    return named or (is_hot and ones == wanted)


_NO_LABEL = object()


def _plain(value: Any) -> Any:
    """Return a label as a number, text, or list of these; `_NO_LABEL` for all else."""
    if value is None or isinstance(value, str | int | float):
        return value
    with_items = isinstance(value, list | tuple) and len(value) <= MOST_CLASSES
    if _is_picture(value) or not (with_items or hasattr(value, "tolist")):
        return _NO_LABEL
    values = value.tolist() if hasattr(value, "tolist") else [_plain(some) for some in value]
    if not isinstance(values, list):
        return values
    if not all(isinstance(some, str | int | float) for some in values):
        return _NO_LABEL
    return values


# --- class numbers ------------------------------------------------------------------------------


def class_number(value: Any) -> int | None:
    """Return one whole number, also in an array or a list of one; None for all else."""
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool | int | np.integer | np.bool_):
        number = int(value)
    elif hasattr(value, "shape") and hasattr(value, "dtype") and math.prod(value.shape) == 1:
        number = value.item()
        if not isinstance(number, int):
            return None
    else:
        return None
    return number if -1 <= number < 1 << 63 else None


def is_class(value: Any) -> bool:
    """Return True for one whole number that may be a label."""
    return class_number(value) is not None


# --- text ---------------------------------------------------------------------------------------


def in_words(part: Part) -> str:
    """Name a part of an item."""
    return f"item {part}" if isinstance(part, int) else printable(repr(part)[:60])


class _Repr(reprlib.Repr):
    def repr_bytes(self, value: bytes, level: int) -> str:  # never those of a file
        return described(value)


def described(value: Any) -> str:
    """Describe a value by its type, and by its shape or how it begins."""
    kind = "text" if isinstance(value, str) else type(value).__name__
    if value is None or isinstance(value, bytes | bytearray | memoryview):
        return "None" if value is None else f"{kind} ({size(len(value))})"
    if hasattr(value, "getpixel"):
        return f"{kind} {value.mode} {value.size[0]} x {value.size[1]}"
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape:
        return f"{kind} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    value = value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value
    return printable(f"the {kind} {_Repr().repr(value)}")


def _is_picture(value: Any) -> bool:
    many = getattr(value, "ndim", 0) > 1 or hasattr(value, "getpixel")
    return many or isinstance(value, bytes | bytearray | memoryview)


# --- content ------------------------------------------------------------------------------------


def hashed(parts: Mapping[Part, Any], contents: Mapping[Part, str]) -> Sample:
    """Return the sample of some parts, of which each has a hash."""
    if len(contents) == 1:
        return Sample(parts, content=next(iter(contents.values())))
    return Sample(parts, content=content_of(contents), contents=contents)


def content_of(inputs: Mapping[Part, Any]) -> str:
    """Hash parts of an item (XXH3-128, hex): names, types, shapes and values.

    What can be neither hashed nor pickled gets a hash of its own each time.
    """
    digest = xxhash.xxh3_128()
    for part, value in inputs.items():
        digest.update(repr(part).encode(errors="surrogatepass"))
        for piece in _pieces(value):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield bytes that tell a value from all others."""
    kind, within = type(value).__name__, list[Any]()
    if value is None or isinstance(value, str | int | float | np.number | np.bool_):
        data = repr(value).encode(errors="surrogatepass")
    elif isinstance(value, bytes | bytearray):
        data = bytes(value)
    elif isinstance(value, list | tuple | Mapping | Set):
        within = list(value.items() if isinstance(value, Mapping) else value)
        within = sorted(within, key=repr) if isinstance(value, Set) else within
        kind, data = f"{kind} of {len(value)}", b""
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        try:
            array = np.asarray(value.detach() if hasattr(value, "detach") else value)
        except TypeError as error:  # such as a tensor of bfloat16
            raise SampleError(f"it is {described(value)}, and no NumPy array: {error}") from None
        mode = getattr(value, "mode", None)
        mode = mode if isinstance(mode, str) else None  # of tensors, a method
        kind = f"{kind} {mode} {array.dtype.str} {array.shape}"
        data = b"" if array.dtype.hasobject else array.tobytes()
        within = [array.tolist()] if array.dtype.hasobject else []
        if mode is not None:
            palette = value.getpalette("RGBA") if mode in ("P", "PA") else None
            within = [palette, value.info.get("transparency")]
    else:
        try:
            kind, data = "pickle", pickle.dumps(value, protocol=4)
        except Exception:  # whatever the user's class raises
            data = os.urandom(16)
    yield f"{kind} {len(data)}\n".encode()
    yield data
    for part in within:
        yield from _pieces(part)
