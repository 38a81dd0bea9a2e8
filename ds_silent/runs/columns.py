"""What is kept of the lines with numbers: columns of the steps, curves of scores, and of many steps the extremes.

steps.add({"step": 1, "loss": {"mean": 2.0}, ...})    # a StepTable: columns of 8 bytes a number
steps.step                       # int64 (S,)
steps["loss mean"]               # float64 (S,); NaN where not measured or not a number
steps.measured("loss mean")      # bool (S,): a NaN there was measured
scores.add({"step": 3, "scores": [{"detector": "outlier", "score": 2.0, "threshold": 16.6, "rank": 1}]})  # ScoreTable
scores.curves[("outlier", "")].score
spread = Envelope(width=2 * layers)     # numbers of each rank, layer or pair of ranks
spread.add(step, values)                # float32 (width,)
spread.buckets()                        # Buckets: steps (B, 2), low and high (B, width)

Of an envelope's steps at most about 1,000 buckets are kept, however many there are: when there are more, two become
one. Nothing is averaged, so a value that stood out at one step still does.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ds_silent.runs.lines import METRICS, NAMES, StepLine, number, numbers, read_step, text, whole

Floats = npt.NDArray[np.float64]
Values = npt.NDArray[np.float32]
Real = TypeVar("Real", bound=np.floating[Any])
MOST_CURVES = 64
_AT = {name: index for index, name in enumerate(NAMES)}
_BLOCK = 256  # steps that are taken up together; a power of two
_NUMBERS = 1 << 22  # that are kept, at most about twice
_Part = tuple[int, int, int, Values, Values]  # first step, last step, count, lowest, highest
MOST_MATRICES = 48
MOST_LAYERS = 2000


def finite(values: npt.NDArray[Real]) -> npt.NDArray[Real]:
    """Return those that are neither NaN nor infinite."""
    known: npt.NDArray[Real] = values[np.isfinite(values)]
    return known


class StepTable:
    """One row per measured step, by step; a step that is written again retires the rows from it on.

    ``replica_checks``: by step, how many groups of equal bits the replicas formed; ``newest``: the line added last.
    """

    def __init__(self) -> None:
        self._step, self._world = array("q"), array("q")
        self._values = [array("d") for _ in NAMES]
        self._absent = array("q")  # a bit per column
        self.replica_checks: dict[int, int] = {}
        self.spread = RankSpread()
        self.newest: StepLine | None = None

    def __len__(self) -> int:
        return len(self._step)

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line of metrics.jsonl; False where it is not a record of a step."""
        found = read_step(line)
        if found is None:
            return False
        self.newest, step = found, found.step
        if self._step and step <= self._step[-1]:
            _retire(self._step, step, self._world, self._absent, *self._values)
            self.replica_checks = {at: groups for at, groups in self.replica_checks.items() if at < step}
        self._step.append(step)
        self._world.append(found.world_size)
        values = [found.values[name] for name in NAMES]
        for column, value in zip(self._values, values, strict=True):
            column.append(math.nan if value is None else value)
        self._absent.append(sum(1 << at for at, value in enumerate(values) if value is None))
        if found.replica_groups is not None and len(self.replica_checks) < 1 << 20:
            self.replica_checks[step] = found.replica_groups
        self.spread.add(step, *(found.ranks[one].each if one in found.ranks else None for one in METRICS))
        return True

    @property
    def step(self) -> npt.NDArray[np.int64]:
        """The measured steps: int64 (S,), ascending."""
        return np.array(self._step, dtype=np.int64)

    @property
    def world_size(self) -> int:
        """Ranks at the newest step; 0 where it was not written."""
        return self._world[-1] if self._world else 0

    def __getitem__(self, name: str) -> Floats:
        """Return a column, float64 (S,); NaN where it was not measured, see :meth:`measured`."""
        return np.array(self._values[_AT[name]], dtype=np.float64)

    def measured(self, name: str) -> npt.NDArray[np.bool_]:
        """Return at which steps it was measured: bool (S,)."""
        absent: npt.NDArray[np.int64] = np.array(self._absent, dtype=np.int64)
        return np.asarray(absent >> _AT[name] & 1 == 0, dtype=np.bool_)

    def any(self, name: str) -> bool:
        """Return whether it was ever measured."""
        return bool(self.measured(name).any())

    def recent(self, name: str, count: int) -> list[float]:
        """Return the last ``count`` values that were measured."""
        return [self._values[_AT[name]][at] for at in np.flatnonzero(self.measured(name))[-count:]]

    def last(self, name: str) -> float | None:
        """Return the newest value; None where it was never measured."""
        return next(iter(self.recent(name, 1)), None)


def _retire(steps: array[int], step: int, *columns: array[Any]) -> None:
    """Delete the rows of this step and of later ones."""
    kept = bisect.bisect_left(steps, step)
    for column in (steps, *columns):
        del column[kept:]


@dataclass
class ScoreCurve:
    """The scores of one detector, or of one of the numbers that it judges."""

    step: array[int] = field(default_factory=lambda: array("q"))
    score: array[float] = field(default_factory=lambda: array("d"))
    threshold: array[float] = field(default_factory=lambda: array("d"))
    rank: array[int] = field(default_factory=lambda: array("q"))  # -1 where it is no rank's

    def shares(self) -> Floats:
        """Return score over threshold, at least 0; NaN where the threshold is not above 0."""
        score, threshold = np.array(self.score), np.array(self.threshold)
        with np.errstate(all="ignore"):
            return np.where(threshold > 0, np.maximum(score / threshold, 0.0), np.nan)


class ScoreTable:
    """The scores of all detectors: by detector and by what was judged ("" where the detector has one number)."""

    def __init__(self) -> None:
        self.curves: dict[tuple[str, str], ScoreCurve] = {}
        self._last = -1

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line of scores.jsonl; False where it is not one."""
        step, scores = whole(line.get("step")), line.get("scores")
        if step is None or type(scores) is not list:
            return False
        for curve in self.curves.values() if step <= self._last else ():
            _retire(curve.step, step, curve.score, curve.threshold, curve.rank)
        self._last = step
        for one in scores[: 4 * MOST_CURVES]:
            if type(one) is dict:
                self._one(step, one)
        return True

    def _one(self, step: int, one: dict[str, Any]) -> None:
        score, threshold, rank = number(one.get("score")), number(one.get("threshold")), whole(one.get("rank"), 1 << 20)
        detector, where = one.get("detector"), one.get("where")
        key = _names(detector if isinstance(detector, str) else "", where if isinstance(where, str) else "")
        if score is None or threshold is None or (key not in self.curves and len(self.curves) >= MOST_CURVES):
            return
        curve = self.curves.setdefault(key, ScoreCurve())
        curve.step.append(step)
        curve.score.append(score)
        curve.threshold.append(threshold)
        curve.rank.append(-1 if rank is None else rank)


@lru_cache(maxsize=4 * MOST_CURVES)  # the same few come at every step
def _names(detector: str, where: str) -> tuple[str, str]:
    return text(detector, 60), text(where, 120)


# -- Of many steps the lowest and the highest --------------------------------------------------------------------------


@dataclass(frozen=True)
class Buckets:
    """Consecutive measured steps in each."""

    steps: npt.NDArray[np.int64]  # (B, 2): first and last
    low: Values  # (B, width)
    high: Values


class Envelope:
    """The lowest and the highest of ``width`` numbers over consecutive steps; NaN where there was none.

    ``prepare``: (steps, width) to (steps, width), for whole blocks at once.
    """

    def __init__(self, width: int, prepare: Callable[[Values], Values] | None = None):
        self.width, self._prepare = width, prepare
        self._most = max(64, min(512, _NUMBERS // max(width, 1)))
        self._per_bucket = 1
        self._rows: list[Values] = []
        self._steps: list[int] = []
        self._done: list[_Part] = []

    def add(self, step: int, values: Values) -> None:
        """Add a step; a step that comes again retires the buckets that begin at it or later."""
        if (self._steps and step <= self._steps[-1]) or (self._done and step <= self._done[-1][1]):
            kept = sum(1 for one in self._steps if one < step)
            del self._steps[kept:], self._rows[kept:]
            self._done = [one for one in self._done if one[0] < step]
        self._steps.append(step)
        self._rows.append(values)
        if len(self._rows) == _BLOCK:
            self._done = self._with_rows()
            self._rows, self._steps = [], []
            while len(self._done) > 2 * self._most:
                self._per_bucket *= 2
                self._done = [_joined(self._done[at : at + 2]) for at in range(0, len(self._done), 2)]

    def buckets(self) -> Buckets:
        """Return the buckets of all steps so far, of which there must be one."""
        parts = self._with_rows() if self._rows else self._done
        steps = np.array([(first, last) for first, last, *_ in parts], dtype=np.int64)
        return Buckets(steps, np.stack([low for *_, low, _ in parts]), np.stack([high for *_, high in parts]))

    def _with_rows(self) -> list[_Part]:
        rows = np.stack(self._rows)
        rows = rows if self._prepare is None else self._prepare(rows)
        each = min(self._per_bucket, _BLOCK)
        starts = np.arange(0, len(rows), each)
        if each == 1:
            low = high = rows
        elif len(rows) % each or np.isnan(rows).any():
            low, high = np.fmin.reduceat(rows, starts), np.fmax.reduceat(rows, starts)
        else:  # many times faster
            grouped = rows.reshape(-1, each, self.width)
            low, high = grouped.min(axis=1), grouped.max(axis=1)
        ends = [*(starts[1:] - 1).tolist(), len(rows) - 1]
        spans = zip(starts.tolist(), ends, low, high, strict=True)
        parts = [(self._steps[a], self._steps[b], b - a + 1, one, other) for a, b, one, other in spans]
        if not self._done or self._done[-1][2] + parts[0][2] > self._per_bucket:
            return self._done + parts
        return [*self._done[:-1], _joined([self._done[-1], parts[0]]), *parts[1:]]


class RankSpread:
    """Each rank's distance from the median of all ranks, of each of the metrics; of the logarithm where it is a ratio.

    A rank without a number (NaN) is at infinity; a quantity that was not measured is NaN. ``parts``: ranks, and an
    envelope of metrics x ranks numbers; one for each number of ranks in its turn.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, Envelope]] = []

    def add(self, step: int, *metrics: npt.ArrayLike | None) -> None:
        """Add the ranks' values of a step, in the order of the metrics; None for what was not measured."""
        with np.errstate(over="ignore"):
            each = [None if values is None else np.asarray(values, dtype=np.float32) for values in metrics]
        ranks = max((len(values) for values in each if values is not None), default=0)
        if ranks == 0:
            return
        if not self.parts or self.parts[-1][0] != ranks:
            self.parts = [*self.parts[-7:], (ranks, Envelope(len(METRICS) * ranks, _deviations))]
        row = np.full((len(METRICS), ranks), _NOT_MEASURED, dtype=np.float32)
        for at, values in enumerate(each):
            if values is not None and len(values) == ranks:
                row[at] = values
        self.parts[-1][1].add(step, row.reshape(-1))


_NOT_MEASURED = np.float32(-3.4e38)


def _deviations(rows: Values) -> Values:
    """Return the distances of (S, metrics x N) values from the median of the step's ranks."""
    each = rows.reshape(len(rows), len(METRICS), -1)
    missing = each == _NOT_MEASURED
    out = np.empty_like(each)
    with np.errstate(all="ignore"):
        for at, metric in enumerate(METRICS.values()):
            values = np.log(each[:, at]) if metric.ratio else each[:, at]
            away = values - _median(values)
            out[:, at] = np.where(np.isnan(away), np.inf, away)
    out[missing] = np.nan
    return out.reshape(len(rows), -1)


def _median(values: Values) -> Values:
    """Return (S, 1), of the finite; of many ranks the lower of the two in the middle, found in half the time."""
    finite = np.isfinite(values)
    middle = (values.shape[1] - 1) // 2
    if finite.all() and values.shape[1] <= 64:
        return np.median(values, axis=1, keepdims=True)
    if finite.all():
        return np.asarray(np.partition(values, middle, axis=1)[:, middle : middle + 1], dtype=np.float32)
    ordered = np.sort(np.where(finite, values, np.inf), axis=1)
    last = np.maximum(finite.sum(axis=1, keepdims=True) - 1, 0)
    low, high = (np.take_along_axis(ordered, at, 1) for at in (last // 2, -(-last // 2)))
    return np.asarray((low + high) / np.float32(2), dtype=np.float32)


def _joined(parts: list[_Part]) -> _Part:
    """Make one bucket of two neighbours, or of one."""
    first, last, count, low, high = zip(*parts, strict=True)
    return first[0], last[-1], sum(count), np.fmin(low[0], low[-1]), np.fmax(high[0], high[-1])


@dataclass
class Layers:
    """The dispersion of each layer's gradient norm over the ranks, and its mean cosine."""

    names: list[str] = field(default_factory=list)
    envelope: Envelope | None = None  # 2 x layers numbers: cv, cosine

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line of layers.jsonl; False where it is not one."""
        step, layers = whole(line.get("step")), line.get("layers")
        if step is None or type(layers) is not list:
            return False
        entries = [one for one in layers[:MOST_LAYERS] if type(one) is dict]
        names = [text(one.get("name"), 200) for one in entries]
        if self.envelope is None or names != self.names:
            self.names, self.envelope = names, Envelope(2 * len(names))
        row = [number(one.get(key)) for key in ("norm_cv", "mean_cosine") for one in entries]
        with np.errstate(over="ignore"):
            self.envelope.add(step, np.array(row, dtype=np.float32))  # None becomes NaN
        return True


@dataclass
class Matrices:
    """The N x N cosines at some steps: of many steps the first, the last and some between."""

    kept: list[tuple[int, list[list[float]]]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line of matrices.jsonl; False where it is not one."""
        step, rows = whole(line.get("step")), line.get("cosines")
        if step is None or type(rows) is not list or not 0 < len(rows) <= 256:
            return False
        table = [row for one in rows if (row := numbers(one)) is not None and len(row) == len(rows)]
        if len(table) < len(rows):
            return False
        self.kept = [*(one for one in self.kept if one[0] < step), (step, table)]
        if len(self.kept) > MOST_MATRICES:
            del self.kept[1:-1:2]
        return True
