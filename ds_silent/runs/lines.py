"""Typed values and lines of records that another program may have written: what is foreign becomes None. Pure.

line = read_step({"step": 3, "loss": {"mean": 2.0, "per_rank": [1.9, 2.1]}})      # None: not a record of a step
line.values["loss mean"]         # a float, perhaps not finite; None: not measured
line.ranks["loss"].each          # [1.9, 2.1]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_silent import metrics
from ds_silent.text import one_line

MOST_STEP = 2**62
MOST_RANKS = 1 << 20
_LONGEST_TEXT = 4000
_MOST_BY_RANK = 4096  # our own lines name 64 at most
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Metric = str
"""A name in :data:`METRICS`."""
METRICS: Mapping[Metric, metrics.RankMetric] = {one.column: one for one in metrics.RANK_METRICS}
"""What each rank has one value of."""
COLUMNS = {metric.column: tuple(metric.path.split(".")) for metric in metrics.METRICS if metric.column}
"""Name, and its place in a line of metrics.jsonl."""
_OVER_RANKS = ("low", "high", "median", "spread")
NAMES = (*COLUMNS, *(f"{metric} {what}" for metric in METRICS for what in _OVER_RANKS))
"""All numbers of a step: the columns, and for each metric four over the ranks (:meth:`RankValues.over_ranks`)."""
_QUARTILES = 1.349  # between them, in standard deviations of a normal distribution
_DEVIATION = 1.4826


def number(value: Any) -> float | None:
    """Return a float, perhaps not finite; None where nothing was measured or it is not a number."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if -(2**1000) < value < 2**1000 else (math.inf if value > 0 else -math.inf)
    return _NOT_FINITE.get(value) if type(value) is str else None


def whole(value: Any, most: int = MOST_STEP) -> int | None:
    """Return a whole number from 0 to ``most``, or None."""
    return value if type(value) is int and 0 <= value <= most else None


def text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    """Return a text without control characters; "" for anything else."""
    if not isinstance(value, str):
        return ""
    return one_line(value if len(value) <= longest else f"{value[: longest - 1]}…")


def ranks(value: Any) -> tuple[int, ...]:
    """Return the ranks among the first 64 entries, in their order."""
    entries = value[:64] if isinstance(value, (list, tuple)) else ()
    return tuple(one for one in entries if whole(one, MOST_RANKS) is not None)


def of(value: Any, *keys: str) -> Any:
    """Return what stands under these keys, one inside the other; None where there is no such thing."""
    for key in keys:
        value = value.get(key) if type(value) is dict else None
    return value


def numbers(value: Any) -> list[float] | None:
    """Return a list of numbers, NaN where an entry is not one; None for an empty list or anything else."""
    if type(value) is not list or not 0 < len(value) <= MOST_RANKS:
        return None
    return [math.nan if (found := number(one)) is None else found for one in value]


@dataclass(frozen=True)
class RankValues:
    """One metric of one step: of each rank, or of many ranks their quartiles and the most extreme ones.

    ``quantiles``: lowest, three quartiles and highest; ``extremes``: as they stand in the line, by rank.
    """

    each: list[float] | None
    quantiles: tuple[float, ...] | None
    extremes: Any

    def by_rank(self) -> dict[int, float]:
        """Return the values by rank; of many ranks those that were written."""
        if self.each is not None:
            return dict(enumerate(self.each[:_MOST_BY_RANK]))
        entries = list(self.extremes.items())[:_MOST_BY_RANK] if type(self.extremes) is dict else ()
        ours = ((key, number(value)) for key, value in entries if key.isascii() and key.isdigit() and len(key) < 10)
        return {int(key): value for key, value in ours if value is not None}

    def over_ranks(self) -> tuple[float, float, float, float] | None:
        """Return lowest, highest, median and spread of the finite values; None where there are none.

        The spread is a standard deviation that one odd rank hardly moves: from the quartiles with 8 ranks or more,
        from the median of the deviations with 4 or more, and the plain one below.
        """
        if self.each is None:
            if self.quantiles is None:
                return None
            low, q25, median, q75, high = self.quantiles
            return low, high, median, (q75 - q25) / _QUARTILES
        values = sorted(filter(math.isfinite, self.each))
        if not (count := len(values)):
            return None
        median = statistics.median(values)
        if count >= 8:
            spread = (values[-(-3 * (count - 1) // 4)] - values[(count - 1) // 4]) / _QUARTILES
        elif count >= 4:
            spread = statistics.median(abs(value - median) for value in values) * _DEVIATION
        else:
            mean = sum(value / count for value in values)
            spread = math.hypot(*(value - mean for value in values)) / math.sqrt(count)
        return values[0], values[-1], median, spread


@dataclass(frozen=True)
class StepLine:
    """A line of metrics.jsonl; ``world_size`` is 0 where it was not written, a number None where it was not measured.

    ``values``: by :data:`NAMES`; ``replica_groups``: how many groups of equal bits; None where they were not compared.
    """

    step: int
    world_size: int
    values: Mapping[str, float | None]
    ranks: Mapping[Metric, RankValues]
    replica_groups: int | None


def read_step(line: dict[str, Any]) -> StepLine | None:
    """Read a line of metrics.jsonl; None where it is not a record of a step."""
    step = whole(line.get("step"))
    if step is None:
        return None
    found: dict[Metric, RankValues] = {}
    values = {name: number(of(line, *path)) for name, path in COLUMNS.items()}
    for metric, one in METRICS.items():
        over_ranks, stats = None, line.get(one.path.split(".")[0])
        if type(stats) is dict:
            five = [number(of(stats, "quantiles", name)) for name in ("min", "q25", "median", "q75", "max")]
            whole_five = tuple(part for part in five if part is not None)
            quantiles = whole_five if len(whole_five) == len(five) else None
            found[metric] = RankValues(numbers(stats.get("per_rank")), quantiles, stats.get("extremes"))
            over_ranks = found[metric].over_ranks()
        values |= zip((f"{metric} {what}" for what in _OVER_RANKS), over_ranks or (None,) * 4, strict=True)
    groups = of(line, "integrity", "replica_groups")
    count = len(groups) if type(groups) is list else whole(of(line, "integrity", "replica_group_count"), MOST_RANKS)
    return StepLine(step, whole(line.get("world_size"), MOST_RANKS) or 0, values, found, count)
