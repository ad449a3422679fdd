"""Commands by which a source builds that was refused: each is planned before it is printed."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from precache.cli import calls
from precache.cli.main import parse
from precache.cli.signatures import function_of
from precache.errors import ChoiceError, PrecacheError, RecipeError, UsageError
from precache.messages import printable, without_secrets
from precache.storage.environment import FromEnvironment

SECONDS = 60.0
"""Time for plans; commands that are left are printed without one."""

SAMPLE_SECONDS = 10.0
"""Limit for a sample of a plan, which this process reads."""

MOST_UNPACKED = 256 << 20
"""Bytes that are unpacked at most, for the plan of a command that unpacks its source."""

ROUNDS = 6
"""Refusals, one after another, whose first ways out a command takes."""

PUBLIC_OPTIONS = (
    "account_host", "account_name", "anon", "endpoint_url", "profile", "project", "requester_pays"
)  # fmt: skip
"""Storage options whose values are no secrets."""


class _Command(NamedTuple):
    """Words of a command, and those of commands that unpack its source before it."""

    words: Sequence[str]
    unpack: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return " && ".join(map(shlex.join, [*self.unpack, ["precache", *self.words]]))


def remedies(
    error: PrecacheError,
    options: argparse.Namespace,
    given: Sequence[str],
    seconds: float,
) -> Iterator[str]:
    """Yield lines with the commands by which a refused source builds.

    What a plan of a command refuses, such as pixels that are read after labels, is said before it,
    and the command takes a way out of that, too: the only command each of them, and of several
    commands each the first. A command that has none is left out.

    Parameters
    ----------
    options
        The arguments `given` of the refused command, parsed.
    seconds
        Time that the refusal took, as that of a plan may.
    """
    end = time.monotonic() + SECONDS
    plans = options.command in ("build", "plan") and getattr(options, "store", None) is not None
    said, is_of_recipe = {str(error)}, isinstance(error, RecipeError)
    left = [*_commands(error, options, given)]
    is_one, tried = len(left) == 1, True
    for way, first in left:
        command: _Command | None = first
        planned, taken = not plans, {word for word in way if _is_flag(word)}
        # The flags of a recipe go with any source.
        anew = (parse(first.words), first.words) if is_of_recipe else (options, given)
        for _ in range(ROUNDS if plans else 0):
            if command is None or time.monotonic() + seconds > end:
                break
            own, began = parse(command.words), time.monotonic()
            refusal = _refusal(command)
            seconds = time.monotonic() - began  # that of the next may take as long
            if isinstance(refusal, bool):
                planned = refusal
                break
            others = [*_commands(refusal, own, command.words, command.unpack)]
            # A flag that is given twice would undo the way.
            apart = [(o, c) for o, c in others if _is_flag(o[0]) and taken.isdisjoint(o)]
            if not (apart and _is_flag(way[0])):
                if others and not _is_flag(others[0][0][0]):
                    # Another source begins anew: it may not take the flags of ways before.
                    others, taken = [*_commands(refusal, *anew, command.unpack)], set()
                apart = [(o, c) for o, c in others if taken.isdisjoint(o)]
                apart.sort(key=lambda one: one[0] != way)
            command = None
            if apart:
                [(other, command), *more] = apart
                taken |= {word for word in other if _is_flag(word)}
                if is_one:
                    left += [(way, one) for _, one in more]
                    is_one = not more
            text = "also" if command else f"`{shlex.join(way)}` is refused, too"
            text += f": {refusal}"
            if text not in said and not (command and str(refusal) in str(error)):
                said.add(text)
                yield f"precache: {text}"
        if command is not None and (line := f"  {command}") not in said:
            said.add(line)
            yield line
            tried = tried and planned
    if not tried:
        yield (
            "precache: not all of these were tried, as that takes long, or unpacks much: one that "
            "is refused prints commands in its turn"
        )


def _refusal(command: _Command) -> UsageError | bool:
    """Plan the build of a command, whose source is unpacked into a temporary folder.

    Returns why it is refused; True if it is not, or cannot be told; False if that was not tried.
    """
    options = parse(command.words)
    if not command.unpack:
        return _refusal_of_plan(options) or True
    folder = command.unpack[-1][-1]
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as temporary:
        unpacked = Path(temporary, Path(folder).name)
        unpacked.mkdir()
        if _unpack(command.unpack, unpacked):
            options.source = options.source.replace(folder, str(unpacked), 1)
            refusal = _refusal_of_plan(options)
            if refusal is None:
                return True
            named = [str(part).replace(str(unpacked), folder) for part in refusal.args]
            ways = [[word.replace(str(unpacked), folder) for word in way] for way in _ways(refusal)]
            return type(refusal)(*named, **({"ways": ways} if ways else {}))
    return False


def _unpack(commands: Sequence[Sequence[str]], folder: Path) -> bool:
    """Unpack archives as commands would, into another folder.

    Returns False if not all were: they are large, damaged or encrypted, or of a service.
    """
    room = MOST_UNPACKED
    with contextlib.suppress(Exception):
        for command in commands:
            if "zipfile" in command:
                with zipfile.ZipFile(command[-2]) as archive:
                    room -= sum(member.file_size for member in archive.infolist())
                    if room < 0:
                        return False
                    archive.extractall(folder)
            elif command[0] == "tar":
                with tarfile.open(command[2]) as tar:
                    for member in filter(lambda member: not member.isdir(), tar):
                        room -= member.size
                        name = PurePosixPath(member.name)
                        data = tar.extractfile(member) if member.isfile() else None
                        if room < 0 or name.is_absolute() or ".." in name.parts or data is None:
                            return False
                        (folder / name).parent.mkdir(parents=True, exist_ok=True)
                        (folder / name).write_bytes(data.read())
            elif command[0] != "mkdir":
                return False
        return True
    return False


def _ways(error: PrecacheError) -> Sequence[Sequence[str]]:
    return error.ways if isinstance(error, ChoiceError | RecipeError) else ()


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


def _commands(
    error: PrecacheError,
    options: argparse.Namespace,
    given: Sequence[str],
    unpack: Sequence[Sequence[str]] = (),
) -> Iterator[tuple[Sequence[str], _Command]]:
    """Yield the ways out of a refusal, each with its command; none with secrets.

    Parameters
    ----------
    unpack
        Words of commands by which the source of the refused command comes to be.
    """
    source = getattr(options, "source", None)
    ways = _ways(error)
    secret = (
        key not in PUBLIC_OPTIONS and not isinstance(value, FromEnvironment)
        for key, value in getattr(options, "storage_options", ())
    )
    if not ways or source is None or any(secret):
        return
    if isinstance(error, RecipeError) and hasattr(options, "recipe"):
        return  # flags do not go with it
    [place] = (place for place, word in enumerate(given) if word is source)
    end = next((number for number, word in enumerate(given) if word == "--"), len(given))
    here = "" if Path(source).is_absolute() else f"{Path.cwd()}/"

    def relative(text: str) -> str:
        short = text.removeprefix(here)
        return f"./{short}" if short != text and short.startswith("-") else short  # no flag

    if isinstance(error, ChoiceError) and error.unpack:
        unpack = [[*map(relative, command)] for command in error.unpack]
    for way in ways:
        words, flags = [*given], [*map(relative, way)]
        is_source = not flags[0].startswith("-")
        if is_source:
            words[place] = type(source)(flags.pop(0))
        before = unpack if unpack and words[place].startswith(unpack[-1][-1]) else ()
        if is_source:
            kind = getattr(options, "source_kind", None)
            if kind in ("folder", "folders") or (kind and before):  # that of the archives
                flags += "--source-kind", "folders" if "{" in words[place] else "folder"
        words[end:end] = flags
        command = _Command(words, before)
        if str(command) == printable(without_secrets(str(command))):
            yield way, command


def _is_flag(word: str) -> bool:
    return word.startswith("--")
