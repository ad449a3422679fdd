"""Load of the machine between two readings; a value that cannot be read is None."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from precache.runtime.usage import Usage, read_usage


@dataclass(frozen=True)
class Machine:
    """Load of a machine between two readings; None for what cannot be read.

    Attributes
    ----------
    cpu_cores
        Cores that this process and its descendants kept busy, on average.
    gpu_utilization
        Share of the last sample period (1/6 to 1 second) in which a kernel ran on this process's
        CUDA device, from `torch.cuda.utilization`; needs nvidia-ml-py.
    io_wait
        Share of the time in which some task of the machine waited for I/O (the ``some`` of
        ``/proc/pressure/io``); if the kernel has no such file, the share of all cores' time that
        they idled waiting for I/O (``/proc/stat``).
    """

    cpu_cores: float | None = None
    gpu_utilization: float | None = None
    io_wait: float | None = None


def current_device() -> torch.device:
    """Return the current CUDA device if this process uses CUDA, else the CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class MachineReader:
    """Reads counters, and returns their increase since the last reading; safe on any thread.

    The GPU is the current device of the thread that creates the reader.
    """

    def __init__(self) -> None:
        self._device = current_device()
        self._lock = threading.Lock()
        self._last: Usage | None = None

    def read(self) -> Machine:
        """Return the load since the last call; the first call returns the GPU's alone."""
        with self._lock:
            last, self._last = self._last, (now := read_usage())
        gpu = _gpu_utilization(self._device) if self._device.type == "cuda" else None
        if last is None or now.wall <= last.wall:
            return Machine(gpu_utilization=gpu)
        gained = now - last
        cpu, io = (
            None if seconds is None else seconds / gained.wall
            for seconds in (gained.cpu, gained.io_wait)
        )
        return Machine(cpu, gpu, io)


def _gpu_utilization(device: torch.device) -> float | None:
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:
        # A missing library or an old driver raises errors of many types.
        return None
