"""Sequences of durations, drawn from a distribution or taken from measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from precache.errors import UsageError

MeasuredTimes = Sequence[float] | npt.NDArray[np.floating]
"""Measured times in milliseconds: (times,)."""
SPREADS = ("constant", "gamma", "lognormal", "exponential")
ORDERS = ("cycle", "resample")
LONGEST_MS = 1e12
"""Upper limit of a time, thirty years; longer times that are drawn are cut to it."""
MOST_CV = 100.0
_NO_CV = 1e-6
_CHUNK = 1024
"""Number of times drawn at once."""


@dataclass(frozen=True)
class Durations:
    """The durations of one repeated event.

    Attributes
    ----------
    mean_ms
        Mean in milliseconds, before rounding.
    cv
        Coefficient of variation: standard deviation over mean.
    kind
        ``"constant"``, ``"gamma"``, ``"lognormal"`` or ``"exponential"``; for measured times
        ``"cycle"`` (in their order, repeated) or ``"resample"`` (drawn at random).
    measured_ms
        Measured times in milliseconds.
    resolution_ms
        Times are rounded up to a multiple of it; 0 for no rounding.
    """

    mean_ms: float
    cv: float
    kind: str
    measured_ms: tuple[float, ...] = ()
    resolution_ms: float = 0.0

    def draw(self, generator: np.random.Generator) -> Iterator[int]:
        """Yield whole nanoseconds endlessly, determined by the state of the generator."""
        start = 0
        while True:
            times = self._draw_chunk(generator, start)
            if self.resolution_ms:
                # The tolerance keeps rounding errors from moving a time to the next multiple.
                times = np.ceil(times / self.resolution_ms * (1 - 1e-12)) * self.resolution_ms
            yield from np.rint(np.minimum(times, LONGEST_MS) * 1e6).astype(np.int64).tolist()
            start += _CHUNK

    def _draw_chunk(self, generator: np.random.Generator, start: int) -> np.ndarray:
        if self.kind == "gamma":
            shape = self.cv**-2
            return generator.gamma(shape, self.mean_ms / shape, _CHUNK)
        if self.kind == "lognormal":
            # A lognormal has mean exp(mu + variance / 2) and squared cv exp(variance) - 1.
            variance = math.log1p(self.cv**2)
            mu = math.log(self.mean_ms) - variance / 2
            return generator.lognormal(mu, math.sqrt(variance), _CHUNK)
        if self.kind == "exponential":
            return generator.exponential(self.mean_ms, _CHUNK)
        if self.kind == "constant":
            return np.full(_CHUNK, self.mean_ms)
        measured = np.array(self.measured_ms)
        if self.kind == "cycle":
            return measured[np.arange(start, start + _CHUNK) % len(measured)]
        return generator.choice(measured, _CHUNK)


def durations(
    name: str,
    time_ms: float | MeasuredTimes,
    cv: float | None = None,
    kind: str | None = None,
    resolution_ms: float = 0.0,
) -> Durations:
    """Check the arguments ``NAME_ms``, ``NAME_cv`` and ``NAME_dist`` of `precache.simulate`.

    Raises
    ------
    UsageError
        If they contradict each other or are out of range.
    """
    if isinstance(time_ms, str | bytes):
        raise UsageError(
            f"{name}_ms is {time_ms!r}, not milliseconds; give a number or measured times "
            "(precache simulate --trace FILE reads them)"
        )
    if isinstance(time_ms, Sequence | np.ndarray):
        return _measured_durations(name, tuple(map(float, time_ms)), cv, kind, resolution_ms)
    if not 0 < time_ms <= LONGEST_MS:
        raise UsageError(f"{name}_ms={time_ms:g} is out of range: give milliseconds above 0")
    if kind is None:
        kind = "gamma" if cv else "constant"
    if kind in ORDERS:
        raise UsageError(
            f"{name}_dist={kind!r} needs measured times: give {name}_ms a list (--trace FILE)"
        )
    if kind not in SPREADS:
        raise UsageError(f"{name}_dist={kind!r} is not one of {', '.join(SPREADS)}")
    fixed = {"constant": 0.0, "exponential": 1.0}.get(kind)
    if cv is None:
        if fixed is None:
            raise UsageError(f"{name}_dist={kind!r} needs {name}_cv, such as 0.1")
        cv = fixed
    if not 0 <= cv <= MOST_CV:
        raise UsageError(f"{name}_cv={cv:g} is out of range: give 0 to {MOST_CV:g}")
    if fixed is not None and cv != fixed:
        raise UsageError(
            f"{name}_cv={cv:g} contradicts {name}_dist={kind!r}, whose cv is {fixed:g}; drop one"
        )
    return Durations(float(time_ms), cv, kind if cv > _NO_CV else "constant", (), resolution_ms)


def _measured_durations(
    name: str, times: tuple[float, ...], cv: float | None, kind: str | None, resolution_ms: float
) -> Durations:
    if cv is not None:
        raise UsageError(
            f"{name}_cv={cv:g} contradicts measured times, which have their own spread; drop it"
        )
    kind = kind or ORDERS[0]
    if kind not in ORDERS:
        raise UsageError(
            f"{name}_dist={kind!r} contradicts measured times: give {' or '.join(ORDERS)}"
        )
    for number, time in enumerate(times):
        if not 0 <= time <= LONGEST_MS:
            raise UsageError(
                f"{name}_ms[{number}]={time:g} is out of range: give milliseconds from 0 up"
            )
    mean = sum(times) / max(1, len(times))
    if not mean:
        raise UsageError(
            f"none of the {len(times)} times in {name}_ms is above 0; give times in ms"
        )
    return Durations(mean, float(np.std(times)) / mean, kind, times, resolution_ms)


def read_times(path: str | Path) -> list[float]:
    """Read milliseconds from a text file: numbers separated by white space or commas, # comments.

    Raises
    ------
    UsageError
        If the file cannot be read, holds no numbers, or holds other text.
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
                    f"{path}, line {number}: {word!r} is not a number; give milliseconds"
                ) from None
    if not times:
        raise UsageError(f"{path} holds no times: write one load time in ms per line")
    return times
