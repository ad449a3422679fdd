"""A Python dataset that another process makes anew: it must hold the same, in the same order."""

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import precache
from precache.errors import SourceError
from precache_workers.sources.kinds import open_source

CODE = """
import dataclasses, os, random, threading, time, uuid
import numpy as np
from pathlib import Path

NAMES = "ant bee cat cow dog eel fox hen owl pig rat yak".split()
{above}

class Data:
    {members}

    def __init__(self):
        {made}

    def __len__(self):
        return 12

    def __getitem__(self, n):
        return np.full((8, 8, 3), n, np.uint8), n
"""

DIFFERING = [
    ("self.classes = list(set(NAMES))", "pass", "", r"dataset\.classes"),
    ("self.numbers = {c: n for n, c in enumerate(set(NAMES))}", "pass", "", r"dataset\.numbers"),
    ("self.files = [Path('/data', c) for c in set(NAMES)]", "pass", "", r"dataset\.files"),
    ("self.table = np.array(list(set(NAMES)), object)", "pass", "", r"dataset\.table"),
    ("self.rows = np.random.permutation(12)", "pass", "", r"dataset\.rows"),
    ("self.data = [np.full((2, 2, 2), ord(c[0])) for c in set(NAMES)]", "pass", "",
     r"dataset\.data"),
    ("self.base = Base()", "pass", "class Base(list):\n    pass\nBase.names = list(set(NAMES))",
     r"dataset\.base\.names"),
    ("pass", "pass", "CLASSES = list(set(NAMES))", r"user_code_\d+\.CLASSES"),
    ("pass", "NUMBERS = {c: n for n, c in enumerate(set(NAMES))}", "", r"dataset\.NUMBERS"),
    ("self.files = [f'/data/{n}/{c}' for n in range(9999) for c in set(NAMES)]", "pass", "",
     r"dataset\.files"),
]  # fmt: skip

HARMLESS = """\
self.lock, self.locks = threading.Lock(), [threading.Lock(), open(os.devnull), object()]
        self.began, self.run = time.time(), {"time": time.time(), "lock": threading.Lock()}
        self.draws, self.generators = random.Random(), [np.random.default_rng(), random.random]
        self.names, self.pid, self.id = set(NAMES), os.getpid(), uuid.uuid4().hex
        self.files = [f"/nodes/{os.getpid()}/{n}/{c}" for n in range(9) for c in NAMES]
        self.cache, self.big, self.scalar = {}, np.zeros((1 << 14, 1 << 14), np.uint8), np.ones(())
        Data.cached[f"{os.getpid()}.png"] = np.zeros(8)
        self.buffers = [np.random.rand(9, 12), np.random.randint(0, 9, (8, 8, 3))]
        self.itself = [self, self.names]
        self.itself.append(self.itself)"""


ELSEWHERE = """
import json, pickle, sys
from precache.errors import SourceError

def error_of(source):
    try:
        source.fetch(["3"], [-1])
        return ""
    except SourceError as error:
        return str(error)

print(json.dumps(list(map(error_of, pickle.load(sys.stdin.buffer)))))
"""

Module = Callable[[str], str]


def source_of(module: Module, made: str, members: str = "pass", above: str = "") -> str:
    return f"python:{module(CODE.format(made=made, members=members, above=above))}:Data"


def fetched_elsewhere(sources: Sequence[str]) -> list[str]:
    """List sources here, fetch a sample of each in another process, and return its errors."""
    opened = [open_source(source) for source in sources]
    for source in opened:
        source.list(lambda count: None)
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        input=pickle.dumps(opened),
        capture_output=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "5",
        },
        check=True,
    )
    errors: list[str] = json.loads(run.stdout)
    return errors


def test_an_order_that_differs_between_processes_is_refused_and_a_sorted_one_is_not(
    module: Module,
) -> None:
    sources = [source_of(module, *case) for *case, _ in DIFFERING]
    for *case, _ in DIFFERING:
        mended = [text.replace("set(NAMES)", "sorted(set(NAMES))") for text in case]
        mended = [text.replace("random.p", "random.default_rng(0).p") for text in mended]
        sources.append(source_of(module, *mended))
    harmless = source_of(module, HARMLESS, "cached = {}")
    *errors, none = fetched_elsewhere([*sources, harmless])
    assert not none
    for (*_, where), error, mended_error in zip(
        DIFFERING, errors, errors[len(DIFFERING) :], strict=False
    ):
        assert re.search(rf"user_code_\d+:Data: `{where}` is not what it was .*sorted\(set", error)
        assert not mended_error


def test_a_build_by_processes_refuses_a_class_map_of_a_set(module: Module, tmp_path: Path) -> None:
    source = source_of(module, "self.classes = list(set(NAMES))")
    with pytest.raises(SourceError, match=r"`dataset\.classes` is not what it was"):
        precache.build(source, tmp_path / "store", address="local", cpus=1)
    assert not (tmp_path / "store/commits").exists()
