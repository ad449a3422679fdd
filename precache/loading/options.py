"""The options of a `Loader`, validated before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from precache.errors import UsageError
from precache.loading.ranks import find_local_rank, find_rank
from precache.reading.version_reader import FieldNames
from precache.runtime.integers import whole
from precache.storage.open import StorageOptions
from precache.transforms import Compose, Transform, require_step

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "shuffle": (True, False, "full", "block"),
    "drop_last": (True, False),
    "output": ("dict", "tuple"),
    "order": ("row", "key"),
    "verify": (True, False),
    "resident": (None, "host", "device"),
    "decompress": ("host", "device"),
    "access": ("map", "pread"),
    "refresh": (None, "epoch"),
}
MINIMUM: Mapping[str, int | None] = {
    "batch_size": 1,
    "seed": None,
    "num_threads": 1,
    "prefetch_batches": 1,
    "shuffle_window": 1,
    "num_canonical_nodes": 1,
    "rank": None,
    "world_size": None,
}
"""Smallest value of each option that is a whole number; None where any will do."""
OPTIONAL = ("num_threads", "prefetch_batches", "shuffle_window", "rank", "world_size")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The parameters of `Loader`, which documents them.

    `device`, `rank` and `world_size` are those that were found where none were given.
    """

    batch_size: int
    shuffle: bool | str
    seed: int
    drop_last: bool
    device: torch.device
    fields: FieldNames
    transform: Transform | Compose | Callable[[Any], Any] | None
    output: str
    order: str
    verify: bool
    num_threads: int | None
    prefetch_batches: int | None
    resident: str | None
    shuffle_window: int | None
    decompress: str
    access: str
    cache_dir: str | os.PathLike[str] | None
    cache_limit: int | str | None
    storage_options: StorageOptions
    rank: int
    world_size: int
    num_canonical_nodes: int
    rows: np.ndarray | Sequence[int] | None
    weights: np.ndarray | Sequence[float] | None
    refresh: str | None

    @classmethod
    def validated(cls, values: Mapping[str, Any]) -> LoaderOptions:
        """Convert numbers to plain ints, and find the device and the rank.

        Raises
        ------
        UsageError
            A value makes no sense, or contradicts another one.
        """
        values = {
            **values,
            **{name: require_choice(name, values[name], of) for name, of in CHOICES.items()},
            **{
                name: whole(name, values[name], minimum)
                for name, minimum in MINIMUM.items()
                if values[name] is not None or name not in OPTIONAL
            },
            "device": find_device(values["device"]),
        }
        fields = values["fields"]
        if fields is not None and not isinstance(fields, Iterable):
            raise UsageError(f"fields is {fields!r}; give names of fields, such as ['image']")
        if values["transform"] is not None:
            require_step("transform", values["transform"])
        rank, world_size = find_rank(values["rank"], values["world_size"])
        options = cls(**{**values, "rank": rank, "world_size": world_size})
        options._require_consistent()
        return options

    def _require_consistent(self) -> None:
        of_one_version = (self.rows, self.weights, self.resident)
        if self.refresh and any(value is not None for value in of_one_version):
            raise UsageError("rows, weights and resident need one version; leave out refresh")
        if self.resident == "device" and self.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"resident='device' needs a CUDA device, and device is {str(self.device)!r}; give "
                "resident='host'"
            )
        if self.cache_limit is not None and self.cache_dir is None:
            raise UsageError(
                f"cache_limit is {self.cache_limit!r} and there is no cache_dir; give both"
            )


def require_path(uri: Any) -> str:
    """Return a path or URL as text; raise `UsageError` if it is none."""
    try:
        return str(os.fspath(uri))
    except TypeError:
        raise UsageError(
            f"a {type(uri).__name__} was given for a store; give its path or URL, and to a Loader "
            "the rows of a subset as rows=, by their numbers or keys (Version.rows_of_keys)"
        ) from None


def require_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return the allowed value that `value` equals; raise `UsageError` if there is none."""
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; choose one of {', '.join(map(str, allowed))}")
    return allowed[allowed.index(value)]


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
