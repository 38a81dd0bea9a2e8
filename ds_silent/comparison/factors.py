"""By which factor one gradient is another's multiple, and what that factor counts. Pure.

common_factor(apart.local, bounds)           # 4.0: of all layers; None: they have no common factor
ratio_name(4.0, counts_of(head_a, head_b, apart), bounds)     # ", as many as B's micro-batches, ..."
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from ds_silent.comparison.differences import Apart, Array, Differences, relative
from ds_silent.comparison.levels import Bounds
from ds_silent.trace import Head

SIMPLE = 1e-3  # relative, of a factor that is a simple ratio
MULTIPLE = 0.02  # of the length, beside a multiple: the rest


def common_factor(gradient: Apart | None, bounds: Bounds) -> float | None:
    """The one factor by which all layers are multiplied; None where there is no such factor."""
    if gradient is None:
        return None
    places = np.flatnonzero(gradient.share > 1e-3).tolist()
    return shared_factor([layer_factor(gradient, place, bounds) for place in places])


def layer_factor(gradient: Apart, place: int, bounds: Bounds) -> float | None:
    """B's gradient of a layer over A's, where the one is a multiple of the other."""
    ratio, cosine = float(gradient.ratio[place]), float(gradient.cosine[place])
    if not math.isfinite(ratio) or ratio <= 0.0:
        return None
    if math.isnan(cosine):
        return ratio
    off = math.sqrt(max(0.0, 1.0 - cosine * cosine))
    if off > max(MULTIPLE * min(1.0, abs(ratio - 1.0) * 5.0 + 0.005), 3.0 * bounds.gradient):
        return None
    return math.copysign(ratio, cosine)


def shared_factor(factors: Iterable[float | None]) -> float | None:
    """The middle of factors that are one but for rounding; None where they are not."""
    known = list(factors)
    if not known or any(one is None for one in known):
        return None
    low, high = min(known), max(known)  # type: ignore[type-var]
    middle = float(np.median(np.array(known, dtype=float)))
    spread = max(1e-3 * abs(middle), 0.1 * abs(middle - 1.0))
    return middle if high - low <= spread else None  # type: ignore[operator]


def multiple_of(one: Array, other: Array) -> float | None:
    """``other`` = factor * ``one``, but for a small rest; None where it is not, or the factor is 1."""
    squared = float(one @ one)
    if not squared > 0.0 or not np.isfinite(other).all():
        return None
    factor = float(one @ other) / squared
    rest = float(np.linalg.norm(other - factor * one) / max(np.linalg.norm(other), 1e-300))
    return factor if rest <= MULTIPLE * min(1.0, 5.0 * abs(factor - 1.0)) and relative(factor, 1.0) > 1e-6 else None


def times(factor: float) -> str:
    """``1.001 times``."""
    digits = f"{factor:.7f}".rstrip("0").rstrip(".") if 0.9 < abs(factor) < 1.1 else f"{factor:.5g}"
    return f"{digits} times"


def ratio_name(factor: float, counts: Iterable[tuple[float, str]], bounds: Bounds) -> str | None:
    """What a factor counts, or the simple fraction that it is; None where it is none."""
    if not math.isfinite(factor) or factor <= 0.0 or relative(factor, 1.0) < 0.02:
        return None
    close = max(SIMPLE, bounds.gradient)
    for value, words in counts:
        if relative(factor, value) <= close:
            return f", {words}"
    simple = Fraction(factor).limit_denominator(16)
    if simple and max(simple.numerator, simple.denominator) <= 64 and relative(factor, float(simple)) <= close:
        return f", a simple ratio ({simple})" if simple.denominator > 1 else ", a whole number"
    return None


def counts_of(a: Head, b: Head, apart: Differences) -> list[tuple[float, str]]:
    """Factors that a forgotten division makes, and what each of them counts."""
    found = []
    for count_a, count_b, what in (
        (a.micro_batches, b.micro_batches, "micro-batches"),
        (a.ranks, b.ranks, "ranks"),
        (a.ranks * a.micro_batches, b.ranks * b.micro_batches, "ranks times micro-batches"),
    ):
        if count_b > 1:
            found.append((float(count_b), f"as many as B's {what}, as if B did not divide by them"))
        if count_a > 1:
            found.append((1.0 / count_a, f"one over A's {what}, as if A did not divide by them"))
        if count_a != count_b:
            found.append((count_b / count_a, f"as B's {what} to A's, as if neither divided by them"))
        if count_b > 1:
            found.append((1.0 / count_b, f"one over B's {what}, as if B divided by them twice"))
        if count_a > 1:
            found.append((float(count_a), f"as many as A's {what}, as if A divided by them twice"))
    one, other = apart.a.objective, apart.b.objective
    if one is not None and other is not None and one.labels > 0.0:
        if one.labels != other.labels:
            found.append((other.labels / one.labels, "as B's labels to A's"))
        found += [(other.labels, "as many as B's labels of the step"), (1.0 / one.labels, "one over A's labels")]
    return found
