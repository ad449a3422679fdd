"""``precache completion``."""

from __future__ import annotations

import argparse
import importlib
import sys

from precache.cli.main import COMMANDS
from precache.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> None:
    """Print a script with which a shell completes commands, flags and paths by Tab.

    examples:
      precache completion bash > ~/.local/share/bash-completion/completions/precache
      precache completion zsh > ~/.zfunc/_precache    # ~/.zfunc is in fpath, before compinit
      precache completion fish > ~/.config/fish/completions/precache.fish
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
            subparser = commands.add_parser(name, help=text)
            command.add_arguments(subparser)
            for action in subparser._actions:
                if options.shell != "bash" and action.nargs != 0 and not action.choices:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, options.shell))
    if options.shell == "bash":  # bash itself completes file names better
        sys.stdout.write("\ncomplete -o bashdefault -o default -F _shtab_precache precache\n")
