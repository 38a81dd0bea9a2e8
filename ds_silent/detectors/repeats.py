"""One rank takes the same rows again and again while the others go on: a loader that is stuck.

Where an epoch ends, or is a few steps long, and where rows are drawn with replacement, every rank takes rows again and
none is to blame. So a rank is compared with the others: of its rows, a share p is expected to be repeats, the largest
of what the other ranks show at this step, what they showed lately, and ``TOLERATED``. Where all ranks do it, p is 1 and
nobody is named here; ``order`` sees it.

Unless the rows are dealt to all ranks from one pool, a rank may have a shard of its own, and a small one begins again
soon. Of the n different rows that a rank has had, passes in any new order each bring one of the w newest with
probability at most w / n: that is expected too. A rank that is stuck had other rows before, and so a large n.

Null hypothesis: a row of the rank is a repeat with probability at most p. Evidence as in ``order``, per rank:
(q/p)^x ((1-q)/(1-p))^(m-x) for m rows with x repeats, over a grid of q > p; to be named costs log N more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Score, StepRecord
from ds_silent.text import named

TOLERATED = 0.01  # share of rows that come again in health
_RATES = np.array([0.5, 0.99])  # who is stuck repeats all rows, or those of one of two workers
_MEMORY = 64  # measured steps
_ROOM = 1.5  # the number of different rows is an estimate


class RepeatTest(Detector):
    """Follow each rank's own repeats.

    Args:
        log_threshold: log of the mean number of measured steps between false alarms.

    Attributes:
        attributed: repeats of the newest step by ranks that these speak against.
        scores: the largest of the ranks' scores at the newest step, if rows are known.
    """

    key = "repeats"
    stored = ("evidence", "lately", "since")

    def __init__(self, log_threshold: float):
        self.attributed = 0.0
        self._threshold = log_threshold
        self._start(0)

    def _start(self, ranks: int) -> None:
        self._evidence: Array = np.full((ranks, len(_RATES)), -np.inf)
        self._lately: Array = np.zeros((2, ranks))  # repeats and rows, the older the less
        self._since: dict[int, int] = {}  # of the ranks that are named

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """The finding of one step, if any; without ids nothing changes."""
        self.attributed, self.scores = 0.0, ()
        if extras.own_repeats is None or extras.own_rows is None or len(extras.own_rows) < 2:
            return []
        repeats, rows = np.array(extras.own_repeats, dtype=float), np.array(extras.own_rows, dtype=float)
        ranks = len(rows)
        if len(self._evidence) != ranks:
            self._start(ranks)
        self._lately = self._lately * (1.0 - 1.0 / _MEMORY) + np.stack([repeats, rows])
        expected = np.maximum(TOLERATED, np.maximum(rate_of_others(repeats, rows), rate_of_others(*self._lately)))
        if extras.dealt != "random" and extras.passes is not None:
            shard = _ROOM * np.array(extras.passes.window) / np.maximum(1.0, extras.passes.distinct)
            expected = np.maximum(expected, np.minimum(1.0, shard))
        threshold = self._threshold + math.log(ranks)
        p = np.minimum(expected[:, None], _RATES)  # a rate that is expected is no evidence: q = p makes it 0
        gain = repeats[:, None] * np.log(_RATES / p)
        gain += (rows - repeats)[:, None] * np.log((1.0 - _RATES) / (1.0 - p))
        grown = np.logaddexp(0.0, self._evidence) + gain
        self._evidence = np.minimum(grown, threshold + math.log(len(_RATES)))
        scores, uncut = (np.logaddexp.reduce(log, axis=1) - math.log(len(_RATES)) for log in (self._evidence, grown))
        nearest = int(np.argmax(uncut))
        self.scores = (Score("repeats", float(uncut[nearest]), threshold, nearest),)
        for rank, score in enumerate(scores.tolist()):
            if score >= threshold - 1e-9:  # the cap itself is an alarm
                self._since.setdefault(rank, record.step)
            elif score < threshold / 2:
                self._since.pop(rank, None)
        guilty = tuple(sorted(self._since))
        self.attributed = float(repeats[(gain > 0.0).any(axis=1)].sum())
        return [self._finding(guilty, repeats, rows, uncut, threshold)] if guilty else []

    def _finding(self, ranks: tuple[int, ...], repeats: Array, rows: Array, scores: Array, threshold: float) -> Finding:
        chosen = list(ranks)
        share = repeats[chosen].sum() / max(1.0, rows[chosen].sum())
        message = (
            f"{named(ranks).capitalize()} take{'s' * (len(ranks) == 1)} the same rows again and again: {share:.0%} of "
            "the rows of this step had been taken there just before, while other ranks go on."
        )
        remedy = (
            "Look at the data loader there: a worker that died, an iterator that is made anew at each step, or a "
            "position that does not advance."
        )
        key = f"repeated-rows:{','.join(map(str, ranks))}"
        score, since = float(scores[chosen].max()), min(self._since.values())
        return Finding(
            key,
            "data-order-mismatch",
            "error",
            ranks,
            "loader",
            score,
            threshold,
            message,
            remedy,
            since,
            log_excess=score - threshold,
        )


def rate_of_others(repeats: Array, rows: Array) -> Array:
    """(N,) share of repeats among the rows of all other ranks; from few rows rather too high than too low."""
    return np.asarray((repeats.sum() - repeats + 1.0) / (rows.sum() - rows + 1.0))
