"""A linear sketch of a gradient: k numbers from which norms, cosines and checksums follow.

    plan = make_plan(numel=total, size=16384, device=device)
    table, squares = plan.new_table(), torch.zeros(len(pieces))
    for piece in plan.pieces(offset, flat.numel()):     # flat: one parameter's gradient, at its global offset
        ...                                             # see `add`
    sketch = plan.fold(table)                           # (k,) fp32

All parameters of a model are seen as one long vector x of D elements. Element p lies in row p // T and column
p % T; it is counted with the sign r[row] * c[column] into bucket column % k. So

    sketch(x)_j = sum over columns == j (mod k) of c[column] * sum over rows of r[row] * x[row, column]

which is linear in x: sketches of parts (parameters, buckets, shards, micro-batches, ranks) add up to the sketch of
the whole, whatever the parts, if each part is laid at its own global offset. Inner products survive:
E<s(x), s(y)> = <x, y>, and the error of a cosine c is (1 - c^2) / sqrt(k_effective) (:func:`cosine_error`).

T is 8 times a prime: rows of a linear layer's gradient are nearly parallel, and a T that shares a large factor
with the layer's width would lay them on top of each other, which multiplies the error; the factor 8 keeps
16-bit rows aligned to 16 bytes. Source of the construction: count sketch (Charikar, Chen, Farach-Colton 2002) with
structured hashing, so that it runs as row additions at memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SEED = 0x5117E27  # the same on every rank: sketches of different seeds cannot be compared
WIDTH_FACTOR = 8  # T is about WIDTH_FACTOR * k, so folding to k adds the error that matters and rows almost none


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
    """Signs and shape of the sketch; one per model and device. All tensors are fp32 on ``device``."""

    numel: int  # D
    size: int  # k
    width: int  # T
    row_signs: Tensor  # (R,)
    row_signs_host: tuple[float, ...]  # the same as Python floats: a scalar factor costs no device read
    column_signs: Tensor  # (T,)
    block_rows: int  # rows handled at once, so that a second look at them comes from the cache

    def new_table(self) -> Tensor:
        """A zeroed (T,) fp32 accumulator."""
        return torch.zeros(self.width, dtype=torch.float32, device=self.row_signs.device)

    def new_scratch(self) -> Tensor:
        """(block_rows * T,) fp32 working memory for gradients that are not fp32, or are a sum of two tensors."""
        return torch.empty(self.block_rows * self.width, dtype=torch.float32, device=self.row_signs.device)

    def pieces(self, offset: int, numel: int) -> tuple[Piece, ...]:
        """How a flat tensor of ``numel`` elements at global ``offset`` falls into rows."""
        return tuple(_pieces(offset, numel, self.width, self.block_rows))

    def fold(self, table: Tensor) -> Tensor:
        """(T,) or (L, T) accumulated table(s) to (k,) or (L, k) sketch(es), fp32."""
        return fold(table * self.column_signs, self.size)


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
    generator = torch.Generator().manual_seed(seed)
    row_signs = torch.randint(0, 2, (rows,), generator=generator).mul_(2).sub_(1).float()
    column_signs = torch.randint(0, 2, (width,), generator=generator).mul_(2).sub_(1).float()
    on_host = torch.device(device).type == "cpu"
    block_bytes = (1 << 20) if on_host else (1 << 25)  # half of a CPU core's L2; well inside an accelerator's
    return SketchPlan(
        numel=numel,
        size=size,
        width=width,
        row_signs=row_signs.to(device),
        row_signs_host=tuple(row_signs.tolist()),
        column_signs=column_signs.to(device),
        block_rows=max(1, block_bytes // (4 * width)),
    )


def offsets_of(numels: list[int]) -> tuple[list[int], int]:
    """Global offsets of tensors laid one after the other, each aligned to 8 elements, and the total length."""
    offsets, position = [], 0
    for numel in numels:
        offsets.append(position)
        position += -(-numel // 8) * 8
    return offsets, position


def add(plan: SketchPlan, table: Tensor, piece: Piece, values: Tensor, weight: float = 1.0) -> None:
    """table += weight * (signed rows of ``values``), in place.

    Args:
        table: (T,) fp32.
        values: the piece's elements, fp32, contiguous, (piece.end - piece.begin,).
        weight: +1 or -1 (to take something out again: the sketch is linear).
    """
    if piece.rows == 1:
        part = table[piece.column : piece.column + piece.end - piece.begin]
        part.add_(values, alpha=weight * plan.row_signs_host[piece.row])
    else:
        signs = plan.row_signs[piece.row : piece.row + piece.rows]
        table.addmv_(values.view(piece.rows, plan.width).t(), signs, alpha=weight)


def sketch_of(plan: SketchPlan, flat: Tensor, offset: int = 0) -> Tensor:
    """The (k,) sketch of one flat tensor at a global offset: the definition in one call, for tests and small uses."""
    table = plan.new_table()
    for piece in plan.pieces(offset, flat.numel()):
        add(plan, table, piece, flat[piece.begin : piece.end].float())
    return plan.fold(table)


def fold(signed: Tensor, size: int) -> Tensor:
    """(..., m) to (..., size): element i is added to bucket i % size. Folding in two steps equals folding in one."""
    length = signed.shape[-1]
    padded = torch.nn.functional.pad(signed, (0, -length % size))
    return padded.view(*signed.shape[:-1], -1, size).sum(-2)


def effective_size(size: int) -> float:
    """k of an ideal sketch with the same error: folding rows into T columns first adds 1/T to the variance 1/k."""
    return 1.0 / (1.0 / size + 1.0 / (WIDTH_FACTOR * size))


def cosine_error(cosine: float, size: int) -> float:
    """Standard error of one pairwise cosine estimated from sketches of ``size`` numbers."""
    return (1.0 - cosine * cosine) / math.sqrt(effective_size(size))


def norm_error(size: int) -> float:
    """Relative standard error of an L2 norm estimated from a sketch of ``size`` numbers."""
    return 1.0 / math.sqrt(2.0 * effective_size(size))


def _pieces(offset: int, numel: int, width: int, block_rows: int) -> Iterator[Piece]:
    position, end = offset, offset + numel
    while position < end:
        row, column = divmod(position, width)
        whole_rows = 0 if column else min((end - position) // width, block_rows)
        length = whole_rows * width if whole_rows else min(width - column, end - position)
        begin = position - offset
        yield Piece(begin, begin + length, row, max(1, whole_rows), column)
        position += length


def _largest_prime_below(limit: int) -> int:
    candidate = limit - 1
    while any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
        candidate -= 1
    return candidate
