"""The documents of a store, as models: what is read from one is checked before it is used."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from precache.errors import StoreError
from precache.recipe.base import canonical_json
from precache.recipe.ops import DTYPES
from precache.runtime.process_id import Process

FORMAT = 2
"""Of the store; a reader refuses a higher one by name. In 1 no field has variants."""

_HEX = re.compile("[0-9a-f]{16,64}")
Model = TypeVar("Model", bound=BaseModel)


def _hex(value: str) -> str:
    if not _HEX.fullmatch(value):
        raise ValueError(f"{value!r} is no version id")
    return value


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise ValueError(f"{value!r} is no dtype of a row; there are {', '.join(DTYPES)}")
    return value


class _Op(BaseModel):
    op: str
    function: str = ""


class _Field(BaseModel):
    ops: tuple[_Op, ...] = ()


_FIELDS = TypeAdapter(dict[str, _Field])


def _recipe(value: dict[str, Any]) -> dict[str, Any]:
    """A recipe, of this release or another: fields with ops, whatever else these have."""
    _FIELDS.validate_python(value.get("fields"))
    return value


VersionId = Annotated[str, AfterValidator(_hex)]
ArrayName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[0-9]{1,9})?$")]
"""Of a field, or ``image.4`` for variant 4 of the field `image`."""


Dtype = Annotated[str, AfterValidator(_dtype)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Length = Annotated[int, Field(gt=0, lt=1 << 63)]
Time = Annotated[float, Field(ge=0, lt=250_000_000_000)]
"""Seconds since 1970, of a year with four digits."""

MOST_AXES = 31
"""Of a row: numpy has 32 at most."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    @classmethod
    def read(cls, data: bytes, where: str) -> Self:
        """From JSON; a `StoreError` that names the file where it is not that."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise refuse(error, where) from None


def version_id(fingerprint: str, rows_digest: str, rows_per_shard: int, retries: int = 0) -> str:
    """The id of the version that a recipe, a row table and rows per shard make.

    Parameters
    ----------
    retries
        How often it was made anew: samples that had failed were tried again, and some were mended,
        or all was computed again.
    """
    parts = [fingerprint, rows_digest, rows_per_shard, *([retries] if retries else [])]
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]


def format_of(arrays: Iterable[str]) -> int:
    """The lowest format of the store in which a version with these arrays can be written."""
    return 2 if any("." in name for name in arrays) else 1


def refuse(error: ValidationError, where: str) -> StoreError:
    """What is wrong with a stored document, in one line."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the document"
    return StoreError(f"{where} is damaged or forged: {place}: {first['msg']}")


class CommitEntry(_Document):
    """A file of the commit log: the version made current, the one before, seconds since 1970.

    `source` is what a build was given, where that has no credentials. `code` is, by name of each
    op, function and factory that made the version, its digest and what stands for that in
    fingerprints and row tables: of versions of older releases, versions of libraries, or a hash of
    its module.
    """

    version: VersionId
    parent: VersionId | None = None
    time: Time
    source: str | None = None
    code: dict[str, tuple[str, str]] | None = None

    def to_json(self) -> bytes:
        """What `read` reads; without what is not known, as releases wrote it that knew of none."""
        left_out = {name for name in ("source", "code") if getattr(self, name) is None}
        return self.model_dump_json(exclude=left_out).encode()


class RowAttributes(_Document):
    """Shape and dtype of one row of a field."""

    shape: Annotated[tuple[Count, ...], Field(max_length=MOST_AXES)]
    dtype: Dtype


class FieldAttributes(RowAttributes):
    """An array of a committed version, with its codec, bytes of all rows, and what made them."""

    codec: str
    raw: NonNegativeInt
    stored: NonNegativeInt
    recipe: str = ""


class Identity(_Document):
    """What tells a version from others; `_build/build.json` while it is being made.

    That file also has the version's rows, when (seconds since 1970) and by which process a build
    last began it, why that one failed, of which version it is a refresh, and whether all of it is
    computed again: then no other build goes on with it.
    """

    version: VersionId
    fingerprint: str
    rows_digest: str
    rows_per_shard: Length
    fields: Mapping[ArrayName, RowAttributes]
    retries: NonNegativeInt = 0
    rows: Length | None = None
    begun: Time | None = None
    by: Process | None = None
    failed: str | None = None
    refreshes: VersionId | None = None
    recompute: bool = False


class Claimed(_Document):
    """A file of a claim: who holds it, a note for others, seconds since 1970 of its last beat."""

    holder: Process
    note: str = ""
    time: Time


class Attributes(_Document):
    """`attributes.precache` of a version's group.

    `decides` is what stands in the fingerprint for whatever decides the pixels, its parameters
    apart, by name; `behaviours` what ops made of each of their probes, as
    `precache_workers.ops.behaviour` has it. Versions of older releases have neither.
    """

    format: int
    version: VersionId
    fingerprint: str
    rows_digest: str
    rows_per_shard: Length
    fields: Annotated[Mapping[ArrayName, FieldAttributes], Field(min_length=1)]
    rows: Length
    holes: NonNegativeInt
    retries: NonNegativeInt = 0
    classes: tuple[str, ...] = ()
    mean: dict[str, list[FiniteFloat]] = {}
    std: dict[str, list[FiniteFloat]] = {}
    pipeline: Annotated[dict[str, Any], AfterValidator(_recipe)]
    digests: dict[str, str] = {}
    libraries: dict[str, str] = {}
    decides: dict[str, str] = {}
    behaviours: dict[str, dict[str, str]] = {}
    created: str = ""
