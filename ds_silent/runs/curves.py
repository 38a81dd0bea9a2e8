"""Compare the curves of two runs over all their steps: which metric is higher in one, by how much, how surely.

    for one in compare_curves("runs/sharded", "runs/replicated"):
        one.metric, one.difference, one.low, one.high, one.verdict

Steps are paired by number, and the difference B - A of each metric is a series whose neighbours are alike. Its mean has
an interval from a circular block bootstrap: blocks of consecutive steps are drawn, as long as the series' own
autocorrelation asks for (Politis and White 2004, with the correction of 2009). All metrics together are wrong in at
most 5 of 100 comparisons of equal runs: each interval is at 95 % divided among them (Bonferroni).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from ds_silent.comparison.output import say
from ds_silent.metrics import METRICS
from ds_silent.runs.run import read_run

Floats = npt.NDArray[np.float64]
LEVEL = 0.95
DRAWS = 4000
FEWEST_BLOCKS, FEWEST_STEPS = 10, 50
"""Below them an interval would say more than the series knows."""
MOST_BLOCKS = 1000
"""Blocks are longer where a series has more steps than that: it is only more careful, and needs little memory."""
ROUNDING, ZERO = 2.0**-24, 1e-12
"""Records of fp32 numbers that are no further apart, relative or at all, are the same."""
_COUNTS = ("samples", "epoch", "seconds.", "coverage.seen", "coverage.repeated", "coverage.sampled")
_BOUNDS = ("integrity.rounding_bound", "objective.mean_of_means_angle_error")
_NO_MEAN = ("noise_scale",)  # its denominator comes near 0, so one step outweighs all others; the cosine has it bounded
COMPARED = tuple(one for one in METRICS if one.column and not one.path.startswith(_COUNTS + _BOUNDS + _NO_MEAN))
"""The metrics whose curves are compared: all that a column shows but counts, times, the bounds of others and means that
do not exist."""
Verdict = Literal["the same", "higher in B", "lower in B", "no difference shown", "too few steps"]
_WORDS: dict[Verdict, str] = {
    "higher in B": "B is higher in", "lower in B": "B is lower in", "no difference shown": "no difference is shown in",
    "too few steps": "too few steps for",
}  # fmt: skip
"""What is said of metrics, but of those that are the same."""


@dataclass(frozen=True)
class CurveDifference:
    """One metric over the steps that both runs have measured.

    Attributes:
        metric: its column's name.
        steps: how many.
        mean_a, mean_b, difference: over these steps; the difference is B - A.
        low, high: of the mean difference's interval; NaN where there are too few steps.
        block: steps in a block of the bootstrap.
    """

    metric: str
    steps: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    block: int

    @property
    def blocks(self) -> int:
        """Return how many whole blocks the steps are: the mean is that of about as many independent numbers."""
        return self.steps // self.block

    @property
    def needed(self) -> int:
        """Return from how many steps on such a series has an interval."""
        return steps_needed(self.block)

    @property
    def verdict(self) -> Verdict:
        """Return what the interval says."""
        if self.difference == self.low == self.high == 0.0:
            return "the same"
        if math.isnan(self.low):
            return "too few steps"
        if self.low > 0.0:
            return "higher in B"
        return "lower in B" if self.high < 0.0 else "no difference shown"


def compare_curves(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> tuple[CurveDifference, ...]:
    """Compare the metrics of two runs' records, in the directories a and b (``output_dir``).

    Raises :class:`~ds_silent.runs.run.ReadingError` where there is no run to read.
    """
    tables = read_run(Path(a)).steps, read_run(Path(b)).steps
    found = []
    for metric in COMPARED:
        values = []
        for table in tables:
            good = table.measured(metric.column) & np.isfinite(table[metric.column])
            values.append(dict(zip(table.step[good].tolist(), table[metric.column][good].tolist(), strict=True)))
        steps = sorted(values[0].keys() & values[1].keys())
        if steps:
            ours, theirs = (np.array([of_run[step] for step in steps]) for of_run in values)
            found.append((metric.column, ours, theirs))
    level = 1.0 - (1.0 - LEVEL) / max(1, len(found))
    return tuple(difference(name, ours, theirs, level) for name, ours, theirs in found)


def difference(name: str, a: Floats, b: Floats, level: float) -> CurveDifference:
    series = b - a
    series[np.abs(series) <= ZERO + ROUNDING * np.maximum(np.abs(a), np.abs(b))] = 0.0
    block = max(block_length(series), math.ceil(len(series) / MOST_BLOCKS))
    low = high = math.nan
    if not series.any():
        low = high = 0.0
    elif len(series) >= steps_needed(block):
        low, high = mean_interval(series, block, level)
    return CurveDifference(name, len(series), a.mean(), b.mean(), series.mean(), low, high, block)


def steps_needed(block: int) -> int:
    """Return from how many steps on a series with such blocks has an interval."""
    return max(FEWEST_STEPS, FEWEST_BLOCKS * block)


def curves_sentence(found: tuple[CurveDifference, ...]) -> str:
    """Return the answer: which metrics differ, and in which no difference is shown."""
    names: dict[Verdict, list[str]] = {}
    for one in found:
        names.setdefault(one.verdict, []).append(one.metric)
    parts = [f"{words} {', '.join(names[verdict])}" for verdict, words in _WORDS.items() if verdict in names]
    steps = max(one.steps for one in found)
    over = f"Over {steps} step{'s' * (steps != 1)}"
    if not parts:
        return f"{over} every metric is the same in A and B."
    differ = "higher in B" in names or "lower in B" in names
    return f"{over} {'the curves differ' if differ else 'no curve is shown to differ'}: {'; '.join(parts)}."


def print_curves(found: tuple[CurveDifference, ...], runs: Sequence[str], console: Console) -> None:
    """Print the answer, and behind it which run is which and a line for each metric."""
    for line in (curves_sentence(found), *(f"{name}: {run}" for name, run in zip("AB", runs, strict=True))):
        say(console, line)
    table = Table()
    for title in ("metric", "blocks", "mean of A", "mean of B", "B - A", "interval", "verdict"):
        table.add_column(title, justify="left" if title in ("metric", "verdict") else "right")
    for one in found:
        interval = f"needs {one.needed} steps" if math.isnan(one.low) else f"{one.low:.4g} .. {one.high:.4g}"
        means = (f"{value:.5g}" for value in (one.mean_a, one.mean_b))
        table.add_row(one.metric, str(one.blocks), *means, f"{one.difference:.4g}", interval, one.verdict)
    console.print(table)


def mean_interval(series: Floats, block: int, level: float, seed: int = 0) -> tuple[float, float]:
    """Return the interval of the mean of a series, float64 (S,), by the circular block bootstrap.

    Each draw's mean is studentised by the spread of its own blocks: percentiles alone are too narrow where there are
    few blocks (Hall, Horowitz and Jing 1995). Blocks spread around their own mean by a share of block / S too little.
    """
    count = len(series)
    blocks = math.ceil(count / block)
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((series, series[: block - 1])))))
    means = (sums[block:] - sums[:-block]) / block  # of the block that begins at each step
    starts = np.random.default_rng(seed).integers(0, count, (DRAWS, blocks))
    drawn = means[starts]
    centre = series.mean()
    error = means.std() / math.sqrt(blocks * (1.0 - block / count))
    spreads = drawn.std(axis=1, ddof=1) / math.sqrt(blocks)
    deviations = (drawn.mean(axis=1) - centre) / np.where(spreads > 0.0, spreads, np.inf)
    below, above = np.quantile(deviations, ((1.0 - level) / 2.0, (1.0 + level) / 2.0), method="weibull")
    return float(centre - above * error), float(centre - below * error)


def block_length(series: Floats) -> int:
    """Return twice the steps of a block that the autocorrelation of a series, float64 (S,), asks for; at least 1.

    Twice, because measured on autoregressive series (0.5) of 60 to 600 steps, intervals at 99.5 % then miss the mean in
    0.5 to 1.5 % of them, and in 0.8 to 2.4 % without it.

    Source:
        Politis and White, Automatic block-length selection for the dependent bootstrap, Econometric Reviews 23 (2004),
        circular bootstrap, with the correction by Patton, Politis and White, 28 (2009).
    """
    count = len(series)
    centred = series - series.mean()
    if count < 4 or not centred.any():
        return 1
    spread = float(centred @ centred)
    run = max(5, math.ceil(math.sqrt(math.log10(count))))
    lags = min(count - 1, math.ceil(math.sqrt(count)) + run)
    rho = np.array([float(centred[lag:] @ centred[: count - lag]) / spread for lag in range(lags + 1)])
    small = np.abs(rho) < 2.0 * math.sqrt(math.log10(count) / count)
    ends = [lag for lag in range(1, lags + 2 - run) if small[lag : lag + run].all()]
    width = min(lags, 2 * max(1, ends[0] - 1)) if ends else lags
    at = np.arange(1, width + 1)
    taper = np.clip(2.0 * (1.0 - at / width), 0.0, 1.0)
    spectrum = rho[0] + 2.0 * float((taper * rho[1 : width + 1]).sum())
    curvature = 2.0 * float((taper * at * rho[1 : width + 1]).sum())
    if spectrum == 0.0:
        return 1
    length = math.ceil((2.0 * curvature**2 / (4.0 / 3.0 * spectrum**2) * count) ** (1.0 / 3.0))
    length = min(length, math.ceil(min(3.0 * math.sqrt(count), count / 3.0)))
    return 1 if length <= 1 else 2 * length
