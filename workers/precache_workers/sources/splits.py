"""Splits that names of files, folders and columns tell: training data, tests and the like.

A source whose samples are of several splits is refused, unless the user takes them together, or
named each of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from precache_workers.sources.base import Doubt, LabelRules, container_suffix, quoted
from precache_workers.sources.container_names import Containers

ALL_SPLITS = ("--all-splits",)
"""The argument that takes samples of all splits together."""

MOST_SPLITS = 20
"""Most values of a column of splits: keys such as ``train_00001`` are none."""

_COLUMN = re.compile(
    r"(?:[a-z]*splits?|(?:data|sub)?sets?|usage|phase|partition|k?fold)(?:name|id|no|\d)?"
)
"""Names of columns of splits, in lower case and without marks."""

_FLAGS = frozenset(("", "0", "1", "0.0", "1.0", "false", "true", "f", "t", "no", "yes", "n", "y"))
"""Texts of a column that tells whether a sample is of a split, in lower case."""

MOST_COMMANDS = 8
"""Splits of files that are named with the source that has each alone."""

_PLAIN = (
    r"(?:images?|imgs?|photos?|pictures?|data|sets?|splits?|jpe?g|png|full|small|public|private|"
    r"[abxy\d._ -])"
)
_SPLIT = re.compile(
    rf"{_PLAIN}*+(?:(?:train(?:ing)?|trn|tst|val(?:id(?:ation)?)?|dev|test(?:ing)?|eval(?:uation)?|"
    rf"h[eo]ld[_-]?out|unlabell?ed|unsup(?:ervised)?){_PLAIN}*+)+"
)
"""Names of splits, such as train2017, training_set, images-val and testA, in lower case."""

_SPLIT_WORDS = frozenset(
    (
        "train", "training", "trn", "tr", "trainval", "val", "valid", "validation", "dev", "test",
        "testing", "tst", "eval", "evaluation", "holdout", "pred", "predict",
        "prediction", "query", "gallery", "probe", "support",
    )
)  # fmt: skip
"""Words of splits, if other names have another of them in its place, and are equal otherwise."""


# --- words --------------------------------------------------------------------------------------


def is_split(name: str) -> bool:
    """Return True for a name of a split, such as ``train2017`` or ``val``."""
    return _SPLIT.fullmatch(name[:100].lower()) is not None


def is_trained_on(name: str) -> bool:
    """Return True if a name of splits has the word of training data."""
    return re.search("tr(ai)?n", name.lower()) is not None


def splits_among(names: Iterable[str]) -> set[str]:
    """Return the names that are splits: each alone, as `is_split`, or beside those like it.

    These differ in one word, which is a split's: ``my_train`` and ``my_val``.
    """
    names = [*names]
    return {*filter(is_split, names)} | differing_in(names, _SPLIT_WORDS)


def differing_in(names: Iterable[str], words: Collection[str]) -> set[str]:
    """Return the names that are equal to another but for one word and digits, both of `words`."""
    frames: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        for word in re.finditer("[a-z]+", name[:100].lower()):
            if word[0] in words:
                frame = f"{word.string[: word.start()]}/{word.string[word.end() :]}"
                frames[re.sub(r"\d", "", frame)][name] = word[0]
    return {name for some in frames.values() if len({*some.values()}) > 1 for name in some}


# --- columns ------------------------------------------------------------------------------------


def names_splits(column: str) -> bool:
    """Return True if the name of a column says that it has splits: ``split``, ``is_valid``."""
    plain = re.sub(r"[\W_]", "", column.lower())
    return _COLUMN.fullmatch(plain) is not None or _is_flag(plain)


def _is_flag(plain: str) -> bool:
    return is_split(re.sub("^(?:is|in|for)", "", plain))


def are_splits(values: Iterable[object]) -> bool:
    """Return True for names of several splits, and no other values: ``test1`` is as ``test2``."""
    names = {*map(str, values)} - {"", "None"}
    kinds = {re.sub(r"[\W\d_]", "", name.lower()) for name in names}
    return len(kinds) > 1 and len(names) <= MOST_SPLITS and splits_among(names) == names


def splits_of(name: str, values: Iterable[str]) -> Literal["", "maybe", "sure"]:
    """Return whether a column has several splits: by its values, or its name beside 0 and 1.

    A column whose name alone says so may have splits.
    """
    texts = set(values)
    if are_splits(texts):
        return "sure"
    if len(texts) < 2 or not names_splits(name):
        return ""
    if _is_flag(re.sub(r"[\W_]", "", name.lower())):
        return "sure" if all(text.lower() in _FLAGS for text in texts) else ""
    return "maybe"


# --- files and folders --------------------------------------------------------------------------


def split_name(name: str) -> str:
    """Return the words in the name of a file or folder that name a split, in lower case."""
    text = name[: len(name) - len(container_suffix(name))].rpartition("=")[2]
    return " ".join(filter(is_split, re.findall("[A-Za-z]{2,}", text))).lower()


def read_split_files(
    containers: Containers, names: Sequence[str], rules: LabelRules
) -> tuple[list[str], list[Doubt]]:
    """Read the splits of files: by words in their names, or by folders such as ``split=train``.

    Returns the lines about guesses, and the doubts.
    """
    for level in range(max(name.count("/") for name in names) + 1):
        files: dict[str, list[str]] = defaultdict(list)
        for name in names:
            part = [*name.split("/"), *[""] * level][level]
            column = part.partition("=")[0] if "=" in part else ""
            files[part if names_splits(column) else split_name(part)].append(name)
        splits = {*files} - {""}
        if len(splits) < 2:
            continue
        named = [part for name in containers.patterns for part in name.split("/")]
        if rules.all_splits or splits <= {*named, *map(split_name, named)}:
            return [f"Files of several splits are taken together: {quoted(sorted(splits))}"], []
        return [], [_doubt(containers, files, names)]
    return [], []


def _doubt(
    containers: Containers, files: Mapping[str, Sequence[str]], names: Sequence[str]
) -> Doubt:
    """Return the doubt about files of several splits, with the source that has each alone."""
    splits = sorted({*files} - {""}, key=lambda split: (not is_trained_on(split), split))
    sources = {s: containers.narrowed(files[s], names) for s in splits[:MOST_COMMANDS]}
    ways = [((source,), f"for {split!r}") for split, source in sources.items() if source]
    text = f"{containers} has files of the splits {quoted(sorted(splits))}, and the samples of all"
    together = ALL_SPLITS, "for all of them"
    return Doubt.of(f"{text} are built together", *ways, together, of_members=True)


def notes_of_folders(names: Iterable[str]) -> list[str]:
    """Return lines about samples that lie in folders of several splits."""
    paths = {name.rpartition("/")[0] for name in names}
    parts: dict[int, set[str]] = defaultdict(set)
    for path in paths:
        for level, name in enumerate(path.split("/")):
            parts[level].add(name)
    splits = {level: splits_among(names) for level, names in parts.items()}
    lines = (
        f"Samples of several splits are taken together: folders {quoted(sorted(some))}"
        for _, some in sorted(splits.items())
        if are_splits(some)
    )
    return [*dict.fromkeys(lines)]  # seg_train/seg_train/ says it twice
