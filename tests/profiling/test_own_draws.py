"""Datasets and functions that draw by themselves are refused unless one draw is meant."""

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.cli import main as command_line
from precache.errors import RecipeError
from tests.support.building import write_jpegs

CODE = """
import os
import random
import numpy as np

PHOTO = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)

class Data:
    memory = {{}}

    def __len__(self):
        return 16

    def __getitem__(self, n):
        {body}
"""

Source = Callable[[str], str]


@pytest.fixture
def source(module: Callable[[str], str]) -> Source:
    """A writer of datasets from the body of `__getitem__`, which returns each as a source."""
    return lambda body: f"python:{module(CODE.format(body=body))}:Data"


def moved(shift: str) -> str:
    return f"return np.roll(PHOTO, {shift}, 1), n % 2"


DRAWS = {
    "random": moved("random.randrange(24)"),
    "the system": moved("os.urandom(1)[0] % 24"),
    "the label": "return PHOTO, random.randrange(1000)",
    "one of two parts": "other = np.roll(PHOTO, random.randrange(24), 1); "
    "return {'image': PHOTO, 'other': other, 'label': 0}",
}

DRAWS_NOT = {
    "unused": "random.random(); np.random.rand(); return PHOTO, n % 2",
    "unread": "return {'image': PHOTO, 'seen': np.full((2, 2), random.random()), 'label': n % 2}",
    "seeded by the index": "random.seed(n); " + moved("random.randrange(24)"),
    "drawn once and kept": moved("self.memory.setdefault(n, random.randrange(24))"),
}

BOTH = {"image": {"ops": [{"op": "decode"}]}, "other": {"ops": [{"op": "decode"}]}}


def recipe_of(body: str, **field: Any) -> precache.Recipe:
    fields = BOTH if "'other'" in body else {"image": BOTH["image"]}
    return precache.Recipe.from_dict(
        {"fields": {name: {**of, **field} for name, of in fields.items()}}
    )


@pytest.mark.parametrize("body", DRAWS.values(), ids=DRAWS)
def test_a_dataset_that_draws_is_refused_unless_one_draw_is_meant(
    body: str, source: Source, tmp_path: Path
) -> None:
    name, store = source(body), tmp_path / "store"
    for ask in (precache.plan, precache.build, precache.ensure)[: 3 if "urandom" in body else 1]:
        with pytest.raises(
            RecipeError, match=f"{name} draws .* two reads of sample .*variants = 1"
        ):
            ask(name, store, recipe_of(body), address="serial")
    assert not [*store.glob("*/zarr.json")]
    assert precache.build(name, store, recipe_of(body, variants=1), address="serial").samples == 16


@pytest.mark.parametrize("body", DRAWS_NOT.values(), ids=DRAWS_NOT)
def test_a_dataset_of_which_all_reads_are_equal_is_built(
    body: str, source: Source, tmp_path: Path
) -> None:
    precache.build(source(body), tmp_path / "store", recipe_of(body), address="serial")


def test_the_flag_that_a_refusal_names_keeps_one_draw(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["build", source(DRAWS["random"]), str(tmp_path / "store"), "--address", "serial"]
    assert command_line.main(line) == 2
    said = " ".join(capsys.readouterr().err.split())
    flag = re.search(r"one draw of each sample: (--variants 1)", said)
    assert flag, said
    assert command_line.main([*line, *flag[1].split()]) == 0
    several = precache.Recipe.image(flip=True, variants=2, mode="RGB", bits=8)
    with pytest.raises(RecipeError, match=r"two reads .*--variants 1"):  # they are no consent
        precache.build(line[1], tmp_path / "several", several, address="serial")
    # A plan reads what decides, even if the recipe states its rows.
    stated = precache.Recipe.image(resize=(8, 8), interpolation="bilinear", mode="RGB", bits=8)
    with pytest.raises(RecipeError, match="two reads"):
        precache.plan(line[1], tmp_path / "stated", stated, address="serial", timing=False)


def test_samples_that_are_added_are_read_twice_too(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "return np.roll(PHOTO, random.randrange(24) if n > 15 else 0, 1), n % 2"
    name, store = source(body), tmp_path / "store"
    precache.build(name, store, recipe_of(body), address="serial")
    length = f"{name.removeprefix('python:').replace(':', '.')}.__len__"
    monkeypatch.setattr(length, lambda self: 24)
    for ask in (precache.plan, precache.build):
        with pytest.raises(RecipeError, match=r"two reads of sample (1[6-9]|2.)"):
            ask(name, store, recipe_of(body), address="serial")
    precache.build(name, store, recipe_of(body, variants=1), address="serial")


calls = itertools.count()


def drawn(image: np.ndarray) -> np.ndarray:
    return np.roll(image, np.random.randint(24), 1)  # noqa: NPY002 - as users draw


class Drawn:
    """A function with a generator of its own."""

    def __init__(self) -> None:
        self.own = random.Random()

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return np.roll(image, self.own.randrange(24), 1)


def seeded(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.roll(image, random.integers(24), 1)


def equal(image: np.ndarray) -> np.ndarray:
    shift = np.random.default_rng(int(image.sum())).integers(24)
    return np.roll(image, shift, 1) // 2


def rounded(image: np.ndarray) -> np.ndarray:
    """Return floats of which the last bits differ, as from sums on several threads."""
    return np.asarray(image / 255 * (1 + next(calls) % 2 * 1e-7), np.float32)


def function(name: str, **field: Any) -> precache.Recipe:
    op = {"op": "function", "function": f"{__name__}:{name}", **field.pop("op", {})}
    image = {"ops": [{"op": "decode"}, op, *field.pop("then", [])], **field}
    return precache.Recipe.from_dict({"fields": {"image": image}})


@pytest.mark.parametrize("name", ["drawn", "Drawn"])
def test_a_function_that_draws_is_refused_and_the_ways_out_build(name: str, tmp_path: Path) -> None:
    photos, store = write_jpegs(tmp_path / "photos", 8), tmp_path / "store"
    for ask in (precache.plan, precache.build, precache.ensure)[: 3 if name == "drawn" else 1]:
        with pytest.raises(RecipeError, match=f":{name} draws .* two calls for sample ") as error:
            ask(photos, store, function(name), address="serial")
    said = str(error.value)
    assert "random = true" in said
    assert "variants = 1 in [fields.image]" in said
    assert not [*store.glob("*/zarr.json")]
    precache.build(photos, store, function(name, variants=1), address="serial")
    several = function("seeded", op={"random": True}, variants=4)
    precache.build(photos, store, several, address="serial")


def test_a_function_is_refused_where_variants_share_its_result_or_its_code_begins_to_draw(
    tmp_path: Path,
) -> None:
    photos, store = write_jpegs(tmp_path / "photos", 8), tmp_path / "store"
    precache.build(photos, store, precache.Recipe.image(), address="serial")
    flipped = function("drawn", then=[{"op": "horizontal_flip"}], variants=2)
    for recipe in (function("drawn"), flipped):
        with pytest.raises(RecipeError, match=":drawn draws"):
            precache.build(photos, store, recipe, address="serial")


@pytest.mark.parametrize(("name", "dtype"), [("equal", "uint8"), ("rounded", "float32")])
def test_a_function_of_which_all_calls_agree_is_built(
    name: str, dtype: str, tmp_path: Path
) -> None:
    photos = write_jpegs(tmp_path / "photos", 8)
    recipe = function(name, op={"dtype": dtype})
    precache.build(photos, tmp_path / "store", recipe, address="serial")
