"""What is done to numbers: a flipped bit, or noise of a known size. In place, and reproducible.

add_noise(values, 0.05, generator)        # of 0.05 times their norm
flip_bit(values, element, bit=30)         # the top exponent bit of an fp32 number
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORDS = {2: torch.int16, 4: torch.int32}
"""Integers by the bytes of a number."""


def flip_bit(values: Tensor, element: int, bit: int) -> None:
    """One bit of one element of a flat tensor, in place; bit 0 is the lowest, the highest the sign."""
    width = 8 * values.element_size()
    mask = 1 << bit if bit < width - 1 else -(1 << bit)
    values.detach().view(WORDS[values.element_size()])[element] ^= mask


def top_exponent_bit(values: Tensor) -> int:
    """Of 2- and 4-byte numbers: 0 in every number below 2 in size; flipped, it makes one above 2, often far above."""
    return 8 * values.element_size() - 2


def lowest_exponent_bit(values: Tensor) -> int:
    """Of fp32 and bf16, which have 8 bits of it; flipped, it makes twice or half."""
    return 8 * values.element_size() - 9


def local_of(value: Any) -> Any:
    """What this rank holds of a sharded tensor; anything else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def noise_like(values: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Random numbers of ``size`` times the norm of ``values``, and of their type."""
    noise = torch.randn(values.shape, generator=generator)
    return (noise * (size * float(values.float().norm()) / float(noise.norm()))).to(values)


def add_noise(values: Tensor, size: float, generator: torch.Generator) -> None:
    """Of ``size`` times their norm, in place."""
    values.add_(noise_like(values, size, generator))
