"""The observing collective: what each rank knows of one step becomes what every rank knows, one step later.

    exchange = make_exchange(layout, group, device)
    exchange.post(step, observation, together) # asynchronous; the same call on every rank, whatever happened there
    arrived = exchange.collect(together.once)  # at the next step's boundary: no waiting in practice

Of few ranks one all-gather brings everybody's sketch. Of more the cost per rank must not grow with N * k: sums of
sketches go through one all-reduce, and only what each rank says of itself is gathered. All buffers are fp32, the only
reduction is SUM, and sizes depend on the configuration alone, so a rank that failed still takes part: with a row that
says "failed" and was ready from the beginning, because packing the observation may be what broke.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.together import Once, Together
from ds_silent.exchange.collectives import Arrived, Landing, all_gather
from ds_silent.exchange.constant_size import ConstantSizeExchange
from ds_silent.exchange.layout import FailedRows, Layout, pack, unpack, with_sums
from ds_silent.exchange.observation import EachRank, Gathered, Observation


class GatherExchange:
    """Every rank's observation to every rank: one all-gather of (scalars + 2 k) fp32 numbers per rank."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._layout, self._group = layout, group
        self._ranks = dist.get_world_size(group)
        self._keeps = dist.get_rank(group) == 0  # what was sent, beyond the next observation: it writes
        width = layout.scalars + layout.vectors
        self._mine = torch.zeros(width, device=device)
        self._failed = FailedRows(width, device)
        self._all = torch.zeros(self._ranks * width, device=device)
        self._landing = Landing(self._all)
        self._step: int | None = None

    def post(self, step: int, observation: Observation, together: Together) -> None:
        """Start the collective of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        packed = together.alone(pack, self._layout, observation, self._mine)
        mine = self._failed.of(together.failure) if packed is None else packed
        self._step = step
        work = together.once(lambda: all_gather(self._all, mine, group=self._group, async_op=True))
        self._landing.start(work)

    def collect(self, once: Once) -> Arrived | None:
        """What was posted last and not yet collected, or None."""
        if once(lambda: self._step) is None:
            return None
        arrived = once(self.peek)
        self._step = None
        return arrived

    def peek(self) -> Arrived:
        """What was posted last, waited for and left where it is."""
        assert self._step is not None
        landed = self._landing.result()
        rows = (landed.clone() if self._keeps else landed).view(self._ranks, -1)
        known = unpack(self._layout, self._step, rows[:, : self._layout.scalars].double())
        return Arrived(known, lambda: self._with_sketches(known, rows))

    def in_full(self, once: Once) -> Arrived:
        """Nothing comes later."""
        return once(self.peek)

    def _with_sketches(self, known: Gathered, rows: Tensor) -> Gathered:
        layout = self._layout
        _, sketches, aggregates, layers, layer_aggregates, grams = torch.split(rows.double(), layout.parts, dim=1)
        of_layers = (layout.layers, layout.layer_size)
        each = EachRank(
            sketches,
            layers.reshape(self._ranks, *of_layers) if layout.layers else None,
            layer_aggregates.sum(0).view(of_layers) if layout.layer_aggregates else None,
        )
        return with_sums(known, aggregates.sum(0), grams.sum(0), each)

    def under_way(self) -> list[Arrived]:
        """Everything that is not collected yet, without a further collective; it is left where it is."""
        return [] if self._step is None else [self.peek()]


Exchange = GatherExchange | ConstantSizeExchange


def make_exchange(layout: Layout, group: dist.ProcessGroup, device: torch.device, total: float = 1.0) -> Exchange:
    """The exchange that the layout is made for. ``total``: sum of the ranks' weights in the aggregate."""
    if layout.gathers:
        return GatherExchange(layout, group, device)
    return ConstantSizeExchange(layout, group, device, total)
