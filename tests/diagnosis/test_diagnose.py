"""`diagnose` on loops whose bottleneck is known, and whose remedies are really applied.

A machine that others use may spoil a try, but not each of several; a wrong prediction spoils all.
"""

import gc
import itertools
import multiprocessing
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import precache
from precache import diagnose
from precache.diagnosis import loop_probes
from precache.runtime.usage import Usage
from tests.conftest import BuiltStore
from tests.metering.test_meter import Clock
from tests.support import loops as support_loops
from tests.support.building import own_threads, poll
from tests.support.loops import KINDS, Samples, best_remedy, burn, draw_loop, measured_gain, nothing

TRIES = 3
# Workers that sleep may be more than cores, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """No worker and no thread is left over."""
    threads = set(own_threads())
    yield
    gc.collect()
    poll(
        lambda: not multiprocessing.active_children() and set(own_threads()) <= threads,
        "nothing is left over",
    )


@pytest.mark.heavy  # burns CPU time
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_judged_by_what_limits_it_and_a_remedy_gains_what_is_predicted(kind: str) -> None:
    """Within a quarter, of the speed that the same loop has without it."""
    tried = list[str]()
    for _ in range(TRIES):
        loop, gain = draw_loop(kind, np.random.default_rng()), 1.0
        with loop.resources:
            found = diagnose(loop.loader(), loop.step, seconds=3)
            if kind in ("network", "slow sample", "start-up"):
                best = best_remedy(loop, found.remedies)
                gain = measured_gain(loop, best, 4) / best.gain
        if found.verdict == loop.verdict and 0.8 < gain < 1.33:
            return
        tried.append(f"expected {loop.verdict} of {loop}, and {gain} times the gain:\n{found}")
    raise AssertionError("\n".join(tried))


def test_rare_slow_samples_are_seen_often_enough_to_know_their_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only steps and loads move, so that each figure follows from them."""
    clock = Clock()
    for module in (loop_probes, support_loops):
        times = SimpleNamespace(sleep=clock.move, perf_counter=lambda: clock.now)
        monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(loop_probes, "read_usage", lambda: Usage(clock.now))
    chance = np.random.default_rng(1)
    for _ in range(5):
        loop = draw_loop("slow sample", chance)
        loop.options["num_workers"] = 0
        best = best_remedy(loop, diagnose(loop.loader(), loop.step, seconds=3).remedies)
        began = clock.now
        for index in range(50):
            loop.work(index)
        load = (clock.now - began) / 50 * loop.options["batch_size"]
        assert best.gain == pytest.approx((load + loop.step_s) / loop.step_s, rel=0.1)


class Shuffled:
    """A batch sampler that draws by itself."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(64, generator=self.generator).view(-1, 4).tolist()


def test_what_was_changed_is_put_back() -> None:
    model = torch.nn.Linear(3 * 32 * 32, 2)
    optimizer = torch.optim.Adam(model.parameters())
    before = [each.clone() for each in model.parameters()]
    generator = torch.Generator().manual_seed(5)
    samples = Samples(nothing, 64)
    data = DataLoader(samples, 4, shuffle=True, generator=generator)
    states = generator.get_state(), torch.get_rng_state(), random.getstate()

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(batch.flatten(1)) + random.random() + torch.rand(1)).sum().backward()
        optimizer.step()

    diagnose(data, step, steps=5, restore=[model, optimizer])
    after = generator.get_state(), torch.get_rng_state(), random.getstate()
    for one, other in zip(states, after, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.state_dict()["state"] == {}
    drawn = RandomSampler(samples, generator=generator)
    for sampler in (BatchSampler(drawn, 4, drop_last=False), Shuffled(generator)):
        diagnose(DataLoader(samples, batch_sampler=sampler), nothing, steps=3)
        assert torch.equal(generator.get_state(), after[0])


def test_persistent_workers_of_the_caller_are_left_alone() -> None:
    data = DataLoader(Samples(nothing), num_workers=1, persistent_workers=True)
    mine = iter(data)
    next(mine)
    (worker,) = multiprocessing.active_children()
    diagnose(data, nothing, steps=4)
    assert multiprocessing.active_children() == [worker]
    next(mine)
    del mine, data
    gc.collect()
    worker.join(30)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_of_the_step_comes_through_and_leaves_nothing(persistent: bool) -> None:
    def fail(_: Any) -> None:
        raise ValueError("the step's own")

    data = DataLoader(Samples(nothing), num_workers=2, persistent_workers=persistent)
    with pytest.raises(ValueError, match="the step's own"):
        diagnose(data, fail)
    assert not multiprocessing.active_children(), "before the error is forgotten"


def test_a_length_and_a_dataset_that_raise_are_ignored() -> None:
    class Batches:
        @property
        def dataset(self) -> Any:
            raise RuntimeError("call setup() first")

        def __len__(self) -> int:
            raise RuntimeError("call setup() first")

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.zeros(1)] * 3)

    assert diagnose(Batches(), nothing, steps=3).measurements.setup.epoch is None
    assert sum(1 for _ in precache.meter(Batches(), to=[])) == 3


def batches(batch: torch.Tensor, cpu_s: float = 0.0) -> Iterator[torch.Tensor]:
    while True:
        burn(cpu_s)
        yield batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    ("values", "loading", "cycles", "verdict"),
    [
        (64 << 20, 0.0, 0, "transfer-bound"),
        (4, 0.02, 10_000_000, "CPU-bound"),
        (4, 0.001, 40_000_000, "compute-bound"),
    ],
)
def test_loops_that_wait_for_copies_the_host_or_the_device_are_told_apart(
    values: int, loading: float, cycles: int, verdict: str
) -> None:
    def step(given: torch.Tensor) -> None:
        given = given.to("cuda")
        if cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's own
        else:
            given.mean().item()

    found = diagnose(batches(torch.zeros(values), loading), step, seconds=1)
    copies = found.measurements.copies
    assert copies is not None
    assert (copies.pinned, found.verdict) == (False, verdict), found
    assert cycles or copies.from_pinned < copies.as_given


@pytest.mark.parametrize("mixed", [False, True])
def test_a_precache_loader_is_where_it_was(stores: dict[str, BuiltStore], mixed: bool) -> None:
    pair = [stores["zstd"], stores["raw"]][: 1 + mixed]
    loaders = [precache.Loader(store.path, 4, device="cpu", seed=3) for store in pair]
    with precache.mix(loaders) if mixed else loaders[0] as cached:
        expected = [batch["row"].tolist() for batch in cached]
        cached.set_epoch(0)
        iterator = iter(cached)
        next(iterator)
        state = cached.state_dict()
        del iterator
        gc.collect()
        found = diagnose(cached, nothing, steps=20)
        assert found.measurements.setup.cached
        assert not {each.name for each in found.remedies} & {"precache", "workers"}
        assert cached.state_dict() == state
        assert [batch["row"].tolist() for batch in cached] == expected[1:]


class Unsendable:
    """A batch that no worker process could send."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


@pytest.mark.parametrize("kind", ["tensors", "own class", "gradients", "no processes"])
def test_taking_a_ready_batch_is_measured_where_a_worker_can_send_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    made = {"own class": Unsendable(), "gradients": torch.zeros(2, requires_grad=True)}
    batches: Any = [made.get(kind, torch.zeros(2))] * 50
    if kind == "no processes":
        monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", refuse)
    data = DataLoader(batches, batch_size=None)
    found = diagnose(data, nothing, steps=8).measurements
    assert (found.take > 0) is (kind == "tensors")


def test_a_loader_of_a_few_batches_is_begun_again_and_each_run_has_a_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = {"image": torch.zeros(2, 8), "mask": [np.zeros((2, 5), np.uint8)], "key": ["a"]}
    steps = 0

    def step(given: dict[str, Any]) -> None:
        nonlocal steps
        assert given.pop("key") == ["a"], "of a batch that is replayed"
        steps += 1

    found = diagnose(({**batch} for _ in itertools.count()), step, steps=7).measurements
    assert (len(found.step.seconds), len(found.together.seconds)) == (7, 7)
    assert steps > 14
    found = diagnose([batch] * 3, nothing, steps=20).measurements
    assert (len(found.together.seconds), found.setup.epoch) == (20, 3)
    assert found.setup.in_order
    assert found.setup.batch_nbytes == 74, "of tensors and arrays"
    assert capsys.readouterr() == ("", "")
    found = diagnose([batch], lambda _: time.sleep(0.2), seconds=0.1, progress=True).measurements
    assert len(found.step.seconds) <= 3
    assert "measuring the loader alone" in capsys.readouterr().err
