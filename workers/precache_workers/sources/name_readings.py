"""Readings of the names of images: those that pair up by name, and words that may be classes.

``17.jpg`` and ``17_mask.png``, or ``17.jpg`` and ``17.png``, are a photo and its mask, or copies.
Names are compared by columns, so that a million of them take about a second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from precache.messages import printable
from precache.store.columns import Texts, numbers_of, without_nulls
from precache_workers.sources.base import IMAGE_SUFFIXES, Doubt, Folders
from precache_workers.sources.container_names import braced, common_end, common_start

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

_COPY = rf"(?i)(?:@[0-9]x|[_. -](?:small|preview|resized?|lowres|edited|{_SIZE}))$"
"""Endings of copies of another size."""

_AGAIN = r"(?i)(?: \(1\)|[ _-]copy)$"
"""Endings that systems give to a second file of a name, which may be a copy."""

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
    "thumbs", "thumbnail", "thumbnails", "preview", "previews", "resized", "cropped",
    "augmented", "aug", "copies", "backup", "backups",
}  # fmt: skip
"""Names of folders, or words of these, with targets or copies of the images beside them."""

MOST_WORDS = 3
"""Words of an ending, at most: ``_gtFine_labelIds`` has two."""

PART, NEARLY_ALL = 4, 3 / 4
"""Images are pairs if one photo in so many has a partner with the ending of a target or another
suffix, or if nearly all photos have one of any other ending."""

FEW, MOST_WAYS = 2, 3

_SYNSET = re.compile(r"n\d{8}")

_FIRST_WORDS = r"(?P<part>[A-Za-z](?:[A-Za-z _.-]*[A-Za-z])?)[ _.-]*[0-9][^/]*$"
_CAMERAS = frozenset(
    (
        "img", "image", "images", "dsc", "dscn", "dscf", "pict", "photo", "pic", "picture", "frame",
        "dji", "gopr", "pxl", "scan", "screenshot", "whatsapp image", "p", "vid", "file", "page",
    )
)  # fmt: skip
"""Words that cameras and programs put before numbers, in lower case."""


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
        Most files of two patterns are called alike, as a source of both takes them.
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
        others = ", ".join(other for _, other in self.pairs)
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
        ways: list[tuple[Sequence[str], str]] = [((source,), both) for source in sources]
        if self.unlike == "folder" and len(sources) > 1:  # no one of them has all samples
            ways = [((), "move one kind of these folders elsewhere")]
        if not self.fit:
            ways = [((), "move one kind of these images elsewhere")]
        if folder is None:
            ways = [((), f"the files in a folder, and '{sources[0]}' as the source, {both}")]
        when = "if each image is a sample"
        # A command that takes masks for pictures would be refused for its pixels.
        whole = ("--sample-name", "whole")
        ways.append(((), f"{' '.join(whole)} {when}") if self.may_be_masks else (whole, when))
        return [], [Doubt.of(f"{text}, as masks and copies are", *ways, of_members=True)]


def _source(inside: str, pair: Sequence[str]) -> str:
    """Return the source of files of two patterns, or folders, which may be absolute or URLs."""
    start = "".join(f"{part}/" for part in common_start([name.split("/")[:-1] for name in pair]))
    names = braced([name[len(start) :] for name in pair])
    return (
        f"{start}{names}" if start.startswith("/") or "://" in start else f"{inside}/{start}{names}"
    )


def partners_among(keys: Texts) -> Partners | None:
    """Find the images that are called as others in the same folder; None if there are none."""
    stems = _replaced(keys, _SUFFIX)
    counts = stems.counts()
    if counts.max(initial=0) > 1:
        return _of_other_suffixes(keys, counts)
    row_of, endings = _called_as(stems, _replaced(stems, _PHOTO), same=True)
    rows = np.flatnonzero(row_of >= 0)
    of_targets = endings.matching(_TARGET)
    are_known = of_targets | endings.matching(_COPY)
    photos, known = len(keys) - len(rows), int(are_known.sum())
    are_pairs = known >= FEW and PART * known >= photos
    if known:
        rows, endings = rows[are_known], endings.take(are_known)
    ranked = _most_common(endings)
    if not known:
        top = ranked[0][1] if ranked else 0
        are_pairs = top >= max(PART, NEARLY_ALL * photos, NEARLY_ALL * len(rows))
        if top < max(PART, len(keys) // 20):
            again = endings.matching(_AGAIN)
            seconds = [name.removesuffix(" (1)") + " (2)" for name in stems.take(rows)]
            again &= stems.find(Texts(seconds)) < 0  # else they are numbered
            rows, ranked = rows[again], _most_common(endings.take(again))
            if not ranked:
                return _of_equal_endings(keys, stems)
    [(of_photos, _), *_] = _most_common(_found(stems.take(row_of[rows]), _PHOTO))
    others = [f"*{ending}.*" for ending, count in ranked if PART * count >= ranked[0][1]]
    example = keys[int(rows[0])]
    photos = len(keys) - len(rows)
    pairs = [(f"*{of_photos}.*", other) for other in others[:MOST_WAYS]]
    may_be_masks = bool(of_targets.any())
    return Partners(len(rows), photos, example, pairs, "ending", may_be_masks, are_pairs)


def _of_other_suffixes(keys: Texts, counts: np.ndarray) -> Partners:
    """Return the images that are called as others but for the suffix, such as 1.jpg and 1.png.

    Parameters
    ----------
    counts
        Number of images that are called as each.
    """
    same = keys.take(counts > 1)
    suffixes = _found(same, _SUFFIX)
    ranked = [suffix for suffix, _ in _most_common(suffixes)]
    photo = next((suffix for suffix in ranked if suffix.lower() in _JPEG), ranked[0])
    others = [suffix for suffix in ranked if suffix != photo]
    example = same[int(suffixes.find(Texts(others[:1]))[0])]
    paired = round((1 / counts[counts > 1]).sum())
    count = len(same) - paired
    are_pairs = paired >= FEW and PART * paired >= len(keys) - count
    stems = {s: _replaced(keys.take(_ends(keys, s)), _SUFFIX) for s in (photo, *others[:MOST_WAYS])}
    of_photos = stems.pop(photo)
    fitting = [
        suffix
        for suffix, of in stems.items()
        if 2 * int((of_photos.find(of) >= 0).sum()) >= min(len(of_photos), len(of))
    ]
    pairs = [(f"*{photo}", f"*{suffix}") for suffix in fitting or stems]
    photos, fit = len(keys) - count, bool(fitting)
    return Partners(count, photos, example, pairs, "ending", True, are_pairs, fit)


def _ends(keys: Texts, end: str) -> np.ndarray:
    import pyarrow.compute as pc

    return numbers_of(pc.ends_with(keys.plain, end))


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

    As ``masks/1.png`` is as ``images/1.jpg``; None if there are none.
    """
    folders = Folders(keys)
    shared = len(common_start([name.split("/")[:-1] for name in folders.names]))

    def have(words: Set[str]) -> np.ndarray:
        return folders.where(
            lambda name: _without(name, words, shared) != _without(name, frozenset(), shared)
        )

    of_targets = have(_APART)
    if not of_targets.any() or of_targets.all():
        return None
    plain = folders.each(
        lambda names: [
            re.sub("//+", "/", _without(name, IMAGES | _APART, shared)[:-1]).lstrip("/")
            for name in names
        ]
    )
    bases = _replaced(_replaced(Texts([*map(_base, keys)]), _SUFFIX), f"(?:{_TARGET}.*|{_PHOTO})")
    called = Texts([*map("".join, zip(plain, bases, strict=True))])
    photos, targets = np.flatnonzero(~of_targets), np.flatnonzero(of_targets)
    found = called.take(photos).find(called.take(targets))
    photos, targets = photos[found[found >= 0]], targets[found >= 0]
    if not len(targets):
        return None
    ranked = Counter(
        (keys[one].rpartition("/")[0], keys[other].rpartition("/")[0])
        for one, other in zip(photos.tolist(), targets.tolist(), strict=True)
    )
    pairs = [*dict.fromkeys(_apart(*pair) for pair, _ in ranked.most_common(MOST_WAYS))]
    count, others = len(targets), int((~of_targets).sum())
    are_pairs = count >= FEW and PART * count >= others
    may_be_masks = bool(have(TARGETS)[targets].any())
    return Partners(count, others, keys[int(targets[0])], pairs, "folder", may_be_masks, are_pairs)


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _without(name: str, words: Set[str], shared: int) -> str:
    """Return a name below the folders that all share, without the words in its folders.

    Of copies, only a whole name counts: ``cat_aug`` may be a class.
    """
    *folders, base = name.split("/")[shared:]
    kept = []
    for folder in folders:
        parts = re.split(r"[\W_]+", folder)
        others = [part for part in parts if plain_folder(part) not in words & (IMAGES | TARGETS)]
        whole = folder if others == parts else "_".join(others)
        kept.append("" if plain_folder(folder) in words else whole)
    return "/".join([*kept, base])


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


def note_of_words(keys: Texts) -> list[str]:
    """Return the line about words that names begin with, such as those of cat.0.jpg and dog.0.jpg.

    They may be classes: there are a few, each of several images, and few names have none.
    """
    import pyarrow.compute as pc

    found = without_nulls(pc.extract_regex(keys.plain, f"(?:^|/){_FIRST_WORDS}").field("part"))
    counted = pc.value_counts(found.plain)
    counts = numbers_of(counted.field("counts"))
    recurs = ~Texts(counted.field("values")).is_blank & (counts >= FEW)
    words = int(recurs.sum())
    if not 1 < words <= len(keys) // PART or counts[recurs].sum() < NEARLY_ALL * len(keys):
        return []
    some = [word for word, _ in _most_common(found) if word]
    if {word.lower() for word in some} & _CAMERAS:
        return []
    begin = f"Names of images begin with {words:,} words ({', '.join(map(repr, some[:3]))})"
    way = "to have them, name each image and its class in a file for --labels"
    return [f"{begin}, which may be classes, and give no label: {way}"]


def note_of_archives(files: Sequence[str], samples: int) -> list[str]:
    """Return the line about archives that may be a class each: no parts of one, by their names."""
    stems = sorted({_base(name).partition(".")[0] for name in files})
    words = {re.sub(r"[\W\d_]", "", stem) for stem in stems}
    if not FEW <= len(stems) <= samples // FEW or (
        len(words) == 1 and not all(map(_SYNSET.fullmatch, stems))
    ):
        return []
    some = ", ".join(map(repr, stems[:3]))
    way = "to have them, unpack each to a folder of its name, or give a file for --labels"
    return [f"Names of {len(stems):,} files ({some}) may be classes, and give no label: {way}"]


def ways_by_patterns(
    folders: Sequence[str], stems: Sequence[Sequence[str]], source_of: Callable[[str], str]
) -> list[tuple[Sequence[str], str]]:
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
    end = ending(map(_base, first))
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
        cut = _replaced(cut, f"{_WORD}$")
        found = others.find(cut)
        found = np.where(same & (found == rows), -1, found)
        row_of[rows[found >= 0]], words[rows[found >= 0]] = found[found >= 0], count
        rows, cut = rows[found < 0], cut.take(found < 0)
    parts, places = [Texts([])], [np.empty(0, np.int64)]
    for count in range(1, MOST_WORDS + 1):
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
