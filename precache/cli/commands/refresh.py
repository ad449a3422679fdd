"""``precache refresh``: fresh variants of the samples of a store."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import precache
from precache.building.refresh import refreshes
from precache.cli.arguments import SERVER, add_code, import_from_here
from precache.cli.build_options import add_option, add_options, read_keywords
from precache.cli.output import build_json, show, show_job
from precache.errors import UsageError
from precache.recipe.variants import variants_text
from precache.storage.environment import with_environment
from precache_workers.planning.options import RunOptions

if TYPE_CHECKING:
    from precache.store.version import FieldInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="folder of the store (path or URL)")
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        default="",
        help="where the samples are; default the source of the current version, as the store's log "
        "of commits names it",
    )
    parser.add_argument(
        "--times",
        type=int,
        metavar="N",
        help="number of child versions; default 1, or no limit with --every",
    )
    parser.add_argument(
        "--every", metavar="TIME", help="time from one start to the next, such as 30m; default 0"
    )
    add_options(
        parser,
        RunOptions,
        address=f"{RunOptions.model_fields['address'].description}; with --submit, {SERVER}",
        max_failures="failed samples allowed; default 1% of the samples, at least 5, and at "
        "least as many as failed before",
    )
    add_option(parser, "run_functions")
    job = parser.add_argument_group("as a job of a cluster")
    job.add_argument(
        "--submit", action="store_true", help="submit it to a cluster, as precache submit does"
    )
    add_code(job)


def run(options: argparse.Namespace) -> int:
    """Build a child of STORE's current version, and make it current. In every field with variants,
    a fresh variant replaces the oldest; all others are linked.

    The rows are those of the current version; build first if the source changed. If it is killed,
    run the same command again to continue. A Loader with refresh="epoch" reads the current version;
    versions that were replaced stay until precache gc removes them.

    A store counts as data: the functions of its recipe, and a python: source from its log, run only
    with --run-functions.

    example:
      precache refresh photos.store --times 10
    """
    address = getattr(options, "address", None)
    if options.submit:
        keywords = read_keywords(options, RunOptions, address="auto")
        keywords |= {"address": address, "times": options.times, "every": options.every}
        job = precache.submit_refresh(
            options.store, options.source or None, code=options.code, **keywords
        )
        return show_job(job, options.no_wait, options.json)
    if options.code or options.no_wait:
        raise UsageError("--code and --no-wait are for a job of a cluster; give --submit with them")
    keywords = read_keywords(options, RunOptions)
    keywords |= {"times": options.times, "every": options.every}
    print_refreshes(options.json, options.store, options.source or None, **keywords)
    return 0


def print_refreshes(
    json_to: TextIO | None, store: str, source: str | None, **keywords: Any
) -> None:
    """Refresh, and print each child version when it is complete."""
    import_from_here(source, keywords.get("run_functions", False))
    variables = keywords.get("storage_options_env")
    storage_options = with_environment(dict(keywords.get("storage_options", ())), variables)
    for result in refreshes(store, source, **keywords):
        version = precache.open(result.path, None, storage_options)
        fields = {n: field for n, field in version.fields.items() if field.variants > 1}
        data = {**build_json(result), "fields": {n: asdict(field) for n, field in fields.items()}}
        show(json_to, data, "\n".join([*_variants(fields), str(result)]))


def _variants(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Describe the variants of a child version's fields that have several."""
    for name, field in fields.items():
        new, dropped = field.first_variant + field.variants - 1, field.first_variant - 1
        yield (
            f"variant {new} of {name} is new; there are variants {variants_text(field)}; "
            f"variant {dropped} is dropped, and the others are unchanged"
        )
