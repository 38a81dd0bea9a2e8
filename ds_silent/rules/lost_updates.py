"""Note that bf16 weights without fp32 masters are left as they are by most updates, which are too small for them.

A bf16 weight of 0.02 has neighbours 1.2e-4 away. An update below 6e-5, as of Adam at a learning rate of 1e-5, is
rounded away at each step anew, whatever the gradient says. Counted are elements with a gradient, of the samples that
:mod:`ds_silent.rules.optimizer_update` judges, over ``WINDOW`` measured steps at about the largest learning rate so
far: a warm-up and the end of a decay are to move little.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ds_silent.maths.optimizers import Elements, Numbers
from ds_silent.rules.rule import Breach

WINDOW = 32  # measured steps
_MOST, _FALL, _RISE = 0.5, 0.9, 1.02  # share of updates that are lost; of the largest rate; of the window's first


class LostUpdates:
    """Count on this rank what the updates of bf16 weights should move, and what they leave."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, int, int]] = deque(maxlen=WINDOW)  # step, rate, to move, left
        self._largest = 0.0  # rate
        self.found: tuple[Breach, ...] = ()

    def take(self, step: int, rate: float, old: Elements, meant: Numbers, seen: Numbers) -> None:
        """Take samples of one step, each (n,): ``meant``: the weights behind it, before they are rounded."""
        moves = (meant != old.weight) & (old.gradient != 0.0) & np.isfinite(meant)
        move, left = int(moves.sum()), int((moves & (seen == old.weight)).sum())
        if self._steps and self._steps[-1][0] == step:
            _, before, moved, lost = self._steps.pop()
            rate, move, left = max(rate, before), move + moved, left + lost
        self._steps.append((step, rate, move, left))
        self._largest = max(self._largest, rate)
        if not self.found and len(self._steps) == WINDOW:
            self._judge()

    def _judge(self) -> None:
        steps, rates, moves, lost = zip(*self._steps, strict=True)
        if sum(lost) <= _MOST * sum(moves) or min(rates) < _FALL * self._largest or rates[-1] > _RISE * rates[0]:
            return
        message = (
            f"{sum(lost) / sum(moves):.0%} of the weights that got a gradient stay as they are: they are bf16, without "
            f"fp32 masters, and half of their last bit is more than the update at a learning rate of {rates[-1]:.3g} "
            f"(samples of steps {steps[0]} to {steps[-1]})."
        )
        remedy = (
            "Do nothing if you know it. Else keep the weights in fp32 (autocast, DeepSpeed's bf16, FSDP2's "
            "MixedPrecisionPolicy), or take an optimizer that rounds stochastically, or a larger learning rate."
        )
        self.found = (Breach("update:lost", "update-mismatch", "info", "bf16 weights", message, remedy, steps[-1]),)
