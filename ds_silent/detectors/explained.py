"""What of one statistic follows from others, by a regression over earlier steps that is common to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.sequential import CLIP, LARGEST, Array, Flags

MEMORY = 256  # steps
RIDGE = 1e-3  # of each covariate's own variance: collinear or constant covariates explain nothing


class Explained:
    """y minus what the covariates explain. The coefficients of a step come from earlier steps only.

    Any function of (y_j, covariates_j) that is the same for all ranks keeps exchangeable ranks exchangeable, so bad
    coefficients cost power and never a false alarm. One spike must not make the coefficients: deviations are
    learnt up to ``CLIP`` of their own past size.
    """

    def __init__(self, covariates: int):
        self._moments = np.zeros((covariates + 1, covariates + 1))  # of the covariates and, last, of y
        self._learnt = 0

    def residual(self, values: Array, covariates: Sequence[Array], peers: Flags) -> Array:
        """(N,) residuals; a covariate that is not known everywhere is left out, for all ranks alike."""
        known = np.isfinite(values)
        columns = [c if np.isfinite(c[known]).all() else np.zeros(len(c)) for c in covariates]
        x = np.clip(np.where(known, np.stack(columns), 0.0), -LARGEST, LARGEST)
        result = values - self._coefficients() @ x
        peers = peers & known
        if peers.sum() >= 2:
            self._learn(np.vstack([x, np.clip(values, -LARGEST, LARGEST)[None]])[:, peers])
        return np.asarray(result)

    def _learn(self, columns: Array) -> None:
        centred = columns - columns.mean(axis=1, keepdims=True)
        if self._learnt:
            size = CLIP * np.sqrt(self._moments.diagonal())[:, None]
            centred = np.where(size > 0.0, np.clip(centred, -size, size), centred)
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

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"moments": self._moments.tolist(), "learnt": self._learnt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._moments = np.array(state["moments"], dtype=np.float64)
        self._learnt = int(state["learnt"])
