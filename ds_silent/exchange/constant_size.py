"""Above the gather limit: sums of sketches and everybody's scalars; the cost per rank does not grow with N * k.

What a rank can say of itself only where it knows the sums - its cosine with the rest, the weight with which its
gradient entered the aggregate - travels with its next observation, so that records come one measurement later.

**A rank's own weight.** Let the aggregate be the sum of w_r (total / N) g_r, with w_r = 1 where all is right. Then

    error = aggregate - total * mean = sum of (w_r - 1) (total / N) g_r + noise

and with o_r, what is left of g_r without the direction of the mean (in which a wrong factor for all ranks lies, and
which all ranks share),

    w_r - 1 = (N / total) <error, o_r> / |o_r|^2.

A sketch keeps inner products: where the error is the sum of others' terms and of rounding, <error, o_r> is 0 with a
standard error of |error| |o_r| / sqrt(k). So every rank finds by itself whether it is missing, counted twice or scaled,
and no sketch has to be gathered (:func:`ds_silent.maths.causes.own_weights`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.together import Once, Together
from ds_silent.exchange.collectives import Arrived, Landing, gather_on_host
from ds_silent.exchange.layout import FailedRows, Layout, pack_scalars, unpack, with_sums
from ds_silent.exchange.observation import FIELDS, LEFT, Gathered, Late, Observation, Sums, Weights, on_any
from ds_silent.exchange.rows import digit_of, failures_in, make_rows
from ds_silent.maths.sketch import fold

_COSINE, _SQUARED = FIELDS.index("local.late_cosine"), FIELDS.index("local.sketch_squared")


class ConstantSizeExchange:
    """One all-reduce of sums, and on its way beside it what each rank says of itself (:mod:`ds_silent.exchange.rows`).

    One NaN would poison a sum for all ranks, so a rank without a finite sketch adds zeros, and its ``sketch_squared``
    says so; the mean of all is then NaN, as it must be.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device, total: float = 1.0):
        """``total``: sum of the ranks' weights in the aggregate, 1 for a mean."""
        self._layout, self._group, self._total = layout, group, total
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        width = layout.scalars + layout.pairs
        self._sums = torch.zeros(sum(layout.sums), device=device)
        self._units, self._sum, self._aggregate, self._layers, self._layer_aggregates, self._gram, self._failures = (
            torch.split(self._sums, layout.sums)
        )
        self._own = torch.zeros(layout.size, device=device)
        self._mine = torch.zeros(width, device=device)
        self._failed = FailedRows(width, device)
        self._rows = make_rows(layout, group, device)
        self._sums_landing = Landing(self._sums)
        self._step: int | None = None
        self._incomplete: Arrived | None = None  # lacks what the ranks say of themselves late
        self._own_layers = torch.zeros(layout.late_layers, layout.layer_size, device=device)
        self._cosine = torch.zeros((), device=device)  # of this rank, in that observation; and what else it finds late:
        self._late = torch.zeros(layout.late, device=device)  # weight - 1, what it is known by, layers' cosines

    def post(self, step: int, observation: Observation, together: Together) -> None:
        """Start the collectives of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        failed = float(observation.status.failed)
        if failed == LEFT:  # what was sent last may still be read
            self._mine = torch.empty_like(self._mine)
        mine = together.alone(self._pack, observation)  # where it broke, nobody reads the sums
        if mine is None:
            mine, failed = self._failed.of(together.failure), self._failed.code(together.failure)
        self._step = step
        self._sums_landing.start(together.once(lambda: self._add_up(failed)))
        self._rows.start(mine, failed == LEFT, together.once)

    def _add_up(self, failed: float) -> dist.Work | None:
        """The collective is its last statement: what breaks here breaks before it, and is played again."""
        if self._layout.failures:
            place, digit = digit_of(failed, self._rank)
            self._failures.zero_()
            self._failures[place].fill_(digit)
        return dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def _pack(self, observation: Observation) -> Tensor:
        """Fill the buffers; this rank's row."""
        layout = self._layout
        scalars, pair = torch.split(self._mine, [layout.scalars, layout.pairs])
        pack_scalars(layout, observation, scalars)
        *_, probes, late = torch.split(scalars, layout.scalar_parts)
        if self._incomplete is not None:
            if self._step is None:
                self._find_late()
            scalars[_COSINE].copy_(self._cosine)
            late.copy_(self._late)
        self._own.zero_() if observation.sketch is None else self._own.copy_(observation.sketch)
        self._sums.zero_()
        norm = self._own.norm()
        scalars[_SQUARED].copy_(norm * norm)
        usable = torch.isfinite(norm * norm) & (norm > 0.0)
        if layout.size:
            folded = fold(self._own, layout.units)
            direction = folded / folded.norm()  # of length 1 as it is sent: two equal ones have a cosine of 1
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
        self._units.masked_fill_(~usable, 0.0)
        self._sum.masked_fill_(~usable, 0.0)
        self._layers.masked_fill_(~usable, 0.0)
        if observation.layer_aggregates is not None and layout.layer_aggregates:
            self._layer_aggregates.copy_(fold(observation.layer_aggregates, layout.layer_size).reshape(-1))
        if observation.gram is not None:
            self._gram.copy_(observation.gram.reshape(-1))
        return self._mine

    def _find_late(self) -> None:
        """What this rank says of the step whose sums have come. On the device; the buffers are those of that step."""
        own, total = self._own, self._sum
        rest = total - own  # of a rank that added zeros: NaN, as its own sketch is
        squared = torch.dot(total, total)
        beside = own - torch.dot(own, total) / torch.where(squared > 0.0, squared, torch.ones_like(squared)) * total
        left = torch.dot(beside, beside)
        error = self._aggregate - total * (self._total / self._ranks)
        torch.div(torch.dot(own, rest), own.norm() * rest.norm(), out=self._cosine)
        if self._layout.late:
            self._late[0].copy_(torch.dot(error, beside) * (self._ranks / self._total) / left)
            self._late[1].copy_(left)
        if self._layout.late_layers:
            ours, others = self._own_layers, self._layers.view_as(self._own_layers) - self._own_layers
            lengths = ours.square().sum(1) * others.square().sum(1)
            self._late[2:].copy_((ours * others).sum(1) / lengths.sqrt())

    def collect(self, once: Once) -> Arrived | None:
        """The record before the last posted one: what the ranks found late came with the last."""
        if once(lambda: self._step) is None:
            return None
        newest = once(self.peek)
        complete = once(lambda: self._incomplete)
        if on_any(newest.known.status.failed):  # at once: some rank may not be there for another
            self._incomplete = self._step = None
            return newest
        self._incomplete, self._step = newest, None
        return None if complete is None else _completed(complete, newest)

    def peek(self) -> Arrived:
        """What was posted last, waited for and left where it is."""
        assert self._step is not None
        layout, step = self._layout, self._step
        sums = self._kept(self._sums_landing.result())
        known = unpack(layout, step, self._rows.agreed()[:, : layout.scalars].double())
        if layout.failures:
            failed = failures_in(sums[-layout.failures :].double(), self._ranks)
            known = replace(known, status=replace(known.status, failed=failed))
            if on_any(failed):  # then the rows may never come
                return Arrived(known, None)
            self._rows.passed_on()
            if not self._rows.brings_all:
                return Arrived(known, None)
        rows = self._kept(self._rows.all())
        return Arrived(known, lambda: self._with_sums(known, sums.double(), rows.double()))

    def in_full(self, once: Once) -> Arrived:
        """:meth:`peek`, with the weights that ranks otherwise find and send one observation later. A collective, where
        no rank has failed."""
        newest = once(self.peek)
        if on_any(newest.known.status.failed) or not self._layout.late:
            return newest
        before = self._cosine.clone(), self._late.clone()  # of the step before, still to be sent
        self._find_late()
        found = torch.cat((self._cosine[None], self._late[:2]))
        self._cosine.copy_(before[0])
        self._late.copy_(before[1])
        said = gather_on_host(found, self._group, once).double()
        late = Late(said[:, 0], Weights(1.0 + said[:, 1], said[:, 2]), None)
        return newest if newest.make is None else Arrived(newest.known, lambda: _told(newest.all, late))

    def _kept(self, landed: Tensor) -> Tensor:
        return landed.clone() if self._rank == 0 else landed  # it writes, perhaps behind the next observation

    def _with_sums(self, known: Gathered, sums: Tensor, rows: Tensor) -> Gathered:
        """``rows``: (N, width)."""
        layout = self._layout
        units, total, aggregate, layers, layer_aggregates, gram, _ = torch.split(sums, layout.sums)
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
        return with_sums(gathered, aggregate, gram, directions)

    def under_way(self) -> list[Arrived]:
        """Everything not collected yet, without a further collective; the last lacks what ranks find late."""
        earlier, newest = self._incomplete, None if self._step is None else self.peek()
        if earlier is not None and newest is not None:
            earlier = _completed(earlier, newest)
        return [record for record in (earlier, newest) if record is not None]


def _completed(record: Arrived, later: Arrived) -> Arrived:
    """With what came with the observation after it."""
    if record.make is None or later.make is None:
        return record
    return Arrived(record.known, lambda: _with_late(record.all, later.all))


def _with_late(record: Gathered, later: Gathered) -> Gathered:
    assert isinstance(later.directions, Sums)
    said = later.directions.of_before
    weights = None if said is None else Weights(1.0 + said[:, 0], said[:, 1])
    layers = None if said is None or said.shape[1] == 2 else said[:, 2:]
    return _told(record, Late(later.local.late_cosine, weights, layers))


def _told(record: Gathered, late: Late) -> Gathered:
    assert isinstance(record.directions, Sums)
    return replace(record, directions=replace(record.directions, late=late))
