"""The command line: its commands, their errors and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

import precache
from precache.cli.commands import COMMAND, COMMANDS
from precache.errors import PrecacheError, UsageError
from precache.messages import did_you_mean, printable, without_secrets

_RESUMED = ("build", "pull", "push", "refresh")

_EPILOG = """\
examples:
  precache doctor photos/ --resize 256 --crop 224
  precache build photos/ photos.store --resize 256 --crop 224
  precache COMMAND --help       arguments of a command

exit status: 0 done; 1 failed or incomplete (run it again to continue); 2 bad usage; 130 interrupted
"""

_PLAIN_WORDS = (
    (r"(invalid choice: '[^'=]*)=.*(' \(choose)", r"\1=…\2"),  # it may be a secret
    (r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", r"\1 is \2; choose \3"),
    (r"argument (\S+): invalid int value: (.*)", r"\1 is \2; give a whole number"),
    (r"argument (\S+): invalid float value: (.*)", r"\1 is \2; give a number"),
    (r"argument (\S+: )", r"\1"),
    (r"the following arguments are required: (.*)", r"give \1"),
)
"""Patterns of argparse's messages, and what is printed instead."""


class _Word(str):
    """An argument, which is told from another of the same text by its identity."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines, without values that may be secrets."""

    def __init__(self, **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **settings)

    def error(self, message: str) -> NoReturn:
        for pattern, words in _PLAIN_WORDS:
            message = re.sub(pattern, words, message)
        message = printable(without_secrets(message))
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str], secret: bool) -> NoReturn:
        """Refuse unknown arguments and suggest similar flags; show values only if not `secret`."""
        flags = [match[0] for text in unknown if (match := re.match(r"--[\w-]+|-\w", text))]
        if flags:
            known = re.findall(r"--[\w-]+", self.format_help())
            places = self.format_usage().rpartition("]")[2].split()
            said = [f"there is no {flag}{did_you_mean(flag, known)}" for flag in flags]
            if any(flag.lstrip("-").upper() in places for flag in flags):
                said.append(f"give {' '.join(places)} without flags")
            self.error("; ".join(said))
        self.error(f"unexpected argument: {'too many' if secret else ' '.join(unknown)}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, and import the function of its command.

    Returns
    -------
    argparse.Namespace
        The arguments that were given, `command`, and `json`, a stream or None.
    """
    name, *rest = arguments or ["--help"]
    if name == "job":  # what a submitted job runs; it is not listed
        parser = _Parser(prog="precache job", description="Run a build that was submitted.")
        parser.add_argument("document", type=json.loads, help="the build, as submit puts it")
        return parser.parse_args(rest, argparse.Namespace(command=name, json=sys.stdout))
    if name not in COMMAND:
        _help_or_refuse(name)
    parser = _parser(name)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        parser.refuse(unknown, any(text.startswith("--storage") for text in rest))
    options.json = sys.stdout if options.json else None
    return options


@functools.cache
def _parser(name: str) -> _Parser:
    from precache.cli.signatures import add_arguments

    parser = _Parser(prog=f"precache {name}")
    parser.set_defaults(command=name)
    add_arguments(parser, name)
    return parser


def _help_or_refuse(name: str) -> NoReturn:
    """Handle ``--help`` and ``--version``; refuse anything else that is not a command."""
    lines = [precache.__doc__.split("\n")[0] if precache.__doc__ else ""]
    for heading, group in COMMANDS.items():
        lines += ["", f"{heading}:", *(f"  {name:<10} {one.help}" for name, one in group.items())]
    parser = _Parser(
        prog="precache", usage="%(prog)s COMMAND ...", description="\n".join(lines), epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=precache.__version__)
    if name.startswith("-"):
        parser.parse_known_args([name])
        parser.refuse([name], secret=True)
    parser.error(f"there is no command {name.partition('=')[0]}{did_you_mean(name, COMMAND)}")


def _with_flags(message: str, given: Sequence[str]) -> str:
    """Name parameters in a message by their flags, if these were given.

    A name of one word is taken for a parameter only where a clause begins with it.
    """
    flags = {text.partition("=")[0] for text in given}
    named = {flag[2:].replace("-", "_"): flag for flag in flags if flag.startswith("--")}
    name = r"(?:^|(?<=; ))\w+\b(?! of )|\b[a-z]+_\w+"
    return re.sub(name, lambda match: named.get(match[0], match[0]), message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a key must not break an ASCII terminal
    options = argparse.Namespace(command="", json=None)
    given = [*map(_Word, sys.argv[1:] if arguments is None else arguments)]
    began = time.monotonic()
    try:
        options = parse(given)
        from precache.runtime.terminal import guard_output

        guard_output()
        # With --json, only results go to standard output: Ray and users' ops print, too.
        elsewhere = sys.stderr if options.json else sys.stdout
        with contextlib.redirect_stdout(elsewhere):
            from precache.cli import calls

            run = getattr(calls, f"run_{options.command}", calls.run)
            status: int = run(options.command, options)
    except PrecacheError as error:
        from precache.runtime.terminal import Terminal, note

        note(_with_flags(str(error), given))
        if isinstance(error, UsageError):
            from precache.cli.remedies import remedies

            console, seconds = Terminal(file=sys.stderr), time.monotonic() - began
            waits = console.status("Planning the commands that are left")
            with contextlib.suppress(KeyboardInterrupt), waits:
                for line in remedies(error, given, seconds):
                    console.print(line, soft_wrap=True)
        return error.exit_status
    except KeyboardInterrupt:
        kept = "; what was done is kept, run it again to continue"
        keeps = options.command in _RESUMED and not getattr(options, "recompute", False)
        sys.stderr.write(f"precache: interrupted{kept if keeps else ''}\n")
        return 130
    return status
