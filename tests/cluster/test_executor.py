"""Builds in worker processes of this machine, which leave no trace, and on a cluster."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
from PIL import Image

import precache
from precache.errors import BuildError, FetchError
from precache_workers.cluster.executor import run_serial
from precache_workers.cluster.ray_session import joined_ray
from tests.support.building import (
    HELD,
    assert_as_serial,
    build_here,
    cli,
    command,
    contents,
    environment,
    free_ports,
    gone,
    poll,
    remains,
    running,
    write,
    write_jpegs,
)

FLAGS = ("--resize=160", "--interpolation=nearest", "--crop=150", "--shard-samples=2")
LARGE = precache.Recipe.image(resize=160, interpolation="nearest", crop=150)


# --- without Ray --------------------------------------------------------------------------------


def test_the_serial_executor_gives_results_in_order_and_errors_as_values() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1, 5):
            taken.append(item)
            yield item

    def work(item: int) -> int:
        if item == 2:
            raise FetchError("two")
        return item // (item < 4) * 10

    run = run_serial(work, items())
    assert (next(run), taken) == ((1, 10), [1])
    item, error = next(run)
    assert (item, type(error)) == (2, FetchError)
    assert next(run) == (3, 30)
    with pytest.raises(ZeroDivisionError):  # not ours
        next(run)


def test_the_serial_executor_imports_no_ray_a_function_no_torch_and_pyarrow_no_pandas(
    tmp_path: Path,
) -> None:
    """Torch takes a second of CPU time or two, pandas 0.2 s, a tenth of a small build."""
    source = str(write_jpegs(tmp_path / "data/in", 3))
    for name in ("1_a.png", "2_b.png"):  # whose endings are compared
        Image.new("RGB", (30, 30)).save(tmp_path / "data/in" / name)
    code = (
        "import sys, precache\n"
        "ops = [{'op': 'decode'}, {'op': 'function', 'function': 'numpy:flipud', 'version': '1'}]\n"
        "recipe = precache.Recipe.from_dict({'fields': {'image': {'ops': ops}}})\n"
        f"precache.build({source!r}, {str(tmp_path / 'out')!r}, recipe, address='serial')\n"
        "print({'ray', 'torch', 'pandas'} & {*sys.modules})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment(), capture_output=True, text=True
    )
    assert ran.stdout == "set()\n"


# --- worker processes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Embedded:
    """One build in worker processes, from a process with a home of its own."""

    ran: subprocess.CompletedProcess[str]
    home: Path
    store: Path
    source: Path
    processes: tuple[psutil.Process, ...]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Embedded:
    folder = tmp_path_factory.mktemp("embedded")
    source = write_jpegs(folder / "data/in", 20)
    write(source / "cat/broken.jpg", b"none")
    (folder / "home").mkdir()
    report = ("--report", folder / "build.json")
    line = command("build", source, folder / "store", *FLAGS, "--json", "--no-progress", *report)
    env = environment(HOME=str(folder / "home"))
    env.pop("RAY_ADDRESS", None)
    with running(line, env) as process:
        seen = poll(lambda: watch_until_a_worker(process), "a worker has started")
        out, err = process.communicate()
    ran = subprocess.CompletedProcess(line, process.returncode, out, err)
    return Embedded(ran, folder / "home", folder / "store", source, seen)


def watch_until_a_worker(process: subprocess.Popen[str]) -> tuple[psutil.Process, ...]:
    """Return the processes that a process has started, once a worker is among them."""
    assert process.poll() is None, "it ended before it had started a worker"
    children = tuple(psutil.Process(process.pid).children(recursive=True))
    return children if any(is_worker(child) for child in children) else ()


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("precache_workers.cluster.worker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_build_in_worker_processes_is_that_of_a_serial_one_and_leaves_nothing(
    embedded: Embedded, tmp_path: Path
) -> None:
    assert (embedded.ran.returncode, embedded.ran.stderr.count("\n")) == (0, 1)
    assert "each folder is a class" in embedded.ran.stderr
    assert embedded.ran.stdout.count("\n") == 1
    found = json.loads(embedded.ran.stdout)
    assert (found["samples"], found["failed"]) == (21, 1)
    assert found["cpu_seconds"] > 0
    assert {"start", "fetch", "ops", "encode", "put"} <= set(found["timings"])
    result = build_here(embedded.source, tmp_path / "store", LARGE, {"shard_samples": 2})
    assert contents(embedded.store) == contents(tmp_path / "store")
    assert remains(embedded.store) == []
    assert [list(hole) for hole in result.holes] == found["holes"]
    assert (result.mean, result.stored_bytes) == (found["mean"], found["stored_bytes"])
    [node] = json.loads((embedded.store.parent / "build.json").read_text())["nodes"]
    assert (node["node"], node["images"]) == (socket.gethostname(), 21)
    for process in embedded.processes:
        poll(lambda process=process: gone(process), f"{process} has ended")
    # The home has the results of ops' probes alone, below the cache folder.
    files = [path for path in embedded.home.rglob("*") if path.is_file()]
    assert {path.parent for path in files} == {embedded.home / ".cache/precache/ops"}


def held(folder: Path, count: int) -> tuple[list[str], dict[str, str]]:
    """A build whose workers wait for `folder`/go; and the environment that makes them wait."""
    write_jpegs(folder / "data/in", count)
    (folder / "held.toml").write_text(HELD.format(folder=folder / "held", store=folder / "store"))
    (folder / "held").mkdir()
    line = command(
        *("build", folder / "data/in", folder / "store", "--recipe", folder / "held.toml"),
        *("--cpus", "2", "--shard-samples", "2", "--json", "--no-progress", "--label-level", "1"),
    )
    return line, environment(HOLD="1")


def waiting(folder: Path) -> list[int]:
    """Ids of the workers that wait inside a shard."""
    return [int(path.name) for path in (folder / "held").iterdir() if path.name.isdigit()]


@pytest.mark.heavy
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_build_whose_driver_is_ended_ends_its_workers_and_the_same_command_finishes_it(
    sent: signal.Signals, tmp_path: Path
) -> None:
    line, env = held(tmp_path, 12)
    with running(line, env) as process:
        poll(lambda: len(waiting(tmp_path)) == 2, "two workers are inside a shard")
        family = psutil.Process(process.pid).children(recursive=True)
        assert set(waiting(tmp_path)) <= {child.pid for child in family}
        process.send_signal(sent)
        out, err = process.communicate()
        for child in family:
            poll(lambda child=child: gone(child), f"{child} ended with its driver")
    assert out == ""
    assert "Traceback" not in err
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert err.splitlines()[-1].startswith("precache: interrupted; what was done is kept")
    assert not (tmp_path / "store/commits").exists()
    (tmp_path / "held/go").touch()
    ran = cli(*line[3:], "--address", "serial")
    assert ran.returncode == 0, ran.stderr
    recipe = precache.Recipe.from_toml(tmp_path / "held.toml")
    assert_as_serial(tmp_path / "store", tmp_path / "data/in", recipe, 2)


@pytest.mark.heavy
def test_a_build_whose_worker_was_killed_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    line, env = held(tmp_path, 12)
    with running(line, env) as process:
        poll(lambda: len(waiting(tmp_path)) == 2, "two workers are inside a shard")
        os.kill(waiting(tmp_path)[0], signal.SIGKILL)
        poll(lambda: len(waiting(tmp_path)) == 3, "another worker took the shard over")
        (tmp_path / "held/go").touch()
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert err == ""
    assert out.startswith("{")
    assert json.loads(out)["failed"] == 0
    recipe = precache.Recipe.from_toml(tmp_path / "held.toml")
    assert_as_serial(tmp_path / "store", tmp_path / "data/in", recipe, 2)


@pytest.mark.heavy
def test_a_sample_that_kills_every_worker_is_a_clear_error(tmp_path: Path) -> None:
    """As a decoder that crashes would; it is tried a few times and then named."""
    write_jpegs(tmp_path / "data/in", 4)
    (tmp_path / "deadly.py").write_text(
        "import os, signal\ndef die(array):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nops = [{ op = "decode" }, { op = "function", function = "deadly:die" }]\n'
    )
    ran = cli(
        *("build", "data/in", "store", "--recipe", "recipe.toml", "--no-progress", "--cpus", "1"),
        cwd=tmp_path,
    )
    assert ran.returncode == 2
    assert "cat/0000.jpg: decoding it kills the worker" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.splitlines()) < 10
    assert ran.stdout == ""


@pytest.mark.heavy
def test_an_error_in_a_task_is_not_called_a_death(tmp_path: Path) -> None:
    """Labels that are no numbers, say: the same text as from the serial executor."""
    (tmp_path / "named.py").write_text(
        "import numpy as np\n"
        "def make():\n"
        "    return [(np.zeros((8, 8, 3), np.uint8), name) for name in ('cat', 'dog')]\n"
    )
    texts = []
    for address in ("serial", "local"):
        ran = cli(
            *("build", "python:named:make", "store", "--no-progress", "--address", address),
            cwd=tmp_path,
        )
        assert ran.returncode in (1, 2)
        assert "Traceback" not in ran.stderr
        texts.append(ran.stderr)
    assert "worker died" not in texts[1]
    assert texts[0] == texts[1]


@pytest.mark.heavy
def test_a_function_from_the_current_folder_reaches_the_workers(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "data/in", 4)
    (tmp_path / "mine.py").write_text("def invert(array):\n    return 255 - array\n")
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nops = [{ op = "decode" }, '
        '{ op = "function", function = "mine:invert" }]\ncodec = "raw"\n'
    )
    flags = ("--recipe", "recipe.toml", "--no-progress", "--json")
    ran = cli("build", "data/in", "local", *flags, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    ran = cli("build", "data/in", "serial", *flags, "--address", "serial", cwd=tmp_path)
    assert contents(tmp_path / "local") == contents(tmp_path / "serial")


# --- a cluster that runs already ----------------------------------------------------------------


@pytest.mark.parametrize("address", ["auto", pytest.param("ray://", marks=pytest.mark.heavy)])
def test_no_cluster_to_join_is_a_clear_error(address: str, tmp_path: Path) -> None:
    write_jpegs(tmp_path / "data/in", 3)
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    address += nowhere if address == "ray://" else ""
    ran = cli(
        *("build", tmp_path / "data/in", tmp_path / "store", *FLAGS, "--address", address),
        "--no-progress",
        env=environment(RAY_ADDRESS=nowhere, RAY_gcs_rpc_server_reconnect_timeout_s="1"),
    )
    assert ran.returncode == 1
    *first, last = ran.stderr.splitlines()
    assert last.startswith("precache: ")
    assert all("each folder is a class" in line for line in first), "nothing of Ray's own"
    assert f"cannot reach the Ray cluster at {address}" in ran.stderr
    assert "start one with `ray start --head`, or use --address local" in ran.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", ["of Ray's server", "of a channel", "of a call"])
def test_a_cluster_that_ends_while_it_is_joined_is_lost(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grpc
    import ray

    errors = {
        "of Ray's server": AssertionError(),
        "of a channel": ValueError("Cannot invoke RPC on closed channel!"),
        "of a call": grpc.RpcError(),
    }
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=errors[kind]))
    with pytest.raises(BuildError, match=r"lost the connection to auto: .* same command again"):
        joined_ray("auto").__enter__()


def test_whatever_fails_once_a_client_has_no_connection_is_due_to_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "init", mock.Mock())
    with (
        pytest.raises(BuildError, match="lost the connection to ray://there: it ended; once"),
        joined_ray("ray://there"),
    ):
        raise AssertionError


@pytest.mark.heavy
def test_one_process_builds_twice_and_leaves_its_own_ray_alone(tmp_path: Path) -> None:
    """As a notebook does."""
    source = str(write_jpegs(tmp_path / "data/in", 4))
    code = (
        "import os, ray, precache\n"
        "os.environ.update(RAY_USAGE_STATS_ENABLED='0')\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False,\n"
        "         logging_level='ERROR')\n"
        "for name in ('one', 'two'):\n"
        f"    result = precache.build({source!r}, {str(tmp_path)!r} + '/' + name)\n"
        "    print(result.samples, result.failed, ray.is_initialized())\n"
    )
    line, env = [sys.executable, "-c", code], environment(HOME=str(tmp_path))
    ran = subprocess.run(line, check=False, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "4 0 True\n" * 2
