"""Why an aggregate is not what the ranks' gradients add up to: what is linear leaves its own trace in the sketches.

    cause = explain(Pieces(layer_sketches, layer_aggregate, error, expected, previous, sketches), tolerances)
    found = explain_micro_batches(step, sketches, aggregate, tolerance)      # on the writing rank, float64
    found.weights[rank][micro_batch]                                         # 1 is right, 0 is missing

The ranks' sketches come times the sum of the weights that the configuration gives them (1 for a mean, N for a sum), so
that their mean is what the aggregate should be, and every weight found here is relative to the right one.

An aggregate that is wrong by rule - a factor, a rank left out or taken twice, nothing reduced, a piece zeroed or left
over from the step before - lies in the span of vectors whose sketches are at hand, so the rule follows from a small
least-squares problem. All wrong layers are tried together, then each on its own: buckets and partitions end inside of
layers, and what begins as one rule there ends as a mixture. What no layer explains is judged by its shape, in the whole
gradient's sketch: a single element, a piece that is gone, a part of some ranks' gradients, or noise.

Everything here is pure and on the host, float64, and runs only at steps whose check failed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ds_silent.maths.sketch import effective_size

Kind = Literal[
    "leftover", "zeroed", "stale", "scale", "weights", "unreduced", "partly-zeroed", "partial", "element", "noise"
]
EXPLAINED = 0.05  # a rule that leaves less than this share of the error has explained it
LEFT_BY_ROUNDING = 0.5  # where rounding is larger than that, a rule must at least leave less than this share
INDEPENDENT = 1e-6  # smallest over largest eigenvalue of the ranks' Gram matrix, below which nobody can be told apart
OUTSTANDING = 0.5  # of the largest score, by the ranks' own account
STANDARD_ERRORS, LEAST_SHARE = 6.0, 0.1  # by which a rank's weight must be off to be spoken of
CERTAIN = 10.0  # standard errors, from which a smaller share is spoken of: of one parameter among many
LARGEST = 1 << 20  # numbers of micro-batches' sketches that one rank may be asked for
OFF = 0.1  # from which a micro-batch's weight is spoken of
BY_CHANCE, MUCH = 3.0, 0.4  # standard errors, and share of the largest: below one of them others' weights are noise


@dataclass(frozen=True)
class Pieces:
    """The gradient in layers, and whole with a finer sketch. float64."""

    sketches: Tensor  # (N, L, m) of the ranks' local gradients, times ``total``
    aggregate: Tensor  # (L, m)
    error: Tensor  # (k,) of the whole gradient's sketch: aggregate - expected
    expected: Tensor  # (k,) of the whole gradient
    previous: Tensor | None = None  # (L, m) the aggregate of the measurement before
    whole: Tensor | None = None  # (N, k) of the ranks' whole local gradients, times ``total``
    total: float = 1.0  # sum of the ranks' weights


@dataclass(frozen=True)
class Cause:
    """What happened. ``weights`` are those with which the ranks' gradients entered, 1 being right.

    ``layers`` are those that the rule explains; ``elsewhere`` holds the rules of others; ``unexplained`` are the rest.
    """

    kind: Kind
    layers: tuple[int, ...]
    factor: float | None = None  # of the scale; for ``partly-zeroed`` the share of the whole squared norm that is gone
    ranks: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    elsewhere: tuple[Cause, ...] = ()
    unexplained: tuple[int, ...] = ()

    @property
    def wrong(self) -> tuple[int, ...]:
        """All layers that are wrong."""
        others = (layer for cause in self.elsewhere for layer in cause.layers)
        return tuple(sorted((*self.layers, *others, *self.unexplained)))

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks behind it; none where one rule blames others than the next."""
        return self.ranks if all(cause.ranks == self.ranks for cause in self.elsewhere) else ()


@dataclass(frozen=True)
class OwnWeights:
    """What each rank has found of its own weight in the whole aggregate: 1 is right. (N,) float64."""

    weights: Tensor
    scores: Tensor  # by how many standard errors it is off
    limit: float  # of the scores, beyond which chance is ruled out
    squares: Tensor  # (N, L) squared norms of the ranks' gradients by layer, in one unit per rank
    explained: Tensor  # of the error beside the mean's direction, the share that each rank's weight explains


def own_weights(
    weights: Tensor,
    own_squared: Tensor,
    squares: Tensor,
    error: Tensor,
    expected: Tensor,
    total: float,
    log_rate: float,
) -> OwnWeights:
    """By how much each rank's weight is off, in standard errors (:mod:`ds_silent.exchange.gather`).

    Args:
        weights: (N,) that the ranks have found; NaN of a rank that has none.
        own_squared: (N,) squared length of what each has found it by.
        squares: (N, L) squared norms of the ranks' gradients by layer.
        error: (k,) sketch of aggregate - expected.
        expected: (k,) sketch of what the aggregate should be.
        total: sum of the ranks' weights in the aggregate.
        log_rate: minus the natural logarithm of the rate at which some rank may be named by chance.
    """
    ranks = len(weights)
    errors = ranks / total * float(error.norm()) / (own_squared * effective_size(len(error))).sqrt()
    known = weights.isfinite() & errors.isfinite() & (errors > 0.0)
    scores = torch.where(known, (weights - 1.0) / errors, torch.zeros_like(weights))
    limit = math.sqrt(2.0 * (math.log(ranks) + log_rate))
    found = torch.where(known, weights, torch.ones_like(weights))
    beside = error - (error @ expected) / (expected @ expected).clamp(min=1e-300) * expected
    lengths = (found - 1.0).square() * (total / ranks) ** 2 * torch.where(known, own_squared, 0.0)
    return OwnWeights(found, scores, limit, squares, lengths / (beside @ beside).clamp(min=1e-300))


def explain(pieces: Pieces, tolerances: Tensor, leftover: tuple[int, ...] = (), own: OwnWeights | None = None) -> Cause:
    """The simplest rule that explains the error.

    Args:
        pieces: of the step.
        tolerances: (L,) largest error of each layer that rounding explains.
        leftover: ranks whose gradients were not empty when the step began.
        own: where the pieces are those of all ranks together.
    """
    errors = pieces.aggregate - pieces.sketches.mean(0)
    wrong = (errors.norm(dim=1) > tolerances).nonzero().flatten()
    if len(wrong) == 0:  # too small for a layer's own threshold: the layer that has most of it
        wrong = errors.norm(dim=1).argmax().reshape(1)
    layers = tuple(wrong.tolist())
    if leftover:
        return Cause("leftover", layers, ranks=leftover)
    named = None if own is None else _by_own_weight(own, layers)
    return _rule(pieces, layers, tolerances) or named or _mixture(pieces, layers, tolerances) or _shape(pieces, layers)


def _by_own_weight(own: OwnWeights, layers: tuple[int, ...]) -> Cause | None:
    """The ranks that stand out by their own account; a rank that is not in it has the weight 0 there.

    What is missing of one rank looks, to another whose own part is like it, as if a share of its own were missing. But
    the first explains the whole error, and the other the cosine's square of it. So ranks are named, those that explain
    most first, as long as what is left of the error is at least half of what the next one would explain.
    """
    scores = own.scores.abs()
    near = (scores >= max(own.limit, OUTSTANDING * float(scores.max()))).nonzero().flatten()
    share = own.squares[:, list(layers)].sum(1) / own.squares.sum(1)  # of each rank's gradient that lies in them
    explains = own.explained[near] / share[near].clamp(min=1e-12)
    off = torch.zeros_like(scores, dtype=torch.bool)
    left = 1.0
    for place in explains.argsort(descending=True).tolist():
        if left < 0.5 * float(explains[place]) and bool(off.any()):
            break
        off[near[place]] = True
        left -= float(explains[place])
    if not bool(off.any()) or 2 * int(off.sum()) > len(off):
        return None
    ranks = tuple(off.nonzero().flatten().tolist())
    weights = torch.where(off, 1.0 + (own.weights - 1.0) / share.clamp(min=1e-12), torch.ones_like(share))
    kind: Kind = "weights" if bool(((weights - 1.0).abs() > LEAST_SHARE)[off].all()) else "partial"
    return Cause(kind, layers, None, ranks, tuple(weights.tolist()))


def _mixture(pieces: Pieces, layers: tuple[int, ...], tolerances: Tensor) -> Cause | None:
    """Layer by layer; equal rules are joined, the one that explains the largest error comes first."""
    found: list[Cause] = []
    for layer in layers if len(layers) > 1 else ():
        cause = _rule(pieces, (layer,), tolerances)
        if cause is None:
            continue
        same = next((i for i, other in enumerate(found) if _alike(cause, other)), None)
        if same is None:
            found.append(cause)
        else:
            found[same] = replace(found[same], layers=(*found[same].layers, layer))
    if not found:
        return None
    errors = (pieces.aggregate - pieces.sketches.mean(0)).square().sum(1)
    found.sort(key=lambda cause: -float(errors[list(cause.layers)].sum()))
    explained = {layer for cause in found for layer in cause.layers}
    rest = tuple(layer for layer in layers if layer not in explained)
    return replace(found[0], elsewhere=tuple(found[1:]), unexplained=rest)


def _alike(one: Cause, other: Cause) -> bool:
    factors = (one.factor or 0.0) - (other.factor or 0.0)
    return one.kind == other.kind and one.ranks == other.ranks and abs(factors) <= 0.01 * abs(one.factor or 1.0)


def _rule(pieces: Pieces, layers: tuple[int, ...], tolerances: Tensor) -> Cause | None:
    """One rule for all these layers."""
    wrong = list(layers)
    local, aggregate = pieces.sketches[:, wrong].flatten(1), pieces.aggregate[wrong].flatten()
    mean = local.mean(0)
    error = float((aggregate - mean).norm())
    limit = min(max(float(tolerances[wrong].norm()), EXPLAINED * error), LEFT_BY_ROUNDING * error)
    if float(aggregate.norm()) <= min(limit, 1e-3 * float(mean.norm())):
        return Cause("zeroed", layers)
    if pieces.previous is not None:
        before = pieces.previous[wrong].flatten()
        if float(before.norm()) > 0.0:
            if float((aggregate - before).norm()) <= 1e-3 * float(aggregate.norm()):
                return Cause("stale", layers)
            if float((aggregate - mean - before).norm()) <= limit:
                return Cause("leftover", layers)
    factor = float(aggregate @ mean) / float(mean @ mean) if float(mean @ mean) > 0.0 else 0.0
    if float((aggregate - factor * mean).norm()) <= limit:
        return Cause("scale", layers, factor)
    everywhere = len(layers) == pieces.sketches.shape[1] > 1
    return _by_rank(local, aggregate, limit, layers, everywhere, pieces.total)


def _by_rank(
    local: Tensor, aggregate: Tensor, limit: float, layers: tuple[int, ...], everywhere: bool, total: float
) -> Cause | None:
    """Ranks whose gradients entered with another weight than 1, when such weights explain the aggregate."""
    gram = distinct_gram(local)
    if gram is None:
        return None
    ranks = len(local)
    weights = torch.linalg.solve(gram, local @ aggregate) * ranks
    if float((aggregate - weights @ local / ranks).norm()) > limit:
        return None
    off = ((weights - 1.0).abs() > LEAST_SHARE).nonzero().flatten().tolist()
    numbers = tuple(weights.tolist())
    alone = [rank for rank, weight in enumerate(numbers) if abs(weight) > LEAST_SHARE]
    # each rank answers for a part: what is one rank's gradient everywhere is the others' that did not enter
    if len(alone) == 1 and ranks > 1 and not everywhere:
        return Cause("unreduced", layers, numbers[alone[0]] * total / ranks, tuple(alone), numbers)
    return Cause("weights", layers, None, tuple(off), numbers)


def _shape(pieces: Pieces, layers: tuple[int, ...]) -> Cause:
    """A piece that is gone is the error's own projection on what is expected; one element fills one bucket.

    The projection of noise on it is 0 with a standard error of |error| |expected| / sqrt(k): a missing piece is told
    from noise where its squared length is at least four of these, and its projection within three of minus that.
    """
    error, expected = pieces.error, pieces.expected
    squared = float(error @ error)
    if float(error.square().max()) > 0.9 * squared:
        return Cause("element", layers)
    chance = float(error.norm()) * float(expected.norm()) / len(error) ** 0.5
    wanted = float(expected @ expected)
    if squared >= 4.0 * chance and abs(float(error @ expected) + squared) <= 3.0 * chance and squared < wanted:
        return Cause("partly-zeroed", layers, squared / wanted)
    partial = None if pieces.whole is None else _partial(pieces.whole, error, layers)
    return partial or Cause("noise", layers)


def _partial(local: Tensor, error: Tensor, layers: tuple[int, ...]) -> Cause | None:
    """Something of the gradients is missing: the error's regression on them is not zero, and leaves a rest.

    A rank is named where the others' weights are far smaller, or as their noise explains: what is gone of several can
    hide behind what is left of the others, and what is wrong of all alike is no rank's noise.
    """
    gram = distinct_gram(local)
    if gram is None:
        return None
    ranks = len(local)
    weights = torch.linalg.solve(gram, local @ error) * ranks
    rest = float((error - weights @ local / ranks).norm()) / len(error) ** 0.5
    standard_errors = torch.linalg.inv(gram).diagonal().clamp(min=0.0).sqrt() * ranks * rest
    least = torch.maximum(STANDARD_ERRORS * standard_errors, (CERTAIN * standard_errors).clamp(max=LEAST_SHARE))
    off = (weights.abs() > least).nonzero().flatten().tolist()
    if not off:
        return None
    doubtful = weights.abs() > (BY_CHANCE * standard_errors).clamp(min=MUCH * float(weights.abs().max()))
    most = int(weights.abs().argmax())  # the others' may be off because their gradients are like its own
    blamed = (most,) if ranks > 2 and int(doubtful.sum()) == 1 and most in off else ()
    return Cause("partial", layers, None, blamed, tuple((weights + 1.0).tolist()))


def distinct_gram(local: Tensor) -> Tensor | None:
    """(N, N) inner products of (N, m) sketches, or None where the N cannot be told apart."""
    gram = local @ local.T
    if not bool(torch.isfinite(gram).all()) or 2 * len(local) > local.shape[1]:
        return None
    eigenvalues = torch.linalg.eigvalsh(gram)
    return None if float(eigenvalues[0]) <= INDEPENDENT * float(eigenvalues[-1]) else gram


# -- single micro-batches ----------------------------------------------------------------------------------------------
#
# Which micro-batches did not enter the aggregate as they should? Solved from a sketch of every one of them. These do
# not travel with an observation: they would be as many times larger. They are kept and gathered only where an aggregate
# was wrong, some steps later, when all ranks have read that they should (``diagnose`` of
# :class:`ds_silent.exchange.observation.Wishes`).


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
