"""What one rank answers for where every rank holds the whole aggregated gradient: an N-th of it, so that the ranks'
shares make up the whole, once.

    share = nth_share(numels, rank=1, ranks=4)
    cut(gradient, share[0])               # flat values of a piece
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ds_silent.maths.sketch import offsets_of


@dataclass(frozen=True)
class Slice:
    """A run of one parameter's elements that this rank answers for."""

    index: int  # of the parameter
    start: int
    numel: int


def nth_share(numels: list[int], rank: int, ranks: int) -> list[Slice]:
    """Of all parameters one after the other: elements ``rank * D / ranks`` to ``(rank + 1) * D / ranks``."""
    offsets, total = offsets_of(numels)
    begin, end = rank * total // ranks, (rank + 1) * total // ranks
    slices = []
    for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        low, high = max(begin - offset, 0), min(end - offset, numel)
        if low < high:
            slices.append(Slice(index, low, high - low))
    return slices


def cut(values: Tensor | None, piece: Slice) -> Tensor | None:
    """The elements of a piece, flat; None stays None."""
    return None if values is None else values.detach().reshape(-1)[piece.start : piece.start + piece.numel]
