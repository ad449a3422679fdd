"""Ranks that would read overlapping rows are refused by name, and none waits for another."""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import zarr

import precache
from precache import Reading, Weighted
from precache.errors import UsageError
from precache.loading import rank_check
from tests.conftest import BuiltStore
from tests.support.building import build_here, end, start, write_jpegs

ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
BLOCKS = {"shuffle": "block"}
FIXED = {"shuffle": False}
WEIGHTS = np.arange(75.0)
FORTY = {"rows": range(40)}
DRAWN = {"shuffle": Weighted(WEIGHTS)}
FIRST = {"rank": 0, "world_size": 2}

DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({}, {"seed": 3}, r"differs in seed \(3 on rank 1, 0 on rank 0\); make it alike"),
    "batch": ({}, {"batch_size": 4}, r"in batch_size \(4 on rank 1, 8 on rank 0\);"),
    "no shuffle": ({}, FIXED, r"in shuffle \(False on rank 1, full on rank 0\);"),
    "kind of shuffle": (BLOCKS, {}, r"in shuffle \(full on rank 1, block on rank 0\);"),
    "window": (BLOCKS, {"shuffle": precache.Block(2)}, r"in window of the shuffle \(2 .*, 8 .*\);"),
    "nodes": (BLOCKS, {"shuffle": precache.Block(nodes=2)}, r"in nodes of the shuffle \(2 .*, 1 "),
    "drop_last": ({"drop_last": True}, {}, r"in drop_last \(False on rank 1, True on rank 0\);"),
    "rows": (FORTY, {"rows": range(1, 41)}, r"in rows \(\d+ rows, .*, \d+ rows, .*\);"),
    "no rows": (FORTY, {}, r"in rows \(all but 2 holes, digest .*, \d+ rows, "),
    "weights": (DRAWN, {"shuffle": Weighted(WEIGHTS**2)}, r"in weights \(digest .* digest "),
    "no weights": (DRAWN, {}, r"in weights \(None on rank 1, digest .* on rank 0\)"),
    "refresh": ({}, {"refresh": "epoch"}, r", refresh \(epoch on rank 1, None on rank 0\);"),
    "store": ({"store": "other"}, {}, r"in store \(\S+ on rank 1, \S+other on rank 0\), version"),
    "two": ({"seed": 1, "batch_size": 4}, {}, r"in seed \(0 .*, 1 .*\), batch_size \(8 .*, 4 .*\)"),
    "one rank twice": (
        FIRST, FIRST,
        r"the same rows: .* is for rank 0 of 2 on ranks 0 and 1 of the job; leave out rank and",
    ),
}  # fmt: skip
"""Case -> options of rank 0 and of rank 1, and the error of rank 1, which comes later."""

ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "machine": (
        {"reading": Reading(num_threads=1, access="pread")},
        {"reading": Reading(prefetch_batches=1)},
    ),
    "copy": ({"store": "copy"}, {}),
    "spelling": ({"rows": range(40), "seed": np.int64(1)}, {"rows": np.arange(75) < 40, "seed": 1}),
    "given ranks": ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}),
    "rows dealt out by hand": ({**ALONE, "rows": range(30)}, {**ALONE, "rows": range(30, 60)}),
    "alone": ({**ALONE, "seed": 7, "store": "other"}, {}),
}
"""Case -> options of rank 0 and of rank 1, which have their reasons."""

Case = Callable[["Rank"], Any]


class Rank:
    """One of two ranks, and the stores."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.loader = self.make

    def make(self, store: str = "store", **options: Any) -> precache.Loader:
        options = {"batch_size": 8, "device": "cpu", **options}
        return precache.Loader(self.folder / store, **options)


def epochs(loader: Any, *numbers: int) -> None:
    """Read epochs as loops do that set them."""
    for number in numbers:
        loader.set_epoch(number)
        list(loader)


def state(epoch: int, batch: int, rank: Rank) -> dict[str, Any]:
    with rank.make(**ALONE, batch_size=16) as loader:
        return {**loader.state_dict(), "epoch": epoch, "sample": 16 * batch}


def mixture(rank: Rank, weights: Any = None, seed: int = 0, **second: Any) -> precache.Mixture:
    return precache.mix([rank.make(), rank.make(**second)], weights, seed=seed)


# --- what a loop does ---

POSITION = r"begins at epoch {}, \w+ {} on rank 1, and at epoch {}, \w+ {} on rank 0; load the"

PLAYED: dict[str, tuple[str, str, str | None]] = {
    "resumed elsewhere": ("resume:1 look", "resume:2 look", POSITION.format(3, 32, 3, 16)),
    "resumed on one rank": ("resume:1 read", "read", POSITION.format(0, 0, 3, 16)),
    "another epoch": ("set:0 look", "set:1 look", POSITION.format(1, 0, 0, 0)),
    "an epoch that stays": ("epoch:0 epoch:0", "epoch:0 epoch:1", POSITION.format(1, 0, 0, 0)),
    "a look that takes an epoch": ("look read", "read", POSITION.format(0, 0, 1, 0)),
    "mixed: another epoch": ("set:0 look", "set:1 look", POSITION.format(1, 0, 0, 0)),
    "the same state": ("look resume:1 epoch:3 epoch:4", "resume:1 epoch:3 epoch:4", None),
    # As the error of "a look that takes an epoch" advises.
    "a look before the epoch is set": ("look epoch:0 epoch:1", "epoch:0 epoch:1", None),
    "longer looks": ("look:2 look:2 epoch:0 look:3 look:2 epoch:1", "epoch:0 epoch:1", None),
    "looks on all ranks": ("look read", "look read", None),
    "fixed: an order has no epoch": ("look read read", "read", None),
    "mixed: looks": ("look:3 epoch:0 epoch:1", "epoch:0 epoch:1", None),
}
"""Case -> what ranks 0 and 1 do with a loader, and the error of rank 1, which comes later."""


def play(rank: Rank, name: str) -> None:
    """Do what stands in `PLAYED`."""
    kind = name.partition(":")[0]
    loader: Any = mixture(rank, [1, 2]) if kind == "mixed" else rank.make(shuffle=kind != "fixed")
    for step in PLAYED[name][rank.rank].split():
        verb, _, number = step.partition(":")
        if verb == "resume":
            loader.load_state_dict(state(3, int(number), rank))
        elif verb in ("set", "epoch"):
            loader.set_epoch(int(number))
        if verb in ("read", "epoch", "look"):
            list(islice(loader, int(number or 1) if verb == "look" else None))


# --- refused ---


def one_more_on_one_rank(rank: Rank) -> None:
    for store in ["other", "store"] if rank.rank == 0 else ["store"]:
        list(rank.make(store))


REFUSED: list[tuple[Case, str]] = [
    (
        lambda rank: next(iter(mixture(rank, seed=rank.rank))),
        r"the mixture made at test_rank_check.py:\d+ differs in seed \(1 on rank 1, 0 on",
    ),
    (
        lambda rank: next(iter(mixture(rank, [[1, 2], [2, 1]][rank.rank]))),
        r"differs in weights \(\[0.66\d*, 0.33\d*\] on rank 1, \[0.33",
    ),
    (
        lambda rank: next(iter(mixture(rank, seed=4, rows=range(30 + rank.rank)))),
        r"differs in rows of source 1 \(\d+ rows",
    ),
    (one_more_on_one_rank, r"differs in store .*; make it alike, and equally often, on all ranks"),
]
"""Case, and the error of rank 1, which comes later."""


# --- allowed ---


def evaluation_on_rank_0(rank: Rank) -> None:
    if rank.rank == 0:
        list(rank.make(shuffle=False))
    train = rank.make()
    for epoch in range(2):
        epochs(train, epoch)
        if rank.rank == 0:
            list(rank.make(shuffle=False))


def a_helper_called_twice(rank: Rank) -> None:
    def helper(**options: Any) -> None:
        list(rank.make(**options))

    if rank.rank == 0:
        helper(seed=5)
    helper(seed=6)


def one_more_that_says_so(rank: Rank) -> None:
    """As the error of `one_more_on_one_rank` advises."""
    for store in ["other", "store"] if rank.rank == 0 else ["store"]:
        list(rank.make(store, **(ALONE if store == "other" else {})))


def a_loader_each_epoch(rank: Rank) -> None:
    for epoch in range(3):
        epochs(rank.make(seed=epoch), epoch)


def made_in_one_order_and_used_in_another(rank: Rank) -> None:
    """One of them on rank 0 alone."""
    loaders = [rank.make(seed=seed) for seed in range(4)]
    for loader in loaders[1:] if rank.rank else reversed(loaders):
        list(loader)


ALLOWED: list[Case] = [
    evaluation_on_rank_0,
    a_helper_called_twice,
    one_more_that_says_so,
    a_loader_each_epoch,
    made_in_one_order_and_used_in_another,
]


# --- what stats() says ---


def both(rank: Rank, mixed: bool = False) -> Iterator[Any]:
    loader: Any = mixture(rank, seed=11) if mixed else rank.make()
    for _ in range(2):
        list(loader)
        yield loader.stats()


def lines(rank: Rank) -> Iterator[Any]:
    if rank.rank:
        yield from both(rank)
    else:
        yield from both(rank)


def in_step(rank: Rank, alone: int = 0, chosen: Sequence[int] = ()) -> Iterator[Any]:
    """Read epochs together; before the second one, some on rank 0 alone."""
    loader = rank.make()
    list(loader)
    yield loader.stats()
    for _ in range(alone if rank.rank == 0 else 0):
        list(loader)
    dist.barrier()
    for number in range(1, 4):
        if chosen:
            loader.set_epoch(chosen[number])
        for _ in loader:
            dist.barrier()
    yield loader.stats()


def set_epoch_on_one_rank(rank: Rank, numbers: Sequence[int] = (0,)) -> Iterator[Any]:
    """Rank 0 reads one epoch twice, in step with rank 1, which reads the next one."""
    loader = rank.make()
    list(loader)
    yield loader.stats()
    dist.barrier()
    for epoch in numbers:
        if rank.rank == 0:
            loader.set_epoch(epoch)
        for _ in loader:
            dist.barrier()
    yield loader.stats()


STATS: dict[str, tuple[Callable[[Rank], Iterator[Any]], int]] = {
    "both": (both, 2),
    "both mixed": (partial(both, mixed=True), 2),
    "lines": (lines, 1),
    "in step": (in_step, 2),
    "one more epoch": (partial(in_step, alone=1), 2),
    "one more epoch, and set_epoch": (partial(in_step, alone=1, chosen=range(4)), 2),
    "set_epoch on one rank": (set_epoch_on_one_rank, 2),
    "set_epoch on one rank, as it is": (partial(set_epoch_on_one_rank, numbers=range(1, 4)), 2),
}
"""Case, and the ranks that are compared in the end."""


@contextlib.contextmanager
def lines_of_the_check() -> Iterator[list[str]]:
    lines, handler = list[str](), logging.Handler()
    # A handler of one method, for a log.
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("precache.loading.rank_check")
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


def _cases(rank: Rank) -> dict[str, Any]:
    """Case -> error of this rank, or None; rank 0 comes first and does not wait."""
    made: dict[str, Any] = {}

    def run(name: str, case: Callable[[], Any]) -> None:
        if rank.rank == 1:
            dist.barrier()
        try:
            made[name] = case()
        except UsageError as error:
            made[name] = f"{type(error).__name__}: {error}"
        if rank.rank == 0:
            dist.barrier()

    for name, (first, second, *_) in {**DIFFERENT, **ALIKE}.items():
        options = second if rank.rank else first
        run(name, lambda options=options: next(iter(rank.make(**options))) and None)
    for name in PLAYED:
        run(name, lambda name=name: play(rank, name))
    for number, (case, _) in enumerate(REFUSED):
        run(f"refused {number}", lambda case=case: case(rank) and None)
    for case in ALLOWED:
        run(case.__name__, lambda case=case: case(rank))
    for name, (case, _) in STATS.items():
        reports = case(rank)
        run(name, lambda reports=reports: next(reports).compared)
        dist.barrier()
        with lines_of_the_check() as logged:
            last = next(reports)
        dist.barrier()
        made[name] = [made[name], last.compared, last.ranks, str(last), logged]
    return made


def run_rank(rank: int, port: int, folder: Path, name: str, elsewhere: bool = False) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shared = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, shared), rank=rank, world_size=2)
    told: Any = None
    if name == "cases":
        told = _cases(Rank(rank, folder))
    else:
        loader = Rank(rank, folder).make(seed=1 if elsewhere else 0)
        epochs(loader, 5 if elsewhere else 0)
        dist.barrier()
        told = loader.stats().compared
    (folder / f"{name}-{rank}").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tile_stores: dict[str, BuiltStore], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a copy of it, and another one."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, codec in (("store", "raw"), ("copy", "raw"), ("other", "zstd")):
        shutil.copytree(tile_stores[codec].path, folder / name)
    return folder


@pytest.fixture(scope="module")
def server() -> Any:
    """The store of a job."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _answers(server: Any, folder: Path, name: str, *arguments: Any) -> list[Any]:
    """What each of two ranks came to."""
    processes = [start(run_rank, rank, server.port, folder, name, *arguments) for rank in (0, 1)]
    assert [end(process) for process in processes] == [0, 0]
    return [json.loads((folder / f"{name}-{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def cases(server: Any, folder: Path) -> list[dict[str, Any]]:
    return _answers(server, folder, "cases")


def test_ranks_that_disagree_are_refused_by_name(cases: list[dict[str, Any]]) -> None:
    for name, error in {
        **{name: error for name, (_, _, error) in DIFFERENT.items()},
        **{name: error for name, (_, _, error) in PLAYED.items() if error},
        **{f"refused {number}": error for number, (_, error) in enumerate(REFUSED)},
    }.items():
        assert cases[0][name] is None
        assert re.search(error, cases[1][name]), name
        assert "rank=0, world_size=1" in cases[1][name]


def test_ranks_may_do_what_mixes_no_rows(cases: list[dict[str, Any]]) -> None:
    played = [name for name, (_, _, error) in PLAYED.items() if error is None]
    for name in [*ALIKE, *played, *(case.__name__ for case in ALLOWED)]:
        assert [rank[name] for rank in cases] == [None, None], name


def test_stats_say_how_many_ranks_were_compared(cases: list[dict[str, Any]]) -> None:
    for name, (_, compared) in STATS.items():
        for rank in (0, 1):
            first, last, ranks, text, _ = cases[rank][name]
            assert first == min(compared, 1 + rank)
            assert (last, ranks) == (compared, 2)
            assert ("ranks compared    1 of 2; the others may read" in text) == (compared == 1)


def test_a_rank_that_reads_or_chooses_epochs_alone_says_so(cases: list[dict[str, Any]]) -> None:
    def logged(name: str) -> list[list[str]]:
        return [rank[name][-1] for rank in cases]

    silent = ("in step", "one more epoch, and set_epoch", "set_epoch on one rank, as it is")
    assert [logged(name) for name in silent] == [[[], []]] * 3
    [ahead], behind = logged("one more epoch")
    first, [line] = logged("set_epoch on one rank")
    assert first == behind == []
    assert re.match(
        r"rank 0 reads epoch 2 of the loader made at test_rank_check.py:\d+ to its end, which 1 "
        r"of 2 ranks have begun, and read .*; .* or set_epoch\(epoch\), on all; a loader that",
        ahead,
    )
    said = r"rank 1 reads epoch 1 of .*, which 1 of 2 ranks have begun, and another rank chose its"
    assert re.match(said, line)


def test_processes_that_replace_others_in_one_job_are_not_compared_with_them(
    server: Any, folder: Path
) -> None:
    assert _answers(server, folder, "before") == [2, 2]
    assert _answers(server, folder, "after", True) == [2, 2]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a job of two ranks, of which this process claims to be one."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return [server]


def test_a_job_whose_store_has_ended_is_logged_and_trains_on(
    job: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Rank(0, folder).make(rank=0, world_size=2) as loader:
        list(loader)
        assert loader.stats().compared == 1
        job.clear()
        with caplog.at_level(logging.INFO, "precache"):
            list(loader)
            assert loader.stats().compared == 1
            epochs(loader, 4)
    assert len([text for text in caplog.messages if text.startswith("ranks do not compare")]) == 1


def test_stores_of_one_version_with_other_holes_are_refused(
    job: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each node has built its own, and read some photo wrong."""
    for rank in (0, 1):
        rank_check._made.clear()  # as another process
        loader = Rank(rank, folder).make(rank=rank, world_size=2)
        if rank == 0:
            next(iter(loader))
            monkeypatch.setattr(precache.Version, "hole_rows", np.array([3, 5, 7]))
    for _ in range(2):  # it stays refused
        with pytest.raises(UsageError, match=r"in rows \(all but 3 holes, .*, all but 2 holes"):
            next(iter(loader))


def test_groups_of_other_software_are_told_apart_by_some_rows(
    job: list[Any], tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), np.uint8)
    for name, of_group in (("a", values), ("copy", values), ("b", values[::-1])):
        zarr.create_array(tmp_path / name, name="x", data=of_group, chunks=(5, 3, 32, 32))
    options: dict[str, Any] = {"fields": {"image": "x"}, "batch_size": 4, "world_size": 2}
    for rank, name in enumerate(("a", "copy")):
        rank_check._made.clear()  # as another process
        next(iter(Rank(rank, tmp_path).make(name, rank=rank, **options)))
    for rank, name in enumerate(("a", "b")):
        rank_check._made.clear()
        loader = Rank(rank, tmp_path).make(name, rank=rank, **options)
        if rank == 0:
            next(iter(loader))
    with pytest.raises(UsageError, match=r"differs in store \(\S+/b on rank 1, \S+/a on rank 0\)"):
        next(iter(loader))


def test_ranks_that_resume_other_versions_within_an_epoch_are_refused(
    job: list[Any], tmp_path: Path
) -> None:
    """Rank 0 decides on a version at the beginning of an epoch alone."""
    source = write_jpegs(tmp_path / "in", 10)
    states = []
    for size in (40, 48):
        build_here(source, tmp_path / "store", precache.Recipe.image(resize=size, crop=32))
        with Rank(0, tmp_path).make(batch_size=4, **ALONE) as loader:
            states.append({**loader.state_dict(), "sample": 4})
    for rank, state in [(1, states[0]), (0, states[1]), (0, None)]:
        rank_check._made.clear()  # as another process
        loader = Rank(rank, tmp_path).make(batch_size=2, rank=rank, world_size=2, refresh="epoch")
        if state is not None:
            loader.load_state_dict(state)
        if rank == 1:
            next(iter(loader))
        else:
            with pytest.raises(
                UsageError, match=r"differs in version \([\w.]+ on rank 0, [\w.]+ on rank 1"
            ):
                next(iter(loader))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_stats_say_that_nothing_was_compared_without_a_job(world: int, folder: Path) -> None:
    """Or in a job of another number of ranks."""
    with Rank(0, folder).make(rank=0, world_size=world) as loader:
        assert loader.stats().compared is None
        list(loader)
        stats = loader.stats()
    assert (stats.ranks, stats.compared) == (world, None if world == 1 else 1)
    assert (f"ranks compared    1 of {world}" in str(stats)) == (world > 1)
