"""Small arrays: written, and read back the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from precache.storage.local import LocalFolder
from precache.store import arrays, small_arrays
from precache.store.small_arrays import decode_strings, read_small, small_array, string_array


def _written(tmp_path: Path, files: dict[str, bytes]) -> LocalFolder:
    folder = LocalFolder(tmp_path)
    for name, data in files.items():
        folder.put(f"x/{name}", [data])
    return folder


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32"])
def test_small_arrays_round_trip_over_several_chunks(
    rows: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", 8)
    values = (np.arange(rows * 2).reshape(rows, 2) % 3).astype(dtype)
    folder = _written(tmp_path, small_array(values, ["row", "pair"]))
    array = arrays.small(values.shape, dtype)
    read = read_small(array, "x", lambda names: [folder.read(name) for name in names], "")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    assert len(folder.names("x/c")) == -(-rows // 8)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_strings_round_trip_over_several_chunks(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_arrays, "KEYS_PER_CHUNK", 4)
    values = [f"cat/é {n}.jpg" for n in range(count)]
    files = string_array(values, "row")
    chunks = [files[f"c/{n}"] for n in range(len(files) - 1)]
    read = [text for chunk in chunks for text in decode_strings(chunk, "x", min(count, 4))]
    assert read[:count] == values
    assert set(read[count:]) <= {""}
