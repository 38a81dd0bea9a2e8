"""What reads gradients here; and the Triton kernel's launches: what programs each has, and the launch itself.

    choice(device).by                                           # triton, compiled, or torch
    reader = Reader(plan)                                       # imports Triton
    launch = reader.launch([Segment(begin, end, table, slot)])  # once: which program reads what, in which order
    reader(launch, [tensor, ...], tables, slots)                # in each step; nobody waits for it

The kernel is in :mod:`ds_silent.kernels.sketch_triton`. ``DS_SILENT_KERNEL`` is ``triton``, ``compiled`` or ``torch``
to have it so. Otherwise Triton is taken on a CUDA device (which ROCm's are too) where it is installed and a first
launch succeeds, and on the CPU :mod:`ds_silent.kernels.host`, where there is a C compiler. All give the same numbers by
definition, so ranks that choose differently can be compared, and a rank may change over in the middle of a step.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_silent.config import ConfigError
from ds_silent.device import module_of, placed
from ds_silent.kernels.host import NotCompiled, compiled
from ds_silent.maths.mixing import PAIR, ROW, keys_of, word_keys
from ds_silent.maths.sketch import SHIFTS, SketchPlan, make_plan

VARIABLE = "DS_SILENT_KERNEL"
_BY = {"triton": "Triton's kernel", "compiled": "a compiled function", "torch": ""}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HOST = ("cpu", "meta")  # neither streams nor pinned memory


class Choice(NamedTuple):
    """Which of the three, and why, in words."""

    by: str
    reason: str


def choice(device: torch.device) -> Choice:
    """Choose for gradients on this kind of device; found out once.

    Raises:
        ConfigError: the variable has another value, or asks for what does not run here.
    """
    return _choice(device.type, os.environ.get(VARIABLE, ""))


@functools.cache
def _choice(kind: str, told: str) -> Choice:
    if told not in ("", *_BY):
        raise ConfigError(f"{VARIABLE} must be triton, compiled, torch or not set, got {told!r}")
    if told == "torch":
        return Choice("torch", f"{VARIABLE}=torch")
    by = told or {"cuda": "triton", "cpu": "compiled"}.get(kind, "")
    if not by:
        return Choice("torch", f"there is no kernel for {kind}")
    why_not = _why_not(torch.device(kind)) if by == "triton" else _why_not_compiled(kind)
    if told and why_not:
        raise ConfigError(f"{VARIABLE}={told}, but its kernel does not run here ({why_not}); unset it or say torch")
    return Choice("torch", why_not) if why_not else Choice(by, _BY[by])


def _why_not_compiled(kind: str) -> str:
    """Say what keeps the compiled functions from reading gradients on this kind of device."""
    if kind != "cpu":
        return f"it reads no gradient on {kind}"
    try:
        compiled()
    except NotCompiled as error:
        return str(error)
    return ""


def _why_not(device: torch.device) -> str:
    """Say what keeps the kernel from running: it is compiled and launched once, on nothing of importance."""
    try:
        plan = make_plan(4096, 256, device)
        reader = Reader(plan)
        launch = reader.launch([Segment(0, 4096, 0, 0)])
        squares = torch.zeros(1, reader.splits * reader.blocks, device=device)
        reader(launch, [torch.ones(4096, device=device)], plan.new_tables(reader.splits), Slots(squares))
        return "" if float(squares.sum()) == 4096.0 else "a first launch gave a wrong sum"
    except Exception as error:  # no Triton, no compiler, a device that it does not know
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


class Segment(NamedTuple):
    """Elements [begin, end) of the long vector, added to one table; their numbers go to one row of the slots."""

    begin: int
    end: int
    table: int
    slot: int


@dataclass(frozen=True, eq=False)
class Launch:
    """Which program reads what, on the device."""

    segments: Tensor  # int64 (n, 3)
    programs: Tensor  # int32 (P, 4)
    order: Tensor  # int32
    aligned: bool  # all begins and ends


class Slots(NamedTuple):
    """What the kernel tells of each segment: (slots, SPLITS * blocks); None is not asked for."""

    squares: Tensor | None = None  # fp32
    checks: Tensor | None = None  # int64


class Reader:
    """Launch the kernel for one plan and device.

    ``keys``: of the checksum's rows, as many as its longest tensor has; 0 where none is asked for.
    """

    def __init__(self, plan: SketchPlan, keys: int = 0):
        from ds_silent.kernels import sketch_triton as kernel

        self._kernel: Any = kernel
        self.plan, self._device, self.splits = plan, plan.signs.device, kernel.SPLITS
        self.blocks = -(-plan.width // (8 * kernel.OCTETS))
        self._words = kernel.packed(plan.signs, plan.width)
        self._keys = torch.cat([word_keys()[::2], keys_of(max(keys, 1))]).to(self._device)
        self._nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._addresses: dict[Launch, tuple[tuple[int, ...], Tensor]] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}  # None in Triton's interpreter
        self._keeps = True

    def launch(self, segments: Sequence[Segment]) -> Launch:
        """Plan a launch of these segments; it adds those of one table in this order."""
        kernel = self._kernel
        columns, rows = 8 * kernel.OCTETS, kernel.ROWS * self.plan.width
        places, owners = [], []
        for number, (begin, end, table, _) in enumerate(segments):
            top, bottom = begin // rows, -(-end // rows)
            for split in range(self.splits):
                low = max(begin, (top + (bottom - top) * split // self.splits) * rows)
                high = min(end, (top + (bottom - top) * (split + 1) // self.splits) * rows)
                touched = _touched(low, high, self.plan.width, columns)
                places.append((table * self.splits + split) * self.blocks + touched)
                owners.append(np.full(len(touched), number))
        place, owner = np.concatenate(places), np.concatenate(owners)
        order = np.argsort(place, kind="stable")
        found, first, count = np.unique(place[order], return_index=True, return_counts=True)
        programs = np.stack((found // self.blocks, found % self.blocks, first, first + count), axis=1)
        aligned = all(begin % 8 == 0 and end % 8 == 0 for begin, end, _, _ in segments)
        return Launch(
            self._there([(begin, end, slot) for begin, end, _, slot in segments], torch.int64),
            self._there(programs, torch.int32),
            self._there(owner[order], torch.int32),
            aligned,
        )

    def __call__(
        self,
        launch: Launch,
        values: Sequence[Tensor],
        tables: Tensor | None,
        slots: Slots,
        previous: Tensor | None = None,
        weight: float = 1.0,
    ) -> None:
        """Read ``values``, or their sum with ``previous``.

        Args:
            launch: of tensors of these sizes.
            values: contiguous, of one of :data:`DTYPES`, the same for all; several, or one.
            tables: (tables * splits, length) fp32, added to; None leaves the sketch out.
            slots: written, of what this launch touches.
            previous: with one tensor only: contiguous, of one of :data:`DTYPES`; the sum is rounded to its dtype.
            weight: of what is added to the tables.

        Raises:
            Whatever Triton raises where it cannot compile for this device; nothing has been written then.
        """
        kernel, many = self._kernel, len(values) > 1
        first, before = values[0], values[0] if previous is None else previous
        whole = [tensor.data_ptr() % 16 == 0 for tensor in (*values, before)]
        nothing, checking = self._nothing, slots.checks is not None
        arguments = (
            first,
            before,
            self._addresses_of(launch, values) if many else nothing,
            launch.segments,
            launch.programs,
            launch.order,
            self._words,
            nothing if tables is None else tables,
            nothing if slots.squares is None else slots.squares,
            nothing if slots.checks is None else slots.checks,
            self._keys,
            weight,
            0 if tables is None else tables.shape[-1],
        )
        constants = (
            self.plan.width,
            SHIFTS,
            ROW,
            PAIR,
            kernel.ROWS,
            kernel.STEP_ROWS[4 if checking else max(first.element_size(), before.element_size())],
            kernel.OCTETS,
            kernel.SPLITS,
            many,
            previous is not None,
            launch.aligned and all(whole),
            tables is not None,
            slots.squares is not None,
            checking,
        )
        self._launch(
            (launch.programs.shape[0], 1, 1),
            (first.dtype, before.dtype, whole[0], whole[-1], arguments[-1], *constants),
            (*arguments, *constants),
        )

    def _launch(self, grid: tuple[int, int, int], key: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        """Launch by what Triton has compiled for such arguments: finding that anew takes longer than the launch.

        Args:
            key: whatever the machine code depends on.
        """
        with _on(self._device):
            ready = self._compiled.get(key)
            if ready is not None:
                try:
                    ready[grid](*arguments)
                    return
                except TypeError:  # Triton before 3.3 takes no constants there, and has launched nothing
                    self._keeps = False
                    self._compiled.clear()
            options = {"num_warps": self._kernel.WARPS, "maxnreg": self._kernel.REGISTERS}
            compiled = self._kernel.read[grid](*arguments, **options)
            if self._keeps:
                self._compiled[key] = compiled

    def _addresses_of(self, launch: Launch, values: Sequence[Tensor]) -> Tensor:
        """int64 (n,) on the device; most tensors stay where they are from step to step."""
        now = tuple(tensor.data_ptr() for tensor in values)
        if self._addresses.get(launch, ((), None))[0] != now:
            self._addresses[launch] = now, self._there(now, torch.int64)
        return self._addresses[launch][1]

    def _there(self, values: object, dtype: torch.dtype) -> Tensor:
        """Copy to the device."""
        return placed(torch.as_tensor(np.asarray(values), dtype=dtype), self._device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the thread's current device, which is this one nearly always."""
    module = None if device.type in _HOST else module_of(device.type)
    if module is None or module.current_device() == device.index:
        return contextlib.nullcontext()
    there: contextlib.AbstractContextManager[object] = module.device(device)
    return there


def _touched(low: int, high: int, width: int, columns: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the blocks of columns that elements [low, high) lie in."""
    last = (width - 1) // columns
    if high <= low:
        return np.arange(0)
    if high - low >= width:
        return np.arange(last + 1)
    left, right = low % width // columns, (high - 1) % width // columns
    if low % width <= (high - 1) % width:
        return np.arange(left, right + 1)
    return np.unique(np.concatenate((np.arange(right + 1), np.arange(left, last + 1))))
