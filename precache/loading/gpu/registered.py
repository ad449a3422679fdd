"""Rows that a CUDA device reads from shards by itself: zero-copy for fields of plain rows, and for
zstd frames that it decompresses as well.

The shards are mapped one behind another into one range of addresses, and registered with the
driver. What the device then sees is one tensor, from which a single gather takes the rows of a
batch, in however many shards they lie. Pages stay page-locked until `Registered.close`.

Where the driver registers read-only memory, these are the pages of the page cache, which all
processes share; where it does not (on many discrete GPUs), writable private maps are registered
instead, whose pages the kernel then copies for this process.

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
from precache.loading.gpu.gathering import Frames, Placed, Places, gather, gather_frames
from precache.loading.ranks import find_local_size
from precache.reading.array_reader import ArrayReader
from precache.reading.version_reader import VersionReader
from precache.runtime.usage import available_bytes
from precache.storage.local_files import libc, map_at
from precache.store.layout import align
from precache.units import size

log = logging.getLogger(__name__)

SHARE = 0.5
"""Of the memory available, that registered shards may take, of all ranks of a node together."""


# --- the range of addresses ---------------------------------------------------------------------


class MappedFiles:
    """Files mapped one behind another, each from a page on; never written to.

    Parameters
    ----------
    files
        Paths and sizes in bytes.
    private
        Map them as memory of this process, whose pages are copied when they are registered.

    Attributes
    ----------
    address, nbytes
        Of the whole range.
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
        """First byte of each file in the range."""
        return [address - self.address for address, _ in self.pieces]

    def host_tensor(self) -> torch.Tensor:
        """(nbytes,) uint8 as the host sees it; valid until `close`."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return torch.from_numpy(np.ctypeslib.as_array(memory))

    def device_tensor(self, device: torch.device) -> torch.Tensor:
        """(nbytes,) uint8 as a device sees it that all pieces are registered with."""
        return torch.as_tensor(_Interface(self.address, self.nbytes), device=device)

    def close(self) -> None:
        """Unmap everything; nobody may be reading it."""
        libc().munmap(self.address, self.nbytes)


class _Interface:
    """Memory that torch takes for a device's own, without copying it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Of mmap(2) on Linux; Python's module leaves them out."""


# --- the driver ---------------------------------------------------------------------------------

DEVICEMAP, READ_ONLY = 0x2, 0x8
"""CU_MEMHOSTREGISTER_DEVICEMAP and CU_MEMHOSTREGISTER_READ_ONLY."""


class _RefusedError(Exception):
    """The driver does not do it; the text says what and why."""


class Driver:
    """The driver of one device. Its own interface, because a refusal by the runtime's would be
    raised once more by the next kernel that torch launches.

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
        """Torch's context of the device is the calling thread's own in the block."""
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
    """Register a whole span, or nothing of it."""
    done: list[int] = []
    with driver.context():
        try:
            for address, nbytes in span.pieces:
                driver.register(address, nbytes, flags)
                done.append(address)
        except _RefusedError:
            for address in done:
                driver.unregister(address)
            raise


def _unlock(driver: Driver, span: MappedFiles, device: torch.device, process: int) -> None:
    """Unregister and unmap a span, once the device has read what it was told to."""
    if os.getpid() != process:  # the driver does not know a process that was forked
        return
    with contextlib.suppress(RuntimeError, _RefusedError):  # a device that failed reads no more
        torch.cuda.synchronize(device)
        with driver.context():
            for address, _ in span.pieces:
                driver.unregister(address)
    span.close()


# --- registering --------------------------------------------------------------------------------


class Registered:
    """Arrays whose rows a device gathers from memory that it reads itself.

    Attributes
    ----------
    places
        Array -> where its rows, or their frames, lie.

    Parameters
    ----------
    memory
        uint8, as the device sees it.
    end
        Lets go of that; called once, by `close`, or when nobody holds this any more, or at exit.
    """

    def __init__(
        self, memory: torch.Tensor, places: Mapping[str, Placed], end: Callable[[], None]
    ) -> None:
        self.places = places
        self._memory: torch.Tensor | None = memory
        self._end = weakref.finalize(self, end)
        self._lock = threading.Lock()

    def gather(self, array: str, places: torch.Tensor) -> torch.Tensor:
        """(n, bytes of a row) uint8 on the device, on its current stream, from (n,) int64 places
        there, as `Places.of` gives them."""
        layout = self.places[array]
        assert isinstance(layout, Places)  # a plain array
        with self._open() as memory:
            return gather(memory, places, layout.row_nbytes, layout.unit)

    def gather_frames(
        self, starts: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the function, on the device's current stream."""
        with self._open() as memory:
            return gather_frames(memory, starts, longest)

    @contextlib.contextmanager
    def _open(self) -> Iterator[torch.Tensor]:
        with self._lock:
            if self._memory is None:
                raise UsageError("this loader is closed; make a new one")
            yield self._memory

    def close(self) -> None:
        """Wait for the device, and let go of the memory."""
        with self._lock:
            self._memory = None
            self._end()


def registered(
    columns: VersionReader, device: torch.device, *, frames: bool = False
) -> Registered | None:
    """The plain fields' shards for a device to read; says why where there is none.

    Parameters
    ----------
    frames
        Those of fields with a zstd frame for each row, too.

    Raises
    ------
    UsageError
        They would take more than half of the memory available, once, or where they are copied, once
        for each rank of the node; found before any is read.
    """
    files, places = _plan(columns, frames)
    if device.type != "cuda":
        why = f"batches go to the {device.type}"
    elif not files:
        why = "no field has plain rows; codec 'raw' stores such"
    else:
        _require_room(columns, sum(nbytes for _, nbytes in files))
        try:
            return _registered(columns, files, places, device)
        except (OSError, _RefusedError) as error:
            why = f"{error}"
    log.warning("rows are read by the host after all: %s", why)
    return None


def _plan(columns: VersionReader, frames: bool) -> tuple[list[tuple[Path, int]], dict[str, Placed]]:
    """Files to map, in order, and where the rows of each array lie in a span of them."""
    readers: dict[str, ArrayReader] = {}
    for turn in range(columns.turns):
        readers |= {reader.name: reader for reader in columns.at_epoch(turn).readers.values()}
    files: list[tuple[Path, int]] = []
    places: dict[str, Placed] = {}
    end = 0

    def place(path: Path, nbytes: int) -> int:
        nonlocal end
        files.append((path, nbytes))
        start, end = end, end + align(nbytes, mmap.PAGESIZE)
        return start

    for name, reader in readers.items():
        array = reader.array
        if plain := reader.plain_objects():
            starts = [place(path, nbytes) + first for path, nbytes, first in plain]
            shard_rows, chunk_rows = array.object_shape[0], array.chunk_shape[0]
            first = np.array(starts, np.int64)
            places[name] = Places(first, shard_rows, chunk_rows, array.row_nbytes, reader.pitch)
        elif frames and reader.framed and (framed := reader.frame_objects()):
            extents = [np.add(each, (place(path, nbytes), 0)) for path, nbytes, each in framed]
            places[name] = Frames(*np.concatenate(extents).T.copy())
    return files, places


def _require_room(columns: VersionReader, nbytes: int, copies: int = 1) -> None:
    free, needed = available_bytes(), nbytes * copies
    if free is None:
        raise UsageError("gather needs /proc/meminfo to know whether the shards fit")
    if needed > SHARE * free:
        raise UsageError(
            f"{columns.version.path} has {size(nbytes)} of shards"
            + (f", which each of {copies} ranks would copy" if copies > 1 else "")
            + f", and {size(free)} of memory are available, of which {SHARE:.0%} may be "
            "page-locked; leave gather out, or name fewer fields"
        )


def _registered(
    columns: VersionReader,
    files: Sequence[tuple[Path, int]],
    places: Mapping[str, Placed],
    device: torch.device,
) -> Registered:
    driver = Driver(device)
    span = MappedFiles(files, private=False)
    try:
        _lock(driver, span, DEVICEMAP | READ_ONLY)
    except _RefusedError as error:
        span.close()
        _require_room(columns, span.nbytes, find_local_size())
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
    return Registered(span.device_tensor(device), places, end)
