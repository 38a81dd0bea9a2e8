"""The observing collective: what each rank knows of one step becomes what every rank knows, one step later.

    exchange = make_exchange(layout, group, device)
    exchange.post(step, sample, together)      # asynchronous; the same call on every rank, whatever happened there
    gathered = exchange.collect(together.once) # at the next step's boundary: no waiting in practice

Up to ``GATHER_LIMIT`` ranks one all-gather brings everybody's sketch. Above, the cost per rank must not grow with
N * k: sums of sketches go through one all-reduce, and only the scalars are gathered. All buffers are fp32, the only
reduction is SUM, and sizes depend on the configuration alone, so a rank that failed still takes part: with a row that
says "failed" and was ready from the beginning, because packing the sample may be what broke.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.device import SideStream, pinned
from ds_silent.maths.sketch import fold
from ds_silent.ranks.together import Once, SparseGradientError, Together, at_once

GATHER_LIMIT = 64
WORDS = 4  # a 64-bit hash travels as four 16-bit numbers, which fp32 carries exactly
# torch 2.13 renamed the flat all-gather and warns at the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Layout:
    """Sizes of what one rank sends; equal on all ranks."""

    size: int  # k of the sketch
    groups: int = 0  # layers, of which squared norms travel
    ids: int = 0  # numbers that hold the ids of the step's rows, see ds_silent.exchange.row_ids
    layers: int = 0  # per-layer sketches, 0 when off
    layer_size: int = 0
    gram: int = 0  # N * N when exact inner products may travel too, else 0
    layer_aggregates: bool = False  # per-layer sketches of the aggregate too
    layer_records: bool = False  # layers are measured for the record, not only for finding a fault's place
    hashes: int = 0  # bit hashes of 64 bits, see ds_silent.replicas.checksums
    micro_batches: int = 0  # per step, where their sketches can be asked for; else 0

    @property
    def scalars(self) -> int:
        """Scalars of :class:`LocalSample`, then squared norms per layer, ids and hashes."""
        return sum(self.scalar_parts)

    @property
    def scalar_parts(self) -> list[int]:
        return [len(SCALARS), self.groups, self.ids, WORDS * self.hashes]

    @property
    def vectors(self) -> int:
        """All of :attr:`parts` but the scalars."""
        return sum(self.parts[1:])

    @property
    def parts(self) -> list[int]:
        """Lengths of scalars, local sketch, aggregate's sketch, both per layer, and Gram matrix."""
        of_layers = self.layers * self.layer_size
        return [self.scalars, self.size, self.size, of_layers, of_layers * self.layer_aggregates, self.gram]


SCALARS = (
    "failed",  # not 0 when this rank's observer broke or ended: everybody switches off, see ds_silent.ranks.lockstep
    "gradient_seen",  # 1 when the local accumulated gradient was captured whole
    "norm_seen",  # 1 when squared_norm is the exact one; else norms come from the sketch, on all ranks
    "aggregate_seen",
    "leftover_squared",  # of what an earlier step left in the gradients
    "loss_sum",
    "loss_count",
    "loss_scale",
    "gram_seen",  # 1 when the exact inner products were exchanged at this step
    "squared_norm",
    "sketch_squared",  # of the local sketch; only above the gather limit
    "aggregate_squared",  # of the part of the aggregate that this rank answers for
    "handed_seen",  # 1 when that part was changed before the step and looked at again; -1 when it was changed unseen
    "handed_squared",  # of that part as the step began, where it was looked at again
    "fired",  # trainable parameters that got a gradient
    "label_tokens",  # tokens that enter the loss, 0 when not known
    "cosine_with_rest",  # of the sample before this one; only above the gather limit
    "micro_squared",  # sum over micro-batches of squared norms, where each is reduced on its own
    "replica_seen",  # 1 when the first hash is that of the replica
    "applied_seen",  # 1 when the sample before this one saw what its optimizer applied; -1 when it applied nothing
    "applied_factor",  # of the sample before: applied gradient over aggregated gradient, of this rank's share
    "applied_error",  # of the sample before: squared length of what no factor explains
    "applied_squared",  # of the sample before: squared length of this rank's share of the applied gradient
    "stop",  # 1 when the writing rank wants everybody to stop
    "diagnose",  # 1 when the writing rank wants the micro-batches' own sketches
    "hyper_parameters",  # short hashes of what ds_silent.capture.conduct compares; 0 when not known
    "device_hyper_parameters",
    "training_modes",
    "trainable",
    "first_draws",  # of the random numbers that the first training forward drew; 0 when it drew none
    "step",  # by this rank's framework, see ds_silent.ranks.lockstep
    "boundary",  # reductions that this rank has passed
    "nothing",  # 1 in a sample that only says where this rank is
    "compare",  # 1 when this rank wants the replicas compared after the next step
)


_LATE = "cosine_with_rest"


BROKE, LEFT, ASTRAY, UNSEEN = 1.0, 2.0, 3.0, 4.0
"""Values of ``failed``: an internal error; the observer was closed there; gradients were reduced and no step taken; a
gradient that cannot be observed. See :mod:`ds_silent.ranks.lockstep`."""


@dataclass(frozen=True)
class LocalSample:
    """One rank's observation of one step. Tensors are fp32 on the training device; nothing here was waited for."""

    scalars: dict[str, float | Tensor]  # by the names of SCALARS; what is missing is 0
    sketch: Tensor | None = None  # (k,) of the local accumulated gradient
    aggregate: Tensor | None = None  # (k,) of the owned part of the aggregated gradient
    layer_squares: Tensor | None = None  # (G,)
    ids: Tensor | None = None  # packed ids of the rows since the last sample
    layer_sketches: Tensor | None = None  # (L, k); sent folded to layer_size
    gram: Tensor | None = None  # (N, N) this rank's part of the exact inner products; sets ``gram_seen``
    layer_aggregates: Tensor | None = None  # (L, k) of the owned part of the aggregate; sent folded
    hashes: Tensor | None = None  # int64 (H,) bit hashes, see ds_silent.replicas.checksums


@dataclass(frozen=True)
class Gathered:
    """All ranks' observations of one step, float64 on the host."""

    step: int
    scalars: dict[str, Tensor]  # name -> (N,)
    aggregate: Tensor  # (k,) sketch of the aggregated gradient
    layer_squares: Tensor  # (N, G)
    ids: Tensor  # (N, layout.ids)
    gram: Tensor | None  # (N, N) exact inner products, summed over pieces
    sketches: Tensor | None  # (N, k); None above the gather limit
    layer_sketches: Tensor | None  # (N, L, layer_size); None above the gather limit
    unit_sum: Tensor | None = None  # (k,) only above the gather limit
    mean_sketch: Tensor | None = None  # (k,) only above the gather limit
    layer_aggregate: Tensor | None = None  # (L, layer_size) sketch of the aggregated gradient; None above the limit
    hashes: Tensor | None = None  # int64 (N, layout.hashes)


class _Landing:
    """Brings one collective's result to the host beside the training: no stream of the training waits for it."""

    def __init__(self, source: Tensor):
        self._source = source
        self._on_host = source.device.type == "cpu"
        self._work: dist.Work | None = None
        self._copying = False
        if not self._on_host:
            self._host = pinned(source)
            self._side = SideStream(source.device)

    def start(self, work: dist.Work | None) -> None:
        """``work`` is under way; on a device, its result is copied as soon as it is there."""
        self._work, self._copying = work, False
        if not self._on_host:
            self._copy()

    def _copy(self) -> None:
        with self._side.working():
            if self._work is not None:
                self._work.wait()  # orders the side stream after the collective; the host goes on
            self._host.copy_(self._source, non_blocking=True)
        self._copying = True

    def result(self) -> Tensor:
        """The landed fp32 values; the copy was started a step ago."""
        if not self._on_host:
            if not self._copying:  # starting it broke
                self._copy()
            self._side.wait()
            return self._host
        if self._work is not None:
            self._work.wait()
        return self._source


class GatherExchange:
    """Every rank's sample to every rank: one all-gather of (scalars + 2 k) fp32 numbers per rank."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._layout, self._group = layout, group
        self._ranks = dist.get_world_size(group)
        width = layout.scalars + layout.vectors
        self._mine = torch.zeros(width, device=device)
        self._failed, self._unseen = failed_rows(width, device)
        self._all = torch.zeros(self._ranks * width, device=device)
        self._landing = _Landing(self._all)
        self._step: int | None = None

    def post(self, step: int, sample: LocalSample, together: Together) -> None:
        """Start the collective of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        packed = together.alone(_pack, self._layout, sample, self._mine)
        mine = self._without(together) if packed is None else packed
        self._step = step
        work = together.once(lambda: _all_gather(self._all, mine, group=self._group, async_op=True))
        self._landing.start(work)

    def _without(self, together: Together) -> Tensor:
        """The row of a rank that has no sample to send."""
        return self._unseen if isinstance(together.failure, SparseGradientError) else self._failed

    def collect(self, once: Once) -> Gathered | None:
        """What was posted last and not yet collected, or None."""
        if once(lambda: self._step) is None:
            return None
        gathered = once(self.peek)
        self._step = None
        return gathered

    def peek(self) -> Gathered:
        """What was posted last, waited for and left where it is."""
        assert self._step is not None
        step, layout = self._step, self._layout
        rows = self._landing.result().view(self._ranks, -1).double()
        scalars, sketches, aggregates, layers, layer_aggregates, grams = torch.split(rows, layout.parts, dim=1)
        names, squares, ids, hashes = _unpack_scalars(layout, scalars)
        of_layers = (layout.layers, layout.layer_size)
        return Gathered(
            step=step,
            scalars=names,
            aggregate=aggregates.sum(0),
            layer_squares=squares,
            ids=ids,
            gram=_gram(names, grams.sum(0), self._ranks),
            sketches=sketches,
            layer_sketches=layers.reshape(self._ranks, *of_layers) if layout.layers else None,
            layer_aggregate=layer_aggregates.sum(0).view(of_layers) if layout.layer_aggregates else None,
            hashes=hashes,
        )

    def under_way(self) -> list[Gathered]:
        """Everything that is not collected yet, without a further collective; it is left where it is."""
        return [] if self._step is None else [self.peek()]


class ConstantSizeExchange:
    """One all-reduce of 3 k numbers and one all-gather of the scalars: the cost per rank does not grow with N * k.

    A rank's cosine with the rest needs the sum, so it travels with the next sample: records come two steps later. One
    NaN would poison a sum for all ranks, so a rank without a finite sketch adds zeros, and its ``sketch_squared`` says
    so; the mean of all is then NaN, as it must be.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._layout, self._group = layout, group
        self._ranks = dist.get_world_size(group)
        size = layout.size
        self._sums = torch.zeros(3 * size + layout.gram, device=device)  # unit sketches, sketches, aggregate, Gram
        self._own = torch.zeros(size, device=device)
        self._mine = torch.zeros(layout.scalars, device=device)
        self._failed, self._unseen = failed_rows(layout.scalars, device)
        self._all = torch.zeros(self._ranks * layout.scalars, device=device)
        self._sums_landing, self._scalars_landing = _Landing(self._sums), _Landing(self._all)
        self._step: int | None = None
        self._incomplete: Gathered | None = None  # lacks the cosines with the rest
        self._cosine = torch.zeros((), device=device)  # of this rank, in that sample

    def post(self, step: int, sample: LocalSample, together: Together) -> None:
        """Start the collectives of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        packed = together.alone(self._pack, sample)  # where it broke, nobody reads the sums
        mine = self._without(together) if packed is None else packed
        self._step = step
        reduced = together.once(
            lambda: dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        )
        self._sums_landing.start(reduced)
        gathered = together.once(lambda: _all_gather(self._all, mine, group=self._group, async_op=True))
        self._scalars_landing.start(gathered)

    def _without(self, together: Together) -> Tensor:
        """The row of a rank that has no sample to send."""
        return self._unseen if isinstance(together.failure, SparseGradientError) else self._failed

    def _pack(self, sample: LocalSample) -> Tensor:
        """Fill the buffers; this rank's scalars."""
        size = self._layout.size
        _pack_scalars(self._layout, sample, self._mine)
        if self._incomplete is not None:
            if self._step is None:
                rest = self._sums[size : 2 * size] - self._own  # of a rank that added zeros: NaN, as its own sketch is
                self._cosine = torch.dot(self._own, rest) / (self._own.norm() * rest.norm())
            self._mine[SCALARS.index(_LATE)].copy_(self._cosine)
        self._own.zero_() if sample.sketch is None else self._own.copy_(sample.sketch)
        self._sums.zero_()
        norm = self._own.norm()
        self._mine[SCALARS.index("sketch_squared")].copy_(norm * norm)
        usable = torch.isfinite(norm * norm) & (norm > 0.0)
        torch.div(self._own, norm, out=self._sums[:size])
        self._sums[size : 2 * size].copy_(self._own)
        self._sums[: 2 * size].masked_fill_(~usable, 0.0)
        if sample.aggregate is not None:
            self._sums[2 * size : 3 * size].copy_(sample.aggregate)
        if sample.gram is not None:
            self._sums[3 * size :].copy_(sample.gram.reshape(-1))
        return self._mine

    def collect(self, once: Once) -> Gathered | None:
        """The record before the last posted one: its cosines with the rest came with the last."""
        if once(lambda: self._step) is None:
            return None
        newest = once(self.peek)
        complete = once(lambda: self._incomplete)
        if bool((newest.scalars["failed"] > 0).any()):  # at once: some rank may not be there for another
            self._incomplete = self._step = None
            return _incomplete(newest)
        self._incomplete, self._step = _incomplete(newest), None
        return None if complete is None else _completed(complete, newest)

    def peek(self) -> Gathered:
        """What was posted last, waited for and left where it is."""
        assert self._step is not None
        step, layout, size = self._step, self._layout, self._layout.size
        sums = self._sums_landing.result().double()
        rows = self._scalars_landing.result().view(self._ranks, -1).double()
        names, squares, ids, hashes = _unpack_scalars(layout, rows)
        mean = sums[size : 2 * size] / self._ranks
        if not bool(names["sketch_squared"].isfinite().all()):
            mean.fill_(torch.nan)
        return Gathered(
            step=step,
            scalars=names,
            aggregate=sums[2 * size : 3 * size].clone(),
            layer_squares=squares,
            ids=ids,
            gram=_gram(names, sums[3 * size :], self._ranks),
            sketches=None,
            layer_sketches=None,
            unit_sum=sums[:size].clone(),
            mean_sketch=mean,
            hashes=hashes,
        )

    def under_way(self) -> list[Gathered]:
        """Everything not collected yet, without a further collective; the last lacks the cosines with the rest."""
        earlier, newest = self._incomplete, None if self._step is None else self.peek()
        if earlier is not None and newest is not None:
            earlier = _completed(earlier, newest)
        return [
            _incomplete(record) if record is newest else record for record in (earlier, newest) if record is not None
        ]


def _completed(record: Gathered, later: Gathered) -> Gathered:
    """With the cosines that came with the sample after it."""
    return replace(record, scalars={**record.scalars, _LATE: later.scalars[_LATE]})


def _incomplete(record: Gathered) -> Gathered:
    """Without the cosines that came with it, which are of the sample before."""
    return replace(record, scalars={name: value for name, value in record.scalars.items() if name != _LATE})


def gather_on_host(mine: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """``mine`` of every rank, stacked, on the host: for the rare exchange that everybody waits for. A collective."""
    own = mine.contiguous()
    everybody = once(lambda: [torch.empty_like(own) for _ in range(dist.get_world_size(group))])
    once(lambda: dist.all_gather(everybody, own, group=group))
    return torch.stack(everybody).cpu()


Exchange = GatherExchange | ConstantSizeExchange


def make_exchange(layout: Layout, group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """The exchange that fits the group's size."""
    whole = gathers_sketches(dist.get_world_size(group))
    return GatherExchange(layout, group, device) if whole else ConstantSizeExchange(layout, group, device)


def gathers_sketches(ranks: int) -> bool:
    """Whether everybody gets everybody's sketch."""
    return ranks <= GATHER_LIMIT


def failed_rows(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a rank sends that has no sample to send: it broke, or its gradient cannot be observed."""
    rows = torch.zeros(2, width, device=device)
    rows[:, SCALARS.index("failed")] = torch.tensor([BROKE, UNSEEN], device=device)
    return rows[0], rows[1]


def _pack(layout: Layout, sample: LocalSample, out: Tensor) -> Tensor:
    """Fill the row of one rank, and give it back."""
    scalars, *vectors = torch.split(out, layout.parts)
    _pack_scalars(layout, sample, scalars)
    layers, aggregates = (
        None if sketches is None else fold(sketches, layout.layer_size)
        for sketches in (sample.layer_sketches, sample.layer_aggregates)
    )
    values = (sample.sketch, sample.aggregate, layers, aggregates, sample.gram)
    for part, value in zip(vectors, values, strict=True):
        part.zero_() if value is None else part.copy_(value.reshape(-1))
    return out


def _pack_scalars(layout: Layout, sample: LocalSample, out: Tensor) -> None:
    out.zero_()
    for name, value in {**sample.scalars, "gram_seen": float(sample.gram is not None)}.items():
        slot = out[SCALARS.index(name)]
        slot.copy_(value) if isinstance(value, Tensor) else slot.fill_(value)
    _, squares, ids, hashes = torch.split(out, layout.scalar_parts)
    if sample.layer_squares is not None:
        squares.copy_(sample.layer_squares)
    if sample.ids is not None:
        ids.copy_(sample.ids)
    if sample.hashes is not None:
        hashes.view(-1, WORDS).copy_(torch.stack([(sample.hashes >> 16 * word) & 0xFFFF for word in range(WORDS)], 1))


def _unpack_scalars(layout: Layout, rows: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    scalars, squares, ids, words = torch.split(rows, layout.scalar_parts, dim=1)
    hashes = torch.zeros(len(rows), layout.hashes, dtype=torch.int64)
    for word in range(WORDS):
        hashes |= words[:, word::WORDS].nan_to_num(0.0).to(torch.int64) << 16 * word
    names = {name: scalars[:, column].clone() for column, name in enumerate(SCALARS)}
    return names, squares.clone(), ids.clone(), hashes


def _gram(scalars: dict[str, Tensor], total: Tensor, ranks: int) -> Tensor | None:
    return total.view(ranks, ranks).clone() if bool((scalars["gram_seen"] > 0).all()) else None
