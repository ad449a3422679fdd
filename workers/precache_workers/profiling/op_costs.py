"""Costs of ops, and the better place for each: the cache, or the training device in every epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from precache.errors import SampleError
from precache.recipe.ops import Op
from precache.recipe.recipe import Field
from precache_workers.profiling.stage_times import StageTimes, measure_stages
from precache_workers.shards.samples import FetchAllTask

SECONDS = 5.0
"""Time after which no further sample of a field is measured, once there are a few."""

OpLocation = Literal["cache", "variants", "device"]


@dataclass(frozen=True)
class OpCost:
    """One op of a field.

    Attributes
    ----------
    cpu_ms
        Mean CPU time per sample.
    better
        ``cache``: done once; ``variants``: done once for each variant; ``device``: left to
        `precache.transforms`, in every epoch.
    """

    op: str
    cpu_ms: float
    better: OpLocation


@dataclass(frozen=True)
class Choice:
    """Cost of a sample of a field in one of the ways to store it.

    Attributes
    ----------
    nbytes
        Stored bytes, of all variants together.
    build_cpu_ms, epoch_cpu_ms
        To compute them, once, without fetching; to decompress a row, in every epoch.
    """

    nbytes: float
    build_cpu_ms: float
    epoch_cpu_ms: float


@dataclass(frozen=True)
class FieldCosts:
    """Costs of the ops of one field.

    Attributes
    ----------
    samples
        Number of samples that were measured.
    declared
        All ops done once, for each variant.
    left
        The last ops left to the device; None if there are none that it could do, or if
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


def time_ops(task: FetchAllTask) -> tuple[FieldCosts, ...]:
    """Measure the ops of each field; leaves out fields without ops, and those without any row."""
    return tuple(_fields_with_ops(task))


def _fields_with_ops(task: FetchAllTask) -> Iterator[FieldCosts]:
    for name, spec in task.job.recipe.fields.items():
        if not spec.ops:
            continue
        alone = task.job.recipe.model_copy(update={"fields": {name: spec}})
        job = replace(task.job, recipe=alone)
        with contextlib.suppress(SampleError):
            times = measure_stages(replace(task, job=job), codecs=(), seconds=SECONDS)
            yield field_costs(name, spec, times)


def field_costs(name: str, declared: Field, times: StageTimes) -> FieldCosts:
    """Choose the better place for each op of a field, by the times of samples.

    Notes
    -----
    The last ops may be left to the device if it has all of them, if the rows before them are of one
    shape, and if reading those takes no more CPU than the ops that are saved. Then the random ones
    draw anew in every epoch, for no CPU. All other ops are done once.
    """
    costs = [_mean_ms(times.stage(step).cpu) for step in times.steps]
    cuts = times.cuts()
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
        build = sum(costs[:first]) + _mean_ms(cut.encode_cpu)
        left = Choice(float(cut.nbytes.mean()), build, _mean_ms(cut.decode_cpu))
    leave = left is not None and left.epoch_cpu_ms - read <= sum(costs[first:])
    better: list[OpLocation] = [
        "device" if leave and at >= first else "variants" if at >= split else "cache"
        for at in range(len(costs))
    ]
    ops = zip(times.steps, costs, better, strict=True)
    return FieldCosts(
        name=name,
        samples=len(times.samples),
        ops=tuple(OpCost(*op) for op in ops),
        variants=count,
        random=split < len(costs),
        declared=whole,
        left=left,
        shapes_differ=able and left is None,
    )


def _device_from(ops: Sequence[Op]) -> int:
    """Return the index from which on the device has all ops."""
    first = len(ops)
    while first and ops[first - 1].on_device:
        first -= 1
    return first


def _mean_ms(seconds: np.ndarray) -> float:
    return float(np.mean(seconds)) * 1e3
