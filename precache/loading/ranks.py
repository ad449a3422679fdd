"""Rank and world size of this process, from `torch.distributed` or the launcher.

Sources of the variables' names: torchrun's documentation, srun(1) and sbatch(1), Open MPI's
"Environment variables set for MPI applications", the user guide of MVAPICH2, Hydra of MPICH and
Intel MPI, Platform MPI, HPE PALS, HPE MPT, flux-environment(7), jsrun, horovodrun, DeepSpeed's
launch.py, Paddle, JAX and dmlc; for hints aprun(1), IBM's poe, LSF's blaunch, pbsdsh, Lightning,
torch_xla's tpu.py and xla_env_vars.py, and the environment variables of TensorFlow, Vertex AI,
SageMaker, SkyPilot, Volcano, LeaderWorkerSet, and of Kubernetes' indexed jobs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from multiprocessing import context
from pathlib import Path

import torch.distributed
from torch.utils.data import get_worker_info

from precache.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launcher:
    """Names of the variables that a launcher sets for each process; empty where it sets none."""

    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


TORCH = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = Launcher(
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
)
_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_MPI = ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "MVP_COMM_WORLD", "PMI", "JSM_NAMESPACE", "HOROVOD")
LAUNCHERS = (
    TORCH,
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    *(Launcher(*(f"{prefix}_{name}" for name in _NAMES)) for prefix in _MPI),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("PALS_RANKID", "", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Launcher("PMIX_RANK", "", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
    Launcher("MPT_MPI_RANK", "MPT_MPI_SIZE"),
    Launcher("MPI_RANKID", "MPI_NRANKS", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    Launcher("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    Launcher("JAX_PROCESS_INDEX", "JAX_PROCESS_COUNT"),
    Launcher("DMLC_RANK", "DMLC_NUM_WORKER"),
    SLURM,
)
"""The innermost first: Slurm starts mpirun, which starts torchrun."""

HINTS = {
    "ALPS_APP_PE": "",
    "MP_CHILD": "MP_PROCS",
    "LSF_PM_TASKID": "LSB_DJOB_NUMPROC",
    "NODE_RANK": "NNODES",
    "GROUP_RANK": "GROUP_WORLD_SIZE",
    "CROSS_RANK": "CROSS_SIZE",
    "HOROVOD_CROSS_RANK": "HOROVOD_CROSS_SIZE",
    "PET_NODE_RANK": "PET_NNODES",
    "AWS_BATCH_JOB_NODE_INDEX": "AWS_BATCH_JOB_NUM_NODES",
    "_CONDOR_PROCNO": "_CONDOR_NPROCS",
    "SM_CURRENT_HOST": "SM_HOSTS",
    "SKYPILOT_NODE_RANK": "SKYPILOT_NUM_NODES",
    "JOB_COMPLETION_INDEX": "",
    "VC_TASK_INDEX": "VC_WORKER_NUM",
    "LWS_WORKER_INDEX": "LWS_GROUP_SIZE",
    "PBS_NODENUM": "",
    "TPU_WORKER_ID": "TPU_WORKER_HOSTNAMES",
    "CLOUD_TPU_TASK_ID": "TPU_PROCESS_ADDRESSES",
    "MEGASCALE_SLICE_ID": "MEGASCALE_NUM_SLICES",
    "PJRT_LOCAL_PROCESS_RANK": "PJRT_LOCAL_PROCESS_COUNT",
    "XRT_SHARD_ORDINAL": "XRT_SHARD_WORLD_SIZE",
    "TF_CONFIG": "TF_CONFIG",
    "CLUSTER_SPEC": "CLUSTER_SPEC",
}
"""Variables that number processes, daemons or nodes -> how many there are, or a list or JSON of
them: no rank of a process."""

CORES, FIRST_NODE = "LSB_DJOB_NUMPROC", "PBS_NODENUM"
"""A number that may be one of cores, and one that is 0 where a job's script runs, too."""

STEP_TASKS, JOB_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_NTASKS_PER_NODE"
STEP, STEP_NODES, JOB = "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"
TASK = "SLURM_TASK_PID"
ELASTIC = "TORCHELASTIC_RUN_ID"

SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm numbers batch scripts and interactive shells of a job from here on."""

Reading = tuple[int | None, int | None]
"""Rank and world size; None where a launcher does not say."""


def find_rank(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return rank and world size: the arguments, else from `torch.distributed` or the launcher.

    Without any of these, this is rank 0 of 1.

    Raises
    ------
    UsageError
        One was given without the other, there is no such rank, or the launcher's variables do not
        tell the rank of this process.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank is {rank} and world_size is {world_size}; give both, or neither")
    if rank is None or world_size is None:
        return _detect_rank()
    if not 0 <= rank < world_size:
        raise UsageError(f"rank is {rank} of {world_size}; ranks count from 0")
    return rank, world_size


def find_local_rank() -> int | None:
    """Return the rank of this process on its node; None without a launcher."""
    for launcher in LAUNCHERS:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[launcher.local_rank])
    return None


def find_local_size() -> int:
    """Return the most ranks that a node has; 1 without a launcher."""
    for launcher in LAUNCHERS:
        with contextlib.suppress(KeyError, ValueError):
            parts = os.environ[launcher.local_size].split(",")  # Slurm's is such as ``4(x2),3``
            return max(1, *(int(part.partition("(")[0]) for part in parts))
    return 1


def require_rank(rank: int, world_size: int) -> None:
    """Raise `UsageError` if this process has another rank by now."""
    current = find_rank()
    if current != (rank, world_size):
        raise UsageError(
            f"this loader was made for rank {rank} of {world_size}, and this process became rank "
            f"{current[0]} of {current[1]} since; make loaders once torch.distributed is "
            "initialised (with Lightning, in train_dataloader), or give rank and world_size"
        )


def _detect_rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    info = get_worker_info()
    return _launched(os.getpid(), info and info.id, frozenset(os.environ.items()))


@functools.lru_cache(1)
def _launched(*_: object) -> tuple[int, int]:
    """Return what the launchers say: once a process and environment, as each epoch asks."""
    rank, size = _reading(TORCH)
    is_given = rank is not None and size is not None
    if rank is not None and size is not None and ELASTIC in os.environ:
        _warn_of_jobs_side_by_side(size)
        return rank, size  # inside whatever started torchrun
    readings = dict[Launcher, Reading]()
    for launcher in LAUNCHERS:
        try:
            readings[launcher] = _reading(launcher)
        except UsageError:
            if not is_given:
                raise
    whole = {
        launcher: (rank, size)
        for launcher, (rank, size) in readings.items()
        if rank is not None and size is not None
    }
    if not whole:
        _require_alone(readings)
        return 0, 1
    # The innermost one that started several processes.
    chosen = max(whole, key=lambda launcher: whole[launcher][1] > 1)
    for launcher, reading in readings.items():
        if chosen is TORCH:
            disagrees = not _may_have_started(reading, whole[chosen])
        else:
            disagrees = _contradicts(launcher, reading, whole[chosen])
        if disagrees:
            names = astuple(chosen)[:2]
            raise _unclear(
                "launchers disagree on the rank of this process",
                [*names, *astuple(launcher)[:2], *STEP_TASKS],
                "give rank= and world_size= of the right one, such as "
                "rank=int(os.environ['{}']), world_size=int(os.environ['{}'])".format(*names),
            )
    return whole[chosen]


def _reading(launcher: Launcher) -> Reading:
    """Return what a launcher says.

    Raises
    ------
    UsageError
        A variable is no number, or the rank is not below the number of processes.
    """
    rank, size = _number(launcher.rank), _number(launcher.size)
    if launcher is SLURM and size != 1 and _is_in_terminal():
        return None, None
    if launcher is SLURM and size is None:
        if not _in_step(rank):
            return None, None
        size = next(filter(None, map(_number, STEP_TASKS)), None)
    if rank is not None and size is not None and rank >= size:
        names = [launcher.rank, launcher.size, *STEP_TASKS]
        raise _unclear("the rank must be below the number of processes", names)
    return rank, size


def _number(name: str) -> int | None:
    """Return the number in a variable; None if it is not set, or empty."""
    value = os.environ.get(name, "").strip()
    if value and not (value.isascii() and value.isdecimal()):
        raise _unclear("the rank of this process is unclear, as this is no number", [name])
    return int(value) if value else None


def _in_step(rank: int | None) -> bool:
    """Return whether srun started this process; in a batch script, the rank is 0 as well."""
    step = os.environ.get(STEP, "")
    return bool(rank) or (step.isdecimal() and int(step) < SPECIAL_STEPS)


def _is_in_terminal() -> bool:
    """Return whether a task with a terminal, as a shell of ``srun --pty``, started this process.

    Only the first of the tasks has the terminal, and starts processes that are no tasks.
    """
    with contextlib.suppress(OSError, UsageError):
        if _number(TASK) == os.getpid():
            return False
        # After the name in parentheses: state, parent, group, session, terminal.
        fields = Path(f"/proc/{_number(TASK)}/stat").read_text().rpartition(")")[2].split()
        return fields[4] != "0"
    return False


def _contradicts(launcher: Launcher, reading: Reading, chosen: tuple[int, int]) -> bool:
    """Return whether a launcher says something else than the chosen one."""
    rank, size = reading
    if rank is None or size is None:
        return rank not in (None, chosen[0]) or size not in (None, 1, chosen[1])
    if size == 1:
        return launcher is TORCH and chosen[1] > 1
    # With one task for each node, srun started the daemons of mpirun, or mpirun on each node.
    if launcher is SLURM and _number(STEP_NODES) == size and size < chosen[1]:
        return False
    return reading != chosen


def _may_have_started(outer: Reading, inner: tuple[int, int]) -> bool:
    """Return whether the process of a launcher may have started that which is `inner`.

    It then started an equal number of processes on each node; or it has an interactive shell as
    one of its tasks, which is the first.
    """
    (rank, size), (inner_rank, inner_size) = outer, inner
    if rank is None or size == 1:
        return True
    if size is None:
        return inner_size == 1 or rank <= inner_rank
    if inner_size % size == 0:
        return inner_rank // (inner_size // size) == rank
    return rank == 0 and size > inner_size


def _count(name: str) -> int | None:
    """Return the number that a variable has, or of the items in its list or the tasks of its
    cluster; None for no such."""
    text = os.environ.get(name, "").strip()
    if text.startswith(("[", "{")):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            given = json.loads(text)
            return len(given) if text[0] == "[" else sum(map(len, given["cluster"].values())) or 1
        return None
    least, _, most = text.rpartition(":")  # of an elastic job
    if most.isascii() and most.isdecimal() and (least.isdecimal() or not least):
        return int(most)
    return len(text.split(",")) if text else None


def _require_alone(readings: dict[Launcher, Reading]) -> None:
    """Raise `UsageError` if something suggests that there are several processes."""
    _require_parent_alone()
    if get_worker_info() is not None and os.environ.get("MASTER_ADDR"):
        raise _unclear(
            "a worker of a DataLoader that is spawned does not know the rank of its process",
            ["MASTER_ADDR", "MASTER_PORT"],
            OUTSIDE,
        )
    for launcher, (rank, size) in readings.items():
        if rank is not None or size not in (None, 1):
            half = "the number of processes, and no rank"
            if size is None:
                half = "a rank, and not the number of processes"
            raise _unclear(f"the launcher gave this process {half}", astuple(launcher)[:2])
    for names in HINTS.items():
        number, count = os.environ.get(names[0], "").strip(), _count(names[1])
        is_numbered = number not in ("", "0" if names[0] == FIRST_NODE else "")
        if count != 1 and (is_numbered or (count is not None and names[1] != CORES)):
            raise _unclear("this process may be one of several", names)
    sizes_of_steps = (SLURM.size, *STEP_TASKS, JOB_TASKS)
    tasks = [name for name in sizes_of_steps if (_number(name) or 1) > 1]
    if tasks or (_number(SLURM.rank) is not None and JOB not in os.environ):
        raise _unclear(
            "this process may be one of several tasks of a Slurm job, or the only one",
            [SLURM.rank, *(tasks or STEP_TASKS)],
            "start it by srun; or " + WAY_OUT,
        )
    sizes = {os.environ.get(launcher.local_size, "") for launcher in LAUNCHERS}
    is_alone = find_local_rank() is None or "1" in sizes or JOB in os.environ
    if find_local_rank() or find_local_size() > 1 or not is_alone:
        local = [name for launcher in LAUNCHERS for name in astuple(launcher)[2:]]
        raise _unclear("the launcher gave this process a rank on its node alone", local)


def _require_parent_alone() -> None:
    """Raise `UsageError` in a spawned process whose parent may be a rank that it does not know.

    A process that is forked knows what its parent knew. The first process of a program is a rank
    of a job where each was given its rank by its user, which no child can see.
    """
    parent, info = multiprocessing.parent_process(), get_worker_info()
    if parent is None or not isinstance(
        multiprocessing.current_process(), context.SpawnProcess | context.ForkServerProcess
    ):
        return
    if parent.name != "MainProcess":
        raise UsageError(
            f"this process was spawned by {parent.name}, which another process started and which "
            "may be one of several ranks, and does not know its rank; "
            + (WAY_OUT if info is None else OUTSIDE)
        )
    if info is not None and info.id == 0:
        _warn(
            "a loader in a worker of a DataLoader that is spawned reads as rank 0 of 1, and does "
            "not know whether its process is one of several ranks, which would then all read all "
            f"rows; with several, {OUTSIDE}"
        )


def _warn_of_jobs_side_by_side(size: int) -> None:
    """Log it if this torchrun shares its ranks with no other, and is one of several processes.

    These may be runs of a sweep, or were meant as ranks of one job.
    """
    if _number(TORCH.local_size) not in (None, size):
        return  # there are other agents
    for launcher in LAUNCHERS:
        with contextlib.suppress(UsageError):
            rank, count = _reading(launcher)
            if launcher.rank != TORCH.rank and (rank or (count or 1) > 1):
                names = [name for name in astuple(launcher)[:2] + STEP_TASKS if name in os.environ]
                values = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
                _warn(
                    f"torchrun says that this is one of WORLD_SIZE={str(size)!r} ranks, in one of "
                    f"several processes ({values}): each torchrun reads all rows, as runs of a "
                    "sweep do; to train one model, start torchrun with --nnodes, or the script "
                    "without torchrun"
                )
                return


@functools.cache
def _warn(text: str) -> None:
    log.warning("%s", text)


OUTSIDE = (
    "iterate over the Loader itself, which reads ahead, in place of the DataLoader; or give rank= "
    "and world_size= of the process"
)

WAY_OUT = (
    "give rank= and world_size=, or set RANK and WORLD_SIZE (rank 0 of 1 if it trains alone), or "
    "make the loader once torch.distributed is initialised"
)


def _unclear(what: str, names: Iterable[str], way_out: str = WAY_OUT) -> UsageError:
    """Make the error that names variables with their values."""
    values = [f"{name}={os.environ[name]!r}" for name in dict.fromkeys(names) if name in os.environ]
    return UsageError(f"{what}: {', '.join(values)}; {way_out}")
