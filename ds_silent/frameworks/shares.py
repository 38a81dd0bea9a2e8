"""What one rank answers for where every rank holds the whole aggregated gradient: an N-th of it, so that the ranks'
shares make up the whole, once.

    share = nth_share(numels, rank=1, ranks=4, rows=[row_of(parameter) for parameter in parameters])
    cut(gradient, share[0])               # values of a piece, in their order

A share begins and ends between two rows, so that each piece is a view of the gradient, however that lies in memory
(``channels_last``, transposed, expanded). A copy would have another address at each look, which says that a script has
written to the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_silent.maths.sketch import offsets_of


@dataclass(frozen=True)
class Slice:
    """A run of one parameter's elements that this rank answers for."""

    index: int  # of the parameter
    start: int
    numel: int


def row_of(parameter: Tensor) -> int:
    """Elements behind one index of the first dimension that has several."""
    return parameter.numel() // _first_long(parameter)[1]


def _first_long(values: Tensor) -> tuple[int, int]:
    """(dimension, its size), (0, 1) without one."""
    return next(((dim, size) for dim, size in enumerate(values.shape) if size > 1), (0, 1))


def nth_share(numels: Sequence[int], rank: int, ranks: int, rows: Sequence[int] = ()) -> list[Slice]:
    """Of all parameters one after the other: elements ``rank * D / ranks`` to ``(rank + 1) * D / ranks``.

    Args:
        numels: elements of each parameter.
        rank, ranks: whose share, and of how many.
        rows: elements of a row of each, which is never divided; by default one.
    """
    offsets, total = offsets_of(list(numels))
    begin, end = rank * total // ranks, (rank + 1) * total // ranks
    slices = []
    for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        row = max(rows[index], 1) if rows else 1
        low, high = (
            numel if bound >= offset + numel else max(bound - offset, 0) // row * row for bound in (begin, end)
        )
        if low < high:
            slices.append(Slice(index, low, high - low))
    return slices


def cut(values: Tensor | None, piece: Slice) -> Tensor | None:
    """The elements of a piece, a view where it consists of whole rows or the values are contiguous; None stays None."""
    if values is None:
        return None
    values = values.detach()
    if not values.is_contiguous():
        dim, size = _first_long(values)
        row = values.numel() // size
        if piece.start % row == 0 and piece.numel % row == 0:
            return values.narrow(dim, piece.start // row, piece.numel // row)
    return values.reshape(-1)[piece.start : piece.start + piece.numel]


class Applied:
    """Which pieces each optimizer applies.

    What no optimizer holds goes with the first, as if it applied its gradient as it is: another optimizer, which the
    observer was not given, may hold it, and if nobody does, that is a finding of its own.
    """

    def __init__(self, pieces: Sequence[tuple[Tensor, Slice]], optimizers: Sequence[Any]):
        """``pieces``: with the parameters that they are of."""
        self._pieces, self._optimizers = pieces, optimizers
        self._groups: tuple[tuple[int, int], ...] = ()
        self._of: dict[int, list[tuple[Tensor, Slice]]] = {}

    def by(self, optimizer: Any) -> Iterable[tuple[Tensor, Slice]]:
        """Found once for as long as the groups stay."""
        held = [group["params"] for one in self._optimizers for group in one.param_groups]
        groups = tuple((id(parameters), len(parameters)) for parameters in held)
        if groups != self._groups:
            self._groups, self._of = groups, {id(one): [] for one in self._optimizers}
            owner = {id(p): id(one) for one in self._optimizers for group in one.param_groups for p in group["params"]}
            for parameter, piece in self._pieces:
                self._of[owner.get(id(parameter), id(self._optimizers[0]))].append((parameter, piece))
        return self._of.get(id(optimizer), ())
