"""Rules of evidence: what shows that a source may be meant otherwise, and what decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from precache.messages import printable
from precache_workers.sources.base import Doubt

FEW = 3
"""Names that are shown of many."""

Way = tuple[Sequence[str], str]
"""Flags that decide, and when they do; without flags: another way out, in words."""


class Rule(NamedTuple):
    """Evidence of a guess, or of two readings.

    Attributes
    ----------
    shown_by
        Returns what of a subject shows it, such as labels, or True; empty if it is not there.
    text
        The readings in words; without ways, a line. Its fields are those of `weighed`.
    ways
        Choices between the readings, or a function of the subject that returns them.
    by_classes
        As of `Doubt`.
    """

    shown_by: Callable[[Any], Sequence[str] | bool]
    text: str
    ways: Sequence[Way] | Callable[[Any], Sequence[Way]] = ()
    by_classes: bool = False


Rules = Sequence[Rule | list[Rule]]
"""Rules, and lists of rules, of each of which the first one counts that is shown."""


def weighed(subject: Any, rules: Rules) -> tuple[list[str], list[Doubt]]:
    """Return the lines and the doubts of the evidence that a subject shows.

    Fields of texts are ``{of}``, the subject; ``{shown}``, what shows the evidence, and
    its ``{count}``; and ``{some}`` of it, or ``{one}``, quoted.
    """
    notes, doubts = list[str](), list[Doubt]()
    for group in rules:
        for rule in group if isinstance(group, list) else [group]:
            if not (found := rule.shown_by(subject)):
                continue
            shown = () if isinstance(found, bool) else found
            quotes = {"some": quoted(shown), "one": quoted(shown, 1)}
            text = rule.text.format(of=subject, shown=shown, count=len(shown), **quotes)
            ways = rule.ways(subject) if callable(rule.ways) else rule.ways
            doubt = Doubt.of(text, *ways, by_classes=rule.by_classes)
            if ways:
                doubts.append(doubt)
            else:
                notes.append(text)
            break
    return notes, doubts


def quoted(names: Iterable[str], most: int = FEW) -> str:
    """Return some names for a message, and the number of the others."""
    some = list(names)
    more = f" and {len(some) - most:,} more" if len(some) > most else ""
    return ", ".join(printable(repr(name)) for name in some[:most]) + more


def flag(name: str, value: str) -> list[str]:
    """Return a flag and its value; after a space, a value such as ``-nan`` would be a flag."""
    return [f"{name}={value}"] if value.startswith("-") and value != "-" else [name, value]


def no_label(words: Iterable[str]) -> list[str]:
    """Return the arguments that take words as no label."""
    return [argument for word in words for argument in flag("--no-label", word)]
