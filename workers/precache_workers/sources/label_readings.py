"""Folders that are classes.

Names of folders can often be read in two ways that give other classes. A reading that was guessed
is a line for the user. Where two readings differ, the listing has a `Doubt`, which a build refuses.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from precache.messages import printable
from precache.store.columns import Texts, arrow_of
from precache_workers.sources.base import (
    Doubt,
    Folders,
    LabelRules,
    Way,
    folder_at,
    no_label,
    quoted,
)
from precache_workers.sources.container_names import (
    braced,
    braced_paths,
    common_start,
    expand_braces,
)
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.labels import LISTED, Column, column_of
from precache_workers.sources.pairs import (
    COPIES,
    IMAGES,
    PARTS,
    TARGETS,
    Files,
    lone_folder,
    match,
    plain_word,
    sources_of,
    split_pattern,
)
from precache_workers.sources.splits import is_split, is_trained_on, notes_of_folders, splits_among

MOST_PARTS = 4
"""Most folders with files of the same names that are taken for parts of samples, whatever they are
called: classes such as persons may have such files, too."""

MOST_COLUMNS = 16
"""Most folders whose files are compared."""

BY_FOLDERS = "folder is a class"
"""What the line about folders that are classes, or none, says."""

BY_TABLE = "in the source gives labels only"
"""What the line about a table among the images says."""


# --- folders ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderReading:
    """The folders that are the classes: their level, 1 for the first of a path, 0 for none."""

    level: int
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    bare: tuple[str, ...] = ()
    """Folders beside the classes that have no readable image, and may be classes."""


_BESIDE = frozenset(
    (
        ".txt", ".md", ".rst", ".pdf", ".html", ".csv", ".tsv", ".json", ".jsonl", ".ndjson",
        ".parquet", ".xml", ".yaml", ".yml", ".toml", ".log", ".mat", ".py", ".ipynb", ".sh",
        ".pt", ".pth", ".ckpt", ".safetensors", ".onnx", ".npy", ".npz", ".pkl", ".pickle", ".h5",
        ".hdf5", ".doc", ".docx", ".xls", ".xlsx", ".db", ".zip", ".gz", ".tar", ".mp4", ".avi",
        ".mov", ".wav", ".mp3",
    )
)  # fmt: skip
"""Suffixes of files that lie beside samples, and are none."""


def is_beside(name: str) -> bool:
    """Return True for a file that is no sample that cannot be read, such as ``about.txt``."""
    return name[name.rfind(".") :].lower() in _BESIDE


_HOLDERS = IMAGES | {
    "photo", "photos", "picture", "pictures", "jpg", "jpeg", "png", "data", "dataset",
}  # fmt: skip
"""Names of folders that hold images of any class, as by `plain_word`."""

Bare = Mapping[str, bool]
"""Folders without a readable image -> True if they may be classes."""


def bare_folders(others: Mapping[str, bool], outer: str) -> Bare:
    """Return the folders in a folder that have files that are no images, here or below.

    Parameters
    ----------
    others
        Folders with such files -> whether some do not just lie beside samples.
    """
    prefix = f"{outer}/" if outer else ""
    bare: dict[str, bool] = {}
    for inside, may_be_class in others.items():
        if f"{inside}/".startswith(prefix):
            name = inside[len(prefix) :].partition("/")[0]
            bare[name] = bare.get(name, False) or may_be_class
    return {name: may for name, may in bare.items() if name}


def read_folders(
    names: Texts,
    rules: LabelRules,
    where: object,
    path_of: Callable[[str], str] | None = None,
    bare_in: Callable[[str], Bare] | None = None,
) -> FolderReading:
    """Find the folders of names that are classes.

    Parameters
    ----------
    path_of
        Converts a folder to a source that the user may name; None if none can be named.
    bare_in
        Returns the folders without a readable image that lie in a folder; None if unknown.
    """
    paths = [folder.split("/") if folder else [] for folder in Folders(names).counts]
    if rules.level is not None:
        return _of_level(rules.level, paths, where)
    shared = common_start(paths)
    is_one = bool(shared) and paths == [shared]
    one = next((level for level, name in enumerate(shared, 1) if not _is_holder(name)), 1)
    levels = [*range(1, len(shared) + 1), one] if is_one else [len(shared) + 1]
    for level in levels:  # beside one folder alone, another may be a class on each
        folders = _Level(names, paths, level, where, path_of, bare_in)
        if folders.missing:
            break
    doubt = _doubt_of(folders)
    level = 1 if folders.mixed else 0 if folders.holders else folders.level
    bare = (*folders.missing,)
    if doubt is not None:
        return FolderReading(level, doubts=(doubt,), bare=bare)
    return FolderReading(level, _notes_of(folders), bare=bare)


def _of_level(level: int, paths: Sequence[list[str]], where: object) -> FolderReading:
    """Return the reading that the user chose; a doubt if no image has a folder there."""
    depth = max(map(len, paths), default=0)
    if level <= depth:
        return FolderReading(level)
    text = f"no image of {where} has a folder of level {level}, and none would have a label"
    return FolderReading(level, doubts=(Doubt.of(text, *_levels_of(paths, range(depth, 0, -1))),))


def _levels_of(paths: Sequence[list[str]], levels: Iterable[int]) -> list[Way]:
    """Return the flags that take the folders of some levels as classes, or none."""
    ways: list[Way] = [
        (("--label-level", str(level)), f"for the classes {quoted(_tops(paths, level))}")
        for level in levels
    ]
    return [*ways, (("--label-level", "0"), "for no label")]


def _tops(paths: Iterable[Sequence[str]], level: int) -> list[str]:
    return sorted({path[level - 1] for path in paths if len(path) >= level})


@dataclass(frozen=True)
class _Level:
    """The folders of a level of names, which may be classes.

    Attributes
    ----------
    listed, paths
        The names, of which some may be there twice, and their folders.
    where, path_of, bare_in
        As of `read_folders`.
    """

    listed: Texts
    paths: Sequence[list[str]]
    level: int
    where: object
    path_of: Callable[[str], str] | None
    bare_in: Callable[[str], Bare] | None

    @cached_property
    def names(self) -> Texts:
        """The names, each once: members of several archives may have the same."""
        return Texts(self.listed.plain.unique())

    @cached_property
    def shared(self) -> list[str]:
        """The folders that hold all names, above the level."""
        return common_start(self.paths)[: self.level - 1]

    @property
    def inside(self) -> str:
        return "".join(f"{part}/" for part in self.shared)

    @property
    def here(self) -> str:
        return f"{self.where}: {printable(self.inside)}" if self.shared else str(self.where)

    @cached_property
    def tops(self) -> list[str]:
        """Names of the folders, sorted."""
        return _tops(self.paths, self.level)

    @cached_property
    def next_level(self) -> int:
        """The next level with folders of several names, of which some is no name of a part of a
        data set; 0 for none."""
        lower = range(self.level + 1, max(map(len, self.paths), default=0) + 1)
        return next((n for n in lower if _are_classes(_tops(self.paths, n))), 0)

    @cached_property
    def bare(self) -> Bare:
        """Folders without a readable image."""
        if self.bare_in is None or all(plain_word(top) in IMAGES for top in self.tops):
            return {}
        return self.bare_in("/".join(self.shared))

    @property
    def missing(self) -> list[str]:
        """Those that may be classes."""
        return sorted({name for name, may in self.bare.items() if may} - {*self.tops})

    @property
    def mixed(self) -> list[str]:
        """The folders, if images lie beside them in the folder that holds all."""
        return self.tops if self.shared and self.shared in self.paths else []

    @property
    def holders(self) -> list[str]:
        """The folders, one in the other, of all images, if each is called as those of any class."""
        [shared] = self.paths if len(self.paths) == 1 else [[]]
        return shared if all(map(_is_holder, shared)) else []

    @cached_property
    def plain(self) -> dict[str, str]:
        """Folder -> its plain name: of those that are not beside their opposite, as mask and
        no_mask, which are classes."""
        plain = {top: plain_word(top) for top in self.tops}
        return {top: name for top, name in plain.items() if not _has_opposite(name, plain.values())}

    @cached_property
    def splits(self) -> list[str]:
        return sorted(splits_among(self.plain)) if len(self.tops) > 1 else []

    @property
    def clear_splits(self) -> list[str]:
        """Splits, unless one alone is called as a train is, and has no folders."""
        [*splits] = self.splits
        at = self.level - 1
        has_folders = any(path[at : at + 1] == splits and path[at + 1 :] for path in self.paths)
        is_train = len(splits) == 1 and not has_folders and "tr" in splits[0].lower()
        return [] if is_train else splits

    @property
    def images(self) -> list[str]:
        return [top for top, name in self.plain.items() if name in IMAGES]

    @property
    def named(self) -> list[str]:
        """Folders of images, and of their targets, by their names."""
        targets = [top for top, name in self.plain.items() if name in TARGETS]
        return [*self.images, *targets] if len(self.tops) > 1 else []

    @property
    def parts(self) -> list[str]:
        """Folders of parts of samples, by their names, or by those of their files.

        Classes may have files of the same names, too, if these are many, or images are just counted
        in each.
        """
        names, are_counted = self.alike
        are_parts = all(plain_word(top) in PARTS for top in self.tops)
        by_files = are_parts or (len(self.tops) <= MOST_PARTS and not are_counted)
        return self.named or (self.tops if names and by_files else [])

    @cached_property
    def alike(self) -> tuple[list[str], bool]:
        """Names of the files, if all folders have the same; and whether these are just counted, and
        not told apart by an ending."""
        if not 1 < len(self.tops) <= MOST_COLUMNS:
            return [], False
        folders = [lone_folder(self.names, self.inside + top) for top in self.tops]
        columns = [Files.at(self.names, folder).stems for folder in folders]
        found = match(columns)
        if not 1 < len(found) == max(map(len, columns)) or len(self.names) > sum(map(len, columns)):
            return [], False
        names = sorted(stem.removesuffix(found.ends[0]) for stem in columns[0])
        return names, all(found.ends) == any(found.ends) and _are_counted(names)

    @property
    def repeated(self) -> list[str]:
        """Names of folders that recur below several of these, if most do."""
        for level in (self.level + 1, self.next_level):
            below = [path for path in self.paths if 0 < level <= len(path)]
            pairs = {(path[self.level - 1], path[level - 1]) for path in below}
            common = Counter(name for _, name in pairs)
            repeated = [name for name, count in sorted(common.items()) if count > 1]
            if len(repeated) > 1 and 2 * len(repeated) >= len(common):
                return repeated
        return []

    @property
    def doubled(self) -> list[str]:
        """The folder that has folders called as most of those beside it, and is not called as those
        of masks or thumbnails are, which other rules know."""
        inside = defaultdict[str, set[str]](set)
        for top, *below in (path[self.level - 1 : self.level + 1] for path in self.paths if path):
            inside[top].update(below)
        own = [top for top in self.tops if plain_word(top) not in PARTS | COPIES]
        beside = {*self.tops}
        return [top for top in own if 1 < len(inside[top] & beside) >= len(beside) // 2]

    @property
    def some(self) -> str:
        return quoted(self.tops)

    @property
    def why_parts(self) -> str:
        return "" if self.named else f": their files have the same names ({quoted(self.alike[0])})"

    @property
    def levels(self) -> str:
        """The flags that take other folders, or none."""
        flags = ["0 for no label"]
        if self.shared:
            flags.append(f"1 for the one class {printable(self.shared[0])!r}")
        if self.next_level:
            number = self.next_level
            example = "/".join(min(path[:number] for path in self.paths if len(path) >= number))
            flags.append(f"{number} for the folders in them, such as {printable(example)}")
        return ", ".join(flags)


def _is_holder(name: str) -> bool:
    return is_split(name) or plain_word(name) in _HOLDERS


def _has_opposite(name: str, names: Collection[str]) -> bool:
    return any(f"{no}{name}" in names for no in ("in", "un", "no", "non", "not", "without"))


def _are_classes(names: Collection[str]) -> bool:
    """Return True if some of several names are not those of parts of a data set."""
    parts = {name for name in names if plain_word(name) in IMAGES | TARGETS} | splits_among(names)
    return 1 < len(names) > len(parts)


def _are_counted(stems: Sequence[str]) -> bool:
    """Return True for names that are numbered in each folder, from 0 or 1 without gaps."""
    numbers = defaultdict[str, list[int]](list)
    for stem in stems:
        folder, _, base = stem.rpartition("/")
        numbers[folder].append(int(re.sub(r"\D", "", base)[-18:] or -1))
    counted = all(min(of) in (0, 1) and max(of) - min(of) == len(of) - 1 for of in numbers.values())
    return counted and len({re.sub(r"\d(?=[^/]*$)", "", stem) for stem in stems}) == len(numbers)


# --- ways out of a doubt ------------------------------------------------------------------------


def _ways_of_splits(of: _Level) -> list[Way]:
    """Return the ways where some folders are splits: a source that is trained on, and levels."""
    trained = [*filter(is_trained_on, of.splits)]
    others = [name for name in of.tops if name not in of.splits]
    bare = [t for t in of.splits if re.fullmatch("unlabell?ed|unsup(ervised)?", of.plain[t])]
    if bare == of.splits and len(others) > 1:
        alone = ("--label-level", str(of.level), *no_label(bare))
        return [(alone, "for the others as classes, and no label of its samples"), *_levels(of)]
    name = (trained or (others if len(others) == 1 else of.splits))[0]
    levels = _all_levels(of) if _has_columns(of) else _levels(of)
    return [*_as_source(of, name), *levels] or [_BY_DATASET]


def _ways_of_parts(of: _Level) -> list[Way]:
    """Return the ways where some folders have parts of samples, as images and their targets."""
    if _has_columns(of):  # which these are
        return _levels_of(of.paths, [*filter(None, [of.next_level])])
    others = [name for name in of.tops if name not in of.named]
    first = (of.images or others or of.tops)[0]
    both = of.tops if of.alike[0] else of.named if 0 < len(of.images) < len(of.named) else []
    one = _as_source(of, first) if of.named else []
    return [*one, *_columns(of, both), *_levels(of)] or [_BY_DATASET]


def _ways_of_missing(of: _Level) -> list[Way]:
    """Return the ways where a folder without a readable image may be a class."""
    place = of.path_of(of.inside[:-1]) if of.path_of is not None else "://"
    keep: Way = (
        ((), f"{LISTED}, if it is") if "://" in place else (("--classes", place), "if it is")
    )
    return [keep, (("--label-level", str(of.level)), "if not")]


_BY_DATASET: Way = (), "a torch Dataset as the source, which returns both as parts of one sample"


def _as_source(of: _Level, name: str) -> list[Way]:
    if of.path_of is None:
        return [((), f"unpack it, and give 'FOLDER/{of.inside}{name}' as the source")]
    return [((of.path_of(of.inside + name),), "as the source")]


def _has_columns(of: _Level) -> bool:
    """Return True for a source of patterns for columns that lie in the same folders."""
    places = [] if of.path_of is None else expand_braces(of.path_of(of.inside))
    return len(places) > 1 == len({split_pattern(place)[0] for place in places})


def _levels(of: _Level) -> list[Way]:
    """Return the flags that take folders as classes, or none: masks are not stored as photos."""
    plain = {plain_word(part) for path in of.paths for part in path}
    masks = any(name in TARGETS and not _has_opposite(name, plain) for name in plain)
    if masks and plain & IMAGES:
        return []
    return _all_levels(of)


def _all_levels(of: _Level) -> list[Way]:
    return _levels_of(of.paths, [*filter(None, [of.next_level]), of.level])


def _columns(of: _Level, names: Sequence[str]) -> list[Way]:
    """Return the source whose samples have a column of each folder, if their files pair up."""
    each = "for samples with a column of each folder"
    both = sorted(names, key=lambda n: (of.plain.get(n) in TARGETS, of.plain.get(n) not in IMAGES))
    if not both:
        return []
    if (path_of := of.path_of) is None:
        unpack = f"unpack it, and give 'FOLDER/{braced_paths([of.inside + name for name in both])}'"
        return [((), f"{unpack} as the source, {each}"), _BY_DATASET]
    sources = sources_of(of.names, [of.inside + name for name in both])
    return [((path_of(source),), each) for source in sources]


def _inner_columns(of: _Level) -> list[Way]:
    """Return the source whose samples have a column of each folder within classes."""
    parts = sorted(of.repeated, key=lambda name: plain_word(name) not in IMAGES)
    if of.path_of is None or len(parts) != 2:
        return []
    source = [of.path_of(of.inside + braced([f"**/{name}/*" for name in parts]))]
    if _has_columns(of):
        source = []
    each = f"for samples with a column of each, and the classes {of.some}"
    return [((*source, "--label-level", str(of.level)), each)]


# --- the reading --------------------------------------------------------------------------------


def _doubt_of(of: _Level) -> Doubt | None:
    """Return the first doubt that folders show; None if they have one reading."""
    if of.mixed:
        text = f"{of.here} has images beside its folders ({quoted(of.mixed)})"
        these = ("--label-level", str(of.level)), "if these are the classes"
        whole = ("--label-level", "1"), f"if {printable(of.shared[0])!r} is the one class of all"
        return Doubt.of(text, these, whole)
    if splits := of.clear_splits:
        text = f"{of.here}: folders look like splits, not like classes: {quoted(splits)}"
        return Doubt.of(text, *_ways_of_splits(of))
    if parts := of.parts:
        text = f"{of.here}: {quoted(parts)} look like parts of one data set, not like classes"
        return Doubt.of(f"{text}{of.why_parts}", *_ways_of_parts(of))
    if doubled := of.doubled:
        text = f"folders in {quoted(doubled, 1)} are called as those beside it ({of.some})"
        ways = [*_as_source(of, doubled[0]), *_levels(of)]
        return Doubt.of(f"{of.here}: {text}", *(ways or [_BY_DATASET]))
    if repeated := of.repeated:
        text = f"folders of the same names ({quoted(repeated)}) are in several of {of.some}"
        ways = _levels(of) or [*_inner_columns(of), _BY_DATASET]
        return Doubt.of(f"{of.here}: {text}", *ways)
    if missing := of.missing:
        text = (
            f"{of.here}: no image can be read in {quoted(missing)}, and the numbers of the other "
            f"classes ({of.some}) depend on whether that is a class"
        )
        return Doubt.of(text, *_ways_of_missing(of), by_classes=True)
    return None


def _notes_of(of: _Level) -> tuple[str, ...]:
    """Return the lines about folders that are classes, or none."""
    notes = []
    if bare := sorted(of.bare.keys() - {*of.tops}):
        notes.append(
            f"Folders without an image are no classes: {quoted(bare)}; if one is, {LISTED}"
        )
    if holders := of.holders:
        one = "(--label-level 1 for one class)"
        notes.append(f"{of.where}: no {BY_FOLDERS}: {quoted(holders)} {one}")
    elif tops := sorted(of.tops, key=lambda name: (not is_split(name), name)):
        notes.append(f"{of.here}: each {BY_FOLDERS}: {quoted(tops)} (--label-level {of.levels})")
    return (*notes,)


def labels_of_folders(
    names: Texts,
    keys: Texts,
    where: object,
    rules: LabelRules,
    path_of: Callable[[str], str] | None = None,
    bare_in: Callable[[str], Bare] | None = None,
) -> tuple[Column, tuple[str, ...]]:
    """Read the folders of names as labels; also returns those beside them that may be classes.

    Parameters
    ----------
    path_of, bare_in
        As of `read_folders`.
    """
    reading = read_folders(names, rules, where, path_of, bare_in)
    folders = Folders(names)
    given = column_of([folder_at(name, reading.level) or None for name in folders.names])
    given = given.take(arrow_of(folders.codes))
    column = read_column(Column(given, keys, str(where), rules, folders=True))
    notes = (*reading.notes, *notes_of_folders(folders.names), *column.notes)
    doubts = (*reading.doubts, *column.doubts)
    return replace(column, notes=notes, doubts=doubts), reading.bare
