"""The norm of a gradient that lies in pieces on several ranks, with the same bits however it is cut.

    norm = global_norm(pieces, group, device)          # a collective

Where a gradient is clipped, its norm is in every weight; and a sum of squares in floating point depends on where the
ranks' pieces end. Integers do not: every element is rounded to a multiple of 2^-24 of the largest one, and the squares
of these whole numbers are added up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BITS = 24  # of an element; twice as many of its square, kept in two parts
WORD = 16  # bits of an int32 that travel, so that 2^15 ranks may be added up
BLOCK = 1 << 16  # elements at a time


def global_norm(pieces: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Euclidean norm of all ranks' pieces together; a collective, the same on every rank. None where one is not finite.

    Args:
        pieces: this rank's, fp32 or narrower, of any shapes.
        device: where the collective's buffers are.
    """
    largest = torch.zeros((), device=device)
    for piece in pieces:
        if piece.numel():
            largest = torch.maximum(largest, piece.abs().max().float())
    largest = torch.where(torch.isfinite(largest), largest, math.inf)  # MAX of a NaN is whatever the backend likes
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if not torch.isfinite(largest):
        return None
    exponent = exponent_of(float(largest))
    high, low = (torch.as_tensor(part, device=device) for part in square_sums(pieces, exponent))
    words = torch.stack([(part >> WORD * word) & ((1 << WORD) - 1) for part in (high, low) for word in range(4)])
    words = words.to(torch.int32)
    dist.all_reduce(words, op=dist.ReduceOp.SUM, group=group)
    return norm_of(words.tolist(), exponent)


def exponent_of(largest: float) -> int:
    """e with every |x| 2^e at most 2^24, from the largest |x|."""
    return BITS - math.frexp(largest)[1]


def square_sums(pieces: Sequence[Tensor], exponent: int) -> tuple[int | Tensor, int | Tensor]:
    """Sum of the squares of the whole numbers nearest to x * 2^exponent, exactly, up to 2^39 elements.

    Returns:
        int64 (), in units of 2^24 and of 1.
    """
    first, second = exponent // 2, exponent - exponent // 2  # 2^exponent itself may be too large for fp32
    high: int | Tensor = 0
    low: int | Tensor = 0
    for piece in pieces:
        for part in torch.split(piece.detach().reshape(-1), BLOCK):
            whole = part.float().mul(2.0**first).mul_(2.0**second).round_().to(torch.int64)
            square = whole.mul_(whole)
            high = high + (square >> BITS).sum()
            low = low + (square & ((1 << BITS) - 1)).sum()
    return high, low


def norm_of(words: list[int], exponent: int) -> float:
    """The root of what :func:`global_norm` has added up: eight words, low ones first, of the high and the low part."""
    high, low = (sum(word << WORD * place for place, word in enumerate(part)) for part in (words[:4], words[4:]))
    return math.ldexp(math.sqrt((high << BITS) + low), -exponent)
