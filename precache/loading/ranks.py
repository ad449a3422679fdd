"""Rank and world size of this process, from `torch.distributed` or the launcher."""

from __future__ import annotations

import contextlib
import os

import torch.distributed

from precache.errors import UsageError

VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""Rank and world size as torchrun, Slurm's srun and Open MPI's mpirun set them."""

LOCAL_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Rank among the processes of the node, from the same launchers."""

LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Number of processes of the node, from the same; Slurm's is a list such as ``4(x2),3``."""


def find_rank(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return rank and world size: the arguments, else from `torch.distributed` or the launcher.

    Without any of these, this is rank 0 of 1.

    Raises
    ------
    UsageError
        One was given without the other, or there is no such rank.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank is {rank} and world_size is {world_size}; give both, or neither")
    if rank is None or world_size is None:
        rank, world_size = _detect_rank()
    if not 0 <= rank < world_size:
        raise UsageError(f"rank is {rank} of {world_size}; ranks count from 0")
    return rank, world_size


def find_local_rank() -> int | None:
    """Return the rank of this process on its node; None without a launcher."""
    for name in LOCAL_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def find_local_size() -> int:
    """Return the most ranks that a node has; 1 without a launcher."""
    for name in LOCAL_SIZES:
        with contextlib.suppress(KeyError, ValueError):
            parts = os.environ[name].split(",")
            return max(1, *(int(part.partition("(")[0]) for part in parts))
    return 1


def require_rank(rank: int, world_size: int) -> None:
    """Raise `UsageError` if this process has another rank by now."""
    current = find_rank()
    if current != (rank, world_size):
        raise UsageError(
            f"this loader was made for rank {rank} of {world_size}, and this process became rank "
            f"{current[0]} of {current[1]} since; make loaders once torch.distributed is "
            "initialised (with Lightning, in train_dataloader), or give rank and world_size"
        )


def _detect_rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for names in VARIABLES:
        try:
            rank, world_size = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError):
            continue
        return rank, world_size
    return 0, 1
