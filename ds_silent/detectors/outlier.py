"""One rank whose loss, gradient norm or direction is not like the others': named when the evidence suffices.

For each statistic a :class:`~ds_silent.detectors.sequential.SequentialTest`; their evidence is averaged over the
statistics, and rank r is flagged when its average reaches N * A, with A the mean number of steps between false alarms:
then the average over the ranks is at least A, which under the null takes A steps or more in the mean.

What is explained is taken out first, with coefficients learnt from earlier steps and common to all ranks, which keeps
the ranks exchangeable and the guarantee intact: the norm given the loss, the number of label tokens and the cosine (a
short batch has a large, noisy gradient, and that is no fault); the cosine given the loss and the tokens.

Label tokens dealt unevenly break the null without any fault. So the same evidence is collected for "this rank's token
count differs", and a rank is flagged only when its statistics differ by more than its tokens do: evidence is divided
by the evidence of the tokens, which can only lower it. A norm that depends on the tokens never says more about which
rank is odd than the tokens themselves.

A flagged rank leaves the comparison and the history, back to the step where its fault began; it is itself compared
with the others until half of the (log) evidence is taken back. Two ranks cannot outvote each other: both are named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.evidence import Evidence, Finding, named
from ds_silent.detectors.explained import Explained
from ds_silent.detectors.sequential import Array, SequentialTest
from ds_silent.records import StepRecord

STATISTICS = ("loss", "gradient norm", "gradient direction")
_MEANING = {
    ("loss", 1): "a higher loss than the others",
    ("loss", -1): "a lower loss than the others",
    ("gradient norm", 1): "larger gradients than the others (given its loss and its tokens)",
    ("gradient norm", -1): "smaller gradients than the others (given its loss and its tokens)",
    ("gradient direction", 1): "a gradient that agrees with the others' mean more than theirs do",
    ("gradient direction", -1): "a gradient that agrees with the others' mean less than theirs do",
}
_REMEDY = (
    "Look at this rank's rows (labels, tokenization, another source of data); if they are sound, run this host's "
    "hardware diagnostics and swap the device: silent data corruption looks like this."
)


class OutlierTest:
    """Follows the ranks of one run.

    Args:
        ranks: N, at least 2.
        log_threshold: log A of the mean number of measured steps between false alarms of this detector.
    """

    def __init__(self, ranks: int, log_threshold: float):
        self.ranks = ranks
        self._threshold = log_threshold + math.log(ranks)
        cap = self._threshold + math.log(len(STATISTICS))
        self._tests = {name: SequentialTest(ranks, cap) for name in STATISTICS}
        self._tokens = SequentialTest(ranks, cap)
        self._norm, self._direction = Explained(3), Explained(2)
        self._flagged: dict[int, dict[str, Any]] = {}

    def step(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """Findings of one step: one per flagged rank."""
        healthy = np.array([rank not in self._flagged for rank in range(self.ranks)])
        tokens = _column(extras.label_tokens, self.ranks)
        with np.errstate(all="ignore"):  # non-finite values are left out one by one below
            log_tokens = np.log(tokens)
            loss = _column(record.loss.per_rank, self.ranks)
            cosine = _column(record.direction.per_rank, self.ranks)
            log_norm = np.log(_column(record.grad_norm.per_rank, self.ranks))
            columns = {
                "loss": loss,
                "gradient norm": self._norm.residual(log_norm, [loss, log_tokens, cosine], healthy),
                "gradient direction": self._direction.residual(cosine, [loss, log_tokens], healthy),
            }
        for name, values in columns.items():
            self._tests[name].step(record.step, values, healthy)
        self._tokens.step(record.step, log_tokens, healthy)
        score = self.score()
        self._end(score)
        self._flag(score, healthy)
        return [self._finding(rank, score[rank], record.step) for rank in self._flagged]

    def score(self) -> Array:
        """(N,) log evidence against each rank, to be compared with ``threshold``."""
        evidence = np.stack([self._tests[name].log_evidence() for name in STATISTICS])
        together = np.logaddexp.reduce(evidence, axis=0) - math.log(len(STATISTICS))
        return np.asarray(together - self._tokens.log_cusum())

    def _end(self, score: Array) -> None:
        for rank in [rank for rank in self._flagged if score[rank] < self._threshold / 2]:
            del self._flagged[rank]
            self._forget(np.arange(self.ranks) == rank)

    def _flag(self, score: Array, healthy: Any) -> None:
        candidates = np.where(healthy, score, -np.inf)
        rank = int(np.argmax(candidates))
        if not candidates[rank] >= self._threshold:
            return
        name = max(STATISTICS, key=lambda name: self._tests[name].log_evidence()[rank])
        onset = self._tests[name].onset(rank)
        peers = [int(other) for other in np.flatnonzero(healthy)]
        ranks = tuple(peers) if len(peers) == 2 else (rank,)
        self._flagged[rank] = {"ranks": list(ranks), "where": name, "since": onset.step, "sign": onset.sign}
        for test in (*self._tests.values(), self._tokens):
            test.unlearn(rank, onset.step)
        self._forget(healthy & (np.arange(self.ranks) != rank))  # they were compared with a faulty rank

    def _forget(self, ranks: Any) -> None:
        for test in (*self._tests.values(), self._tokens):
            test.forget_evidence(ranks)

    def _finding(self, rank: int, score: float, step: int) -> Finding:
        flag = self._flagged[rank]
        ranks, where, since = tuple(flag["ranks"]), flag["where"], flag["since"]
        if len(ranks) == 2:
            message = (
                f"{named(ranks).capitalize()} disagree in their {where} since about step {since}; with two ranks to "
                "compare nobody can say which of them is wrong."
            )
        else:
            message = f"Rank {rank} has {_MEANING[where, flag['sign']]}, since about step {since}."
        return Finding(
            f"outlier-rank:{rank}",
            "outlier-rank",
            "warning",
            ranks,
            where,
            float(score),
            self._threshold,
            message,
            _REMEDY,
            since,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ranks": self.ranks,
            "tests": {name: test.state_dict() for name, test in self._tests.items()},
            "tokens": self._tokens.state_dict(),
            "norm": self._norm.state_dict(),
            "direction": self._direction.state_dict(),
            "flagged": {str(rank): flag for rank, flag in self._flagged.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; of another number of ranks nothing can be taken over."""
        if state["ranks"] != self.ranks:
            return
        for name, test in self._tests.items():
            test.load_state_dict(state["tests"][name])
        self._tokens.load_state_dict(state["tokens"])
        self._norm.load_state_dict(state["norm"])
        self._direction.load_state_dict(state["direction"])
        self._flagged = {int(rank): dict(flag) for rank, flag in state["flagged"].items()}


def _column(values: Sequence[float] | None, ranks: int) -> Array:
    return np.full(ranks, np.nan) if values is None else np.array(values, dtype=np.float64)
