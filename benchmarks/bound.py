"""How soon could any test find a rank that is off? The bound that the measured delays of ``detection.py`` stand beside.

    fewest_steps(pool, ranks=4, mean_steps=1e6, scale=1.03)       # about 3,000

A test whose false alarms are ``mean_steps`` apart in the mean needs, after the change, at least

    log(mean_steps) / I        (to first order; Lorden, Annals of Mathematical Statistics 42, 1971)

steps in the mean, I being the information of one step: the mean log likelihood ratio of faulty against healthy. Here it
is that of a shift by d of the rank's loss, log gradient norm and cosine with the mean of the others, given its label
tokens, as if they were Gaussian with the covariance C that they have in the pool; the level common to all ranks is
unknown, and N ranks tell it with an error of C / N:

    I = (1 - 1/N) d' C^-1 d / 2

The bound knows the rank, the size and the kind of the fault from the start; a detector knows none of them.
"""

from __future__ import annotations

import math

import torch
from gradient_pool import Pool
from torch import Tensor


def fewest_steps(
    pool: Pool, ranks: int, mean_steps: float, scale: float = 1.0, rotation: float = 0.0, kind: int = 0
) -> float:
    """At least 1. ``scale``, ``rotation`` and ``kind`` as in ``detection.Fault``."""
    healthy = pool.of_kind(0)
    before = _features(pool, healthy, ranks)
    after = _features(pool, pool.of_kind(kind), ranks)
    after[:, 1] += math.log(scale) + 0.5 * math.log1p(rotation**2)
    after[:, 2] /= math.sqrt(1.0 + rotation**2)
    residuals, shifted = _given_tokens(before, after, pool.tokens[healthy], pool.tokens[pool.of_kind(kind)])
    shift = shifted.mean(dim=0) - residuals.mean(dim=0)
    information = 0.5 * (1.0 - 1.0 / ranks) * float(shift @ torch.linalg.solve(residuals.T.cov(), shift))
    return max(1.0, math.log(mean_steps) / information) if information > 0.0 else math.inf


def _features(pool: Pool, chosen: Tensor, ranks: int) -> Tensor:
    """(len(chosen), 3): loss, log norm, cosine with the sum of N - 1 healthy gradients drawn at random."""
    generator, healthy = torch.Generator().manual_seed(0), pool.of_kind(0)
    norms, cosines = pool.gram.diagonal()[chosen].sqrt(), []
    for own, norm in zip(chosen.tolist(), norms.tolist(), strict=True):
        drawn = healthy[torch.randperm(len(healthy), generator=generator)[:ranks]]
        others = drawn[drawn != own][: ranks - 1]
        length = float(pool.gram[others[:, None], others].sum()) ** 0.5
        cosines.append(float(pool.gram[own, others].sum()) / (norm * length))
    return torch.stack([pool.loss[chosen], norms.log(), torch.tensor(cosines, dtype=torch.float64)], dim=1)


def _given_tokens(before: Tensor, after: Tensor, tokens: Tensor, tokens_after: Tensor) -> tuple[Tensor, Tensor]:
    """Both minus what a regression of ``before`` on the logarithm of the label tokens explains."""

    def columns(count: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(count), dtype=torch.float64), count.double().log()], dim=1)

    coefficients = torch.linalg.lstsq(columns(tokens), before).solution
    return before - columns(tokens) @ coefficients, after - columns(tokens_after) @ coefficients
