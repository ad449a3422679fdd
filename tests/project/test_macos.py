"""Stores are read where Python lacks what Linux alone has, with the same rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import precache
from tests.conftest import CODECS, BuiltStore
from tests.support.building import environment
from tests.support.servers import S3Server

READ = """
import json, sys
from tests.support.macos import become
become()
import fsspec, os, subprocess, torch, xxhash
import precache
from precache.errors import UsageError
from precache.runtime.process_id import has_ended, process_of
memory = fsspec.filesystem("memory")

def digest(uri, **options):
    options = {"reading": precache.Reading(3), **options}
    with precache.Loader(uri, 5, shuffle=False, **options) as loader:
        return xxhash.xxh3_64_hexdigest(torch.cat([b["image"] for b in loader]).numpy())

def digests(store, cache):
    memory.put(store, f"/{cache}", recursive=True)
    remote = f"memory://{cache}"
    assert precache.verify(store).ok
    return [
        digest(store),
        digest(store, reading=precache.Reading(3, access="pread")),
        digest(store, reading=precache.Reading(3, resident="host")),
        digest(remote),
        *(digest(remote, cache=precache.Cache(cache, "64MB")) for again in range(2)),
    ]

def refusal(function, *values):
    try:
        function(*values)
    except UsageError as error:
        return str(error)

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
process = process_of(child.pid)
assert process.node == process_of(os.getpid()).node
ended = [has_ended(process)]
child.communicate(b"\\n")
ended.append(has_ended(process))

print(json.dumps({
    "ended": ended,
    "digests": {store: digests(store, cache) for store, cache in json.loads(sys.argv[1])},
    "refusals": [
        refusal(precache.build, "photos", "store"),
        refusal(precache.plan, "photos", "store"),
        refusal(precache.ensure, "photos", "store"),
        refusal(precache.submit, "photos", "store"),
        refusal(precache.doctor, "photos"),
        refusal(precache.refresh, "store"),
    ],
}))
"""


def _run(code: str, tmp_path: Path, *arguments: object) -> Any:
    """Run a script, whose last line of output is JSON, and return that."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", script, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _digest(store: BuiltStore) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(store.rows()[store.open().valid]))


@pytest.mark.heavy
def test_a_store_is_read_with_the_same_rows_and_building_is_refused(
    stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    # By way of a link, as everything in macOS's folders of temporary files is.
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for codec in CODECS:
        (tmp_path / "real" / codec).symlink_to(stores[codec].path)
    places = [(str(tmp_path / "link" / c), str(tmp_path / "link" / f"cache-{c}")) for c in CODECS]
    result = _run(READ, tmp_path, json.dumps(places))
    expected = [_digest(stores[codec]) for codec in CODECS]
    assert [set(found) for found in result["digests"].values()] == [{one} for one in expected]
    assert result["ended"] == [False, True]
    for refusal in result["refusals"]:
        assert "runs on Linux alone, and this system is 'darwin'" in refusal


WORK = """
import json, sys
from tests.support.macos import become
become()
import precache

def main():
    import torch, xxhash
    from precache.cli.main import main as command
    store, remote, options, folder = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
    loaded = {}
    for context in (None, "fork"):  # None: macOS's own choice
        dataset = precache.CachedDataset(store)
        loader = torch.utils.data.DataLoader(
            dataset, 5, num_workers=2, multiprocessing_context=context
        )
        rows = torch.cat([batch["image"] for batch in loader])
        loaded[str(context)] = xxhash.xxh3_64_hexdigest(rows.numpy())
    with precache.Loader(remote, 5, shuffle=False, storage_options=options,
                         cache=f"{folder}/cache") as loader:
        rows = torch.cat([batch["image"] for batch in loader])
        loaded["remote"] = xxhash.xxh3_64_hexdigest(rows.numpy())
    precache.pull(remote, f"{folder}/pulled", storage_options=options)
    for line in (["info"], ["ls"], ["verify"], ["gc", "--keep", "1"]):
        assert command([*line[:1], f"{folder}/pulled", *line[1:]]) in (0, None), line
    with precache.Loader(f"{folder}/pulled", 5, shuffle=False) as loader:
        rows = torch.cat([batch["image"] for batch in loader])
        loaded["pulled"] = xxhash.xxh3_64_hexdigest(rows.numpy())
        reports = []
        metered = precache.meter(loader, every=2, to=[reports.append])
        for batch in metered:
            batch["image"].float().sum()
        metered.flush()
        diagnosis = precache.diagnose(loader, lambda batch: batch["image"].float().sum())
    assert reports
    print(json.dumps({"loaded": loaded, "verdict": diagnosis.verdict}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.heavy
def test_workers_buckets_copies_and_measurements_work_as_well(
    stores: dict[str, BuiltStore], s3: S3Server, tmp_path: Path
) -> None:
    store = stores["image"]
    precache.push(store.path, "s3://bucket/macos", storage_options=s3.options())
    result = _run(
        WORK, tmp_path, store.path, "s3://bucket/macos", json.dumps(s3.options()), tmp_path
    )
    assert set(result["loaded"].values()) == {_digest(store)}
