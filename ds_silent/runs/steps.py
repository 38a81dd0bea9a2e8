"""The numbers of every step as columns: 8 bytes a number, whatever the number of ranks.

steps = Steps()
steps.add({"step": 1, "loss": {"mean": 2.0}, ...})
steps.step                       # int64 (S,)
steps["loss mean"]               # float64 (S,); NaN where not measured or not a number
steps.measured("loss mean")      # bool (S,): a NaN there is one that was measured
"""

from __future__ import annotations

import bisect
import math
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.runs.values import MOST_RANKS, number, whole

Floats = npt.NDArray[np.float64]
COLUMNS: dict[str, tuple[str, ...]] = {
    "samples": ("samples",),
    "epoch": ("epoch",),
    "loss mean": ("loss", "mean"),
    "loss std": ("loss", "std"),
    "loss range": ("loss", "range"),
    "norm mean": ("grad_norm", "mean"),
    "norm std": ("grad_norm", "std"),
    "norm cv": ("grad_norm", "cv"),
    "norm range": ("grad_norm", "range"),
    "norm aggregated": ("grad_norm", "aggregated"),
    "cosine mean": ("direction", "mean_cosine"),
    "cosine error": ("direction", "standard_error"),
    "pair min": ("direction", "min_cosine"),
    "pair max": ("direction", "max_cosine"),
    "noise scale": ("noise_scale",),
    "duplicates": ("coverage", "duplicates"),
    "seen": ("coverage", "seen"),
    "repeated": ("coverage", "repeated"),
    "sampled": ("coverage", "sampled"),
    "integrity error": ("integrity", "relative_error"),
    "integrity bound": ("integrity", "rounding_bound"),
    "step seconds": ("seconds", "step"),
    "observe seconds": ("seconds", "observe"),
}
"""Name -> where it stands in a line of metrics.jsonl."""
OF_RANKS = {"loss": "loss", "norm": "grad_norm", "cosine": "direction"}
"""What each rank has one of: for each, "low", "high", "median" and "spread" over the ranks are columns too.

The spread is a standard deviation that one odd rank hardly moves: by the quartiles from 8 ranks on, by the median of
the deviations from 4 on, and the plain one below.
"""
_COMPUTED = ("low", "high", "median", "spread")
_NAMES = {name: index for index, name in enumerate([*COLUMNS, *(f"{of} {c}" for of in OF_RANKS for c in _COMPUTED)])}
_TOP: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
for _name, _path in COLUMNS.items():
    _TOP.setdefault(_path[0], []).append((_NAMES[_name], _path[1:]))
_QUARTILES = 1.349  # between them, in standard deviations of a normal distribution
_DEVIATION = 1.4826


class Steps:
    """One row per measured step, by step; a step that is written again retires what was written from it on.

    Attributes:
        replica_checks: steps at which the replicas were compared, and in how many groups of equal bits they were.
        method: how directions were compared last, "sketch" or "exact"; "" where not.
    """

    def __init__(self) -> None:
        self._step, self._world = array("q"), array("q")
        self._values = [array("d") for _ in _NAMES]
        self._absent = array("q")  # a bit per column
        self.replica_checks: dict[int, int] = {}
        self.method = self.norm_method = ""

    def __len__(self) -> int:
        return len(self._step)

    def add(self, line: dict[str, Any]) -> bool:
        """A line of metrics.jsonl; False where it is no record of a step."""
        step = whole(line.get("step"))
        if step is None:
            return False
        if self._step and step <= self._step[-1]:
            self._retire(step)
        self._step.append(step)
        world = whole(line.get("world_size"), MOST_RANKS)
        self._world.append(world or 0)
        absent = 0
        for key, wanted in _TOP.items():
            held = line.get(key)
            for index, rest in wanted:
                value: Any = held
                for inner in rest:
                    value = value.get(inner) if type(value) is dict else None
                known = number(value)
                if known is None:
                    absent |= 1 << index
                    known = math.nan
                self._values[index].append(known)
        for name, key in OF_RANKS.items():
            first = _NAMES[f"{name} low"]
            known_of = _of_ranks(line.get(key))
            for index, value in enumerate(known_of or (math.nan,) * len(_COMPUTED), first):
                self._values[index].append(value)
                absent |= (known_of is None) << index
        self._absent.append(absent)
        self._note(step, line)
        return True

    def _note(self, step: int, line: dict[str, Any]) -> None:
        integrity, direction, norm = line.get("integrity"), line.get("direction"), line.get("grad_norm")
        if type(integrity) is dict:
            groups = integrity.get("replica_groups")
            count = len(groups) if type(groups) is list else whole(integrity.get("replica_group_count"), MOST_RANKS)
            if count is not None and len(self.replica_checks) < 1 << 20:
                self.replica_checks[step] = count
        if type(direction) is dict and type(direction.get("method")) is str:
            self.method = direction["method"][:20]
        if type(norm) is dict and type(norm.get("method")) is str:
            self.norm_method = norm["method"][:20]

    def _retire(self, step: int) -> None:
        kept = bisect.bisect_left(self._step, step)
        for whole_numbers in (self._step, self._world, self._absent):
            del whole_numbers[kept:]
        for values in self._values:
            del values[kept:]
        self.replica_checks = {at: groups for at, groups in self.replica_checks.items() if at < step}

    @property
    def step(self) -> npt.NDArray[np.int64]:
        """int64 (S,), ascending."""
        return np.array(self._step, dtype=np.int64)

    @property
    def world_size(self) -> npt.NDArray[np.int64]:
        """int64 (S,); 0 where it is not said."""
        return np.array(self._world, dtype=np.int64)

    def __getitem__(self, name: str) -> Floats:
        """float64 (S,); NaN where it was not measured, see :meth:`measured`."""
        return np.array(self._values[_NAMES[name]], dtype=np.float64)

    def measured(self, name: str) -> npt.NDArray[np.bool_]:
        """bool (S,)."""
        absent: npt.NDArray[np.int64] = np.array(self._absent, dtype=np.int64)
        return np.asarray(absent >> _NAMES[name] & 1 == 0, dtype=np.bool_)

    def any(self, name: str) -> bool:
        """Whether it was ever measured."""
        return bool(self.measured(name).any())

    def last(self, name: str) -> float | None:
        """The newest value; None where it was never measured."""
        found = np.flatnonzero(self.measured(name))
        return self._values[_NAMES[name]][int(found[-1])] if len(found) else None


def _of_ranks(held: Any) -> tuple[float, float, float, float] | None:
    """Lowest, highest, median and spread of the ranks whose value is finite; None where there is none."""
    if type(held) is not dict:
        return None
    each, quantiles = held.get("per_rank"), held.get("quantiles")
    if type(each) is list and each:
        values = sorted(value for value in map(number, each) if value is not None and math.isfinite(value))
        return _summed_up(values) if values else None
    if type(quantiles) is dict:
        low, q25, median, q75, high = (number(quantiles.get(name)) for name in ("min", "q25", "median", "q75", "max"))
        if low is None or q25 is None or median is None or q75 is None or high is None:
            return None
        return low, high, median, (q75 - q25) / _QUARTILES
    return None


def _summed_up(values: list[float]) -> tuple[float, float, float, float]:
    """Of sorted values."""
    count = len(values)
    median = (values[(count - 1) // 2] + values[count // 2]) / 2
    if count >= 8:
        spread = (values[-(-3 * (count - 1) // 4)] - values[(count - 1) // 4]) / _QUARTILES
    elif count >= 4:
        off = sorted(abs(value - median) for value in values)
        spread = (off[(count - 1) // 2] + off[count // 2]) / 2 * _DEVIATION
    else:
        mean = sum(value / count for value in values)
        spread = math.hypot(*(value - mean for value in values)) / math.sqrt(count)
    return values[0], values[-1], median, spread
