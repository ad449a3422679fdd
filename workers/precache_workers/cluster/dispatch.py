"""Scheduling of idempotent tasks: a bound on those under way, retries, second copies.

A task runs one item, or several short ones, since a task costs its driver the same either way.

Nothing here depends on Ray: `dispatch` works with any `Engine`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from precache.errors import BuildError, CrashError, Hole, PrecacheError

if TYPE_CHECKING:
    from precache_workers.cluster.executor import Outcome

SUBMITTED_PER_SLOT = 2
"""Tasks under way for each slot: one runs, and the arguments of another are on the way."""

MIN_SUBMITTED = 8
"""Tasks under way where no node can run one, so that an autoscaler sees some work."""

STRAGGLER_SECONDS = 5.0
STRAGGLER_FACTOR = 1.5
"""A straggler's age: at least so many seconds, and so many medians of the tasks that ended."""

FIRST_FACTOR = 2 * STRAGGLER_FACTOR
"""Age from which the first unfinished task has a second copy while further tasks wait: so many
medians of the later ones that ended.

A reader that follows a build waits for it. The copy takes a slot from another task, so it comes
later than that of a straggler at the end.
"""

TASK_SECONDS = 1.0
"""Items that take less share a task, up to this time."""

MAX_ITEMS = 32
"""Limit on the items of a task."""

CRASHES, LOSSES = 3, 20
"""Crashes of its process, and losses of its node, after which a task is given up. Crashes count
from the last one that found a sample to leave out."""

BARRED = 16
"""Samples that a task leaves out, after which it is given up."""

LATE, FIRST_LATE = 30.0, 300.0
"""Age in seconds from which another copy of a task is begun, even if the first one runs: at least
`LATE`, the time limit of its samples, in which one may hang, and four times the slowest task so
far; `FIRST_LATE` before any task has ended."""

COPIES = 4
"""Limit on the copies of a task at a time."""


class WorkItem(Protocol):
    """The argument of a task's function."""

    @property
    def job(self) -> Any:
        """The part that many items share: one object, sent to each worker once."""

    @property
    def memory(self) -> int:
        """Bytes that its process may need."""

    @property
    def seconds(self) -> float:
        """Time limit of a sample: one that hangs ends its process then."""

    @property
    def barred(self) -> Mapping[str, Hole]:
        """Samples that are left out, as they end workers: key -> hole."""

    def retried(self) -> Self:
        """Return the item for another copy, which may find the work done."""

    def after(self, suspects: Mapping[str, Hole]) -> Self:
        """Return the item to try after a worker ended at samples (digest of key -> hole).

        They are tried one by one; one that was alone at its worker's end is left out.
        """


@dataclass(frozen=True)
class Done:
    """A copy that ended with values.

    Attributes
    ----------
    values
        Of its first items, in order, at least one. A task that took twice `TASK_SECONDS` leaves
        the rest undone.
    seconds
        From its beginning on a worker to its end.
    """

    values: Sequence[Any]
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A copy that ended without values; `crashed` if its process died, but not its node.

    Attributes
    ----------
    suspects
        Digest of key -> hole, of the samples that its process worked on.
    """

    why: str
    crashed: bool
    suspects: Mapping[str, Hole] = field(default_factory=dict)


class Engine(Protocol):
    """Runs tasks."""

    def slots(self) -> int:
        """Return how many tasks can run at a time on the nodes that are up now."""

    def submit(
        self, function: Callable[[Any], Any], items: Sequence[Any], next_one: bool = False
    ) -> Hashable:
        """Begin a task, of items of one job; return a name for this copy of it.

        Where the engine can, `next_one` begins before others that wait for a slot.
        """

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Lost]]:
        """Return copies that ended, at least one unless the time runs out."""

    def cancel(self, copy: Hashable) -> None:
        """End a copy and forget it, unless it has ended."""


def dispatch(
    engine: Engine,
    function: Callable[[Any], Any],
    items: Iterable[WorkItem],
    count: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run every item in a task; yield (item, outcome) as they end, each item once.

    Items must be idempotent: one may run several times, also at once. The number of copies under
    way follows the engine's slots; closing the iterator cancels them.

    Parameters
    ----------
    count
        Number of items, if they are all of one job: then short ones share tasks while many remain.
    """
    run = _Dispatch(engine, function, iter(items), count, clock)
    try:
        while run.fill():
            yield from run.collect()
    finally:
        run.cancel(list(run.copies))


@dataclass(eq=False)
class _Task:
    items: Sequence[WorkItem]
    number: int
    """Position of its items among those of all tasks."""
    copies: dict[Hashable, float] = field(default_factory=dict)
    """Copy under way -> time of its submission."""
    retry: bool = False
    """A copy was submitted before."""
    crashes: int = 0
    losses: int = 0
    barred: int = 0
    suspected: bool = False
    """A process ended at its samples, and may end at them again."""

    def split(self) -> Iterator[_Task]:
        """Yield a task for each item."""
        for item in self.items:
            yield replace(self, items=[item], copies={})


@dataclass
class _Dispatch:
    engine: Engine
    function: Callable[[Any], Any]
    items: Iterator[WorkItem]
    remaining: int
    """Items that are in no task yet; 0 or less if unknown."""
    clock: Callable[[], float]
    copies: dict[Hashable, _Task] = field(default_factory=dict)
    """Copies under way."""
    waiting: deque[_Task] = field(default_factory=deque)
    """Tasks to be submitted before any further item."""
    exhausted: bool = False
    begun: int = 0
    """Tasks that were made of items."""
    items_per_task: float = 1.0
    """Items that take `TASK_SECONDS`, by the task that ended last."""
    durations: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=256))
    """Number and age of the tasks that ended last."""
    ages_checked: float = float("-inf")
    late: int = 0
    """Late copies: they are not expected to end, and count for no slot."""

    def fill(self) -> bool:
        """Submit tasks up to the bound; return False when nothing is under way nor left to be."""
        slots = self.engine.slots()
        bound = slots * SUBMITTED_PER_SLOT or MIN_SUBMITTED
        if self.copies and self.clock() - self.ages_checked >= 1:
            self._submit_second_copies(slots)
        while len(self.copies) - self.late < bound and (task := self._next_task(slots)):
            self._submit(task)
        return bool(self.copies)

    def collect(self) -> Iterator[Outcome]:
        """Wait for copies to end; yield the outcomes of their items."""
        for copy, end in self.engine.wait(1.0):
            task = self.copies.pop(copy, None)
            if task is None:
                continue
            age = self.clock() - task.copies.pop(copy)
            if isinstance(end, Lost):
                error = self._count_loss(task, end)
                values: Sequence[Any] = [] if error is None else [error]
            else:
                values = end.values
                self.durations.append((task.number, age))
                self.items_per_task = TASK_SECONDS * len(values) / max(end.seconds, 1e-6)
            if values:
                self.cancel(list(task.copies))
                self.waiting.extend(replace(task, items=task.items[len(values) :]).split())
                yield from zip(task.items, values, strict=False)

    def cancel(self, copies: list[Hashable]) -> None:
        for copy in copies:
            del self.copies[copy]
            self.engine.cancel(copy)

    def _next_task(self, slots: int) -> _Task | None:
        """Return the next task, None if there is none; the fewer items remain, the smaller it is.

        Towards the end a task with many items would leave slots idle.
        """
        if self.waiting:
            return self.waiting.popleft()
        share = self.remaining // (2 * SUBMITTED_PER_SLOT * slots) if slots else 1
        count = max(1, min(MAX_ITEMS, share, int(self.items_per_task)))
        items = list(itertools.islice(self.items, count))
        self.remaining -= len(items)
        self.exhausted = not items
        self.begun += 1
        return _Task(items, self.begun) if items else None

    def _submit(self, task: _Task, next_one: bool = False) -> None:
        items = [item.retried() for item in task.items] if task.retry else task.items
        task.retry = True
        copy = self.engine.submit(self.function, items, next_one)
        task.copies[copy] = self.clock()
        self.copies[copy] = task

    def _count_loss(self, task: _Task, end: Lost) -> PrecacheError | None:
        """Let a lost task begin again, split into its items; return an error at the limit."""
        task.crashes += end.crashed
        task.losses += not end.crashed
        if end.suspects:
            self.cancel(list(task.copies))  # in which they are not alone
            task.copies.clear()
            before, task.items = task.items, [item.after(end.suspects) for item in task.items]
            task.suspected = [item.barred for item in before] == [i.barred for i in task.items]
            if not task.suspected:
                task.crashes, task.barred = 0, task.barred + 1
        if len(task.items) == 1:
            if task.barred >= BARRED:
                return CrashError(f"its worker died at {task.barred} samples: {end.why}")
            if task.crashes >= CRASHES:
                return CrashError(f"its worker died {task.crashes} times: {end.why}")
            if task.losses >= LOSSES:
                return BuildError(f"a task was lost {task.losses} times with its node: {end.why}")
        if not task.copies:
            self.waiting.extend(task.split())
        return None

    def _submit_second_copies(self, slots: int) -> None:
        """Submit further copies of late tasks, of the first task that lags, and of stragglers where
        slots are free; but not where a sample is known to hang.
        """
        now = self.ages_checked = self.clock()
        late, straggling = FIRST_LATE, float("inf")
        limit = max(item.seconds for task in self.copies.values() for item in task.items)
        if self.durations:
            seconds = [seconds for _, seconds in self.durations]
            late = max(LATE, 4 * max(seconds))
            straggling = max(STRAGGLER_SECONDS, STRAGGLER_FACTOR * statistics.median(seconds))
        late = max(late, limit + LATE)
        ages = {task: now - max(task.copies.values()) for task in self.copies.values()}
        self.late = sum(now - task.copies[copy] > late for copy, task in self.copies.items())
        room = slots * SUBMITTED_PER_SLOT - len(self.copies) + self.late
        late_tasks = [task for task, age in ages.items() if age > late]
        few = [task for task in late_tasks if len(task.copies) < COPIES]
        for task in few[: max(0, room)]:
            self._submit(task)
        ages = {task: age for task, age in ages.items() if not task.suspected}
        if not ages:
            return
        first = min(ages, key=lambda task: task.number)
        later = [seconds for number, seconds in self.durations if number > first.number]
        if later and len(first.copies) == 1:
            lagging = max(STRAGGLER_SECONDS, FIRST_FACTOR * statistics.median(later))
            if ages[first] > lagging:
                self._submit(first, next_one=True)  # even beyond the bound
        at_the_end = self.exhausted and not self.waiting
        free = slots - len(self.copies) + self.late if at_the_end else 0
        single = [t for t, age in ages.items() if age > straggling and len(t.copies) == 1]
        for task in sorted(single, key=ages.__getitem__, reverse=True)[: max(0, free)]:
            self._submit(task)
