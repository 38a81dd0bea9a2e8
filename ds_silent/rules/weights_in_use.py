"""Check that the low-precision weights that a forward uses are the rounded fp32 masters that the optimizer updates.

Both are as the last update left them, between the reduction and the optimizer of the next step. Of each piece up to
``SAMPLES`` elements, evenly spread and other ones at each look, are compared bit for bit with their masters, rounded to
nearest; looked at are ``LOOKED_AT`` measured steps, from the first and from every ``EVERY``-th on. A framework that
keeps no masters, or whose copies are rounded otherwise, names no copies.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from ds_silent.device import ReadLater
from ds_silent.framework import Framework, WeightCopy
from ds_silent.rules.batch import EVERY, LOOKED_AT
from ds_silent.rules.rule import Breach, Rule

SAMPLES = 64
_SHOWN = 3


class WeightsInUse(Rule):
    """Compare samples of the copies with their masters."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._steps = 0  # measured
        self._later: list[tuple[int, list[str], list[int], ReadLater]] = []  # step, names, samples of each
        self._found: tuple[Breach, ...] = ()

    def breaches(self) -> tuple[Breach, ...]:
        """Return what the newest look that has arrived has found."""
        looks = self._steps % EVERY < LOOKED_AT
        copies = sorted(self._framework.copies(), key=lambda copy: str(copy.weights.dtype)) if looks else []
        if copies:
            unequal = torch.cat([unequal_samples(list(alike), self._steps) for _, alike in groupby(copies, _dtype)])
            sizes = [len(sample(copy.weights, self._steps)) for copy in copies]
            pieces = [copy.name for copy in copies]
            self._later.append((self._framework.step, pieces, sizes, ReadLater(unequal)))
        self._steps += 1
        while self._later and self._later[0][3].ready:
            step, pieces, sizes, later = self._later.pop(0)
            parts = later.values.split(sizes) if bool(later.values.any()) else ()  # type: ignore[no-untyped-call]
            self._judge(step, [name for name, part in zip(pieces, parts, strict=False) if bool(part.any())])
        return self._found

    def _judge(self, step: int, unequal: list[str]) -> None:
        if not unequal:
            self._found = ()
        elif not self._found:
            self._found = (_breach(unequal, step),)


def _dtype(copy: WeightCopy) -> torch.dtype:
    return copy.weights.dtype


def sample(values: Tensor, look: int) -> Tensor:
    """Return a view of up to ``SAMPLES`` elements, evenly spread; other ones at another look."""
    stride = max(1, values.numel() // SAMPLES)
    return values[look % stride :: stride][:SAMPLES]


def unequal_samples(copies: list[WeightCopy], look: int) -> Tensor:
    """Tell of each sample, bool on the weights' device, whether it is not its rounded master; NaN is equal to NaN.

    Args:
        copies: of one dtype.
    """
    weights = torch.cat([sample(copy.weights, look) for copy in copies])
    masters = torch.cat([sample(copy.masters, look) for copy in copies])
    rounded = masters.to(weights.device, non_blocking=True).to(weights.dtype)
    return (weights != rounded) & ~(weights.isnan() & rounded.isnan())


def _breach(unequal: list[str], step: int) -> Breach:
    more = f" and {len(unequal) - _SHOWN} more" if len(unequal) > _SHOWN else ""
    return Breach(
        key="weights:masters",
        kind="weights-mismatch",
        severity="error",
        where=unequal[0],
        message=f"The weights in use are not the rounded fp32 masters: {', '.join(unequal[:_SHOWN])}{more}. The "
        "forward computes with other weights than the optimizer updates, and the next update overwrites them.",
        remedy="Write weights through deepspeed.utils.safe_set_full_fp32_param, or load them before the engine is "
        "made; else go back to the last checkpoint before this step.",
        since=step,
    )
