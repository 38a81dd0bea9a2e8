"""A rank whose gradient enters the aggregate with another weight, by less than the rounding of one step hides.

    test = OwnWeightTest(ranks, log_threshold)
    findings = test.step(record, evidence.reduction.own, told=False)

In bf16 rounding explains an error of 8 % at 1,024 ranks, where one missing rank makes 0.3 %. Yet each rank knows its
own weight, to within a noise that is another one at each step (:mod:`ds_silent.exchange.constant_size`), and a rank
that is missing is so at every step. The scores of the ranks are compared like their losses: by
:class:`ds_silent.detectors.sequential.SequentialTest`, which assumes nothing of how they are distributed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Finding
from ds_silent.detectors.result import distrust
from ds_silent.detectors.sequential import SequentialTest
from ds_silent.maths.causes import OwnWeights
from ds_silent.records import Score, StepRecord
from ds_silent.text import TORCH, Words

Array = npt.NDArray[np.float64]
RECENT = 64  # steps whose weights are averaged


class OwnWeightTest:
    """Follows the ranks of one run.

    Args:
        ranks: N.
        log_threshold: log of the mean number of measured steps between false alarms of this detector.
        words: for the remedy.

    Attributes:
        saw: the largest score of the newest step.
    """

    def __init__(self, ranks: int, log_threshold: float, words: Words = TORCH):
        self.ranks, self._words = ranks, words
        self.saw: tuple[Score, ...] = ()
        self._threshold = log_threshold + float(np.log(ranks))
        self._test = SequentialTest(1, ranks, 2.0 * self._threshold)
        self._recent: deque[tuple[int, Array, Array]] = deque(maxlen=RECENT)  # step, weight - 1, 1 / variance
        self._flagged: dict[int, dict[str, Any]] = {}

    def step(self, record: StepRecord, own: OwnWeights | None, told: bool) -> list[Finding]:
        """Findings of one step: one per flagged rank.

        Args:
            own: what the ranks have found; None where nothing was.
            told: the aggregate of this step is wrong beyond rounding, which is said already.
        """
        if own is None or told:
            return self.standing()
        scores, off = own.scores.numpy(), own.weights.numpy() - 1.0
        known = scores != 0.0
        precision = np.where(known, np.square(scores / np.where(known, off, 1.0)), 0.0)
        self._recent.append((record.step, off, precision))
        healthy = np.array([rank not in self._flagged for rank in range(self.ranks)])
        self._test.step(record.step, np.where(known, scores, np.nan)[None], healthy)
        for rank in list(self._flagged):
            off_by, error = self._mean(rank, 0)
            if abs(off_by) < 2.0 * error:
                del self._flagged[rank]
                self._test.forget_evidence(np.arange(self.ranks) == rank)
        candidates = np.where(healthy, self._test.log_evidence()[0], -np.inf)
        rank = int(np.argmax(candidates))
        score = float(candidates[rank])
        self.saw = (Score("own weight", score, self._threshold, rank),)
        if score >= self._threshold:
            since = self._test.onset(0, rank).step
            off_by, error = self._mean(rank, since)
            numbers = f"{1.0 + off_by:.2f} times, with a standard error of {error:.2g}"
            self._flagged[rank] = {"since": since, "score": score, "numbers": numbers}
            self._test.unlearn(rank, since)
            self._test.forget_evidence(np.arange(self.ranks) != rank)
        return self.standing()

    def standing(self) -> list[Finding]:
        """What is flagged."""
        return [self._finding(rank) for rank in self._flagged]

    def _mean(self, rank: int, since: int) -> tuple[float, float]:
        """By how much its weight is off, on average over the recent steps from ``since`` on, and the standard error."""
        known = [(off[rank], precision[rank]) for step, off, precision in self._recent if step >= since]
        total = max(sum(precision for _, precision in known), 1e-300)
        return sum(off * precision for off, precision in known) / total, total**-0.5

    def _finding(self, rank: int) -> Finding:
        flag = self._flagged[rank]
        message = (
            f"The gradient of rank {rank} does not count once in the aggregate since about step "
            f"{flag['since']}: {flag['numbers']}, on average over the last steps. In a single step rounding hides it."
        )
        return Finding(
            key=f"own-weight:{rank}",
            kind="aggregation-error",
            severity="error",
            ranks=(rank,),
            where="aggregated gradient",
            score=flag["score"],
            threshold=self._threshold,
            message=message,
            remedy=distrust(self._words, (rank,)),
            since=flag["since"],
            log_excess=flag["score"] - self._threshold,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ranks": self.ranks,
            "test": self._test.state_dict(),
            "flagged": {str(rank): flag for rank, flag in self._flagged.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; of another number of ranks nothing can be taken over."""
        if state["ranks"] != self.ranks:
            return
        self._test.load_state_dict(state["test"])
        self._flagged = {int(rank): flag for rank, flag in state["flagged"].items()}
