"""Rows that come again before the epoch is over, and rows that never come; for single ranks see ``repeats``.

With one permutation shared by all ranks no row comes twice in an epoch. When each rank takes its share of its *own*
permutation, after a fraction f of the epoch a row has been seen with probability 1 - (1 - f/N)^N: 68.5 % at the end
with 4 ranks. Loss, norm and cosine look the same in both cases.

Null hypothesis: a consumed row repeats an earlier one with probability at most p. Evidence for a repeat rate q > p,
from m consumed rows with x repeats: (q/p)^x ((1-q)/(1-p))^(m-x), expectation at most 1; accumulated as in
``sequential`` over a grid of q > p.

**Of all ranks** (:class:`OrderTest`) p is ``TOLERATED``: rows that the data hold twice, ids that are hashes. Where rows
are known by their content only, those that the data hold several times repeat in health: p is ``TOLERATED_BY_CONTENT``,
and what is found is a warning.

**The same order in every epoch** although the data are shuffled (:class:`SameOrderTest`): no rank calls
``sampler.set_epoch``. Reported where the sampler says that it shuffles, or else, as a note, where the ids that the
script tells are not in their own order (shards may be read as they were written), or a sampler or a shuffled data set
has ``set_epoch``. Data that are walked in a fixed order by design are healthy. Null hypothesis: each epoch has a
shuffle of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.repeats import (
    MEMORY,
    ROUNDING,
    TOLERATED,
    RepeatTest,
    grown_evidence,
    log_gain,
    mean_evidence,
)
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Coverage, CutPasses, Evidence
from ds_silent.records import Event, EventKind, Score, Severity, StepRecord
from ds_silent.text import TORCH, Words, named

TOLERATED_BY_CONTENT = 0.1  # share of rows that come again in health, where the content tells them; else TOLERATED
_RATES = np.array([0.02, 0.05, 0.1, 0.25, 0.5, 0.99])  # of all ranks
_COPIES = (
    "If the data hold copies of rows, this is no fault: give ids (observe_batch; docs/ways-in.md, for a Trainer too), "
    "and the content no longer counts."
)
ORDERS_CUT, TIMES_CUT = 2, 3  # passes that are broken off and begin again: of several orders, or of one
PASSES_ALIKE = 3  # of one sampler with one epoch: the first may have been a trial, and a second its resume
_ITSELF = 0.9  # share of the rows that come again
_BY_CHANCE = 10.8  # log of the odds, as of 16 rows of 16 where two ranks have had them by chance


class OrderTest(Detector):
    """Follow the coverage of one run; ``repeats`` weighs the rows that single ranks take again."""

    key = "order"
    stored = ("evidence", "mismatch_since", "low", "own", "lately", "noted", "several")

    def __init__(self, log_threshold: float, repeats: RepeatTest | None = None):
        self._threshold, self._repeats = log_threshold, repeats
        self._evidence = np.full(len(_RATES), -np.inf)
        self._score = -math.inf  # of the evidence before the newest step's was cut at what is needed
        self._last: Coverage | None = None
        self._mismatch_since: int | None = None
        self._own = 0.0  # rows of this epoch that came again on the rank that had them
        self._lately: Array = np.zeros(2)  # those, and all that came again: of all epochs, the older the less
        self._copies = self._elsewhere = self._itself = False  # who had had the rows that come again
        self._noted: int | None = None  # since when the copies of the data come that were noted, once
        self._several = False  # it was noted, once, that rows are trained several times from a buffer
        self._low: tuple[int, float] | None = None  # since step, share seen in the newest finished epoch

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return the findings of one step. Ranks that share rows now explain repeats by that alone."""
        duplicated = any(finding.kind == "duplicate-data" for finding in before)
        attributed = 0.0 if self._repeats is None else self._repeats.attributed
        self.scores, self.notes = (), ()
        if extras.rounds > 1 and not self._several:
            self._several, self.notes = True, (_from_buffer(record, extras.rounds),)
        now, last = extras.coverage, self._last
        if now is None or not all(math.isfinite(v) for v in (now.epoch, now.seen, now.repeated)):
            return self._findings(record)
        started = last is None or now.epoch < last.epoch
        begin = Coverage(0.0, 0.0, 0.0, now.rows) if last is None or started else last
        known = now.rows * now.sampled  # of the epoch: a row that is not known is no evidence
        consumed, repeated = (now.epoch - begin.epoch) * known, (now.repeated - begin.repeated) * known
        self._last = now
        if consumed > 0:
            own = 0.0 if extras.dealt == "random" or extras.passes is None else repeated * (extras.passes.again or 0.0)
            self._own = own + (0.0 if started else self._own)
            self._copies, self._elsewhere, self._itself = self._who_had_them(now, repeated, extras)
            doubtful = 3.0 * now.error * known  # rows that may be a sketch's error
            if now.anew is not None:  # all rows of this pass may come again
                if last is None or last.anew is None:
                    self.notes += (_begun_anew(record, now, now.anew),)
                return self._findings(record)
            if not duplicated:
                certain = min(repeated - max(attributed, own), (now.repeated - now.filled) * known - doubtful)
                self._weigh(record.step, consumed, max(0.0, certain))
            self._close_epoch(record.step, now, consumed / known, self._own / known)
        return self._findings(record)

    def _who_had_them(self, now: Coverage, repeated: float, extras: Evidence) -> tuple[bool, bool, bool]:
        """Tell whether rows that come again are copies in the data, those of other ranks alone, or each rank's own.

        Known by their content they may be copies, where all samplers deal each row once. One of N ranks then has had a
        row as often as any other. Where no rank has had them itself, the ranks' data are in unlike orders. A loop that
        takes a batch twice takes it on the rank that had it, and so does one that takes a row several times in a batch,
        of which none had come before.
        """
        share, ranks = (None, 0) if extras.passes is None else (extras.passes.again, len(extras.passes.taken))
        self._lately = self._lately * (1.0 - 1.0 / MEMORY)
        self._lately += max(0.0, repeated) * np.array([1.0 if share is None else share, 1.0])
        if now.told or ranks < 2:
            return False, False, False
        own, every = self._lately
        odds = _log_odds(own, every, 1.0 / ranks)
        by_chance, itself = odds <= _BY_CHANCE, own >= _ITSELF * every and odds > _BY_CHANCE / 2
        if not now.once:
            return False, False, itself
        elsewhere = own * ranks < every and not by_chance and extras.dealt == "random"
        return by_chance or (own * ranks < every and not elsewhere), elsewhere, itself

    @property
    def _tolerated(self) -> float:
        return TOLERATED if self._last is None or self._last.told else TOLERATED_BY_CONTENT

    def _weigh(self, step: int, consumed: float, repeated: float) -> None:
        gain = log_gain(repeated, consumed, _RATES, self._tolerated)
        gain[self._tolerated >= _RATES] = -np.inf  # no alternative
        self._evidence, grown = grown_evidence(self._evidence, gain, self._threshold)
        self._score, score = float(mean_evidence(grown)), float(mean_evidence(self._evidence))
        self.scores = (Score("order", self._score, self._threshold),)
        if score >= self._threshold - ROUNDING:
            self._mismatch_since = self._mismatch_since or step
        elif score < self._threshold / 2:
            self._mismatch_since = None

    def _close_epoch(self, step: int, now: Coverage, share_of_step: float, own: float) -> None:
        if now.epoch + share_of_step <= 1.0 + now.filled + 1e-9:  # another step fits into the epoch
            return
        missing = min(now.epoch, 1.0) - now.seen - 3.0 * now.error - own
        low = missing > self._tolerated
        self._low = (self._low[0] if self._low else step, now.seen) if low else None

    def _findings(self, record: StepRecord) -> list[Finding]:
        findings: list[Finding] = []
        ranks, now = tuple(range(record.world_size)), self._last
        severity: Severity
        if self._mismatch_since is not None and now is not None:
            share = now.repeated / now.epoch if now.epoch else 0.0
            message = (
                f"Rows come again before the epoch is over: {100 * share:.1f} % of the rows consumed in this epoch "
                f"had been consumed before (epoch {now.epoch:.2f}, {100 * now.seen:.1f} % of the rows seen)."
                if share > 0.0
                else "Rows have come again before the last epoch was over."
            )
            remedy = (
                "Give every rank's sampler the same seed and call set_epoch with the same epoch everywhere; rank-"
                "dependent seeds belong to dropout and augmentation, not to the order of the data."
            )
            severity = "error" if now.told else "warning"
            if self._copies:
                severity = "info"
                message += (
                    " Rows are known by their content here, and all ranks' samplers deal one order of all rows: so the "
                    "data hold these rows several times."
                )
                remedy = "Do nothing if that is meant. Else look for copies in the data set."
            elif self._elsewhere:
                message += (
                    " Another rank had them, never the same: all ranks' samplers deal one order, but the ranks' data "
                    "sets hold the rows in orders of their own."
                )
                remedy = (
                    "Shuffle the data set with the same seed on every rank, or not at all: the sampler deals the rows."
                )
            elif self._itself:
                message += " Each rank takes again what it has taken itself."
                remedy = (
                    "Look at the loop and at the loader: a batch that is trained twice, or kept while the loader goes "
                    f"on. {_COPIES}"
                )
            elif not now.told:
                message += " Rows are known by their content here: those that the data hold several times count too."
                remedy = f"{_COPIES} Else: {remedy[0].lower()}{remedy[1:]}"
            key: EventKind = "data-order-mismatch"
            score, since = self._score, self._mismatch_since
            found = Finding(key, key, severity, ranks, "sampler", score, self._threshold, message, remedy, since)
            self._noted = since if self._noted is None and self._copies else self._noted
            if not self._copies or self._noted == since:
                findings.append(found.by_chance())
        if self._low is not None:
            since, seen = self._low
            message = (
                f"The epoch ended with {100 * seen:.1f} % of its rows seen; the others were never trained on while "
                "some were repeated."
            )
            remedy = "Look at the order of the data (see data-order-mismatch) or at ranks that share rows."
            key, most, severity = "low-coverage", 1.0 - self._tolerated, "warning"
            if self._copies:
                severity = "info"
                message = f"By their content {100 * seen:.1f} % of the epoch's rows were seen: the others are copies."
                remedy = "Do nothing if that is meant. Else look for copies in the data set."
            findings.append(Finding(key, key, severity, ranks, "epoch", seen, most, message, remedy, since))
        return findings

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": None if self._last is None else asdict(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"lately": [0.0, 0.0], "noted": None, "several": False, **state})
        self._score = float(mean_evidence(self._evidence))
        self._last = None if state["last"] is None else Coverage(**state["last"])


def _log_odds(count: float, of: float, rate: float) -> float:
    """Bound the log of the odds against so many, or so few, of ``of`` with a chance of ``rate`` each (Chernoff)."""
    share = min(1.0, count / of) if of else rate
    parts = ((share, rate), (1.0 - share, 1.0 - rate))
    return of * sum(one * math.log(one / other) for one, other in parts if one > 0.0)


def _from_buffer(record: StepRecord, times: int) -> Event:
    message = (
        f"Each row is trained {times} times before the next ones are dealt, on every rank alike: the script goes over "
        "a buffer of its own. The epoch counts each row once."
    )
    remedy = "Do nothing if that is meant, as PPO means it."
    ranks = tuple(range(record.world_size))
    return Event(record.step, "data-order-mismatch", "info", ranks, "buffer", None, None, message, remedy)


def _begun_anew(record: StepRecord, now: Coverage, severity: Severity) -> Event:
    message = (
        "The run resumed within an epoch and began its pass over the data anew: rows that had been trained come again "
        f"(so far {100 * now.repeated:.1f} % of an epoch, up to {100 * now.seen:.1f} %)."
    )
    remedy = (
        "Skip the rows that were trained: accelerate's skip_first_batches, the Trainer without ignore_data_skip, or a "
        "sampler or DataLoader that is resumed with its own state. If each pass is cut short on purpose, do nothing."
    )
    ranks = tuple(range(record.world_size))
    return Event(record.step, "data-order-mismatch", severity, ranks, "resume", now.repeated, 0.0, message, remedy)


class SameOrderTest(Detector):
    """Report an order that comes again, as :mod:`ds_silent.measure.row_tracker` sees it."""

    key = "same_order"
    stored = ("since", "score", "rows", "promised")

    def __init__(self, log_threshold: float, words: Words = TORCH, repeats: RepeatTest | None = None):
        self._threshold, self._words, self._repeats = log_threshold, words, repeats
        self._since: int | None = None
        self._score, self._rows = 0.0, 0
        self._promised = True
        self._noted = self._cut = False  # that the sampler's epoch stays, that passes are cut; once in a process

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return the finding of one step, if any; none where rows come again for another reason."""
        self.notes = ()
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
            if (cut := extras.cut_passes) is not None and _is_habit(cut) and not (self._cut or explained):
                self._cut, self.notes = True, (_cut_short(record, extras, cut),)
            if extras.passes_alike >= PASSES_ALIKE and not (self._noted or explained):
                self._noted, self.notes = True, (self._epoch_stays(record, extras.passes_alike),)
            return []
        message = (
            f"The rows come in the same order in every pass, as they came {self._rows} rows before"
            f"{', although the sampler shuffles' * self._promised}: each pass shows the model the same batches again."
        )
        remedy = (
            f"Call sampler.set_epoch(epoch) on every rank at the start of each epoch{self._words.own_sampler}, and do "
            "not seed the loader's generator anew."
        )
        epoch = 0 if extras.coverage is None else extras.coverage.rows
        if 4 * self._rows < 3 * epoch:
            message += f" A pass is broken off after {self._rows} of {epoch} rows."
            remedy = f"Go on with one iterator, where next(iter(loader)) makes one for each step. Else: {remedy}"
        if not self._promised:
            remedy = (
                f"If the order is meant to stay, do nothing. Else: {remedy} Workers that persist may not learn of it."
            )
        key: EventKind = "same-order"
        severity: Severity = "warning" if self._promised else "info"
        ranks, score, since = tuple(range(record.world_size)), self._score, self._since
        return [Finding(key, key, severity, ranks, "sampler", score, self._threshold, message, remedy, since)]

    def _epoch_stays(self, record: StepRecord, passes: int) -> Event:
        """Note what the sampler itself says, where augmented rows never come again bit for bit."""
        message = (
            f"The sampler's epoch is the same in {passes} passes in a row: although it shuffles, each "
            "pass takes the data set's places in the same order, and the same places share a batch, also where the "
            "rows themselves are augmented at random."
        )
        remedy = (
            f"Call sampler.set_epoch(epoch) on every rank at the start of each epoch{self._words.own_sampler}. Do "
            "nothing if the data set itself shuffles or draws its rows."
        )
        ranks = tuple(range(record.world_size))
        return Event(record.step, "same-order", "info", ranks, "sampler", None, None, message, remedy)


def _is_habit(cut: CutPasses) -> bool:
    """Tell whether passes are broken off by habit: a single one may have been a trial before the training."""
    return cut.orders >= ORDERS_CUT or cut.times >= TIMES_CUT


def _cut_short(record: StepRecord, evidence: Evidence, cut: CutPasses) -> Event:
    of = "" if evidence.coverage is None else f" of {evidence.coverage.rows}"
    whose = f"On {named(cut.alone)} passes" if cut.alone else "Passes"
    message = (
        f"{whose} over the data begin again in the same order after {cut.rows}{of} rows: these rows are trained once "
        "more, and in such a pass the others never come."
    )
    remedy = (
        "Look at the loop and at the sampler: go on with the same iterator, or begin the next pass with another epoch "
        "(sampler.set_epoch). Do nothing if passes are cut and repeated on purpose."
    )
    severity: Severity = "warning" if cut.promised else "info"
    ranks = cut.alone or tuple(range(record.world_size))
    return Event(record.step, "data-order-mismatch", severity, ranks, "sampler", None, None, message, remedy)
