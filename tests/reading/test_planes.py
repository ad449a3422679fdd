"""Laying a row down as planes, and the sums of its channels, against numpy in whole numbers."""

import itertools
import math

import numpy as np
import pytest

from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums
from precache_workers.shards.field_writer import Sums, copy_row

SHAPES = [(3, 224, 224), (3, 223, 224), (3, 32, 32), (1, 60, 60), (3, 300, 7), (4, 5, 5), (3, 1, 1)]
SHAPES += [(3, 1500, 2000), (3, 3, 2)]


def pixels(count: int, *shape: int) -> np.ndarray:
    made = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
    made[0] = 255
    return made


def sums_of(rows: np.ndarray) -> ChannelSums:
    values = rows.astype(np.int64).swapaxes(0, 1).reshape(rows.shape[1], -1)
    totals, squares = values.sum(axis=1), np.square(values).sum(axis=1)
    return ChannelSums(values.shape[1], totals.tolist(), squares.tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_exact_however_rows_come(shape: tuple[int, ...]) -> None:
    channels, height, width = shape
    rows = pixels(37 if math.prod(shape) < 1_000_000 else 3, *shape)
    sums = Sums(RowShape(shape, "uint8"))
    for row in rows[: len(rows) // 2]:
        sums.add(row)
    sums.extend(rows[len(rows) // 2 :])
    sums.extend(rows[1:2], -1)
    assert sums.result() == sums_of(np.delete(rows, 1, axis=0))
    cut = pixels(3, channels, height + 6, width + 6)[:, :, 2 : 2 + height, 2 : 2 + width]
    sums = Sums(RowShape(shape, "uint8"))
    sums.extend(cut)
    assert sums.result() == sums_of(cut)


def test_sums_of_floats() -> None:
    rows = np.random.default_rng(0).random((4, 3, 20, 20), dtype=np.float32)
    sums = Sums(RowShape((3, 20, 20), "float32"))
    for row in rows:
        sums.add(row)
    found, values = sums.result(), rows.astype(np.float64)
    assert found.count == 4 * 400
    np.testing.assert_allclose(found.total, values.sum(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.squares, np.square(values).sum(axis=(0, 2, 3)), rtol=1e-12)


@pytest.mark.parametrize("kind", ["crop", "whole", "flipped", "planes"])
def test_a_row_lies_in_its_place_whatever_its_layout(kind: str) -> None:
    for start, width in itertools.product([0, 16, 32, 1], [224, 216, 223, 32, 1]):
        image = pixels(2, 40, width + 9, 3)[1]
        image = image[4:36, 3 : 3 + width] if kind == "crop" else image[:32, :width].copy()
        row = (image[:, ::-1] if kind == "flipped" else image).transpose(2, 0, 1)
        row = row.copy() if kind == "planes" else row
        memory = np.zeros(row.size + 128, np.uint8)
        begin = -memory.ctypes.data % 64 + start
        place = memory[begin : begin + row.size].reshape(row.shape)
        copy_row(row, place)
        np.testing.assert_array_equal(place, row)
        place[...] = 0
        assert not memory.any()
