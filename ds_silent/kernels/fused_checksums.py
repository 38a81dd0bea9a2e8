"""Checksums of many tensors in one launch of the kernel, where it is chosen: :mod:`ds_silent.kernels.checksums` asks.

together = new_checksums(sizes, device)      # None where torch's operations do it
taken = together(tensors)                    # checksums of those that the kernel takes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_silent.kernels.fused import choice, logger
from ds_silent.kernels.keys import ROW, Taken
from ds_silent.maths.sketch import make_plan, offsets_of

if TYPE_CHECKING:
    from ds_silent.kernels.launches import Launch

WORD = 4  # bytes of an element: the bits of every dtype are read as int32
SKETCH_SIZE = 16_384  # any: the kernel's columns follow from it, and no sketch is made


def new_checksums(sizes: Sequence[int], device: torch.device) -> FusedChecksums | None:
    """For tensors of so many bytes on this device."""
    return FusedChecksums(sizes, device) if sizes and choice(device).triton else None


class FusedChecksums:
    """See the module docstring."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        from ds_silent.kernels import launches

        self._launches, self._device = launches, device
        self._reader = launches.Reader(make_plan(1, SKETCH_SIZE, device), keys=max(sizes) // (8 * ROW) + 1)
        self._words = [size // WORD for size in sizes]
        self._offsets, _ = offsets_of(self._words)
        columns = self._reader.splits * self._reader.blocks
        self._checks = torch.zeros(len(sizes), columns, dtype=torch.int64, device=device)
        self._planned: dict[tuple[int, ...], tuple[Launch, Tensor]] = {}
        self._refused = False

    def __call__(self, tensors: Sequence[Tensor | None]) -> Taken:
        """Of each that is contiguous, aligned, and of whole groups of 32 bytes; nobody waits for it."""
        which = tuple(index for index, tensor in enumerate(tensors) if tensor is not None and self._takes(tensor))
        if self._refused or not which:
            return Taken(frozenset())
        if which not in self._planned:
            self._planned[which] = self._plan(which)
        launch, mask = self._planned[which]
        bits = [_bits(tensors[index]) for index in which]
        try:
            self._reader(launch, bits, None, self._launches.Slots(checks=self._checks))
        except Exception as error:  # a launch that fails has written nothing
            self._refused = True
            logger.warning("checksums are made by torch from now on: Triton's kernel failed (%s)", type(error).__name__)
            return Taken(frozenset())
        return Taken(frozenset(which), mask, self._checks.sum(1))

    def _plan(self, which: tuple[int, ...]) -> tuple[Launch, Tensor]:
        segments = [
            self._launches.Segment(self._offsets[index], self._offsets[index] + self._words[index], 0, index)
            for index in which
        ]
        mask = torch.zeros(len(self._words), dtype=torch.bool)
        mask[list(which)] = True
        return self._reader.launch(segments), mask.to(self._device)

    def _takes(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        aligned = size > 0 and size % 32 == 0 and tensor.data_ptr() % 16 == 0
        return aligned and tensor.is_contiguous() and tensor.device.type == self._device.type


def _bits(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().reshape(-1).view(torch.int32)
