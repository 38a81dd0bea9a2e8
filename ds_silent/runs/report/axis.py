"""Steps in at most 400 bins of equal width; of each bin the lowest, the mean and the highest. Pure.

axis = Axis.of(steps)                        # int64 (S,), ascending
curve = binned(axis, steps, values)          # float64 (S,) to low, mean, high (B,)
axis.at(step)                                # 0 ... 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
MOST_BINS = 400


@dataclass(frozen=True)
class Axis:
    """The bins; ``low`` and ``high`` are half an interval before the first and behind the last step."""

    low: float
    high: float
    bins: int

    @classmethod
    def of(cls, steps: Steps, most: int = MOST_BINS) -> Axis:
        """For these measured steps; of none, one bin around step 1."""
        if not len(steps):
            return cls(0.5, 1.5, 1)
        first, last = float(steps[0]), float(steps[-1])
        interval = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
        low, high = first - interval / 2, last + interval / 2
        return cls(low, high, max(1, min(most, round((high - low) / interval))))

    def at(self, step: float) -> float:
        """Its place from 0 to 1; what lies outside is at an end."""
        return min(max((step - self.low) / (self.high - self.low), 0.0), 1.0)

    def bin_of(self, steps: Steps) -> npt.NDArray[np.intp]:
        """The bin of each step."""
        share = (steps.astype(np.float64) - self.low) / (self.high - self.low)
        return np.clip(share * self.bins, 0, self.bins - 1).astype(np.intp)

    def centre(self, index: int) -> float:
        """Of a bin, from 0 to 1."""
        return (index + 0.5) / self.bins

    def steps(self) -> list[tuple[int, int]]:
        """The first and the last step that each bin may hold."""
        edges = np.linspace(self.low, self.high, self.bins + 1)
        return [(math.ceil(a - 1e-9), max(math.ceil(b - 1e-9) - 1, math.ceil(a - 1e-9))) for a, b in _pairs(edges)]

    def ticks(self, count: int = 6) -> list[int]:
        """Some steps that are round numbers, among those of the axis."""
        first, last = math.ceil(self.low), math.floor(self.high)
        found = [int(tick) for tick in ticks(first, last, count) if float(tick).is_integer() and first <= tick <= last]
        return found or [first]


@dataclass(frozen=True)
class Curve:
    """(B,) each; NaN where a bin holds no finite value.

    Attributes:
        broken: bins in which a value was measured and is not finite.
    """

    low: Floats
    mean: Floats
    high: Floats
    broken: npt.NDArray[np.intp]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not np.isfinite(self.mean).any() and not len(self.broken)


def binned(axis: Axis, steps: Steps, values: Floats, measured: npt.NDArray[np.bool_] | None = None) -> Curve:
    """Of the values at these steps.

    Args:
        measured: where a value that is no number was measured as such; without it, nowhere.
    """
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
    return Curve(low, mean, high, broken)


def rebinned(
    axis: Axis, spans: Steps, low: npt.NDArray[np.float32], high: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Buckets of steps (K, 2) with the lowest and the highest of each row (K, R) to what is furthest from 0, (R, B).

    A bucket that lies across bins counts in each of them: nothing that stands out is lost.
    """
    furthest = np.where(np.abs(np.nan_to_num(low, nan=0.0)) > np.abs(np.nan_to_num(high, nan=0.0)), low, high)
    out = np.full((low.shape[1], axis.bins), np.nan, dtype=np.float32)
    first, last = axis.bin_of(spans[:, 0]), axis.bin_of(spans[:, 1])
    for values, a, b in zip(furthest, first, last, strict=True):
        held = out[:, a : b + 1]
        column = values[:, None]
        out[:, a : b + 1] = np.where(np.isnan(held) | (np.abs(column) > np.abs(held)), column, held)
    return out


def smoothed(values: Floats, window: int = 9) -> Floats:
    """The median of each value's neighbours that are numbers."""
    if not len(values):
        return values
    half = window // 2
    padded = np.pad(values, half, constant_values=np.nan)
    stacked = np.lib.stride_tricks.sliding_window_view(padded, window)
    some = np.isfinite(stacked).any(axis=1)
    out = np.full(len(values), np.nan)
    if some.any():
        out[some] = np.nanmedian(np.where(np.isfinite(stacked[some]), stacked[some], np.nan), axis=1)
    return out


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low] if math.isfinite(low) else []
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor * 1.0000001)
    begin = math.ceil(low / step - 1e-9)
    return [
        (begin + n) * step
        for n in range(int((high - low) / step + 1e-6) + 2)
        if (begin + n) * step <= high + 1e-9 * span
    ]


def shown(value: float | None, digits: int = 3) -> str:
    """A number as a person reads it."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}".replace("-", "−")
    text = f"{value:.{max(digits - 1 - math.floor(math.log10(size)), 0)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def _pairs(edges: Floats) -> list[tuple[float, float]]:
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
