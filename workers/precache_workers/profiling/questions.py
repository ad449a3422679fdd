"""Questions that a few samples answer before a build, which refuses, prints, or goes on."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from precache.errors import RecipeError
from precache_workers.profiling.harness import run_samples
from precache_workers.shards.samples import FetchAllTask
from precache_workers.sources.base import Sample

OFTEN = 4
"""A build is refused if one sample in so many of those that are tried is read in two ways."""


def is_often(some: int, tried: int) -> bool:
    """Return True if so many of the samples tried refuse a build."""
    return some > 0 and some * OFTEN >= tried


class Question:
    """Looks at each sample, and has findings when all were seen."""

    def look(self, key: str, sample: Sample) -> None:
        """Add a sample; raises what makes it a hole."""
        raise NotImplementedError

    def findings(self) -> Iterable[str]:
        """Yield lines for the user; raises the error that refuses the build."""
        raise NotImplementedError


def show_samples(task: FetchAllTask, questions: Sequence[Question]) -> list[str]:
    """Show the samples of a task to questions; returns the reasons of those that have no row.

    Raises
    ------
    RecipeError
        The recipe makes no rows of any sample.
    """

    def look(key: str, sample: Sample) -> None:
        for question in questions:
            question.look(key, sample)

    failed = list[str]()
    runs = run_samples(task.fetch(), lambda run, s: look(run.key, s), barred=task.barred)
    with contextlib.closing(runs):
        for run, error in runs:
            if isinstance(error, RecipeError):
                raise error
            if error is not None:  # the build itself decides which samples are holes
                failed.append(f"{run.key}: {error}")
    return failed


def answers(questions: Iterable[Question]) -> tuple[str, ...]:
    """Return the lines of all findings; raises the first error among them."""
    return tuple(line for question in questions for line in question.findings())


class Stated(NamedTuple):
    """Options that state a reading: as a recipe has them, and as flags, none if these cannot."""

    options: str
    flags: Sequence[str]

    def __str__(self) -> str:
        return f"{' '.join(self.flags)} ({self.options})" if self.flags else self.options


class Verdict(NamedTuple):
    """A finding on a field, and the options that state each of its readings."""

    text: str
    refused: bool = False
    ways: Sequence[Stated] = ()


class FieldQuestion(Question):
    """A question about one field: what its pixels, or its entries, mean.

    Attributes
    ----------
    tried
        Number of samples that have what is asked about.
    seen
        Evidence -> a text for each sample that has it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.tried = name, 0
        self.seen = defaultdict[str, list[str]](list)

    def evidence(self, key: str, sample: Sample) -> Iterator[tuple[str, str]]:
        """Count a sample, and yield its evidence."""
        raise NotImplementedError

    def verdicts(self) -> Iterator[Verdict]:
        """Yield what the evidence says, that which refuses a build first."""
        raise NotImplementedError

    def look(self, key: str, sample: Sample) -> None:
        with contextlib.suppress(Exception):  # the ops say why it cannot be decoded
            for name, text in self.evidence(key, sample):
                self.seen[name].append(text)

    def findings(self) -> Iterator[str]:
        for text, refused, stated in self.verdicts():
            if refused:
                ways = [way.flags for way in stated if way.flags]
                raise RecipeError(f"field {self.name}: {text}", ways=ways)
            yield f"{self.name}: {text}"

    def often(self, name: str) -> bool:
        """Return True if enough of the samples tried have some evidence to refuse a build."""
        return is_often(len(self.seen[name]), self.tried)

    def said(self, name: str, what: str) -> str:
        """Return how many samples have some evidence, and the first of them."""
        some = self.seen[name]
        return f"{len(some)} of {self.tried} samples tried {what}: {some[0]}"
