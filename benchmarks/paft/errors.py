"""Errors of the reduction, one object per training and rank; reproducible from (seed, step, rank, attempt).

    errors = Errors(Noise(0.01), seed=0, rank=2)
    EngineHooks(engine, Injection(reduction=errors.reduce))

PAFT's error model (openreview cPZepCZlFW): worker m applies g + eps_m, g the average over the workers, eps_m ~ N(0,
sigma^2) per element, independent per worker, added *after* averaging. Each attempt to reduce a step's gradient draws
its own eps_m. A *sparse* error strikes every n-th step and only its first attempt: a repetition is clean.

The models here fit into one of DeepSpeed's buckets, so the n-th reduction within a step is its n-th attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.drill.faults.injection import Collective, flip_bit, top_exponent_bit


@dataclass(frozen=True)
class Noise:
    """N(0, variance) on every rank, at every step and attempt."""

    variance: float


@dataclass(frozen=True)
class Sparse:
    """Every ``every``-th step something strikes, on one rank (drawn from seed and step) or on all.

    ``kind``: ``noise`` N(0, variance); ``flip`` of the highest exponent bit of a random element; ``dropped``, the
    rank's own part of the sum is left as it is; ``stale``, the result of the step before. ``background``: variance of
    a noise that is always there, on every rank and attempt.
    """

    kind: str
    every: int
    variance: float = 0.0
    all_ranks: bool = False
    background: float = 0.0


Error = Noise | Sparse | None


class Errors:
    """What the reductions of one rank of one training come to.

    Attributes:
        noise_square, gradient_square: sums over the steps of |eps|^2 and |g|^2 of the first attempts.
        attempts: reductions so far; more than steps where some were repeated.
    """

    def __init__(self, error: Error, seed: int, rank: int, ranks: int) -> None:
        self.noise_square, self.gradient_square, self.attempts = 0.0, 0.0, 0
        self._error, self._seed, self._rank, self._ranks = error, seed, rank, ranks
        self._step, self._attempt = 0, 0
        self._before: Tensor | None = None  # result of the step before
        self._latest: Tensor | None = None

    def reduce(self, under_way: Collective) -> None:
        """Runs the collective and spoils its result; called at every attempt."""
        self._attempt = self._attempt + 1 if under_way.step == self._step else 0
        if self._attempt == 0:
            self._step, self._before = under_way.step, self._latest
        self.attempts += 1
        values, own = under_way.tensor, under_way.tensor.clone()
        under_way.run()
        right = values.clone()
        self._spoil(values, own)
        if self._attempt == 0:
            self.gradient_square += float(right.square().sum())
            self.noise_square += float((values - right).square().sum())
        self._latest = right

    def _spoil(self, values: Tensor, own: Tensor) -> None:
        error = self._error
        if isinstance(error, Noise):
            self._add_noise(values, error.variance)
        elif isinstance(error, Sparse):
            if error.background:
                self._add_noise(values, error.background)
            if self._attempt == 0 and self._step % error.every == 0 and (error.all_ranks or self._struck()):
                self._strike(error, values, own)

    def _strike(self, error: Sparse, values: Tensor, own: Tensor) -> None:
        if error.kind == "noise":
            self._add_noise(values, error.variance, stream=1)
        elif error.kind == "flip":
            element = int(torch.randint(len(values), (1,), generator=self._generator(stream=2)))
            flip_bit(values, element, top_exponent_bit(values))
        elif error.kind == "dropped":
            values.copy_(own)
        elif error.kind == "stale":
            if self._before is not None:
                values.copy_(self._before)
        else:
            raise ValueError(f"kind must be noise, flip, dropped or stale, got {error.kind!r}")

    def _add_noise(self, values: Tensor, variance: float, stream: int = 0) -> None:
        noise = torch.randn(values.shape, generator=self._generator(stream))
        values.add_(noise, alpha=variance**0.5)

    def _struck(self) -> bool:
        generator = torch.Generator().manual_seed(mixed(self._seed, self._step, 0, 0, 3))
        return int(torch.randint(self._ranks, (1,), generator=generator)) == self._rank

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(mixed(self._seed, self._step, self._rank, self._attempt, stream))


def mixed(seed: int, step: int, rank: int, attempt: int, stream: int) -> int:
    """One number for each combination: below 10^6 steps, 1,000 ranks, 100 attempts and 10 streams."""
    return (((seed * 1_000_000 + step) * 1_000 + rank) * 100 + attempt) * 10 + stream
