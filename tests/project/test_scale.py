"""A version of a hundred million rows is opened, described and listed in little time and memory."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.store.arrays import checks_per_object
from precache.store.small_arrays import KEYS_PER_CHUNK, small_array, string_array
from tests.support.building import build_here, write, write_jpegs
from tests.support.forging import settle

ROWS, PER_SHARD, PER_CHUNK, ROW_NBYTES = 10**8, 43_680, 16, 3 * 32 * 32
SHARDS, CHUNKS = -(-ROWS // PER_SHARD), PER_SHARD // PER_CHUNK


def write_huge(to: Path) -> Path:
    """A store with real metadata and small arrays, but keys, which repeat; shards are sparse."""
    recipe = precache.Recipe.image(resize=36, crop=32, codec="raw")
    built = build_here(write_jpegs(to / "in", 4), to / "store", recipe)
    version = Path(built.path)
    document = json.loads((version / "zarr.json").read_bytes())
    document["attributes"]["precache"].update(rows=ROWS, rows_per_shard=PER_SHARD)
    (version / "zarr.json").write_text(json.dumps(document))
    size = CHUNKS * (PER_CHUNK * ROW_NBYTES + 4) + 16 * CHUNKS + 4
    for number in range(SHARDS):
        os.truncate(write(version / f"image/c/{number}/0/0/0", b""), size)
    table = np.full((SHARDS, 3), (size, 0, 0), np.uint64)
    checks = np.zeros((SHARDS, CHUNKS), np.uint32)
    keys = string_array([f"{row:08d}.jpg" for row in range(KEYS_PER_CHUNK)], "row")
    etags = string_array([""] * KEYS_PER_CHUNK, "row")
    for texts in (keys, etags):
        texts |= {f"c/{number}": texts["c/0"] for number in range(-(-ROWS // KEYS_PER_CHUNK))}
    numbers = np.arange(ROWS)
    for array, files in {
        "label": small_array(np.zeros(ROWS, np.int8), ["row"], fill_value=-1),
        "valid": small_array(np.ones(ROWS, np.bool_), ["row"], fill_value=False),
        "shards/image": small_array(table, ["shard", "size_xxh3"]),
        "_sums/image": small_array(np.ones((SHARDS, 7)), ["shard", "sum"]),
        "_checks/image": small_array(
            checks, ["shard", "chunk"], per_chunk=checks_per_object(CHUNKS)
        ),
        "key": keys,
        "rows/size": small_array(numbers % 99_991, ["row"]),
        "rows/mtime_ns": small_array(numbers, ["row"]),
        "rows/etag": etags,
        "rows/removed": small_array(np.zeros(ROWS, np.bool_), ["row"], fill_value=False),
        "rows/content": small_array(np.zeros((ROWS, 2), np.uint64), ["row", "xxh3"]),
    }.items():
        shutil.rmtree(version / array)
        for name, data in files.items():
            write(version / array / name, data)
    settle(version)
    return to / "store"


MEASURED = """
import sys, time
import precache
store, began = sys.argv[1], time.process_time()
version = precache.open(store)
assert version.keys[10**8 - 1] and version.rows == 10**8
opened = time.process_time()
assert precache.info(store).rows == 10**8
described = time.process_time()
[listed] = precache.versions(store).versions
assert listed.rows == 10**8 and listed.nbytes > 3 * 10**11
done = time.process_time()
# Not `ru_maxrss`, which begins with that of the process that started this one.
[peak] = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
memory = int(peak.split()[1]) / 1024
print(opened - began, described - opened, done - described, memory)
"""


@pytest.mark.heavy
def test_a_version_of_a_hundred_million_rows(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """CPU seconds to open it, for `info` and `ls`, and MiB at most."""
    said = run_python(MEASURED, write_huge(tmp_path)).stdout
    print(said)
    opened, described, listed, memory = map(float, said.split())
    assert opened < 2
    assert max(described, listed) < 3
    assert memory < 300
