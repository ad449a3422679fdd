"""List the source, the first step of a build, and give its samples their rows."""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from precache.errors import ChoiceError, Hole, SourceError, StorageError, UsageError
from precache.messages import printable, shown
from precache.recipe.recipe import Recipe
from precache.storage.base import BAD_SAMPLES, Folder, left_out_text
from precache.store.columns import Texts, system_memory
from precache.store.commit_log import recordable_source, short
from precache.store.labels import are_classes, has_label
from precache.store.open import split_uri
from precache.store.row_table import LISTINGS_FOLDER, RowTable, listing_prefix, place_digest
from precache_workers.ops.identity import function_digests
from precache_workers.planning.class_maps import (
    class_folders,
    freeze_classes,
    read_classes,
    require_names,
)
from precache_workers.planning.content_reader import ContentReader, DatasetReader
from precache_workers.planning.labels import override_labels
from precache_workers.planning.request import Request, label_rules, source_has_columns
from precache_workers.planning.row_placement import Placed, place_rows
from precache_workers.planning.source_record import (
    RecalledListing,
    note_of_held_data,
    recall,
    require_spots,
)
from precache_workers.planning.stored_versions import stored_versions
from precache_workers.planning.target_version import VersionSpec
from precache_workers.sources.base import (
    UNSEEN,
    Doubt,
    Inputs,
    Listing,
    Source,
    Tick,
    choice_error,
    is_flag,
    quoted,
)
from precache_workers.sources.container_names import around_braces, braced
from precache_workers.sources.containers import ContainerSource, member_names
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.label_readings import BY_FOLDERS, BY_TABLE
from precache_workers.sources.labels import note_of_order, numbers_out_of_order
from precache_workers.sources.manifests import ManifestSource
from precache_workers.sources.paired_folders import PairedFolders, columns_of
from precache_workers.sources.pairs import partners_across, partners_among
from precache_workers.sources.splits import is_split, is_trained_on, split_name
from precache_workers.user_code.identity import code_of, unfollowed

log = logging.getLogger(__name__)

SPLIT_DEPTH = 3
"""Folders of a path that are looked at for a split, from the last."""


@dataclass(frozen=True)
class ListedSource:
    """A source, listed.

    Attributes
    ----------
    ignored, left_out
        Files that are not images, counted by suffix; other files that are no samples, by reason.
    examples
        Name of one that is left out, by reason.
    code
        Digests of the code of custom functions that declare no version, and of a factory whose
        samples have no fingerprints, by name.
    seconds
        Wall time of listing.
    barred
        Key -> hole, of samples that must not be decoded.
    refreshes, labels
        Id of the version that is refreshed, and its labels by row: they need not be those of the
        row table, as they may have come with its samples. These are its rows, and the source was
        not listed: samples must not have changed.
    notes
        Lines for the user about the listing.
    index
        Name in the store and content of the index of the source, where it is to be kept.
    contents
        XXH3-128 (hex) of each sample, by row, if samples were read to be compared.
    compares
        Whether a change of the data of samples is seen.
    record
        Name in the store and content of the record of the source, where it is to be kept.
    """

    spec: VersionSpec
    placed: Placed
    ignored: Mapping[str, int]
    code: Mapping[str, str]
    seconds: float
    barred: Mapping[str, Hole] = field(default_factory=dict)
    refreshes: str | None = None
    labels: np.ndarray | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    index: tuple[str, bytes] | None = None
    contents: Sequence[str] = ()
    compares: bool = True
    record: tuple[str, bytes] | None = None

    def keep(self, store: Folder) -> None:
        """Store the index with which the next listing skips containers that did not change; and
        record what was listed, before a build reads it, so that later changes are seen."""
        with contextlib.suppress(StorageError):  # read-only: then the next listing reads again
            _remove_unfinished(store)
            for name, data in filter(None, (self.index, self.record)):
                store.put(name, [data])

    @property
    def fetches_labels(self) -> bool:
        """True if labels are known only once samples are fetched."""
        return self.spec.table.labels_with_samples and self.labels is None

    @property
    def known_labels(self) -> np.ndarray:
        """Labels by row, as far as they are known before samples are fetched."""
        return self.spec.table.labels if self.labels is None else self.labels

    def announce(self, note: Callable[[str], None], *, labels_given: bool) -> None:
        """Pass on the lines about the listing.

        Parameters
        ----------
        labels_given
            Whether labels are those of a file, whose own warning names samples without one.
        """
        if not labels_given:
            self.warn_of_missing_labels()
        for line in (*self.notes, *self.unfollowed()):
            note(line)

    def warn_of_missing_labels(self) -> None:
        """Log a warning if some samples have a label, and others have none."""
        table, labels = self.spec.table, self.known_labels
        missing = table.keys.take(np.flatnonzero(~has_label(labels) & ~table.is_removed))
        samples = len(table) - len(table.removed)
        if self.fetches_labels or not 0 < len(missing) < samples:
            return
        classes = are_classes(labels)
        in_folders = classes and any("/" in key for key in table.keys)
        outside = sum("/" not in key for key in missing) if in_folders else 0
        why = f": {outside:,} are in no class folder" if outside else ""
        log.warning(
            "%s of %s samples have no label (%s), such as %s%s",
            f"{len(missing):,}",
            f"{samples:,}",
            "-1" if classes else "NaN" if labels.ndim == 1 else "zeros",
            printable(missing[0]),
            why,
        )

    def warn_of_fetched_labels(self) -> None:
        """Log what holds of labels that came with the samples."""
        self.warn_of_missing_labels()
        from_0 = "return one less to count from 0"
        for line in _note_of_lowest(self.known_labels, self.spec.table.classes, from_0):
            log.warning("%s", line)

    def unfollowed(self) -> list[str]:
        """Describe, for each function or factory, the code whose edits are not noticed."""
        lines = []
        for name in self.code:
            code = code_of(name.removeprefix("python:"))
            if code is None:
                continue
            unknown = unfollowed(code)
            remedy = "give the function a version=, and change it with them"
            if name.startswith("python:"):  # a dataset is there to read files
                unknown = [(text, reads) for text, reads in unknown if not reads]
                remedy = "a method fingerprint(i) of the dataset decides instead"
            if unknown:
                more = f"; and {len(unknown) - 8} more" if len(unknown) > 8 else ""
                shown = "; ".join(text for text, _ in unknown[:8]) + more
                lines.append(
                    f"{name}: edits of what these reach are not noticed: {shown}; {remedy}"
                )
        return lines


def _remove_unfinished(store: Folder) -> None:
    """Remove what a killed build left of an index, a record or an entry of the log.

    One that is being written is begun anew.
    """
    if store.local("") is None:
        return
    for folder in (LISTINGS_FOLDER, "commits"):
        for name in () if store.is_link(folder) else store.names(folder):
            if name.startswith(".") and name.endswith(".tmp"):
                store.remove(f"{folder}/{name}")


@system_memory()
def list_rows(
    request: Request,
    store: Folder,
    source: Source,
    tick: Tick,
    say: Callable[[str], None],
) -> ListedSource:
    """List the source, and give its samples the rows that they have in an earlier version.

    Parameters
    ----------
    say
        Prints a line.

    Raises
    ------
    SourceError
        The source cannot be listed, or does not fit the request.
    """
    began = time.perf_counter()
    name = _index_name(request, source)
    listing = source.list(tick, index=store.get(name) if name else None)
    _require_few_bad(request, listing)
    recipe = _with_current_variants(request.recipe, store)
    code = function_digests(recipe)
    table = listing.table
    if request.ignore_ctime and table.locations is not None:
        table = replace(table, locations=table.locations.without_file_states())
    if not table.source:
        table = replace(table, source=source_by_name(request.source))
    if isinstance(source, DatasetSource):
        if table.etags[0].startswith(source.etag):
            code[f"python:{source.factory}"] = source.code
    elif request.compare:
        raise UsageError(
            f"--compare is for a Python dataset, and {shown(request.source)} is none: its samples "
            "are compared without it; leave it out"
        )
    with system_memory():
        of_names, doubts = _read_names(request, source, listing)
    table = _labelled(request, source, listing, table, doubts)
    if isinstance(source, FolderSource):
        _require_images_alone(request, source)
    with system_memory():
        recalled, compared = _recall(request, store, source, table, listing.file_states, tick, say)
        table, record = recalled.table, None
        if not isinstance(source, DatasetSource) or listing.file_states is not None:
            record = recalled.new_record()  # of a dataset without files, the versions say all
        listing = replace(listing, file_states=None)  # a listing of millions takes memory
        del recalled
        if isinstance(source, DatasetSource) and not request.compare:
            changed = note_of_held_data(store, source, table)
        else:
            changed = () if request.recompute else _note_of_unseen(store, table)
    placed = place_rows(store, table, request.keep_order, request.compact, request.shard_samples)
    seconds = time.perf_counter() - began
    return ListedSource(
        VersionSpec.of(recipe, placed.table),
        placed,
        listing.ignored,
        code,
        seconds,
        left_out=listing.left_out,
        examples=listing.examples,
        notes=(
            *_true_of(listing, request, table),
            *of_names,
            *changed,
            *_label_notes(request, source, table),
            *_note_of_numbers(request, store, table),
            *_note_of_order(request, source, table),
        ),
        # An index would not tell the next build of a doubt that this one need not settle.
        index=(name, listing.index) if listing.index is not None and not listing.doubts else None,
        contents=[compared.get(key, "") for key in placed.table.keys] if compared else (),
        compares=not isinstance(source, DatasetSource) or source.compares,
        record=record,
    )


def _require_images_alone(request: Request, source: FolderSource) -> None:
    """Raise `SourceError` for a recipe that reads other parts than the images of a folder."""
    fields = request.recipe.fields.items()
    files = {name for name, field in fields if field.kind == "bytes" and field.input is None}
    names = [name for name in Inputs.of(request.recipe).names if name not in files]
    if names:
        suffix = names[0].rpartition(".")[2]
        patterns = braced(["**/*.*", f"**/*.{suffix}"])
        raise SourceError(
            f"fields start from {quoted(names)}, and a sample of {source.folder} is an image "
            f"alone. If others lie beside them, as 17.{suffix} beside 17.jpg, give "
            f'{source.folder.path(patterns)!r}, and in the field input = "*.{suffix}". '
            "If they are columns of a table that names the images, give the table as the source"
        )


def _require_few_bad(request: Request, listing: Listing) -> None:
    """Raise `SourceError` if more samples are left out than may fail."""
    bad = {reason: n for reason, n in listing.left_out.items() if reason in BAD_SAMPLES}
    count = sum(bad.values())
    samples = len(listing.table) + count
    if count > request.allowed_failures(samples):
        allow = f"allow as many failures by --max-failures {count}"
        if request.on_error == "raise":
            allow = "leave them out by --on-error skip"
        raise SourceError(
            f"of {samples:,} samples in {shown(request.source)}, {count:,} cannot be taken"
            f"{left_out_text(bad, listing.examples)}; correct the source, or {allow}"
        )


def source_by_name(source: str) -> str:
    """Return the digest for `RowTable.source` of a source that lists from no folder."""
    return place_digest(recordable_source(source) or shown(source))


def _recall(
    request: Request,
    store: Folder,
    source: Source,
    listing: RowTable,
    file_states: np.ndarray | None,
    tick: Tick,
    say: Callable[[str], None],
) -> tuple[RecalledListing, Mapping[str, str]]:
    """Recognise the samples of a listing; also returns the contents of those that are compared."""
    known = functools.partial(
        recall,
        store,
        listing,
        file_states,
        most_bytes=request.max_sample_bytes,
        ignore_ctime=request.ignore_ctime,
    )
    if not isinstance(source, DatasetSource):
        return known(ContentReader(source, request.sample_timeout, say)), {}
    reader = DatasetReader(source, request.sample_timeout, say, tick, request.compare)
    # What one recipe reads of a sample settles nothing for another.
    inputs = repr((source.fields, source.labels_given))
    recalled = known(reader, read_all=request.compare, read_touched=False, inputs=inputs)
    if not source.compares and not request.recompute:
        spots = replace(reader, tick=lambda count: None, contents={})
        require_spots(store, spots, recalled.table)
    return recalled, reader.contents if request.compare else {}


def _note_of_unseen(store: Folder, table: RowTable) -> tuple[str, ...]:
    """Return a line if a change of samples that a version has would not be seen."""
    unseen = np.flatnonzero(
        (table.mtimes < 0) & (table.etags.is_blank | table.etags.matching(f"^{UNSEEN}"))
    )
    if not len(unseen) or next(stored_versions(store, table.source), None) is None:
        return ()
    line = (
        f"{len(unseen):,} of {len(table):,} samples, such as {printable(table.keys[unseen[0]])}, "
        "have no time and no ETag, as of a web server: one that changed since an earlier version "
        "is not noticed; --recompute reads all of them"
    )
    return (line,)


def _label_notes(request: Request, source: Source, table: RowTable) -> list[str]:
    """Describe labels that are no class numbers, or classes of a split that are numbered alone."""
    labels = table.labels
    if labels.ndim == 2:
        return [f"Labels are multi-hot: several of {labels.shape[1]:,} classes for each sample"]
    if not are_classes(labels):
        return ["Labels are numbers: float32, NaN for none"]
    places = [shown(request.source), *([request.labels] if request.labels else [])]
    from_0 = "--label-kind name --class-order number counts them from 0"
    if request.classes is None and (note := _note_of_lowest(labels, table.classes, from_0)):
        return note
    later = any(_is_later_split(_named_split(place)) for place in places)
    by_name = table.classes and list(table.classes) == sorted(table.classes)
    compared = request.labels is None and _splits_beside(source)  # as by `_doubt_of_split`
    if later and by_name and request.classes is None and not compared:
        classes = f"The {len(table.classes):,} classes are numbered from this source alone"
        others = "if the training data may have others, give their store or folder by --classes"
        return [f"{classes}; {others}"]
    return []


def _note_of_lowest(labels: np.ndarray, classes: Sequence[str], from_0: str) -> list[str]:
    """Return the line about class numbers without names that are all above 0."""
    numbers = labels[labels >= 0]
    lowest, highest = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    if not lowest or not all(map(str.isdecimal, classes[:1])):
        return []
    numbered = f"Class numbers are from {lowest} to {highest:,}, and no sample has 0"
    return [f"{numbered}: a model needs {highest + 1:,} outputs; {from_0}"]


def _true_of(listing: Listing, request: Request, table: RowTable) -> list[str]:
    """Return the lines of a listing that its labels leave true: not that of an order not taken,
    nor those of folders and of a table in the source beside a file of labels."""
    order_taken = request.classes is None and table.classes == listing.table.classes
    untrue = () if order_taken else note_of_order(listing.table.classes)
    notes = [note for note in listing.notes if note not in untrue]
    if request.labels:
        notes = [note for note in notes if BY_FOLDERS not in note and BY_TABLE not in note]
    return notes


def _note_of_numbers(request: Request, store: Folder, table: RowTable) -> list[str]:
    """Return the line about classes that the latest version has, or has by other numbers."""
    current = next(stored_versions(store), None)
    if current is None or request.classes is not None:
        return []
    before = {name: number for number, name in enumerate(current.attributes.classes)}
    version = short(current.folder.name)
    if before and not table.classes:
        without = f"Samples have no classes, and those of version {version} have {len(before):,}"
        return [f"{without}: to keep them, give the options for labels that it was built with"]
    moved = [
        f"{printable(repr(name))} {before[name]} -> {number}"
        for number, name in enumerate(table.classes)
        if before.get(name, number) != number
    ]
    if not moved:
        return []
    some = ", ".join(moved[:3]) + (f" and {len(moved) - 3:,} more" if len(moved) > 3 else "")
    keep = f"--classes {shlex.quote(f'{shown(request.store)}@{version}')} keeps those, and adds new"
    return [f"Classes get other numbers than in version {version}: {some}; {keep} ones"]


def _note_of_order(request: Request, source: Source, table: RowTable) -> list[str]:
    """Return the line about numbers in names of a folder, whose order as text is kept."""
    of_names = request.keep_order and isinstance(source, FolderSource | PairedFolders)
    pair = numbers_out_of_order(table.keys) if of_names else ()
    if not pair:
        return []
    first, second = map(printable, pair)
    way = "for that of numbers, write them with leading zeros, or give a table of the files"
    return [f"Rows are in the order of text: {first} comes before {second}; {way}"]


def _named_split(source: str) -> str:
    """Return the words in the last name of a source that name a split; of a pattern, in two."""
    *_, outer, last = ["", *source.rstrip("/").split("/")]
    return split_name(last) or split_name(outer)


def _is_later_split(name: str) -> bool:
    """Return True for the name of a split that is not trained on."""
    return is_split(name) and not is_trained_on(name)


def _local(source: Source) -> Path | None:
    return source.folder.local("") if isinstance(source, FolderSource) else None


def _split_above(source: Source) -> Path | None:
    """Return the split that a local folder is, or is in, as ``val`` of ``val/imgs``."""
    local = _local(source)
    inner = [] if local is None else [local, *local.parents][:SPLIT_DEPTH]
    return next((path for path in inner if is_split(path.name)), None)


def _splits_beside(source: Source) -> list[Path]:
    """Return the local folders that are of other splits, those that are trained on first."""
    split, local, beside = _split_above(source), _local(source), list[Path]()
    if split is None or local is None:
        return []
    with contextlib.suppress(OSError):  # a parent that may not be listed
        beside = sorted(split.parent.iterdir())
    inside = local.relative_to(split)
    splits = [path for path in beside if path != split and is_split(path.name)]
    splits.sort(key=lambda path: _is_later_split(path.name))
    return [path / inside for path in splits if (path / inside).is_dir()]


def _doubt_of_split(request: Request, source: Source, table: RowTable) -> list[Doubt]:
    """Return the doubt about a split whose classes are not those of the training data beside it."""
    split, local = _split_above(source), _local(source)
    if split is None or not _is_later_split(split.name):
        return []
    if request.labels is not None or request.classes is not None:
        return []
    if not table.classes or request.label_level not in (None, 1):
        return []
    for other in _splits_beside(source):
        theirs = class_folders(other)
        if len(theirs) < 2:  # flat, or of one folder
            continue
        missing = sorted(set(theirs) - set(table.classes))
        more = sorted(set(table.classes) - set(theirs))
        if missing or more:
            lacks, has = f"lacks {quoted(missing)}", f"has {quoted(more)} besides"
            differs = " and ".join([*[lacks] * bool(missing), *[has] * bool(more)])
            text = f"{local} {differs}, unlike {other}: its classes would get other numbers"
            same = ("--classes", str(other)), "if they are to be as there"
            alone = ("--classes", str(local)), "to number them by these folders alone"
            none = ("--label-level", "0"), "for no label"
            without = [none] * (len(table.classes) == 1)
            return [Doubt.of(text, *[same] * (not more), alone, *without)]
        return []
    return []


def _index_name(request: Request, source: Source) -> str:
    """Return the name in the store of the index of a source; empty if it has none."""
    if not source.index_name:
        return ""
    prefix = listing_prefix(recordable_source(request.source))
    return f"{LISTINGS_FOLDER}/{prefix}{source.index_name}.parquet"


def forget_index(request: Request, store: Folder, source: Source) -> None:
    """Remove the kept index of a source, so that the next listing reads all containers."""
    if name := _index_name(request, source):
        store.remove(name)


def with_locations(request: Request, store: Folder, source: Source, table: RowTable) -> RowTable:
    """Give the rows of a version the locations that their samples have now, if these have any."""
    name = _index_name(request, source)
    if not name:
        return table
    now = source.list(lambda count: None, index=store.get(name)).table
    return replace(table, locations=now.locations_of(now.keys.find(table.keys)))


def _with_current_variants(recipe: Recipe, store: Folder) -> Recipe:
    """Give the recipe the variants of the current version, where it does not declare which.

    Otherwise the same build would bring back variants that a refresh has replaced. Fields that are
    new have those of the others, so that a mask has the draws of its image.
    """
    undeclared = {name for name, field in recipe.fields.items() if field.leaves_variants_open}
    current = next(stored_versions(store), None) if undeclared else None
    if current is None:
        return recipe
    before = current.attributes.recipe.fields
    varied = {name for name in undeclared & before.keys() if before[name].variants > 1}
    numbers = {name: before[name].first_variant for name in varied}
    new = dict.fromkeys(undeclared - varied, max(numbers.values(), default=0))
    return recipe.with_first_variants(numbers | new)


def _read_names(
    request: Request, source: Source, listing: Listing
) -> tuple[list[str], list[Doubt]]:
    """Return the lines and doubts about what the names of images tell: pairs, and classes."""
    has_map = request.classes is not None
    labels = [doubt for doubt in listing.doubts if not (doubt.by_classes and has_map)]
    if isinstance(source, DatasetSource | PairedFolders) or (labels and request.labels is None):
        return [], labels
    notes, doubts, table = list[str](), list[Doubt](), listing.table
    files = table.keys
    if isinstance(source, ManifestSource) and table.locations is not None:
        uris = table.locations.places.field("uri")  # keys may be others
        files = Texts([*dict.fromkeys(uris.to_pylist())])
    folder = None
    if isinstance(source, FolderSource):
        folder = str(source.folder)
    if isinstance(source, ContainerSource) and source.format.columns is None and table.locations:
        inside = member_names(files, table.locations)
        files = files if inside.is_repeated.any() else inside
    partners = None
    if request.sample_name != "whole":
        partners = partners_among(files) or partners_across(files)
    if isinstance(source, ManifestSource) and partners and partners.unlike == "folder":
        folder = str(source.folder)
    if partners is not None:
        notes, doubts = partners.reading(shown(request.source), folder)
    if isinstance(source, ManifestSource):
        doubts = [_of_table(request, doubt, table) for doubt in doubts]
    return notes, [*labels, *doubts]


def _of_table(request: Request, doubt: Doubt, table: RowTable) -> Doubt:
    """Say of the choices of folders that they lack the rows, labels and columns of a table."""
    lacks = bool(request.image_column or request.key_column or request.label_column)
    lacks |= bool(has_label(table.labels).any())
    choices = [
        ((), f"{way[0]!r} as the source, with the labels by --labels, {when}")
        if way and lacks else (way, f"{when}, of all files there" * bool(way) or when)
        for way, when in doubt.choices
    ]  # fmt: skip
    return replace(doubt, choices=(*choices, ((), "leave the rows of one kind out of the table")))


def _for_recipe(request: Request, source: Source, doubt: Doubt) -> Doubt:
    """Leave out choices of folders whose samples lack the columns that the recipe reads."""
    read = {f.input for f in request.recipe.fields.values() if isinstance(f.input, str)}
    if not isinstance(source, FolderSource) or read <= {"bytes"}:
        return doubt
    instead = f"in place of {quoted(sorted(read))}"
    choices = list[tuple[tuple[str, ...], str]]()
    for way, when in doubt.choices:
        is_pair = bool(way) and around_braces(way[0]) is not None
        columns = columns_of(way[0]) if is_pair else ["bytes"]
        if not way or read <= {*columns}:
            choices.append((way, when))
        elif is_pair:
            text = f"{shown(way[0])} with a recipe that reads its columns ({quoted(columns)})"
            choices.append(((), f"{text} {instead}"))
    other = (), f"a recipe that reads the bytes of images {instead}"
    return replace(doubt, choices=tuple(choices or [other]))


def _labelled(
    request: Request,
    source: Source,
    listing: Listing,
    table: RowTable,
    doubts: list[Doubt],
) -> RowTable:
    """Give a listing the labels and classes of the request.

    Parameters
    ----------
    doubts
        Those about classes, and about the names of images.

    Raises
    ------
    ChoiceError
        They leave two readings.
    """
    frozen = None
    if request.classes is not None:
        frozen = read_classes(request.classes, request.storage_options, request.class_order)
        require_names(frozen, table.classes, shown(request.classes))
    if of_split := _doubt_of_split(request, source, table):  # each of its ways gives the classes
        doubts = [*(doubt for doubt in doubts if not doubt.by_classes), *of_split]
    if request.labels is not None:
        is_folder = isinstance(source, FolderSource)
        parts = [one for one in listing.doubts if not all(map(is_flag, one.ways))]
        doubts = [doubt for doubt in doubts if doubt.of_members]
        try:
            table = override_labels(
                table,
                request.labels,
                frozen or (),
                label_rules(request),
                source=request.source,
                label_column=request.label_column,
                key_column=request.key_column,
                source_has_columns=source_has_columns(request),
                accept_unmatched=request.accept_unmatched,
                of_folders=is_folder,
                doubts=parts if is_folder else (),
            )
        except ChoiceError as error:
            raise choice_error([*error.doubts, *doubts]) from None
    if doubts:
        doubts = [_for_recipe(request, source, doubt) for doubt in doubts]
        raise choice_error(doubts)
    if request.classes is not None and frozen is not None:
        if source.labels_with_samples and not has_label(table.labels).any():
            raise SourceError(
                f"--classes {shown(request.classes)} numbers labels before samples are fetched, "
                f"and {shown(request.source)} has no targets; give it targets, or --labels"
            )
        store, _ = split_uri(request.classes, request.storage_options)
        own = recordable_source(store) == recordable_source(request.store)
        from_0 = request.label_kind == "number"
        table = freeze_classes(table, frozen, shown(request.classes), grows=own, from_0=from_0)
    if request.labels is not None or request.classes is not None:
        return table
    return replace(table, labels_with_samples=source.labels_with_samples)
