"""Changes of the data of a Python dataset: seen by files, by fingerprints, or by reading it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import precache
from precache.cli import main as command_line
from precache.errors import PrecacheError, SourceError, UsageError
from tests.support.building import labels, pixels, write_jpegs

CODE = """
import json
import pathlib
import random
import numpy as np
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

class Data:
    {members}

    def __len__(self):
        return {count}

    def __getitem__(self, n):
        {body}
"""
MEMBERS, COUNT = "pass", 8
IMAGE = precache.Recipe.image()
_numbers = itertools.count()

Module = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a dataset, and gives its name as a source."""
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "code")

    def make(body: str, members: str = MEMBERS, count: int = COUNT) -> str:
        name = f"compared_data_{next(_numbers)}"
        code = CODE.format(body=body, members=members, count=count)
        (tmp_path / f"code/{name}.py").write_text(code)
        return f"python:{name}:Data"

    return make


def put(tmp_path: Path, values: Any) -> None:
    """Write the data that a dataset reads, unseen by precache."""
    import json

    (tmp_path / "code/state.json").write_text(json.dumps(values))


def build(source: str, tmp_path: Path, recipe: precache.Recipe = IMAGE, **options: Any) -> Any:
    return precache.build(
        source, tmp_path / "store", recipe, **{"address": "serial", "shard_samples": 4, **options}
    )


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
    put(tmp_path, [9, *DATA[1:]])
    line = [name, str(tmp_path / "store"), "--address", "serial", "--shard-samples", "4"]
    for command in ("plan", "build"):
        assert command_line.main([command, *line]) == 0
        printed = capsys.readouterr()
        shown = " ".join((printed.err + printed.out).split())
        assert "samples not compared" in shown, command
        assert "fingerprint(i)" in shown, command
        assert "--compare" in shown, command
    plan = str(precache.plan(name, tmp_path / "store", IMAGE, address="serial", shard_samples=4))
    assert "samples not compared: give the dataset fingerprint(i), or --compare" in plan
    assert command_line.main(["build", *line, "--compare"]) == 0  # the advice
    assert "samples not compared" not in capsys.readouterr().err
    assert values(tmp_path) == [9, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("changed", "fetched"),
    [([9, *DATA[1:]], 1), ([100, *DATA[1:]], 1), (DATA, 0)],
    ids=["pixels", "label", "nothing"],
)
def test_compared_samples_alone_are_built_again(
    changed: list[int], fetched: int, source: Module, tmp_path: Path
) -> None:
    put(tmp_path, DATA)
    name = source(BODY)
    first = build(name, tmp_path)
    put(tmp_path, changed)
    plan = precache.plan(
        name, tmp_path / "store", IMAGE, address="serial", compare=True, shard_samples=4
    )
    assert plan.rows_computed == fetched
    second = build(name, tmp_path, compare=True)
    assert (second.version == first.version) is (fetched == 0)
    found = labels(tmp_path / "store")
    assert values(tmp_path) == [v % 100 for v in changed]
    assert [found[str(n)] for n in range(8)] == [v // 100 for v in changed]
    # A later build that does not compare keeps what was seen, also where rows are laid anew.
    assert build(name, tmp_path).version == second.version
    build(name, tmp_path, compact=True)
    assert values(tmp_path) == [v % 100 for v in changed]
    assert precache.verify(tmp_path / "store").ok


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
    from precache_workers.sources.base import Sample
    from precache_workers.sources.kinds import open_source

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
    build(name, tmp_path)


def test_a_changed_sample_that_is_another_in_its_task_is_refused(
    source: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache_workers.planning.compared_samples.READ_TWICE", 0)
    body = "self.reads += n == 5; return np.full((8, 8, 3), self.reads if n == 5 else n, np.uint8)"
    name = source(body, "reads = 0")
    build(name, tmp_path)
    with pytest.raises(PrecacheError, match="two reads of sample 5 gave different items"):
        build(name, tmp_path, compare=True)


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
    "samples": ("samples = [(str(p), 0) for p in sorted(HERE.glob('*.png'))]", 1),
    "samples with a text and their file": (
        "samples = [(HERE / 'state.json', 'cat', p) for p in sorted(HERE.glob('*.png'))]",
        1,
    ),
    "paths": ("files = sorted(HERE.glob('*.png'))", 8),
    "names": ("root = str(HERE); files = sorted(p.name for p in HERE.glob('*.png'))", 8),
    "dicts": ("rows = [{'a': 1, 'file': str(p)} for p in sorted(HERE.glob('*.png'))]", 8),
    "pairs": ("pairs = [(p, p) for p in sorted(HERE.glob('*.png'))]", 8),
    "array": ("files = np.array([str(p) for p in sorted(HERE.glob('*.png'))])", 8),
    "one file": ("path = HERE / '3.png'", 8),
    "memory map": ("def __init__(self): self.data = np.memmap(HERE / '3.png', mode='r')", 8),
    "within": ("def __init__(self): self.inner = Inner()", 8),
    "several": ("def __init__(self): self.datasets = [Inner(), Inner()]", 8),
    "subset": ("def __init__(self): self.dataset, self.indices = Inner(), range(8)", 1),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_edit_of_a_file_that_the_dataset_holds_is_seen(
    holder: str, source: Module, tmp_path: Path
) -> None:
    for n in range(8):
        Image.fromarray(np.full((8, 8, 3), n, np.uint8)).save(tmp_path / f"code/{n}.png")
    members, fetched = HOLDERS[holder]
    name = source("return np.asarray(Image.open(HERE / f'{n}.png')), n % 2", members)
    first = build(name, tmp_path)
    assert build(name, tmp_path).version == first.version
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "code/3.png")
    os.utime(tmp_path / "code/3.png", (1, 1))
    plan = precache.plan(name, tmp_path / "store", IMAGE, address="serial", shard_samples=4)
    assert plan.rows_computed == fetched
    assert build(name, tmp_path).rows_reused == 7
    assert values(tmp_path) == [0, 1, 2, 99, 4, 5, 6, 7]
    assert [labels(tmp_path / "store")[str(n)] for n in range(8)] == [n % 2 for n in range(8)]


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


def test_rows_are_reused_with_the_labels_that_came_with_them(
    source: Module, tmp_path: Path
) -> None:
    put(tmp_path, DATA)
    name = source(BODY, NAMED)
    build(name, tmp_path)
    put(tmp_path, [9, 201, *DATA[2:], 308])
    (tmp_path / "code" / f"{name.split(':')[1]}.py").write_text(
        CODE.format(body=BODY, members=NAMED, count=9)
    )
    result = build(name, tmp_path)
    assert (result.rows_reused, result.samples) == (7, 9)  # a label alone decodes nothing
    assert labels_by_name(tmp_path) == [0, 2, *(v // 100 for v in DATA[2:]), 3]
    assert precache.verify(tmp_path / "store").ok


def test_labels_are_not_reused_from_a_version_that_got_others(
    source: Module, tmp_path: Path
) -> None:
    put(tmp_path, DATA)
    name = source(BODY, NAMED)
    (tmp_path / "labels.csv").write_text("".join(f"k{n},{n}\n" for n in range(8)))
    build(name, tmp_path, labels=tmp_path / "labels.csv")
    assert labels_by_name(tmp_path) == list(range(8))
    build(name, tmp_path)
    assert labels_by_name(tmp_path) == [v // 100 for v in DATA]
    put(tmp_path, [9, *DATA[1:]])
    assert build(name, tmp_path).rows_reused == 7
    assert labels_by_name(tmp_path) == [v // 100 for v in DATA]


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
