"""What ops make of their probes, by which libraries are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from precache.operations import ToDType
from precache.pipeline import Pipeline
from workers import behaviour, decoding, ops
from workers.behaviour import Outputs, Step, computed, digest_of, steps_of


def steps(*listed: dict[str, Any]) -> list[Step]:
    pipeline = Pipeline.from_dict({"fields": {"x": {"ops": list(listed)}}})
    return [step for step in steps_of(pipeline.fields["x"]) if step is not None]


def anew(step: Step) -> Outputs:
    return computed.__wrapped__(step)


DECODE = {"op": "decode"}


# --- what is noticed ----------------------------------------------------------------------------


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
    assert "jpeg-progressive.jpg, to 20" in changed


def test_random_crops_are_tried_on_what_they_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops._resampled

    def shifted(array: np.ndarray, shape: tuple[int, int], *given: Any) -> np.ndarray:
        result = real(array, shape, *given)
        return result ^ 1 if array.shape[0] > shape[0] and array.shape[1] > shape[1] else result

    step = steps(DECODE, {"op": "random_resized_crop", "size": 224})[1]
    before = anew(step)
    monkeypatch.setattr(ops, "_resampled", shifted)
    assert anew(step) != before


def test_all_values_of_a_byte_are_converted_and_no_negative_float_to_an_unsigned_type() -> None:
    def values(dtype: str, of: str) -> np.ndarray:
        [(_, array)] = behaviour._value_probes(ToDType(dtype=dtype), of)
        assert array.dtype == of
        return array

    assert values("float32", "uint8").max() == 255
    assert values("float32", "int16").min() < 0
    assert values("int8", "float32").min() < 0
    assert values("uint8", "float32").min() == 0


# --- what they cost -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["resize", "center_crop", "random_resized_crop"])
def test_sizes_beyond_memory_are_not_tried(op: str) -> None:
    [step] = steps({"op": op, "size": 60_000})
    assert computed(step) == {}
    assert digest_of(computed(step))
