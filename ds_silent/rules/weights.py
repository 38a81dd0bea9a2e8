"""Check that the low-precision weights that a forward uses are the rounded fp32 masters that the optimizer updates.

Both are as the last update left them, between the reduction and the optimizer of the next step. Of each piece up to
``SAMPLES`` elements, evenly spread and other ones at each look, are compared bit for bit with their masters, rounded to
nearest; looked at are ``LOOKED_AT`` measured steps, from the first and from every ``EVERY``-th on. A framework that
keeps no masters, or whose copies are rounded otherwise, names no copies.
"""

from __future__ import annotations

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
        self._later: list[tuple[int, list[str], ReadLater]] = []
        self._found: tuple[Breach, ...] = ()

    def breaches(self) -> tuple[Breach, ...]:
        """Return what the newest look that has arrived has found."""
        if self._steps % EVERY < LOOKED_AT:
            copies = self._framework.copies()
            if copies:
                unequal = torch.stack([unequal_samples(copy, self._steps) for copy in copies])
                self._later.append((self._framework.step, [copy.name for copy in copies], ReadLater(unequal)))
        self._steps += 1
        while self._later and self._later[0][2].ready:
            step, names, counts = self._later.pop(0)
            self._judge(step, [name for name, count in zip(names, counts.numbers(), strict=True) if count])
        return self._found

    def _judge(self, step: int, unequal: list[str]) -> None:
        if not unequal:
            self._found = ()
        elif not self._found:
            self._found = (_breach(unequal, step),)


def unequal_samples(copy: WeightCopy, look: int) -> Tensor:
    """Count samples, fp32 () on the weights' device, that are not their rounded masters; NaN is equal to NaN."""
    stride = max(1, copy.weights.numel() // SAMPLES)
    part = slice(look % stride, None, stride)
    weights = copy.weights[part][:SAMPLES]
    rounded = copy.masters[part][:SAMPLES].to(weights.device, non_blocking=True).to(weights.dtype)
    return ((weights != rounded) & ~(weights.isnan() & rounded.isnan())).sum().float()


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
