"""A recipe whose function counts its calls, and builds that count them anew."""

from typing import Any

import numpy as np

import precache
from tests.support import building

CALLS: list[int] = []


def counted(array: np.ndarray) -> np.ndarray:
    """The array as it is."""
    CALLS.append(1)
    return array


def mean_of(array: np.ndarray) -> np.ndarray:
    return array.mean((0, 1)).astype(np.float32)


COUNT, MEAN = (
    {"op": "function", "function": f"{__name__}:{name}", "version": "1"}
    for name in ("counted", "mean_of")
)
MEAN |= {"dtype": "float32", "shape": [3]}


def recipe_of(
    size: int = 150, codec: str = "image", *after: dict[str, Any], mode: str = "RGB", **fields: Any
) -> precache.Recipe:
    """Square images that `counted` has seen, and the ops given after that."""
    ops = [{"op": "decode", "mode": mode}, {"op": "resize", "size": [size, size]}, COUNT, *after]
    image = {"ops": ops, "codec": codec, "variants": 1}
    return precache.Recipe.from_dict({"fields": {"image": image, **fields}})


def mean_field(size: int) -> dict[str, Any]:
    """A field of the means of resized images."""
    ops = [{"op": "decode"}, {"op": "resize", "size": [size, size]}, MEAN]
    return {"ops": ops, "codec": "zstd", "variants": 1}


def build(source: Any, store: Any, recipe: precache.Recipe, **options: Any) -> precache.BuildResult:
    CALLS.clear()
    return building.build(source, store, recipe, **{"shard_samples": 8} | options)
