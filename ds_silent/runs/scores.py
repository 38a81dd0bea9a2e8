"""How near each detector was to saying something, as columns.

scores = ScoreTable()
scores.add({"step": 3, "scores": [{"detector": "outlier", "score": 2.0, "threshold": 16.6, "rank": 1}]})
scores.curves[("outlier", "")].score      # float64
"""

from __future__ import annotations

import bisect
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ds_silent.runs.values import number, text, whole

MOST_CURVES = 64


@dataclass
class Curve:
    """Of one detector, or of one of the numbers that it judges."""

    step: array[int] = field(default_factory=lambda: array("q"))
    score: array[float] = field(default_factory=lambda: array("d"))
    threshold: array[float] = field(default_factory=lambda: array("d"))
    rank: array[int] = field(default_factory=lambda: array("q"))  # -1 where it is no rank's


class ScoreTable:
    """Attributes:
    curves: by detector and by what was judged ("" where the detector has one number).
    """

    def __init__(self) -> None:
        self.curves: dict[tuple[str, str], Curve] = {}
        self._last = -1

    def __len__(self) -> int:
        return max((len(curve.step) for curve in self.curves.values()), default=0)

    def add(self, line: dict[str, Any]) -> bool:
        """A line of scores.jsonl; False where it is none."""
        step, scores = whole(line.get("step")), line.get("scores")
        if step is None or type(scores) is not list:
            return False
        if step <= self._last:
            for curve in self.curves.values():
                kept = bisect.bisect_left(curve.step, step)
                for held in (curve.step, curve.score, curve.threshold, curve.rank):
                    del held[kept:]
        self._last = step
        for one in scores[: 4 * MOST_CURVES]:
            if type(one) is dict:
                self._one(step, one)
        return True

    def _one(self, step: int, one: dict[str, Any]) -> None:
        score, threshold = number(one.get("score")), number(one.get("threshold"))
        key = _key(one.get("detector"), one.get("where"))
        if score is None or threshold is None or (key not in self.curves and len(self.curves) >= MOST_CURVES):
            return
        curve = self.curves.setdefault(key, Curve())
        rank = whole(one.get("rank"), 1 << 20)
        curve.step.append(step)
        curve.score.append(score)
        curve.threshold.append(threshold)
        curve.rank.append(-1 if rank is None else rank)


def _key(detector: Any, where: Any) -> tuple[str, str]:
    usual = isinstance(detector, str) and (where is None or isinstance(where, str))
    return _cleaned(detector, where) if usual else (text(detector, 60), text(where, 120))


@lru_cache(maxsize=4 * MOST_CURVES)
def _cleaned(detector: str, where: str | None) -> tuple[str, str]:
    """The same few come at every step."""
    return text(detector, 60), text(where, 120)
