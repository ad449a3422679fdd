"""Every refusal of two readings: each command that it prints, pasted, builds."""

import ast
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import precache
from precache.cli import remedies
from precache_workers.sources.base import Doubt
from tests.building.cases import Case, files, labels, packed, tar, two_archives
from tests.building.test_label_readings import REFUSED
from tests.support.building import REPOSITORY, cut, encoded, write
from tests.support.layouts import Builds, commands_in, put


def mask(name: str) -> bytes:
    values = np.kron(np.arange(4, dtype=np.uint8).reshape(2, 2), np.ones((20, 16), np.uint8))
    return encoded(Image.fromarray(values), "PNG")


def of_12_bits(name: str) -> bytes:
    values = np.asarray(cut(sum(name.encode()) % 200).convert("L"), np.uint16) << 4
    return encoded(Image.fromarray(values), "PNG")


def arrays(root: Path) -> str:
    for name in "ab":
        np.save(write(root / f"in/{name}.npy", b""), np.zeros((8, 8, 3), np.uint8))
    return "in/*.npy"


DRAWING = """
import random
import numpy as np
class Photos:
    def __len__(self): return 3
    def __getitem__(self, i): return np.full((8, 8, 3), random.randrange(256), np.uint8), 0
def make(): return Photos()
"""


def a_dataset_that_draws(root: Path) -> str:
    write(root / "drawing_photos.py", DRAWING.encode())
    return "python:drawing_photos:make"


def links_out(root: Path) -> str:
    put(root, "in/cat/a.png", "in/dog/b.png")
    for name in ("cat/a.png", "dog/b.png"):
        (root / "links" / name).parent.mkdir(parents=True)
        (root / "links" / name).symlink_to(root / "in" / name)
    return "links"


def archives_in_a_folder(root: Path) -> str:
    two_archives(files("in/train/cat/a.png in/val/cat/b.png", "in"), "tar")(root)
    folder = root / "shards"
    folder.mkdir()
    for archive in root.glob("**/*.tar"):
        archive.rename(folder / archive.name)
    return "shards"


PAIRS = files(" ".join(f"in/{n}{end}.png" for n in "abcd" for end in ("", "_mask")), "in")
COPIES = files(" ".join(f"in/{n}{end}.png" for n in "abcd" for end in ("", "_cut")), "in")
THREE = "in/0.png in/1.png in/2.png"

REFUSALS: dict[str, tuple[Case, int]] = {
    # folders
    "images beside folders": (files("in/x/a.png in/x/cat/b.png", "in"), 2),
    "folders of the same names": (
        files("in/k0/cat/a.png in/k0/dog/b.png in/k1/cat/c.png in/k1/dog/d.png", "in"), 3,
    ),
    "a folder of links to images elsewhere": (links_out, 1),
    "a folder of archives": (archives_in_a_folder, 2),
    "splits in two tar archives": (
        two_archives(files("in/train/cat/a.png in/val/cat/b.png in/val/dog/c.png", "in"), "tar"), 3,
    ),
    "splits with classes that look alike in a zip archive": (
        packed(files("in/train/01/a.png in/train/1/b.png in/val/1/c.png", "in"), "zip"), 3,
    ),
    "splits of images of 12 bits in a packed tar archive": (
        packed(files("in/train/cat/a.png in/train/dog/b.png in/val/cat/c.png", "in", None,
                     of_12_bits), "tar.gz"), 3,
    ),
    "images and masks of two suffixes": (
        files(" ".join(f"in/{d}/{n}.{e}" for d in ("images", "masks") for n in "ab"
                       for e in ("jpg", "png")), "in"), 1,
    ),
    # names of images
    "images that pair": (PAIRS, 1),
    "images of two suffixes that rarely pair": (
        files("in/a.jpg in/a.png in/b.jpg in/b.png in/c.jpg in/d.jpg in/e.jpg in/f.png "
              "in/g.png in/h.png", "in"), 0,
    ),
    "images that pair, in a folder beside others": (
        files(" ".join(f"in/{n}.png" for n in ("train/a", "train/a_mask", "train/b", "train/b_mask",
                                               "val/c", "val/c_mask")), "in"), 2,
    ),
    "splits of patterns": (
        files("in/train/a.png in/train/a_mask.png in/val/c.png in/val/c_mask.png",
              "'in/**/{*.*,*_mask.*}'"), 3,
    ),
    "images that pair, with labels in doubt": (
        files("in/a.png in/a@2x.png in/b.png in/b@2x.png", "in --labels l.csv",
              {"l.csv": "key,label a.png,NaN b.png,cat a@2x.png,cat b@2x.png,cat"}), 2,
    ),
    "images that pair, with labels": (
        files("in/a.png in/a@2x.png in/b.png in/b@2x.png", "in --labels l.csv",
              {"l.csv": "key,label a.png,cat b.png,dog a@2x.png,cat b@2x.png,dog"}), 2,
    ),
    "copies in a tar archive": (packed(COPIES, "tar"), 1),
    "masks beside, without a label": (
        files(" ".join(f"in/{of}/{n}.png" for n in "ab" for of in ("img", "gt")),
              "in --label-level 0"), 1,
    ),
    "folders that pair by several endings": (
        files("in/x/a.png in/x/b.png in/y/a_m.png in/y/a_n.png in/y/b_m.png in/y/b_n.png",
              "'in/{x,y}'"), 2,
    ),
    # names of members of tar archives
    "images that may be of one sample": (tar("a.1.png a.2.png b.1.png b.2.png"), 3),
    "images that may be of one sample, or pair": (
        tar("21.05.jpg 21.05_mask.png 21.06.jpg 21.06_mask.png 21.07.jpg 21.07_mask.png"), 1,
    ),
    "images that may be of one sample, of splits": (
        tar("train/cat/21.05.jpg train/cat/21.06.jpg val/cat/21.07.jpg val/cat/21.08.jpg"), 3,
    ),
    "labels of one sample that differ": (
        tar("a.1.png a.2.png", {"a.1": "cat", "a.2": "dog"}), 2,
    ),
    "labels of one sample that differ, with leading zeros": (
        tar("a.1.png a.2.png", {"a.1": "007", "a.2": "010"}), 2,
    ),
    "labels of several lines": (
        tar("a.png b.png", {"a": "cat dog", "b": "cat"}), 1,
    ),
    "many images of one sample": (tar(" ".join(f"a.{number}.png" for number in range(257))), 3),
    # pixels, which are read after labels
    "masks with leading zeros": (
        files(THREE, "in --labels l.csv --resize 16",
              {"l.csv": "id,label 0,007 1,010 2,007"}, mask), 3,
    ),
    "splits of masks and of photographs": (
        lambda root: (files("in/a/train/x.png in/a/val/y.png", "", None, mask)(root)
                      + files("in/b/train/x.png in/b/val/y.png", "in --resize 16")(root)), 3,
    ),
    "a dataset that draws": (a_dataset_that_draws, 1),
    "random ops": (files("in/a.png in/b.png", "in --random-resized-crop 16 --flip"), 2),
    "random ops, and folders in doubt": (
        files("in/train/a.png in/val/b.png", "in --flip"), 2,
    ),
    # arguments
    "a source called as a value": (
        files(" ".join(f"0/{n}{end}.png" for n in "abcd" for end in ("", "_cut")),
              "0 --label-level 0"), 2,
    ),
    # files of samples
    "labels of few samples": (
        files(" ".join(f"in/{number}.png" for number in range(10)), "in --labels l.csv",
              {"l.csv": "key,label 0.png,cat 1.png,dog"}), 1,
    ),
    # columns
    "two columns of numbers as keys": (
        files(THREE, "in --labels l.csv",
              {"l.csv": "index,image_id,label 0,2,cat 1,1,dog 2,0,eel"}), 2,
    ),
    "a file of splits alone": (
        files(THREE, "in --labels l.csv", {"l.csv": "id,split 0,train 1,val 2,train"}), 1,
    ),
    "several columns of labels": (
        files(THREE, "in --labels l.csv", {"l.csv": "id,w,breed 0,3,cat 1,4,dog 2,5,eel"}), 2,
    ),
    "numbers beside folders that are no classes": (
        files(" ".join(f"in/{'abc'[n % 3]}/{n}.png" for n in range(36)), "in --labels l.txt",
              {"l.txt": " ".join(f"{'abc'[n % 3]}/{n}.png,{n % 11}" for n in range(30))}), 3,
    ),
    "keys that are numbers from 1, of samples from 0": (
        files("in/0.png in/1.png in/2.png", "in --labels l.csv", {"l.csv": "1,cat 2,dog 3,cat"}), 1,
    ),
    # values
    "words beside lists": (labels('["cat", "dog"]', "NaN"), 1),
    "numbers below -1, of splits": (
        files("in/a.png in/b.png", "in/list.csv",
              {"in/list.csv": "path,label,split a.png,-2,train b.png,0,val"}), 3,
    ),
    "words for nothing that look alike": (labels("cat", "NaN", "-nan"), 1),
    "numbers and a word": (labels("0", "1", "unclear"), 2),
    "1 and -1 with a fraction": (labels("1.0", "-1.0"), 3),
    "numbers and truth values": (labels("0", "1", "True"), 2),
    "amounts": (labels("$1.50", "$20", "-$3"), 1),
    "several numbers": (labels("0.1 0.9", "0.5 0.5"), 1),
    "arrays": (arrays, 2),
    "durations": (labels("0 days 01:00:00", "-1 days 23:00:00"), 1),
    "dates": (labels("2024-05-01", "2024-06-11"), 1),
}  # fmt: skip
"""Sources that are refused, and how many commands the refusal prints."""


RAISED = set[tuple[str, int]]()
"""Places of the code that made a doubt in this process."""
TRIED: set[str] = set()


@pytest.fixture(autouse=True)
def record_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Doubt.of.__func__  # type: ignore[attr-defined]

    def recording(cls: type[Doubt], *arguments: Any, **options: Any) -> Doubt:
        frame = sys._getframe(1)
        RAISED.add((frame.f_code.co_filename, frame.f_lineno))
        return of(cls, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(Doubt, "of", classmethod(recording))


@pytest.mark.parametrize("name", REFUSALS)
def test_each_command_that_a_refusal_prints_builds(builds: Builds, name: str) -> None:
    case, commands = REFUSALS[name]
    builds.choices(case(builds.root))
    TRIED.add(name)
    assert len(commands_in(builds.printed)) == commands, builds.printed
    assert UNTRIED not in builds.printed


UNTRIED = "not all of these were tried"


def test_commands_that_were_not_planned_are_told_from_others(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files("in/train/01/a.png in/train/1/b.png in/val/1/c.png", "in")
    monkeypatch.setattr(remedies, "SECONDS", 0)
    commands = builds.refused(source(builds.root))
    assert commands[0][:2] == ["build", "in/train"]
    assert UNTRIED in builds.printed


@pytest.mark.parametrize(
    "function", [precache.plan, precache.submit, precache.ensure, precache.refresh]
)
def test_an_unknown_keyword_is_named(function: Callable[..., Any]) -> None:
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword .* 'colour'$"):
        function("in", "out", colour="red")


def test_a_source_is_told_from_a_value_before_it(builds: Builds) -> None:
    put(builds.root, "0/train/a.png", "0/val/b.png")
    line = ("build", "--address", "serial", "--max-failures", "0", "--", "0", "x.store")
    assert builds.run(*line) == 2
    commands = commands_in(builds.printed)
    assert commands[0] == [*line[:6], "0/train", "x.store"]
    for number, command in enumerate(commands):
        assert builds.run(*command[:-1], f"{number}.store") == 0, builds.printed


def test_a_name_of_samples_by_which_labels_are_lost_says_so(builds: Builds) -> None:
    names = "a.1.png a.2.png b.1.png b.2.png c.png"
    lost = "2 .cls members of tar archives have no image beside them"
    for members, said in (({"a": "x", "b": "y"}, True), ({"a": "x", "b": "y", "c": "x"}, False)):
        choices = builds.choices(tar(names, members)(builds.root))
        assert [all(label is None for label in found.values()) for found in choices] == [
            False, said, said,
        ]  # fmt: skip
        builds.labels("in.tar --sample-name whole")
        assert lost in " ".join(builds.printed.split())


def test_no_doubt_is_without_a_case(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The refusals of this module have been tried before, unless this test runs alone."""
    monkeypatch.setattr(remedies, "SECONDS", 0)  # no command is planned
    cases = [case for name, (case, _) in REFUSALS.items() if name not in TRIED]
    cases += [reading.case for reading in REFUSED.values()]
    for number, case in enumerate(cases):
        (root := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(root)
        assert builds.run("build", *shlex.split(case(root)), "x.store") == 2
    for path in sorted((REPOSITORY / "workers/precache_workers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Doubt.of":
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                assert {(str(path), line) for line in lines} & RAISED, (path, node.lineno)
