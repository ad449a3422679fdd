"""`precache completion`: a script with which a shell completes a command line."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from precache.cli.main import main

TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_precache
echo "${COMPREPLY[@]}"
"""


def by_bash(script: Path, words: list[str]) -> str:
    line = ["bash", "-c", TAB, "bash", str(script), *words]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def by_fish(script: Path, words: list[str]) -> str:
    code = f"source {script}; complete -C '{' '.join(words)}'"
    lines = subprocess.run(["fish", "-N", "-c", code], capture_output=True, text=True, check=True)
    return " ".join(line.partition("\t")[0] for line in lines.stdout.splitlines())


def by_zsh(script: Path, words: list[str]) -> str:
    """Press Tab in an interactive shell, and have it echo the line that it has then."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": ""})
    load = f"fpath=({script.parent} $fpath); autoload -U compinit; compinit -u -D"
    setup = f"bindkey -e; {load}; echo 'rea''dy'\n"
    os.write(terminal, setup.encode())
    screen = b""
    while b"\nready\r" not in screen:
        screen += os.read(terminal, 4096)
    os.write(terminal, f"{' '.join(words)}\t\x01echo '<' \x05 '>'\n".encode())
    while (echoed := re.search(rb"\n< (.*) >\r", screen)) is None:
        screen += os.read(terminal, 4096)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(terminal)
    line = echoed[1].decode().split()
    return "" if line == words else line[-1]


SHELLS = {"bash": by_bash, "zsh": by_zsh, "fish": by_fish}


@pytest.fixture(params=SHELLS)
def complete(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """A function that presses Tab behind the words of a line, and returns what stands there."""
    pytest.importorskip("shtab", reason="needs precache[completion]")
    if shutil.which(request.param) is None:
        pytest.skip(f"needs {request.param}")
    script = tmp_path / "_precache"
    with script.open("w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert main(["completion", request.param]) == 0
    return lambda *words: SHELLS[request.param](script, ["precache", *words])


def test_a_shell_completes_commands_flags_and_choices(complete: Callable[..., str]) -> None:
    assert complete("bu") == "build"
    assert complete("build", "in", "out", "--resi") == "--resize"
    assert complete("build", "in", "out", "--codec", "z") == "zstd"
    assert complete("gc", "store", "--old") == "--older-than"
    assert complete("jo") == ""


# Bash does it by itself.
@pytest.mark.parametrize("complete", ["zsh", "fish"], indirect=True)
def test_a_shell_completes_paths(complete: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    photos = f"{tmp_path}/photos"
    for words in (["build"], ["build", "in", "out", "--recipe"]):
        assert complete(*words, photos[:-2]).removesuffix("/") == photos


def test_without_its_library_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "precache[completion]"' in capsys.readouterr().err
