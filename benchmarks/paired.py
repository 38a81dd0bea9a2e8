"""From paired times to a statement: how much longer, and how sure.

    change = shift([math.log(a / b) for a, b in pairs])      # of the logarithms
    change.percent()                                         # "+0.81 % (+0.43 .. +1.20)"

Each pair is two successive runs of nearly the same moment, so the machine's own pace cancels; what is left is
symmetric noise with heavy tails (a preempted step is late by any amount). For that the Hodges-Lehmann estimator, the
median of the means of all two pairs, loses 4.5 % of the mean's efficiency on normal noise and nothing to outliers, and
inverting Wilcoxon's signed-rank test gives it an interval that assumes symmetry only (Hollander and Wolfe, chapter 3).

It is the typical step's cost: what only every hundredth step does hardly moves it. A mean counts that, and all of the
neighbours' noise with it, so it is given for CPU time only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Shift:
    """A location and the interval that holds it with :data:`CONFIDENCE`; of logarithms of ratios."""

    middle: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def percent(self) -> str:
        values = (100 * math.expm1(value) for value in (self.middle, self.low, self.high))
        return "{:+.2f} % ({:+.2f} .. {:+.2f})".format(*values)


def shift(differences: Sequence[float]) -> Shift:
    """Hodges-Lehmann estimate of the differences' centre, with the interval of the signed-rank test.

    Args:
        differences: at least one; with fewer than six the interval is everything that was seen.
    """
    values = np.asarray(differences, dtype=np.float64)
    first, second = np.triu_indices(len(values))
    means = np.sort((values[first] + values[second]) / 2)
    n, count = len(values), len(means)
    spread = _quantile() * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    outside = min(max(math.floor(count / 2 - spread), 0), (count - 1) // 2)
    return Shift(float(np.median(means)), float(means[outside]), float(means[count - 1 - outside]))


def mean_ratio(ours: Sequence[float], plain: Sequence[float]) -> Shift:
    """log of the ratio of two paired series' means, with its interval by the delta method."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(plain, dtype=np.float64)
    middle = math.log(a.mean() / b.mean())
    if len(a) < 2:
        return Shift(middle, -math.inf, math.inf)
    error = float((a / a.mean() - b / b.mean()).std(ddof=1)) / math.sqrt(len(a))
    return Shift(middle, middle - _quantile() * error, middle + _quantile() * error)


def mixture(parts: Sequence[tuple[float, Shift]]) -> Shift:
    """The shift of a training of which a share of the steps is of each kind: shares add up to 1, all are small."""
    middle = sum(share * part.middle for share, part in parts)
    half = math.sqrt(sum((share * part.half_width) ** 2 for share, part in parts))
    return Shift(middle, middle - half, middle + half)


def _quantile() -> float:
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
