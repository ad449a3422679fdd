"""Small arrays: written, and read back the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from precache.storage.local import LocalFolder
from precache.store import arrays
from precache.store.small_arrays import read_small, small_array


@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("dtype", ["bool", "uint64"])
def test_small_arrays_round_trip_over_several_chunks(
    rows: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", 8)
    values = (np.arange(rows * 2).reshape(rows, 2) % 3).astype(dtype)
    folder = LocalFolder(tmp_path)
    for name, data in small_array(values, ["row", "pair"]).items():
        folder.put(f"x/{name}", [data])
    array = arrays.small(values.shape, dtype)
    read = read_small(array, "x", lambda names: {name: folder.read(name) for name in names}, "")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    assert len(folder.names("x/c")) == -(-rows // 8)
