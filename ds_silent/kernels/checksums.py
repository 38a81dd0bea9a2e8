"""Checksums of tensors' bits: of one, of each of a list, of a gradient's layers; on their device, waiting for nothing.

    checksum(tensor)                             # int64 ()
    bits = Bits()
    values = bits(items)                         # int64 (n,): of a list of names and tensors, planned once
    combined(values)                             # int64 (): of all of them, in their order

It reads the bits as 64-bit words, ROW of them a row, and adds them up modulo 2^64, each times an odd key of its place
in the row and an odd key of the row. One changed bit always changes the sum: the change is 2^b times an odd number.
Several changes cancel with a probability of about 2^-64, equal and opposite ones too, as replicas in bf16 have them
that an update has left apart. An even number of words that differ in nothing but their highest bit (the sign of every
second fp32) cancels always: an odd key times 2^63 is 2^63, whatever the key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_silent.device import placed
from ds_silent.kernels.host import compiled
from ds_silent.kernels.launches import Launch, Reader, Segment, Slots, choice
from ds_silent.maths.mixing import ROW, keys_of, word_keys
from ds_silent.maths.sketch import make_plan, offsets_of

logger = logging.getLogger("ds_silent")
SCRATCH = 128  # rows that are multiplied by their keys at once, where a device has no such product
WORD = 4  # bytes of an element to the kernel: the bits of every dtype are read as int32
SKETCH_SIZE = 16_384  # any: the kernel's columns follow from it, and no sketch is made
Items = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Replica:
    """Tensors that may be written, so that this rank holds what the others hold.

    ``write_back``: to be called after writing, for what is no tensor but a number and is here as a copy.
    """

    items: Items
    write_back: Callable[[], None]


class Checksums:
    """(n,) int64 checksums of n tensors of fixed sizes in bytes, in two kernels per tensor and a few for all.

    ``by_torch``: by torch's operations, whatever is chosen for the device.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, by_torch: bool = False):
        self._places: list[tuple[int, int, int]] = []  # first row, whole rows, words of the last row
        owners: list[int] = []
        numbers: list[int] = []
        for index, size in enumerate(sizes):
            whole, rest = divmod(size // 8, ROW)
            self._places.append((len(owners), whole, rest))
            owners += [index] * (whole + (rest > 0))
            numbers += range(whole + (rest > 0))
        keys = keys_of(max(numbers, default=0) + 1)
        self._row_keys = keys[numbers].to(device)
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self._words = word_keys().to(device)
        self._multiplies = device.type == "cpu"  # int64 matrices
        self._scratch: Tensor | None = None
        self._rows = torch.zeros(len(owners), dtype=torch.int64, device=device)
        self._last_words = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        self._last_key = int(keys[0])
        by = "torch" if by_torch or not sizes else choice(device).by
        self._together = FusedChecksums(sizes, device) if by == "triton" else None
        self._compiled = compiled() if by == "compiled" else None
        self._sizes, self._keys = list(sizes), keys

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return those of these tensors, in the order and of the sizes that were planned for; 0 for None."""
        if self._compiled is not None:
            flat = [None if one is None else one.contiguous() for one in tensors]
            found = self._compiled.checksums(flat, self._sizes, self._keys)
            if found is not None:
                return found
        taken = None if self._together is None else self._together(tensors)
        if taken is not None and len(taken.which) == len(self._places):
            return taken.values
        for index, ((first, whole, rest), tensor) in enumerate(zip(self._places, tensors, strict=True)):
            if taken is not None and index in taken.which:
                continue
            if tensor is None:
                self._rows[first : first + whole + (rest > 0)].zero_()
                self._last_words[index].zero_()
            else:
                self._read(tensor, index, first, whole, rest)
        sums = torch.zeros_like(self._last_words).index_add_(0, self._owners, self._rows * self._row_keys)
        sums += self._last_words * self._last_key
        return sums if taken is None else torch.where(taken.mask, taken.values, sums)

    def _read(self, tensor: Tensor, index: int, first: int, whole: int, rest: int) -> None:
        flat = tensor.detach().resolve_neg().contiguous().view(-1)
        flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # 64-bit words need an aligned beginning
        in_words = (whole * ROW + rest) * 8 // flat.element_size()
        words = flat[:in_words].view(torch.int64)
        if whole:
            self._add_up(words[: whole * ROW].view(whole, ROW), self._rows[first : first + whole])
        if rest:
            self._add_up(words[whole * ROW :].view(1, rest), self._rows[first + whole : first + whole + 1])
        if in_words < flat.numel():
            self._last_words[index : index + 1].view(flat.dtype)[: flat.numel() - in_words].copy_(flat[in_words:])

    def _add_up(self, rows: Tensor, sums: Tensor) -> None:
        """(n, words) to (n,), each word times its key."""
        keys = self._words[: rows.shape[1]]
        if self._multiplies:
            torch.mv(rows, keys, out=sums)
            return
        if self._scratch is None or len(self._scratch) < min(len(rows), SCRATCH):
            self._scratch = torch.empty(min(len(rows), SCRATCH), ROW, dtype=torch.int64, device=rows.device)
        for begin in range(0, len(rows), SCRATCH):
            part = rows[begin : begin + SCRATCH]
            product = torch.mul(part, keys, out=self._scratch[: len(part), : len(keys)])
            torch.sum(product, 1, out=sums[begin : begin + SCRATCH])


class Taken(NamedTuple):
    """What one launch has read of a list of tensors."""

    which: frozenset[int]
    mask: Tensor  # bool (n,): the same
    values: Tensor  # int64 (n,): their checksums, anything elsewhere


class FusedChecksums:
    """Read the checksums of many tensors in one launch of the kernel, where it is chosen."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self._device = device
        self._reader = Reader(make_plan(1, SKETCH_SIZE, device), keys=max(sizes) // (8 * ROW) + 1)
        self._words = [size // WORD for size in sizes]
        self._offsets, _ = offsets_of(self._words)
        columns = self._reader.splits * self._reader.blocks
        self._checks = torch.zeros(len(sizes), columns, dtype=torch.int64, device=device)
        self._planned: dict[tuple[int, ...], tuple[Launch, Tensor]] = {}
        self._refused = False

    def __call__(self, tensors: Sequence[Tensor | None]) -> Taken | None:
        """Read each tensor that is contiguous, aligned, and of whole groups of 32 bytes; nobody waits for it."""
        taken = {place: one for place, one in enumerate(tensors) if one is not None and self._takes(one)}
        which = tuple(taken)
        if self._refused or not which:
            return None
        first, *rest = taken.values()
        # the first says of which dtype all are read, the others only where they lie
        read = [first.detach().reshape(-1).view(torch.int32), *rest]
        if which not in self._planned:
            self._planned[which] = self._plan(which)
        launch, mask = self._planned[which]
        try:
            self._reader(launch, read, None, Slots(checks=self._checks))
        except Exception as error:  # a launch that fails has written nothing
            self._refused = True
            logger.warning("checksums are made by torch from now on: Triton's kernel failed (%s)", type(error).__name__)
            return None
        return Taken(frozenset(which), mask, self._checks.sum(1))

    def _plan(self, which: tuple[int, ...]) -> tuple[Launch, Tensor]:
        places = [(index, self._offsets[index]) for index in which]
        segments = [Segment(at, at + self._words[index], 0, index) for index, at in places]
        mask = torch.zeros(len(self._words), dtype=torch.bool)
        mask[list(which)] = True
        return self._reader.launch(segments), mask.to(self._device)

    def _takes(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        aligned = size > 0 and size % 32 == 0 and tensor.data_ptr() % 16 == 0
        return aligned and tensor.is_contiguous() and tensor.device.type == self._device.type


class Bits:
    """(n,) int64 checksums of a list of tensors, planned once for their sizes and devices.

    They are made on the training's device, so that no device is waited for. What lies on the host beside it is little,
    such as Adam's step: torch reads it, because the host's functions would have to be compiled first, which takes 5 s.

    Args:
        device: the training's; by default that of the first tensor that is not on the host.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._sizes: tuple[tuple[int, torch.device], ...] = ()
        self._plans: list[tuple[list[int], Tensor, Checksums]] = []  # which ones, the same on the values' device

    def __call__(self, items: Items) -> Tensor:
        """Return them on the training's device."""
        tensors = [tensor for _, tensor in items]
        sizes = tuple((tensor.numel() * tensor.element_size(), tensor.device) for tensor in tensors)
        devices = dict.fromkeys(device for _, device in sizes)
        home = self._device or next((one for one in devices if one.type != "cpu"), tensors[0].device)
        if sizes != self._sizes:
            self._sizes, self._plans = sizes, []
            for device in devices:
                places = [place for place, (_, own) in enumerate(sizes) if own == device]
                beside = device.type == "cpu" != home.type
                checksums = Checksums([sizes[place][0] for place in places], device, by_torch=beside)
                self._plans.append((places, placed(torch.tensor(places), home), checksums))
        if len(self._plans) == 1:
            return placed(self._plans[0][2](tensors), home)
        values = torch.zeros(len(tensors), dtype=torch.int64, device=home)
        for places, there, checksums in self._plans:
            values[there] = placed(checksums([tensors[place] for place in places]), home)
        return values


class LayerChecksums:
    """(L,) int64 checksums of the layers of a gradient, from its tensors' elements and layers, counted from 0."""

    def __init__(self, numels: Sequence[int], layers: Sequence[int], device: torch.device):
        self._sizes, self._device = [4 * numel for numel in numels], device
        self._layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self._keys = keys_of(len(layers)).to(device)
        self._count = max(layers, default=-1) + 1
        self._checksums: Checksums | None = None  # made when the tensors' dtypes are known

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return them; an absent tensor counts as 0, which no gradient is likely to have."""
        sizes = [old if one is None else one.nbytes for one, old in zip(tensors, self._sizes, strict=True)]
        if self._checksums is None or sizes != self._sizes:
            self._sizes, self._checksums = sizes, Checksums(sizes, self._device)
        layers = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        return layers.index_add_(0, self._layers, self._checksums(tensors) * self._keys)


def checksum(tensor: Tensor) -> Tensor:
    """int64 () checksum of a tensor's bits, on its device; see the module docstring. Does not know dtype or shape."""
    return Checksums([tensor.numel() * tensor.element_size()], tensor.device)([tensor])[0]


def combined(values: Tensor) -> Tensor:
    """(..., n) checksums to (...) int64, in their order."""
    return (values * _device_keys(values.shape[-1], values.device)).sum(-1)


@lru_cache(maxsize=32)
def _device_keys(count: int, device: torch.device) -> Tensor:
    return keys_of(count).to(device)
