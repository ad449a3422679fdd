"""The JSON documents of a store, as models that validate what is read."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from precache.errors import StoreError
from precache.recipe.base import canonical_json
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import Field as RecipeField
from precache.recipe.recipe import Recipe, field_name
from precache.recipe.variants import variants_of
from precache.runtime.process_id import Process
from precache.store.labels import CLASS_DTYPES, MOST_CLASSES, kind_in_words
from precache.store.layout import RowShape

FORMAT = 5
"""The store format; a version of any other number is refused."""

_VARIANT = re.compile(r"\.[0-9]{1,9}\Z")


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise ValueError(f"{value!r} is no dtype of a row; there are {', '.join(DTYPES)}")
    return value


def _array_name(value: str) -> str:
    field_name(_VARIANT.sub("", value))
    return value


VersionName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.[1-9][0-9]{0,8}$")]
"""Name of a version's folder, `ID.G`."""

ArrayName = Annotated[str, AfterValidator(_array_name)]
"""Name of a field, or ``image.4`` for variant 4 of the field `image`."""


Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""XXH3-128 in hex."""

VersionId = Digest

SmallName = Annotated[
    str,
    Field(
        pattern=r"^([^./]+/)?[^./]+(\.[0-9]{1,9})?(\.shape)?/(zarr\.json|c/[0-9]+(/0)*)$",
        max_length=1000,
    ),
]
"""Name of an object of a small array, or of the document of an array or group."""

StoredDtype = Annotated[str, AfterValidator(_dtype)]
Extent = Annotated[int, Field(ge=0, lt=1 << 63)]
Length = Annotated[int, Field(gt=0, lt=1 << 63)]
Time = Annotated[float, Field(ge=0, lt=250_000_000_000)]
"""Seconds since 1970, in a year with four digits."""

MAX_ROW_AXES = 31
"""Axes of a row: NumPy's older releases have up to 32 for an array."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    @classmethod
    def read(cls, data: bytes, where: str) -> Self:
        """Parse JSON; raise a `StoreError` that names the file if it is not such a document."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise document_error(error, where) from None


def version_id(fingerprint: str, rows_digest: str, rows_per_shard: int) -> str:
    """Compute the id of the version of a recipe, a row table and a number of rows per shard."""
    parts = [fingerprint, rows_digest, rows_per_shard]
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]


def document_error(error: ValidationError, where: str) -> StoreError:
    """Make the error for an invalid document, in one line."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the document"
    given = f", not {first['input']!r:.99}" if first["type"] == "string_pattern_mismatch" else ""
    return StoreError(f"{where} is damaged or forged: {place}: {first['msg']}{given}")


class LogEntry(_Document):
    """An entry of the log: the version that is current from there on, and versions removed.

    Attributes
    ----------
    version
        Empty while no version is current.
    root
        Digest of its root.
    parent, time
        The version that it replaced, and when: seconds since 1970.
    source
        The source that a build was given, unless it has credentials.
    removed
        Versions that are removed from there on.
    nonce
        Makes the entry differ from all others.
    number
        That of its name.
    """

    version: VersionName = ""
    root: Digest | None = None
    parent: VersionName | None = None
    time: Time
    source: str | None = None
    removed: tuple[VersionName, ...] = ()
    nonce: str = ""
    number: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.version and not self.removed:
            raise ValueError("it names no version")
        return self

    def to_json(self) -> bytes:
        """Serialise; what is unknown is left out."""
        return self.model_dump_json(exclude_defaults=True).encode()

    def with_(self, **changes: Any) -> Self:
        """Return the entry with some attributes changed."""
        return self.model_copy(update=changes)


class RowAttributes(_Document):
    """Shape and dtype of one row of a field; see `RowShape`."""

    shape: Annotated[tuple[Extent, ...], Field(max_length=MAX_ROW_AXES)]
    dtype: StoredDtype
    ragged: bool = False

    @property
    def row(self) -> RowShape:
        """The same, to compute with."""
        return RowShape(self.shape, self.dtype, self.ragged)


class LabelAttributes(RowAttributes):
    """Class numbers (int8 to int64), numbers (float32), or several classes of a row (uint8).

    `with_samples` is `RowTable.labels_with_samples`.
    """

    with_samples: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        several = self.dtype == "uint8" and len(self.shape) == 1
        single = self.dtype in (*CLASS_DTYPES, "float32") and not self.shape
        if not (several and 0 < self.shape[0] <= MOST_CLASSES) and not single:
            raise ValueError(f"labels are never {self.dtype} {self.shape}")
        return self


class ArrayAttributes(RowAttributes):
    """An array of a version: its codec, and the digest of the ops that make its rows."""

    codec: str
    recipe: str


class FieldAttributes(ArrayAttributes):
    """An array of a committed version, with its raw and stored bytes."""

    raw: NonNegativeInt
    stored: NonNegativeInt


class Identity(_Document):
    """Identity of a version, and description of its build (`_build/build.json`).

    The file also has the version's recipe and rows, the time (seconds since 1970) and the process
    of the last build, the reason why that build failed, the version that it refreshes, and whether
    everything is recomputed: then no other build resumes it.
    """

    version: VersionName
    fingerprint: str
    rows_digest: str
    rows_per_shard: Length
    fields: Mapping[ArrayName, ArrayAttributes]
    recipe: Recipe
    source: str
    rows: Length
    begun: Time
    by: Process
    refreshes: VersionName | None
    recompute: bool
    failed: str | None = None


class LeaseDocument(_Document):
    """A lease: its holder, a note for others, seconds since 1970 of its last heartbeat.

    `nonce` makes it differ from those of all other holders; `released` is true once its holder has
    given it back.
    """

    holder: Process
    note: str = ""
    time: Time
    nonce: str = ""
    released: bool = False


class TableAttributes(_Document):
    """Attributes of a stored row table, beside its arrays."""

    rows: Length
    classes: tuple[str, ...]
    label: LabelAttributes
    source: str


class Attributes(TableAttributes):
    """`attributes.precache` of a version's group.

    `decides` has, by name, the text in the fingerprint for everything besides parameters that
    decides the pixels; `behaviours` the outputs of ops for each of their probes, as in
    `precache_workers.ops.behaviour`. `digest` is that of the document, and `objects` has size and
    digest of every object but the shards (`store.tree`). `source` is that of the row table.
    """

    digest: str

    format: int
    version: VersionId
    fingerprint: str
    rows_digest: str
    rows_per_shard: Length
    fields: Annotated[Mapping[ArrayName, FieldAttributes], Field(min_length=1)]
    holes: NonNegativeInt
    mean: dict[str, list[FiniteFloat]]
    std: dict[str, list[FiniteFloat]]
    recipe: Recipe
    objects: dict[SmallName, tuple[NonNegativeInt, Digest]]
    libraries: dict[str, str]
    decides: dict[str, str]
    behaviours: dict[str, dict[str, str]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.declared.keys() != self.fields.keys():
            raise ValueError(f"its recipe has the arrays {', '.join(self.declared)}")
        for array, values in (*self.mean.items(), *self.std.items()):
            if array not in self.fields or len(values) not in self.fields[array].shape[:1]:
                raise ValueError(f"{array!r} has {len(values)} means, and not one for each channel")
        for arrays in variants_of(self.fields).values():
            if len({(self.fields[array].row, self.fields[array].codec) for array in arrays}) > 1:
                raise ValueError(f"{', '.join(arrays)} are not variants of one field")
        return self

    @functools.cached_property
    def declared(self) -> Mapping[str, RecipeField]:
        """The recipe's field of each array."""
        return self.recipe.by_array().fields

    @property
    def label_kind(self) -> str:
        """The kind of the labels, in words."""
        return kind_in_words(self.label.shape, self.label.dtype)
