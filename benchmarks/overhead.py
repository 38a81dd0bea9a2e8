"""What watching costs: the same training in one process group, with and without, in alternating turns.

    python benchmarks/overhead.py                      # 2 ranks x 1 thread, about 20 M parameters, fp32, stage 0
    python benchmarks/overhead.py --ranks 4 --stage 1 --dtype bf16
    python benchmarks/overhead.py --ranks 4 --length 64 --variant retry --variant majority --variant "interval 1"

A turn is a few optimizer steps of one variant; variants take turns in an order that is reversed every round, so that
a drift of the machine hits all alike. Each step's time is compared with the plain steps of its own round. Absolute
times of a shared machine say little; the ratios and their spread are the result.

Beside ds_silent the two obvious ways are run: all-gathering the gradients for their pairwise cosines, and a norm
with one host synchronisation per bucket in a gradient hook, as in the paper's released code.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import ds_silent

BATCH = 4
BUCKET = 25 * 2**20  # bytes, DDP's default bucket


@dataclass(frozen=True)
class Settings:
    ranks: int
    stage: int
    dtype: str
    rounds: int
    turn: int
    variants: tuple[str, ...]
    length: int
    directory: str


def block(settings: Settings, **changes: Any) -> dict[str, Any]:
    return {"output_dir": f"{settings.directory}/records-{len(str(changes))}", **changes}


@contextmanager
def plain(engine: Any, settings: Settings) -> Iterator[None]:
    yield


def observed(**changes: Any) -> Callable[..., Any]:
    """One observer for the whole benchmark, connected for its turns: files and plans are made once, as in training."""
    made: list[ds_silent.Observer] = []

    @contextmanager
    def variant(engine: Any, settings: Settings) -> Iterator[None]:
        if made:
            made[0]._capture.connect(made[0])
        else:
            observer = ds_silent.attach(engine, block(settings, **changes))
            assert observer is not None
            made.append(observer)
            del engine.__dict__["_ds_silent_observer"]  # so that the other variants may attach theirs
        yield
        made[0].flush()
        made[0]._capture.close()

    return variant


@contextmanager
def gathered_gradients(engine: Any, settings: Settings) -> Iterator[None]:
    """All-gather of every gradient before the reduction, then all pairwise cosines: the formula taken literally."""
    original = engine.allreduce_gradients

    def gather_first(*args: Any, **kwargs: Any) -> Any:
        mine = torch.cat([p.grad.reshape(-1).float() for p in engine.module.parameters() if p.grad is not None])
        everybody = [torch.empty_like(mine) for _ in range(settings.ranks)]
        dist.all_gather(everybody, mine)
        for i in range(settings.ranks):
            for j in range(i + 1, settings.ranks):
                torch.nn.functional.cosine_similarity(everybody[i], everybody[j], dim=0).item()
        return original(*args, **kwargs)

    engine.__dict__["allreduce_gradients"] = gather_first
    yield
    del engine.__dict__["allreduce_gradients"]


@contextmanager
def synchronised_norms(engine: Any, settings: Settings) -> Iterator[None]:
    """One norm and one ``.item()`` per bucket of 25 MB, then a scalar all-reduce, as in the paper's released code."""
    bucket: list[torch.Tensor] = []
    size = 0

    def hook(gradient: torch.Tensor) -> None:
        nonlocal size
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= BUCKET:
            flush()

    def flush() -> None:
        nonlocal size
        total = torch.tensor([sum(g.detach().float().norm().item() ** 2 for g in bucket)])
        dist.all_reduce(total)
        total.item()
        bucket.clear()
        size = 0

    original = engine._take_model_step

    def take(*args: Any, **kwargs: Any) -> Any:
        if bucket:
            flush()
        return original(*args, **kwargs)

    handles = [p.register_hook(hook) for p in engine.module.parameters()]
    engine.__dict__["_take_model_step"] = take
    yield
    for handle in handles:
        handle.remove()
    del engine.__dict__["_take_model_step"]


VARIANTS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "ds_silent, interval 1": observed(interval=1),
    "ds_silent, interval 10": observed(interval=10),
    "ds_silent, interval 1, no integrity": observed(
        interval=1, integrity={"aggregation": False, "replica_interval": 0}
    ),
    "plain again (noise floor)": plain,
    "retry ready": observed(interval=1, respond={"on_aggregation_error": "retry"}),
    "majority, compared at every step": observed(
        interval=1, respond={"on_replica_drift": "majority"}, integrity={"replica_interval": 1}
    ),
    "majority, compared at every 10th step (interval 10)": observed(
        interval=1, respond={"on_replica_drift": "majority"}, integrity={"replica_interval": 10}
    ),
    "ds_silent, exact": observed(interval=1, direction={"method": "exact"}),
    "norm with .item() per bucket": synchronised_norms,
    "all-gather of gradients": gathered_gradients,
}


def model_shape() -> LlamaConfig:
    """About 20 M parameters."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=3,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def build(settings: Settings) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(model_shape())
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}},
        "zero_optimization": {"stage": settings.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.dtype == "bf16"},
        "steps_per_print": 10**9,
        "silent_consistency": {"enabled": False},
    }
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def step(engine: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Wall seconds of one optimizer step, and CPU seconds of the training thread in it."""
    dist.barrier()
    started, worked = time.perf_counter(), time.thread_time()
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - started, time.thread_time() - worked


def tensor_bytes() -> int:
    """Bytes of every distinct storage that a live tensor holds."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type != "meta":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def worker(rank: int, settings: Settings) -> None:
    size = str(settings.ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_SIZE=size)
    torch.set_num_threads(1)
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # one rank's console is enough
    dist.init_process_group(
        "gloo", init_method=f"file://{settings.directory}/rendezvous", rank=rank, world_size=settings.ranks
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    engine = build(settings)
    tokens = torch.randint(0, 8192, (BATCH, settings.length), generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        step(engine, tokens)
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in settings.variants}
    extra = {}
    for number in range(-1, settings.rounds):  # round -1 is for files, first pictures and caches: not counted
        order = settings.variants if number % 2 == 0 else reversed(settings.variants)
        for name in order:
            before = tensor_bytes() if number < 0 else 0
            length = 10 if "interval 10" in name else settings.turn
            with VARIANTS[name](engine, settings):
                step(engine, tokens)  # hooks, plans and caches are made once per training, not per step
                if number < 0:
                    extra[name] = tensor_bytes() - before
                turn = [step(engine, tokens) for _ in range(length)]
                if number >= 0:
                    times[name].append(turn)
    if rank == 0:
        parameters = sum(p.numel() for p in engine.module.parameters())
        result = {"times": times, "extra": extra, "parameters": parameters}
        Path(settings.directory, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def report(settings: Settings, result: dict[str, Any]) -> None:
    wall, work = added(result["times"], 0), added(result["times"], 1)
    plain_ms = 1e3 * statistics.median(seconds[0] for turn in result["times"]["plain"] for seconds in turn)
    title = (
        f"{settings.ranks} ranks x 1 thread, {result['parameters'] / 1e6:.1f} M parameters, {settings.dtype}, "
        f"ZeRO {settings.stage}, batch {BATCH} x {settings.length}; {settings.rounds} rounds of {settings.turn} steps; "
        f"plain step {plain_ms:.0f} ms"
    )
    table = Table(title=title, caption="added to a plain step of the same round: median of rounds (quartiles)")
    for column in ("variant", "wall time", "CPU time of the training thread", "standing tensors, MiB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name in result["times"]:
        table.add_row(name, shown(wall[name]), shown(work[name]), f"{result['extra'][name] / 2**20:.2f}")
    Console(width=150).print(table)


def added(times: dict[str, list[list[list[float]]]], kind: int) -> dict[str, list[float]]:
    """Relative added time of each round. A turn of interval 10 has one measured step in ten: its mean counts."""
    shares = {}
    for name, turns in times.items():
        centre = statistics.fmean if "interval 10" in name else statistics.median
        ours = [centre([seconds[kind] for seconds in turn]) for turn in turns]
        plain = [centre([seconds[kind] for seconds in turn]) for turn in times["plain"]]
        shares[name] = [a / b - 1 for a, b in zip(ours, plain, strict=True)]
    return shares


def shown(shares: list[float]) -> str:
    low, middle, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    return f"{100 * middle:+.2f} % ({100 * low:+.2f} .. {100 * high:+.2f})"


def main(
    ranks: Annotated[int, typer.Option(help="gloo ranks, one thread each")] = 2,
    stage: Annotated[int, typer.Option(help="ZeRO stage")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    rounds: Annotated[int, typer.Option(help="rounds of all variants")] = 12,
    turn: Annotated[int, typer.Option(help="steps per turn")] = 5,
    length: Annotated[int, typer.Option(help="tokens per row")] = 256,
    variant: Annotated[
        list[str] | None, typer.Option(help="only variants whose name contains this; may be repeated")
    ] = None,
) -> None:
    """Measure the added time of each variant against plain training."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        chosen = tuple(n for n in VARIANTS if n == "plain" or not variant or any(part in n for part in variant))
        settings = Settings(ranks, stage, dtype, rounds, turn, chosen, length, directory)
        multiprocessing.spawn(worker, args=(settings,), nprocs=ranks)
        report(settings, json.loads(Path(directory, "result.json").read_text()))


if __name__ == "__main__":
    typer.run(main)
