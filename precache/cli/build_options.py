"""Command-line arguments of a build, derived from the models of its options."""

from __future__ import annotations

import argparse
import inspect
import json
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from precache.cli.arguments import add_json, add_storage_options
from precache.errors import UsageError
from precache.recipe.ops import Interpolation, Mode
from precache.recipe.recipe import Recipe
from precache_workers.planning.options import (
    BuildOptions,
    Flag,
    RunOptions,
    SourceOptions,
    flag_of,
    read_options,
)

_RECIPE_FLAGS = (
    "resize",
    "crop",
    "random_resized_crop",
    "flip",
    "interpolation",
    "mode",
    "codec",
    "seed",
    "variants",
    "bits",
)

_APART = ("run_functions", "storage_options_env")
"""Options that `add_options` skips; `refresh` and `add_storage_options` add their flags."""


def add_build_arguments(to: argparse.ArgumentParser, **descriptions: str) -> Any:
    """Add the arguments of a build; returns the argument group of `RunOptions`.

    Parameters
    ----------
    descriptions
        Help texts, by option, that replace the model's.
    """
    add_source(to)
    to.add_argument("store", metavar="STORE", help="folder of the store (path or URL)")
    add_recipe_options(to)
    return add_options(to, BuildOptions, **descriptions)


def add_options(to: argparse.ArgumentParser, model: type[RunOptions], **descriptions: str) -> Any:
    """Add the flags of a model and ``--json``; returns the argument group of `RunOptions`."""
    groups: dict[str, Any] = {}
    for part in model.__mro__:
        title = vars(part).get("group")
        if title is not None:
            groups[title] = to.add_argument_group(title)
            for name in inspect.get_annotations(part):
                if name in model.model_fields and name not in _APART:
                    add_option(groups[title], name, descriptions.get(name))
    run = groups[RunOptions.group]
    add_json(run, "JSON on stdout, one object per version")
    return run


def add_option(to: Any, name: str, description: str | None = None) -> None:
    """Add the flag of one option; if the flag is absent, the model's default applies."""
    if name == "storage_options":
        add_storage_options(to)
        return
    field = BuildOptions.model_fields[name]
    flag = next((entry for entry in field.metadata if isinstance(entry, Flag)), Flag())
    text = description or field.description or ""
    if type(field.default) in (int, float) and "default" not in text:
        text += f"; default {field.default:g}"
    kind = _value_type(field.annotation)
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": flag.metavar}
    if kind is bool and field.default is None:
        settings = {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
    elif kind is bool:
        action = "store_false" if flag.turns_off else "store_true"
        settings = {"action": action, "default": flag.turns_off}
    elif get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    elif get_origin(kind) is tuple:
        settings |= {"action": "append", "default": []}
    elif get_origin(kind) is dict:
        settings |= {"action": "append", "default": [], "type": _pair}
    elif kind in (int, float):
        settings["type"] = kind
    to.add_argument(flag_of(name), dest=name, help=text.replace("%", "%%"), **settings)


def _value_type(annotation: Any) -> Any:
    """Return the type of an option's value, without None and without metadata."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def read_keywords(
    options: argparse.Namespace, model: type[SourceOptions] = BuildOptions, **own: Any
) -> dict[str, Any]:
    """Return the options that were given, as keyword arguments of `precache.build`.

    Parameters
    ----------
    own
        Options that the command itself sets.

    Raises
    ------
    UsageError
        A value is invalid; the message names its flag.
    """
    values = {name: value for name, value in vars(options).items() if name in model.model_fields}
    read_options(model, values | own, flag_of)
    return values | own


def add_source(to: argparse.ArgumentParser) -> None:
    """Add the argument ``SOURCE``."""
    to.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images (path or URL), one sub-folder per class; tar, Parquet and zip "
        "files, or tables of URIs, such as 'data/*.parquet' and 'shards-{0000..0099}.tar'; or "
        "python:module:factory for a torch Dataset",
    )


def add_recipe_options(to: argparse.ArgumentParser) -> None:
    """Add the flags that `read_recipe` reads."""
    recipe = to.add_argument_group("recipe")
    recipe.add_argument(
        "--recipe", metavar="FILE", help="TOML file or JSON text, in place of this group's flags"
    )
    recipe.add_argument("--pipeline", dest="recipe", help=argparse.SUPPRESS)
    recipe.add_argument(
        "--resize", type=_size, metavar="N|HxW", help="shorter side, or exact height and width"
    )
    recipe.add_argument("--crop", type=_size, metavar="N|HxW", help="centre crop after the resize")
    recipe.add_argument(
        "--random-resized-crop",
        type=_size,
        metavar="N|HxW",
        help="a random part of the image, resized to this",
    )
    recipe.add_argument(
        "--flip", action="store_true", default=None, help="mirror each image with probability 1/2"
    )
    recipe.add_argument(
        "--variants",
        type=_positive,
        metavar="K",
        help="keep K random realisations of each sample: epoch e reads number e modulo K; needed "
        "with random ops",
    )
    recipe.add_argument(
        "--interpolation",
        choices=get_args(Interpolation),
        help="bilinear (default) and bicubic are antialiased; nearest keeps the values of masks",
    )
    recipe.add_argument(
        "--mode", choices=get_args(Mode), help="colours; default RGB; P for the values of masks"
    )
    recipe.add_argument(
        "--bits",
        type=int,
        choices=range(8, 17),
        metavar="N",
        help="significant bits of images that are stored with 16; default 16",
    )
    recipe.add_argument(
        "--codec",
        choices=("image", "raw", "zstd"),
        help="image (lossless, smallest; default), raw (fastest, largest), zstd (any reader)",
    )
    recipe.add_argument("--seed", type=int, help="seed of random ops, in the recipe; default 0")


def _size(text: str) -> int | tuple[int, int]:
    height, by, width = text.lower().partition("x")
    try:
        return (_positive(height), _positive(width)) if by else _positive(height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of pixels from 1 up nor HxW, such as 224x224"
        ) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def read_recipe(options: argparse.Namespace) -> Recipe:
    """Return the recipe that flags, a file or JSON text describe."""
    values = {n: getattr(options, n) for n in _RECIPE_FLAGS if getattr(options, n) is not None}
    resizes = values.keys() & {"resize", "random_resized_crop"}
    if "interpolation" in values and not resizes and options.recipe is None:
        raise UsageError("--interpolation says how to resize; give --resize with it")
    if options.recipe is None:
        return Recipe.image(**values)
    if values:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in values)
        raise UsageError(f"--recipe {options.recipe} and {flags} both say what to do; drop one")
    if options.recipe.lstrip().startswith("{"):
        return _recipe_of_json(options.recipe)
    return Recipe.from_toml(options.recipe)


def _recipe_of_json(text: str) -> Recipe:
    try:
        return Recipe.from_dict(json.loads(text))
    except ValueError as error:
        raise UsageError(f"--recipe is neither a TOML file nor JSON: {error}") from None
