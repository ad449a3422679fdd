"""`Loader`: batches of a cached version on the training device, with almost no CPU."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from precache.columns import Columns, FieldNames
from precache.errors import UsageError
from precache.meter import LoaderStats, StallClock
from precache.prefetch import prefetch
from precache.sampler import Order
from precache.slots import DeviceCopier, SlotLayout, SlotPool, undo_image_tensor
from precache.store import Version

Batch = dict[str, torch.Tensor]
STATE_FORMAT = 1


class Loader:
    """Iterates over a cached version in batches; one iterator is one epoch.

    Parameters
    ----------
    uri
        A store, ``STORE@prefix`` for one version, or a Zarr group together with a mapping as
        `fields`.
    batch_size
        Rows a batch; the last one is smaller unless `drop_last`.
    shuffle, seed
        A new order every epoch, a function of (seed, epoch) alone.
    device
        Where batches go; by default this rank's CUDA device if there is one, else the CPU.
    fields
        Names to read, by default all; or name -> path of an array in a group that other software
        wrote.
    transform
        Called with each batch on the device; what it returns is what the loop gets.
    output
        ``dict``: field -> tensor, with `row` (int64). ``tuple``: (image, label).
    order
        Without shuffle: ``row`` (as stored) or ``key`` (sorted by key).
    verify
        When CRC32C checksums are checked: ``first`` (once a process), ``always`` or ``off``.
    threads
        That decode; by default one where reading is copying, else up to four.
    ahead
        Batches in the making; by default one more than threads.

    Notes
    -----
    Images are (N, C, H, W) uint8 unless `transform` changes them. On the CPU a batch's memory is
    used again once its last tensor is gone. Each ``iter(loader)`` is the next epoch, unless
    `set_epoch` says which.

    Examples
    --------
    >>> with Loader("photos.store", output="tuple") as loader:  # doctest: +SKIP
    ...     for image, label in loader:
    ...         step(image.float() / 255, label)
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        batch_size: int = 256,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device | None = None,
        fields: FieldNames = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        output: str = "dict",
        order: str = "row",
        verify: str = "first",
        threads: int | None = None,
        ahead: int | None = None,
    ) -> None:
        _choose("output", output, ("dict", "tuple"))
        _choose("order", order, ("row", "key"))
        _choose("verify", verify, ("first", "always", "off"))
        self._columns = Columns(os.fspath(uri), fields, verify)
        self._order = self._make_order(batch_size, shuffle, seed, drop_last, order)
        self._sorted_by = order
        self._transform = transform
        self._output = self._output_names(output)
        self.device = _device(device)
        self._threads = threads or (1 if self._columns.plain else min(4, os.cpu_count() or 1))
        self._ahead = ahead or self._threads + 1
        self._layout = SlotLayout.of(self._columns.shapes, batch_size)
        cuda = self.device.type == "cuda"
        self._pool = SlotPool(self._layout.nbytes, self._ahead + 3, pinned=cuda)
        self._copier = DeviceCopier(self._pool, self.device) if cuda else None
        self._clock = StallClock()
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        self._closed = False
        self._position = (0, 0)
        self._next = (0, 0)

    def _make_order(
        self, batch_size: int, shuffle: bool, seed: int, drop_last: bool, order: str
    ) -> Order:
        valid = self._columns.valid
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size!r}; give a whole number from 1 up")
        if batch_size > len(valid):
            raise UsageError(
                f"batch_size is {batch_size}, and {self.version.path} has {len(valid)} valid rows; "
                f"give at most {len(valid)}"
            )
        if order == "key" and shuffle:
            raise UsageError("order='key' reads in a fixed order; give shuffle=False with it")
        sequence = None
        if order == "key":
            rows = valid(np.arange(len(valid)))
            keys = list(self.version.keys)
            sequence = np.array(sorted(rows.tolist(), key=lambda row: keys[row]), np.int64)
        return Order(valid, batch_size, shuffle, seed, drop_last, sequence)

    def _output_names(self, output: str) -> tuple[str, str] | None:
        if output == "dict":
            return None
        missing = {"image", "label"} - set(self._columns.shapes)
        if missing:
            raise UsageError(
                f"output='tuple' gives (image, label), and {', '.join(sorted(missing))} is not "
                f"among {', '.join(self._columns.shapes)}; use output='dict'"
            )
        return ("image", "label")

    @property
    def version(self) -> Version:
        """The version being read."""
        return self._columns.version

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._order.batches

    def keys(self, rows: torch.Tensor | np.ndarray | Iterable[int]) -> list[str]:
        """Keys of the given row numbers, such as ``batch["row"]``."""
        numbers = rows.tolist() if isinstance(rows, torch.Tensor | np.ndarray) else list(rows)
        return [self.version.keys[row] for row in numbers]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs."""
        if epoch != self._next[0]:
            self._position = self._next = (epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise UsageError("this loader is closed; make a new one")
        self._position = epoch, batch = self._next
        self._next = (epoch + 1, 0)
        iterator = self._run(epoch, batch)
        self._iterators.add(iterator)
        return iterator

    def _run(self, epoch: int, start: int) -> Generator[Any, None, None]:
        batches = self._order.epoch(epoch, start)
        work = prefetch(self._fill, batches, self._threads, self._ahead)
        try:
            asked = time.perf_counter()
            for number, (slot, rows) in enumerate(work, start + 1):
                batch = self._deliver(slot, rows)
                del slot
                arrived = time.perf_counter()
                self._clock.batch(arrived - asked, rows, self._layout.nbytes)
                self._position = (epoch, number) if number < len(self) else (epoch + 1, 0)
                yield batch
                del batch
                asked = time.perf_counter()
                self._clock.step(asked - arrived)
        finally:
            work.close()

    def _fill(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Decode a batch into a slot; runs on the decoding threads."""
        slot = self._pool.acquire()
        try:
            out = self._layout.arrays(slot, len(rows))
            self._columns.read(rows, out, undo=self._copier is None)
        except BaseException:
            self._pool.release(slot)
            raise
        return slot, len(rows)

    def _deliver(self, slot: np.ndarray, rows: int) -> Any:
        if self._copier is None:
            batch = self._layout.tensors(self._pool.lend(slot), rows)
        else:
            batch = self._layout.tensors(self._copier.copy(slot), rows)
            for name, reader in self._columns.readers.items():
                if reader.filtered:
                    batch[name] = undo_image_tensor(batch[name])
        result: Any = batch if self._output is None else tuple(batch[n] for n in self._output)
        return result if self._transform is None else self._transform(result)

    def stats(self) -> LoaderStats:
        """Batches, bytes, waiting and step times since the last call."""
        return self._clock.report()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: what it has received, not what is being read ahead."""
        epoch, batch = self._position
        return {**self._identity(), "epoch": epoch, "batch": batch}

    def _identity(self) -> dict[str, Any]:
        order = self._order
        return {
            "format": STATE_FORMAT,
            "version": self.version.id,
            "batch_size": order.batch_size,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "drop_last": order.drop_last,
            "order": self._sorted_by,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator yields the rest of that epoch.

        Raises
        ------
        UsageError
            The state is of another version, batch size or order, by name.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise UsageError(
                    f"the saved state has {name}={state.get(name)!r} and this loader has {own!r}; "
                    "open the same version with the same settings, or start a new epoch"
                )
        self._position = self._next = (int(state["epoch"]), int(state["batch"]))

    def close(self) -> None:
        """End running iterators and their threads."""
        self._closed = True
        for iterator in list(self._iterators):
            iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", rank % torch.cuda.device_count())
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not one torch knows: {error}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, and torch sees no CUDA device")
    return chosen
