"""What of one statistic follows from others, by a regression over earlier steps that is common to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_silent.detectors.sequential import CLIP, LARGEST, RESOLUTION, Array, Flags
from ds_silent.detectors.stored import Stored

MEMORY = 256  # steps
RIDGE = 1e-3  # of each covariate's own variance: collinear or constant covariates explain nothing


class Explained(Stored):
    """y minus what the covariates explain. The coefficients of a step come from earlier steps only.

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

    def residual(self, values: Array, covariates: Sequence[Array], peers: Flags) -> Array:
        """(N,) residuals, and learn the step. A covariate that is not known everywhere is left out, on all ranks."""
        peers = peers & np.isfinite(values)
        x = self._deviations(values, covariates, peers)
        if not peers.any():
            return np.array(values)
        result = values - self._coefficients() @ x
        if peers.sum() >= 2:
            y = np.clip(values[None], -LARGEST, LARGEST)
            self._learn(np.vstack([x, self._clipped(y - _middles(y, peers), slice(-1, None))])[:, peers])
        return np.asarray(result)

    def adjusted(self, values: Array, covariates: Sequence[Array], peers: Flags) -> Array:
        """(N,) the same residuals; nothing is learnt."""
        peers = peers & np.isfinite(values)
        if not peers.any():
            return np.array(values)
        return np.asarray(values - self._coefficients() @ self._deviations(values, covariates, peers))

    def _deviations(self, values: Array, covariates: Sequence[Array], peers: Flags) -> Array:
        """(C, N) covariates against the peers' middle."""
        known = np.isfinite(values)
        columns = [c if np.isfinite(c[known]).all() else np.zeros(len(c)) for c in covariates]
        x = np.clip(np.where(known, np.stack(columns), 0.0), -LARGEST, LARGEST)
        return self._clipped(x - _middles(x, peers)) if peers.any() else x

    def _clipped(self, deviations: Array, rows: slice = slice(-1)) -> Array:
        """(len, N), up to ``CLIP`` of the sizes learnt; as they are where nothing was learnt."""
        size = CLIP * np.sqrt(self._moments.diagonal()[rows])[:, None]
        return np.where(size > 0.0, np.clip(deviations, -size, size), deviations)

    def _learn(self, deviations: Array) -> None:
        centred = deviations - deviations.mean(axis=1, keepdims=True)  # clipping has moved the mean
        self._learnt = min(self._learnt + 1, MEMORY)
        self._moments += (centred @ centred.T / centred.shape[1] - self._moments) / self._learnt

    def _coefficients(self) -> Array:
        moments, cross = self._moments[:-1, :-1], self._moments[:-1, -1]
        own = moments.diagonal()
        used = own > 0.0
        result = np.zeros(len(own))
        if used.any():
            scale = np.sqrt(own[used])
            correlations = moments[np.ix_(used, used)] / np.outer(scale, scale) + RIDGE * np.eye(used.sum())
            result[used] = np.linalg.solve(correlations, cross[used] / scale) / scale
        return result


def _middles(columns: Array, peers: Flags) -> Array:
    """(C, N) means over the peers; where a column has no spread over them, its own values, which leaves 0 exactly."""
    inside = columns[:, peers]
    flat = np.ptp(inside, axis=1) <= RESOLUTION * np.abs(inside).max(axis=1)
    return np.where(flat[:, None], columns, inside.mean(axis=1, keepdims=True))
