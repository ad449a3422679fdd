"""What the machine did meanwhile, where it can be read; nothing here is required."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

PRESSURE = Path("/proc/pressure/io")
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Machine:
    """What a machine did between two readings; None where that cannot be read.

    Attributes
    ----------
    cpu_cores
        Cores that this process and its descendants kept busy, on average; needs psutil.
    gpu_utilization
        Share of the last sample period, of a sixth of a second to a second, in which a kernel ran
        on this process's CUDA device, as `torch.cuda.utilization` says; needs nvidia-ml-py.
    io_wait
        Share of the time in which some task of the machine waited for I/O (the ``some`` of
        ``/proc/pressure/io``); where the kernel has none, the share of idle cores' time that was
        spent waiting for I/O, of all cores' time (``/proc/stat``).
    """

    cpu_cores: float | None = None
    gpu_utilization: float | None = None
    io_wait: float | None = None


class MachineReader:
    """Reads counters, and tells what they gained since it did so last; safe on any thread.

    The GPU is the current device of the thread that makes it: each thread has one of its own.
    """

    def __init__(self) -> None:
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
        self._device = torch.cuda.current_device() if on_cuda else None
        self._lock = threading.Lock()
        self._last: tuple[float, float | None, float | None] | None = None

    def read(self) -> Machine:
        """The machine since the last call; the first one knows nothing but the GPU."""
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
    """CPU time of this process and its descendants, those that were waited for included."""
    try:
        import psutil
    except ImportError:
        return None
    seconds = 0.0
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended; its parent has its time when it has waited for it
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _gpu_utilization(device: int) -> float | None:
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:
        # No library for it, or a driver that does not tell: each fails in a way of its own.
        return None


def _io_wait_seconds() -> float | None:
    """A counter of seconds that something waited for I/O."""
    try:
        some = PRESSURE.read_text("ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        pass
    try:
        ticks = STAT.read_text("ascii").splitlines()[0].split()
        return int(ticks[5]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return None
