"""Two builds of one version at once, each in a process: the second waits or takes over."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import BuildError, StoreError
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store.build_status import remove_folder
from precache.store.commit_log import ROOT, record_removal
from precache.store.json_documents import LeaseDocument
from precache.store.lease import Lease, Leases
from precache_workers.driver import build as driver
from precache_workers.planning.target_version import TargetVersion
from tests.support.building import (
    build_here,
    command,
    cut,
    encoded,
    end,
    environment,
    pixels,
    poll,
    remains,
    start,
    write,
    write_jpegs,
)

OPTIONS: dict[str, Any] = {"shard_samples": 3}


def mood(array: np.ndarray, folder: str = "") -> np.ndarray:
    """The array as it is, counted by process; the smallest fail unless LUCKY is set.

    The smallest wait where HOLD is set, if that is a store once a build of it has begun.
    """
    with Path(folder, f"{os.getpid()}.calls").open("a") as calls:
        calls.write(".")
    if array.shape[0] == 40:
        held = os.environ.get("HOLD")
        if held and (held == "1" or builds_of(Path(held))):
            Path(folder, str(os.getpid())).touch()
            poll(Path(folder, "go").exists, "the test's leave to go on")
        if not os.environ.get("LUCKY"):
            raise ValueError("no luck")
    return array


def builds_of(store: Path) -> int:
    """Number of builds that have begun and not ended."""
    return len(list(store.glob("*/_build/leases/*.json")))


def recipe_of(folder: Path, size: int = 24, codec: str = "zstd") -> precache.Recipe:
    op = {"op": "function", "function": "tests.driver.test_two_builds:mood", "version": "1"}
    op |= {"params": {"folder": str(folder)}}
    ops = [{"op": "decode"}, op, {"op": "resize", "size": [size, size]}]
    return precache.Recipe.from_dict({"fields": {"image": {"ops": ops, "codec": codec}}})


def assert_whole(store: Path) -> None:
    assert precache.verify(store).ok
    assert remains(store) == []


def start_held(folder: Path, build: Any, *arguments: Any) -> Any:
    """Start a build in a process, until it waits inside a shard."""
    process = start(build, *arguments)
    poll((folder / str(process.pid)).exists, "the build waits inside a shard")
    return process


def source_of(folder: Path) -> Path:
    """Twelve photos, the last of which is 40 px high."""
    source = write_jpegs(folder / "in", 11)
    write(source / "cat/0099.jpg", encoded(cut(99, (64, 40)), quality=90))
    return source


def when_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something as soon as a build of this process waits for another one."""

    wait = Leases.wait

    def act_and_wait(own: Leases, say: Callable[[LeaseDocument], None], note: str = "") -> Lease:
        def say_and_act(lease: LeaseDocument) -> None:
            say(lease)
            act()

        return wait(own, say_and_act, note)

    monkeypatch.setattr(Leases, "wait", act_and_wait)


def test_the_second_of_two_equal_builds_waits_and_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    variables = {"HOLD": str(store), "LUCKY": "1"}
    first = start_held(tmp_path, build_here, source, store, recipe, OPTIONS, variables)
    when_waiting(monkeypatch, (tmp_path / "go").touch)
    result = precache.build(source, store, recipe, address="serial", progress=True, **OPTIONS)
    assert end(first) == 0
    assert (result.samples, result.failed, result.shards_skipped) == (12, 0, result.shards)
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(rf"is running already \(process {first.pid} [^)]*, since 20\d\d-", said)
    assert f"Nothing to do: version {result.version[:8]} is complete" in said
    assert not Path(tmp_path, f"{os.getpid()}.calls").exists(), "it computed nothing"
    assert_whole(store)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_the_second_goes_on_where_the_first_ended_while_it_waited(
    tmp_path: Path, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = source_of(tmp_path), tmp_path / "store"
    recipe, variables = recipe_of(tmp_path, size=150), {"HOLD": str(store), "LUCKY": "1"}
    first = start_held(tmp_path, build_here, source, store, recipe, OPTIONS, variables)
    done = len(list(store.rglob("receipts/*.json")))
    when_waiting(monkeypatch, lambda: os.kill(first.pid, sent))
    monkeypatch.setenv("LUCKY", "1")
    result = build_here(source, store, recipe, OPTIONS)
    assert end(first) != 0
    assert (result.failed, result.shards) == (0, 4)
    assert result.shards_skipped >= done
    assert_whole(store)


@pytest.mark.parametrize(
    ("built", "lucky"),
    [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.heavy)],
)
def test_what_failed_is_tried_again_after_another_build_of_the_version(
    tmp_path: Path, built: bool, lucky: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is the first, or tries again, too, with luck or without."""
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    again = {**OPTIONS, "retry_failed": True}
    if built:
        assert build_here(source, store, recipe, OPTIONS).failed == 1
    options = again if built else OPTIONS
    variables = {"HOLD": str(store), **({"LUCKY": "1"} if lucky else {})}
    slow = start_held(tmp_path, build_here, source, store, recipe, options, variables)
    before = {path.name for path in store.glob("commits/*")}
    when_waiting(monkeypatch, (tmp_path / "go").touch)
    monkeypatch.setenv("LUCKY", "1")
    result = build_here(source, store, recipe, again)
    assert end(slow) == 0
    assert precache.open(store).id == result.version
    assert {path.name for path in store.glob("commits/*")} > before
    assert built or result.mended == 1
    assert not precache.open(store).holes
    assert_whole(store)


def test_of_two_that_recompute_one_version_the_second_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    monkeypatch.setenv("LUCKY", "1")
    before = build_here(source, store, recipe, OPTIONS).version
    again, begun = {**OPTIONS, "recompute": True}, []

    def tidy_late(folder: Folder) -> None:
        held = {"HOLD": str(store)}
        begun.append(start_held(tmp_path, build_here, source, store, recipe, again, held))

    monkeypatch.setattr(driver, "tidy_current", tidy_late)
    when_waiting(monkeypatch, (tmp_path / "go").touch)
    result = build_here(source, store, recipe, again)
    assert end(begun[0]) == 0
    assert precache.open(store).id == result.version != before
    assert_whole(store)


def test_ctrl_c_ends_the_wait_and_leaves_the_other_build_alone(tmp_path: Path) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    variables = {"HOLD": str(store), "LUCKY": "1"}
    first = start_held(tmp_path, build_here, source, store, recipe, OPTIONS, variables)
    [held] = store.glob("*/_build/leases/*.json")
    text, said = json.dumps(recipe.to_dict()), tmp_path / "said"
    line = command("build", source, store, "--recipe", text, "--shard-samples", "3")
    with said.open("wb") as file:
        waiting = subprocess.Popen(line, env=environment(), stdout=file, stderr=file)
        poll(lambda: "waiting for its end" in said.read_text(), "the second build waits")
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
    assert "Traceback" not in said.read_text()
    assert list(store.glob("*/_build/leases/*.json")) == [held]
    assert not list(store.glob("_claims/*/*"))
    assert "failed" not in json.loads((held.parents[1] / "build.json").read_text())
    (tmp_path / "go").touch()
    assert end(first) == 0
    assert_whole(store)


def test_a_document_that_was_cut_off_is_no_commit(tmp_path: Path) -> None:
    """As a process leaves it that is killed on a disk without hard links."""
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    build = start_held(
        tmp_path, build_here, source, store, recipe, OPTIONS, {"HOLD": str(store), "LUCKY": "1"}
    )
    [version] = {path.parents[2] for path in store.glob("*/_build/leases/*.json")}
    write(version / ROOT, b"")
    (tmp_path / "go").touch()
    assert end(build) == 0
    assert_whole(store)


@pytest.mark.parametrize("ended", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_a_version_that_a_plain_build_took_meanwhile_is_not_that_of_recompute(
    tmp_path: Path, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    monkeypatch.setenv("LUCKY", "1")
    variables = {} if ended else {"HOLD": str(store)}
    plain = []

    def tidy_late(folder: Folder) -> None:
        plain.append(start(build_here, source, store, recipe, OPTIONS, variables))
        if ended:
            assert end(plain[0]) == 0
        else:
            poll((tmp_path / str(plain[0].pid)).exists, "the plain build waits inside a shard")

    again = {**OPTIONS, "recompute": True}
    with monkeypatch.context() as late:
        late.setattr(driver, "tidy_current", tidy_late)
        with pytest.raises(StoreError, match="may not recompute what this one does; run the same"):
            build_here(source, store, recipe, again)
    (tmp_path / "go").touch()
    assert end(plain[0]) == 0
    taken = precache.open(store).id
    assert build_here(source, store, recipe, again).version != taken
    assert precache.verify(store).ok


def test_a_build_whose_version_was_removed_commits_no_shards_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `gc`, if the build was stopped for long between its last shard and its commit."""
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    monkeypatch.setenv("LUCKY", "1")
    commit = driver.commit

    def commit_late(target: TargetVersion, *args: Any) -> None:
        folder = open_folder(store)
        record_removal(folder, [target.version])
        remove_folder(folder, target.version)
        others = {**OPTIONS, "max_failures": 0}
        assert end(start(build_here, source, store, recipe, others, {"LUCKY": ""})) == 1
        assert not target.folder.sizes("image")  # that one is another generation
        commit(target, *args)

    monkeypatch.setattr(driver, "commit", commit_late)
    with pytest.raises(BuildError, match=r"meanwhile.*; run the same command again"):
        build_here(source, store, recipe, OPTIONS)
    monkeypatch.setattr(driver, "commit", commit)
    build_here(source, store, recipe, OPTIONS)
    assert precache.verify(store).ok
    assert all(image.any() for image in pixels(store).values())


def test_a_mend_leaves_the_version_that_a_pull_put_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pulled one has a row where the damaged one has a hole: it is another generation."""
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    assert build_here(source, store, recipe, OPTIONS).failed == 1
    assert end(start(build_here, source, tmp_path / "other", recipe, OPTIONS, {"LUCKY": "1"})) == 0
    version = Path(precache.open(store).path)
    (version / "valid/c/0").write_bytes(b"damaged")
    (version / "label/c/0").write_bytes(b"damaged")
    spare_objects = driver.spare_objects  # made right before objects are put

    def pulled_before(*given: Any) -> Any:
        precache.pull(tmp_path / "other", store)
        return spare_objects(*given)

    monkeypatch.setattr(driver, "spare_objects", pulled_before)
    build_here(source, store, recipe, OPTIONS)
    assert precache.verify(store).ok
    assert not precache.open(store).holes
    assert precache.verify(f"{store}@{version.name}").ok
    assert precache.open(f"{store}@{version.name}").holes
