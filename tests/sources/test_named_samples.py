"""Datasets that name their samples, and tell which of them changed."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import SourceError
from precache_workers.sources.base import FetchError, Sample
from precache_workers.sources.fetching import fetch_ahead
from precache_workers.sources.kinds import open_source
from tests.support import building
from tests.support.building import pixels, write

CODE = """
import numpy as np

ITEMS = {items}

class Data:
    def __init__(self):
        self.items = list(ITEMS.items())
        self.targets = [0] * len(self.items)
    def __len__(self):
        return len(self.items)
    def __getitem__(self, number):
        return np.full((8, 8, 3), self.items[number][1], np.uint8), 0
    def key(self, number):
        return self.items[number][0]
    def fingerprint(self, number):
        return str(self.items[number][1])

def make():
    return Data()
"""
RECIPE = precache.Recipe.image()
Say = Callable[..., None]
build = functools.partial(building.build, "python:named:make", recipe=RECIPE)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Writes the module of a dataset with these items."""
    monkeypatch.delitem(sys.modules, "named", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def put(items: dict[str, int]) -> None:
        write(tmp_path / "code/named.py", CODE.format(items=items).encode())
        sys.modules.pop("named", None)  # as a process of its own would import it

    return put


def values(tmp_path: Path) -> dict[str, int]:
    return {key: int(row[0, 0, 0]) for key, row in pixels(tmp_path / "store").items()}


def test_samples_keep_their_rows_wherever_they_stand(say: Say, tmp_path: Path) -> None:
    say({"a": 1, "b": 2, "c": 3})
    first = build(tmp_path / "store")
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}
    say({"c": 3, "a": 1, "b": 2})  # code changed, and no sample did
    assert build(tmp_path / "store").version == first.version
    say({"new": 9, "c": 3, "a": 1, "b": 7})
    second = build(tmp_path / "store")
    assert (second.samples, second.rows_reused) == (4, 2)
    assert values(tmp_path) == {"a": 1, "b": 7, "c": 3, "new": 9}


REFUSED = [
    ("def key(self, n): return 'x'", "key returned 'x'; keys must be unique"),
    ("def key(self, n): return ''", "key returned ''; keys must be unique and not empty"),
    ("def key(self, n): return n", r"key\(0\) is 0; it must be a string"),
    ("def key(self, n): return 1 / 0", "key failed: ZeroDivisionError"),
    ("key, fingerprint = (lambda self, n: f'{n}'), (lambda self, n: b'bytes')",
     r"fingerprint\(0\) is b'bytes'; it must be a string"),
    ("fetch_threads = 'many'", "fetch_threads is 'many'"),
    ("targets = [1]", "targets"),
    ("def __len__(self): return 0", "is empty"),
    ("del __len__", "without a length"),
]  # fmt: skip


@pytest.mark.parametrize(("member", "why"), REFUSED)
def test_datasets_that_cannot_be_listed_are_refused(
    member: str, why: str, module: Callable[[str], str]
) -> None:
    code = f"class Data:\n    def __len__(self): return 2\n    {member}\n"
    source = open_source(f"python:{module(code)}:Data")

    def read() -> None:
        source.list(lambda count: None)
        _ = source.fetch_threads

    with pytest.raises(SourceError, match=why):
        read()


def test_keys_of_another_state_of_the_dataset_are_not_fetched(say: Say, tmp_path: Path) -> None:
    """A key that a store names is no number."""
    say({"a": 1, "b": 2})
    fetched = open_source("python:named:make").fetch(["b", "0", "../a"], [-1] * 3)
    assert np.array_equal(fetched[0].inputs[0][0, 0], [2, 2, 2])  # type: ignore[union-attr]
    assert all(isinstance(each, FetchError) for each in fetched[1:])


THREADED = """
import threading
import numpy as np

at_work = threading.Barrier(4)

class Data:
    fetch_threads = 4
    def __len__(self):
        return 64
    def __getitem__(self, number):
        at_work.wait(timeout=150)
        return np.full((8, 8, 3), number, np.uint8), 0
"""


def test_a_dataset_may_be_read_by_several_threads(module: Callable[[str], str]) -> None:
    source = open_source(f"python:{module(THREADED)}:Data")
    table = source.list(lambda count: None).table
    samples = list(fetch_ahead(source, table.keys, table.sizes.tolist()))
    assert [key for key, _ in samples] == list(table.keys)
    arrays = [sample.inputs[0] for _, sample in samples if isinstance(sample, Sample)]
    assert [int(array[0, 0, 0]) for array in arrays] == list(range(64))
