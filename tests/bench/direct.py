"""Plain rows that kvikio reads from the shards of a store straight into a CUDA device's memory.

Not a way of a `Loader`: it is here to be compared with those. Where the machine has GPUDirect
Storage, no CPU touches the bytes, and they come from the disk each time; elsewhere kvikio or cuFile
copies them. Sources: kvikio's documentation, `CuFile.pread` and `defaults`; NVIDIA's of GPUDirect
Storage, whose kernel module shows itself in /proc.
"""

import contextlib
import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import precache
from precache.reading.array_reader import ArrayReader
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


class DirectRows(contextlib.ExitStack):
    """The rows of a plain field's shards, which lie open until the context is left."""

    def __init__(self, store: Path, field: str = "image") -> None:
        super().__init__()
        kvikio = importlib.import_module("kvikio")
        self._reader = ArrayReader(precache.open(store), field)
        self.array = self._reader.array
        found = self._reader.plain_objects()
        self._begins = np.array([begin for _, _, begin in found])
        self._files = [self.enter_context(kvikio.CuFile(path)) for path, _, _ in found]

    def read(self, rows: np.ndarray, memory: torch.Tensor) -> None:
        """Fill the first of (n, bytes of a row) uint8 with rows."""
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        chunks, within = np.divmod(inside, self.array.chunk_shape[0])
        starts = self._begins[numbers] + chunks * self.array.pitch
        starts += within * self.array.row_nbytes
        places = zip(memory, numbers.tolist(), starts.tolist(), strict=False)
        reads = [self._files[n].pread(row, row.nbytes, start) for row, n, start in places]
        for read in reads:
            read.get()


def read_directly(store: Path, device: torch.device, batch: int, epochs: int) -> Direct | str:
    """Shuffled epochs of a `raw` store, one more than is asked for; or why there are none."""
    try:
        by_itself = importlib.import_module("kvikio.defaults").is_compat_mode_preferred()
        with DirectRows(store) as rows:
            costs = tuple(cost_of(lambda: _epoch(rows, device, batch)) for _ in range(epochs + 1))
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        return f"{error} (it takes {PACKAGE} and a CUDA driver)"
    return Direct(by_itself, MODULE.exists(), costs)


def _epoch(rows: DirectRows, device: torch.device, batch: int) -> int:
    count = rows.array.shape[0]
    memory = torch.empty((batch, rows.array.row_nbytes), dtype=torch.uint8, device=device)
    order = np.random.default_rng().permutation(count)
    for start in range(0, count, batch):
        rows.read(order[start : start + batch], memory)
    return count
