"""`ensure`: what is there is opened, what is not is built once, however many ask."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import BuildError, UsageError
from tests.support.building import (
    build_here,
    contents,
    pixels,
    poll,
    remains,
    start,
    write,
    write_jpegs,
)
from tests.support.holding import Held
from tests.support.jobhead import JobHead
from tests.support.servers import S3Server

ASK = """
import json, sys
from pathlib import Path
import precache

source, store, recipe, options, answer = sys.argv[1:]
recipe = precache.Recipe.from_dict(json.loads(recipe))
try:
    version = precache.ensure(source, store, recipe, **json.loads(options))
    told = {"version": version and version.id}
except precache.PrecacheError as error:
    told = {"error": f"{type(error).__name__}: {error}"}
Path(answer).write_text(json.dumps(told))
"""

SHARDS = {"address": "serial", "shard_samples": 4}


class Asking(Held):
    """Processes that ask for one version."""

    def ask(self, name: str, store: str = "", after: int = 0, **options: Any) -> Any:
        """A process that asks, as a context."""
        cluster = "code" in options
        asked = precache.Recipe.image(resize=150, crop=150) if cluster else self.recipe_of(after)
        recipe, given = json.dumps(asked.to_dict()), json.dumps({**SHARDS, **options})
        return self.process(name, ASK, self.source, store or self.store, recipe, given)

    def says(self, name: str, text: str) -> None:
        path = self.said(name)
        poll(lambda: path.exists() and text in path.read_text(), f"{name} says {text!r}")


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    return Asking(tmp_path, 12)


def test_two_at_once_make_one_build(asking: Asking) -> None:
    with asking.ask("one"), asking.ask("two"):
        poll(asking.builders, "one of them builds")
        poll(
            lambda: any(
                asking.said(name).exists() and "waiting for" in asking.said(name).read_text()
                for name in ("one", "two")
            ),
            "the other one waits",
        )
        asking.go()
        one, two = asking.answer("one"), asking.answer("two")
    assert one == two
    assert len(asking.builders()) == 1
    assert precache.open(asking.store).id == one["version"]
    assert len(pixels(asking.store)) == 12
    assert remains(asking.store) == []
    assert asking.leases() == []


@pytest.mark.heavy
def test_of_one_that_is_killed_another_takes_over(asking: Asking) -> None:
    with asking.ask("one", after=5) as first:
        [builder] = poll(asking.builders, "it builds")
        [done] = asking.store.glob("*/image/c/0/0/0/0")
        before = done.stat().st_ino, done.stat().st_mtime_ns
        with asking.ask("two", after=5):
            asking.says("two", "waiting for")
            os.kill(builder, signal.SIGKILL)
            first.wait()
            poll(lambda: len(asking.builders()) == 2, "the other one builds")
            asking.go()
            assert asking.answer("two")["version"] == precache.open(asking.store).id
    assert not (asking.folder / "one").exists()
    assert (done.stat().st_ino, done.stat().st_mtime_ns) == before
    assert len(pixels(asking.store)) == 12
    assert asking.leases() == []


def test_a_build_that_asked_nobody_is_awaited_too(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = start(
        build_here,
        asking.source,
        asking.store,
        asking.recipe_of(),
        {"shard_samples": 4},
        {"HOLD": "1"},
    )
    poll(asking.builders, "it builds")
    with asking.ask("one"):
        asking.says("one", "waiting for")
        asking.go()
        assert asking.answer("one")["version"]
    build.join()
    assert asking.builders() == [build.pid]


def test_not_waiting_leaves_the_build_to_a_process_of_its_own(asking: Asking) -> None:
    with asking.ask("one", wait=False) as first:
        assert asking.answer("one") == {"version": None}
        first.wait()
    said = asking.said("one").read_text()
    assert "in the background; its log, removed if it succeeds: " in said
    log = Path(said.rpartition("succeeds: ")[2].strip())
    assert log.exists()
    [builder] = poll(asking.builders, "it builds, though nobody waits")
    with asking.ask("two", wait=0.01):
        told = asking.answer("two")
    assert "BuildError" in told["error"]
    assert "is not built after 0.01 seconds: 0 of 3 shards are done" in told["error"]
    assert str(log) in told["error"]
    with asking.ask("three", wait=100):
        asking.says("three", f"which process {builder} on ")
        asking.go()
        assert asking.answer("three")["version"] == precache.open(asking.store).id
    assert asking.builders() == [builder]
    poll(lambda: not log.exists(), "the log of a build that succeeded is removed")
    poll(lambda: not asking.leases(), "its lease is gone")


@pytest.mark.heavy
def test_a_failure_in_the_background_is_told(asking: Asking) -> None:
    write(asking.source / "cat/broken.jpg", b"none")
    asking.go()
    with asking.ask("one", wait=100, on_error="raise"):
        told = asking.answer("one")["error"]
    assert told.startswith("BuildError: the build in the background failed: 1 of 13 samples failed")
    assert "its log: " in told
    with asking.ask("two", wait=100, max_failures=1):
        assert asking.answer("two")["version"]
        # Before the block ends the process that builds, too.
        poll(lambda: not asking.leases(), "its lease is gone")


def test_a_process_in_the_background_that_cannot_begin_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it takes nothing of what it is given: more than a pipe holds."""
    source = tmp_path / "in"
    for number in range(600):
        write(source / "cat" / f"{number:0150}.jpg", b"")
    python = write(tmp_path / "python", b"#!/bin/sh\necho no room >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    recipe = precache.Recipe.image(resize=150, interpolation="nearest", crop=150)
    with pytest.raises(BuildError, match=r"in the background failed: no room \(its log: "):
        precache.ensure(source, tmp_path / "store", recipe, wait=100.0, progress=False)


OPEN = """
import sys
import precache

recipe = precache.Recipe.image(resize=24)
version = precache.ensure(*sys.argv[1:], recipe)
print(version.id, *sys.modules)
"""


def test_what_is_there_is_opened_and_nothing_is_written(
    tmp_path: Path,
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "XDG_CACHE_HOME", os.fspath(tmp_path / "cache")
    )  # tests clear the shared one
    source, store = write_jpegs(tmp_path / "in", 6), tmp_path / "store"
    first = build_here(source, store, precache.Recipe.image(resize=24)).version
    build_here(source, store, precache.Recipe.image(resize=20))
    before = contents(store)
    run_python(OPEN, source, store)
    version, *modules = run_python(OPEN, source, store).stdout.split()
    assert version == first
    assert not {"ray", "torch", "simplejpeg", "PIL", "zarr"} & set(modules)
    assert contents(store) == before
    names = {"_listings", "commits", *{v.id for v in both(store)}}
    assert {path.name for path in store.iterdir()} == names


def both(store: Path) -> list[precache.Version]:
    return [precache.open(f"{store}@{each.version}") for each in precache.versions(store).versions]


def test_the_version_goes_into_a_loader_as_it_is(tmp_path: Path) -> None:
    source, store = write_jpegs(tmp_path / "in", 6), tmp_path / "store"
    recipe = precache.Recipe.image(resize=24, crop=24)
    version = precache.ensure(source, store, recipe, address="serial", progress=False)
    assert version is not None
    with precache.Loader(version, batch_size=2) as loader:
        assert sum(len(batch["row"]) for batch in loader) == 6
        assert loader.version is version
    with precache.Loader(os.fspath(version), batch_size=2) as loader:
        assert loader.version.id == version.id
    lost = next((store / version.id / "image").rglob("0/0/0/0"))
    lost.unlink()
    again = precache.ensure(source, store, recipe, address="serial", progress=False)
    assert again is not None
    assert lost.exists()


@pytest.mark.heavy
def test_in_a_bucket_too_two_make_one_build(asking: Asking, s3: S3Server) -> None:
    store = "s3://bucket/ensured"
    options = {"storage_options": s3.options(), "shard_samples": 4}
    with asking.ask("one", store, **options), asking.ask("two", store, **options):
        asking.go()
        one, two = asking.answer("one"), asking.answer("two")
    assert one == two
    version = precache.open(store, s3.options())
    assert version.id == one["version"]
    said = [asking.said(name).read_text() for name in ("one", "two")]
    assert sum("to be stored" in each for each in said) == 1


@pytest.mark.heavy
def test_a_build_that_failed_is_not_awaited(asking: Asking) -> None:
    write(asking.source / "cat/broken.jpg", b"none")
    asking.go()
    with pytest.raises(BuildError):
        build_here(asking.source, asking.store, asking.recipe_of(), {"on_error": "raise"})
    with asking.ask("one", max_failures=1):  # though its process lives, and did just now
        assert asking.answer("one")["version"]
    assert "waiting for" not in asking.said("one").read_text()


@pytest.mark.heavy
def test_a_cluster_makes_one_build_of_several_that_ask(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = JobHead()
    try:
        for name, value in head.env.items():
            monkeypatch.setenv(name, value)
        options = {"address": head.address, "code": []}
        with asking.ask("none", wait=False, **options), asking.ask("late", wait=0.5, **options):
            assert asking.answer("none") == {"version": None}
            assert "is not built after 0.5 seconds" in asking.answer("late")["error"]
        with asking.ask("one", **options), asking.ask("two", follow=True, **options):
            one, two = asking.answer("one"), asking.answer("two")
        assert one == two == {"version": precache.open(asking.store).id}
        told = json.loads(head.get("/api/jobs/") or b"")
        assert len([each for each in told if each["submission_id"]]) == 1
    finally:
        head.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wait": -1}, "wait is -1"),
        ({"wait": "10m"}, "wait is '10m'; give True, False, or seconds"),
        ({"wait": float("nan")}, "wait is nan"),
        ({"code": ["x.py"]}, "code is sent to a cluster"),
        ({"address": "mars"}, "address is 'mars'"),
        ({"source": precache.Recipe.image()}, "source is a Recipe; give a folder"),
        ({"source": None}, "source is a NoneType; give a folder"),
        ({"store": None}, "store is None; give a path or URL as text"),
        ({"store": b"x"}, "store is b'x'; give a path or URL as text"),
        ({"store": "a\0b"}, r"store is 'a\\x00b'; give a path or URL as text"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: Any, text: str) -> None:
    asked = {"source": write_jpegs(tmp_path / "in", 2), "store": tmp_path / "store", **options}
    with pytest.raises(UsageError, match=text):
        precache.ensure(**asked)
    assert not (tmp_path / "store").exists()


def test_a_source_may_be_named_like_a_recipe_file(tmp_path: Path) -> None:
    source = write_jpegs(tmp_path / "photos.toml", 3)
    version = precache.ensure(source, tmp_path / "store", address="serial")
    assert version.rows == 3
