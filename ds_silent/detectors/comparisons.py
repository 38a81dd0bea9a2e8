"""A rank's loss, gradient norm and direction against the other ranks', and against its own past.

    level = AgainstOthers(ranks=4, cap=34.0)
    level.step(12, columns, healthy)             # (4, N): loss, log norm, cosine, log label tokens
    level.score()                                # (N,) log evidence against each rank
    level.strongest(2)                           # which statistic speaks against rank 2, how, and since when

:class:`AgainstOthers` has the null hypothesis that rows are dealt at random, so that ranks are exchangeable;
:class:`AgainstOwnPast` that of :mod:`ds_silent.detectors.own_past`. The evidence of both is a mean over their series,
so its expectation after n steps is n under their null, whatever the series have to do with each other.

What is explained is taken out first, with coefficients learnt from earlier steps and common to all ranks: the loss
given the number of label tokens; the norm given the loss, the tokens and the cosine (a short batch has a large, noisy
gradient, and that is no fault); the cosine given the loss and the tokens.

Label tokens dealt unevenly break the null without any fault. So the same evidence is collected for "this rank's token
count differs", and it is taken off: a norm that depends on the tokens never says more about which rank is odd than the
tokens themselves. Where all ranks have as many tokens, as packed rows do, nothing can be explained by them: each such
step takes half of their (log) evidence back, or one odd batch would hide a fault for good.

**Spread.** A rank that is far above the others at one step and as far below at the next (a task out of phase) is not
shifted. So the size of a rank's deviation, |x_r - median of the others' x|, is followed as well, of the loss, the norm
and, to be taken off, the tokens. It is the same function of the step's values for every rank: exchangeable ranks have
exchangeable sizes, whatever their distribution, and the rate holds as above. The sizes have SPREAD of the evidence's
weight. Of two ranks both are as far from the other. Where rows are not dealt at random, a rank's own rows make its
spread, and none is followed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ds_silent.detectors.finding import Stored
from ds_silent.detectors.own_past import OwnPast
from ds_silent.detectors.sequential import (
    CLIP,
    LARGEST,
    RESOLUTION,
    Add,
    Array,
    Flags,
    Onset,
    Ranks,
    SequentialTest,
    clip,
    median,
    only,
    others,
)

STATISTICS = ("loss", "gradient norm", "gradient direction")
LOSS, NORM, DIRECTION, TOKENS, LOSS_SIZE, NORM_SIZE, TOKENS_SIZE = range(7)
SPREAD = 1 / 8  # of the weight
_SIZED = (LOSS, NORM, TOKENS)
WINDOWS = (16, 128, 1024)
"""Steps that make a rank's own past: a change is seen for about as long, so small ones need the long windows."""
SMALLEST = (0.0, 0.02, 0.01, 0.02)
"""Moves of a rank's offset that are always expected: of the loss, the log norm, the cosine, the log label tokens."""
_COVARIATES = ([TOKENS], [LOSS, TOKENS, DIRECTION], [LOSS, TOKENS])  # that explain each of the statistics
_NOT_TOKENS = [row for row in range(len(WINDOWS) * len(SMALLEST)) if row % len(SMALLEST) != TOKENS]
MEMORY = 256  # steps whose coefficients explain a statistic by others
RIDGE = 1e-3  # of each covariate's own variance: collinear or constant covariates explain nothing


class Explained(Stored):
    """Take from y what the covariates explain, with coefficients from earlier steps only, common to all ranks.

    Any function of (y_j, covariates_j) that is the same for all ranks keeps exchangeable ranks exchangeable, so bad
    coefficients cost power and never a false alarm. One spike must not make the coefficients: deviations are
    learnt up to ``CLIP`` of their own past size, and none explains more than one of that size would.

    Deviations are from the peers' mean at every use: a coefficient times a level common to all ranks (a billion tokens)
    would leave only the rounding of that product. A column whose spread is below ``RESOLUTION`` of its values has none:
    equal numbers minus their mean leave 1e-14 of rounding, which a coefficient of 1e11 blows up to "explain" any y.
    """

    stored = ("moments", "learnt")

    def __init__(self, covariates: int):
        self._moments = np.zeros((covariates + 1, covariates + 1))  # of the covariates and, last, of y
        self._learnt = 0

    def residuals(self, values: Array, covariates: Array, peers: Flags, learnt: int = 0) -> Array:
        """(W, N) residuals of a statistic that is taken in W ways, each known on the same ranks, and learn the step.

        Args:
            values, covariates: (W, N), (W, C, N). A covariate that is not known everywhere is left out, on all ranks.
            peers: (N,) that are compared.
            learnt: the way that is learnt; those behind it are explained with what it has taught.
        """
        known = np.isfinite(values).all(axis=0)
        peers = peers & known
        if not peers.any():
            return np.array(values)
        lacking = (known & ~np.isfinite(covariates)).any(axis=-1, keepdims=True)
        columns = clip(np.where(known & ~lacking, covariates, 0.0), -LARGEST, LARGEST)
        result, coefficients = np.empty(values.shape), self._coefficients()
        for row, own in enumerate(columns):
            x = self._clipped(own - _middles(own, peers))
            result[row] = values[row] - coefficients @ x
            if row == learnt and peers.sum() >= 2:
                y = clip(values[row, None], -LARGEST, LARGEST)
                self._learn(np.vstack([x, self._clipped(y - _middles(y, peers), slice(-1, None))])[:, peers])
                coefficients = self._coefficients() if row + 1 < len(columns) else coefficients
        return result

    def _clipped(self, deviations: Array, rows: slice = slice(-1)) -> Array:
        """(len, N), up to ``CLIP`` of the sizes learnt; as they are where nothing was learnt."""
        size = CLIP * np.sqrt(self._moments.diagonal()[rows])[:, None]
        return np.where(size > 0.0, clip(deviations, -size, size), deviations)

    def _learn(self, deviations: Array) -> None:
        centred = deviations - _mean(deviations)  # clipping has moved the mean
        self._learnt = min(self._learnt + 1, MEMORY)
        self._moments += (centred @ centred.T / centred.shape[1] - self._moments) / self._learnt

    def _coefficients(self) -> Array:
        moments, cross = self._moments[:-1, :-1], self._moments[:-1, -1]
        own = moments.diagonal()
        result, used = np.zeros(len(own)), (own > 0.0).nonzero()[0]
        if len(used):
            scale = np.sqrt(own[used])
            correlations = moments[used[:, None], used] / (scale[:, None] * scale) + RIDGE * np.eye(len(used))
            result[used] = np.linalg.solve(correlations, cross[used] / scale) / scale
        return result


@dataclass(frozen=True)
class Strongest:
    """What speaks loudest against a rank."""

    statistic: str  # of STATISTICS
    series: int
    onset: Onset
    spread: bool = False  # the size of its deviation


class _Comparison(Stored):
    """Hold the evidence of a comparison of ranks, and the coefficients that explain one statistic by others."""

    def __init__(self, series: int, ranks: int, cap: float):
        self._test = SequentialTest(series, ranks, cap)
        self._explained = self._loss, self._norm, self._direction = Explained(1), Explained(3), Explained(2)

    def gain(self, series: int, component: int, rank: int) -> float:
        """Return the log evidence of the newest step without slack: a change does not end because all ranks move."""
        return self._test.gained(series, component, rank)

    def forget(self, ranks: Flags) -> None:
        """Start again for these ranks: the comparison was spoiled, or the fault has ended."""
        self._test.forget_evidence(ranks)

    def unlearn(self, rank: int, since: int) -> None:
        """Take a rank out of the history, from the step at which its fault began."""
        self._test.unlearn(rank, since)


class AgainstOthers(_Comparison):
    """Follow three statistics and the label tokens of each rank, as they are."""

    stored = ("test", "loss", "norm", "direction")

    def __init__(self, ranks: int, cap: float):
        super().__init__(TOKENS_SIZE + 1, ranks, cap)

    def step(self, step: int, columns: Array, healthy: Flags, random: bool = True) -> None:
        """Add the evidence of one step: (4, N), NaN where not known. Sizes are compared if rows are dealt at random."""
        residuals = [
            explained.residuals(columns[None, row], columns[None, covariates], healthy)[0]
            for row, (explained, covariates) in enumerate(zip(self._explained, _COVARIATES, strict=True))
        ]
        values = np.stack([*residuals, columns[TOKENS]])
        sizes = [_sizes(values[row], healthy) if random else np.full_like(values[row], np.nan) for row in _SIZED]
        self._test.step(step, np.concatenate([values, sizes]), healthy)
        if _all_equal(columns[TOKENS], healthy):
            self._test.halve_cusum([TOKENS, TOKENS_SIZE])

    def score(self, ranks: Ranks = slice(None), add: Add = np.logaddexp.reduce) -> Array:
        """(N,) log evidence against each rank."""
        shifts = self._test.log_evidence(slice(TOKENS), ranks, add)
        sizes = self._test.log_evidence(slice(LOSS_SIZE, TOKENS_SIZE), ranks, add)
        tokens = self._test.log_cusum(slice(TOKENS, None, TOKENS_SIZE - TOKENS), ranks, add)
        shift = add(shifts, axis=0) - math.log(len(STATISTICS)) + math.log1p(-SPREAD)
        spread = np.logaddexp(*sizes) + math.log(SPREAD / 2.0)
        return np.asarray(np.logaddexp(shift, spread) - np.maximum(*tokens))

    def forget_sizes(self, rank: int) -> None:
        """Start again with the sizes of one rank's deviations."""
        self._test.forget_evidence(only(rank, self._test.ranks), LOSS_SIZE)

    def strongest(self, rank: int) -> Strongest:
        """Return what speaks loudest against a rank. A large shift has a large size as well, and counts as a shift."""
        evidence = self._test.log_evidence(ranks=[rank])[:, 0]
        series, size = int(np.argmax(evidence[:TOKENS])), LOSS_SIZE + int(np.argmax(evidence[LOSS_SIZE:TOKENS_SIZE]))
        spread = bool(evidence[series] < evidence[size] / 2.0)
        series = size if spread else series
        return Strongest(STATISTICS[series % LOSS_SIZE], series, self._test.onset(series, rank), spread)


class AgainstOwnPast(_Comparison):
    """Follow how the same numbers change against each rank's own past, over several windows side by side.

    A resume keeps each rank's past; evidence that is not enough yet starts anew.
    """

    stored = ("explained", "past")

    def __init__(self, ranks: int, cap: float):
        super().__init__(len(WINDOWS) * len(SMALLEST), ranks, cap)
        windows, smallest = np.repeat(WINDOWS, len(SMALLEST)), np.tile(SMALLEST, len(WINDOWS))
        self._past = OwnPast(len(windows), ranks, windows, smallest)  # of all windows, one behind the other

    def step(self, step: int, columns: Array, healthy: Flags) -> None:
        """Add the evidence of one step: (4, N), NaN where not known."""
        values = np.concatenate([columns] * len(WINDOWS))
        moved = self._past.moved(values)
        ways, rest = moved.reshape(len(WINDOWS), *columns.shape), moved.copy()
        for row, (explained, covariates) in enumerate(zip(self._explained, _COVARIATES, strict=True)):
            rest[row :: len(columns)] = explained.residuals(ways[:, row], ways[:, covariates], healthy, learnt=1)
        deviations, slack = self._past.step(rest, values, healthy)
        self._test.step(step, deviations, healthy, slack)
        if _all_equal(columns[TOKENS], healthy):
            self._test.halve_cusum(slice(TOKENS, None, len(SMALLEST)))  # of every window

    def score(self, ranks: Ranks = slice(None), add: Add = np.logaddexp.reduce) -> Array:
        """(N,) log evidence against each rank."""
        evidence = self._test.log_evidence(_NOT_TOKENS, ranks, add)
        tokens = self._test.log_cusum(slice(TOKENS, None, len(SMALLEST)), ranks, add).max(axis=0)
        return np.asarray(add(evidence, axis=0) - math.log(len(evidence)) - tokens)

    def strongest(self, rank: int) -> Strongest:
        """Return what speaks loudest against a rank."""
        evidence = self._test.log_evidence(ranks=[rank])[:, 0]
        evidence[TOKENS :: len(SMALLEST)] = -np.inf
        series = int(np.argmax(evidence))
        return Strongest(STATISTICS[series % len(SMALLEST)], series, self._test.onset(series, rank))

    def usual(self) -> Array:
        """Return (2, N) loss and gradient norm of each rank's newest past; NaN where not known or not positive."""
        mean = self._past.means()
        with np.errstate(over="ignore"):
            both = np.stack([mean[LOSS], np.exp(mean[NORM])])
        return np.where(both > 0.0, both, np.nan)

    def begin_anew(self, ranks: Flags) -> None:
        """Take what these ranks do from now on for their past."""
        self.forget(ranks)
        self._past.forget(ranks)


def _sizes(values: Array, healthy: Flags) -> Array:
    """Return (N,) distances from the median of the other healthy values; NaN where there is none."""
    peers = healthy & np.isfinite(values)
    if peers.sum() < 2:
        return np.full_like(values, np.nan)
    centre = np.full_like(values, median(values[peers]))
    centre[peers] = others(clip(values[peers], -LARGEST, LARGEST)[None])[0][0]
    return np.asarray(np.abs(values - centre))


def _all_equal(tokens: Array, healthy: Flags) -> bool:
    compared = tokens[healthy & np.isfinite(tokens)]
    return len(compared) > 1 and bool(compared.min() == compared.max())


def _middles(columns: Array, peers: Flags) -> Array:
    """(C, N) means over the peers; where a column has no spread over them, its own values, which leaves 0 exactly."""
    inside = columns[:, peers]
    lowest, highest = inside.min(axis=1, keepdims=True), inside.max(axis=1, keepdims=True)
    flat = highest - lowest <= RESOLUTION * np.maximum(highest, -lowest)
    return np.where(flat, columns, _mean(inside))


def _mean(columns: Array) -> Array:
    return np.asarray(columns.sum(axis=1, keepdims=True) / columns.shape[1])
