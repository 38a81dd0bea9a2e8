"""How far each rank has stood from the others lately, in the ranks' own spread. Pure.

    departures = Departures()
    departures.step(line)       # a StepLine
    departures.of(3)            # Departure(times=1.2, metric="norm")

A rank's departure of one step is |value - median of the ranks|, over the median of that distance over all ranks; a
healthy rank's is about 1 on average, whatever the metric and its noise. Both are averaged over some :data:`MEMORY`
records, and the largest of the three metrics counts. This orders and draws the ranks; judging is what the detectors
do, with a stated false-alarm rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_silent.runs.lines import METRICS, Metric, RankValues, StepLine

MEMORY = 32
"""Records over which the averages go, about."""
MOST = 99.0
"""The largest departure: of a value that is not a number, or that differs where all others are equal."""
_USUAL = 1.0  # of a rank that is not among the extremes that were written
_FORGOTTEN = 1.5  # below it a rank that is no longer written is like all others
_ROUNDING = 1e-6  # of the median: ranks whose values are equal but for this do not differ


@dataclass(frozen=True)
class Departure:
    """``times`` as far from the ranks' median as a rank usually is, in the metric in which that is the most."""

    times: float
    metric: Metric


class _Average:
    """The departures of one metric, by rank."""

    def __init__(self) -> None:
        self._records = 0
        self._spread = 0.0
        self.times: dict[int, float] = {}

    def step(self, values: Mapping[int, float], median: float, spread: float) -> None:
        self._records += 1
        share = max(1.0 / self._records, 1.0 / MEMORY)
        self._spread += share * (spread - self._spread)
        scale = max(self._spread, _ROUNDING * abs(median), 1e-30)
        for rank, value in values.items():
            now = min(abs(value - median) / scale, MOST) if math.isfinite(value) else MOST
            before = self.times.get(rank, _USUAL if self._records > 1 else now)
            self.times[rank] = before + share * (now - before)
        for rank in self.times.keys() - values.keys():
            self.times[rank] += share * (_USUAL - self.times[rank])
            if self.times[rank] < _FORGOTTEN:
                del self.times[rank]


class Departures:
    """The departures of every rank that the records name."""

    def __init__(self) -> None:
        self._averages: dict[Metric, _Average] = {metric: _Average() for metric in METRICS}

    def step(self, line: StepLine) -> None:
        """Add a step; a metric that was not measured at it stays as it is."""
        for metric, ranks in line.ranks.items():
            if values := ranks.by_rank():
                self._averages[metric].step(values, *_middle(values, ranks))

    def of(self, rank: int) -> Departure | None:
        """Return a rank's departure; None where it is not known: the rank is not there, or like most."""
        found = [(average.times[rank], metric) for metric, average in self._averages.items() if rank in average.times]
        return Departure(*max(found, key=lambda one: one[0])) if found else None

    def ranks(self) -> set[int]:
        """Return the ranks whose departure is known."""
        return {rank for average in self._averages.values() for rank in average.times}


def _middle(values: Mapping[int, float], ranks: RankValues) -> tuple[float, float]:
    """Return the median over the ranks, and the median distance from it."""
    if ranks.quantiles is None:  # all ranks are here
        median = _median(values.values())
        spread = _median(abs(value - median) for value in values.values())
    else:
        _, low, median, high, _ = ranks.quantiles
        spread = (high - low) / 2.0
    return (median, spread) if math.isfinite(median) and math.isfinite(spread) else (0.0, 0.0)


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else 0.0
