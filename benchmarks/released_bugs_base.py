"""What the trainings of released_bugs.py share: each is beside a number that knows nothing of ds_silent.

Every function trains with the releases that PYTHONPATH names, and returns per step how far what was done is from what
was promised, computed by hand: in float64 by plain torch, by a schedule's published formula, or by counting rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY, RATE, STEPS, SEED, EOS = 64, 0.05, 6, 11, 1


@dataclass(frozen=True)
class Found:
    """Per step an error relative to what was promised, and the first wrong step's number in words."""

    errors: tuple[float, ...]
    number: str


@dataclass(frozen=True)
class Watch:
    """Where ds_silent writes; with None it is not there."""

    directory: Path
    block: dict[str, Any] | None

    def callbacks(self) -> list[Any]:
        """Return the Trainer's callback, if it is to be observed."""
        if self.block is None:
            return []
        from ds_silent.integrations.huggingface import SilentConsistencyCallback

        return [SilentConsistencyCallback(self.block)]


CASES: dict[str, Callable[..., Found]] = {}


def case(function: Callable[..., Found]) -> Callable[..., Found]:
    """Put a training into the list under its name."""
    CASES[function.__name__] = function
    return function


def flat(tensors: Iterable[Any]) -> Any:
    """(D,) float64 clone."""
    import torch

    return torch.cat([one.detach().double().flatten() for one in tensors])


def mean_over_ranks(value: Any) -> Any:
    """The mean, as a new tensor."""
    import torch.distributed as dist

    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def against(applied: Sequence[Any], true: Sequence[Any], what: str) -> Found:
    """Compare updates by their difference; in words, the first wrong one by its length and its direction."""
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(applied, true, strict=True)]
    worst = next((i for i, error in enumerate(errors) if not error < 1e-3), 0)
    length = float(applied[worst].norm() / true[worst].norm())
    cosine = float(applied[worst] @ true[worst] / (applied[worst].norm() * true[worst].norm()))
    return Found(tuple(errors), f"{length:.3f} times {what}, cosine {cosine:.3f}")


def load(plain: Any, weights: Iterable[Any]) -> None:
    """Give a copy these weights. (Gradients of the observed model itself would count as one more micro-batch.)"""
    for one, other in zip(plain.parameters(), weights, strict=True):
        one.data.copy_(other.detach())
