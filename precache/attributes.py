"""The documents of a store, as models: what is read from one is checked before it is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
)

from precache.errors import StoreError
from precache.liveness import Process

FORMAT = 2
"""Of the store; a reader refuses a higher one by name. In 1 no field has variants."""

_HEX = re.compile("[0-9a-f]{16,64}")
Model = TypeVar("Model", bound=BaseModel)


def _hex(value: str) -> str:
    if not _HEX.fullmatch(value):
        raise ValueError(f"{value!r} is no version id")
    return value


VersionId = Annotated[str, AfterValidator(_hex)]
ArrayName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[0-9]{1,9})?$")]
"""Of a field, or ``image.4`` for variant 4 of the field `image`."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    @classmethod
    def read(cls, data: bytes, where: str) -> Self:
        """From JSON; a `StoreError` that names the file where it is not that."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise refuse(error, where) from None


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

    `source` is what a build was given, where that has no credentials.
    """

    version: VersionId
    parent: VersionId | None = None
    time: float
    source: str | None = None

    def to_json(self) -> bytes:
        """What `read` reads; without a source as releases wrote it that knew of none."""
        left_out = {"source"} if self.source is None else None
        return self.model_dump_json(exclude=left_out).encode()


class RowAttributes(_Document):
    """Shape and dtype of one row of a field."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str


class FieldAttributes(RowAttributes):
    """An array of a committed version, with its codec, bytes of all rows, and what made them."""

    codec: str
    raw: NonNegativeInt
    stored: NonNegativeInt
    recipe: str = ""


class Identity(_Document):
    """What tells a version from others; `_build/build.json` while it is being made.

    That file also has the version's rows, when (seconds since 1970) and by which process a build
    last began it, why that one failed, and of which version it is a refresh.
    """

    version: VersionId
    fingerprint: str
    rows_digest: str
    rows_per_shard: PositiveInt
    fields: Mapping[ArrayName, RowAttributes]
    retries: NonNegativeInt = 0
    rows: PositiveInt | None = None
    begun: float | None = None
    by: Process | None = None
    failed: str | None = None
    refreshes: VersionId | None = None


class Claimed(_Document):
    """A file of a claim: who holds it, a note for others, seconds since 1970 of its last beat."""

    holder: Process
    note: str = ""
    time: float


class Attributes(_Document):
    """`attributes.precache` of a version's group."""

    format: int
    version: VersionId
    fingerprint: str
    rows_digest: str
    rows_per_shard: PositiveInt
    fields: Annotated[Mapping[ArrayName, FieldAttributes], Field(min_length=1)]
    rows: PositiveInt
    holes: NonNegativeInt
    retries: NonNegativeInt = 0
    classes: tuple[str, ...] = ()
    mean: dict[str, list[float]] = {}
    std: dict[str, list[float]] = {}
    pipeline: dict[str, Any]
    digests: dict[str, str] = {}
    libraries: dict[str, str] = {}
    created: str = ""
