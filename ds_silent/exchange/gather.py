"""Run the observing collective: what each rank knows of one step, every rank knows one step later.

    exchange = make_exchange(layout, group, device)
    exchange.post(step, observation, guard) # asynchronous; every rank calls it, even after a failure
    arrived = exchange.collect(guard.collective)  # at the next step's boundary: in practice without waiting

With few ranks one all-gather brings every rank's sketch. With more, the cost per rank must not grow with N * k: one
all-reduce sums the sketches, and only what each rank says of itself is gathered. All buffers are fp32, the only
reduction is SUM, and sizes depend on the configuration alone. So a failed rank still takes part: it sends a row that
says "failed", made in advance because packing the observation may be what broke.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.guard import CollectiveCall, CollectiveGuard
from ds_silent.exchange.collectives import Arrived, HostCopy, gather_on_host
from ds_silent.exchange.layout import Layout, code_of, failed_rows, pack, pack_scalars, unpack, with_sums
from ds_silent.exchange.observation import (
    FIELDS,
    LEFT,
    EachRank,
    Gathered,
    Late,
    Observation,
    Sums,
    Weights,
    on_any,
)
from ds_silent.exchange.rows import digit_of, failures_in, make_rows
from ds_silent.maths.sketch import fold

_COSINE, _SQUARED = FIELDS.index("local.late_cosine"), FIELDS.index("local.sketch_squared")


class Exchange(ABC):
    """Send this rank's row to the ranks that read it (:mod:`ds_silent.exchange.rows`)."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._layout, self._group = layout, group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._mine = torch.zeros(layout.row, device=device)
        self._failed = failed_rows(layout.row, device)
        self._rows = make_rows(layout, group, device)
        self._step: int | None = None  # posted last and not yet collected

    def post(self, step: int, observation: Observation, guard: CollectiveGuard) -> None:
        """Start the collectives of ``step``, again if its reduction was repeated. Every rank calls this."""
        failed = float(observation.status.failed)
        if failed == LEFT:  # the row sent last may still be read
            self._mine = torch.empty_like(self._mine)
        mine = guard.local(self._pack, observation)
        if mine is None:
            failed = code_of(guard.failure)
            mine = self._failed[failed]
        self._step = step
        self._start(mine, failed, guard.collective)

    @abstractmethod
    def _pack(self, observation: Observation) -> Tensor:
        """Return this rank's row."""

    def _start(self, mine: Tensor, failed: float, collective: CollectiveCall) -> None:
        self._rows.start(mine, failed == LEFT, collective)

    def collect(self, collective: CollectiveCall) -> Arrived | None:
        """Return the observation posted last, or that before it (above the gather limit); None if it was collected."""
        if collective(lambda: self._step) is None:
            return None
        arrived = collective(self.peek)
        self._step = None
        return arrived

    @abstractmethod
    def peek(self) -> Arrived:
        """Wait for the observation posted last; return it without collecting it."""

    def in_full(self, collective: CollectiveCall) -> Arrived:
        """Return :meth:`peek` with what ranks otherwise send one observation later; may run a collective."""
        return collective(self.peek)

    def arrives(self, seconds: float) -> bool:
        """Wait for the observation posted last, for so long; return whether it has come."""
        return self._step is None or all(copy.arrives(seconds) for copy in self._copies())

    def _copies(self) -> Sequence[HostCopy]:
        return self._rows.copies

    def under_way(self) -> list[Arrived]:
        """Return all not yet collected, without a further collective and without collecting it."""
        return [] if self._step is None else [self.peek()]

    def _kept(self, landed: Tensor) -> Tensor:
        # Cloned: rank 0's judging thread may still read it when the next collective overwrites the buffer.
        return landed.clone() if self._rank == 0 else landed


class GatherExchange(Exchange):
    """Send every rank's observation to every rank: one all-gather of (scalars + 2 k) fp32 numbers per rank."""

    def _pack(self, observation: Observation) -> Tensor:
        return pack(self._layout, observation, self._mine)

    def peek(self) -> Arrived:
        assert self._step is not None
        rows = self._kept(self._rows.agreed())
        known = unpack(self._layout, self._step, rows[:, : self._layout.scalars].double())
        return Arrived(known, lambda: self._with_sketches(known, rows))

    def _with_sketches(self, known: Gathered, rows: Tensor) -> Gathered:
        layout = self._layout
        parts = torch.split(rows.double(), layout.parts, dim=1)
        _, sketches, aggregates, layers, layer_aggregates, grams, weights = parts
        of_layers = (layout.layers, layout.layer_size)
        each = EachRank(
            sketches,
            layers.reshape(self._ranks, *of_layers) if layout.layers else None,
            layer_aggregates.sum(0).view(of_layers) if layout.layer_aggregates else None,
        )
        return with_sums(known, aggregates.sum(0), grams.sum(0), weights.sum(0), each)


class ConstantSizeExchange(Exchange):
    """Above the gather limit, send sums of sketches by one all-reduce, and what each rank says of itself.

    One NaN would poison a sum for all ranks, so a rank without a finite sketch adds zeros, and its ``sketch_squared``
    says so; the mean of all is then set to NaN.

    Some numbers need the sums: a rank's cosine with the rest, and the weight with which its gradient entered the
    aggregate. A rank sends them with its next observation, so records come one measurement later.

    **A rank's own weight.** Let the aggregate be the sum of w_r (total / N) g_r, with w_r = 1 in health. Then

        error = aggregate - total * mean = sum of (w_r - 1) (total / N) g_r + noise

    and with o_r, the part of g_r without the mean's direction (which all ranks share, and in which a factor that is
    wrong for all ranks lies),

        w_r - 1 = (N / total) <error, o_r> / |o_r|^2.

    A sketch keeps inner products: if the error comes only from other ranks and rounding, <error, o_r> is 0 with a
    standard error of |error| |o_r| / sqrt(k). So every rank finds by itself whether it is missing, counted twice or
    scaled, and no sketch has to be gathered (:func:`ds_silent.maths.causes.own_weights`).
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device, total: float = 1.0):
        """Set up the buffers; ``total``: sum of the ranks' weights, 1 for a mean."""
        super().__init__(layout, group, device)
        self._total = total
        self._sums = torch.zeros(sum(layout.sums), device=device)
        parts = torch.split(self._sums, layout.sums)
        self._units, self._sum, self._aggregate, self._layers, self._layer_aggregates, self._gram, *rest = parts
        self._weights, self._failures = rest
        self._own = torch.zeros(layout.size, device=device)
        self._own_layers = torch.zeros(layout.late_layers, layout.layer_size, device=device)
        self._sums_copy = HostCopy(self._sums)
        self._incomplete: Arrived | None = None  # lacks the ranks' late numbers
        self._late = torch.zeros(1 + layout.late, device=device)  # this rank's late numbers

    def _copies(self) -> Sequence[HostCopy]:
        return [*self._rows.copies, self._sums_copy]

    def _start(self, mine: Tensor, failed: float, collective: CollectiveCall) -> None:
        self._sums_copy.start(collective(lambda: self._add_up(failed)))
        super()._start(mine, failed, collective)

    def _add_up(self, failed: float) -> dist.Work | None:
        """Start the all-reduce, as the last statement: an error comes before it, so this can run again."""
        if self._layout.failures:
            place, digit = digit_of(failed, self._rank)
            self._failures.zero_()
            self._failures[place].fill_(digit)
        return dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def _pack(self, observation: Observation) -> Tensor:
        """Fill the buffers and return this rank's row. If this raises, no rank reads the sums."""
        layout = self._layout
        scalars, pair = torch.split(self._mine, [layout.scalars, layout.pairs])
        pack_scalars(layout, observation, scalars)
        *_, probes, late = torch.split(scalars, layout.scalar_parts)
        if self._incomplete is not None:
            if self._step is None:  # else the buffers belong to a repeated reduction
                self._late = self._find_late()
            scalars[_COSINE].copy_(self._late[0])
            late.copy_(self._late[1:])
        self._own.zero_() if observation.sketch is None else self._own.copy_(observation.sketch)
        self._sums.zero_()
        norm = self._own.norm()
        scalars[_SQUARED].copy_(norm * norm)
        usable = torch.isfinite(norm * norm) & (norm > 0.0)
        if layout.size:
            folded = fold(self._own, layout.units)
            direction = folded / folded.norm()  # length 1 as sent: equal ones have cosine 1
            self._units.copy_(direction)
            probes.copy_(fold(direction, layout.probes))
        if layout.pairs:
            pair.copy_(fold(self._own, layout.pairs))
        self._sum.copy_(self._own)
        if observation.aggregate is not None:
            self._aggregate.copy_(observation.aggregate)
        if observation.layer_sketches is not None and layout.layers:
            by_layer = fold(observation.layer_sketches, layout.layer_size)
            self._layers.copy_(by_layer.reshape(-1))
            if layout.late_layers:
                self._own_layers.copy_(by_layer)
        for sums in (self._units, self._sum, self._layers):
            sums.masked_fill_(~usable, 0.0)
        if observation.layer_aggregates is not None and layout.layer_aggregates:
            self._layer_aggregates.copy_(fold(observation.layer_aggregates, layout.layer_size).reshape(-1))
        if observation.gram is not None:
            self._gram.copy_(observation.gram.reshape(-1))
        if observation.weights is not None:
            self._weights.copy_(observation.weights)
        return self._mine

    def _find_late(self) -> Tensor:
        """Compute this rank's late numbers of the step whose sums have come, on the device, from its buffers.

        Returns:
            fp32 (1 + layout.late,): cosine with the rest; weight - 1 and its |o_r|^2; the layers' cosines.
        """
        own, total = self._own, self._sum
        rest = total - own  # NaN if this rank's sketch is, though it added zeros
        found = [(torch.dot(own, rest) / (own.norm() * rest.norm()))[None]]
        if self._layout.late:
            squared = torch.dot(total, total)
            beside = own - torch.dot(own, total) / torch.where(squared > 0.0, squared, torch.ones_like(squared)) * total
            left = torch.dot(beside, beside)
            error = self._aggregate - total * (self._total / self._ranks)
            weight = torch.dot(error, beside) * (self._ranks / self._total) / left
            found.append(torch.stack((weight, left)))
        if self._layout.late_layers:
            ours, others = self._own_layers, self._layers.view_as(self._own_layers) - self._own_layers
            lengths = ours.square().sum(1) * others.square().sum(1)
            found.append((ours * others).sum(1) / lengths.sqrt())
        return torch.cat(found)

    def collect(self, collective: CollectiveCall) -> Arrived | None:
        """Return the record before the last: its late numbers came with the last."""
        if collective(lambda: self._step) is None:
            return None
        newest = collective(self.peek)
        complete = collective(lambda: self._incomplete)
        if on_any(newest.known.status.failed):  # at once: some rank may not post again
            self._incomplete = self._step = None
            return newest
        self._incomplete, self._step = newest, None
        return None if complete is None else _completed(complete, newest)

    def peek(self) -> Arrived:
        assert self._step is not None
        layout, step = self._layout, self._step
        sums = self._kept(self._sums_copy.result())
        known = unpack(layout, step, self._rows.agreed()[:, : layout.scalars].double())
        if layout.failures:
            failed = failures_in(sums[-layout.failures :].double(), self._ranks)
            known = replace(known, status=replace(known.status, failed=failed))
            if on_any(failed):  # the rows may never come
                return Arrived(known, None)
            self._rows.passed_on()
            if not self._rows.brings_all:
                return Arrived(known, None)
        rows = self._kept(self._rows.all())
        return Arrived(known, lambda: self._with_sums(known, sums.double(), rows.double()))

    def in_full(self, collective: CollectiveCall) -> Arrived:
        newest = collective(self.peek)
        if on_any(newest.known.status.failed) or not self._layout.late:
            return newest
        said = gather_on_host(self._find_late()[:3], self._group, collective).double()
        late = Late(said[:, 0], Weights(1.0 + said[:, 1], said[:, 2]), None)
        return newest if newest.make is None else Arrived(newest.known, lambda: _with_late(newest.all, late))

    def _with_sums(self, known: Gathered, sums: Tensor, rows: Tensor) -> Gathered:
        """Add the sums; ``rows``: (N, layout.row)."""
        layout = self._layout
        units, total, aggregate, layers, layer_aggregates, gram, weights, _ = torch.split(sums, layout.sums)
        scalars, pairs = torch.split(rows, [layout.scalars, layout.pairs], dim=1)
        *_, probes, late = torch.split(scalars, layout.scalar_parts, dim=1)
        gathered = unpack(layout, known.step, scalars) if layout.failures else known
        by_layer = (layout.layers, layout.layer_size)
        mean, layer_mean = total / self._ranks, layers.view(by_layer) / self._ranks
        if not bool(gathered.local.sketch_squared.isfinite().all()):
            mean.fill_(torch.nan)
            layer_mean.fill_(torch.nan)
        directions = Sums(
            units,
            mean,
            layer_mean if layout.layers else None,
            layer_aggregates.view(by_layer) if layout.layer_aggregates else None,
            probes,
            pairs if layout.pairs else None,
            late if layout.late else None,
        )
        return with_sums(gathered, aggregate, gram, weights, directions)

    def under_way(self) -> list[Arrived]:
        """Return all not yet collected, without a further collective; the last lacks its late numbers."""
        earlier, newest = self._incomplete, None if self._step is None else self.peek()
        if earlier is not None and newest is not None:
            earlier = _completed(earlier, newest)
        return [record for record in (earlier, newest) if record is not None]


def _completed(record: Arrived, later: Arrived) -> Arrived:
    """Complete a record with the late numbers of the next observation."""
    if record.make is None or later.make is None:
        return record
    return Arrived(record.known, lambda: _with_late(record.all, _late_in(later.all)))


def _late_in(later: Gathered) -> Late:
    assert later.sums is not None
    said = later.sums.of_before
    weights = None if said is None else Weights(1.0 + said[:, 0], said[:, 1])
    layers = None if said is None or said.shape[1] == 2 else said[:, 2:]
    return Late(later.local.late_cosine, weights, layers)


def _with_late(record: Gathered, late: Late) -> Gathered:
    assert record.sums is not None
    return replace(record, directions=replace(record.sums, late=late))


def make_exchange(layout: Layout, group: dist.ProcessGroup, device: torch.device, total: float = 1.0) -> Exchange:
    """Make the layout's exchange. ``total``: sum of the ranks' weights in the aggregate."""
    if layout.gathers:
        return GatherExchange(layout, group, device)
    return ConstantSizeExchange(layout, group, device, total)
