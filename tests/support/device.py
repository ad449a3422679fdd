"""A device that is the host: what it makes of a slot."""

import numpy as np
import torch

from precache.loading.gpu.device_slots import DeviceSlots, FrameFailures
from precache.reading.version_reader import VersionReader
from precache.transforms import Batch


def unpacked(slots: DeviceSlots, columns: VersionReader, rows: np.ndarray) -> Batch:
    """Fill a slot with rows, and unpack it."""
    slot = np.empty(slots.nbytes, np.uint8)
    filled = slots.fill(columns, rows, slots.layout.arrays(slot, len(rows)), slot)
    memory = torch.from_numpy(slot[: filled.nbytes])
    return slots.unpack(rows, filled, FrameFailures({}), memory)
