"""What differs between a version and what is asked for: recipe, source, code, libraries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from precache.errors import RecipeError
from precache.recipe.ops import Function
from precache.recipe.recipe import Recipe
from precache.store.attributes import Attributes
from precache.store.row_table import RowTable
from precache_workers.ops.behaviour import Outputs, digest_of, first_difference
from precache_workers.ops.identity import (
    as_recorded,
    behaviours,
    by_libraries,
    decides,
    installed_versions,
    named_ops,
    ops_digest,
    with_code,
)
from precache_workers.planning.target_version import VersionSpec

EXAMPLES = 5
"""Keys named of each kind of change."""


@dataclass(frozen=True)
class RecipeChange:
    """A part of the recipe, such as ``image.ops[1].resize.size``, as JSON has it before and after.

    None where there is no such part.
    """

    where: str
    before: Any
    after: Any


@dataclass(frozen=True)
class KeyChange:
    """How many keys changed in some way, and the first few of them."""

    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class SourceChanges:
    """What a source did since a version was made of it.

    Attributes
    ----------
    same
        Samples that it still has, with the identity that they had.
    added, changed, removed
        Keys that are new, that have another identity, that are no more.
    relabelled
        Keys of another class, or of another label where classes have no names.
    classes_changed
        Whether classes have other names or numbers.
    """

    same: int
    added: KeyChange
    changed: KeyChange
    removed: KeyChange
    relabelled: KeyChange
    classes_changed: bool

    @property
    def any(self) -> bool:
        """Whether there is a change at all."""
        kinds = self.added, self.changed, self.removed, self.relabelled
        return self.classes_changed or any(each.count for each in kinds)


@dataclass(frozen=True)
class LibraryChange:
    """A library of another version than recorded; `decides` if rows are then computed again."""

    name: str
    before: str
    after: str
    decides: bool


@dataclass(frozen=True)
class OpChange:
    """An op of which the libraries of this machine make other pixels than recorded.

    Attributes
    ----------
    op
        In its place, such as ``resize(size=256) of uint8 x 3``.
    libraries
        That compute it: those of other versions than recorded, or all where none is.
    probe
        The first of the fixed inputs of which something else is made.
    far
        How far, in words.
    """

    op: str
    libraries: tuple[str, ...]
    probe: str
    far: str


@dataclass(frozen=True)
class Differences:
    """Between a version and what is asked for.

    Attributes
    ----------
    recipe
        Fields, ops, codecs, seed.
    source
        None where the version's rows cannot be read, or are these.
    functions
        Custom functions without a declared version whose code was edited; of versions of older
        releases also other functions of the same field.
    ops
        Those that compute other pixels.
    libraries
        Those of other versions than recorded.
    """

    recipe: tuple[RecipeChange, ...] = ()
    source: SourceChanges | None = None
    functions: tuple[str, ...] = ()
    libraries: tuple[LibraryChange, ...] = ()
    ops: tuple[OpChange, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is one at all, libraries apart."""
        own = self.recipe or self.functions or self.ops
        return bool(own or (self.source and self.source.any))


def compare(
    spec: VersionSpec, attributes: Attributes, rows: RowTable | None, libraries: Mapping[str, str]
) -> Differences:
    """What differs from a committed version.

    Parameters
    ----------
    rows
        Of that version; None where they are those of the recipe, or unknown.
    libraries
        Versions with which the rows that stay were made.
    """
    recipe, installed = spec.recipe, installed_versions()
    changed = {each.name for each in _other_versions(libraries, installed)}
    ops = op_changes(spec.declared, attributes.behaviours, changed)
    deciding = {library for each in ops for library in each.libraries}
    if not attributes.behaviours:  # of an older release
        deciding |= by_libraries({})(recipe).keys()
    return Differences(
        recipe_changes(attributes.pipeline, spec.declared.to_dict()),
        None if rows is None else source_changes(rows, spec.table),
        edited_functions(attributes, recipe),
        tuple(
            replace(each, decides=each.name in deciding)
            for each in _other_versions(libraries, installed)
        ),
        ops,
    )


def recipe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[RecipeChange, ...]:
    """Between two recipes as `Recipe.to_dict` gives them, op by op and parameter by parameter.

    Ops are paired in their order by kind, so that one that is put between two others is the only
    change.
    """
    found: list[RecipeChange] = []
    fields = before["fields"], after["fields"]
    for name in dict.fromkeys([*fields[0], *fields[1]]):
        if name not in fields[0] or name not in fields[1]:
            found.append(RecipeChange(name, fields[0].get(name), fields[1].get(name)))
            continue
        old, new = fields[0][name], fields[1][name]
        found += _op_changes(name, old.get("ops", ()), new.get("ops", ()))
        rest = ({k: v for k, v in each.items() if k != "ops"} for each in (old, new))
        found += _parameters(name, *rest)
    found += _parameters("", {"seed": before.get("seed")}, {"seed": after.get("seed")})
    return tuple(found)


def _op_changes(
    field: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Iterator[RecipeChange]:
    old_kinds, new_kinds = (
        [f"{op['op']} {op.get('function', '')}" for op in ops] for ops in (before, after)
    )
    matcher = SequenceMatcher(None, old_kinds, new_kinds, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for at, (old, new) in enumerate(zip(before[i:i_end], after[j:j_end], strict=True), j):
                yield from _parameters(f"{field}.ops[{at}].{new['op']}", old, new)
            continue
        for at, op in enumerate(before[i:i_end], i):
            yield RecipeChange(f"{field}.ops[{at}].{op['op']}", _given(op), None)
        for at, op in enumerate(after[j:j_end], j):
            yield RecipeChange(f"{field}.ops[{at}].{op['op']}", None, _given(op))


def _given(op: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in op.items() if name != "op" and value is not None}


def _parameters(
    where: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[RecipeChange]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _parameters(f"{where}.{name}", old, new)
        elif old != new:
            yield RecipeChange(f"{where}.{name}".lstrip("."), old, new)


def source_changes(before: RowTable, after: RowTable) -> SourceChanges:
    """Between the rows of a version and those to be made, by key."""
    rows = {key: row for row, key in enumerate(before.keys) if row not in before.removed}
    added, changed, relabelled = [], [], []
    same = 0
    old = _identities(before)
    labels = _names(before), _names(after)
    for row, (key, identity) in enumerate(zip(after.keys, _identities(after), strict=True)):
        if row in after.removed:
            continue
        was = rows.pop(key, None)
        if was is None:
            added.append(key)
            continue
        if old[was] == identity:
            same += 1
        else:
            changed.append(key)
        if (names := (labels[0][was], labels[1][row]))[0] != names[1]:
            relabelled.append(f"{key}: {names[0]} → {names[1]}")
    return SourceChanges(
        same,
        _keys(added),
        _keys(changed),
        _keys(rows),
        _keys(relabelled),
        before.classes != after.classes,
    )


def _identities(table: RowTable) -> list[tuple[int, int, str]]:
    return list(zip(table.sizes.tolist(), table.mtimes.tolist(), table.etags, strict=True))


def _names(table: RowTable) -> list[str]:
    """Class of each row, its number where classes have no names; ``none`` without one."""
    classes = table.classes
    return [
        "none" if label < 0 else classes[label] if label < len(classes) else str(label)
        for label in table.labels.tolist()
    ]


def _keys(keys: Iterable[str]) -> KeyChange:
    found = sorted(keys)
    return KeyChange(len(found), tuple(found[:EXAMPLES]))


def edited_functions(attributes: Attributes, recipe: Recipe) -> tuple[str, ...]:
    """Custom functions without a declared version whose code is not that of a version any more.

    Parameters
    ----------
    recipe
        That is asked for, by array.
    """
    used = {op.function: op for op in recipe.functions if not op.version}
    if attributes.decides:
        now, recorded = decides(recipe), attributes.decides
        return tuple(each for each in used if recorded.get(each, now[each]) != now[each])
    try:
        before = Recipe.from_dict(attributes.pipeline).by_array()
    except RecipeError:  # of another release
        return ()
    named = {op.function for op in recipe.functions}
    before = with_code(before, {name: op.code for name, op in used.items() if op.code})
    found: dict[str, None] = {}
    for name, field in before.fields.items():
        functions = [op.function for op in field.ops if isinstance(op, Function) and not op.version]
        stored = attributes.fields.get(name)
        if functions and named.issuperset(functions) and stored and stored.recipe:
            try:
                digest = ops_digest(before, name, len(field.ops), as_recorded(attributes))
            except RecipeError:  # no module of that name is left
                digest = ""
            if digest != stored.recipe:
                found |= dict.fromkeys(each for each in functions if each in used)
    return tuple(found)


def op_changes(
    recipe: Recipe, before: Mapping[str, Outputs], changed: AbstractSet[str]
) -> tuple[OpChange, ...]:
    """Ops of which libraries make something else than recorded.

    Parameters
    ----------
    before
        What they made of their probes, by name; none of a version of an older release.
    changed
        Libraries of other versions than recorded.
    """
    libraries = {name: step.libraries for name, _, step in named_ops(recipe) if step is not None}
    found = []
    for name, outputs in behaviours(recipe).items() if before else ():
        if name in before and digest_of(before[name]) != digest_of(outputs):
            of = libraries.get(name, ("numpy",))
            named = tuple(each for each in of if each in changed) or of
            found.append(OpChange(name, named, *first_difference(before[name], outputs)))
    return tuple(found)


def _other_versions(
    before: Mapping[str, str], installed: Mapping[str, str]
) -> Iterator[LibraryChange]:
    """Libraries of other versions than those recorded with a version."""
    for name, version in installed.items():
        if name in before and before[name] != version:
            yield LibraryChange(name, before[name], version, decides=False)
