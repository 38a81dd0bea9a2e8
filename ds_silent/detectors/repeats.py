"""A rank that takes the same rows again and again, as with a loader that is stuck there.

The evidence is that of :mod:`ds_silent.detectors.order`.

**Of one rank** (:class:`RepeatTest`), the same rows just before: where an epoch ends, or is a few steps long, and where
rows are drawn with replacement, every rank takes rows again and none is to blame. So a rank is compared with the
others: p is the largest of what the other ranks show at this step, what they showed lately, and ``TOLERATED``. Where
all ranks do it, p is 1 and no rank is named. To be named costs log N more.

**Ranks with rows of their own.** Unless the rows are dealt to all ranks from one pool, those that come again on the
rank that had them are a pass over that rank's own shard, which may be smaller than the others': such repeats are no
evidence of a wrong order, nor of low coverage. Of the n different rows that a rank has had, passes in any new order
each bring one of the w newest with probability at most w / n: a single rank's p is at least that. A rank that is stuck
had other rows before, and so a large n.

**A batch that is drawn again by chance** (a pool of generated images, a replay buffer) brings all of its rows at once:
once ranks have taken batches again and gone on, without having been named, a step counts as one draw and not as many,
unless one pool deals to all ranks at random.

**A rank that has no new rows** took the same tensors again, at step after step, while the others' were new: that is no
matter of evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Score, StepRecord
from ds_silent.text import named

TOLERATED = 0.01  # share of rows that come again in health
MEMORY = 64  # measured steps
ROUNDING = 1e-9  # of a score at the cap of a single rate, which is an alarm
_STUCK = np.array([0.5, 0.99])  # who is stuck repeats all rows, or those of one of two workers
ROUNDS, ONCE = 4.0, 1.5  # rows of a rank by its different rows: it goes round, it does not; the estimate is off by 1/8
_ROOM = 1.5  # the number of different rows is an estimate


class RepeatTest(Detector):
    """Follow each rank's own repeats; ``attributed``: those of the newest step by ranks that these speak against."""

    key = "repeats"
    stored = ("evidence", "lately", "since", "by_batch")

    def __init__(self, log_threshold: float):
        self.attributed = 0.0
        self._threshold = log_threshold
        self._start(0)

    def _start(self, ranks: int) -> None:
        self._evidence: Array = np.full((ranks, len(_STUCK)), -np.inf)
        self._lately: Array = np.zeros((2, ranks))  # repeats and rows, the older the less
        self._since: dict[int, int] = {}  # of the ranks that are named
        self._whole = np.zeros(ranks, dtype=bool)  # most rows of the newest step came again
        self._by_batch = False  # batches are drawn again by chance

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return the finding of one step, if any; without ids nothing changes."""
        self.attributed, self.scores = 0.0, ()
        if extras.stuck:
            return [self._stuck_for_sure(record, extras.stuck)]
        if extras.own_repeats is None or extras.own_rows is None or len(extras.own_rows) < 2:
            return []
        repeats, rows = np.array(extras.own_repeats, dtype=float), np.array(extras.own_rows, dtype=float)
        ranks = len(rows)
        if len(self._evidence) != ranks:
            self._start(ranks)
        self._lately = self._lately * (1.0 - 1.0 / MEMORY) + np.stack([repeats, rows])
        expected = np.maximum(TOLERATED, np.maximum(rate_of_others(repeats, rows), rate_of_others(*self._lately)))
        if extras.dealt != "random" and extras.passes is not None:
            shard = _ROOM * np.array(extras.passes.window) / np.maximum(1.0, extras.passes.distinct)
            expected = np.maximum(expected, np.minimum(1.0, shard))
        threshold = self._threshold + math.log(ranks)
        p = np.minimum(expected[:, None], _STUCK)  # a rate that is expected is no evidence: q = p makes it 0
        draws = self._draws(repeats, rows, by_chance=extras.dealt != "random")
        gain = log_gain((repeats * draws)[:, None], (rows * draws)[:, None], _STUCK, p)
        self._evidence, grown = grown_evidence(self._evidence, gain, threshold)
        scores, uncut = mean_evidence(self._evidence), mean_evidence(grown)
        nearest = int(np.argmax(uncut))
        self.scores = (Score("repeats", float(uncut[nearest]), threshold, nearest),)
        for rank, score in enumerate(scores.tolist()):
            if score >= threshold - ROUNDING:
                self._since.setdefault(rank, record.step)
            elif score < threshold / 2:
                self._since.pop(rank, None)
        self.attributed = float(repeats[(gain > 0.0).any(axis=1)].sum())
        return [self._finding(repeats, rows, uncut, threshold)] if self._since else []

    def _draws(self, repeats: Array, rows: Array, by_chance: bool) -> Array:
        """Return what each rank's rows count, (N,): together as one draw where batches come again by chance."""
        whole = 2 * repeats > rows
        gone_on = self._whole & ~whole if len(self._whole) == len(whole) else np.zeros_like(whole)  # a resume forgets
        gone_on[list(self._since)] = False
        self._whole, self._by_batch = whole, self._by_batch or bool(gone_on.any())
        return np.asarray(1.0 / np.maximum(1.0, rows)) if self._by_batch and by_chance else np.ones(len(rows))

    def _stuck_for_sure(self, record: StepRecord, stuck: tuple[int, ...]) -> Finding:
        """Name ranks of which it is no matter of evidence, until they have new rows."""
        ranks, threshold = record.world_size, self._threshold + math.log(record.world_size)
        if len(self._evidence) != ranks:
            self._start(ranks)
        self._evidence[list(stuck)] = threshold + math.log(len(_STUCK))
        for rank in stuck:
            self._since.setdefault(rank, record.step)
        return self._finding(np.ones(ranks), np.ones(ranks), np.full(ranks, threshold), threshold)

    def _finding(self, repeats: Array, rows: Array, scores: Array, threshold: float) -> Finding:
        stuck = sorted(self._since)
        ranks, since, score = tuple(stuck), min(self._since.values()), float(scores[stuck].max())
        share = repeats[stuck].sum() / max(1.0, rows[stuck].sum())
        message = (
            f"{named(ranks).capitalize()} take{'s' * (len(ranks) == 1)} the same rows again and again: {share:.0%} of "
            "the rows of this step had been taken there just before, while other ranks go on."
        )
        remedy = (
            "Look at the data loader there: a worker that died, an iterator that is made anew at each step, or a "
            "position that does not advance."
        )
        key, where = f"repeated-rows:{','.join(map(str, ranks))}", "loader"
        found = Finding(key, "data-order-mismatch", "error", ranks, where, score, threshold, message, remedy, since)
        return found.by_chance()


class FewRowsTest(Detector):
    """Note a rank that goes round among few rows while each of the others has new ones.

    A small shard of a rank's own looks the same, so it is no more than a note: once for each rank. Where rows are dealt
    from one pool, :class:`OrderTest` reports them.
    """

    key = "few_rows"
    stored = ("noted",)

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}  # rank -> step

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes, passes = (), evidence.passes
        if passes is None or evidence.dealt == "random" or len(passes.taken) < 2 or not all(passes.taken):
            return []
        rounds = np.array(passes.taken) / np.maximum(1.0, passes.distinct)
        rank, others = int(np.argmax(rounds)), np.sort(rounds)[:-1]
        if rounds[rank] < ROUNDS or others[-1] > ONCE or rank in self._noted:
            return []
        if any(finding.kind == "data-order-mismatch" and rank in finding.ranks for finding in before):
            return []
        self._noted[rank] = record.step
        message = (
            f"Rank {rank} goes round among about {passes.distinct[rank]:.0f} rows, {rounds[rank]:.0f} times so far, "
            "while the rows of every other rank are new. A small shard of its own looks like this too."
        )
        remedy = (
            "Do nothing if this rank's own data are so few. Else look there for a list of batches that is read again "
            "and again (itertools.cycle), or for a position that does not advance."
        )
        note = Event(record.step, "data-order-mismatch", "info", (rank,), "loader", None, None, message, remedy)
        self.notes = (note,)
        return []


def rate_of_others(repeats: Array, rows: Array) -> Array:
    """(N,) share of repeats among the rows of all other ranks; from few rows rather too high than too low."""
    return np.asarray((repeats.sum() - repeats + 1.0) / (rows.sum() - rows + 1.0))


def log_gain(repeats: Any, rows: Any, rates: Array, expected: Any) -> Array:
    """Log evidence of so many repeats among rows for each rate, where a share is expected."""
    fewer = np.maximum(rows - repeats, 0.0)
    return np.asarray(repeats * np.log(rates / expected) + fewer * np.log((1.0 - rates) / (1.0 - expected)))


def grown_evidence(evidence: Array, gain: Array, threshold: float) -> tuple[Array, Array]:
    """The evidence after a step, (..., rates): cut at what is needed, so that a fault can end, and as it is."""
    grown = np.logaddexp(0.0, evidence) + gain
    return np.minimum(grown, threshold + math.log(evidence.shape[-1])), grown


def mean_evidence(evidence: Array) -> Array:
    """log of the mean over the rates."""
    return np.asarray(np.logaddexp.reduce(evidence, axis=-1) - math.log(evidence.shape[-1]))
