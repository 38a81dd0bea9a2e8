"""Which trainings each part consists of; every method of a seed has the same weights, rows and errors to begin with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .errors import Error, Noise, Sparse
from .training import Training

STEPS = 199  # one less than a multiple of 5, 10 and 50: every H ends just before an averaging
EVERY = 25  # steps between two bursts or sparse faults: seven in a training
VARIANCES = {"sgd": (1e-4, 1e-3, 1e-2, 1e-1), "adam": (1e-3, 1e-2)}
FEW_VARIANCES = (1e-3,)  # for what cannot repair a noise that is always there; one repetition costs as much again
LANGUAGE_VARIANCES = (1e-3,)
RATES = {("digits", "sgd"): 0.02, ("digits", "adam"): 0.003, ("language", "sgd"): 0.05}
DIVERGENCE_RATE, DIVERGENCE_VARIANCE = 0.02, 1e-3
PAFT = ("none", "sync-5", "sync-10", "sync-50", "dynamic")
METHODS_OF = {"sgd": (*PAFT, "retry", "majority"), "adam": ("none", "sync-5", "dynamic")}
LANGUAGE_METHODS = ("none", "sync-5", "dynamic")
SPARSE_METHODS = ("none", "sync-5", "dynamic", "retry", "majority")
SPARSE: dict[str, Sparse] = {
    "N(0, 1e-4) always, N(0, 0.1) on all ranks": Sparse("noise", EVERY, 0.1, all_ranks=True, background=1e-4),
    "N(0, 1e-4) always, N(0, 1) on all ranks": Sparse("noise", EVERY, 1.0, all_ranks=True, background=1e-4),
    "N(0, 1) on one rank": Sparse("noise", EVERY, 1.0),
    "N(0, 1) on all ranks": Sparse("noise", EVERY, 1.0, all_ranks=True),
    "top exponent bit, one rank": Sparse("flip", EVERY),
    "dropped bucket, one rank": Sparse("dropped", EVERY),
    "stale bucket, one rank": Sparse("stale", EVERY),
}


def cell(task: str, optimizer: str, method: str, error: Error, seed: int) -> Training:
    return Training(task, optimizer, RATES[task, optimizer], STEPS, method, error, seed)


def representative(method: str, error: Sparse) -> Sparse:
    """The error whose training leaves the very same weights: for a repeated step, that with the smallest burst.

    With a noise that is always there retry repeats every step, and the burst is in the first attempt only.
    """
    return replace(error, variance=0.1) if method == "retry" and error.background else error


def noise(seeds: int) -> Iterator[Training]:
    for seed in range(seeds):
        for optimizer, variances in VARIANCES.items():
            yield cell("digits", optimizer, "none", None, seed)
            for method in METHODS_OF[optimizer]:
                for variance in variances:
                    if method in PAFT or variance in FEW_VARIANCES:
                        yield cell("digits", optimizer, method, Noise(variance), seed)


def bursts(seeds: int) -> Iterator[Training]:
    for seed in range(seeds):
        for method in SPARSE_METHODS:
            yield cell("digits", "sgd", method, None, seed)  # nothing to repair: is anything changed?
            for error in SPARSE.values():
                yield cell("digits", "sgd", method, representative(method, error), seed)


def language(seeds: int) -> Iterator[Training]:
    for seed in range(seeds):
        yield cell("language", "sgd", "none", None, seed)
        for method in LANGUAGE_METHODS:
            for variance in LANGUAGE_VARIANCES:
                yield cell("language", "sgd", method, Noise(variance), seed)


def divergence(seeds: int) -> Iterator[Training]:
    """Plain SGD at a constant rate, because that is what the formula is about."""
    for seed in range(seeds):
        for method in ("none", "sync-50", "sync-10"):
            yield Training(
                *("digits", "plain", DIVERGENCE_RATE, STEPS, method, Noise(DIVERGENCE_VARIANCE), seed),
                constant_rate=True,
                divergence=True,
            )


PARTS = {"noise": noise, "bursts": bursts, "language": language, "divergence": divergence}
