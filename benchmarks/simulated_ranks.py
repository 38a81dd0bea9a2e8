"""The observations of many ranks, simulated: what their collectives would have brought to the writing rank.

    ranks = SimulatedRanks(layout, count, seed=0, noise=0.0)
    rows, sums = ranks.step(step, fault)          # what the buffers of the exchange hold then

Gradients are a direction that all share and a part of each rank's own, so that two of them have the cosine COSINE. The
sketches are drawn as such: a sketch of a gradient with many elements is a vector of normal numbers. What a rank finds
of its own weight is computed as the exchange does it, for all ranks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import FIELDS
from ds_silent.maths.sketch import fold

COSINE = 0.1
CHUNK = 1024  # ranks whose sketches are drawn at once


@dataclass(frozen=True)
class Fault:
    """What is wrong with the first ``ranks`` ranks, from a step on."""

    name: str = "none"
    ranks: int = 0
    gradient: float = 1.0  # their gradient, times this
    weight: float = 1.0  # with which it enters the aggregate
    loss: float = 0.0  # added
    twin: bool = False  # they hold the rows of the rank after them
    aggregate: float = 1.0  # the whole of it, times this


class SimulatedRanks:
    """``count`` of them; see the module docstring.

    Args:
        noise: of the reduction, relative to the aggregate's length.
        tokens: standard deviation of the label tokens, relative; 0 where all have as many.
    """

    def __init__(self, layout: Layout, count: int, seed: int = 0, noise: float = 1e-7, tokens: float = 0.2):
        self._layout, self._count, self._noise, self._tokens = layout, count, noise, tokens
        self._random = torch.Generator().manual_seed(seed)
        self._late: Tensor | None = None  # (N, 1 + layout.late) of the step before

    def step(self, step: int, fault: Fault) -> tuple[Tensor, Tensor | None]:
        """(N, scalars + pairs) and (sums,) fp32; what is found late is of the step before.

        Of few ranks (N, scalars + vectors), and no sums.
        """
        layout, count, k = self._layout, self._count, self._layout.size
        struck = torch.arange(count) < fault.ranks
        shared = torch.randn(k, generator=self._random) * COSINE**0.5 / k**0.5
        norms = 1.0 + 0.05 * torch.randn(count, generator=self._random)
        norms = torch.where(struck, norms * fault.gradient, norms)
        weights = torch.where(struck, fault.weight, 1.0)
        own_seed = int(torch.randint(1 << 40, (), generator=self._random))
        total, entered, units = torch.zeros(k), torch.zeros(k), torch.zeros(k)
        squares, probes = torch.empty(count), torch.empty(count, layout.probes)
        pairs = torch.empty(count, layout.pairs)
        twins = range(1, fault.ranks + 1) if fault.twin else ()
        for begin, sketches in self._sketches(own_seed, shared, norms, twins):
            part = slice(begin, begin + len(sketches))
            lengths = sketches.norm(dim=1)
            squares[part] = lengths.square()
            total += sketches.sum(0)
            entered += weights[part] @ sketches
            units += (sketches / lengths[:, None]).sum(0)
            if layout.probes:
                probes[part] = fold(sketches / lengths[:, None], layout.probes)
            if layout.pairs:
                pairs[part] = fold(sketches, layout.pairs)
        aggregate = fault.aggregate * entered / count
        aggregate += self._noise * aggregate.norm() / k**0.5 * torch.randn(k, generator=self._random)
        if layout.gathers:
            rows = self._rows(step, norms, squares, aggregate, fault, struck)
            return torch.cat((rows, self._vectors(own_seed, shared, norms, twins, aggregate)), 1), None
        late = self._found_late(own_seed, shared, norms, twins, total, aggregate)
        rows = self._rows(step, norms, squares, aggregate, fault, struck)
        if self._late is not None:
            rows[:, FIELDS.index("local.late_cosine")] = self._late[:, 0]
        said = torch.zeros(count, 1 + layout.late) if self._late is None else self._late
        rows = torch.cat((rows, probes, said[:, 1:], pairs), 1)
        self._late = late
        layers = [fold(vector, layout.layer_size) for vector in (total, aggregate)]
        by_layer = [(one.repeat(layout.layers) / layout.layers**0.5) for one in layers]  # all layers alike
        failures = torch.zeros(layout.failures)
        return rows, torch.cat((fold(units, layout.units), total, aggregate, *by_layer, failures))

    def _sketches(self, seed, shared, norms, twins):  # type: ignore[no-untyped-def]
        """Chunks of (ranks, k), drawn again alike at each call."""
        random = torch.Generator().manual_seed(seed)
        k = len(shared)
        for begin in range(0, self._count, CHUNK):
            many = min(CHUNK, self._count - begin)
            own = torch.randn(many, k, generator=random) * ((1.0 - COSINE) / k) ** 0.5
            sketches = (own + shared) * norms[begin : begin + many, None]
            for twin in twins if begin == 0 else ():
                sketches[twin - 1] = sketches[twin]
            yield begin, sketches

    def _vectors(self, seed, shared, norms, twins, aggregate) -> Tensor:  # type: ignore[no-untyped-def]
        """(N, vectors): each rank's sketches; the first answers for the whole aggregate. All layers are alike."""
        layout = self._layout
        sketches = torch.cat([part for _, part in self._sketches(seed, shared, norms, twins)])
        answered = torch.zeros_like(sketches)
        answered[0] = aggregate
        by_layer = [
            fold(one, layout.layer_size).repeat(1, layout.layers) / layout.layers**0.5 for one in (sketches, answered)
        ]
        return torch.cat((sketches, answered, *by_layer), 1)

    def _found_late(self, seed, shared, norms, twins, total, aggregate) -> Tensor:  # type: ignore[no-untyped-def]
        count = self._count
        cosine, weight, own = torch.empty(count), torch.empty(count), torch.empty(count)
        error, squared = aggregate - total / count, total @ total
        for begin, sketches in self._sketches(seed, shared, norms, twins):
            part = slice(begin, begin + len(sketches))
            rest = total - sketches
            cosine[part] = (sketches * rest).sum(1) / (sketches.norm(dim=1) * rest.norm(dim=1))
            beside = sketches - (sketches @ total / squared)[:, None] * total
            own[part] = beside.square().sum(1)
            weight[part] = beside @ error * count / own[part]
        by_layer = torch.full((count, self._layout.late_layers), COSINE)  # nothing is drawn by layer
        by_layer += 0.05 * torch.randn(by_layer.shape, generator=self._random)
        return torch.cat((cosine[:, None], weight[:, None], own[:, None], by_layer), 1)

    def _rows(
        self, step: int, norms: Tensor, squares: Tensor, aggregate: Tensor, fault: Fault, struck: Tensor
    ) -> Tensor:
        layout, count = self._layout, self._count
        rows = torch.zeros(count, sum(layout.scalar_parts[:-2]))
        tokens = (1000.0 * (1.0 + self._tokens * torch.randn(count, generator=self._random))).round().clamp(min=10.0)
        loss = 2.0 + 0.05 * torch.randn(count, generator=self._random) + fault.loss * struck
        if fault.twin:
            for name in (loss, tokens, norms):
                name[: fault.ranks] = name[1 : fault.ranks + 1]
        share = float(aggregate @ aggregate) / count
        values = {
            "status.step": step,
            "status.boundary": step,
            "loss.total": loss,
            "loss.count": 1.0,
            "loss.scale": 1.0,
            "loss.tokens": tokens,
            "local.seen": 1.0,
            "local.norm_seen": 1.0,
            "local.squared": squares,
            "local.fired": layout.groups,
            "local.sketch_squared": squares,
            "reduced.seen": 1.0,
            "reduced.squared": share,
            "applied.seen": 1.0,
            "applied.factor": 1.0,
            "applied.squared": share,
        }
        for name, value in values.items():
            rows[:, FIELDS.index(name)] = torch.as_tensor(value, dtype=torch.float32)
        begin = len(FIELDS)
        rows[:, begin : begin + layout.groups] = squares[:, None] / layout.groups
        return rows
