"""Lay out what each rank sends, from the configuration, the number of ranks and what the framework reduces.

pack(layout, observation, out)                        # fp32, in the order of the fields
gathered = unpack(layout, step, rows)                 # and with_sums(gathered, ...)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.guard import SparseGradientError, UnevenInputsError, WithinBackwardError
from ds_silent.exchange.observation import (
    BROKE,
    FIELDS,
    GROUPS,
    UNEVEN,
    UNSEEN,
    WITHIN,
    EachRank,
    Gathered,
    Observation,
    Sums,
    on_all,
)
from ds_silent.exchange.row_ids import ROW_NUMBERS
from ds_silent.maths.causes import LARGEST
from ds_silent.maths.mixing import WORDS, words_of
from ds_silent.maths.sketch import fold

GATHER_LIMIT = 64
"""Ranks up to which everybody gets everybody's sketch: whole up to a quarter of it, and folded, for the cosines of the
pairs, from there on. Above a quarter sums over the ranks tell what whole sketches would."""
QUARTER = 4
TIMES = 4
"""Gather limits up to which everybody gets what everybody says of itself; above, the writing rank alone, by way of
blocks of ``BLOCK_TIMES`` gather limits: 256 ranks, and blocks of 128."""
BLOCK_TIMES = 2
PAIRS_TOGETHER = 1 << 17  # numbers of all folded sketches: 0.5 MB
LAYERS_TOGETHER = 1 << 12  # numbers of all layers' sketches, where sums of them travel
UNITS = 8  # the sum of the ranks' directions is folded so many times: its length is all that is asked
PROBES = 16  # numbers of a rank's direction, by which equal ones are found where no pairs are known
DIGIT, DIGITS = 3, 8  # bits of a rank's failure, and how many ranks' make a number that fp32 carries exactly


@dataclass(frozen=True)
class Layout:
    """Hold the sizes of what one rank sends; equal on all ranks."""

    size: int  # k of the sketch
    groups: int = 0  # layers, of which squared norms travel
    ids: int = 0  # numbers that hold the ids of the step's rows, see ds_silent.exchange.row_ids
    layers: int = 0  # per-layer sketches, 0 when off
    layer_size: int = 0
    gram: int = 0  # N * N when exact inner products may travel too, else 0
    layer_aggregates: bool = False  # per-layer sketches of the aggregate too
    layer_records: bool = False  # layers are measured for the record, not only for finding a fault's place
    hashes: int = 0  # bit hashes of 64 bits, see ds_silent.kernels.checksums
    gathers: bool = True  # everybody gets everybody's whole sketch
    units: int = 0  # above the gather limit: numbers of the sum of the ranks' directions; 0 below it
    pairs: int = 0  # and of each rank's folded sketch, while there are few enough ranks
    micro_batches: int = 0  # per step, where their sketches can be asked for; else 0
    block: int = 0  # ranks that gather for one of them to pass on to the writing rank; 0: everybody gets everything
    failures: int = 0  # numbers in the sums that say which ranks failed, where not everybody gets everything
    rows: int = 0  # numbers that hold the hash of the step's rows, where a trace is written
    weights: int = 0  # sampled elements of the weights, and how many are known, likewise

    @property
    def scalars(self) -> int:
        """An observation's own, then layers' squared norms, ids, hashes, rows, what tells equal directions, what is
        late."""
        return sum(self.scalar_parts)

    @property
    def scalar_parts(self) -> list[int]:
        return [len(FIELDS), self.groups, self.ids, WORDS * self.hashes, self.rows, self.probes, self.late]

    @property
    def probes(self) -> int:
        """Numbers of this rank's direction."""
        return min(PROBES, self.units)

    @property
    def late(self) -> int:
        """Numbers that a rank finds once it has the sums: two of its weight, and each layer's cosine of few ranks."""
        return 2 + self.late_layers if self.units else 0

    @property
    def late_layers(self) -> int:
        """Layers whose cosine with the rest is among them."""
        return self.layers if self.pairs else 0

    @property
    def parts(self) -> list[int]:
        """Lengths of scalars, local sketch, aggregate's sketch, both per layer, Gram matrix, and sampled weights."""
        of_layers = self.layers * self.layer_size
        of_both = [of_layers, of_layers * self.layer_aggregates]
        return [self.scalars, self.size, self.size, *of_both, self.gram, self.weights]

    @property
    def row(self) -> int:
        """Numbers that a rank says of itself: with all its sketches, or those of the pairs alone."""
        return sum(self.parts) if self.gathers else self.scalars + self.pairs

    @property
    def sums(self) -> list[int]:
        """Lengths of what is added up over the ranks above the gather limit: directions, as :attr:`parts`, failures."""
        return [self.units, *self.parts[1:], self.failures]


@dataclass(frozen=True)
class ExchangeShape:
    """Hold what a layout follows from beside the configuration; the same on every rank."""

    ranks: int
    layers: int
    ids: int  # numbers that an observation's row ids take
    micro_batches: int  # per step
    aggregate_replicated: bool  # every rank holds the whole aggregate, and sends its layers' checksums
    gather_limit: int = GATHER_LIMIT
    weights: int = 0  # sampled elements of the weights


def layout_of(config: SilentConsistencyConfig, shape: ExchangeShape) -> Layout:
    """Return the layout of what each rank sends."""
    ranks = shape.ranks
    direction, groups = config.direction, shape.layers
    size = 0 if direction.method == "off" else direction.sketch_size
    exact = direction.method == "exact" or (direction.exact_interval > 0 and size > 0)
    traced = config.trace is not None and size > 0
    aggregation = config.integrity.aggregation and size > 0
    gathers = gathers_sketches(ranks, shape.gather_limit, direction.per_layer)
    layers = groups if size and ((direction.per_layer and gathers) or aggregation or traced) else 0
    # Layers share about one sketch more; folding a sketch further gives the sketch of the smaller size. To find a
    # fault's place and the rank behind it, a few numbers per rank do.
    layer_size = max(256, _power_of_two(size // layers)) if layers else 0
    if layers and not direction.per_layer:
        layer_size = min(layer_size, place_size(size, ranks))
    if layers and not gathers:
        layer_size = max(32, _power_of_two(LAYERS_TOGETHER // layers))
    steps = shape.micro_batches if aggregation else 0
    far = ranks > TIMES * shape.gather_limit and not gathers
    return Layout(
        size,
        groups,
        shape.ids,
        layers,
        min(layer_size, size),
        ranks * ranks if exact else 0,
        layer_aggregates=aggregation or traced,
        layer_records=direction.per_layer and gathers,
        hashes=1 + (groups if shape.aggregate_replicated else 0),
        gathers=gathers,
        units=0 if gathers else size // UNITS,
        pairs=0 if gathers or not size else pair_size(size, ranks, shape.gather_limit),
        micro_batches=steps if 1 < steps <= LARGEST // max(1, layers * layer_size) else 0,
        block=max(2, BLOCK_TIMES * shape.gather_limit) if far else 0,
        failures=-(-ranks // DIGITS) if far else 0,
        rows=ROW_NUMBERS if traced and shape.ids else 0,
        weights=shape.weights + 1 if traced else 0,
    )


def _power_of_two(most: int) -> int:
    return 1 << max(1, most).bit_length() - 1


def place_size(sketch_size: int, ranks: int) -> int:
    """Numbers of a layer's sketch from which N ranks' shares in it can be solved, with some to spare."""
    return min(sketch_size, max(64, 1 << (4 * ranks - 1).bit_length()))


def pair_size(sketch_size: int, ranks: int, limit: int = GATHER_LIMIT) -> int:
    """Numbers of a folded sketch that everybody gets of everybody; 0 above the gather limit."""
    return min(sketch_size, 1 << (PAIRS_TOGETHER // ranks).bit_length() - 1) if ranks <= limit else 0


def gathers_sketches(ranks: int, limit: int = GATHER_LIMIT, per_layer: bool = False) -> bool:
    """Tell whether every rank gets all whole sketches. The directions of single layers cannot be had from sums."""
    return ranks <= (limit if per_layer else limit // QUARTER)


# ----------------------------------------------------------------------------------------------------------------------
# Observations as numbers, and back.


_values = attrgetter(*FIELDS)
_ENDS = list(accumulate(len(fields(group)) for group in GROUPS.values()))
_BEGINS = [0, *_ENDS[:-1]]
_SPANS = [(name, GROUPS[name], begin, end) for name, begin, end in zip(GROUPS, _BEGINS, _ENDS, strict=True)]


_CODES: dict[type | None, float] = {SparseGradientError: UNSEEN, UnevenInputsError: UNEVEN, WithinBackwardError: WITHIN}


def code_of(failure: Exception | None) -> float:
    """Return the ``status.failed`` of a rank that broke, or whose training cannot be observed."""
    return _CODES.get(type(failure), BROKE)


def failed_rows(width: int, device: torch.device) -> dict[float, Tensor]:
    """Make what a rank sends that has nothing to send, beforehand: fp32 (width,) for each of :func:`code_of`."""
    codes = (BROKE, *_CODES.values())
    rows = torch.zeros(len(codes), width, device=device)
    rows[:, FIELDS.index("status.failed")] = torch.tensor(codes, device=device)
    return dict(zip(codes, rows.unbind(), strict=True))


def pack(layout: Layout, observation: Observation, out: Tensor) -> Tensor:
    """Fill the row of one rank, (scalars + vectors,) fp32, and give it back."""
    scalars, *vectors = torch.split(out, layout.parts)
    pack_scalars(layout, observation, scalars)
    layers, aggregates = (
        None if sketches is None else fold(sketches, layout.layer_size)
        for sketches in (observation.layer_sketches, observation.layer_aggregates)
    )
    values = (observation.sketch, observation.aggregate, layers, aggregates, observation.gram, observation.weights)
    for part, value in zip(vectors, values, strict=True):
        part.zero_() if value is None else part.copy_(value.reshape(-1))
    return out


def pack_scalars(layout: Layout, observation: Observation, out: Tensor) -> None:
    """Fill ``out``, (layout.scalars,) fp32: one copy for what is known on the host, and one for what is on a device."""
    values = _values(observation)
    out.zero_()
    scalars, squares, ids, hashes, rows, _, _ = torch.split(out, layout.scalar_parts)
    known = torch.tensor([value if type(value) is float else 0.0 for value in values], dtype=torch.float32)
    scalars.copy_(known, non_blocking=True)
    # type(), because isinstance of a Tensor is Python, once for each
    there = [(place, value) for place, value in zip(scalars.unbind(), values, strict=True) if type(value) is not float]
    if there:
        torch._foreach_copy_([place for place, _ in there], [value for _, value in there])
    if observation.layer_squares is not None:
        squares.copy_(observation.layer_squares)
    if observation.ids is not None:
        ids.copy_(observation.ids)
    if observation.rows is not None:
        rows.copy_(observation.rows)
    if observation.hashes is not None:
        hashes.view(-1, WORDS).copy_(words_of(observation.hashes))


def unpack(layout: Layout, step: int, rows: Tensor) -> Gathered:
    """Read all ranks' scalars, (N, layout.scalars) float64."""
    scalars, squares, ids, words, hashed, _, _ = torch.split(rows, layout.scalar_parts, dim=1)
    hashes = torch.zeros(len(rows), layout.hashes, dtype=torch.int64)
    for word in range(WORDS):
        hashes |= words[:, word::WORDS].nan_to_num(0.0).to(torch.int64) << 16 * word
    columns = scalars.t().contiguous().unbind()
    groups = {name: group(*columns[begin:end]) for name, group, begin, end in _SPANS}
    return Gathered(step, **groups, layer_squares=squares, ids=ids, hashes=hashes, rows=hashed)


def with_sums(
    known: Gathered, aggregate: Tensor, gram: Tensor, weights: Tensor, directions: EachRank | Sums
) -> Gathered:
    """Add to what is known what is not of single ranks.

    Args:
        aggregate: (k,) sum over the ranks.
        gram: (layout.gram,) sum over the ranks; used where all have exchanged their inner products.
        weights: (layout.weights,) sum over the ranks.
    """
    exact = on_all(known.local.gram_seen)
    matrix = gram.view(known.ranks, known.ranks).clone() if exact else None
    return replace(known, aggregate=aggregate, gram=matrix, weights=weights, directions=directions)
