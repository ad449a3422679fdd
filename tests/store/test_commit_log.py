"""The log: who is current, who wins a number, what is removed, and what is refused."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import BuildError, StorageError, StoreError
from precache.storage.local import LocalFolder
from precache.store.commit_log import (
    Log,
    ReplacedError,
    commit_entry,
    id_of,
    make_current,
    read_log,
    record_removal,
    removal_entry,
    short,
)
from tests.support.building import append_commit, end, poll, start
from tests.support.building import version_name as _id


def _forge(store: LocalFolder, name: str, entry: Any) -> None:
    if isinstance(entry, dict):
        entry = {"number": int(name.partition(".")[0]), **entry}
    data = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    store.put(f"commits/{name}", [data])


NAMES = [f"{digit}{'0' * 31}.{generation}" for digit in "ab" for generation in (1, 2)]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(NAMES)), max_size=12))
def test_what_was_removed_never_becomes_current_and_the_current_is_never_removed(
    steps: list[tuple[bool, str]],
) -> None:
    log = Log()
    for number, (commits, version) in enumerate(steps, 1):
        try:
            entry = commit_entry(log, version) if commits else removal_entry(log, [version])
        except BuildError:
            assert version in log.removed
            continue
        if entry is None:
            is_current = log.current is not None and log.current.version == version
            assert is_current or version in log.removed
            continue
        log = Log((*log.entries, entry.with_(number=number)), number)
        assert log.current is None or log.current.version not in log.removed
    for version in NAMES:
        generation = log.next_generation(id_of(version), NAMES[:1])
        used = {*log.versions, *log.removed, NAMES[0]}
        assert f"{id_of(version)}.{generation}" not in used
        assert generation == 1 or f"{id_of(version)}.{generation - 1}" in used


def test_a_log_names_each_version_after_its_parent(empty: LocalFolder) -> None:
    versions = [_id("a"), _id("b"), _id("a")]
    commits = [append_commit(empty, version) for version in versions]
    assert append_commit(empty, _id("a")) == commits[-1], "what is current is not committed again"
    assert [c.number for c in commits] == [1, 2, 3]
    assert [c.version for c in commits] == versions
    assert [c.parent for c in commits] == [None, *versions[:-1]]
    assert empty.names("commits") == ["000001.json", "000002.json", "000003.json"]
    for name in (".000002.json.abc.tmp", "README", "x.json", "000002.json.bak", "²³.json"):
        _forge(empty, name, b"junk")
    assert read_log(empty).commits == tuple(commits)
    for number, digit in [(999_999, "c"), (1_000_000, "d"), (7, "e")]:
        _forge(empty, f"{number:06d}.json", {"version": _id(digit), "time": 0})
    assert append_commit(empty, _id("d")).number == 1_000_000
    assert short("0123456789abcdef" * 2 + ".1") == "01234567"
    assert short("0123456789abcdef" * 2 + ".12", 12) == "0123456789ab.12"


def test_what_is_current_and_built_from_elsewhere_is_noted_once(empty: LocalFolder) -> None:
    append_commit(empty, _id("a"), source="/old")
    second = append_commit(empty, _id("b"), source="/old")
    assert append_commit(empty, _id("b"), source="/old") == second
    assert append_commit(empty, _id("b")) == second
    moved = append_commit(empty, _id("b"), source="/new")
    assert moved == second.with_(number=3, source="/new", nonce=moved.nonce)
    assert append_commit(empty, _id("b"), source="/new") == moved
    assert read_log(empty).source_of(_id("b")) == "/new"
    assert append_commit(empty, _id("a")).parent == _id("b")


def test_a_removal_is_an_entry_that_names_the_current_version_too(empty: LocalFolder) -> None:
    first, second = (append_commit(empty, _id("a")), append_commit(empty, _id("b"), source="/in"))
    log = record_removal(empty, [_id("a"), _id("b"), _id("c")])
    assert log == read_log(empty)
    assert log.removed == {_id("a"), _id("c")}
    removal = second.with_(number=3, removed=(_id("a"), _id("c")), nonce=log.commits[-1].nonce)
    assert log.commits == (first, second, removal)
    assert read_log(empty, newest=True).current == log.current
    assert record_removal(empty, [_id("c")]) == log
    with pytest.raises(BuildError, match="was removed meanwhile; run the same command again"):
        append_commit(empty, _id("a"))
    unfinished = LocalFolder(empty.root.with_name("unfinished"))
    log = record_removal(unfinished, [_id("a")])
    assert (log.current, log.removed, log.number) == (None, {_id("a")}, 1)
    assert read_log(unfinished) == log
    assert append_commit(unfinished, _id("b")).number == 2
    assert record_removal(unfinished, [_id("b")], unfinished=[_id("b")]).removed == {_id("a")}


def test_a_version_takes_the_place_of_one_that_is_still_current(
    empty: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process commits between the look at the log and the entry."""
    first = append_commit(empty, _id("a"))
    noted = append_commit(empty, _id("a"), source="/new", since=first.number)
    assert (noted.version, noted.number) == (first.version, 2)
    assert append_commit(empty, _id("b"), replaces=_id("a")).parent == _id("a")
    assert append_commit(empty, _id("b"), replaces=_id("a")).version == _id("b")  # it is current

    def create_late(*args: Any, **options: Any) -> bool:
        monkeypatch.undo()
        append_commit(empty, _id("c"))
        return LocalFolder.create(*args, **options)

    monkeypatch.setattr(LocalFolder, "create", create_late)
    with pytest.raises(ReplacedError, match=f"{_id('c')[:12]} of .* is current, and no longer"):
        append_commit(empty, _id("d"), replaces=_id("b"))
    assert append_commit(empty, _id("b"), since=3).version == _id("c")  # it was current since
    assert [commit.version for commit in read_log(empty).commits][-1] == _id("c")
    assert append_commit(empty, _id("b"), since=4).version == _id("b")


def test_a_version_that_is_not_there_does_not_become_current(empty: LocalFolder) -> None:
    append_commit(empty, _id("a"))
    with pytest.raises(BuildError, match=f"{_id('b')} of .* was removed before it was made"):
        make_current(empty, _id("b"))
    assert len(read_log(empty).commits) == 1


@pytest.mark.parametrize(
    ("there", "versions"), [("its own", "a"), ("another's", "ba"), ("none", None)]
)
def test_an_entry_whose_answer_was_lost_is_read_back(
    there: str, versions: str | None, empty: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nonce tells whether it or another one is there."""
    create = LocalFolder.create
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def create_unheard(store: LocalFolder, name: str, *args: Any, **options: Any) -> bool:
        if name == "commits/000001.json":
            if there == "its own":
                create(store, name, *args, **options)
            elif there == "another's":
                _forge(store, "000001.json", {"version": _id("b"), "time": 1})
            raise StorageError("out of reach")
        return create(store, name, *args, **options)

    monkeypatch.setattr(LocalFolder, "create", create_unheard)
    if versions is None:
        with pytest.raises(StorageError, match="out of reach"):
            append_commit(empty, _id("a"))
    else:
        assert append_commit(empty, _id("a")).number == len(versions)
        assert [commit.version for commit in read_log(empty).commits] == [*map(_id, versions)]


@pytest.mark.parametrize("version", ["a", "b"])
def test_the_next_number_is_above_an_empty_entry_that_a_killed_create_left(
    version: str, empty: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk without links; nobody else takes it for a commit. A version that is current
    gets another entry, or the store stayed unreadable."""
    monkeypatch.setattr("precache.store.commit_log.EMPTY_SECONDS", 0.05)
    first = append_commit(empty, _id("a"))
    _forge(empty, "000002.json", b"")
    for read in (read_log, lambda store: precache.open(store.root)):
        with pytest.raises(
            StoreError, match=r"000002\.json is damaged or forged: it is empty"
        ) as e:
            read(empty)
        assert "build command again, and do not remove that file" in str(e.value)
    second = append_commit(empty, _id(version))
    assert second.number == 3
    assert read_log(empty).commits == (first, second)


def commit_when_told(root: Path, racer: int, links: bool) -> None:
    """Eight commits, once ``go`` is there; on a disk with hard links or without."""
    if not links:
        refuse = Mock(side_effect=OSError(errno.EPERM, "no links"))
        os.link = refuse  # in a process of its own
    Path(root, f"ready-{racer}").touch()
    poll((root / "go").exists, "the start")
    for number in range(8):
        append_commit(LocalFolder(root), _id(f"{racer:x}{number:x}"))


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


RIGHT = "a" * 32 + ".1"
NO_VERSIONS = [None, 7, "ab", "/etc", f"../{RIGHT}", f"{RIGHT}\n", RIGHT.upper()]
FORGED_ENTRIES: list[Any] = [
    b"{",
    [],
    {},
    *({"version": version, "time": 0} for version in NO_VERSIONS),
    *({"version": RIGHT[:-2] + generation, "time": 0} for generation in ("", ".0")),
    {"removed": ["a"], "time": 0},
    {"version": RIGHT},
    {"version": RIGHT, "time": "noon"},
    {"version": RIGHT, "time": 0, "number": 2},
]


@pytest.mark.parametrize("entry", FORGED_ENTRIES, ids=repr)
def test_a_forged_commit_is_refused_by_name(entry: Any, empty: LocalFolder) -> None:
    _forge(empty, "000001.json", entry)
    for act in (lambda: precache.open(empty.root), lambda: append_commit(empty, _id("a"))):
        with pytest.raises(StoreError, match=r"commits/000001\.json is damaged or forged: .*Rem"):
            act()
