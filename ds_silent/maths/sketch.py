"""A linear sketch of a gradient: k numbers from which norms, cosines and checksums follow.

    plan = make_plan(numel=total, size=16384, device=device)
    tables, scratch = plan.new_tables(), plan.new_scratch()
    for piece in plan.pieces(offset, flat.numel()):     # flat: one parameter's gradient, at its global offset
        add(place(plan, tables[0], piece), flat[piece.begin : piece.end], scratch)
    sketch = plan.fold(tables[0])                       # (k,) fp32

All parameters of a model are seen as one long vector x of D elements. Element p lies in row p // T and column
p % T. It is added to bucket column % k with the sign L[8 * row + column], where L is one long random +-1 vector that
every row reads at its own shift:

    sketch(x)_j = sum over rows, and over columns == j (mod k), of L[8 row + column] * x[row, column]

This is linear in x: sketches of parts (parameters, buckets, shards, micro-batches, ranks) add up to the sketch of
the whole, whatever the parts, if each part is laid at its own global offset. Inner products survive:
E<s(x), s(y)> = <x, y>, and the error of a cosine c is (1 - c^2) / sqrt(k_effective) (:func:`cosine_error`).

The construction is a count sketch (Charikar, Chen, Farach-Colton 2002) whose hashing is laid out so that it runs as
additions of rows at memory bandwidth. Two rows meet in every column, and rows of one layer's gradient can be nearly
parallel (the output layer's rows of tokens that do not occur are multiples of each other). With one sign per row
their products add up coherently: measured on such a layer, the error was 1.9 times the theory's. Shifted signs make
the products' signs independent in every column. T is about 8 k, so that folding rows adds little to the error, and 8
times a prime, so that rows of 16-bit elements stay aligned and no layer's width divides T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SEED = 0x5117E27  # the same on every rank: sketches of different seeds cannot be compared
WIDTH_FACTOR = 8  # T is about WIDTH_FACTOR * k: rows that share a column add 1/T to the variance 1/k
SHIFT = 8  # of the signs from one row to the next; keeps 16-byte alignment
BLOCK_BYTES = 1 << 24  # of fp32 rows: with their product 33 MB, and half of that in 16 bits
SHIFTS = 1 << 16  # rows until a shift is used again; far too few pairs to matter, and L stays small


@dataclass(frozen=True)
class Piece:
    """A run of one flat tensor that lies in whole rows, or inside one row, of the long vector."""

    begin: int  # first element, within the flat tensor
    end: int
    row: int
    rows: int  # 1 for a part of a row
    column: int  # 0 for whole rows


@dataclass(frozen=True)
class SketchPlan:
    """Signs and shape of the sketch; one per model and device, fp32."""

    numel: int  # D
    size: int  # k
    width: int  # T
    signs: Tensor  # L, (T + SHIFT * rows,)
    block_rows: int  # rows handled at once

    def new_tables(self, count: int = 1) -> Tensor:
        """(count, T + rest) fp32 zeros. The rest makes rows a multiple of k long, for :meth:`fold`; it stays zero."""
        length = -(-self.width // self.size) * self.size
        return torch.zeros(count, length, dtype=torch.float32, device=self.signs.device)

    def new_scratch(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(block_rows * T,) working memory: of :func:`add`, and for gradients that must be converted first."""
        return torch.empty(self.block_rows * self.width, dtype=dtype, device=self.signs.device)

    def pieces(self, offset: int, numel: int) -> tuple[Piece, ...]:
        """How a flat tensor of ``numel`` elements at global ``offset`` falls into rows."""
        return tuple(_pieces(offset, numel, self.width, self.block_rows))

    def blocks_of(self, offset: int, numel: int) -> int:
        """Tell by bits which of a table's blocks of k columns, 8 at most, a flat tensor at ``offset`` is added to."""
        first, last = offset % self.width, (offset + numel - 1) % self.width
        begin, end = 1 << first // self.size, 2 << last // self.size
        every = 2 << (self.width - 1) // self.size
        if numel == 0 or numel >= self.width:
            return every - 1 if numel else 0
        return end - begin if first <= last else every - begin | end - 1

    def fold(self, table: Tensor) -> Tensor:
        """(..., T) or (..., T + rest) accumulated tables to (..., k) sketches, fp32."""
        return fold(table, self.size)


def make_plan(numel: int, size: int, device: torch.device | str = "cpu", seed: int = SEED) -> SketchPlan:
    """The plan of a sketch of ``size`` numbers for a vector of ``numel`` elements.

    Args:
        numel: length D of the long vector (parameters at offsets that are multiples of 8, see :func:`offsets_of`).
        size: k, a power of two.
        device: where the gradients are.
        seed: of the signs. Drawn on the CPU, so every device type gets the same signs.
    """
    width = 8 * _largest_prime_below(WIDTH_FACTOR * size // 8)
    rows = max(1, math.ceil(numel / width))
    length = width + SHIFT * min(rows, SHIFTS)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (length,), generator=generator, dtype=torch.int8).mul_(2).sub_(1).float()
    # On the CPU one row fits the cache. An accelerator wants fewer, larger kernels, whose second look at the block,
    # and at its product with the signs, still comes from its cache.
    block_rows = 1 if torch.device(device).type == "cpu" else max(1, BLOCK_BYTES // (4 * width))
    return SketchPlan(numel, size, width, signs.to(device), block_rows)


def offsets_of(numels: list[int]) -> tuple[list[int], int]:
    """Global offsets of tensors laid one after the other, each aligned to 8 elements, and the total length."""
    offsets, position = [], 0
    for numel in numels:
        offsets.append(position)
        position += -(-numel // 8) * 8
    return offsets, position


@dataclass(frozen=True)
class SketchEntry:
    """Where a piece of the long vector goes, as views that are made once."""

    table: Tensor  # the columns of a table that it is added to
    signs: Tensor  # of its elements: (elements,), or (rows, T) for whole rows


def place(plan: SketchPlan, table: Tensor, piece: Piece, signs: Tensor | None = None) -> SketchEntry:
    """The place of ``piece`` in a table of :meth:`SketchPlan.new_tables`; ``signs``: the plan's, in another dtype."""
    signs = plan.signs if signs is None else signs
    shift = SHIFT * (piece.row % SHIFTS)
    if piece.rows == 1:
        columns = slice(piece.column, piece.column + piece.end - piece.begin)
        return SketchEntry(table[columns], signs[shift:][columns])
    rows = signs.as_strided((piece.rows, plan.width), (SHIFT, 1), signs.storage_offset() + shift)
    return SketchEntry(table[: plan.width], rows)


def add(at: SketchEntry, values: Tensor, scratch: Tensor, weight: float = 1.0, row: Tensor | None = None) -> None:
    """table += weight * (signed rows of ``values``), in place.

    Args:
        at: of the piece.
        values: its elements, contiguous, (piece.end - piece.begin,), of the dtype of ``at.signs``. A product with a
            sign is exact in each; what is added up is fp32.
        scratch: working memory of that dtype and of at least ``values.numel()`` elements; may be where ``values`` lies.
        weight: +1 or -1 (to take something out again: the sketch is linear).
        row: (T,) fp32 working memory for pieces of several rows; None allocates it.
    """
    if at.signs.ndim == 1 and values.dtype == torch.float32:
        at.table.addcmul_(values, at.signs, value=weight)
        return
    shape = at.signs.shape
    product = torch.mul(values.view(shape), at.signs, out=scratch[: values.numel()].view(shape))
    if at.signs.ndim == 2:
        product = torch.sum(product, 0, dtype=torch.float32, out=row)
    at.table.add_(product, alpha=weight)


def sketch_of(plan: SketchPlan, flat: Tensor, offset: int = 0) -> Tensor:
    """The (k,) sketch of one flat tensor at a global offset: the definition in one call, for tests and small uses."""
    table, scratch = plan.new_tables()[0], plan.new_scratch()
    for piece in plan.pieces(offset, flat.numel()):
        add(place(plan, table, piece), flat[piece.begin : piece.end].float(), scratch)
    return plan.fold(table)


def fold(signed: Tensor, size: int) -> Tensor:
    """(..., m) to (..., size): element i is added to bucket i % size. Folding in two steps equals folding in one."""
    rest = -signed.shape[-1] % size
    padded = torch.nn.functional.pad(signed, (0, rest)) if rest else signed
    return padded.view(*signed.shape[:-1], -1, size).sum(-2)


def effective_size(size: int) -> float:
    """k of an ideal sketch with the same error: folding rows into T columns first adds 1/T to the variance 1/k."""
    return 1.0 / (1.0 / size + 1.0 / (WIDTH_FACTOR * size))


def cosine_error(cosine: float, size: int) -> float:
    """Standard error of one pairwise cosine estimated from sketches of ``size`` numbers."""
    return (1.0 - cosine * cosine) / math.sqrt(effective_size(size))


def _pieces(offset: int, numel: int, width: int, block_rows: int) -> Iterator[Piece]:
    position, end = offset, offset + numel
    while position < end:
        row, column = divmod(position, width)
        whole_rows = 0 if column else min((end - position) // width, block_rows)
        # a block of rows must not run over the end of the shifts
        whole_rows = min(whole_rows, SHIFTS - row % SHIFTS)
        length = whole_rows * width if whole_rows else min(width - column, end - position)
        begin = position - offset
        yield Piece(begin, begin + length, row, max(1, whole_rows), column)
        position += length


def _largest_prime_below(limit: int) -> int:
    candidate = limit - 1
    while any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
        candidate -= 1
    return candidate
