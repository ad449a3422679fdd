"""What comes out of a store is data: it names no code that runs, and no file that is read.

A store is forged as a stranger could: all digests hold, its recipe and its log of commits name
code, part of which lies in the store's own folder, and its row table names files beside the source.
"""

import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.cli.main import main
from precache.errors import BuildError, FetchError, PrecacheError, UsageError
from precache.recipe.recipe import Field, Recipe
from precache.store.json_documents import version_id
from precache.store.row_table import below, table_objects
from precache.store.small_arrays import small_array
from precache_workers.sources.base import Sample, Source
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.kinds import open_source
from tests.support.building import build_here, cut, encoded, environment, write, write_jpegs
from tests.support.forging import settle
from tests.support.servers import web_server

RECIPE = Recipe.image(resize=24, random_resized_crop=16, variants=2)

CODE: dict[str, str | None] = {
    "numpy:full_like": "1",
    "subprocess:call": "1",
    "trap:declared": "1",
    "trap:hashed": None,
    "pack.part:hashed": None,
}
"""Functions that a forged recipe names -> the version that they declare."""

FACTORY = "python:pack.part:make"

TRAP = """
from pathlib import Path

Path({ran!r}).touch()

def declared(array, trap=0):
    return array

hashed = declared

class make:
    def __len__(self):
        return 6

    def __getitem__(self, number):
        import numpy as np
        return np.full((30, 30, 3), number, np.uint8), 0
"""


@dataclass
class Forged:
    """A store that nobody should trust, the samples it was built from, and what it had run."""

    path: Path
    source: Path
    marker: Path
    called: list[str]

    @property
    def ran(self) -> bool:
        """Whether any code ran that only the store names."""
        return self.marker.exists() or bool(self.called)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two variants of six photographs, which lie beside it."""
    root = tmp_path_factory.mktemp("honest")
    build_here(write_jpegs(root / "in", 6), root / "store", RECIPE, {"shard_samples": 4})
    return root


@pytest.fixture
def copied(honest: Path, tmp_path: Path) -> Path:
    """A copy of `honest` of the test's own; the log names the source in the copy."""
    root = Path(shutil.copytree(honest, tmp_path / "root"))
    rewrite_log(root / "store", source=str(root / "in"))
    return root


@pytest.fixture
def forged(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Forged:
    """Its recipe and its log name code; the modules among it lie in the store, and there we are."""
    store, marker, called = copied / "store", copied / "ran", list[str]()
    ops = [
        {"op": "function", "function": name, "version": version, "params": {"trap": 1}}
        for name, version in CODE.items()
    ]
    forge(store, ops=ops)
    rewrite_log(store, source=FACTORY)
    for name in ("trap.py", "pack/__init__.py", "pack/part.py"):
        write(store / name, TRAP.format(ran=str(marker)).encode())
    for function in (np.full_like, subprocess.call):
        module = sys.modules[str(function.__module__)]
        monkeypatch.setattr(module, function.__name__, trapped(function, called))
    for name in ("trap", "pack", "pack.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(store)  # whatever a command itself may do to the path
    monkeypatch.chdir(store)
    importlib.invalidate_caches()
    return Forged(store, copied / "in", marker, called)


def trapped(function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    """The function, which as an op of the forged recipe does nothing but tell."""

    def spy(array: Any, *others: Any, **options: Any) -> Any:
        if "trap" not in options:
            return function(array, *others, **options)
        called.append(function.__name__)
        return array

    return spy


def forge(
    store: Path, ops: list[dict[str, Any]] | None = None, keys: dict[str, str] | None = None
) -> None:
    """Rewrite a store's only version with more ops, or with other keys, so that all digests hold.

    Of a row with another key no size and content are known, as of one that never was a file.
    """
    version = precache.open(store)
    folder = Path(version.path)
    document = json.loads((folder / "zarr.json").read_bytes())
    own = document["attributes"]["precache"]
    own["recipe"]["fields"]["image"]["ops"] += ops or []
    own["fingerprint"] = hashlib.sha256(json.dumps(own["recipe"]).encode()).hexdigest()
    if keys:
        table, contents = version.row_table(), version.contents()
        changed = [key in keys for key in table.keys]
        names = [keys.get(key, key) for key in table.keys]
        table = replace(table, keys=names, sizes=np.where(changed, -1, table.sizes))
        contents[changed] = 0
        content = small_array(contents, ["row", "xxh3"])
        for name, data in {**table_objects(table), **below({"rows/content": content})}.items():
            (folder / name).write_bytes(data)
        own["rows_digest"] = table.digest
    own["version"] = version_id(own["fingerprint"], own["rows_digest"], own["rows_per_shard"])
    (folder / "zarr.json").write_text(json.dumps(document))
    name = f"{own['version']}.1"
    folder.rename(store / name)
    rewrite_log(store, version=name)
    settle(store / name)
    assert precache.verify(store).ok, "a forgery that nobody notices"


def rewrite_log(store: Path, **changes: str) -> None:
    [entry] = (store / "commits").iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_bytes()), **changes}))


# --- no command runs code that only a store names -----------------------------------------------

SERIAL: dict[str, Any] = {"address": "serial"}
NOWHERE: dict[str, Any] = {"address": "http://127.0.0.1:1"}
"""A job server that is not there: what is to be refused is refused before."""


def recipe_of(store: Path) -> Recipe:
    return precache.open(store).recipe


def asked(function: Any, **options: Any) -> Callable[[Path, Path], object]:
    """A function that is called with the recipe that the store has."""
    return lambda store, source: function(source, store, recipe_of(store), **options)


REFUSED: dict[str, Callable[[Path, Path], object]] = {
    "refresh": lambda store, source: precache.refresh(store, source, **SERIAL),
    "refresh from the log": lambda store, source: precache.refresh(store, **SERIAL),
    "build": asked(precache.build, **SERIAL),
    "build elsewhere": lambda store, source: precache.build(
        source, store.parent / "new", recipe_of(store), **SERIAL
    ),
    "plan": asked(precache.plan, **SERIAL),
    "ensure": asked(precache.ensure, **SERIAL),
    "ensure apart": asked(precache.ensure, wait=False, **SERIAL),
    "ensure by a job": asked(precache.ensure, **NOWHERE),
    "submit": asked(precache.submit, **NOWHERE),
    "doctor": lambda store, source: precache.doctor(source, recipe_of(store), samples=2),
    "a recipe of its fields": lambda store, source: precache.build(
        source, store, Recipe(fields=recipe_of(store).fields), **SERIAL
    ),
    "a recipe of its ops": lambda store, source: precache.build(
        source,
        store,
        Recipe(fields={"image": Field(ops=recipe_of(store).fields["image"].ops, variants=2)}),
        **SERIAL,
    ),
}


def test_code_that_a_store_names_is_refused_by_name(forged: Forged) -> None:
    for command, call in REFUSED.items():
        with pytest.raises(UsageError) as refused:
            call(forged.path, forged.source)
        assert not forged.ran, command
        said = str(refused.value)
        assert all(repr(name) in said for name in CODE), command
        assert str(forged.path) in said, command
        assert "--run-functions (in Python run_functions=True)" in said, command
        assert len(list((forged.path / "commits").iterdir())) == 1, command


def read_all(store: Path, source: Path) -> None:
    with precache.Loader(store, batch_size=4, device="cpu") as loader:
        assert sum(len(batch["row"]) for batch in loader) == 6
    _ = precache.CachedDataset(store)[0]


HARMLESS: dict[str, Callable[[Path, Path], object]] = {
    "train": read_all,
    "versions": lambda store, source: precache.versions(store),
    "diff": lambda store, source: precache.diff(store, source.parent / "honest"),
    "build another recipe": lambda store, source: precache.build(source, store, RECIPE, **SERIAL),
    "plan another recipe": lambda store, source: precache.plan(source, store, RECIPE, **SERIAL),
    "ensure another recipe": lambda store, source: precache.ensure(source, store, RECIPE, **SERIAL),
    "classes": lambda store, source: precache.build(
        source, source.parent / "new", RECIPE, classes=store, **SERIAL
    ),
}


def test_a_store_is_read_without_its_code(forged: Forged, honest: Path) -> None:
    shutil.copytree(honest / "store", forged.source.parent / "honest")
    for command, call in HARMLESS.items():
        call(forged.path, forged.source)
        assert not forged.ran, command


LINES = [
    "info {store}",
    "info {store} --json",
    "verify {store}",
    "ls {store}",
    "diff {store} {store}",
    "plan {source} {store} --resize 24 --random-resized-crop 16 --variants 2 --address serial",
    "plan {source} {store} --crop 20 --no-timing",
    "build {source} {store} --crop 20 --address serial --dry-run",
    "refresh {store} --address serial",
    "refresh {store} --source {source} --address serial",
    "build {source} {store} --crop 20 --address serial",
    "build {source} {store} --crop 20 --address serial --retry-failed",
    "build {source} {new} --crop 20 --address serial --classes {store}",
    "view {store} --out {new}.html",
    "use {store}@{version}",
    "gc {store} --keep 1 --older-than 0s",
    "pull {store} {new}",
    "push {store} {new}",
]


def test_no_command_runs_code_that_only_a_store_names(forged: Forged) -> None:
    new = forged.source.parent / "new"
    version = precache.open(forged.path).id
    places = {"store": forged.path, "source": forged.source, "new": new, "version": version}
    for line in LINES:
        arguments = [part.format(**places) for part in line.split()]
        assert main(arguments) == (2 if arguments[0] == "refresh" else 0), line
        assert not forged.ran, line


def test_with_leave_of_the_user_it_runs(forged: Forged) -> None:
    """And the traps of this module do snap."""
    store, source = forged.path, forged.source
    line = ["refresh", str(store), "--source", str(source), "--address", "serial"]
    assert main([*line, "--run-functions"]) == 0
    assert precache.open(store).fields["image"].first_variant == 1
    options: dict[str, Any] = {"run_functions": True, **SERIAL}
    for call in (
        lambda: None,
        lambda: precache.build(source, store.parent / "new", recipe_of(store), **options),
        lambda: precache.doctor(source, recipe_of(store), samples=2, seconds=1, **options),
    ):
        call()
        assert {"full_like", "call"} <= set(forged.called)
        forged.called.clear()
    assert forged.marker.exists()


def test_a_recipe_file_is_code_that_the_user_names(forged: Forged, tmp_path: Path) -> None:
    """As a Makefile is: no option is asked for, though a store names the same."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[fields.image]\nops = [{ op = "decode" }, { op = "resize", size = [20, 20] },\n'
        '{ op = "function", function = "trap:hashed" }]\n'
    )
    line = ["build", forged.source, forged.path, "--recipe", recipe, "--address", "serial"]
    assert main(list(map(str, line))) == 0
    assert forged.marker.exists()


def test_a_mark_of_its_store_changes_nothing_else_of_a_recipe(forged: Forged) -> None:
    own = recipe_of(forged.path)
    same = Recipe.from_dict(own.to_dict())
    assert {op.store for op in own.functions} == {precache.open(forged.path).path}
    assert {op.store for op in same.functions} == {""}
    assert own == same
    assert hash(own.functions[0]) == hash(same.functions[0])
    assert own.to_dict() == same.to_dict()
    assert own.fingerprint({}) == same.fingerprint({})
    kept = own.by_array(), own.with_fresh_variants(), own.model_copy(deep=True)
    assert all(op.store for each in kept for op in each.functions)
    assert all(op.store for op in Recipe.from_dict({"fields": own.fields}).functions)


# --- what the log of commits names as the source ------------------------------------------------


def test_a_factory_in_the_log_runs_only_with_leave(forged: Forged, honest: Path) -> None:
    shutil.copytree(honest / "store", forged.path.parent / "plain")
    plain = forged.path.parent / "plain"
    rewrite_log(plain, source=FACTORY)
    with pytest.raises(UsageError, match=rf"plain names code to be run: '{FACTORY}'"):
        precache.refresh(plain, **SERIAL)
    assert not forged.ran
    with pytest.raises(PrecacheError, match=r"no key of pack\.part:make"):  # keys of photographs
        precache.refresh(plain, run_functions=True, **SERIAL)
    assert forged.marker.exists()


def test_a_factory_that_the_user_gives_needs_no_leave(forged: Forged, tmp_path: Path) -> None:
    built = precache.build(FACTORY, tmp_path / "own", RECIPE, **SERIAL)
    child = precache.refresh(tmp_path / "own", FACTORY, **SERIAL)
    assert child.version != built.version


def test_a_source_as_no_build_writes_it_is_asked_for(copied: Path) -> None:
    for source in ("in", "../in", "~/in", "s3://key:secret@bucket/in"):
        rewrite_log(copied / "store", source=source)
        with pytest.raises(UsageError, match="in a form that no build writes; give --source SOU"):
            precache.refresh(copied / "store", **SERIAL)


def test_a_refresh_says_where_it_reads(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refresh", str(copied / "store"), "--address", "serial"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert f"6 samples in 3 classes in {copied / 'in'}" in told


# --- keys ---------------------------------------------------------------------------------------

_opened: set[str] = set()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _opened.add(str(arguments[0]))


@pytest.fixture(scope="module")
def opened() -> set[str]:
    """Paths of the files that this process opens; a hook stays for good."""
    sys.addaudithook(_note)
    return _opened


def test_no_key_leads_out_of_the_source(copied: Path, opened: set[str]) -> None:
    store, secret = copied / "store", write(copied / "secret.jpg", encoded(cut(9)))
    keys = ["../secret.jpg", "cat/../../secret.jpg", f"{copied}/secret.jpg", "nul\0.jpg"]
    forge(store, keys=dict(zip(precache.open(store).keys[:4], keys, strict=True)))
    opened.clear()
    with pytest.raises(BuildError) as refused:
        precache.refresh(store, **SERIAL)
    assert any(repr(key)[1:-1] in str(refused.value) for key in keys)
    child = precache.refresh(store, accept_missing=True, **SERIAL)
    assert {named for named, _ in child.holes} == {*keys}
    assert not [name for name in opened if Path(name).name == secret.name]


def test_no_key_leads_to_another_folder_of_a_web_server(tmp_path: Path) -> None:
    write(tmp_path / "secret.jpg", b"secret")
    write(tmp_path / "in/a.jpg", b"inside")
    with web_server(tmp_path) as url:
        keys = ["../secret.jpg", "/secret.jpg", f"{url}/secret.jpg", "%2e%2e/secret.jpg", "a.jpg"]
        *others, own = open_source(f"{url}/in").fetch(keys, [-1] * len(keys))
    assert all(isinstance(each, FetchError) for each in others)
    assert isinstance(own, Sample)


NAMES = st.text("./ab\0~\\%", max_size=8) | st.lists(
    st.sampled_from(["..", ".", "", "a", "b.jpg", "secret.jpg", "%2e%2e"]), max_size=5
).map("/".join)


@given(NAMES)
def test_a_folder_gives_only_what_lies_below_it(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    root = tmp_path_factory.mktemp("below") / "in"
    for inside in ("b.jpg", "a/b.jpg"):
        write(root / inside, b"inside")
    for neighbour in ("secret.jpg", "b.jpg"):
        write(root.parent / neighbour, b"secret")
    [found] = open_source(str(root)).fetch([name], [-1])
    if isinstance(found, Sample):
        assert (root / name).resolve().is_relative_to(root.resolve())
        assert found.inputs["bytes"] == b"inside"
    else:
        assert isinstance(found, FetchError)


class Six:
    """A dataset that counts how often it is asked."""

    asked: int = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        Six.asked += 1
        return np.zeros((2, 2, 3), np.uint8), number


@pytest.fixture
def six() -> Source:
    Six.asked = 0
    return open_source("python:tests.project.test_trust:Six")


@pytest.mark.parametrize(
    "key", ["-1", "6", " 1", "1_0", "१", "3.0", "", "../1", "1\0", "9" * 5000, "1\n"]
)
def test_a_dataset_is_asked_for_its_own_samples_alone(key: str, six: DatasetSource) -> None:
    good, bad, other = six.fetch(["0", key, "5"], [-1] * 3)
    assert isinstance(bad, FetchError)
    assert repr(key) in str(bad)
    assert isinstance(good, Sample)
    assert isinstance(other, Sample)
    assert (good.label, other.label, Six.asked) == (0, 5, 2)


# --- the current folder -------------------------------------------------------------------------


def test_modules_that_lie_in_the_store_are_not_imported_from_there(copied: Path) -> None:
    """Neither those that are missing elsewhere, nor in place of others: here, in Ray's workers."""
    store, marker = copied / "store", copied / "ran"
    for name in ("pandas", "opt_einsum", "triton", "torch", "simplejpeg", "precache"):
        write(store / f"{name}.py", f"open({str(marker)!r}, 'a').write('{name} ')".encode())
    line = [sys.executable, "-P", "-m", "precache", "refresh", ".", "--no-progress"]
    ran = subprocess.run(
        line, cwd=store, env=environment(), capture_output=True, text=True, check=False
    )
    assert not marker.exists(), marker.read_text()
    assert ran.returncode == 0, ran.stderr
    assert precache.open(store).fields["image"].first_variant == 1


@pytest.mark.heavy
def test_a_build_in_the_background_imports_none_of_them_either(
    copied: Path, tmp_path: Path
) -> None:
    folder, marker = copied / "store", copied / "ran"
    for name in ("workers", "precache", "numpy"):
        write(folder / f"{name}.py", f"open({str(marker)!r}, 'a').write('{name} ')".encode())
    script = tmp_path / "train.py"
    script.write_text(
        "import precache\n"
        f"recipe = precache.Recipe.image(crop=20)\n"
        f"version = precache.ensure({str(copied / 'in')!r}, {str(tmp_path / 'new')!r}, recipe,\n"
        "                          wait=60, address='serial')\n"
        "print(version.rows)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not marker.exists(), marker.read_text()
    assert ran.stdout == "6\n", ran.stderr
