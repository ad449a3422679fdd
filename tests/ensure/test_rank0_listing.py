"""Ranks of one training job request a version: one of them lists the source."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import precache
from precache.errors import BuildError
from precache_workers.ensure import rank0_listing
from precache_workers.ensure.rank0_listing import Rank0Channel
from precache_workers.sources.folder import FolderSource
from tests.conftest import BuiltStore
from tests.support.building import end, start, write, write_jpegs


def run_rank(rank: int, port: int, folder: Path) -> None:
    """Ask for versions; what was answered, and how often this rank listed the source, goes into a
    file."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shared = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    listings: list[None] = []
    list_source = FolderSource.list

    def noted(self: FolderSource, *arguments: Any, **options: Any) -> Any:
        listings.append(None)
        return list_source(self, *arguments, **options)

    FolderSource.list = noted  # type: ignore[method-assign]  # in a process of its own

    def ask(name: str, size: int = 150, source: str = "in", **options: Any) -> Any:
        before, version = len(listings), None
        recipe = precache.Recipe.image(resize=size, crop=size)
        given: dict[str, Any] = {"address": "serial", "shard_samples": 4, "progress": rank == 0}
        try:
            version = precache.ensure(folder / source, folder / "store", recipe, **given, **options)
            answer = version and version.id
        except precache.PrecacheError as error:
            answer = f"{type(error).__name__}: {error}"
        found[name] = [answer, len(listings) - before]
        return version

    ask("built")
    ask("there")
    ask("nowhere", source="nowhere")
    version = ask("followed", size=140, follow=True)
    with precache.Loader(version, batch_size=3, device="cpu") as loader:
        found["rows"] = [row for batch in loader for row in batch["row"].tolist()]
    ask("broken", source="broken", on_error="raise")
    if rank == 0:
        ask("alone", size=130)
    dist.barrier()
    rank0_listing.BEGIN_TIMEOUT = timedelta(seconds=0.1)
    if rank == 1:
        ask("alone", size=120)
    dist.barrier()
    ask("together", size=110, wait=100)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks was answered, and how often it listed the source for that."""
    folder = tmp_path_factory.mktemp("ranks")
    write_jpegs(folder / "in", 12)
    write(write_jpegs(folder / "broken", 8) / "cat/none.jpg", b"no photo")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [start(run_rank, rank, server.port, folder) for rank in range(2)]
    assert [end(process) for process in processes] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["built", "there", "followed", "together"])
def test_rank_0_lists_for_all(found: list[dict[str, Any]], name: str) -> None:
    (one, listed), (other, listed_too) = (each[name] for each in found)
    assert one == other
    assert len(one.partition(".")[0]) == 32
    assert (listed, listed_too) == (1, 0)


def test_a_version_that_is_followed_is_shared_out(found: list[dict[str, Any]]) -> None:
    assert sorted(row for each in found for row in each["rows"]) == list(range(12))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nowhere", "SourceError: {}the source "),
        ("broken", "BuildError: {}1 of 9 samples failed (cat/none.jpg: "),
    ],
)
def test_what_rank_0_fails_with_all_fail_with(
    found: list[dict[str, Any]], name: str, error: str
) -> None:
    (one, _), (other, listed) = (each[name] for each in found)
    assert one.startswith(error.format(""))
    assert other == one.replace(": ", ": rank 0: ", 1)
    assert listed == 0


def test_ranks_may_ask_alone(found: list[dict[str, Any]]) -> None:
    for each in found:
        answer, listed = each["alone"]
        assert len(answer.partition(".")[0]) == 32
        assert listed >= 1


def test_a_failure_that_is_none_of_ours_is_named() -> None:
    store = HashStore()
    leader = Rank0Channel(store, "asked", is_rank0=True)
    leader.begin()
    leader.fail(MemoryError())
    with pytest.raises(BuildError, match=r"^rank 0: MemoryError\(\)$"):
        Rank0Channel(store, "asked", is_rank0=False).receive()


def test_a_process_whose_rank_is_unclear_lists_the_source_itself(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_RANK", "1")
    store = stores["raw"]
    version = precache.ensure(store.source, store.path, store.recipe, shard_samples=8)
    assert version is not None
    assert version.id == store.result.version
