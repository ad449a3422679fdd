"""What commands print of text that others wrote: shown as it is, never obeyed."""

import argparse
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import precache
from precache.cli.calls import follow
from precache.messages import as_text
from precache.runtime.terminal import Terminal, say_text
from tests.support.building import cut, encoded, shard_files, write
from tests.support.command_line import Run, on_a_terminal
from tests.support.forging import settle

TITLE = "\x1b]0;pwned\x07"
FORGED = "hole: forged.jpg: no image"
NAMES = (
    f"{TITLE}\x1b[31mred",
    f"nl\n{FORGED}",
    f"sep\u2028{FORGED}",
    "[bold]x[-bold] [link=http:x][",
    ":smile: é日本😀",
    "rtl\u202egpj.exe",
    "c1\x9b31m\x7f",
    "tab\tcr\rbs\x08",
    "$\\frac{",
)
CLASSES = (f"evil{TITLE}\n{FORGED}", "[red]cls[-red]", "$\\frac{", "rtl\u202ex")
OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What no output holds that goes into a file; newlines are our own."""

RECIPE = ("--resize", 16, "--crop", 16, "--address", "serial", "--max-failures", 50)


def write_hostile(root: Path) -> Path:
    """Photographs and broken files whose names and folders a terminal would obey."""
    for number, name in enumerate(NAMES):
        folder = root / CLASSES[number % len(CLASSES)]
        write(folder / f"{name}.jpg", encoded(cut(number)))
        write(folder / f"broken {name}.jpg", b"no photo")
    return root


def assert_harmless(text: str) -> None:
    assert not OBEYED.search(text), OBEYED.findall(text)
    assert not any(line.startswith(FORGED) for line in text.split("\n"))


Said = Callable[..., str]


@pytest.fixture
def said(run: Run) -> Said:
    """A command's whole output, looked through."""

    def said(*arguments: object, status: int = 0) -> str:
        ran = run(*arguments)
        assert ran.status == status, ran.err
        assert_harmless(ran.out)
        assert_harmless(ran.err)
        return ran.out + ran.err

    return said


def test_no_command_obeys_what_names_and_classes_hold(said: Said, tmp_path: Path) -> None:
    source, store = write_hostile(tmp_path / "in"), tmp_path / "store"
    planned = said("plan", source, store, *RECIPE)
    assert r"nl\nhole: forged.jpg" in planned
    built = said("build", source, store, *RECIPE, "--report", tmp_path / "report.json")
    for name in (NAMES[3], NAMES[4], r"rtl\u202egpj.exe", r"\x9b31m"):
        assert name in built
    assert "class" in said("info", store)
    for line in (("info", store, "--json"), ("build", source, store, *RECIPE, "--json"),
        ("ls", store), ("verify", store)):  # fmt: skip
        said(*line)
    json.loads((tmp_path / "report.json").read_text())

    changed = write(next((source / CLASSES[1]).glob("*.jpg")), encoded(cut(77)))
    folder = source / CLASSES[0]
    (folder / f"{NAMES[0]}.jpg").rename(folder / f"new{TITLE}.jpg")
    os.utime(changed, (1, 1))
    assert r"\x1b]0;pwned\x07" in said("plan", source, store, *RECIPE)
    said("build", source, store, *RECIPE)
    first, second = (path.name for path in store.iterdir() if (path / "zarr.json").is_file())
    assert r"new\x1b]0;pwned\x07.jpg" in said("diff", f"{store}@{first}", f"{store}@{second}")
    said("use", f"{store}@{first}")
    document = store / first / "zarr.json"
    data = json.loads(document.read_text())
    data["attributes"]["precache"]["libraries"] = {"of": f"{TITLE}\n{FORGED}"}
    document.write_text(json.dumps(data))
    settle(document.parent)
    assert rf"\x1b]0;pwned\x07\n{FORGED}" in said("info", store)
    said("ls", store)
    said("gc", store, "--keep", 1, "--older-than", "0s")
    said("pull", store, tmp_path / "here")
    said("view", store, "--out", tmp_path / "page.html")

    [shard] = shard_files(store).values()
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert r"sep\u2028hole" in said("verify", store, status=1)


def test_no_error_obeys_what_a_user_is_made_to_type(said: Said, tmp_path: Path) -> None:
    evil = f"{TITLE}\n{FORGED}"
    source = write_hostile(tmp_path / "in")
    (tmp_path / "labels.csv").write_text(f'"no{evil}.jpg",{TITLE}\n')
    (tmp_path / "classes").write_text(f"other{TITLE}\n")
    (tmp_path / "recipe.toml").write_text('[fields.image]\nops = [{ op = "x\\u001b[31m" }]\n')
    (tmp_path / evil).mkdir()
    for arguments in (
        ("info", tmp_path / evil),
        ("info", f"{tmp_path}@{evil}"),
        ("verify", f"s3{evil}://x"),
        ("build", tmp_path / evil, tmp_path / "store"),
        ("build", f"python:{evil}:x", tmp_path / "store", *RECIPE),
        ("build", source, tmp_path / "store", *RECIPE, "--labels", tmp_path / "labels.csv"),
        ("build", source, tmp_path / "store", *RECIPE, "--classes", tmp_path / "classes"),
        ("build", source, tmp_path / "s", "--recipe", tmp_path / "recipe.toml"),
        ("build", source, tmp_path / "s", "--crop", evil),
        ("build", source, tmp_path / "s", *RECIPE, "--address", evil),
        ("gc", tmp_path / evil, "--older-than", evil),
        ("simulate", "--load-ms", tmp_path / "labels.csv", "--step-ms", 1, "--workers", 1),
        ("pull", tmp_path / evil, tmp_path / "here"),
        ("nothing", evil),
        ("info", tmp_path, evil),
        ("doctor", tmp_path / evil),
        ("view", tmp_path / evil),
    ):
        said(*arguments, status=2)


@pytest.mark.heavy
def test_a_terminal_gets_the_programs_own_sequences_alone(tmp_path: Path) -> None:
    source = write_hostile(tmp_path / "in")
    text = on_a_terminal("build", source, tmp_path / "store", *RECIPE)
    assert "\x1b[" in text  # a bar is drawn
    for name in (TITLE, "\x1b[31mred", "\x9b", "\u202e", "\u2028", "\x08"):
        assert name not in text
    assert not any(line.startswith(FORGED) for line in re.split(r"\r|\n", text))
    assert "[bold]x[-bold]" in text
    assert ":smile: é日本😀" in text


@given(st.text(st.characters()) | st.text(st.sampled_from("[]/:=bold smile\x1b\n\r\u202e\\$")))
def test_a_string_is_a_line_wherever_it_is_printed(text: str) -> None:
    table = Table(box=None, padding=0)
    table.add_column(Text("head"), no_wrap=True)
    table.add_row(text)
    for lines, shown in (
        (1, lambda out: out.print(text)),
        (1, lambda out: out.print(text, style="bold", soft_wrap=True)),
        (1, lambda out: say_text(as_text([text]), out)),
        (2, lambda out: out.print(table)),
    ):
        screen = io.StringIO()
        shown(Terminal(file=screen, width=10_000))
        assert_harmless(screen.getvalue())
        assert screen.getvalue().count("\n") == lines


EVIL = f"{TITLE}\n{FORGED}"
LOGGING = f"""
import logging, sys, warnings
from precache.runtime.terminal import guard_output
guard_output()
warnings.simplefilter("always")
log = logging.getLogger("anything")
log.warning("key %s of http://user:pass-word@host/x", {EVIL!r})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
warnings.warn({EVIL!r})
raise ValueError({EVIL!r} + " at s3://KEY:pass-word@bucket")
"""


def test_logs_warnings_and_tracebacks_are_lines_of_their_own(run_python: Any) -> None:
    text = run_python(LOGGING, check=False).stderr
    assert_harmless(text)
    assert "pass-word" not in text
    assert "Traceback" in text
    assert text.count(r"\x1b]0;pwned\x07") >= 3


class Cluster:
    """A job server with one job, whose log and whose words are hostile."""

    address = "http://head:8265"

    def get_job_info(self, job: str) -> Any:
        status, metadata = SimpleNamespace(value="FAILED"), {"precache_store": f"store{TITLE}"}
        return SimpleNamespace(status=status, metadata=metadata, driver_exit_code=1,
            start_time=1, end_time=2, message=TITLE)  # fmt: skip

    def tail_job_logs(self, job: str) -> Iterator[str]:
        yield self.get_job_logs(job)

    def get_job_logs(self, job: str) -> str:
        return f"listed {TITLE}\nline\u2028{FORGED}\r{FORGED}\nprecache: no {TITLE}\u202e\n"


def test_the_log_of_a_job_is_shown_and_not_obeyed(capfd: pytest.CaptureFixture[str]) -> None:
    from precache_workers.jobs.submission import ClusterJob

    job = ClusterJob(Cluster(), Cluster.address, "precache-0123456789ab-1")
    with pytest.raises(precache.BuildError) as caught:
        follow(job, argparse.Namespace(no_wait=False, json=None))
    out, err = capfd.readouterr()
    assert_harmless(out + err)
    assert_harmless(str(caught.value))
    assert r"line\u2028hole: forged.jpg: no image\rhole" in err
