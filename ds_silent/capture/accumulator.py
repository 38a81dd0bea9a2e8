"""One pass over a gradient, wherever its pieces turn up: its sketch and its squared norm.

The norm itself, of all pieces together and without the loss scale, is made of it by :mod:`ds_silent.measure.record`.

    accumulator = Accumulator(plan, offsets, numels)
    accumulator.add(3, flat)                    # the whole gradient of tensor 3
    accumulator.add(5, shard, start=1024)       # a part of tensor 5, e.g. what this rank owns of it
    sketch, squared = accumulator.take()        # and start again

Each block of the gradient is read twice in a row, the second time from the cache. Nothing of the gradient's size is
allocated: 16-bit gradients and sums of two tensors go through a scratch of one block. Nothing here waits for the
device; a stream waits for another one that used the same tables before, see :mod:`ds_silent.capture.streams`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.capture.streams import StreamOrder
from ds_silent.maths import sketch
from ds_silent.maths.sketch import Place, SketchPlan


@dataclass(frozen=True)
class _Work:
    """A piece and where its results go: views made once, so that a step creates as few as it can."""

    begin: int  # first element, within the tensor
    end: int
    place: Place
    square: Tensor  # 0-dim view of one slot


class Accumulator:
    """Sketch tables and squared norms of tensors that arrive piece by piece.

    Args:
        plan: of the sketch; ``plan.numel`` covers every tensor at its offset.
        offsets: of the tensors in the long vector.
        numels: of the tensors.
        groups: the group (layer) of each tensor, 0..G-1; squares are kept per group.
        sketch_groups: keep sketches per group too, at 4 T bytes each.
        order: of the streams on which it is used; None where there is one only.
    """

    def __init__(
        self,
        plan: SketchPlan,
        offsets: list[int],
        numels: list[int],
        groups: list[int] | None = None,
        sketch_groups: bool = False,
        order: StreamOrder | None = None,
    ):
        self.plan, self._order = plan, order
        self._offsets = offsets
        self._groups = groups or [0] * len(numels)
        self._count = max(self._groups, default=0) + 1
        self._tables = plan.new_tables(self._count if sketch_groups else 1)
        tables = self._tables.unbind()
        self._table = [tables[group if sketch_groups else 0] for group in self._groups]
        self._scratch = plan.new_scratch()
        self._product = plan.new_scratch() if plan.block_rows > 1 else self._scratch
        self._sum_scratch: dict[torch.dtype, Tensor] = {torch.float32: self._scratch}
        self._work: dict[tuple[int, int, int], list[_Work]] = {}
        # One slot per piece of a whole tensor, and as many for its parts: squares are summed once, at the end.
        block = plan.block_rows * plan.width
        capacity = sum(2 * (numel // block + 4) for numel in numels)
        self._squares = torch.zeros(capacity, device=self._tables.device)
        self._square_groups = torch.zeros(capacity, dtype=torch.int64, device=self._tables.device)
        self._used = 0

    def add(
        self,
        index: int,
        values: Tensor,
        previous: Tensor | None = None,
        start: int = 0,
        weight: float = 1.0,
        square: bool = True,
        sketching: bool = True,
    ) -> None:
        """Add ``weight * (previous + values)`` to the sketch, and its squared norm.

        Args:
            index: which tensor.
            values: elements ``start`` to ``start + values.numel()`` of it, any shape, any floating dtype.
            previous: the same elements accumulated so far; the sum is rounded to its dtype, as accumulation does.
            square: False leaves the squared norm out.
            sketching: False leaves the sketch out.
        """
        if self._order is not None:
            self._order.enter()
        flat = values.detach().reshape(-1)
        before = None if previous is None else previous.detach().reshape(-1)
        dtype = flat.dtype if before is None else before.dtype
        copied = dtype != torch.float32 or flat.device != self._tables.device
        for work in self._work_of(index, start, flat.numel()):
            part = flat[work.begin : work.end]
            if before is not None:
                part = torch.add(before[work.begin : work.end], part, out=self._sum(dtype, part.numel()))
            if copied:
                part = self._scratch[: part.numel()].copy_(part, non_blocking=True)
            if square:
                torch.dot(part, part, out=work.square)
            if sketching:
                sketch.add(work.place, part, self._product, weight)

    def take(self) -> tuple[Tensor, Tensor]:
        """(G, k) or (1, k) sketches and (G,) squared norms since the last call; starts again from zero.

        A piece counts its last addition in the squared norm: norms, unlike sketches, do not add up over additions.
        """
        if self._order is not None:
            self._order.enter()
        sketches = self.plan.fold(self._tables)
        squares = torch.zeros(self._count, device=self._tables.device)
        squares.index_add_(0, self._square_groups, self._squares)
        self._tables.zero_()
        self._squares.zero_()
        return sketches, squares

    def peek(self) -> Tensor:
        """(k,) sketch of everything since the last :meth:`take`."""
        if self._order is not None:
            self._order.enter()
        return self.plan.fold(self._tables.sum(0))

    def _work_of(self, index: int, start: int, numel: int) -> list[_Work]:
        key = (index, start, numel)
        work = self._work.get(key)
        if work is None:
            pieces = self.plan.pieces(self._offsets[index] + start, numel)
            slots = slice(self._used, self._used + len(pieces))
            if slots.stop > len(self._squares):
                raise RuntimeError(f"tensor {index} arrived in more different parts than were planned for")
            self._used = slots.stop
            self._square_groups[slots].fill_(self._groups[index])
            squares = self._squares[slots].unbind()
            places = (sketch.place(self.plan, self._table[index], piece) for piece in pieces)
            ends = ((piece.begin, piece.end) for piece in pieces)
            work = [_Work(*end, at, square) for end, at, square in zip(ends, places, squares, strict=True)]
            self._work[key] = work
        return work

    def _sum(self, dtype: torch.dtype, numel: int) -> Tensor:
        if dtype not in self._sum_scratch:
            self._sum_scratch[dtype] = torch.empty_like(self._scratch, dtype=dtype)
        return self._sum_scratch[dtype][:numel]
