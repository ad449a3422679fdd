"""Readings of the names of images that pair up.

``17.jpg`` and ``17_mask.png``, or ``17.jpg`` and ``17.png``, are a photo and its mask, or copies.
Names are compared by columns, so that a million of them take about a second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np

from precache.messages import printable
from precache.store.columns import Texts, numbers_of, without_nulls
from precache_workers.sources.base import IMAGE_SUFFIXES, Doubt, Folders
from precache_workers.sources.container_names import (
    braced,
    braced_paths,
    common_end,
    common_start,
)
from precache_workers.sources.evidence import Way

_SUFFIX = rf"(?i)\.(?:{'|'.join(suffix[1:] for suffix in sorted(IMAGE_SUFFIXES))})$"
_SIZE = r"[0-9]{2,4}x[0-9]{2,4}"
_WORD = rf"(?:[_. -]+(?:[A-Za-z][A-Za-z0-9]*(?:[_. -]?[0-9]+)?|{_SIZE})|@[0-9]x| \(1\))"
"""A word at the end of a name, with the number behind it: ``_mask``, ``_mask_1``, or ``@2x``."""

_TARGET = (
    r"(?i)[_. -](?:masks?|seg|segmentations?|gt|gtfine|groundtruth|labels?|labelids|annotations?"
    r"|mattes?|alpha|depth|disparity|thumb|thumbnail|trimaps?|targets?|instances?|instanceids"
    r"|edges?|contours?)(?:[_. -]|\d|$)"
)
"""Endings of masks, of other targets, and of small copies."""

_COPY = rf"(?i)(?:@[0-9]x| \(1\)|[_. -](?:small|preview|resized?|lowres|edited|copy|{_SIZE}))$"
"""Endings of copies, of another size or as systems name them."""

_PHOTO = r"(?i)[_. -](?:image|img|photo|rgb|sat|input|leftimg8bit)$"
"""Endings of photos beside those of their targets."""

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")

IMAGES = frozenset(("image", "images", "img", "imgs", "jpegimages", "rgb", "leftimgbit"))
TARGETS = frozenset(
    (
        "mask", "masks", "annotation", "annotations", "label", "labels", "gt", "groundtruth",
        "segmentation", "segmentations", "segmentationclass", "segmentationobject", "seg",
        "trimaps", "segmentationclassaug", "gtfine", "matte", "mattes", "bboxes", "boxes",
    )
)  # fmt: skip
"""Names of folders with the images and the targets of one data set, as by `plain_folder`."""

_APART = TARGETS | {
    "thumbs", "thumbnail", "thumbnails", "preview", "previews", "resized", "cropped", "augs",
    "augmented", "augmentation", "augmentations", "aug", "copies", "backup", "backups", "bak",
}  # fmt: skip
"""Names of folders, or words of these, with targets or copies of the images beside them."""

_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")

MOST_WORDS = 3
"""Words of an ending, at most: ``_gtFine_labelIds`` has two."""

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
        Key of one.
    pairs
        Patterns of the files of photos and of the others, the most common first.
    unlike
        What differs in their names.
    may_be_masks
        Their ending, or suffix, may be one of masks.
    are_pairs
        So many photos have a partner that these are no samples of their own.
    fit
        A source of two patterns has all samples, and most of their files are called alike.
    """

    count: int
    photos: int
    example: str
    pairs: Sequence[tuple[str, str]]
    unlike: str
    may_be_masks: bool
    are_pairs: bool
    fit: bool = True

    def reading(self, where: object, folder: str | None) -> tuple[list[str], list[Doubt]]:
        """Return the line about them, or the doubt.

        Parameters
        ----------
        folder
            Path or pattern of the folders of the files; None if they lie in none.
        """
        others = ", ".join(dict.fromkeys(other for _, other in self.pairs))
        text = (
            f"{self.count:,} of {self.count + self.photos:,} images of {where} are called as "
            f"others ({self.pairs[0][0]}) but for their {self.unlike} ({others}), such as "
            f"{printable(self.example)}"
        )
        inside = folder or f"FOLDER{'/**' * (self.unlike == 'ending')}"
        sources = [_source(inside, pair) for pair in self.pairs]
        both = "for samples with a column of each"
        if not self.are_pairs:
            way = f"'{sources[0]}' as the source takes both as columns of one"
            return [f"{text}, and are samples; if they are masks or copies, {way}"], []
        ways: list[Way] = [((source,), both) for source in sources]
        if folder is None:
            ways = [((), f"the files in a folder, and '{sources[0]}' as the source, {both}")]
        if not self.fit:
            ways = [((), "move one kind of these images elsewhere")]
        when = "if each image is a sample"
        # A command that takes masks for pictures would be refused for its pixels.
        whole = ("--sample-name", "whole")
        ways.append(((), f"{' '.join(whole)} {when}") if self.may_be_masks else (whole, when))
        return [], [Doubt.of(f"{text}, as masks and copies are", *ways, of_members=True)]


def _source(inside: str, pair: Sequence[str]) -> str:
    """Return the source of files of two patterns, or folders, which may be absolute or URLs."""
    names = braced_paths(pair)
    return names if names.startswith("/") or "://" in names else f"{inside}/{names}"


def _are_pairs(others: int, photos: int) -> bool:
    return others >= FEW and PART * others >= photos


def partners_among(keys: Texts) -> Partners | None:
    """Find the images that are called as others in the same folder; None if there are none."""
    stems = _replaced(keys, _SUFFIX)
    if stems.counts().max(initial=0) > 1:
        return _of_other_suffixes(keys, stems)
    row_of, endings = _called_as(stems, _replaced(stems, _PHOTO), same=True)
    rows, of_targets = np.flatnonzero(row_of >= 0), endings.matching(_TARGET)
    known = of_targets | endings.matching(_COPY)
    photos = len(keys) - len(rows)
    if known.any():
        rows, endings = rows[known], endings.take(known)
    ranked = _most_common(endings)
    top = ranked[0][1] if ranked else 0
    if not known.any() and top < max(PART, len(keys) // 20):
        return _of_equal_endings(keys, stems)
    [(of_photos, _), *_] = _most_common(_found(stems.take(row_of[rows]), _PHOTO))
    others = [f"*{ending}.*" for ending, count in ranked if PART * count >= top]
    pairs = [(f"*{of_photos}.*", other) for other in others[:MOST_WAYS]]
    are_pairs = top >= max(PART, NEARLY_ALL * photos, NEARLY_ALL * len(rows))
    are_pairs = _are_pairs(len(rows), photos) if known.any() else are_pairs
    example, photos = keys[int(rows[0])], len(keys) - len(rows)
    may_be_masks = bool(of_targets.any())
    return Partners(len(rows), photos, example, pairs, "ending", may_be_masks, are_pairs)


def _of_other_suffixes(keys: Texts, stems: Texts) -> Partners:
    """Return the images that are called as others but for the suffix, such as 1.jpg and 1.png."""
    suffixes = _found(keys, _SUFFIX)
    [*ranked] = dict(_most_common(suffixes.take(stems.counts() > 1)))
    photo = next((suffix for suffix in ranked if suffix.lower() in _JPEG), ranked[0])
    is_photo = suffixes.matching(f"^{re.escape(photo)}$")
    others = np.flatnonzero(~is_photo)
    rows = others[stems.take(is_photo).find(stems.take(others)) >= 0]
    total, paired = Counter(suffixes), Counter(suffixes.take(rows))
    fitting = [s for s, n in paired.most_common() if 2 * n >= min(total[s], total[photo])]
    pairs = [(f"*{photo}", f"*{suffix}") for suffix in (fitting or [*paired])[:MOST_WAYS]]
    example, photos, fit = keys[int(rows[0])], len(keys) - len(rows), bool(fitting)
    are_pairs = _are_pairs(len(rows), photos)
    return Partners(len(rows), photos, example, pairs, "ending", True, are_pairs, fit)


def _of_equal_endings(keys: Texts, stems: Texts) -> Partners | None:
    """Return the images of names that nearly all have the same few endings, as 1_left and 1_right.

    None if they have not.
    """
    ranked = _most_common(_found(stems, f"{_WORD}$"))
    endings = [ending for ending, _ in ranked]
    counts = _replaced(stems, f"{_WORD}$").counts()
    if "" in endings or not 1 < len(endings) < PART or (counts == len(endings)).mean() < NEARLY_ALL:
        return None
    pairs = [(f"*{endings[0]}.*", f"*{other}.*") for other in endings[1:]]
    photos = ranked[0][1]
    return Partners(len(keys) - photos, photos, keys[0], pairs, "ending", False, False)


def partners_across(keys: Texts) -> Partners | None:
    """Find masks, other targets and copies that are called as images in a folder beside theirs.

    As ``masks/1.png`` and ``masks/a/1.png`` are as ``images/a/1.jpg``, and ``cat_aug/1.jpg`` is as
    ``cat/1.jpg``; None if there are none.
    """
    folders = Folders(keys)
    shared = len(common_start([name.split("/")[:-1] for name in folders.names]))

    def have(words: Set[str]) -> np.ndarray:
        none = frozenset[str]()
        return folders.where(lambda n: _without(n, words, shared) != _without(n, none, shared))

    of_targets = have(_APART)
    if not of_targets.any() or of_targets.all():
        return None
    plain = Texts(folders.each(lambda some: [_without(n, IMAGES | _APART, shared) for n in some]))
    bases = Texts([name.rpartition("/")[2] for name in _replaced(keys, _SUFFIX)])
    bases = _replaced(bases, f"(?:{_TARGET}.*|{_PHOTO})")
    called = Texts([*map("/".join, zip(plain, bases, strict=True))])
    photos, others = np.flatnonzero(~of_targets), np.flatnonzero(of_targets)
    found = called.take(photos).find(called.take(others))
    of_any = bases.take(photos).find(bases.take(others))  # where all lie in one folder
    found = np.where((found < 0) & plain.is_blank[others], of_any, found)
    may_be_masks = have(TARGETS)[others]
    ended = _called_as(called.take(others), called.take(photos), same=False)[0]  # as 1_flip
    ended = np.where((found < 0) & ~may_be_masks, ended, -1)
    found = np.maximum(found, ended)
    has_photo = found >= 0
    photos, others = photos[found[has_photo]], others[has_photo]
    if not len(others):
        return None
    ranked = Counter(
        (keys[one].rpartition("/")[0], keys[other].rpartition("/")[0])
        for one, other in zip(photos.tolist(), others.tolist(), strict=True)
    )
    pairs = [*dict.fromkeys(_apart(*pair) for pair, _ in ranked.most_common(MOST_WAYS))]
    starts = tuple(place.removesuffix("/*.*").removesuffix("*.*") for place in pairs[0])
    fit = all(name.startswith(starts) for name in folders.names) and not (ended >= 0).any()
    fit &= len(pairs) == 1  # else no one of them has all samples
    count, of_photos, example = len(others), int((~of_targets).sum()), keys[int(others[0])]
    masks, are_pairs = bool(may_be_masks[has_photo].any()), _are_pairs(count, of_photos)
    return Partners(count, of_photos, example, pairs, "folder", masks, are_pairs, fit)


def _without(name: str, words: Set[str], shared: int) -> str:
    """Return the folders of a name below those that all share, without words in their names."""
    kept = []
    for folder in name.split("/")[shared:-1]:
        parts = [p for p in re.split(r"[\W_]+", folder) if plain_folder(p) not in words]
        kept.append("_".join(parts) if plain_folder(folder) not in words else "")
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


def is_target(ending: str) -> bool:
    """Return True for the ending of a name that masks and other targets have."""
    return re.search(_TARGET, ending) is not None


def plain_folder(name: str) -> str:
    """Return the name of a folder in lower case without digits and marks, to be compared."""
    return re.sub(r"[\W\d_]", "", name.lower())


def by_number(name: str) -> list[Any]:
    """Sort key by which numbers in names count: frame-2 is before frame-10, and 0.25 before 0.5."""
    if _NUMBER.fullmatch(name):
        return ["", Decimal(name)]
    parts = re.split("([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def numbers_out_of_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first two neighbours that are in the order of text, and not of their numbers;
    none if there are none."""
    pairs = pairwise(names)
    return next(((a, b) for a, b in pairs if a < b and by_number(a) > by_number(b)), ())


def ways_by_patterns(
    folders: Sequence[str], stems: Sequence[Sequence[str]], source_of: Callable[[str], str]
) -> list[Way]:
    """Return the sources of two folders whose files pair up but for several endings.

    Parameters
    ----------
    stems
        Names of the files of each folder below it, without suffixes.
    source_of
        Returns the source of the files that braces name.
    """
    if len(folders) != 2:
        return []
    (photos, masks), (first, others) = folders, map(Texts, stems)
    end = ending(name.rpartition("/")[2] for name in first)
    end = re.sub(r"^(?:[_. -]+\d+)+(?=[_. -])", "", end)  # a number belongs to the name
    endings = _called_as(others, _replaced(first, f"{re.escape(end)}$"), same=False)[1]
    return [
        (
            (source_of(braced([f"{photos}/**/*{end}.*", f"{masks}/**/*{other}.*"])),),
            f"for samples with a column of each folder, of the files that end in {other!r}",
        )
        for other, _ in _most_common(endings)[:MOST_WAYS]
    ]


def ending(names: Iterable[str]) -> str:
    """Return what all names end in, from a separator or from a letter that follows digits.

    As ``_mask`` of ``17_mask``, and ``x4`` of ``0001x4``; never a part of a number or a word.
    """
    listed = [*names]
    common = common_end(listed)
    outside = [name[-len(common) - 1 :][:1] for name in listed if len(name) > len(common)]
    before = "0" if len(outside) == len(listed) and all(map(str.isdigit, outside)) else "a"
    found = re.search(r"[\W_].*|(?<=\d)[^\W\d_].*", before + common)
    return found[0] if found else ""


def _called_as(stems: Texts, others: Texts, *, same: bool) -> tuple[np.ndarray, Texts]:
    """Find the names that are as other ones but for an ending of a few words.

    Returns the row of that other one for each name, (len,) int64, -1 for none; and the endings of
    those that have one.

    Parameters
    ----------
    same
        The others are the names themselves, of which each is another one.
    """
    row_of = np.full(len(stems), -1)
    words = np.zeros(len(stems), np.int64)
    rows = np.flatnonzero(stems.matching(f"{_WORD}$"))
    cut = stems.take(rows)
    for count in range(1, MOST_WORDS + 1):
        if not len(rows):
            break
        cut = _replaced(cut, f"{_WORD}$")
        found = others.find(cut)
        found = np.where(same & (found == rows), -1, found)
        row_of[rows[found >= 0]], words[rows[found >= 0]] = found[found >= 0], count
        rows, cut = rows[found < 0], cut.take(found < 0)
    parts, places = [Texts([])], [np.empty(0, np.int64)]
    for count in range(1, int(words.max(initial=0)) + 1):
        of_count = np.flatnonzero(words == count)
        parts.append(_found(stems.take(of_count), f"(?:{_WORD}){{{count}}}$"))
        places.append(of_count)
    return row_of, Texts.joined(parts).take(np.argsort(np.concatenate(places)))


def _most_common(values: Texts) -> list[tuple[str, int]]:
    """Return the most common values with their number, at most a few."""
    import pyarrow.compute as pc

    counted = pc.value_counts(values.plain)
    counts = numbers_of(counted.field("counts"))
    top = np.argsort(-counts, kind="stable")[:16]
    return [(str(counted.field("values")[int(row)]), int(counts[row])) for row in top]


def _replaced(names: Texts, pattern: str) -> Texts:
    import pyarrow.compute as pc

    return Texts(pc.replace_substring_regex(names.plain, pattern, ""))


def _found(names: Texts, pattern: str) -> Texts:
    """Return the part of each name that fits a pattern; empty if there is none."""
    import pyarrow.compute as pc

    found = pc.extract_regex(names.plain, f"(?P<part>{pattern})").field("part")
    return without_nulls(found)
