"""`build`, `plan`, `submit` and `doctor`."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from precache.errors import UsageError, needs
from precache.maintenance.location import require_apart
from precache.recipe.recipe import Recipe, require_stated_draws
from precache.runtime.integers import whole
from precache.runtime.operating_system import require_linux
from precache.runtime.usage import cores as usable_cores
from precache.storage.open import StorageOptions, address_of
from precache_workers.planning.options import BuildOptions, read_options

if TYPE_CHECKING:
    from precache_workers.doctor.measure import Examination
    from precache_workers.doctor.report import DoctorReport
    from precache_workers.driver.build_plan import BuildPlan
    from precache_workers.driver.build_result import BuildResult
    from precache_workers.jobs.submission import ClusterJob
    from precache_workers.planning.request import Request


@needs("building")
def build(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    address: str = "local",
    labels: str | os.PathLike[str] | None = None,
    classes: str | os.PathLike[str] | None = None,
    label_level: int | None = None,
    label_kind: Literal["name", "number", "value"] | None = None,
    label_separator: str | None = None,
    no_label: str | Sequence[str] = (),
    class_order: Literal["text", "number"] = "text",
    all_splits: bool = False,
    accept_unmatched: bool = False,
    follow_links: bool = False,
    keep_order: bool = False,
    shard_samples: int | None = None,
    ignore_ctime: bool = False,
    on_error: Literal["skip", "raise"] = "skip",
    max_failures: int | None = None,
    accept_missing: bool = False,
    check_space: bool = True,
    verify: bool | None = None,
    cpus: int | None = None,
    compact: bool = False,
    compare: bool = False,
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
    storage_options_env: Mapping[str, str] | None = None,
    report: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    max_sample_bytes: int | str = "512MiB",
    sample_timeout: float = 300.0,
    source_kind: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    key_column: str | None = None,
    sample_name: Literal["first-dot", "last-dot", "whole"] | None = None,
) -> BuildResult:
    """Decode a source once into a cached version, or resume an unfinished version.

    Parameters
    ----------
    source
        A folder of images, containers of samples (tar, Parquet, zip, tables of URIs), as path, URL
        or pattern such as ``data/*.parquet`` and ``shards-{0000..0099}.tar``; folders whose files
        of one name are one sample, such as ``data/{images,masks}`` and ``data/{*.jpg,*_gt.png}``;
        or ``python:module:factory`` for a torch map-style `Dataset`.
    store
        Folder of the store, as path or URL; created if missing.
    recipe
        A `Recipe`, or the path of a TOML file; by default images are decoded, and not resized
        or cropped.
    address
        ``local`` (worker processes on this machine), ``serial`` (this process), or a running
        cluster: ``auto``, ``host:6379`` or ``ray://host:10001``.
    labels
        Table of keys and labels (CSV, TSV, JSON Lines or Parquet) that replace the source's
        labels; a sample without a line gets none. Keys are compared in Unicode's NFC; a key may
        occur twice, but not with two labels.
    classes
        Store, file, or folder of class folders, whose class map is used, so that training and
        validation agree.
    label_level
        The folder of a path that is its class: 1 for the first, 0 for none. By default the first,
        or the first below a folder that holds all images; folders that seem to be splits or parts
        of a data set are refused.
    label_kind
        ``name``, ``number`` (class numbers) or ``value`` (for a regression): the kind of the labels
        of a column or file; by default their type and text decide.
    label_separator
        Text between several classes in a label, such as ``|``: labels become multi-hot.
    no_label
        Labels that stand for none, such as ``NaN``.
    class_order
        ``text`` or ``number``: the order in which names of classes are sorted.
    all_splits
        Take samples of all splits together, where files or a column of a table name several, such
        as ``train`` and ``test``; by default they are refused.
    accept_unmatched
        Accept `labels` even if many lines match no sample, or many samples get no label. By
        default 1%, at least 5, are accepted, and their number is logged.
    follow_links
        Follow links in a local source that lead out of it, and redirects of a web server. By
        default they are counted and left out.
    keep_order
        Store rows in the order of the listing, of a folder by name as text, instead of a fixed
        shuffle.
    shard_samples
        Rows of a shard, rounded up to those of whole chunks. By default a shard has about 128 MiB
        of raw data, and small sets are divided into about 16 shards if their chunks allow it.
    ignore_ctime
        Take local samples as unchanged that have the size and time that they had. By default those
        of another ctime or inode are read, as `chmod`, links and copies change these, but so do
        rewriting and `mv`.
    on_error
        ``skip``: a sample that cannot be decoded becomes a hole; ``raise``: the first one ends the
        build.
    max_failures
        Number of holes beyond which the build stops; by default 1% of the samples, at least 5.
    accept_missing
        Turn samples that cannot be fetched into holes, too.
    check_space
        Refuse to begin if the disk is estimated to be too small.
    verify
        Compare the bytes of shards with their checksums: of a complete version, to repair what is
        damaged, and of an earlier version before they are reused. By default this is done on disks
        of this machine; in a bucket or on a network file system it fetches all of them.
    cpus
        Worker processes with the address ``local``; by default one for each usable core.
    compact
        Assign new positions to all rows. By default rows keep their positions in the current
        version, and samples that were removed from the source leave holes.
    compare
        Read all samples of a Python dataset while listing, and compare them, type, shape, values
        and label, with those of its latest version. Otherwise, samples are compared by the
        dataset's `fingerprint`, or else by its code and the files that it holds.
    recompute
        Compute all rows again; each call makes a new version. Nothing is reused, not even from an
        interrupted build with `recompute`.
    retry_failed
        Retry failed samples, including those that could not be fetched, and reuse all others. If
        any succeeds, the result is a new version; otherwise the current one stays.
    run_functions
        Run the functions that a store's recipe names (``precache.open(…).recipe``, and in
        `refresh`); set it only for a store that you trust. Functions that you name yourself always
        run.
    cpus_per_task, memory_per_task
        CPUs and memory of each task, with the address of a cluster; memory in bytes or
        as ``"2GB"``, by default 1 GiB plus the size of a raw shard, and more for large files.
    node_resources
        Custom Ray resources that each task requires, such as ``{"spare": 1}``; tasks run only on
        nodes that have them.
    node_labels
        Labels that a node must have, such as ``{"tier": "spot"}``.
    nice
        Niceness of the workers, 0 to 19, with the address of a cluster: other work on
        their nodes has priority.
    progress
        Show progress on standard error.
    storage_options
        Options of the remote file systems of source and store, such as
        ``{"endpoint_url": "http://host:9000"}``, passed to their fsspec classes. They are sent with
        the tasks, and never written or shown.
    storage_options_env
        Storage options whose values are environment variables, such as
        ``{"secret": "PHOTOS_SECRET"}``. Each process that opens the storage reads its own
        environment: on a cluster, set the variables on the nodes; the values are not sent.
    report
        Files for a report of the build, also written if it fails: ``.html`` for a page
        (``pip install 'precache[report]'``), ``.json`` for its figures.
    max_sample_bytes
        A larger file becomes a hole without being fetched; in bytes or as ``"2GB"``.
    sample_timeout
        Seconds that fetching or decoding a sample may take. A sample that takes longer becomes a
        hole; with the address ``serial`` it ends the build, or this process if it holds the
        interpreter's lock.
    source_kind
        Kind of the source: ``folder``, ``tar``, ``parquet``, ``zip``, ``npy`` or ``manifest``;
        by default it follows from the suffix.
    image_column, label_column, key_column
        Columns of a table with images or their URIs, labels, and names of samples. By default the
        first two are guessed, and a sample's key is its place, or its URI. The type of the labels
        decides their kind: classes, numbers (float32), or several classes (multi-hot). If labels
        come from a file of their own, `label_column` is a column of that file, and so is
        `key_column`, unless the source is a table.
    sample_name
        Part of a name in a tar archive that names a sample: up to the first dot (``first-dot``, as
        in WebDataset) or the last one (``last-dot``). By default the first dot; images whose
        suffixes do not recur in nearly all samples are refused. Of any source, each image is a
        sample by ``whole``, also those that are called as masks of others.

    Raises
    ------
    UsageError
        An option's value is not allowed, or the request cannot be met; nothing was written.
    BuildError, StorageError
        The build is incomplete; the same call continues it, unless `recompute` is set.
    """
    require_linux("build")
    request = new_request(**locals())
    from precache_workers.driver.build import run_build

    return run_build(request, progress)


@needs("planning")
def plan(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    timing: bool = True,
    rate: float | None = None,
    samples: int = 200,
    seconds: float = 45.0,
    cores: int | None = None,
    tick: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> BuildPlan | DoctorReport:
    """Report what the same `build` would do and cost, and what a cache would bring.

    Nothing is written into the store. Without a store, the report is that of `doctor`, which looks
    at samples and not at labels.

    Parameters
    ----------
    source, recipe
        As in `build`.
    store
        As in `build`; without it, the build of a new store is predicted.
    timing
        Build a few dozen rows and drop them, on this machine or on the cluster at `address`, to
        estimate the time and size of the build. Otherwise samples are read only if row shapes are
        not known, or the recipe does not state whether pixels are of pictures or of masks.
    rate
        Samples per second that the training device consumes; with it, the plan also says what a
        cache would bring. Without a store it is 1000 by default.
    samples, seconds, cores, tick
        As in `doctor`.
    options
        The other options of `build`.

    Returns
    -------
    BuildPlan or DoctorReport
        Differences from the current version, rows reused and the version of most of them, rows to
        compute, and an estimate of the time and the bytes; its `gain` is a `DoctorReport` if `rate`
        is given. Without a store, a `DoctorReport`.

    Raises
    ------
    UsageError, SourceError, RecipeError
        The build would fail with the same error.
    """
    check_call("plan", options)
    if store is None and not timing:
        raise UsageError("a plan without a store is all measured; give a store, or leave timing on")
    how: dict[str, Any] = {"samples": samples, "seconds": seconds, "cores": cores, "tick": tick}
    if store is None:
        return doctor(source, recipe, rate=1000.0 if rate is None else rate, **how, **options)
    request = new_request(source, store, recipe, **options)
    from precache_workers.driver.build_plan import run_plan

    if rate is None:
        return run_plan(request, timing, request.progress)
    examination = _examination(request, rate=rate, **how)
    planned = run_plan(request, timing, request.progress)
    same = planned.state == "build" and not planned.rows_reused
    gain = examination.report(planned.estimate if same else None)
    return dataclasses.replace(planned, gain=gain)


def check_call(
    function: str, options: Iterable[str], model: type[BaseModel] = BuildOptions
) -> None:
    """Refuse any other system than Linux, and keyword arguments that a function does not take."""
    require_linux(function)
    if unknown := set(options) - set(model.model_fields):
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def new_request(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None,
    **options: Any,
) -> Request:
    """Check keyword arguments of `build`, and return them as a `Request` for its driver.

    Raises
    ------
    UsageError
        An option's value is not allowed, or a library of the workers is missing.
    RecipeError
        The recipe leaves the draws of random ops open, and there is a store to build.
    """
    from precache_workers.planning.request import Request

    recipe = _recipe_of(recipe)
    if store:
        require_stated_draws(recipe)
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            f"source is a {type(source).__name__}; give a folder or URL, or for a torch Dataset "
            "python:module:factory"
        )
    own = {
        "source": address_of("source", source),
        "store": address_of("store", store),
        "recipe": recipe,
        "import_path": tuple(path or str(Path.cwd()) for path in sys.path),
    }
    return read_options(Request, {**options, **own})


def submit(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    code: Sequence[str | os.PathLike[str]] = (),
    **options: Any,
) -> ClusterJob:
    """Submit a build to a cluster and return at once; the job continues without this process.

    If the same build is under way, its job is returned; it does not run twice.

    Parameters
    ----------
    source, store
        As in `build`; paths are those of the cluster's nodes.
    recipe
        As in `build`; a TOML file is read on this machine.
    address
        Address of the cluster's job server, ``http://head:8265``; by default that of
        RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else of a Ray cluster that runs on this machine.
    code
        Your own modules and packages, or folders of them, that the job can import. Hidden files,
        caches, virtual environments and stores in them are not sent.
    options
        The other options of `build`. Ray shows `storage_options`, so they must hold no secrets: use
        the nodes' own credentials, or name their environment variables in `storage_options_env`.
        `labels` and `classes` are sent if they are files on this machine; `progress` is on by
        default.

    Returns
    -------
    ClusterJob
        With ``id``, ``address`` and ``wait()``; ``ray job status``, ``logs`` and ``stop`` take the
        id.

    Raises
    ------
    UsageError
        The request cannot be met, or another build into the store is under way; nothing was sent.
    BuildError
        The cluster cannot be reached.
    """
    check_call("submit", options)
    from precache_workers.jobs.job_package import pack
    from precache_workers.jobs.submission import submit_package
    from precache_workers.user_code.loading import require_permission

    checked = read_options(BuildOptions, {"progress": True, **options, "address": "auto"})
    recipe = _recipe_of(recipe)
    require_stated_draws(recipe)
    require_permission(recipe, checked.run_functions)
    source, store = address_of("source", source), address_of("store", store)
    require_apart(store, source, checked.storage_options)
    package = pack(source, store, recipe, checked, code)
    return submit_package(package, address)


@needs("doctor decodes samples and")
def doctor(
    source: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    samples: int = 200,
    seconds: float = 45.0,
    rate: float = 1000.0,
    cores: int | None = None,
    tick: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> DoctorReport:
    """Measure a random part of a source before it is cached, and predict the gain of caching.

    It is `plan` without a store: both predict the same time of a build. Nothing is kept: trials are
    written to a temporary folder, on the disk that TMPDIR names. Of a source on a local disk, up to
    1,536 files are dropped from the page cache before they are read, to measure the disk.

    Parameters
    ----------
    source, recipe
        As in `build`. Draws of random ops need not be stated.
    samples
        Number of samples, drawn at random from the source without repetition.
    seconds
        Time limit of the measurement; fewer samples are measured if they are slow.
    rate
        Samples per second that the training device consumes.
    cores
        CPU cores of the build, and of training; by default those that this process may use.
    tick
        Called with the name of each measurement when it begins.
    options
        The other options of `build`.

    Raises
    ------
    UsageError
        A number is out of range, or the source is missing, empty, or without a sample that the
        recipe can process.
    """
    check_call("doctor", options)
    how: dict[str, Any] = {"samples": samples, "seconds": seconds, "cores": cores, "tick": tick}
    return _examination(new_request(source, "", recipe, **options), rate=rate, **how).report()


def _examination(
    request: Request,
    *,
    samples: int,
    seconds: float,
    rate: float,
    cores: int | None,
    tick: Callable[[str], None],
) -> Examination:
    """Check the numbers of a request's examination."""
    from precache_workers.doctor.measure import Examination
    from precache_workers.user_code.loading import require_permission

    samples = whole("samples", samples, 1)
    cores = whole("cores", usable_cores() if cores is None else cores, 1)
    for name, value in (("seconds", seconds), ("rate", rate)):
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value:g}; give a number above 0")
    require_permission(request.recipe, request.run_functions)
    return Examination(
        request=request, samples=samples, seconds=seconds, rate=rate, cores=cores, tick=tick
    )


def _recipe_of(recipe: Recipe | str | os.PathLike[str] | None) -> Recipe:
    if recipe is None or isinstance(recipe, Recipe):
        return recipe or Recipe.image()
    if not isinstance(recipe, str | os.PathLike):
        raise UsageError(
            f"recipe is a {type(recipe).__name__}; give a Recipe or the path of a file"
        )
    return Recipe.from_toml(os.fspath(recipe))
