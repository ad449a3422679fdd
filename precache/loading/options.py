"""The options of a `Loader`, validated before anything is opened."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from precache.errors import UsageError
from precache.loading.ranks import find_local_rank, find_rank
from precache.loading.sequences import Form
from precache.runtime.integers import whole
from precache.storage.open import address_of
from precache.transforms import require_step

SHUFFLE_WINDOW = 8
"""Shards that a block shuffle mixes by default."""


@dataclass(frozen=True)
class Block:
    """A shuffle that mixes a few random shards at a time, so that only these are read from.

    Parameters
    ----------
    window
        Shards mixed at a time: by default 8, or as many as a given cache limit has room for.
    nodes
        Deal out the shards to so many nodes permanently, so that the cache of each needs to hold
        its share alone. The order is a function of this number, not of how many nodes there are;
        `batch_size` times `world_size` must be a multiple of it.

    Raises
    ------
    UsageError
        They are no whole numbers from 1 up.
    """

    window: int | None = None
    nodes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("nodes", self.nodes)):
            if value is not None or name == "nodes":
                object.__setattr__(self, name, whole(name, value, 1))


@dataclass(frozen=True)
class Buckets:
    """A shuffle by which the rows of a batch have similar lengths, so that little is padded.

    Rows are shuffled within buckets, and the batches of all buckets are. Where two buckets meet, a
    batch has rows of both. The order depends on the rows of a step over all ranks: a loop is
    resumed with the same `batch_size` times `world_size`.

    Parameters
    ----------
    field
        A field whose rows differ in length, such as texts or tokens.
    count
        Most buckets, which end at the lengths that leave the least to pad: more of them leave less,
        and mix less.

    Raises
    ------
    UsageError
        `count` is no whole number from 1 to 32,767.
    """

    field: str
    count: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole("count", self.count, 1))
        if self.count >= 1 << 15:
            raise UsageError(f"count is {self.count}; give at most 32,767 buckets")


@dataclass(frozen=True, eq=False)
class Weighted:
    """A shuffle that draws as many rows as there are, with replacement.

    Parameters
    ----------
    weights
        (rows,) of the version, holes included, not negative: rows are drawn in proportion to them.
        An array is kept, not copied. It must not change where it is of more than 4 million rows;
        draws from one that did are refused.
    """

    weights: Any

    def __post_init__(self) -> None:
        if self.weights is None:
            raise UsageError("weights is None; give a number for each row of the version")
        if isinstance(self.weights, Iterator):  # a copy of a loader takes them again
            object.__setattr__(self, "weights", [*self.weights])


@dataclass(frozen=True)
class Cache:
    """A folder on a local disk for whole shards of a remote store.

    All loaders of this user on a node may share it; it is refused if another user owns it or others
    can write to it, and links in it are never followed.

    Parameters
    ----------
    folder
        Made if missing.
    limit
        Its size in bytes, or text such as ``"200GB"``, which only the shards of batches being read
        may exceed; by default nine tenths of the disk.
    """

    folder: str | os.PathLike[str]
    limit: int | str | None = None


Place = Literal["host", "device"]
Access = Literal["map", "pread"]


@dataclass(frozen=True)
class Reading:
    """Threads and memory with which rows are read. The batches are the same with any.

    Parameters
    ----------
    num_threads
        Decoding threads; by default one where reading is copying, else up to four, and no more than
        the cores that this process may use by its affinity and the CPU quota of its control group.
    prefetch_batches
        Batches prepared ahead; by default chosen from the size of a batch and the threads.
    resident
        ``host`` or ``device``: decode everything once into that memory and gather batches there;
        refused if it does not fit.
    decompress
        ``host``, or ``device``: zstd frames go to the CUDA device as they are, and nvCOMP
        decompresses them there. Falls back to the host, and logs why, if there is no nvCOMP or no
        CUDA device. Checksums of frames are checked on the host.
    access
        ``map``, or ``pread`` for a network file system, where another client may truncate a mapped
        file, which would end the process.

    Raises
    ------
    UsageError
        A number is no whole number from 1 up, or a choice is none of these.
    """

    num_threads: int | None = None
    prefetch_batches: int | None = None
    resident: Place | None = None
    decompress: Place = "host"
    access: Access = "map"

    def __post_init__(self) -> None:
        for name in ("num_threads", "prefetch_batches"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(name, value, 1))
        for name, allowed in (
            ("resident", (None, *get_args(Place))),
            ("decompress", get_args(Place)),
            ("access", get_args(Access)),
        ):
            object.__setattr__(self, name, require_choice(name, getattr(self, name), allowed))


Flag = Literal[True, False]


class LoaderOptions(BaseModel):
    """The parameters of `Loader`, which documents them.

    `device`, `rank` and `world_size` are those that were found where none were given.

    Raises
    ------
    UsageError
        A value makes no sense, or contradicts another one.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    batch_size: int
    shuffle: Literal[True, False, "full", "block"] | Block | Buckets | Weighted
    seed: int
    drop_last: Flag
    device: torch.device
    fields: Any
    transform: Any
    output: Literal["dict", "tuple"] | dict[str, Form]
    reading: Reading
    cache: Cache | None
    storage_options: Any
    rank: int
    world_size: int
    rows: Any
    refresh: Literal[None, "epoch"]

    @model_validator(mode="before")
    @classmethod
    def _find(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Find the device and the rank."""
        names = ("rank", "world_size")
        given = [None if values[name] is None else whole(name, values[name]) for name in names]
        found = dict(zip(names, find_rank(*given), strict=True))
        return {**values, "device": find_device(values["device"]), **found}

    @field_validator("*", mode="before")
    @classmethod
    def _convert(cls, value: Any, info: ValidationInfo) -> Any:
        """Take whole numbers, and any value that equals a choice, also of NumPy's types."""
        name = str(info.field_name)
        kind: Any = cls.model_fields[name].annotation
        if kind is int:
            return whole(name, value, 1 if name == "batch_size" else None)
        if name == "cache":
            cache = value if value is None or isinstance(value, Cache) else Cache(value)
            folder = cache and cache.folder
            if cache and (not isinstance(folder, str | os.PathLike) or "\0" in str(folder)):
                raise UsageError(f"cache is {value!r}; give a folder on a local disk, or a Cache")
            return cache
        if name == "reading":
            if not isinstance(value, Reading | None):
                raise UsageError(f"reading is {value!r}; give a Reading, as Reading(num_threads=2)")
            return value or Reading()
        if name == "fields" and not isinstance(value, Iterable | None):
            raise UsageError(f"fields is {value!r}; give names of fields, such as ['image']")
        if name == "transform" and value is not None:
            return require_step("transform", value)
        if name == "output" and isinstance(value, Mapping):
            forms = get_args(Form)
            return {str(n): require_choice(f"output[{n!r}]", v, forms) for n, v in value.items()}
        literals = (part for part in (kind, *get_args(kind)) if get_origin(part) is Literal)
        choices = get_args(next(literals, None))
        if not choices or isinstance(value, Block | Buckets | Weighted):
            return value
        return require_choice(name, value, choices)

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        weighted, resident = isinstance(self.shuffle, Weighted), self.reading.resident
        if self.refresh and (self.rows is not None or resident or weighted):
            raise UsageError("rows, weights and resident need one version; leave out refresh")
        if self.batch_size * self.world_size >= 2**63:
            raise UsageError(
                f"batch_size is {self.batch_size} on each of {self.world_size} ranks; give less "
                "than 2**63 rows a step"
            )
        if resident == "device" and self.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"resident='device' needs a CUDA device, and device is {str(self.device)!r}; give "
                "resident='host'"
            )
        return self


OF_DATALOADER = (
    "num_workers", "prefetch_factor", "persistent_workers", "sampler", "batch_sampler",
    "collate_fn", "pin_memory",
)  # fmt: skip
"""Options of torch's `DataLoader` that a `Loader` has not."""


class FixedOptions:
    """Base of iterables that options decide when they are made.

    An option that is set later, or in a subclass, is refused, unless the subclass iterates itself.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        # Its own names first: some are set with each batch.
        if not name.startswith("_"):
            _require_followed(name, value, type(self))
        super().__setattr__(name, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__module__.startswith(__package__):
            for name, value in vars(cls).items():
                _require_followed(name, value, cls)


def _require_followed(name: str, value: Any, kind: Any) -> None:
    is_option = name in LoaderOptions.model_fields or hasattr(Reading, name)
    if name in OF_DATALOADER:
        is_option = value is not None
    if is_option and kind.__iter__.__module__.startswith(__package__):
        raise UsageError(
            f"{name} was set on a {kind.__name__}, and its batches would not follow it: give "
            f"{name} when it is made, if it has such an option"
        )


def require_path(uri: Any) -> str:
    """Return a path or URL as text; raise `UsageError` if it is none."""
    if not isinstance(uri, str | os.PathLike):
        raise UsageError(
            f"a {type(uri).__name__} was given for a store; give its path or URL, and to a Loader "
            "the rows of a subset as rows=, by their numbers or keys (Version.rows_of_keys)"
        )
    return address_of("the store", uri)


def require_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return the allowed value that `value` equals; raise `UsageError` if there is none."""
    try:
        return allowed[allowed.index(value)]
    except (ValueError, RuntimeError):  # an array and a tensor cannot be compared
        given, choices = reprlib.repr(value), ", ".join(map(str, allowed))
        raise UsageError(f"{name} is {given}; choose one of {choices}") from None


def named_device(device: str | torch.device) -> torch.device:
    """Return the device of a name; raise `UsageError` if torch knows none."""
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not one torch knows: {error}") from None


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device that batches go to; a CUDA device with its index.

    Parameters
    ----------
    device
        None for this rank's CUDA device, or the CPU if there is none.

    Raises
    ------
    UsageError
        There is no such device.
    """
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        rank = find_local_rank()
        if rank is None:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", rank % torch.cuda.device_count())
    chosen = named_device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, and torch sees no CUDA device")
    if chosen.type != "cuda":
        if chosen.type == "meta":
            raise UsageError("device 'meta' keeps no values; choose another one")
        try:
            torch.empty(0, device=chosen)
        except Exception as error:  # of a type that depends on the backend
            reason = str(error).partition(". ")[0]
            raise UsageError(f"device {device!r} cannot be used here: {reason}") from None
        return chosen
    # With its index: the current device may be another one later, or on another thread.
    unnumbered = chosen.index is None
    index = torch.cuda.current_device() if unnumbered else chosen.index
    count = torch.cuda.device_count()
    if index >= count:
        raise UsageError(f"device {device!r} was asked for, and torch sees {count} CUDA devices")
    return torch.device("cuda", index)
