"""Sources that a test writes down in a few words, and what a build reads in them."""

import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import precache
from tests.support.building import write
from tests.support.layouts import ANIMALS, Builds, Labels, photo, put, put_csv

Case = Callable[[Path], str]
"""Writes a source; returns the arguments of the build that reads it."""

IN_CLASSES = " ".join(f"{{0}}/{label}/{name}.png" for name, label in ANIMALS.items())
READ_ANIMALS = " ".join(f"{name}={label}" for name, label in ANIMALS.items())


def read(text: str) -> Labels:
    """Labels of words such as ``a,b=cat c=7 d='7' e=0.5 f={cat+no~dog} g``; the last has none."""
    labels: dict[str, Any] = {}
    for names, _, label in (word.replace("~", " ").partition("=") for word in text.split()):
        value: Any = label.strip("'") or None
        if label.startswith("{"):
            value = {*label[1:-1].split("+")} - {""}
        elif re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", label):
            value = float(label) if "." in label else int(label)
        labels |= dict.fromkeys(names.split(","), value)
    return labels


@dataclass(frozen=True)
class Reading:
    """A source, the labels of each way to build it, and what is said of it."""

    case: Case
    labels: str
    """Of each command that is printed, or of the build, as `read` takes them; with | between."""
    said: str = ""
    """Parts of what is printed, with | between; after ! what is not."""
    classes: str = ""
    """Of the same ways; not compared where empty."""

    def expected(self) -> list[Labels]:
        return [read(part) for part in self.labels.split("|")] if self.labels else []

    def require_said(self, builds: Builds) -> None:
        printed = " ".join(builds.printed.split()).replace(f"{builds.root}/", "")
        for part in filter(None, self.said.split("|")):
            assert (part.lstrip("!") in printed) != part.startswith("!"), printed

    def require_classes(self, *stores: Path) -> None:
        for names, store in zip(self.classes.split("|") if self.classes else (), stores):  # noqa: B905
            assert precache.open(store).classes == tuple(names.split())


def files(
    names: str,
    arguments: str,
    tables: Mapping[str, str] | None = None,
    picture: Callable[[str], bytes] = photo,
) -> Case:
    """Photographs by name, and tables whose lines are separated by spaces, or in several lines."""

    def lay(root: Path) -> str:
        for name in names.split():
            write(root / name, picture(Path(name).stem))
        for name, text in (tables or {}).items():
            lines = text.split("\n") if "\n" in text else text.split()
            put_csv(root / name, *(line.replace("ROOT", str(root)) for line in lines))
        return arguments

    return lay


def labels(*cells: str, flags: str = "", source: str = "list.csv") -> Case:
    """A table of photographs and labels, as the source or beside it."""

    def lay(root: Path) -> str:
        names = [f"p{number}.png" for number in range(len(cells))]
        put(root / "in", *names)
        cells_of = zip(names, (cell.replace('"', '""') for cell in cells), strict=True)
        put_csv(root / "in/list.csv", "path,label", *(f'{n},"{cell}"' for n, cell in cells_of))
        return f"in/{source} {flags}"

    return lay


def parquet(**columns: Any) -> Case:
    def lay(root: Path) -> str:
        names = ["a", "b", "c"][: len(next(iter(columns.values())))]
        table = pa.table({"id": names, "image": [photo(name) for name in names], **columns})
        pq.write_table(table, root / "a.parquet")
        return "a.parquet --key-column id"

    return lay


def pack(root: Path, kind: str, prefix: str = "") -> str:
    """Pack the folder ``in``, if it is to be of a kind of archive; returns the source."""
    paths = [path for path in sorted((root / "in").rglob("*")) if path.is_file()]
    if kind == "zip":
        with zipfile.ZipFile(root / "in.zip", "w") as archive:
            for path in paths:
                archive.write(path, path.relative_to(root / "in"))
    elif kind:
        with tarfile.open(root / f"in.{kind}", "w:" + kind.partition(".")[2]) as tar:
            for path in paths:
                tar.add(path, f"{prefix}{path.relative_to(root / 'in')}")
    return f"in.{kind}" if kind else "in"


def packed(case: Case, kind: str) -> Case:
    """The folder ``in`` of a case, packed."""

    def lay(root: Path) -> str:
        flags = case(root).removeprefix("in")
        source = pack(root, kind)
        shutil.rmtree(root / "in")
        return f"{source}{flags}"

    return lay


def tar(names: str, labels: Mapping[str, str] | None = None) -> Case:
    """A tar archive of photographs, and of .cls members by name."""
    placed = {f"in/{name}.cls": label for name, label in (labels or {}).items()}
    return packed(files(" ".join(f"in/{name}" for name in names.split()), "in", placed), "tar")


def two_archives(case: Case, kind: str) -> Case:
    """Each folder in the folder ``in`` of a case in an archive of its own."""

    def lay(root: Path) -> str:
        case(root)
        for path in (root / "in").iterdir():
            shutil.make_archive(str(root / f"in_{path.name}"), kind, root / "in", path.name)
        shutil.rmtree(root / "in")
        return f"'in_*.{kind}'"

    return lay
