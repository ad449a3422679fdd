"""The command line, as other processes see it: exit statuses, stdout and stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.cli import main as command_line
from precache_workers.driver import progress
from tests.conftest import BuiltStore
from tests.support.building import cli, command, environment, poll, running, write, write_jpegs
from tests.support.servers import web_server

BUILD_KEYS = {
    "version",
    "path",
    "samples",
    "failed",
    "shards",
    "shards_skipped",
    "shards_reused",
    "raw_bytes",
    "stored_bytes",
    "seconds",
    "cpu_seconds",
}
SMALL = ("--resize", "24", "--crop", "20", "--address", "serial")


class Ran:
    """What one run of the command line in this process came to."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, with nothing else there."""
        assert self.out.count("\n") == 1, self.out
        assert self.out.endswith("\n")
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, its output caught at the descriptors."""
    monkeypatch.setattr("sys.path", list(__import__("sys").path))

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        try:
            status = command_line.main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = int(error.code or 0)
        return Ran(status, *capfd.readouterr())

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 9)


# --- usage --------------------------------------------------------------------------------------


LISTED = [name for group in command_line.COMMANDS.values() for name in group]


def test_every_command_is_listed_with_its_module() -> None:
    folder = Path(command_line.__file__).parent / "commands"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules == {*LISTED, "job"}


@pytest.mark.parametrize("name", LISTED)
def test_help_of_every_command(run: Run, name: str) -> None:
    ran = run(name, "--help")
    assert ran.status == 0
    assert f"usage: precache {name} " in ran.out
    assert ran.err == ""


def test_help_lists_the_first_steps_first_and_no_hidden_command(run: Run) -> None:
    ran = run("--help")
    assert re.findall(r"^  (\w+)   ", ran.out, re.MULTILINE)[:5] == LISTED[:5]
    assert LISTED[:5] == ["doctor", "plan", "build", "info", "view"]
    for name in LISTED:
        assert f"\n  {name} " in ran.out
    assert "\n  job " not in ran.out
    assert "exit status: 0 done; 1 failed or incomplete" in ran.out


def test_without_arguments_the_help_is_shown(run: Run) -> None:
    ran = run()
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == run("--help").out


def test_help_lists_every_flag(run: Run) -> None:
    text = run("build", "--help").out
    flags = (
        "--recipe --resize --crop --codec --interpolation --mode --seed --labels --classes "
        "--keep-order --shard-samples --address --on-error --max-failures --accept-missing "
        "--verify --no-verify --quiet --json"
    )
    for flag in flags.split():
        assert flag in text


def test_the_version_of_the_release(run: Run) -> None:
    assert run("--version").out.strip() == precache.__version__


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("biuld", "there is no command biuld (did you mean build?)"),
        ("zzz", "there is no command zzz"),
        ("jobs", "there is no command jobs"),
        ("--resize 9", "there is no --resize"),
        ("build in", "the following arguments are required: STORE"),
        ("build in out --resize large", "--resize: 'large' is neither a number of pixels from 1"),
        ("build in out --resize 256x", "--resize: '256x' is neither a number of pixels from 1 up"),
        ("build in out --resize 0", "--resize: '0' is neither a number of pixels from 1 up"),
        ("build in out --resize -5", "--resize: '-5' is neither a number of pixels from 1 up"),
        ("build in out --crop 9x0", "--crop: '9x0' is neither a number of pixels from 1 up nor"),
        ("build in out --crop", "--crop: expected one argument"),
        ("build in out --variants 0", "--variants: '0' is not a whole number from 1 up"),
        ("build in out --codec jpeg", "--codec is 'jpeg'; choose "),
        ("build in out --on-error stop", "--on-error is 'stop'; choose "),
        ("build in out --shard-samples many", "--shard-samples is 'many'; give a whole number"),
        ("build in out --cpus-per-task x", "--cpus-per-task is 'x'; give a number"),
        ("build in out --resiz=9", "there is no --resiz (did you mean --resize?)"),
        ("ls in --jsno --xyz", "there is no --jsno (did you mean --json?); there is no --xyz"),
        ("ls store more", "unexpected argument: more"),
    ],
)
def test_wrong_usage_is_two_lines(run: Run, line: str, error: str) -> None:
    ran = run(*line.split())
    assert (ran.status, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    name = line.partition(" ")[0]
    command = f"precache {name}" if name in LISTED else "precache"
    assert first.startswith(f"{command}: error: {error}")
    assert second == f"see {command} --help"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--resize", "20", "--crop", "24"], "crop of 24 x 24 is larger than the "),
        (["--shard-samples", "0"], "--shard-samples is 0; give a whole number from 1 up"),
        (["--cpus", "0"], "--cpus is 0"),
        (["--max-failures", "-1"], "--max-failures is -1"),
        (["--address", "sreial"], "--address is 'sreial'; choose local, serial, auto"),
        (["--labels", "nowhere.csv"], "cannot read labels from nowhere.csv"),
        (["--classes", "nowhere"], "nowhere is neither a file nor a store"),
    ],
)
def test_requests_that_cannot_be_met(
    run: Run, source: Path, tmp_path: Path, flags: list[str], text: str
) -> None:
    ran = run("build", source, tmp_path / "out", *SMALL, *flags)
    assert ran.status == 2
    assert text in ran.err
    assert ran.err.splitlines()[-1].startswith("precache: ")
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "there is no field; begin with [fields.image]"),
        ("[field.image]\nops = []", "field: unknown parameter (did you mean fields?)"),
        ('[fields.image]\nops = [{ op = "reszie" }]', "unknown op 'reszie' (did you mean resize?)"),
        ('[fields.image]\nops = ["decode"]', "is 'decode'; give a table, such as { op = \"dec"),
        (
            '[fields.image]\nops = [{ op = "decode" }, { op = "resize", size = 0 }]',
            "fields.image.ops[1].resize.size: 0 is neither a number of pixels from 1 up nor a pair",
        ),
    ],
)
def test_a_wrong_recipe_file_is_explained(
    run: Run, source: Path, tmp_path: Path, text: str, error: str
) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    ran = run("build", source, tmp_path / "out", "--recipe", tmp_path / "recipe.toml")
    assert ran.status == 2
    assert error in ran.err
    assert ran.err.count("\n") == 1


def test_a_recipe_file_that_is_not_there(run: Run, source: Path, tmp_path: Path) -> None:
    ran = run("build", source, tmp_path / "out", "--recipe", "nowhere.toml")
    assert ran.status == 2
    assert "cannot read the recipe nowhere.toml: No such file" in ran.err


@pytest.mark.parametrize("flag", [("--resize", "9"), ("--codec", "raw"), ("--seed", "0")])
def test_a_recipe_file_and_flags_exclude_each_other(
    run: Run, source: Path, tmp_path: Path, flag: tuple[str, str]
) -> None:
    ran = run("build", source, tmp_path / "out", "--recipe", "recipe.toml", *flag)
    assert ran.status == 2
    assert f"--recipe recipe.toml and {flag[0]} both say what to do" in ran.err


# --- build --------------------------------------------------------------------------------------


def test_build_prints_one_object(run: Run, source: Path, tmp_path: Path) -> None:
    write(source / "cat/broken.jpg", b"none")
    write(source / "notes.txt", b"not an image")
    ran = run("build", source, tmp_path / "out", *SMALL, "--json", "--quiet")
    assert ran.status == 0
    assert ran.err == ""
    found = ran.json
    assert set(found) >= BUILD_KEYS
    version = precache.open(tmp_path / "out")
    assert found["version"] == version.id
    assert found["path"] == version.path
    assert found["samples"] == 10
    assert found["failed"] == 1
    assert found["ignored"] == {".txt": 1}
    assert found["shards_skipped"] == 0
    assert found["shards"] == len(version.shard_table("image"))
    assert found["raw_bytes"] >= 10 * 3 * 20 * 20
    assert found["stored_bytes"] == int(version.shard_table("image")[:, 0].sum())
    assert found["cpu_seconds"] > 0
    assert found["seconds"] > 0
    [[key, reason]] = found["holes"]
    assert key == "cat/broken.jpg"
    assert "not an image" in reason


def test_build_again_says_so(run: Run, source: Path, tmp_path: Path) -> None:
    first = run("build", source, tmp_path / "out", *SMALL, "--json").json
    ran = run("build", source, tmp_path / "out", *SMALL, "--json")
    assert ran.status == 0
    assert "Nothing to do" in ran.err
    again = ran.json
    assert again["shards_skipped"] == again["shards"] == first["shards"]
    assert again["cpu_seconds"] == 0
    for key in BUILD_KEYS - {"seconds", "cpu_seconds", "shards_skipped"}:
        assert again[key] == first[key]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--verify", " checked"),
        ("--no-verify", "not checked (--verify reads them)"),
        ("", " KB ch"),
    ],
)
def test_build_again_says_what_it_read(
    run: Run, source: Path, tmp_path: Path, flag: str, said: str
) -> None:
    run("build", source, tmp_path / "out", *SMALL)
    ran = run("build", source, tmp_path / "out", *SMALL, *flag.split())
    assert said in " ".join(ran.err.split())


def test_build_tells_people_what_it_did(run: Run, source: Path, tmp_path: Path) -> None:
    write(source / "cat/broken.jpg", b"none")
    write(source / "notes.txt", b"x")
    ran = run("build", source, tmp_path / "out", *SMALL)
    assert ran.status == 0
    for text in ("10 samples in 3 classes", "they are no images: 1 .txt", "to be stored", "free"):
        assert text in ran.err
    for text in ("10, 1 failed", "ratio", "mean, std", "cat/broken.jpg: not an image", "encode"):
        assert text in ran.out


@pytest.mark.heavy
def test_a_terminal_shows_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 60)
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nops = [{ op = "decode" }, { op = "resize", size = [150, 150] }, '
        '{ op = "function", version = "1", function = "tests.support.building:hold", '
        f'params = {{ folder = "{tmp_path}", store = "{tmp_path}/out", after = 40 }} }}]\n'
    )
    line = command("build", "in", "out", "--recipe", "recipe.toml", "--address", "serial")
    controller, terminal = os.openpty()
    environ = environment(HOLD="1", TERM="xterm", COLUMNS="160")
    with subprocess.Popen(
        [*line, "--shard-samples", "2"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        shown = b""
        while b"samples/s" not in shown or not re.search(rb"40/60", shown):
            shown += os.read(controller, 4096)
        (tmp_path / "go").touch()
        while process.poll() is None:
            with contextlib.suppress(OSError):  # EIO, once the other end is closed
                shown += os.read(controller, 4096)
    os.close(controller)
    assert process.returncode == 0
    assert re.search(rb"\d:\d\d:\d\d", shown), "the time left"
    assert b"is complete" in shown


def test_a_terminal_shows_how_many_files_were_found_while_others_are_listed(
    tmp_path: Path,
) -> None:
    for number in range(2500):
        write(tmp_path / f"photos/cat/{number:04d}.jpg", b"no photo")
    (tmp_path / "photos/dog").mkdir()
    go = threading.Event()
    controller, terminal = os.openpty()
    environ = environment(TERM="xterm", COLUMNS="160")
    with web_server(tmp_path, {"/photos/dog/": go, "/photos/dog": go}) as url:
        line = command("build", f"{url}/photos", tmp_path / "out", "--address", "serial")
        with subprocess.Popen(
            line, env=environ, stdout=subprocess.DEVNULL, stderr=terminal
        ) as process:
            os.close(terminal)
            shown = b""
            while not re.search(rb"Listing.*2000/\?", shown):
                shown += os.read(controller, 4096)
            go.set()
            while process.poll() is None:
                with contextlib.suppress(OSError):  # EIO, once the other end is closed
                    shown += os.read(controller, 4096)
    os.close(controller)
    assert process.returncode == 2
    assert b"2,500 samples in 1 classes" in shown


def test_a_log_gets_a_line_of_progress_now_and_then(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = r"(\d) of 9 samples, [\d,]+/s, 0:00:00 left\n"
    assert not re.search(line, run("build", source, tmp_path / "first", *SMALL).err)
    monkeypatch.setattr(progress, "LINE_EVERY", 0)
    ran = run("build", source, tmp_path / "second", *SMALL, "--shard-samples", "4")
    assert re.findall(line, ran.err)[-1] == "9"
    line = progress.progress_line(1200, 5000, 345.4)
    assert line == "1,200 of 5,000 samples, 345/s, 0:00:11 left"
    assert progress.progress_line(0, 5000, 0.0) == "0 of 5,000 samples"


def test_quiet_is_quiet(run: Run, source: Path, tmp_path: Path) -> None:
    assert run("build", source, tmp_path / "out", *SMALL, "--quiet").err == ""


@pytest.mark.parametrize("name", ["a long name " * 12, "set[v2]", "[red]", "x[/b]"])
def test_paths_are_printed_whole(run: Run, tmp_path: Path, name: str) -> None:
    """Not folded at some width, nor read as markup."""
    source = write_jpegs(tmp_path / name / "in", 3)
    store = tmp_path / name / "store"
    ran = run("build", source, store, *SMALL)
    assert ran.status == 0
    assert str(source) in ran.err
    assert str(store) in ran.out
    assert str(store) in run("info", store).out
    assert run("verify", store).status == 0


def test_a_build_over_the_failure_limit_fails(run: Run, source: Path, tmp_path: Path) -> None:
    write(source / "cat/broken.jpg", b"none")
    ran = run("build", source, tmp_path / "out", *SMALL, "--json", "--max-failures", "0")
    assert ran.status == 1
    assert ran.out == ""
    assert "1 of 10 samples failed (cat/broken.jpg: not an image" in ran.err
    assert "raise --max-failures" in ran.err
    ran = run("build", source, tmp_path / "out", *SMALL, "--on-error", "raise")
    assert ran.status == 1
    assert "use --on-error skip" in ran.err


def test_an_incomplete_build_fails(run: Run, source: Path, tmp_path: Path) -> None:
    (source / "cat/gone.jpg").symlink_to("nowhere.jpg")
    ran = run("build", source, tmp_path / "out", *SMALL, "--json")
    assert ran.status == 1
    assert ran.out == ""
    assert "gone.jpg" in ran.err
    assert "run the same command again, or with --accept-missing" in ran.err
    assert run("info", tmp_path / "out").status == 2
    ran = run("build", source, tmp_path / "out", *SMALL, "--json", "--accept-missing")
    assert ran.status == 0
    assert ran.json["failed"] == 1


def test_flags_and_a_file_give_the_same_version(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        """
        [fields.image]
        ops = [
            { op = "decode" },
            { op = "resize", size = 24 },
            { op = "center_crop", size = 20 },
        ]
        """
    )
    out = tmp_path / "out"
    serial = ("--address", "serial", "--json")
    by_file = run("build", source, out, "--recipe", tmp_path / "recipe.toml", *serial).json
    by_flags = run("build", source, out, *SMALL, "--json").json
    assert by_file["version"] == by_flags["version"]
    recipe = precache.Recipe.image(resize=24, crop=20)
    assert precache.build(source, out, recipe, address="serial").version == by_flags["version"]


def test_a_recipe_as_text(run: Run, source: Path, tmp_path: Path) -> None:
    text = json.dumps(precache.Recipe.image(resize=24, crop=20).to_dict())
    line = ("build", source, tmp_path / "out", "--address", "serial", "--json", "--recipe")
    made = run("build", source, tmp_path / "out", *SMALL, "--json").json
    assert run(*line, text).json["version"] == made["version"]
    ran = run(*line, text[:-1])
    assert ran.status == 2
    assert "--recipe is neither a TOML file nor JSON: " in ran.err


def test_every_flag_of_the_recipe_arrives(run: Run, source: Path, tmp_path: Path) -> None:
    recipe = "--resize 24x30 --crop 20x22 --interpolation bicubic --mode L --codec zstd --seed 7"
    flags = f"{recipe} --shard-samples 64 --keep-order --address serial --json".split()
    ran = run("build", source, tmp_path / "out", *flags)
    assert ran.status == 0
    version = precache.open(tmp_path / "out")
    assert list(version.keys) == sorted(version.keys)
    assert version.fields["image"].shape == (1, 20, 22)
    assert version.fields["image"].codec == "zstd"
    [decode, resize, crop] = version.recipe.fields["image"].ops
    assert (decode.mode, resize.size, resize.interpolation) == ("L", (24, 30), "bicubic")
    assert crop.size == (20, 22)
    assert version.recipe.seed == 7
    assert ran.json["shards"] == 1


def test_a_users_own_function_is_found_here_and_what_it_prints_is_no_part_of_json(
    tmp_path: Path,
) -> None:
    write_jpegs(tmp_path / "in", 3)
    (tmp_path / "mine.py").write_text(
        "def invert(array):\n    print('inverting')\n    return 255 - array\n"
    )
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nops = [{ op = "decode" }, '
        '{ op = "function", function = "mine:invert" }]\ncodec = "raw"\n'
    )
    ran = cli(
        *("build", "in", "out", "--recipe", "recipe.toml", "--address", "serial", "--json"),
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["samples"] == 3
    assert "inverting" in ran.stderr


def test_nothing_to_do_loads_neither_torch_nor_ray(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache of its own: a test beside it may empty the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = [str(source), str(tmp_path / "out"), *map(str, SMALL)]
    assert cli("build", *store).returncode == 0
    heavy = {"torch", "ray", "PIL", "zarr", "simplejpeg"}
    code = (
        "import sys; from precache.cli.main import main\n"
        f"print(main({['build', *store, '--json']}), main({['plan', *store]}))\n"
        f"print({heavy} & set(sys.modules))"
    )
    ran = subprocess.run(
        [*command()[:1], "-c", code], check=True, env=environment(), capture_output=True, text=True
    )
    built, *planned, states, loaded = ran.stdout.splitlines()
    assert json.loads(built)["shards_skipped"] == json.loads(built)["shards"]
    assert "Nothing to do" in "".join(planned)
    assert (states, loaded) == ("0 0", "set()")


@pytest.mark.heavy
def test_an_interrupted_build_says_how_to_go_on(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 6)
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nops = [{ op = "decode" }, { op = "function", version = "1", '
        f'function = "tests.support.building:hold", params = {{ folder = "{tmp_path}" }} }}]\n'
        'codec = "raw"\n'
    )
    line = command("build", "in", "out", "--recipe", "recipe.toml", "--address", "serial")
    with running(line, environment(HOLD="1"), cwd=tmp_path) as process:
        poll((tmp_path / str(process.pid)).exists, "the build is at its first sample")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("precache: interrupted; what was done is kept")
    assert out == ""
    assert "Traceback" not in err


def test_a_command_that_is_interrupted_as_it_starts_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line.importlib, "import_module", interrupted)
    assert command_line.main(["ls", "store"]) == 130
    assert capsys.readouterr().err == "precache: interrupted\n"


# --- info, verify, bench ------------------------------------------------------------------------


def test_info_as_an_object(run: Run, store: BuiltStore) -> None:
    found = run("info", store.path, "--json").json
    assert found["version"] == store.result.version
    assert found["path"] == store.result.path
    assert found["rows"] == 23
    assert found["holes"] == 2
    assert found["classes"] == ["cat", "dog", "eel"]
    image = found["fields"]["image"]
    assert image["shape"] == [3, 112, 112]
    assert image["dtype"] == "uint8"
    assert image["codec"] == store.recipe.fields["image"].codec.name
    assert precache.Recipe.from_dict(found["pipeline"]) == store.recipe


def test_info_for_people(run: Run, store: BuiltStore) -> None:
    ran = run("info", store.path)
    assert ran.status == 0
    assert ran.err == ""
    for text in (store.result.version, "23, 2 of them holes", "cat, dog, eel", "decode", "hole: "):
        assert text in ran.out


def test_info_without_a_store_describes_the_installation(run: Run) -> None:
    here = run("info", "--json").json
    assert here["precache"] == precache.__version__
    assert {"torch", "numpy", "zarr", "numcodecs"} <= here["libraries"].keys()
    assert {"python", "platform", "cpu", "cores", "compiled"} <= here.keys()
    ran = run("info")
    assert (ran.status, ran.err) == (0, "")
    for text in (here["precache"], here["python"], here["platform"], here["libraries"]["numpy"]):
        assert text in ran.out


def test_info_of_a_version_by_prefix(run: Run, store: BuiltStore) -> None:
    found = run("info", f"{store.path}@{store.result.version[:5]}", "--json").json
    assert found["version"] == store.result.version


def test_verify_of_a_whole_store(run: Run, store: BuiltStore) -> None:
    ran = run("verify", store.path)
    assert ran.status == 0
    assert "is whole: 3 shards, 23 rows" in ran.out
    found = run("verify", store.path, "--json").json
    assert found["ok"] is True
    assert found["damage"] == []


def test_verify_names_shard_and_key(
    run: Run, store: BuiltStore, copy_store: Callable[[BuiltStore], BuiltStore]
) -> None:
    damaged = copy_store(store)
    path = damaged.shard_path(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    ran = run("verify", damaged.path)
    assert ran.status == 1
    found = run("verify", damaged.path, "--json")
    assert found.status == 1
    assert found.json["ok"] is False
    [damage] = found.json["damage"]
    assert damage["shard"] == "image/c/1/0/0/0"
    assert len(damage["keys"]) == 1
    assert f"image/c/1/0/0/0: its checksum does not hold; keys {damage['keys'][0]}" in ran.out
    assert "run the same precache build command again with --verify, which repairs it" in ran.out
    assert "delete" not in ran.out


def test_bench_as_an_object(run: Run, store: BuiltStore) -> None:
    ran = run("bench", store.path, "--batch-size", 8, "--epochs", 1, "--json")
    assert ran.status == 0
    found = ran.json
    assert found["samples"] == 21
    assert found["batch_size"] == 8
    for cost in ("first_epoch", "warm", "copy_limit"):
        assert set(found[cost]) == {"samples_per_s", "cpu_ms_per_1000"}


def test_bench_for_people(run: Run, store: BuiltStore) -> None:
    ran = run("bench", store.path, "--epochs", 1, "--threads", 1)
    assert ran.status == 0
    for text in ("samples/s", "CPU-ms per 1,000", "copy limit", "times the CPU"):
        assert text in ran.out


@pytest.mark.parametrize("flag", ["--batch-size", "--epochs", "--threads"])
def test_bench_of_nothing(run: Run, store: BuiltStore, flag: str) -> None:
    ran = run("bench", store.path, flag, 0)
    assert ran.status == 2
    assert "from 1 up" in ran.err


def test_pull_says_what_it_copied_and_what_was_there(
    run: Run, store: BuiltStore, tmp_path: Path
) -> None:
    ran = run("pull", store.path, "--to", tmp_path / "here")
    assert ran.status == 0, ran.err
    assert f"version {store.result.version[:8]} is at {tmp_path / 'here'}" in ran.out
    again = run("push", tmp_path / "here", "--to", tmp_path / "here", "--json")
    assert json.loads(again.out)["skipped"] == store.result.shards
    assert run("verify", tmp_path / "here").status == 0


@pytest.mark.parametrize("option", ["novalue", "=novalue"])
def test_a_storage_option_has_a_key_and_a_value(run: Run, store: BuiltStore, option: str) -> None:
    ran = run("info", store.path, "--storage-option", option)
    assert ran.status == 2
    assert "expected KEY=VALUE" in ran.err
    assert "novalue" not in ran.err


@pytest.mark.parametrize("name", ["info", "verify", "bench"])
def test_stores_that_are_none(run: Run, store: BuiltStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "file", b"x")
    for uri, text in (
        (tmp_path / "nowhere", "there is no store at"),
        (tmp_path / "empty", "is not a store"),
        (tmp_path / "file", "file"),
        (f"{store.path}@ffffff", "'ffffff' fits no version"),
        ("nowhere://bucket/store", "nowhere:// is not supported"),
    ):
        for flags in ([], ["--json"]):
            ran = run(name, uri, *flags)
            assert ran.status == 2, uri
            assert text in ran.err
            assert ran.out == ""
            assert "Traceback" not in ran.err


def test_the_module_runs_as_the_command_does(store: BuiltStore) -> None:
    ran = cli("info", store.path, "--json")
    assert ran.returncode == 0
    assert ran.stderr == ""
    assert json.loads(ran.stdout)["rows"] == 23
    assert cli("info", "/nowhere").returncode == 2


@pytest.mark.heavy
def test_a_terminal_that_shows_ascii_alone(tmp_path: Path) -> None:
    source = write_jpegs(tmp_path / "in", 3, classes=("Zoë",))
    env = environment(PYTHONIOENCODING="ascii")
    for arguments in (("build", source, tmp_path / "out", *SMALL), ("info", tmp_path / "out")):
        ran = cli(*arguments, env=env)
        assert ran.returncode == 0, ran.stderr[-500:]


def test_output_into_a_closed_pipe_is_no_traceback(store: BuiltStore) -> None:
    """As with ``precache info STORE | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            command("info", store.path),
            check=False,
            env=environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert "Traceback" not in ran.stderr
