"""Readings of labels: the user's choice, else the one that the labels leave open to no doubt.

Labels of text, names of folders and numbers can often be read in two ways that give other classes.
A reading that was guessed is a line for the user. Where two readings differ, the listing has a
`Doubt`, which a build refuses: its text holds the flags that decide, between backticks.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from precache.errors import SourceError
from precache.messages import printable
from precache_workers.sources.base import (
    Doubt,
    LabelRules,
    Ways,
    choice_error,
    first_folder,
    folder_at,
)
from precache_workers.sources.labels import Kind, infer_kind, is_nothing

_FEW = 3
"""Names that are shown of many."""

_SEPARATORS = ("|", ";", ",", "/", "+", "&", " ")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_EXPONENT = re.compile(r"[0-9]+[eE][0-9]+")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")

_PLAIN = r"(?:images?|imgs?|photos?|pictures?|data|sets?|splits?|jpe?g|png|full|small|[abxy\d._ -])"
_SPLIT = re.compile(
    rf"{_PLAIN}*+(?:(?:train(?:ing)?|trn|val(?:id(?:ation)?)?|dev|test(?:ing)?|eval(?:uation)?|"
    rf"h[eo]ld[_-]?out|unlabell?ed){_PLAIN}*+)+"
)
"""Names of splits, such as train2017, training_set, images-val and testA, in lower case."""

_IMAGES = frozenset(("image", "images", "img", "imgs", "jpegimages", "rgb", "leftimgbit"))
_TARGETS = frozenset(
    (
        "mask", "masks", "annotation", "annotations", "label", "labels", "gt", "groundtruth",
        "segmentation", "segmentations", "segmentationclass", "segmentationobject", "seg",
        "trimaps", "segmentationclassaug", "gtfine", "matte", "mattes", "bboxes", "boxes",
    )
)  # fmt: skip
"""Names of folders with the images and the targets of one data set, without digits and marks."""

_OPPOSITES = ("in", "un", "no", "non", "not", "without")


def quoted(names: Iterable[str], most: int = _FEW) -> str:
    """Return some names for a message, and the number of the others."""
    some = list(names)
    more = f" and {len(some) - most:,} more" if len(some) > most else ""
    return ", ".join(printable(repr(name)) for name in some[:most]) + more


def is_split(name: str) -> bool:
    """Return True for a name of a split, such as ``train2017`` or ``val``."""
    return _SPLIT.fullmatch(name[:100].lower()) is not None


def split_name(source: str) -> str:
    """Return the words in the last name of a source that name a split."""
    name = source.rstrip("/").rpartition("/")[2].partition(".")[0]
    return " ".join(filter(is_split, re.findall("[A-Za-z]{2,}", name)))


def note_of_containers(names: Iterable[str]) -> list[str]:
    """Return the line about containers of several splits that are taken together."""
    splits = sorted(set(map(split_name, names)) - {""})
    if len(splits) < 2:
        return []
    return [f"Files of several splits are taken together: {quoted(splits)}; name those of one"]


# --- folders ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderReading:
    """The folders that are the classes: their level, 1 for the first of a path, 0 for none."""

    level: int
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()


_PART = re.compile(r"[0-9]{4,}")
"""Names of folders that files are spread over, as by img2dataset."""


def read_folders(
    names: Iterable[str],
    rules: LabelRules,
    where: object,
    path_of: Callable[[str], str] | None = None,
) -> FolderReading:
    """Find the folders of names that are classes.

    Parameters
    ----------
    path_of
        Converts a folder to a source that the user may name; None if none can be named.
    """
    if rules.level is not None:
        return FolderReading(rules.level)
    counts = Counter(name.rpartition("/")[0] for name in names)
    paths = [folder.split("/") if folder else [] for folder in counts]
    shared = _shared(paths)
    level = len(shared) + 1
    outer = "/".join(shared)
    here = f"{where}: {printable(outer)}/" if shared else str(where)
    if shared and shared in paths:
        if len(paths) > 1:
            ways = Ways()
            text = (
                f"{here} has images beside its folders ({quoted(_tops(paths, level))}): add "
                f"{ways('--label-level', str(level))} if these are the classes, or "
                f"{ways('--label-level', '1')} if {printable(shared[0])!r} is the one class of all"
            )
            return FolderReading(1, doubts=(Doubt(text, tuple(ways)),))
        text = (
            f"All samples are of the one class {printable(shared[0])!r}, their only folder "
            "(--label-level 0 for no label)"
        )
        return FolderReading(1, (text,))
    inner: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        if len(path) >= level:
            inner[path[level - 1]].update(path[level : level + 1])
    if doubt := _doubt(inner, level, outer, here, path_of):
        return FolderReading(level, doubts=(doubt,))
    notes = []
    below = [f"{top}/{name}" for top, names in sorted(inner.items()) for name in sorted(names)]
    if shared:
        notes.append(
            f"Classes are the {len(inner):,} folders of {printable(outer)}/, which holds all "
            f"images ({quoted(sorted(inner))}); --label-level 1 takes {printable(shared[0])!r} "
            "as the one class"
        )
    elif below:
        notes.append(
            f"Classes are the {len(inner):,} first folders ({quoted(sorted(inner))}), which have "
            f"folders in them, such as {printable(below[0])}; --label-level 2 takes these"
        )
    if len(inner) > 1 and len({*map(len, inner)}) == 1 and all(map(_PART.fullmatch, inner)):
        notes.append(
            f"Classes are the {len(inner):,} numbered folders ({quoted(sorted(inner))}); if these "
            "are parts of one data set, --label-level 0 gives no label"
        )
    if splits := sorted(filter(is_split, inner)):
        notes.append(
            f"{quoted(splits)} is a class beside {len(inner) - 1:,} others; if it is a split, name "
            "the folder that is to be read, or move it elsewhere"
        )
    return FolderReading(level, tuple(notes))


def _tops(paths: Iterable[Sequence[str]], level: int) -> list[str]:
    return sorted({path[level - 1] for path in paths if len(path) >= level})


def _shared(paths: Sequence[list[str]]) -> list[str]:
    """Return the folders in which all others lie."""
    first, last = (min(paths), max(paths)) if paths else ([], [])
    count = 0
    while count < min(len(first), len(last)) and first[count] == last[count]:
        count += 1
    return list(first[:count])


def _doubt(
    inner: dict[str, set[str]],
    level: int,
    outer: str,
    here: str,
    path_of: Callable[[str], str] | None,
) -> Doubt | None:
    """Return the doubt about folders that may be no classes; None if they are."""
    tops = sorted(inner)
    plain = {top: re.sub(r"[\W\d_]", "", top.lower()) for top in tops}
    all_plain = set(plain.values())
    # Beside its opposite a name is a class: valid and invalid, mask and no_mask.
    single = [t for t in tops if all_plain.isdisjoint(f"{no}{plain[t]}" for no in _OPPOSITES)]
    splits = [top for top in single if is_split(top)]
    images = [top for top in single if plain[top] in _IMAGES]
    targets = [top for top in single if plain[top] in _TARGETS]
    common = Counter(name for names in inner.values() for name in names)
    repeated = [name for name, count in sorted(common.items()) if count > 1]
    first = ""
    lone_train = len(splits) == 1 and not inner[splits[0]] and "tr" in splits[0].lower()
    if splits and len(tops) > 1 and not lone_train:
        why, first = f"{quoted(splits)} look like splits, not like classes", splits[0]
        first = next((name for name in splits if "tr" in name.lower()), first)
    elif len(tops) > 1 and (images or targets):
        why = f"{quoted(images + targets)} look like parts of one data set, not like classes"
        first = images[0] if images else next(name for name in tops if name not in targets[1:])
        first = (
            first
            if first not in targets or len(targets) == len(tops)
            else min(set(tops) - set(targets))
        )
    elif len(repeated) > 1 and 2 * len(repeated) >= len(common):
        why = f"folders of the same names ({quoted(repeated)}) are in several of {quoted(tops)}"
    else:
        return None
    ways, texts = Ways(), []
    if first and path_of is not None:
        path = path_of(f"{outer}/{first}" if outer else first)
        texts.append(f"name one of them as the source: {ways(path)}")
    for number, names in ((level + 1, sorted(common)), (level, tops)):
        if names:
            texts.append(f"{ways('--label-level', str(number))} for the classes {quoted(names)}")
    texts.append(f"{ways('--label-level', '0')} for no label")
    if images and targets and not splits:
        texts.append("a torch Dataset as the source, which returns both as parts of one sample")
    return Doubt(f"{here}: {why}. Choose: {'; or '.join(texts)}", tuple(ways))


def folder_labels(names: Iterable[str], level: int) -> list[str]:
    """Return the folder of each name that is its class; empty for none."""
    if level == 1:
        return list(map(first_folder, names))
    return [folder_at(name, level) for name in names]


# --- text and numbers ---------------------------------------------------------------------------


@dataclass
class SettledLabels:
    """Labels with their final kind, and what is to be said of them."""

    labels: list[str]
    kind: Kind | None
    notes: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)


def settle_labels(
    labels: list[str],
    kind: Kind | None,
    keys: Sequence[str],
    where: str,
    rules: LabelRules,
    *,
    declared: bool = False,
    typed: bool = False,
    folders: bool = False,
    several: bool = True,
) -> SettledLabels:
    """Give labels the kind that the user names, or find what leaves their kind in doubt.

    Parameters
    ----------
    declared
        The source lists the names of its classes by number.
    typed
        A type says that text is text, and no number.
    folders
        The labels are names of folders, which nobody writes for nothing.
    several
        A sample may have several classes.

    Raises
    ------
    SourceError
        A label cannot be of the kind that the user names.
    """
    settled = SettledLabels(labels, kind)
    if rules.none:
        _blank(settled, keys, where, rules.none, typed)
        kind = settled.kind
    if kind in ("several names", "several numbers"):
        if rules.kind or rules.separator:
            raise SourceError(
                f"{where} has lists of classes as labels; leave out --label-kind and "
                "--label-separator"
            )
        if nothing := sorted(filter(is_nothing, set(settled.labels))):
            ways = Ways()
            text = (
                f"some labels of {where} are {quoted(nothing)}, beside lists: add "
                f"{ways(*no_label(nothing))} if that stands for no label, or write "
                '["NaN"] if it is a class'
            )
            settled.doubts.append(Doubt(text, tuple(ways)))
        return settled
    if rules.separator:
        _split_labels(settled, rules.separator)
    elif rules.kind and not (declared and rules.kind != "value"):
        _convert(settled, keys, where, rules.kind)
    elif folders:
        pass
    elif kind == "names":
        settled.doubts += _doubts_of_names(settled.labels, where, typed, several)
    else:
        settled.doubts += _doubts_of_numbers(settled.labels, kind, where, several)
        if kind == "numbers" and not declared and not settled.doubts:
            settled.doubts += doubts_of_negative_numbers(settled.labels, where, values=several)
        _count_nothing(settled)
        if kind == "numbers" and not declared and (count := settled.labels.count("-1")):
            none = f"{count:,} labels that are -1 are taken as none (--label-kind name)"
            settled.notes.append(none)
    return settled


def _blank(
    settled: SettledLabels, keys: Sequence[str], where: str, words: Sequence[str], typed: bool
) -> None:
    unknown = set(words) - set(settled.labels)
    if unknown:
        raise SourceError(f"{where} has no label {quoted(sorted(unknown))}; correct --no-label")
    settled.labels = ["" if label in words else label for label in settled.labels]
    if settled.kind == "names" and not typed:
        settled.kind = infer_kind(settled.labels, keys, where)


def _split_labels(settled: SettledLabels, separator: str) -> None:
    mark = separator.strip() or None  # None: any white space
    lists = {
        text: [part.strip() for part in text.split(mark) if part.strip()]
        for text in set(settled.labels)
    }
    numbers = all(_INTEGER.fullmatch(part) for parts in lists.values() for part in parts)
    texts = {
        text: json.dumps(list(map(int, parts)) if numbers else parts) if parts else ""
        for text, parts in lists.items()
    }
    settled.labels = [texts[text] for text in settled.labels]
    settled.kind = "several numbers" if numbers else "several names"


def _convert(settled: SettledLabels, keys: Sequence[str], where: str, kind: str) -> None:
    if kind == "name":
        settled.kind = "names" if any(settled.labels) else None
        return
    texts = {"": ""}
    for row, text in enumerate(settled.labels):
        if text in texts:
            continue
        number = math.nan if is_nothing(text) else _number(text)
        if number is None or (kind == "number" and not (math.isnan(number) or number.is_integer())):
            wanted = "a whole number" if kind == "number" else "a number"
            raise SourceError(
                f"{where}: the label of {printable(keys[row])} is {printable(text[:60])!r}, and "
                f"--label-kind {kind} needs {wanted}; correct it, or leave out --label-kind"
            )
        if math.isnan(number):
            texts[text] = ""
        elif kind == "value":
            texts[text] = text
        else:  # not by way of a float, which is not exact
            texts[text] = str(int(text) if _INTEGER.fullmatch(text) else int(number))
    settled.labels = [texts[text] for text in settled.labels]
    settled.kind = "numbers" if kind == "number" else "values"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _count_nothing(settled: SettledLabels) -> None:
    """Take words for nothing among numbers as no label."""
    words = {text for text in set(settled.labels) if is_nothing(text)}
    if words:
        count = sum(label in words for label in settled.labels)
        settled.notes.append(f"{count:,} labels that are {quoted(sorted(words))} are taken as none")
        settled.labels = ["" if label in words else label for label in settled.labels]


def no_label(words: Iterable[str]) -> list[str]:
    """Return the arguments that take words as no label."""
    return [argument for word in words for argument in _arguments("--no-label", word)]


def _arguments(flag: str, value: str) -> list[str]:
    """Return a flag and its value; after a space, a value such as ``-nan`` would be a flag."""
    return [f"{flag}={value}"] if value.startswith("-") and value != "-" else [flag, value]


def doubts_of_negative_numbers(
    labels: Collection[str], where: str, *, values: bool = True
) -> list[Doubt]:
    """Return the doubt about class numbers that are 1 and -1, as -1 stands for no label.

    Parameters
    ----------
    values
        Labels may be values for a regression.

    Raises
    ------
    ChoiceError
        A number is below -1, and so no class number.
    """
    numbers = {int(text) for text in set(labels) if text and not is_nothing(text)}
    below, ways = sorted(number for number in numbers if number < -1), Ways()
    name = f"{ways('--label-kind', 'name')} if each number is a class"
    if below:
        choices = [name]
        if len(below) == 1:
            choices.append(f"{ways(*no_label(map(str, below)))} if that stands for no label")
        if values:
            choices.append(f"{ways('--label-kind', 'value')} for a regression")
        text = f"labels of {where} are whole numbers, and some are below -1, such as {below[0]}"
        raise choice_error([Doubt(f"{text}: add {', or '.join(choices)}", tuple(ways))])
    if numbers == {-1, 1}:
        text = (
            f"labels of {where} are 1 and -1, and -1 may stand for no label: add {name}, or "
            f"{ways('--label-kind', 'number')} if -1 stands for no label"
        )
        return [Doubt(text, tuple(ways))]
    return []


def _doubts_of_numbers(
    labels: Collection[str], kind: Kind | None, where: str, several: bool
) -> list[Doubt]:
    ways = Ways()
    texts = {text for text in set(labels) if text and not is_nothing(text)}
    if kind == "numbers":
        zeros = sorted(text for text in texts if _LEADING_ZERO.fullmatch(text))
        if zeros:
            text = (
                f"labels of {where} have leading zeros, such as {quoted(zeros)}: add "
                f"{ways('--label-kind', 'name')} if they are codes, one class each, or "
                f"{ways('--label-kind', 'number')} if they are class numbers"
            )
            return [Doubt(text, tuple(ways))]
    if kind == "values" and texts and all(float(text).is_integer() for text in texts):
        if codes := sorted(text for text in texts if _EXPONENT.fullmatch(text)):
            text = (
                f"labels of {where} such as {quoted(codes)} are codes, or have an exponent: "
                f"add {ways('--label-kind', 'name')} if they are codes, one class each, or "
            )
            text += (
                f"{ways('--label-kind', 'value')} for a regression"
                if several
                else "give values for a regression in a table of URIs"
            )
            return [Doubt(text, tuple(ways))]
        blank = sum(not label or is_nothing(label) for label in labels)
        none = f", and {blank:,} of {len(labels):,} have none" if blank else ""
        text = (
            f"labels of {where} are numbers with a fraction that is zero, such as "
            f"{quoted(sorted(texts), 1)}{none}; a column of class numbers with a blank cell is "
            f"often written so: add {ways('--label-kind', 'number')} if they are class numbers, or "
            f"{ways('--label-kind', 'value')} for a regression"
        )
        return [Doubt(text, tuple(ways))]
    return []


def _doubts_of_names(labels: Sequence[str], where: str, typed: bool, several: bool) -> list[Doubt]:
    texts, ways = set(labels) - {""}, Ways()
    doubts = []
    nothing = sorted(filter(is_nothing, texts))
    if nothing:
        count = sum(label in nothing for label in labels)
        text = (
            f"{count:,} labels of {where} are {quoted(nothing)}: add {ways(*no_label(nothing))} if "
            f"that stands for no label, or {ways('--label-kind', 'name')} if it is a class"
        )
        doubts.append(Doubt(text, tuple(ways)))
        ways = Ways()
    texts.difference_update(nothing)
    words = sorted(text for text in texts if _number(text) is None)
    if not typed and len(words) == 1 and len(texts) > 2:
        text = (
            f"all labels of {where} are numbers but {quoted(words)}: add "
            f"{ways(*no_label(words))} if that stands for no label, or "
            f"{ways('--label-kind', 'name')} if all are names of classes"
        )
        doubts.append(Doubt(text, tuple(ways)))
    elif words and all(map(_DECIMAL_COMMA.fullmatch, words)):
        way = ""
        if several:
            way = f"add {ways('--label-separator', ',')} if they are several classes, or "
        text = (
            f"labels of {where} such as {quoted(words)} may be numbers with a decimal comma: write "
            f"them with a point, or {way}add {ways('--label-kind', 'name')} if they are names of "
            "classes"
        )
        doubts.append(Doubt(text, tuple(ways)))
    elif separator := next((mark for mark in _SEPARATORS if _joins(texts, mark)), ""):
        joined = sorted(text for text in texts if separator in text)
        way = "give them in a table of URIs"
        if several:
            way = f"add {ways('--label-separator', separator)}"
        text = (
            f"labels of {where} such as {quoted(joined)} seem to be several classes: {way} if they "
            f"are, or add {ways('--label-kind', 'name')} if each is the name of one class"
        )
        doubts.append(Doubt(text, tuple(ways)))
    return doubts


def _joins(texts: Collection[str], separator: str) -> bool:
    """Return True if a separator seems to join classes: parts recur in several labels."""
    lists = [
        parts
        for text in texts
        if separator in text
        and len(parts := {part.strip() for part in text.split(separator)} - {""}) > 1
    ]
    if not lists:
        return False
    counts = Counter(text for text in texts if separator not in text)
    counts.update(part for parts in lists for part in parts)
    parts = set().union(*lists)
    recurring = sum(counts[part] > 1 for part in parts)
    # These marks are rare in names, and others are not: "sea lion" is one class beside "lion".
    least = {"|": 0, ";": 1, ",": (len(parts) + 1) // 2}.get(separator, len(parts) // 2 + 1)
    return recurring >= least


# --- a column for each class --------------------------------------------------------------------


_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
"""Texts of 0 and 1 in lower case; pandas writes columns of `get_dummies` as True and False."""


def binary(value: object) -> int | None:
    """Return 0 or 1 for a value of a column of such; None for any other value."""
    if isinstance(value, str):
        return _BITS.get(value.strip().lower())
    return int(value) if isinstance(value, int | float) and value in (0, 1) else None


def one_hot_label(values: Sequence[object], names: Sequence[str]) -> str:
    """Return the label of a row with a column for each class.

    Raises
    ------
    ValueError
        A value is neither 0 nor 1.
    """
    ones = []
    for number, (value, name) in enumerate(zip(values, names, strict=True)):
        bit = binary(value)
        if bit is None:
            raise ValueError(
                f"has {printable(repr(value)[:60])} in the column {printable(name)!r}; of several "
                "columns of labels, each has 0 or 1"
            )
        if bit:
            ones.append(number)
    return f"{len(names)}:{json.dumps(ones)}"


def one_class_each(labels: Sequence[str]) -> list[str] | None:
    """Return the class numbers of labels of `one_hot_label` if each has exactly one; else None."""
    numbers = {}
    for text in set(labels):
        ones = json.loads(text.partition(":")[2] or "[]")
        if len(ones) != 1:
            return None
        numbers[text] = str(ones[0])
    return [numbers[text] for text in labels]


def doubt_of_columns(names: Sequence[str], where: object) -> list[Doubt]:
    """Return the doubt about columns of only 0 and 1 in a table without a column of labels."""
    if len(names) < 2:
        return []
    ways = Ways()
    if any("," in name for name in names):
        way = "rename those that have a comma in their name, and choose them by --label-column"
    else:
        way = (
            f"add {ways(*_arguments('--label-column', ','.join(names)))} if each is a class, or "
            f"{ways('--label-column', '')} for no label"
        )
    text = (
        f"{where} has no column of labels, and {len(names):,} columns of only 0 and 1: "
        f"{quoted(names)}; {way}"
    )
    return [Doubt(text, tuple(ways))]


# --- names of classes ---------------------------------------------------------------------------

_COPY = re.compile(r"(?: \(\d+\)| - copy)+$", re.IGNORECASE)
"""Ends of the names that systems give to copies of a folder."""

_BETWEEN = re.compile(r"[\s_\u2010-\u2015\u2212-]+")

_LATIN = str.maketrans(
    "\u0410\u0412\u0415\u0405\u0406\u0408\u041a\u041c\u041d\u041e\u0420\u0421\u0422"
    "\u0425\u0423\u0430\u0435\u043e\u0455\u0456\u0458\u0440\u0441\u0445\u0443\u0391"
    "\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    "\u03bf\u0501\u051b\u051d\u2018\u2019\u02bc\u00b4",
    "ABESIJKMHOPCTXYaeosijpcxyABEZHIKMNOPTYXodqw''''",
)
"""Letters of other scripts that look like Latin ones, and apostrophes."""


def spelling(name: str) -> str:
    """Return a text that is equal for names that look alike."""
    if _INTEGER.fullmatch(name):
        return str(int(name))  # its sign counts
    text = name
    if not name.isascii():
        text = unicodedata.normalize("NFKC", name)
        text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
        text = text.translate(_LATIN)
    text = " ".join(_BETWEEN.split(_COPY.sub("", text))).strip()
    return text.casefold() if len(text) > 1 else text


def doubts_of_classes(classes: Iterable[str], where: object) -> list[Doubt]:
    """Return the doubt about names of classes that look alike."""
    seen: dict[str, str] = {}
    for name in classes:
        other = seen.setdefault(spelling(name), name)
        if other != name:
            text = (
                f"{where} has the classes {other!a} and {name!a}, which look alike: rename one, or "
                "list all names of classes in a text file, one a line, and give it by --classes"
            )
            return [Doubt(text, by_classes=True)]
    return []


def note_of_order(
    classes: Sequence[str], way: str = "--class-order number: as numbers"
) -> list[str]:
    """Return the line about classes whose names are numbers in the order of text."""
    if not all(map(_INTEGER.fullmatch, classes)):
        return []
    pair = next((pair for pair in pairwise(classes) if int(pair[0]) > int(pair[1])), None)
    if pair is None:
        return []
    why = f"{pair[0]!r} comes before {pair[1]!r}"
    return [f"Names of classes are sorted as text: {why} ({way})"]
