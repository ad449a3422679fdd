"""Placement of tasks on a cluster, and samples that kill their workers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache_workers.cluster.placement import Placement
from tests.support.building import (
    MARKED,
    build_here,
    cli,
    contents,
    marked_photos,
    marked_recipe,
    write_jpegs,
)
from tests.support.command_line import Run
from tests.support.raycluster import Cluster


def node(
    cpus: float, alive: bool = True, labels: dict[str, str] | None = None, **more: float
) -> Any:
    return {
        "Alive": alive,
        "Labels": labels or {},
        "Resources": {"CPU": cpus, "memory": 8e9, **more} if alive else {},
    }


@pytest.mark.parametrize(
    ("placement", "memory", "slots"),
    [
        (Placement(), 0, 2 + 4 + 8),
        (Placement(cpus_per_task=3), 0, 0 + 1 + 2),
        (Placement(cpus_per_task=0.5), 0, 4 + 8 + 16),
        (Placement(), int(3e9), 2 + 2 + 2),
        (Placement(node_resources={"spare": 1}), 0, 3),
        (Placement(node_labels={"tier": "spot"}), 0, 8),
        (Placement(node_labels={"tier": "spot", "zone": "a"}), 0, 0),
    ],
)
def test_slots_follow_from_what_the_nodes_have(
    placement: Placement, memory: int, slots: int
) -> None:
    nodes = [node(2), node(4, spare=3), node(8, labels={"tier": "spot"}), node(16, alive=False)]
    assert placement.slots(nodes, memory) == slots


def test_placement_without_a_cluster_is_refused(tmp_path: Path, run: Run) -> None:
    ran = run("build", tmp_path, tmp_path / "store", "--node-resources", "spare=1")
    assert ran.status == 2
    assert "--node-resources is for a cluster that is joined, and address is 'local'" in ran.err


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, of one CPU each; one is spare."""
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        cluster.add(resources={"spare": 1}, labels={"tier": "spot"})
        cluster.add()
        yield cluster
    finally:
        cluster.close()


LARGE = ("--resize", "160", "--crop", "150", "--shard-samples", "2")


@pytest.mark.heavy
def test_a_running_cluster_is_joined_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    write_jpegs(tmp_path / "data/in", 12)
    plan = ("plan", tmp_path / "data/in", tmp_path / "one", *LARGE, "--address", "auto", "--json")
    planned = cli(*plan, env=cluster.env)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["estimate"]["cpus"] == 2

    def built(name: str) -> Any:
        ran = cli(
            *("build", tmp_path / "data/in", tmp_path / name, *LARGE),
            *("--address", "auto", "--json", "--no-progress", "--label-level", "1"),
            env=cluster.env,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        return json.loads(ran.stdout)

    assert [built(name)["shards_skipped"] for name in ("one", "two")] == [0, 0]
    recipe = precache.Recipe.image(resize=160, crop=150)
    build_here(tmp_path / "data/in", tmp_path / "serial", recipe, {"shard_samples": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "serial")
    assert contents(tmp_path / "two") == contents(tmp_path / "serial")
    write_jpegs(tmp_path / "data/in", 14)
    assert built("one")["rows_reused"] == 12


@pytest.mark.heavy
def test_tasks_run_where_they_are_allowed_and_nicely(cluster: Cluster, tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 12)
    (tmp_path / "noting.py").write_text(
        "import os, pathlib\n"
        "def note(array, folder=''):\n"
        "    import ray\n"
        "    node = ray.get_runtime_context().get_node_id()\n"
        "    nice = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "    (pathlib.Path(folder) / f'{node} {nice}').touch()\n"
        "    return array\n"
    )
    ray_nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 15)  # by default, its workers'
    for flag, nice in (
        (("--node-resources", "spare=1"), ray_nice),
        (("--node-labels", "tier=spot"), ray_nice),
        (("--nice", "19"), 19),
    ):
        spare = f"{cluster.nodes[0].node_id} {nice}"
        seen = tmp_path / flag[0].strip("-")
        seen.mkdir()
        (tmp_path / "recipe.toml").write_text(
            '[fields.image]\nops = [{ op = "decode" }, { op = "function", '
            f'function = "noting:note", params = {{ folder = "{seen}" }} }}]\n'
        )
        ran = cli(
            *("build", "in", f"store-{seen.name}", "--recipe", "recipe.toml", "--no-progress"),
            *("--address", "auto", "--shard-samples", "2", *flag),
            cwd=tmp_path,
            env=cluster.env,
        )
        assert ran.returncode == 0, ran.stderr
        places = {path.name for path in seen.iterdir()}
        if flag[0] == "--nice":  # where they run is Ray's choice
            assert {place.split()[1] for place in places} == {"19"}
        else:
            assert places == {spare}


@pytest.mark.heavy
def test_samples_that_kill_their_workers_become_holes(cluster: Cluster, tmp_path: Path) -> None:
    """One of them among those that are measured first."""
    marked_photos(tmp_path / "in")
    (tmp_path / "recipe.toml").write_text(marked_recipe("die"))
    ran = cli(
        *("build", "in", "store", "--recipe", "recipe.toml", "--json"),
        *("--address", "auto", "--shard-samples", "20"),
        cwd=tmp_path,
        env=cluster.env,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert sorted(key for key, _ in result["holes"]) == sorted(MARKED)
    for _, why in result["holes"]:
        assert why.startswith("decoding it kills the worker: its process ended by itself, or was")
    assert "Traceback" not in ran.stderr
    version = precache.open(tmp_path / "store")
    assert int(np.sum(version.valid)) == 38
    assert precache.verify(tmp_path / "store").ok


HELD = """
import numpy as np
class Data:
    def __init__(self):
        self.names = {made}(set("ant bee cat cow dog eel fox hen owl pig rat yak".split()))
    def __len__(self): return 12
    def __getitem__(self, n): return np.full((8, 8, 3), n, np.uint8), n
"""


@pytest.mark.heavy
def test_a_dataset_that_a_node_makes_in_another_order_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    for made in ("list", "sorted"):
        (tmp_path / f"{made}_data.py").write_text(HELD.format(made=made))
        ran = cli(
            *("build", f"python:{made}_data:Data", f"{made}.store", "--no-progress"),
            *("--address", "auto", "--shard-samples", "2"),
            cwd=tmp_path,
            env={**cluster.env, "PYTHONHASHSEED": "5"},
        )
        said = " ".join(ran.stderr.split())
        assert ("`dataset.names` is not what it was" in said) == (made == "list"), said
        assert (ran.returncode == 0) == (made == "sorted"), said
    assert not (tmp_path / "list.store/commits").exists()


# --- niceness -----------------------------------------------------------------------------------

NICENESS = """
import os
from precache_workers.cluster.nodes import set_niceness
os.nice(15 - os.nice(0))
if os.geteuid() == 0:
    os.setuid(65534)
set_niceness(10)
print(os.nice(0))
set_niceness(18)
print(os.nice(0))
"""


def test_a_worker_that_is_nicer_already_stays_so() -> None:
    """Only root could lower its niceness; Ray and service managers start workers with some."""
    line = [sys.executable, "-c", NICENESS]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("15\n18\n", "")
