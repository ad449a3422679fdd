"""Options of a build: type, default and limits of each.

The checks of Python's keyword arguments and of the command line, the driver's `Request` and the
document that a submitted job carries all come from these models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

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
from precache_workers.cluster.placement import (
    PLAIN_DICT,
    PLAIN_INT,
    Placement,
    PositiveBytes,
)
from precache_workers.runtime.time_limit import SAMPLE_SECONDS
from precache_workers.sources.base import MOST_SAMPLE_BYTES, SampleName

MOST_SHARD_SAMPLES = 1 << 24

Options = TypeVar("Options", bound=BaseModel)


def _plain_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _plain_paths(value: Any) -> Any:
    return (value,) if isinstance(value, str | os.PathLike) else value


Count = Annotated[int, Field(strict=True, ge=1), PLAIN_INT]
NotNegative = Annotated[int, Field(strict=True, ge=0, lt=2**63), PLAIN_INT]
ShardRows = Annotated[int, Field(strict=True, ge=1, le=MOST_SHARD_SAMPLES), PLAIN_INT]
PathText = Annotated[str, BeforeValidator(_plain_path)]


class SourceOptions(BaseModel):
    """Options by which the samples of a source are found in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source_kind: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    key_column: str | None = None
    sample_name: SampleName | None = None


class RunOptions(SourceOptions, Placement):
    """Options that say where and how a build or a refresh runs."""

    address: str = "local"
    cpus: Count | None = None
    on_error: Literal["skip", "raise"] = "skip"
    max_failures: NotNegative | None = None
    accept_missing: bool = False
    max_sample_bytes: PositiveBytes = ByteSize(MOST_SAMPLE_BYTES)
    sample_timeout: float = Field(default=SAMPLE_SECONDS, gt=0, le=1e9)  # of clocks
    check_space: bool = True
    verify: bool | None = None
    report: Annotated[tuple[PathText, ...], BeforeValidator(_plain_paths)] = ()
    follow_links: bool = False
    progress: bool = False
    run_functions: bool = False
    storage_options: Annotated[dict[str, Any], PLAIN_DICT] = Field(default={}, repr=False)
    storage_options_env: Annotated[dict[str, str], PLAIN_DICT] = {}

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if not is_joined(address) and address not in ("serial", "local"):
            web = address.startswith(("http://", "https://"))
            job = "; a job server takes precache submit" if web else ""
            raise ValueError(f"choose local, serial, auto, host:6379 or ray://host:10001{job}")
        return address

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.storage_options_env:
            options = with_environment(self.storage_options, self.storage_options_env)
            object.__setattr__(self, "storage_options", options)
        names = [n for n, f in Placement.model_fields.items() if getattr(self, n) != f.default]
        if names and not is_joined(self.address):
            raise ValueError(
                f"`{names[0]}` is for a cluster that is joined, and `address` is {self.address!r}; "
                "give auto, host:6379 or ray://host:10001"
            )
        return self


class LabelOptions(BaseModel):
    """Options that say which labels samples have."""

    labels: PathText | None = None
    classes: PathText | None = None
    label_level: NotNegative | None = None
    label_kind: Literal["name", "number", "value"] | None = None
    label_separator: Annotated[str | None, Field(min_length=1)] = None
    no_label: Annotated[tuple[str, ...], BeforeValidator(_plain_paths)] = ()
    class_order: Literal["text", "number"] = "text"
    all_splits: bool = False
    accept_unmatched: bool = False


class BuildOptions(RunOptions, LabelOptions):
    """All options of a build."""

    keep_order: bool = False
    shard_samples: ShardRows | None = None
    ignore_ctime: bool = False
    compact: bool = False
    compare: bool = False
    recompute: bool = False
    retry_failed: bool = False

    @model_validator(mode="after")
    def _check_reuse(self) -> Self:
        if self.retry_failed and self.recompute:
            raise ValueError(
                "`retry_failed` reuses all samples but those that failed, and `recompute` reuses "
                "none; drop one"
            )
        return self


def read_options(model: type[Options], values: Mapping[str, Any]) -> Options:
    """Check values of options.

    Raises
    ------
    UsageError
        Names the option, its value and what is allowed.
    """
    try:
        return model(**values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    raise UsageError("; ".join(map(_describe, problems)))


def _describe(problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden":
        return f"there is no option {problem['loc'][0]!r}"
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"]).replace("`", "")
    else:
        text = advice(problem)
    if not problem["loc"]:
        return text
    name, *inner = map(str, problem["loc"])
    secret = name.startswith("storage_options")
    value = "of another type" if secret else repr(problem["input"])
    return f"{' '.join((name, *inner))} is {value}; {text}"
