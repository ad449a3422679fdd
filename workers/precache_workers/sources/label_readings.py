"""Folders that are classes, and names of classes that look alike.

Names of folders can often be read in two ways that give other classes. A reading that was guessed
is a line for the user. Where two readings differ, the listing has a `Doubt`, which a build refuses.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from precache.messages import printable
from precache.store.columns import Texts
from precache_workers.sources.base import (
    NO_RULES,
    Doubt,
    Folders,
    LabelRules,
    first_folder,
    folder_at,
)
from precache_workers.sources.container_names import around_braces, braced, common_end
from precache_workers.sources.evidence import no_label, quoted
from precache_workers.sources.name_readings import (
    IMAGES,
    NEARLY_ALL,
    TARGETS,
    ending,
    partners_across,
    partners_among,
    plain_folder,
    ways_by_patterns,
)
from precache_workers.sources.splits import differing_in, is_split, splits_among

INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}")

_PAIRED = IMAGES | TARGETS | {
    "input", "inputs", "output", "outputs", "target", "targets", "source", "src", "reference",
    "ref", "hr", "lr", "hq", "lq", "sr", "noisy", "noise", "clean", "blur", "blurred", "blurry",
    "sharp", "haze", "hazy", "left", "right", "depth", "depths", "disparity", "disp", "flow",
    "normals", "visible", "vis", "infrared", "ir", "nir", "thermal", "optical", "sar", "raw",
    "edges", "before", "after", "alpha",
}  # fmt: skip
"""Names of folders with several images of each sample, without digits and marks."""

MOST_PARTS = 4
"""Most folders with files of the same names that are taken for parts of samples, whatever they are
called: classes such as persons may have such files, too."""

_COPIES = (
    r"aug(?:s|mented|mentations?)?|thumbs|thumbnails?|previews?|resized|copies|backups?|bak|"
    r"\d{2,4}(?:x\d{2,4}|px)"
)
_COPIED = (
    rf"{_COPIES}|resize|small|lowres|crop(?:s|ped)?|flip(?:s|ped)?|rotated?|copy|old|"
    r"orig(?:inals?)?"
)
"""Names of folders with copies of all images; words beside the name of the class of the copies."""

_OPPOSITES = ("in", "un", "no", "non", "not", "without")


LISTED = "list the names of all classes in a text file, one a line, and give it by --classes"
"""The way out by which the user says which classes there are."""


def holds_images(name: str) -> bool:
    """Return True for a usual name of the folder of photos beside one of masks."""
    return plain_folder(name) in IMAGES


# --- folders ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderReading:
    """The folders that are the classes: their level, 1 for the first of a path, 0 for none."""

    level: int
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    bare: tuple[str, ...] = ()
    """Folders beside the classes that have no readable image, and may be classes."""


_PART = re.compile(r"[0-9]{4,}|(?:.*[\W_])?[^\W\d_]{2,}[ _.-]?[0-9]+")
"""Names of folders that files are spread over, as by img2dataset, or called ``part_1``."""

_HASHED = re.compile("[0-9a-f]{1,4}")
"""Names of folders by the first digits of hashes."""

_SHOTS = re.compile(
    r"[1-9]\d{2}[A-Z_][A-Z0-9_]{4}|(?:19|20)\d{2}(?:[-_. ]?(?:0[1-9]|1[0-2])(?:[-_. ]?[0-3]\d)?)?"
    r"(?:[^\d].*)?|[0-3]?\d[-_.][01]?\d[-_.](?:19|20)\d{2}"
)
"""Names of folders as cameras (100CANON) and programs that sort by date (2024-05-01) give them."""

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
    unpack: tuple[tuple[str, ...], ...] = (),
) -> FolderReading:
    """Find the folders of names that are classes.

    Parameters
    ----------
    path_of
        Converts a folder to a source that the user may name; None if none can be named.
    bare_in
        Returns the folders without a readable image that lie in a folder; None if unknown.
    unpack
        Words of the commands by which the folders of `path_of` come to be, of an archive.
    """
    counts = Folders(names).counts
    paths = [folder.split("/") if folder else [] for folder in counts]
    if rules.level is not None:
        return _of_level(rules.level, paths, where)
    shared = _shared(paths)
    level = len(shared) + 1
    here = _place(where, shared)
    is_one = bool(shared) and shared in paths
    if is_one and len(paths) > 1:
        text = f"{here} has images beside its folders ({quoted(_tops(paths, level))})"
        these = ("--label-level", str(level)), "if these are the classes"
        one = ("--label-level", "1"), f"if {printable(shared[0])!r} is the one class of all"
        return FolderReading(1, doubts=(Doubt.of(text, these, one),))
    for level in range(1, level) if is_one else [level]:  # noqa: B020 - the last one is meant
        outer, here = "/".join(shared[: level - 1]), _place(where, shared[: level - 1])
        tops = _Tops(paths, level)
        inner = tops.inner
        may_lack = bare_in is not None and not all(map(holds_images, inner))
        bare = bare_in(outer) if bare_in is not None and may_lack else {}
        if missing := sorted(name for name, may_be in bare.items() if may_be and name not in inner):
            break
    if is_one and not missing:
        text = (
            f"All samples are of the one class {printable(shared[0])!r}, their only folder "
            "(--label-level 0 for no label)"
        )
        return FolderReading(1, (text,))
    pairs = _Pairs.of(names, level, counts) if len(inner) > 1 else None
    if found := _doubt(tops, pairs, names, outer, here, path_of):
        found = replace(found, unpack=unpack)
        return FolderReading(level, doubts=(found,), bare=(*missing,))
    if missing:
        place = path_of(outer) if path_of is not None and not unpack else "://"
        keep: tuple[Sequence[str], str] = ("--classes", place), "if it is"
        if "://" in place:
            keep = (), f"{LISTED}, if it is"
        text = (
            f"{here}: no image can be read in {quoted(missing)}, and the numbers of the other "
            f"classes ({quoted(sorted(inner))}) depend on whether that is a class"
        )
        alone = ("--label-level", str(level)), "if not"
        doubt = Doubt.of(text, keep, alone, by_classes=True)
        return FolderReading(level, doubts=(doubt,), bare=(*missing,))
    notes = []
    if others := sorted(bare.keys() - inner):
        notes.append(
            f"Folders without an image are no classes: {quoted(others)}; if one is, {LISTED}"
        )
    if shared:
        notes.append(
            f"Classes are the {len(inner):,} folders of {printable(outer)}/, which holds all "
            f"images ({quoted(sorted(inner))}); --label-level 1 takes {printable(shared[0])!r} "
            "as the one class"
        )
    elif tops.next_level:
        some = "/".join(min(path[: tops.next_level] for path in tops.deep))
        notes.append(
            f"Classes are the {len(inner):,} first folders ({quoted(sorted(inner))}), which have "
            f"folders in them, such as {printable(some)}; --label-level {tops.next_level} takes "
            "these"
        )
    if pairs is not None:
        notes.append(
            f"Classes have files of the same names ({quoted(pairs.stems)}); if these are parts of "
            "one sample each, --label-level 0 gives no label"
        )
    words = {name.rstrip("0123456789") or len(name) for name in inner}
    numbered = len(words) == 1 and all(map(_PART.fullmatch, inner))
    parts = sorted(differing_in(inner, _PAIRED))
    hashed = len({*map(len, inner)}) == 1 and all(map(_HASHED.fullmatch, inner))
    hashed &= not (all(map(str.isdecimal, inner)) or all(map(str.isalpha, inner)))
    if len(inner) > 1 and (numbered or hashed or all(map(_SHOTS.fullmatch, inner))):
        parts = sorted(inner)
    if parts:
        notes.append(
            f"Classes are also {quoted(parts)}; if these are parts of one data set, as their names "
            "suggest, --label-level 0 gives no label"
        )
    if splits := sorted(filter(is_split, inner)):
        notes.append(
            f"{quoted(splits)} is a class beside {len(inner) - 1:,} others; if it is a split, name "
            "the folder that is to be read, or move it elsewhere"
        )
    return FolderReading(level, tuple(notes))


def _place(where: object, folders: Sequence[str]) -> str:
    return f"{where}: {printable('/'.join(folders))}/" if folders else str(where)


def _of_level(level: int, paths: Sequence[list[str]], where: object) -> FolderReading:
    """Return the reading that the user chose; a doubt if no image has a folder there."""
    depth = max(map(len, paths), default=0)
    if level <= depth:
        return FolderReading(level)
    text = f"no image of {where} has a folder of level {level}, and none would have a label"
    ways = [
        (("--label-level", str(number)), f"for the classes {quoted(_tops(paths, number))}")
        for number in range(depth, 0, -1)
    ]
    none: tuple[Sequence[str], str] = ("--label-level", "0"), "for no label"
    return FolderReading(level, doubts=(Doubt.of(text, *ways, none),))


def _tops(paths: Iterable[Sequence[str]], level: int) -> list[str]:
    return sorted({path[level - 1] for path in paths if len(path) >= level})


def _shared(paths: Sequence[list[str]]) -> list[str]:
    """Return the folders in which all others lie."""
    first, last = (min(paths), max(paths)) if paths else ([], [])
    count = 0
    while count < min(len(first), len(last)) and first[count] == last[count]:
        count += 1
    return list(first[:count])


class _Tops:
    """The folders of a level, which may be classes, and the next level whose folders may be.

    Attributes
    ----------
    inner
        Folder of the level -> the folders of the next level that are below it.
    next_level
        The next level with folders of several names, of which some is no name of a part of a data
        set; 0 for none, or if images and their targets lie in folders of one name there.
    deep
        The paths that have the next level.
    nested
        Folders of the level with folders in them -> these.
    """

    def __init__(self, paths: Sequence[list[str]], level: int) -> None:
        self.level = level
        self.nested: dict[str, set[str]] = defaultdict(set)
        for path in paths:
            if len(path) > level:
                self.nested[path[level - 1]].add(path[level])
        self.deep = [path for path in paths if len(path) > level]
        number = level + 1
        while self.deep and not _are_classes({path[number - 1] for path in self.deep}):
            self.deep = [path for path in self.deep if len(path) > number]
            number += 1
        mixed = any(
            plain_folder(name) in TARGETS for p in self.deep for name in p[level - 1 : number - 1]
        )
        self.next_level = number if self.deep and not mixed else 0
        self.inner: dict[str, set[str]] = {p[level - 1]: set() for p in paths if len(p) >= level}
        for path in self.deep if self.next_level else ():
            self.inner[path[level - 1]].add(path[number - 1])


def _are_classes(names: Collection[str]) -> bool:
    """Return True if some of several names are not those of parts of a data set."""
    parts = {name for name in names if plain_folder(name) in IMAGES | TARGETS} | splits_among(names)
    return 1 < len(names) > len(parts)


class _Pairs(NamedTuple):
    """Folders that all have files of the same names: some of these, and whether they are numbers.

    Numbers begin with 0 or 1, and have no gap: images of each class are often counted so. Beside
    ``17.jpg`` in one folder, ``17_mask.png`` in all others is no such number.
    """

    stems: list[str]
    numbered: bool

    @classmethod
    def of(cls, names: Texts, level: int, counts: Mapping[str, int]) -> _Pairs | None:
        """Compare the files of the folders of a level; None if they have other names, or one.

        What all names of a folder end in is left out if they differ with it, as in ``17_mask.png``.
        """
        totals: Counter[str] = Counter()
        for folder, count in counts.items():
            totals[folder_at(f"{folder}/", level)] += count
        if "" in totals or len({*totals.values()}) > 1 or min(totals.values()) < 2:
            return None
        two = sorted(totals)[:2]
        if len(totals) > len(two):  # most often these two tell already
            some = names.take(Folders(names).where(lambda name: folder_at(name, level) in two))
            if cls.of(some, level, Folders(some).counts) is None:
                return None
        stems: dict[str, list[str]] = defaultdict(list)
        for name in names:
            top = folder_at(name, level)
            stems[top].append(name.split("/", level)[-1].rpartition(".")[0])
        for top, of in stems.items():  # all files may lie in one folder of it
            start = len("".join(f"{part}/" for part in _shared([s.split("/")[:-1] for s in of])))
            stems[top] = [stem[start:] for stem in of]
        is_mask = False
        if len({frozenset(some) for some in stems.values()}) > 1:
            ends = {top: ending(s.rpartition("/")[2] for s in of) for top, of in stems.items()}
            bare = {top: [s.removesuffix(ends[top]) for s in of] for top, of in stems.items()}
            if len({frozenset(some) for some in bare.values()}) > 1:
                return None
            stems, is_mask = bare, "" in ends.values()
        first = stems[min(stems)]
        numbers: dict[str, list[int]] = defaultdict(list)
        patterns = set()
        for stem in first:
            folder, _, base = stem.rpartition("/")
            patterns.add((folder, re.sub(r"\d", "", base)))
            numbers[folder].append(int(re.sub(r"\D", "", base)[-18:] or -1))
        counted = (
            min(some) in (0, 1) and max(some) - min(some) == len(some) - 1
            for some in numbers.values()
        )
        numbered = not is_mask and len(patterns) == len(numbers) and all(counted)
        return cls(sorted(first), numbered)


def _repeated(inner: Mapping[str, Collection[str]]) -> list[str]:
    """Return the names of folders that recur below others, if most do."""
    common = Counter(name for names in inner.values() for name in names)
    repeated = [name for name, count in sorted(common.items()) if count > 1]
    return repeated if len(repeated) > 1 and 2 * len(repeated) >= len(common) else []


def _copied(top: str, tops: Set[str], level: int, names: Texts) -> list[str]:
    """Return the folders whose images a folder has copies of, by its name and those of its files.

    As ``cat`` of ``cat_aug``, and all others of ``thumbnails``.
    """
    cut = re.sub(rf"(?i)^(?:(?:{_COPIED})[_. -])+|(?:[_. -](?:{_COPIED}))+$", "", top)
    of = (tops if re.fullmatch(f"(?i){_COPIES}", top) else tops & {cut}) - {top}
    if not of:
        return []
    files = [(folder_at(name, level), name.rpartition("/")[2].rpartition(".")[0]) for name in names]
    known = {stem for folder, stem in files if folder in of}
    stems = [stem for folder, stem in files if folder == top]
    found = [
        not known.isdisjoint({stem, re.sub(r"(?:[_. -]+\w+){1,2}?$", "", stem)}) for stem in stems
    ]
    # Images of a class are often counted: 1 in "truck" and 1 in "small truck" are two.
    are_counted = len({re.sub(r"\d+", "", stem) for stem in stems}) == 1
    is_weak = not re.search(rf"(?i)(?:^|[_. -])(?:{_COPIES})(?:[_. -]|$)", top)
    if (are_counted and is_weak) or sum(found) < NEARLY_ALL * len(found):
        return []
    return sorted(of)


def _doubt(
    folders: _Tops,
    pairs: _Pairs | None,
    names: Texts,
    outer: str,
    here: str,
    path_of: Callable[[str], str] | None,
) -> Doubt | None:
    """Return the doubt about folders that may be no classes; None if they are."""
    inner, level = folders.inner, folders.level
    tops = sorted(inner)
    plain = {top: plain_folder(top) for top in tops}
    all_plain = set(plain.values())
    # Beside its opposite a name is a class: valid and invalid, mask and no_mask.
    single = [t for t in tops if all_plain.isdisjoint(f"{no}{plain[t]}" for no in _OPPOSITES)]
    splits = sorted(splits_among(single))
    images = [top for top in single if plain[top] in IMAGES]
    targets = [top for top in single if plain[top] in TARGETS]
    repeated = _repeated(folders.nested) or _repeated(inner)
    lone_train = len(splits) == 1 and splits[0] not in folders.nested and "tr" in splits[0].lower()
    all_tops = {*tops}
    copies = {top: of for top in tops if (of := _copied(top, all_tops, level, names))}
    is_part = all(name in _PAIRED for name in all_plain)
    if splits and len(tops) > 1 and not lone_train:
        look = "looks like a split, not like a class"
        look = look if len(splits) == 1 else "look like splits, not like classes"
        why = f"{quoted(splits)} {look}"
        trained = [name for name in splits if re.search("tr(ai)?n", name.lower())]
        others = [name for name in tops if name not in splits]
        sources = (trained or (others if len(others) == 1 else splits))[:1]
    elif len(tops) > 1 and (images or targets):
        why = f"{quoted(images + targets)} look like parts of one data set, not like classes"
        others = [name for name in tops if name not in targets]
        sources = (images or others or tops)[:1]
    elif pairs is not None and (is_part or (not pairs.numbered and len(tops) <= MOST_PARTS)):
        why = (
            f"{quoted(tops)} have files of the same names ({quoted(pairs.stems)}), as parts of "
            "samples have, not classes"
        )
        sources = tops[:MOST_PARTS]
    elif copies:
        of = sorted({name for names in copies.values() for name in names} - {*copies})
        why = f"{quoted(copies)} have images called as those of {quoted(of)}, as copies have"
        sources = []
    elif repeated:
        why = f"folders of the same names ({quoted(repeated)}) are in several of {quoted(tops)}"
        sources = []
    else:
        return None
    ways: list[tuple[Sequence[str], str]] = []
    bare = [top for top in splits if re.fullmatch("unlabell?ed|unsup(ervised)?", plain[top])]
    if bare and bare == splits and len(tops) > len(bare) + 1:
        sources = []
        others_alone = ("--label-level", str(level), *no_label(bare))
        ways.append((others_alone, "for the others as classes, and no label of its samples"))
    inside = f"{outer}/" if outer else ""
    settled = [way for name in sources for way in _settled(names, f"{inside}{name}")]
    if path_of is not None:
        ways += [((path_of(path), *flags), "as the source") for path, *flags in settled]
    below = sorted(set().union(*inner.values()))
    parts = {plain_folder(part) for folder in Folders(names).counts for part in folder.split("/")}
    masks = {t for t in parts & TARGETS if parts.isdisjoint(f"{no}{t}" for no in _OPPOSITES)}
    across = partners_across(names)
    are_pairs = across is not None and across.are_pairs
    whole = ("--sample-name", "whole") if are_pairs else ()
    if copies or not (are_pairs or (masks and parts & IMAGES)):  # masks are not stored as photos
        for number, some in ((folders.next_level, below), (level, tops)):
            if some:
                classes = f"for the classes {quoted(some)}"
                ways.append((("--label-level", str(number), *whole), classes))
        ways.append((("--label-level", "0", *whole), "for no label"))
    if copies and not splits:
        ways.append(((), f"move {quoted(copies)} elsewhere, or give the classes by --labels"))
    both: list[str] = []
    if not splits and ((images and targets) or (pairs and not repeated)):
        both = sorted(
            tops if pairs else images + targets, key=lambda n: (n in targets, n not in images)
        )
    if both and path_of is not None:
        split = settled[0][0].removeprefix(f"{inside}{sources[0]}") if settled else ""
        lone = [_lone(names, f"{inside}{name}")[len(inside) :] for name in both]
        for some, below_all in ((both, split), (both, ""), (lone, "")):
            if _pair_up(names, [f"{inside}{name}{below_all}/" for name in some]):
                place = path_of(f"{inside}{braced(some)}{below_all}")
                columns = "for samples with a column of each folder, matched by name"
                ways.append(((place,), columns))
                break
        else:
            folders_of_each = [f"{name}{split}" for name in both]
            stems = [_stems_below(names, f"{inside}{folder}/") for folder in folders_of_each]
            ways += ways_by_patterns(folders_of_each, stems, lambda pair: path_of(inside + pair))
    if (both and path_of is None) or not ways:
        if both:
            parts_of = braced([f"{inside}{name}" for name in both])
            columns = "for samples with a column of each folder"
            ways.append(((), f"unpack it, and give 'FOLDER/{parts_of}' as the source, {columns}"))
        ways.append(
            ((), "a torch Dataset as the source, which returns both as parts of one sample")
        )
    return Doubt.of(f"{here}: {why}", *ways)


def _lone(names: Texts, folder: str) -> str:
    """Return the folder in a folder that holds all its names: itself, or one below."""
    paths = [f"{path}/" for path in Folders(names).counts if f"{path}/".startswith(f"{folder}/")]
    return "/".join([folder, *_shared([path[len(folder) + 1 :].split("/")[:-1] for path in paths])])


def _pair_up(names: Texts, starts: Sequence[str]) -> bool:
    """Return True if most files of all folders have the same names, or but for what each ends in.

    As a source of all takes them.
    """
    stems = [_stems_below(names, start) for start in starts]
    ends = [common_end([stem.rpartition("/")[2] for stem in of]) for of in stems if of]
    if len(ends) < len(stems):
        return False
    cut = [{s.removesuffix(end) for s in of} for of, end in zip(stems, ends, strict=True)]
    alike = max(len(set.intersection(*of)) for of in ([*map(set, stems)], cut))
    return 0 < 2 * alike >= min(map(len, stems))


def _stems_below(names: Texts, start: str) -> list[str]:
    return [name[len(start) :].rpartition(".")[0] for name in names if name.startswith(start)]


def _settled(names: Texts, folder: str) -> list[list[str]]:
    """Return the arguments that read a folder without a doubt: itself, or what its doubt names."""
    begin = f"{folder}/"
    inside = [*dict.fromkeys(n.removeprefix(begin) for n in names if n.startswith(begin))]
    found = read_folders(Texts(inside), NO_RULES, folder, lambda name: f"{folder}/{name}")
    if not found.doubts:
        partners = partners_among(Texts(inside))
        doubts = partners.reading(folder, f"{folder}/**")[1] if partners is not None else []
        ways = [[*way] for doubt in doubts for way in doubt.ways[:1]]
        return ways if doubts else [[folder]]
    flags = [way for way in found.doubts[0].ways if way[0].startswith("--")]
    sources = [[*way] for way in found.doubts[0].ways if way not in flags]
    # Several folders are parts of one sample each, of which none stands for all.
    if sum(around_braces(way[0]) is None for way in sources) == 1:
        return sources
    paired = [way for way in sources if around_braces(way[0])]
    return paired[:1] or ([[folder, *flags[0]]] if flags else [])


def folder_labels(names: Iterable[str], level: int) -> list[str]:
    """Return the folder of each name that is its class; empty for none."""
    if level == 1:
        return list(map(first_folder, names))
    return [folder_at(name, level) for name in names]


# --- names of classes ---------------------------------------------------------------------------

_COPY = re.compile(r"(?: ?\(\d+\)|(?: -)? copy(?: \d+)?)+$", re.IGNORECASE)
"""Ends of the names that systems give to copies of a folder."""

_QUOTED = re.compile(r"""(['"`])(.+)\1""", re.DOTALL)

_BETWEEN = re.compile(r"(?:[\s_\u2010-\u2015\u2212-]|(?<=[^\W\d_])\.)+")
"""Spaces, lines and dashes, and the point of an abbreviation."""

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
    if INTEGER.fullmatch(name):
        return str(int(name))  # its sign counts
    if _DECIMAL.fullmatch(name):
        return repr(float(name))
    text = name
    if not name.isascii():
        text = unicodedata.normalize("NFKC", name)
        text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
        text = text.translate(_LATIN)
    text = " ".join(_BETWEEN.split(_COPY.sub("", text))).strip()
    text = _QUOTED.sub(r"\2", text).rstrip(",; ") or text
    return text.casefold() if len(text) > 1 else text


def doubts_of_classes(
    classes: Iterable[str], where: object, *, are_codes: bool = False
) -> list[Doubt]:
    """Return the doubt about names of classes that look alike.

    Parameters
    ----------
    are_codes
        Numbers are codes, in which each digit counts.
    """
    seen: dict[str, str] = {}
    for name in classes:
        number = INTEGER.fullmatch(name) is not None
        other = seen.setdefault(name if number and are_codes else spelling(name), name)
        if other != name:
            text = f"{where} has the classes {other!a} and {name!a}, which look alike"
            codes = ("--label-kind", "name"), "if they are codes, one class each"
            ways = [codes] if number else []
            return [Doubt.of(text, *ways, ((), "rename one"), ((), LISTED), by_classes=True)]
    return []


_NUMBERED = re.compile(r"(.*[^0-9])([0-9]{1,18})", re.DOTALL)
_NUMBER_FIRST = re.compile(r"([0-9]{1,18})[^0-9].*", re.DOTALL)


def numbers_in(names: Sequence[str]) -> list[int]:
    """Return the numbers that names are, begin with, or end in behind the same text; else zeros."""
    if all(map(INTEGER.fullmatch, names)):
        return [*map(int, names)]
    first = [match for match in map(_NUMBER_FIRST.fullmatch, names) if match]
    if len(first) == len(names):
        return [int(match[1]) for match in first]
    found = [match for match in map(_NUMBERED.fullmatch, names) if match]
    if len(found) < len(names) or len({match[1] for match in found}) > 1:
        return [0] * len(names)
    return [int(match[2]) for match in found]


def note_of_order(
    classes: Sequence[str], way: str = "--class-order number: as numbers"
) -> list[str]:
    """Return the line about classes whose names are numbers in the order of text."""
    pairs = zip(pairwise(numbers_in(classes)), pairwise(classes), strict=True)
    pair = next((pair for (one, two), pair in pairs if one > two), None)
    if pair is None:
        return []
    why = f"{pair[0]!r} comes before {pair[1]!r}"
    return [f"Names of classes are sorted as text: {why} ({way})"]
