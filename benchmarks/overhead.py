"""What watching costs: the same training in one process group, single steps with and without, in alternation.

    python benchmarks/overhead.py                      # 2 ranks x 1 thread, about 20 M parameters, fp32, stage 0
    python benchmarks/overhead.py --ranks 4 --stage 1 --dtype bf16
    python benchmarks/overhead.py --ranks 4 --variant retry --variant majority
    python benchmarks/overhead.py --framework ddp      # or fsdp2
    python benchmarks/overhead.py --all --pairs 20
    python benchmarks/overhead.py --part pieces        # what one measured step pays for: see overhead_pieces
    python benchmarks/overhead.py --device cuda --framework ddp --model 1B --dtype bf16 --length 2048 --ranks 8
    python benchmarks/overhead.py --part trace         # what a trace adds to it: see overhead_trace

Between any two steps of a variant lies a plain step; each is compared with the plain steps right before and right after
it, and the variants' order is drawn anew in every cycle, so a drift of the machine hits all alike. Hooks are put on and
taken off between the clocks. One more "variant" is plain again: its interval says what this machine can show today,
and steps are taken until that is within half a percent (``--precision``) or the time (``--minutes``) is over. Absolute
times of a shared machine say little; the ratios and their intervals are the result.

Wall time is the slowest rank's, by the typical step (``paired.shift``). CPU time is that of all threads of all ranks,
by the mean of all steps, so that what happens at few steps only is in it. What rank 0 judges beside the training is
waited for before the clock is read: a training that goes on meanwhile pays less. Ctrl-C shows what is known by then.

On a GPU one process is one of ``--ranks`` equal ranks (``mirror.py``): all that a rank does, and no network. The clock
is read around ten steps at a time, the device is waited for at both ends, and within them only as a training waits.

Beside ds_silent the two obvious ways are run: all-gathering the gradients for their pairwise cosines, and a norm
with one host synchronisation per bucket in a gradient hook, as in the paper's released code. Under DDP sums that read
the gradient as often as ds_silent does, and do nothing else, are the limit.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import mirror
import overhead_pieces
import overhead_trace
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from engines import FRAMEWORKS, TorchEngine, deepspeed_engine
from engines import observed as attached
from obvious_ways import gathered_gradients, summed_gradients, synchronised_norms
from paired import Shift, mean_ratio, mixture, shift
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import ds_silent
from ds_silent import device

BATCH = 4
REPLICATED = ("deepspeed", "ddp")
PARTS, DTYPES, DEVICES = ("pairs", "pieces", "trace"), ("fp32", "bf16"), ("cpu", "cuda")
STEPS = {"cpu": 1, "cuda": 10}  # between two looks at the clock
WARM_UP = {"cpu": 3, "cuda": 1}  # times so many: files, first pictures, plans and caches come once per training
MODELS = {"20M": (384, 8, 6, 3), "110M": (768, 12, 12, 4), "1B": (2048, 16, 32, 8)}
"""Width, layers, heads, heads of keys and values; by the number of parameters, nearly."""


@dataclass(frozen=True)
class Settings:
    ranks: int
    stage: int
    dtype: str
    length: int
    directory: str
    variants: tuple[str, ...] = ()
    pairs: int = 0  # at least, of each variant
    seconds: float = 0.0  # at most, for what is beyond
    precision: float = 0.0  # half width of the noise floor's interval
    framework: str = "deepspeed"
    part: str = "pairs"
    device: str = "cpu"
    model: str = "20M"


Block = dict[str, Any]


@contextmanager
def plain(engine: Any, settings: Settings) -> Iterator[None]:
    yield


def observed(name: str, block: Block) -> Callable[..., Any]:
    """One observer for the whole benchmark, connected for its steps: files and plans are made once, as in training."""
    made: list[ds_silent.Observer] = []

    @contextmanager
    def variant(engine: Any, settings: Settings) -> Iterator[None]:
        if made:
            made[0].connect()
        else:
            folder = "".join(letter if letter.isalnum() else "-" for letter in name)
            made.append(attached(engine, {"output_dir": f"{settings.directory}/{folder}", **block}))
        yield made[0]._publisher.recorder.finish
        if made[0].closed or not made[0]._steps.observing:
            raise RuntimeError(f'"{name}" observes no more: its figures would be those of a plain training')
        made[0]._capture.close(ended=False)

    # of the observer: where nobody but it counts the steps (DDP, FSDP2), those of other variants are not in it
    variant.under_way = lambda: made[0]._steps.plan.step  # type: ignore[attr-defined]
    return variant


@dataclass(frozen=True)
class Variant:
    """One way to train, beside the plain one."""

    block: Block | None = None  # of an observer
    other: Callable[..., Any] | None = None
    least_ranks: int = 2
    frameworks: tuple[str, ...] = FRAMEWORKS

    @property
    def interval(self) -> int:
        return 1 if self.block is None else int(self.block.get("interval", 1))


FLOOR = "plain again (noise floor)"
VARIANTS: dict[str, Variant] = {
    FLOOR: Variant(other=plain),
    "ds_silent, interval 1": Variant({"interval": 1}),
    "ds_silent, interval 10": Variant({"interval": 10}),
    "judged within the step (stop_on)": Variant({"detectors": {"stop_on": "error"}}),
    "ds_silent, interval 1, no integrity": Variant({"integrity": {"aggregation": False, "replica_interval": 0}}),
    "ds_silent, interval 1, no rules": Variant({"rules": False}),
    "ds_silent, interval 1, trace": Variant({"trace": {}}),
    "retry ready": Variant({"respond": {"on_aggregation_error": "retry"}}, frameworks=("deepspeed",)),
    "majority, compared at every step": Variant(
        {"respond": {"on_replica_drift": "majority"}, "integrity": {"replica_interval": 1}},
        least_ranks=3,
        frameworks=REPLICATED,
    ),
    "majority, compared at every 10th step": Variant(
        {"respond": {"on_replica_drift": "majority"}, "integrity": {"replica_interval": 10}},
        least_ranks=3,
        frameworks=REPLICATED,
    ),
    "nothing but sums, 2 and a share": Variant(other=summed_gradients, frameworks=("ddp",)),
    "ds_silent, exact": Variant({"direction": {"method": "exact"}}),
    "norm with .item() per bucket": Variant(other=synchronised_norms, frameworks=("deepspeed",)),
    "all-gather of gradients": Variant(other=gathered_gradients, frameworks=("deepspeed",)),
}
COMMON = ("ds_silent, interval 1", "ds_silent, interval 10")


def model_shape(name: str = "20M") -> LlamaConfig:
    """One of :data:`MODELS`."""
    width, layers, heads, pairs = MODELS[name]
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def build(settings: Settings) -> Any:
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = LlamaForCausalLM(model_shape(settings.model))
    if settings.framework == "deepspeed":
        return deepspeed_engine(model, settings.stage, settings.dtype, BATCH)
    return TorchEngine(model, settings.framework, settings.dtype)


def step(engine: Any, tokens: torch.Tensor, finish: Callable[[], None] | None = None) -> tuple[float, float]:
    """Seconds of one optimizer step (of :data:`STEPS` on a GPU): on the clock, and of this process's CPU.

    ``finish``: waits for what goes on beside the training, which else the plain step after it would pay for.
    """
    dist.barrier()
    steps = STEPS[tokens.device.type]
    waits = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    waits()
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    if finish is not None:
        finish()
    waits()
    return (time.perf_counter() - started) / steps, (time.process_time() - worked) / steps


def tensor_bytes() -> int:
    """Bytes of every distinct storage that a live tensor holds."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type != "meta":
            storage = candidate.untyped_storage()
            with suppress(RuntimeError):  # FSDP2 holds tensors whose storage is gone
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass
class Pairs:
    """One variant's steps beside the plain ones around them; all of one kind, measured or not."""

    wall: list[float] = field(default_factory=list)  # log of the ratio, slowest rank
    cpu: list[float] = field(default_factory=list)  # seconds, all ranks
    plain_cpu: list[float] = field(default_factory=list)

    def add(self, before: list[float], own: list[float], after: list[float]) -> None:
        """Each is (wall, CPU) of one step."""
        self.wall.append(math.log(own[0]) - (math.log(before[0]) + math.log(after[0])) / 2)
        self.cpu.append(own[1])
        self.plain_cpu.append((before[1] + after[1]) / 2)


def joined(seconds: list[tuple[float, float]]) -> list[list[float]]:
    """(wall of the slowest rank, CPU of all ranks) of each step of one rank's list. A collective."""
    own = torch.tensor(seconds, dtype=torch.float32)
    slowest, total = own[:, 0].clone(), own[:, 1].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return torch.stack((slowest, total), dim=1).tolist()


def worker(rank: int, settings: Settings) -> None:
    size = str(settings.ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_SIZE=size)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reports
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # one rank's console is enough
    if settings.device == "cuda":
        torch.set_float32_matmul_precision("high")  # as trainings on GPUs do
        mirror.register()
        dist.init_process_group("mirror", store=dist.HashStore(), rank=rank, world_size=settings.ranks)
    else:
        rendezvous = f"file://{settings.directory}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings.ranks)
    if settings.framework == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    bar = tqdm(total=settings.pairs, unit="cycle", desc="building the model", disable=rank != 0)
    engine = build(settings)
    tokens = torch.randint(0, 8192, (BATCH, settings.length), generator=torch.Generator().manual_seed(rank))
    tokens = tokens.to(settings.device)
    for _ in range(WARM_UP[settings.device]):
        step(engine, tokens)
    if settings.part == "pieces":
        bar.close()
        overhead_pieces.measure(engine, tokens, settings.directory, settings.pairs, settings.seconds)
    elif settings.part == "trace":
        bar.close()
        overhead_trace.measure(engine, tokens, settings.directory, settings.pairs)
    else:
        measure_pairs(engine, tokens, settings, bar)
    dist.barrier()
    dist.destroy_process_group()


def measure_pairs(engine: Any, tokens: torch.Tensor, settings: Settings, bar: Any) -> None:
    """Every rank calls it; rank 0 leaves ``result.json`` after each cycle."""
    rank = dist.get_rank()
    variants, extra = {}, {}
    for name in settings.variants:
        bar.set_description(f"warming up: {name}")
        chosen = VARIANTS[name]
        variants[name] = chosen.other or observed(name, chosen.block or {})
        before = tensor_bytes()
        for _ in range(WARM_UP[settings.device]):
            with variants[name](engine, settings) as finish:
                step(engine, tokens, finish)
        extra[name] = tensor_bytes() - before
    parameters = sum(p.numel() for p in engine.module.parameters())
    file, partial = (Path(settings.directory, name) for name in ("result.json", "partial.json"))
    bar.set_description("measuring")
    for pairs, plain_wall, floor in measured(engine, tokens, settings, variants):
        if rank == 0:
            kinds = {name: {kind: vars(own) for kind, own in kinds.items()} for name, kinds in pairs.items()}
            result = {"pairs": kinds, "plain": plain_wall, "extra": extra, "parameters": parameters}
            partial.write_text(json.dumps(result))
            partial.replace(file)  # as a whole, whenever Ctrl-C comes
            bar.set_postfix_str(f"noise floor ± {100 * floor.half_width:.2f} %", refresh=False)
            bar.update()
    bar.close()


def measured(
    engine: Any, tokens: torch.Tensor, settings: Settings, variants: dict[str, Callable[..., Any]]
) -> Iterator[tuple[dict[str, dict[str, Pairs]], list[float], Shift]]:
    """Cycles of plain, variant, plain, variant, ..., plain until the noise floor is known well enough; all so far."""
    pairs = {name: {"measured": Pairs(), "not measured": Pairs()} for name in variants}
    plain_wall: list[float] = []
    order, drawn = list(variants), random.Random(0)  # the same on every rank
    cycles, started, enough = 0, time.monotonic(), False
    while not enough:
        drawn.shuffle(order)
        kinds = []
        seconds = [step(engine, tokens)]
        for name in order:
            under_way = variants[name].under_way() if hasattr(variants[name], "under_way") else engine.global_steps + 1
            due = under_way % VARIANTS[name].interval == 0
            kinds.append("measured" if due else "not measured")
            with variants[name](engine, settings) as finish:
                seconds.append(step(engine, tokens, finish))
            seconds.append(step(engine, tokens))
        rows = joined(seconds)
        for place, (name, kind) in enumerate(zip(order, kinds, strict=True)):
            pairs[name][kind].add(*rows[2 * place : 2 * place + 3])
        plain_wall += [wall for wall, _ in rows[::2]]
        cycles += 1
        floor = shift(pairs[FLOOR]["measured"].wall)
        late = time.monotonic() - started > settings.seconds
        done = cycles >= settings.pairs and (floor.half_width <= settings.precision or late)
        word = torch.tensor([int(done)], dtype=torch.int32)
        dist.broadcast(word, src=0)  # the clocks differ
        enough = bool(word.item())
        yield pairs, plain_wall, floor


def added(kinds: dict[str, dict[str, list[float]]], interval: int) -> tuple[Shift, Shift]:
    """Of wall and CPU time; a training has one measured step in ``interval``, whatever share of the pairs had."""
    known = {kind: pairs for kind, pairs in kinds.items() if pairs["wall"]}
    if set(known) == {"measured", "not measured"}:
        weights = {"measured": 1 / interval, "not measured": 1 - 1 / interval}
    else:
        weights = dict.fromkeys(known, 1.0)
    walls = [(weights[kind], shift(pairs["wall"])) for kind, pairs in known.items()]
    works = [(weights[kind], mean_ratio(pairs["cpu"], pairs["plain_cpu"])) for kind, pairs in known.items()]
    return mixture(walls), mixture(works)


def trained(settings: Settings) -> str:
    """What is trained, and how."""
    trainer = f"ZeRO {settings.stage}" if settings.framework == "deepspeed" else settings.framework
    return f"{settings.dtype}, {trainer}, batch {BATCH} x {settings.length}"


def ranks_of(settings: Settings) -> str:
    """How many, and where."""
    if settings.device == "cuda":
        return f"one of {settings.ranks} ranks on a {device.model_name()}"
    return f"{settings.ranks} ranks x 1 thread"


def report(settings: Settings, result: dict[str, Any]) -> None:
    count = sum(len(pairs["wall"]) for pairs in result["pairs"][FLOOR].values())
    title = (
        f"{ranks_of(settings)}, {result['parameters'] / 1e6:.1f} M parameters, {trained(settings)}; "
        f"{count} pairs of steps per variant; "
        f"plain step {1e3 * statistics.median(result['plain']):.1f} ms"
    )
    table = Table(title=title, caption="added to a plain step (95 % interval)")
    for column in ("variant", "wall time, typical step", "CPU time of all ranks, mean", "standing tensors, MiB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, kinds in result["pairs"].items():
        wall, work = added(kinds, VARIANTS[name].interval)
        table.add_row(name, wall.percent(), work.percent(), f"{result['extra'][name] / 2**20:.2f}")
    console = Console(width=150)
    console.print(table)
    floor, _ = added(result["pairs"][FLOOR], 1)
    if floor.half_width > settings.precision:
        console.print(
            f"The noise floor's interval is ± {100 * floor.half_width:.2f} %, wider than ± "
            f"{100 * settings.precision:.2f} %: differences below it say nothing; give more --minutes or a quieter "
            "machine."
        )


def chosen_variants(ranks: int, parts: list[str], everything: bool, framework: str = "deepspeed") -> tuple[str, ...]:
    """The noise floor, and what was asked for and is possible with so many ranks; what is not is said."""
    parts = parts or list(COMMON)
    named = {name for name in VARIANTS for part in parts if part == name or (part not in VARIANTS and part in name)}
    asked = [name for name in VARIANTS if name != FLOOR and (everything or name in named)]
    enough = [name for name in asked if VARIANTS[name].least_ranks <= ranks]
    possible = [name for name in enough if framework in VARIANTS[name].frameworks]
    for name in enough:
        if name not in possible:
            typer.echo(f'"{name}" is left out: it is for {", ".join(VARIANTS[name].frameworks)}.')
    for name in asked:
        if name not in enough:
            typer.echo(f'"{name}" is left out: it needs at least {VARIANTS[name].least_ranks} ranks, not {ranks}.')
    if not possible:
        typer.echo(
            f"--variant {' '.join(parts)!a} names nothing that {ranks} ranks can run; known: {', '.join(VARIANTS)}",
            err=True,
        )
        raise typer.Exit(2)
    return (FLOOR, *possible)


def ended(settings: Settings) -> bool:
    """Start the ranks and wait for their end; False where Ctrl-C came before it."""
    try:
        processes = settings.ranks if settings.device == "cpu" else 1
        started = multiprocessing.spawn(worker, args=(settings,), nprocs=processes, join=False)
        while not started.join():
            pass
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.kill()
        return False
    return True


def main(
    ranks: Annotated[int, typer.Option(min=2, help="gloo ranks, one thread each")] = 2,
    framework: Annotated[str, typer.Option(help="deepspeed, ddp or fsdp2")] = "deepspeed",
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage; of DeepSpeed")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    pairs: Annotated[int, typer.Option(min=1, help="steps of each variant, at least")] = 200,
    minutes: Annotated[float, typer.Option(min=0.0, help="go on for so long where the noise floor is too wide")] = 30.0,
    precision: Annotated[float, typer.Option(min=0.0, help="half width of the noise floor's interval, percent")] = 0.5,
    length: Annotated[int, typer.Option(min=2, help="tokens per row; more make the step longer, not the cost")] = 64,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="only the variant of this name, or those whose name contains it; may be repeated"),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="all variants")] = False,
    part: Annotated[
        str,
        typer.Option(
            help="pairs: the variants beside plain steps; pieces: of one measured step; trace: what it adds to that"
        ),
    ] = "pairs",
    place: Annotated[str, typer.Option("--device", help="cpu, or cuda: one of the ranks, see above")] = "cpu",
    model: Annotated[str, typer.Option(help="number of parameters: 20M, 110M or 1B")] = "20M",
) -> None:
    """Measure the added time of each variant against plain training."""
    os.environ.setdefault("DS_ACCELERATOR", place)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # seconds: a log needs fewer lines
    if framework not in FRAMEWORKS:
        raise typer.BadParameter(f"--framework must be one of {', '.join(FRAMEWORKS)}, got {framework!a}")
    if part not in PARTS:
        raise typer.BadParameter(f"--part must be one of {', '.join(PARTS)}, got {part!a}")
    if place not in DEVICES:
        raise typer.BadParameter(f"--device must be one of {', '.join(DEVICES)}, got {place!a}")
    if place == "cuda" and (framework == "deepspeed" or not torch.cuda.is_available()):
        raise typer.BadParameter("--device cuda is for ddp and fsdp2, and needs a GPU that torch can use")
    if model not in MODELS:
        raise typer.BadParameter(f"--model must be one of {', '.join(MODELS)}, got {model!a}")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!a}")
    if part != "pairs" and (variant or everything):
        raise typer.BadParameter(f"--part {part} looks at the steps of interval 1 only: leave out --variant and --all")
    variants = chosen_variants(ranks, variant or [], everything, framework) if part == "pairs" else ()
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(
            ranks,
            stage,
            dtype,
            length,
            directory,
            variants,
            pairs,
            60 * minutes,
            precision / 100,
            framework,
            part,
            place,
            model,
        )
        whole, result = ended(settings), Path(directory, "result.json" if part == "pairs" else f"{part}-0.json")
        if result.exists() and part != "pairs":
            shown = overhead_pieces.report if part == "pieces" else overhead_trace.report
            shown(directory, f"{ranks_of(settings)}, {trained(settings)}")
        elif result.exists():
            report(settings, json.loads(result.read_text()))
        if not whole:
            typer.echo(f"Interrupted: {'that' if result.exists() else 'nothing'} is what is known.", err=True)
            raise typer.Exit(130)


if __name__ == "__main__":
    typer.run(main)
