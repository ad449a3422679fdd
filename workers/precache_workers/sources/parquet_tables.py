"""Parquet files with images in a column: bytes, or Hugging Face's struct of bytes and path.

Class names come from the metadata of the schema (Hugging Face's ``ClassLabel``). A sample's key is
the value of the column of keys, if the user names one. Otherwise it is the name of the file with
the path in the row's struct, if the paths of the file are all different, or else with the row
number.

A row has neither a size nor a time: its identity is that of its file. After a change of the file,
its rows are compared by content. A row group is read at once, up to the last row that is needed;
small row groups are read together.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO
from urllib.parse import unquote

import numpy as np

from precache.errors import SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import FileInfo, Folder
from precache.store.locations import Container
from precache_workers.runtime.time_limit import samples_at_work
from precache_workers.sources.base import (
    BY_DATASET,
    NO_COLUMNS,
    Columns,
    Doubt,
    Fetched,
    Sample,
    choice_error,
    require_columns,
)
from precache_workers.sources.column_evidence import (
    ColumnEvidence,
    doubt_of_rivals,
    names_splits,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    GrowingRows,
    Members,
    Read,
    TimeUpError,
    Wanted,
    container_etag,
    no_rows,
    structs,
    too_large_error,
)
from precache_workers.sources.file_ranges import GAP_BYTES, open_file
from precache_workers.sources.label_readings import quoted
from precache_workers.sources.labels import (
    MOST_TEXT,
    Kind,
    bits_column,
    cell_of,
    kind_of,
    texts_of_labels,
    typed_column,
    values_of,
)

IMAGE_COLUMNS = (
    "image", "img", "photo", "picture", "jpg", "jpeg", "png", "webp", "bytes", "content",
)  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "target", "cls", "category")
"""Usual names of columns; the first that a file has is used."""

LISTED_ROWS, LISTED_LISTS = 8192, 128
"""Rows whose labels and names are decoded at a time; fewer if labels are lists, since one long list
may stand for all rows of a page."""

FOOTER_BYTES = 16 << 20
"""Most bytes of footers that a process keeps."""

_ONE = ("names", "numbers", "values")
"""Kinds of one label a row."""

_KEYS = "a key is text or a whole number"


@dataclass(frozen=True)
class ChosenColumns:
    """The columns of a file that are read.

    Attributes
    ----------
    image, struct
        Column of images; True if its values are structs of bytes and path.
    classes
        Names of classes by number, if the schema has them.
    paths
        True if the structs have a path.
    labels
        Columns of labels: one, or one for each class with 0 and 1.
    others
        Columns that are not used.
    binary
        If there are no labels: columns whose type may hold 0 and 1.
    splits
        Columns that by name and type may name the split of each row.
    rivals
        If labels were guessed: other columns that may have them, by name or metadata.
    label
        Column of labels, or the key of the folders that name them; empty for none.
    ordered
        The labels are ordered categories.
    folder
        The label of all rows, if it comes from a folder such as ``label=cat``, not from a column.
    """

    image: str
    struct: bool
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    paths: bool
    folder: str | None = None
    others: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    label: str = ""
    rivals: tuple[str, ...] = ()
    ordered: bool = False

    @property
    def listed(self) -> tuple[str, ...]:
        """Columns that a listing reads beside names."""
        labels = self.labels or self.binary
        return tuple(dict.fromkeys((*labels, *self.splits, *self.rivals)))

    def kind(self, schema: Any) -> Kind | None:
        """Return the kind of the one column of labels; None if there is no such column."""
        return kind_of(schema.field(self.labels[0]).type) if len(self.labels) == 1 else None

    def describe(self, members: Members, schema: Any) -> None:
        """Give the members of a file what the choice says of them, before rows are read."""
        splits = {name: list[str]() for name in self.splits}
        rivals = {name: set[tuple[str, str]]() for name in self.rivals}
        label = self.label or ",".join(self.labels)
        bits = {name: set[int]() for name in self.binary}
        members.evidence = ColumnEvidence(label, bits, splits, rivals)
        members.classes = self.classes
        labels = f"labels from {quoted(self.labels)}" if self.labels else "no labels"
        labels += "" if self.labels else " (--label-column)"
        labels = labels if self.folder is None else "labels from the names of folders"
        others = f"; not used: {quoted(self.others, 8)}" if self.others else ""
        members.notes[f"Images from the column {self.image!r}, {labels}{others}"] += 1

    @property
    def image_leaf(self) -> str:
        return f"{self.image}.bytes" if self.struct else self.image


@dataclass(frozen=True)
class ParquetFormat:
    """Parquet files with images; see the module."""

    columns: Columns = NO_COLUMNS
    noun: str = "a Parquet table"
    suffixes: tuple[str, ...] = (".parquet",)
    typed: bool = True
    checks_members: bool = False

    def places(self) -> Any:
        """Return the type of the places of rows: their row group, and their number there."""
        import pyarrow as pa

        return pa.struct({"group": pa.int32(), "row": pa.int32()})

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        where = folder.path(file.name)
        members, rows = Members(rows=no_rows(self.places())), GrowingRows(self.places())
        with open_file(folder, file, GAP_BYTES) as stream, damaged(where):
            table = open_table(stream)
            count = table.metadata.num_rows
            if count > file.size:
                raise SourceError(f"{where} claims {count:,} rows and has {file.size:,} bytes")
            chosen = choose_columns(table.schema_arrow, self.columns, where, file.name)
            chosen.describe(members, table.schema_arrow)
            members.forward = True
            keys = _NameReader(self.columns.key, chosen)
            units = _units(table, chosen)
            several = "several" in str(chosen.kind(table.schema_arrow))
            at_once = LISTED_LISTS if several else LISTED_ROWS
            flat = [] if several or len(chosen.labels) > 1 else chosen.labels
            table = open_table(stream, table.metadata, keys.columns(flat))
            for group, (unit, nbytes) in enumerate(units):
                place = 0
                for names, labels in keys.read(table, group, chosen, at_once, members):
                    if time.monotonic() > until:
                        raise TimeUpError
                    numbers = np.arange(place, place + len(names), dtype=np.int32)
                    rows.extend(
                        names,
                        structs(self.places(), (np.full_like(numbers, group), numbers)),
                        units=np.full_like(numbers, unit),
                        sizes=np.full_like(numbers, -1),
                        etag=container_etag(file),
                        labels=labels,
                        nbytes=nbytes,
                    )
                    place += len(names)
                if place != (claimed := table.metadata.row_group(group).num_rows):
                    raise SourceError(
                        f"{where}: row group {group} has {place:,} rows, and its footer claims "
                        f"{claimed:,}"
                    )
        members.take(rows, file.name, self.columns.key, where)
        if chosen.folder is not None:
            members.rows = replace(members.rows, labels=_repeated(chosen.folder, len(members.rows)))
        return members

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        file = FileInfo(container.name, container.size, -1)
        numbers = [(place["group"], place["row"]) for place in wanted.places.to_pylist()]
        rows: dict[int, set[int]] = defaultdict(set)
        for group, row in numbers:
            rows[group].add(row)
        where = folder.path(container.name)
        stamp = where, f"{container.etag}:{container.ctime_ns}"
        footer = _footers.get(stamp)
        images: dict[tuple[int, int], Fetched] = {}
        missing = SampleError(f"{where} has no such row: its footer claims more than there are")
        try:
            with damaged(where):
                if footer is None:
                    with open_file(folder, file) as stream:
                        footer = open_table(stream).metadata
                schema = footer.schema.to_arrow_schema()
                chosen = choose_columns(schema, self.columns, where, container.name)
                end = _end(footer, chosen, *max(numbers))
                with open_file(folder, file, end=end) as stream:
                    table = open_table(stream, footer)
                    for group, some in sorted(rows.items()):
                        for row, image in _images(table, group, chosen, some, most_bytes):
                            images[group, row] = image
        except SourceError as error:
            missing = SampleError(str(error))
        if container.etag and footer is not None:
            _keep_footer(stamp, footer)
        return [images.get(number, missing) for number in numbers]


_footers: dict[tuple[str, str], Any] = {}
"""(Path, identity and ctime) -> footer of the last files that this process read."""
_lock = threading.Lock()


def _keep_footer(file: tuple[str, str], footer: Any) -> None:
    with _lock:
        _footers[file] = footer
        while sum(kept.serialized_size for kept in _footers.values()) > FOOTER_BYTES:
            del _footers[next(iter(_footers))]


def _end(footer: Any, chosen: ChosenColumns, group: int, row: int) -> int:
    """Estimate the offset in the file at which the image of a row ends."""
    described = footer.row_group(group)
    [column] = _image_columns(described, chosen)
    start = column.dictionary_page_offset or column.data_page_offset
    return int(start + column.total_compressed_size * (row + 1) // max(1, described.num_rows))


@contextmanager
def damaged(where: str) -> Iterator[None]:
    """Translate the errors that pyarrow raises for a damaged file.

    Raises
    ------
    SourceError
        The file is damaged.
    StorageError
        The operating system cannot read the file.
    """
    import pyarrow as pa

    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors have none
            raise StorageError(f"cannot read {where}: {error.strerror}") from None
        raise SourceError(f"{where} cannot be read: {printable(str(error))}") from None


def open_table(stream: BinaryIO, metadata: Any = None, repeated: Sequence[str] = ()) -> Any:
    """Open a Parquet file and read its pages only when needed, since row groups may be large.

    Parameters
    ----------
    metadata
        Footer of the same file, if it was read before.
    repeated
        Columns of text that are read as dictionaries: equal values are held once.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(
        stream,
        metadata=metadata,
        read_dictionary=list(repeated),
        buffer_size=1 << 20,
        pre_buffer=False,
        page_checksum_verification=True,
    )


def _units(table: Any, chosen: ChosenColumns) -> list[tuple[int, int]]:
    """Return the unit of each row group, and the mean bytes of an image in the unit.

    Small neighbours share a unit.
    """
    units: list[list[int]] = []
    held = 0
    for group in range(table.num_row_groups):
        nbytes = table.metadata.row_group(group).total_byte_size
        if not units or held + nbytes > UNIT_BYTES:
            units.append([])
            held = 0
        units[-1].append(group)
        held += nbytes
    means = [_row_bytes(table, groups, chosen) for groups in units]
    return [(unit, means[unit]) for unit, groups in enumerate(units) for _ in groups]


def _row_bytes(table: Any, groups: Sequence[int], chosen: ChosenColumns) -> int:
    """Return the mean bytes of an image in some row groups, according to the footer."""
    described = [table.metadata.row_group(group) for group in groups]
    columns = [column for group in described for column in _image_columns(group, chosen)]
    nbytes = sum(column.total_uncompressed_size for column in columns)
    mean: int = nbytes // max(1, sum(group.num_rows for group in described))
    return max(1, mean)


def _image_columns(described: Any, chosen: ChosenColumns) -> list[Any]:
    """Return the footer's description of the column of images in a row group."""
    columns = map(described.column, range(described.num_columns))
    return [column for column in columns if column.path_in_schema == chosen.image_leaf]


def _images(
    table: Any, group: int, chosen: ChosenColumns, rows: set[int], most_bytes: int
) -> Iterator[tuple[int, Fetched]]:
    """Yield (row, image) of the wanted rows of a row group.

    Rows are decoded one by one, and equal images are held once, since one large image may stand
    for thousands of rows of a page.
    """
    last, known = max(rows), dict[str, Sample]()
    batches = table.iter_batches(1, [group], [chosen.image_leaf], use_threads=False)
    for row, batch in enumerate(batches):
        samples_at_work().advance()  # row groups may be large, and networks slow
        if row in rows:
            column = batch.column(0).field(0) if chosen.struct else batch.column(0)
            sample = _sample(column[0].as_py(), most_bytes)
            if isinstance(sample, Sample):
                sample = known.setdefault(sample.content, sample)
            yield row, sample
        if row == last:
            return


def _sample(data: bytes | None, most_bytes: int) -> Fetched:
    if data is None:
        return SampleError(
            "its row has no image, or only a path of one; write the file with all images embedded, "
            "or, to read the files there, give --source-kind manifest"
        )
    if len(data) > most_bytes:
        return too_large_error(len(data), most_bytes)
    return Sample.of(data)


class _NameReader:
    """Reads names and labels of rows, batch by batch."""

    def __init__(self, key: str | None, chosen: ChosenColumns) -> None:
        self._key = key or (f"{chosen.image}.path" if chosen.paths else None)

    def columns(self, labels: Sequence[str]) -> list[str]:
        return [name for name in (self._key, *labels) if name is not None]

    def read(
        self, table: Any, group: int, chosen: ChosenColumns, at_once: int, members: Members
    ) -> Iterator[tuple[list[str], Any]]:
        """Yield the names and the labels of rows."""
        import pyarrow as pa

        columns = self.columns(chosen.listed)
        if not columns:
            rows = table.metadata.row_group(group).num_rows
            yield [""] * rows, pa.nulls(rows)
            return
        for batch in table.iter_batches(at_once, [group], columns, use_threads=False):
            names = [""] * len(batch)
            if self._key is not None:
                names = texts_of(_leaf(batch, self._key), self._key)
            labels = row_labels(batch, chosen, members)
            yield names, labels


def _leaf(batch: Any, name: str) -> Any:
    """Return a column, or a field of a struct by its dotted path."""
    if name in batch.schema.names:
        return batch.column(name)
    outer, _, inner = name.partition(".")
    return batch.column(outer).field(inner)


def row_labels(batch: Any, chosen: ChosenColumns, members: Members) -> Any:
    """Return the labels of rows as an Arrow array; drop columns from `Members` with other values.

    Raises
    ------
    ValueError
        Some value is no label.
    """
    import pyarrow as pa

    members.evidence.look(
        lambda name: values_of(batch.column(name).unique()),
        lambda name: texts_of_labels(typed_column(batch.column(name), name)),
    )
    if not chosen.labels:
        return pa.nulls(len(batch))
    if chosen.ordered:
        categories = batch.column(chosen.labels[0]).dictionary
        members.evidence.orders.add(tuple(texts_of(categories, chosen.labels[0])))
    if len(chosen.labels) == 1:
        return typed_column(batch.column(chosen.labels[0]), chosen.labels[0])
    columns = [
        [cell_of(value, name) for value in batch.column(name).to_pylist()] for name in chosen.labels
    ]
    return bits_column(zip(*columns, strict=True))


def texts_of(column: Any, name: str) -> list[str]:
    """Return keys, or labels of one class, as text; empty for none.

    Bytes that are not UTF-8 become surrogates.

    Raises
    ------
    ValueError
        The values are neither text nor whole numbers, or too long.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        values = texts_of(column.dictionary, name)
        return ["" if index is None else values[index] for index in column.indices.to_pylist()]
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif kind_of(column.type) not in ("numbers", "names"):
        raise ValueError(f"its column {name} has values of type {column.type}; {_KEYS}")
    texts = ["" if value is None else str(value) for value in values_of(column)]
    if max(map(len, texts), default=0) > MOST_TEXT:
        raise ValueError(
            f"its column {name} has a text of more than {MOST_TEXT:,} characters; keys and labels "
            "are shorter"
        )
    return texts


def is_ordered(kind: Any) -> bool:
    """Return True for a type of categories with an order."""
    import pyarrow as pa

    return bool(pa.types.is_dictionary(kind) and kind.ordered and kind_of(kind) == "names")


def may_be_binary(schema: Any, name: str) -> bool:
    """Return True if a column's type may hold 0 and 1."""
    return kind_of(schema.field(name).type) in ("numbers", "values")


def may_name_splits(schema: Any, name: str) -> bool:
    """Return True if a column may name the split of each row, by its name and type."""
    return names_splits(name) and kind_of(schema.field(name).type) in _ONE


def _repeated(text: str, count: int) -> Any:
    """Return the label of a folder, which may be a number, for each row."""
    import pyarrow as pa

    number = text.isdecimal() and len(text) < 18
    value = (int(text) if number else text) if text else None
    return pa.array([value], None if text else pa.null()).take(pa.array([0] * count, pa.int32()))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _holds_images(kind: Any) -> bool:
    import pyarrow as pa

    if not pa.types.is_struct(kind):
        return _is_bytes(kind)
    names = [kind.field(number).name for number in range(kind.num_fields)]
    return "bytes" in names and _is_bytes(kind.field("bytes").type)


def _require_columns(schema: Any, columns: Columns, folders: Collection[str], where: str) -> None:
    """Raise `SourceError` for a column that does not exist, or whose type cannot be that of keys.

    Labels may come from names of folders, and keys from fields of structs.
    """
    import pyarrow as pa

    structs = [field for field in schema if pa.types.is_struct(field.type)]
    parts = [f"{field.name}.{part.name}" for field in structs for part in field.type]
    of_labels = [*schema.names, *folders]
    require_columns(schema.names, [columns.image], where)
    require_columns(of_labels, filter(None, columns.labels(of_labels)), where)
    require_columns([*schema.names, *parts], [columns.key], where)
    if columns.key in schema.names:
        kind = schema.field(columns.key).type
        if kind_of(kind) not in ("numbers", "names"):
            raise SourceError(
                f"{where}: its column {columns.key!r} has values of type {kind}; {_KEYS}"
            )


def choose_columns(schema: Any, columns: Columns, where: str, file: str = "") -> ChosenColumns:
    """Choose the columns of a file: those that the user names, else by type, metadata and name.

    The label may come from a folder in the file's name, such as ``label=cat`` of a partitioned
    table.
    """
    import pyarrow as pa

    features = _features(schema)
    pairs = [part.partition("=") for part in file.split("/")[:-1] if part.find("=") > 0]
    folders = {name: _folder_value(value) for name, _, value in pairs if name not in schema.names}
    _require_columns(schema, columns, folders, where)
    image = columns.image or _guess_image(schema, features, where)
    kind = schema.field(image).type
    if not _holds_images(kind):
        raise SourceError(
            f"{where}: its column {image!r} has values of type {kind}; images are bytes, or a "
            "struct of bytes and path"
        )
    struct = bool(pa.types.is_struct(kind))
    parts = [kind.field(number).name for number in range(kind.num_fields)] if struct else []
    usual = _usual(LABEL_COLUMNS, [*folders])
    labels = tuple(filter(None, columns.labels((*schema.names, *folders))))
    guess = None
    if columns.label is None:
        guess = _guess_label(schema, features) or next(iter(usual), None)
        labels = () if guess is None else (guess,)
        if guess is None:
            _require_no_label(schema, {image, columns.key}, where)
    folder = folders.get(labels[0]) if len(labels) == 1 else None
    labels = labels if folder is None else ()
    for label in labels:
        if kind_of(schema.field(label).type) is None:
            raise SourceError(
                f"{where}: its column {label} has values of type {schema.field(label).type}; a "
                "label is a class, a number, or a list of classes"
            )
    classes = class_names(schema, labels)
    others = tuple(name for name in schema.names if name not in (image, *labels, columns.key))
    bare = not labels and folder is None and columns.label is None
    possible = tuple(name for name in others if bare and may_be_binary(schema, name))
    paths = "path" in parts and kind_of(kind.field("path").type) == "names"
    splits = tuple(name for name in others if may_name_splits(schema, name))
    rivals = _rivals(schema, features, guess, others) if guess and labels else ()
    ordered = len(labels) == 1 and is_ordered(schema.field(labels[0]).type)
    return ChosenColumns(
        image,
        struct,
        labels,
        classes,
        paths,
        folder,
        others,
        possible,
        splits,
        guess or "",
        rivals,
        ordered,
    )


def _folder_value(text: str) -> str:
    """Return the value in a folder's name, which Hive encodes; empty for none."""
    return "" if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text)


def class_names(schema: Any, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes by number: of several columns theirs, or what metadata has."""
    if len(labels) != 1:
        return tuple(labels)
    named = _features(schema).get(labels[0], {})
    named = named.get("feature", named)  # the element type of a list
    names = named.get("names") if _is_class(named) else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features in Hugging Face's metadata, by column; none if it is damaged."""
    try:
        document = json.loads((schema.metadata or {})[b"huggingface"])
        features = document["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return {}


def _guess_image(schema: Any, features: dict[str, dict[str, Any]], where: str) -> str:
    able = [name for name in schema.names if _holds_images(schema.field(name).type)]
    declared = [name for name in able if features.get(name, {}).get("_type") == "Image"]
    named = _usual(IMAGE_COLUMNS, declared or able)
    candidates = named or declared or able
    if not candidates:
        raise SourceError(
            f"{where} has no column of images (bytes, or a struct of bytes and path); its columns "
            f"are {', '.join(f'{field.name!r} ({field.type})' for field in [*schema][:20])}. If "
            "one has URIs of images, give --source-kind manifest; to build from others, "
            f"{BY_DATASET}"
        )
    if len(candidates) > 1:
        raise choice_error(
            doubt_of_rivals("--image-column", candidates[:20], "may have the images", where)
        )
    return candidates[0]


def _require_no_label(schema: Any, used: Collection[str | None], where: str) -> None:
    """Raise `ChoiceError` for an unused column of a usual name, whose type cannot hold labels."""
    import pyarrow as pa

    for name in _usual(LABEL_COLUMNS, [name for name in schema.names if name not in used]):
        kind = schema.field(name).type
        if not pa.types.is_null(kind):
            text = f"the column {name!r} of {where} has values of type {kind}, which are no labels"
            none = ("--label-column", ""), "for no label"
            raise choice_error([Doubt.of(text, none, ((), "write text or whole numbers"))])


def _guess_label(schema: Any, features: dict[str, dict[str, Any]]) -> str | None:
    declared = [name for name in schema.names if _is_class(features.get(name))]
    able = [name for name in schema.names if kind_of(schema.field(name).type) is not None]
    chosen = [*_usual(LABEL_COLUMNS, declared), *declared, *_usual(LABEL_COLUMNS, able)]
    return next(iter(chosen), None)


def _rivals(
    schema: Any, features: dict[str, dict[str, Any]], guess: str, others: Sequence[str]
) -> tuple[str, ...]:
    """Return the columns that have labels by what the guessed column was taken for: its name, or
    else the metadata."""
    able = [name for name in others if kind_of(schema.field(name).type) is not None]
    if _usual(LABEL_COLUMNS, [guess]):
        return tuple(_usual(LABEL_COLUMNS, able))
    return tuple(name for name in able if _is_class(features.get(name)))


def _usual(usual: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that have a usual name, in the order of the usual names."""
    lower = {name.lower(): name for name in reversed(names)}
    return [lower[name] for name in usual if name in lower]


def _is_class(feature: Any) -> bool:
    """Return True if a feature of Hugging Face's metadata is a class label."""
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
