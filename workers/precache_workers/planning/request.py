"""The request that a build's driver gets."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from precache.errors import UsageError
from precache.maintenance.location import open_for_writing
from precache.recipe.base import UNICODE_ADVICE
from precache.recipe.recipe import Recipe
from precache.storage.retries import RETRY_SECONDS, SILENT_SECONDS
from precache.store.commit_log import recordable_source
from precache_workers.planning.options import BuildOptions
from precache_workers.planning.rows import default_max_failures
from precache_workers.sources.base import Columns, Inputs, LabelRules, Source, is_utf8
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.kinds import has_columns, open_source
from precache_workers.user_code.loading import require_permission


class Request(BuildOptions):
    """The options of a build with its source, store and recipe.

    Attributes
    ----------
    import_path
        Folders where modules of the user are looked for, in this process and on the nodes.
    """

    source: str = Field(repr=False)
    store: str = Field(repr=False)
    recipe: Recipe
    import_path: tuple[str, ...] = ()

    def allowed_failures(self, samples: int) -> int:
        """Return how many of so many samples may fail before a build stops."""
        limit = default_max_failures(samples) if self.max_failures is None else self.max_failures
        return limit if self.on_error == "skip" else 0


def check_request(request: Request) -> None:
    """Raise `UsageError` for what is wrong before the source is listed, the options' values apart.

    The options have been checked when the request was made.
    """
    require_permission(request.recipe, request.run_functions)
    least = RETRY_SECONDS + SILENT_SECONDS if "://" in request.source else 0
    if request.sample_timeout <= least:
        raise UsageError(
            f"sample_timeout is {request.sample_timeout:g}; give more than {least:g} seconds, for "
            "which requests to a service may be made again"
        )
    if not is_utf8(path := recordable_source(request.source) or ""):
        raise UsageError(f"source is {path!r}; {UNICODE_ADVICE}")
    open_for_writing(request.store, request.source, request.storage_options)


def source_of(request: Request) -> Source:
    """Open the source of a request."""
    rules = label_rules(request)
    # With a file of labels, the column is one of that file; that of keys may be one of both.
    label_column, key_column = request.label_column, request.key_column
    if request.labels is not None:
        label_column = None
        if not source_has_columns(request):
            key_column = None
    source = open_source(
        request.source,
        request.storage_options,
        follow_links=request.follow_links,
        most_bytes=request.max_sample_bytes,
        kind=request.source_kind,
        columns=Columns(request.image_column, label_column, key_column, Inputs.of(request.recipe)),
        sample_name=request.sample_name,
        # Of text, the rules are for a file of labels, if there is one.
        rules=rules
        if request.labels is None
        else replace(rules, kind=None, separator=None, none=()),
    )
    if isinstance(source, DatasetSource):
        inputs = tuple((name, field.input) for name, field in request.recipe.fields.items())
        given = request.labels is not None
        return replace(source, fields=inputs, labels_given=given, compare=request.compare)
    return source


def source_has_columns(request: Request) -> bool:
    """Return whether the source is a table, whose columns a request may choose."""
    return has_columns(request.source, request.storage_options, request.source_kind)


def label_rules(request: Request) -> LabelRules:
    """Return the readings of labels that a request chooses."""
    return LabelRules(
        request.label_level,
        request.label_kind,
        request.label_separator,
        request.no_label,
        request.class_order,
        request.all_splits,
    )
