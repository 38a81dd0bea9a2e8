"""The run against its own past: a jump of the noise scale or of a dispersion. Information, never an alarm.

A value is compared with the earlier values of its *segment*, ``SEGMENT`` successive steps. Null hypothesis: within a
segment the values are exchangeable, whatever their distribution and whatever came before it.

Then the rank of the i-th value among the first i is uniform on 1..i and *independent of the earlier ranks* (Rényi
1962; the rank of a value in a window that slides is not independent of them, because one window's luck lasts as long
as the window). So with q_k the normal score of position k among i,

    L_i = exp(t q_rank) / mean over k = 1..i of exp(t q_k)

has expectation exactly 1 given the earlier ranks, and so has (L_i)^g with g 0 or 1 as the earlier ranks say: a bet may
be left out for any reason that the past gives. M_n = (1 + M_{n-1}) L_n, begun anew with each segment, is a nonnegative
submartingale whose mean is the number b of bets so far, so it reaches A within a segment with probability b / A at
most (Doob). Equal values are ordered by an equidistributed sequence.

**A healthy training is not exchangeable from the start.** From random weights the noise scale grows by a factor of a
hundred within fifty steps, and waves of it come later, as warm-up ends and as the model learns something. A value that
changes all the time does not jump. So a note needs more than evidence; whatever it needs besides only lowers the rate:

* *A past without a trend.* The first ``REFERENCE`` values of a segment only tell what is usual. If their ranks are
  correlated with time by more than ``TREND`` (a change by a standard deviation of the noise gives 0.28; chance goes
  beyond it in 5 % of the segments), nothing is bet in the rest.
* *More than the level moves anyway.* The medians of successive blocks of ``BLOCK`` values, in units of the spread
  within them, moved by w (root mean square over the last ``BLOCKS`` pairs). The jump in those units must be above
  sqrt(2 log A) w: a level that walks on as it did, by normal moves, goes that far once in A steps at most. Until
  ``FEWEST`` pairs are known nothing is bet: the first ``(FEWEST + 1) * BLOCK`` steps of a run say nothing.

A segment's last values have no time left to be noticed and its first ones are its reference. So each number is followed
four times, in segments that are a quarter of a segment apart, each of which bets in half of the steps. Every one of
these tests has its own threshold, 3 * 4 / 2 * A: then their rates add up to the stated one, although they depend on
each other. What one says within a segment of a note on the same number is not said again.

t = 2 (and -2) is at its best for a jump by 2 to 3 standard deviations of the steps' noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import NormalDist, median
from typing import Any

import numpy as np

from ds_silent.detectors.finding import Detector, Finding, with_odds
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Score, StepRecord

SEGMENT = 128  # values
REFERENCE = 64  # of them, on which nothing is bet
TREND = 0.25  # rank correlation with time, in the reference
BLOCK, BLOCKS, FEWEST = 32, 8, 4
NEWEST = 8  # values that say where it jumped to
_TILTS = np.array([2.0, -2.0])
_NAMES = ("noise scale", "loss dispersion", "gradient-norm dispersion")
_STARTS = tuple(range(0, SEGMENT, SEGMENT // 4))
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_NOTHING = -700.0  # log 0: JSON has no infinity
_FAR = 1e3  # spreads; a move without any spread is so far


@dataclass
class _Series:
    """One number, followed in segments that begin at ``start`` modulo ``SEGMENT``."""

    start: int
    segment: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of each value among those up to it
    evidence: list[float] = field(default_factory=lambda: [_NOTHING] * len(_TILTS))  # log
    usual: float | None = None  # how much the level moves from block to block; None: no bets

    def add(self, count: int, value: float, usual: float | None) -> None:
        """Add one value; ``count``: those before it in the whole run, ``usual``: see :class:`_Level`."""
        if count % SEGMENT == self.start:
            self.segment, self.positions, self.evidence, self.usual = [], [], [_NOTHING] * len(_TILTS), None
        if len(self.segment) == REFERENCE:
            self.usual = usual if _trend(self.positions) <= TREND else None
        self.segment.append(value)
        below, equal = sum(v < value for v in self.segment), self.segment.count(value)
        self.positions.append(below + int(count * _GOLDEN % 1.0 * equal))
        if self.usual is None or len(self.segment) <= REFERENCE:
            return
        grown = np.logaddexp(0.0, np.array(self.evidence)) + _log_gains(len(self.segment))[:, self.positions[-1]]
        self.evidence = np.maximum(grown, _NOTHING).tolist()

    def score(self) -> float:
        """Return the log of the mean evidence."""
        return float(np.logaddexp.reduce(np.array(self.evidence)) - math.log(len(_TILTS)))

    def jumped(self, deviations: float) -> bool:
        """Whether what the evidence speaks of is a jump, ``deviations`` times larger than the level's usual moves."""
        before, spread = _middle(self.segment[:REFERENCE])
        size = abs(median(self.segment[-NEWEST:]) - before)
        return self.usual is not None and size > deviations * self.usual * spread


@dataclass
class _Level:
    """Follow how much one number's level moves from block to block."""

    block: list[float] = field(default_factory=list)
    last: tuple[float, float] | None = None  # median and spread of the newest whole block
    moves: list[float] = field(default_factory=list)  # in units of the spread, the newest last

    def add(self, value: float) -> None:
        self.block.append(value)
        if len(self.block) < BLOCK:
            return
        now = _middle(self.block)
        if self.last is not None:
            moved, spread = abs(now[0] - self.last[0]), (now[1] + self.last[1]) / 2.0
            self.moves.append(0.0 if moved == 0.0 else min(moved / spread, _FAR) if spread > 0.0 else _FAR)
            del self.moves[:-BLOCKS]
        self.block, self.last = [], now

    def usual(self) -> float | None:
        """Return the root mean square of the newest moves; None while too few are known."""
        if len(self.moves) < FEWEST:
            return None
        return math.sqrt(sum(move * move for move in self.moves) / len(self.moves))


class JumpTest(Detector):
    """Follow three numbers of one run; ``rate``: stated false alarms per million steps, for the odds of a note."""

    key = "drift"

    def __init__(self, log_threshold: float, rate: float = 1.0):
        bets = (SEGMENT - REFERENCE) / SEGMENT  # of the steps
        self._rate = rate
        self._threshold = log_threshold + math.log(len(_NAMES) * len(_STARTS) * bets)
        self._deviations = math.sqrt(2.0 * log_threshold)
        self._series = {name: [_Series(start) for start in _STARTS] for name in _NAMES}
        self._levels = {name: _Level() for name in _NAMES}
        self._counts = dict.fromkeys(_NAMES, 0)
        self._noted = dict.fromkeys(_NAMES, -SEGMENT)  # value at which the newest note was made

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Make the notes of one step; nothing is learnt from a step at which anything is wrong."""
        self.scores, self.notes = (), ()
        if record.world_size > 1 and not before:
            self.notes = tuple(self.follow(record))
        return []

    def follow(self, record: StepRecord) -> list[Event]:
        """Return at most one note per number."""
        values = (record.noise_scale, _log(record.loss.std), _log(record.grad_norm.cv))
        events, saw = [], []
        for name, value in zip(_NAMES, values, strict=True):
            if value is None or not math.isfinite(value):
                continue
            usual = self._levels[name].usual()
            self._levels[name].add(value)
            largest = _NOTHING
            for number, series in enumerate(self._series[name]):
                series.add(self._counts[name], value, usual)
                score = series.score()
                largest = max(largest, score)
                if score < self._threshold or not series.jumped(self._deviations):
                    continue
                if self._counts[name] - self._noted[name] >= SEGMENT:
                    self._noted[name] = self._counts[name]
                    events.append(self._note(record.step, name, series))
                self._series[name][number] = _Series(series.start)  # begins anew, so that each jump is told once
            self._counts[name] += 1
            saw.append(Score("jump", largest if largest > _NOTHING else -math.inf, self._threshold, where=name))
        self.scores = tuple(saw)
        return events

    def _note(self, step: int, name: str, series: _Series) -> Event:
        shown = (lambda v: v) if name == _NAMES[0] else math.exp
        before, after = shown(median(series.segment[:REFERENCE])), shown(median(series.segment[-NEWEST:]))
        message = f"The {name} jumped from about {before:.3g} to about {after:.3g}."
        remedy = "Look at what changed here: learning rate, data mixture, batch size, or a loss spike."
        score = series.score()
        note = Event(step, "drift", "info", (), name, score, self._threshold, message, remedy)
        return with_odds(note, self._rate, score - self._threshold)

    def state_dict(self) -> dict[str, Any]:
        return {
            "series": {name: [asdict(series) for series in both] for name, both in self._series.items()},
            "levels": {name: asdict(level) for name, level in self._levels.items()},
            "counts": dict(self._counts),
            "noted": dict(self._noted),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._levels = {name: _Level(**level) for name, level in state["levels"].items()}
        self._series = {name: [_Series(**series) for series in state["series"][name]] for name in _NAMES}
        self._counts, self._noted = dict(state["counts"]), dict(state["noted"])


@cache
def _log_gains(count: int) -> Array:
    """(tilts, count) log L of each position among ``count`` values, lowest first."""
    normal_scores = np.array([NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)])
    exponents = _TILTS[:, None] * normal_scores
    return np.asarray(exponents - np.log(np.exp(exponents).mean(axis=1, keepdims=True)))


def _trend(positions: list[int]) -> float:
    """|rank correlation| with time: a function of the ranks alone, of which the next one is independent.

    ``positions``: of each value among those up to it.
    """
    order: list[int] = []
    for index, position in enumerate(positions):
        order.insert(position, index)
    time = np.arange(len(order), dtype=np.float64)
    ranks = np.empty_like(time)
    ranks[order] = time
    ranks, time = ranks - ranks.mean(), time - time.mean()
    return abs(float(ranks @ time) / float(time @ time)) if len(time) > 1 else 0.0


def _middle(values: list[float]) -> tuple[float, float]:
    """Median, and the standard deviation of normal values with these quartiles."""
    low, middle, high = np.quantile(np.array(values), (0.25, 0.5, 0.75)).tolist()
    return middle, (high - low) / 1.349


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and 0.0 < value < math.inf else None
