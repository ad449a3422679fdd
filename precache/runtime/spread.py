"""Statistics of measured values."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache.units import ms

STANDARD_ERRORS_95 = 1.96
"""Standard errors on either side of a mean that hold the true mean in 95% of samples."""


@dataclass(frozen=True)
class Spread:
    """Mean, median, 95th percentile and maximum of values; zeros if there is none.

    At most 5% of the values are above the 95th percentile, which is one of them.
    """

    mean: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Collection[float] | npt.NDArray[np.float64]) -> Spread:
        """Compute the figures of values, (values,)."""
        if not len(values):
            return cls()
        ordered = np.sort(np.array(values, float))
        p95 = ordered[int(0.95 * len(ordered))]
        return cls(*map(float, (ordered.mean(), np.median(ordered), p95, ordered[-1])))

    def in_ms(self) -> str:
        """Format values that are seconds as milliseconds."""
        median, p95, most = map(ms, (self.median, self.p95, self.max))
        return f"{ms(self.mean)} ms (median {median}, p95 {p95}, max {most})"


def mean_and_cv(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the coefficient of variation: the standard deviation over the mean."""
    mean = float(values.mean())
    return mean, float(values.std()) / mean if mean else 0.0


def relative_error(values: npt.NDArray[np.float64], population: int) -> float:
    """Return half the 95% confidence interval of a mean over the mean, without replacement.

    Source: Cochran, Sampling Techniques, section 2.5, finite population correction included.
    """
    count, mean = len(values), float(values.mean())
    if count < 2 or mean == 0:
        return 0.0 if count >= population or mean == 0 else math.inf
    left = max(0.0, 1 - count / population)
    return STANDARD_ERRORS_95 * float(values.std(ddof=1)) / mean * math.sqrt(left / count)
