"""Exchange what the data-parallel groups of one model know: each holds a part of its parameters only.

    model = WholeModel(ranks=(0, 2, 4, 6), told_by=6)       # the first rank of each group; who computes the losses
    gathered = model.exchange(gathered)                     # on each of them, once per measured step, in order
    model.norm(step)                                        # of a step that was exchanged at least one step ago

Each leaves what it knows on a :class:`~ds_silent.distributed.agreement.Board`, before any goes on to the next but one:
the training itself brings them together in each step, where it clips. Only for a loss a rank waits, WAIT at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_silent.distributed.agreement import Board
from ds_silent.exchange.observation import Gathered, on_any

WAIT = timedelta(seconds=2)
PATIENCE = 100  # steps for which nobody waits again, where nothing came


class WholeModel:
    """Exchange with the other groups, from one of the groups' first ranks.

    Args:
        ranks: of the whole training, in any order: this one is among them.
        told_by: the rank whose group computes the losses.
    """

    def __init__(self, ranks: Sequence[int], told_by: int):
        self._ranks, self._told_by, self._me = sorted(ranks), told_by, dist.get_rank()
        self._board = Board("model", self._ranks)
        self._waits_from = 0

    def exchange(self, gathered: Gathered) -> Gathered:
        """Leave what this group knows of a step; return it with the losses that another group has computed."""
        loss, scale = gathered.loss, float(gathered.loss.scale[0]) or 1.0
        has_losses = on_any(loss.count)
        said = {
            "squares": float(gathered.reduced.counted.sum()) / scale**2,
            "losses": [loss.total.tolist(), loss.count.tolist()] if has_losses else None,
        }
        self._board.leave(gathered.step, said)
        if has_losses or self._told_by == self._me or gathered.step < self._waits_from:
            return gathered
        heard = self._board.heard(gathered.step, self._told_by, wait=WAIT)
        if heard is None or heard["losses"] is None or len(heard["losses"][0]) != len(loss.total):
            self._waits_from = gathered.step + PATIENCE
            return gathered
        total, count = (torch.tensor(values, dtype=loss.total.dtype) for values in heard["losses"])
        return replace(gathered, loss=replace(loss, total=total, count=count))

    def norm(self, step: int) -> float | None:
        """Return the norm of the whole model's gradient, unscaled, each parameter once; None without all parts."""
        heard = [self._board.heard(step, rank) for rank in self._ranks]
        return None if None in heard else math.sqrt(sum(one["squares"] for one in heard))
