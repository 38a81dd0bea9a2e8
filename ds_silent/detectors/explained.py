"""What of one statistic follows from others, by a regression over earlier steps that is common to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.sequential import Array, Flags

MEMORY = 256  # steps
RIDGE = 1e-3  # of each covariate's own variance: collinear or constant covariates explain nothing


class Explained:
    """y minus what the covariates explain. The coefficients of a step come from earlier steps only.

    Any function of (y_j, covariates_j) that is the same for all ranks keeps exchangeable ranks exchangeable, so bad
    coefficients cost power and never a false alarm.
    """

    def __init__(self, covariates: int):
        self._moments = np.zeros((covariates, covariates))
        self._cross = np.zeros(covariates)

    def residual(self, values: Array, covariates: Sequence[Array], peers: Flags) -> Array:
        """(N,) residuals; a covariate that is not known everywhere is left out, for all ranks alike."""
        x = np.stack([c if np.isfinite(c[np.isfinite(values)]).all() else np.zeros(len(c)) for c in covariates], axis=1)
        known = peers & np.isfinite(values)
        result = values - np.where(np.isfinite(x), x, 0.0) @ self._coefficients()
        if known.sum() >= 2:
            centred = x[known] - x[known].mean(axis=0)
            y = values[known] - values[known].mean()
            moments, cross = centred.T @ centred / known.sum(), centred.T @ y / known.sum()
            if np.isfinite(moments).all() and np.isfinite(cross).all():
                self._moments += (moments - self._moments) / MEMORY
                self._cross += (cross - self._cross) / MEMORY
        return np.asarray(result)

    def _coefficients(self) -> Array:
        own = self._moments.diagonal()
        used = own > 0.0
        result = np.zeros(len(own))
        if used.any():
            scale = np.sqrt(own[used])
            correlations = self._moments[np.ix_(used, used)] / np.outer(scale, scale) + RIDGE * np.eye(used.sum())
            result[used] = np.linalg.solve(correlations, self._cross[used] / scale) / scale
        return result

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"moments": self._moments.tolist(), "cross": self._cross.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._moments = np.array(state["moments"], dtype=np.float64)
        self._cross = np.array(state["cross"], dtype=np.float64)
