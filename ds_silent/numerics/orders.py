"""Sums of the ranks' terms in the orders that communication libraries use. Pure functions of tensors.

    terms = terms_of_mean(gradients, torch.bfloat16)      # (N, D): what each rank puts in
    ORDERS["ring"](terms)                                 # (D,): what comes out, rounded after every addition
    reference_mean(gradients)                             # (D,) float64

An addition of two bf16 or fp16 numbers is done in fp32 and rounded once, in torch as in NCCL and gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
