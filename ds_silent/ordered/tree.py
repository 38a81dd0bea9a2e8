"""Average gradients to bits that depend on the micro-batches alone, not on how they were spread and added up.

    tree = LocalTree(leaves=A, micro_batches="contiguous")     # on each of N ranks
    tree.push(gradients)                                       # A times: one micro-batch's gradients, or None
    own = tree.take()                                          # fp32 sums
    sum_rows(rows, "contiguous")                               # the ranks' sums, of the same elements: (N, p) -> (p,)

One step has M = N x A micro-batches. Their gradients are the leaves of one binary tree whose every node is the fp32 sum
of its two children, and the tree is the same for every N and A with the same M. Powers of two make that possible: a
rank's leaves are then a whole subtree, which it adds up by itself, and the ranks' sums are the leaves of the rest.

* ``contiguous``: leaf rank * A + a. Neighbours are paired, so a rank keeps at most one partial sum per level, log2 A.
* ``interleaved``: leaf a * N + rank. Leaf k is paired with k + M/2, so a rank waits with A/2 partial sums: subtrees of
  every N-th leaf, for whatever N, allow no other order.

With another number of ranks the bits are still those of one tree, whatever the backend, the buckets and the algorithm,
but of another tree than with other numbers.

A gradient that is absent, because a parameter took no part, counts as +0.0: -0.0 + 0.0 is +0.0, so it is added where
its partner is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Gradients = list[Tensor | None]
"""One tensor per parameter; None where it took no part."""


class LocalTree:
    """Add up one rank's subtree while its leaves come in.

    Args:
        leaves: A, micro-batches per rank and step; a power of two.
        micro_batches: ``contiguous`` or ``interleaved``.
    """

    def __init__(self, leaves: int, micro_batches: str):
        if leaves < 1 or leaves & (leaves - 1):
            raise ValueError(f"leaves must be a power of two, got {leaves}")
        self._leaves, self._neighbours = leaves, micro_batches == "contiguous"
        self._waiting: list[deque[Gradients]] = [deque() for _ in range(leaves.bit_length() - 1)]  # one per level
        self._root: Gradients | None = None
        self.count = 0
        """Leaves so far."""

    def push(self, gradients: Gradients) -> None:
        """The next leaf. Its tensors are the tree's from now on, and may be written to.

        Raises:
            ValueError: all leaves are there already.
        """
        if self.count == self._leaves:
            raise ValueError(f"the tree has its {self._leaves} leaves already")
        number, size, node = self.count, self._leaves, gradients
        self.count += 1
        for waiting in self._waiting:
            size //= 2
            first = number % 2 == 0 if self._neighbours else number < size
            if first:
                waiting.append(node)
                return
            node = _added(waiting.popleft(), node)
            number = number // 2 if self._neighbours else number - size
        self._root = node

    def take(self) -> Gradients:
        """The sums, fp32 and contiguous, and an empty tree.

        Raises:
            ValueError: leaves are missing.
        """
        if self._root is None:
            raise ValueError(f"the tree has {self.count} of its {self._leaves} leaves")
        root, self._root, self.count = self._root, None, 0
        return [None if value is None else value.float().contiguous() for value in root]

    def take_incomplete(self) -> Gradients | None:
        """What has come in so far, added up in some order, and an empty tree."""
        if self.count == self._leaves:
            return self.take()
        nodes = [node for waiting in self._waiting for node in waiting]
        for waiting in self._waiting:
            waiting.clear()
        self.count = 0
        total: Gradients | None = None
        for node in nodes:
            total = node if total is None else _added(total, node)
        return total


def _added(left: Gradients, right: Gradients) -> Gradients:
    """Their sum in fp32; in ``left``, and in the memory of either where it is fp32 already."""
    for index, other in enumerate(right):
        right[index] = None  # so that each tensor is freed as soon as it is added
        one = left[index]
        if one is None:
            one, other = other, None
        if one is not None:
            left[index] = one.float().add_(0.0 if other is None else other)
    return left


def sum_rows(rows: Tensor, micro_batches: str) -> Tensor:
    """The tree over the ranks, in place.

    Args:
        rows: (N, p) fp32, row r of rank r; overwritten.
        micro_batches: ``contiguous`` or ``interleaved``.

    Returns:
        (p,) fp32, a view of the first row.
    """
    ranks = len(rows)
    if micro_batches == "contiguous":
        step = 1
        while step < ranks:
            right = rows[step :: 2 * step]
            rows[: ranks - step : 2 * step].add_(right)
            step *= 2
    else:
        while ranks > 1:
            half = -(-ranks // 2)
            rows[: ranks - half].add_(rows[half:ranks])
            ranks = half
    return rows[0]


# ----------------------------------------------------------------------------------------------------------------------
# The norm of a gradient that lies in pieces on several ranks, with the same bits however it is cut.
#
# Where a gradient is clipped, its norm is in every weight; and a sum of squares in floating point depends on where
# the ranks' pieces end. Integers do not: every element is rounded to a multiple of 2^-24 of the largest one, and the
# squares of these whole numbers are added up exactly.


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
