"""Functions and classes of the user's own, given as they are where a recipe is made in Python."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import transforms
from precache.errors import PrecacheError, RecipeError
from precache.recipe.ops import CenterCrop, Decode, Resize
from precache.recipe.recipe import Field, Recipe
from tests.support.building import build_here, pixels, write_jpegs


def shift(image: np.ndarray, by: int = 1) -> np.ndarray:
    return image + np.uint8(by)


class Shift:
    made = 0

    def __init__(self, by: int = 1) -> None:
        Shift.made += 1
        self.by = np.uint8(by)

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return image + self.by


instance = Shift(3)
alias = functools.partial(shift, by=2)


def recipe_of(*ops: Any) -> Recipe:
    own = (Decode(), Resize(size=(8, 8)), CenterCrop(size=8), *ops)
    return Recipe(fields={"image": Field(ops=own)})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jpegs(tmp_path_factory.mktemp("callables") / "in", 5)


@pytest.fixture(scope="module")
def plain(photos: Path) -> dict[str, np.ndarray]:
    build_here(photos, photos.parent / "plain.store", recipe_of())
    return pixels(photos.parent / "plain.store")


@pytest.mark.parametrize(
    ("op", "name", "params", "by"),
    [
        (shift, "shift", {}, 1),
        (functools.partial(shift, by=7), "shift", {"by": 7}, 7),
        (alias, "shift", {"by": 2}, 2),
        (Shift, "Shift", {}, 1),
        (functools.partial(Shift, by=5), "Shift", {"by": 5}, 5),
        (instance, "instance", {}, 3),
        (np.flipud, "numpy:flipud", {}, None),
    ],
)
def test_what_has_a_name_in_a_module_is_an_op(
    op: Any,
    name: str,
    params: dict[str, Any],
    by: int | None,
    photos: Path,
    plain: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    found = recipe_of(op)
    name = name if by is None else f"tests.recipe.test_callables:{name}"
    assert (found.functions[0].function, found.functions[0].params) == (name, params)
    assert Recipe.from_dict(found.to_dict()) == found
    build_here(photos, tmp_path / "store", found)
    made = pixels(tmp_path / "store")
    assert made.keys() == plain.keys()
    for key, row in plain.items():
        np.testing.assert_array_equal(made[key], row[:, ::-1] if by is None else row + by)


def local() -> Any:
    def inside(image: np.ndarray) -> np.ndarray:
        return image

    return inside


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda image: image, r"lambda.* has no name in a module"),
        (local(), r"inside.* has no name in a module"),
        (Shift(4), r"has no name in a module"),
        (instance.__call__, r"has no name in a module"),
        (functools.partial(shift, np.zeros(1)), "has positional arguments; give them by name"),
        (functools.partial(shift, by=np.zeros(1)), "params must be what JSON can hold"),
        (7, "ops"),
        (Decode, r"write Decode\(…\)"),
        (transforms.HorizontalFlip, r"transforms\.HorizontalFlip changes batches .* to a Loader"),
        (transforms.HorizontalFlip(), r"transforms\.HorizontalFlip changes batches .* to a Loader"),
    ],
)
def test_what_workers_cannot_import_is_refused(op: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(op)


def test_functions_of_the_script_that_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(image: np.ndarray) -> np.ndarray:
        return image

    main = __import__("__main__")
    mine.__module__, mine.__qualname__ = "__main__", "mine"
    monkeypatch.setattr(main, "mine", mine, raising=False)
    with pytest.raises(RecipeError, match=r"is in the script that runs.*put it into a module"):
        recipe_of(mine)


def halves(image: np.ndarray) -> np.ndarray:
    return image / np.float32(2)


def plane(image: np.ndarray) -> np.ndarray:
    return image[..., 0]


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (functools.partial(Shift, to=3), r"callables:Shift\(\*\*{'to': 3}\) failed.*: Type"),
        (halves, "codec 'image' stores uint8, not float32; use zstd or raw"),
        (
            plane,
            r"rows of uint8 \(8, 8\), and codec image .*; return \(H, W, C\) from the f",
        ),
    ],
)
def test_what_makes_no_image_is_refused_as_it_is_built(
    op: Any, why: str, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(PrecacheError, match=why):
        build_here(photos, tmp_path / "store", recipe_of(op))
