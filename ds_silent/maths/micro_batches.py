"""Which micro-batches did not enter the aggregate as they should? Solved from a sketch of every one of them.

    found = explain_micro_batches(step, sketches, aggregate, tolerance)      # on the writing rank, float64
    found.weights[rank][micro_batch]                                         # 1 is right, 0 is missing

The sketches of a step's micro-batches do not travel with an observation: they would be as many times larger. They are
kept and gathered only where an aggregate was wrong, some steps later, when all ranks have read that they should
(``diagnose`` of :class:`ds_silent.exchange.observation.Wishes`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.maths.causes import EXPLAINED, distinct_gram

LARGEST = 1 << 20  # numbers that one rank may be asked for
OFF = 0.1  # from which a weight is spoken of


@dataclass(frozen=True)
class MicroBatches:
    """With which weight each rank's micro-batches entered the aggregate of one step, in these layers."""

    step: int
    weights: tuple[tuple[float, ...], ...]  # (N, A)
    layers: tuple[int, ...]

    @property
    def off(self) -> dict[int, dict[int, float]]:
        """Micro-batch -> rank -> its weight, where that is not 1."""
        found: dict[int, dict[int, float]] = {}
        for rank, row in enumerate(self.weights):
            for micro_batch, weight in enumerate(row):
                if abs(weight - 1.0) > OFF:
                    found.setdefault(micro_batch, {})[rank] = weight
        return dict(sorted(found.items()))


def explain_micro_batches(step: int, sketches: Tensor, aggregate: Tensor, tolerance: float) -> MicroBatches | None:
    """The weights that explain the aggregate, in all layers or in those where one set of weights does.

    Args:
        step: that was looked at.
        sketches: (N, A, L, m) of the micro-batches' gradients as they are added up, float64, times the sum of the
            ranks' weights, so that the mean over the ranks is what the aggregate should be.
        aggregate: (L, m) float64.
        tolerance: largest error of the whole aggregate that rounding explains.

    Returns:
        None where no weights explain it, or where micro-batches cannot be told apart.
    """
    everywhere = tuple(range(len(aggregate)))
    weights = _solve(sketches, aggregate, tolerance)
    if weights is not None:
        return _found(step, weights, everywhere)
    by_layer: dict[tuple[tuple[int, float], ...], list[tuple[int, Tensor]]] = {}
    for layer in everywhere if len(everywhere) > 1 else ():
        own = _solve(sketches[:, :, layer : layer + 1], aggregate[layer : layer + 1], tolerance)
        if own is not None:
            off = ((own - 1.0).abs() > OFF).flatten().nonzero().flatten().tolist()
            rule = tuple((index, round(float(own.flatten()[index]), 1)) for index in off)
            by_layer.setdefault(rule, []).append((layer, own))
    by_layer.pop((), None)
    if not by_layer:
        return None
    most = max(by_layer.values(), key=len)
    return _found(step, most[0][1], tuple(layer for layer, _ in most))


def _found(step: int, weights: Tensor, layers: tuple[int, ...]) -> MicroBatches | None:
    if not bool(((weights - 1.0).abs() > OFF).any()):
        return None
    if bool(((weights - weights.mean(1, keepdim=True)).abs() <= OFF).all()):
        return None  # a rule of ranks, which the ranks' own sketches tell
    return MicroBatches(step, tuple(tuple(row) for row in weights.tolist()), layers)


def _solve(sketches: Tensor, aggregate: Tensor, tolerance: float) -> Tensor | None:
    """(N, A) weights by least squares, when they leave next to nothing of the error."""
    ranks, count = sketches.shape[:2]
    terms, target = sketches.reshape(ranks * count, -1), aggregate.flatten()
    error = float((target - terms.sum(0) / ranks).norm())
    gram = None if error <= tolerance else distinct_gram(terms)
    if gram is None:
        return None
    weights: Tensor = torch.linalg.solve(gram, terms @ target) * ranks
    if float((target - weights @ terms / ranks).norm()) > max(tolerance, EXPLAINED * error):
        return None
    return weights.view(ranks, count)
