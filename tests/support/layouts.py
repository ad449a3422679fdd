"""Sources of few small photographs, built by the command line, and the labels in their stores."""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.cli.main import main
from precache_workers.sources.base import LabelRules
from tests.support.building import cut, encoded, write

Labels = Mapping[str, Any]
"""File name without its suffix -> class name, number or value; a set of classes; None for none."""

NAME, NUMBER, VALUE = (f"--label-kind {kind}" for kind in ("name", "number", "value"))

ANIMALS = {"a1": "cat", "a2": "dog", "b1": "cat", "b2": "eel"}


def labels_by(names: Iterable[str], text: str) -> Labels:
    """Labels of a text such as ``cat, {dog+eel}, -``: of a class, of several, and none."""
    labels: dict[str, Any] = dict(zip(names, text.split(", "), strict=True))
    for name, label in labels.items():
        if label.startswith("{"):
            labels[name] = {*label[1:-1].split("+")} - {""}
        elif label == "-" or "." in label:
            labels[name] = None if label == "-" else float(label)
    return labels


def rules_of(flags: str) -> LabelRules:
    """The readings that flags of a command choose."""
    words = shlex.split(flags.replace("=", " "))
    pairs = [*zip(words[::2], words[1::2], strict=True)]
    none = tuple(value for flag, value in pairs if flag == "--no-label")
    one: dict[str, Any] = {flag[2:]: value for flag, value in pairs}
    order = one.get("class-order", "text")
    return LabelRules(None, one.get("label-kind"), one.get("label-separator"), none, order)


def photo(name: str) -> bytes:
    return encoded(cut(sum(name.encode()) % 200, (40, 32)), "PNG")


def put(root: Path, *names: str) -> None:
    for name in names:
        write(root / name, photo(Path(name).stem))


def put_classes(root: Path, labels: Labels = ANIMALS) -> None:
    put(root, *(f"{label}/{name}.png" for name, label in labels.items()))


def put_csv(path: Path, *lines: str, mark: str = "") -> None:
    write(path, (mark + "\n".join(lines) + "\n").encode())


def built_labels(store: Path) -> dict[str, Any]:
    version = precache.open(store)
    assert version.valid.all()
    return {
        re.split(r"[/.]", re.sub(r"\.(?:png|jpg)$", "", key))[-1]: label_of(version.classes, label)
        for key, label in zip(version.keys, version.labels, strict=True)
    }


def label_of(classes: tuple[str, ...], label: Any) -> Any:
    if np.ndim(label):
        ones = np.flatnonzero(label).tolist()
        return {classes[number] for number in ones} if classes else set(ones)
    if label.dtype.kind == "f":
        return None if np.isnan(label) else float(label)
    return None if label < 0 else classes[label] if classes else int(label)


def commands_in(printed: str) -> list[list[str]]:
    """The arguments of the commands that a refusal prints."""
    lines = re.findall(r"^  precache (build .*)$", printed, re.MULTILINE)
    return [shlex.split(line) for line in lines]


class Builds:
    """Builds of sources in a folder, by the command line."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.printed = ""
        self._capsys = capsys
        self._count = 0

    def run(self, *arguments: str) -> int:
        """Run a command; `printed` is what it wrote to standard error."""
        self._capsys.readouterr()
        status = main(list(arguments))
        self.printed = self._capsys.readouterr().err
        return status

    def labels(self, source: str, *flags: str) -> Labels:
        """Build into a new store; returns its labels."""
        self._count += 1
        store = f"{self._count}.store"
        status = self.run("build", *shlex.split(source), store, "--address", "serial", *flags)
        assert status == 0, self.printed
        return built_labels(self.root / store)

    def refused(self, source: str, *flags: str) -> list[list[str]]:
        """Build what must be refused; returns the commands that are printed."""
        arguments = ["build", *shlex.split(source), "refused.store", "--address", "serial", *flags]
        status = self.run(*arguments)
        assert status == 2, self.printed
        return commands_in(self.printed)

    def choices(self, source: str, *flags: str) -> list[Labels]:
        """Build what must be refused; returns the labels of each command that is printed."""
        commands = self.refused(source, *flags)
        refusal = self.printed
        choices = []
        for number, command in enumerate(commands):
            store = f"choice{self._count}{number}.store"
            command[command.index("refused.store")] = store
            assert self.run(*command) == 0, self.printed
            choices.append(built_labels(self.root / store))
        self._count += 1
        self.printed = refusal
        return choices
