"""How far two trainings are apart at one step, link by link, in relative numbers. Pure; nothing is judged here.

    apart = differences(pairs, (first_a, first_b), step_a, step_b, next_a, next_b, loosely)
    apart.local.relative         # (layers,) |B - A| over the larger of the two; NaN where it cannot be known

Sketches of two trainings of the same shapes subtract, so that the length of a difference is known to 9 % with 64
numbers. Norms of layers are those of their sketches: two whose tensors lie elsewhere tell of large factors only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.comparison.matching import Pairs, Places, TensorPair
from ds_silent.trace import Gradient, Step, Used

Array = npt.NDArray[np.float64]
UNIT_ROUNDOFF = {
    **dict.fromkeys(("fp64", "float64"), 2.0**-53),
    **dict.fromkeys(("fp32", "float32"), 2.0**-24),
    **dict.fromkeys(("bf16", "bfloat16"), 2.0**-8),
    **dict.fromkeys(("fp16", "float16", "half"), 2.0**-11),
}
SMALL = 0.1
"""Of the median tensor's size: weights below it may be what rounding made of zeros."""
UNSTABLE = 0.5
"""Correlation of two updates below which nothing but rounding made them."""
NORM_ERROR = 6.0
"""Standard errors of a norm by its sketch, where the two sketches have other signs."""
RATE_ERROR = 1e-6
"""Relative; rates are computed in fp64 or kept in fp32."""
MULTIPLE = 0.02
"""Of the length, beside a multiple: the rest."""


def unit_roundoff(dtype: str) -> float:
    """Return that of a dtype's name, also of torch.bfloat16; of another, fp32's."""
    return UNIT_ROUNDOFF.get(dtype.removeprefix("torch.").lower(), 2.0**-24)


@dataclass(frozen=True)
class Apart:
    """A gradient of A against B's, layer by layer: (layers,) arrays.

    Attributes:
        relative: length of the difference over the larger length.
        cosine: of the two; NaN where only norms are known.
        ratio: B's norm over A's; NaN where the sketches' error is all that it tells.
        share: A's norm over that of the whole gradient.
    """

    relative: Array
    cosine: Array
    ratio: Array
    share: Array


@dataclass(frozen=True)
class Moved:
    """The update of A against B's, tensor by tensor: (tensors,) arrays.

    Attributes:
        relative: median over the sampled elements of how far they are apart beyond what the weights' own digits lose,
            relative to the tensor's root mean square.
        unstable: whether nothing but rounding made the two updates.
        size: of A's and of B's, root mean square: (2, tensors).
        way: as ``relative``, but of the whole way since the first step, and beyond twice the digits; 0 unless one of
            the two goes less than a third as far: what nothing but rounding moves goes as far in any direction.
        ends: the steps of A and of B that have the weights behind it.
    """

    relative: Array
    unstable: npt.NDArray[np.bool_]
    size: Array
    way: Array
    ends: tuple[Step, Step]


@dataclass(frozen=True)
class Differences:
    """Everything of one pair of steps; None is what one of the two does not know."""

    a: Step
    b: Step
    rows: bool | None
    weights: Array | None  # (tensors,) relative
    strayed: float  # how far B's weights are from A's, over the way that A's have gone: of the median tensor
    loss: float | None
    local: Apart | None
    reduced: Apart | None
    wrong: tuple[Array, Array] | None  # of A and of B: the reduced against its own local gradient, by layer
    factor: float | None  # of B's applied gradient over A's, where clipping to one norm does not explain it; else 1
    error: tuple[float, float] | None  # of A's and of B's: what the optimizer used is a multiple but for that
    update: Moved | None
    rates: bool | None


def differences(
    pairs: Pairs, begin: tuple[Step, Step], a: Step, b: Step, next_a: Step | None, next_b: Step | None, loosely: float
) -> Differences:
    """Compare one pair of steps.

    Args:
        begin: the first step that both have.
        next_a, next_b: the next steps that both have, for the update.
        loosely: relative error of norms that rounding explains by now, for the clip factor.
    """
    moved = None
    if next_a is not None and next_b is not None and _known(a.weights, b.weights, next_a.weights, next_b.weights):
        moved = _moved(pairs, begin, a, b, next_a, next_b)
    return Differences(
        a,
        b,
        None if a.rows is None or b.rows is None or a.rows.by != b.rows.by else a.rows == b.rows,
        _weights(pairs, a, b) if _known(a.weights, b.weights) else None,
        _strayed(pairs, begin[0], a, b) if _known(begin[0].weights, a.weights, b.weights) else 0.0,
        None if a.loss is None or b.loss is None else relative(a.loss, b.loss),
        _apart(pairs, a.local, b.local),
        _apart(pairs, a.reduced, b.reduced),
        _wrong(pairs, a, b),
        None if a.applied is None or b.applied is None else _applied(a, b, a.applied, b.applied, loosely),
        None if a.applied is None or b.applied is None else (abs(a.applied.error), abs(b.applied.error)),
        moved,
        same_rates(a, b),
    )


def relative(one: float, other: float) -> float:
    """Return |one - other| over the larger; infinity where one of them is not a number, 0 where both are the same."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def same_rates(a: Step, b: Step) -> bool | None:
    """Whether every group trains with the same rate; groups that are split otherwise must all have one rate."""
    ones, others = ([rate for rate in step.rates if rate is not None] for step in (a, b))
    if not ones or not others:
        return None
    if len(ones) != len(others):
        ones, others = sorted({*ones}), sorted({*others})
    return len(ones) == len(others) and all(relative(x, y) <= RATE_ERROR for x, y in zip(ones, others, strict=True))


def values_at(step: Step, places: Places) -> Array:
    """Return sampled weights of a step that has them."""
    assert step.weights is not None
    return step.weights[places].astype(float)


def _known(*arrays: Any) -> bool:
    return all(one is not None for one in arrays)


def _weights(pairs: Pairs, a: Step, b: Step) -> Array:
    """The median element's difference over the tensor's root mean square; 0 of a small tensor that only noise moves."""
    ones = [values_at(a, pair.here) for pair in pairs.tensors]
    others = [values_at(b, pair.there) for pair in pairs.tensors]
    sizes = np.array([(_rms(one), _rms(other)) for one, other in zip(ones, others, strict=True)]).reshape(-1, 2)
    usual = float(np.median(sizes.max(1))) if len(sizes) else 0.0
    found = []
    for one, other, size in zip(ones, others, sizes, strict=True):
        noise = size.max() < SMALL * usual and _unlike(one, other)
        found.append(0.0 if noise else _middle(np.abs(other - one), one, other))
    return np.array(found)


def _middle(difference: Array, one: Array, other: Array) -> float:
    if not len(one):
        return math.nan
    if np.array_equal(one, other, equal_nan=True):
        return 0.0
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return math.inf
    return float(np.median(difference) / max(_rms(one), _rms(other)))


def _strayed(pairs: Pairs, begin: Step, a: Step, b: Step) -> float:
    """0 where the weights have too few digits to say."""
    found = []
    for pair in pairs.tensors:
        if len(pair.here) and max(map(unit_roundoff, pair.dtypes)) <= UNIT_ROUNDOFF["fp32"]:
            one = values_at(a, pair.here)
            off = float(np.linalg.norm(values_at(b, pair.there) - one))
            way = float(np.linalg.norm(one - values_at(begin, pair.here)))
            if begin is a:  # they began apart: the way is not known, but is shorter than the weights are
                way = 0.1 * float(np.linalg.norm(one))
            found.append(0.0 if off == 0.0 else off / way if way > 0.0 else math.inf)
    middle = float(np.median(found)) if found else 0.0
    return middle if math.isfinite(middle) else 0.0


def _apart(pairs: Pairs, a: Gradient | None, b: Gradient | None) -> Apart | None:
    if a is None or b is None or not pairs.layers:
        return None
    here, there = [one.a for one in pairs.layers], [one.b for one in pairs.layers]
    norms, others = a.layer_norms[here].astype(float), b.layer_norms[there].astype(float)
    sketched = np.array([one.sketched for one in pairs.layers])
    with np.errstate(all="ignore"):
        largest = np.maximum(norms, others)
        apart = np.abs(norms - others) / largest
        ratio = others / norms
        share = norms / a.norm if a.norm > 0.0 else np.full_like(norms, math.nan)
        cosine = np.full(len(pairs.layers), math.nan)
        if sketched.any():
            ones, twos = _same_size(a.layer_sketches[here], b.layer_sketches[there])
            lengths = np.linalg.norm(ones, axis=1), np.linalg.norm(twos, axis=1)
            by_sketch = np.linalg.norm(twos - ones, axis=1) / np.maximum(*lengths)
            cosine = np.where(sketched, (ones * twos).sum(1) / (lengths[0] * lengths[1]), math.nan)
            apart = np.where(sketched, np.fmax(apart, by_sketch), apart)
        blur = NORM_ERROR / math.sqrt(2.0 * max(1, min(a.layer_sketches.shape[1], b.layer_sketches.shape[1])))
        apart = np.where(sketched, apart, np.maximum(apart - blur, 0.0))
        ratio = np.where(sketched | (apart > 0.0), ratio, math.nan)
    both = norms == others
    nothing = both & (norms == 0.0)
    apart[nothing], ratio[nothing], cosine[nothing] = 0.0, 1.0, 1.0
    lost = np.isfinite(norms) != np.isfinite(others)
    apart[lost] = math.inf
    apart[~np.isfinite(norms) & ~np.isfinite(others)] = 0.0
    return Apart(apart, cosine, ratio, share)


def _same_size(one: Any, other: Any) -> tuple[Array, Array]:
    """Fold the longer sketches to the shorter ones' length: element i goes into i % length, as they were made."""
    size = min(one.shape[1], other.shape[1])
    folded = [each.astype(float).reshape(len(each), -1, size).sum(1) for each in (one, other)]
    return folded[0], folded[1]


def _wrong(pairs: Pairs, a: Step, b: Step) -> tuple[Array, Array] | None:
    if a.local is None or a.reduced is None or b.local is None or b.reduced is None or not pairs.layers:
        return None
    found = []
    for local, reduced, layers in (
        (a.local, a.reduced, [one.a for one in pairs.layers]),
        (b.local, b.reduced, [one.b for one in pairs.layers]),
    ):
        own = local.layer_sketches[layers].astype(float)
        with np.errstate(all="ignore"):
            off = np.linalg.norm(reduced.layer_sketches[layers] - own, axis=1) / np.linalg.norm(own, axis=1)
        found.append(np.where(np.isfinite(off), off, math.nan))
    return found[0], found[1]


def _applied(a: Step, b: Step, one: Used, other: Used, loosely: float) -> float:
    """B's factor over A's; 1 where both clip to the same norm, or neither clips."""
    if relative(one.factor, other.factor) <= loosely:
        return 1.0
    norms = [step.reduced.norm if step.reduced is not None else None for step in (a, b)]
    if norms[0] is None or norms[1] is None or one.factor == 0.0:
        return other.factor / one.factor if one.factor else math.inf
    clipped = one.factor * norms[0], other.factor * norms[1]
    tight = 1e-3
    if one.factor < 1.0 and other.factor < 1.0:
        same = relative(*clipped) <= tight
    elif one.factor < 1.0:  # B, whose factor is 1, must lie below the norm to which A clips
        same = other.factor == 1.0 and norms[1] <= clipped[0] * (1.0 + tight)
    else:
        same = one.factor == 1.0 and other.factor < 1.0 and norms[0] <= clipped[1] * (1.0 + tight)
    return 1.0 if same else other.factor / one.factor


def _since(values: Array, origin: Any, places: Any) -> Array:
    return values if origin is None else values - origin[places].astype(float)


def _moved(pairs: Pairs, begin: tuple[Step, Step], a: Step, b: Step, next_a: Step, next_b: Step) -> Moved:
    off, unstable, sizes, ways = [], [], [], []
    for pair in pairs.tensors:
        after, end = values_at(next_a, pair.here), values_at(next_b, pair.there)
        one, other = after - values_at(a, pair.here), end - values_at(b, pair.there)
        size = (_rms(one), _rms(other))
        sizes.append(size)
        largest = np.maximum(np.abs(after), np.abs(end))
        off.append(_beyond_digits(pair, one, other, largest, max(size)))
        gone = _since(after, begin[0].weights, pair.here), _since(end, begin[1].weights, pair.there)
        far = (_rms(gone[0]), _rms(gone[1]))
        astray = _beyond_digits(pair, gone[0], gone[1], 2.0 * largest, max(far))
        ways.append(astray if 3.0 * min(far) < max(far) else 0.0)
        unstable.append(_unlike(one, other))
    size_of_both = np.array(sizes).reshape(-1, 2).T
    return Moved(np.array(off), np.array(unstable, bool), size_of_both, np.array(ways), (next_a, next_b))


def _beyond_digits(pair: TensorPair, one: Array, other: Array, largest: Array, size: float) -> float:
    if not len(one):
        return math.nan
    apart = np.abs(other - one)
    if not np.isfinite(apart).all():
        return 0.0 if np.array_equal(np.isfinite(one), np.isfinite(other)) else math.inf
    if size == 0.0:
        return 0.0
    last_digit = 2.0 * max(map(unit_roundoff, pair.dtypes)) * largest
    return float(np.median(np.maximum(apart - last_digit, 0.0)) / size)


def _unlike(one: Array, other: Array) -> bool:
    """Whether the two are as long, and each has a direction of its own: rounding alone makes such."""
    lengths = _rms(one), _rms(other)
    product = lengths[0] * lengths[1] * max(1, len(one))
    correlation = float(one @ other) / product if product > 0.0 else float(np.array_equal(one, other))
    return -0.9 < correlation < UNSTABLE and min(lengths) > 0.5 * max(lengths)


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2))) if len(values) else 0.0


# -- multiples ---------------------------------------------------------------------------------------------------------


def common_factor(gradient: Apart | None, rounding: float, places: Sequence[int] | None = None) -> float | None:
    """Return the factor by which these layers, or all that count, are multiplied; None where they have none in common.

    Args:
        rounding: relative difference of a gradient that rounding explains.
    """
    if gradient is None:
        return None
    if places is None:
        places = np.flatnonzero(gradient.share > 1e-3).tolist()
    known = [_layer_factor(gradient, place, rounding) for place in places]
    if not known or None in known:
        return None
    factors = np.array(known, dtype=float)
    middle = float(np.median(factors))
    return middle if np.ptp(factors) <= max(1e-3 * abs(middle), 0.1 * abs(middle - 1.0)) else None


def _layer_factor(gradient: Apart, place: int, rounding: float) -> float | None:
    """B's gradient of a layer over A's, where the one is a multiple of the other."""
    ratio, cosine = float(gradient.ratio[place]), float(gradient.cosine[place])
    if not math.isfinite(ratio) or ratio <= 0.0:
        return None
    if math.isnan(cosine):
        return ratio
    off = math.sqrt(max(0.0, 1.0 - cosine * cosine))
    if off > max(MULTIPLE * min(1.0, abs(ratio - 1.0) * 5.0 + 0.005), 3.0 * rounding):
        return None
    return math.copysign(ratio, cosine)


def multiple_of(one: Array, other: Array) -> float | None:
    """``other`` = factor * ``one``, but for a small rest; None where it is not, or the factor is 1."""
    squared = float(one @ one)
    if not squared > 0.0 or not np.isfinite(other).all():
        return None
    factor = float(one @ other) / squared
    rest = float(np.linalg.norm(other - factor * one) / max(np.linalg.norm(other), 1e-300))
    return factor if rest <= MULTIPLE * min(1.0, 5.0 * abs(factor - 1.0)) and relative(factor, 1.0) > 1e-6 else None
