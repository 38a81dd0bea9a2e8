"""A rank so far above all others that one step is enough, or so far below that a few steps are.

    test = AtOnce(ranks=4, log_threshold=17.0)
    test.step(step, losses, norms, label_tokens, healthy)     # (N,) each; who stands out, with which odds, or None

``sequential`` assumes nothing of the distribution, and pays for it: within a step of N ranks its evidence cannot exceed
log N, and with the pool of all ranks' history log (N + pool). A loss that is summed instead of averaged, 193 times that
of the others, does not need a dozen steps. But a statement from one step needs a model of how far apart healthy ranks
can be.

**The model.** The loss and the gradient norm of a rank are positive, and the largest value among the ranks exceeds
the next one by a factor exp(E) whose tail is no heavier than

    P(E > y) = (1 + y / (SHAPE * b)) ^ -SHAPE                       (generalised Pareto, of the *logarithm*)

with a scale b that the run itself shows. For exponential E that is, for values with a power-law tail of index 1/b
(Cauchy: b = 1), the gaps between successive order statistics y_(1) >= y_(2) >= ... are independent and j (y_(j) -
y_(j+1)) has mean b for every j (Rényi 1953): so the other ranks' own gaps at this very step, and the newest MEMORY
steps' largest gaps, all say what b is. b is the largest of

* the mean of the remembered largest gaps (of ranks that were not flagged), and the mean of the other ranks' gaps now;
* a share of the largest gap remembered: what has happened before may happen again, a little larger;
* FLOOR, so that a run that begins with equal ranks (random weights, log V on all of them) may spread.

The finite SHAPE is the price of not knowing b exactly and of tails heavier than a power law; it is smaller, and tails
are heavier, while few gaps are known: PER_GAP for each gap between other ranks at this very step, half as much for each
one remembered. So four ranks suffice for a statement at the very first step, of three or two some steps must be known.
What is light-tailed, as norms of large batches are, is far within this.

What is compared is the excess over the *run's own* largest value too: a hard row late in a training is not larger than
everything was at its beginning. And what other numbers of label tokens can do is taken off: a mean over t tokens is at
most t times as large as one over all of them. A rank with a single label token is no fault.

**Some steps, one after the other.** The law above is that of an exponential gap whose rate is known no better than a
Gamma distribution of SHAPE tells. All steps have one rate, so that k gaps have

    P(E_1 > y_1, ..., E_k > y_k) = (1 + (y_1 + ... + y_k) / (SHAPE * b)) ^ -SHAPE

and excesses of the same rank add up, over up to LASTS steps. Half of the odds are for the single step, half are dealt
to the longer runs. Only excesses of more than APART count, factors that no rank's share of the data explains again and
again; and such a rank is not learnt from before its run is over: else the first step of a fault would be "the run's own
largest value", and the fault healthy from then on.

A number that may be 0 or negative (other losses than a likelihood) has no such ratio: from the first one that is not
positive on, it is not judged here.

**Below the others** the gradient norm is judged by the same rule of its inverse. Rows that are known by heart have a
gradient near 0, so a single step says nothing there: the same rank must stand out for LASTING steps, one after the
other, which chance gives to one of N ranks (1 / N) ^ (LASTING - 1) of the times at most. It has BELOW_SHARE of the
rate. Of losses nothing is said: one near 0 is no fault.

**The odds.** A rank is named when log P is below -log_threshold: the rate that is stated per step, over two numbers.
Under the model this is a bound, and FLOOR is a belief: tails so heavy that no loss has them can break it at the very
first step, before the run has shown its own scale. Simulated alarms per million first steps of 4 ranks, over both
quantities: log-normal with sigma 0.5: 0, sigma 1: 13, sigma 2: 1,100; Cauchy: 960; in the five steps after the first
one, together: 0, 20, 100, 190. Then the run's own gaps speak.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.sequential import Array, Flags, median
from ds_silent.records import Score

Ranks = npt.NDArray[np.intp]

QUANTITIES = ("loss", "gradient norm")
SIDES = ((0, 1), (1, 1), (1, -1))  # which quantity, above or below the others
SHAPE, PER_GAP = 32.0, 10.0
FLOOR = 0.12
MEMORY = 256  # steps
LARGEST_SHARE = 0.25  # of the largest gap remembered, as a scale
FORGETS = (0.0, 0.01)  # of the log of the largest value so far, per step: norms sink with the learning rate's warm-up
GAPS = 4  # of the other ranks' largest values that say how far apart they are
LASTS, APART = 8, math.log(8.0)  # steps one after the other, of excesses beyond
LASTING = 3  # steps that a rank stands out for where one is not enough
BELOW_SHARE = 1 / 16  # of the rate


@dataclass(frozen=True)
class StandsOut:
    """A rank that no noise explains."""

    rank: int
    quantity: str  # of QUANTITIES
    sign: int  # +1: above the others
    score: float  # minus the log of the odds
    threshold: float
    since: int  # the step at which it began to stand out


@dataclass(frozen=True)
class _Run:
    """Steps, one after the other, at which one rank was far above all others: not learnt from yet."""

    rank: int
    since: int
    gaps: tuple[float, ...] = ()
    excess: float = 0.0  # of all steps
    highest: float = -math.inf  # log of its largest value; of those below, of its inverse

    def longer(self, gap: float, excess: float, value: float) -> _Run:
        return _Run(self.rank, self.since, (*self.gaps, gap), self.excess + excess, max(self.highest, value))


class AtOnce:
    """Learn how far apart the ranks of a run are, and find one that is further; ``scores`` are of the newest step."""

    def __init__(self, ranks: int, log_threshold: float):
        self.scores: tuple[Score, ...] = ()
        self.ranks = ranks
        above = log_threshold + math.log(len(QUANTITIES)) - math.log1p(-BELOW_SHARE)
        self._thresholds = [above if sign > 0 else log_threshold - math.log(BELOW_SHARE) for _, sign in SIDES]
        self._gaps: list[deque[float]] = [deque(maxlen=MEMORY) for _ in SIDES]
        self._highest = [-math.inf] * len(SIDES)  # log, of all ranks that were not flagged
        self._signed = False  # a loss was not positive
        self._runs: list[_Run | None] = [None] * len(SIDES)

    def step(
        self, step: int, losses: Array, norms: Array, label_tokens: Array, healthy: Flags, least: int = 1
    ) -> StandsOut | None:
        """Judge one step, and learn from it.

        Args:
            losses, norms: (N,); NaN where not known.
            label_tokens: (N,); NaN where not known, then nothing is taken off.
            healthy: (N,) ranks that are not flagged already.
            least: steps for which a rank must stand out, one after the other.
        """
        self.scores = ()
        self._signed |= bool((losses[np.isfinite(losses)] <= 0.0).any())
        found = [
            self._judge(step, index, (losses, norms)[quantity], label_tokens, healthy, least)
            for index, (quantity, _) in enumerate(SIDES)
            if not (quantity == 0 and self._signed)
        ]
        return max(filter(None, found), key=lambda one: one.score, default=None)

    def _judge(
        self, step: int, index: int, values: Array, label_tokens: Array, healthy: Flags, least: int
    ) -> StandsOut | None:
        """Judge one quantity on one side: return a rank that stands out, learn from all that do not."""
        quantity, sign = QUANTITIES[SIDES[index][0]], SIDES[index][1]
        seen = np.flatnonzero(healthy & np.isfinite(values) & (values > 0.0))
        if len(seen) < 2:
            return None
        order = seen[np.argsort(-sign * values[seen], kind="stable")]
        logs, least = sign * np.log(values[order]), least if sign > 0 else max(least, LASTING)
        rank, gap = int(order[0]), float(logs[0] - logs[1])
        excess = float(logs[0]) - max(float(logs[1]), self._highest[index]) - self._tokens_off(order, label_tokens)
        run = self._runs[index]
        if run is not None and not (run.rank == rank and excess > APART and len(run.gaps) < LASTS):
            self._learn(index, run.gaps, run.highest)  # it is over: chance, or what this training is like
            run, excess = None, min(excess, float(logs[0]) - self._highest[index])
        if excess > APART:
            run = (run or _Run(rank, step)).longer(gap, excess, float(logs[0]))
        self._runs[index] = run
        shape, scale = self._spread_of(index, logs)
        length = 1 if run is None else len(run.gaps)
        threshold = self._thresholds[index] + math.log(2.0 if length == 1 else 2.0 * (LASTS - 1))
        excess = max(excess if run is None else run.excess, 0.0)
        score = shape * math.log1p(excess / (shape * scale)) if shape > 0.0 else 0.0
        self.scores += (Score("at-once", score, threshold, rank, quantity if sign > 0 else f"{quantity}, below"),)
        if score >= threshold and length >= least:
            self._runs[index] = None  # never learnt from
            return StandsOut(rank, quantity, sign, score, threshold, step if run is None else run.since)
        if run is None:
            self._learn(index, (gap,), float(logs[0]))
        elif len(logs) > 2:  # the others, as if it were not there
            self._learn(index, (float(logs[1] - logs[2]),), float(logs[1]))
        return None

    def _learn(self, index: int, gaps: tuple[float, ...], highest: float) -> None:
        self._gaps[index].extend(gaps)
        self._highest[index] = max(self._highest[index] - FORGETS[SIDES[index][0]], highest)

    def _spread_of(self, index: int, logs: Array) -> tuple[float, float]:
        """Return SHAPE and b, from the remembered gaps and the other ranks' gaps at this step."""
        others = logs[1 : 2 + GAPS]
        gaps = -np.diff(others) * np.arange(1, len(others))
        known = self._gaps[index]
        scales = [FLOOR, float(gaps.mean()) if len(gaps) else 0.0]
        if known:
            scales += [sum(known) / len(known), LARGEST_SHARE * max(known)]
        return min(SHAPE, PER_GAP * (len(gaps) + len(known) / 2)), max(scales)

    def _tokens_off(self, order: Ranks, label_tokens: Array) -> float:
        """Return what the first rank's number of label tokens may add to the log of its value."""
        own, others = label_tokens[order[0]], label_tokens[order[1:]]
        if not own > 0.0 or not np.isfinite(others).all():
            return 0.0
        return abs(math.log(max(float(median(others)), 1.0) / float(own)))

    def state_dict(self) -> dict[str, Any]:
        highest = [None if value == -math.inf else value for value in self._highest]
        runs = [None if run is None else asdict(run) for run in self._runs]
        gaps = [list(gaps) for gaps in self._gaps]
        return {"gaps": gaps, "highest": highest, "signed": self._signed, "runs": runs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        for index, (gaps, value) in enumerate(zip(state["gaps"], state["highest"], strict=True)):
            self._gaps[index] = deque(gaps, maxlen=MEMORY)
            self._highest[index] = -math.inf if value is None else float(value)
        self._signed = bool(state["signed"])
        for index, run in enumerate(state["runs"]):
            self._runs[index] = None if run is None else _Run(**{**run, "gaps": tuple(run["gaps"])})
