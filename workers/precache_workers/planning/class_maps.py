"""Class maps: names of classes by number, from a store, a file or class folders."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from precache.errors import SourceError, StoreError
from precache.messages import shown
from precache.storage.base import NOT_UTF8
from precache.storage.open import StorageOptions, open_folder
from precache.store.open import open_version
from precache.store.row_table import RowTable
from precache.store.version import Version
from precache_workers.sources.base import Doubt, choice_error
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.labels import in_order, names_by_number
from precache_workers.sources.sample_keys import composed
from precache_workers.sources.tables import parse_json

log = logging.getLogger(__name__)

_NO_LISTS = (".csv", ".tsv", ".yaml", ".yml", ".toml", ".xml", ".pbtxt", ".parquet", ".pkl", ".npy")
"""Suffixes of files whose lines are no names, though they may have them."""

_FORMS = (
    "give a text file with the names of the classes one a line, by number, a JSON list of them, "
    'or a JSON object such as {"cat": 0, "dog": 1}'
)


def freeze_classes(
    table: RowTable,
    classes: Sequence[str],
    where: str,
    *,
    grows: bool = False,
    from_0: bool = False,
) -> RowTable:
    """Number the labels by a given class map.

    Class numbers without names are those of the map, from 0, or from 1 if its last name is else
    beyond them. Multi-hot labels whose classes have no names keep their numbers, and get as many
    classes as the map has.

    Parameters
    ----------
    grows
        Classes that the map lacks are added to it.
    from_0
        Class numbers without names are from 0.

    Raises
    ------
    SourceError
        The source has classes that the map lacks, and it does not grow, or its labels are numbers.
    ChoiceError
        Class numbers may begin with 0 or with 1.
    """
    if table.labels.dtype.kind == "f":
        raise SourceError(f"the source's labels are numbers, and no classes; leave out {where}")
    labels, several = table.labels, table.labels.ndim == 2
    used = np.flatnonzero(labels.any(axis=0)) if several else np.unique(labels[labels >= 0])
    if not (several or table.classes) and len(used) and not {*map(str, used)} <= {*classes}:
        return _named_by_number(table, classes, where, from_0=from_0)
    known = table.classes or (classes if several else ())
    names = {n: known[n] if n < len(known) else str(n) for n in used.tolist()}
    numbers = {composed(name): i for i, name in enumerate(classes)}
    numbers |= {name: i for i, name in enumerate(classes)}  # an exact match comes first
    new: dict[int, int] = {}
    taken: dict[int, str] = {}
    unknown = []
    for before, name in sorted(names.items(), key=lambda item: item[1]):
        number = numbers.get(name, numbers.get(composed(name)))
        if number is None and grows:
            number = numbers[composed(name)] = len(classes)
            classes = (*classes, name)
        if number is None:
            unknown.append(name)
            continue
        new[before] = number
        if (other := taken.setdefault(number, name)) != name:
            raise SourceError(
                f"the source has {other!a} and {name!a}, which differ only in how their "
                f"letters are composed, and {where} has one of them; rename one"
            )
    if unknown:
        raise SourceError(
            f"the source has classes that {where} does not: {', '.join(unknown[:10])}; "
            "remove them or build without --classes"
        )
    if several:
        frozen = np.zeros((len(table), len(classes)), np.uint8)
        frozen[:, [*new.values()]] = labels[:, [*new]]
    else:
        frozen = np.array([new.get(number, -1) for number in labels.tolist()], np.int64)
    return replace(table, labels=frozen, classes=tuple(classes))


def _named_by_number(
    table: RowTable, classes: Sequence[str], where: str, *, from_0: bool
) -> RowTable:
    """Give class numbers the names of a map in its order."""
    used = table.labels[table.labels >= 0]
    lowest, highest, count = int(used.min()), int(used.max()), len(classes)
    first = int(not from_0 and lowest > 0 and highest == count)
    if highest - first >= count:
        raise SourceError(
            f"the source has the class number {highest}, and {where} names {count:,} classes; give "
            "a name for each, or build without --classes"
        )
    if lowest > 0 and not (first or from_0):
        text = (
            f"class numbers of the source are from {lowest} to {highest}, and may be those of the "
            f"{count:,} names of {where} counted from 0 or from 1"
        )
        from_1 = (), f"write names, or numbers less by 1, if 1 is {classes[0]!a}"
        way = ("--label-kind", "number"), f"if 0 is {classes[0]!a}"
        raise choice_error([Doubt.of(text, way, from_1)])
    log.warning("class numbers are those of the names of %s: %s is %a", where, first, classes[0])
    labels = np.where(table.labels < 0, -1, table.labels - first)
    return replace(table, labels=labels, classes=tuple(classes))


_NUMBERED = (
    r"(?P<number>[0-9]+)[\s:,.;)]+(?P<name>\S.*)", r"(?P<name>.*\S)[\s:,;]+(?P<number>[0-9]+)",
)  # fmt: skip
"""Names of a class map with their numbers before or behind them."""


def require_names(classes: Sequence[str], known: Collection[str], where: str) -> None:
    """Raise `SourceError` for lines such as ``0 ant`` or ``ant 0``, also below a line of others.

    Parameters
    ----------
    known
        Names of classes, of which some may be such names.
    """
    for pattern, below in itertools.product(_NUMBERED, (0, 1)):
        found = [match for name in classes[below:] if (match := re.fullmatch(pattern, name))]
        numbers = {int(match["number"]) for match in found}
        counted = [{*range(first, first + len(classes) - below)} for first in (0, 1)]
        differ = len({match["name"] for match in found}) == len(found) > 1
        if differ and numbers in counted and {*classes}.isdisjoint(known):
            raise SourceError(
                f"names of {where} have their numbers beside them, such as {classes[-1]!a}: write "
                "the names alone, one a line, in the order of the numbers"
            )


def read_classes(
    uri: str,
    storage_options: StorageOptions = None,
    order: Literal["text", "number"] = "text",
) -> tuple[str, ...]:
    """Read class names from a store, a JSON list, a text file with one a line, or class folders."""
    path, where = Path(uri), f"--classes {shown(uri)}"
    if not path.is_file():
        try:
            return _classes_of(open_version(uri, storage_options), where)
        except StoreError as error:
            if path.is_dir() and (names := class_folders(path)):
                return in_order(names, order)
            raise SourceError(f"{where} is neither a file nor a store: {error}") from None
    if path.suffix.lower() in _NO_LISTS:
        raise SourceError(f"{where} is a {path.suffix[1:].upper()} file; {_FORMS}")
    try:
        text = path.read_text("utf-8-sig")
        given: Any = parse_json(text) if text.lstrip().startswith(("[", "{")) else text.split("\n")
        given = names_by_number(given) if isinstance(given, dict) else given
        text = "".join(given) if isinstance(given, list) else ""
        text.encode()  # JSON may hold lone surrogates
    except (MemoryError, OSError, ValueError, TypeError, RecursionError) as error:
        reason = str(error) or "memory does not suffice for it"
        raise SourceError(f"{where} cannot be read: {reason}; {_FORMS}") from None
    if not isinstance(given, list) or "\0" in text:
        raise SourceError(f"{where} has no list of names; {_FORMS}")
    classes = tuple(name.strip() for name in given if name.strip())
    if len(set(map(composed, classes))) != len(classes) or not classes:
        raise SourceError(f"{where} must name each class once, and at least one")
    return classes


def class_folders(path: Path) -> list[str]:
    """Return the class folders of a local folder: those that a listing of it takes as classes.

    Folders without a readable image that may be classes are among them.
    """
    try:
        listing = FolderSource(open_folder(path, follow_links=True)).list(lambda count: None)
    except SourceError:  # it has no image
        return []
    if NOT_UTF8 in listing.left_out:
        log.warning(
            "%s images of %s have no class, as their names are not UTF-8, such as %s",
            f"{listing.left_out[NOT_UTF8]:,}", path, listing.examples[NOT_UTF8],
        )  # fmt: skip
    return sorted({*listing.table.classes, *listing.bare})


def _classes_of(version: Version, where: str) -> tuple[str, ...]:
    """Return the names of a version's classes; of multi-hot labels without names, their numbers."""
    label = version.attributes.label
    if version.classes:
        return version.classes
    if not label.shape:
        raise SourceError(f"{where} is a store whose labels have no names of classes")
    return tuple(map(str, range(label.shape[0])))
