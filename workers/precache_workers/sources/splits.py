"""Splits that names of files and folders tell: training data, tests and the like.

A source whose samples are of several splits is refused, unless the user takes them together, or
named each of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from precache_workers.sources.base import Doubt, LabelRules, container_suffix
from precache_workers.sources.column_evidence import ALL_SPLITS, are_splits, splits_of
from precache_workers.sources.container_names import Containers
from precache_workers.sources.evidence import quoted
from precache_workers.sources.label_readings import is_split, splits_among

MOST_COMMANDS = 8
"""Splits of files that are named with the source that has each alone."""


def split_name(name: str) -> str:
    """Return the words in the name of a file or folder that name a split, in lower case."""
    text = name[: len(name) - len(container_suffix(name))].rpartition("=")[2]
    return " ".join(filter(is_split, re.findall("[A-Za-z]{2,}", text))).lower()


def read_split_files(
    containers: Containers, names: Sequence[str], label: str, rules: LabelRules
) -> tuple[list[str], list[Doubt]]:
    """Read the splits of files: by words in their names, or by folders such as ``split=train``.

    Returns the lines about guesses, and the doubts.

    Parameters
    ----------
    label
        Column of labels, which folders may name, too.
    """
    notes: list[str] = []
    for level in range(max(name.count("/") for name in names) + 1):
        parts = {name: name.split("/")[level] for name in names if name.count("/") >= level}
        column, values = _partition(parts.values())
        kind = splits_of(column, values) if column and column != label else ""
        if kind == "maybe":
            some = quoted(sorted({*values} - {""}))
            notes.append(
                f"Folders {column}=… have {some}, which may be splits: all files are built"
            )
        if column and kind != "sure":
            continue
        files: dict[str, list[str]] = defaultdict(list)
        for name in names:
            part = parts.get(name, "")
            files[part if column else split_name(part)].append(name)
        splits = {*files} - {""}
        if len(splits) < 2:
            continue
        named = [part for name in containers.patterns for part in name.split("/")]
        if rules.all_splits or splits <= {*named, *map(split_name, named)}:
            text = f"Files of several splits are taken together: {quoted(sorted(splits))}"
            return [*notes, text], []
        return notes, [_doubt(containers, files, names)]
    return notes, []


def _partition(parts: Iterable[str]) -> tuple[str, list[str]]:
    """Return the column and values of folders such as ``split=train``; empty if some are others."""
    pairs = [part.partition("=") for part in parts]
    columns = {column if mark else "" for column, mark, _ in pairs}
    return (columns.pop() if len(columns) == 1 else ""), [value for *_, value in pairs]


def _doubt(
    containers: Containers, files: Mapping[str, Sequence[str]], names: Sequence[str]
) -> Doubt:
    """Return the doubt about files of several splits, with the source that has each alone."""
    splits = sorted({*files} - {""}, key=lambda split: (not re.search("tr(ai)?n", split), split))
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
    return [
        f"Samples of several splits are taken together: folders {quoted(sorted(some))}"
        for _, some in sorted(splits.items())
        if are_splits(some)
    ]
