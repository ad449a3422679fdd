"""A dataset of rows that a test writes down, of fields of every kind."""

import functools
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from precache.recipe.recipe import Recipe

ROWS = "PRECACHE_TEST_ROWS"
"""Variable with the path of the file that has the rows."""

SOURCE = "python:tests.support.kinds:Rows"

FIELDS: dict[str, dict[str, Any]] = {
    "image": {"ops": [{"op": "decode"}], "codec": "image"},
    "caption": {"kind": "text"},
    "blob": {"kind": "bytes"},
    "tokens": {"kind": "ragged"},
    "points": {"kind": "ragged"},
    "boxes": {"kind": "boxes"},
    "joints": {"kind": "keypoints"},
}


@functools.lru_cache(1)
def _loaded(path: str, changed: int) -> Any:
    return pickle.loads(Path(path).read_bytes())


class Rows:
    """Rows of the file that `ROWS` names: dicts with a `key`, kept under it."""

    def __init__(self) -> None:
        self.path = os.environ[ROWS]

    def rows(self) -> Any:
        return _loaded(self.path, Path(self.path).stat().st_mtime_ns)

    def __len__(self) -> int:
        return len(self.rows())

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: v for name, v in self.rows()[number].items() if name != "key"}

    def key(self, number: int) -> str:
        return str(self.rows()[number]["key"])

    def fingerprint(self, number: int) -> str:
        return hashlib.sha256(pickle.dumps(self.rows()[number])).hexdigest()


class ReusedMemory(Rows):
    """Reads the arrays of each row into the memory of those of the row before."""

    memory: dict[str, Any] | None = None

    def __getitem__(self, number: int) -> dict[str, Any]:
        import torch

        if self.memory is None:  # not in __init__, as its content differs between processes
            self.memory = {
                "image": np.empty((152, 144, 3), np.uint8),
                "tokens": torch.empty(100, dtype=torch.int64),
                "blob": bytearray(100),
                "points": [],
            }
        given, memory = super().__getitem__(number), self.memory
        memory["image"][:] = given["image"]
        memory["tokens"][: len(given["tokens"])] = torch.tensor(given["tokens"])
        memory["blob"][: len(given["blob"])] = given["blob"]
        memory["points"][:] = list(given["points"])
        return {
            "image": memory["image"],
            "tokens": memory["tokens"][: len(given["tokens"])],
            "blob": memoryview(memory["blob"])[: len(given["blob"])],
            "points": memory["points"],
            "label": given["label"],
        }


def put_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write down the rows of the dataset, and return its source."""
    path.write_bytes(pickle.dumps(rows))
    os.environ[ROWS] = str(path)
    return SOURCE


def row(number: int, **values: Any) -> dict[str, Any]:
    """A row of every kind, of lengths from 0 up; values replace its own."""
    random = np.random.default_rng(number)
    points = random.random((number % 4, 3), np.float32)
    return {
        "key": f"row {number}",
        "image": random.integers(0, 256, (152, 144, 3), np.uint8),
        "caption": f"№ {number} " + "é" * (number * 5 % 17),
        "blob": random.bytes(number * 3 % 11),
        "tokens": random.integers(0, 1000, number * 7 % 13).tolist(),
        "points": points,
        "boxes": [[1, 2, 3.5, 9 + number % 99]] * (number % 3),
        "joints": 9 * random.random((number % 2, 5, 3)),
        "label": number % 3,
        **values,
    }


def recipe(*names: str, **changes: dict[str, Any]) -> Recipe:
    """A recipe of some fields, by default all, with changes of theirs."""
    fields = {name: {**FIELDS[name], **changes.get(name, {})} for name in names or FIELDS}
    return Recipe.from_dict({"fields": fields})


def expected(given: dict[str, Any]) -> dict[str, Any]:
    """A row as it is read: str, bytes and arrays."""
    read = {n: given[n] for n in ("caption", "blob") if n in given}
    for name, dtype, shape in (
        ("tokens", np.int64, (-1,)),
        ("points", np.float32, (-1, 3)),
        ("boxes", np.float32, (-1, 4)),
        ("joints", np.float32, (-1, 5, 3)),
    ):
        if name in given:
            read[name] = np.asarray(given[name], dtype).reshape(shape)
    return read


# --- functions of a recipe ----------------------------------------------------------------------


def shout(text: str) -> str:
    return text.upper()


def twice(text: str) -> str:
    return text + text


def longer(tokens: np.ndarray) -> list[int]:
    return [*tokens.tolist(), 7]


def dropped(tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return tokens[random.random(len(tokens)) < 0.5]
