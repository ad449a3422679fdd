"""The interface of sources: list samples with their identity and locality, and fetch many.

A source fetches only its own samples, since keys may come from an untrusted store.
Locations are trusted: they come from a listing of this run and are never stored.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import xxhash

from precache.errors import ChoiceError, FetchError, SampleError, SourceError
from precache.messages import did_you_mean, printable, shown
from precache.recipe.recipe import Recipe
from precache.storage.backends import EXTRAS
from precache.storage.base import HIDDEN_FILE, NOT_UTF8, SERVICE_FOLDER, Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.columns import Texts, numbers_of
from precache.store.locations import Locations
from precache.store.row_table import RowTable, place_digest
from precache.units import size

IMAGE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".avif", ".heic", ".heif"),
    )
)
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
MOST_SAMPLE_BYTES = 512 << 20

TAR_SUFFIXES = (
    ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst",
)  # fmt: skip
CONTAINER_NOUNS = {
    ".csv": "a CSV table", ".tsv": "a table", ".parquet": "a Parquet table",
    ".arrow": "an Arrow table", **dict.fromkeys(TAR_SUFFIXES, "a tar archive"),
    ".zip": "a zip archive", ".h5": "an HDF5 file", ".hdf5": "an HDF5 file",
    ".npz": "a NumPy archive", ".npy": "a NumPy array", ".tfrecord": "a TFRecord file",
    ".array_record": "an ArrayRecord file",
    ".lmdb": "an LMDB database", "data.mdb": "an LMDB database", ".beton": "an FFCV dataset",
    ".mds": "an MDS shard", ".jsonl": "a table of JSON lines", ".ndjson": "a table of JSON lines",
}  # fmt: skip
"""Suffixes of files that hold many samples."""

BY_DATASET = (
    "read it by a torch map-style Dataset: write a function that returns one, such as "
    "`def photos(): return MyDataset(...)` in mydata.py, and give python:mydata:photos as the "
    "source"
)
MOST_SUFFIXES, SUFFIXES_SHOWN = 100, 8
"""Suffixes of unused files that are counted apart, and that are shown."""

_SUFFIX = re.compile(r"\.(?=.*[a-z])[a-z0-9_-]{1,16}")

_SERVICE = re.compile(
    r"(?:^|/)(?:\.[^/]*|__MACOSX|__pycache__|@eaDir|@Recycle|@Recently-Snapshot|#recycle|[#~]snapshot"
    r"|lost\+found|found\.\d{3}|\$RECYCLE\.BIN|RECYCLER|System Volume Information|_gsdata_"
    r"|Network Trash Folder|Temporary Items)/",
    re.IGNORECASE,
)
"""Hidden folders, and folders that systems and programs make beside the user's."""

IMAGE_NAME = rf"[^/]\.(?:{'|'.join(suffix[1:] for suffix in sorted(IMAGE_SUFFIXES))})$"
HIDDEN = rf"(?:^|/)\.|{_SERVICE.pattern}"
"""Regular expressions of RE2, to be searched in names without regard to case."""

FILES_PER_TICK = 1 << 14
"""Files between two calls of a `Tick`."""

Tick = Callable[[int], None]
"""Called with the number of samples listed so far."""


@dataclass(frozen=True)
class Sample:
    """One raw sample: the inputs of its fields, its label if the listing has none, its hash.

    `inputs` maps names to bytes, texts, arrays or Pillow images; the first is the default input. An
    input that other samples have and this one lacks is a `SampleError`. Those of `unread` are read
    by no field; `label_part` is the part of the sample that has the label; `files` are the files of
    inputs that are not called as the sample is. `contents` has the hash of each of several inputs.
    """

    inputs: Mapping[str | int, Any]
    label: int | None = None
    content: str = ""
    label_part: str = ""
    unread: Mapping[str | int, Any] = field(default_factory=dict)
    files: Mapping[str | int, str] = field(default_factory=dict)
    contents: Mapping[str | int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes) -> Sample:
        """Return the sample of an encoded image."""
        return cls({IMAGE: data}, content=xxhash.xxh3_128_hexdigest(data))

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs; a Pillow image counts as 0."""
        return sum(map(nbytes_of, self.inputs.values()))


def nbytes_of(value: Any) -> int:
    """Return the bytes of a part of a sample, of text those in UTF-8; 0 if that is unknown."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)


Fetched = Sample | FetchError | SampleError
"""A sample or an error: a FetchError is retried, a SampleError makes a hole."""


def too_large_error(nbytes: int, most_bytes: int) -> SampleError:
    """Return the error of a sample above the limit; its size may be unknown, -1."""
    has = "more" if nbytes < 0 else size(nbytes)
    return SampleError(f"has {has}, over the limit of {size(most_bytes)} (--max-sample-bytes)")


@dataclass(frozen=True)
class LabelRules:
    """Readings of labels, as chosen by the user.

    Attributes
    ----------
    level
        The folder of a path that is its class: 1 for the first, 0 for none; None to find it.
    kind
        Kind of the labels of a column or file: names or numbers of classes, or regression values.
    separator
        Text between several classes in a label.
    none
        Labels that stand for no label.
    order
        Order of the names of classes: as text, or as numbers.
    all_splits
        Samples of all splits are taken together.
    """

    level: int | None = None
    kind: Literal["name", "number", "value"] | None = None
    separator: str | None = None
    none: tuple[str, ...] = ()
    order: Literal["text", "number"] = "text"
    all_splits: bool = False


NO_RULES = LabelRules()


FEW = 3
"""Names that are shown of many."""

Way = tuple[Sequence[str], str]
"""Flags that decide, and when they do; without flags: another way out, in words."""


@dataclass(frozen=True)
class Doubt:
    """Two readings of labels, or of which samples there are, that differ; a build refuses it.

    Attributes
    ----------
    what
        The readings, in words.
    choices
        Arguments that decide, and when they do. Without arguments: another way out, in words.
    by_classes
        A map of classes that the user gives decides, too.
    of_members
        It is about which samples there are, and labels of a file do not decide.
    """

    what: str
    choices: tuple[tuple[tuple[str, ...], str], ...] = ()
    by_classes: bool = False
    of_members: bool = False

    @classmethod
    def of(
        cls,
        text: str,
        *choices: tuple[Sequence[str], str],
        by_classes: bool = False,
        of_members: bool = False,
    ) -> Doubt:
        """Return the doubt that a text states, with the choices between its readings."""
        named = tuple((tuple(flags), when) for flags, when in choices)
        return cls(text, named, by_classes, of_members)

    @property
    def ways(self) -> list[tuple[str, ...]]:
        """Arguments that decide, as in `ChoiceError`."""
        return [*dict.fromkeys(flags for flags, _ in self.choices if flags)]

    @property
    def text(self) -> str:
        """The readings and the choices between them."""
        named = (
            f"`{shlex.join(flags)}` {when}".rstrip() if flags else when
            for flags, when in self.choices
        )
        return f"{self.what}. Choose: {'; or '.join(named)}"


def quoted(names: Iterable[str], most: int = FEW) -> str:
    """Return some names for a message, and the number of the others."""
    some = list(names)
    more = f" and {len(some) - most:,} more" if len(some) > most else ""
    return ", ".join(printable(repr(name)) for name in some[:most]) + more


def flag(name: str, value: str) -> list[str]:
    """Return a flag and its value; after a space, a value such as ``-nan`` would be a flag."""
    return [f"{name}={value}"] if value.startswith("-") and value != "-" else [name, value]


def no_label(words: Iterable[str]) -> list[str]:
    """Return the arguments that take words as no label."""
    return [argument for word in words for argument in flag("--no-label", word)]


def is_flag(way: Sequence[str]) -> bool:
    """Return True for arguments that are no source; also for none."""
    return not way or way[0].startswith("-")


def choice_error(doubts: Sequence[Doubt]) -> ChoiceError:
    """Return the error of all doubts, with the ways out of the first one that has a source among
    them, as other samples may have other labels; else of the first one.

    A way out of that meets the others in its turn, among the samples that it takes.
    """
    text = ". Also: ".join(doubt.text for doubt in doubts)
    first = min(doubts, key=lambda doubt: (not doubt.ways, all(map(is_flag, doubt.ways))))
    return ChoiceError(text, ways=first.ways, doubts=doubts)


@dataclass(frozen=True)
class Listing:
    """The samples of a source.

    Attributes
    ----------
    table
        Files of a folder are sorted by key. Members of containers are in the order of their
        containers, with locations.
    ignored
        Number of files or members that are no images, by suffix; see `count_ignored`.
    complete
        False if time ran out.
    left_out
        Number of other files, members and rows, by the reason why they are left out.
    examples
        Name of one that is left out, by reason.
    index
        Index for the next listing, which then reads only containers that changed; None if there
        is nothing new to keep.
    notes
        Lines for the user about guesses and unused data.
    file_states
        `FileInfo.file_state` of the file of each sample; int64, -1 where unknown. None if it is
        unknown of all.
    doubts
        Readings of the labels that the user must choose between; the table has one of them.
    bare
        Folders beside the classes that have no readable image, and may be classes.
    """

    table: RowTable
    ignored: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    index: bytes | None = None
    notes: tuple[str, ...] = ()
    file_states: np.ndarray | None = None
    doubts: tuple[Doubt, ...] = ()
    bare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """The columns of samples that the fields of a recipe start from.

    Attributes
    ----------
    names
        Columns that fields name, but for ``bytes``, as the image is called where no name has it.
    image
        True if some field names that, or none.
    unnamed
        Fields that name none, and start from the image.
    """

    names: tuple[str, ...] = ()
    image: bool = True
    unnamed: tuple[str, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe) -> Inputs:
        """Return what the fields of a recipe start from, whatever their order.

        Those of a kind start from the column of their name if they name no other.
        """
        inputs = {
            name if field.input is None and field.kind is not None else field.input
            for name, field in recipe.fields.items()
        }
        names = sorted(name for name in inputs if isinstance(name, str) and name != IMAGE)
        plain = (n for n, field in recipe.fields.items() if field.input is None and not field.kind)
        return cls(tuple(names), not inputs <= {*names}, tuple(sorted(plain)))

    def require_clear(
        self, columns: Collection[str], image: str | None, where: str, *, stated: bool = False
    ) -> None:
        """Raise `SourceError` if a field would start from the image, and has a column of its name.

        Parameters
        ----------
        image
            Column of images.
        stated
            The user states it, and the field ``image`` is of it.
        """
        for name in self.unnamed:
            if name in columns and name not in (image, *self.names, *["image"] * stated):
                way = f", or input = {json.dumps(image)}" if image else ""
                raise SourceError(
                    f"{where}: the field {name!r} names no input, and would start from the image, "
                    f"although there is a column {name!r}: state input = {json.dumps(name)}{way} "
                    f"in [fields.{name}]"
                )


IMAGE = "bytes"
"""Name of the image among the inputs of a sample whose image has no name of its own."""

IMAGES_ALONE = Inputs()

UNSEEN = "unseen:"
"""Beginning of an etag that tells nothing of the content of a file."""


@dataclass(frozen=True)
class Columns:
    """Columns of a table, as chosen by the user: images or their URIs, labels, keys; and those that
    fields start from."""

    image: str | None = None
    label: str | None = None
    key: str | None = None
    inputs: Inputs = IMAGES_ALONE

    def labels(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the chosen columns of labels; commas join several, one for each class."""
        if self.label is None:
            return ()
        parts = tuple(part.strip() for part in self.label.split(","))
        return parts if self.label not in names and len(parts) > 1 else (self.label,)


NO_COLUMNS = Columns()


def require_columns(names: Collection[str], wanted: Iterable[str | None], where: str) -> None:
    """Raise `SourceError` for a column that a table does not have."""
    for name in wanted:
        if name is not None and name not in names:
            raise SourceError(
                f"{where} has no column {name!r}{did_you_mean(name, names)}; it has "
                f"{', '.join(map(repr, filter(None, [*names][:20])))}"
            )


def require_distinct(names: Iterable[str], what: str) -> None:
    """Raise `SourceError` for a name that is there twice; blank ones may be.

    Parameters
    ----------
    what
        Begins the message, before the name.
    """
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise SourceError(f"{what} {printable(twice[0])!r}; rename all but one")


SampleName = Literal["first-dot", "last-dot", "whole"]
"""The part of a member's name that names its sample: up to the first or the last dot of the file
name; or each image is a sample."""


@dataclass(frozen=True)
class SourceSpec:
    """A source as the user names it, with its options of `precache.build`.

    Attributes
    ----------
    most_bytes
        Size limit of a sample; larger samples are not fetched.
    sample_name, kind
        Part of a member's name that names its sample, and name of the kind of source; by default
        they are inferred.
    """

    uri: str = ""
    storage_options: StorageOptions = field(default=None, repr=False)
    follow_links: bool = False
    most_bytes: int = MOST_SAMPLE_BYTES
    columns: Columns = NO_COLUMNS
    sample_name: SampleName | None = None
    rules: LabelRules = NO_RULES
    kind: str | None = None

    @property
    def inputs(self) -> Inputs:
        return self.columns.inputs

    def folder(self, uri: str) -> Folder:
        """Open a folder with the options of the source."""
        return open_folder(uri, self.storage_options, follow_links=self.follow_links)


NO_SPEC = SourceSpec()


class Source(Protocol):
    """Lists samples and fetches them; travels to the workers as a pickle.

    Attributes
    ----------
    index_name
        Name of the source's index in a store; empty if the source has no index.
    """

    @property
    def labels_with_samples(self) -> bool:
        """True if labels are known only after samples are fetched."""
        return False

    @property
    def fetch_threads(self) -> int:
        """Number of threads of a task that may fetch at the same time."""

    @property
    def index_name(self) -> str:
        return ""

    def file_of(self, key: str, location: Locations | None = None) -> tuple[Folder, str] | None:
        """Return the folder and name of the file that holds a sample; None if no file does.

        Parameters
        ----------
        location
            As in `fetch`, of this one sample.
        """
        return None

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        """List all samples, or those found in `seconds`; `tick` is called with their number.

        Parameters
        ----------
        index
            Index of an earlier listing, from a store. A damaged or forged index must be ignored.
        """

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        """Return the samples in order, or an error in place of each that cannot be used.

        Samples of one unit of a container are passed in one call where possible.

        Parameters
        ----------
        sizes
            As listed, -1 for unknown.
        locations
            As listed; None if the caller has only keys, for example from a store. A source whose
            listing has `RowTable.locations` must then find them itself.
        """

    def require_unchanged(self, locations: Locations) -> None:
        """Raise `FetchError` for a container that is not the one that was listed, after reads."""
        return


_listings: dict[str, RowTable] = {}
"""Index name of a source -> its listing, for `located`. Single dict operations need no lock."""


def forget(source: Source) -> None:
    """Let `located` list a source again, as files of it may have changed."""
    _listings.pop(source.index_name, None)


def located(source: Source, keys: Sequence[str]) -> Locations:
    """Return where samples of a source with locations lie, those of unknown keys nowhere.

    The source is listed once in a process.
    """
    table = _listings.get(source.index_name)
    if table is None:
        table = _listings[source.index_name] = source.list(lambda count: None).table
    assert table.locations is not None
    return table.locations.take(table.rows_of(keys))


def fetch_located(
    source: Source,
    keys: Sequence[str],
    locations: Locations | None,
    read: Callable[[list[int], Locations], Mapping[int, Fetched]],
) -> list[Fetched]:
    """Fetch the samples of a source with locations; errors in place of those that it has not.

    Parameters
    ----------
    read
        Returns the samples of some rows of the locations, by row.
    """
    found = located(source, keys) if locations is None else locations
    fetched = read(np.flatnonzero(numbers_of(found.places.is_valid())).tolist(), found)
    samples = [
        fetched[row] if row in fetched else FetchError(f"{source} has no sample {printable(key)}")
        for row, key in enumerate(keys)
    ]
    if any(isinstance(sample, FetchError) for sample in samples):
        forget(source)  # a file may have changed
    return samples


def source_of(folder: Folder) -> str:
    """Return the digest of a folder for `RowTable.source`, however the folder is spelled."""
    path = folder.local("")
    if path is not None:
        return place_digest(os.path.realpath(path))
    protocol, _, place = shown(str(folder)).partition("://")
    return place_digest(f"{EXTRAS.get(protocol, protocol)}://{place.strip('/')}")


def is_image(name: str) -> bool:
    """Return True if a file has the suffix of an image and is no ``._`` file of macOS."""
    stem, _, suffix = name.rpartition("/")[2].rpartition(".")
    return bool(stem) and not stem.startswith("._") and f".{suffix.lower()}" in IMAGE_SUFFIXES


@dataclass(frozen=True)
class Names:
    """Names of files or members, by column.

    Attributes
    ----------
    texts
        The names, with marks in place of bytes that are not UTF-8.
    images
        Which are images: (names,) bool.
    left_out
        Row -> reason, of images that are left out as hidden, or since keys are UTF-8.
    wrong
        Rows of names that are not UTF-8.
    """

    texts: Texts
    images: np.ndarray
    left_out: Mapping[int, str]
    wrong: Sequence[int]

    @classmethod
    def of(cls, names: Sequence[str], also: str = "") -> Names:
        """Tell images from others, as `is_image` does, and those that are left out.

        Files whose names match `also`, a regular expression of RE2, count as images.
        """
        wrong: list[int] = []
        try:
            texts = Texts(names)
        except UnicodeEncodeError:
            wrong = [row for row, name in enumerate(names) if not is_utf8(name)]
            texts = Texts([name.encode(errors="replace").decode() for name in names])
        pattern = rf"{IMAGE_NAME}|{also}" if also else IMAGE_NAME
        images = texts.matching(pattern, ignore_case=True)
        left_out = {row: NOT_UTF8 for row in wrong if images[row]}
        may_be = np.zeros(len(names), np.bool_)
        if not are_plain(texts):
            may_be = images & texts.matching(HIDDEN, ignore_case=True)
        for row in np.flatnonzero(may_be).tolist():
            images[row] = is_image(names[row])
            if images[row] and (reason := hidden_as(names[row])):
                left_out[row] = reason
        return cls(texts, images, left_out, wrong)

    @property
    def kept(self) -> np.ndarray:
        """Rows of the images that are not left out: (names,) bool."""
        kept = self.images.copy()
        kept[list(self.left_out)] = False
        return kept


def are_plain(names: Texts) -> bool:
    """Return True if no name has a folder or a NUL, is empty, or begins with a dot."""
    data, ends = names.data
    odd = (data == ord("/")).any() or (data == 0).any() or (ends[1:] == ends[:-1]).any()
    return not (odd or (data[ends[:-1]] == ord(".")).any())


def starts_as_image(data: bytes | memoryview) -> bool:
    """Return True if data start with the signature of an image format in `IMAGE_SUFFIXES`."""
    head = bytes(data[:12])
    boxed = head[8:] in (b"avif", b"avis", b"heic", b"heix", b"mif1") and head[4:8] == b"ftyp"
    return boxed or head.startswith(IMAGE_STARTS) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def container_suffix(name: str) -> str:
    """Return the suffix of a file that holds many samples; empty for any other file."""
    suffixes = [suffix for suffix in CONTAINER_NOUNS if name.lower().endswith(suffix)]
    return max(suffixes, key=len, default="")


def container_noun(name: str) -> str:
    """Return the noun for a file that holds many samples; empty for any other file."""
    return CONTAINER_NOUNS.get(container_suffix(name), "")


def unread_container(path: str) -> str:
    """Return what a file with many samples is, of a kind that is not read, and the way out."""
    if path.lower().endswith(".npz"):
        folder = f"{path[:-4]}_arrays"
        command = shlex.join(["python3", "-m", "zipfile", "-e", path, folder])
        return f"a NumPy archive: unpack it by `{command}`, and name one of the arrays in {folder}"
    return f"{container_noun(path)}: {BY_DATASET}"


def is_utf8(name: str) -> bool:
    """Return True if a name can be a key: names that are no valid UTF-8 have surrogates."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def count_ignored(ignored: Counter[str], name: str) -> None:
    """Count a file that is no image, under its suffix.

    Names that macOS writes beside files count as ``._``, those without a suffix under an empty
    text, and numbers, odd suffixes and those beyond `MOST_SUFFIXES` as ``*``.
    """
    known = name[name.rfind(".") :]
    if known in ignored and "._" not in name:
        ignored[known] += 1
        return
    stem, dot, suffix = name.rpartition("/")[2].rpartition(".")
    suffix = f"{dot}{suffix.lower()}" if stem else ""
    if stem.startswith("._"):
        suffix = "._"
    elif suffix and not _SUFFIX.fullmatch(suffix):
        suffix = "*"
    if suffix not in ignored and len(ignored) >= MOST_SUFFIXES:
        suffix = "*"
    ignored[suffix] += 1


def ignored_text(ignored: Mapping[str, int]) -> str:
    """Describe files that are no images: ``1,000 .json, 1,000 .txt``; empty if there are none."""
    shown = sorted(ignored.items(), key=lambda item: (item[0] == "*", -item[1], item[0]))
    others = sum(count for suffix, count in shown[SUFFIXES_SHOWN:] if suffix != "*")
    others += ignored.get("*", 0)
    names = {"": "without a suffix", "._": "._ files of macOS"}
    texts = [
        f"{count:,} {names.get(suffix, suffix)}"
        for suffix, count in shown[:SUFFIXES_SHOWN]
        if suffix != "*"
    ]
    return ", ".join([*texts, f"{others:,} of other suffixes"] if others else texts)


def folder_at(name: str, level: int) -> str:
    """Return a folder of a name, from level 1 for the first; empty if the name has none there."""
    parts = name.split("/", level)
    return parts[level - 1] if 0 < level < len(parts) else ""


class Folders:
    """The folders that names begin with, each once.

    Attributes
    ----------
    names
        A name for each folder: the folder and a letter.
    codes
        Number of the folder of each name.
    """

    def __init__(self, names: Texts) -> None:
        folders = names.mapped(_folders).plain.dictionary_encode()
        self.codes = numbers_of(folders.indices)
        self.names = [f"{folder}x" for folder in folders.dictionary.to_pylist()]

    @property
    def counts(self) -> dict[str, int]:
        """Number of names by folder."""
        counts = np.bincount(self.codes, minlength=len(self.names)).tolist()
        return dict(zip((name[:-2] for name in self.names), counts, strict=True))

    def where(self, predicate: Callable[[str], bool]) -> np.ndarray:
        """Return of which names the folders are such: (names,) bool."""
        of_rows: np.ndarray = np.array([*map(predicate, self.names)], np.bool_)[self.codes]
        return of_rows


def _folders(names: Texts) -> Texts:
    return names.cut(names.data[1][:-1], names.after_last("/"))


def in_service_folder(name: str) -> bool:
    """Return True for a file below a hidden folder, or one that a system or program made."""
    folder, slash, _ = name.rpartition("/")
    return bool(slash) and _is_service(folder)


def hidden_as(name: str) -> str:
    """Return the reason to leave out an image as hidden or of a service; empty if there is none."""
    if in_service_folder(name):
        return SERVICE_FOLDER
    return HIDDEN_FILE if name.rpartition("/")[2].startswith(".") else ""


@functools.lru_cache(1 << 10)
def _is_service(folder: str) -> bool:
    return _SERVICE.search(f"{folder}/") is not None
