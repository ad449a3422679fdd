"""Images of tar archives that are inputs of one sample, and the evidence that they are.

WebDataset names samples up to the first dot: ``17.input.jpg`` and ``17.target.png`` are one sample.
Photographs such as ``2024.05.01.jpg`` and ``2024.05.02.jpg`` share that part of their names, too.
Suffixes that recur in nearly all samples, and differ by more than numbers, are inputs. Any others
may be either, and the user decides.

A combination is the text of the suffixes of a sample's images, separated by commas.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from precache.messages import printable
from precache_workers.sources.base import Doubt, SampleName, choice_error, is_image
from precache_workers.sources.pairs import is_target

AT_ONCE = 1 << 14
"""Samples whose images are put in order at a time."""

NEARLY_ALL = 3 / 4
"""Part of the samples that have an image of a suffix, if it is an input."""

WHEN: Mapping[SampleName, str] = {
    "first-dot": "if they are inputs of one sample",
    "whole": "if each image is a sample",
    "last-dot": "if the name of a sample ends at its last dot",
}

_NUMBERED = re.compile(r"v?\d+|[\W_]+")


class SampleInputs:
    """The inputs of the samples of a source that has some samples of several images.

    A role is what tells inputs apart: the suffix, without that of the image format if possible.
    """

    def __init__(self, combinations: Mapping[str, int], keys: Mapping[str, str]) -> None:
        """Look at combinations, with the number of samples that have each, and the key of one."""
        self._counts = {tuple(text.split(",")): count for text, count in combinations.items()}
        self._keys = keys
        self._several = {c: count for c, count in self._counts.items() if len(c) > 1}
        self._by_suffix = any(len(set(map(_stem, c))) < len(c) for c in self._several)
        self._samples = sum(self._counts.values())
        having, suffixes = Counter[str](), Counter[tuple[str, str]]()
        for combination, count in self._counts.items():
            for suffix in combination:
                having[self._role(suffix)] += count
                suffixes[self._role(suffix), suffix] += count
        usual = {self._role(s) for combination in self._several for s in combination}
        least = max(2, NEARLY_ALL * self._samples)
        self._usual = {
            role: suffix for (role, suffix), _ in reversed(suffixes.most_common())
            if role in usual and having[role] >= least
        }  # fmt: skip
        firsts = Counter[str]()
        for combination, count in self._several.items():
            firsts[self._role(combination[0])] += count
        self._default = firsts.most_common(1)[0][0] if firsts else ""

    def __bool__(self) -> bool:
        return bool(self._several)

    def _role(self, suffix: str) -> str:
        return suffix if self._by_suffix else _stem(suffix)

    def require_clear(self, source: object) -> None:
        """Raise `ChoiceError` if the images of a sample may be samples of their own."""
        unclear = [c for c in self._several if not self._is_clear(c)]
        if not unclear:
            return
        combination = min(unclear, key=lambda c: (not any(c), self._counts[c]))
        samples = sum(self._several.values())
        suffixes = ", ".join(map(repr, combination[:3])) + ", …" * (len(combination) > 3)
        example = printable(self._keys[",".join(combination)])
        text = (
            f"{samples:,} of {self._samples:,} samples of the source {source} would have several "
            "images that share their names up to the first dot, such as "
            f"{example} ({printable(suffixes)}). In WebDataset's "
            "archives these are inputs of one sample, and their suffixes recur in all samples; "
            "here that is unclear"
        )
        # A command that takes masks for pictures would be refused for its pixels.
        masks = any(map(_may_be_masks, self._several))
        ways = [
            ((), f"--sample-name {rule} {when}") if masks and rule == "whole"
            else (("--sample-name", rule), when)
            for rule, when in WHEN.items()
        ]  # fmt: skip
        raise choice_error([Doubt.of(text, *ways, of_members=True)])

    def _is_clear(self, combination: tuple[str, ...]) -> bool:
        roles = list(map(self._role, combination))
        differ = len({_NUMBERED.sub("", role) for role in roles}) == len(roles)
        return differ and set(roles) <= self._usual.keys()

    def note(self, dot: str) -> str:
        """Describe the inputs in a line."""
        roles = sorted(self._usual, key=lambda role: (role != self._default, role))
        names = ", ".join(repr(self._usual[role]) for role in roles) or "of various suffixes"
        default = self._usual.get(self._default)
        begin = f"; fields that name no input start from {default!r}" if default else ""
        return printable(
            f"{sum(self._several.values()):,} of {self._samples:,} samples of tar archives have "
            f"several images, which share their names up to the {dot} dot: {names}{begin} "
            "(--sample-name whole makes each image a sample)"
        )

    def with_all(self, places: Any) -> Any:
        """Return the places of all samples with the default input first, and with places of no size
        for the usual inputs that a sample lacks.

        Parameters
        ----------
        places
            Arrow array of the images of each sample, as tar archives have them.
        """
        if all([*combination] == self._whole(combination) for combination in self._counts):
            return places
        parts = []
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE].to_pylist()
            parts.append(pa.array([self._ordered(images) for images in some], places.type))
        return pa.concat_arrays(parts)

    def _whole(self, suffixes: Sequence[str]) -> list[str]:
        """Return suffixes with the default first, and with the usual ones that are not there."""
        roles = set(map(self._role, suffixes))
        lacking = (suffix for role, suffix in self._usual.items() if role not in roles)
        every = [*suffixes, *lacking]
        return sorted(every, key=lambda suffix: self._role(suffix) != self._default)

    def _ordered(self, images: list[dict[str, Any]]) -> list[dict[str, Any]]:
        held = {image["suffix"]: image for image in images}
        nowhere = {"offset": 0, "size": -1, "crc": 0}
        every = dict.fromkeys((*self._whole([*filter(is_picture, held)]), *held))
        return [held.get(suffix) or {**nowhere, "suffix": suffix} for suffix in every]


def is_picture(suffix: str) -> bool:
    """Return True for a suffix of an image, behind the name of a sample."""
    return not suffix or is_image(f"x.{suffix}")


def _may_be_masks(combination: Sequence[str]) -> bool:
    formats = {suffix.rpartition(".")[2] for suffix in combination}
    return len(formats) > 1 or any(is_target(f".{_stem(suffix)}") for suffix in combination)


def _stem(suffix: str) -> str:
    """Return a suffix without that of the image format."""
    return suffix.rpartition(".")[0]
