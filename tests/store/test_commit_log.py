"""The commit log: who is current, who wins a number, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import StoreError
from precache.storage import local_files
from precache.storage.local import LocalFolder
from precache.store.commit_log import (
    ReplacedError,
    append_entry,
    read_log,
    recorded_source,
)
from tests.support.building import end, poll, start


def _id(*digits: str) -> str:
    return "".join(digits).ljust(32, "0")


def _forge(store: LocalFolder, name: str, entry: Any) -> None:
    data = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    store.put(f"commits/{name}", [data])


def test_a_log_names_each_version_after_its_parent(empty: LocalFolder) -> None:
    versions = [_id("a"), _id("b"), _id("a")]
    commits = [append_entry(empty, version) for version in versions]
    assert [c.number for c in commits] == [1, 2, 3]
    assert [c.version for c in commits] == versions
    assert [c.parent for c in commits] == [None, *versions[:-1]]
    assert read_log(empty).commits == commits
    assert empty.names("commits") == ["000001.json", "000002.json", "000003.json"]


def test_committing_what_is_current_adds_nothing(empty: LocalFolder) -> None:
    first = append_entry(empty, _id("a"))
    assert append_entry(empty, _id("a")) == first
    assert len(read_log(empty).commits) == 1


def test_what_is_current_and_built_from_elsewhere_is_noted_once(empty: LocalFolder) -> None:
    append_entry(empty, _id("a"), "/old")
    second = append_entry(empty, _id("b"), "/old")
    assert append_entry(empty, _id("b"), "/old") == second
    assert append_entry(empty, _id("b")) == second
    moved = append_entry(empty, _id("b"), "/new")
    assert moved == dataclasses.replace(second, number=3, source="/new")
    assert append_entry(empty, _id("b"), "/new") == moved
    assert recorded_source(read_log(empty).commits, _id("b")) == "/new"
    assert append_entry(empty, _id("a")).parent == _id("b")


def test_a_version_takes_the_place_of_one_that_is_still_current(
    empty: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process commits between the look at the log and the entry."""
    first = append_entry(empty, _id("a"))
    noted = append_entry(empty, _id("a"), "/new", since=first.number)
    assert (noted.version, noted.number) == (first.version, 2)
    assert append_entry(empty, _id("b"), replaces=_id("a")).parent == _id("a")
    assert append_entry(empty, _id("b"), replaces=_id("a")).version == _id("b")  # it is current

    def create_late(*args: Any, **options: Any) -> bool:
        monkeypatch.undo()
        append_entry(empty, _id("c"))
        return LocalFolder.create(*args, **options)

    monkeypatch.setattr(LocalFolder, "create", create_late)
    with pytest.raises(ReplacedError, match=f"{_id('c')[:12]} of .* is current, and no longer"):
        append_entry(empty, _id("d"), replaces=_id("b"))
    assert append_entry(empty, _id("b"), since=3).version == _id("c")  # it was current since
    assert [commit.version for commit in read_log(empty).commits][-1] == _id("c")
    assert append_entry(empty, _id("b"), since=4).version == _id("b")


def commit_when_told(root: Path, racer: int, links: bool) -> None:
    """Eight commits, once ``go`` is there; on a disk with hard links or without."""
    if not links:
        os.link = local_files.rename = refuse  # type: ignore[assignment]  # in a process of its own
    Path(root, f"ready-{racer}").touch()
    poll((root / "go").exists, "the start")
    for number in range(8):
        append_entry(LocalFolder(root), _id(f"{racer:x}{number:x}"))


def refuse(*arguments: object) -> None:
    raise OSError(errno.EPERM, "no links")


@pytest.mark.parametrize("links", [True, False])
def test_processes_that_commit_at_once_all_get_a_number(links: bool, empty: LocalFolder) -> None:
    empty.root.mkdir()
    racers = [start(commit_when_told, empty.root, racer, links) for racer in (10, 11, 12)]
    poll(lambda: len(list(empty.root.glob("ready-*"))) == 3, "all are ready")
    (empty.root / "go").touch()
    assert [end(racer) for racer in racers] == [0, 0, 0]
    log = read_log(empty).commits
    assert sorted(c.version for c in log) == sorted(
        _id(f"{racer:x}{number:x}") for racer in (10, 11, 12) for number in range(8)
    )
    assert len({commit.number for commit in log}) == 24
    if links:
        assert [commit.number for commit in log] == list(range(1, 25))
        assert [c.parent for c in log] == [None, *(c.version for c in log[:-1])]
        left = [path.name for path in (empty.root / "commits").rglob("*") if path.is_file()]
        assert sorted(left) == empty.names("commits")


def test_the_highest_number_is_current_however_many_digits_it_has(empty: LocalFolder) -> None:
    for number, digit in [(999_999, "a"), (1_000_000, "b"), (7, "c")]:
        _forge(empty, f"{number:06d}.json", {"version": _id(digit), "parent": None, "time": 0})
    assert read_log(empty).commits[-1].version == _id("b")
    assert append_entry(empty, _id("b")).number == 1_000_000


def test_files_that_are_no_commits_are_passed_over(empty: LocalFolder) -> None:
    append_entry(empty, _id("a"))
    for name in (".000002.json.abc.tmp", "README", "x.json", "000002.json.bak", "²³.json"):
        _forge(empty, name, b"junk")
    assert [commit.number for commit in read_log(empty).commits] == [1]


FORGED_ENTRIES: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"{",
    "no object": [],
    "nothing": {},
    "no version": {"version": None, "time": 0},
    "number": {"version": 7, "time": 0},
    "short": {"version": "ab", "time": 0},
    "upper case": {"version": "A" * 32, "time": 0},
    "path upwards": {"version": "../" + "a" * 32, "time": 0},
    "absolute path": {"version": "/etc", "time": 0},
    "path and line end": {"version": "a" * 32 + "\n", "time": 0},
    "no time": {"version": "a" * 32},
    "time of words": {"version": "a" * 32, "time": "noon"},
}


@pytest.mark.parametrize("case", FORGED_ENTRIES)
def test_a_forged_commit_is_refused_by_name(case: str, empty: LocalFolder) -> None:
    _forge(empty, "000001.json", FORGED_ENTRIES[case])
    with pytest.raises(StoreError, match=r"commits/000001\.json is damaged or forged: .*Remove"):
        precache.open(empty.root)
    with pytest.raises(StoreError, match=r"commits/000001\.json is damaged or forged: .*Remove"):
        append_entry(empty, _id("a"))
