"""The command line: what processes see; what is refused; flags, made from signatures."""

import argparse
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import precache
from precache.cli import main as command_line
from precache.cli import remedies
from precache.cli.calls import arguments, to_json
from precache.cli.commands import COMMANDS
from precache.cli.main import parse
from precache.cli.signatures import flag_of, help_of, parameters
from precache.errors import SourceError, UsageError
from precache_workers.driver import progress
from precache_workers.planning.options import BuildOptions
from tests.conftest import BuiltStore
from tests.support.building import cli, command, environment, flip, write, write_jpegs
from tests.support.command_line import Run, on_a_terminal
from tests.support.holding import Held
from tests.support.loops import nothing

SMALL = ("--resize=24", "--interpolation=nearest", "--crop=20", "--address=serial")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Photos below a path that is longer than lines, looks like markup and is no ASCII."""
    return write_jpegs(tmp_path / ("a long name " * 12) / "[red]x[/b]", 9, classes=("cat", "Zoë"))


LISTED = [name for group in COMMANDS.values() for name in group]


def test_a_users_own_function_is_found_here_and_what_it_prints_is_no_part_of_json(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_ops.py").write_text("def f(array):\n    print('called')\n    return 255 - array\n")
    ops = [{"op": "decode"}, {"op": "function", "function": "my_ops:f"}]
    recipe = json.dumps({"fields": {"image": {"ops": ops, "codec": "raw"}}})
    ran = run("build", source, "out", "--recipe", recipe, "--address=serial", "--json")
    assert (ran.status, ran.json["samples"]) == (0, 9)
    assert "called\n" in ran.err


def test_a_command_that_is_interrupted_as_it_starts_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "parse", Mock(side_effect=KeyboardInterrupt))
    assert command_line.main(["ls", "store"]) == 130
    assert capsys.readouterr().err == "precache: interrupted\n"


# --- help and messages -------------------------------------------------------------------------


def test_help_lists_the_first_steps_first_and_no_hidden_command(run: Run) -> None:
    ran = run("--help")
    assert (run().out, ran.status, ran.err) == (ran.out, 0, "")
    assert re.findall(r"^  (\w+)   ", ran.out, re.MULTILINE)[:5] == LISTED[:5]
    assert LISTED[:5] == ["doctor", "plan", "build", "info", "view"]
    assert "\n  job " not in ran.out
    assert "exit status: 0 done; 1 failed or incomplete" in ran.out
    for name in LISTED:
        for function, parameter in parameters(name):
            assert parameter.name == "storage_options" or help_of(function, parameter.name)
        assert f"\n  {name} " in ran.out
        text = run(name, "--help").out
        assert f"usage: precache {name} " in text
        options_of_others = {"endpoint_url", "num_workers", "prefetch_factor", "in_order"}
        assert {*re.findall(r"[a-z]+_\w+", text)} <= options_of_others, "flags, not keywords"
        assert '{"' not in text, "KEY=VALUE, not dicts"
    assert run("--version").out.strip() == precache.__version__


def test_a_message_names_parameters_as_they_were_given() -> None:
    """As flags where these were given, and where a clause of the message is of the parameter."""
    given = "--labels l.csv --nice=20 --rate 0 --cpus-per-task 0"
    text = "labels of l.csv are 1; --nice is 20; seconds is 0; --cpus-per-task is 0; the rate is 0"
    message = text.replace("--nice", "nice").replace("--cpus-per-task", "cpus_per_task")
    assert command_line._with_flags(message, given.split()) == text


BUILD, SIMULATE = "build in out --address=serial", "simulate --workers 7 --step-ms 100"


REFUSED: list[tuple[str, ...]] = [
    ("biuld", "error: there is no command biuld (did you mean build?)"),
    ("--resize 9", "error: there is no --resize"),
    ("build in", "error: give STORE"),
    *((f"build in out --resize {size}",
       f"error: --resize: '{size}' is neither a number of pixels from 1 up nor HxW")
      for size in ("large", "256x", "0")),
    ("build in out --crop", "error: --crop: expected one argument"),
    ("build in out --codec png", "error: --codec is 'png'; choose "),
    ("build in out --on-error stop", "error: --on-error is 'stop'; choose "),
    ("build in out --shard-samples many", "error: --shard-samples is 'many'; give a whole number"),
    ("build in out --cpus-per-task x", "error: --cpus-per-task is 'x'; give a number"),
    ("build in out --resiz=9", "error: there is no --resiz (did you mean --resize?)"),
    ("ls in --jsno --xyz", "error: there is no --jsno (did you mean --json?); there is no --xyz"),
    ("pull A --to B", "error: there is no --to; give STORE TO without flags"),
    (f"{BUILD} --resize 20 --crop 24", "crop of 24 x 24 is larger than the "),
    (f"{BUILD} --shard-samples 0", "--shard-samples is 0; give a whole number from 1 up"),
    (f"{BUILD} --max-failures -1", "--max-failures is -1"),
    (f"{BUILD} --address sreial", "--address is 'sreial'; choose local, serial, auto"),
    (f"{BUILD} --recipe x", "cannot read the recipe x: No such file"),
    (f"{BUILD} --recipe x --resize 9", "--recipe x and --resize both say what to do", ""),
    (f"{BUILD} --recipe x --seed 0", "--recipe x and --seed both say what to do", ""),
    (f"{BUILD} --recipe {{", "--recipe is neither a TOML file nor JSON: "),
    (f"{BUILD} --recipe x", "field: unknown parameter (did you mean f", "[field.image]\nops = []"),
    (f"{BUILD} --recipe x", "is 'decode'; give a table, such ", "[fields.image]\nops = ['decode']"),
    (f"{BUILD} --recipe x",
     "fields.image.ops[1].resize.size: 0 is neither a number of pixels from 1 up nor a pair",
     "[fields.image]\nops = [{ op = 'decode' }, { op = 'resize', size = 0 }]"),
    *((f"{name} in out --address {address} --node-resources=spare=x",
       "--node-resources spare is 'x'; give a number") for name, address in
      (("build", "auto"), ("plan", "auto"), ("submit", "http://127.0.0.1:1"))),
    ("plan in --no-timing", "a plan without a store is all measured"),
    (SIMULATE, "give load_ms, or a scenario"),
    ("simulate --load-ms 2000", "give step_ms and workers, or a scenario"),
    ("simulate --scenario high", "--scenario is 'high'; there are loading-bound, "),
    (f"{SIMULATE} --load-ms 2000 --html no/a.html", "no/a.html cannot be written"),
    (f"{SIMULATE} --load-ms 2000 --html .", ". is a folder; give the name of a file"),
    (f"{SIMULATE} --load-ms x", "cannot read the times in x"),
    (f"{SIMULATE} --load-ms x", "x: could not convert string to float: 'ms'; give", "12\n13 ms\n"),
    (f"{SIMULATE} --load-ms x", "x holds no times", "# none\n"),
    ("view none.store", "there is no store at"),
    ('job {"source":"in","store":"out","options":{"colour":"red"}}', "no option 'colour'"),
]  # fmt: skip
"""A line, what it is told, and what is in the file x."""


@pytest.mark.parametrize(("line", "text", "file"), [(*row, None)[:3] for row in REFUSED])
def test_requests_that_cannot_be_met_are_explained_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str,
    file: str | None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_jpegs(tmp_path / "in", 3)
    if file is not None:
        Path("x").write_text(file)
    ran = run(*line.split())
    assert (ran.status, ran.out) == (2, "")
    name, *_, last = line.partition(" ")[0], *ran.err.splitlines()
    command = f"precache {name}" if name in LISTED else "precache"
    if text.startswith("error: "):  # of the words themselves: two lines
        assert ran.err.startswith(f"{command}: {text}")
        assert ran.err.splitlines()[1:] == [f"see {command} --help"]
    assert text in ran.err
    assert last.startswith(("precache: ", "see precache"))
    assert not Path("out").exists()


REFUSED_CALLS: list[tuple[Any, dict[str, Any], list[tuple[Any, ...]]]] = [
    (precache.meter, {"loader": []}, [
        ("{} is {!r}; give an iterable of batches", {"loader": 3}),
        ("{} is {!r}; give steps such as 100, or a time such as '30s'",
         {"every": 0}, {"every": "soon"}, {"every": "0s"}, {"every": None}),
        ("{} is {!r}; give a share from 0 to 1", {"threshold": 2}),
        ("{} has {!r}; give a list", {"to": print}),
        ("to has 'stalls.jsonl'; give a list of callables", {"to": ["stalls.jsonl"]}),
        ("{} {!r} is not one torch knows", {"device": "abacus"}),
    ]),
    (precache.diagnose, {"loader": [1], "step": nothing, "steps": 3}, [
        ("{} is {!r}", {"seconds": 0}, {"steps": 0}),
        ("loader is a int", {"loader": 3}),
        ("list has no batches left", {"loader": []}),
        ("list_iterator has no batches left", {"loader": iter([1, 2, 3])}),
        ("step is a NoneType", {"step": None}),
        ("restore has 3", {"restore": [3]}),
        ("restore is a Linear; give a list", {"restore": torch.nn.Linear(1, 1)}),
        ("nonsense", {"device": "nonsense"}),
    ]),
    (precache.simulate, {"load_ms": 1, "step_ms": 1, "workers": 2}, [
        ("{} is {!r}", {"workers": -1}, {"prefetch": 0}, {"seed": -1}),
        ("{} has no time above 0", {"load_ms": 0}, {"load_ms": []}),
        ("{} is {!r}; give milliseconds",
         {"load_ms": "2000"}, {"load_ms": [[1, 2], [3, 4]]}, {"handover_ms": [1]}),
        ("{} has {!r}", {"step_ms": -3}, {"startup_ms": -1}, {"copy_ms": math.inf}),
        ("load_ms has nan", {"load_ms": [3, math.nan]}),
        ("{}={!r} is out of range", {"seconds": 0}, {"seconds": math.nan}),
        ("{}={!r} is wrong: give 0 to 100, and none for a list",
         {"step_cv": math.inf}, {"load_ms": [1, 2], "load_cv": 0.5}),
        ("{}={:.0f} with workers=2 and prefetch=2 gives too many batches: give a shorter time",
         {"seconds": 1e5}),
        ("with {}={!r} and prefetch=2 gives too many batches", {"workers": 10**7}),
    ]),
    (precache.doctor, {"source": "in"}, [
        ("{} is {!r}", {"samples": 0}, {"cores": -1}, {"rate": 0}, {"seconds": math.nan}),
        ("does not exist", {"source": "nowhere"}),
        ("none of 1 samples has a row: broken.jpg", {"source": "in"}),
    ]),
    (precache.view, {"store": "in"}, [
        ("{} is {!r}; give 1 to 1000", {"rows": 0}, {"rows": -1}, {"rows": 1001}),
    ]),
]  # fmt: skip
"""Functions, arguments that are fine, and messages, each with those that it refuses."""


@pytest.mark.parametrize(
    ("function", "usual", "text", "wrong"),
    [
        (function, usual, text, wrong)
        for function, usual, rows in REFUSED_CALLS
        for text, *calls in rows
        for wrong in calls
    ],
)
def test_functions_refuse_what_cannot_be(
    function: Any, usual: dict[str, Any], text: str, wrong: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in/broken.jpg", b"none")
    with pytest.raises((UsageError, SourceError)) as refused:
        function(**usual | wrong)
    assert text.format(*[*wrong.items()][-1]) in str(refused.value)


def test_each_command_of_a_refusal_is_printed_before_the_next_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jpegs(tmp_path / "in", 4, classes=("train", "val"))
    said, printed, plan = [""], list[int](), remedies._refusal_of_plan

    def planned(options: argparse.Namespace) -> UsageError | None:
        said[0] += capsys.readouterr().err
        printed.append(said[0].count("  precache build"))
        return plan(options)

    monkeypatch.setattr(remedies, "_refusal_of_plan", planned)
    command_line.main(["build", str(source), str(tmp_path / "out"), *SMALL])
    assert printed == [*range(len(printed))]
    assert len(printed) > 1


# --- build --------------------------------------------------------------------------------------


def test_a_build_is_one_object_or_text_and_nothing_to_do_loads_neither_torch_nor_ray(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Any
) -> None:
    """Paths are printed whole: not folded at some width, nor read as markup, also in ASCII."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # others may empty the user's
    write(source / "cat/broken.jpg", b"none")
    write(source / "notes.txt", b"not an image")
    line = ("build", source, tmp_path / "out", *SMALL)
    built = cli(*line, "--json", "--no-progress")
    assert built.returncode == 0
    assert not re.search("of 10 samples|to be stored", built.stderr)
    found, version = json.loads(built.stdout), precache.open(tmp_path / "out")
    assert (found["version"], found["path"]) == (version.id, version.path)
    assert (found["samples"], found["failed"], found["ignored"]) == (10, 1, {".txt": 1})
    assert (found["shards"], found["shards_skipped"]) == (len(version.shard_leaves("image")), 0)
    assert found["stored_bytes"] == sum(leaf.size for leaf in version.shard_leaves("image"))
    assert min(found["raw_bytes"] - 10 * 3 * 20 * 20 + 1, found["cpu_seconds"]) > 0
    [[key, reason]] = found["holes"]
    assert (key, "not an image" in reason) == ("cat/broken.jpg", True)
    for flag, said in (("--verify", " checked"), ("--no-verify", "not checked (--verify reads")):
        ran = run(*line, flag, "--json")
        assert "Nothing to do" in ran.err
        assert said in " ".join(ran.err.split())
        again = ran.json
        assert again["shards_skipped"] == again["shards"] == found["shards"]
        assert again["cpu_seconds"] == 0
        assert again.items() >= {name: found[name] for name in ("version", "holes", "path")}.items()
    words, heavy = [*map(str, line)], {"torch", "ray", "PIL", "zarr", "simplejpeg"}
    printed = run_python(
        "import sys; from precache.cli.main import main\n"
        f"print(main({words}), main({['plan', *words[1:]]}), {heavy} & set(sys.modules))"
    ).stdout
    assert ("Nothing to do" in printed, printed.splitlines()[-1]) == (True, "0 0 set()")
    monkeypatch.setattr(progress, "LINE_EVERY", 0)
    store = source.parent / "[/b]"
    ran = run("build", source, store, *SMALL)
    for text in ("10 samples in 2 classes", "no field names them: 1 .txt", "to be stored", "free",
                 "10 of 10 samples, ", str(source)):  # fmt: skip
        assert text in ran.err
    for text in ("10, 1 failed", "ratio", "mean, std", "cat/broken.jpg: not an image", "encode",
                 str(store)):  # fmt: skip
        assert text in ran.out
    assert str(store) in run("info", store).out
    in_ascii = cli("info", store, env=environment(PYTHONIOENCODING="ascii"))
    assert (in_ascii.returncode, "Zo" in in_ascii.stdout) == (0, True)
    shown = progress.progress_line(1200, 5000, 345.4)
    assert shown == "1,200 of 5,000 samples, 345/s, 0:00:11 left"
    assert progress.progress_line(0, 5000, 0.0) == "0 of 5,000 samples"


def test_failures_have_a_status_and_a_way_out(run: Run, source: Path, tmp_path: Path) -> None:
    line = ("build", source, tmp_path / "out", *SMALL, "--json")
    (source / "cat/gone.jpg").symlink_to("nowhere.jpg")
    ran = run(*line)
    assert (ran.status, ran.out) == (1, "")
    assert "gone.jpg" in ran.err
    assert run(*line, "--accept-missing").json["failed"] == 1
    (source / "cat/gone.jpg").unlink()
    write(source / "cat/broken.jpg", b"none")
    ran = run(*line, "--on-error", "raise")
    assert (ran.status, ran.out) == (1, "")
    assert "1 of 10 samples failed (cat/broken.jpg: not an image" in ran.err
    assert "use --on-error skip" in ran.err


def test_a_terminal_shows_a_bar_with_the_rate_and_the_time_left(tmp_path: Path) -> None:
    held = Held(tmp_path, 60)
    recipe = json.dumps(held.recipe_of(after=40).to_dict())
    flags = ("--address", "serial", "--recipe", recipe, "--shard-samples", "2")
    line = ("build", held.source, held.store, *flags)
    shown = on_a_terminal(*line, at="40/60.*samples/s", act=held.go, HOLD="1", COLUMNS="160")
    assert shown.index("Listing") < shown.index("is complete")
    assert re.search(r"\d:\d\d:\d\d", shown), "the time left"


# --- other commands -----------------------------------------------------------------------------


def test_a_result_is_printed_as_in_python(
    run: Run, photos: Path, tmp_path: Path, make_store: Callable[..., BuiltStore]
) -> None:
    """As text and as JSON; foreign text in it is escaped, and damage is exit status 1."""
    store = make_store(photos, precache.Recipe.image(codec="raw"), shard_samples=8)
    first, path, here = store.result.version, str(store.path), tmp_path / "here"
    recipe = precache.Recipe.image(codec="zstd")
    built = precache.build(photos, path, recipe, address="serial", shard_samples=8)
    plan = precache.plan(photos, path, recipe, timing=False, address="serial")
    precache.pull(path, here)
    results: dict[str, tuple[list[object], Any]] = {
        "info": ([f"{path}@{built.version[:5]}"], precache.info(path)),
        "verify": ([path], precache.verify(path)),
        "ls": ([path], precache.versions(path)),
        "diff": ([f"{path}@{first}", path], precache.diff(f"{path}@{first}", path)),
        "gc": ([path, "--dry-run"], precache.gc(path, dry_run=True)),
        "plan": ([photos, path, "--codec=zstd", "--no-timing", "--address=serial"], plan),
        "pull": ([path, here], precache.pull(path, here)),
        "push": ([here, here], precache.push(here, here)),
        "use": ([f"{path}@{built.version}"], precache.use(f"{path}@{built.version}")),
    }
    ages = re.compile(r"[\d.]+ \w+ ago")
    for name, (words, result) in results.items():
        ran = run(name, *words)
        assert (ran.status, ages.sub("", ran.out)) == (0, ages.sub("", f"{result}\n"))
        assert type(result).__name__ not in str(result)
        assert run(name, *words, "--json").json.keys() == to_json(result).keys()
    assert run("info", path, "--json").json == to_json(results["info"][1])
    assert f"version {built.version[:8]} is at {here}" in str(results["pull"][1])
    versions, whole = results["ls"][1], results["verify"][1]
    assert "\x1b" not in str(type(versions)("\x1b[2J", (), (), 0))
    assert ("is whole: 3 shards, 23 rows" in str(whole), to_json(whole)["way_out"]) == (True, "")
    flip(Path(built.path, "image/c/1/0/0/0"), 1 / 3)
    ran, found = run("verify", path), run("verify", path, "--json")
    assert (ran.status, found.status, found.json["ok"]) == (1, 1, False)
    [damage] = found.json["damage"]
    [key] = damage["keys"]
    assert f"{damage['shard']}: its checksum does not hold; keys {key}" in ran.out
    assert "run the same precache build command again with --verify, which repairs it" in ran.out


def test_output_into_a_closed_pipe_is_no_traceback(image_store: BuiltStore) -> None:
    """As with ``precache info STORE | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    line, errors = command("info", image_store.path), subprocess.PIPE
    ran = subprocess.run(line, check=False, env=environment(), stdout=writer, stderr=errors)
    os.close(writer)
    assert b"Traceback" not in ran.stderr


VALUES: dict[str, Any] = {
    "address": "auto", "labels": "labels.csv", "classes": "train.store", "accept_unmatched": True,
    "all_splits": True, "follow_links": True, "label_level": 2, "label_kind": "name",
    "label_separator": "|", "no_label": ["NaN", "null"], "class_order": "number",
    "keep_order": True, "ignore_ctime": True, "shard_samples": 12, "on_error": "raise",
    "max_failures": 0, "accept_missing": True, "compact": True, "compare": True,
    "recompute": True, "retry_failed": False, "check_space": False, "verify": True, "cpus": 3,
    "cpus_per_task": 0.5, "memory_per_task": "2GB", "nice": 3, "progress": False,
    "node_resources": {"spare": "1.5", "quick": "2"}, "node_labels": {"tier": "x", "zone": "a=b"},
    "report": ["report.html", "report.json"], "max_sample_bytes": "2GB", "sample_timeout": 99.5,
    "source_kind": "parquet", "image_column": "photo", "label_column": "species",
    "key_column": "id", "sample_name": "last-dot", "storage_options": {"anon": True, "key": "x"},
}  # fmt: skip


def read(*flags: str) -> dict[str, Any]:
    """Keyword arguments of `build` by these flags."""
    given = arguments("build", parse(["build", "in", "out", *flags]))
    return {name: given[name] for name in given.keys() - {"source", "store", "recipe"}}


def flags_of(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        match value:
            case True:
                yield flag_of(name)
            case False:
                yield from ["--no-" + flag_of(name)[2:]] * (name != "retry_failed")
            case dict():
                texts = {key: "true" if entry is True else entry for key, entry in value.items()}
                yield from (f"{flag_of(name)}={key}={text}" for key, text in texts.items())
            case list():
                yield from (f"{flag_of(name)}={entry}" for entry in value)
            case _:
                yield f"{flag_of(name)}={value}"


def test_every_option_has_a_flag_of_its_name() -> None:
    """Without any, the defaults hold, and progress is shown."""
    # Functions of a recipe that the command line names are the user's own.
    apart = {"run_functions", "storage_options_env"}
    assert VALUES.keys() == BuildOptions.model_fields.keys() - apart
    assert BuildOptions(**read(*flags_of(VALUES))) == BuildOptions(**VALUES)
    assert BuildOptions(**read()) == BuildOptions(progress=True)


def test_a_storage_option_is_text_or_json_or_a_variable_of_the_environment() -> None:
    given = read("--storage-options", "anon=true", "--storage-options-env", "key=KEY")
    by_name = BuildOptions(storage_options={"anon": True}, storage_options_env={"key": "KEY"})
    assert BuildOptions(**given).storage_options == by_name.storage_options
    with pytest.raises(SystemExit):
        read("--storage-options-env", "key=a secret")
    options = ("secret=0123", "key=1e5", "account_key=true", 'token="1"', "anon=true", "timeout=3")
    flags = [flag for option in options for flag in ("--storage-options", option)]
    texts = {"secret": "0123", "key": "1e5", "account_key": "true", "token": "1"}
    assert read(*flags)["storage_options"] == {**texts, "anon": True, "timeout": 3}
    for text, value in (("null", None), ('{"type": "x"}', {"type": "x"})):
        assert read("--storage-options", f"token={text}")["storage_options"] == {"token": value}
