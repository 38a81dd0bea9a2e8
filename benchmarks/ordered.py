"""The ordered reduction: are the bits the same for every split, and what does it cost?

    python benchmarks/ordered.py                       # all parts
    python benchmarks/ordered.py --part time --ranks 4 --stage 1

``bits`` trains a small Llama, 20 steps, on the same 8 micro-batches per step, spread over 1, 2, 4
and 8 ranks with 8, 4, 2 and 1 accumulation steps and with other bucket sizes, and compares hashes of all weights.

``time`` runs the same training in one process group, native and ordered taking turns in an order that is reversed every
round; each turn of the ordered reduction is compared with the native one of its own round, in wall time and in CPU time
of all of rank 0's threads. The observer is not connected, so that only the reductions differ.

``exchange`` is the reduction without the training: 20 M fp32 numbers in 100 tensors, flattened, all-reduced and copied
back as DeepSpeed does, against the ordered exchange, taking turns.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import ds_silent
from ds_silent.config import parse
from ds_silent.drill.training import hash_of
from ds_silent.frameworks.deepspeed.engine import DeepSpeedFramework
from ds_silent.ordered.exchange import LongVector, OrderedExchange
from ds_silent.practice.ranks import results_of

MICRO_BATCHES, STEPS, ROWS, LENGTH = 8, 20, 2, 33
CLIPPING = 0.05  # far below the gradient's norm: the norm's bits are in every weight
DAY = 86_400.0  # seconds: a machine that is slow is no fault


@dataclass(frozen=True)
class Settings:
    ranks: int
    stage: int
    dtype: str
    reduction: str  # of the training whose bits are compared
    micro_batches: str
    rounds: int
    turn: int
    length: int
    directory: str
    accumulation: int = 1


Worker = Callable[[Settings], dict[str, Any]]


def engine_of(settings: Settings, shape: LlamaConfig, block: dict[str, Any] | None, rows: int, **zero: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": settings.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": settings.stage, **zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": settings.dtype == "bf16"},
        "steps_per_print": 10**9,
        "silent_consistency": block or {"enabled": False},
    }
    model = LlamaForCausalLM(shape)
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


# -- bits -----------------------------------------------------------------------------------------------------------


def hash_after(settings: Settings) -> str:
    """Of all weights, after the same micro-batches."""
    shape = LlamaConfig(
        vocab_size=211,
        hidden_size=40,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    block = {
        "output_dir": f"{settings.directory}/bits",
        "tensorboard": False,
        "preflight": False,
        "reduction": settings.reduction,
        "ordered": {"micro_batches": settings.micro_batches},
    }
    bucket = 3_000 * settings.ranks  # another one for every split
    engine = engine_of(settings, shape, block, ROWS, reduce_bucket_size=bucket)
    rank = dist.get_rank()
    for step in range(STEPS):
        for a in range(settings.accumulation):
            number = rank * settings.accumulation + a
            if settings.micro_batches == "interleaved":
                number = a * settings.ranks + rank
            seed = torch.Generator().manual_seed(MICRO_BATCHES * step + number)
            tokens = torch.randint(0, 211, (ROWS, LENGTH), generator=seed)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    weights = hash_of(engine.module.parameters())
    ds_silent.observer_of(engine).close()
    engine.destroy()
    return weights


def bits_worker(settings: Settings) -> dict[str, str]:
    found = {}
    for reduction, pairing, stage, dtype in cells():
        case = replace(settings, reduction=reduction, micro_batches=pairing, stage=stage, dtype=dtype)
        found[json.dumps((reduction, pairing, stage, dtype))] = hash_after(case)
    return found


def cells() -> list[tuple[str, str, int, str]]:
    """(reduction, micro-batches, ZeRO stage, dtype); the native ones show that the hashes can differ."""
    ordered = itertools.product(("ordered",), ("contiguous", "interleaved"), (0, 1), ("fp32", "bf16"))
    return [*ordered, ("native", "contiguous", 0, "fp32"), ("native", "contiguous", 1, "bf16")]


def bits(settings: Settings) -> bool:
    """Print the matrix; whether all ordered weights are the same."""
    splits = [(ranks, MICRO_BATCHES // ranks) for ranks in (1, 2, 4, 8)]
    found = []
    for ranks, accumulation in splits:
        found.append(run(bits_worker, replace(settings, ranks=ranks, accumulation=accumulation)))
        print(f"{ranks} x {accumulation}: done", file=sys.stderr)
    table = Table(title=f"sha256 of all weights after {STEPS} steps of {MICRO_BATCHES} micro-batches, clipped")
    for column in ("reduction", "micro-batches", "ZeRO", "dtype", *(f"{n} x {a}" for n, a in splits), "equal"):
        table.add_column(column)
    good = True
    for cell in cells():
        hashes = [of_split[json.dumps(cell)] for of_split in found]
        equal = len(set(hashes)) == 1
        good &= equal or cell[0] == "native"
        table.add_row(
            *map(str, cell), *(h[:8] for h in hashes), "yes" if equal else f"no, {len(set(hashes))} different"
        )
    Console(width=150).print(table)
    return good


# -- time -----------------------------------------------------------------------------------------------------------


def time_worker(settings: Settings) -> dict[str, Any]:
    from benchmarks.overhead import model_shape, step

    engine = engine_of(settings, model_shape(), None, 4)
    block = parse({"silent_consistency": {"reduction": "ordered", "ordered": {"micro_batches": "contiguous"}}})
    assert block is not None
    reduction = DeepSpeedFramework(engine, block)._ordered
    assert reduction is not None
    tokens = torch.randint(0, 8192, (4, settings.length), generator=torch.Generator().manual_seed(dist.get_rank()))
    turns: dict[str, list[tuple[float, float]]] = {"native": [], "ordered": []}
    for number in range(-1, settings.rounds):  # round -1 is for caches: not counted
        for name in ("native", "ordered") if number % 2 == 0 else ("ordered", "native"):
            if name == "ordered":
                reduction.connect()
            step(engine, tokens)
            worked = time.process_time()
            seconds = statistics.median(step(engine, tokens)[0] for _ in range(settings.turn))
            worked = (time.process_time() - worked) / settings.turn
            reduction.close()
            if number >= 0:
                turns[name].append((seconds, worked))
    parameters = sum(p.numel() for p in engine.module.parameters())
    return {**turns, "parameters": parameters}


def times(settings: Settings, worker: Worker, what: str, ranks: list[int], stages: list[int]) -> None:
    table = Table(title=f"{what}; times are ordered : native, median of rounds (quartiles)")
    for column in ("ranks", "ZeRO", "dtype", "parameters", "native, s", "ordered, s", "wall time", "CPU time"):
        table.add_column(column, justify="right")
    for n, stage in itertools.product(ranks, stages):
        result = run(worker, replace(settings, ranks=n, stage=stage))
        native, ordered = result["native"], result["ordered"]
        print(
            f"{n} ranks, stage {stage}: done, {ratio([o[0] for o in ordered], [p[0] for p in native])}", file=sys.stderr
        )
        table.add_row(
            str(n),
            str(stage),
            settings.dtype,
            f"{result['parameters'] / 1e6:.1f} M",
            f"{statistics.median(wall for wall, _ in native):.2f}",
            f"{statistics.median(wall for wall, _ in ordered):.2f}",
            *(ratio([turn[kind] for turn in ordered], [turn[kind] for turn in native]) for kind in (0, 1)),
        )
    Console(width=150).print(table)


def exchange_worker(settings: Settings) -> dict[str, Any]:
    ranks, numel, count = settings.ranks, 200_000, 100
    own, result = ([torch.randn(numel) for _ in range(count)] for _ in range(2))
    offsets, total = [index * numel for index in range(count)], count * numel
    runs = [[(total * r // ranks, total * (r + 1) // ranks - total * r // ranks)] for r in range(ranks)]
    group = dist.distributed_c10d._get_default_group()
    gathered = torch.float32 if settings.stage == 0 else None
    ordered = OrderedExchange(runs, group, torch.device("cpu"), 64, "contiguous", gathered, gram=False)

    def reduce_natively() -> None:
        flat = torch.cat(own)
        dist.all_reduce(flat)
        for values, mean in zip(result, torch.split(flat.mul_(1.0 / ranks), numel), strict=True):
            values.copy_(mean)

    def reduce_in_order() -> None:
        ordered.mean(LongVector(offsets, own), LongVector(offsets, result), gram=False)

    turns: dict[str, list[tuple[float, float]]] = {"native": [], "ordered": []}
    ways = {"native": reduce_natively, "ordered": reduce_in_order}
    for number in range(-1, settings.rounds):
        for name in ("native", "ordered") if number % 2 == 0 else ("ordered", "native"):
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            ways[name]()
            if number >= 0:
                turns[name].append((time.perf_counter() - started, time.process_time() - worked))
    return {**turns, "parameters": total}


def ratio(ordered: list[float], native: list[float]) -> str:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ordered, native, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


# -- processes ------------------------------------------------------------------------------------------------------


def run(worker: Worker, settings: Settings) -> dict[str, Any]:
    """What rank 0's ``worker`` returned."""
    with tempfile.TemporaryDirectory() as directory:
        own = replace(settings, directory=directory)
        result: dict[str, Any] = results_of(worker, (own,), settings.ranks, timeout=DAY)[0]
        return result


def main(
    part: Annotated[str, typer.Option(help="bits, time, exchange or all")] = "all",
    ranks: Annotated[list[int] | None, typer.Option(help="for time; may be repeated. Default: 2 and 4")] = None,
    stage: Annotated[list[int] | None, typer.Option(help="for time; may be repeated. Default: 0 and 1")] = None,
    dtype: Annotated[str, typer.Option(help="for time: fp32 or bf16")] = "fp32",
    rounds: Annotated[int, typer.Option(min=2, help="for time: rounds of both reductions")] = 8,
    turn: Annotated[int, typer.Option(min=1, help="for time: steps per turn")] = 3,
    length: Annotated[int, typer.Option(help="for time: tokens per row; few make the reduction count")] = 64,
) -> None:
    """Exit status 1 where ordered weights differ."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = Settings(1, 0, dtype, "ordered", "contiguous", rounds, turn, length, "")
    good = bits(settings) if part in ("all", "bits") else True
    if part in ("all", "time"):
        times(settings, time_worker, "one optimizer step", ranks or [2, 4], stage or [0, 1])
    if part in ("all", "exchange"):
        alone = replace(settings, rounds=4 * rounds, dtype="fp32")
        times(alone, exchange_worker, "the reduction alone", ranks or [2, 4], stage or [0, 1])
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    typer.run(main)
