"""Load of the machine between two readings; a value that cannot be read is None."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from precache.runtime.usage import io_pressure_seconds

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Machine:
    """Load of a machine between two readings; None for what cannot be read.

    Attributes
    ----------
    cpu_cores
        Cores that this process and its descendants kept busy, on average; needs psutil.
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


class MachineReader:
    """Reads counters, and returns their increase since the last reading; safe on any thread.

    The GPU is the current device of the thread that creates the reader.
    """

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            import psutil  # noqa: F401  # a fork while a thread imports it would leave half of it
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
        self._device = torch.cuda.current_device() if on_cuda else None
        self._lock = threading.Lock()
        self._last: tuple[float, float | None, float | None] | None = None

    def read(self) -> Machine:
        """Return the load since the last call; the first call returns the GPU's alone."""
        with self._lock:
            last, now = self._last, (time.monotonic(), _tree_cpu_seconds(), _io_wait_seconds())
            self._last = now
        gpu = None if self._device is None else _gpu_utilization(self._device)
        if last is None or now[0] <= last[0]:
            return Machine(gpu_utilization=gpu)
        wall = now[0] - last[0]
        cpu, io = (
            max(0.0, after - before) / wall if after is not None and before is not None else None
            for before, after in zip(last[1:], now[1:], strict=True)
        )
        return Machine(cpu, gpu, io)


def _tree_cpu_seconds() -> float | None:
    """Return the CPU time of this process and its descendants, with those already waited for."""
    try:
        import psutil
    except ImportError:
        return None
    seconds = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended; its time counts as its parent's once that waited for it
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _gpu_utilization(device: int) -> float | None:
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:
        # A missing library or an old driver raises errors of many types.
        return None


def _io_wait_seconds() -> float | None:
    """Read a counter of seconds in which some task waited for I/O."""
    seconds = io_pressure_seconds()
    if seconds is not None:
        return seconds
    try:
        ticks = STAT.read_text("ascii").splitlines()[0].split()
        return int(ticks[5]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return None
