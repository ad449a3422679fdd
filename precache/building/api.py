"""The face of `workers` for Python callers."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from precache.errors import UsageError
from precache.recipe.recipe import Recipe
from precache.runtime.integers import whole
from precache.storage.open import StorageOptions

if TYPE_CHECKING:
    from precache_workers.doctor.report import DoctorReport
    from precache_workers.driver.build_plan import BuildPlan
    from precache_workers.jobs.submission import ClusterJob
    from precache_workers.planning.request import BuildResult, Request


def build(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    address: str = "local",
    labels: str | os.PathLike[str] | None = None,
    classes: str | os.PathLike[str] | None = None,
    accept_unmatched: bool = False,
    follow_links: bool = False,
    keep_order: bool = False,
    shard_samples: int | None = None,
    on_error: str = "skip",
    max_failures: int | None = None,
    accept_missing: bool = False,
    check_space: bool = True,
    cpus: int | None = None,
    compact: bool = False,
    recompute: bool = False,
    retry_failed: bool = False,
    run_functions: bool = False,
    cpus_per_task: float = 1,
    memory_per_task: int | str | None = None,
    node_resources: Mapping[str, float] | None = None,
    node_labels: Mapping[str, str] | None = None,
    nice: int = 10,
    progress: bool = False,
    storage_options: StorageOptions = None,
    report: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    max_sample_bytes: int | str = "512MiB",
    sample_timeout: float = 300.0,
) -> BuildResult:
    """Decode a source once into a cached version, or finish one that was begun.

    Parameters
    ----------
    source
        A folder of images, as path or URL, or ``python:module:factory`` for a torch map-style
        `Dataset`.
    store
        Folder of the store, as path or URL; made if missing.
    recipe
        A `Recipe`, or the path of a TOML file; by default images as they are.
    address
        ``local`` (a Ray of our own on this machine), ``serial`` (this process, no Ray), ``auto``
        or ``ray://host:port`` (a running cluster).
    labels
        CSV file of (key, label) that overrides the folders' labels. Keys are compared under
        Unicode's NFC; a sample may stand there twice, but not with two labels.
    classes
        Store or file whose class map is used, so that train and validation agree.
    accept_unmatched
        Accept `labels` of which many lines fit no sample, or that leave many samples without a
        label; else 1% of them, at least 5, are accepted, and the log says how many.
    follow_links
        Follow links in a local source that lead out of it. By default they are counted and left
        out.
    keep_order
        Lay rows down in the listing's order instead of a fixed shuffle.
    shard_samples
        Rows a shard; by default what makes about 128 MiB raw, and at least 16 shards.
    on_error
        ``skip``: a sample that cannot be decoded becomes a hole; ``raise``: the first one ends the
        build.
    max_failures
        Holes beyond which the build stops; by default 1% of the samples, at least 5.
    accept_missing
        Make holes of samples that cannot be fetched, too.
    check_space
        Refuse to begin where the disk is too small by estimate.
    cpus
        CPUs that a local Ray may use; by default all that this process may use.
    compact
        Lay all rows down anew. By default they keep the places that they have in the current
        version, and samples that the source has no more leave holes.
    recompute
        Compute all anew, as a new version beside those that there are, each time. It takes nothing
        over, from a build of this kind that was cut off neither.
    retry_failed
        Try samples again that failed, those too that could not be fetched; all others are taken
        over. Where some are mended, that is a new version; else the current one stays.
    run_functions
        Let functions of a `recipe` run that came out of a store (``precache.open(…).recipe``),
        which may be a stranger's. Functions that you name yourself always run.
    cpus_per_task, memory_per_task
        What each task takes of its node, on a cluster that is joined; memory in bytes or as
        ``"2GB"``, by default 1 GiB and what its shard may need.
    node_resources
        Custom resources that each task takes, such as ``{"spare": 1}``: it runs only where they
        are.
    node_labels
        Labels that a node must have, such as ``{"tier": "spot"}``.
    nice
        Niceness of the workers on a cluster that is joined, 0 to 19: other work on their nodes
        comes first.
    progress
        Show progress on standard error.
    storage_options
        Of remote file systems, as their fsspec classes take them, for source and store alike; they
        travel with the tasks, and are never written nor shown.
    report
        A file, or several, that tell how the build went, written when it fails as well: ``.html``
        for a page (``pip install 'precache[report]'``), ``.json`` for its figures.
    max_sample_bytes
        A larger file becomes a hole without being fetched; in bytes or as ``"2GB"``.
    sample_timeout
        Seconds that fetching or decoding a sample may take. One that takes longer becomes a hole;
        with the address ``serial`` it ends the build, and where it keeps the interpreter's lock,
        this process.

    Raises
    ------
    UsageError
        The request cannot be met; nothing was written.
    BuildError, StorageError
        The build is incomplete; the same call continues it.
    """
    request = request_of(**locals())
    from precache_workers.driver.build import run_build

    return run_build(request, progress)


def plan(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    timing: bool = True,
    **options: Any,
) -> BuildPlan:
    """Say what the same `build` would do, and why; nothing is written into the store.

    Parameters
    ----------
    source, store, recipe
        As `build` takes them.
    timing
        Make a few dozen rows in memory, in this process or on the cluster that is joined, to
        tell what the build will take. Without it rows are made only where nothing else tells
        their shapes.
    options
        The others of `build`.

    Returns
    -------
    BuildPlan
        What differs from the current version, what is taken over from which version, what is to
        be computed, and an estimate of the time and the bytes.

    Raises
    ------
    UsageError, SourceError, RecipeError
        The build would end so.
    """
    known = inspect.signature(build).parameters
    require_known("plan", options, known)
    defaults = {name: each.default for name, each in known.items()}
    given = {**defaults, "source": source, "store": store, "recipe": recipe, **options}
    request = request_of(**given)
    from precache_workers.driver.build_plan import run_plan

    return run_plan(request, timing, given["progress"])


def require_known(function: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise `TypeError` for keyword arguments that a function does not take."""
    unknown = options.keys() - known.keys()
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def request_of(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None,
    *,
    progress: bool,
    labels: str | os.PathLike[str] | None,
    classes: str | os.PathLike[str] | None,
    cpus_per_task: float,
    memory_per_task: int | str | None,
    node_resources: Mapping[str, float] | None,
    node_labels: Mapping[str, str] | None,
    nice: int,
    report: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    max_sample_bytes: int | str,
    **as_given: Any,
) -> Request:
    """What `build` was given, as the workers take it; `progress` is not theirs."""
    try:
        from precache_workers.cluster.placement import Placement
        from precache_workers.planning.request import Request
    except ModuleNotFoundError as error:
        raise UsageError(f"building needs {error.name}: pip install 'precache[workers]'") from None
    reports = [report] if isinstance(report, str | os.PathLike) else report
    for name, least in (("shard_samples", 1), ("cpus", 1), ("max_failures", 0)):
        if as_given[name] is not None:
            as_given[name] = whole(name, as_given[name], least)
    return Request(
        os.fspath(source),
        os.fspath(store),
        recipe if isinstance(recipe, Recipe) else _read_recipe(recipe),
        labels=None if labels is None else os.fspath(labels),
        classes=None if classes is None else os.fspath(classes),
        import_path=tuple(path or str(Path.cwd()) for path in sys.path),
        placement=Placement(
            cpus_per_task,
            None if memory_per_task is None else _bytes("memory_per_task", memory_per_task),
            node_resources or {},
            node_labels or {},
            whole("nice", nice),
        ),
        reports=tuple(os.fspath(path) for path in reports),
        max_sample_bytes=_bytes("max_sample_bytes", max_sample_bytes),
        **as_given,
    )


def submit(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    code: Sequence[str | os.PathLike[str]] = (),
    storage_options: StorageOptions = None,
    **options: Any,
) -> ClusterJob:
    """Have a cluster build, and return at once: the job goes on without this process.

    The same build submitted while it is under way is joined, not run twice.

    Parameters
    ----------
    source, store
        As `build` takes them; paths are those of the cluster's nodes.
    recipe
        Travels as text.
    address
        Of the cluster's job server, ``http://head:8265``; by default as RAY_API_SERVER_ADDRESS or
        RAY_ADDRESS say, else of a Ray that runs on this machine.
    code
        Modules and packages of your own, or folders of them, that the job can import. Hidden
        files, caches, virtual environments and stores in them stay here.
    storage_options
        As `build` takes them; Ray lists them nowhere.
    options
        The others of `build`. `labels` and `classes` travel where they are files here; `progress`
        is on unless it is false.

    Returns
    -------
    ClusterJob
        With ``id``, ``status()``, ``wait()`` and ``cancel()``.

    Raises
    ------
    UsageError
        The request cannot be met, or another build into the store is under way; nothing was sent.
    BuildError
        The cluster cannot be reached.
    """
    from precache_workers.jobs.job_package import pack
    from precache_workers.jobs.submission import submit_parcel
    from precache_workers.sources.user_code import require_permission

    known = inspect.signature(build).parameters
    require_known("submit", options, known)
    defaults = {name: known[name].default for name in options} | {"progress": True}
    given = {name: value for name, value in options.items() if value != defaults[name]}
    recipe = recipe if isinstance(recipe, Recipe) else _read_recipe(recipe)
    require_permission(recipe, given.pop("run_functions", False))
    parcel = pack(os.fspath(source), os.fspath(store), recipe, given, code)
    return submit_parcel(parcel, address, storage_options or {})


def doctor(
    source: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    samples: int = 200,
    seconds: float = 45.0,
    rate: float = 1000.0,
    cores: int | None = None,
    run_functions: bool = False,
    follow_links: bool = False,
    storage_options: StorageOptions = None,
    tick: Callable[[str], None] = lambda what: None,
) -> DoctorReport:
    """Time a sample of a source before anything is cached, and tell what caching would bring.

    Nothing is kept: trials are in a temporary folder, on the disk that TMPDIR names.

    Parameters
    ----------
    source, recipe, run_functions, follow_links, storage_options
        As `build` takes them.
    samples
        Drawn at random from the source, without repetition.
    seconds
        That measuring may take; fewer samples are measured where they are slow.
    rate
        Samples a second that the training device takes.
    cores
        Of the build, and of training; by default those that this process may use.
    tick
        Told what is being measured.

    Raises
    ------
    UsageError
        A number that makes no sense, or a source that is missing, empty, or has no sample that
        the recipe makes a row of.
    """
    try:
        from precache_workers.doctor.measure import DoctorRequest, examine
    except ModuleNotFoundError as error:
        raise UsageError(
            f"doctor decodes samples and needs {error.name}: pip install 'precache[workers]'"
        ) from None
    recipe = recipe if isinstance(recipe, Recipe) else _read_recipe(recipe)
    request = DoctorRequest(
        os.fspath(source),
        recipe,
        samples=whole("samples", samples, 1),
        seconds=seconds,
        rate=rate,
        cores=None if cores is None else whole("cores", cores, 1),
        run_functions=run_functions,
        import_path=tuple(path or str(Path.cwd()) for path in sys.path),
        storage_options=storage_options,
        follow_links=follow_links,
    )
    return examine(request, tick)


def _read_recipe(path: str | os.PathLike[str] | None) -> Recipe:
    return Recipe.image() if path is None else Recipe.from_toml(os.fspath(path))


def _bytes(name: str, size: int | str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise UsageError(f"{name} is {size!r}; give bytes, or a size such as '2GB'") from None
