"""Steps in at most 400 bins of equal width; of each bin the lowest, the mean and the highest. Pure.

axis = Axis.of(steps)                        # int64 (S,), ascending
curve = binned(axis, steps, values)          # float64 (S,) to low, mean, high (B,)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ds_silent.runs.columns import Floats

Ints = npt.NDArray[np.int64]
MOST_BINS = 400


@dataclass(frozen=True)
class Axis:
    """The bins; ``low`` and ``high`` are half an interval before the first and behind the last step."""

    low: float
    high: float
    bins: int

    @classmethod
    def of(cls, steps: Ints) -> Axis:
        """Make the axis of these measured steps; of none, one bin around step 1."""
        if not len(steps):
            return cls(0.5, 1.5, 1)
        first, last = float(steps[0]), float(steps[-1])
        interval = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
        low, high = first - interval / 2, last + interval / 2
        return cls(low, high, max(1, min(MOST_BINS, round((high - low) / interval))))

    def at(self, step: float) -> float:
        """Return the place of a step from 0 to 1; a step outside is at an end."""
        return min(max((step - self.low) / (self.high - self.low), 0.0), 1.0)

    def bin_of(self, steps: Ints) -> npt.NDArray[np.intp]:
        share = (steps.astype(np.float64) - self.low) / (self.high - self.low)
        return np.clip(share * self.bins, 0, self.bins - 1).astype(np.intp)

    def centre(self, index: int) -> float:
        """Return the place of a bin's centre from 0 to 1."""
        return (index + 0.5) / self.bins

    def steps(self) -> list[tuple[int, int]]:
        """Return the first and the last step that each bin may hold."""
        firsts = [math.ceil(edge - 1e-9) for edge in np.linspace(self.low, self.high, self.bins + 1).tolist()]
        return [(first, max(following - 1, first)) for first, following in pairwise(firsts)]

    def ticks(self, count: int = 6) -> list[int]:
        """Return some steps of the axis that are round numbers."""
        first, last = math.ceil(self.low), math.floor(self.high)
        found = [int(tick) for tick in ticks(first, last, count) if float(tick).is_integer() and first <= tick <= last]
        return found or [first]


@dataclass(frozen=True)
class BinnedCurve:
    """(B,) each; NaN where a bin holds no finite value. ``broken``: bins in which a measured value is not finite."""

    low: Floats
    mean: Floats
    high: Floats
    broken: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))

    @classmethod
    def line(cls, values: Floats) -> BinnedCurve:
        return cls(values, values, values)

    @property
    def empty(self) -> bool:
        return not np.isfinite(self.mean).any() and not len(self.broken)


def binned(axis: Axis, steps: Ints, values: Floats, measured: npt.NDArray[np.bool_] | None = None) -> BinnedCurve:
    """Put the values at these steps into the bins; ``measured``: where NaN and infinities were measured as such."""
    where = axis.bin_of(steps)
    finite = np.isfinite(values)
    low, high = np.full(axis.bins, np.inf), np.full(axis.bins, -np.inf)
    np.minimum.at(low, where[finite], values[finite])
    np.maximum.at(high, where[finite], values[finite])
    count = np.bincount(where[finite], minlength=axis.bins)
    with np.errstate(all="ignore"):
        # each value over its bin's count, so that huge values do not add up to infinity
        total = np.bincount(where[finite], values[finite] / count[where[finite]], minlength=axis.bins)
        mean = np.where(count > 0, np.clip(total, low, high), np.nan)
    low[count == 0] = high[count == 0] = np.nan
    broken = np.unique(where[~finite & measured]) if measured is not None else np.zeros(0, dtype=np.intp)
    return BinnedCurve(low, mean, high, broken)


def rebinned(
    axis: Axis, spans: Ints, low: npt.NDArray[np.float32], high: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return (R, B), what is furthest from 0, of steps (K, 2) with the lowest and the highest of each row (K, R).

    A bucket that lies across bins counts in each of them: nothing that stands out is lost.
    """
    furthest = np.where(np.abs(np.nan_to_num(low, nan=0.0)) > np.abs(np.nan_to_num(high, nan=0.0)), low, high)
    out = np.full((low.shape[1], axis.bins), np.nan, dtype=np.float32)
    first, last = axis.bin_of(spans[:, 0]), axis.bin_of(spans[:, 1])
    for values, a, b in zip(furthest, first, last, strict=True):
        filled, column = out[:, a : b + 1], values[:, None]
        out[:, a : b + 1] = np.where(np.isnan(filled) | (np.abs(column) > np.abs(filled)), column, filled)
    return out


def smoothed(values: Floats, window: int = 9) -> Floats:
    """Return the median of each value's finite neighbours."""
    if not len(values):
        return values
    finite = np.pad(np.where(np.isfinite(values), values, np.nan), window // 2, constant_values=np.nan)
    stacked = np.lib.stride_tricks.sliding_window_view(finite, window)
    some, out = ~np.isnan(stacked).all(axis=1), np.full(len(values), np.nan)
    out[some] = np.nanmedian(stacked[some], axis=1)
    return out


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low] if math.isfinite(low) else []
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor * 1.0000001)
    begin = math.ceil(low / step - 1e-9)
    found = [(begin + n) * step for n in range(int(span / step + 1e-6) + 2)]
    return [tick for tick in found if tick <= high + 1e-9 * span]


def shown(value: float | None, digits: int = 3) -> str:
    """Return a number as people read it."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size, exponent = abs(value), ""
    if size >= 1e6 or size < 1e-3:
        text, power = f"{value:.{digits - 1}e}".split("e")
        exponent = f"e{int(power)}"
    elif size >= 1000 or float(value).is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{max(digits - 1 - math.floor(math.log10(size)), 0)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text}{exponent}".replace("-", "−")
