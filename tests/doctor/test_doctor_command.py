"""``precache doctor``: what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import precache
from precache.cli.main import main
from precache.units import number
from precache_workers.doctor.report import DoctorReport
from precache_workers.doctor.text import count_cores
from precache_workers.profiling.measurements import CodecTimes, Host
from tests.doctor.test_report import ask, cut, measured, times
from tests.support.building import cli, environment, write, write_jpegs


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_jpegs(tmp_path_factory.mktemp("examined"), 12)
    write(root / "cat/broken.jpg", b"none")
    return root


@pytest.mark.heavy
def test_as_an_object_and_a_page(photos: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    ran = cli(
        "doctor", photos, "--resize", 40, "--crop", 32, "--seconds", 5, "--json", "--html", page
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    [line] = ran.stdout.splitlines()
    found = json.loads(line)
    assert found["samples"] == found["sampled"] == 13
    assert found["failed"] == 1
    assert found["cut"] in [each["after"] for each in found["cuts"]]
    assert {each["codec"] for each in found["codecs"]} == {"image", "raw", "zstd"}
    assert set(found["stages"][0]["cpu_ms"]) == {"mean", "median", "p95", "max"}
    assert found["codecs"][0]["bytes_total"] > 0
    assert found["host"]["cores"] >= 1
    assert {len(stage["each_ms"]) for stage in found["stages"]} == {12}
    text = page.read_text("utf-8")
    assert "broken: cat/broken.jpg" in text
    assert found["slowest"][0]["key"] in text


@pytest.mark.heavy
def test_for_people(photos: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    precache_recipe = (
        '[fields.image]\nops = [{ op = "decode" }, { op = "function", function = "mine:half" }]\n'
    )
    recipe.write_text(precache_recipe)
    write(tmp_path / "mine.py", b"def half(array):\n    return array[:32, :32]\n")
    ran = cli(
        "doctor", photos, "--recipe", recipe, "--samples", 9, "--seconds", 5, "--rate", 50,
        cwd=tmp_path, env=environment(COLUMNS="80"),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "13 samples" in ran.stdout
    assert "9 measured" in ran.stdout
    assert "50 samples/s need" in ran.stdout
    assert "mine:half" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--samples", "0"], "samples is 0"),
        (["--rate", "0"], "rate is 0"),
        (["--recipe", "x.toml", "--crop", "3"], "drop one"),
        (["--resize", "big"], "neither a number of pixels from 1 up nor HxW"),
    ],
)
def test_bad_usage(
    photos: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["doctor", str(photos), *arguments])
    except SystemExit as exit:  # of the parser
        status = int(exit.code or 0)
    assert status == 2
    assert text in capsys.readouterr().err


def test_answers_come_first() -> None:
    text = str(ask(measured(), rate=2000))
    first = text.splitlines()[1:7]
    assert first == [
        "without a cache  2,000 samples/s need 6.2 cores; 4 cores would load 1,290/s",
        "with a cache     2,000 samples/s need 0.24 cores, 25.8 times less work per epoch",
        "time to build    3 s on 4 cores (2 s to list and start); CPU time 4 s (± 56%)",
        "store size       80 MB with codec image; 150 MB uncompressed",
        "store rows       the result of resize",
        "broken files     none of 4",
    ]
    assert max(map(len, text.splitlines())) <= 90


def test_what_spoils_the_figures_is_said() -> None:
    busy = measured(host=Host(2, 16 << 30, 8 << 30, None, 11.0), complete=False, storage=[])
    text = str(ask(busy))
    assert "at least 1,000 samples" in text
    assert "Listing ran out of time" in text
    assert "load 11.0 on 2 cores" in text
    assert "Reading whole files" not in text


def test_broken_files_are_named_and_counted() -> None:
    text = str(ask(measured(failures=[(f"{n}.jpg", "no image") for n in range(8)])))
    assert "8 of 12; about 667 of all" in text
    assert "broken: 4.jpg: no image\n… and 3 more" in text


def test_rows_that_no_store_holds() -> None:
    nowhere = [cut(300_000, 0.6, alike=False), cut(90_000, 0.2, alike=False)]
    text = str(ask(measured(cuts=nowhere, misfits=[("b", "its row is wide")] * 2)))
    assert "add a resize and a crop" in text
    assert "other shape: b: its row is wide" in text
    assert text.count("shapes differ") == 2


def test_random_ops_are_explained() -> None:
    text = str(ask(measured(cuts=[cut(300_000, 0.6), cut(90_000, 0.2, frozen=True)])))
    assert "the result of decode; resize is random, and a store would keep one draw of it" in text


def test_slow_samples_are_shown_where_there_are_any() -> None:
    assert "Slowest samples" not in str(ask(measured()))
    slow = measured(ops=[times("decode", 1, 1, 1, 50), times("resize", 1, 1, 1, 1)])
    assert "Slowest samples\nkey" in str(ask(slow))


def test_a_slow_source_is_named_as_the_limit() -> None:
    text = str(ask(measured(), cores=1000))
    assert "limited by reading the source" in text
    assert "1,000 cores would load 2,000/s, waiting for the source" in text


def test_a_codec_that_costs_more_than_the_files() -> None:
    slow = CodecTimes("image", 80_000, 150_000, 0.4e-3, 15_000, 9000)
    raw = CodecTimes("raw", 150_020, 150_000, 0.1e-3, 90_000, 10)
    text = str(ask(measured(codecs=[slow, raw], cuts=[cut(300_000, 6), cut(90_000, 2)])))
    assert "need 9 cores, more work per epoch than without" in text
    assert "nothing with codec image; with raw a store would need 0.01 cores" in text
    text = str(ask(measured(codecs=[slow], cuts=[cut(300_000, 6), cut(90_000, 2)])))
    assert "nothing: no store would be cheaper to read than the files" in text


def test_numbers_are_short() -> None:
    assert [count_cores(n) for n in (1, 0.156, 12.4, 99.7, 1000, 1e-5)] == [
        "1 core", "0.16 cores", "12 cores", "100 cores", "1,000 cores", "0.00001 cores",
    ]  # fmt: skip
    assert [number(n) for n in (1234.5, 12.34, 0.00123, 0)] == ["1,234", "12.3", "0.001", "0"]


def test_the_class_of_the_answer_is_public() -> None:
    assert precache.DoctorReport is DoctorReport
