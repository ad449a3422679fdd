"""Entries of a picture, such as boxes: checked, and moved as its ops move pixels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from precache.errors import SampleError
from precache.recipe.ops import Op

Size = tuple[int, int]
"""Height and width."""


def require_inside(kind: str, name: str, entries: np.ndarray, size: Size) -> np.ndarray:
    """Return boxes (n, 4), or keypoints (n, ..., 2 or more), that may lie in a picture.

    Raises
    ------
    SampleError
        They have another shape, or are no numbers; a box is empty or lies outside of the picture.
    """
    if not len(entries):  # a list of none tells no other axes
        return entries.reshape(0, 4) if kind == "boxes" else entries
    if kind == "boxes" and entries.shape[1:] != (4,):
        raise SampleError(f"its {name} are {entries.shape}, and boxes are (n, 4): x1, y1, x2, y2")
    if entries.ndim < 2 or entries.shape[-1] < 2:
        raise SampleError(f"its {name} are {entries.shape}, and keypoints (n, …) end in x, y")
    faults = [(~np.isfinite(entries.reshape(len(entries), -1)), "")]
    if kind == "boxes":
        height, width = size
        empty = entries[:, 2:] <= entries[:, :2]
        outside = (entries[:, 2:] <= 0) | (entries[:, :2] >= [width, height])
        corners = (
            ", and boxes are x1, y1, x2, y2 with x2 above x1 and y2 above y1; of x, y, width, "
            "height, x2 is x + width"
        )
        beyond = f", outside of its picture of {width} x {height} px"
        faults += [(empty, corners), (outside, beyond)]
    for is_wrong, why in faults:
        if is_wrong.any():
            first = int(is_wrong.any(axis=1).argmax())
            raise SampleError(f"{name}[{first}] is {entries[first].tolist()}{why}")
    return entries


def moved(
    kind: str, entries: np.ndarray, size: Size, ops: Iterable[tuple[Op, np.random.Generator | None]]
) -> np.ndarray:
    """Return boxes or keypoints where ops, each with its random numbers, move them in a picture.

    Boxes are clipped, and keep their places where nothing is left of them.

    Raises
    ------
    SampleError
        The picture has no output of an op.
    """
    if not len(entries):
        return entries
    import torch

    from precache.recipe.coordinates import Movement

    values = torch.from_numpy(np.array(entries, np.float32))[None]
    if kind == "boxes":  # those that reach outside are clipped, whatever the ops
        height, width = size
        values = values.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    for op, draw in ops:
        scene = op.scene(*size, draw)
        if scene is None:
            raise SampleError(f"{size[1]} x {size[0]} px is too small for {op}")
        (rows, columns), (height, width) = scene.part, scene.size
        across, down = width / (columns.stop - columns.start), height / (rows.stop - rows.start)
        movement = Movement(
            torch.tensor([[columns.start, rows.start]]),
            torch.tensor([[across, down]]),
            torch.tensor([scene.mirrored]),
            torch.tensor([-1.0 if scene.mirrored else 0.0]),
            scene.size,
        )
        values = movement.boxes(values) if kind == "boxes" else movement.keypoints(values)
        size = scene.size
    result: np.ndarray = values[0].numpy()
    return result
