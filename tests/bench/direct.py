"""Plain rows that kvikio reads from the shards of a store straight into a CUDA device's memory.

Not a way of a `Loader`: it is here to be compared with those. Where the machine has GPUDirect
Storage, no CPU touches the bytes, and they come from the disk each time; elsewhere kvikio or cuFile
copies them. Sources: kvikio's documentation, `CuFile.pread` and `defaults`; NVIDIA's of GPUDirect
Storage, whose kernel module shows itself in /proc.
"""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import precache
from precache.shards import ArrayReader
from tests.bench.common import Cost, cost_of

PACKAGE = "kvikio-cu13"
MODULE = Path("/proc/driver/nvidia-fs/stats")


@dataclass(frozen=True)
class Direct:
    """Epochs, whether kvikio reads by itself instead of cuFile, and whether the kernel module of
    GPUDirect Storage is loaded, without which cuFile copies."""

    by_itself: bool
    module_loaded: bool
    epochs: tuple[Cost, ...]


def read_directly(store: Path, device: torch.device, batch: int, epochs: int) -> Direct | str:
    """Shuffled epochs of a `raw` store, one more than is asked for; or why there are none."""
    try:
        return _read(store, device, batch, epochs)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        return f"{error} (it takes {PACKAGE} and a CUDA driver)"


def _read(store: Path, device: torch.device, batch: int, epochs: int) -> Direct:
    kvikio = importlib.import_module("kvikio")
    defaults = importlib.import_module("kvikio.defaults")
    reader = ArrayReader(precache.open(store), "image")
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(kvikio.CuFile(p)) for p, _, _ in reader.plain_objects()]
        memory = torch.empty((batch, reader.array.row_nbytes), dtype=torch.uint8, device=device)

        def run() -> int:
            for numbers, offsets in _batches(reader, batch):
                places = zip(memory, numbers.tolist(), offsets.tolist(), strict=False)
                reads = [files[n].pread(row, row.nbytes, offset) for row, n, offset in places]
                for read in reads:
                    read.get()
            return reader.array.shape[0]

        costs = tuple(cost_of(run) for _ in range(epochs + 1))
    return Direct(defaults.is_compat_mode_preferred(), MODULE.exists(), costs)


def _batches(reader: ArrayReader, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shard and offset there of each row of a batch, in random order."""
    array = reader.array
    begins = np.array([begin for _, _, begin in reader.plain_objects()])
    order = np.random.default_rng().permutation(array.shape[0])
    for start in range(0, len(order), batch):
        numbers, inside = np.divmod(order[start : start + batch], array.object_shape[0])
        chunks, within = np.divmod(inside, array.chunk_shape[0])
        yield numbers, begins[numbers] + chunks * reader.pitch + within * array.row_nbytes
