"""One pass over a gradient, wherever its pieces turn up: its sketch and its squared norm.

    accumulator = new_accumulator(plan, offsets, numels)    # by what is chosen for the plan's device
    accumulator.add(3, flat)                    # the whole gradient of tensor 3
    accumulator.add(5, shard, start=1024)       # a part of tensor 5, e.g. what this rank owns of it
    sketch, squared = accumulator.take()        # and start again

Each block of the gradient is read twice in a row, the second time from the cache. Nothing is allocated in a step:
products and sums of two tensors go through a scratch of one block. Nothing here waits for the device; a stream waits
for another one that used the same tables before (:class:`~ds_silent.device.StreamOrder`).
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_silent.device import StreamOrder
from ds_silent.kernels.host import Touched, address_of, compiled
from ds_silent.kernels.launches import DTYPES, Launch, Reader, Segment, Slots, choice
from ds_silent.maths import sketch
from ds_silent.maths.mixing import place_of
from ds_silent.maths.sketch import SHIFT, SHIFTS, SketchEntry, SketchPlan

logger = logging.getLogger("ds_silent")
TOGETHER = 1 << 24  # elements that share a launch where parts come one by one: each may be temporary
Part = tuple[int, int, Tensor]
"""(tensor, first element, values)."""
EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which an accelerator multiplies elements by signs, which rounds nothing and writes no wider copy."""


@dataclass(frozen=True)
class _Work:
    """A piece and where its results go: views made once, so that a step creates as few as it can."""

    begin: int  # first element, within the tensor
    end: int
    place: SketchEntry
    square: Tensor  # 0-dim view of one slot: the squared norm, on an accelerator the norm


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

    _splits = 1  # tables that make up each one, for who writes to them side by side

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
        self._offsets, self._sketch_groups = offsets, sketch_groups
        self._groups = groups or [0] * len(numels)
        self._count = max(self._groups, default=0) + 1
        self._tables = plan.new_tables((self._count if sketch_groups else 1) * self._splits)
        tables = self._tables.unbind()
        self._table = [tables[group * self._splits if sketch_groups else 0] for group in self._groups]
        self._blocks = plan.block_rows > 1  # an accelerator, where each kernel counts, and each byte that it writes
        self._row = plan.new_tables()[0, : plan.width] if self._blocks else None
        self._scratch: dict[tuple[torch.dtype, str], Tensor] = {}
        self._signs = {torch.float32: plan.signs}
        self._work: dict[tuple[int, int, int, torch.dtype], tuple[list[int], list[_Work]]] = {}
        # One slot per piece of a whole tensor, and as many for its parts: squares are summed once, at the end.
        block = plan.block_rows * plan.width
        capacity = sum(2 * (numel // block + 4) for numel in numels)
        self._squares = torch.zeros(capacity, device=self._tables.device)
        self._square_groups = torch.zeros(capacity, dtype=torch.int64, device=self._tables.device)
        self._slots: dict[tuple[int, int, int, int], slice] = {}
        self._used, self._numels = 0, numels
        self._square_tensors = torch.zeros_like(self._square_groups)
        self._counted = torch.tensor([(1.0, place_of(tensor)) for tensor in range(len(numels))]).view(-1, 2)
        self._come_whole: set[int] = set()  # tensors
        self._whole = torch.zeros(2, len(numels), device=self._tables.device)  # what is counted of these

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
        part = index, start, values
        if not self._add_whole(part, previous, weight, square, sketching):
            self._add_by_pieces(part, previous, weight, square, sketching)

    def _add_whole(self, part: Part, previous: Tensor | None, weight: float, square: bool, sketching: bool) -> bool:
        """Do what :meth:`add` does in one call, where this kind can; return whether it has."""
        return False

    def _add_by_pieces(self, part: Part, previous: Tensor | None, weight: float, square: bool, sketching: bool) -> None:
        """Do what :meth:`add` does by torch's operations, a block at a time."""
        index, start, values = part
        if self._order is not None:
            self._order.enter()
        if not values.numel():
            return
        flat = values.detach().reshape(-1)
        before = None if previous is None else previous.detach().reshape(-1)
        dtype = flat.dtype if before is None else before.dtype
        own = dtype if self._blocks and dtype in EXACT else torch.float32
        copied = dtype != own or flat.device != self._tables.device
        lengths, works = self._work_of(index, start, flat.numel(), own)
        for work, piece in zip(works, flat.split_with_sizes(lengths), strict=True):
            if before is not None:
                memory = self._memory(dtype, "sum")[: piece.numel()]
                piece = torch.add(before[work.begin : work.end], piece, out=memory)
            if copied:
                piece = self._memory(own, "values")[: piece.numel()].copy_(piece, non_blocking=True)
            if square and self._blocks:
                torch.linalg.vector_norm(piece, dtype=torch.float32, out=work.square)
            elif square:
                torch.dot(piece, piece, out=work.square)
            if sketching:
                product = self._memory(own, "product") if self._blocks else self._memory(own, "values")
                sketch.add(work.place, piece, product, weight, self._row)

    def add_all(self, parts: Iterable[Part], square: bool = True, sketching: bool = True) -> None:
        """Add each part, as :meth:`add` does; those that come together may be read together."""
        for index, start, values in parts:
            self.add(index, values, start=start, square=square, sketching=sketching)

    def take(self) -> tuple[Tensor, Tensor]:
        """(G, k) or (1, k) sketches and (G,) squared norms since the last call; starts again from zero.

        A piece counts its last addition in the squared norm: norms, unlike sketches, do not add up over additions.
        """
        if self._order is not None:
            self._order.enter()
        sketches = self._emptied()
        squares = torch.zeros(self._count, device=self._tables.device)
        squares.index_add_(0, self._square_groups, self._squares.square() if self._blocks else self._squares)
        self._squares.zero_()
        return sketches, squares

    def zeros(self, missed: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
        """Count the tensors with a norm of exactly zero since :meth:`take`, and add up their ``place_of``; 0-dim.

        Left out are ``missed`` ones and those that come in pieces: of an embedding, a piece is zero in health.
        """
        if self._order is not None:
            self._order.enter()
        count, places = torch.where(self._squares_by_tensor() == 0.0, self._whole, 0.0).sum(1).unbind()
        if missed := [index for index in missed if index in self._come_whole]:
            count, places = count - len(missed), places - sum(map(place_of, missed))
        return count, places

    def _squares_by_tensor(self) -> Tensor:
        """Add up a tensor's slots, (n,): it may come whole in one step, and in pieces in the next."""
        squares = torch.zeros(len(self._numels), device=self._squares.device)
        return squares.index_add_(0, self._square_tensors[: self._used], self._squares[: self._used])

    def peek(self) -> Tensor:
        """(k,) sketch of everything since the last :meth:`take`."""
        if self._order is not None:
            self._order.enter()
        return self._folded().sum(0)

    def _emptied(self) -> Tensor:
        """(tables, k); the tables are zero behind it."""
        sketches = self._folded()
        self._tables.zero_()
        return sketches

    def _folded(self) -> Tensor:
        """(tables, k)"""
        return self.plan.fold(self._tables).view(-1, self._splits, self.plan.size).sum(1)

    def _work_of(self, index: int, start: int, numel: int, dtype: torch.dtype) -> tuple[list[int], list[_Work]]:
        """``dtype``: in which the elements are multiplied by their signs."""
        key = (index, start, numel, dtype)
        if key not in self._work:
            if dtype not in self._signs:
                self._signs[dtype] = self.plan.signs.to(dtype)
            pieces = self.plan.pieces(self._offsets[index] + start, numel)
            squares = self._squares[self._slots_of(index, start, numel, len(pieces))].unbind()
            places = (sketch.place(self.plan, self._table[index], piece, self._signs[dtype]) for piece in pieces)
            ends = [(piece.begin, piece.end) for piece in pieces]
            works = [_Work(*end, at, square) for end, at, square in zip(ends, places, squares, strict=True)]
            self._work[key] = [end - begin for begin, end in ends], works
        return self._work[key]

    def _slots_of(self, index: int, start: int, numel: int, pieces: int) -> slice:
        slots = self._slots.get((index, start, numel, pieces))
        if slots is None:
            slots = self._slots[index, start, numel, pieces] = slice(self._used, self._used + pieces)
            if slots.stop > len(self._squares):
                raise RuntimeError(f"tensor {index} arrived in more different parts than were planned for")
            self._used = slots.stop
            self._square_groups[slots].fill_(self._groups[index])
            self._square_tensors[slots].fill_(index)
            if pieces == 1 and numel == self._numels[index]:
                self._comes_whole(index)
        return slots

    def _comes_whole(self, index: int) -> None:
        self._come_whole.add(index)
        self._whole[:, index] = self._counted[index].to(self._whole.device)

    def _memory(self, dtype: torch.dtype, use: str) -> Tensor:
        """(block_rows * T,) of working memory, made once; on the CPU, whose block is one row, one for all of fp32."""
        key = (dtype, use if self._blocks or dtype != torch.float32 else "")
        if key not in self._scratch:
            self._scratch[key] = self.plan.new_scratch(dtype)
        return self._scratch[key]


class CompiledAccumulator(Accumulator):
    """Do the same on the CPU by one call for each tensor, which reads it once.

    Other dtypes, and elements that do not lie one behind the other, go the other way.
    """

    def __init__(self, plan: SketchPlan, *arguments: Any, **named: Any):
        super().__init__(plan, *arguments, **named)
        functions = compiled()
        self._readers, self._fold = functions.readers, functions.fold
        self._table_of = self._groups if self._sketch_groups else [0] * len(self._groups)
        self._touched: Touched = (ctypes.c_uint8 * len(self._tables))()
        self._signs_read = plan.signs.to(torch.int8)
        self._shape = self._signs_read.data_ptr(), plan.width, SHIFT, SHIFTS
        self._places: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}

    def _add_whole(self, part: Part, previous: Tensor | None, weight: float, square: bool, sketching: bool) -> bool:
        index, start, values = part
        count = values.numel()
        read = self._readers.get((values.dtype, None if previous is None else previous.dtype))
        at, before = address_of(values), None if previous is None else address_of(previous)
        if read is None or not at or before == 0:
            self._touched[self._table_of[index]] |= self.plan.blocks_of(self._offsets[index] + start, count)
            return False
        offset, table, slot, blocks = self._places.get((index, start, count)) or self._place(index, start, count)
        self._touched[self._table_of[index]] |= blocks
        to = table if sketching else None, *self._shape, weight, slot if square else None
        read(at, before, count, offset, *to)
        return True

    def _emptied(self) -> Tensor:
        return self._fold(self._tables, self._touched, self.plan.size)

    def _place(self, index: int, start: int, count: int) -> tuple[int, int, int, int]:
        """Return the offset of a part of a tensor, the addresses of its table and of its square, and its blocks."""
        slot = self._squares.data_ptr() + 4 * self._slots_of(index, start, count, 1).start
        offset, table = self._offsets[index] + start, self._table[index].data_ptr()
        place = self._places[index, start, count] = offset, table, slot, self.plan.blocks_of(offset, count)
        return place


class FusedAccumulator(Accumulator):
    """Do the same by one launch for each tensor, or for many where they come together.

    Other dtypes, and elements that do not lie one behind the other, go the other way.

    Attributes:
        refused: what Triton said at a launch, since when the kernel is used no more; None as long as it is used.
    """

    def __init__(self, plan: SketchPlan, *arguments: Any, **named: Any):
        self._reader = Reader(plan)
        self._splits = self._reader.splits
        super().__init__(plan, *arguments, **named)
        self._planned: dict[tuple[tuple[int, int, int], ...], Launch] = {}
        self._row_of: dict[tuple[int, int, int], int] = {}  # of _squares_read, for each part
        self._squares_read = self._new_squares(len(self._groups) + 1)
        self._groups_read: list[int] = []
        self._tensors_read: list[int] = []
        self._read_of: Tensor | None = None  # the same, int64 (rows of _squares_read,)
        self._membership: Tensor | None = None  # bool (G, rows of _squares_read)
        self.refused: str | None = None

    def _add_whole(self, part: Part, previous: Tensor | None, weight: float, square: bool, sketching: bool) -> bool:
        taken = self._takes(part[2]) and (previous is None or self._takes(previous))
        return taken and self._read([part], square, sketching, previous, weight)

    def add_all(self, parts: Iterable[Part], square: bool = True, sketching: bool = True) -> None:
        """See :meth:`Accumulator.add_all`. A launch takes the host 0.2 ms: all of a list is read by one."""
        waiting: dict[torch.dtype, list[Part]] = {}
        elements, most = 0, math.inf if isinstance(parts, list) else TOGETHER
        for index, start, values in parts:
            if not self._takes(values):
                self.add(index, values, start=start, square=square, sketching=sketching)
                continue
            waiting.setdefault(values.dtype, []).append((index, start, values))
            elements += values.numel()
            if elements >= most:
                self._read_all(waiting, square, sketching)
                elements = 0
        self._read_all(waiting, square, sketching)

    def take(self) -> tuple[Tensor, Tensor]:
        """See :meth:`Accumulator.take`."""
        sketches, squares = super().take()
        used = len(self._groups_read)
        if used:
            if self._membership is None or self._membership.shape[1] != used:
                groups = torch.tensor(self._groups_read)
                self._membership = (groups == torch.arange(self._count)[:, None]).to(self._squares_read.device)
            # sums in a fixed order: index_add_ has none on a GPU
            squares += torch.where(self._membership, self._squares_read[:used].sum(1), 0.0).sum(1)
            self._squares_read[:used].zero_()
        return sketches, squares

    def _squares_by_tensor(self) -> Tensor:
        squares, used = super()._squares_by_tensor(), len(self._tensors_read)
        if not used:
            return squares
        if self._read_of is None or len(self._read_of) != used:
            self._read_of = torch.tensor(self._tensors_read, device=squares.device)
        return squares.index_add_(0, self._read_of, self._squares_read[:used].sum(1))

    def _takes(self, values: Tensor) -> bool:
        return (
            self.refused is None
            and values.dtype in DTYPES
            and values.device == self._squares_read.device
            and values.is_contiguous()
            and values.numel() > 0
        )

    def _read_all(self, waiting: dict[torch.dtype, list[Part]], square: bool, sketching: bool) -> None:
        for parts in waiting.values():
            if not self._read(parts, square, sketching):
                for part in parts:
                    self._add_by_pieces(part, None, 1.0, square, sketching)
        waiting.clear()

    def _read(
        self, parts: list[Part], square: bool, sketching: bool, previous: Tensor | None = None, weight: float = 1.0
    ) -> bool:
        """Read them by the kernel; return whether it has."""
        if self._order is not None:
            self._order.enter()
        key = tuple((index, start, values.numel()) for index, start, values in parts)
        launch = self._planned.get(key)
        if launch is None:
            launch = self._planned[key] = self._reader.launch([self._segment(place) for place in key])
        slots = Slots(self._squares_read if square else None)
        tables = self._tables if sketching else None
        try:
            self._reader(launch, [values.detach() for _, _, values in parts], tables, slots, previous, weight)
        except Exception as error:  # a launch that fails has written nothing
            self.refused = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            logger.warning("gradients are read by torch from now on: Triton's kernel failed (%s)", self.refused)
            return False
        return True

    def _segment(self, place: tuple[int, int, int]) -> Segment:
        index, start, numel = place
        if place not in self._row_of:
            self._row_of[place] = len(self._groups_read)
            self._groups_read.append(self._groups[index])
            self._tensors_read.append(index)
            if numel == self._numels[index]:
                self._comes_whole(index)
            if len(self._groups_read) > len(self._squares_read):
                self._squares_read = torch.cat((self._squares_read, self._new_squares(len(self._squares_read))))
        begin, group = self._offsets[index] + start, self._groups[index] if self._sketch_groups else 0
        return Segment(begin, begin + numel, group, self._row_of[place])

    def _new_squares(self, count: int) -> Tensor:
        return torch.zeros(count, self._reader.splits * self._reader.blocks, device=self.plan.signs.device)


def new_accumulator(plan: SketchPlan, *arguments: Any) -> Accumulator:
    """Make an :class:`Accumulator` of these arguments for the plan's device."""
    kinds = {"triton": FusedAccumulator, "compiled": CompiledAccumulator, "torch": Accumulator}
    return kinds[choice(plan.signs.device).by](plan, *arguments)
