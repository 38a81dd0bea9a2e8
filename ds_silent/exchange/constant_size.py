"""Above the gather limit: sums of sketches and everybody's scalars; the cost per rank does not grow with N * k."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.exchange.collectives import all_gather
from ds_silent.exchange.landing import Landing
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import FIELDS, Gathered, Observation, Sums, on_any
from ds_silent.exchange.packing import FailedRows, pack_scalars, unpack
from ds_silent.ranks.together import Once, Together

_LATE, _SQUARED = FIELDS.index("local.late_cosine"), FIELDS.index("local.sketch_squared")


class ConstantSizeExchange:
    """One all-reduce of 3 k numbers and one all-gather of the scalars: the cost per rank does not grow with N * k.

    A rank's cosine with the rest needs the sum, so it travels with the next observation: records come two steps later.
    One NaN would poison a sum for all ranks, so a rank without a finite sketch adds zeros, and its ``sketch_squared``
    says so; the mean of all is then NaN, as it must be.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._layout, self._group = layout, group
        self._ranks = dist.get_world_size(group)
        size = layout.size
        self._sums = torch.zeros(3 * size + layout.gram, device=device)  # unit sketches, sketches, aggregate, Gram
        self._own = torch.zeros(size, device=device)
        self._mine = torch.zeros(layout.scalars, device=device)
        self._failed = FailedRows(layout.scalars, device)
        self._all = torch.zeros(self._ranks * layout.scalars, device=device)
        self._sums_landing, self._scalars_landing = Landing(self._sums), Landing(self._all)
        self._step: int | None = None
        self._incomplete: Gathered | None = None  # lacks the cosines with the rest
        self._cosine = torch.zeros((), device=device)  # of this rank, in that observation

    def post(self, step: int, observation: Observation, together: Together) -> None:
        """Start the collectives of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        packed = together.alone(self._pack, observation)  # where it broke, nobody reads the sums
        mine = self._failed.of(together.failure) if packed is None else packed
        self._step = step
        reduced = together.once(
            lambda: dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        )
        self._sums_landing.start(reduced)
        gathered = together.once(lambda: all_gather(self._all, mine, group=self._group, async_op=True))
        self._scalars_landing.start(gathered)

    def _pack(self, observation: Observation) -> Tensor:
        """Fill the buffers; this rank's scalars."""
        size = self._layout.size
        pack_scalars(self._layout, observation, self._mine)
        if self._incomplete is not None:
            if self._step is None:
                rest = self._sums[size : 2 * size] - self._own  # of a rank that added zeros: NaN, as its own sketch is
                self._cosine = torch.dot(self._own, rest) / (self._own.norm() * rest.norm())
            self._mine[_LATE].copy_(self._cosine)
        self._own.zero_() if observation.sketch is None else self._own.copy_(observation.sketch)
        self._sums.zero_()
        norm = self._own.norm()
        self._mine[_SQUARED].copy_(norm * norm)
        usable = torch.isfinite(norm * norm) & (norm > 0.0)
        torch.div(self._own, norm, out=self._sums[:size])
        self._sums[size : 2 * size].copy_(self._own)
        self._sums[: 2 * size].masked_fill_(~usable, 0.0)
        if observation.aggregate is not None:
            self._sums[2 * size : 3 * size].copy_(observation.aggregate)
        if observation.gram is not None:
            self._sums[3 * size :].copy_(observation.gram.reshape(-1))
        return self._mine

    def collect(self, once: Once) -> Gathered | None:
        """The record before the last posted one: its cosines with the rest came with the last."""
        if once(lambda: self._step) is None:
            return None
        newest = once(self.peek)
        complete = once(lambda: self._incomplete)
        if on_any(newest.status.failed):  # at once: some rank may not be there for another
            self._incomplete = self._step = None
            return newest
        self._incomplete, self._step = newest, None
        return None if complete is None else _completed(complete, newest)

    def peek(self) -> Gathered:
        """What was posted last, waited for and left where it is."""
        assert self._step is not None
        step, layout, size = self._step, self._layout, self._layout.size
        sums = self._sums_landing.result().double()
        rows = self._scalars_landing.result().view(self._ranks, -1).double()
        mean = sums[size : 2 * size] / self._ranks
        gathered = unpack(layout, step, rows, sums[2 * size : 3 * size].clone(), sums[3 * size :])
        if not bool(gathered.local.sketch_squared.isfinite().all()):
            mean.fill_(torch.nan)
        return replace(gathered, directions=Sums(sums[:size].clone(), mean))

    def under_way(self) -> list[Gathered]:
        """Everything not collected yet, without a further collective; the last lacks the cosines with the rest."""
        earlier, newest = self._incomplete, None if self._step is None else self.peek()
        if earlier is not None and newest is not None:
            earlier = _completed(earlier, newest)
        return [record for record in (earlier, newest) if record is not None]


def _completed(record: Gathered, later: Gathered) -> Gathered:
    """With the cosines that came with the observation after it."""
    assert isinstance(record.directions, Sums)
    return replace(record, directions=replace(record.directions, cosines_with_rest=later.local.late_cosine))
