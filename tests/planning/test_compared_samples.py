"""Changes of the data of a Python dataset: seen by files, by fingerprints, or by reading it."""

import importlib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import precache
from precache.cli import main as command_line
from precache.errors import PrecacheError, SourceError, UsageError
from precache_workers.sources.base import Sample
from precache_workers.sources.kinds import open_source
from tests.support import building
from tests.support.building import labels, pixels, rewrite, write_jpegs

CODE = """
import dataclasses
import json
import pathlib
import random
import numpy as np
import pandas
import pyarrow
import torch
from PIL import Image

HERE = pathlib.Path(__file__).parent
STATE = json.loads((HERE / "state.json").read_text()) if (HERE / "state.json").exists() else None

def state():
    return json.loads((HERE / "state.json").read_text())

class Inner(list):
    def __init__(self):
        super().__init__(range(8))
        self.samples = [(str(path), 0) for path in sorted(HERE.glob("*.png"))]

class Record:
    def __init__(self, path):
        self.path = path

class Slots:
    __slots__ = ("path",)
    def __init__(self, path):
        self.path = path

@dataclasses.dataclass(slots=True)
class Slotted:
    path: pathlib.Path

class Data:
    {members}

    def __len__(self):
        return {count}

    def __getitem__(self, n):
        {body}
"""
MEMBERS, COUNT = "pass", 8
IMAGE = precache.Recipe.image()

Module = Callable[..., str]


@pytest.fixture
def source(module: Callable[[str], str]) -> Module:
    """A writer of datasets, which returns the name of each as a source."""

    def write(body: str, members: str = MEMBERS, count: int = COUNT) -> str:
        return f"python:{module(CODE.format(body=body, members=members, count=count))}:Data"

    return write


def put(tmp_path: Path, values: Any) -> None:
    """Write the data that a dataset reads, unseen by precache."""
    (tmp_path / "code/state.json").write_text(json.dumps(values))


def build(source: str, tmp_path: Path, recipe: precache.Recipe = IMAGE, **options: Any) -> Any:
    return building.build(source, tmp_path / "store", recipe, **{"shard_samples": 4, **options})


def values(tmp_path: Path, field: str = "image") -> list[int]:
    found = pixels(tmp_path / "store", field)
    return [int(found[str(n)].max()) for n in range(len(found))]


BODY = "v = state()[n]; return np.full((8, 8, 3), v % 100, np.uint8), v // 100"
DATA = [0, 101, 2, 103, 4, 105, 6, 107]


def test_data_that_is_not_compared_is_said_with_the_way_out(
    source: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, DATA)
    name = source(BODY)
    build(name, tmp_path)
    put(tmp_path, [0, 109, *DATA[2:]])  # none of those that are read
    line = [name, str(tmp_path / "store"), "--address", "serial", "--shard-samples", "4"]
    for command in (["plan", "--no-timing"], ["build"]):
        assert command_line.main([*command, *line]) == 0
        printed = capsys.readouterr()
        shown = " ".join((printed.err + printed.out).split())
        assert "samples not compared" in shown, command
        assert "fingerprint(i)" in shown, command
        assert "--compare" in shown, command
    options: dict[str, Any] = {"address": "serial", "shard_samples": 4, "timing": False}
    plan = str(precache.plan(name, tmp_path / "store", IMAGE, **options))
    assert "samples not compared: give the dataset fingerprint(i), or --compare" in plan
    assert command_line.main(["build", *line, "--compare"]) == 0  # the advice
    assert "samples not compared" not in capsys.readouterr().err
    assert values(tmp_path) == [0, 9, 2, 3, 4, 5, 6, 7]
    for members, said in ((MEMBERS, True), (NAMED, False)):
        name, store = source(BODY, members), tmp_path / f"store{said}"
        for _ in range(2):
            capsys.readouterr()
            precache.ensure(name, store, IMAGE, address="serial")
        assert ("samples not compared" in capsys.readouterr().err) is said


@pytest.mark.parametrize(
    ("changed", "fetched"),
    [([9, *DATA[1:]], 1), ([100, *DATA[1:]], 1), (DATA, 0)],
    ids=["pixels", "label", "nothing"],
)
def test_data_that_changed_are_refused_or_compared_and_then_these_alone_are_built_again(
    changed: list[int],
    fetched: int,
    source: Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(tmp_path, DATA)
    name = source(BODY)
    first = build(name, tmp_path).version
    put(tmp_path, changed)
    if fetched:
        with pytest.raises(SourceError, match=r"sample 0 of user_code_\d+:Data is not what"):
            build(name, tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plan = precache.plan(
        name, tmp_path / "store", IMAGE, address="serial", compare=True, shard_samples=4
    )
    assert plan.rows_computed == fetched
    assert not list(Path.cwd().iterdir())
    second = build(name, tmp_path, compare=True).version
    assert (second == first) is (fetched == 0)
    found = labels(tmp_path / "store")
    assert values(tmp_path) == [v % 100 for v in changed]
    assert [found[str(n)] for n in range(8)] == [v // 100 for v in changed]
    # A later build that does not compare keeps what was seen, also where rows are laid anew.
    assert build(name, tmp_path).version == second
    build(name, tmp_path, compact=True)
    assert values(tmp_path) == [v % 100 for v in changed]
    assert precache.verify(tmp_path / "store").ok
    put(tmp_path, DATA)
    assert build(name, tmp_path, compare=True).version == first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{'image': b'xy', 'mask': b''}", "{'image': b'x', 'mask': b'y'}"),
        ("{'image': np.zeros((8, 4), np.uint8)}", "{'image': np.zeros((4, 8), np.uint8)}"),
        ("{'image': np.zeros(4, np.uint8)}", "{'image': np.zeros(4, np.int8)}"),
        ("{'image': np.zeros(2, np.uint16)}", "{'image': np.zeros(4, np.uint8)}"),
        ("{'image': [1, 2], 'mask': [3]}", "{'image': [1], 'mask': [2, 3]}"),
        ("{'image': b'x'}", "{'mask': b'x'}"),
        ("{'image': b'x'}", "{'image': 'x'}"),
        ("{'image': Image.new('P', (2, 2))}", "{'image': Image.new('L', (2, 2))}"),
        ("{'image': np.array([None, 1])}", "{'image': np.array([None, 2])}"),
        ("{'image': {1, 2}}", "{'image': {1, 3}}"),
    ],
)
def test_content_is_of_names_types_shapes_and_values(
    before: str, after: str, source: Module
) -> None:
    hashes = []
    for item in (before, before, after):
        [sample] = open_source(source(f"return {item}")).fetch(["0"], [-1])
        assert isinstance(sample, Sample)
        hashes.append(sample.content)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    "body",
    [
        "return np.full((8, 8, 3), random.randrange(1 << 8), np.uint8), 0",
        "return np.zeros((8, 8, 3), np.uint8), random.randrange(1 << 20)",
    ],
)
def test_a_dataset_that_gives_another_item_each_time_is_refused(
    body: str, source: Module, tmp_path: Path
) -> None:
    name = source(body)
    for function in (precache.build, precache.plan):
        with pytest.raises(SourceError, match=r"two reads of sample \d .*leave out --compare"):
            function(name, tmp_path / "store", IMAGE, compare=True, address="serial")
    one_draw = precache.Recipe.image(variants=1)
    version = build(name, tmp_path, one_draw).version  # the advice
    assert build(name, tmp_path, one_draw).version == version


def test_a_changed_sample_that_is_another_in_its_task_is_refused(
    source: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache_workers.planning.content_reader.READ_TWICE", 0)
    body = "self.reads += n == 5; return np.full((8, 8, 3), self.reads if n == 5 else n, np.uint8)"
    name = source(body, "reads = 0")
    one_draw = precache.Recipe.image(variants=1)
    build(name, tmp_path, one_draw)
    with pytest.raises(PrecacheError, match="two reads of sample 5 gave different items"):
        build(name, tmp_path, one_draw, compare=True)


def test_other_sources_need_no_comparison(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 3)
    with pytest.raises(UsageError, match=r"--compare is for a Python dataset.*leave it out"):
        precache.build(tmp_path / "in", tmp_path / "store", IMAGE, compare=True, address="serial")


def test_a_fingerprint_that_misses_a_change_is_compared_too(source: Module, tmp_path: Path) -> None:
    put(tmp_path, DATA)
    name = source(BODY, "def fingerprint(self, n): return 'same'")
    build(name, tmp_path)
    put(tmp_path, [9, *DATA[1:]])
    assert build(name, tmp_path, compare=True).rows_reused >= 4
    assert values(tmp_path)[0] == 9


# --- files that a dataset holds -----------------------------------------------------------------

HOLDERS = {
    "samples": "samples = [(str(p), 0) for p in sorted(HERE.glob('*.png'))]",
    "samples with a text and their file": (
        "samples = [(HERE / 'state.json', 'cat', p) for p in sorted(HERE.glob('*.png'))]"
    ),
    "names": "root = str(HERE); files = sorted(p.name for p in HERE.glob('*.png'))",
    "dicts": "rows = [{'a': 1, 'file': str(p)} for p in sorted(HERE.glob('*.png'))]",
    "array": "files = np.array([str(p) for p in sorted(HERE.glob('*.png'))])",
    "one file": "path = HERE / '3.png'",
    "memory map": "def __init__(self): self.data = np.memmap(HERE / '3.png', mode='r')",
    "within": "def __init__(self): self.inner = Inner()",
    "several": "def __init__(self): self.datasets = [Inner(), Inner()]",
    "samples and masks under roots": (
        "root, masks = '/no', HERE; samples = [(f'{n}.a', f'{n}.png', 0) for n in range(8)]"
    ),
    "images of a class's folder": (
        "data_dir = HERE.parent; imgs = [(f'code/{n}.png', 0) for n in range(8)]"
    ),
    "data frame": (
        "img_dir, x = HERE, pandas.DataFrame([{'n': 0, 'file': f'{n}.png'} for n in range(8)])"
    ),
    "data frame with two columns of one name": (
        "root = HERE; x = pandas.DataFrame([[n, f'{n}.png'] for n in range(8)], columns=[*'aa'])"
    ),
    "Arrow table": (
        "root = HERE; x = pyarrow.table({'n': [0] * 8, 'file': [f'{n}.png' for n in range(8)]})"
    ),
    "Arrow structs": (
        "root, x = HERE, pyarrow.table({'i': [{'path': f'{n}.png'} for n in range(8)]})"
    ),
    "slots": (
        "__slots__ = ('files',)\n    def __init__(self): self.files = sorted(HERE.glob('*.png'))"
    ),
    "objects with slots": "files = [Slots(p) for p in sorted(HERE.glob('*.png'))]",
    "data class with slots": "files = [Slotted(p) for p in sorted(HERE.glob('*.png'))]",
    "open file": (
        "def __init__(self): self.file = open(HERE / '3.png', 'rb')\n"
        "    def __del__(self): self.file.close()"
    ),
    "index of a data frame": (
        "root, x = HERE, pandas.DataFrame({'n': 0}, [f'{n}.png' for n in range(8)])"
    ),
    "series": "img_dir, names = HERE, pandas.Series([f'{n}.png' for n in range(8)])",
    "columns": "root, table = HERE, {'label': [*range(8)], 'file': [f'{n}.png' for n in range(8)]}",
    "bytes": "files = np.array([bytes(p) for p in sorted(HERE.glob('*.png'))])",
    "set": "files = {str(p) for p in HERE.glob('*.png')}",
    "objects": "files = [Record(p) for p in sorted(HERE.glob('*.png'))]",
    "subset": "def __init__(self): self.dataset, self.indices = Inner(), range(8)",
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_edit_of_a_file_that_the_dataset_holds_is_listed(
    holder: str, source: Module, tmp_path: Path
) -> None:
    for n in range(8):
        Image.fromarray(np.full((8, 8, 3), n, np.uint8)).save(tmp_path / f"code/{n}.png")
    name = source("return np.asarray(Image.open(HERE / f'{n}.png')), n % 2", HOLDERS[holder])
    found = []
    for _ in range(2):
        found += [[*open_source(name).list(lambda count: None).table.etags] for _ in range(2)]
        Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "code/3.png")
        os.utime(tmp_path / "code/3.png", (1, 1))
    assert found[0] == found[1] != found[2] == found[3]


BROKEN = {
    "OSError('gone')": "class Broken:\n    def to_list(self): raise OSError('gone')",
    "RuntimeError('not opened')": """import collections.abc
class Broken(collections.abc.Mapping):
    def __getitem__(self, key): raise RuntimeError("not opened")
    def __iter__(self): raise RuntimeError("not opened")
    def __len__(self): return 3""",
}


@pytest.mark.parametrize("reason", BROKEN)
def test_an_attribute_that_cannot_be_searched_is_named(
    reason: str, source: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, DATA)
    members = "def __init__(self): self.broken = Broken(); self.path = HERE / 'state.json'"
    name = source(BODY, members)
    module = tmp_path / f"code/{name.split(':')[1]}.py"
    module.write_text(module.read_text().replace("class Data:", f"{BROKEN[reason]}\n\nclass Data:"))
    build(name, tmp_path)
    [line] = [line for line in caplog.messages if "samples not compared" in line]
    assert "of 1 files that these name" in line
    assert f"its attribute 'broken' could not be searched: {reason}" in line


OWN_ORDERS = {
    "an order of its own": (
        "samples = [(str(HERE / f'{n}.png'), n % 2) for n in range(8)]; order = [*range(8)][::-1]",
        "path, label = self.samples[self.order[n]]; return Path(path).read_bytes(), label",
        7,
    ),
    "two files": (
        "samples = [(str(HERE / f'{n}.png'), n % 2) for n in range(8)]",
        (
            "return {key: Path(self.samples[m % 8][0]).read_bytes() for key, m in "
            "(('image', n), ('next', n + 1))} | {'label': self.samples[n][1]}"
        ),
        0,
    ),
    "names that exist in the working folder, too": (
        "root = str(HERE); samples = [(f'{n}.png', n % 2) for n in range(8)]",
        "path, label = self.samples[n]; return Path(self.root, path).read_bytes(), label",
        0,
    ),
}


@pytest.mark.parametrize("case", OWN_ORDERS)
def test_a_sample_may_read_any_file_that_the_dataset_holds(
    case: str,
    source: Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    members, body, row = OWN_ORDERS[case]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for n, folder in itertools.product(range(8), ("code", "elsewhere")):
        Image.fromarray(np.full((8, 8, 3), n, np.uint8)).save(tmp_path / folder / f"{n}.png")
    name = source(f"from pathlib import Path; {body}", members)
    fields = {"image": {"ops": [{"op": "decode"}]}}
    if case == "two files":
        fields["next"] = fields["image"]
    recipe = precache.Recipe.from_dict({"fields": fields})
    build(name, tmp_path, recipe)
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "code/0.png")
    result = build(name, tmp_path, recipe, progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "all 8 samples are read and compared" in said
    assert "fingerprint(i) of the dataset spares reading them" in said
    assert result.rows_reused == 7 - (case == "two files")
    assert values(tmp_path)[row] == 99
    assert labels(tmp_path / "store")[str(row)] == 0
    if case == "two files":
        assert values(tmp_path, "next")[7] == 99
    again = build(name, tmp_path, recipe, progress=True)
    assert again.version == result.version
    assert "are read and compared" not in capsys.readouterr().err


OWN = """
class Own(Data):
    def __getitem__(self, n): return np.full((8, 8, 3), n, np.uint8), {label}
make = Own
"""
IN_SAMPLES = OWN.format(label="state()[n]").replace(
    "(Data):", "(Data):\n    def __init__(self): self.samples = {samples}"
)
LABELS = {
    "pairs": IN_SAMPLES.format(samples="[(n, v) for n, v in enumerate(state())]"),
    "dicts": IN_SAMPLES.format(samples="[{'n': n, 'label': v} for n, v in enumerate(state())]"),
    "an array": IN_SAMPLES.format(samples="np.array(list(enumerate(state())))"),
    "tensors": IN_SAMPLES.format(samples="[(0, torch.tensor([v])) for v in state()]"),
    "a closure": (
        "def make():\n    labels = state()\n"
        "    class Own(Data):\n"
        "        def __getitem__(self, n): return np.full((8, 8, 3), n, np.uint8), labels[n]\n"
        "    return Own()"
    ),
    "a function of the module": (
        "LABELS = state()\ndef label(n): return LABELS[n]\n"
        + OWN.format(label="[label(m) for m in [n]][0]")
    ),
    "a table of the module": (
        "TABLE = pandas.DataFrame({'label': state()})\n" + OWN.format(label="int(TABLE.label[n])")
    ),
    "an attribute that is a partial function": (
        "import functools\n"
        "def pick(labels, n): return np.full((8, 8, 3), n, np.uint8), labels[n]\n"
        "class Own(Data):\n"
        "    def __init__(self): self.pick = functools.partial(pick, state())\n"
        "    def __getitem__(self, n): return self.pick(n)\n"
        "make = Own"
    ),
}


@pytest.mark.parametrize("place", LABELS)
def test_a_label_that_changes_in_or_around_the_dataset_is_seen(
    place: str, source: Module, tmp_path: Path
) -> None:
    put(tmp_path, [0, 1, 2, 3, 4, 5, 6, 7])
    module = source("pass").split(":")[1]
    with (tmp_path / f"code/{module}.py").open("a") as file:
        file.write(LABELS[place])
    name = f"python:{module}:make"
    first = build(name, tmp_path)
    assert build(name, tmp_path).version == first.version
    put(tmp_path, [5, 1, 2, 3, 4, 5, 6, 7])
    if "module" in place:  # as another process would read it
        importlib.reload(sys.modules[module])
    assert build(name, tmp_path).rows_reused in (7, 8)
    assert [labels(tmp_path / "store")[str(n)] for n in range(8)] == [5, 1, 2, 3, 4, 5, 6, 7]


def bitmap(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "BMP")
    return file.getvalue()


BITMAPS = (
    "return np.asarray(Image.open(HERE / f'{n}.bmp')), int((HERE / 'labels.txt').read_text()[n])"
)
FILES = (
    "samples = [(str(p), 0) for p in sorted(HERE.glob('*.bmp'))]; table = str(HERE / 'labels.txt')"
)


@pytest.fixture
def bitmaps(source: Module, tmp_path: Path) -> str:
    """A dataset of files of equal sizes; each has its own, and one has the labels of all."""
    for n in range(8):
        (tmp_path / f"code/{n}.bmp").write_bytes(bitmap(n))
    (tmp_path / "code/labels.txt").write_text("01010101")
    broken = "if (HERE / 'broken').exists() and n == 5: raise OSError"
    return source(f"{broken}\n        {BITMAPS}", FILES)


@pytest.mark.parametrize(("name", "data"), [("3.bmp", bitmap(99)), ("labels.txt", b"01020101")])
def test_a_file_that_is_rewritten_in_place_is_seen(
    name: str, data: bytes, bitmaps: str, tmp_path: Path
) -> None:
    first = build(bitmaps, tmp_path)
    rewrite(tmp_path / "code" / name, data)
    options: dict[str, Any] = {"address": "serial", "shard_samples": 4, "timing": False}
    assert precache.plan(bitmaps, tmp_path / "store", IMAGE, **options).rows_computed == 1
    assert build(bitmaps, tmp_path, ignore_ctime=True).version == first.version
    rewrite(tmp_path / "code" / name, data)
    second = build(bitmaps, tmp_path)
    assert second.version != first.version
    assert second.rows_reused >= 7
    value, label = (99, 1) if name == "3.bmp" else (3, 2)
    assert values(tmp_path) == [0, 1, 2, value, 4, 5, 6, 7]
    found = labels(tmp_path / "store")
    assert [found[str(n)] for n in range(8)] == [0, 1, 0, label, 0, 1, 0, 1]
    assert build(bitmaps, tmp_path).version == second.version
    assert build(bitmaps, tmp_path, compact=True).version == second.version


def test_a_rewritten_file_is_seen_after_a_build_that_failed(bitmaps: str, tmp_path: Path) -> None:
    first = build(bitmaps, tmp_path)
    rewrite(tmp_path / "code/5.bmp", bitmap(99))
    (tmp_path / "code/broken").write_bytes(b"")
    with pytest.raises(PrecacheError):
        build(bitmaps, tmp_path)
    (tmp_path / "code/broken").unlink()
    assert build(bitmaps, tmp_path).version != first.version
    assert values(tmp_path) == [0, 1, 2, 3, 4, 99, 6, 7]


@pytest.mark.parametrize("compare", [False, True])
def test_a_build_without_the_labels_of_samples_settles_nothing_for_one_with_them(
    compare: bool, bitmaps: str, tmp_path: Path
) -> None:
    (tmp_path / "labels.csv").write_text("".join(f"{n},0\n" for n in range(8)))
    build(bitmaps, tmp_path)
    build(bitmaps, tmp_path, labels=tmp_path / "labels.csv")
    rewrite(tmp_path / "code/labels.txt", b"01020101")
    build(bitmaps, tmp_path, labels=tmp_path / "labels.csv", compare=compare)
    build(bitmaps, tmp_path, compare=compare)
    assert labels(tmp_path / "store")["3"] == 2


def test_samples_are_compared_with_the_latest_version_of_their_own_dataset(
    source: Module, tmp_path: Path
) -> None:
    put(tmp_path, DATA)
    name = source(BODY)
    build(name, tmp_path)
    put(tmp_path, [9, *DATA[1:]])
    version = build(name, tmp_path, compare=True).version
    build(source("return np.full((8, 8, 3), n, np.uint8), 0"), tmp_path)
    assert build(name, tmp_path).version == version
    assert build(name, tmp_path, compare=True).version == version
    assert values(tmp_path)[0] == 9


def test_a_refresh_of_changed_data_says_that_a_comparison_comes_first(
    source: Module, tmp_path: Path
) -> None:
    recipe = precache.Recipe.image(random_resized_crop=4, variants=2)
    put(tmp_path, DATA)
    name = source(BODY)
    build(name, tmp_path, recipe)
    put(tmp_path, [9, *DATA[1:]])
    options: dict[str, Any] = {"address": "serial", "run_functions": True}
    with pytest.raises(PrecacheError, match="the same precache build as then, with --compare"):
        precache.refresh(tmp_path / "store", **options)
    build(name, tmp_path, recipe, compare=True)
    precache.refresh(tmp_path / "store", **options)
    assert values(tmp_path)[0] == 9


# --- labels that come with samples are reused ---------------------------------------------------

NAMED = "def key(self, n): return f'k{n}'\n    def fingerprint(self, n): return str(state()[n])"


def labels_by_name(tmp_path: Path) -> list[int]:
    found = labels(tmp_path / "store")
    return [found[f"k{n}"] for n in range(len(found))]


def test_rows_are_reused_with_the_labels_that_came_with_them_alone(
    source: Module, tmp_path: Path
) -> None:
    put(tmp_path, DATA)
    name = source(BODY, NAMED)
    (tmp_path / "labels.csv").write_text("".join(f"k{n},{n}\n" for n in range(8)))
    build(name, tmp_path, labels=tmp_path / "labels.csv")
    assert labels_by_name(tmp_path) == list(range(8))
    build(name, tmp_path)
    assert labels_by_name(tmp_path) == [v // 100 for v in DATA]
    put(tmp_path, [9, 201, *DATA[2:], 308])
    module = name.split(":")[1]
    code = CODE.format(body=BODY, members=NAMED, count="8 + 1")
    (tmp_path / f"code/{module}.py").write_text(code)
    sys.modules.pop(module)  # as in another process
    result = build(name, tmp_path)
    assert (result.rows_reused, result.samples) == (7, 9)  # a label alone decodes nothing
    assert labels_by_name(tmp_path) == [0, 2, *(v // 100 for v in DATA[2:]), 3]
    assert precache.verify(tmp_path / "store").ok


def test_labels_are_not_reused_where_fields_read_other_parts(
    source: Module, tmp_path: Path
) -> None:
    put(tmp_path, DATA)
    body = "v = state()[n]; image = np.full((8, 8, 3), v % 100, np.uint8); return image, v, image"
    name = source(body, NAMED)
    fields: dict[str, Any] = {"image": {"input": 0}, "other": {"input": 1}}
    build(name, tmp_path, precache.Recipe.from_dict({"fields": fields}))
    assert labels_by_name(tmp_path) == [-1] * 8
    del fields["other"]
    build(name, tmp_path, precache.Recipe.from_dict({"fields": fields}))
    assert labels_by_name(tmp_path) == DATA


@pytest.mark.parametrize("classes", [["new", "a", "b"], ["b", "a"]])
def test_labels_are_not_reused_where_classes_have_other_numbers(
    classes: list[str], source: Module, tmp_path: Path
) -> None:
    """A fingerprint has the name of a class, and need not have its number."""
    body = "return np.full((8, 8, 3), n, np.uint8), 'ab'[n % 2]"
    fingerprint = "def fingerprint(self, n): return f'{n} {n % 2}'"
    name = source(body, f"def __init__(self): self.classes = state()\n    {fingerprint}")
    put(tmp_path, ["a", "b"])
    build(name, tmp_path)
    put(tmp_path, classes)
    assert build(name, tmp_path).rows_reused == 8
    found = labels(tmp_path / "store")
    assert [classes[found[str(n)]] for n in range(8)] == [*"ab" * 4]
