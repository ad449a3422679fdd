"""Options of a build, each declared once: name, type, default, limits, description and flag.

The flags of the command line, the checks of Python's keyword arguments, the driver's `Request` and
the document that a submitted job carries all come from these models.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from precache.errors import UsageError
from precache.recipe.base import advice
from precache.storage.environment import with_environment
from precache_workers.cluster.executor import is_joined
from precache_workers.cluster.placement import Placement
from precache_workers.runtime.time_limit import SAMPLE_SECONDS
from precache_workers.sources.base import MOST_SAMPLE_BYTES
from precache_workers.sources.sample_inputs import SampleName

MOST_SHARD_SAMPLES = 1 << 24

Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class Flag:
    """The flag of an option on the command line.

    Attributes
    ----------
    metavar
        Placeholder of the value in the help.
    name
        By default ``--`` and the option's name with dashes.
    turns_off
        The flag turns the option off; on the command line it is on by default.
    """

    metavar: str | None = None
    name: str = ""
    turns_off: bool = False


def _plain_int(value: Any) -> Any:
    """Convert integers of NumPy and torch; leave other values to the check that follows."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _plain_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _plain_paths(value: Any) -> Any:
    return (value,) if isinstance(value, str | os.PathLike) else value


def _plain_dict(value: Any) -> Any:
    """Convert any mapping, or (name, value) pairs as the command line reads them."""
    try:
        return dict(value or ())
    except (TypeError, ValueError):
        raise ValueError("give values by name") from None


_INT = BeforeValidator(_plain_int)
_DICT = BeforeValidator(_plain_dict)
Count = Annotated[int, Field(strict=True, ge=1), _INT]
NotNegative = Annotated[int, Field(strict=True, ge=0), _INT]
Niceness = Annotated[int, Field(strict=True, ge=0, le=19), _INT]
ShardRows = Annotated[int, Field(strict=True, ge=1, le=MOST_SHARD_SAMPLES), _INT]
PathText = Annotated[str, BeforeValidator(_plain_path)]
PositiveBytes = Annotated[ByteSize, Field(ge=1)]


class PlacementOptions(BaseModel):
    """Resources that each task takes of a cluster that is joined, and the nodes for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    group: ClassVar[str] = "on a cluster that is joined"

    cpus_per_task: Annotated[float, Flag("N")] = Field(
        default=1, gt=0, description="CPUs of each task"
    )
    memory_per_task: Annotated[PositiveBytes | None, Flag("SIZE")] = Field(
        default=None,
        description="memory of each task, such as 2GB; default 1 GiB and the size of a raw shard",
    )
    node_resources: Annotated[
        dict[str, Annotated[float, Field(gt=0)]], _DICT, Flag("NAME=AMOUNT", "--resource")
    ] = Field(
        default={}, description="custom resource that each task takes, such as spare=1; repeatable"
    )
    node_labels: Annotated[dict[str, str], _DICT, Flag("KEY=VALUE", "--label")] = Field(
        default={}, description="label that a node must have, such as tier=spot; repeatable"
    )
    nice: Annotated[Niceness, Flag("N")] = Field(
        default=10,
        description="least niceness of the workers, 0 to 19: other work on their nodes goes first",
    )

    @field_validator("node_labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not key or not value or set(value) & set("!(),"):
                raise ValueError(f"label {key}={value} is not KEY=VALUE, such as tier=spot")
        return labels

    @property
    def placement(self) -> Placement:
        """These options as the executor takes them."""
        return Placement(
            cpus=self.cpus_per_task,
            memory=self.memory_per_task,
            resources=self.node_resources,
            labels=self.node_labels,
            nice=self.nice,
        )


class SourceOptions(BaseModel):
    """Options by which the samples of a source are found in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    group: ClassVar[str] = "source"

    source_kind: Annotated[str | None, Flag("KIND")] = Field(
        default=None,
        description="folder, tar, zip, parquet, arrow, tfrecord, lmdb, arrayrecord, manifest, or "
        "the kind of a plug-in; default by the suffix of SOURCE",
    )
    image_column: Annotated[str | None, Flag("NAME")] = Field(
        default=None,
        description="column of a table that has images, or their URIs; default by "
        "its name and type",
    )
    label_column: Annotated[str | None, Flag("NAME")] = Field(
        default=None, description="column of a table that has labels; default by its name"
    )
    key_column: Annotated[str | None, Flag("NAME")] = Field(
        default=None,
        description="column of a table that has a unique name of each sample, so that it keeps its "
        "row in any order; default the number of its row, or its URI",
    )
    sample_name: Annotated[SampleName | None, Flag()] = Field(
        default=None,
        description="what names a sample of a tar archive: its members' names up to the first dot, "
        "as in WebDataset, or up to the last one; or each image is a sample; default by the "
        "first dot, and refused if suffixes do not recur",
    )


class RunOptions(SourceOptions, PlacementOptions):
    """Options that say where and how a build or a refresh runs."""

    group: ClassVar[str] = "running"

    address: Annotated[str, Flag()] = Field(
        default="local",
        description="local (processes on this machine; default), serial (this process), "
        "auto or ray://host:port (a Ray cluster)",
    )
    cpus: Annotated[Count | None, Flag("N")] = Field(
        default=None, description="worker processes on this machine; default one per usable core"
    )
    on_error: Annotated[Literal["skip", "raise"], Flag()] = Field(
        default="skip",
        description="what happens at a sample that cannot be decoded: it becomes a hole (default), "
        "or the build ends",
    )
    max_failures: Annotated[NotNegative | None, Flag("N")] = Field(
        default=None, description="failed samples allowed; default 1% of the samples, at least 5"
    )
    accept_missing: Annotated[bool, Flag()] = Field(
        default=False, description="make holes of samples that cannot be fetched"
    )
    max_sample_bytes: Annotated[PositiveBytes, Flag("SIZE")] = Field(
        default=ByteSize(MOST_SAMPLE_BYTES),
        description="a larger file becomes a hole without being fetched; default "
        f"{MOST_SAMPLE_BYTES >> 20}MiB",
    )
    sample_timeout: Annotated[float, Flag("SECONDS")] = Field(
        default=SAMPLE_SECONDS,
        gt=0,
        description="a sample that takes longer to fetch or to decode becomes a hole",
    )
    check_space: Annotated[bool, Flag(name="--no-space-check", turns_off=True)] = Field(
        default=True, description="begin even if the disk seems too small"
    )
    verify: Annotated[bool | None, Flag()] = Field(
        default=None,
        description="compare the bytes of shards with their checksums: of a complete version, to "
        "repair what is damaged, and of an earlier one before they are reused; default on disks of "
        "this machine, as on a network all of them are fetched",
    )
    report: Annotated[tuple[PathText, ...], BeforeValidator(_plain_paths), Flag("PATH")] = Field(
        default=(),
        description="write a report of the build, also if it fails: a page (.html) or figures "
        "(.json); repeatable",
    )
    follow_links: Annotated[bool, Flag()] = Field(
        default=False,
        description="follow links on a local disk, and redirects of a web server, that lead out of "
        "the source; default leave them out",
    )
    progress: Annotated[bool, Flag(name="--quiet", turns_off=True)] = Field(
        default=False, description="no progress on stderr"
    )
    run_functions: bool = Field(
        default=False,
        description="run the code that the store names: functions of its recipe, and a python: "
        "source in its log of commits. It runs with your rights, so only for a store that you "
        "trust: see what precache info prints of the recipe, and read these functions. A recipe "
        "file that you name yourself needs no such permission",
    )
    storage_options: Annotated[dict[str, Any], _DICT, Flag(name="--storage-option")] = Field(
        default={}, repr=False
    )
    storage_options_env: Annotated[dict[str, str], _DICT, Flag(name="--storage-option-env")] = {}

    @model_validator(mode="after")
    def _name_variables(self) -> Self:
        if self.storage_options_env:
            options = with_environment(self.storage_options, self.storage_options_env)
            object.__setattr__(self, "storage_options", options)
        return self

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if not is_joined(address) and address not in ("serial", "local"):
            web = address.startswith(("http://", "https://"))
            job = "; a job server takes precache submit, or refresh --submit" if web else ""
            raise ValueError(f"choose local, serial, auto, or ray://host:10001{job}")
        return address

    @model_validator(mode="after")
    def _check_joined(self) -> Self:
        if not is_joined(self.address) and self.placement != Placement():
            default = PlacementOptions()
            names = [
                n for n in type(default).model_fields if getattr(self, n) != getattr(default, n)
            ]
            raise ValueError(
                f"`{names[0]}` is for a cluster that is joined, and `address` is {self.address!r}; "
                "give auto or ray://host:10001"
            )
        return self


class BuildOptions(RunOptions):
    """All options of a build."""

    group: ClassVar[str] = "rows"

    labels: Annotated[PathText | None, Flag("CSV")] = Field(
        default=None, description="key,label lines that override the labels of the source"
    )
    classes: Annotated[PathText | None, Flag("FROM")] = Field(
        default=None,
        description="store, file, or folder of class folders, whose class map is used as it is",
    )
    label_level: Annotated[NotNegative | None, Flag("N")] = Field(
        default=None,
        description="folder of a path that is its class: 1 for the first, 0 for none; default the "
        "first, or the first below a folder that holds all images",
    )
    label_kind: Annotated[Literal["name", "number", "value"] | None, Flag()] = Field(
        default=None,
        description="labels are names of classes, class numbers, or values for a regression; "
        "default by their type and text",
    )
    label_separator: Annotated[str | None, Field(min_length=1), Flag("TEXT")] = Field(
        default=None, description="labels are several classes, with TEXT between them"
    )
    no_label: Annotated[tuple[str, ...], BeforeValidator(_plain_paths), Flag("TEXT")] = Field(
        default=(), description="label that stands for none, such as NaN; repeatable"
    )
    class_order: Annotated[Literal["text", "number"], Flag()] = Field(
        default="text",
        description="names of classes are sorted as text (default), or as whole numbers",
    )
    accept_unmatched: Annotated[bool, Flag()] = Field(
        default=False,
        description="continue although many lines of --labels match no sample, or many samples get "
        "no label",
    )
    keep_order: Annotated[bool, Flag()] = Field(
        default=False, description="store rows in the order of the listing, not shuffled"
    )
    shard_samples: Annotated[ShardRows | None, Flag("N")] = Field(
        default=None,
        description="rows of a shard; default 128 MiB of raw data, small sets in about 16 shards",
    )
    ignore_ctime: Annotated[bool, Flag()] = Field(
        default=False,
        description="take local files as unchanged that have the size and time that they had, "
        "even if their ctime is another; default read those, as their content decides",
    )
    compact: Annotated[bool, Flag()] = Field(
        default=False,
        description="place all rows anew, without holes for samples that were removed",
    )
    compare: Annotated[bool, Flag()] = Field(
        default=False,
        description="of a Python dataset, read all samples while listing, and compare them with "
        "those that are stored",
    )
    recompute: Annotated[bool, Flag()] = Field(
        default=False, description="compute all rows again, as a new version; reuse nothing"
    )
    retry_failed: Annotated[bool, Flag()] = Field(
        default=False,
        description="try failed samples again, also those that could not be fetched, and reuse all "
        "others; if some succeed, this is a new version, else the current one stays",
    )

    @model_validator(mode="after")
    def _check_reuse(self) -> Self:
        if self.retry_failed and self.recompute:
            raise ValueError(
                "`retry_failed` reuses all samples but those that failed, and `recompute` reuses "
                "none; drop one"
            )
        return self


def flag_of(name: str) -> str:
    """Return the flag of an option of `BuildOptions`."""
    field = BuildOptions.model_fields.get(name)
    flags = (entry.name for entry in (field.metadata if field else ()) if isinstance(entry, Flag))
    return next(flags, "") or "--" + name.replace("_", "-")


def read_options(
    model: type[Options], values: Mapping[str, Any], spell: Callable[[str], str] = str
) -> Options:
    """Check values of options.

    Parameters
    ----------
    spell
        Converts an option's name to what the user wrote, such as `flag_of`; by default it is a
        keyword argument.

    Raises
    ------
    UsageError
        Names the option, its value and what is allowed.
    """
    try:
        return model(**values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    raise UsageError("; ".join(_describe(problem, spell) for problem in problems))


def _describe(problem: ErrorDetails, spell: Callable[[str], str]) -> str:
    if problem["type"] == "extra_forbidden":
        return f"there is no option {problem['loc'][0]!r}"
    if problem["type"] == "value_error":
        error = str(problem["ctx"]["error"])
        text = re.sub(r"`(\w+)`", lambda match: spell(match[1]), error)
    else:
        text = advice(problem)
    if not problem["loc"]:
        return text
    name, *inner = map(str, problem["loc"])
    secret = name.startswith("storage_options")
    value = "of another type" if secret else repr(problem["input"])
    return f"{' '.join((spell(name), *inner))} is {value}; {text}"
