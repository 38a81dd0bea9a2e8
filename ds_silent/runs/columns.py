"""The numbers of every step as columns of 8 bytes each, whatever the number of ranks; and the detectors' scores.

steps.add({"step": 1, "loss": {"mean": 2.0}, ...})    # a StepTable
steps.step                       # int64 (S,)
steps["loss mean"]               # float64 (S,); NaN where not measured or not a number
steps.measured("loss mean")      # bool (S,): a NaN there was measured
scores.add({"step": 3, "scores": [{"detector": "outlier", "score": 2.0, "threshold": 16.6, "rank": 1}]})  # ScoreTable
scores.curves[("outlier", "")].score
"""

from __future__ import annotations

import bisect
import math
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ds_silent.runs.lines import METRICS, NAMES, StepLine, number, read_step, text, whole
from ds_silent.runs.spread import RankSpread

Floats = npt.NDArray[np.float64]
Real = TypeVar("Real", bound=np.floating[Any])
MOST_CURVES = 64
_AT = {name: index for index, name in enumerate(NAMES)}


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
