"""Kernels and bytes of one pass over a gradient with openPangu-1B's shapes, counted on meta tensors.

Reads and writes of every operation, no credit for caches. The bounds are what was counted: they may go down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_silent.kernels.accumulator import Accumulator, FusedAccumulator
from ds_silent.maths.sketch import make_plan, offsets_of

META = torch.device("meta")
HIDDEN, LAYERS = 1536, 26
LAYER = [(HIDDEN, HIDDEN), (768, HIDDEN), (768, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (768,), (768,), (HIDDEN,)]
LAYER += [(6144, HIDDEN), (6144, HIDDEN), (HIDDEN, 6144), (HIDDEN,), (HIDDEN,)]
SHAPES = [(153_376, HIDDEN), *LAYERS * LAYER, (HIDDEN,)]
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
GROUPS = [0, *(1 + layer for layer in range(LAYERS) for _ in LAYER), LAYERS + 1]


class Counted(TorchDispatchMode):
    """Operations that start a kernel, and the bytes of their operands and results.

    Overlapping views count each element that is read. An operation that only makes views starts none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes, self.allocated = 0, 0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.is_view or "detach" in str(operation) or "_unsafe_view" in str(operation):
            return result
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        made = [
            value for value in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(value, Tensor)
        ]
        new = [value for value in made if all(value is not each for each in given)]
        self.kernels += 1
        self.bytes += sum(value.numel() * value.element_size() for value in (*given, *new))
        if not operation._schema.is_mutable:
            self.allocated += sum(value.numel() * value.element_size() for value in new)
        elif str(operation).endswith("_.default"):  # in place: read and written
            self.bytes += args[0].numel() * args[0].element_size()
        return result


def test_shapes_are_those_of_the_model() -> None:
    assert (len(NUMELS), sum(NUMELS), max(GROUPS) + 1) == (340, 1_155_912_192, 28)


def passed(accumulator: Accumulator, dtype: torch.dtype, previous: bool) -> Counted:
    """A whole local gradient from hooks; the second time, when everything is planned."""
    gradients = [torch.empty(shape, dtype=dtype, device=META) for shape in SHAPES]
    for _ in range(2):
        with Counted() as counted:
            for index, gradient in enumerate(gradients):
                accumulator.add(index, gradient, previous=gradient if previous else None)
    return counted


def plan_and_offsets() -> tuple[Any, list[int]]:
    offsets, total = offsets_of(NUMELS)
    return make_plan(total, 16_384, META), offsets


@pytest.mark.parametrize(
    ("dtype", "previous", "kernels", "traffic"),
    [
        (torch.bfloat16, False, 3_152, 5.32),
        (torch.bfloat16, True, 4_071, 8.32),
        (torch.float32, False, 2_628, 5.14),
    ],
)
@pytest.mark.long
def test_of_torch(dtype: torch.dtype, previous: bool, kernels: int, traffic: float) -> None:
    plan, offsets = plan_and_offsets()
    counted = passed(Accumulator(plan, offsets, NUMELS, GROUPS, sketch_groups=True), dtype, previous)
    assert counted.kernels <= kernels
    assert counted.bytes / (dtype.itemsize * sum(NUMELS)) <= traffic
    assert counted.allocated == 0


class Launches:
    """In the kernel's place: what its launches would read and write."""

    def __init__(self) -> None:
        self.count, self.bytes = 0, 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            *_, square, _ = arguments
            self.count += 1
            self.bytes += grid[0] * 512 * 4 * 2  # each program's columns of a table: added to
            self.bytes += grid[0] * 4 if square else 0

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    pytest.importorskip("triton")
    from ds_silent.kernels import sketch_triton

    made = Launches()
    monkeypatch.setattr(sketch_triton, "read", made)
    monkeypatch.setattr(sketch_triton, "packed", lambda signs, width: torch.empty(1, device=META))
    return made


def test_of_the_kernel_from_hooks(launched: Launches) -> None:
    """One launch for each tensor, the gradient read once, and little else."""
    plan, offsets = plan_and_offsets()
    accumulator = FusedAccumulator(plan, offsets, NUMELS, GROUPS, sketch_groups=True)
    counted = passed(accumulator, torch.bfloat16, previous=False)
    assert accumulator.refused is None
    assert counted.kernels == 0  # nothing beside the launches
    assert launched.count == 2 * len(NUMELS)
    beside = launched.bytes / 2
    assert beside <= 0.23 * 2 * sum(NUMELS)


@pytest.mark.parametrize(("held", "launches"), [(True, 1), (False, 41)])
def test_of_the_kernel_where_tensors_come_together(launched: Launches, held: bool, launches: int) -> None:
    """A list, whose tensors the caller holds, is one launch; of parts that come one by one, small ones share one."""
    plan, offsets = plan_and_offsets()
    accumulator = FusedAccumulator(plan, offsets, NUMELS, GROUPS, sketch_groups=True)
    parts = [(index, 0, torch.empty(shape, dtype=torch.bfloat16, device=META)) for index, shape in enumerate(SHAPES)]
    for _ in range(2):
        accumulator.add_all(parts if held else iter(parts))
    assert accumulator.refused is None
    assert launched.count == 2 * launches
    assert launched.bytes / 2 <= 0.073 * 2 * sum(NUMELS)


class Compiled:
    """Stands for the kernel: what is compiled for some arguments, and what is launched without asking Triton again."""

    def __init__(self, refuses: bool = False) -> None:
        self.compiled, self.launched, self._refuses = 0, 0, refuses

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Any:
            self.compiled += 1
            return {grid: self._launch}

        return compile_and_launch

    def _launch(self, *arguments: Any) -> None:
        if self._refuses:
            raise TypeError("function takes exactly 22 arguments (36 given)")
        self.launched += 1


def reads_of(stand_in: Compiled, monkeypatch: pytest.MonkeyPatch) -> FusedAccumulator:
    """Read two tensors twice: one whose address is a multiple of 16 bytes, and one whose address is not."""
    pytest.importorskip("triton")
    from ds_silent.kernels import sketch_triton

    monkeypatch.setattr(sketch_triton, "read", stand_in)
    accumulator = FusedAccumulator(make_plan(2048, 256), [0, 1024], [1024, 1024])
    memory = torch.empty(2048)
    for _ in range(2):
        accumulator.add(0, memory[:1024])
        accumulator.add(1, memory[1 : 1 + 1024])
    return accumulator


def test_what_was_compiled_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code for aligned addresses must not read others."""
    stand_in = Compiled()
    assert reads_of(stand_in, monkeypatch).refused is None
    assert (stand_in.compiled, stand_in.launched) == (2, 2)


def test_a_triton_that_takes_no_constants_at_a_launch_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Compiled(refuses=True)
    assert reads_of(stand_in, monkeypatch).refused is None
    assert (stand_in.compiled, stand_in.launched) == (4, 0)
