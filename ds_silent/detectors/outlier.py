"""One rank whose loss, gradient norm or direction is not like the others': named when the evidence suffices.

For each statistic a :class:`~ds_silent.detectors.sequential.SequentialTest`; their evidence is averaged over the
statistics, and rank r is flagged when its average reaches N * A, with A the mean number of steps between false alarms:
then the average over the ranks is at least A, which under the null takes A steps or more in the mean.

What is explained is taken out first, with coefficients learnt from earlier steps and common to all ranks, which keeps
the ranks exchangeable and the guarantee intact: the loss given the number of label tokens; the norm given the loss,
the tokens and the cosine (a short batch has a large, noisy gradient, and that is no fault); the cosine given the loss
and the tokens.

Label tokens dealt unevenly break the null without any fault. So the same evidence is collected for "this rank's token
count differs", and a rank is flagged only when its statistics differ by more than its tokens do: evidence is divided
by the evidence of the tokens, which can only lower it. A norm that depends on the tokens never says more about which
rank is odd than the tokens themselves. Where all ranks have as many tokens, as packed rows do, nothing can be explained
by them: each such step takes half of their (log) evidence back, or one odd batch would hide a fault for good.

A rank so far above the others that no noise explains it is flagged at its first step, by ``at_once``. The two share the
rate.

A flagged rank leaves the comparison and the history, back to the step where its fault began. The component that
flagged it goes on comparing it with the others; when half of the (log) evidence has been taken back the fault has
ended. Two ranks cannot outvote each other: both are named. Why a rank differs follows from all of its numbers, see
``likely_causes``; it is weighed once, when the rank is flagged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.at_once import AtOnce, StandsOut
from ds_silent.detectors.explained import Explained
from ds_silent.detectors.finding import Evidence, Finding, named
from ds_silent.detectors.likely_causes import causes_in_words, either_in_words, in_words, likely_causes
from ds_silent.detectors.sequential import Array, SequentialTest, strongest_tilt
from ds_silent.detectors.symptoms import Recent
from ds_silent.records import Score, StepRecord
from ds_silent.words import TORCH, Words

AT_ONCE_SHARE = 1 / 16  # of the rate: what it finds is far beyond any threshold, and the others' delay hardly grows
STATISTICS = ("loss", "gradient norm", "gradient direction")
_MEANING = {
    ("loss", 1): "a higher loss than the others (given its tokens)",
    ("loss", -1): "a lower loss than the others (given its tokens)",
    ("gradient norm", 1): "larger gradients than the others (given its loss and its tokens)",
    ("gradient norm", -1): "smaller gradients than the others (given its loss and its tokens)",
    ("gradient direction", 1): "a gradient that agrees with the others' mean more than theirs do",
    ("gradient direction", -1): "a gradient that agrees with the others' mean less than theirs do",
}
_UNKNOWN = {  # of a flag that an older version has written
    "threshold": None,
    "severity": "warning",
    "meaning": "other numbers than the others",
    "numbers": "not known",
    "why": "",
    "look_at": "this rank's rows and code",
}
_AT_ONCE = "a far larger {where} than all others, {when}: no noise explains it"


class OutlierTest:
    """Follows the ranks of one run.

    Args:
        ranks: N, at least 2.
        log_threshold: log A of the mean number of measured steps between false alarms of this detector.
        words: for the likely causes.

    Attributes:
        saw: the largest score of the ranks compared at the newest step; and what ``at_once`` saw.
    """

    def __init__(self, ranks: int, log_threshold: float, words: Words = TORCH):
        self.saw: tuple[Score, ...] = ()
        self.ranks, self._words = ranks, words
        self._threshold = log_threshold - math.log1p(-AT_ONCE_SHARE) + math.log(ranks)
        cap = 2.0 * self._threshold  # room for a rank whose tokens, by chance, were odd just before its fault
        self._test = SequentialTest(len(STATISTICS) + 1, ranks, cap)  # the last one: label tokens
        self._loss, self._norm, self._direction = Explained(1), Explained(3), Explained(2)
        self._at_once = AtOnce(ranks, log_threshold - math.log(AT_ONCE_SHARE))
        self._recent = Recent(ranks)
        self._flagged: dict[int, dict[str, Any]] = {}

    def step(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """Findings of one step: one per flagged rank."""
        self._recent.append(record, extras)
        healthy = np.array([rank not in self._flagged for rank in range(self.ranks)])
        tokens = _column(extras.label_tokens, self.ranks)
        with np.errstate(all="ignore"):  # non-finite values are left out one by one below
            log_tokens = np.log(tokens)
            loss = _column(record.loss.per_rank, self.ranks)
            cosine = _column(record.direction.per_rank, self.ranks)
            norms = _column(record.grad_norm.per_rank, self.ranks)
            apart = self._at_once.step(record.step, loss, norms, tokens, healthy)
            self.saw = self._at_once.saw
            if apart is not None:  # before anything is learnt from it
                self._flag_at_once(apart, record.step, healthy)
                healthy[apart.rank] = False
            log_norm = np.log(norms)
            norm = self._norm.residual(log_norm, [loss, log_tokens, cosine], healthy)
            direction = self._direction.residual(cosine, [loss, log_tokens], healthy)
            own_loss = self._loss.residual(loss, [log_tokens], healthy)
        self._test.step(record.step, np.stack([own_loss, norm, direction, log_tokens]), healthy)
        compared = log_tokens[healthy & np.isfinite(log_tokens)]
        if len(compared) > 1 and np.ptp(compared) == 0.0:
            self._test.halve_cusum(-1)
        self._end()
        if healthy.sum() > 1:
            self._flag(self.score(), healthy)
        else:  # nobody is left to compare the last one with
            self._test.forget_evidence(healthy)
        return self.standing()

    def standing(self) -> list[Finding]:
        """What is flagged; also the answer at a step at which ranks cannot be compared."""
        return [self._finding(rank) for rank in self._flagged]

    def score(self) -> Array:
        """(N,) log evidence against each rank, to be compared with ``threshold``."""
        together = np.logaddexp.reduce(self._test.log_evidence()[:-1], axis=0) - math.log(len(STATISTICS))
        return np.asarray(together - self._test.log_cusum()[-1])

    def _end(self) -> None:
        for rank, flag in list(self._flagged.items()):
            gain = float(self._test.gain[STATISTICS.index(flag["where"]), flag["component"], rank])
            flag["left"] = min(flag["left"] + gain, self._threshold)
            if flag["left"] < self._threshold / 2:
                del self._flagged[rank]
                self._test.forget_evidence(np.arange(self.ranks) == rank)

    def _flag(self, score: Array, healthy: Any) -> None:
        candidates = np.where(healthy, score, -np.inf)
        rank = int(np.argmax(candidates))
        self.saw += (Score("outlier", float(candidates[rank]), self._threshold, rank),)
        if not candidates[rank] >= self._threshold:
            return
        strongest = int(np.argmax(self._test.log_evidence()[:-1, rank]))
        onset = self._test.onset(strongest, rank)
        where = STATISTICS[strongest]
        flag = {"where": where, "since": onset.step, "sign": onset.sign, "component": onset.component}
        flag |= {"score": float(score[rank]), "threshold": self._threshold, "severity": "warning"}
        flag |= {"meaning": f"{_MEANING[where, onset.sign]}, since about step {onset.step}"}
        self._set_apart(rank, flag, healthy)
        self._test.forget_evidence(healthy & (np.arange(self.ranks) != rank))  # they were compared with a faulty rank

    def _flag_at_once(self, apart: StandsOut, step: int, healthy: Any) -> None:
        flag = {"where": apart.quantity, "since": apart.since, "sign": 1, "component": strongest_tilt(1)}
        flag |= {"score": apart.score, "threshold": apart.threshold, "severity": "error"}
        when = "at this step" if apart.since == step else f"since step {apart.since}"
        flag |= {"meaning": _AT_ONCE.format(where=apart.quantity, when=when), "when": when}
        self._set_apart(apart.rank, flag, healthy)

    def _set_apart(self, rank: int, flag: dict[str, Any], healthy: Any) -> None:
        """The rank leaves the comparison, and the history since its fault began; what its numbers say is kept."""
        peers = [int(other) for other in np.flatnonzero(healthy)]
        others = [other for other in peers if other != rank]
        seen = self._recent.symptoms(rank, others, flag["since"])
        causes = likely_causes(seen, self._words)
        numbers, why = in_words(seen), causes_in_words(causes)
        two = len(peers) == 2
        if two:  # the other one may be the wrong one as well
            [other] = others
            mirrored = likely_causes(self._recent.symptoms(other, [rank], flag["since"]), self._words)
            numbers, why = in_words(seen, f"rank {other}"), either_in_words({rank: causes, other: mirrored})
            causes = (*causes[:2], *mirrored[:2])
        look_at = "; then ".join(dict.fromkeys(cause.look_at for cause in causes))
        self._flagged[rank] = {
            **flag,
            "ranks": peers if two else [rank],
            "numbers": numbers,
            "why": why,
            "look_at": look_at.replace("this rank", "each rank") if two else look_at,
            "left": self._threshold,
        }
        self._test.unlearn(rank, flag["since"])

    def _finding(self, rank: int) -> Finding:
        flag = self._flagged[rank]
        ranks, where, since = tuple(flag["ranks"]), flag["where"], flag["since"]
        if len(ranks) == 2:
            when = flag.get("when", f"since about step {since}")
            message = (
                f"{named(ranks).capitalize()} disagree in their {where} {when}; with two ranks to compare nobody can "
                f"say which of them is wrong. Rank {rank} against rank {sum(ranks) - rank}: {flag['numbers']}. "
                f"{flag['why']}"
            )
        else:
            message = f"Rank {rank} has {flag['meaning']}. Against the others: {flag['numbers']}. {flag['why']}"
        return Finding(
            key=f"outlier-rank:{rank}",
            kind="outlier-rank",
            severity=flag["severity"],
            ranks=ranks,
            where=where,
            score=flag["score"],
            threshold=flag["threshold"],
            message=message,
            remedy=f"Look at {flag['look_at']}.",
            since=since,
            log_excess=flag["score"] - flag["threshold"],
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ranks": self.ranks,
            "test": self._test.state_dict(),
            "loss": self._loss.state_dict(),
            "norm": self._norm.state_dict(),
            "direction": self._direction.state_dict(),
            "at_once": self._at_once.state_dict(),
            "recent": self._recent.state_dict(),
            "flagged": {str(rank): flag for rank, flag in self._flagged.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; of another number of ranks nothing can be taken over."""
        if state["ranks"] != self.ranks:
            return
        self._test.load_state_dict(state["test"])
        self._loss.load_state_dict(state["loss"])
        self._norm.load_state_dict(state["norm"])
        self._direction.load_state_dict(state["direction"])
        if "at_once" in state:  # older states lack it
            self._at_once.load_state_dict(state["at_once"])
            self._recent.load_state_dict(state["recent"])
        self._flagged = {int(rank): {**_UNKNOWN, **flag} for rank, flag in state["flagged"].items()}


def _column(values: Sequence[float] | None, ranks: int) -> Array:
    return np.full(ranks, np.nan) if values is None else np.array(values, dtype=np.float64)
