"""Rows that come again before the epoch is over, and rows that never come.

With one permutation shared by all ranks no row comes twice in an epoch. When each rank takes its share of its *own*
permutation, after a fraction f of the epoch a row has been seen with probability 1 - (1 - f/N)^N: 68.5 % at the end
with 4 ranks. Loss, norm and cosine look the same in both cases.

Null hypothesis: a consumed row repeats an earlier one with probability at most ``TOLERATED`` (rows that the data hold
twice, ids that are hashes). Evidence for a repeat rate q > TOLERATED, from m consumed rows with x repeats:
(q/p)^x ((1-q)/(1-p))^(m-x), expectation at most 1; accumulated as in ``sequential.py`` over a grid of q > p. Where rows
are known by their content only, those that the data hold several times repeat in health: p is ``TOLERATED_BY_CONTENT``,
and what is found is a warning.

The same order in every epoch although the data are shuffled: nobody calls ``sampler.set_epoch``. Told where the sampler
says that it shuffles, or else, as a note, where the ids that the script tells are not in their own order: shards may be
read as they were written. Data that are walked in a fixed order by design are healthy. Null hypothesis: each epoch has
a shuffle of its own.

Unless the rows are dealt to all ranks from one pool, those that come again on the rank that had them are a pass over
that rank's own shard, which may be smaller than the others': such repeats are no evidence, here nor of low coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.repeats import TOLERATED, RepeatTest
from ds_silent.detectors.sequential import Array
from ds_silent.detectors.stored import listed, unlisted
from ds_silent.measure.evidence import Coverage, Evidence
from ds_silent.records import Score, StepRecord
from ds_silent.text import TORCH, Words

TOLERATED_BY_CONTENT = 0.1
_RATES = np.array([0.02, 0.05, 0.1, 0.25, 0.5, 0.99])


class OrderTest(Detector):
    """Follow the coverage of one run.

    Args:
        log_threshold: log of the mean number of measured steps between false alarms.
        repeats: weighs the rows that single ranks take again.

    Attributes:
        scores: what was weighed at the newest step, if anything.
    """

    key = "order"

    def __init__(self, log_threshold: float, repeats: RepeatTest | None = None):
        self._threshold, self._repeats = log_threshold, repeats
        self._evidence = np.full(len(_RATES), -np.inf)
        self._score = -math.inf
        self._last: Coverage | None = None
        self._tolerated = TOLERATED
        self._mismatch_since: int | None = None
        self._own = 0.0  # rows of this epoch that came again on the rank that had them
        self._low: tuple[int, float] | None = None  # since step, share seen in the newest finished epoch

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return the findings of one step. Ranks that share rows now explain repeats by that alone."""
        duplicated = any(finding.kind == "duplicate-data" for finding in before)
        attributed = 0.0 if self._repeats is None else self._repeats.attributed
        self.scores = ()
        now, last = extras.coverage, self._last
        if now is None or not all(math.isfinite(v) for v in (now.epoch, now.seen, now.repeated)):
            return self._findings(record)
        new_epoch = last is not None and now.epoch < last.epoch
        started = last is None or new_epoch
        known = now.rows * now.sampled  # of the epoch: a row that is not known is no evidence
        consumed = (now.epoch - (0.0 if started or last is None else last.epoch)) * known
        repeated = (now.repeated - (0.0 if started or last is None else last.repeated)) * known
        self._last = now
        self._tolerated = TOLERATED if now.told else TOLERATED_BY_CONTENT
        if consumed > 0:
            own = 0.0 if extras.dealt == "random" or extras.passes is None else repeated * (extras.passes.again or 0.0)
            self._own = own + (0.0 if started else self._own)
            doubtful = 3.0 * now.error * known  # rows that may be a sketch's error
            if not duplicated:
                certain = min(repeated - max(attributed, own), now.repeated * known - doubtful)
                self._weigh(record.step, consumed, max(0.0, certain))
            self._close_epoch(record.step, now, consumed / known, self._own / known)
        return self._findings(record)

    def _weigh(self, step: int, consumed: float, repeated: float) -> None:
        p = self._tolerated
        gain = repeated * np.log(_RATES / p) + max(consumed - repeated, 0.0) * np.log((1 - _RATES) / (1 - p))
        gain[p >= _RATES] = -np.inf  # no alternative
        cap = self._threshold + math.log(len(_RATES))
        grown = np.logaddexp(0.0, self._evidence) + gain
        self._evidence, self._score = np.minimum(grown, cap), _mean(grown)
        self.scores = (Score("order", self._score, self._threshold),)
        score = _mean(self._evidence)
        if score >= self._threshold - 1e-9:  # the cap of a single rate, with its rounding, is an alarm
            self._mismatch_since = self._mismatch_since or step
        elif score < self._threshold / 2:
            self._mismatch_since = None

    def score(self) -> float:
        """log of the mean evidence, before the newest step's was cut at what is needed."""
        return self._score

    def _close_epoch(self, step: int, now: Coverage, share_of_step: float, own: float) -> None:
        if now.epoch + share_of_step <= 1.0 + 1e-9:  # another step fits into the epoch
            return
        missing = min(now.epoch, 1.0) - now.seen - 3.0 * now.error - own
        low = missing > self._tolerated
        self._low = (self._low[0] if self._low else step, now.seen) if low else None

    def _findings(self, record: StepRecord) -> list[Finding]:
        findings = []
        everyone = tuple(range(record.world_size))
        now = self._last
        if self._mismatch_since is not None and now is not None:
            share = now.repeated / now.epoch if now.epoch else 0.0
            message = (
                f"Rows come again before the epoch is over: {100 * share:.1f} % of the rows consumed in this epoch "
                f"had been consumed before (epoch {now.epoch:.2f}, {100 * now.seen:.1f} % of the rows seen)."
            )
            remedy = (
                "Give every rank's sampler the same seed and call set_epoch with the same epoch everywhere; rank-"
                "dependent seeds belong to dropout and augmentation, not to the order of the data."
            )
            if not now.told:
                message += " Rows are known by their content here: those that the data hold several times count too."
            findings.append(
                Finding(
                    "data-order-mismatch",
                    "data-order-mismatch",
                    "error" if now.told else "warning",
                    everyone,
                    "sampler",
                    self.score(),
                    self._threshold,
                    message,
                    remedy,
                    self._mismatch_since,
                    log_excess=self.score() - self._threshold,
                )
            )
        if self._low is not None:
            since, seen = self._low
            message = (
                f"The epoch ended with {100 * seen:.1f} % of its rows seen; the others were never trained on while "
                "some were repeated."
            )
            remedy = "Look at the order of the data (see data-order-mismatch) or at ranks that share rows."
            findings.append(
                Finding(
                    "low-coverage",
                    "low-coverage",
                    "warning",
                    everyone,
                    "epoch",
                    seen,
                    1.0 - self._tolerated,
                    message,
                    remedy,
                    since,
                )
            )
        return findings

    def state_dict(self) -> dict[str, Any]:
        return {
            "evidence": listed(self._evidence),
            "last": None if self._last is None else asdict(self._last),
            "mismatch_since": self._mismatch_since,
            "low": self._low,
            "own": self._own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evidence = unlisted(state["evidence"])
        self._score = _mean(self._evidence)
        self._last = None if state["last"] is None else Coverage(**state["last"])
        self._mismatch_since = state["mismatch_since"]
        self._own = float(state.get("own", 0.0))
        self._low = None if state["low"] is None else (state["low"][0], state["low"][1])


class SameOrderTest(Detector):
    """Report an order that comes again, as :mod:`ds_silent.measure.row_tracker` sees it.

    Args:
        log_threshold: log of the mean number of measured steps between false alarms.
        words: for the remedy.
        repeats: weighs the rows that single ranks take again.

    Attributes:
        scores: the odds at the newest step, where a pass has ended there.
    """

    key = "same_order"
    stored = ("since", "score", "rows", "promised")

    def __init__(self, log_threshold: float, words: Words = TORCH, repeats: RepeatTest | None = None):
        self._threshold, self._words, self._repeats = log_threshold, words, repeats
        self._since: int | None = None
        self._score, self._rows = 0.0, 0
        self._promised = True

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return the finding of one step, if any; none where rows come again for another reason."""
        explained = any(finding.kind in ("data-order-mismatch", "low-coverage") for finding in before)
        explained |= self._repeats is not None and self._repeats.attributed > 0
        seen = extras.same_order
        self.scores = () if seen is None else (Score("same-order", seen.log_odds, self._threshold),)
        if seen is not None and not seen.again:
            self._since = None
        elif seen is not None and seen.log_odds >= self._threshold and not explained:
            self._since = self._since or record.step
            self._score, self._rows, self._promised = seen.log_odds, seen.rows, seen.promised
        if self._since is None:
            return []
        message = (
            f"The rows come in the same order in every epoch, as they came {self._rows} rows before"
            f"{', although the sampler shuffles' * self._promised}: each epoch shows the model the same batches again."
        )
        remedy = (
            f"Call sampler.set_epoch(epoch) on every rank at the start of each epoch{self._words.own_sampler}, and do "
            "not seed the loader's generator anew."
        )
        everyone = tuple(range(record.world_size))
        return [
            Finding(
                "same-order",
                "same-order",
                "warning" if self._promised else "info",
                everyone,
                "sampler",
                self._score,
                self._threshold,
                message,
                remedy,
                self._since,
            )
        ]


def _mean(evidence: Array) -> float:
    """log of the mean over the rates."""
    return float(np.logaddexp.reduce(evidence) - math.log(len(_RATES)))
