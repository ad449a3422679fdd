"""The names of images: the lines and doubts about them, and ways out of these that are tried first.

A command that a refusal prints must not lead to the next refusal. So each is tried on the names
that were listed: one that leaves a doubt is followed by the ways out of that, and one that comes to
no end is not offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from precache.errors import PrecacheError, SourceError
from precache.store.columns import Texts
from precache_workers.sources.base import Doubt, LabelRules, is_flag
from precache_workers.sources.container_names import expand_braces
from precache_workers.sources.label_readings import Bare
from precache_workers.sources.listings import labels_of_folders
from precache_workers.sources.pairs import (
    MAGIC,
    Files,
    Partners,
    match,
    partners_across,
    partners_among,
    split_pattern,
)

Choice = tuple[tuple[str, ...], str]
"""A choice of a `Doubt`."""

MOST_STEPS = 3
"""Doubts after each other that a command may have to settle."""

_OTHER: Choice = (), "a table of the images and their labels as the source"


@dataclass(frozen=True)
class ImageNames:
    """Names of the images of a source, and the readings of them that the user chose.

    Attributes
    ----------
    names
        Names below `place`, with which the sources begin that a doubt offers; empty for none.
    where
        The source in messages.
    labels
        Its folders may be classes: no labels of a file are given.
    pairs
        Images may be parts of samples: none is said to be a sample of its own.
    has_map
        The user gives a map of classes.
    bare_in
        As of `read_folders`.
    """

    names: Texts
    place: str
    where: str
    rules: LabelRules
    labels: bool = True
    pairs: bool = True
    has_map: bool = False
    bare_in: Callable[[str], Bare] | None = None

    def doubts(self) -> list[Doubt]:
        """Return the doubts that a listing of the names has."""
        doubts = list[Doubt]()
        if self.labels:
            column, _ = labels_of_folders(
                self.names,
                self.names,
                self.where,
                self.rules,
                (lambda folder: f"{self.place}/{folder}") if self.place else None,
                self.bare_in,
            )
            doubts = [one for one in column.doubts if not (one.by_classes and self.has_map)]
        if (partners := self.partners(doubts)) is not None:
            doubts += partners.reading(self.where, self.place or None)[1]
        return doubts

    def partners(self, doubts: Sequence[Doubt]) -> Partners | None:
        """Find the images that are called as others.

        Parameters
        ----------
        doubts
            Those about folders; one with sources has those that take folders as columns.
        """
        if not self.pairs:
            return None
        has_sources = any(not is_flag(way) for doubt in doubts for way in doubt.ways)
        among = partners_among(self.names)
        return among or (None if has_sources else partners_across(self.names))

    def settled(self, doubts: Sequence[Doubt]) -> Doubt:
        """Return doubts as one, with the ways out of all of them."""
        ways = [(way, when) for way, when in doubts[0].choices if way]
        words = [(way, when) for doubt in doubts for way, when in doubt.choices if not way]
        tried = dict[tuple[str, ...], str]()
        for way, when in ways:
            for settled, text in self._followed(way, when, MOST_STEPS):
                tried.setdefault(settled, text)
        return replace(
            doubts[0],
            what=". Also: ".join(doubt.what for doubt in doubts),
            choices=(*tried.items(), *dict.fromkeys(words)) if tried or words else (_OTHER,),
        )

    def _followed(self, way: tuple[str, ...], when: str, steps: int) -> Iterator[Choice]:
        """Yield the choices that a way comes to by which no doubt is left."""
        try:
            taken = self._taking(way)
            doubts = taken.doubts() if taken else []
        except PrecacheError:
            return
        if not doubts:
            yield way, when
            return
        choices = [choice for choice in doubts[0].choices if choice[0]]
        if not is_flag(way):  # what it is best read as
            choices = [c for c in choices if not is_flag(c[0])] or choices[:1]
        for inner, inner_when in choices if steps else ():
            if not is_flag(inner):
                yield from self._followed(inner, inner_when, steps - 1)
            elif inner[0] not in way:
                both = ", and ".join(dict.fromkeys((when, inner_when)))
                yield from self._followed((*way, *inner), both, steps - 1)

    def _taking(self, way: Sequence[str]) -> Self | None:
        """Return the names as a way takes them; None if it is a source that was not listed.

        Raises
        ------
        PrecacheError
            The source has no samples.
        """
        taken, flags = self, [*way]
        if not is_flag(way):
            source, *flags = way
            begin = f"{self.place}/"
            if not self.place or not source.startswith(begin):
                return None
            taken = self._of_source(source, [p.removeprefix(begin) for p in expand_braces(source)])
        words = itertools.chain.from_iterable(flag.split("=", 1) for flag in flags)
        for flag in words:
            if flag == "--label-level":
                taken = replace(taken, rules=replace(taken.rules, level=int(next(words))))
            elif flag == "--no-label":
                taken = replace(
                    taken, rules=replace(taken.rules, none=(*taken.rules.none, next(words)))
                )
            elif flag == "--sample-name":
                taken = replace(taken, pairs=next(words) != "whole")
            elif flag == "--classes":
                taken, _ = replace(taken, has_map=True), next(words)
        return taken

    def _of_source(self, source: str, places: Sequence[str]) -> Self:
        """Return the names of another source, which lies in this one."""
        folder = places[0]
        if len(places) > 1 or MAGIC.search(folder):
            columns = [Files.at(self.names, place).stems for place in places]
            if not match(columns).fits:
                raise SourceError("has no samples")
            folder, _ = split_pattern(folder)
        names = Files.at(self.names, folder).names if folder else self.names
        if not len(names):
            raise SourceError("has no images")
        taken = replace(self, names=names, place=source, where=source, pairs=len(places) == 1)
        if (bare_in := self.bare_in) is None:
            return taken
        return replace(taken, bare_in=lambda outer: bare_in(f"{folder}/{outer}".strip("/")))
