"""Speed of the pass over a gradient on a GPU, against a copy on the same device, by torch and by the kernel.

    python benchmarks/bandwidth.py                    # on the GPU that is here
    python benchmarks/bandwidth.py --dtype fp32 --elements 300000000

One read of the gradient counts as its bytes; a copy reads and writes, and counts as both. Each row is the median of
the rounds, in which the works alternate, by the device's own events. A training's tensors are not all large: ``shapes``
is a transformer of this many elements with 13 tensors a layer, ``one tensor`` is all of it in a piece.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_silent.kernels.accumulator import Accumulator, FusedAccumulator
from ds_silent.kernels.launches import choice
from ds_silent.maths.sketch import make_plan, offsets_of

CONSOLE = Console(width=120)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HIDDEN = 1536
LAYER = [
    HIDDEN * HIDDEN,
    HIDDEN * HIDDEN // 2,
    HIDDEN * HIDDEN // 2,
    HIDDEN * HIDDEN,
    *6 * [HIDDEN],
    *3 * [4 * HIDDEN**2],
]


def gradients_of(elements: int, dtype: torch.dtype, device: torch.device, shapes: bool) -> list[Tensor]:
    """Random tensors of about so many elements."""
    numels = LAYER * max(1, elements // sum(LAYER)) if shapes else [elements]
    return [torch.randn(numel, dtype=dtype, device=device) for numel in numels]


def works_of(gradients: list[Tensor], kernel: bool) -> dict[str, Callable[[], object]]:
    """What a step does, one work for each way; each is done whole, results taken."""
    numels = [gradient.numel() for gradient in gradients]
    offsets, total = offsets_of(numels)
    plan = make_plan(total, 16_384, gradients[0].device)
    copies = [torch.empty_like(gradient) for gradient in gradients]

    def from_hooks(accumulator: Accumulator) -> None:
        for index, gradient in enumerate(gradients):
            accumulator.add(index, gradient)
        accumulator.take()

    def together(accumulator: Accumulator) -> None:
        accumulator.add_all([(index, 0, gradient) for index, gradient in enumerate(gradients)])
        accumulator.take()

    by_torch = Accumulator(plan, offsets, numels)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: [copy.copy_(gradient) for copy, gradient in zip(copies, gradients, strict=True)],
        "torch, tensor by tensor": lambda: from_hooks(by_torch),
    }
    if kernel:
        by_kernel = FusedAccumulator(plan, offsets, numels)
        works["kernel, tensor by tensor"] = lambda: from_hooks(by_kernel)
        works["kernel, tensors together"] = lambda: together(by_kernel)
    return works


def measured(works: dict[str, Callable[[], object]], rounds: int, module: object) -> dict[str, float]:
    """Median milliseconds of each work."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 3):
        for name, work in works.items():
            begin, end = (module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            if number >= 3:  # the first compile and plan
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def main(
    elements: Annotated[int, typer.Option(min=1, help="of the whole gradient")] = 1_000_000_000,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each work")] = 20,
) -> None:
    """GB/s of the pass over the gradient, and its share of the device's copy."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    if not torch.cuda.is_available():
        CONSOLE.print("no GPU that torch can use is here, so there is no bandwidth to measure")
        raise typer.Exit(0)
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = choice(device)
    table = Table(title=f"{torch.cuda.get_device_name(device)}, {elements:,} elements of {dtype} ({chosen.reason})")
    for column in ("gradient", "work", "ms", "GB/s", "of the copy"):
        table.add_column(column, justify="left" if column in ("gradient", "work") else "right")
    for shapes in (False, True):
        gradients = gradients_of(elements, DTYPES[dtype], device, shapes)
        size = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        found = measured(works_of(gradients, chosen.by == "triton"), rounds, torch.cuda)
        speeds = {name: size * (2 if name == "copy" else 1) / ms / 1e6 for name, ms in found.items()}
        for name, speed in speeds.items():
            kind = "shapes" if shapes else "one tensor"
            table.add_row(kind, name, f"{found[name]:.2f}", f"{speed:.0f}", f"{speed / speeds['copy']:.0%}")
        del gradients
    CONSOLE.print(table)


if __name__ == "__main__":
    typer.run(main)
