"""deploy/slurm.sbatch under a real Slurm: two nodes on this machine, with daemons of their own."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import precache
from tests.support import building
from tests.support.building import (
    HELD,
    REPOSITORY,
    environment,
    free_ports,
    poll,
    running,
    write_jpegs,
)

SCRIPT = REPOSITORY / "deploy/slurm.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
KillWait=2
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=2
PartitionName=spare Nodes=ALL Default=YES State=UP
"""

pytestmark = [
    pytest.mark.heavy,
    # Two clusters of Ray are started one after another in a job that is requeued.
    pytest.mark.timeout(600),
]


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes; `folder` has its files."""

    folder: Path

    def run(self, *line: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm's, with this Python's precache and ray on the PATH."""
        return subprocess.run(
            list(map(str, line)),
            check=False,
            env=environment(
                SLURM_CONF=str(self.folder / "slurm.conf"),
                PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                **variables,
            ),
            capture_output=True,
            text=True,
        )

    @contextlib.contextmanager
    def job(self, folder: Path, nodes: int, *options: object, **variables: str) -> Iterator[str]:
        """The number of a job that builds ``folder/in`` into ``folder/store``."""
        submitted = self.run(
            *("sbatch", "--parsable", f"--nodes={nodes}", "--cpus-per-task=1"),
            *(f"--output={folder}/log", SCRIPT, folder / "in", folder / "store", *options),
            **variables,
        )
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.strip()
        try:
            yield job
        finally:
            self.run("scancel", job)

    def end(self, job: str) -> str:
        """How a job ended."""
        under_way = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        return str(poll(lambda: (s := self.state(job)) not in under_way and s, f"{job} ended"))

    def state(self, job: str) -> str:
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = {name: shutil.which(name, path=path) for name in (*DAEMONS, "sbatch", "scontrol")}
    missing = [name for name, program in programs.items() if program is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt install munge slurmctld slurmd slurm-client")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    cluster = Slurm(folder)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder, host=socket.gethostname(), user=getpass.getuser(), ports=free_ports(3)
        )
    )
    munge = [
        *("--foreground", "--force", f"--key-file={folder}/munge.key"),
        *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
        *(f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munged.log"),
    ]
    env = environment(SLURM_CONF=str(folder / "slurm.conf"))
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(running([str(programs["munged"]), *munge], env))
        poll((folder / "munge.socket").exists, "munged listens")
        for name, options in (
            ("slurmctld", ()),
            ("slurmd", ("-N", "n1")),
            ("slurmd", ("-N", "n2")),
        ):
            log = ("-L", str(folder / f"{name}{''.join(options[1:])}.log"))
            daemons.enter_context(running([str(programs[name]), "-D", *options, *log], env))
        idle = ("sinfo", "--noheader", "--Node", "--format=%T")
        poll(lambda: cluster.run(*idle).stdout.split() == ["idle"] * 2, "two nodes are idle")
        yield cluster


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two states of a job a whole cluster of Ray may start or end."""
    monkeypatch.setattr(building, "DEADLINE", 240.0)


def left_over(job: str) -> list[object]:
    """Processes and folders of a job's Ray."""
    folder = Path(f"/tmp/precache-{job}")
    found: list[object] = [folder] if folder.exists() else []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


def test_a_job_builds_on_its_nodes_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 12)
    with slurm.job(tmp_path, 2, "--resize", "32", "--crop", "32") as job:
        assert slurm.end(job) == "COMPLETED", (tmp_path / "log").read_text()
    version = precache.open(tmp_path / "store")
    assert (version.rows, len(version.holes)) == (12, 0)
    assert precache.verify(tmp_path / "store").ok
    poll(lambda: not left_over(job), "nothing of the job's is left")


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm, tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 12)
    (tmp_path / "held").mkdir()
    held = HELD.format(folder=tmp_path / "held", store=tmp_path / "store")
    (tmp_path / "held.toml").write_text(held)
    options = ("--recipe", tmp_path / "held.toml", "--shard-samples", "2")
    with slurm.job(tmp_path, 1, *options, HOLD="1") as job:
        poll(
            lambda: any((tmp_path / "held").iterdir()) or slurm.state(job) == "FAILED",
            "a worker is inside a shard",
        )
        assert slurm.run("scontrol", "requeue", job).returncode == 0, slurm.state(job)
        poll(lambda: slurm.state(job) == "PENDING", "the job waits to be run again")
        assert not (tmp_path / "store/commits").exists()
        (tmp_path / "held/go").touch()
        poll(lambda: slurm.state(job) != "PENDING", "it is run again")
        assert slurm.end(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert precache.open(tmp_path / "store").rows == 12
    poll(lambda: not left_over(job), "nothing of the job's is left")
