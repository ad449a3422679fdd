"""Builds by a driver that is a client of a Ray cluster, and the counters that Ray exports."""

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.building import (
    HELD,
    cli,
    command,
    environment,
    free_ports,
    gone,
    poll,
    running,
    write,
    write_jpegs,
)
from tests.support.raycluster import HEAD, Cluster


def make_source(folder: Path) -> Path:
    """22 files, one of them no image."""
    write(write_jpegs(folder, 21) / "cat/broken.jpg", b"none")
    return folder


FLAGS = ("--resize", "150", "--crop", "150", "--shard-samples", "4")


@dataclass(frozen=True)
class Open:
    """A cluster that takes clients, and how its clients run."""

    cluster: Cluster
    address: str
    env: dict[str, str]

    def servers(self) -> list[psutil.Process]:
        """Processes that speak with clients."""
        found = [each for each in psutil.Process().children(recursive=True) if not gone(each)]
        return [each for each in found if "ray.util.client.server" in " ".join(each.cmdline())]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    client = free_ports(1)[0]
    ports = {"ray_client_server_port": client}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray closes not all that it opens
        cluster = Cluster(tmp_path_factory.mktemp("ray"), ports, HOLD="1")
    try:
        cluster.add()
        env = {name: value for name, value in cluster.env.items() if name != "RAY_ADDRESS"}
        yield Open(cluster, f"ray://{HEAD}:{client}", env)
    finally:
        cluster.close()


BUILD = """
import json, sys, time, urllib.request
import precache
import ray

port, photos, store, out = int(sys.argv[1]), *sys.argv[2:]
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         logging_level="ERROR", _metrics_export_port=port)
recipe = precache.Recipe.image(resize=150, crop=150)
built = precache.build(photos, store, recipe, shard_samples=4, max_failures=5, address="auto")
wanted = {"ray_precache_rows_total": 22, "ray_precache_written_bytes_total": built.stored_bytes}
counted, limit = {}, time.monotonic() + 60
while counted != wanted and time.monotonic() < limit:
    time.sleep(0.2)  # Ray answers with what it was told last, some seconds ago
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
    except OSError:  # not listening yet
        continue
    named = [line for line in lines if line.startswith("ray_precache_")]
    counted = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in named}
with open(out, "w") as file:
    json.dump([counted, wanted], file)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None,
    reason="Ray exports metrics where ray[default] is installed: pip install '.[cluster]'",
)
@pytest.mark.heavy
def test_rows_and_bytes_of_a_build_are_at_rays_endpoint(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_metrics_report_interval_ms": "1000"}
    env = environment(HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0", **settings)
    env.pop("RAY_ADDRESS", None)
    arguments = [source, tmp_path / "photos.store", tmp_path / "scraped"]
    line = [sys.executable, "-c", BUILD, str(free_ports(1)[0]), *map(str, arguments)]
    ran = subprocess.run(line, check=False, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    counted, wanted = json.loads((tmp_path / "scraped").read_text())
    assert counted == wanted


@pytest.mark.heavy
def test_a_clients_build_that_fails_says_why(opened: Open, tmp_path: Path) -> None:
    source, store = make_source(tmp_path / "in"), tmp_path / "photos.store"
    line = ("build", source, store, *FLAGS, "--max-failures", "0")
    ran = cli(*line, "--address", opened.address, env=opened.env)
    assert "1 of 22 samples failed" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 1


@pytest.mark.heavy
def test_a_client_that_loses_its_cluster_says_so(opened: Open, tmp_path: Path) -> None:
    """Last of those with this cluster, whose server for clients is killed."""
    source, store = write_jpegs(tmp_path / "in", 40), tmp_path / "store"
    write(tmp_path / "recipe.toml", HELD.format(folder=tmp_path, store=store).encode())
    line = ("build", source, store, "--recipe", tmp_path / "recipe.toml", *FLAGS[4:], "--json")
    with running(command(*line, "--address", opened.address), opened.env) as build:
        poll(lambda: list(store.glob("*/_build/build.json")), "it has begun")
        for server in opened.servers():
            server.kill()
        (tmp_path / "go").touch()
        _, err = build.communicate()
    assert f"lost the connection to {opened.address}" in err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert build.returncode == 1
