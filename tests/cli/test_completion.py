"""`precache completion`: a script with which bash completes a command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from precache.cli.main import main

TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_precache
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab", reason="needs precache[completion]")
    path = tmp_path_factory.mktemp("completion") / "precache"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["bu"], "build"),
        (["build", "in", "out", "--resi"], "--resize"),
        (["build", "in", "out", "--codec", "z"], "zstd"),
        (["gc", "store", "--old"], "--older-than"),
        (["jo"], ""),
    ],
)
def test_bash_completes_commands_flags_and_choices(
    script: Path, words: list[str], completed: str
) -> None:
    line = ["bash", "-c", TAB, "bash", str(script), "precache", *words]
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == completed


def test_without_its_library_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "precache[completion]"' in capsys.readouterr().err
