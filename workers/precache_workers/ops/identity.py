"""Identities of the code that computes a recipe's pixels: digests of libraries' outputs and code.

Besides parameters, the outputs of libraries (`behaviour`) and the code of custom functions
(`precache_workers.user_code.identity`) decide the pixels. Each of them has a name, and its digest,
or the version that a function declares, is its identity.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping

from precache.codecs.image import import_zstd
from precache.errors import MismatchError
from precache.recipe.base import canonical_json
from precache.recipe.ops import OPS_REVISION, Function
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import field_of
from precache_workers.ops.behaviour import (
    Outputs,
    Step,
    computed,
    digest_of,
    first_difference,
    installed_version,
    outputs_of,
    steps_of,
)
from precache_workers.user_code.identity import code_digest
from precache_workers.user_code.loading import require_unchanged


def recipe_steps(recipe: Recipe) -> Iterator[Step]:
    """Yield the step of each op of each field."""
    for field in recipe.fields.values():
        yield from steps_of(field)


def _own_steps(recipe: Recipe) -> list[Step]:
    return [step for step in recipe_steps(recipe) if not isinstance(step.op, Function)]


def behaviours(recipe: Recipe) -> dict[str, Outputs]:
    """Return the outputs of each step with this machine's libraries, by name of the step.

    Functions of the user have none: their code identifies them.
    """
    return {step.name: outputs_of(step) for step in _own_steps(recipe)}


def require_same_outputs(recipe: Recipe, expected: Mapping[str, Outputs]) -> None:
    """Check that this process computes the expected outputs.

    Raises
    ------
    MismatchError
        An output differs.
    """
    for step in _own_steps(recipe) if expected else ():
        outputs = computed(step)
        if expected.get(step.name, outputs) != outputs:
            versions = " and ".join(
                f"{library} {installed_version(library)}"
                for library in step.op.libraries or ("numpy",)
            )
            first = first_difference(expected[step.name], outputs)
            raise MismatchError(
                f"{os.uname().nodename} computes other pixels than the machine that planned the "
                f"build: {step.name} by {versions}, first of the probe {first}; "
                "install the same libraries on both; on one machine, run the same command again"
            )


def function_digests(recipe: Recipe) -> dict[str, str]:
    """Return the code digest of each custom function that declares no version, by function.

    Raises
    ------
    RecipeError
        A function has no source here, or this process changed a value that it reaches.
    """
    for op in recipe.functions:
        require_unchanged(op.function)
    return {op.function: code_digest(op.function) for op in recipe.functions if not op.version}


def decides(recipe: Recipe) -> dict[str, str]:
    """Return this machine's identities of the ops and functions that decide the pixels, by name."""
    digests = {name: digest_of(outputs) for name, outputs in behaviours(recipe).items()}
    return _versions(recipe) | digests | function_digests(recipe)


def _versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions that functions declare.

    If another op has the same function without a version, callers replace it by the code's digest.
    """
    return {op.function: op.version for op in recipe.functions if op.version}


def ops_digest(recipe: Recipe, name: str, count: int, decided: Mapping[str, str]) -> str:
    """Return SHA-256 (hex) of everything that decides the output of a field's first `count` ops.

    Whether there is an output may differ: `decode` of 16 bits refuses less if these are stated.

    Parameters
    ----------
    recipe
        Recipe that has a field for each stored array.
    decided
        Identities of its ops and functions, by name, as `decides` returns them.
    """
    field = recipe.fields[name]
    ops = tuple(op.without_refusals() for op in field.ops[:count])
    part = recipe.model_copy(update={"fields": {name: field.model_copy(update={"ops": ops})}})
    identities = _versions(part)  # that decide its pixels; empty if unknown
    for step in recipe_steps(part):
        if not (isinstance(step.op, Function) and step.op.version):
            identities[step.name] = decided.get(step.name, "")
    random = any(op.is_random for op in ops)
    meaning = {
        "ops": [op.model_dump(mode="json") for op in ops],
        "input": _start(name, field),
        "seed": recipe.seed if random else None,
        "decodes": field.decodes,
        "revision": OPS_REVISION,
        "versions": identities,
        "kind": field.kind,
        "variant": field.first_variant if random else None,
    }
    return hashlib.sha256(canonical_json(meaning)).hexdigest()


def _start(name: str, field: Field) -> object:
    return [field_of(name)] if field.input is None else field.input


def starts_of(name: str, field: Field) -> dict[str, tuple[str, Field]]:
    """Return a name for each part of a sample that decides a field: its own, and of those that it
    follows; with the field that starts from it."""
    follow = field.follow
    leaders = () if follow is None else zip(follow.names, follow.fields, strict=True)
    return {json.dumps(_start(*each)): each for each in ((name, field), *leaders)}


def all_starts(recipe: Recipe) -> dict[str, tuple[str, Field]]:
    """Return the parts of a sample that a recipe's fields start from, in the order of a store."""
    starts: dict[str, tuple[str, Field]] = {}
    for name, field in recipe.fields.items():
        starts |= starts_of(name, field)
    return {start: starts[start] for start in sorted(starts)}


LIBRARIES = ("precache", "torch", "numpy", "numcodecs", "simplejpeg", "pillow")
"""Distributions whose versions receipts record for information."""


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions that receipts record; ``zstd`` is the library that encodes images."""
    versions = {name: installed_version(name) for name in LIBRARIES}
    return versions | {"zstd": import_zstd().zstd_version}
