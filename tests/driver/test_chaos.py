"""Builds on a cluster that loses workers, nodes, drivers and links while they run."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import precache
from tests.support.building import (
    DEADLINE,
    assert_as_serial,
    command,
    environment,
    gone,
    poll,
    running,
    write,
    write_jpegs,
)
from tests.support.raycluster import SETTINGS, Cluster

SEED = 20
KILLS = {"worker": 12, "node": 7, "driver": 5}
RECIPE = """
[[fields.image.ops]]
op = "decode"

[[fields.image.ops]]
op = "resize"
size = [60, 60]

[[fields.image.ops]]
op = "function"
function = "tests.support.building:linger"
version = "1"
params = {{ seconds = {seconds} }}
"""


def recipe_of(folder: Path, seconds: float) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(seconds=seconds))
    return path


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_twenty_four_kills_change_nothing(tmp_path: Path) -> None:
    """Workers, nodes and drivers at random moments of one build of 5,000 samples."""
    draw = random.Random(SEED)
    write_jpegs(tmp_path / "in", 5000, classes=("cat", "dog"))
    line = command(
        *("build", tmp_path / "in", tmp_path / "store", "--recipe", recipe_of(tmp_path, 0.012)),
        *("--shard-samples", "25", "--address", "auto", "--no-progress"),
    )
    victims = [kind for kind, count in KILLS.items() for _ in range(count)]
    draw.shuffle(victims)
    killed: Counter[str] = Counter()
    cluster = Cluster(tmp_path / "ray", LINGER="1")
    try:
        cluster.add()
        cluster.add()
        attempts = 0
        while True:
            attempts += 1
            with running(line, cluster.env) as driver:
                while driver.poll() is None:
                    busy = [worker for node in cluster.nodes for worker in cluster.workers(node)]
                    if victims and busy and has_receipts(tmp_path / "store"):
                        kind = victims.pop()
                        if kind == "worker":
                            draw.choice(busy).kill()
                        elif kind == "node":
                            cluster.kill(draw.choice(cluster.nodes))
                            cluster.add()
                        else:
                            driver.kill()
                        killed[kind] += 1
                    # Kills come at random times: what they hit must not matter.
                    time.sleep(draw.uniform(0.05, 1.0))
                _, err = driver.communicate()
            if driver.returncode == 0:
                break
            assert driver.returncode == -9, err
    finally:
        cluster.close()
    assert killed == KILLS
    assert attempts == KILLS["driver"] + 1
    recipe = precache.Recipe.from_toml(tmp_path / "recipe.toml")
    assert_as_serial(tmp_path / "store", tmp_path / "in", recipe, 25)


def has_receipts(store: Path) -> bool:
    return any(store.glob("*/_build/receipts/*.json"))


# --- hosts of their own -------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A network namespace with an address of its own on a bridge to this machine's."""

    name: str
    address: str

    def cut(self) -> None:
        """Cut its link."""
        ip("link", "set", f"v{self.name}", "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


_networks = itertools.count()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts and this one, in a network of their own; the first is this one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    number = os.getpid() + next(_networks)  # the kernel takes its time to let go of one
    tag, net = f"{number % 10000:04d}", f"10.{200 + number % 50}.{number % 250}"
    bridge = f"br{tag}"
    found = [Host("", f"{net}.1")]
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge can be made here: {error.stderr.strip()}")
        ip("address", "add", f"{net}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for last in (2, 3):
            host = Host(f"{tag}{last}", f"{net}.{last}")
            found.append(host)
            ip("netns", "add", host.name)
            ip("link", "add", f"v{host.name}", "type", "veth", "peer", "eth0", "netns", host.name)
            ip("link", "set", f"v{host.name}", "master", bridge, "up")
            inside = ("-n", host.name)
            ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            ip(*inside, "link", "set", "eth0", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield found
    finally:
        for host in found[1:]:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)


class Hosts:
    """A cluster with its head here and a node on each other host."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self._folder = folder
        self._sockets = tempfile.mkdtemp(prefix="ray")  # a socket's path may be short only
        token = write(folder / "token", b"0" * 64)
        token.chmod(0o600)
        own = {"HOME": str(folder), "RAY_AUTH_TOKEN_PATH": str(token), "LINGER": "1"}
        self.settings = {**SETTINGS, **own}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address = f"{hosts[0].address}:6399"
        self.env = environment(**self.settings, RAY_ADDRESS=self.address)
        self._here = hosts[0].address

    def head(self) -> None:
        self._start([], "--head", "--port=6399", "--num-cpus=0", f"--node-ip-address={self._here}")

    def node(self, host: Host, private: Path | None = None) -> None:
        """A node on another host, which sees an empty folder in the place of `private`."""
        line = ["ip", "netns", "exec", host.name]
        if private is not None:
            mount = f'mount -t tmpfs none {private} && exec "$@"'
            line += ["unshare", "--mount", "sh", "-c", mount, "sh"]
        where = (f"--address={self.address}", f"--node-ip-address={host.address}")
        self._start(line, "--num-cpus=1", *where)

    def _start(self, before: list[str], *flags: str) -> None:
        log = self._folder / f"{len(self._processes)}.log"
        line = [
            *(*before, str(Path(sys.executable).parent / "ray"), "start", "--block", *flags),
            *("--object-store-memory=80000000", "--disable-usage-stats"),
        ]
        if "--head" in flags:
            line += ["--include-dashboard=false", f"--temp-dir={self._sockets}"]
        with log.open("wb") as out:
            self._processes.append(
                subprocess.Popen(line, env=environment(**self.settings), stdout=out, stderr=out)
            )
        process = self._processes[-1]

        def started() -> bool:
            assert process.poll() is None, log.read_text()
            return b"Ray runtime started" in log.read_bytes()

        poll(started, f"{log} tells of a start")

    def close(self) -> None:
        for process in reversed(self._processes):
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for child in family:
                if not gone(child):
                    child.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_link_that_is_cut_does_not_stop_the_job(hosts: list[Host], tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 1200, classes=("cat", "dog"))
    line = command(
        *("build", tmp_path / "in", tmp_path / "store", "--recipe", recipe_of(tmp_path, 0.02)),
        *("--shard-samples", "25", "--address", "auto", "--json", "--no-progress"),
    )
    cluster = Hosts(hosts, tmp_path)
    try:
        cluster.head()
        for host in hosts[1:]:
            cluster.node(host)
        with running(line, cluster.env) as driver:
            done = (tmp_path / "store").glob
            poll(lambda: len(list(done("*/_build/receipts/*.json"))) > 4, "some shards are done")
            hosts[1].cut()
            began = time.monotonic()
            out, err = driver.communicate(timeout=3 * DEADLINE)
            took = time.monotonic() - began
        assert driver.returncode == 0, err
        assert json.loads(out)["failed"] == 0
        assert took < 120, "seconds"
    finally:
        cluster.close()
    recipe = precache.Recipe.from_toml(tmp_path / "recipe.toml")
    assert_as_serial(tmp_path / "store", tmp_path / "in", recipe, 25)


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("private", ["in", "store"])
def test_local_paths_that_a_node_does_not_share_are_refused(
    hosts: list[Host], tmp_path: Path, private: str
) -> None:
    write_jpegs(tmp_path / "in", 40)
    (tmp_path / "store").mkdir()
    line = command(
        *("build", tmp_path / "in", tmp_path / "store", "--resize", "40", "--crop", "40"),
        *("--shard-samples", "4", "--address", "auto", "--no-progress"),
    )
    cluster = Hosts(hosts, tmp_path)
    try:
        cluster.head()
        cluster.node(hosts[1])
        cluster.node(hosts[2], tmp_path / private)
        with running(line, cluster.env) as driver:
            _, err = driver.communicate(timeout=DEADLINE)
    finally:
        cluster.close()
    assert driver.returncode == 1
    assert f"{tmp_path / private}" in err
    assert "is not shared: 1 of 2 nodes do not see" in err
    assert hosts[2].address in err
    assert "use a URL, or a disk that all nodes mount at the same path" in err
