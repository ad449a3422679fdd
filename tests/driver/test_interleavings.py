"""Builds of one version that begin at once, call by call, in every order that matters.

Two builders of a version, whose codecs give other bytes for the same rows, and a removal of old
versions share a store. Whatever the order of their calls: what is committed is whole, and a build
that had to give way succeeds when it is run again.
"""

import contextlib
import functools
import gc
import json
import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from numcodecs import zstd

import precache.store.commit_log
import precache.store.open
import precache_workers.driver.build
import precache_workers.driver.commit
import precache_workers.driver.sample_probe
import precache_workers.profiling.row_probe
import precache_workers.shards.field_writer
import precache_workers.shards.shard_objects
import precache_workers.shards.shard_task
import precache_workers.shards.stored_rows
from precache.errors import BuildError, FetchError, GoneError, StoreError
from precache.maintenance import gc as garbage
from precache.maintenance import transfer
from precache.maintenance import versions as inventory
from precache.maintenance.verify import verify
from precache.reading.version_reader import open_reader
from precache.recipe.recipe import Field, Recipe, ZstdCodec
from precache.runtime.process_id import Process
from precache.store import lease as leases
from precache.store.arrays import SHARDS
from precache.store.build_status import remove_abandoned_scratch
from precache.store.commit_log import BUILD, ROOT, id_of, read_log
from precache.store.json_documents import LeaseDocument
from precache.store.layout import RowShape
from precache.store.lease import Lease, Leases
from precache.store.open import open_own
from precache.store.tree import Leaf
from precache.store.version import HOLES, Version
from precache_workers.cluster.executor import run_serial
from precache_workers.doctor.trials import HeldRows
from precache_workers.driver.build import Build
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.report import report_failure
from precache_workers.planning.catalogue import StoredRows
from precache_workers.planning.listing import ListedSource
from precache_workers.planning.request import Request
from precache_workers.planning.row_placement import Placed
from precache_workers.planning.target_version import TargetVersion, VersionSpec
from precache_workers.planning.work_plan import Work
from precache_workers.sources.base import Fetched
from tests.support.interleaving import (
    ACTORS,
    Choose,
    Killed,
    Memory,
    MemoryFolder,
    Turns,
    Visited,
    digest,
    explore,
    knowing_its_result,
)

LEVELS = {"first": 1, "second": 19, "third": 5, "again": 1}
"""Of zstd, and of JSON's indentation, by actor: as of other releases of libraries."""

CACHED = [
    held
    for held in gc.get_objects()
    if type(held) is functools.cached_property and hasattr(held, "lock")
]
"""In Python 3.11 these have a lock for all instances, which actors would wait for."""

RECIPE = Recipe(fields={"image": Field(codec=ZstdCodec())})
SHAPES = {"image": RowShape((3, 4, 4), "uint8")}


KEEPING_NOTHING: Sequence[tuple[Any, str]] = (
    (leases, "_remove_until"),
    (leases, "_highest"),
    (Lease, "end"),
    (Lease, "is_held"),
    (precache_workers.driver.build, "make_current"),
    (precache_workers.driver.build, "commit"),
    (precache_workers.driver.build, "remove_scratch"),
    (MemoryFolder, "remove"),
)
"""What a caller keeps of these is what they return."""


def encoder_of_the_actor(codec: object, dtype: str) -> Callable[[np.ndarray], bytes]:
    level = LEVELS[ACTORS.name]
    return lambda chunk: bytes(zstd.compress(np.ascontiguousarray(chunk), level, True))


def sleep(seconds: float) -> None:
    ACTORS.turns.sleep(seconds)


def now() -> float:
    return float(ACTORS.turns.monotonic())


def json_of_the_actor(value: object) -> bytes:
    return json.dumps(value, indent=LEVELS[ACTORS.name]).encode()


def forgetting(take: Callable[..., Lease | None]) -> Callable[..., Lease | None]:
    """Whoever waits for a lease knows no more than before: however often it looked is one state."""

    def taken(own: Leases, *given: Any, **named: Any) -> Lease | None:
        known, name = ACTORS.turns.known, ACTORS.name
        before = vars(own).setdefault("before", known[name])
        known[name] = before
        lease = take(own, *given, **named)
        if lease is None:
            known[name] = digest(before, "waits")
        return lease

    return taken


def is_alive(own: Leases, lease: LeaseDocument) -> bool:
    """As `Leases._is_alive`, without silence."""
    return not lease.released and not leases.has_ended(lease.holder)


def of_the_dead(number: int) -> bytes:
    holder = Process(node="memory", pid=number, started=0, host="ended")
    return LeaseDocument(holder=holder, note="", time=2e9).model_dump_json().encode()


def own_process(pid: int) -> Process:
    return Process(node="memory", pid=pid, started=ACTORS.turns.number, host=ACTORS.name)


def has_ended(who: Process) -> bool:
    return who.started != ACTORS.turns.number or ACTORS.turns.has_ended(who.host)


def one_by_one(work: Callable[[Any], Any], items: Iterable[Any], *given: int) -> Iterator[Any]:
    yield from map(work, items)


def later(*given: object) -> Any:
    """A pool of threads whose work is done on the actor's own once its result is asked for."""

    def submit(work: Callable[..., object], *given: object, **named: object) -> SimpleNamespace:
        return SimpleNamespace(result=partial(work, *given, **named))

    return SimpleNamespace(submit=submit, close=lambda: None)


def own_number() -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{ACTORS.name} {next(ACTORS.numbers)}")


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (precache_workers.driver.sample_probe, garbage, precache.store.open, inventory):
        monkeypatch.setattr(module, "open_folder", lambda uri, options: ACTORS.store)
    monkeypatch.setattr(precache.store.open, "Threads", later)
    monkeypatch.setattr(inventory, "split_uri", lambda uri, options: tuple(uri.split("@")))
    monkeypatch.setattr(precache_workers.driver.build, "check_request", lambda request: None)
    monkeypatch.setattr(
        precache_workers.driver.sample_probe, "source_of", lambda asked: asked.source
    )
    monkeypatch.setattr(precache_workers.driver.build, "recordable_source", lambda source: None)
    monkeypatch.setattr(precache_workers.driver.build, "shown", str)
    monkeypatch.setattr(Leases, "_is_alive", is_alive)
    monkeypatch.setattr(Leases, "holder", lambda own: None)
    for module in (precache_workers.driver.commit, transfer):  # on the actor's own thread
        monkeypatch.setattr(module, "prefetch", one_by_one)
    for module in (
        precache_workers.profiling.row_probe,
        precache_workers.shards.shard_task,
    ):  # on the actor's own thread
        monkeypatch.setattr(module, "run_in_time", lambda work, seconds: work())
    monkeypatch.setattr(precache_workers.driver.commit, "as_json", json_of_the_actor)
    monkeypatch.setattr(precache_workers.shards.field_writer, "encoder", encoder_of_the_actor)
    monkeypatch.setattr(precache_workers.shards.shard_objects, "RECEIPT_SECONDS", 0.5)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(
        precache_workers.shards.shard_objects, "time", SimpleNamespace(monotonic=now, sleep=sleep)
    )
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(time, "strftime", lambda *given: "2033-05-18T03:33:20Z")
    monkeypatch.setattr(uuid, "uuid4", own_number)
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 1e6)
    monkeypatch.setattr(leases, "process_of", own_process)
    monkeypatch.setattr(leases, "has_ended", has_ended)
    for held in CACHED:
        monkeypatch.setattr(held, "lock", contextlib.nullcontext())
    for owner, name in KEEPING_NOTHING:
        monkeypatch.setattr(owner, name, knowing_its_result(getattr(owner, name)))
    monkeypatch.setattr(Leases, "take", forgetting(Leases.take))


@dataclass(frozen=True)
class Rows(HeldRows):
    """Rows in memory, of which some cannot be fetched."""

    missing: frozenset[str] = frozenset()

    def __fspath__(self) -> str:
        return "rows"

    def startswith(self, scheme: str) -> bool:
        return "rows".startswith(scheme)

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
    ) -> Fetched:
        found = super().fetch(keys, sizes)
        lost = FetchError("it is out of reach")
        return [
            lost if key in self.missing else each for key, each in zip(keys, found, strict=True)
        ]


PIXELS = np.random.default_rng(0).integers(0, 99, (12, 3, 4, 4), np.uint8)
PIXELS[1] = 0


def rows(count: int, *missing: str) -> Rows:
    made = PIXELS[:count]
    return Rows([{"image": row} for row in made], count, missing=frozenset(missing))


def build(source: Rows, **options: bool) -> str:
    request = Request.model_construct(  # without checks: a source is opened by its name
        source=source,
        store="store",
        recipe=RECIPE,
        address="serial",
        shard_samples=4,
        accept_missing=True,
        **options,
    )
    with BuildProgress(False) as progress:
        run = Build(request, progress)
        try:
            return run.run().version
        except Exception as error:
            report_failure(run, error, progress.say)
            raise


def remove_old() -> object:
    return garbage.gc("store", keep=0, older_than=0)


def alone(memory: Memory, act: Callable[[], Any]) -> Any:
    """What an actor returns that has the store to itself."""
    outcome = Turns(memory, lambda able: able[0]).run({"again": act})["again"]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def store_with(source: Rows) -> Memory:
    """A store with a version of a source."""
    alone(memory := Memory(), partial(build, source))
    return memory


def check(memory: Memory, outcomes: Mapping[str, object], source: Rows) -> None:
    """Whatever happened, what is committed is whole, and a build makes the version."""
    for name, outcome in outcomes.items():
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, BuildError | StoreError | Killed), (name, repr(outcome))
    require_whole(memory)
    version = alone(memory, partial(build, source))
    [*_, last] = read_log(MemoryFolder(memory)).commits
    assert last.version == version
    require_whole(memory)
    assert not [name for name in memory.objects if name.startswith(f"{version}/{BUILD}")]


def require_whole(memory: Memory) -> None:
    """The version that the log names as current is there, without a fault."""
    ACTORS.store = MemoryFolder(memory)
    if read_log(ACTORS.store).commits:
        assert verify("store").damage == ()


def preempted(points: Sequence[int], first: str) -> Choose:
    """One actor has so many turns, then another so many, and so on; the last has no limit."""
    left, going = list(points), first

    def choose(able: Sequence[str]) -> str:
        nonlocal going
        if left and left[0] == 0:
            left.pop(0)
            going = next(name for name in able if name != going)
        if left:
            left[0] -= 1
        return going if going in able else able[0]

    return choose


HEAVY = pytest.mark.heavy


@pytest.mark.parametrize("ended", [0, pytest.param(1, marks=HEAVY), pytest.param(2, marks=HEAVY)])
def test_one_at_a_time_holds_a_lease_in_every_order(ended: int) -> None:
    """Of three processes, after leases of processes that have ended."""
    left = {f"_claims/x/{number + 1:06d}.json": of_the_dead(number) for number in range(ended)}
    inside: list[str] = []

    def hold() -> None:
        with Leases.named(ACTORS.store, "x").wait(lambda lease: None):
            assert not inside
            inside.append(ACTORS.name)
            ACTORS.store.size("work")
            inside.clear()

    def run(choose: Callable[[Turns, Sequence[str]], str]) -> None:
        inside.clear()
        memory = Memory(left)
        turns = Turns(memory, lambda able: choose(turns, able))
        with contextlib.suppress(Visited):
            outcomes = turns.run(dict.fromkeys(("first", "second", "third"), hold))
            assert set(outcomes.values()) == {None}, outcomes
            assert not memory.objects

    assert [*explore(run)][-1] > 30


def turns_of(memory: Memory, source: Rows) -> int:
    """How many turns a build takes that is alone."""
    turns = Turns(memory, lambda able: able[0])
    turns.run({"first": partial(build, source)})
    return len(turns.calls)


SECOND = {
    "the same": rows(4),
    "without one that cannot be fetched": rows(4, "2"),
    "without one whose pixels are those of a hole": rows(4, "1"),
}


EACH = pytest.mark.parametrize(
    ("name", "step"), [("the same", 4), *(pytest.param(name, 1, marks=HEAVY) for name in SECOND)]
)


@EACH
@pytest.mark.parametrize("silent", [False, True])
def test_a_builder_is_stopped_at_its_calls_while_another_builds(
    name: str, step: int, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is silent for long, the other one takes over, and it wakes up after that."""
    if silent:
        monkeypatch.setattr(Leases, "_is_alive", lambda own, lease: False)
    source = rows(4)
    actors = {"first": partial(build, source), "second": partial(build, SECOND[name])}
    for first in actors if name != "the same" else ("first",):
        for point in range(1, turns_of(Memory(), source), step):
            memory = Memory()
            check(memory, Turns(memory, preempted([point], first)).run(actors), source)


@EACH
def test_a_builder_is_killed_at_its_calls_and_another_goes_on(name: str, step: int) -> None:
    source = rows(4)
    actors = {"first": partial(build, source), "second": partial(build, SECOND[name])}
    for point in range(0, turns_of(Memory(), source), step):
        memory = Memory()
        turns = Turns(memory, preempted([point + 1], "first"), {"first": point})
        check(memory, turns.run(actors), source)


def test_two_that_try_again_what_failed_and_mend_nothing_leave_nothing() -> None:
    source = rows(4, "2")
    before = store_with(source)
    again = partial(build, source, retry_failed=True)
    for seed in range(20):
        memory = Memory(before.objects)
        outcomes = Turns(memory, random.Random(seed).choice).run({"first": again, "second": again})
        assert all(isinstance(outcome, str | BuildError) for outcome in outcomes.values())
        require_whole(memory)
        added = memory.objects.keys() - before.objects.keys()
        assert all(name.startswith("commits/") for name in added)  # the removals


# --- any history --------------------------------------------------------------------------------

SOURCES = [rows(4), rows(4, "2"), rows(9), rows(12, "5")]
"""Of two of them a sample cannot be fetched: what is committed has it, or a hole in its place."""


class Pair(RuleBasedStateMachine):
    """Two stores that builds, removals and copies from one to the other share, killed anywhere.

    At any time the current version of each is whole, and a reader gets its rows, or that it is
    gone. In the end, a build makes its version, and leaves nothing else of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stores = [Memory(), Memory()]
        self.built: dict[str, Rows] = {}

    # --- what an actor does ---------------------------------------------------------------------

    def build(self, number: int, **options: bool) -> str:
        version = build(SOURCES[number], **options)
        self.built[id_of(version)] = SOURCES[number]
        return version

    def use(self) -> str:
        versions = [commit.version for commit in read_log(ACTORS.store).commits]
        return inventory.use(f"store@{versions[0]}").version if versions else ""

    def copy(self, other: Memory) -> str:
        """Pull the current version of the other store, which is at rest."""
        there = MemoryFolder(other)
        current = read_log(there).current
        if current is None:
            return ""
        version = open_own(there.folder(current.version))
        return transfer._pull(version, ACTORS.store, lambda nbytes: None).version

    def read(self) -> str:
        """Read a version in two steps, between which others go on."""
        current = read_log(ACTORS.store).current
        if current is not None:
            require_rows(open_own(ACTORS.store.folder(current.version)), self.built)
        return ""

    def actions(self, other: Memory) -> list[Callable[[], object]]:
        builds = [partial(self.build, number) for number in range(len(SOURCES))]
        again = [partial(self.build, 1, retry_failed=True), partial(self.build, 2, recompute=True)]
        return [*builds, *again, remove_old, self.use, partial(self.copy, other), self.read]

    # --- rules ----------------------------------------------------------------------------------

    @rule(
        place=st.integers(0, 1),
        chosen=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        kills=st.dictionaries(st.sampled_from(("first", "second")), st.integers(0, 90)),
        seed=st.integers(0, 2**16),
    )
    def act(self, place: int, chosen: list[int], kills: dict[str, int], seed: int) -> None:
        memory, actions = self.stores[place], self.actions(self.stores[1 - place])
        actors = dict(zip(LEVELS, (actions[number] for number in chosen), strict=False))
        turns = Turns(memory, random.Random(seed).choice, kills)
        for name, outcome in turns.run(actors).items():
            expected = str | garbage.GcResult | BuildError | StoreError | Killed
            assert isinstance(outcome, expected), (name, repr(outcome))

    @rule(place=st.integers(0, 1), at=st.floats(0, 0.99), killed=st.integers(0, 90))
    def repair(self, place: int, at: float, killed: int) -> None:
        """Of any object that is damaged or lost, by the same build, even if it is killed."""
        memory = self.stores[place]
        current = read_log(MemoryFolder(memory)).current
        if current is None or id_of(current.version) not in self.built:
            return
        names = [name for name in sorted(memory.objects) if name.startswith(current.version)]
        name = names[int(at * len(names))]
        data = bytearray(memory.objects[name])
        if data and killed % 3:
            data[int(at * len(data))] ^= 0x55
        memory.set(name, bytes(data) if killed % 3 else None)
        source = self.built[id_of(current.version)]
        mend = partial(build, source, verify=True)
        Turns(memory, lambda able: able[0], {"first": killed}).run({"first": mend})
        alone(memory, mend)

    @invariant()
    def what_is_current_is_whole(self) -> None:
        for memory in self.stores:
            require_whole(memory)
            if current := read_log(ACTORS.store).current:
                require_rows(open_own(ACTORS.store.folder(current.version)), self.built)

    def teardown(self) -> None:
        for memory in self.stores:
            check(memory, {}, SOURCES[0])


def require_rows(version: Version, built: Mapping[str, Rows]) -> None:
    """All rows of a version are those of its source, unless it is gone."""
    found = np.empty((version.rows, *SHAPES["image"].shape), np.uint8)
    try:
        open_reader(version, "image").read(np.arange(version.rows), found)
        keys, valid = list(version.keys), version.valid
    except GoneError:
        return
    for key, row, is_valid in zip(keys, found, valid.tolist(), strict=True):
        right = PIXELS[int(key)] if is_valid else 0
        np.testing.assert_array_equal(row, right)


@pytest.mark.parametrize("examples", [4, pytest.param(150, marks=HEAVY)])
@pytest.mark.timeout(3600)
def test_any_history_of_two_stores(examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Pair,
        settings=settings(
            max_examples=examples, stateful_step_count=6, deadline=None,
            suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
        ),
    )  # fmt: skip


def minimal(source: Rows) -> str:
    """A build's calls from its lease on, of a version that is listed and measured."""
    table = source.list(lambda count: None).table
    goal = TargetVersion.of(ACTORS.store, VersionSpec(RECIPE, "f", table, table.digest), 4, SHAPES)
    request = Request.model_construct(source=source, store="store", recipe=RECIPE, address="serial")
    with BuildProgress(False) as progress:
        build = Build(request, progress)
        build.run_tasks = run_serial
        build.listed = ListedSource(goal.spec, Placed(table), {}, {}, 0.0)
        try:
            return build._make(Work(goal, StoredRows.empty(SHAPES, len(table)), todo=[0])).version
        except Exception as error:
            report_failure(build, error, progress.say)
            raise


def few_objects(goal: TargetVersion, *facts: object) -> dict[str, bytes]:
    names = ("label/c/0", "valid/c/0", f"{SHARDS}/image/c/0/0")  # those that a root must name
    return {**dict.fromkeys(names, json_of_the_actor(list(goal.shapes))), HOLES: b"{}"}


def tidied(build: Build, goal: TargetVersion) -> TargetVersion:
    """As `Build._nothing_to_do`, without reading the version."""
    remove_abandoned_scratch(goal.folder)
    return goal


def require_minimal(memory: Memory, outcomes: Mapping[str, object]) -> None:
    """One of the two committed; what its documents say of the other objects is so."""
    for name, outcome in outcomes.items():
        assert isinstance(outcome, str | BuildError), (name, repr(outcome))
    [commit] = read_log(MemoryFolder(memory)).commits
    version = MemoryFolder(memory).folder(commit.version)
    attributes = json.loads(version.read(ROOT))["attributes"]["precache"]
    assert attributes["fields"]["image"]["stored"] == len(version.read("image/c/0/0/0/0"))
    for name, (size, xxh3) in attributes["objects"].items():
        assert Leaf.of(name, version.read(name)) == Leaf(name, size, int(xxh3, 16))
    if all(isinstance(outcome, str) for outcome in outcomes.values()):
        assert not version.sizes(BUILD)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_two_minimal_builds_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what only reads, or looks for what others left before."""
    monkeypatch.setattr(precache_workers.driver.commit, "small_objects", few_objects)
    monkeypatch.setattr(precache_workers.driver.build, "require_create_only", lambda *given: None)
    monkeypatch.setattr(precache.store.commit_log, "require_create_only", lambda *given: None)
    monkeypatch.setattr(precache_workers.driver.build, "tidy_current", lambda *given: None)
    monkeypatch.setattr(
        precache_workers.driver.build, "is_whole", lambda goal: goal.folder.size(ROOT) is not None
    )
    monkeypatch.setattr(Build, "_nothing_to_do", tidied)
    actors = dict.fromkeys(("first", "second"), partial(minimal, rows(1)))
    every_order(actors, require_minimal)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_two_builds_in_every_order_with_two_switches() -> None:
    source = rows(1)
    actors = dict.fromkeys(("first", "second"), partial(build, source))
    every_order(actors, partial(check, source=source), switches=2)


def read_old(version: str) -> object:
    """All small objects of a version, and sizes of its shards; or that it is gone."""
    try:
        found = open_own(ACTORS.store.folder(version))
        return (found.flaws(), found.lost_objects())
    except GoneError:
        return "gone"


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_two_removals_and_a_reader_in_every_order_with_two_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "QUIET_SECONDS", -1.0)
    before = store_with(rows(1))
    alone(before, partial(build, rows(2)))
    log = read_log(MemoryFolder(before))
    old, current = (commit.version for commit in log.commits)

    def check_removals(memory: Memory, outcomes: Mapping[str, object]) -> None:
        for name in ("first", "second"):
            assert isinstance(outcomes[name], garbage.GcResult), repr(outcomes[name])
        assert outcomes["third"] in (({}, {}), "gone")
        require_whole(memory)
        after = read_log(MemoryFolder(memory))
        assert (after.removed, after.number) == ({old}, log.number + 1)
        assert {name.partition("/")[0] for name in memory.objects} == {"commits", current}

    actors = {"first": remove_old, "second": remove_old, "third": partial(read_old, old)}
    every_order(actors, check_removals, switches=2, objects=before.objects)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("begun", [False, True])
def test_a_build_and_a_removal_in_every_order_with_two_switches(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gc` takes the build for one that is silent, at whatever moment it looks."""
    monkeypatch.setattr(garbage, "QUIET_SECONDS", -1.0)
    source, before = rows(2), store_with(rows(1))
    if begun:
        turns = turns_of(Memory(before.objects), source)
        choose: Choose = lambda able: able[0]  # noqa: E731
        Turns(before, choose, {"first": turns // 2}).run({"first": partial(build, source)})
    actors = {"first": partial(build, source), "second": remove_old}
    every_order(actors, partial(check, source=source), switches=2, objects=before.objects)


def every_order(
    actors: Mapping[str, Callable[[], object]],
    check: Callable[[Memory, Mapping[str, object]], None],
    switches: float = math.inf,
    objects: Mapping[str, bytes] | None = None,
) -> None:
    def run(choose: Callable[[Turns, Sequence[str]], str]) -> None:
        memory = Memory(objects)
        turns = Turns(memory, lambda able: choose(turns, able))
        with contextlib.suppress(Visited):
            outcomes = turns.run(actors)
            check(memory, outcomes)

    for count in explore(run, switches):
        if count % 1000 == 0:
            print(count, "runs", flush=True)
    print(count, "runs in all", flush=True)
