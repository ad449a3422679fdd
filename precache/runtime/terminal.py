"""Output for people: lines, rows and tables, in which foreign text cannot control the terminal.

Every printed string is one line of literal text: markup, emoji codes and control characters in it
are shown, not obeyed. Text of several lines is printed in several calls, or as a rich object made
of such strings.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from precache.messages import indented, printable, without_secrets

_LEADING_NAME = r"^\S.{0,30}?(?= {2})"
"""Name before a value of `precache.messages.aligned`."""


class Terminal(Console):
    """A console that prints strings as literal text, in tables too."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text with control characters escaped."""
        style, justify, overflow = map(options.get, ("style", "justify", "overflow"))
        return Text(printable(text), style=style or "", justify=justify, overflow=overflow)


def say(line: str, *, style: str = "", stderr: bool = False) -> None:
    """Print a line without wrapping it, so that paths can be copied."""
    Terminal(stderr=stderr).print(line, style=style, soft_wrap=True)


def say_text(text: str, out: Console | None = None) -> None:
    """Print the text of a result, `precache.messages.as_text`, with names of values in bold."""
    for line in text.split("\n"):
        shown = Text(printable(line))
        shown.highlight_regex(_LEADING_NAME, "bold")
        (out or Terminal()).print(shown, soft_wrap=True)


def note(line: object) -> None:
    """Print a line about a command, or its error, on standard error."""
    say(f"precache: {line}", stderr=True)


def guard_output() -> None:
    """Escape the text of logging, warnings and tracebacks of this process, too.

    Handlers that the user has configured are not changed.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())
    warnings.showwarning = _show_warning
    sys.excepthook = _show_exception


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(without_secrets(super().format(record)))


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **others: Any
) -> None:
    say(without_secrets(f"{category.__name__}: {message}"), stderr=True)


def _show_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(indented(without_secrets(text)) + "\n")
