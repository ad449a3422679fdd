"""Shards that a CUDA device reads directly: plain rows, and zstd frames that it decompresses.

All shards are mapped into one range of addresses, one behind another, and registered with the
driver. The device sees the range as one tensor, and a single gather takes the rows of a batch from
any number of shards. Pages stay page-locked until `RegisteredShards.close`.

If the driver registers read-only memory, these are the pages of the page cache, which all processes
share. If it does not (on many discrete GPUs), writable private maps are registered instead, whose
pages the kernel copies for this process.

Sources: CUDA driver API, cuMemHostRegister and cuMemHostGetDevicePointer; mmap(2); the CUDA Array
Interface, version 3, as Numba describes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from precache.errors import StorageError, UsageError
from precache.loading.gpu.gathering import FrameOffsets, Offsets, RowOffsets, gather, gather_frames
from precache.loading.ranks import find_local_size
from precache.reading.array_reader import ArrayReader
from precache.reading.version_reader import VersionReader
from precache.runtime.usage import available_bytes
from precache.storage.local_files import libc, map_at
from precache.store.layout import align
from precache.units import size

log = logging.getLogger(__name__)

PAGE_LOCKED_SHARE = 0.5
"""Share of the available memory for the registered shards of all ranks of a node together."""


# --- the range of addresses ---------------------------------------------------------------------


class MappedFiles:
    """Files mapped read-only one behind another, each from the start of a page.

    Parameters
    ----------
    files
        Paths and sizes in bytes.
    private
        Map them as private memory, whose pages are copied when they are registered.

    Attributes
    ----------
    address, nbytes
        Address and size of the whole range.
    pieces
        Address and bytes, in whole pages, of each file.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], *, private: bool) -> None:
        lengths = [align(nbytes, mmap.PAGESIZE) for _, nbytes in files]
        self.nbytes = sum(lengths)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.address = map_at(None, self.nbytes, 0, flags, -1)
        self.pieces: list[tuple[int, int]] = []
        access = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        start = self.address
        for (path, nbytes), length in zip(files, lengths, strict=True):
            try:
                with path.open("rb", buffering=0) as file:
                    map_at(start, nbytes, access, kind | MAP_FIXED, file.fileno())
            except OSError as error:
                self.close()
                raise StorageError(f"cannot map {path}: {error}") from None
            self.pieces.append((start, length))
            start += length

    def starts(self) -> list[int]:
        """Return the offset of each file in the range."""
        return [address - self.address for address, _ in self.pieces]

    def device_tensor(self, device: torch.device) -> torch.Tensor:
        """Return the range as (nbytes,) uint8 on a device with which all pieces are registered."""
        return torch.as_tensor(_Interface(self.address, self.nbytes), device=device)

    def close(self) -> None:
        """Unmap everything; no thread may be reading it."""
        libc().munmap(self.address, self.nbytes)


class _Interface:
    """Memory that torch uses as a device's own, without copying it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Flags of mmap(2) on Linux that Python's module lacks."""


# --- the driver ---------------------------------------------------------------------------------

DEVICEMAP, READ_ONLY = 0x2, 0x8
"""CU_MEMHOSTREGISTER_DEVICEMAP and CU_MEMHOSTREGISTER_READ_ONLY."""


class _RefusedError(Exception):
    """The driver refused a call; the text names the call and the status."""


class Driver:
    """The CUDA driver's API for one device.

    Not the runtime's API: the next kernel that torch launches would raise its errors again.

    Raises
    ------
    OSError
        There is no driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._device = device.index

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise _RefusedError(f"{name} gives {(text.value or b'?').decode()} ({status})")

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Make torch's context of the device current on the calling thread."""
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), self._device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def register(self, address: int, nbytes: int, flags: int) -> None:
        """Page-lock whole pages, for the device to read at the same address."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)
        seen = ctypes.c_uint64()
        host = ctypes.c_void_p(address)
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), host, 0)
        if seen.value != address:
            self.unregister(address)
            raise _RefusedError("it gives host memory another address on the device")

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))


def _lock(driver: Driver, span: MappedFiles, flags: int) -> None:
    """Register all pieces of a span, or none."""
    registered: list[int] = []
    with driver.context():
        try:
            for address, nbytes in span.pieces:
                driver.register(address, nbytes, flags)
                registered.append(address)
        except _RefusedError:
            for address in registered:
                driver.unregister(address)
            raise


def _unlock(driver: Driver, span: MappedFiles, device: torch.device, process: int) -> None:
    """Unregister and unmap a span, after all reads that the device has queued."""
    if os.getpid() != process:  # the driver does not know a process that was forked
        return
    with contextlib.suppress(RuntimeError, _RefusedError):  # a device that failed reads no more
        torch.cuda.synchronize(device)
        with driver.context():
            for address, _ in span.pieces:
                driver.unregister(address)
    span.close()


# --- registering --------------------------------------------------------------------------------


class RegisteredShards:
    """Arrays whose rows a device gathers from registered memory.

    Attributes
    ----------
    layouts
        Array -> offsets of its rows, or of their frames.

    Parameters
    ----------
    memory
        uint8, on the device.
    end
        Releases the memory; called once, by `close`, when this is collected, or at exit.
    """

    def __init__(
        self, memory: torch.Tensor, layouts: Mapping[str, Offsets], end: Callable[[], None]
    ) -> None:
        self.layouts = layouts
        self._memory: torch.Tensor | None = memory
        self._end = weakref.finalize(self, end)
        self._lock = threading.Lock()

    def gather(self, array: str, offsets: torch.Tensor) -> torch.Tensor:
        """Gather rows on the device's current stream.

        Parameters
        ----------
        offsets
            (n,) int64 on the device, from `RowOffsets.of`.

        Returns
        -------
        torch.Tensor
            (n, bytes of a row) uint8.
        """
        layout = self.layouts[array]
        assert isinstance(layout, RowOffsets)  # a plain array
        with self._open() as memory:
            return gather(memory, offsets, layout.row_nbytes, layout.unit)

    def gather_frames(
        self, starts: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather frames, as the function does, on the device's current stream."""
        with self._open() as memory:
            return gather_frames(memory, starts, longest)

    @contextlib.contextmanager
    def _open(self) -> Iterator[torch.Tensor]:
        with self._lock:
            if self._memory is None:
                raise UsageError("this loader is closed; make a new one")
            yield self._memory

    def close(self) -> None:
        """Wait for the device, and release the memory."""
        with self._lock:
            self._memory = None
            self._end()


def register_shards(
    reader: VersionReader, device: torch.device, *, frames: bool = False
) -> RegisteredShards | None:
    """Register the shards of plain fields for a device to read; log why if there is none.

    Parameters
    ----------
    frames
        Also register fields with a zstd frame for each row.

    Raises
    ------
    UsageError
        The shards, or the copies of all ranks of the node if they are copied, would take more than
        half of the available memory; none was read.
    """
    files, layouts = _plan(reader, frames)
    if device.type != "cuda":
        why = f"batches go to the {device.type}"
    elif not files:
        why = "no field has plain rows; codec 'raw' stores such"
    else:
        _require_room(reader, sum(nbytes for _, nbytes in files))
        try:
            return _register(reader, files, layouts, device)
        except (OSError, _RefusedError) as error:
            why = f"{error}"
    log.warning("reading rows on the host: %s", why)
    return None


def _plan(reader: VersionReader, frames: bool) -> tuple[list[tuple[Path, int]], dict[str, Offsets]]:
    """Choose the files to map, in order, and compute the offsets of each array's rows."""
    readers: dict[str, ArrayReader] = {}
    for turn in range(reader.variant_period):
        readers |= {array.name: array for array in reader.at_epoch(turn).readers.values()}
    files: list[tuple[Path, int]] = []
    layouts: dict[str, Offsets] = {}
    end = 0

    def append(path: Path, nbytes: int) -> int:
        nonlocal end
        files.append((path, nbytes))
        start, end = end, end + align(nbytes, mmap.PAGESIZE)
        return start

    for name, field in readers.items():
        array = field.array
        if plain := field.plain_objects():
            starts = [append(path, nbytes) + first for path, nbytes, first in plain]
            shard_rows, chunk_rows = array.object_shape[0], array.chunk_shape[0]
            first = np.array(starts, np.int64)
            layouts[name] = RowOffsets(first, shard_rows, chunk_rows, array.row_nbytes, array.pitch)
        elif frames and field.framed and (framed := field.frame_objects()):
            extents = [np.add(rows, (append(path, nbytes), 0)) for path, nbytes, rows in framed]
            layouts[name] = FrameOffsets(*np.concatenate(extents).T.copy())
    return files, layouts


def _require_room(reader: VersionReader, nbytes: int, copies: int = 1) -> None:
    free, needed = available_bytes(), nbytes * copies
    if needed > PAGE_LOCKED_SHARE * free:
        raise UsageError(
            f"{reader.version.path} has {size(nbytes)} of shards"
            + (f", which each of {copies} ranks would copy" if copies > 1 else "")
            + f", and {size(free)} of memory are available, of which {PAGE_LOCKED_SHARE:.0%} may "
            "be page-locked; leave gather out, or name fewer fields"
        )


def _register(
    reader: VersionReader,
    files: Sequence[tuple[Path, int]],
    layouts: Mapping[str, Offsets],
    device: torch.device,
) -> RegisteredShards:
    driver = Driver(device)
    span = MappedFiles(files, private=False)
    try:
        _lock(driver, span, DEVICEMAP | READ_ONLY)
    except _RefusedError as error:
        span.close()
        _require_room(reader, span.nbytes, find_local_size())
        span = MappedFiles(files, private=True)
        try:
            _lock(driver, span, DEVICEMAP)
        except _RefusedError:
            span.close()
            raise
        log.warning(
            "%s: shards are copied into %s of page-locked memory of this process",
            error,
            size(span.nbytes),
        )
    end = functools.partial(_unlock, driver, span, device, os.getpid())
    return RegisteredShards(span.device_tensor(device), layouts, end)
