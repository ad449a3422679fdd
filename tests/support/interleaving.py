"""A store in memory whose callers take turns, call by call, in an order that a test chooses."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

from precache.errors import StorageError
from precache.storage.base import Buffer, FileInfo, Folder, LeaveOut, Part, ignore_left_out
from tests.support.building import DEADLINE

Found = TypeVar("Found")
P = ParamSpec("P")

ACTORS = threading.local()
"""Of the actor that a thread belongs to: `name`, `store` as it sees it, `turns`, `numbers`."""


class Memory:
    """The objects of a store, how often they changed, and how often actors ran in it."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.changes = self.runs = 0

    def view(self) -> list[tuple[str, str]]:
        """Names and digests of all objects, without times taken."""
        return [(key, digest(timeless(key, data))) for key, data in sorted(self.objects.items())]

    def set(self, name: str, data: bytes | None) -> None:
        self.changes += 1
        if data is None:
            self.objects.pop(name, None)
        else:
            self.objects[name] = data


class MemoryFolder(Folder):
    """A folder of a `Memory`; each call waits for its turn, and notes what it returns."""

    def __init__(
        self,
        memory: Memory,
        turn: Callable[[str, str], None] = lambda call, name: None,
        learn: Callable[[object], None] = lambda found: None,
        root: str = "",
    ) -> None:
        self._memory, self._turn, self._learn, self._root = memory, turn, learn, root

    def __str__(self) -> str:
        return f"memory:{self._root}"

    @property
    def name(self) -> str:
        return self._root.rpartition("/")[2]

    def path(self, name: str) -> str:
        return f"memory:{self._at(name)}"

    def folder(self, name: str) -> MemoryFolder:
        return MemoryFolder(self._memory, self._turn, self._learn, self._at(name))

    def _found(self, found: Found) -> Found:
        self._learn(found)
        return found

    def _at(self, name: str) -> str:
        return "/".join(filter(None, (self._root, name)))

    def _below(self, name: str) -> dict[str, bytes]:
        prefix = f"{self._at(name)}/" if self._at(name) else ""
        held = sorted(self._memory.objects.items())
        return {key[len(prefix) :]: data for key, data in held if key.startswith(prefix)}

    def info(self, name: str) -> FileInfo | None:
        self._turn("info", self._at(name))
        data = self._memory.objects.get(self._at(name))
        return self._found(None if data is None else FileInfo(name, len(data), 1))

    def is_folder(self, name: str = "") -> bool:
        self._turn("is_folder", self._at(name))
        return self._found(bool(self._below(name)))

    def read_parts(
        self, parts: Sequence[Part], least: Sequence[int], *, whole: bool = False
    ) -> list[bytes | StorageError]:
        return [self._read(*part) for part in parts]

    def _read(self, name: str, start: int, end: int | None) -> bytes | StorageError:
        self._turn("read", self._at(name))
        data = self._memory.objects.get(self._at(name))
        self._learn(data and timeless(self._at(name), data))
        if data is not None:
            return data[start:end]
        error = StorageError(f"cannot read {self.path(name)}: there is no such object")
        error.__cause__ = FileNotFoundError(name)
        return error

    def names(self, name: str = "", *, first: bool = False) -> list[str]:
        self._turn("names", self._at(name))
        return self._found(sorted({key.partition("/")[0] for key in self._below(name)}))

    def walk(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileInfo]:
        self._turn("walk", self._root)
        held = self._below("").items()
        yield from self._found([FileInfo(key, len(data), 1) for key, data in held])

    def put(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> None:
        self._turn("put", self._at(name))
        self._memory.set(self._at(name), b"".join(parts))

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        data = b"".join(parts)
        self._turn("create", self._at(name))
        held = self._memory.objects.get(self._at(name))
        if held is None:
            self._memory.set(self._at(name), data)
        return self._found(held in (None, data))

    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        data = origin.read(source)
        self._turn("copy", self._at(name))
        if create and self._at(name) in self._memory.objects:
            return False
        self._memory.set(self._at(name), data)
        return True

    def remove(self, name: str) -> None:
        # As in a bucket: one object after another.
        self._turn("remove", self._at(name))
        for key in self._found([*self._below(name)]):
            self._turn("remove", f"{self._at(name)}/{key}")
            self._memory.set(f"{self._at(name)}/{key}", None)
        self._memory.set(self._at(name), None)


def knowing_its_result(function: Callable[P, Found]) -> Callable[P, Found]:
    """A function that keeps nothing: who called it knows what it returned, and no more."""

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> Found:
        known, name = ACTORS.turns.known, ACTORS.name
        before = known[name]
        found = function(*given, **named)
        known[name] = digest(before, function.__qualname__, found)
        return found

    return called


class Killed(BaseException):
    """An actor is no more: none of its calls comes through."""


Choose = Callable[[Sequence[str]], str]
"""From the names of the actors that can go on to one of them."""


class Turns:
    """Runs actors, each in a thread, of which one goes on at a time.

    Parameters
    ----------
    killed
        Actor -> the number of its call at which it is killed, from 0.

    Attributes
    ----------
    calls
        Actor, method and name of each call, in the order in which they were made.
    live
        Actors that have not ended.
    clock
        How often all were asleep, and one was woken.
    number
        Of the run in its store, from 1: actors of earlier ones have ended.
    """

    def __init__(
        self, memory: Memory, choose: Choose, killed: Mapping[str, int] | None = None
    ) -> None:
        self._memory, self._choose, self._killed = memory, choose, killed or {}
        memory.runs += 1
        self.number = memory.runs
        self._changed = threading.Condition()
        self._waiting: dict[str, int | None] = {}
        """Actor -> None, or the number of changes that it has seen and waits to see exceeded."""
        self._turn = ""
        self.live: set[str] = set()
        self._given_up = False
        self.clock = 0
        self.known: dict[str, str] = {}
        """Actor -> a digest of all that its calls returned."""
        self.calls: list[tuple[str, str, str]] = []

    def state(self) -> str:
        """The same where the store, and all that the actors know of it, is the same."""
        asleep = sorted(self._asleep())
        return digest(self._memory.view(), sorted(self.known.items()), sorted(self.live), asleep)

    def folder(self, actor: str) -> MemoryFolder:
        """The store as an actor sees it."""

        def wait(call: str, name: str) -> None:
            self._wait(actor, None)
            if self._killed.get(actor) == sum(who == actor for who, _, _ in self.calls):
                self.live.discard(actor)
            if actor not in self.live:
                raise Killed
            self.calls.append((actor, call, name))
            self.learn((call, name), actor)

        return MemoryFolder(self._memory, wait, functools.partial(self.learn, actor=actor))

    def has_ended(self, actor: str) -> bool:
        """Whether an actor is no more, as another asks."""
        self.learn(ended := actor not in self.live)
        return ended

    def monotonic(self) -> float:
        """As `time.monotonic`: time passes where all are asleep."""
        self.learn(self.clock)
        return self.clock

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`: the actor goes on once the store changed, or nobody else can."""
        self._wait(ACTORS.name, self._memory.changes)
        self.learn("woke")

    def learn(self, found: object, actor: str | None = None) -> None:
        """Note what an actor knows from now on; by default that of this thread."""
        name = actor or ACTORS.name
        self.known[name] = digest(self.known.get(name), found)

    def _asleep(self) -> set[str]:
        return {name for name in self.live if self._waiting[name] == self._memory.changes}

    def _wait(self, actor: str, seen: int | None) -> None:
        with self._changed:
            self._waiting[actor] = seen
            self._turn = ""
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == actor or self._given_up)
            if self._given_up:
                raise Killed

    def run(self, actors: Mapping[str, Callable[[], object]]) -> dict[str, object]:
        """What each actor returned, or the error that it raised."""
        outcomes: dict[str, object] = {}

        def act(name: str) -> None:
            ACTORS.name, ACTORS.store, ACTORS.turns = name, self.folder(name), self
            ACTORS.numbers = itertools.count()
            try:
                self._wait(name, None)
                self.learn("began")
                outcomes[name] = actors[name]()
            except (Exception, Killed) as error:
                outcomes[name] = error
            finally:
                with self._changed:
                    self.live.discard(name)
                    self._turn = ""
                    self._changed.notify_all()

        self.live = set(actors)
        threads = [threading.Thread(target=act, args=(name,)) for name in actors]
        for thread in threads:
            thread.start()
        try:
            self._take_turns()
        finally:
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        return outcomes

    def _take_turns(self) -> None:
        while self.live:
            with self._changed:
                ready = self._changed.wait_for(
                    lambda: not self._turn and self.live <= self._waiting.keys(),
                    timeout=DEADLINE,
                )
                assert ready, f"{self.live - self._waiting.keys()} neither ends nor calls the store"
                if not self.live:
                    break
                awake = self.live - self._asleep()
                self.clock += not awake
                able = sorted(awake or self.live)
                chosen = self._choose(able) if len(able) > 1 else able[0]
                del self._waiting[chosen]
                self._turn = chosen
                self._changed.notify_all()


def timeless(name: str, data: bytes) -> object:
    """What an object says, without the times that it took."""
    if "/_build/receipts/" in name:
        return sorted((key, str(json.loads(data)[key])) for key in ("objects", "holes", "content"))
    return data


def explore(
    run: Callable[[Callable[[Turns, Sequence[str]], str]], None], switches: float = math.inf
) -> Iterator[int]:
    """Run actors in every order of their calls that leads to another state.

    Parameters
    ----------
    run
        Runs them once, told whom to choose of those that can go on.
    switches
        From an actor that could go on to another, at most.

    Yields
    ------
    int
        How many runs there were so far.
    """
    visited: set[tuple[str, str, float]] = set()
    waiting: list[list[str]] = [[]]
    runs = 0
    while waiting:
        prefix, taken = waiting.pop(), list[str]()

        def choose(turns: Turns, able: Sequence[str], prefix: list[str], taken: list[str]) -> str:
            if len(taken) < len(prefix):
                taken.append(prefix[len(taken)])
                return taken[-1]
            left = switches - sum(one != other for one, other in itertools.pairwise(taken))
            going = taken[-1] if taken and taken[-1] in able else None
            state, fresh = turns.state(), []
            for name in sorted(able, key=lambda name: name != going):
                cost = going is not None and name != going
                if cost <= left and (state, name, left) not in visited:
                    visited.add((state, name, left))
                    fresh.append(name)
            if not fresh:
                raise Visited
            waiting.extend([*taken, name] for name in fresh[1:])
            taken.append(fresh[0])
            return fresh[0]

        run(functools.partial(choose, prefix=prefix, taken=taken))
        runs += 1
        yield runs


class Visited(Exception):
    """From here on all was tried before."""


def digest(*parts: object) -> str:
    """Of things whose `repr` tells them apart."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
