"""Builds as jobs of a real Ray head: followed, left alone, attached to again, stopped."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import precache
from precache.cli.main import main
from precache.errors import BuildError, UsageError
from precache.store.build_status import BuildStatus
from precache_workers.driver.build_result import BuildResult
from precache_workers.jobs import job_server
from precache_workers.jobs.job_server import TimedClient, connect
from precache_workers.jobs.submission import ClusterJob, _own_lines, _reason, _result
from tests.support.building import (
    build_here,
    cli,
    command,
    contents,
    pixels,
    poll,
    remains,
    running,
    write,
    write_jpegs,
)
from tests.support.jobhead import JobHead
from tests.support.servers import S3Server, web_server

SECRET = "a-secret-that-nobody-may-see"
MODULE = '''
import time
from pathlib import Path

def hold(array, store, go, shards):
    """Wait for `go` once some shards of the store are done."""
    while len(list(Path(store).glob("*/_build/receipts/*"))) >= shards and not Path(go).exists():
        time.sleep(0.01)
    return array
'''


@pytest.fixture(scope="module")
def head() -> Iterator[JobHead]:
    head = JobHead(PHOTOS_KEY="someone", PHOTOS_SECRET=SECRET)
    yield head
    head.close()


@dataclass(frozen=True)
class Work:
    """A build that pauses when `shards` of its five shards are done, until `go` is called."""

    folder: Path
    head: JobHead
    shards: int = 1

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def prepare(self) -> None:
        write_jpegs(self.folder / "in", 9)
        write(self.folder / "in/dog/broken.jpg", b"no photo")
        write(self.folder / "code/held.py", MODULE.encode())
        op = {"op": "function", "function": "held:hold", "version": "1", "params": self.params()}
        recipe = {"fields": {"image": {"ops": [*self.ops(), op]}}}
        write(self.folder / "recipe.json", json.dumps(recipe).encode())

    def params(self) -> dict[str, Any]:
        return {"store": str(self.store), "go": str(self.folder / "go"), "shards": self.shards}

    def ops(self) -> list[dict[str, Any]]:
        return [{"op": "decode"}, {"op": "resize", "size": [150, 150]}]

    def line(self, *more: str) -> list[object]:
        recipe = (self.folder / "recipe.json").read_text()
        line: list[object] = ["submit", self.folder / "in", self.store, "--recipe", recipe]
        return [*line, "--code", self.folder / "code", "--shard-samples", "2", *more]

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return cli(*arguments, env=self.head.env, cwd=self.folder)

    def json(self, *arguments: object) -> Any:
        ran = self.run(*arguments, "--json")
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("\n") == 1, ran.stdout
        return json.loads(ran.stdout)

    def begins(self, job: str) -> None:
        """Wait until the job has reached its pause."""

        def begun() -> bool:
            details = self.head.job(job)
            assert details["status"] in ("PENDING", "RUNNING"), details
            return len(list(self.store.glob("*/_build/receipts/*"))) >= self.shards

        poll(begun, "the job waits in the middle")

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.mark.heavy
def test_a_job_goes_on_without_its_client_and_makes_what_a_build_here_makes(
    head: JobHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that follows it is killed, others come."""
    work = Work(tmp_path, head)
    work.prepare()
    line = work.line("--storage-options-env", "secret=PHOTOS_SECRET")
    with running(command(*line), head.env, work.folder) as client:
        assert client.stderr is not None
        said = client.stderr.readline()
        found = re.search(r"job (\S+) is submitted", said)
        assert found, said + client.stderr.read()
        job = found.group(1)
        work.begins(job)
        again = work.json(*line, "--no-wait")
        client.kill()
    assert (again["job"], again["attached"]) == (job, True)
    other = work.run(*work.line("--max-failures", "3"))
    assert other.returncode == 2
    assert f"job {job} builds into {work.store} with other" in other.stderr
    assert f"ray job stop {job} --address http://127.0.0.1:" in other.stderr
    listing = precache.versions(work.store)  # needs no cluster
    assert not listing.versions
    assert [each.build for each in listing.unfinished] == [BuildStatus(rows=10, shards=5, done=1)]
    listed = (head.get("/api/jobs/") or b"").decode() + json.dumps(head.job(job))
    with running(command(*line), head.env, work.folder) as client:
        assert client.stderr is not None
        said = client.stderr.readline()  # before the build may end
        work.go()
        out, err = client.communicate()
    assert client.returncode == 0, err
    assert f"job {job} is already running" in said
    assert f"10 samples in 3 classes in {work.folder}/in" in said + err
    assert "Running entrypoint" not in err
    assert "samples          10, 1 failed" in out
    assert "hole: dog/broken.jpg" in out
    # A secret of the nodes is nowhere to be seen.
    assert job in listed
    assert r"\"storage_options_env\":{\"secret\":\"PHOTOS_SECRET\"}" in listed
    log = (head.get(f"/api/jobs/{job}/logs") or b"").decode()
    assert "is complete" in log
    assert SECRET not in listed + log
    assert head.files_with(job)
    assert head.files_with(SECRET) == []
    assert precache.verify(work.store).ok
    assert remains(work.store) == []
    monkeypatch.syspath_prepend(str(work.folder / "code"))
    recipe = precache.Recipe.from_dict(json.loads((work.folder / "recipe.json").read_text()))
    build_here(work.folder / "in", tmp_path / "here", recipe, {"shard_samples": 2})
    assert contents(work.store) == contents(tmp_path / "here")


# --- stopping and going on ----------------------------------------------------------------------


@pytest.mark.heavy
def test_a_job_is_stopped_by_ray_and_goes_on_when_submitted_again(
    head: JobHead, tmp_path: Path
) -> None:
    work = Work(tmp_path, head, shards=2)
    work.prepare()
    with running(command(*work.line()), head.env, work.folder) as client:
        assert client.stderr is not None
        found = re.search(
            r"job (\S+) is submitted; to stop it: ray (.+)\n", client.stderr.readline()
        )
        assert found
        job = found.group(1)
        work.begins(job)
        ray = [sys.executable, "-m", "ray.scripts.scripts", *found.group(2).split()]
        subprocess.run(ray, check=True, env=head.env, capture_output=True)
        assert "submit the build again to continue it" in client.communicate()[1]
    [unfinished] = work.json("ls", work.store)["unfinished"]
    assert unfinished["build"]["done"] == 2
    work.go()
    done = work.json(*work.line())
    assert done["job"] != job
    assert done["job"][:-1] == job[:-1]
    assert (done["result"]["shards"], done["result"]["shards_skipped"]) == (5, 2)
    head.delete(job)  # one of two, of which the other has ended, too
    again = work.json(*work.line())
    assert again["job"] not in (job, done["job"])
    assert not again["attached"]
    assert again["result"]["shards_skipped"] == 5


@pytest.mark.heavy
def test_ctrl_c_ends_the_following_and_not_the_job(head: JobHead, tmp_path: Path) -> None:
    work = Work(tmp_path, head)
    work.prepare()
    with running(command(*work.line()), head.env, work.folder) as client:
        assert client.stderr is not None
        found = re.search(r"job (\S+) is submitted", client.stderr.readline())
        assert found
        job = found.group(1)
        work.begins(job)
        client.send_signal(signal.SIGINT)
        _, said = client.communicate()
    assert client.returncode == 130
    assert f"the job continues; to see its progress: ray job logs --follow {job} --address" in said
    assert "Traceback" not in said
    work.go()
    poll(lambda: head.job(job)["status"] == "SUCCEEDED", "the job has ended")


@pytest.mark.heavy
def test_a_job_reads_secrets_from_the_environment_of_its_nodes(
    head: JobHead, tmp_path: Path, s3: S3Server
) -> None:
    write_jpegs(tmp_path / "in", 4)
    code = (
        "import sys, json, precache\n"
        "recipe = precache.Recipe.image(resize=32, crop=30)\n"
        "job = precache.submit(sys.argv[1], 's3://bucket/submitted.store', recipe,\n"
        "                      storage_options=json.loads(sys.argv[2]),\n"
        "                      storage_options_env=json.loads(sys.argv[3]),\n"
        "                      shard_samples=16, progress=False)\n"
        "result = job.wait()\n"
        "print(result.samples, result.path, job.attached)\n"
    )
    plain = {name: s3.options()[name] for name in ("endpoint_url", "client_kwargs")}
    by_name = {"key": "PHOTOS_KEY", "secret": "PHOTOS_SECRET"}
    line = ["-c", code, str(tmp_path / "in"), json.dumps(plain), json.dumps(by_name)]
    ran = subprocess.run(
        [command()[0], *line], check=False, env=head.env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    samples, path, attached = ran.stdout.split()
    assert (samples, attached) == ("4", "False")
    assert path.startswith("s3://bucket/submitted.store/")
    assert len(pixels("s3://bucket/submitted.store", storage_options=s3.options())) == 4
    assert head.files_with(SECRET) == []


@pytest.mark.heavy
def test_a_cluster_with_tokens(tmp_path: Path) -> None:
    head = JobHead(token="0123456789abcdef" * 4)
    try:
        write_jpegs(tmp_path / "in", 4)
        line = "submit", tmp_path / "in", tmp_path / "store", "--storage-options", "anon=true"
        without = {n: v for n, v in head.env.items() if not n.startswith("RAY_AUTH")}
        other = {**head.env, "RAY_AUTH_TOKEN": "f" * 64}
        for env in (without, {**without, "RAY_AUTH_MODE": "token"}, other):
            ran = cli(*line, env=env)
            assert ran.returncode == 1
            assert f"the Ray cluster at {head.address} refused access: " in ran.stderr
            assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_" in ran.stderr
            assert ran.stderr.count("\n") == 1
        path = write(tmp_path / "token", head.token.encode())
        path.chmod(0o600)
        by_file = {**without, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        ran = cli(*line, env=by_file)
        assert ran.returncode == 0, ran.stderr
        assert precache.verify(tmp_path / "store").ok
    finally:
        head.close()


# --- without a cluster --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "variables", "said"),
    [
        (
            "http://127.0.0.1:1", {},
            "at http://127.0.0.1:1: .*Connection refused; give --address http://HEAD:8265",
        ),
        (
            "http://127.0.0.1:2", {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"},
            "at http://127.0.0.1:2: ",
        ),
        ("", {"RAY_ADDRESS": "127.0.0.1:1"}, "at 127.0.0.1:1: "),
        ("of a web server", {}, r"at http://127.0.0.1:\d+\D"),
    ],
)  # fmt: skip
def test_an_address_where_no_job_server_answers(
    address: str, variables: dict[str, str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with web_server(tmp_path) as url:
        flags = [f"--address={url if ' ' in address else address}"] * bool(address)
        assert main(["submit", str(tmp_path / "in"), str(tmp_path / "store"), *flags]) in (1, 2)
    [line] = capfd.readouterr().err.splitlines()
    assert re.match(f"precache: no Ray job server answers {said}", line), line


@pytest.mark.parametrize("address", ["ray://head:10001", "head:8265", "local", "serial"])
def test_an_address_of_no_job_server(address: str) -> None:
    with pytest.raises(UsageError, match=f"the address {address} is none of a job server"):
        connect(address)


def test_an_address_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "FIRST_ANSWER", 0.2)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BuildError, match=f"answers at {address}: no answer within 0.2 s"):
            connect(address)
    assert "RAY_API_SERVER_ADDRESS" not in os.environ


class Cluster:
    """A client of a job server that runs each job at once, in this process, and keeps its log."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.jobs: dict[str, SimpleNamespace] = {}
        self.capsys = capsys

    def list_jobs(self) -> list[SimpleNamespace]:
        return [*self.jobs.values()]

    def submit_job(
        self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, str],
        metadata: dict[str, str],
    ) -> None:  # fmt: skip
        *python, command, text = shlex.split(entrypoint)
        assert (python, command) == (["python", "-m", "precache"], "job")
        document = json.loads(text)
        document["options"]["address"] = "serial"
        with contextlib.chdir(runtime_env.get("working_dir", ".")):
            status = main(["job", json.dumps(document)])
        ran = self.capsys.readouterr()
        self.jobs[submission_id] = SimpleNamespace(
            submission_id=submission_id, metadata=metadata, message="", driver_exit_code=status,
            status=SimpleNamespace(value="FAILED" if status else "SUCCEEDED"),
            log=f"Running entrypoint for job {submission_id}: python\n{ran.err}{ran.out}",
        )  # fmt: skip

    def get_job_info(self, job: str) -> SimpleNamespace:
        return self.jobs[job]

    def get_job_logs(self, job: str) -> str:
        return str(self.jobs[job].log)

    def tail_job_logs(self, job: str) -> Iterator[str]:
        yield self.jobs[job].log


def test_a_build_is_submitted_once_and_ends_as_its_job_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(capsys)
    place = "precache_workers.jobs.submission.connect"
    monkeypatch.setattr(place, lambda address: (cluster, "http://head:8265"))
    write_jpegs(tmp_path / "in", 4)
    write(tmp_path / "classes.txt", b"cat\ndog\neel\nfox\n")
    line = ["submit", str(tmp_path / "in"), str(tmp_path / "store")]
    line += ["--classes", str(tmp_path / "classes.txt")]

    def ran(*flags: str) -> tuple[int, str, str]:
        status = main([*line, *flags])
        return status, *capsys.readouterr()

    assert ran("--resize", "32", "--crop", "32")[0] == 0
    [job] = cluster.list_jobs()
    assert job.submission_id == f"precache-{job.metadata['precache_build']}-1"
    assert precache.open(tmp_path / "store").classes == ("cat", "dog", "eel", "fox")
    options, recipe = {"classes": line[-1]}, precache.Recipe.image(resize=32, crop=32)
    build_here(tmp_path / "in", tmp_path / "here", recipe, options)
    assert contents(tmp_path / "store") == contents(tmp_path / "here")
    again = json.loads(ran("--resize", "32", "--crop", "32", "--json")[1])
    assert (again["job"][-2:], again["attached"]) == ("-2", False)
    assert again["result"]["shards_skipped"] == again["result"]["shards"]

    cluster.jobs[again["job"]].status.value = "RUNNING"
    joined = json.loads(ran("--resize", "32", "--crop", "32", "--json", "--no-wait")[1])
    assert (joined["job"], joined["attached"]) == (again["job"], True)
    status, _, said = ran("--resize", "40", "--crop", "32")
    assert status == 2
    assert f"job {again['job']} builds into {tmp_path}/store with other options or code" in said
    assert f"ray job stop {again['job']} --address http://head:8265" in said

    line[1:3] = [str(tmp_path / "nowhere"), str(tmp_path / "other")]
    status, _, said = ran()
    assert status == 2
    why = f"failed: the source {tmp_path}/nowhere does not exist; give a folder of images"
    assert why in " ".join(said.split())


class Server:
    """A client of a job server: a job that has ended, and the chunks in which its log comes."""

    def __init__(self, *tails: list[str]) -> None:
        self.tails = list(tails)
        self.asked = 0
        self.log = "".join(tails[-1])

    def get_job_info(self, job: str) -> SimpleNamespace:
        self.asked += 1
        state = "RUNNING" if len(self.tails) > 1 else "SUCCEEDED"
        return SimpleNamespace(
            metadata={"precache_store": "/in/store"},
            status=SimpleNamespace(value=state),
            start_time=None,
            end_time=None,
            message="",
            driver_exit_code=0,
        )

    def get_job_logs(self, job: str) -> str:
        return self.log

    def tail_job_logs(self, job: str) -> Iterator[str]:
        yield from self.tails[0]
        if len(self.tails) > 1:
            del self.tails[0]
            raise RuntimeError("WebSocket connection closed unexpectedly")


def test_a_job_out_of_reach_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def get_job_info(self, job: str) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr("precache_workers.jobs.submission.UNREACHABLE_SECONDS", 0)
    monkeypatch.setattr("precache_workers.jobs.submission.POLL_EVERY", 0)
    job = ClusterJob(Gone(), "http://head:8265", "precache-0123456789ab-1")
    with pytest.raises(BuildError, match="the job may go on: ray job status precache-01"):
        job.wait(print)


def test_each_line_of_a_log_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though chunks end within lines, and a connection that breaks brings them all again."""
    monkeypatch.setattr("precache_workers.jobs.submission.POLL_EVERY", 0)
    lines = ["Running entrypoint for job x\n", "one\n", "", "\n(raylet)\ta tab\nthr", "ee\n"]
    lines += [json.dumps(dataclasses.asdict(RESULT)), "\nlast"]
    server = Server(lines[:4], lines)
    told: list[str] = []
    job = ClusterJob(server, "http://head:8265", "precache-0123456789ab-1")
    assert job.wait(told.append) == RESULT
    assert told == ["one", "(raylet)        a tab", "three", "last"]
    assert server.asked == 5, "before each log, when it is silent, and at its end"


def test_a_log_is_followed_on_a_thread_of_its_own_and_silence_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_server, "SILENT", 0.05)
    speak = threading.Event()

    class Client:
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "one"
            await asyncio.to_thread(speak.wait)
            yield "two"
            if job == "breaks":
                raise RuntimeError("closed")

    for job in ("ends", "breaks"):
        speak.clear()
        chunks = TimedClient(Client()).tail_job_logs(job)
        assert [next(chunks), next(chunks)] == ["one", ""]
        speak.set()
        assert next(filter(None, chunks)) == "two"
        with contextlib.nullcontext() if job == "ends" else pytest.raises(RuntimeError):
            assert not any(chunks)


@pytest.mark.parametrize("log", ["", "9 samples in /in\n"])
def test_a_job_that_succeeded_and_whose_log_is_lost_is_not_to_be_submitted_again(log: str) -> None:
    job = ClusterJob(Server([log]), "http://head:8265", "precache-0123456789ab-1")
    with pytest.raises(BuildError) as raised:
        job.wait()
    assert str(raised.value) == (
        "job precache-0123456789ab-1 succeeded, and the cluster has lost its log with the result; "
        "the store has the version: precache info /in/store"
    )


@pytest.mark.parametrize(
    ("module", "library"), [("ray.job_submission", "ray"), ("aiohttp", "aiohttp")]
)
def test_a_library_that_is_missing_is_named(
    module: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"submitting needs {library}: pip install 'precache.work"):
        precache.submit("/in", "/out", address="http://127.0.0.1:1")


# --- parsing a log ---------------------------------------------------------------------------

RESULT = BuildResult(
    version="3f2a",
    path="/s/3f2a",
    samples=9,
    failed=1,
    shards=5,
    shards_skipped=0,
    raw_bytes=10,
    stored_bytes=5,
    holes=[("a", "b")],
    classes=("c",),
)
LOG = f"""\
Running entrypoint for job x: python -m precache build in out
9 samples in 3 classes in /in
2 of 9 samples, 3/s, 0:00:02 left
Committing

{json.dumps(dataclasses.asdict(RESULT))}
"""


def test_the_result_is_found_in_a_log() -> None:
    lines = _own_lines(LOG)
    assert lines[0] == "9 samples in 3 classes in /in"
    assert _result(lines[-1]) == RESULT
    of_later = json.dumps({**json.loads(lines[-1]), "more": 1})
    assert _result(of_later) == RESULT
    for line in ('{"version": "3f2a"}', '{"version', "Version 3f2a is complete", ""):
        assert _result(line) is None


def test_the_reason_is_what_precache_said_last() -> None:
    assert _reason(["precache: one", "precache: two", "later"], "message") == "two"
    assert _reason(["Traceback", "ValueError: x", ""], "message") == "ValueError: x"
    assert _reason([], "the runtime environment\nfailed") == "the runtime environment"
    other = _reason(["/usr/bin/python: No module named precache"], "")
    assert other.startswith("/usr/bin/python: No module named precache, and here it is ")
    assert sys.executable in other
