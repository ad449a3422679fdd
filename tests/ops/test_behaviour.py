"""What ops make of their probes, by which libraries are told apart."""

from typing import Any

import numpy as np
import pytest
import torch

from precache.recipe import ops
from precache.recipe.recipe import Recipe
from precache_workers.ops import decoding, field_recipe
from precache_workers.ops.behaviour import (
    Outputs,
    Step,
    computed,
    digest_of,
    first_difference,
    steps_of,
)


def steps(*listed: dict[str, Any]) -> list[Step]:
    recipe = Recipe.from_dict({"fields": {"x": {"ops": list(listed)}}})
    return steps_of(recipe.fields["x"])


def anew(step: Step) -> Outputs:
    return computed.__wrapped__(step)


DECODE = {"op": "decode"}


# --- what is noticed ----------------------------------------------------------------------------


OPS: dict[str, tuple[list[dict[str, Any]], Any, str]] = {
    "decode": ([DECODE], field_recipe, "decode"),
    "resize": ([DECODE, {"op": "resize", "size": 40}], torch.ops.aten, "_upsample_bilinear2d_aa"),
    "bicubic": (
        [DECODE, {"op": "resize", "size": 40, "interpolation": "bicubic"}],
        torch.ops.aten,
        "_upsample_bicubic2d_aa",
    ),
    "center_crop": ([DECODE, {"op": "center_crop", "size": 20}], ops.CenterCrop, "__call__"),
    "a crop after a resize": (
        [DECODE, {"op": "resize", "size": 40}, {"op": "center_crop", "size": 32}],
        torch.ops.aten,
        "_upsample_bilinear2d_aa",
    ),
    "random_resized_crop": (
        [DECODE, {"op": "random_resized_crop", "size": 20}],
        torch.ops.aten,
        "_upsample_bilinear2d_aa",
    ),
    "to_dtype": ([DECODE, {"op": "to_dtype", "dtype": "float32"}], ops.ToDType, "__call__"),
}
"""Op -> a recipe that ends with it, and what computes it."""


@pytest.mark.parametrize("op", OPS)
def test_one_value_of_one_probe_is_noticed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library changes it that is wrong once."""
    recipe, where, name = OPS[op]
    step, real = steps(*recipe)[-1], getattr(where, name)
    calls, wrong = 0, -1

    def call(*given: Any, **named: Any) -> Any:
        nonlocal calls
        result = real(*given, **named)
        if calls == wrong:
            result = result.clone() if isinstance(result, torch.Tensor) else result.copy()
            result[tuple(length // 2 for length in result.shape)] += 1
        calls += 1
        return result

    monkeypatch.setattr(where, name, call)
    before = anew(step)
    for number in sorted({0, calls // 2, calls - 1}):
        calls, wrong = 0, number
        after = anew(step)
        assert digest_of(before) != digest_of(after)
        assert sum(before[probe] != after[probe] for probe in before) == 1
        assert first_difference(before, after).partition(";")[0] in before


def test_scaled_decoding_is_tried_however_large_the_resize_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No probe is so large that a resize to 256 would have it decoded at a half."""
    real = decoding.simplejpeg.decode_jpeg
    ratios = set()

    def seen(data: bytes, *given: Any, **named: Any) -> np.ndarray:
        array: np.ndarray = real(data, *given, **named)
        if "min_height" in named:
            height = decoding.simplejpeg.decode_jpeg_header(data)[0]
            ratios.add(round(height / array.shape[0]))
            array[0, 0, 0] ^= 1
        return array

    step = steps({**DECODE, "scaled": True}, {"op": "resize", "size": 256})[0]
    before = anew(step)
    monkeypatch.setattr(decoding.simplejpeg, "decode_jpeg", seen)
    after = anew(step)
    assert ratios == {2, 4, 8}
    changed = [probe for probe in before if before[probe] != after[probe]]
    assert {"jpeg-progressive.jpg", "jpeg-progressive.jpg by decode(scaled=11)"} <= {*changed}


# --- what they cost -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["resize", "center_crop", "random_resized_crop"])
def test_sizes_beyond_memory_are_not_tried(op: str) -> None:
    [step] = steps({"op": op, "size": 60_000})
    assert computed(step) == {}
    assert digest_of(computed(step))


# --- what must not change -----------------------------------------------------------------------


DIGESTS = {
    "decode": "2037a1f25a7740278095dd37382058a3",
    "resize(size=40) of uint8 x 3": "235fc56b6a796da324ff95807fcfa3d4",
    "center_crop(size=(32, 32)) after resize(size=40) of uint8 x 3": (
        "497d4df0e6e583d5380cb843063b6cff"
    ),
    "decode(mode=L, scaled=24)": "e1b9e78f872fc6c411913a0f66b7956d",
    "resize(size=(24, 20), interpolation=bicubic) of uint8 x 1": "cc0741bd5089c776e7a37bd7d092c82d",
    "random_resized_crop(size=(20, 20)) of uint8 x 1": "31cef1d837880eb04751a9225f15c0c4",
    "horizontal_flip of uint8 x 1": "948c0ee0c8fff0637ea2c144b9a6e51d",
    "to_dtype(dtype=float32, scale=True) of uint8 x 1": "188c94faee0d8395a992d69400ace8f2",
}
"""As found by Pillow 13.0, simplejpeg 1.9, NumPy 2.4 and torch 2.13, with and without SIMD kernels.
They stand in the ids of users' versions."""


def test_digests_are_what_they_were() -> None:
    """Where pixels are: then a change here has everybody compute all again."""
    crop = steps(DECODE, {"op": "resize", "size": 40}, {"op": "center_crop", "size": 32})
    others = steps(
        {**DECODE, "mode": "L", "scaled": True},
        {"op": "resize", "size": [24, 20], "interpolation": "bicubic"},
        {"op": "random_resized_crop", "size": 20},
        {"op": "horizontal_flip"},
        {"op": "to_dtype", "dtype": "float32", "scale": True},
    )
    found = {step.name: digest_of(computed(step)) for step in (*crop, *others)}
    assert found == DIGESTS
