"""The engine of builds on Ray: bounded submission of tasks, results as they come."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.errors import BuildError, HangError, MismatchError, PrecacheError
from precache.runtime.process_id import Process, has_ended, process_of
from precache.runtime.usage import cores
from precache.units import size
from precache_workers.cluster.dispatch import (
    TASK_SECONDS,
    Done,
    Hung,
    Item,
    Lost,
    Outcome,
    Patience,
    dispatch,
)
from precache_workers.cluster.placement import Placement
from precache_workers.runtime.node import NODE
from precache_workers.runtime.time_limit import Lookout, lookout_kept
from precache_workers.runtime.watchdog import explain, write_report

logger = logging.getLogger(__name__)

Run = Callable[..., Iterator[Outcome]]
"""(function, items, patience, count), as `dispatch` has them, to (item, outcome) as they come."""

NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""

SLOTS_SECONDS = 1.0
"""Between two looks at the nodes of a cluster."""

NOTICE_SECONDS = 15.0
"""Without a node that can take a task, after which that is said."""

MANY = 64
"""Copies under way, above which all that ended are asked for at once."""

MEMORY_STEP = 64 << 20
"""What a task may need is rounded up to: Ray gives a worker on to tasks that ask for the same."""

HEARD_SECONDS = 5.0
"""For an actor to hear the last that it is told: it may have only just been started."""

RESULT_SECONDS = 60.0
"""To bring a result that is there: its node may just be going away."""

FOLDER, OWNER = "precache-ray-", "owner.json"
"""How the name of a folder of our own Ray begins, in the folder for temporary files; the process
that it is of."""

LONGEST_FOLDER = 38
"""Bytes, as the path of a socket has at most 107, and 69 come behind."""

REPORT = "precache-hang-"
"""How the name of a file begins, in the folder for temporary files, on what ended a worker."""

OWN = Placement(memory=0, nice=0)
"""On a Ray of our own: its memory monitor ends what takes too much of the machine's."""

KEEPALIVE = {
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "3000",
}
"""Without these, tasks on a node whose link was cut stay pending though Ray declared it dead."""


def run_serial(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    patience: Patience | None = None,
    count: int = 0,
) -> Iterator[Outcome]:
    """The same tasks, one after another in this process: what a cluster's results must equal."""
    for item in items:
        try:
            yield item, function(item)
        except PrecacheError as error:
            yield item, error


@contextlib.contextmanager
def executor(
    address: str,
    cpus: int | None = None,
    placement: Placement | None = None,
    notice: Callable[[str], None] = logger.warning,
) -> Iterator[Run]:
    """Where tasks run: ``serial``, ``local`` (a Ray of our own), ``auto`` or ``ray://…``.

    What was started here is stopped at the end; a cluster that was joined goes on.

    Parameters
    ----------
    placement
        On a cluster that is joined; a Ray of our own takes a CPU a task.
    notice
        Told when the work waits for nodes.
    """
    if address == "serial":
        with lookout_kept():
            yield run_serial
    elif address == "local":
        with own_folder() as folder, _quiet_environment(folder), _connected(None, cpus, folder):
            yield functools.partial(_run_on_ray, OWN, notice, {})
    else:
        with _environment(KEEPALIVE), _connected(address, None):
            yield functools.partial(_run_on_ray, placement or Placement(), notice, {})


def is_joined(address: str) -> bool:
    """Whether it is that of a cluster that runs already."""
    return address == "auto" or address.startswith("ray://")


@functools.cache
def _token() -> str:
    """One for the process: Ray's client keeps the first that it reads."""
    return os.urandom(32).hex()


@functools.cache
def _token_is_ours() -> bool:
    """Whether Ray is yet to be imported: it keeps from then on how the process authenticates."""
    return "ray" not in sys.modules


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder of a Ray of our own, which nobody else may look into; those of builds that were
    killed are removed."""
    temporary, user = Path(tempfile.gettempdir()), os.getuid()
    for left in temporary.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError, ValueError):
            found = left.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
                continue
            if has_ended(Process.model_validate_json((left / OWNER).read_bytes())):
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True) as name:
        (Path(name) / OWNER).write_text(process_of(os.getpid()).model_dump_json())
        yield Path(name)


@contextlib.contextmanager
def _quiet_environment(folder: Path) -> Iterator[None]:
    """Settings of a Ray of our own, unless the user chose: no reports, a token of its own."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_task_events_report_interval_ms": "0",  # for a dashboard, which there is none of
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Workers that are just starting when a build is killed try five times: half a minute.
        "RAY_gcs_rpc_server_connect_timeout_s": "1",
        # glibc gives freed image buffers back to the kernel, only to fault them in again.
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    }
    if _token_is_ours():
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with _environment(settings):
        yield


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Variables that are set meanwhile, unless the user set them."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _connected(address: str | None, cpus: int | None, folder: Path | None = None) -> Iterator[None]:
    import ray

    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        quiet |= {"include_dashboard": False, "num_cpus": cpus or cores(), "address": "local"}
        if folder is not None and len(str(folder)) <= LONGEST_FOLDER:
            quiet["_temp_dir"] = str(folder / "ray")  # of which Ray lets everyone write into
    else:
        quiet |= {"address": address}
    if address is None or address == "auto":
        # Else Ray puts the current folder first on the workers' path, where a store or samples may
        # lie, with files that are named like modules. `Job.import_path` tells what they may import.
        quiet |= {"job_config": ray.job_config.JobConfig(_client_job=True)}
    if address is not None:
        _require_listening(address)
    already = ray.is_initialized()
    try:
        if not already:
            _init(quiet)
    except (ConnectionError, TimeoutError) as error:
        raise BuildError(
            f"cannot reach the Ray cluster at {address}: {error}; start one with `ray start "
            "--head`, or use --address local; one with tokens needs RAY_AUTH_MODE=token here, and "
            "its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from None
    # Ray prints that a worker died on standard output, whatever its own settings say.
    printing = ray._private.worker
    speaks, printing._worker_logs_enabled = getattr(printing, "_worker_logs_enabled", True), False
    try:
        yield
    except ConnectionError as error:
        if type(error) is not ConnectionError:  # of another connection than Ray's
            raise
        raise BuildError(
            f"lost the connection to {address}: {error}; once the cluster answers again, run the "
            "same command again: it continues"
        ) from None
    finally:
        if not already:
            ray.shutdown()
        printing._worker_logs_enabled = speaks  # a shutdown prints what was held back


def _init(options: Mapping[str, Any]) -> None:
    """Start or join a Ray; a head's server for a client may die as it is forked."""
    import ray

    for left in (2, 1, 0):
        try:
            ray.init(**options)
            return
        except ConnectionAbortedError as error:
            if "Starting Ray client server failed" not in str(error) or not left:
                raise


def _require_listening(address: str) -> None:
    """Raise `BuildError` where nothing answers: Ray would end the process, or try for long."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise BuildError(
            f"cannot reach the Ray cluster at {address}: {named} does not answer ({error}); start "
            "one with `ray start --head`, or use --address local"
        ) from None


def on_every_node(
    placement: Placement, function: Callable[[Any], Any], item: Any
) -> dict[str, Any]:
    """What the function returns, or its `PrecacheError`, by address of each node tasks may run on.

    Nodes that go away meanwhile are left out.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    nodes = [node for node in _nodes() if placement.slots([node], 0)]
    remote: Any = ray.remote(_on_worker)
    asked = {}
    for node in nodes:
        here = OnNode(node["NodeID"], soft=False)
        task = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        name = f"{node['NodeManagerHostname']} at {node['NodeManagerAddress']}"
        asked[task.remote(function, item, placement.nice)] = name
    answers = {}
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=60) if asked else ([], [])
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            answers[asked[reference]] = ray.get(reference)
    for reference in late:
        ray.cancel(reference, force=True)
    return answers


def _run_on_ray(
    placement: Placement,
    notice: Callable[[str], None],
    apart: dict[str, str],
    function: Callable[[Any], Any],
    items: Iterable[Item],
    patience: Patience | None = None,
    count: int = 0,
) -> Iterator[Outcome]:
    return dispatch(_Ray(placement, notice, apart), function, items, patience, count)


class _Ray:
    """The engine of `dispatch`."""

    def __init__(
        self, placement: Placement, notice: Callable[[str], None], apart: dict[str, str]
    ) -> None:
        import ray

        self._ray = ray
        self._placement = placement
        self._notice = notice
        self._apart = apart
        self._remotes: dict[tuple[Callable[[Any], Any], int, int, int], Any] = {}
        self._memory = 0
        self._under_way: dict[Any, tuple[str, float]] = {}
        """Copy -> the name of the report on what hangs in it, and when that is to be expected."""
        self._slots, self._looked = 0, float("-inf")
        self._waiting_since = time.monotonic()

    def slots(self) -> int:
        now = time.monotonic()
        if now - self._looked >= SLOTS_SECONDS:
            self._looked, self._slots = now, self._free_slots()
            if self._slots:
                self._waiting_since = now
            elif now - self._waiting_since > NOTICE_SECONDS:
                self._waiting_since = float("inf")
                self._notice(
                    f"No node of the cluster can take a task ({self._placement}, "
                    f"{size(self._memory)} of memory): waiting for one"
                )
        return self._slots

    def _free_slots(self) -> int:
        nodes = [node for node in _nodes() if node["NodeID"] not in self._apart]
        return self._placement.slots(nodes, self._memory)

    def _labels(self) -> dict[str, str]:
        """What Ray chooses nodes by."""
        apart = {NODE_ID: f"!in({','.join(self._apart)})"} if self._apart else {}
        return {**self._placement.labels, **apart}

    def submit(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Hashable:
        given, job = self._placement.memory, items[0].job
        most = max(item.memory for item in items)
        self._memory = -(-most // MEMORY_STEP) * MEMORY_STEP if given is None else given
        which = function, id(job), self._memory, len(self._apart)
        remote = self._remotes.get(which) or self._remotes.setdefault(
            which, self._remote_of(function, job, self._memory)
        )
        report = f"{REPORT}{os.urandom(16).hex()}"
        given_items = [replace(item, job=None) for item in items]
        reference: Hashable = remote.remote(pickle.dumps((given_items, report)))
        seconds = getattr(job, "sample_seconds", 0.0)
        self._under_way[reference] = report, time.monotonic() + seconds
        return reference

    def _remote_of(self, function: Callable[[Any], Any], job: Any, memory: int) -> Any:
        """What Ray calls on a worker: it has the job, and a task's only argument is the rest.

        It answers with the values that `Done` has, and their seconds.
        """
        placement, nice = self._placement, self._placement.nice

        def on_worker(items_and_report: bytes) -> bytes:
            began, seconds, values = time.monotonic(), 0.0, []
            items, name = pickle.loads(items_and_report)
            report = Path(tempfile.gettempdir()) / name
            with _lookout().on_duty(str(report)):
                for item in items:
                    if seconds < 2 * TASK_SECONDS:
                        values.append(_on_worker(function, replace(item, job=job), nice))
                        seconds = time.monotonic() - began
                    if isinstance(values[-1], MismatchError):
                        values[-1].node = _node_id()
                        break
                    if isinstance(values[-1], HangError):
                        with contextlib.suppress(OSError):  # then it is found as a killer is
                            write_report(str(report), values[-1].late)
                        os._exit(1)
            return pickle.dumps((values, seconds))

        made: Any = self._ray.remote(on_worker)
        return made.options(
            name=function.__name__,
            num_cpus=placement.cpus,
            memory=memory or None,
            max_retries=0,  # deaths are told to `dispatch`, which counts them and knows what to do
            resources=dict(placement.resources) or None,
            label_selector=self._labels() or None,
        )

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Hung | Lost]]:
        references = list(self._under_way)
        ready, _ = self._ray.wait(references, num_returns=1, timeout=seconds)
        if ready and len(references) > MANY:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        return [(each, self._end(each, *self._under_way.pop(each))) for each in ready]

    def cancel(self, copy: Any) -> None:
        if copy in self._under_way:
            del self._under_way[copy]
            self._ray.cancel(copy, force=True)

    def _end(self, reference: Any, report: str, may_hang: float) -> Done | Hung | Lost:
        errors = self._ray.exceptions
        try:
            values, seconds = pickle.loads(self._ray.get(reference, timeout=RESULT_SECONDS))
            if isinstance(values[-1], MismatchError):
                return self._leave_out(values[-1])
            return Done(values, seconds)
        except errors.RayTaskError as error:
            return Done([BuildError(f"a task failed: {error.cause!r}")], 0.0)
        except errors.OutOfMemoryError:
            return Lost("it ran out of memory", crashed=True)
        except errors.WorkerCrashedError:
            if time.monotonic() >= may_hang:
                reports = on_every_node(self._placement, _take_report, report).values()
                if late := next(filter(None, reports), None):
                    return Hung(HangError(explain(late), late=late))
            return Lost("its process ended by itself, or was killed", crashed=True)
        except (errors.RuntimeEnvSetupError, errors.TaskUnschedulableError) as error:
            return Done([BuildError(f"a task cannot be run: {error}")], 0.0)
        except errors.RayError as error:
            return Lost(str(error).partition("\n")[0], crashed=False)

    def _leave_out(self, error: MismatchError) -> Done | Lost:
        """Have no more tasks run on a node; the error where no other is left."""
        if error.node not in self._apart:
            self._apart[error.node] = str(error)
            self._notice(f"A node is left out: {error}")
        self._slots = self._free_slots()
        if not self._slots:
            return Done([error], 0.0)
        return Lost(str(error), crashed=False)


def _node_id() -> str:
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def _nodes() -> list[dict[str, Any]]:
    import ray

    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own
    return found


def is_connected() -> bool:
    """Whether this process has joined a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def is_client() -> bool:
    """Whether it did so at ``ray://``."""
    import ray

    return bool(ray.util.client.ray.is_connected())  # type: ignore[no-untyped-call]  # Ray's own


def actor_on_head(kind: type, *given: Any) -> Any:
    """An actor that takes no CPU, where no spare node is kept for it or lost with it.

    It ends with this process's connection. What it is told when it is gone is lost without a word.
    """
    import ray

    remote: Any = ray.remote(kind)
    on_head = {"node:__internal_head__": 0.001}
    return remote.options(num_cpus=0, resources=on_head).remote(*given)


def wait_for(call: Any) -> None:
    """Wait until an actor has done what it was told, for a few seconds at most."""
    import ray

    ray.wait([call], timeout=HEARD_SECONDS)


def node_cpus() -> dict[str, int]:
    """CPUs of each live node of the cluster that is joined, by address; none without a cluster."""
    if not is_connected():
        return {}
    found: Counter[str] = Counter()
    for node in _nodes():
        if node["Alive"]:
            found[node["NodeManagerAddress"]] += int(node["Resources"].get("CPU", 0))
    return dict(found)


@functools.cache
def _lookout() -> Lookout:
    """One for the process of a worker, with which it ends."""
    return Lookout()


def _take_report(name: str) -> dict[str, str]:
    """Key -> why, of the samples at work in a process of this node that had to be ended."""
    path = Path(tempfile.gettempdir()) / name
    try:
        late: dict[str, str] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    path.unlink()
    return late


def _on_worker(function: Callable[[Any], Any], item: Any, nice: int) -> Any:
    """Errors of ours come back as values, so that only a lost worker counts as lost."""
    import ray

    here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's own
    os.environ.setdefault(NODE, here)
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    try:
        return function(item)
    except PrecacheError as error:
        return error
