"""The run against its own past: a jump of the noise scale or of a dispersion. Information, never an alarm.

A value is compared with the earlier values of its *segment*, ``SEGMENT`` successive steps. Null hypothesis: within a
segment the values are exchangeable, whatever their distribution and whatever came before it.

Then the rank of the i-th value among the first i is uniform on 1..i and *independent of the earlier ranks* (Rényi
1962; the rank of a value in a window that slides is not independent of them, because one window's luck lasts as long
as the window). So with q_k the normal score of position k among i,

    L_i = exp(t q_rank) / mean over k = 1..i of exp(t q_k)

has expectation exactly 1 given the earlier ranks, the product of the L of a segment is a martingale, and evidence that
adds up as in ``sequential.py`` reaches A once in A steps or more in the mean; it lives on from segment to segment,
because the ranks of the next one are independent of these. Equal values are ordered by an equidistributed sequence.

A jump just after a segment has begun finds no past to be compared with. So each number is followed twice, in segments
that are half a segment apart. Every one of these tests has its own threshold, 2 * 3 * A: then their rates add up to
the stated one, although they depend on each other. What one says within a segment of a note on the same number is
not said again.

Every training has slow trends. t = 2 (and -2) is at its best for a jump by 2 to 3 standard deviations of the steps'
noise and loses what it has won where the change within a segment is smaller than one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import NormalDist, median
from typing import Any

import numpy as np

from ds_silent.detectors.sequential import Array
from ds_silent.records import Event, StepRecord

SEGMENT = 128  # values
NEWEST = 8  # values that say where it jumped to
_TILTS = np.array([2.0, -2.0])
_NAMES = ("noise scale", "loss dispersion", "gradient-norm dispersion")
_STARTS = (0, SEGMENT // 2)
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_NOTHING = -700.0  # log 0: JSON has no infinity


@dataclass
class _Series:
    """One number, followed in segments that begin at ``start`` modulo ``SEGMENT``."""

    start: int
    segment: list[float] = field(default_factory=list)
    evidence: list[float] = field(default_factory=lambda: [_NOTHING] * len(_TILTS))  # log

    def add(self, count: int, value: float) -> None:
        """``count``: values before this one, in the whole run."""
        if count % SEGMENT == self.start:
            self.segment = []
        self.segment.append(value)
        below, equal = sum(v < value for v in self.segment), self.segment.count(value)
        position = below + int(count * _GOLDEN % 1.0 * equal)
        grown = np.logaddexp(0.0, np.array(self.evidence)) + _log_gains(len(self.segment))[:, position]
        self.evidence = np.maximum(grown, _NOTHING).tolist()

    def score(self) -> float:
        """log of the mean evidence."""
        return float(np.logaddexp.reduce(np.array(self.evidence)) - math.log(len(_TILTS)))


class DriftTest:
    """Follows three numbers of one run.

    Args:
        log_threshold: log of the mean number of measured steps between false notes.
    """

    def __init__(self, log_threshold: float):
        self._threshold = log_threshold + math.log(len(_NAMES) * len(_STARTS))
        self._series = {name: [_Series(start) for start in _STARTS] for name in _NAMES}
        self._counts = dict.fromkeys(_NAMES, 0)
        self._noted = dict.fromkeys(_NAMES, -SEGMENT)  # value at which the newest note was made

    def step(self, record: StepRecord) -> list[Event]:
        """At most one note per number."""
        values = (record.noise_scale, _log(record.loss.std), _log(record.grad_norm.cv))
        events = []
        for name, value in zip(_NAMES, values, strict=True):
            if value is None or not math.isfinite(value):
                continue
            for number, series in enumerate(self._series[name]):
                series.add(self._counts[name], value)
                if series.score() < self._threshold:
                    continue
                if self._counts[name] - self._noted[name] >= SEGMENT:
                    self._noted[name] = self._counts[name]
                    events.append(self._note(record.step, name, series))
                self._series[name][number] = _Series(series.start)  # begins anew, so that each jump is told once
            self._counts[name] += 1
        return events

    def _note(self, step: int, name: str, series: _Series) -> Event:
        shown = (lambda v: v) if name == _NAMES[0] else math.exp
        before, after = shown(median(series.segment)), shown(median(series.segment[-NEWEST:]))
        message = f"The {name} jumped from about {before:.3g} to about {after:.3g}."
        remedy = "Look at what changed here: learning rate, data mixture, batch size, or a loss spike."
        return Event(step, "drift", "info", (), name, series.score(), self._threshold, message, remedy)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "series": {name: [asdict(series) for series in both] for name, both in self._series.items()},
            "counts": dict(self._counts),
            "noted": dict(self._noted),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._series = {name: [_Series(**series) for series in state["series"][name]] for name in _NAMES}
        self._counts, self._noted = dict(state["counts"]), dict(state["noted"])


@cache
def _log_gains(count: int) -> Array:
    """(tilts, count) log L of each position among ``count`` values, lowest first."""
    scores = np.array([NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)])
    exponents = _TILTS[:, None] * scores
    return np.asarray(exponents - np.log(np.exp(exponents).mean(axis=1, keepdims=True)))


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and 0.0 < value < math.inf else None
