"""Dispersion, cosine and noise scale over N ranks: pure functions of small float64 tensors on the host.

    cosines = cosines_of(sketches)                  # (N, N)
    gram = gram_of(cosines, norms)                  # (N, N): <g_i, g_j>
    loss_stats(losses); norm_stats(norms, ...); direction_stats(gram, cosines, ...); noise_scale(...)

The formulas are those of arXiv 2602.14462 (the three metrics) and arXiv 1812.06162 (noise scale, appendix A). NaN is
never dropped: a rank without a finite gradient makes every mean and dispersion it enters NaN, and stands as NaN in
``per_rank``. The numbers of the other ranks stay numbers: they are compared with each other alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_silent.maths.sketch import effective_size
from ds_silent.records import DirectionStats, GradNormStats, LossStats, Method


def dispersion(values: Tensor) -> tuple[float, float, float]:
    """(mean, population standard deviation, max - min) of (N,) float64 values."""
    spread = values.max() - values.min()
    return float(values.mean()), float(values.std(correction=0)), float(spread)


def loss_stats(losses: Tensor | None) -> LossStats:
    """Loss dispersion over the ranks; (N,) float64, or None when no loss was seen."""
    if losses is None:
        return LossStats()
    mean, std, spread = dispersion(losses)
    return LossStats(mean, std, spread, tuple(losses.tolist()))


def norm_stats(norms: Tensor | None, method: Method, aggregated: float | None) -> GradNormStats:
    """Gradient-norm dispersion over the ranks; (N,) float64 L2 norms before aggregation, None when not known."""
    if norms is None:
        return GradNormStats(aggregated=aggregated)
    mean, std, spread = dispersion(norms)
    cv = std / mean if mean != 0.0 else math.nan  # all ranks without gradient: no relative spread exists
    return GradNormStats(method, mean, std, cv, spread, aggregated, tuple(norms.tolist()))


def cosines_of(vectors: Tensor) -> Tensor:
    """(N, N) cosines of (N, k) float64 sketches; NaN for a zero or non-finite vector, 1 on the diagonal otherwise."""
    return normalised(vectors @ vectors.T)


def normalised(gram: Tensor) -> Tensor:
    """(N, N) Gram matrix to cosines, clipped to [-1, 1] against rounding."""
    norms = gram.diagonal().sqrt()
    return (gram / torch.outer(norms, norms)).clamp(-1.0, 1.0)


def gram_of(cosines: Tensor, norms: Tensor) -> Tensor:
    """(N, N) inner products from cosines and norms; a zero gradient has inner product 0 with everything."""
    gram = cosines * torch.outer(norms, norms)
    zero = norms == 0.0
    gram[zero, :] = 0.0
    gram[:, zero] = 0.0
    return gram


def direction_stats(gram: Tensor, cosines: Tensor, method: Method, size: int) -> DirectionStats:
    """Gradient-direction consistency: the mean over all pairs i < j of cos(g_i, g_j), and who stands out.

    Args:
        gram: (N, N) float64 inner products of the local gradients.
        cosines: (N, N) float64.
        method: ``"exact"`` has no standard error (0.0).
        size: k of the sketch.

    Returns:
        None in every field but ``method`` when there is one rank: no pair exists. Where a rank has no direction (NaN,
        infinity or zero) the mean is NaN; the lowest and the highest pair are of the others, NaN when there is none.
    """
    ranks = len(cosines)
    if ranks < 2:
        return DirectionStats(method=method)
    pairs = _pairs_of(cosines)
    error = 0.0 if method == "exact" else mean_cosine_error(cosines, size)
    return DirectionStats(
        method=method,
        mean_cosine=float(pairs[2].mean()),
        standard_error=error,
        per_rank=tuple(cosine_with_others(gram).tolist()),
        **_extreme_pairs(*pairs),
    )


def _pairs_of(cosines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return i and j of all pairs i < j, and their cosines."""
    first, second = torch.triu_indices(len(cosines), len(cosines), offset=1)
    return first, second, cosines[first, second]


def _extreme_pairs(first: Tensor, second: Tensor, pairs: Tensor) -> dict[str, Any]:
    """The lowest and the highest of the pairs i < j, and which they are: fields of :class:`DirectionStats`."""
    lowest, highest = _argument(pairs, -1.0), _argument(pairs, 1.0)
    return {
        "min_cosine": float(pairs[lowest]),
        "max_cosine": float(pairs[highest]),
        "min_pair": (int(first[lowest]), int(second[lowest])),
        "max_pair": (int(first[highest]), int(second[highest])),
    }


def cosine_with_others(gram: Tensor) -> Tensor:
    """(N,) cosine of each rank's gradient with the mean of the other ranks' gradients, from inner products.

    With S the sum of all: <g_i, S - g_i> / (|g_i| |S - g_i|). A rank whose own gradient is not finite is left out of
    S, and its cosine is NaN.
    """
    finite = gram.diagonal().isfinite()
    between = torch.where(torch.outer(finite, finite), gram, torch.zeros_like(gram))
    own = between.diagonal()
    with_all = between.sum(dim=1)
    others_squared = (between.sum() - 2.0 * with_all + own).clamp(min=0.0)
    return ((with_all - own) / (own * others_squared).sqrt()).clamp(-1.0, 1.0)  # 0 / 0 where it is left out


def angle_between(gram: Tensor, one: Tensor, other: Tensor, size: int) -> tuple[float, float]:
    """Degrees between two weighted sums of the same N gradients, and their standard error.

    The sine comes from what of the second sum is perpendicular to the first: near 0 a cosine has no digits left. A
    cosine c has the error (1 - c^2) / sqrt(k), and d angle = d c / sin(angle), so that of the angle is
    sin(angle) / sqrt(k).

    Args:
        gram: (N, N) float64 inner products of the gradients.
        one, other: (N,) float64 weights.
        size: k of the sketch that the inner products come from; 0: they are exact.

    Returns:
        NaN where one of the sums is 0 or not finite.
    """
    squared = one @ gram @ one
    along = (other @ gram @ one) / squared
    across = other - along * one
    rest = (across @ gram @ across).clamp(min=0.0).sqrt()
    angle = torch.atan2(rest, along * squared.sqrt())
    if not (float(squared) > 0.0 and float(other @ gram @ other) > 0.0 and bool(angle.isfinite())):
        return math.nan, math.nan
    error = float(angle.sin()) / math.sqrt(effective_size(size)) if size else 0.0
    return math.degrees(float(angle)), math.degrees(error)


def mean_cosine_error(cosines: Tensor, size: int) -> float:
    """Standard error of the mean pairwise cosine when the cosines come from sketches of ``size`` numbers.

    Sketched inner products have Cov(G_ij, G_kl) = (G_ik G_jl + G_il G_jk) / k. The mean cosine is, to first order,
    tr(W G) with W_ij = 1/(N(N-1)) off the diagonal and W_ii = -(1/(N(N-1))) sum over j != i of c_ij, because each
    cosine is divided by estimated norms. So its variance is 2 tr((W C)^2) / k, which for N = 2 is the (1 - c^2)^2 / k
    of a single cosine. Errors of pairs that share a rank are correlated: dividing by the number of pairs is wrong.
    """
    ranks = len(cosines)
    weights = torch.ones_like(cosines)
    weights.fill_diagonal_(0.0)
    weights -= torch.diag((cosines * weights).sum(dim=1))
    product = weights @ cosines / (ranks * (ranks - 1))
    variance = 2.0 * float((product @ product).diagonal().sum()) / effective_size(size)
    return math.sqrt(variance) if variance >= 0.0 else (0.0 if variance > -1e-18 else math.nan)


def noise_scale(mean_squared: float, squared_mean: float, ranks: int, batch: float) -> float | None:
    """Gradient noise scale tr(Sigma) / |G|^2 in samples (arXiv 1812.06162, appendix A.1), from one step.

    Args:
        mean_squared: mean over ranks of |g_i|^2, where g_i is the mean gradient of ``batch`` samples.
        squared_mean: |mean of g_i|^2.
        ranks: N.
        batch: samples per rank and step, b.

    Returns:
        An estimate with the noise of a single step; negative where |G|^2 is estimated negative, that is, where the
        signal is below its own sampling error. None with one rank (B = b: nothing to compare), or where the
        samples are not known (b = 0).
    """
    if ranks < 2 or batch <= 0.0:
        return None
    total = ranks * batch
    signal = (total * squared_mean - batch * mean_squared) / (total - batch)
    noise = (mean_squared - squared_mean) / (1.0 / batch - 1.0 / total)
    return noise / signal if signal != 0.0 else math.nan


def constant_size_direction(
    unit_sum: Tensor,
    cosine_with_rest: Tensor | None,
    ranks: int,
    size: int,
    known: bool = True,
    pairs: Tensor | None = None,
) -> DirectionStats:
    """Direction statistics above the gather limit, from the sum of unit sketches.

    sum over i != j of cos(g_i, g_j) = |sum of g_i/|g_i||^2 - N. The standard error is that of N(N-1)/2 pairs of equal
    cosine (see :func:`mean_cosine_error`).

    Args:
        unit_sum: (size,) float64, sum over ranks of sketch / |sketch|.
        cosine_with_rest: (N,) float64, each rank's cosine with the mean of the others' gradients; None when unknown.
        known: every rank has a direction; else there is no mean.
        pairs: (N, N) float64 cosines from coarser sketches, where they are known: the lowest and the highest.
    """
    mean = (float(unit_sum @ unit_sum) - ranks) / (ranks * (ranks - 1)) if known else math.nan
    # mean_cosine_error in closed form for N vectors of equal pairwise cosine
    spread = (1.0 - mean) * (1.0 + (ranks - 1) * mean) / ranks
    error = math.sqrt(2.0 * ranks / (ranks - 1) / effective_size(size)) * abs(spread)
    stats = DirectionStats(
        method="sketch",
        mean_cosine=mean,
        standard_error=error,
        per_rank=None if cosine_with_rest is None else tuple(cosine_with_rest.tolist()),
    )
    return stats if pairs is None else replace(stats, **_extreme_pairs(*_pairs_of(pairs)))


def _argument(values: Tensor, sign: float) -> int:
    """Index of the largest of ``sign * values`` that is a number; of the first NaN where there is no number."""
    known = values.isfinite()
    if not bool(known.any()):
        return 0
    return int(torch.where(known, sign * values, torch.full_like(values, -math.inf)).argmax())


def expected_coverage(ranks: int) -> float:
    """Share of the epoch that is seen when each rank takes its share of a permutation of its own.

    Each of N ranks takes 1/N of the rows of its own, independent permutation: a row is missed by one rank with
    probability 1 - 1/N and by all with (1 - 1/N)^N. Seen: 1 - (1 - 1/N)^N, 0.684 for N = 4, and 1 - 1/e in the limit.
    """
    return 1.0 - (1.0 - 1.0 / ranks) ** ranks
