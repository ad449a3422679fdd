"""Files that pair up by name: photos, and their masks, other targets, or copies.

`match` joins the files of several columns: those of one name are one sample. `partners` finds
columns among the images of a source: ``17_mask.png`` is called as ``17.jpg`` but for its ending,
``17.png`` but for its suffix, and ``masks/a/17.png`` as ``images/a/17.jpg`` but for its folder.
Names are compared by columns, so that a million of them take about a second.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from precache.messages import printable
from precache.store.columns import Texts, joined_texts, numbers_of, without_nulls
from precache_workers.sources.base import IMAGE_NAME, IMAGE_SUFFIXES, Doubt, Folders, Way, is_image
from precache_workers.sources.container_names import (
    braced,
    braced_paths,
    common_end,
    common_start,
)
from precache_workers.sources.splits import is_split

# --- words --------------------------------------------------------------------------------------

IMAGES = frozenset(("image", "images", "img", "imgs", "jpegimages", "rgb", "leftimgbit"))
TARGETS = frozenset(
    (
        "mask", "masks", "annotation", "annotations", "label", "labels", "gt", "groundtruth",
        "segmentation", "segmentations", "segmentationclass", "segmentationobject", "seg",
        "trimaps", "segmentationclassaug", "gtfine", "matte", "mattes", "bboxes", "boxes",
    )
)  # fmt: skip
"""Names of folders with the images and the targets of one data set, as by `plain_word`."""

COPIES = frozenset(
    (
        "thumbs", "thumbnail", "thumbnails", "preview", "previews", "resized", "cropped", "augs",
        "augmented", "augmentation", "augmentations", "aug", "copies", "backup", "backups", "bak",
    )
)  # fmt: skip
"""Words in the names of folders with copies of the images beside them."""

PARTS = IMAGES | TARGETS | {
    "input", "inputs", "output", "outputs", "target", "targets", "source", "src", "reference",
    "ref", "hr", "lr", "hq", "lq", "sr", "noisy", "noise", "clean", "blur", "blurred", "blurry",
    "sharp", "haze", "hazy", "left", "right", "depth", "depths", "disparity", "disp", "flow",
    "normals", "visible", "vis", "infrared", "ir", "nir", "thermal", "optical", "sar", "raw",
    "edges", "before", "after", "alpha",
}  # fmt: skip
"""Names of folders with several images of each sample."""

_OF_TARGETS = TARGETS | {
    "alpha", "depth", "disparity", "thumb", "thumbnail", "trimap", "target", "targets", "instance",
    "instances", "edge", "edges", "contour", "contours", "labelid", "labelids", "instanceid",
    "instanceids",
}  # fmt: skip
_OF_COPIES = COPIES | {"small", "resize", "lowres", "edited", "copy"}
"""Words in the endings of targets and small copies, and of copies."""

_SIZE = r"[0-9]{2,4}x[0-9]{2,4}"
_AGAIN = r"@[0-9]x| ?\([12]\)"  # higher numbers are those of downloads of one name
_WORD = rf"(?:[_. -]+(?:[A-Za-z][A-Za-z0-9]*(?:[_. -]?[0-9]+)?|{_SIZE})|{_AGAIN})$"
"""A word at the end of a name, with the number behind it: ``_mask``, ``_mask_1``, or ``@2x``."""

_OF_COPY = re.compile(rf"(?:{_AGAIN}|{_SIZE})$")
_OF_PHOTO = r"(?i)[_. -](?:image|img|photo|rgb|sat|input|leftimg8bit)$"
"""Endings of photos beside those of their targets."""

_KNOWN_END = rf"{_OF_PHOTO}|[_. -](?:{'|'.join(sorted(_OF_TARGETS))})[0-9]*$"

_PHOTO_START = r"(?i)^(?:image|img|photo|rgb|sat|input)[_. -]+"
_KNOWN_START = rf"(?i:copy of |(?:{'|'.join(sorted(_OF_TARGETS | _OF_COPIES))})[_. -]+)"
"""Beginnings of names of photos, and of their targets and copies."""

_SUFFIX = rf"(?i)\.(?:{'|'.join(suffix[1:] for suffix in sorted(IMAGE_SUFFIXES))})$"
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")

MOST_WORDS = 3
"""Words of an ending, at most: ``_gtFine_labelIds`` has two."""


def plain_word(name: str) -> str:
    """Return a word, or the name of a folder, in lower case without digits and marks."""
    return re.sub(r"[\W\d_]", "", name.lower())


def _words(text: str) -> set[str]:
    return {*map(plain_word, re.split(r"[\W_]+", text))}


def is_target(ending: str) -> bool:
    """Return True for the ending of a name that masks and other targets have."""
    return not _words(ending).isdisjoint(_OF_TARGETS)


def _is_copy(ending: str) -> bool:
    return bool(_OF_COPY.search(ending)) or not _words(ending).isdisjoint(_OF_COPIES)


def ending(names: Texts) -> str:
    """Return what all names end in, from a separator or from a letter that follows digits.

    As ``_mask`` of ``17_mask``, and ``x4`` of ``0001x4``; never a part of a number or a word.
    """
    if not len(names):
        return ""
    ends = pc.min_max(pc.utf8_reverse(names.plain)).as_py().values()
    common = common_end([end[::-1] for end in ends]).rpartition("/")[2]
    before = "0" if names.matching(f"[0-9]{re.escape(common)}$").all() else "a"
    found = re.search(r"[\W_].*|(?<=\d)[^\W\d_].*", before + common)
    return found[0] if found else ""


# --- columns ------------------------------------------------------------------------------------

MAGIC = re.compile(r"[*?]")
ALL = "**/*.*"
"""The pattern of all files of a folder."""


class Files(NamedTuple):
    """The files of a column: those in a folder that fit a pattern.

    Files are images. Where none fits, they are texts and arrays; of a pattern with another suffix,
    what fits it.

    Attributes
    ----------
    names, stems
        Of each file below the folder, and what stars stand for in it, which is compared.
    rows
        Rows of the files among the names: (files,) int64.
    """

    names: Texts
    stems: Texts
    rows: np.ndarray

    @classmethod
    def at(cls, names: Texts, place: str) -> Files:
        """Return the files of a folder, or of a pattern, among names."""
        (folder, pattern), rows = split_pattern(place), np.arange(len(names))
        if folder:
            inside = f"^{re.escape(folder)}/"
            rows = np.flatnonzero(names.matching(inside))
            names = _replaced(names.take(rows), inside)
        regex = expression(pattern)
        fits = names.matching(regex)
        pictures = fits & names.matching(IMAGE_NAME, ignore_case=True)
        if not names_suffix(pattern) and pictures.any():  # others are of another column
            fits = pictures
        names = names.take(fits)
        groups = "/".join(f"\\{number + 1}" for number in range(re.compile(regex).groups))
        return cls(names, _replaced(names, regex, groups), rows[fits])


def split_pattern(place: str) -> tuple[str, str]:
    """Split a place at the first part that has a star or question mark; a folder has none."""
    parts = place.split("/")
    first = next((n for n, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:]) or ALL


def names_suffix(pattern: str) -> bool:
    """Return True for a pattern of files with one suffix, which is not that of an image."""
    suffix = pattern.rpartition("/")[2].rpartition(".")[2]
    is_open = not suffix or MAGIC.search(suffix) is not None
    return "." in pattern and not is_open and not is_image(f"x.{suffix}")


def expression(pattern: str) -> str:
    """Return the expression of RE2 of a pattern: a group for each star, none for a last ``.*``."""
    text = pattern.removesuffix(".*")
    parts = re.split(r"(\*\*/\*|\*\*/|\*|\?)", text)
    groups = {"**/*": "(.*)", "**/": "(?:(.+)/)?", "*": "([^/]*)", "?": "([^/])"}
    inside = "".join(groups.get(part) or re.escape(part) for part in parts)
    return f"(?s)^{inside}$" if text == pattern else rf"(?s)^{inside}\.[^./]*$"


class Match(NamedTuple):
    """The samples of several columns: names that each of them has once.

    Attributes
    ----------
    rows
        Of each column those of the samples, in the order of the first one: (samples,) int64.
    ends
        What is left out at the end of the names of each column.
    least
        Files of the smallest column.
    """

    rows: Sequence[np.ndarray]
    ends: Sequence[str]
    least: int

    def __len__(self) -> int:
        return len(self.rows[0])

    @property
    def fits(self) -> bool:
        """True if most files of the smallest column have partners in all."""
        return 0 < 2 * len(self) >= self.least


def match(columns: Sequence[Texts]) -> Match:
    """Join columns of names, and if more are alike then, without what all of a column end in."""
    least, best, ends = min(map(len, columns)), _alike(columns), [""] * len(columns)
    if len(best[0]) == least:
        return Match(best, ends, least)
    first, *others = map(ending, columns)
    for way in (["", *others], [first, *ends[1:]], [first, *others]):
        if any(way):
            pairs = zip(columns, way, strict=True)
            rows = _alike([_replaced(of, f"{re.escape(end)}$") if end else of for of, end in pairs])
            if len(rows[0]) > len(best[0]):
                best, ends = rows, way
    return Match(best, ends, least)


def _alike(columns: Sequence[Texts]) -> list[np.ndarray]:
    """Return the rows in each column of the texts that each has once, in the order of the first."""
    once = [np.flatnonzero(of.counts() == 1) for of in columns]
    rows = [once[0]]
    for of, single in zip(columns[1:], once[1:], strict=True):
        found = of.take(single).find(columns[0].take(rows[0]))
        rows = [*(some[found >= 0] for some in rows), single[found[found >= 0]]]
    return rows


def sources_of(names: Texts, places: Sequence[str]) -> list[str]:
    """Return the source, in braces, of folders or patterns whose files pair up.

    Of two folders whose files pair up by several endings, it has a pattern for each. None if they
    do not.
    """
    columns = [Files.at(names, place).stems for place in places]
    if match(columns).fits:
        return [braced_paths(places)]
    if any(map(MAGIC.search, places)):
        return []
    lone = [lone_folder(names, place) for place in places]
    if match([Files.at(names, place).stems for place in lone]).fits:
        return [braced_paths(lone)]
    if len(places) != 2:
        return []
    (photos, masks), (first, others) = places, columns
    end = re.sub(r"^(?:[_. -]+\d+)+(?=[_. -])", "", ending(first))  # a number belongs to the name
    is_photo = np.arange(len(first) + len(others)) < len(first)
    called = Texts.joined([first, others])
    endings = _called_as(called, is_photo, ~is_photo, f"{re.escape(end)}$")[1]
    return [
        braced([f"{photos}/**/*{end}.*", f"{masks}/**/*{other}.*"])
        for other, _ in _most_common(endings)[:MOST_WAYS]
        if other
    ]


def lone_folder(names: Texts, folder: str) -> str:
    """Return the folder in a folder that holds all its files."""
    inside = names.take(names.matching(f"^{re.escape(folder)}/"))
    return "/".join(common_start([path.split("/") for path in Folders(inside).counts]))


# --- partners -----------------------------------------------------------------------------------

PART, NEARLY_ALL = 4, 3 / 4
"""Images are pairs if one photo in so many has a partner with the ending of a target or another
suffix, or if nearly all photos have one of any other ending."""

FEW, MOST_WAYS = 2, 3


@dataclass(frozen=True)
class Partners:
    """Images that are called as others, their photos.

    Attributes
    ----------
    count, photos
        Number of such images, and of all others.
    example
        Name of one.
    pairs
        Patterns of the files of photos and of the others, the most common first.
    unlike
        What differs in their names: beginning, ending or folder.
    may_be_masks
        Their ending, or suffix, may be one of masks.
    are_pairs
        So many photos have a partner that these are no samples of their own.
    sources
        Sources of two patterns that have most samples.
    """

    count: int
    photos: int
    example: str
    pairs: Sequence[tuple[str, str]]
    unlike: str
    may_be_masks: bool
    are_pairs: bool
    sources: Sequence[str]

    def reading(self, where: object, folder: str | None) -> tuple[list[str], list[Doubt]]:
        """Return the line about them, or the doubt.

        Parameters
        ----------
        folder
            Path of the folder of the names; None if there is none.
        """
        others = ", ".join(dict.fromkeys(other for _, other in self.pairs))
        text = (
            f"{self.count:,} of {self.count + self.photos:,} images of {where} are called as "
            f"others ({self.pairs[0][0]}) but for their {self.unlike} ({others}), such as "
            f"{printable(self.example)}"
        )
        inside = "FOLDER" if folder is None else folder
        sources = [
            source if source.startswith("/") or "://" in source else f"{inside}/{source}"
            for source in self.sources
        ]
        both = "for samples with a column of each"
        if not self.are_pairs:
            way = ", ".join(f"'{source}'" for source in sources[:1])
            as_columns = f"; if they are masks or copies, {way} as the source takes both as columns"
            return [f"{text}, and are samples" + f"{as_columns} of one" * bool(way)], []
        ways: list[Way] = [((source,), both) for source in sources]
        if not sources:
            ways = [((), "move one kind of these images elsewhere")]
        elif folder is None:
            ways = [((), f"the files in a folder, and '{sources[0]}' as the source, {both}")]
        when = "if each image is a sample"
        # A command that takes masks for pictures would be refused for its pixels.
        whole = ("--sample-name", "whole")
        ways.append(((), f"{' '.join(whole)} {when}") if self.may_be_masks else (whole, when))
        return [], [Doubt.of(f"{text}, as masks and copies are", *ways, of_members=True)]


def _without_suffix(names: Texts) -> Texts:
    after, (starts, ends) = names.after_last("."), (names.data[1][:-1], names.data[1][1:])
    suffixes = names.cut(after, ends).plain.dictionary_encode()
    are_known = Texts(suffixes.dictionary).between(".").matching(_SUFFIX)
    is_known = are_known[numbers_of(suffixes.indices)] & (after > starts)
    return names.cut(starts, np.where(is_known, after - 1, ends))


def partners_among(names: Texts) -> Partners | None:
    """Find the images that are called as others in the same folder; None if there are none."""
    called = names.mapped(_without_suffix)
    if (twice := called.is_repeated).any():
        suffixes = _found(names, _SUFFIX)
        among = [suffix for suffix, _ in _most_common(suffixes.take(twice))]
        photo = next((suffix for suffix in among if suffix.lower() in _JPEG), among[0])
        is_photo = suffixes.matching(f"^{re.escape(photo)}$")
        row_of = np.where(is_photo, -1, called.blanked(~is_photo).find(called))
        others = _most_common(suffixes.take(row_of >= 0))
        return _partners(names, row_of, [(f"*{photo}", f"*{of}") for of, _ in others], masks=True)
    row_of, endings = _called_as(called, every := np.ones(len(names), np.bool_), every)
    ends = endings.plain.unique().to_pylist()
    if known := [end for end in ends if is_target(end) or _is_copy(end)]:
        is_known = Texts(known).find(endings) >= 0
        row_of[np.flatnonzero(row_of >= 0)[~is_known]] = -1
        endings = endings.take(is_known)
    elif (partners := _partners_by_start(names, called)) is not None:
        return partners
    ranked = _most_common(endings)
    top = ranked[0][1] if ranked else 0
    if known or top >= max(PART, len(names) // 20):
        [(of_photos, _), *_] = _most_common(_found(called.take(row_of[row_of >= 0]), _OF_PHOTO))
        pairs = [(f"*{of_photos}.*", f"*{end}.*") for end, count in ranked if PART * count >= top]
        masks = any(map(is_target, known))
        return _partners(names, row_of, pairs, masks=masks, top=None if known else top)
    # Nearly all names may have the same few endings, as 1_left and 1_right.
    ends = [end for end, _ in _most_common(_found(called, _WORD))]
    if "" in ends or not 1 < len(ends) < PART:
        return None
    if (_replaced(called, _WORD).counts() == len(ends)).mean() < NEARLY_ALL:
        return None
    row_of = np.where(called.matching(f"{re.escape(ends[0])}$"), -1, np.arange(len(names)))
    return _partners(
        names, row_of, [(f"*{ends[0]}.*", f"*{end}.*") for end in ends[1:]], masks=False, top=0
    )


def _partners_by_start(names: Texts, called: Texts) -> Partners | None:
    """Find the images that are called as others but for the beginning of a target or copy."""
    if not called.matching(rf"(?:^|/){_KNOWN_START}").any():
        return None
    folders, bases = _found(called, "^(?:.*/)?"), _replaced(called, "^.*/")
    starts = _found(bases, rf"^{_KNOWN_START}")
    others = ~starts.is_blank

    def without(start: str) -> Texts:
        return joined_texts([folders, _replaced(bases, start)])

    known = rf"^{_KNOWN_START}"
    numbered = rf"{known}[0-9]+[_. -]+"
    for start, photo_start in itertools.product((known, numbered), ("^$", _PHOTO_START)):
        rest, photos = without(start), without(photo_start).blanked(others)
        row_of = np.where(others & ~rest.is_blank, photos.find(rest), -1)
        if len(rows := np.flatnonzero(row_of >= 0)):
            break
    else:
        return None
    [(of_photos, _), *_] = _most_common(_found(bases.take(row_of[rows]), photo_start))
    ranked = [start for start, _ in _most_common(starts.take(rows))]
    pairs = [(f"{of_photos}*.*", f"{start}*.*") for start in ranked]
    masks = any(map(is_target, ranked))
    return _partners(names, row_of, pairs, masks=masks, unlike="beginning")


def partners_across(names: Texts) -> Partners | None:
    """Find masks, other targets and copies that are called as images in a folder beside theirs.

    As ``masks/1.png`` and ``masks/a/1.png`` are as ``images/a/1.jpg``, ``cat_aug/1.jpg`` is as
    ``cat/1.jpg``, and ``ground_truth/bad/1_mask.png`` as ``test/bad/1.png``; None if there are
    none.
    """
    folders = Folders(names)
    shared = len(common_start([name.split("/")[:-1] for name in folders.names]))

    def have(words: Set[str]) -> np.ndarray:
        return folders.where(lambda n: _without(n, words, shared) != _without(n, (), shared))

    others = have(TARGETS | COPIES)
    if not others.any() or others.all():
        return None
    words = IMAGES | TARGETS | COPIES
    kept = [_without(name, words, shared) for name in folders.names]
    places, bases = Texts(kept).take(folders.codes), _replaced(_replaced(names, _SUFFIX), "^.*/")
    called = joined_texts([places, bases], "/")
    row_of, _ = _called_as(called, ~others, others, _KNOWN_END)
    alone = others & (row_of < 0) & places.is_blank  # all lie in one folder
    row_of = np.where(alone, _called_as(bases, ~others, alone, _KNOWN_END)[0], row_of)
    if (beside := others & (row_of < 0)).any():  # of splits, as ground_truth/ beside test/
        kept = ["/".join(p for p in place.split("/") if not is_split(p)) for place in kept]
        called = joined_texts([Texts(kept).take(folders.codes), bases], "/")
        row_of = np.where(beside, _called_as(called, ~others, beside, _KNOWN_END)[0], row_of)
    rows = np.flatnonzero(row_of >= 0)
    of_rows = Texts([name[:-2] for name in folders.names]).take(folders.codes)
    ranked = Counter(zip(of_rows.take(row_of[rows]), of_rows.take(rows), strict=True))
    pairs = [*dict.fromkeys(_apart(*pair) for pair, _ in ranked.most_common(MOST_WAYS))]
    masks = bool(have(TARGETS)[rows].any())
    return _partners(names, row_of, pairs, masks=masks, photos=~others)


def _partners(
    names: Texts,
    row_of: np.ndarray,
    pairs: Sequence[tuple[str, str]],
    *,
    masks: bool,
    top: int | None = None,
    photos: np.ndarray | None = None,
    unlike: str = "ending",
) -> Partners | None:
    """Return the images that have a photo; None if there are none.

    Parameters
    ----------
    row_of
        Row of the photo of each image, -1 for none.
    pairs, masks
        As `pairs` and `may_be_masks` of `Partners`.
    top
        Images of the most common ending, if that is no known one.
    photos
        Which images may be photos, if these are in other folders.
    unlike
        As of `Partners`.
    """
    rows = np.flatnonzero(row_of >= 0)
    if not len(rows):
        return None
    count, places = len(rows), [[*pair] for pair in pairs[:MOST_WAYS]]
    others = len(names) - count if photos is None else int(photos.sum())
    if photos is not None:
        unlike = "folder"
        # A source of two folders has not all samples where others have some, too.
        in_pair = sum(len(Files.at(names, place).rows) for place in places[0])
        places = places if len(places) == 1 and in_pair == len(names) else []
    elif names.matching("/").any():
        places = [[f"**/{place}" for place in pair] for pair in places]
    sources = [source for pair in places for source in sources_of(names, pair)]
    are_pairs = count >= FEW and PART * count >= others
    if top is not None:
        are_pairs = top >= NEARLY_ALL * max(others, count)
    example = names[int(rows[0])]
    return Partners(count, others, example, pairs[:MOST_WAYS], unlike, masks, are_pairs, sources)


def _called_as(
    called: Texts, is_photo: np.ndarray, others: np.ndarray, photo_end: str = _OF_PHOTO
) -> tuple[np.ndarray, Texts]:
    """Find the names that are as those of photos, or are but for an ending of a few words.

    Returns the row of the photo of each name, (len,) int64, -1 for none; and the endings of those
    that have one.

    Parameters
    ----------
    is_photo, others
        Which names may be those of photos, and which may have one: (len,) bool.
    photo_end
        Expression of what is left out at the ends of names of photos.
    """

    photos, row_of = _replaced(called, photo_end).blanked(~is_photo), np.full(len(called), -1)
    apart = np.flatnonzero(others & ~is_photo)
    row_of[apart] = photos.find(called.take(apart))
    places = [np.flatnonzero(row_of >= 0)]
    parts = [Texts([""]).take(np.zeros_like(places[0]))]
    rows = np.flatnonzero(others & (row_of < 0) & called.matching(_WORD))
    cut, ends = called.take(rows), Texts([""]).take(np.zeros_like(rows))
    for _ in range(MOST_WORDS):
        if not len(rows):
            break
        ends = joined_texts([_found(cut, _WORD), ends])
        cut = _replaced(cut, _WORD)
        found = photos.find(cut)
        has = (found >= 0) & (found != rows) & ~cut.is_blank
        row_of[rows[has]] = found[has]
        places.append(rows[has])
        parts.append(ends.take(has))
        more = ~has & cut.matching(_WORD)
        rows, cut, ends = rows[more], cut.take(more), ends.take(more)
    return row_of, Texts.joined(parts).take(np.argsort(np.concatenate(places)))


def _without(name: str, words: Collection[str], shared: int) -> str:
    """Return the folders of a name below those that all share, without words in their names."""
    kept = []
    for folder in name.split("/")[shared:-1]:
        parts = [part for part in re.split(r"[\W_]+", folder) if plain_word(part) not in words]
        kept.append("_".join(parts) if plain_word(folder) not in words else "")
    return "/".join(filter(None, kept))


def _apart(photos: str, others: str) -> tuple[str, str]:
    """Return two folders without what both end in; patterns of their files if one is the other's
    outer one."""
    paths = [photos.split("/"), others.split("/")] if photos else [[], others.split("/")]
    end = len(common_start([path[::-1] for path in paths]))
    one, other = ("/".join(path[: len(path) - end]) for path in paths)
    if f"{other}/".startswith(f"{one}/") or not one:
        return f"{one}/*.*".lstrip("/"), f"{other}/*.*"
    return one, other


def _most_common(values: Texts) -> list[tuple[str, int]]:
    """Return the most common values with their number, at most a few."""
    counted = pc.value_counts(values.plain)
    counts = numbers_of(counted.field("counts"))
    top = np.argsort(-counts, kind="stable")[:16]
    return [(str(counted.field("values")[int(row)]), int(counts[row])) for row in top]


def _replaced(names: Texts, pattern: str, by: str = "") -> Texts:
    fitting = names.matching(pattern)  # which takes a tenth of the time, and mostly none fits
    return Texts(pc.replace_substring_regex(names.plain, pattern, by)) if fitting.any() else names


def _found(names: Texts, pattern: str) -> Texts:
    """Return the part of each name that fits a pattern; empty if there is none."""
    if not names.matching(pattern).any():
        return Texts.repeated([""], [len(names)])
    found = pc.extract_regex(names.plain, f"(?P<part>{pattern})").field("part")
    return without_nulls(found)
