"""Parsers of commands, made from the signatures and docstrings of public functions.

A parameter without a default that can be text, and `store`, are positional; others are flags of the
same name. A flag that is absent sets nothing, so the function's own default applies.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import precache
from precache.cli.commands import COMMAND
from precache.errors import UsageError
from precache.recipe.recipe import Recipe
from precache.storage.environment import FromEnvironment, with_environment

METAVARS = {"uri": "STORE", "older_than": "AGE", "memory_per_task": "SIZE", "report": "FILE"}
"""Placeholders that are not the last word of their parameter."""

_ELSEWHERE = re.compile(r"As (?:in )?(\w+)( takes them| took them)?\.")
"""Description of a parameter that is described by another function."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments of a command, and its description."""
    command, groups = COMMAND[name], dict[str, Any]({"": parser})
    example = f"\n\nexample:\n  precache {name} {command.example}" if command.example else ""
    parser.description = documented(function_of(name))[0] + example
    headings = headings_of(name)
    for function, parameter in parameters(name):
        group = headings.get(parameter.name, "")
        to = groups.get(group) or groups.setdefault(group, parser.add_argument_group(group))
        if parameter.name == "recipe":
            _add_recipe(parser)
        else:
            _add(to, function, parameter)
    for flag, settings in command.flags.items():
        parser.add_argument(flag, **settings)
    parser.set_defaults(json=False)
    if name != "view":
        text = "Print one JSON object on standard output."
        parser.add_argument("--json", action="store_true", help=text)
    if command.model:  # whose flags are too many for a line
        places = parser.format_usage().partition("[--json]")[2].split()
        parser.usage = " ".join(["%(prog)s [options]", *places])


def function_of(name: str) -> Callable[..., Any]:
    """Return the public function that a command calls."""
    function: Callable[..., Any] = getattr(precache, COMMAND[name].function or name)
    return function


def parameters(name: str) -> Iterator[tuple[Callable[..., Any], inspect.Parameter]]:
    """Yield the parameters that have arguments, each with the function that documents it."""
    function = function_of(name)
    own = inspect.signature(function).parameters
    apart = {"tick"}
    if "recipe" in own:  # functions of a recipe that the command line names are the user's own
        apart.add("run_functions")
    for parameter in own.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            for option, more in inspect.signature(precache.build).parameters.items():
                if option in headings_of(name).keys() - apart - own.keys():
                    yield precache.build, more
        elif parameter.name not in apart:
            yield function, parameter
    if "storage_options" in own and "storage_options_env" not in own:  # which only a shell needs
        more = inspect.signature(with_environment).parameters["storage_options_env"]
        yield with_environment, more


def headings_of(name: str) -> Mapping[str, str]:
    """Return the options that a function's model declares, with their headings in the help."""
    if not COMMAND[name].model:
        return {}
    from precache_workers.planning import options

    classes = getattr(options, COMMAND[name].model).__mro__
    fields = {one.__name__: getattr(one, "model_fields", ()) for one in classes}
    texts = {kind: f"{kind.removesuffix('Options').lower()} options" for kind in fields}
    return {option: texts[kind] for kind, names in fields.items() for option in names}


@functools.cache
def documented(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and of each parameter, from its NumPy docstring.

    The flags of optional parameters stand in place of their names.
    """
    own = inspect.signature(function).parameters
    flags = {name: flag_of(name) for name, each in own.items() if each.default is not each.empty}
    plain = inspect.getdoc(function) or ""
    spelled = re.sub(r"(?<!`)`(\w+)`", lambda match: flags.get(match[1], match[0]), plain)
    head, *sections = re.split(r"\n(?=\w[\w ]*\n---)", spelled)
    texts: dict[str, str] = {}
    for section in sections:
        title, _, body = section.partition("\n")
        for names, lines in re.findall(r"^(\w[\w, ]*)\n((?:    .*\n?|\n)+)", body, re.MULTILINE):
            if title == "Parameters":
                text = _without_marks(" ".join(lines.split()))
                first, *others = names.split(", ")
                refer = first in flags and not _ELSEWHERE.match(text)
                same = f"See {flags[first]}." if refer else text
                texts |= {first: text} | dict.fromkeys(others, same)
    return _without_marks(head.strip()), texts


def _without_marks(text: str) -> str:
    return re.sub(r"``(.+?)``|`(\w[\w.]*)`", lambda match: match[1] or match[2], text)


def help_of(function: Callable[..., Any], name: str) -> str:
    """Describe a parameter; a text such as "As in build." leads to that function."""
    text = documented(function)[1].get(name, "")
    other = _ELSEWHERE.match(text)
    return help_of(getattr(precache, other[1]), name) if other else text


def _kinds(annotation: Any) -> list[Any]:
    """Return the types of a union without None, or the type."""
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return [kind for kind in get_args(annotation) if kind is not NoneType]


def _add(to: Any, function: Callable[..., Any], parameter: inspect.Parameter) -> None:
    """Add the argument of a parameter."""
    name, default = parameter.name, parameter.default
    kinds = _kinds(eval(parameter.annotation, vars(sys.modules[function.__module__])))
    origins = {get_origin(kind): kind for kind in kinds}
    text = help_of(function, name)
    if type(default) in (int, float, str) and default != "":
        text += f" Default {default:g}." if type(default) is not str else f" Default {default}."
    settings: dict[str, Any] = {
        "help": text.replace("%", "%%"),
        "metavar": METAVARS.get(name, name.rpartition("_")[2].upper()),
    }
    required = default is parameter.empty
    if str in kinds and (required or name == "store"):
        to.add_argument(name, nargs=None if required else "?", **settings)
        return
    if bool in kinds:
        del settings["metavar"]
        plain = default is False and name != "progress"  # which is shown by default
        settings["action"] = "store_true" if plain else argparse.BooleanOptionalAction
    elif Literal in origins:
        settings |= {"choices": get_args(origins[Literal]), "metavar": None}
    elif tuple in origins:
        settings |= {"type": _size, "metavar": "N|HxW"}
    elif Mapping in origins:
        of, read = _PAIRS.get(name, ("VALUE", _pair))
        settings["help"] = re.sub(r'\{"(\w+)": "?([^"}]+)"?\}', r"\1=\2", settings["help"])
        settings |= {"type": read, "action": "append", "metavar": f"KEY={of}"}
    elif Sequence in origins:
        text_kind = str in _kinds(get_args(origins[Sequence])[0])
        settings |= {"action": "append"} if text_kind else _TIMES
    elif str not in kinds:
        settings |= {"type": kinds[0], "metavar": "N"}
    settings |= {"dest": name.removesuffix("_env"), "default": argparse.SUPPRESS}
    to.add_argument(flag_of(name), required=required, **settings)


def flag_of(name: str) -> str:
    """Return the flag of a parameter."""
    return f"--{name.replace('_', '-')}"


# --- values -------------------------------------------------------------------------------------


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of pixels from 1 up nor HxW, such as 224x224"
        )
    return (int(sides[0]), int(sides[1])) if len(sides) == 2 else int(text)


def _number_or_file(text: str) -> Any:
    """Read a number, or a file of measured times."""
    try:
        return float(text)
    except ValueError:
        from precache.simulation.model import read_times

        return read_times(text)


def _pair(text: str, of: str = "KEY=VALUE", secret: bool = False) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        shown = "; not shown, as it may be a secret" if secret else f", not {text!r}"
        raise argparse.ArgumentTypeError(f"expected {of}{shown}")
    return key, value


def _storage_option(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE; the value is parsed if it is JSON, unless the option takes text."""
    from precache.storage.service_options import TEXT_OPTIONS

    key, value = _pair(text, secret=True)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return key, value
    looks_like_number = isinstance(parsed, int | float)  # or like true
    return key, value if looks_like_number and key in TEXT_OPTIONS else parsed


def _storage_option_env(text: str) -> tuple[str, FromEnvironment]:
    key, variable = _pair(text, "KEY=VARIABLE", secret=True)
    try:
        return key, FromEnvironment(variable)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_TIMES = {"type": _number_or_file, "metavar": "N|FILE"}
_PAIRS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "storage_options": ("VALUE", _storage_option),
    "storage_options_env": ("VARIABLE", _storage_option_env),
}
"""Placeholder and type of the values of pairs, by parameter."""


# --- the recipe ---------------------------------------------------------------------------------


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recipe")
    text = "TOML file or JSON text, in place of this group's flags."
    group.add_argument("--recipe", metavar="FILE", default=argparse.SUPPRESS, help=text)
    for parameter in inspect.signature(Recipe.image).parameters.values():
        _add(group, Recipe.image, parameter)


def read_recipe(given: Mapping[str, Any]) -> Recipe:
    """Return the recipe that flags, a file or JSON text describe."""
    names = inspect.signature(Recipe.image).parameters
    values = {name: given[name] for name in names if name in given}
    recipe = given.get("recipe")
    if recipe is None:
        return Recipe.image(**values)
    if values:
        flags = ", ".join(map(flag_of, values))
        raise UsageError(f"--recipe {recipe} and {flags} both say what to do; drop one")
    if not recipe.lstrip().startswith("{"):
        return Recipe.from_toml(recipe)
    try:
        return Recipe.from_dict(json.loads(recipe))
    except ValueError as error:
        raise UsageError(f"--recipe is neither a TOML file nor JSON: {error}") from None
