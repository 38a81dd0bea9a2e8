"""A rank whose gradient enters the aggregate with another weight, by less than the rounding of one step hides.

    test = OwnWeightTest(log_threshold)
    findings = test.step(record, evidence, before)      # above the gather limit

In bf16 rounding explains an error of 8 % at 1,024 ranks, where one missing rank makes 0.3 %. Yet each rank knows its
own weight, to within a noise that is another one at each step (:mod:`ds_silent.exchange.gather`), and a rank
that is missing is so at every step. The scores of the ranks are compared like their losses: by
:class:`ds_silent.detectors.sequential.SequentialTest`, which assumes nothing of how they are distributed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.reduction_errors import distrust
from ds_silent.detectors.sequential import Array, SequentialTest, highest, only
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Score, StepRecord
from ds_silent.text import TORCH, Words

RECENT = 64  # steps whose weights are averaged


class OwnWeightTest(Detector):
    """Follow the ranks of one run, once they know their own weights."""

    key = "own_weight"

    def __init__(self, log_threshold: float, words: Words = TORCH):
        self._log_threshold, self._words = log_threshold, words
        self._start(0)

    def _start(self, ranks: int) -> None:
        self.ranks, self.scores = ranks, ()
        self._threshold = self._log_threshold + float(np.log(max(ranks, 1)))
        self._test = SequentialTest(1, max(ranks, 1), 2.0 * self._threshold)
        self._recent: deque[tuple[int, Array, Array]] = deque(maxlen=RECENT)  # step, weight - 1, 1 / variance
        self._flagged: dict[int, dict[str, Any]] = {}

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return one finding per flagged rank. Where the aggregate is wrong beyond rounding, nothing is weighed."""
        self.scores = ()
        own = None if evidence.reduction is None else evidence.reduction.own
        if own is not None and self.ranks != record.world_size:
            self._start(record.world_size)
        wrong = any(finding.kind in ("aggregation-error", "unreduced-gradient") for finding in before)
        if own is None or wrong:
            return self.standing()
        scores, off = own.scores.numpy(), own.weights.numpy() - 1.0
        known = scores != 0.0
        precision = np.where(known, np.square(scores / np.where(known, off, 1.0)), 0.0)
        self._recent.append((record.step, off, precision))
        healthy = np.ones(self.ranks, dtype=bool)
        healthy[list(self._flagged)] = False
        self._test.step(record.step, np.where(known, scores, np.nan)[None], healthy)
        for rank in list(self._flagged):
            off_by, error = self._mean(rank, 0)
            if abs(off_by) < 2.0 * error:
                del self._flagged[rank]
                self._test.forget_evidence(only(rank, self.ranks))
        rank, score = highest(partial(self._test.log_evidence, 0), healthy)
        self.scores = (Score("own weight", score, self._threshold, rank),)
        if score >= self._threshold:
            since = self._test.onset(0, rank).step
            off_by, error = self._mean(rank, since)
            numbers = f"{1.0 + off_by:.2f} times, with a standard error of {error:.2g}"
            self._flagged[rank] = {"since": since, "score": score, "numbers": numbers}
            self._test.unlearn(rank, since)
            self._test.forget_evidence(~only(rank, self.ranks))
        return self.standing()

    def _mean(self, rank: int, since: int) -> tuple[float, float]:
        """By how much its weight is off, on average over the recent steps from ``since`` on, and the standard error."""
        known = [(off[rank], precision[rank]) for step, off, precision in self._recent if step >= since]
        total = max(sum(precision for _, precision in known), 1e-300)
        return sum(off * precision for off, precision in known) / total, total**-0.5

    def standing(self) -> list[Finding]:
        """What is flagged."""
        return [self._finding(rank, **flag) for rank, flag in self._flagged.items()]

    def _finding(self, rank: int, since: int, score: float, numbers: str) -> Finding:
        message = (
            f"The gradient of rank {rank} does not count once in the aggregate since about step "
            f"{since}: {numbers}, on average over the last steps. In a single step rounding hides it."
        )
        key, where, remedy = f"own-weight:{rank}", "aggregated gradient", distrust(self._words, (rank,))
        limit, ranks = self._threshold, (rank,)
        found = Finding(key, "aggregation-error", "error", ranks, where, score, limit, message, remedy, since)
        return found.by_chance()

    def state_dict(self) -> dict[str, Any] | None:
        """Return JSON values; None where no weights have come yet."""
        if not self.ranks:
            return None
        return {
            "ranks": self.ranks,
            "test": self._test.state_dict(),
            "flagged": {str(rank): flag for rank, flag in self._flagged.items()},
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from :meth:`state_dict`; with another number of ranks the next step begins anew."""
        if state is None:
            return
        self._start(int(state["ranks"]))
        self._test.load_state_dict(state["test"])
        self._flagged = {int(rank): flag for rank, flag in state["flagged"].items()}
