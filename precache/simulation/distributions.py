"""Times drawn one after another: from a distribution, or from times that were measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from precache.errors import UsageError

Measured = Sequence[float] | npt.NDArray[np.floating]
"""Milliseconds, one after another: (times,)."""
SPREADS = ("constant", "gamma", "lognormal", "exponential")
ORDERS = ("cycle", "resample")
LONGEST_MS = 1e12
"""Thirty years: what is longer counts as this."""
MOST_CV = 100.0
_NO_CV = 1e-6
_DRAWN = 1024
"""Times drawn at once."""


@dataclass(frozen=True)
class Durations:
    """How long one thing takes, time after time.

    Attributes
    ----------
    mean_ms
        Milliseconds, before rounding.
    cv
        Coefficient of variation: standard deviation over mean.
    kind
        ``"constant"``, ``"gamma"``, ``"lognormal"`` or ``"exponential"``, or for measured times
        ``"cycle"`` (as they came, over and over) or ``"resample"`` (any of them, at random).
    measured_ms
        Times that were measured, in milliseconds.
    resolution_ms
        Times are rounded up to a multiple of it; 0 leaves them as they are.
    """

    mean_ms: float
    cv: float
    kind: str
    measured_ms: tuple[float, ...] = ()
    resolution_ms: float = 0.0

    def drawn(self, generator: np.random.Generator) -> Iterator[int]:
        """Whole nanoseconds without end; the same ones for a generator in the same state."""
        start = 0
        while True:
            times = self._some(generator, start)
            if self.resolution_ms:
                # A time that is on the grid but for the last bits of its float stays there.
                times = np.ceil(times / self.resolution_ms - 1e-9) * self.resolution_ms
            yield from np.rint(np.minimum(times, LONGEST_MS) * 1e6).astype(np.int64).tolist()
            start += _DRAWN

    def _some(self, generator: np.random.Generator, start: int) -> np.ndarray:
        if self.kind == "gamma":
            shape = self.cv**-2
            return generator.gamma(shape, self.mean_ms / shape, _DRAWN)
        if self.kind == "lognormal":
            # Of mean exp(mu + variance / 2) and squared cv exp(variance) - 1.
            variance = math.log1p(self.cv**2)
            mu = math.log(self.mean_ms) - variance / 2
            return generator.lognormal(mu, math.sqrt(variance), _DRAWN)
        if self.kind == "exponential":
            return generator.exponential(self.mean_ms, _DRAWN)
        if self.kind == "constant":
            return np.full(_DRAWN, self.mean_ms)
        measured = np.array(self.measured_ms)
        if self.kind == "cycle":
            return measured[np.arange(start, start + _DRAWN) % len(measured)]
        return generator.choice(measured, _DRAWN)


def durations(
    name: str,
    time_ms: float | Measured,
    cv: float | None = None,
    kind: str | None = None,
    resolution_ms: float = 0.0,
) -> Durations:
    """What the arguments `name_ms`, `name_cv` and `name_dist` of `precache.simulate` mean.

    Raises
    ------
    UsageError
        If they contradict each other or are out of range; `name` is named.
    """
    if isinstance(time_ms, Sequence | np.ndarray):
        return _of_measured(name, tuple(map(float, time_ms)), cv, kind, resolution_ms)
    if not 0 < time_ms <= LONGEST_MS:
        raise UsageError(f"{name}_ms={time_ms:g} is no time: give milliseconds above 0")
    if kind is None:
        kind = "gamma" if cv else "constant"
    if kind in ORDERS:
        raise UsageError(
            f"{name}_dist={kind!r} is for measured times: give {name}_ms a list (--trace FILE)"
        )
    if kind not in SPREADS:
        raise UsageError(f"{name}_dist={kind!r} is none of {', '.join(SPREADS)}")
    fixed = {"constant": 0.0, "exponential": 1.0}.get(kind)
    if cv is None:
        if fixed is None:
            raise UsageError(f"{name}_dist={kind!r} needs {name}_cv, such as 0.1")
        cv = fixed
    if not 0 <= cv <= MOST_CV:
        raise UsageError(f"{name}_cv={cv:g} is out of range: give 0 to {MOST_CV:g}")
    if fixed is not None and cv != fixed:
        raise UsageError(
            f"{name}_cv={cv:g} contradicts {name}_dist={kind!r}, which has {fixed:g}; drop one"
        )
    return Durations(float(time_ms), cv, kind if cv > _NO_CV else "constant", (), resolution_ms)


def _of_measured(
    name: str, times: tuple[float, ...], cv: float | None, kind: str | None, resolution_ms: float
) -> Durations:
    if cv is not None:
        raise UsageError(f"{name}_cv={cv:g} is not for measured times, which have their own spread")
    kind = kind or ORDERS[0]
    if kind not in ORDERS:
        raise UsageError(f"{name}_dist={kind!r} is not for measured times: {' or '.join(ORDERS)}")
    for number, time in enumerate(times):
        if not 0 <= time <= LONGEST_MS:
            raise UsageError(f"{name}_ms[{number}]={time:g} is no time: give milliseconds")
    mean = sum(times) / max(1, len(times))
    if not mean:
        raise UsageError(f"{name}_ms has no time above 0 among its {len(times)}")
    return Durations(mean, float(np.std(times)) / mean, kind, times, resolution_ms)


def read_times(path: str | Path) -> list[float]:
    """Milliseconds from a text file: numbers apart by white space or commas; ``#`` begins a note.

    Raises
    ------
    UsageError
        If the file cannot be read, holds anything but numbers, or none.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the times in {path}: {error}") from None
    times: list[float] = []
    for number, line in enumerate(lines, 1):
        for word in re.split(r"[\s,]+", line.partition("#")[0].strip()):
            if not word:
                continue
            try:
                times.append(float(word))
            except ValueError:
                raise UsageError(
                    f"{path}, line {number}: {word!r} is no number of milliseconds"
                ) from None
    if not times:
        raise UsageError(f"{path} holds no times: write one load time in ms on each line")
    return times
