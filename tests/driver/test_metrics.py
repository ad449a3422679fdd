"""A build's figures at Ray's Prometheus exporter, scraped over HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import socket
import subprocess
import sys
import urllib.request
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from precache.store.receipts import Receipt
from precache_workers.driver.metrics import BuildMetrics, Figures
from precache_workers.driver.totals import BuildTotals
from tests.support.building import (
    HELD,
    cli,
    command,
    environment,
    gone,
    poll,
    running,
    write,
    write_jpegs,
)
from tests.support.raycluster import HEAD, Cluster

WHOLE = r"^ray_precache_build_shard_seconds_count{.*} 6"
"""Of a scrape in which all six shards of a build are counted."""

BUILD = """
import json, re, sys, time, urllib.request
import precache
import ray

port, whole, photos, store, out = int(sys.argv[1]), *sys.argv[2:]
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         logging_level="ERROR", _metrics_export_port=port)
result = precache.build(photos, store, precache.Recipe.image(resize=150, crop=150),
                        shard_samples=4, max_failures=5)
scraped, limit = "", time.monotonic() + 60
while not re.search(whole, scraped, re.MULTILINE) and time.monotonic() < limit:
    time.sleep(0.2)  # Ray answers with what it was told last, some seconds ago
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            scraped = answer.read().decode()
    except OSError:  # not listening yet
        pass
with open(out, "w") as file:
    json.dump([scraped, result.stored_bytes, result.cpu_seconds], file)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


needs_exporter = pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None,
    reason="Ray exports metrics where ray[default] is installed: pip install '.[cluster]'",
)


def make_source(folder: Path) -> Path:
    """22 files, one of them no image."""
    write(write_jpegs(folder, 21) / "cat/broken.jpg", b"none")
    return folder


def check(scraped: str, source: Path, stored: int, cpu_seconds: float) -> None:
    """Assert that what was scraped is what the build of a source told in the end."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            if sample.name.startswith("ray_precache_build_"):
                name = sample.name.removeprefix("ray_precache_build_")
                stage = sample.labels.get("stage", "")
                sums[f"{name}{stage}"] += sample.value
                assert sample.labels["store"] == "photos.store"
                assert len(sample.labels["version"]) == 8
                assert ("node" in sample.labels) == (name != "planned_shards_total")
                assert str(source.parent) not in str(sample.labels)
    assert sums["shards_total"] == sums["shard_seconds_count"] == 6
    assert sums["images_total"] == 22
    assert sums["failed_images_total"] == 1
    assert sums["fetched_bytes_total"] == sum(p.stat().st_size for p in source.glob("*/*"))
    assert sums["stored_bytes_total"] == stored
    assert sums["cpu_seconds_total"] == pytest.approx(cpu_seconds)
    assert sums["stage_seconds_totalops"] > 0
    assert sums["planned_shards_total"] == 6


@needs_exporter
@pytest.mark.heavy
def test_a_builds_figures_can_be_scraped(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    env = environment(
        HOME=str(tmp_path),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
        RAY_metrics_report_interval_ms="1000",
    )
    env.pop("RAY_ADDRESS", None)
    arguments = [source, tmp_path / "photos.store", tmp_path / "scraped"]
    line = [sys.executable, "-c", BUILD, str(free_port()), WHOLE, *map(str, arguments)]
    ran = subprocess.run(line, check=False, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    scraped, stored, cpu_seconds = json.loads((tmp_path / "scraped").read_text())
    check(scraped, source, stored, cpu_seconds)


# --- from a driver that is a client -------------------------------------------------------------

FLAGS = ("--resize", "150", "--crop", "150", "--shard-samples", "4")


@dataclass(frozen=True)
class Open:
    """A cluster that takes clients, where its metrics are, and how its clients run."""

    cluster: Cluster
    address: str
    metrics: str
    env: dict[str, str]

    def exporters(self) -> list[psutil.Process]:
        """Actors that tell Ray of builds."""
        found = psutil.Process().children(recursive=True)
        return [each for each in found if not gone(each) and "Exporter" in each.name()]

    def servers(self) -> list[psutil.Process]:
        """Processes that speak with clients."""
        found = [each for each in psutil.Process().children(recursive=True) if not gone(each)]
        return [each for each in found if "ray.util.client.server" in " ".join(each.cmdline())]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    client, metrics = free_port(), free_port()
    ports = {"ray_client_server_port": client, "metrics_export_port": metrics}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray closes not all that it opens
        cluster = Cluster(tmp_path_factory.mktemp("ray"), ports, HOLD="1")
    try:
        cluster.add()
        env = {name: value for name, value in cluster.env.items() if name != "RAY_ADDRESS"}
        yield Open(cluster, f"ray://{HEAD}:{client}", f"http://{HEAD}:{metrics}/metrics", env)
    finally:
        cluster.close()


@needs_exporter
@pytest.mark.heavy
def test_a_clients_figures_can_be_scraped_at_the_head(opened: Open, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    line = ("build", source, tmp_path / "photos.store", *FLAGS, "--max-failures", "5", "--json")
    ran = cli(*line, "--address", opened.address, env=opened.env)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)

    def scraped() -> str:
        with contextlib.suppress(OSError), urllib.request.urlopen(opened.metrics) as answer:
            text: str = answer.read().decode()
            return text if re.search(WHOLE, text, re.MULTILINE) else ""
        return ""

    found = poll(scraped, "all is told")
    check(found, source, told["stored_bytes"], told["cpu_seconds"])
    poll(lambda: not opened.exporters(), "nothing of the build is left on the cluster")


@pytest.mark.heavy
def test_a_client_builds_on_when_its_metrics_are_lost(opened: Open, tmp_path: Path) -> None:
    source, store = write_jpegs(tmp_path / "in", 40), tmp_path / "store"
    write(tmp_path / "recipe.toml", HELD.format(folder=tmp_path, store=store).encode())
    line = ("build", source, store, "--recipe", tmp_path / "recipe.toml", *FLAGS[4:], "--json")
    with running(command(*line, "--address", opened.address), opened.env) as build:
        [exporter] = poll(opened.exporters, "the build tells of itself")
        poll(lambda: list(store.glob("*/_build/build.json")), "it has begun")
        exporter.kill()
        poll(lambda: gone(exporter), "nobody tells")
        (tmp_path / "go").touch()
        out, err = build.communicate()
    assert build.returncode == 0, err
    assert json.loads(out)["samples"] == 40


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


def test_each_export_has_what_was_added_since_the_last() -> None:
    totals, exported = BuildTotals(planned=3), list[Figures]()
    metrics = BuildMetrics(totals, exported.append)
    for host, images in (("a", 2), ("b", 4), ("a", 8)):
        totals.add(
            Receipt(
                shard=0,
                objects={},
                holes={},
                content=[""] * images,
                sums={},
                seconds={"ops": 1.5},
                cpu_seconds=0.5,
                host=host,
            ),
            0.0,
        )
        metrics.shard_done(host, 1.5)
        metrics.export()
    assert sum(figures.planned for figures in exported) == 3
    images = [(n, t.images) for figures in exported for n, t in figures.nodes.items() if t.images]
    assert images == [("a", 2), ("b", 4), ("a", 8)]
    assert [wall for figures in exported for wall in figures.walls] == [
        ("a", 1.5), ("b", 1.5), ("a", 1.5),
    ]  # fmt: skip
    stages = [total.stages.get("ops", 0.0) for each in exported for total in each.nodes.values()]
    assert sum(stages) == 4.5


def test_a_process_that_joined_no_ray_has_no_metrics() -> None:
    code = (
        "import sys\n"
        "from precache_workers.driver.metrics import build_metrics\n"
        "from precache_workers.driver.totals import BuildTotals\n"
        "assert build_metrics('store', '3f2a', 'local', BuildTotals()) is None\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
