"""A rank so far above all others that one step is enough to say so.

    test = AtOnce(ranks=4, log_threshold=17.0)
    test.step(losses, norms, label_tokens, healthy)     # (N,) each; who stands out now, with which odds, or None

``sequential`` assumes nothing of the distribution, and pays for it: within a step of N ranks its evidence cannot exceed
log N, and against the pool of all ranks' history log (N + pool). A loss that is summed instead of averaged, 193 times
that of the others, does not need a dozen steps. But a statement from one step needs a model of how far apart healthy
ranks can be:

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

A number that may be 0 or negative (other losses than a likelihood) has no such ratio: from the first one that is not
positive on, it is not judged here. Below the others nothing is judged either: rows that are known by heart have a
loss and a gradient near 0.

**The odds.** A rank is named when log P is below -log_threshold: the rate that is stated per step, over two numbers.
Under the model this is a bound, and FLOOR is a belief: tails so heavy that no loss has them can break it at the very
first step, before the run has shown its own scale. Simulated alarms per million first steps of 4 ranks: log-normal with
sigma 0.5: 0, sigma 1: 30, sigma 2: 640; Cauchy: 500. After it the run's own gaps speak.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.sequential import Array, Flags

Ranks = npt.NDArray[np.intp]

QUANTITIES = ("loss", "gradient norm")
SHAPE, PER_GAP = 32.0, 10.0
FLOOR = 0.12
MEMORY = 256  # steps
LARGEST_SHARE = 0.25  # of the largest gap remembered, as a scale
FORGETS = (0.0, 0.01)  # of the log of the largest value so far, per step: norms sink with the learning rate's warm-up
GAPS = 4  # of the other ranks' largest values that say how far apart they are


@dataclass(frozen=True)
class StandsOut:
    """A rank that no noise explains, at this step."""

    rank: int
    quantity: str  # of QUANTITIES
    score: float  # minus the log of the odds
    threshold: float


class AtOnce:
    """Knows how far apart the ranks of a run have been.

    Args:
        ranks: N, at least 2.
        log_threshold: log of the mean number of measured steps between false alarms.
    """

    def __init__(self, ranks: int, log_threshold: float):
        self.ranks, self._threshold = ranks, log_threshold + math.log(len(QUANTITIES))
        self._gaps: list[deque[float]] = [deque(maxlen=MEMORY) for _ in QUANTITIES]
        self._highest = [-math.inf] * len(QUANTITIES)  # log, of all ranks that were not flagged
        self._signed = [False] * len(QUANTITIES)

    def step(self, losses: Array, norms: Array, label_tokens: Array, healthy: Flags) -> StandsOut | None:
        """Judge one step, and learn from it.

        Args:
            losses, norms: (N,); NaN where not known.
            label_tokens: (N,); NaN where not known, then nothing is taken off.
            healthy: (N,) ranks that are not flagged already.
        """
        found: list[StandsOut] = []
        for index, values in enumerate((losses, norms)):
            if index == 0:
                self._signed[index] |= bool((values[np.isfinite(values)] <= 0.0).any())
            if self._signed[index]:
                continue
            seen = np.flatnonzero(healthy & np.isfinite(values) & (values > 0.0))
            if len(seen) < 2:
                continue
            order = seen[np.argsort(-values[seen], kind="stable")]
            logs = np.log(values[order])
            gap = float(logs[0] - logs[1])
            score = self._score(index, logs, self._tokens_off(order, label_tokens))
            if score >= self._threshold:
                found.append(StandsOut(int(order[0]), QUANTITIES[index], score, self._threshold))
                continue  # never learnt from
            self._gaps[index].append(gap)
            self._highest[index] = max(self._highest[index] - FORGETS[index], float(logs[0]))
        return max(found, key=lambda one: one.score, default=None)

    def _score(self, index: int, logs: Array, taken_off: float) -> float:
        """Minus the log of the odds of the largest value."""
        excess = float(logs[0]) - max(float(logs[1]), self._highest[index]) - taken_off
        if not excess > 0.0:
            return 0.0
        others = logs[1 : 2 + GAPS]
        gaps = -np.diff(others) * np.arange(1, len(others))
        known = self._gaps[index]
        scales = [FLOOR, float(gaps.mean()) if len(gaps) else 0.0]
        if known:
            scales += [sum(known) / len(known), LARGEST_SHARE * max(known)]
        shape = min(SHAPE, PER_GAP * (len(gaps) + len(known) / 2))
        return shape * math.log1p(excess / (shape * max(scales))) if shape > 0.0 else 0.0

    def _tokens_off(self, order: Ranks, label_tokens: Array) -> float:
        """What its number of label tokens may add to the log of a rank's value."""
        own, others = label_tokens[order[0]], label_tokens[order[1:]]
        if not own > 0.0 or not np.isfinite(others).all():
            return 0.0
        return abs(math.log(max(float(np.median(others)), 1.0) / float(own)))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        highest = [None if value == -math.inf else value for value in self._highest]
        return {"gaps": [list(gaps) for gaps in self._gaps], "highest": highest, "signed": list(self._signed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._gaps = [deque(gaps, maxlen=MEMORY) for gaps in state["gaps"]]
        self._highest = [-math.inf if value is None else float(value) for value in state["highest"]]
        self._signed = [bool(value) for value in state["signed"]]
