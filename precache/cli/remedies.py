"""Commands by which a source builds that was refused: each is planned before it is printed."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from precache.cli import calls
from precache.cli.main import parse
from precache.cli.signatures import function_of
from precache.errors import RecipeError, UsageError
from precache.messages import printable, without_secrets
from precache.storage.environment import FromEnvironment

SECONDS = 60.0
"""Time for plans; commands that are left are printed without one."""

SAMPLE_SECONDS = 10.0
"""Limit for a sample of a plan, which this process reads."""

ROUNDS = 6
"""Refusals, one after another, whose first ways out a command takes."""


class _Command(NamedTuple):
    """A command by which a source may build.

    Attributes
    ----------
    met
        Number of refusals, one after another, of which it takes a way out.
    added
        Flags of these ways; one that is given twice would undo the first.
    """

    words: Sequence[str]
    met: int = 0
    added: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return shlex.join(["precache", *self.words])


def remedies(error: UsageError, given: Sequence[str], seconds: float) -> Iterator[str]:
    """Yield lines with the commands by which a refused source builds.

    What a plan of a command refuses, such as pixels that are read after labels, is said before it,
    and the command takes a way out of that, too: the only command each of them, and of several
    commands each the first. A command that has none is left out.

    Parameters
    ----------
    given
        Words of the refused command.
    seconds
        Time that the refusal took, as that of a plan may.
    """
    end, asked, said = time.monotonic() + SECONDS, _Command(given), {str(error)}
    left = _ways_out(error, asked)
    plans = left and given[0] in ("build", "plan") and parse(given).store is not None
    is_one, all_tried = len(left) == 1, True
    # Another source begins anew, without the flags of ways before; those of a recipe go with any.
    anew = dict(left) if isinstance(error, RecipeError) else dict.fromkeys(dict(left), asked)
    while left:
        way, command = left.pop(0)
        began = time.monotonic()
        refusal: UsageError | bool = not plans
        if plans and command.met <= ROUNDS and began + seconds <= end:
            refusal = _refusal_of_plan(parse(command.words)) or True
            seconds = time.monotonic() - began  # that of the next may take as long
        if isinstance(refusal, bool):
            if (line := f"  {command}") not in said:
                said.add(line)
                yield line
                all_tried = all_tried and refusal
            continue
        others = _ways_out(refusal, command)
        flags = [(other, by) for other, by in others if _is_flag(other[0])]
        if flags and _is_flag(way[0]):
            others = flags
        else:
            if refusal.ways and not _is_flag(refusal.ways[0][0]):
                source = anew[way]._replace(met=command.met)
                others = _ways_out(refusal, source)
            others.sort(key=lambda one: one[0] != way)
        text = "also" if others else f"`{shlex.join(way)}` is refused, too"
        text += f": {refusal}"
        if text not in said and not (others and str(refusal) in str(error)):
            said.add(text)
            yield f"precache: {text}"
        left[:0] = [(way, by) for _, by in (others if is_one else others[:1])]
        is_one = is_one and len(others) == 1
    if not all_tried:
        yield (
            "precache: not all of these were tried, as that takes long: one that is "
            " refused prints commands in its turn"
        )


def _refusal_of_plan(options: argparse.Namespace) -> UsageError | None:
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            keywords = calls.arguments("plan", options)
            if "://" not in str(options.source):  # whose requests may be made again
                timeout = keywords.get("sample_timeout", SAMPLE_SECONDS)
                keywords["sample_timeout"] = min(timeout, SAMPLE_SECONDS)
            keywords |= {"progress": False, "timing": False, "rate": None, "address": "serial"}
            function_of("plan")(**keywords)
    except UsageError as error:
        return error
    except Exception:  # of a service, or a sample that takes long: the build says it again
        pass
    return None


def _ways_out(error: UsageError, command: _Command) -> list[tuple[tuple[str, ...], _Command]]:
    """Return the ways out of the refusal of a command, each with its command.

    None has secrets, or a flag of a way before.
    """
    if not error.ways:
        return []
    from precache_workers.jobs.storage_options import is_plain

    options, given = parse(command.words), command.words
    source = getattr(options, "source", None)
    given_options = getattr(options, "storage_options", ())
    are_plain = all(isinstance(v, FromEnvironment) or is_plain(k, v) for k, v in given_options)
    # Flags of a recipe do not go with another one.
    if source is None or not are_plain or (isinstance(error, RecipeError) and "recipe" in options):
        return []
    [place] = (place for place, word in enumerate(given) if word is source)
    end = next((number for number, word in enumerate(given) if word == "--"), len(given))
    here = "" if Path(source).is_absolute() else f"{Path.cwd()}/"

    def relative(text: str) -> str:
        short = text.removeprefix(here)
        return f"./{short}" if short != text and short.startswith("-") else short  # no flag

    found = []
    for way in error.ways:
        added = frozenset(filter(_is_flag, way))
        words, flags = [*given], [*map(relative, way)]
        is_source = not flags[0].startswith("-")
        if is_source:
            words[place] = type(source)(flags.pop(0))
        if is_source and getattr(options, "source_kind", None) in ("folder", "folders"):
            flags += "--source-kind", "folders" if "{" in words[place] else "folder"
        words[end:end] = flags
        by = _Command(words, command.met + 1, command.added | added)
        is_shown = str(by) == printable(without_secrets(str(by)))
        if is_shown and added.isdisjoint(command.added):
            found.append((way, by))
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("--")
