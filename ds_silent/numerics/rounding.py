"""One reduction in the orders that communication libraries add in: its error, its bits, and ``integrity``'s bound.

    terms = terms_of_mean(gradients, torch.bfloat16)      # (N, D): what each rank puts in
    ORDERS["ring"](terms)                                 # (D,): what comes out, rounded after every addition
    reference_mean(gradients)                             # (D,) float64
    for row in measure_rounding(micro_batches, torch.float32, (2, 4, 8), ("fp32", "bf16")): row.error

An addition of two bf16 or fp16 numbers is done in fp32 and rounded once, in torch as in NCCL and gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.config import DetectorsConfig, DirectionConfig
from ds_silent.detectors import log_steps
from ds_silent.maths.rounding_bound import Arithmetic, check_aggregate, terms_of
from ds_silent.maths.sketch import make_plan, sketch_of

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LARGEST = 65504.0
SEGMENT = 1 << 20  # bytes: gloo cuts a tensor into segments of at most this size (kMaxSegmentSize)


def terms_of_mean(gradients: Tensor, dtype: torch.dtype, loss_scale: float = 1.0) -> Tensor:
    """Each rank's share of the mean, g_i * loss_scale / N, cast to the communication dtype: (N, D) fp32 to (N, D)."""
    return term_of_mean(gradients, len(gradients), dtype, loss_scale)


def term_of_mean(gradient: Tensor, ranks: int, dtype: torch.dtype, loss_scale: float = 1.0) -> Tensor:
    """One rank's term; see :func:`terms_of_mean`."""
    return (gradient * (loss_scale / ranks)).to(dtype)


def reference_mean(gradients: Tensor) -> Tensor:
    """The mean of (N, D) in float64, (D,): rank by rank, so that no float64 copy of all ranks is needed."""
    total = torch.zeros(gradients.shape[1], dtype=torch.float64)
    for gradient in gradients:
        total += gradient
    return total / len(gradients)


def spread(micro_batches: Tensor, world_size: int) -> Tensor:
    """The local gradients of ``world_size`` ranks that share the micro-batches: (M, D) fp32 to (N, D) fp32.

    Rank r accumulates the micro-batches r M/N, ..., (r + 1) M/N - 1 in fp32, one after the other.
    """
    count = len(micro_batches) // world_size
    total = micro_batches[::count].clone()
    for step in range(1, count):
        total += micro_batches[step::count]
    return total / count


def one_rank_adds(terms: Tensor) -> Tensor:
    """Rank 0 adds what the others send, in the order of their ranks: (N, D) to (D,)."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def tree(terms: Tensor) -> Tensor:
    """Binary tree: neighbours are added in pairs, then the pairs; one that is left over waits for the next level."""
    level: list[Tensor] = list(terms)
    while len(level) > 1:
        level = [level[i] + level[i + 1] if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0].clone()


def ring(terms: Tensor, direction: int = 1, rotation: int = 0) -> Tensor:
    """Ring reduce-scatter: chunk c goes round the ring and ends at rank c, so each chunk is added in its own order.

    Args:
        terms: (N, D).
        direction: +1: chunk c is c+1, c+2, ..., c (NCCL); -1: c-1, c-2, ..., c (gloo).
        rotation: places by which the ranks are moved in the ring.
    """
    ranks, elements = terms.shape
    chunk = chunk_length(elements, ranks, terms.element_size())
    total = torch.empty_like(terms[0])
    for number in range(ranks):
        members = [(number + rotation + direction * step) % ranks for step in range(1, ranks + 1)]
        piece = slice(number * chunk, (number + 1) * chunk)
        total[piece] = one_rank_adds(terms[members, piece])
    return total


def chunk_length(elements: int, ranks: int, element_size: int) -> int:
    """Elements of a chunk, as gloo cuts them (gloo/allreduce.cc, ring): a multiple of N segments, at least 2 N."""
    segments = max(math.ceil(elements * element_size / SEGMENT), 2 * ranks)
    per_rank = math.ceil(segments / ranks)
    return per_rank * math.ceil(elements / (per_rank * ranks))


ORDERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ring": ring,
    "ring rotated": lambda terms: ring(terms, rotation=1),
    "ring reversed": lambda terms: ring(terms, direction=-1),
    "tree": tree,
    "one rank adds": one_rank_adds,
}


def changed_bits(one: Tensor, other: Tensor) -> float:
    """Share of the elements of two tensors of one dtype whose bits differ."""
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return float((one.view(integers) != other.view(integers)).double().mean())


def relative_error(result: Tensor, reference: Tensor, loss_scale: float = 1.0) -> float:
    """|result / loss_scale - reference| / |reference|, in float64; infinite or NaN where ``result`` overflowed."""
    return float((result.double() / loss_scale - reference).norm() / reference.norm())


def settled_loss_scale(gradients: Tensor) -> float:
    """Where dynamic loss scaling settles: the largest power of two at which no sum of N gradients overflows fp16.

    With room for a factor of two, as the scale is halved after an overflow. (N, D) to a number.
    """
    largest = float(gradients.abs().amax(1).double().sum())
    return 2.0 ** math.floor(math.log2(FP16_LARGEST / (2.0 * largest))) if largest > 0.0 else 1.0


# -- the error of one reduction ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounding:
    """Of one world size and communication dtype. Errors and bounds are relative to the mean gradient."""

    world_size: int
    dtype: str
    loss_scale: float  # 1 unless fp16
    errors: Mapping[str, float]  # by order, against the float64 mean
    seen: float  # the largest error over the orders, as the sketch shows it (``integrity.relative_error``)
    bound: float  # what ``integrity`` puts down to rounding (``integrity.rounding_bound``)
    changed: Mapping[str, float]  # share of elements whose bits are not those of the plain ring, by order
    changed_by_world_size: float | None  # against the ring of the largest world size; None for that one
    unscaled_error: float | None  # of the ring without loss scaling; fp16 only

    @property
    def error(self) -> float:
        return self.errors["ring"]

    @property
    def ratio(self) -> float:
        """The bound over the error that it must cover."""
        return self.bound / self.seen if self.seen > 0.0 else math.inf

    @property
    def holds(self) -> bool:
        """Whether rounding alone raises no alarm. What overflowed is another finding (``non-finite``)."""
        return not math.isfinite(self.seen) or self.seen <= self.bound


def measure_rounding(
    micro_batches: Tensor,
    kept: torch.dtype,
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    loss_scale: float | None = None,
) -> Iterator[Rounding]:
    """A row for every world size and dtype.

    Args:
        micro_batches: (M, D) fp32, M a multiple of each world size.
        kept: dtype in which the gradients were stored before.
        world_sizes, dtypes: what to measure.
        loss_scale: for fp16; None: where dynamic loss scaling settles.
    """
    scale = settled_loss_scale(spread(micro_batches, max(world_sizes))) if loss_scale is None else loss_scale
    for name in dtypes:
        factor = scale if name == "fp16" else 1.0
        largest = ORDERS["ring"](terms_of_mean(spread(micro_batches, max(world_sizes)), DTYPES[name], factor))
        for world_size in world_sizes:
            local = kept if world_size == len(micro_batches) else torch.float32
            other = largest if world_size != max(world_sizes) else None
            yield _row(spread(micro_batches, world_size), local, name, factor, other)


def _row(gradients: Tensor, kept: torch.dtype, name: str, scale: float, largest: Tensor | None) -> Rounding:
    dtype, reference = DTYPES[name], reference_mean(gradients)
    terms = terms_of_mean(gradients, dtype, scale)
    results = {order: add(terms) for order, add in ORDERS.items()}
    seen, bound = _checked(gradients * scale, list(results.values()), arithmetic_of_mean(gradients, kept, dtype))
    plain = results["ring"]
    unscaled = relative_error(ORDERS["ring"](terms_of_mean(gradients, dtype)), reference)
    return Rounding(
        world_size=len(gradients),
        dtype=name,
        loss_scale=scale,
        errors={order: relative_error(result, reference, scale) for order, result in results.items()},
        seen=seen,
        bound=bound,
        changed={order: changed_bits(plain, result) for order, result in results.items() if order != "ring"},
        changed_by_world_size=None if largest is None else changed_bits(plain, largest),
        unscaled_error=unscaled if name == "fp16" else None,
    )


def arithmetic_of_mean(gradients: Tensor, kept: torch.dtype, dtype: torch.dtype) -> Arithmetic:
    """What :func:`terms_of_mean` and one sum round: a cast to a narrower dtype, and a division unless N is 2^n."""
    narrows = torch.promote_types(kept, dtype) != dtype
    divides = not math.log2(len(gradients)).is_integer()
    size = DirectionConfig().sketch_size
    return Arithmetic(
        dtype, before=narrows + divides, elements=gradients.shape[1], width=make_plan(gradients.shape[1], size).width
    )


def _checked(gradients: Tensor, results: Sequence[Tensor], arithmetic: Arithmetic) -> tuple[float, float]:
    """Largest relative error over the results and the bound, as the observer's audit would have them."""
    plan = make_plan(gradients.shape[1], DirectionConfig().sketch_size)
    terms = terms_of(torch.stack([sketch_of(plan, gradient).double() for gradient in gradients]))
    log_rate = log_steps(DetectorsConfig(), 1) + math.log(2.0)  # as the observer: the reduction, and what is applied
    checks = [check_aggregate(terms, sketch_of(plan, result).double(), arithmetic, log_rate) for result in results]
    errors = [check.error / check.expected for check in checks]
    worst = max(errors) if all(map(math.isfinite, errors)) else math.nan
    return worst, checks[0].tolerance / checks[0].expected
