"""Compare a version with a build to come: recipe, source, code, libraries. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from precache.maintenance.diff import (
    Change,
    KeyChange,
    compare_recipes,
    compare_samples,
    listed_samples,
)
from precache.recipe.recipe import Recipe
from precache.store.json_documents import Attributes
from precache.store.labels import kind_in_words
from precache.store.row_table import RowTable
from precache_workers.ops.behaviour import Outputs, digest_of, first_difference
from precache_workers.ops.identity import behaviours, installed_versions, recipe_steps
from precache_workers.planning.target_version import VersionSpec


@dataclass(frozen=True)
class SourceChanges:
    """Changes of a source since a version was built from it.

    Attributes
    ----------
    same
        Samples that it still has, with the same identity.
    added, changed, removed
        Samples that are new, that have another identity, that it has no more.
    relabelled
        Samples with another label: the names of classes, or numbers.
    classes_changed
        Whether classes have other names or numbers.
    labels
        The kind of the labels, and whether they come with the samples, if that is another.
    other_source
        Whether samples are listed from another place: then those of the same names count as
        changed, and their content decides.
    """

    same: int
    added: KeyChange
    changed: KeyChange
    removed: KeyChange
    relabelled: KeyChange
    classes_changed: bool
    labels: Change | None = None
    other_source: bool = False

    def __str__(self) -> str:
        """Return the numbers of samples, without those of another label alone."""
        counts = {
            "of the same names" if self.other_source else "changed": self.changed.count,
            "added": self.added.count,
            "removed": self.removed.count,
        }
        changes = (f"{count:,} {what}" for what, count in counts.items() if count)
        first = "another source" if self.other_source else f"{self.same:,} same"
        return ", ".join([first, *changes])

    @property
    def any(self) -> bool:
        """Return whether there is a change."""
        kinds = self.added, self.changed, self.removed, self.relabelled
        other = self.labels or self.classes_changed or self.other_source
        return bool(other) or any(kind.count for kind in kinds)


@dataclass(frozen=True)
class LibraryChange:
    """A library of another version than recorded; `decides` if rows are computed again for it."""

    name: str
    before: str
    after: str
    decides: bool


@dataclass(frozen=True)
class OpChange:
    """An op that is identified otherwise than recorded.

    Attributes
    ----------
    op
        The op in its place, such as ``resize(size=256) of uint8 x 3``.
    libraries
        Libraries that compute it and are of other versions than recorded.
    probe
        The first of the fixed inputs with another output; empty if all that were tried before have
        the same, and others are tried now; and how many have another one.
    """

    op: str
    libraries: tuple[str, ...]
    probe: str

    def __str__(self) -> str:
        if not self.probe:
            return (
                f"{self.op}: tried on other probes than before, so that its rows are computed again"
            )
        by = " and ".join(self.libraries) or "precache, or this processor,"
        return f"{self.op}: {by} computes other pixels, first of the probe {self.probe}"


@dataclass(frozen=True)
class BuildDifferences:
    """Differences between a version and a build to come.

    Attributes
    ----------
    recipe
        Changes of fields, ops, codecs and seed.
    source
        None where the version's rows cannot be read, or are the same.
    functions
        Custom functions without a declared version whose code was edited.
    ops
        Ops that give other pixels.
    libraries
        Libraries of other versions than recorded.
    """

    recipe: tuple[Change, ...] = ()
    source: SourceChanges | None = None
    functions: tuple[str, ...] = ()
    libraries: tuple[LibraryChange, ...] = ()
    ops: tuple[OpChange, ...] = ()

    @property
    def any(self) -> bool:
        """Return whether there is a difference, other than of libraries."""
        own = self.recipe or self.functions or self.ops
        return bool(own or (self.source and self.source.any))


def compare_with_committed(
    spec: VersionSpec, attributes: Attributes, rows: RowTable | None, libraries: Mapping[str, str]
) -> BuildDifferences:
    """Compare a committed version with the one that is to be built.

    Parameters
    ----------
    rows
        Row table of the committed version; None where it is the same, or unknown.
    libraries
        Versions of libraries with which the rows that stay were computed.
    """
    installed = installed_versions()
    other = [name for name, now in installed.items() if libraries.get(name, now) != now]
    ops = op_changes(spec.declared, attributes.behaviours, {*other})
    deciding = {library for op in ops for library in op.libraries}
    return BuildDifferences(
        tuple(compare_recipes(attributes.recipe, spec.declared)),
        None if rows is None else source_changes(rows, spec.table),
        edited_functions(attributes, spec),
        tuple(LibraryChange(n, libraries[n], installed[n], n in deciding) for n in other),
        ops,
    )


def source_changes(before: RowTable, after: RowTable) -> SourceChanges:
    """Compare the rows of a version with those of a listing, by key."""
    found = compare_samples(listed_samples(before), listed_samples(after), by_key=True)
    one, other = map(_label_kind, (before, after))
    return SourceChanges(
        same=after.samples - found.added.count - found.changed.count,
        added=found.added,
        changed=found.changed,
        removed=found.removed,
        relabelled=found.relabelled,
        classes_changed=before.classes != after.classes,
        labels=None if one == other else Change("labels", one, other),
        other_source=before.source != after.source,
    )


def _label_kind(table: RowTable) -> str:
    kind = kind_in_words(table.labels.shape[1:], table.labels.dtype.name)
    return f"{kind} that come with the samples" if table.labels_with_samples else kind


def edited_functions(attributes: Attributes, spec: VersionSpec) -> tuple[str, ...]:
    """Find functions without a declared version whose code is no longer that of a version."""
    used = dict.fromkeys(op.function for op in spec.declared.functions if not op.version)
    now, recorded = spec.decides, attributes.decides
    return tuple(name for name in used if recorded.get(name, now[name]) != now[name])


def op_changes(
    recipe: Recipe, before: Mapping[str, Outputs], changed: AbstractSet[str]
) -> tuple[OpChange, ...]:
    """Find ops whose outputs differ from those recorded.

    Parameters
    ----------
    before
        Op -> its outputs of its probes.
    changed
        Libraries of other versions than recorded.
    """
    libraries = {step.name: step.op.libraries for step in recipe_steps(recipe)}
    changes = []
    for name, outputs in behaviours(recipe).items():
        old = before.get(name, outputs)
        if digest_of(old) == digest_of(outputs):
            continue
        used = [library for library in libraries.get(name, ("numpy",)) if library in changed]
        both = old.keys() & outputs.keys()
        tried = ({probe: of[probe] for probe in of if probe in both} for of in (old, outputs))
        same = len({digest_of(of) for of in tried}) == 1
        differs = "" if both and same else first_difference(old, outputs)
        changes.append(OpChange(name, tuple(used), differs))
    return tuple(changes)
