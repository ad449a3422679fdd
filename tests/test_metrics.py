"""A build's figures at Ray's Prometheus exporter, scraped over HTTP."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.building import environment, write, write_jpegs

BUILD = """
import json, re, sys, time, urllib.request
import precache
import ray

port, photos, store, out = int(sys.argv[1]), *sys.argv[2:]
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         logging_level="ERROR", _metrics_export_port=port)
result = precache.build(photos, store, precache.Pipeline.image(resize=150, crop=150),
                        shard_samples=4, max_failures=5)
scraped, limit = "", time.monotonic() + 60
whole = re.compile(r"^ray_precache_build_shard_seconds_count{.*} 6", re.MULTILINE)
while not whole.search(scraped) and time.monotonic() < limit:
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


@pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None,
    reason="Ray exports metrics where ray[default] is installed: pip install '.[cluster]'",
)
@pytest.mark.heavy
def test_a_builds_figures_can_be_scraped(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    write_jpegs(tmp_path / "in", 21)
    write(tmp_path / "in/cat/broken.jpg", b"none")
    env = environment(
        HOME=str(tmp_path),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
        RAY_metrics_report_interval_ms="1000",
    )
    env.pop("RAY_ADDRESS", None)
    arguments = [tmp_path / "in", tmp_path / "photos.store", tmp_path / "scraped"]
    line = [sys.executable, "-c", BUILD, str(free_port()), *map(str, arguments)]
    ran = subprocess.run(line, check=False, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    scraped, stored, cpu_seconds = json.loads((tmp_path / "scraped").read_text())

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
                assert str(tmp_path) not in str(sample.labels)
    assert sums["shards_total"] == sums["shard_seconds_count"] == 6
    assert sums["images_total"] == 22
    assert sums["failed_images_total"] == 1
    assert sums["fetched_bytes_total"] == sum(p.stat().st_size for p in tmp_path.glob("in/*/*"))
    assert sums["stored_bytes_total"] == stored
    assert sums["cpu_seconds_total"] == pytest.approx(cpu_seconds)
    assert sums["stage_seconds_totalops"] > 0
    assert sums["planned_shards_total"] == 6


def test_a_process_that_joined_no_ray_has_no_metrics() -> None:
    code = (
        "import sys\n"
        "from workers.metrics import build_metrics\n"
        "assert build_metrics('store', '3f2a') is None\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
