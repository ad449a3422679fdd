"""Exceptions and signals of the code of a sample end neither a build nor its worker unnamed."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache_workers.sources.kinds import open_source

SOURCE = "python:tests.runtime.test_sample_failures:{}"


class OwnError(BaseException):
    """As the panics of extensions in Rust are."""


RAISED: dict[str, type[BaseException]] = {
    error.__name__: error
    for error in (ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, OwnError)
}


class Raising:
    """A data set of which each item but the last raises another exception."""

    def __len__(self) -> int:
        return len(RAISED) + 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index < len(RAISED):
            raise list(RAISED.values())[index]
        return np.zeros((8, 8, 3), np.uint8), 0


class Plain:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((8, 8, 3), index, np.uint8), 0


def fail(image: np.ndarray) -> np.ndarray:
    """Raise another exception for each sample but the last ones."""
    number = int(image[0, 0, 0])
    if number < len(RAISED):
        raise list(RAISED.values())[number]
    return image


def by(function: str) -> precache.Recipe:
    op = {"op": "function", "function": f"{__name__}:{function}"}
    return precache.Recipe.from_dict({"fields": {"image": {"ops": [op]}}})


@pytest.mark.parametrize("address", ["serial", pytest.param("local", marks=pytest.mark.heavy)])
def test_what_the_code_of_a_sample_raises_is_its_failure(address: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "address": address,
        "cpus": None if address == "serial" else 1,
        "max_failures": 9,
    }
    for source, recipe, said in (
        ("Raising", precache.Recipe.image(), "sample {} of "),
        ("Plain", by("fail"), "fail"),
    ):
        how |= {"run_functions": True, "accept_missing": True}
        result = precache.build(SOURCE.format(source), tmp_path / source, recipe, **how)
        holes = dict(result.holes)
        assert set(holes) == {str(number) for number in range(len(RAISED))}
        for number, name in enumerate(RAISED):
            assert said.format(number) in holes[str(number)]
            assert name in holes[str(number)]


def test_ctrl_c_stops_what_fetches_on_the_main_thread() -> None:
    source = open_source(SOURCE.format("Raising"))
    keys = [str(list(RAISED).index("KeyboardInterrupt"))]
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        source.fetch(keys, [-1])
