"""Identities of the code that computes a recipe's pixels: digests of libraries' outputs and code.

Besides parameters, the outputs of libraries (`behaviour`) and the code of custom functions
(`precache_workers.sources.code_digest`) decide the pixels. Each of them has a name and an identity:
its digest, or, in versions of older releases, the versions of libraries
(`precache_workers.planning.recorded_code`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from pydantic import TypeAdapter, ValidationError

from precache.codecs.image import import_zstd
from precache.errors import MismatchError
from precache.recipe.base import canonical_json
from precache.recipe.ops import (
    OPS_REVISION,
    Decode,
    Function,
    Op,
    RandomResizedCrop,
    Resize,
    is_random,
)
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import field_of
from precache.store.json_documents import Attributes
from precache_workers.ops.behaviour import (
    RANDOM,
    Outputs,
    Step,
    computed,
    digest_of,
    first_difference,
    installed_version,
    outputs_of,
    steps_of,
    streams,
)
from precache_workers.sources.code_digest import code_digest

Rule = Callable[[Recipe], Mapping[str, str]]
"""Recipe -> identities by name, of the library ops and functions that decide its pixels."""


def named_ops(recipe: Recipe) -> Iterator[tuple[str, Op, Step | None]]:
    """Yield (name, op, step) of each op of each field; functions have no step."""
    for field in recipe.fields.values():
        for op, step in zip(field.ops, steps_of(field), strict=True):
            yield _name(op, step), op, step


def behaviours(recipe: Recipe) -> dict[str, Outputs]:
    """Return the outputs of each step with this machine's libraries, by name of the step."""
    outputs = {name: outputs_of(step) for name, _, step in named_ops(recipe) if step is not None}
    if any(map(_draws, recipe.functions)):
        outputs[RANDOM] = streams()
    return outputs


def require_same_outputs(recipe: Recipe, expected: Mapping[str, Outputs]) -> None:
    """Check that this process computes the expected outputs.

    Raises
    ------
    MismatchError
        An output differs.
    """
    for name, op, step in named_ops(recipe) if expected else ():
        known = RANDOM if _draws(op) else name
        outputs = computed(step) if step is not None else streams()
        if digest_of(expected.get(known, outputs)) != digest_of(outputs):
            libraries = step.libraries if step is not None else ("numpy",)
            versions = " and ".join(
                f"{library} {installed_version(library)}" for library in libraries
            )
            probe, far = first_difference(expected[known], outputs)
            raise MismatchError(
                f"{os.uname().nodename} computes other pixels than the machine that planned the "
                f"build: {known} by {versions}, first of the probe {probe}: {far}; "
                "install the same libraries on both; on one machine, run the same command again"
            )


def function_digests(recipe: Recipe) -> dict[str, str]:
    """Return the code digest of each custom function that declares no version, by function."""
    return {op.function: code_digest(op.function) for op in recipe.functions if not op.version}


def digests(recipe: Recipe) -> dict[str, str]:
    """Return this machine's digests of the ops and functions that decide the pixels, by name."""
    by_name = {name: digest_of(outputs) for name, outputs in behaviours(recipe).items()}
    return by_name | function_digests(recipe)


def with_code(recipe: Recipe, code: Mapping[str, str]) -> Recipe:
    """Return the recipe with `Operation.code` set for each op whose name is in `code`."""

    def known(op: Op, step: Step | None) -> Op:
        name = _name(op, step)
        if name not in code:
            return op
        drawn = code.get(RANDOM, NOTHING) if _draws(op) else NOTHING
        return op.with_code(code[name] if drawn == NOTHING else f"{code[name]} {drawn}")

    fields = {
        name: field.model_copy(update={"ops": tuple(map(known, field.ops, steps_of(field)))})
        for name, field in recipe.fields.items()
    }
    return recipe.model_copy(update={"fields": fields})


def decides(recipe: Recipe) -> dict[str, str]:
    """Return the identities of ops and functions that decide the pixels, by name."""
    identities: dict[str, str] = _versions(recipe)
    for name, op, step in named_ops(recipe):
        if not (isinstance(op, Function) and op.version):
            code = op.code or _code(op, step)
            identities |= libraries_in(code) or {name: code}
    return {name: code for name, code in identities.items() if code != NOTHING}


def _versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions that functions declare.

    If another op has the same function without a version, callers replace it by the code's digest.
    """
    return {op.function: op.version for op in recipe.functions if op.version}


def _code(op: Op, step: Step | None) -> str:
    """Return the digest of an op on this machine."""
    if step is not None:
        return digest_of(outputs_of(step))
    code = code_digest(_name(op, step))
    return f"{code} {digest_of(streams())}" if _draws(op) else code


def _name(op: Op, step: Step | None) -> str:
    if step is not None:
        return step.name
    assert isinstance(op, Function)  # only they have no step
    return op.function


def _draws(op: Op) -> bool:
    """Return True if the op depends on streams of random numbers."""
    return isinstance(op, Function) and op.random and not op.version


NOTHING = "{}"
"""Identity of an op for which older releases recorded no library."""


def libraries_in(code: str) -> dict[str, str]:
    """Return the versions of libraries in an older release's identity; empty for a digest."""
    versions: dict[str, str] = {}
    if code.startswith("{"):
        with contextlib.suppress(ValidationError):  # a pulled log may hold anything
            versions = _VERSIONS.validate_json(code)
    return versions


_VERSIONS = TypeAdapter(dict[str, str])


def by_libraries(known: Mapping[str, str]) -> Rule:
    """Return the rule of older releases: versions of libraries, and the code of functions.

    Parameters
    ----------
    known
        Versions of libraries in place of those installed.
    """

    def rule(recipe: Recipe) -> dict[str, str]:
        versions: dict[str, str] = {}
        for name, op, _ in named_ops(recipe):
            if isinstance(op, Function):
                versions[name] = op.version or op.code or code_digest(name)
            else:
                versions |= {library: plain_version(library, known) for library in libraries_of(op)}
        return versions

    return rule


def libraries_of(op: Op) -> tuple[str, ...]:
    """Return the libraries whose versions were an op's identity in older releases."""
    if isinstance(op, Decode):
        return "simplejpeg", "pillow"
    return ("torch",) if isinstance(op, Resize | RandomResizedCrop) else ()


def plain_version(library: str, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the version of a library without its build tag, such as ``+cpu``."""
    return (known.get(library) or installed_version(library)).split("+")[0]


def as_recorded(attributes: Attributes) -> Rule:
    """Return the rule by which a version was built, from its metadata."""
    if not attributes.decides:
        return by_libraries(attributes.libraries)

    def rule(recipe: Recipe) -> dict[str, str]:
        identities = _versions(recipe)
        for name, op, _ in named_ops(recipe):
            if isinstance(op, Function) and op.version:
                continue
            names = (name,) if name in attributes.decides else libraries_of(op)
            identities |= {known: attributes.decides.get(known, "") for known in names}
        return identities

    return rule


def ops_digest(recipe: Recipe, name: str, count: int, rule: Rule = decides) -> str:
    """Return SHA-256 (hex) of everything that decides the output of a field's first `count` ops.

    Parameters
    ----------
    recipe
        Recipe that has a field for each stored array.
    """
    field = recipe.fields[name]
    ops = field.ops[:count]
    part = recipe.model_copy(update={"fields": {name: field.model_copy(update={"ops": ops})}})
    random = any(map(is_random, ops))
    meaning = {
        "ops": [op.model_dump(mode="json") for op in ops],
        "input": [field_of(name)] if field.input is None else field.input,
        "seed": recipe.seed if random else None,
        "shrunk": shrink_to(field) if count == 1 else None,
        "decodes": field.decodes,
        "revision": OPS_REVISION,
        "versions": dict(rule(part)),
    }
    if random and field.first_variant:
        meaning["variant"] = field.first_variant
    return hashlib.sha256(canonical_json(meaning)).hexdigest()


def shrink_to(field: Field) -> int | None:
    """Return the shorter side below which DCT-scaled decoding must not go; None if not declared."""
    match field.ops[:2]:
        case (Decode(scaled=True), Resize(size=size)):
            return max(size) if isinstance(size, tuple) else size
        case _:
            return None


LIBRARIES = ("precache", "torch", "numpy", "numcodecs", "simplejpeg", "pillow")
"""Distributions whose versions receipts record for information."""


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions that receipts record; ``zstd`` is the library that encodes images."""
    versions = {name: installed_version(name) for name in LIBRARIES}
    return versions | {"zstd": import_zstd().zstd_version}
