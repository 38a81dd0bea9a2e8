"""What the check of the reduction finds, what it lets pass, and what it costs, on real gradients.

    python benchmarks/integrity.py                        # everything: half an hour on one core
    python benchmarks/integrity.py --part false-alarms --stride 4
    python benchmarks/integrity.py --part detection --ranks 8 --trials 200

Real gradients of the warm embedded model (four rows each) are reduced as libraries do it: divided by the number of
ranks and added up in the training's dtype, every sum rounded, in a random order of the ranks and by a random algorithm
(one after the other, a tree, or a ring, which begins each piece at another rank). A step draws its ranks' gradients
from a pool without replacement. Then the aggregate is left as it is (false alarms) or corrupted (detection).
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.config import DetectorsConfig, DirectionConfig
from ds_silent.detectors import log_steps
from ds_silent.kernels.checksums import Checksums, checksum
from ds_silent.maths.rounding_bound import AggregateCheck, Arithmetic, check_aggregate, terms_of
from ds_silent.maths.sketch import SketchPlan, make_plan, offsets_of, sketch_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # the fine-tune's modules

from finetune.data import Row
from finetune.encoding import collate, encode
from finetune.models import load
from instructions import generate

CONSOLE = Console(width=120)
BATCH, SKETCH = 4, 16_384
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Pool:
    """Gradients of M micro-batches in one dtype, and their sketches."""

    gradients: Tensor  # (M, D)
    sketches: Tensor  # (M, k) float64
    plan: SketchPlan


def collect(count: int, seed: int) -> Tensor:
    """(M, D) fp32 gradients of the embedded model at its shipped weights."""
    loaded = load("embedded", dtype=torch.float32)
    model, tokenizer = loaded.model, loaded.tokenizer
    rows = [Row(**row) for row in generate(rows=BATCH * count, seed=2000 + seed)]
    examples = encode(rows, tokenizer, template="alpaca", max_length=512, append_eos=True).examples
    parameters = [p for p in model.parameters() if p.requires_grad]
    offsets, numel = offsets_of([p.numel() for p in parameters])
    gradients = torch.zeros(count, numel)
    for number in range(count):
        chosen = examples[BATCH * number : BATCH * (number + 1)]
        batch = collate(chosen, pad_id=tokenizer.pad_token_id)
        model.zero_grad(set_to_none=True)
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss.backward()
        for parameter, offset in zip(parameters, offsets, strict=True):
            gradients[number, offset : offset + parameter.numel()] = parameter.grad.flatten()
    return gradients


def pool_of(gradients: Tensor, dtype: torch.dtype) -> Pool:
    plan = make_plan(gradients.shape[1], SKETCH)
    values = gradients.to(dtype)
    return Pool(values, torch.stack([sketch_of(plan, row).double() for row in values]), plan)


def reduce(terms: Tensor, order: list[int], algorithm: str) -> Tensor:
    """The sum of (N, D) terms with every partial sum rounded to their dtype."""
    if algorithm == "tree":
        parts = [terms[index] for index in order]
        while len(parts) > 1:
            rest = parts[len(parts) & ~1 :]
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + rest
        return parts[0]
    if algorithm == "chain":
        total = terms[order[0]].clone()
        for index in order[1:]:
            total += terms[index]
        return total
    pieces = []
    for begin, piece in enumerate(torch.tensor_split(terms, len(order), dim=1)):
        pieces.append(reduce(piece, order[begin:] + order[:begin], "chain"))
    return torch.cat(pieces)


class Reductions:
    """Steps of N simulated ranks."""

    def __init__(self, pool: Pool, ranks: int, seed: int):
        self._pool, self._ranks, self._random = pool, ranks, random.Random(seed)
        dtype = pool.gradients.dtype
        division = 0 if math.log2(ranks).is_integer() else 1
        self._arithmetic = Arithmetic(dtype, division, elements=pool.plan.numel, width=pool.plan.width)
        # as the observer at its default of one false alarm per million steps
        self._log_rate = log_steps(DetectorsConfig(), 1) + math.log(2.0)

    def step(self, corrupt: Callable[[Tensor], None] | None = None) -> AggregateCheck:
        """One reduction, checked; ``corrupt`` changes the aggregate in place."""
        chosen = self._random.sample(range(len(self._pool.gradients)), self._ranks)
        order = self._random.sample(range(self._ranks), self._ranks)
        terms = self._pool.gradients[chosen] / self._ranks
        aggregate = reduce(terms, order, self._random.choice(("chain", "tree", "ring")))
        if corrupt is not None:
            corrupt(aggregate)
        sketch = sketch_of(self._pool.plan, aggregate).double()
        return check_aggregate(terms_of(self._pool.sketches[chosen]), sketch, self._arithmetic, self._log_rate)


def report_false_alarms(pools: dict[str, Pool], worlds: list[int], steps: int, seed: int) -> None:
    table = Table(title=f"Healthy reductions of real gradients, 1 false alarm per million stated (seed {seed})")
    for column in ("dtype", "ranks", "reductions", "alarms", "relative error, median", "bound, median", "worst ratio"):
        table.add_column(column, justify="right")
    for name, pool in pools.items():
        for ranks in worlds:
            reductions = Reductions(pool, ranks, seed + ranks)
            errors, bounds, ratios, alarms = [], [], [], 0
            for _ in range(steps):
                check = reductions.step()
                errors.append(check.relative_error or 0.0)
                bounds.append(check.rounding_bound or 0.0)
                ratios.append(check.error / check.tolerance)
                alarms += check.wrong
            middle = [f"{sorted(values)[len(values) // 2]:.2e}" for values in (errors, bounds)]
            table.add_row(name, str(ranks), f"{steps:,}", str(alarms), *middle, f"{max(ratios):.2f}")
            CONSOLE.print(f"{name}, {ranks} ranks: {alarms} alarms in {steps:,} reductions")
    CONSOLE.print(table)


def report_detection(pools: dict[str, Pool], worlds: list[int], trials: int, seed: int) -> None:
    table = Table(title=f"Corrupted aggregates found at their step, of {trials} trials (seed {seed})")
    for column in ("dtype", "corruption", *(f"{ranks} ranks" for ranks in worlds)):
        table.add_column(column, justify="right" if "ranks" in column else "left")
    generator = torch.Generator().manual_seed(seed)
    for name, pool in pools.items():
        sizes = (1e-6, 1e-5, 1e-4) if name == "fp32" else (5e-3, 1e-2, 2e-2, 5e-2)
        corruptions = {f"noise of {size:g} of the norm": noise(size, generator) for size in sizes}
        element = (1e-5, 1e-3) if name == "fp32" else (1e-2, 2e-2)
        corruptions |= {f"one element off by {size:g} of the norm": one_element(size, generator) for size in element}
        for label, corrupt in corruptions.items():
            cells = []
            for ranks in worlds:
                reductions = Reductions(pool, ranks, seed + ranks)
                cells.append(f"{sum(reductions.step(corrupt).wrong for _ in range(trials))}/{trials}")
            table.add_row(name, label, *cells)
            CONSOLE.print(f"{name}, {label}: {', '.join(cells)}")
    CONSOLE.print(table)


def noise(size: float, generator: torch.Generator) -> Callable[[Tensor], None]:
    """Gaussian noise of ``size`` times the aggregate's norm; rounded to the aggregate's dtype, as memory does."""

    def corrupt(aggregate: Tensor) -> None:
        values = torch.randn(len(aggregate), generator=generator)
        exact = aggregate.float() + values * (size * float(aggregate.float().norm()) / float(values.norm()))
        aggregate.copy_(exact)

    return corrupt


def one_element(size: float, generator: torch.Generator) -> Callable[[Tensor], None]:
    """A random element changed by ``size`` times the norm."""

    def corrupt(aggregate: Tensor) -> None:
        place = int(torch.randint(len(aggregate), (1,), generator=generator))
        aggregate[place] += size * float(aggregate.float().norm())

    return corrupt


def report_bit_flips(numel: int, flips: int, seed: int) -> None:
    """A bit flip anywhere in a weight changes the checksum."""
    generator = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES.items():
        weights = torch.randn(numel, generator=generator).to(dtype)
        raw, right, missed = weights.view(torch.uint8), int(checksum(weights)), 0
        for _ in range(flips):
            place, bit = (int(torch.randint(limit, (1,), generator=generator)) for limit in (len(raw), 8))
            raw[place] ^= 1 << bit
            missed += int(checksum(weights)) == right
            raw[place] ^= 1 << bit
        CONSOLE.print(f"bit flips in {numel:,} {name} weights: {flips - missed} of {flips} change the checksum")


def report_hash_time(numel: int, rounds: int) -> None:
    """Time of the checksum of ``numel`` parameters over the time of a sum over them, alternating."""
    for name, dtype in DTYPES.items():
        weights = torch.randn(numel).to(dtype)
        ratios = []
        for number in range(rounds + 1):
            times = []
            for function in (torch.sum, checksum):
                started = time.perf_counter()
                function(weights)
                times.append(time.perf_counter() - started)
            if number:  # the first warms up
                ratios.append(times[1] / times[0])
        ordered = sorted(ratios)
        low, middle, high = (ordered[int(q * (len(ordered) - 1))] for q in (0.25, 0.5, 0.75))
        CONSOLE.print(
            f"checksum of {numel:,} {name} parameters: {middle:.2f} times a sum (quartiles {low:.2f}..{high:.2f}, "
            f"{rounds} rounds, one thread)"
        )


def report_cost(ranks: int, rounds: int) -> None:
    """CPU time per measured step of one rank, on a model as large as ``overhead.py``'s."""
    shapes = [(8192, 384)] + 8 * [(384, 384), (192, 384), (192, 384), (384, 384), *2 * [(1536, 384)], (384, 1536)]
    gradients = [torch.randn(shape) for shape in shapes]
    numels = [gradient.numel() for gradient in gradients]
    layers = [0] + [1 + number // 7 for number in range(len(shapes) - 1)]
    share = len(gradients) // ranks

    def local_gradient(by_layer: bool) -> LocalGradient:
        config, device = DirectionConfig(), torch.device("cpu")
        return LocalGradient(numels, layers, config, device, lambda index: None, False, True, False, by_layer)

    def look(local: LocalGradient, count: int, square: bool) -> None:
        local.start_step()
        for index, gradient in enumerate(gradients[:count]):
            local.accumulator.add(index, gradient, square=square)
        local.accumulator.take()

    whole, by_layer = local_gradient(False), local_gradient(True)
    sums = Checksums([4 * numel for numel in numels], torch.device("cpu"))
    works: dict[str, Callable[[], object]] = {
        "a sum over the gradient, for comparison": lambda: [gradient.sum() for gradient in gradients],
        "metrics: the local gradient's sketch and norm": lambda: look(whole, len(gradients), True),
        "the same with a sketch per layer": lambda: look(by_layer, len(gradients), True),
        f"sketch of a {ranks}th of the aggregated or applied gradient": lambda: look(by_layer, share, False),
        "checksum of the aggregated gradient (stage 0), or of the weights": lambda: sums(gradients),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            started = time.process_time()
            work()
            if number:
                times[name].append(1e3 * (time.process_time() - started))
    table = Table(title=f"CPU time of one rank, {sum(numels):,} fp32 elements, one thread, {rounds} rounds")
    table.add_column("work")
    table.add_column("ms, median (quartiles)", justify="right")
    for name, values in times.items():
        ordered = sorted(values)
        low, middle, high = (ordered[int(q * (len(ordered) - 1))] for q in (0.25, 0.5, 0.75))
        table.add_row(name, f"{middle:.1f} ({low:.1f}..{high:.1f})")
    CONSOLE.print(table)


def main(
    part: Annotated[str, typer.Option(help="false-alarms, detection, replicas, cost or all")] = "all",
    ranks: Annotated[list[int] | None, typer.Option(help="simulated ranks; may be given several times")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32 or bf16; may be given twice")] = None,
    steps: Annotated[int, typer.Option(help="healthy reductions per dtype and number of ranks")] = 10_000,
    trials: Annotated[int, typer.Option(help="corrupted reductions per cell")] = 100,
    batches: Annotated[int, typer.Option(help="gradients in the pool")] = 96,
    stride: Annotated[int, typer.Option(min=1, help="take every n-th element only, to be n times as fast")] = 1,
    seed: Annotated[int, typer.Option(help="of rows, draws and corruptions")] = 0,
) -> None:
    """Detection, false alarms and cost of the integrity checks."""
    parts = ("false-alarms", "detection", "replicas", "cost", "all")
    if part not in parts:
        raise typer.BadParameter(f"must be one of {', '.join(parts)}, got {part!r}", param_hint="--part")
    unknown = [name for name in dtype or () if name not in DTYPES]
    if unknown:
        raise typer.BadParameter(f"must be fp32 or bf16, got {unknown[0]!r}", param_hint="--dtype")
    torch.set_num_threads(1)
    worlds = ranks or [4, 8]
    if part not in ("replicas", "cost"):
        gradients = collect(batches, seed)[:, ::stride].contiguous()
        CONSOLE.print(f"{batches} gradients of {gradients.shape[1]:,} elements")
        pools = {name: pool_of(gradients, DTYPES[name]) for name in dtype or DTYPES}
        if part != "detection":
            report_false_alarms(pools, worlds, steps, seed)
        if part != "false-alarms":
            report_detection(pools, worlds, trials, seed)
    if part in ("replicas", "all"):
        report_bit_flips(1_000_000, 2000, seed)
        report_hash_time(100_000_000, 15)
    if part in ("cost", "all"):
        report_cost(worlds[0], 25)


if __name__ == "__main__":
    typer.run(main)
