"""Why an aggregate is not the mean of the ranks' gradients: what is linear leaves its own trace in the sketches.

    cause = explain(Pieces(layer_sketches, layer_aggregate, error, mean, previous), tolerances)

An aggregate that is wrong by rule - a factor, a rank left out or taken twice, nothing reduced, a piece zeroed or left
over from the step before - lies in the span of vectors whose sketches are at hand, so the rule follows from a small
least-squares problem. What remains unexplained is noise, or a single element that is off.

Everything here is pure and on the host, float64, and runs only at steps whose check failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["leftover", "zeroed", "stale", "scale", "weights", "unreduced", "partly-zeroed", "element", "noise"]
EXPLAINED = 0.05  # a rule that leaves less than this share of the error has explained it
INDEPENDENT = 1e-6  # smallest over largest eigenvalue of the ranks' Gram matrix, below which nobody can be told apart


@dataclass(frozen=True)
class Pieces:
    """The gradient in layers. float64."""

    sketches: Tensor  # (N, L, m) of the ranks' local gradients
    aggregate: Tensor  # (L, m)
    error: Tensor  # (k,) of the whole gradient's sketch: aggregate - mean
    mean: Tensor  # (k,) of the whole gradient
    previous: Tensor | None = None  # (L, m) the aggregate of the measurement before


@dataclass(frozen=True)
class Cause:
    """What happened. ``weights`` are those with which the ranks' gradients entered, 1 being right."""

    kind: Kind
    layers: tuple[int, ...]  # that are wrong
    factor: float | None = None  # of the scale; for ``partly-zeroed`` the share of the whole squared norm that is gone
    ranks: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


def explain(pieces: Pieces, tolerances: Tensor, leftover: bool = False) -> Cause:
    """The simplest rule that explains the error.

    Args:
        pieces: of the step.
        tolerances: (L,) largest error of each layer that rounding explains.
        leftover: the gradients were not empty when the step began.
    """
    errors = pieces.aggregate - pieces.sketches.mean(0)
    wrong = (errors.norm(dim=1) > tolerances).nonzero().flatten()
    if len(wrong) == 0:  # too small for a layer's own threshold: the layer that has most of it
        wrong = errors.norm(dim=1).argmax().reshape(1)
    layers = tuple(int(layer) for layer in wrong)
    if leftover:
        return Cause("leftover", layers)
    local, aggregate, error = pieces.sketches[:, wrong].flatten(1), pieces.aggregate[wrong].flatten(), errors[wrong]
    mean, error = local.mean(0), error.flatten()
    limit = max(float(tolerances[wrong].norm()), EXPLAINED * float(error.norm()))
    if float(aggregate.norm()) <= min(limit, 1e-3 * float(mean.norm())):
        return Cause("zeroed", layers)
    if pieces.previous is not None:
        before = pieces.previous[wrong].flatten()
        if float((aggregate - before).norm()) <= 1e-3 * float(aggregate.norm()) and float(before.norm()) > 0.0:
            return Cause("stale", layers)
    factor = float(aggregate @ mean) / float(mean @ mean) if float(mean @ mean) > 0.0 else 0.0
    if float((aggregate - factor * mean).norm()) <= limit:
        return Cause("scale", layers, factor)
    return _by_rank(local, aggregate, limit, layers) or _by_shape(pieces.error, pieces.mean, layers)


def _by_rank(local: Tensor, aggregate: Tensor, limit: float, layers: tuple[int, ...]) -> Cause | None:
    """Ranks whose gradients entered with another weight than 1, when such weights explain the aggregate."""
    ranks = len(local)
    gram = local @ local.T
    if not bool(torch.isfinite(gram).all()):
        return None
    eigenvalues = torch.linalg.eigvalsh(gram)
    if ranks * 2 > local.shape[1] or float(eigenvalues[0]) <= INDEPENDENT * float(eigenvalues[-1]):
        return None
    weights = torch.linalg.solve(gram, local @ aggregate) * ranks
    if float((aggregate - weights @ local / ranks).norm()) > limit:
        return None
    off = ((weights - 1.0).abs() > 0.1).nonzero().flatten().tolist()
    numbers = tuple(weights.tolist())
    alone = [rank for rank, weight in enumerate(numbers) if abs(weight) > 0.1]
    if len(alone) == 1 and ranks > 1:
        return Cause("unreduced", layers, numbers[alone[0]] / ranks, tuple(alone), numbers)
    return Cause("weights", layers, None, tuple(off), numbers)


def _by_shape(error: Tensor, mean: Tensor, layers: tuple[int, ...]) -> Cause:
    """A piece that is gone is the error's own projection on the mean; one element fills one bucket.

    The projection of noise on the mean is 0 with a standard error of |error| |mean| / sqrt(k): a missing piece is told
    from noise where its squared length is at least four of these, and its projection within three of minus that.
    """
    squared = float(error @ error)
    if float(error.square().max()) > 0.9 * squared:
        return Cause("element", layers)
    chance = float(error.norm()) * float(mean.norm()) / len(error) ** 0.5
    if squared >= 4.0 * chance and abs(float(error @ mean) + squared) <= 3.0 * chance and squared < float(mean @ mean):
        return Cause("partly-zeroed", layers, squared / float(mean @ mean))
    return Cause("noise", layers)
