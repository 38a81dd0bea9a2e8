"""How far each rank stands from the others lately, in the ranks' own spread. Pure.

    departures = Departures()
    departures.step(line)       # of metrics.jsonl
    departures.of(3)            # Departure(times=1.2, metric="norm")

A rank's departure of one step is |value - median of the ranks|, over the median of that distance over all ranks; a
healthy rank's is about 1 on average, whatever the metric and its noise. Both are averaged over some :data:`MEMORY`
records, and the largest of the three metrics counts. This orders and draws the ranks; it judges nothing, that is what
the detectors do, with a stated false-alarm rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ds_silent.runs.values import number, numbers, of, whole

Metric = Literal["loss", "norm", "cosine"]
METRICS: tuple[Metric, ...] = ("loss", "norm", "cosine")
KEYS: Mapping[Metric, str] = {"loss": "loss", "norm": "grad_norm", "cosine": "direction"}
"""Where each stands in a line of metrics.jsonl."""
MOST_RANKS_READ = 4096
"""Of one line; our own lines name 64 at most."""
MEMORY = 32
"""Records over which the averages go, about."""
MOST = 99.0
"""Where a departure ends: of a value that is no number, or of one that differs where all others are equal."""
_USUAL = 1.0  # of a rank that is not among the extremes that were written
_FORGOTTEN = 1.5  # below it a rank that is not written any more is like all others
_ROUNDING = 1e-6  # of the median: ranks whose values are equal but for this do not differ


@dataclass(frozen=True)
class Departure:
    """``times`` as far from the ranks' median as a rank usually is, in the metric in which that is the most."""

    times: float
    metric: Metric


@dataclass(frozen=True)
class _Ranks:
    """One metric of one step: of all ranks, or of those with the lowest and highest values."""

    values: Mapping[int, float]
    median: float
    spread: float  # median of |value - median|


class _Average:
    """The departures of one metric."""

    def __init__(self) -> None:
        self._records = 0
        self._spread = 0.0
        self.times: dict[int, float] = {}

    def step(self, ranks: _Ranks) -> None:
        self._records += 1
        share = max(1.0 / self._records, 1.0 / MEMORY)
        self._spread += share * (ranks.spread - self._spread)
        scale = max(self._spread, _ROUNDING * abs(ranks.median), 1e-30)
        for rank, value in ranks.values.items():
            distance = abs(value - ranks.median)
            now = min(distance / scale, MOST) if math.isfinite(value) else MOST
            before = self.times.get(rank, _USUAL if self._records > 1 else now)
            self.times[rank] = before + share * (now - before)
        for rank in [rank for rank in self.times if rank not in ranks.values]:
            self.times[rank] += share * (_USUAL - self.times[rank])
            if self.times[rank] < _FORGOTTEN:
                del self.times[rank]


class Departures:
    """Of every rank that the records speak of."""

    def __init__(self) -> None:
        self._averages: dict[Metric, _Average] = {metric: _Average() for metric in METRICS}

    def step(self, line: Mapping[str, Any]) -> None:
        """Take in a line; a metric that was not measured at this step stays as it is."""
        for metric, average in self._averages.items():
            ranks = _ranks_of(line, metric)
            if ranks is not None:
                average.step(ranks)

    def of(self, rank: int) -> Departure | None:
        """None where nothing is known of this rank: it is not there, or like most."""
        found = [
            Departure(average.times[rank], metric)
            for metric, average in self._averages.items()
            if rank in average.times
        ]
        return max(found, key=lambda one: one.times, default=None)

    def ranks(self) -> set[int]:
        """Those of whom something is known."""
        return {rank for average in self._averages.values() for rank in average.times}


def values_of(line: Mapping[str, Any], metric: Metric) -> Mapping[int, float]:
    """Rank to value of all ranks, or of the extreme ones where only those were written; empty if not measured."""
    each = numbers(of(line, KEYS[metric], "per_rank"))
    if each is not None:
        return dict(enumerate(each[:MOST_RANKS_READ]))
    extremes = of(line, KEYS[metric], "extremes")
    found = {}
    for key, value in list(extremes.items())[:MOST_RANKS_READ] if isinstance(extremes, Mapping) else ():
        rank, known = whole(int(key)) if key.isascii() and key.isdigit() and len(key) < 10 else None, number(value)
        if rank is not None and known is not None:
            found[rank] = known
    return found


def _ranks_of(line: Mapping[str, Any], metric: Metric) -> _Ranks | None:
    values = values_of(line, metric)
    if not values:
        return None
    median, low, high = (number(of(line, KEYS[metric], "quantiles", name)) for name in ("median", "q25", "q75"))
    if median is None or low is None or high is None:  # all ranks are here
        median = _median(values.values())
        return _finite(values, median, _median(abs(value - median) for value in values.values()))
    return _finite(values, median, (high - low) / 2.0)


def _finite(values: Mapping[int, float], median: float, spread: float) -> _Ranks:
    known = math.isfinite(median) and math.isfinite(spread)
    return _Ranks(values, median if known else 0.0, spread if known else 0.0)


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else 0.0
