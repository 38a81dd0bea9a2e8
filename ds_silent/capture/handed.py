"""Whether a script changed gradients between the reduction and the step, told without reading them again.

    before = remember(parts)             # the reduction has ended
    moved(before, parts)                 # the step begins: other tensors, or written to in a way that torch counts
    differs(before, parts)               # a few elements of every tensor have other bits, on the device

Clipping and its like are the script's own business: what is reduced is looked at before, what is applied after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 8  # elements of each tensor


@dataclass(frozen=True)
class Remembered:
    """Of pieces of a gradient, which are not kept."""

    places: tuple[tuple[int, int], ...]  # where each lies, and how often torch has seen it written to
    few: Tensor | None  # elements of all, one after the other


def remember(values: Sequence[Tensor]) -> Remembered:
    """Pieces of any shape and floating dtype, on one device."""
    return Remembered(_places(values), _few(values))


def moved(before: Remembered, values: Sequence[Tensor]) -> bool:
    """Whether the pieces are others, or were written to since; ``tensor.data`` hides from this."""
    return _places(values) != before.places


def differs(before: Remembered, values: Sequence[Tensor]) -> Tensor | None:
    """fp32 (): 1 where a few elements differ, else 0; NaN differs from itself. None where there are no pieces.

    Scaling shows in every element that is not zero; what is written behind autograd's back to single elements may not.
    """
    few = _few(values)
    if few is None or before.few is None:
        return None
    return (few != before.few).any().float()


def _places(values: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((value.data_ptr(), 0 if value.is_inference() else value._version) for value in values)


def _few(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([_some(value) for value in values]) if values else None


def _some(value: Tensor) -> Tensor:
    """Elements that are spread evenly: one view of a contiguous tensor, because this is done for each at every step."""
    step, count = max(1, value.numel() // FEW), min(FEW, value.numel())
    if value.is_contiguous() and not value.requires_grad:
        return value.as_strided((count,), (step,))
    return value.detach().reshape(-1)[::step][:FEW]
