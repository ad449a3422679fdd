"""A `Loader` within the workers of a `DataLoader`: each row once, or a refusal."""

import contextlib
import functools
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import precache
from precache.errors import UsageError
from tests.conftest import BuiltStore
from tests.support.building import environment
from tests.support.loaders import assert_refused, flat, opened, rows_of

_plain = functools.partial(opened, batch_size=5)


def _mixed(store: Path, **options: Any) -> Any:
    return precache.mix([_plain(store, **options)])


def _metered(store: Path, **options: Any) -> Any:
    return precache.meter(_plain(store, **options), to=[])


class Streamed(IterableDataset[Any]):
    """Batches of what `make` returns; options that are functions are called in the worker."""

    def __init__(self, make: Callable[..., Any], store: Path, **options: Any) -> None:
        self.make, self.store, self.options = make, store, options

    def __iter__(self) -> Iterator[Any]:
        options = {n: v() if callable(v) else v for n, v in self.options.items()}
        yield from self.make(self.store, **options)


def _rows(dataset: Any, workers: int, **options: Any) -> list[int]:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=workers, **options)
    return sorted(row for batch in loader for row in batch["row"].tolist())


CONTEXTS = ["fork", pytest.param("spawn", marks=pytest.mark.heavy)]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("make", [_plain, _mixed, _metered])
def test_several_workers_that_would_each_read_everything_are_refused(
    make: Callable[..., Any], context: str, stores: dict[str, BuiltStore]
) -> None:
    dataset = Streamed(make, stores["raw"].path)
    valid = stores["raw"].open().valid.nonzero()[0].tolist()
    assert _rows(dataset, 0) == _rows(dataset, 1, multiprocessing_context=context) == valid
    with pytest.raises(UsageError, match="2 workers of a DataLoader") as refused:
        _rows(dataset, 2, multiprocessing_context=context)
    _, options = _advised(str(refused.value))
    parted = Streamed(make, stores["raw"].path, drop_last=True, **options)
    rows = _rows(parted, 2, multiprocessing_context=context)
    assert len(rows) == len(set(rows)) == 20


class _Evaluated:
    def __init__(self, code: str, names: dict[str, Any]) -> None:
        self.code, self.names = code, names

    def __call__(self) -> Any:
        return eval(self.code, self.names)


def _advised(refusal: str, **names: int) -> tuple[str, dict[str, Any]]:
    """The options that a refusal writes, and what they come to in a worker."""
    [code] = re.findall(r"such as (rank=.*?), with info = ", refusal)
    names = {"get_worker_info": get_worker_info, **names}  # type: ignore[dict-item]
    return code, {
        name: _Evaluated(expression.replace("info.", "get_worker_info()."), names)
        for name, expression in (part.split("=") for part in code.split(", "))
    }


def test_workers_of_several_ranks_have_parts_of_their_own(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match="2 workers of a DataLoader") as refused:
            _rows(Streamed(_plain, stores["raw"].path), 2)
        code, options = _advised(str(refused.value), RANK=rank, WORLD_SIZE=2)
        assert f"`{code}`" in Path("docs/guides/ddp.md").read_text()
        rows += _rows(Streamed(_plain, stores["raw"].path, drop_last=True, **options), 2)
    assert len(rows) == len(set(rows)) == 20


@contextlib.contextmanager
def _lines_of(module: str, folder: Path) -> Iterator[list[str]]:
    """What a module of `precache.loading` logs, in all processes; known in the end."""
    logger, lines = logging.getLogger(f"precache.loading.{module}"), list[str]()
    with contextlib.closing(logging.FileHandler(folder / "log")) as handler:
        logger.addHandler(handler)
        yield lines
        logger.removeHandler(handler)
    lines += (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(("workers", "world", "said"), [(0, 2, 0), (1, 2, 1), (2, 2, 1), (1, 1, 0)])
def test_a_loader_in_a_worker_says_that_no_rank_compares_it(
    workers: int, world: int, said: int, stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    rows = list[int]()
    with _lines_of("rank_check", tmp_path) as lines:
        for rank in range(world):
            options: dict[str, Any] = {"rank": rank, "world_size": world}
            if workers > 1:
                options = {
                    "rank": lambda rank=rank: rank * workers + get_worker_info().id,
                    "world_size": lambda: world * workers,
                }
            rows += _rows(Streamed(_plain, stores["raw"].path, drop_last=True, **options), workers)
    assert len(lines) == said
    assert all("is in a worker of a DataLoader, and no rank compares it" in line for line in lines)
    assert len(rows) == len({*rows}) == 20


class Kept(Streamed):
    """Batches of one loader, which is made here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loader = self.make(self.store, **self.options)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize(
    ("persistent", "chosen", "said"), [(False, False, 2), (True, False, 1), (False, True, 0)]
)
@pytest.mark.parametrize("make", [_plain, _mixed])
def test_workers_that_begin_each_epoch_anew_say_that_it_is_the_first(
    make: Callable[..., Any],
    persistent: bool,
    chosen: bool,
    said: int,
    stores: dict[str, BuiltStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By way of both remedies that the line names, epochs have orders of their own."""
    monkeypatch.setattr("precache.loading.loop._first_epochs", set())
    with _lines_of("loop", tmp_path) as lines:
        dataset, epochs = Kept(make, stores["raw"].path), []
        batches: DataLoader[Any] = DataLoader(
            dataset, batch_size=None, num_workers=1, persistent_workers=persistent
        )
        for epoch in range(2):
            if chosen:
                dataset.loader.set_epoch(epoch)
            epochs.append(rows_of(batches))
    assert len(lines) == said
    assert all("begins at epoch 0 in a worker of a DataLoader" in line for line in lines)
    assert all("persistent_workers=True, or call set_epoch(epoch)" in line for line in lines)
    assert (epochs[0] == epochs[1]) == (not persistent and not chosen)


@pytest.mark.parametrize("make", [_plain, _mixed])
def test_a_worker_that_does_not_know_the_rank_of_its_process_is_refused(
    make: Callable[..., Any], stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is spawned, where `torch.multiprocessing.spawn` started the ranks."""
    store = stores["raw"].path
    with monkeypatch.context() as rank:
        rank.setenv("RANK", "1")
        rank.setenv("WORLD_SIZE", "2")
        pickled: Any = pickle.dumps(make(store))
    said = "made on one of 2 ranks, and is used in a worker"
    assert_refused((said, _rows, Streamed(pickle.loads, pickled), 1))
    assert len(_rows(Streamed(pickle.loads, pickled), 0)) == 21
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    said = "does not know the rank of its process: MASTER_ADDR="
    assert_refused((said, _rows, Streamed(make, store), 1))
    assert len(_rows(Streamed(make, store, rank=1, world_size=2), 1)) == 11
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(_rows(Streamed(make, store), 1)) == 21


RANK = """
import sys, torch
from multiprocessing import get_context
from torch.utils.data import DataLoader
from tests.loading.test_workers import Streamed, _plain, _rows

def made(store):
    _rows(Streamed(_plain, store), 0)

def train(rank, store, meet, world, how, given):
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    options = {"rank": rank, "world_size": world} if given else {}
    if how == "worker":
        rows = _rows(Streamed(_plain, store, **options), 1, multiprocessing_context="spawn")
        print(rank, *rows, flush=True)
        return
    child = get_context("spawn").Process(target=made, args=(store,))
    child.start()
    child.join()

if __name__ == "__main__":
    store, meet, world, how, given = sys.argv[1:]
    arguments = store, meet, int(world), how, given == "given"
    if int(world) > 1:
        torch.multiprocessing.spawn(train, arguments, int(world))
    else:
        train(0, *arguments)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("world", "how", "given"),
    [
        (2, "worker", False), (2, "process", False), (2, "worker", True), (1, "worker", False),
    ],
)  # fmt: skip
def test_what_a_rank_without_a_launcher_spawns_does_not_take_itself_for_the_only_one(
    world: int, how: str, given: bool, stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    arguments = [stores["raw"].path, f"file://{tmp_path / 'meet'}", world, how, "given" * given]
    ended = subprocess.run(
        [sys.executable, tmp_path / "rank.py", *map(str, arguments)],
        capture_output=True, text=True, timeout=200, check=False, env=environment(),
    )  # fmt: skip
    refused = bool(re.search(r"spawned by SpawnProcess-\d, which another process", ended.stderr))
    assert refused == (world > 1 and not given), ended.stderr
    assert ("reads as rank 0 of 1, and does not know" in ended.stderr) == (world == 1)
    rows = [int(row) for line in ended.stdout.splitlines() for row in line.split()[1:]]
    assert len(rows) == (0 if refused else 22 if world > 1 else 21)


def test_workers_with_rows_of_their_own_are_the_users_business(
    stores: dict[str, BuiltStore],
) -> None:
    def rows() -> Any:
        info = get_worker_info()
        valid = stores["raw"].open().valid.nonzero()[0]
        return valid if info is None else valid[info.id :: info.num_workers]

    with pytest.raises(UsageError, match="rows= of its own, rank=0, world_size=1"):
        _rows(Streamed(_plain, stores["raw"].path, rows=rows), 2)
    dataset = Streamed(_plain, stores["raw"].path, rows=rows, rank=0, world_size=1)
    assert _rows(dataset, 2) == _rows(dataset, 0)


@pytest.mark.parametrize(
    ("workers", "given", "said"),
    [
        (0, 2, "some read the same"), (0, 1, ""), (0, 4, ""), (0, 8, "some rows are never read"),
        (2, 4, "some read the same"), (2, 1, "some read the same"), (2, 8, ""),
        (2, 9, "some rows are never read"),
    ],
)  # fmt: skip
def test_other_numbers_of_parts_than_of_processes_and_workers_are_said_once(
    workers: int,
    given: int,
    said: str,
    stores: dict[str, BuiltStore],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In a job of four processes."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = opened(stores["raw"], 2, rank=0, world_size=given)
    with _lines_of("loader", tmp_path) as lines:
        for _ in range(2):
            _rows(Streamed(lambda _: loader, Path()), workers)
    assert len(lines) == (2 * 2 if workers else 1) * bool(said)
    assert all(f"rank=0, world_size={given} was given, and" in line for line in lines)
    assert all(said in line for line in lines)


def test_a_loader_made_before_the_workers_is_refused_with_its_first_batch(
    stores: dict[str, BuiltStore],
) -> None:
    with _plain(stores["raw"], rank=1, world_size=2) as parted:
        assert len(_rows(Streamed(lambda _: parted, Path()), 2)) == 22

    class Begun(IterableDataset[Any]):
        def __init__(self, batches: Any) -> None:
            self.batches = batches

        def __iter__(self) -> Iterator[Any]:
            return iter(self.batches)

    loader = _plain(stores["raw"])
    for batches in (loader, iter(loader)):
        assert_refused(("2 workers of a DataLoader", _rows, Begun(batches), 2))
    assert get_worker_info() is None
    assert len(flat(loader)) == 21
