"""A training that begins while its version is made."""

import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import precache
from precache import Reading
from precache.errors import BuildError, StoreError, UsageError
from precache.loading.shard_order import ShardOrder
from precache.store import live_version
from precache.store.build_status import DESCRIPTION
from precache.store.live_version import LiveVersion
from precache.transforms import MixUp
from tests.support.building import (
    DEADLINE,
    assert_same,
    build_here,
    command,
    contents,
    environment,
    pixels,
    poll,
    remains,
    write,
    write_jpegs,
)
from tests.support.holding import Held, leases_of
from tests.support.loaders import assert_refused, epoch_of, flat, opened, rows_of
from tests.support.servers import S3Server

# --- the order ----------------------------------------------------------------------------------


class Coming(LiveVersion):
    """A version whose shards come one by one, each when it is waited for."""

    path = "store/version"

    def __init__(self, rows: int, per_shard: int, holes: set[int]) -> None:
        self.attributes: Any = SimpleNamespace(rows_per_shard=per_shard)
        self.rows = self.planned = rows
        self.finished = self.waits = 0
        self.valid = np.ones(rows, np.bool_)
        self._missing = holes

    def advance(self) -> bool:
        return False

    def await_shards(self, stopped: threading.Event) -> None:
        self.waits += 1
        self.finished += 1
        end = self.finished * self.attributes.rows_per_shard
        self.valid[[row for row in self._missing if row < end]] = False


@st.composite
def coming(draw: st.DrawFn) -> tuple[Any, ...]:
    rows, per_shard = draw(st.integers(4, 60)), draw(st.integers(1, 9))
    holes = draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1))
    return rows, per_shard, holes


def orders(version: tuple[Any, ...], world: int, batch: int, **more: Any) -> list[ShardOrder]:
    given = {"seed": 1, "drop_last": False, "stopped": threading.Event(), **more}
    versions: list[Any] = [Coming(*version) for _ in range(world)]
    return [ShardOrder(v, batch, rank=r, world_size=world, **given) for r, v in enumerate(versions)]


@given(coming(), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_ranks_have_as_many_batches_and_all_rows_each_draw_with_a_number_of_its_own(
    version: tuple[Any, ...], world: int, batch: int, drop_last: bool
) -> None:
    rows, _, holes = version
    if world * batch > rows:
        batch = 1
    ranks = orders(version, world, batch, drop_last=drop_last)
    read = [[list(map(int, part)) for run in order.runs(0) for part in run] for order in ranks]
    assert {len(parts) for parts in read} == {ranks[0].batches()}
    assert len({tuple(map(len, parts)) for parts in read}) == 1
    taken = [row for parts in read for part in parts for row in part]
    right = set(range(rows)) - holes
    assert set(taken) <= right
    if not drop_last:
        assert set(taken) == right
    starts = range(0, ranks[0].stop(), ranks[0].global_batch)
    marks = [order.repeated(start) for order in ranks for start in starts]
    again = sum(int(mark.sum()) for mark in marks if mark is not None)
    assert len(taken) - min(len(taken), len(right)) == again
    drawn = []
    for order, parts in zip(ranks, read, strict=True):
        for start, part in zip(starts, parts, strict=True):
            numbers = order.again(start)
            drawn += part if numbers is None else np.where(numbers < 0, numbers, part).tolist()
    assert len(set(drawn)) == len(drawn)
    assert {number for number in drawn if number >= 0} <= right


@given(coming(), st.integers(1, 4), st.integers(0, 20))
def test_steps_are_the_same_for_any_number_of_ranks_and_from_any_start(
    version: tuple[Any, ...], world: int, start: int
) -> None:
    [alone] = orders(version, 1, 4)
    steps = [sorted(part.tolist()) for part in alone.epoch(0)]
    if 4 % world == 0:
        ranks = [list(order.epoch(0, 4 * start)) for order in orders(version, world, 4 // world)]
        shared = [sorted(np.concatenate(parts).tolist()) for parts in zip(*ranks, strict=True)]
        assert len(shared) >= len(steps[start:])
        assert shared[:-1] == steps[start:][: len(shared)][:-1]  # the last one may be padded
    [again] = orders(version, 1, 4)
    assert [sorted(part.tolist()) for part in again.epoch(0, 4 * start)] == steps[start:]


def test_a_batch_waits_for_its_own_shards_alone_and_nothing_is_an_error() -> None:
    [order] = orders((20, 5, set()), 1, 4)
    version: Any = order._version
    runs = order.runs(0)
    first = list(next(runs))
    assert version.waits == 1
    assert set(first[0].tolist()) < set(range(5))
    assert [len(part) for run in runs for part in run] == [4, 4, 4, 4]
    assert version.waits == 4
    [order] = orders((4, 2, {0, 1, 2, 3}), 1, 2)
    with pytest.raises(BuildError, match="no sample of store/version could be decoded"):
        list(order.epoch(0))


# --- trainings ----------------------------------------------------------------------------------


class Training(Held):
    """Processes that follow one build, which holds after its first shard."""

    def __init__(self, folder: Path, bad: int = 0) -> None:
        super().__init__(folder, 22)
        for number in range(bad):
            write(self.source / f"cat/broken{number}.jpg", b"none")
        self.recipe = self.recipe_of(after=5)
        self.options: dict[str, Any] = {"shard_samples": 4, "max_failures": 9}

    def ensure(self, *, follow: bool = True) -> precache.Version:
        version = precache.ensure(
            self.source, self.store, self.recipe, follow=follow, progress=False,
            address="serial", **self.options,
        )  # fmt: skip
        assert version is not None
        return version

    def loader(self, batch_size: int = 2, **options: Any) -> precache.Loader:
        return opened(self.ensure(), batch_size, **options)

    def valid(self) -> list[int]:
        return np.flatnonzero(precache.open(self.store).valid).tolist()

    def await_commit(self) -> None:
        """Wait until the build is committed: it removes its description last."""

        def committed() -> bool:
            described = list(self.store.glob(f"*/{DESCRIPTION}"))
            return bool(list(self.store.glob("commits/*.json"))) and not described

        poll(committed, "the commit")

    def builder(self) -> int:
        """The process that builds, once it holds a sample."""
        return int(poll(self.builders, "the build holds a sample")[0])


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A training of this process, whose build is elsewhere and holds."""
    monkeypatch.setenv("HOLD", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(live_version, "LIVENESS_SECONDS", 0.02)
    monkeypatch.setattr(live_version, "TAKEOVER_SECONDS", 3.0)
    training = Training(tmp_path, bad=1)
    yield training
    training.go()
    training.await_builds()


def test_a_state_of_the_first_epoch_goes_on_after_the_commit(held: Training) -> None:
    version = held.ensure()
    assert isinstance(version, LiveVersion)
    with opened(version, 3) as loader:
        first = next(iter(loader))["row"].tolist()
        state = loader.state_dict()
        assert loader.follows
        assert loader.rows_of_batch(0, 0).tolist() == first
        said = "epoch is 1, and its order is known once the version"
        assert_refused((said, loader.rows_of_batch, 1, 0))
    said = "is closed, and the rows of that batch are not known"
    assert_refused((said, loader.rows_of_batch, 0, 7))
    held.go()
    held.await_commit()
    late = held.ensure()
    assert (late.committed, late.followed) == (True, True)
    with opened(late, 3) as loader:
        whole = rows_of(loader)
        assert len(loader) == 8
        assert len(list(loader)) == 8  # of the version that is there: 22 valid rows
        later = loader.state_dict()
    assert whole[0] == first
    with held.loader(3) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == whole[1:]
    with held.loader(3) as loader:
        loader.load_state_dict(later)
        assert loader.state_dict() == later
        assert not loader.follows
    with opened(held.store, 3) as loader:
        assert_refused(("order='shard'", loader.load_state_dict, state))


def test_every_position_of_the_first_epoch_resumes_exactly_before_and_after_the_commit(
    held: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ranks, too, one of which comes after the commit; what a bad sample costs is said."""
    states, batches, ranks = [], [], {"seed": 5, "world_size": 2}
    with held.loader(rank=0, **ranks) as early, held.loader(4, seed=5) as loader:
        assert not loader.version.committed
        for number, batch in enumerate(loader):
            batches.append(batch["row"].tolist())
            states.append(loader.state_dict())
            if number == 0:
                held.go()
        held.await_commit()
        for number, state in enumerate(states[:-1], 1):
            with held.loader(4, seed=5) as late:
                late.load_state_dict(state)
                assert rows_of(late) == batches[number:]
        version = held.ensure()
        assert version.committed
        with opened(version, 2, rank=1, **ranks) as second:
            assert early.settings() == second.settings()
            caplog.clear()
            pairs = [*zip(early, second, strict=True)]
            assert sum("samples of" in message for message in caplog.messages) == 1
            shared = [sorted(a["row"].tolist() + b["row"].tolist()) for a, b in pairs]
            assert early.stats().repeated + second.stats().repeated == 2
    assert shared[:-1] == [sorted(step) for step in batches][:-1]  # the last one is padded
    valid = held.valid()
    assert len(valid) == 22
    assert sorted({row for step in shared for row in step}) == valid
    right, seen = pixels(held.store), dict[str, np.ndarray]()
    for loader, batch in [*((early, a) for a, _ in pairs), *((second, b) for _, b in pairs)]:
        for key, label, image in zip(
            loader.keys(batch["row"]), batch["label"], batch["image"], strict=True
        ):
            assert version.classes[int(label)] == key.partition("/")[0]
            seen[key] = image.numpy()
    assert_same(seen, right)
    assert remains(held.store) == []


def test_receipts_that_come_out_of_turn_wait_for_the_first(held: Training) -> None:
    version = held.ensure()
    assert isinstance(version, LiveVersion)
    poll(version.advance, "the first shard")
    [folder] = {path.parents[2] for path in held.store.glob("*/_build/receipts/*")}
    receipts = folder / "_build/receipts"
    own = json.loads((receipts / "00000000.json").read_text())
    write(receipts / "00000002.json", json.dumps({**own, "shard": 2, "holes": {}}).encode())
    assert not version.advance()
    write(receipts / "00000001.json", b'{"sha')  # cut off
    assert not version.advance()
    assert version.finished == 1
    for forged in ({"shard": 7}, {"shard": 1, "holes": {}, "content": []}):
        write(receipts / "00000001.json", json.dumps({**own, **forged}).encode())
        with pytest.raises(StoreError, match=r"00000001\.json is damaged: it is of shard"):
            version.advance()
    for number in (1, 2):
        (receipts / f"0000000{number}.json").unlink()


def test_a_build_that_is_killed_is_told_and_goes_on_with_the_next_training(held: Training) -> None:
    with held.loader() as loader:
        batches = iter(loader)
        rows = [next(batches)["row"].tolist() for _ in range(2)]
        os.kill(held.builder(), signal.SIGKILL)
        with pytest.raises(BuildError, match=r"stopped with 1 of 6 shards done: process .* ended"):
            list(batches)
    held.go()
    with held.loader() as loader:
        again = rows_of(loader)
        assert again[:2] == rows
        held.await_commit()
        assert sorted({row for batch in again for row in batch}) == held.valid()


def test_a_follower_goes_on_where_a_build_that_waited_takes_over(held: Training) -> None:
    with held.loader() as loader:
        batches = iter(loader)
        rows = next(batches)["row"].tolist()
        recipe, said = json.dumps(held.recipe.to_dict()), held.folder / "second"
        line = command("build", held.source, held.store, "--recipe", recipe, "--address", "serial",
            "--shard-samples", 4, "--max-failures", 9)  # fmt: skip
        with (
            said.open("wb") as file,
            subprocess.Popen(line, env=environment(), stdout=file, stderr=file) as second,
        ):
            poll(lambda: "waiting for its end" in said.read_text(), "the second build waits")
            os.kill(held.builder(), signal.SIGKILL)
            held.go()
            rows += flat(batches)
            assert second.wait(DEADLINE) == 0
    assert sorted(set(rows)) == held.valid()


def test_a_build_that_fails_says_why(held: Training) -> None:
    held.options["max_failures"] = 0
    with held.loader() as loader:
        batches = iter(loader)
        next(batches)
        held.go()
        with pytest.raises(BuildError, match="shards done: 1 of 23 samples failed"):
            list(batches)


def test_what_needs_a_whole_version_is_refused_and_closing_ends_the_wait(held: Training) -> None:
    version = held.ensure()
    for options, text in (
        ({"rows": [1]}, "needs a finished version"),
        ({"reading": Reading(resident="host")}, "needs a finished version"),
        ({"refresh": "epoch"}, "needs a finished version"),
        ({"shuffle": precache.Weighted([1.0] * 23)}, "shuffle needs a finished version"),
        ({"shuffle": False}, "rows come shard by shard"),
        ({"batch_size": 24, "drop_last": True}, "give at most 23"),
    ):
        given: dict[str, Any] = {"batch_size": 2, **options}
        assert_refused((text, functools.partial(precache.Loader, version, **given)))
    loader = opened(version, 2)
    batches = iter(loader)
    rows = [next(batches) for _ in range(2)]
    threading.Timer(0.2, loader.close).start()
    assert list(batches) == []
    assert len(rows) == 2


def test_a_complete_version_takes_all_options(held: Training) -> None:
    held.go()
    version = held.ensure(follow=False)
    assert not version.followed
    followed = held.ensure()
    assert type(followed) is precache.Version
    for options in ({"rows": [1, 2]}, {"shuffle": False}, {"reading": Reading(resident="host")}):
        assert epoch_of(followed, 2, **options) == epoch_of(version, 2, **options)


@pytest.mark.heavy
@pytest.mark.usefixtures("lingering")
def test_in_a_bucket_by_way_of_a_disk_cache(tmp_path: Path, s3: S3Server) -> None:
    source = write_jpegs(tmp_path / "in", 20)
    write(source / "cat/broken.jpg", b"none")
    slow = {"function": "tests.support.building:linger", "params": {"seconds": 0.1}}
    linger = {"op": "function", **slow}
    ops = [{"op": "decode"}, {"op": "resize", "size": [150, 150]}, linger]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    options: dict[str, Any] = {"shard_samples": 4, "storage_options": s3.options()}
    version = follow(source, "s3://bucket/followed", recipe, **options)
    with opened(version, 3, cache=tmp_path / "cache") as loader:
        assert len(loader) == 7
        first = flat(loader)
        assert loader.stats().fetched.objects == 6
        assert len(first) == 21
        assert len(set(first)) == 20
        assert sorted(flat(loader)) == sorted(set(first))
        assert loader.stats().fetched.objects == 0


class Squares(Dataset[tuple[np.ndarray, int]]):
    """Pictures of one level, which is their label, too; they come slowly where LINGER is set."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(0.05 if "LINGER" in os.environ else 0)
        return np.full((8, 8, 3), index, np.uint8), index


def squares() -> Squares:
    return Squares()


SQUARES = "python:tests.loading.test_shard_order:squares"


@pytest.fixture
def lingering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples come slowly, so that there is a build to follow."""
    monkeypatch.setenv("LINGER", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def follow(source: Any, store: Any, recipe: precache.Recipe, **options: Any) -> LiveVersion:
    version = precache.ensure(
        source, store, recipe, follow=True, progress=False, address="serial", **options
    )
    assert isinstance(version, LiveVersion)
    return version


@pytest.mark.usefixtures("lingering")
def test_labels_that_come_with_samples_are_looked_at_before_they_are_mixed(tmp_path: Path) -> None:
    store, said = tmp_path / "store", "has the label 39, and MixUp takes 0 to 38"
    version = follow(SQUARES, store, precache.Recipe.image(codec="raw"))
    with (
        opened(version, transform=MixUp(39)) as loader,
        pytest.raises(UsageError, match=f"{said}; 1 rows"),
    ):
        list(loader)
    poll(lambda: not leases_of(store), "the end of the build")
    with pytest.raises(UsageError, match=said):
        opened(store, transform=MixUp(39))


@pytest.mark.heavy
@pytest.mark.usefixtures("lingering")
def test_small_fields_and_labels_that_come_with_samples_grow_too(tmp_path: Path) -> None:
    tiny = {"ops": [{"op": "decode", "mode": "L"}, {"op": "resize", "size": [4, 4]}]}
    image = {"ops": [{"op": "decode"}], "codec": "raw"}
    recipe = precache.Recipe.from_dict({"fields": {"image": image, "tiny": tiny}})
    version = follow(SQUARES, tmp_path / "store", recipe)
    with opened(version) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                for image, tiny, label in zip(
                    batch["image"], batch["tiny"], batch["label"], strict=True
                ):
                    assert (image == label).all()
                    assert (tiny == label).all()
                    seen.append(int(label))
            assert sorted(seen) == list(range(40))
        assert not loader.follows
    poll(lambda: not leases_of(tmp_path / "store"), "the end of the build")
    build_here(Path(SQUARES), tmp_path / "plain", recipe)
    alike = [contents(tmp_path / name / version.id) for name in ("store", "plain")]
    assert alike[0] == alike[1]  # the version tells nothing of who followed, and in which order
