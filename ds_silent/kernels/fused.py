"""The pass over a gradient in one kernel where Triton and a device for it are there, else in torch's own operations.

    accumulator = new_accumulator(plan, offsets, numels, groups)    # the right one of the two

``DS_SILENT_KERNEL`` is ``triton`` or ``torch`` to have it so; otherwise Triton is taken on a CUDA device (which ROCm's
are too) where it is installed and a first launch succeeds. Both give the same sketch by definition, so ranks that
choose differently can be compared, and a rank may change over in the middle of a step.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_silent.config import ConfigError
from ds_silent.kernels.accumulator import Accumulator, Part
from ds_silent.kernels.keys import ROW
from ds_silent.maths.sketch import SketchPlan, make_plan, offsets_of

if TYPE_CHECKING:
    from ds_silent.kernels.launches import Launch, Segment

logger = logging.getLogger("ds_silent")
VARIABLE = "DS_SILENT_KERNEL"
TOGETHER = 1 << 24  # elements that share a launch: what is handed over piece by piece may be temporary


class Choice(NamedTuple):
    """Which of the two, and why, in words."""

    triton: bool
    reason: str


def choice(device: torch.device) -> Choice:
    """For gradients on this kind of device; found out once.

    Raises:
        ConfigError: the variable has another value, or asks for Triton where there is none.
    """
    return _choice(device.type, os.environ.get(VARIABLE, ""))


@functools.cache
def _choice(kind: str, told: str) -> Choice:
    if told not in ("", "triton", "torch"):
        raise ConfigError(f"{VARIABLE} must be triton, torch or not set, got {told!r}")
    if told == "torch":
        return Choice(False, f"{VARIABLE}=torch")
    if not told and kind != "cuda":
        return Choice(False, f"there is no kernel for {kind}")
    why_not = _why_not(torch.device(kind))
    if told and why_not:
        raise ConfigError(f"{VARIABLE}=triton, but its kernel does not run here ({why_not}); unset it or say torch")
    return Choice(not why_not, why_not or "Triton's kernel")


def _why_not(device: torch.device) -> str:
    """What keeps the kernel from running: it is compiled and launched once, on nothing of importance."""
    try:
        launches = importlib.import_module("ds_silent.kernels.launches")
        plan = make_plan(4096, 256, device)
        reader = launches.Reader(plan)
        launch = reader.launch([launches.Segment(0, 4096, 0, 0)])
        squares = torch.zeros(1, reader.splits * reader.blocks, device=device)
        reader(launch, [torch.ones(4096, device=device)], plan.new_tables(reader.splits), launches.Slots(squares))
        return "" if float(squares.sum()) == 4096.0 else "a first launch gave a wrong sum"
    except Exception as error:  # no Triton, no compiler, a device that it does not know
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def new_accumulator(plan: SketchPlan, *arguments: Any) -> Accumulator:
    """An :class:`Accumulator` of these arguments for the plan's device."""
    return (FusedAccumulator if choice(plan.signs.device).triton else Accumulator)(plan, *arguments)


class FusedAccumulator(Accumulator):
    """The same by one launch for each tensor, or for many where they come together.

    Other dtypes, and elements that do not lie one behind the other, go the other way.

    Attributes:
        refused: what Triton said at a launch, since when the kernel is used no more; None as long as it is used.
    """

    def __init__(self, plan: SketchPlan, *arguments: Any, **named: Any):
        from ds_silent.kernels import launches

        self._launches = launches
        self._reader = launches.Reader(plan)
        self._splits = self._reader.splits
        super().__init__(plan, *arguments, **named)
        self._planned: dict[tuple[tuple[int, int, int], ...], Launch] = {}
        self._row_of: dict[tuple[int, int, int], int] = {}  # of _squares_read, for each part
        self._squares_read = self._new_squares(len(self._groups) + 1)
        self._groups_read: list[int] = []
        self._membership: Tensor | None = None  # bool (G, rows of _squares_read)
        self.refused: str | None = None

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
        """See :meth:`Accumulator.add`."""
        taken = self._takes(values) and (previous is None or self._takes(previous))
        if not (taken and self._read([(index, start, values)], square, sketching, previous, weight)):
            super().add(index, values, previous, start, weight, square, sketching)

    def add_all(self, parts: Iterable[Part], square: bool = True, sketching: bool = True) -> None:
        """See :meth:`Accumulator.add_all`."""
        waiting: dict[torch.dtype, list[Part]] = {}
        elements = 0
        for index, start, values in parts:
            if not self._takes(values):
                self.add(index, values, start=start, square=square, sketching=sketching)
                continue
            waiting.setdefault(values.dtype, []).append((index, start, values))
            elements += values.numel()
            if elements >= TOGETHER:
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

    def _takes(self, values: Tensor) -> bool:
        return (
            self.refused is None
            and values.dtype in self._launches.DTYPES
            and values.device == self._squares_read.device
            and values.is_contiguous()
            and values.numel() > 0
        )

    def _read_all(self, waiting: dict[torch.dtype, list[Part]], square: bool, sketching: bool) -> None:
        for parts in waiting.values():
            if not self._read(parts, square, sketching):
                for index, start, values in parts:
                    super().add(index, values, start=start, square=square, sketching=sketching)
        waiting.clear()

    def _read(
        self, parts: list[Part], square: bool, sketching: bool, previous: Tensor | None = None, weight: float = 1.0
    ) -> bool:
        """Whether the kernel has read them."""
        if self._order is not None:
            self._order.enter()
        key = tuple((index, start, values.numel()) for index, start, values in parts)
        launch = self._planned.get(key)
        if launch is None:
            launch = self._planned[key] = self._reader.launch([self._segment(place) for place in key])
        slots = self._launches.Slots(self._squares_read if square else None)
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
            if len(self._groups_read) > len(self._squares_read):
                self._squares_read = torch.cat((self._squares_read, self._new_squares(len(self._squares_read))))
        begin, group = self._offsets[index] + start, self._groups[index] if self._sketch_groups else 0
        return self._launches.Segment(begin, begin + numel, group, self._row_of[place])

    def _new_squares(self, count: int) -> Tensor:
        return torch.zeros(count, self._reader.splits * self._reader.blocks, device=self.plan.signs.device)


# ----------------------------------------------------------------------------------------------------------------------
# Checksums of many tensors in one launch of the kernel, where it is chosen: :mod:`ds_silent.kernels.checksums` asks.


WORD = 4  # bytes of an element: the bits of every dtype are read as int32
SKETCH_SIZE = 16_384  # any: the kernel's columns follow from it, and no sketch is made


class Taken(NamedTuple):
    """What one launch has read of a list of tensors."""

    which: frozenset[int]
    mask: Tensor  # bool (n,): the same
    values: Tensor  # int64 (n,): their checksums, anything elsewhere


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

    def __call__(self, tensors: Sequence[Tensor | None]) -> Taken | None:
        """Of each that is contiguous, aligned, and of whole groups of 32 bytes; nobody waits for it."""
        bits = {
            index: tensor.detach().reshape(-1).view(torch.int32)
            for index, tensor in enumerate(tensors)
            if tensor is not None and self._takes(tensor)
        }
        which = tuple(bits)
        if self._refused or not which:
            return None
        if which not in self._planned:
            self._planned[which] = self._plan(which)
        launch, mask = self._planned[which]
        try:
            self._reader(launch, list(bits.values()), None, self._launches.Slots(checks=self._checks))
        except Exception as error:  # a launch that fails has written nothing
            self._refused = True
            logger.warning("checksums are made by torch from now on: Triton's kernel failed (%s)", type(error).__name__)
            return None
        return Taken(frozenset(which), mask, self._checks.sum(1))

    def _plan(self, which: tuple[int, ...]) -> tuple[Launch, Tensor]:
        places = [(index, self._offsets[index]) for index in which]
        segments = [self._launches.Segment(at, at + self._words[index], 0, index) for index, at in places]
        mask = torch.zeros(len(self._words), dtype=torch.bool)
        mask[list(which)] = True
        return self._reader.launch(segments), mask.to(self._device)

    def _takes(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        aligned = size > 0 and size % 32 == 0 and tensor.data_ptr() % 16 == 0
        return aligned and tensor.is_contiguous() and tensor.device.type == self._device.type
