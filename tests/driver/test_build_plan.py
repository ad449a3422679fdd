"""A plan is what the same build then does."""

import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.cli.main import main
from precache_workers.planning import source_record
from precache_workers.planning.assembly import Compute, FieldRows, Take
from precache_workers.profiling import row_probe
from precache_workers.shards.field_writer import FieldWriter
from precache_workers.sources.folder import FolderSource
from tests.driver.test_incremental import CHANGES, MEAN, RECIPES, build, recipe_of, some_added
from tests.support.building import cli, cut, encoded, marked_recipe, write, write_jpegs
from tests.support.command_line import Run
from tests.support.forging import settle
from tests.support.servers import S3Server


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that this process fetches for shards, and not to try their pixels."""
    keys: list[str] = []
    fetch, show = FolderSource.fetch, row_probe.show_samples

    def noted(self: FolderSource, names: Any, sizes: Any, locations: Any = ()) -> Any:
        keys.extend(names)
        return fetch(self, names, sizes)

    def tried(*given: Any) -> list[str]:
        before, failed = [*keys], show(*given)
        keys[:] = before
        return failed

    monkeypatch.setattr(FolderSource, "fetch", noted)
    monkeypatch.setattr(row_probe, "show_samples", tried)
    return keys


def plan(source: Path, store: Path, recipe: precache.Recipe, **options: Any) -> Any:
    """A plan, which leaves the store as it was."""
    before = _state(store)
    given: dict[str, Any] = {"shard_samples": 8, "timing": False, "address": "serial", **options}
    found = precache.plan(source, store, recipe, **given)
    assert _state(store) == before
    return found


def _state(store: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in [store, *store.rglob("*")] if path.exists()}
    return {str(path): (each.st_mtime_ns, each.st_ino) for path, each in found.items()}


def kept(
    source: Path, store: Path, recipe: precache.Recipe, **options: Any
) -> tuple[precache.BuildPlan, precache.BuildResult]:
    """A plan, and the build that must be as it says; rows that are compared may be reused, too."""
    planned: precache.BuildPlan = plan(source, store, recipe, **options)
    result: precache.BuildResult = build(source, store, recipe, **options)
    assert planned.version == result.version
    assert (planned.samples, planned.removed) == (result.samples, result.removed)
    assert (planned.shards, planned.shards_skipped, planned.shards_reused) == (
        result.shards,
        result.shards_skipped,
        result.shards_reused,
    )
    assert 0 <= result.rows_reused - planned.rows_reused <= planned.rows_compared
    return planned, result


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("image", "a hole mended"), ("image", "all of it"), ("two fields", "all of it"),
        pytest.param("several rows a chunk", "all of it", marks=pytest.mark.heavy),
        pytest.param("floats", "a hole mended", marks=pytest.mark.heavy),
    ],
)  # fmt: skip
def test_a_changed_source_is_counted(
    kind: str, what: str, source: Path, tmp_path: Path, fetched: list[str]
) -> None:
    recipe, store = RECIPES[kind], tmp_path / "store"
    first = build(source, store, recipe)
    changing, taken = CHANGES[what]
    changing(source)
    fetched.clear()
    planned, result = kept(source, store, recipe)
    assert planned.rows_reused == taken
    assert planned.rows_computed == len(fetched)
    assert (planned.current, planned.base, planned.keeps_rows) == (first.version,) * 2 + (True,)
    # A plan of a store that has a version has differences.
    found: Any = planned.differences.source  # type: ignore[union-attr]
    assert found.relabelled.count == 0
    if what == "all of it":
        assert found.changed.examples == ("cat/0006.jpg", "dog/0017.jpg", "dog/0021.jpg")
        assert found.removed.examples == ("cat/0004.jpg", "dog/0039.jpg")
        assert (found.added.count, found.added.examples[0]) == (5, "cat/new0.jpg")
        assert found.same == 35
    assert planned.rows_computed + planned.rows_reused + planned.removed == len(
        precache.open(result.path).keys
    )
    assert all(
        each.linked + each.copied + each.resumed + each.computed
        <= planned.rows_computed + planned.rows_reused + planned.removed
        for each in planned.fields.values()
    )
    linked = {path for path in Path(result.path).rglob("c/*/**/*") if path.is_file()}
    assert (
        planned.bytes_linked
        == sum(path.stat().st_size for path in linked if path.stat().st_nlink > 1)
        or what == "all of it"
    )


OTHER = {"ops": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}, MEAN], "codec": "zstd"}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Field -> rows that this process makes, by how they come about."""
    done = defaultdict[str, Counter[str]](Counter)
    stage, keep, finish = FieldWriter.stage, FieldWriter.keep, FieldWriter.finish

    def staged(self: Any, action: Any, *rest: Any) -> None:
        stage(self, action, *rest)
        if isinstance(action, Compute) or (isinstance(action, Take) and action.part is None):
            done[self._name]["computed" if isinstance(action, Compute) else "resumed"] += 1

    def kept(self: Any, rows: range) -> None:
        if isinstance(self._staged, Take):
            encoded = self._arrays[self._staged.array].encoded
            done[self._name]["copied" if encoded else "resumed"] += len(rows)
        keep(self, rows)

    def finished(self: Any, rows: int) -> Any:
        made = finish(self, rows)
        if made.other is not None and not made.parts:
            done[self._name].update(copied=-made.other.count, linked=made.other.count)
        return made

    monkeypatch.setattr(FieldWriter, "finish", finished)
    monkeypatch.setattr(FieldWriter, "stage", staged)
    monkeypatch.setattr(FieldWriter, "keep", kept)
    return done


RESIZED = {"ops": [{"op": "decode"}, {"op": "resize", "size": [9, 9]}]}
COLUMNS = {
    "image": {"input": "photos", **RESIZED},
    "caption": {"kind": "text", "input": "texts"},
    "title": {"kind": "text", "input": "texts", "codec": "raw"},
}


def _captioned(root: Path, *numbers: int, caption: str = "a photo") -> None:
    for number in numbers:
        write(root / f"photos/{number}.png", encoded(cut(number, (12, 10)), "PNG"))
        write(root / f"texts/{number}.txt", f"{caption} {number}".encode())


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ({"caption": {**COLUMNS["caption"], "codec": "raw"}}, lambda root: None),
        ({"image": {**COLUMNS["image"], "ops": [*RESIZED["ops"], MEAN], "codec": "zstd"}},
         lambda root: _captioned(root, *range(40, 47))),
        ({"title": {**COLUMNS["title"], "codec": "zstd"}},
         lambda root: (root / "texts/3.txt").unlink()),
        ({"more": {"input": "photos", "ops": [{"op": "decode", "mode": "L"}]}},
         lambda root: _captioned(root, 7, 21, 41, caption="another")),
        ({"image": {"input": "photos", "ops": OTHER["ops"][:2]}},
         lambda root: _captioned(root, 30, caption="another")),
    ],
)  # fmt: skip
def test_rows_of_each_column_come_about_as_planned(
    changed: dict[str, Any],
    change: Callable[[Path], Any],
    tmp_path: Path,
    done: dict[str, Counter[str]],
) -> None:
    """Samples that are compared may be found to be as they were, in some columns."""
    root, store = tmp_path / "in", tmp_path / "store"
    _captioned(root, *range(40))
    source: Any = f"{root}/{{photos,texts}}"
    build(source, store, precache.Recipe.from_dict({"fields": COLUMNS}))
    change(root)
    recipe = precache.Recipe.from_dict({"fields": {**COLUMNS, **changed}})
    done.clear()
    planned, result = kept(source, store, recipe)
    for name, rows in planned.fields.items():
        found, most = FieldRows(**done[name]), planned.rows_compared
        assert 0 <= rows.computed - found.computed <= most
        assert found.linked + found.copied + found.resumed + found.computed == result.samples
        assert most or found == rows, name


@pytest.mark.parametrize(
    ("recompute", "reason"), [(True, "--recompute"), (False, "no version has these samples")]
)
def test_why_nothing_is_taken_over_is_said(
    recompute: bool, reason: str, source: Path, tmp_path: Path
) -> None:
    build(source, tmp_path / "store", RECIPES["image"])
    if not recompute:
        source = tmp_path / "other"
        for number in range(1000, 1040):
            write(source / f"cat/{number}.jpg", encoded(cut(number)))
    planned, _ = kept(source, tmp_path / "store", recipe_of(codec="raw"), recompute=recompute)
    assert planned.base is None
    assert reason in planned.base_reason
    assert planned.rows_computed == 40


def test_files_of_another_time_and_the_same_content_are_no_other_version(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are many, the build fetches them, and finds out."""
    build(source, tmp_path / "store", RECIPES["image"])
    for path in source.rglob("*.jpg"):
        os.utime(path, ns=(0, 0))
    assert plan(source, tmp_path / "store", RECIPES["image"]).state == "nothing"
    monkeypatch.setattr(source_record, "MOST_TOUCHED", 39)
    planned = plan(source, tmp_path / "store", RECIPES["image"])
    result = build(source, tmp_path / "store", RECIPES["image"])
    assert planned.version == result.version
    assert (planned.rows_computed, planned.rows_compared, planned.rows_reused) == (40, 40, 0)
    assert result.rows_reused == 40


def test_a_lost_object_is_made_again_and_a_whole_version_becomes_current(
    source: Path, tmp_path: Path
) -> None:
    first = build(source, tmp_path / "store", RECIPES["image"])
    lost = Path(first.path, "image/c/2/0/0/0")
    size = lost.stat().st_size
    lost.unlink()
    planned, _ = kept(source, tmp_path / "store", RECIPES["image"])
    assert (planned.state, planned.shards_to_make, planned.rows_computed) == ("repair", 1, 8)
    assert planned.bytes_written == size
    second = build(source, tmp_path / "store", RECIPES["raw"])
    planned, _ = kept(source, tmp_path / "store", RECIPES["image"])
    assert (planned.state, planned.current) == ("nothing", second.version)
    assert planned.version == first.version


def test_a_build_that_began_goes_on(source: Path, tmp_path: Path) -> None:
    with pytest.raises(precache.BuildError):
        build(source, tmp_path / "store", RECIPES["image"], on_error="raise")
    planned, result = kept(source, tmp_path / "store", RECIPES["image"])
    assert planned.state == "continue"
    assert result.shards_skipped


def test_edited_code_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_ops.py"
    module.write_text("def same(array):\n    return array\n")
    ops = [{"op": "decode"}, {"op": "resize", "size": [20, 20]}]
    field = {"ops": [*ops, {"op": "function", "function": "edited_ops:same"}], "codec": "raw"}
    recipe = precache.Recipe.from_dict({"fields": {"image": field}})
    build(source, tmp_path / "store", recipe)
    assert plan(source, tmp_path / "store", recipe).differences.functions == ()
    module.write_text("def same(array):\n    return array + 1\n")
    monkeypatch.delitem(sys.modules, "edited_ops")  # as in another process
    planned, _ = kept(source, tmp_path / "store", recipe)
    assert planned.differences is not None
    assert planned.differences.functions == ("edited_ops:same",)
    assert planned.differences.recipe == ()
    assert planned.rows_computed == 40


def _record(store: Path, version: str, **libraries: str) -> None:
    """Have a version say that it was made with these libraries."""
    path = store / version / "zarr.json"
    document = json.loads(path.read_bytes())
    document["attributes"]["precache"]["libraries"] |= libraries
    path.write_text(json.dumps(document))
    settle(path.parent)


def test_libraries_that_differ_are_told(source: Path, tmp_path: Path) -> None:
    first = build(source, tmp_path / "store", RECIPES["image"])
    _record(tmp_path / "store", first.version, numpy="1.0", pillow="2.0")
    some_added(source)
    found = plan(source, tmp_path / "store", RECIPES["image"]).differences.libraries
    assert [(each.name, each.before, each.decides) for each in found] == [
        ("numpy", "1.0", False),
        ("pillow", "2.0", False),
    ]


@pytest.mark.parametrize(
    "what", ["all of it", "nothing before", "another codec", "several rows a chunk"]
)
def test_what_it_takes_is_estimated(what: str, source: Path, tmp_path: Path) -> None:
    store, recipe = tmp_path / "store", RECIPES["image"]
    if what != "nothing before":
        build(source, store, recipe)
    if what == "all of it":
        CHANGES[what][0](source)
    elif what == "another codec":
        recipe = RECIPES["raw"]
    elif what == "several rows a chunk":
        recipe = RECIPES[what]
        build(source, store, recipe)
        write(source / "cat/0004.jpg", encoded(cut(700)))
    planned = plan(source, store, recipe, timing=True)
    found = planned.estimate
    assert 0 < found.seconds < math.inf
    assert 0 < found.cpu_seconds < math.inf
    result = build(source, store, recipe)
    assert result.stored_bytes - planned.bytes_linked == pytest.approx(
        planned.bytes_written, rel=0.5
    )
    if planned.rows_computed:
        assert planned.bytes_fetched > 0
    if what == "nothing before":
        assert [key for key, _ in found.failed] == ["dog/0039.jpg"] or found.failed == ()


def test_the_command_says_it_in_words_and_in_json(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    precache.build(source, store, precache.Recipe.image(resize=40, crop=40), address="serial")
    some_added(source)
    line = [str(source), str(store), "--resize", "48", "--crop", "40", "--address", "serial"]
    assert main(["plan", *line]) == 0
    said = capsys.readouterr().out
    for part in ("image op 2 resize size: 40 → 48", "5 added: cat/new0.jpg", "CPU-s"):
        assert part in said
    random = ["--random-resized-crop", "9", "--variants", "3", "--address", "serial"]
    assert main(["plan", str(source), str(store), *random]) == 0
    assert "image, variants 0 to 2: 45 computed from samples" in capsys.readouterr().out
    assert main(["build", *line, "--dry-run", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows_computed"] == 45
    assert data["estimate"]["cpus"] == 1
    assert main(["plan", *line, "--no-timing", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**data, "estimate": None, "bytes_written": None}
    assert precache.open(store).id == data["current"]


def test_in_a_bucket_whole_shards_are_copied_by_the_service(
    source: Path, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url, options = "s3://bucket/planned.store", s3.options()
    recipe = precache.Recipe.image(resize=40, crop=40)
    given: dict[str, Any] = {"address": "serial", "shard_samples": 8, "storage_options": options}
    first = precache.build(source, url, recipe, **given)
    some_added(source)
    planned = precache.plan(source, url, recipe, timing=False, **given)
    assert (planned.hard_links, planned.shards_reused) == (False, 5)
    assert planned.bytes_linked == first.stored_bytes
    flags = [f"--storage-options={name}={json.dumps(each)}" for name, each in options.items()]
    flags += ["--resize=40", "--crop=40", "--address=serial", "--no-timing"]
    assert main(["plan", str(source), url, *flags]) == 0
    assert " copied by the service" in capsys.readouterr().out


def test_bad_requests_end_as_the_build_would(source: Path, tmp_path: Path, run: Run) -> None:
    with pytest.raises(precache.SourceError, match="does not exist"):
        precache.plan(tmp_path / "none", tmp_path / "store")
    missing = run("plan", source, tmp_path / "store", "--recipe", tmp_path / "none.toml")
    assert missing.status == 2
    assert "cannot read the recipe" in missing.err
    assert not (tmp_path / "store").exists()


def test_a_plan_counts_the_holes_that_stay_or_are_tried_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, other, broken = tmp_path / "store", tmp_path / "other", source / "dog/0039.jpg"
    build(source, store, recipe_of())
    assert plan(source, store, recipe_of()).rows_failed == 1
    some_added(source)
    assert plan(source, store, recipe_of()).rows_failed == 1
    assert plan(source, store, recipe_of(), retry_failed=True).rows_failed == 0
    precache.build(source, store, precache.Recipe.image(resize=40, crop=40), address="serial")
    assert main(["plan", str(source), str(store), "--resize", "40", "--crop", "40"]) == 0
    assert "1 failed before, and stay; --retry-failed tries again" in capsys.readouterr().out
    build(source, other, recipe_of())
    write(broken, encoded(cut(7)))  # which a later version has
    build(source, other, recipe_of())
    write(broken, b"no photo")
    assert plan(source, other, recipe_of(), retry_failed=True).rows_retried == 1


@pytest.mark.heavy
def test_a_sample_that_kills_its_worker_is_left_out_of_what_is_measured(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 4)
    write(tmp_path / "in/cat/0000.jpg", encoded(cut(1, (33, 33)), quality=90))
    (tmp_path / "recipe.toml").write_text(marked_recipe("die"))
    ran = cli("plan", "in", "store", "--recipe", "recipe.toml", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["rows_computed"] == 4


def test_a_plan_in_which_more_samples_fail_than_are_allowed_has_exit_status_1(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    command = ["plan", str(source), str(store), "--resize", "40", "--crop", "40"]
    command += ["--address", "serial"]
    precache.build(source, store, precache.Recipe.image(resize=40, crop=40), address="serial")
    write(source / "dog/0050.jpg", b"no photo")
    assert main(command) == 0  # so few are accepted
    for number in range(51, 60):
        write(source / f"dog/{number:04d}.jpg", b"no photo")
    capsys.readouterr()
    assert main(command) == 1
    assert "cannot be built: all 10 samples measured fail" in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fails"]
    write(source / "dog/0051.jpg", next(source.glob("cat/*.jpg")).read_bytes())
    assert main(command) == 1
    assert "cannot be built: 9 of 10 samples measured fail" in capsys.readouterr().out
