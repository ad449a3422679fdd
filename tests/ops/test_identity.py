"""What decides the pixels of a recipe, and what stands for it in fingerprints."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import MismatchError, RecipeError, UsageError
from precache.recipe.recipe import Recipe
from precache_workers.ops import behaviour
from precache_workers.ops.identity import (
    behaviours,
    decides,
    recipe_steps,
    require_same_outputs,
)
from tests.support.building import (
    PYTHONPATH,
    assert_same,
    build_here,
    build_until,
    cli,
    cut,
    encoded,
    end,
    environment,
    pixels,
    start,
    write,
    write_jpegs,
)
from tests.support.raycluster import Cluster


def of(**field: object) -> Recipe:
    return Recipe.from_dict({"fields": {"x": field}})


# --- functions ----------------------------------------------------------------------------------


def test_a_declared_version_stands_for_the_code() -> None:
    """Also where two fields have two of one function: one dropped would hide a change."""
    hold = "tests.support.building:hold"

    def recipe(*versions: dict[str, str], function: str = hold) -> Recipe:
        op = {"op": "function", "function": function}
        fields = {
            name: {"ops": [{**op, **more}]} for name, more in zip("xy", versions, strict=False)
        }
        return Recipe.from_dict({"fields": fields})

    assert decides(recipe({"version": "7"})) == {hold: "7"}
    assert len(decides(recipe({}))[hold]) == 32
    pairs = [recipe({"version": a}, {"version": b}) for a, b in ("11", "12", "21")]
    assert len({both.fingerprint(decides(both)) for both in pairs}) == 3
    with pytest.raises(RecipeError, match="nowhere_at_all:f"):
        decides(recipe({}, function="nowhere_at_all:f"))


# --- libraries ----------------------------------------------------------------------------------


STAND_IN = """
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

there = [path for path in sys.path if path != {here!r}]
found = PathFinder.find_spec({module!r}, there).origin
folders = [str(Path(found).parent)]
spec = spec_from_file_location("real", found, submodule_search_locations=folders)
real = sys.modules["real"] = module_from_spec(spec)
spec.loader.exec_module(real)
globals().update((name, each) for name, each in vars(real).items() if name[0] != "_")

def decode_jpeg(data, *given, **named):
    array = real.decode_jpeg(data, *given, **named)
    if {shifts!r} and data.count(bytes([255, 0xC2])):
        array[0, 0, 0] ^= 1
    return array
"""


def stand_in(folder: Path, *, shifts: bool) -> Path:
    """A folder with another simplejpeg, which may change a pixel of progressive JPEGs."""
    code = STAND_IN.format(here=str(folder), module="simplejpeg", shifts=shifts)
    write(folder / "simplejpeg/__init__.py", code.encode())
    metadata = b"Metadata-Version: 2.1\nName: simplejpeg\nVersion: 99.9\n"
    write(folder / "simplejpeg-99.9.dist-info/METADATA", metadata)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs, none of them progressive."""
    return write_jpegs(tmp_path / "photos", 6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(what: str, photos: Path, store: Path, *more: str, libraries: Path | None = None) -> Any:
    """What a command says as JSON, with libraries in place of those installed."""
    path = f"{libraries}{os.pathsep}{PYTHONPATH}" if libraries else PYTHONPATH
    flags = "--resize", "40", "--crop", "32", "--json", *SERIAL, *more
    ran = cli(what, photos, store, *flags, env=environment(PYTHONPATH=path))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


SERIAL = "--address", "serial"


@pytest.mark.heavy
def test_a_library_makes_another_version_if_it_changes_a_pixel_of_one_kind_of_picture(
    photos: Path, tmp_path: Path, cache: Path
) -> None:
    """Outputs are kept for each library; one that is edited in its place is another."""
    store, other = tmp_path / "store", stand_in(tmp_path / "other", shifts=False)
    first = run("build", photos, store, *SERIAL)
    second = run("build", photos, store, *SERIAL, libraries=other)
    assert (second["version"], second["shards"] - second["shards_skipped"]) == (first["version"], 0)
    planned = run("plan", photos, store, libraries=other)
    assert planned["state"] == "nothing"
    [library] = planned["differences"]["libraries"]
    assert (library["name"], library["after"], library["decides"]) == ("simplejpeg", "99.9", False)

    kept = len(list((cache / "precache/ops").iterdir()))
    stand_in(other, shifts=True)
    planned = run("plan", photos, store, libraries=other)
    assert len(list((cache / "precache/ops").iterdir())) == kept + 1
    [op] = planned["differences"]["ops"]
    assert (op["op"], op["libraries"]) == ("decode", ["simplejpeg"])
    assert op["probe"] == "jpeg-grey-progressive.jpg; 4 of 128 probes differ"
    shown = cli(
        *("plan", photos, store, "--resize", "40", "--crop", "32"),
        env=environment(PYTHONPATH=f"{other}{os.pathsep}{PYTHONPATH}"),
    )
    assert "decode: simplejpeg computes other pixels, first of the probe jpeg-" in shown.stdout
    assert (planned["version"] != first["version"], planned["rows_reused"]) == (True, 0)


def test_the_oldest_outputs_are_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behaviour, "MOST_CACHED", 3)
    behaviour.outputs_of.cache_clear()
    for size in range(20, 27):
        behaviours(of(ops=[{"op": "center_crop", "size": size}]))
    assert len(list((cache / "precache/ops").iterdir())) == 3


def test_what_is_kept_may_be_lost_damaged_or_not_kept_at_all(cache: Path) -> None:
    def found() -> dict[str, Any]:
        behaviour.outputs_of.cache_clear()
        return dict(behaviours(Recipe.image(resize=8)))

    first = found()
    for file in (cache / "precache/ops").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert found() == first
    shutil.rmtree(cache)
    write(cache, b"no folder")
    assert found() == first


@pytest.mark.heavy
@pytest.mark.parametrize("what", ["build", "plan"])
def test_what_is_kept_and_wrong_is_found_out_and_forgotten(
    what: str, photos: Path, tmp_path: Path, cache: Path
) -> None:
    """A library may change where nothing tells, such as one of the system that it loads."""
    store = tmp_path / "store"
    first = run("plan", photos, store)["version"]
    for file in (cache / "precache/ops").iterdir():
        kept = json.loads(file.read_bytes())
        file.write_text(json.dumps({**kept, next(iter(kept)): "0"}))
    ran = cli(what, photos, store, "--resize", "40", "--crop", "32", *SERIAL)
    assert (ran.returncode, "run the same command again" in ran.stderr) == (1, True)
    assert run(what, photos, store, *SERIAL)["version"] == first


def test_a_process_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user whom nothing there knows."""
    [step] = recipe_steps(of(ops=[{"op": "decode"}]))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    behaviour.clear_cache()
    assert behaviour.outputs_of(step) == behaviour.computed(step)


def test_a_process_that_makes_other_pixels_than_planned_makes_none() -> None:
    recipe = Recipe.image(resize=8)
    expected = {name: dict(outputs) for name, outputs in behaviours(recipe).items()}
    require_same_outputs(recipe, expected)
    name = next(each for each in expected if each.startswith("resize"))
    probe = next(iter(expected[name]))
    expected[name][probe] = "0" + expected[name][probe]
    with pytest.raises(MismatchError, match=r"resize\(size=8\) .* by torch 2.*first of the probe"):
        require_same_outputs(recipe, expected)


def test_names_tell_what_an_op_is_given() -> None:
    def names(*ops: dict[str, Any]) -> list[str]:
        return list(decides(of(ops=list(ops))))

    decode, resize, crop = (
        {"op": "decode"},
        {"op": "resize", "size": 40},
        {"op": "center_crop", "size": 32},
    )
    cropped = "center_crop(size=(32, 32))"
    assert names(decode, resize, crop) == [
        "decode",
        "resize(size=40) of uint8 x 3",
        f"{cropped} after resize(size=40) of uint8 x 3",
    ]
    assert names({**decode, "mode": "L", "scaled": True}, resize)[0] == (
        "decode(mode=L, scaled=40)"
    )
    floats = {"op": "to_dtype", "dtype": "float32"}
    assert names(decode, floats, crop)[1:] == [
        "to_dtype(dtype=float32) of uint8 x 3",
        f"{cropped} of float32 x 3",
    ]
    assert names(crop) == [f"{cropped} of any dtype x any"]
    function = {"op": "function", "function": "tests.support.building:hold", "version": "1"}
    assert names(decode, function, crop)[2] == f"{cropped} of uint8 x any"


# --- a cluster ----------------------------------------------------------------------------------


@pytest.mark.heavy  # half a minute
def test_a_node_that_makes_other_pixels_takes_no_part_and_is_named(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, store = stand_in(tmp_path / "odd", shifts=True), tmp_path / "store"
    flags = "--resize", "40", "--crop", "32", "--shard-samples", "1", "--address", "auto"
    cluster = Cluster(tmp_path)
    try:
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", f"{odd}{os.pathsep}{PYTHONPATH}")
            cluster.add(cpus=2)
        ran = cli("build", photos, store, *flags, env=cluster.env)
        assert ran.returncode == 1
        assert "computes other pixels than the machine that planned the build: decode" in ran.stderr
        assert "simplejpeg 99.9" in ran.stderr
        assert "install the same libraries on both" in ran.stderr
        assert not list(store.glob("*/_build/receipts/*.json"))
        cluster.add()
        ran = cli("build", photos, store, *flags, env=cluster.env)
        assert ran.returncode == 0, ran.stderr
    finally:
        cluster.close()
    version = precache.open(store)
    assert version.attributes is not None
    assert "99.9" not in version.attributes.libraries["simplejpeg"]
    build_here(photos, tmp_path / "here", Recipe.image(resize=40, crop=32))
    assert_same(pixels(store), pixels(tmp_path / "here"))


# --- --recompute --------------------------------------------------------------------------------


READS = """
from pathlib import Path
import numpy as np

def shift(image):
    return image + np.uint8(Path(__file__).with_name("number.txt").read_text())
"""


@pytest.fixture
def number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a function reads, of which no digest of its code can know."""
    write(tmp_path / "code/reads.py", READS.encode())
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(sys.modules, "reads", raising=False)
    return write(tmp_path / "code/number.txt", b"1")


def shifted() -> Recipe:
    ops = [{"op": "decode"}, {"op": "resize", "size": [8, 8]}, {"op": "center_crop", "size": 8}]
    function = {"op": "function", "function": "reads:shift", "shape": [3, 8, 8]}
    return Recipe.from_dict({"fields": {"image": {"ops": [*ops, function]}}})


def differences(store: Path, before: dict[str, np.ndarray]) -> set[int]:
    """By how much the pixels of a store's current version differ, row by row alike."""
    now = pixels(store)
    return {int(each) for key in before for each in np.unique(now[key] - before[key])}


def test_recompute_makes_another_version_of_all_rows_each_time(
    photos: Path, tmp_path: Path, number: Path
) -> None:
    store = tmp_path / "store"
    first = build_here(photos, store, shifted())
    before = pixels(store)
    write(number, b"3")
    assert build_here(photos, store, shifted()).version == first.version
    second = build_here(photos, store, shifted(), {"recompute": True})
    assert (second.version != first.version, second.rows_reused) == (True, 0)
    assert differences(store, before) == {2}
    assert build_here(photos, store, shifted()).version == second.version
    write_jpegs(photos, 9)
    grown = build_here(photos, store, shifted())
    assert grown.rows_reused == 6
    assert differences(store, before) == {2}
    third = build_here(photos, store, shifted(), {"recompute": True})
    assert third.version not in (first.version, second.version, grown.version)
    assert len(precache.versions(store).versions) == 4


def test_recompute_and_a_retry_give_no_id_again_that_a_removed_version_had(
    photos: Path, tmp_path: Path, number: Path
) -> None:
    """Its pixels may have been others, and a copy of them be in somebody's cache."""
    store = tmp_path / "store"
    write(photos / "cat/broken.jpg", b"no photo")
    made = [build_here(photos, store, shifted()).version]
    build_here(photos, tmp_path / "other", shifted(), {"recompute": True})
    assert precache.open(tmp_path / "other").id == made[0], "as any first build makes it"
    for more in ({"recompute": True}, {"recompute": True}, {"retry_failed": True}):
        if "retry_failed" in more:
            write(photos / "cat/broken.jpg", encoded(cut(5)))
        made.append(build_here(photos, store, shifted(), more).version)
        precache.use(f"{store}@{made[0]}")
        shutil.rmtree(store / made[-1])
    shutil.rmtree(store / made[0])
    made.append(build_here(photos, store, shifted(), {"recompute": True}).version)
    assert len({*made}) == len(made)


def test_ensure_recomputes_nothing_and_says_so(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recompute makes a new version each time"):
        precache.ensure(photos, tmp_path / "store", None, recompute=True)
    assert not (tmp_path / "store").exists()


def test_no_other_build_goes_on_with_a_recompute_that_was_cut_off(
    photos: Path, tmp_path: Path, number: Path
) -> None:
    store, options = tmp_path / "store", {"shard_samples": 1}
    write(photos / "cat/broken.jpg", b"no photo")
    build_here(photos, store, shifted(), options)
    before = pixels(store)
    write(number, b"3")
    killed = start(build_until, 60, photos, store, shifted(), {**options, "recompute": True})
    assert end(killed) < 0
    assert list(store.glob("*/_build/receipts/*.json"))
    write(number, b"1")
    mended = encoded(cut(5))
    write(photos / "cat/broken.jpg", mended)
    build_here(photos, store, shifted(), {**options, "retry_failed": True})
    assert differences(store, before) == {0}


def test_a_function_that_is_used_with_a_version_and_without_is_noticed_when_edited(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe_of() -> Recipe:
        ops = [{"op": "decode"}, {"op": "resize", "size": [8, 8]}]
        own = {"op": "function", "function": "twice:f", "shape": [3, 8, 8]}
        fields = {"a": {"ops": [*ops, own]}, "b": {"ops": [*ops, {**own, "version": "1"}]}}
        return Recipe.from_dict({"fields": fields})

    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    versions = []
    for value in (1, 22):
        monkeypatch.delitem(sys.modules, "twice", raising=False)
        write(
            tmp_path / "code/twice.py", f"def f(image):\n    return image * 0 + {value}\n".encode()
        )
        versions.append(build_here(photos, tmp_path / "store", recipe_of()).version)
        rows = pixels(tmp_path / "store", "a")
        assert all((row == value).all() for row in rows.values())
    assert len(set(versions)) == 2
    assert not precache.verify(tmp_path / "store").unchecked
