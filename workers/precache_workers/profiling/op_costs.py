"""Where each op is better done: once, into the cache, or in every epoch on the training device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from precache.errors import SampleError
from precache.recipe.ops import HorizontalFlip, Op, RandomResizedCrop, ToDType
from precache.recipe.recipe import Field
from precache_workers.profiling.stage_times import Passed, take_through
from precache_workers.shards.samples import BASE_MEMORY, Job, SampleTask

SECONDS = 5.0
"""After which no further sample of a field is timed, once there are a few."""

ON_DEVICE = RandomResizedCrop | HorizontalFlip | ToDType
"""Ops that `precache.transforms` has."""

Where = Literal["cache", "variants", "device"]


@dataclass(frozen=True)
class OpCost:
    """One op of a field.

    Attributes
    ----------
    cpu_ms
        That it takes of a sample, mean.
    better
        ``cache``: done once; ``variants``: done once for each of them; ``device``: left to
        `precache.transforms`, in every epoch.
    """

    op: str
    cpu_ms: float
    better: Where


@dataclass(frozen=True)
class Choice:
    """What a sample of a field takes in one of the ways to store it.

    Attributes
    ----------
    nbytes
        Stored bytes, of all variants together.
    build_cpu_ms, epoch_cpu_ms
        To make them, once, without fetching; to decompress a row, in every epoch.
    """

    nbytes: float
    build_cpu_ms: float
    epoch_cpu_ms: float


@dataclass(frozen=True)
class FieldCosts:
    """The ops of one field, and what becomes of its random ones.

    Attributes
    ----------
    samples
        That were timed.
    declared
        All ops done once, for each variant.
    left
        The last ops left to the device; None where there are none that it could do, or where
        `shapes_differ` before them, so that no store holds such rows.
    """

    name: str
    samples: int
    ops: tuple[OpCost, ...]
    variants: int
    random: bool
    declared: Choice
    left: Choice | None
    shapes_differ: bool


@dataclass(frozen=True)
class OpsTask(SampleTask):
    """Samples by which the ops of every field are to be timed; of a recipe as it is declared."""

    job: Job
    keys: Sequence[str]
    sizes: Sequence[int]
    memory: int = field(default=BASE_MEMORY, kw_only=True)


def time_ops(task: OpsTask) -> tuple[FieldCosts, ...]:
    """Time the ops of each field; one without ops, or of which no sample has a row, is left out."""
    return tuple(_time_fields(task))


def _time_fields(task: OpsTask) -> Iterator[FieldCosts]:
    for name, each in task.job.recipe.fields.items():
        if each.ops:
            alone = task.job.recipe.model_copy(update={"fields": {name: each}})
            job = replace(task.job, recipe=alone)
            try:
                passed = take_through(
                    job, task.keys, task.sizes, (), SECONDS, lambda done: None, task.barred
                )
            except SampleError:
                continue
            yield weigh(name, each, passed)


def weigh(name: str, declared: Field, passed: Passed) -> FieldCosts:
    """Where the ops of a field are better done, by what samples took.

    Notes
    -----
    The last ops may be left to the device where it has all of them, where the rows before them are
    of one shape, and where reading those takes no more CPU than the ops that are saved. Then the
    random ones draw anew in every epoch, for no CPU. All other ops are done once.
    """
    costs = [_mean_ms(passed.stage(step).cpu) for step in passed.steps]
    cuts = passed.cuts()
    first = _device_from(declared.ops)
    split = declared.fixed_ops
    own = cuts[-1]
    encode, read = _mean_ms(own.encode_cpu), _mean_ms(own.decode_cpu)
    count = declared.variants
    whole = Choice(
        count * float(own.nbytes.mean()),
        sum(costs[:split]) + count * (sum(costs[split:]) + encode),
        read,
    )
    left, able = None, 0 < first < len(costs)
    if able and cuts[first - 1].one_shape:
        cut = cuts[first - 1]
        made = sum(costs[:first]) + _mean_ms(cut.encode_cpu)
        left = Choice(float(cut.nbytes.mean()), made, _mean_ms(cut.decode_cpu))
    leave = left is not None and left.epoch_cpu_ms - read <= sum(costs[first:])
    places = range(len(costs))
    better: list[Where] = [
        "device" if leave and at >= first else "variants" if at >= split else "cache"
        for at in places
    ]
    ops = zip(passed.steps, costs, better, strict=True)
    return FieldCosts(
        name,
        len(passed.taken),
        tuple(OpCost(*each) for each in ops),
        count,
        split < len(costs),
        whole,
        left,
        able and left is None,
    )


def _device_from(ops: Sequence[Op]) -> int:
    """Place of the first of the last ops that the device has, all of them."""
    first = len(ops)
    while first and isinstance(ops[first - 1], ON_DEVICE):
        first -= 1
    return first


def _mean_ms(seconds: np.ndarray) -> float:
    return float(np.mean(seconds)) * 1e3
