"""``precache completion``."""

from __future__ import annotations

import argparse
import importlib
import sys

from precache.cli.main import COMMANDS
from precache.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash",))


def run(options: argparse.Namespace) -> None:
    """Print a script with which bash completes commands, flags and paths by Tab.

    example:
      precache completion bash > ~/.local/share/bash-completion/completions/precache
    """
    try:
        import shtab
    except ImportError:
        raise UsageError(
            'completion needs shtab, which is missing; pip install "precache[completion]"'
        ) from None
    parser = argparse.ArgumentParser(prog="precache")
    commands = parser.add_subparsers()
    for group in COMMANDS.values():
        for name, text in group.items():
            command = importlib.import_module(f"precache.cli.commands.{name}")
            command.add_arguments(commands.add_parser(name, help=text))
    sys.stdout.write(shtab.complete(parser, options.shell))
    # Where the script has nothing to offer, names of files are completed.
    sys.stdout.write("\ncomplete -o bashdefault -o default -F _shtab_precache precache\n")
