"""Calls of a command's function, and what is printed of its result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

import precache
from precache.cli.commands import COMMAND
from precache.cli.signatures import function_of, parameters, read_recipe
from precache.errors import UsageError
from precache.messages import plain_data, printable
from precache.runtime.terminal import Terminal, note, say, say_text

if TYPE_CHECKING:
    from precache_workers.jobs.submission import ClusterJob


def run(name: str, options: argparse.Namespace, text: Callable[[Any], str] = str) -> int:
    """Call the function of a command, and print its result; returns the exit status."""
    keywords, page = arguments(name, options), getattr(options, "html", None)
    if page is not None:
        from precache.html.pages import check_page

        check_page(page)
    with _progress(name, keywords, shown=not options.json):
        result = function_of(name)(**keywords)
    show(options, result, text(result))
    if page is not None:
        result.html(page)
    return int(getattr(result, "fails", not getattr(result, "ok", True)))


def run_plan(name: str, options: argparse.Namespace) -> int:
    """Plan a build, and say what a cache would bring."""
    if options.html and options.store is not None and not hasattr(options, "rate"):
        raise UsageError("--html shows what a cache would bring; give --rate with it")
    return run(name, options)


def run_build(name: str, options: argparse.Namespace) -> int:
    """Build, or plan the build with ``--dry-run``."""
    if options.dry_run:
        return run("plan", options)
    hint = "\nto retry failed samples, for example after raising a limit, give --retry-failed"
    return run(name, options, lambda result: f"{result}{hint if result.holes else ''}")


def run_submit(name: str, options: argparse.Namespace) -> int:
    """Submit a build as a job; print its id, or follow it and print its result."""
    keywords = arguments(name, options, here=False)
    return follow(function_of(name)(**keywords), options)


def run_refresh(name: str, options: argparse.Namespace) -> int:
    """Refresh, and say which variants are new."""
    from precache.recipe.variants import variants_text

    keywords = arguments(name, options)
    result = precache.refresh(**keywords)
    version = precache.open(result.path, keywords.get("storage_options"))
    fields = {name: field for name, field in version.fields.items() if field.variants > 1}
    lines = [
        f"variant {field.first_variant + field.variants - 1} of {name} is new; there are variants "
        f"{variants_text(field)}; variant {field.first_variant - 1} is dropped, and the others are "
        "unchanged"
        for name, field in fields.items()
    ]
    show(options, {**to_json(result), "fields": fields}, "\n".join([*lines, str(result)]))
    return 0


def run_view(name: str, options: argparse.Namespace) -> int:
    """Serve pages, or write one."""
    keywords = arguments(name, options)
    if options.out is None:
        precache.view(**keywords).serve(options.port)
    else:
        from precache.html.pages import check_page

        check_page(options.out)
        precache.view(**keywords).write(options.out)
        say(f"wrote {options.out}", stderr=True)
    return 0


def run_job(name: str, options: argparse.Namespace) -> int:
    """Run the build that a submitted document describes, and print JSON."""
    from precache.recipe.recipe import Recipe
    from precache_workers.planning.options import BuildOptions, read_options

    given = options.document
    read_options(BuildOptions, given["options"])  # it names options that this release lacks
    keywords = {"source": given["source"], "store": given["store"], **given["options"]}
    keywords["recipe"] = Recipe.from_dict(given["recipe"])
    _import_from_here(keywords)
    show(options, precache.build(**keywords))
    return 0


def arguments(name: str, options: argparse.Namespace, *, here: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of a command's function.

    Parameters
    ----------
    here
        The function runs in this process, and may import the user's modules.
    """
    names = [parameter.name for _, parameter in parameters(name)]
    keywords = {name: value for name, value in vars(options).items() if name in names}
    if "storage_options" in keywords:
        keywords["storage_options"] = dict(keywords["storage_options"])
    if COMMAND[name].model:
        keywords = {"progress": True, **keywords}
    if "recipe" in names:
        keywords["recipe"] = read_recipe(vars(options))
    if here:
        _import_from_here(keywords)
    return keywords


def _import_from_here(keywords: Mapping[str, Any]) -> None:
    """Append the current folder to the import path if the command runs the user's code.

    The folder comes last: it may be a store or full of samples, with files named like modules.
    """
    functions = keywords.get("run_functions") or getattr(keywords.get("recipe"), "functions", ())
    if functions or str(keywords.get("source")).startswith("python:"):
        sys.path.append(str(Path.cwd()))


# --- what is printed ----------------------------------------------------------------------------


def show(options: argparse.Namespace, result: Any, text: str | None = None) -> None:
    """Print a result for people, or write it as one line of JSON."""
    if options.json:
        options.json.write(json.dumps(to_json(result)) + "\n")
        options.json.flush()
    else:
        say_text(str(result) if text is None else text)
        sys.stdout.flush()


def to_json(result: Any) -> Any:
    """Return the fields and properties of a result as plain data."""
    data = plain_data(result)
    if dataclasses.is_dataclass(result) and not hasattr(result, "to_dict"):
        members = vars(type(result)).items()
        names = [name for name, member in members if isinstance(member, property)]
        data |= {name: plain_data(getattr(result, name)) for name in names}
    return data


def follow(submitted: ClusterJob, options: argparse.Namespace) -> int:
    """Print a job's id, or follow the job and print its result; returns the exit status."""
    data = {"job": submitted.id, "address": submitted.address, "attached": submitted.attached}
    if options.no_wait:
        show(options, data, submitted.id)
        return 0
    began = "already running" if submitted.attached else "submitted"
    note(f"job {submitted.id} is {began}; to stop it: {submitted.command('stop')}")
    try:
        result = submitted.wait(lambda line: say(line, stderr=True))
    except KeyboardInterrupt:
        note(f"the job continues; to see its progress: {submitted.command('logs --follow')}")
        return 130
    show(options, {**data, "result": to_json(result)}, str(result))
    return 0


@contextlib.contextmanager
def _progress(name: str, keywords: dict[str, Any], shown: bool) -> Iterator[None]:
    """Show on standard error what a function with a `tick` works on."""
    heading = "" if keywords.get("store") and name == "plan" else COMMAND[name].tick
    if heading == "Measuring":
        with Terminal(stderr=True, quiet=not shown).status(heading) as status:
            keywords["tick"] = lambda what: status.update(Text(printable(f"{heading}: {what}")))
            yield
    elif heading:
        from precache.store.open import open_version

        version = open_version(keywords["uri"], keywords.get("storage_options"), mends=True)
        total = sum(field.stored_nbytes for field in version.fields.values())
        from rich import progress

        kinds = progress.BarColumn, progress.DownloadColumn, progress.TransferSpeedColumn
        columns = progress.TextColumn(heading), *(kind() for kind in kinds)
        console = Terminal(stderr=True)
        hidden = not (shown and console.is_terminal)
        with progress.Progress(*columns, console=console, disable=hidden, transient=True) as bar:
            task = bar.add_task("", total=total)
            keywords["tick"] = lambda nbytes: bar.advance(task, nbytes)
            yield
    else:
        yield
