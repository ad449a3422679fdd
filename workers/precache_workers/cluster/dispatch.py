"""Which task runs when, and how often: a bound on what is under way, retries, second copies.

A task runs an item, or several short ones, as what a task costs its driver is the same for both.

It knows no engine: Ray's is in `cluster`, and whatever keeps to `Engine` will do.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from precache.errors import BuildError, CrashError, HangError, PrecacheError

Outcome = tuple[Any, Any]
"""An item, and what its task returned, which may be a `PrecacheError`."""

SUBMITTED_PER_SLOT = 2
"""Tasks under way for each that can run: one running, one whose arguments are on the way."""

FEWEST_SUBMITTED = 8
"""Tasks under way where no node can run one: what an autoscaler sees of the work."""

STRAGGLER_SECONDS = 5.0
STRAGGLER_FACTOR = 1.5
"""Age of a task, at least and in medians, from which a free slot gets a second copy of it."""

TASK_SECONDS = 1.0
"""Of items that take less, a task is given more than one, so that they take as long together."""

MOST_ITEMS = 32
"""Of a task."""


class Item(Protocol):
    """What a task is given."""

    @property
    def job(self) -> Any:
        """What many items have in common: the same object, which goes to a worker but once."""

    @property
    def memory(self) -> int:
        """Bytes that its process may need."""

    def retried(self) -> Self:
        """The same, for a copy that may find the work done."""

    def after(self, hang: HangError) -> Self:
        """The same, without the sample that hangs, or with those tried one by one that may."""


@dataclass(frozen=True)
class Done:
    """A copy that ended with values.

    Attributes
    ----------
    values
        Of its first items, in order: one at least. A task that took twice `TASK_SECONDS` leaves
        the others undone.
    seconds
        From its beginning on a worker to its end.
    """

    values: Sequence[Any]
    seconds: float


@dataclass(frozen=True)
class Hung:
    """A copy whose process had to be ended, as a sample of one of its items hangs."""

    error: HangError


@dataclass(frozen=True)
class Lost:
    """A copy that ended without one; `crashed` where its process died, and not its node."""

    why: str
    crashed: bool


class Engine(Protocol):
    """Where tasks run."""

    def slots(self) -> int:
        """Tasks that can run at a time on the nodes that there are."""

    def submit(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Hashable:
        """Begin one, of one job's items; what it returns names the copy."""

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Hung | Lost]]:
        """Copies that ended, at least one unless the time runs out."""

    def cancel(self, copy: Hashable) -> None:
        """End one and forget it, unless it has ended."""


@dataclass(frozen=True)
class Patience:
    """What is borne before something is done about it.

    Attributes
    ----------
    crashes, losses
        Ends of its process, and of its nodes, after which a task is given up.
    late, first_late
        Seconds after which another copy of a task is begun, whatever the engine says of the first:
        at least `late` and four times what the slowest one took; `first_late` before any ended.
    copies
        Of one task at a time, at most.
    """

    crashes: int = 3
    losses: int = 20
    late: float = 30.0
    first_late: float = 300.0
    copies: int = 4


def dispatch(
    engine: Engine,
    function: Callable[[Any], Any],
    items: Iterable[Item],
    patience: Patience | None = None,
    count: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run every item in a task, and give (item, outcome) as they end, each once.

    Items must be idempotent: one may run several times, also at once. What is under way is bounded
    by the engine's slots as they come and go, and cancelled when the iterator is closed.

    Parameters
    ----------
    count
        How many items there are, all of one job: then short ones share a task while many are left.
    """
    run = _Run(engine, function, iter(items), patience or Patience(), count, clock)
    try:
        while run.fill():
            yield from run.collect()
    finally:
        run.cancel(list(run.copies))


@dataclass(eq=False)
class _Task:
    items: Sequence[Item]
    since: dict[Hashable, float] = field(default_factory=dict)
    """Copy -> when it was submitted."""
    again: bool = False
    crashes: int = 0
    losses: int = 0

    def alone(self) -> Iterator[_Task]:
        """A task for each of its items."""
        for item in self.items:
            yield _Task([item], {}, self.again, self.crashes, self.losses)


@dataclass
class _Run:
    engine: Engine
    function: Callable[[Any], Any]
    items: Iterator[Item]
    patience: Patience
    left: int
    """Items that no task has had yet, as far as that is known."""
    clock: Callable[[], float]
    copies: dict[Hashable, _Task] = field(default_factory=dict)
    waiting: deque[_Task] = field(default_factory=deque)
    """Tasks that come before any other item."""
    exhausted: bool = False
    fitting: float = 1.0
    """Items that take `TASK_SECONDS`, as the last task tells."""
    took: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    looked: float = float("-inf")
    stale: int = 0
    """Copies that are late: nothing is expected of them, and they take no slot."""

    def fill(self) -> bool:
        """Submit what there is room for; False when nothing is under way nor left to be."""
        slots = self.engine.slots()
        bound = slots * SUBMITTED_PER_SLOT or FEWEST_SUBMITTED
        if self.copies and self.clock() - self.looked >= 1:
            self._look(slots)
        while len(self.copies) - self.stale < bound and (task := self._next(slots)):
            self._start(task)
        return bool(self.copies)

    def collect(self) -> Iterator[Outcome]:
        """Wait for copies to end, and give what is settled by that."""
        for copy, end in self.engine.wait(1.0):
            task = self.copies.pop(copy, None)
            if task is None:
                continue
            age = self.clock() - task.since.pop(copy)
            values: Sequence[Any] = []
            left = task.items
            if isinstance(end, Lost):
                error = self._bear(task, end)
                values = [] if error is None else [error]
            elif isinstance(end, Hung):
                left = [item.after(end.error) for item in task.items]
            else:
                values = end.values
                self.took.append(age)
                self.fitting = TASK_SECONDS * len(values) / max(end.seconds, 1e-6)
            if values or isinstance(end, Hung):
                self.cancel(list(task.since))
                self.waiting.extend(replace(task, items=left[len(values) :]).alone())
                yield from zip(task.items, values, strict=False)

    def cancel(self, copies: list[Hashable]) -> None:
        for copy in copies:
            del self.copies[copy]
            self.engine.cancel(copy)

    def _next(self, slots: int) -> _Task | None:
        """A task to be started, if there is one; the fewer items are left, the smaller it is."""
        if self.waiting:
            return self.waiting.popleft()
        fair = self.left // (2 * SUBMITTED_PER_SLOT * slots) if slots else 1
        many = max(1, min(MOST_ITEMS, fair, int(self.fitting)))
        items = list(itertools.islice(self.items, many))
        self.left -= len(items)
        self.exhausted = not items
        return _Task(items) if items else None

    def _start(self, task: _Task) -> None:
        items = [item.retried() for item in task.items] if task.again else task.items
        task.again = True
        copy = self.engine.submit(self.function, items)
        task.since[copy] = self.clock()
        self.copies[copy] = task

    def _bear(self, task: _Task, end: Lost) -> PrecacheError | None:
        """Have a lost task begin again, its items alone; the error where it was lost too often."""
        task.crashes += end.crashed
        task.losses += not end.crashed
        alone = len(task.items) == 1
        if alone and task.crashes >= self.patience.crashes:
            return CrashError(f"its worker died {task.crashes} times: {end.why}")
        if alone and task.losses >= self.patience.losses:
            return BuildError(f"a task was lost {task.losses} times with its node: {end.why}")
        if not task.since:
            self.waiting.extend(task.alone())
        return None

    def _look(self, slots: int) -> None:
        """Begin further copies of what is late, and of stragglers where slots are free."""
        now = self.looked = self.clock()
        late, straggling = self.patience.first_late, float("inf")
        if self.took:
            late = max(self.patience.late, 4 * max(self.took))
            straggling = max(STRAGGLER_SECONDS, STRAGGLER_FACTOR * statistics.median(self.took))
        ages = {task: now - max(task.since.values()) for task in self.copies.values()}
        self.stale = sum(now - task.since[copy] > late for copy, task in self.copies.items())
        most = slots * SUBMITTED_PER_SLOT - len(self.copies) + self.stale
        lates = [task for task, age in ages.items() if age > late]
        for task in [t for t in lates if len(t.since) < self.patience.copies][: max(0, most)]:
            self._start(task)
        over = self.exhausted and not self.waiting
        free = slots - len(self.copies) + self.stale if over else 0
        alone = [task for task, age in ages.items() if age > straggling and len(task.since) == 1]
        for task in sorted(alone, key=ages.__getitem__, reverse=True)[: max(0, free)]:
            self._start(task)
