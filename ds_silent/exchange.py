"""The observing collective: what each rank knows of one step becomes what every rank knows, one step later.

    exchange = make_exchange(layout, group, device)
    exchange.post(step, sample)        # asynchronous; the same call on every rank, whatever happened there
    gathered = exchange.collect()      # at the next step's boundary: no waiting in practice

Up to ``GATHER_LIMIT`` ranks one all-gather brings everybody's sketch. Above, the cost per rank must not grow with
N * k: sums of sketches go through one all-reduce, and only the scalars are gathered. All buffers are fp32, the only
reduction is SUM, and sizes depend on the configuration alone, so a rank that failed still takes part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_silent.sketch import fold

GATHER_LIMIT = 64
WORDS = 4  # a 64-bit hash travels as four 16-bit numbers, which fp32 carries exactly
# torch 2.13 renamed the flat all-gather and warns at the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Layout:
    """Sizes of what one rank sends; equal on all ranks."""

    size: int  # k of the sketch
    groups: int = 0  # layers, of which squared norms travel
    ids: int = 0  # numbers that hold the ids of the step's rows, see ds_silent.sample_ids
    layers: int = 0  # per-layer sketches, 0 when off
    layer_size: int = 0
    gram: int = 0  # N * N when exact inner products may travel too, else 0
    layer_aggregates: bool = False  # per-layer sketches of the aggregate too
    layer_records: bool = False  # layers are measured for the record, not only for finding a fault's place
    hashes: int = 0  # bit hashes of 64 bits, see ds_silent.replicas
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
    "failed",  # not 0 when this rank's observer broke or ended: everybody switches off, see ds_silent.lockstep
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
    "step",  # by this rank's framework, see ds_silent.lockstep
    "boundary",  # reductions that this rank has passed
    "nothing",  # 1 in a sample that only says where this rank is
    "compare",  # 1 when this rank wants the replicas compared after the next step
)


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
    hashes: Tensor | None = None  # int64 (H,) bit hashes, see ds_silent.replicas


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
        self._accelerator = get_accelerator()
        self._on_host = source.device.type == "cpu"
        self._work: dist.Work | None = None
        if not self._on_host:
            self._host = self._accelerator.pin_memory(torch.empty(source.shape, dtype=source.dtype))
            self._stream = self._accelerator.Stream()
            self._event = self._accelerator.Event()

    def start(self, work: dist.Work | None) -> None:
        if self._on_host:
            self._work = work
            return
        with self._accelerator.stream(self._stream):
            if work is not None:
                work.wait()  # orders the side stream after the collective; the host goes on
            self._host.copy_(self._source, non_blocking=True)
            self._event.record(self._stream)

    def result(self) -> Tensor:
        """The landed fp32 values; the copy was started a step ago."""
        if not self._on_host:
            self._event.synchronize()
            host: Tensor = self._host
            return host
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
        self._all = torch.zeros(self._ranks * width, device=device)
        self._landing = _Landing(self._all)
        self._step: int | None = None

    def post(self, step: int, sample: LocalSample) -> None:
        """Start the collective of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        _pack(self._layout, sample, self._mine)
        work = _all_gather(self._all, self._mine, group=self._group, async_op=True)
        self._landing.start(work)
        self._step = step

    def collect(self) -> Gathered | None:
        """What was posted last and not yet collected, or None."""
        if self._step is None:
            return None
        gathered, self._step = self.peek(), None
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

    def drain(self) -> list[Gathered]:
        """Everything that is still under way, without a further collective."""
        gathered = self.collect()
        return [] if gathered is None else [gathered]


class ConstantSizeExchange:
    """One all-reduce of 3 k numbers and one all-gather of the scalars: the cost per rank does not grow with N * k.

    A rank's cosine with the rest needs the sum, so it travels with the next sample: records come two steps later.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._layout, self._group = layout, group
        self._ranks = dist.get_world_size(group)
        size = layout.size
        self._sums = torch.zeros(3 * size + layout.gram, device=device)  # unit sketches, sketches, aggregate, Gram
        self._own = torch.zeros(size, device=device)
        self._mine = torch.zeros(layout.scalars, device=device)
        self._all = torch.zeros(self._ranks * layout.scalars, device=device)
        self._sums_landing, self._scalars_landing = _Landing(self._sums), _Landing(self._all)
        self._step: int | None = None
        self._incomplete: Gathered | None = None  # lacks the cosines with the rest
        self._cosine = torch.zeros((), device=device)  # of this rank, in that sample

    def post(self, step: int, sample: LocalSample) -> None:
        """Start the collectives of ``step``; again, where its reduction was repeated. Every rank calls this alike."""
        size = self._layout.size
        _pack_scalars(self._layout, sample, self._mine)
        if self._incomplete is not None:
            if self._step is None:
                rest = self._sums[size : 2 * size] - self._own
                self._cosine = torch.dot(self._own, rest) / (self._own.norm() * rest.norm())
            self._mine[SCALARS.index("cosine_with_rest")].copy_(self._cosine)
        self._own.zero_() if sample.sketch is None else self._own.copy_(sample.sketch)
        self._sums.zero_()
        norm = self._own.norm()
        self._mine[SCALARS.index("sketch_squared")].copy_(norm * norm)
        torch.div(self._own, norm, out=self._sums[:size])
        self._sums[size : 2 * size].copy_(self._own)
        if sample.aggregate is not None:
            self._sums[2 * size : 3 * size].copy_(sample.aggregate)
        if sample.gram is not None:
            self._sums[3 * size :].copy_(sample.gram.reshape(-1))
        reduced = dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        self._sums_landing.start(reduced)
        gathered = _all_gather(self._all, self._mine, group=self._group, async_op=True)
        self._scalars_landing.start(gathered)
        self._step = step

    def collect(self) -> Gathered | None:
        """The record before the last posted one: its cosines with the rest came with the last."""
        if self._step is None:
            return None
        newest, self._step = self.peek(), None
        if bool((newest.scalars["failed"] > 0).any()):  # at once: some rank may not be there for another
            self._incomplete = None
            return newest
        complete, late = self._incomplete, newest.scalars.pop("cosine_with_rest")
        self._incomplete = newest
        if complete is not None:
            complete.scalars["cosine_with_rest"] = late
        return complete

    def peek(self) -> Gathered:
        """What was posted last, waited for and left where it is."""
        assert self._step is not None
        step, layout, size = self._step, self._layout, self._layout.size
        sums = self._sums_landing.result().double()
        rows = self._scalars_landing.result().view(self._ranks, -1).double()
        names, squares, ids, hashes = _unpack_scalars(layout, rows)
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
            mean_sketch=sums[size : 2 * size] / self._ranks,
            hashes=hashes,
        )

    def drain(self) -> list[Gathered]:
        """Everything still under way, without a further collective; the last lacks the cosines with the rest."""
        records = [self.collect(), self._incomplete]
        self._incomplete = None
        return [record for record in records if record is not None]


def gather_on_host(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``mine`` of every rank, stacked, on the host: for the rare exchange that everybody waits for. A collective."""
    own = mine.contiguous()
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, own, group=group)
    return torch.stack(everybody).cpu()


Exchange = GatherExchange | ConstantSizeExchange


def make_exchange(layout: Layout, group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """The exchange that fits the group's size."""
    whole = gathers_sketches(dist.get_world_size(group))
    return GatherExchange(layout, group, device) if whole else ConstantSizeExchange(layout, group, device)


def gathers_sketches(ranks: int) -> bool:
    """Whether everybody gets everybody's sketch."""
    return ranks <= GATHER_LIMIT


def _pack(layout: Layout, sample: LocalSample, out: Tensor) -> None:
    scalars, *vectors = torch.split(out, layout.parts)
    _pack_scalars(layout, sample, scalars)
    layers, aggregates = (
        None if sketches is None else fold(sketches, layout.layer_size)
        for sketches in (sample.layer_sketches, sample.layer_aggregates)
    )
    values = (sample.sketch, sample.aggregate, layers, aggregates, sample.gram)
    for part, value in zip(vectors, values, strict=True):
        part.zero_() if value is None else part.copy_(value.reshape(-1))


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
