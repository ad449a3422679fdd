"""A device that is the host: what it makes of a slot, and registered memory as it sees it."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from precache.loading.gpu.device_slots import DeviceSlots, FrameFailures
from precache.loading.gpu.registered import MappedFiles
from precache.reading.version_reader import VersionReader
from precache.transforms import Batch


def unpacked(slots: DeviceSlots, columns: VersionReader, rows: np.ndarray) -> Batch:
    """Fill a slot with rows, and unpack it."""
    slot = np.empty(slots.nbytes, np.uint8)
    filled = slots.fill(columns, rows, slots.layout.arrays(slot, len(rows)), slot)
    memory = torch.from_numpy(slot[: filled.nbytes])
    return slots.unpack(rows, filled, FrameFailures({}), memory)


def host_tensor(span: MappedFiles) -> torch.Tensor:
    """A range of mapped files, (nbytes,) uint8; valid until it is closed."""
    memory = (ctypes.c_uint8 * span.nbytes).from_address(span.address)
    return torch.from_numpy(np.ctypeslib.as_array(memory))
