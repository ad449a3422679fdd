"""Random recipes, and the rows that they make of photos, computed without precache."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.support.changing_sources import BROKEN, Sample, pixels_of

Op = dict[str, Any]
Row = tuple[np.ndarray | None, int]
"""A row before a flip, None if only a draw tells, and by how much each value may differ."""


# --- functions of the user ----------------------------------------------------------------------

FUNCTIONS = """
import numpy as np

BITS = {bits}


def turned(array):
    return array ^ BITS


def edit(array, more=0):
    if array[0, 0, 0] % 16 == {unlucky}:
        raise ValueError("an unlucky photo")
    return turned(array) ^ more


def mean(array):
    return (array.mean((0, 1)) * {scale}).astype(np.float32)
"""


# --- recipes, and what they make without precache -----------------------------------------------


def draw_recipe(draw: random.Random, release: int) -> dict[str, Any]:
    """Return fields: an image, and at times others; `extra` is left out where there is none."""
    decode = {"op": "decode"}
    image: dict[str, Any] = {"codec": draw.choice(["image", "zstd", "raw"])}
    resize = {"op": "resize", "size": draw.choice([[18, 16], [24, 24], 17])}
    crop = {"op": "center_crop", "size": draw.choice([[16, 12], [12, 12], [12, 8], [17, 15]])}
    ops: list[Op] = [decode]
    geometry = draw.random()
    if geometry < 0.4:
        ops.append(crop if draw.random() < 0.9 else {"op": "center_crop", "size": [22, 20]})
    elif geometry < 0.9:
        ops += [resize, crop] if isinstance(resize["size"], int) else [resize]
        if draw.random() < 0.3 and resize["size"] == [24, 24]:
            ops.append(crop)
    else:
        ops.append({"op": "random_resized_crop", "size": [14, 14]})
    if draw.random() < 0.3:
        op: Op = {"op": "function", "function": "history_functions:edit"}
        if draw.random() < 0.3:
            op["version"] = str(release)
        if draw.random() < 0.3:
            op["params"] = {"more": draw.choice([1, 2])}
        ops.insert(draw.choice([1, len(ops)]), op)
    if draw.random() < 0.3:
        ops.append({"op": "horizontal_flip"})
    if any(op["op"] in ("horizontal_flip", "random_resized_crop") for op in ops):
        image["variants"] = draw.choice([1, 1, 2, 3])
    fields = {"image": image | {"ops": ops}}
    if draw.random() < 0.3:
        grey = [{"op": "decode", "mode": "L"}, {"op": "resize", "size": [8, 9]}]
        fields["grey"] = {"ops": grey, "codec": draw.choice(["raw", "image"])}
    if draw.random() < 0.25:
        large = [{"op": "decode"}, {"op": "resize", "size": [150, 150]}]
        fields["large"] = {"ops": large, "codec": "image"}
    if draw.random() < 0.25:
        mean = {"op": "function", "function": "history_functions:mean"}
        mean |= {"dtype": "float32", "shape": [3]}
        fields["mean"] = {"ops": [{"op": "decode"}, mean], "codec": "zstd"}
    if draw.random() < 0.5:
        fields["extra"] = {"input": "extra", "ops": [], "codec": "zstd"}
    recipe: dict[str, Any] = {"fields": fields}
    if draw.random() < 0.2:
        recipe["seed"] = draw.choice([1, 2])
    return recipe


class FailedSampleError(Exception):
    """A sample that becomes a hole."""


def row_of(sample: Sample, ops: Sequence[Op], code: dict[str, Any]) -> Row:
    """Return the row that a field's ops make; raises `FailedSampleError` for a hole."""
    if not ops:
        return np.full(5, sample.number, np.float32), 0
    if sample.number == BROKEN:
        raise FailedSampleError
    array, slack = pixels_of(sample.number), 0
    for op in ops:
        height, width = array.shape[:2]
        if op["op"] == "decode" and op.get("mode") == "L":
            array = np.asarray(Image.fromarray(array).convert("L"))[..., None]
        elif op["op"] == "resize":
            size = op["size"]
            if isinstance(size, int):
                side = min(height, width)
                size = [size * height // side, size * width // side]
            channels = [Image.fromarray(array[..., c]) for c in range(array.shape[2])]
            resized = [
                channel.resize(size[::-1], Image.Resampling.BILINEAR) for channel in channels
            ]
            array, slack = np.stack(resized, axis=2), slack + 2
        elif op["op"] == "center_crop":
            tall, wide = op["size"]
            if height < tall or width < wide:
                raise FailedSampleError
            top, left = round((height - tall) / 2), round((width - wide) / 2)
            array = array[top : top + tall, left : left + wide]
        elif op["op"] == "random_resized_crop":
            return None, 0
        elif op["op"] == "function":
            function = code[op["function"].partition(":")[2]]
            if slack and function is code["edit"]:
                return None, 0  # of a value that is not known to the bit, it may make any other
            try:
                array = function(array, **op.get("params", {}))
            except ValueError:
                raise FailedSampleError from None
    return array.transpose(2, 0, 1) if array.ndim == 3 else array, slack
