"""Which rank a process is, whoever started it."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precache
from precache.errors import UsageError
from precache.loading import ranks
from precache.loading.options import find_device
from precache.loading.ranks import find_local_rank, find_local_size, find_rank
from tests.conftest import BuiltStore
from tests.support.building import environment
from tests.support.loaders import assert_refused, epoch_of, flat, opened, valid_rows


def launch(monkeypatch: pytest.MonkeyPatch, variables: str) -> dict[str, str]:
    """Set what a launcher sets, and nothing that another launcher sets."""
    environment = dict(part.split("=") for part in variables.split())
    monkeypatch.setattr(os, "environ", environment)
    return environment


JOB = "SLURM_JOB_ID=7 SLURM_PROCID=0"
TORCHRUN = "TORCHELASTIC_RUN_ID=x RANK={} WORLD_SIZE={}"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", (0, 1)),
        ("RANK=3 WORLD_SIZE=4", (3, 4)),
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", (1, 2)),
        ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=6", (5, 6)),
        ("MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=6 PMI_SIZE=6", (5, 6)),
        ("MVP_COMM_WORLD_RANK=5 MVP_COMM_WORLD_SIZE=6", (5, 6)),
        ("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", (2, 4)),
        ("JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2", (1, 2)),
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2", (1, 2)),
        ("HOROVOD_RANK=1 HOROVOD_SIZE=2", (1, 2)),
        ("MPT_MPI_RANK=1 MPT_MPI_SIZE=2", (1, 2)),
        ("MPI_RANKID=1 MPI_NRANKS=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 2)),
        ("PADDLE_TRAINER_ID=1 PADDLE_TRAINERS_NUM=2", (1, 2)),
        ("JAX_PROCESS_ID=1 JAX_NUM_PROCESSES=2", (1, 2)),
        ("JAX_PROCESS_INDEX=1 JAX_PROCESS_COUNT=2", (1, 2)),
        ("DMLC_RANK=1 DMLC_NUM_WORKER=2", (1, 2)),
        # Nodes and daemons have numbers of their own.
        (f"{TORCHRUN.format(5, 8)} NODE_RANK=1 NNODES=2", (5, 8)),
        ("PMI_RANK=5 PMI_SIZE=8 LSF_PM_TASKID=2 LSB_DJOB_NUMPROC=8", (5, 8)),
        ("NODE_RANK=0 NNODES=1", (0, 1)),
        ("PET_NODE_RANK=0 PET_NNODES=1", (0, 1)),
        (f"{TORCHRUN.format(5, 8)} PET_NODE_RANK=1 PET_NNODES=1:2", (5, 8)),
        ("LSF_PM_TASKID=1 LSB_DJOB_NUMPROC=1", (0, 1)),
        ("GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", (0, 1)),
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2", (5, 8)),
        ('SM_CURRENT_HOST=algo-1 SM_HOSTS=["algo-1"]', (0, 1)),
        ("TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost", (0, 1)),
        ("CLOUD_TPU_TASK_ID=0 TPU_PROCESS_ADDRESSES=10.0.0.1:8476", (0, 1)),
        ("SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=1", (0, 1)),
        ("VC_TASK_INDEX=0 VC_WORKER_NUM=1", (0, 1)),
        ("RANK=1 WORLD_SIZE=2 JOB_COMPLETION_INDEX=1", (1, 2)),
        ("XRT_SHARD_ORDINAL=0 XRT_SHARD_WORLD_SIZE=1", (0, 1)),
        ("RANK=3 WORLD_SIZE=4 XRT_SHARD_ORDINAL=1 XRT_SHARD_WORLD_SIZE=2", (3, 4)),
        ('TF_CONFIG={"cluster":{"chief":["a:1"]},"task":{"type":"chief","index":0}}', (0, 1)),
        ('TF_CONFIG={"cluster":{},"task":{"type":"chief","index":0}}', (0, 1)),
        ('RANK=1 WORLD_SIZE=2 TF_CONFIG={"cluster":{"worker":["a:1","b:1"]}}', (1, 2)),
        ("LSB_DJOB_NUMPROC=8", (0, 1)),
        ("PBS_NODENUM=0", (0, 1)),
        # Slurm's other names, within a step.
        ("SLURM_PROCID=3 SLURM_NTASKS=4", (3, 4)),
        ("SLURM_PROCID=3 SLURM_NPROCS=4", (3, 4)),
        (f"{JOB} SLURM_STEP_ID=0 SLURM_NTASKS=4", (0, 4)),
        # A batch script or an interactive shell of a job for one process.
        (JOB, (0, 1)),
        (f"{JOB} SLURM_TASKS_PER_NODE=64", (0, 1)),
        (f"{JOB} SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1", (0, 1)),
        (f"{JOB} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8", (0, 1)),
        # torchrun and mpirun within a job, a batch script or a step.
        ("RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8", (1, 2)),
        (f"{TORCHRUN.format(0, 1)} SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8", (0, 1)),
        (f"{TORCHRUN.format(1, 2)} PMIX_RANK=0 {JOB} SLURM_NTASKS=8", (1, 2)),
        (f"RANK=0 WORLD_SIZE=1 {JOB} SLURM_NTASKS=8", (0, 1)),
        (f"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=3 {JOB} SLURM_NTASKS=8", (3, 4)),
        ("PMI_RANK=1 PMI_SIZE=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", (1, 4)),
        # Hydra and orted are started by srun, one for each node.
        (
            "PMI_RANK=5 PMI_SIZE=8 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2",
            (5, 8),
        ),
        # Others than torchrun that start processes on each node.
        ("RANK=5 WORLD_SIZE=8 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", (5, 8)),
        ("RANK=1 WORLD_SIZE=4 PMIX_RANK=0", (1, 4)),
        # Several that agree.
        ("RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", (1, 2)),
        ("PMI_RANK=1 PMI_SIZE=4 PMIX_RANK=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4", (1, 4)),
        ("PALS_RANKID=1 PMI_RANK=1 PMI_SIZE=4", (1, 4)),
        ("PMIX_RANK=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", (0, 1)),
        ("WORLD_SIZE=4 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4", (3, 4)),
        ("RANK= WORLD_SIZE= PMI_RANK=1 PMI_SIZE=2", (1, 2)),
        # A size of one says it all.
        ("WORLD_SIZE=1", (0, 1)),
        ("LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", (0, 1)),
    ],
)
def test_launchers_say_it_in_the_environment(
    variables: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, variables)
    assert find_rank() == expected


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ("PMIX_RANK=0", "PMIX_RANK='0'"),
        ("PMIX_RANK=3 PMIX_LOCAL_RANK=1", "PMIX_RANK='3'"),
        ("PALS_RANKID=0 PALS_LOCAL_SIZE=4", "PALS_RANKID='0'"),
        ("RANK=0", "RANK='0'"),
        ("WORLD_SIZE=2 LOCAL_RANK=0", "WORLD_SIZE='2'"),
        ("PMI_RANK=1", "PMI_RANK='1'"),
        ("MPT_MPI_RANK=1", "MPT_MPI_RANK='1'"),
        ("PADDLE_TRAINER_ID=1", "PADDLE_TRAINER_ID='1'"),
        ("ALPS_APP_PE=1", "ALPS_APP_PE='1'"),
        ("MP_CHILD=1", "MP_CHILD='1'"),
        ("LSF_PM_TASKID=2 LSB_DJOB_NUMPROC=2", "LSF_PM_TASKID='2', LSB_DJOB_NUMPROC='2'"),
        ("NODE_RANK=1 NNODES=2", "NODE_RANK='1', NNODES='2'"),
        ("NODE_RANK=0", "NODE_RANK='0'"),
        ("PET_NODE_RANK=1 PET_NNODES=2", "PET_NODE_RANK='1', PET_NNODES='2'"),
        ("AWS_BATCH_JOB_NODE_INDEX=1", "AWS_BATCH_JOB_NODE_INDEX='1'"),
        ("_CONDOR_PROCNO=0 _CONDOR_NPROCS=2", "_CONDOR_NPROCS='2'"),
        ("OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE='8'"),
        ("SLURM_PROCID=0", "SLURM_PROCID='0'"),
        ("SLURM_PROCID=1", "SLURM_PROCID='1'"),
        ("SLURM_NTASKS=8", "SLURM_NTASKS='8'"),
        (f"{JOB} SLURM_NTASKS=8", "SLURM_PROCID='0', SLURM_NTASKS='8'"),
        (f"{JOB} SLURM_NTASKS_PER_NODE=4", "SLURM_PROCID='0', SLURM_NTASKS_PER_NODE='4'"),
        ("SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS='2'"),
        ("LOCAL_RANK=1", "LOCAL_RANK='1'"),
        ("LOCAL_RANK=0", "LOCAL_RANK='0'"),
        ("GROUP_RANK=1 LOCAL_RANK=0", "GROUP_RANK='1'"),
        ("GROUP_RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "GROUP_RANK='0'"),
        ("HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2", "HOROVOD_CROSS_RANK='1'"),
        ("HOROVOD_SIZE=2", "HOROVOD_SIZE='2'"),
        ("CROSS_RANK=0 CROSS_SIZE=2 LOCAL_SIZE=1", "CROSS_RANK='0', CROSS_SIZE='2'"),
        ("LOCAL_SIZE=4", "LOCAL_SIZE='4'"),
        ("JAX_PROCESS_ID=0", "JAX_PROCESS_ID='0'"),
        ("JAX_PROCESS_COUNT=2", "JAX_PROCESS_COUNT='2'"),
        ("TPU_WORKER_ID=0", "TPU_WORKER_ID='0'"),
        ("TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=a,b", "TPU_WORKER_ID='1', TPU_WORKER_HOSTN.*='a,b'"),
        ("TPU_WORKER_HOSTNAMES=a,b", "TPU_WORKER_HOSTNAMES='a,b'"),
        ("CLOUD_TPU_TASK_ID=0 TPU_PROCESS_ADDRESSES=a:1,b:1", "TPU_PROCESS_ADDRESSES='a:1,b:1'"),
        ("PJRT_LOCAL_PROCESS_RANK=0 PJRT_LOCAL_PROCESS_COUNT=4", "PJRT_LOCAL_PROCESS_RANK='0'"),
        ("MEGASCALE_SLICE_ID=1", "MEGASCALE_SLICE_ID='1'"),
        ('SM_CURRENT_HOST=algo-1 SM_HOSTS=["algo-1","algo-2"]', "SM_CURRENT_HOST='algo-1'"),
        ("JOB_COMPLETION_INDEX=0", "JOB_COMPLETION_INDEX='0'"),
        ("XRT_SHARD_ORDINAL=0 XRT_SHARD_WORLD_SIZE=2", "XRT_SHARD_WORLD_SIZE='2'"),
        ('TF_CONFIG={"cluster":{"chief":["a:1"],"worker":["b:1"]}}', "TF_CONFIG='{"),
        ("TF_CONFIG={", "TF_CONFIG='{"),
        ('CLUSTER_SPEC={"cluster":{"workerpool0":["a:1"],"workerpool1":["b:1"]}}', "CLUSTER_SPEC="),
        ("LWS_WORKER_INDEX=0 LWS_GROUP_SIZE=2", "LWS_WORKER_INDEX='0'"),
        ("VC_TASK_INDEX=0", "VC_TASK_INDEX='0'"),
        ("SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2", "SKYPILOT_NODE_RANK='0'"),
        ("PET_NODE_RANK=0 PET_NNODES=1:2", "PET_NNODES='1:2'"),
        ("NNODES=2", "NNODES='2'"),
        ("PBS_NODENUM=1", "PBS_NODENUM='1'"),
        ("MPI_LOCALNRANKS=4", "MPI_LOCALNRANKS='4'"),
        ("RANK=x WORLD_SIZE=2", "no number: RANK='x'"),
        ("PMI_RANK=-1 PMI_SIZE=2", "no number: PMI_RANK='-1'"),
        ("RANK=2 WORLD_SIZE=2", "below .*: RANK='2', WORLD_SIZE='2'"),
    ],
)
def test_variables_that_do_not_tell_the_rank_are_refused(
    variables: str, named: str, stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, variables)
    said = f"{named}.*; .*give rank= and world_size=, or set RANK"
    assert_refused((said, opened, stores["raw"]))
    with opened(stores["raw"], rank=0, world_size=1, fields=["label"]) as loader:
        assert len(list(loader)) == 6
    for rank, size in ((3, 4), (0, 1)):  # the way out
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        assert find_rank() == (rank, size)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("PMI_RANK=2 PMI_SIZE=4", "PMI_RANK='2', PMI_SIZE='4'"),
        ("LOCAL_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "OMPI.*SIZE='2'"),
        ("PMIX_RANK=3", "PMIX_RANK='3'"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=8", "SLURM_PROCID='0', SLURM_NTASKS='8'"),
        ("WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=4", "WORLD_SIZE='2' .*PMI_RANK='1'"),
        ("WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 PMI_RANK=0 PMI_SIZE=2", ""),
        ("PMI_RANK=0 PMI_SIZE=1", ""),
        ("PMI_RANK=9 PMI_SIZE=4", ""),
        (f"{JOB} SLURM_NTASKS=8", ""),
        ("", ""),
    ],
)
def test_torchrun_alone_in_each_of_several_processes_is_said_once(
    variables: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch(monkeypatch, f"{TORCHRUN.format(0, 1)} {variables}")
    ranks._warn.cache_clear()
    assert find_rank()[0] == find_rank()[0] == 0
    assert len(caplog.messages) == bool(said)
    if said:
        assert re.search(f"{said}.*each torchrun reads all rows", caplog.text)


@pytest.fixture
def terminal_task() -> Iterator[int]:
    """A process with a terminal, as ``srun --pty`` starts it; returns its number."""
    master, terminal = os.openpty()
    code = "import os, sys; os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
    line = [sys.executable, "-c", code, os.ttyname(terminal)]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()
    os.close(terminal)
    os.close(master)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4", None),
        ("SLURM_NTASKS=4", None),
        ("SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1", (0, 1)),
        ("SLURM_STEP_NUM_TASKS=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", (3, 4)),
        ("SLURM_STEP_NUM_TASKS=4 RANK=1 WORLD_SIZE=2", (1, 2)),
        ("SLURM_STEP_NUM_TASKS=4 RANK=0 WORLD_SIZE=1", (0, 1)),
    ],
)
def test_a_shell_in_the_terminal_of_a_step_is_no_rank_of_it(
    variables: str,
    expected: tuple[int, int] | None,
    terminal_task: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = f"{JOB} SLURM_STEP_ID=0 SLURM_TASK_PID={terminal_task}"
    launch(monkeypatch, f"{step} {variables}")
    if expected is None:
        with pytest.raises(UsageError, match=r"or the only one: SLURM_PROCID='0', SLURM.*='4'"):
            find_rank()
    else:
        assert find_rank() == expected
    if expected is None:  # a step that is started from there, and the task itself
        monkeypatch.setattr(os, "getpid", lambda: terminal_task)
        assert find_rank() == (0, 4)
        monkeypatch.undo()
        launch(monkeypatch, f"{step} {variables} SLURM_TASK_PID=0")
        assert find_rank() == (0, 4)


DISAGREEING = [
    "PMI_RANK=1 PMI_SIZE=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2",
    "PMI_RANK=1 PMI_SIZE=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4",
    "PMI_RANK=1 PMI_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
    "PMI_RANK=1 PMI_SIZE=4 PMIX_RANK=0",
    "PMIX_RANK=3 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
    "WORLD_SIZE=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4",
    "RANK=0 WORLD_SIZE=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4",
    "RANK=0 WORLD_SIZE=1 PMI_RANK=3 PMI_SIZE=4",
    # Set by hand for all processes.
    "RANK=0 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
    "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
    "RANK=0 WORLD_SIZE=2 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4",
    "RANK=0 WORLD_SIZE=2 PMIX_RANK=1",
    "RANK=0 WORLD_SIZE=8 PMI_RANK=1 PMI_SIZE=2",
]


def test_launchers_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in DISAGREEING:
        given = launch(monkeypatch, variables)
        with pytest.raises(UsageError, match="launchers disagree on the rank") as refused:
            find_rank()
        text = str(refused.value)
        assert all(f"{name}={value!r}" in text for name, value in given.items())
        options = eval(f"dict({text.partition('such as ')[2]})", {"os": os})
        assert find_rank(**options) == (options["rank"], options["world_size"])


def test_launchers_number_and_count_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, int | None, int]] = [
        ("", None, 1),
        ("LOCAL_RANK=2 SLURM_LOCALID=1", 2, 1),
        ("SLURM_LOCALID=1", 1, 1),
        ("OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 SLURM_LOCALID=0", 3, 4),
        ("MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 2),
        ("PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2", 1, 2),
        ("MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2", 1, 2),
        ("FLUX_TASK_LOCAL_ID=1", 1, 1),
        ("PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2", 1, 2),
        ("PMIX_LOCAL_RANK=1", 1, 1),
        ("LOCAL_RANK=", None, 1),
        ("LOCAL_RANK=1 LOCAL_SIZE=4", 1, 4),
        ("LOCAL_WORLD_SIZE=8 SLURM_STEP_TASKS_PER_NODE=4", None, 8),
        ("SLURM_STEP_TASKS_PER_NODE=4(x2),6,1", None, 6),
        ("LOCAL_WORLD_SIZE=many OMPI_COMM_WORLD_LOCAL_SIZE=2", None, 2),
    ]
    for variables, rank, size in cases:
        launch(monkeypatch, variables)
        assert (find_local_rank(), find_local_size()) == (rank, size), variables


def test_a_device_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with four devices, the second of which is the current one."""
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for asked, variables, expected in (
        (None, "", "cuda:1"), (None, "LOCAL_RANK=3", "cuda:3"), (None, "LOCAL_RANK=5", "cuda:1"),
        ("cuda", "LOCAL_RANK=3", "cuda:1"), ("cuda:2", "", "cuda:2"),
        ("cpu", "LOCAL_RANK=3", "cpu"),
    ):  # fmt: skip
        launch(monkeypatch, variables)
        assert str(find_device(asked)) == expected
    said = r"'cuda:4' was asked for, and torch sees 4 CUDA devices"
    assert_refused((said, find_device, "cuda:4"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert_refused((r"cuda.*torch sees no CUDA device", find_device, device))


def test_what_is_given_wins_and_what_is_no_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, "RANK=3 WORLD_SIZE=4")
    assert find_rank(1, 3) == (1, 3)
    launch(monkeypatch, "")
    for rank, world in ((1, None), (None, 2), (2, 2), (-1, 2), (0, 0)):
        assert_refused(("rank is", find_rank, rank, world))
    # One that a rank spawned does not take itself for the only one.
    spawned, parent = get_context("spawn").Process(), SimpleNamespace(name="SpawnProcess-1")
    monkeypatch.setattr("multiprocessing.current_process", lambda: spawned)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    assert_refused(("spawned by SpawnProcess-1, which another process", find_rank))


def test_a_loader_made_before_its_rank_was_known_is_refused(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning's own launcher does it; otherwise every rank would read everything."""
    store = stores["raw"]
    with opened(store) as early, opened(store, rank=0, world_size=1) as told:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert_refused((r"made for rank 0 of 1, and .* became rank 1 of 2", iter, early))
        assert len(list(told)) == 6
        with opened(store) as late:
            assert (late.rank, late.world_size, len(list(late))) == (1, 2, 3)


TRAIN = """
import json, sys
from pathlib import Path
import torch.distributed as dist
import precache
store, folder, saved = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
with precache.Loader(store, 16 // world, device="cpu", seed=2) as loader:
    if saved:
        loader.load_state_dict(json.loads(saved[0]))
    steps = [[batch["row"].tolist(), loader.state_dict()] for batch in loader]
(folder / f"{rank}.json").write_text(json.dumps(steps))
dist.destroy_process_group()
"""


def _torchrun(processes: int, folder: Path, *arguments: object) -> list[Any]:
    """Rows of each step of all ranks, and the state after it, which is the same on all."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line = [*launcher, f"--nproc-per-node={processes}", script, *arguments]
    variables = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(line, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    for step in zip(*ranks, strict=True):
        assert len({len(rows) for rows, _ in step}) == 1
        assert [state for _, state in step] == [step[0][1]] * processes
    return [
        [sorted(r for rows, _ in step for r in rows), step[0][1]]
        for step in zip(*ranks, strict=True)
    ]


@pytest.mark.heavy
def test_eight_processes_read_as_one_does_and_two_go_on_where_they_stopped(
    tile_stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    store = tile_stores["raw"]
    alone = [sorted(rows) for rows in epoch_of(store, 16, seed=2)]
    eight = _torchrun(8, tmp_path / "eight", store.path, tmp_path / "eight")
    state = json.dumps(eight[1][1])
    for processes, first, steps in (
        (8, 0, eight),
        *((n, 2, _torchrun(n, tmp_path / str(n), store.path, tmp_path / str(n), state))
          for n in (2, 4)),
    ):  # fmt: skip
        rows = [step for step, _ in steps]
        assert rows[:-1] == alone[first:-1], processes
        assert {*rows[-1]} >= {*alone[-1]}
        assert {*rows[-1]} <= {row for step in alone for row in step}


def test_a_batch_of_all_ranks_must_fit_and_deal_out_evenly(stores: dict[str, BuiltStore]) -> None:
    make = functools.partial(opened, stores["raw"], rank=0)
    for said, options in (
        (r"21 valid rows for 4 ranks, .* give at most 5",
         {"batch_size": 6, "world_size": 4, "drop_last": True}),
        ("the shuffle has nodes=4, and 2 ranks read 3 rows each",
         {"batch_size": 3, "world_size": 2, "shuffle": precache.Block(nodes=4)}),
    ):  # fmt: skip
        assert_refused((said, functools.partial(make, **options)))


def test_nodes_need_only_their_own_share_in_their_caches(
    stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    """Two nodes, each with a cache of its own."""
    store, seen = stores["image"], list[int]()
    precache.pull(store.path, "memory://nodes")
    options: dict[str, Any] = {"shuffle": precache.Block(1, nodes=2), "drop_last": True}
    for rank in range(2):
        cache = tmp_path / str(rank)
        with opened("memory://nodes", 2, cache=cache, rank=rank, world_size=2, **options) as loader:
            seen += [row for _ in range(3) for row in flat(loader)]
            assert loader.state_dict()["shuffle"]["nodes"] == 2
        assert len(list((cache / "objects").iterdir())) == 2  # of three shards, the middle is cut
    assert sorted(set(seen)) == valid_rows(store)
