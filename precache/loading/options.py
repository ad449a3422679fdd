"""The options of a `Loader`, as far as they make sense before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precache.errors import UsageError
from precache.loading.ranks import find_local_rank
from precache.runtime.integers import whole

CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "output": ("dict", "tuple"),
    "order": ("row", "key"),
    "verify": ("first", "always", "off"),
    "resident": (None, "host", "device"),
    "decompress": ("host", "device"),
    "gather": ("host", "device"),
    "access": ("map", "pread"),
    "refresh": (None, "epoch"),
}
LEAST: Mapping[str, int | None] = {
    "batch_size": 1,
    "seed": None,
    "threads": 1,
    "ahead": 1,
    "window": 1,
    "num_canonical_nodes": 1,
    "rank": None,
    "world_size": None,
}
"""Options that are whole numbers, and the least of each."""
OPTIONAL = ("threads", "ahead", "window", "rank", "world_size")


def sensible(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a `Loader`, by name, with plain ints, bools and choices.

    Raises
    ------
    UsageError
        Some say nothing, or contradict each other.
    """
    given = {
        **given,
        **{name: require_choice(name, given[name], allowed) for name, allowed in CHOICES.items()},
        **{
            name: whole(name, given[name], least)
            for name, least in LEAST.items()
            if given[name] is not None or name not in OPTIONAL
        },
        "drop_last": bool(given["drop_last"]),
    }
    by_device = given["gather"] == "device"
    if given["refresh"] and (
        given["rows"] is not None or given["weights"] is not None or given["resident"] or by_device
    ):
        raise UsageError("rows, weights, resident and gather are of one version; leave out refresh")
    if by_device and (given["resident"] or given["access"] != "map"):
        raise UsageError("gather='device' maps shards; leave out resident and access")
    if given["cache_limit"] is not None and given["cache_dir"] is None:
        raise UsageError(
            f"cache_limit is {given['cache_limit']!r} and there is no cache_dir; give both"
        )
    if given["cache_shared"] and given["cache_dir"] is None:
        raise UsageError("cache_shared is True and there is no cache_dir; give both")
    return given


def require_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return the one of those allowed that a value equals; raise `UsageError` where none does."""
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; choose one of {', '.join(map(str, allowed))}")
    return allowed[allowed.index(value)]


def find_device(device: str | torch.device | None) -> torch.device:
    """The device that batches go to, with its number; by default this rank's, where there is CUDA.

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
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not one torch knows: {error}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not one of ours; choose cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, and torch sees no CUDA device")
    if chosen.type == "cpu":
        return chosen
    # With its number: the current device may be another one later, or on another thread.
    unnumbered = chosen.index is None
    index = torch.cuda.current_device() if unnumbered else chosen.index
    count = torch.cuda.device_count()
    if index >= count:
        raise UsageError(f"device {device!r} was asked for, and torch sees {count} CUDA devices")
    return torch.device("cuda", index)
