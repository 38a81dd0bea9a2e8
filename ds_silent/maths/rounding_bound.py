"""Is the aggregated gradient what the ranks' gradients add up to? Algorithm-based fault tolerance with sketches.

    check = check_aggregate(terms_of(sketches, arithmetic.total), aggregate, arithmetic, log_rate)
    check.relative_error, check.rounding_bound, check.wrong

A reduction adds up the ranks' gradients with equal weights: 1/N for a mean, 1 for a sum. A sketch is linear, so
sketch(aggregate) - weight * (sum of the ranks' sketches) is the sketch of the aggregation's error, and as long as that
error. An ideal reduction leaves rounding only. The weights come from the configuration, never from what applies them.

**The rounding model.** Let x_1, ..., x_N be the terms, g_i times the weight, and P_j = x_1 + ... + x_j. A reduction
rounds

* each term ``before`` times (cast to the communication dtype, division by N unless N is a power of two, padding):
  error at most u |x_i| per element and rounding, with u the communication dtype's unit roundoff;
* each of the N - 1 partial sums: at most u |P_j|. The order is the library's own, so it is not known. For partial sums
  of random terms the sum of |P_j|^2 is largest when terms are added one after the other; other orders of the ranks,
  trees and wider accumulators give less;
* the result, once for every unit roundoff in ``after`` (cast back, postscaling, cast to the master's dtype).

Where every micro-batch is reduced on its own, this happens ``reductions`` times, each on that micro-batch's terms, and
the results are added up, which rounds the running sum. Micro-batches' gradients are taken to agree over the ranks no
better than their sums do, so that their partial sums are as much longer than their terms as those of the whole.

Let e be the vector of all these errors. Each is at most u times a known number and of either sign alike; so by
Hoeffding's lemma it is sub-Gaussian with variance proxy (u |P|)^2, and elements err independently. In the sketch each
element goes into exactly one of k buckets with a random sign: the residual r has independent sub-Gaussian coordinates
whose variance proxies v_b sum up to V, the sum of all u^2 |P|^2. By Hsu, Kakade and Zhang (2012, theorem 2.1)

    P( |r|^2 > V + 2 sqrt(t sum v_b^2) + 2 t max v_b ) <= exp(-t).

How V spreads over the buckets follows from the partial sums' own sketches, whose squares estimate it (a few outliers
too many, which errs to the safe side): one huge element makes one bucket hold nearly everything, and the bound widens
accordingly. exp(-t) is the stated rate of false alarms per step. Nothing here was fitted to measurements; measured
rounding stays below the bound (docs/numerics.md).

**The sketch's own rounding.** Each of the T columns of the table adds up n = D / T elements of random signs in fp32, so
the partial sums have mean square n/2 of the elements': u_fp32^2 (n/2 + 8) |x|^2 for a vector x, of which the last term
covers folding T columns into k.

Common-mode faults cannot be seen here: a gradient that was wrong before it was captured, on all ranks alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LARGEST_EXCESS = 700.0  # nats: rarer than a float64 can say
SMALLEST_STEP = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}  # between subnormals


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Which rounds most; float32 of none."""
    return max(dtypes, key=UNIT_ROUNDOFF.__getitem__, default=torch.float32)


@dataclass(frozen=True)
class Arithmetic:
    """What a step's reductions round, as the adapter knows it from the configuration; at least as much as is true."""

    communication: torch.dtype  # in which terms travel and are added; of several, the coarsest
    before: int = 1  # roundings of each term ahead of the sum
    after: tuple[torch.dtype, ...] = ()  # dtypes to which the result is rounded
    reductions: int = 1  # per step: 1, or one per micro-batch
    accumulation: torch.dtype = torch.float32  # in which several reductions are added up
    applied: torch.dtype = torch.float32  # in which the result is unscaled and clipped
    norm: torch.dtype = torch.float32  # in which norms of single tensors are kept on the way to the clip factor
    elements: int = 0  # D, trainable parameters
    width: int = 1  # T of the sketch
    total: float = 1.0  # of the ranks' weights in the aggregate: 1 for a mean, N for a sum
    writes_hidden: bool = False  # torch does not count in-place operations on what an optimizer is handed
    handed_unscaled: bool = False  # the loss scale is taken out before the step begins, not by the optimizer's wrapper

    def result(self, ranks: int) -> str:
        """What the aggregate should be, of the ranks' gradients."""
        names = {float(ranks): "sum", 1.0: "mean"}
        return names.get(self.total, f"mean times {self.total:g}")


def step_rounding(arithmetic: Arithmetic, ranks: int, micro_batches: int) -> float:
    """Return what rounding takes at most from one step's gradient, relative to the lengths of its terms together.

    In the worst order: each term is rounded ``before`` times and in each of N - 1 partial sums, the result as ``after``
    says, the sum of the micro-batches each time; and the gradient's sketch by its own rounding.
    """
    reduced = UNIT_ROUNDOFF[arithmetic.communication] * (arithmetic.before + ranks - 1)
    reduced += sum(UNIT_ROUNDOFF[dtype] for dtype in arithmetic.after)
    accumulated = UNIT_ROUNDOFF[arithmetic.accumulation] * (micro_batches - 1)
    return (
        reduced + accumulated + UNIT_ROUNDOFF[torch.float32] * math.sqrt(arithmetic.elements / arithmetic.width / 2 + 8)
    )


@dataclass(frozen=True)
class AggregateCheck:
    """Lengths in the gradients' own unit (times the loss scale)."""

    error: float  # |aggregate - expected|
    expected: float  # |what the locals add up to with the configured weights|
    tolerance: float  # largest error that rounding explains, at the stated rate
    log_excess: float | None = None  # where it is larger: nats by which the rate could be smaller and it still be so

    @property
    def relative_error(self) -> float | None:
        return self.error / self.expected if self.expected > 0.0 else None

    @property
    def rounding_bound(self) -> float | None:
        return self.tolerance / self.expected if self.expected > 0.0 else None

    @property
    def wrong(self) -> bool:
        """Whether rounding does not explain the error. NaN is somebody else's finding (``non-finite``)."""
        return math.isfinite(self.error) and math.isfinite(self.expected) and self.error > self.tolerance


@dataclass(frozen=True)
class Terms:
    """What was to be added up, by bucket of the sketch: (k,) float64."""

    expected: Tensor  # sketch of what the terms add up to
    squares: Tensor  # sum of the squared terms x_i
    partial_sums: Tensor  # sum of the squared partial sums P_2, ..., P_N
    ranks: int


def terms_of(sketches: Tensor, total_weight: float = 1.0) -> Terms:
    """From all ranks' sketches, (N, k) float64, and the sum of their weights (:attr:`Arithmetic.total`)."""
    ranks = len(sketches)
    weight = total_weight / ranks
    total, squares = sketches[0].clone(), sketches[0].square()
    partial_sums = torch.zeros_like(total)
    for sketch in sketches[1:]:  # rank by rank in the cache: ten times faster than cumsum at 64 ranks
        total += sketch
        squares.addcmul_(sketch, sketch)
        partial_sums.addcmul_(total, total)
    return Terms(total * weight, squares * weight**2, partial_sums * weight**2, ranks)


def terms_of_sums(mean: Tensor, mean_square: float, ranks: int, total_weight: float = 1.0) -> Terms:
    """From the mean sketch (k,) and the ranks' mean squared norm, where the sketches themselves stay with the ranks.

    The mean over all orders of |P_j|^2 is (j Q + j (j-1) C) / N^2 with Q the mean squared norm and C the mean inner
    product of two ranks; it is spread over the buckets as the mean's own squares are.
    """
    squared = float(mean @ mean)
    inner = (ranks * ranks * squared - ranks * mean_square) / (ranks * (ranks - 1)) if ranks > 1 else 0.0
    j = torch.arange(2, ranks + 1, dtype=torch.float64)
    total = float((j * mean_square + j * (j - 1) * inner).clamp(min=0.0).sum()) / ranks**2
    share = mean.square() / squared if squared > 0.0 else torch.full_like(mean, 1.0 / len(mean))
    own, together = share * mean_square / ranks, share * total
    return Terms(mean * total_weight, own * total_weight**2, together * total_weight**2, ranks)


def check_aggregate(
    terms: Terms, aggregate: Tensor, arithmetic: Arithmetic, log_rate: float, spread: float = 1.0
) -> AggregateCheck:
    """Compare the aggregate's sketch with what the ranks' add up to.

    Args:
        terms: of the ranks' local gradients, with their weights.
        aggregate: (k,) float64, of the aggregated gradient.
        arithmetic: of the reduction.
        log_rate: t, minus the natural logarithm of the rate of false alarms per comparison.
        spread: see :func:`rounding_tolerance`.
    """
    error = float((aggregate - terms.expected).norm())
    tolerance = rounding_tolerance(terms, arithmetic, log_rate, spread)
    excess = None
    if math.isfinite(error) and error > tolerance:
        low, high = 0.0, LARGEST_EXCESS  # the tolerance grows with the rate's logarithm
        if error > rounding_tolerance(terms, arithmetic, log_rate + high, spread):
            low = high
        while high - low > 0.01:
            middle = (low + high) / 2.0
            explained = error <= rounding_tolerance(terms, arithmetic, log_rate + middle, spread)
            low, high = (low, middle) if explained else (middle, high)
        excess = low
    return AggregateCheck(error, float(terms.expected.norm()), tolerance, excess)


def rounding_tolerance(terms: Terms, arithmetic: Arithmetic, log_rate: float, spread: float = 1.0) -> float:
    """Largest length of the error's sketch that rounding explains; see the module docstring. Same unit as the terms.

    Args:
        terms, arithmetic, log_rate: see :func:`check_aggregate`.
        spread: where every micro-batch is reduced on its own, the sum over ranks and micro-batches of their squared
            norms, relative to the squared norms of the ranks' sums over micro-batches.
    """
    u = UNIT_ROUNDOFF[arithmetic.communication] ** 2
    result = terms.expected.square()
    energy = u * (arithmetic.before * terms.squares + terms.partial_sums)
    for dtype in arithmetic.after:
        energy = energy + UNIT_ROUNDOFF[dtype] ** 2 * result
    energy = energy + (arithmetic.reductions - 1) * UNIT_ROUNDOFF[arithmetic.accumulation] ** 2 * result
    energy = energy * max(1.0, spread)
    rows = arithmetic.elements / arithmetic.width
    energy = energy + UNIT_ROUNDOFF[torch.float32] ** 2 * (rows / 2 + 8) * (terms.squares + result)
    roundings = arithmetic.reductions * (arithmetic.before * terms.ranks + terms.ranks - 1 + len(arithmetic.after))
    energy = energy + _underflow(arithmetic, roundings) / len(energy)
    return math.sqrt(_quantile(energy, log_rate))


def multiple_of(total: Tensor, aggregate: Tensor) -> tuple[Tensor, Tensor]:
    """``total`` = factor * ``aggregate`` + error, with the factor that leaves the least; of sketches, on their device.

    A dot product in fp32 may be off by several unit roundoffs where a few buckets hold nearly everything, and so would
    be the factor: a second one, of what the first has left, takes that back.

    Args:
        total, aggregate: (k,) fp32.

    Returns:
        factor () and error (k,), fp32; a factor of 0 where there is no aggregate.
    """
    squared = torch.dot(aggregate, aggregate)
    safe = torch.where(squared > 0.0, squared, torch.ones_like(squared))
    factor = torch.dot(total, aggregate) / safe
    error = total - factor * aggregate
    correction = torch.dot(error, aggregate) / safe
    return factor + correction, error - correction * aggregate


def applied_tolerance(aggregate: Tensor, arithmetic: Arithmetic, log_rate: float) -> float:
    """Largest error of the applied gradient, relative to it, that unscaling, clipping and two sketches explain.

    Two roundings to ``arithmetic.applied`` per element, the sketch's own rounding in each of the two, and that of the
    aggregate times the factor (:func:`multiple_of`).

    Args:
        aggregate: (k,) float64, of which the applied gradient should be a multiple.
        arithmetic, log_rate: see :func:`check_aggregate`.
    """
    rows = arithmetic.elements / arithmetic.width
    own = UNIT_ROUNDOFF[torch.float32] ** 2 * (2.0 * (rows / 2 + 8) + 1.0)
    share = aggregate.square() / float(aggregate @ aggregate)
    return math.sqrt(_quantile((2.0 * UNIT_ROUNDOFF[arithmetic.applied] ** 2 + own) * share, log_rate))


def factor_tolerance(arithmetic: Arithmetic) -> float:
    """Relative error of a clip factor: norms of tensors are kept in ``arithmetic.norm``, sums of D squares in fp32.

    The random errors of a sum of D squares grow with sqrt(D); the norms' own rounding is at most a unit roundoff, and
    where the gradient itself is rounded to that dtype on the way, its norm moves by no more than as much again.
    """
    u = UNIT_ROUNDOFF
    return 2.0 * u[arithmetic.norm] + 2.0 * u[arithmetic.applied] + u[torch.float32] * math.sqrt(arithmetic.elements)


def _quantile(energy: Tensor, log_rate: float) -> float:
    """Hsu, Kakade, Zhang: |r|^2 is above this with probability exp(-log_rate), given the buckets' variance proxies."""
    total, squares, largest = float(energy.sum()), float(energy.square().sum()), float(energy.max())
    return total + 2.0 * math.sqrt(log_rate * squares) + 2.0 * log_rate * largest


def _underflow(arithmetic: Arithmetic, roundings: int) -> float:
    """Squared absolute error of numbers too small for the dtype: half the distance of its smallest numbers each."""
    step = SMALLEST_STEP.get(arithmetic.communication, 0.0)
    return arithmetic.elements * roundings * (step / 2) ** 2
