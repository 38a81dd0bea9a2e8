"""What each method costs: bytes handed to collectives and time, variants taking turns in one process group.

    tables, numbers = measure_cost()

Every variant has an engine of its own around the same residual network (0.7 M parameters, images of 32 x 32, SGD with
momentum). A turn is ten steps, so H = 5 averages twice in it; the order of the turns is reversed every round, and a
turn is compared with the plain turn of its own round.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import ds_silent
from ds_silent.drill.faults.injection import NOTHING, Collective, Injection
from ds_silent.drill.train_deepspeed import EngineHooks
from ds_silent.practice.ranks import on_ranks

from .methods import METHODS, NO_COMPARISON, Method
from .tasks import Block
from .training import RANKS, counted_bytes

TURN, ROUNDS, BATCH, WIDTH, PERIOD = 10, 12, 16, 16, 5
PLAIN = "no mitigation"
DYNAMIC = Method({**NO_COMPARISON, "resync": {"mode": "dynamic", "interval": PERIOD}})


@dataclass(frozen=True)
class Variant:
    """``trouble``: ``drift``, a bit of every tensor differs between the ranks; ``fault``, at a turn's first step."""

    name: str
    method: Method = field(hash=False)
    trouble: str = "nothing"


VARIANTS = (
    Variant(PLAIN, METHODS["none"]),
    Variant("no mitigation again: the noise of this measurement", METHODS["none"]),
    Variant("PAFT-Sync H = 5, nothing wrong", METHODS["sync-5"]),
    Variant("PAFT-Sync H = 5, every tensor drifts", METHODS["sync-5"], "drift"),
    Variant("PAFT-Dyn, H at most 5, nothing wrong", DYNAMIC),
    Variant("PAFT-Dyn, H at most 5, every tensor drifts", DYNAMIC, "drift"),
    Variant("retry, nothing wrong", METHODS["retry"]),
    Variant("retry, one wrong reduction in ten steps", METHODS["retry"], "fault"),
    Variant("majority every step, nothing wrong", METHODS["majority"]),
    Variant("majority every step, one wrong replica in ten steps", METHODS["majority"], "fault"),
)


class ResNet18(nn.Module):
    """ResNet-18's layers at a quarter of its width, with GroupNorm; the loss of 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False)
        widths = ((WIDTH, 1), (WIDTH, 1), (WIDTH, 2), (2 * WIDTH, 1), (2 * WIDTH, 2), (4 * WIDTH, 1), (4 * WIDTH, 2))
        self.blocks = nn.Sequential(*(Block(*shape) for shape in (*widths, (8 * WIDTH, 1))))
        self.head = nn.Linear(8 * WIDTH, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return F.cross_entropy(self.head(hidden), labels)


def measure_cost() -> tuple[list[Table], dict[str, Any]]:
    (message,) = on_ranks(_on_rank, (), RANKS, silence=1800.0)
    times, bytes_per_step, parameters, repairs = message
    plain = times[PLAIN]
    table = Table(
        title=f"{RANKS} ranks, {parameters / 1e6:.1f} M parameters, {ROUNDS} rounds of {TURN} steps, plain step "
        f"{1e3 * statistics.median(plain) / TURN:.0f} ms; its reduction takes {bytes_per_step[PLAIN] / 1e6:.1f} MB",
        caption="time: ratio to the plain turn of the same round, median (quartiles); bytes: handed to collectives by "
        "a rank, beyond the reduction of the gradient",
    )
    for column in ("method", "added time", "added bytes per step", "of the reduction", "repairs told"):
        table.add_column(column, justify="left" if column == "method" else "right")
    numbers: dict[str, Any] = {"parameters": parameters, "times": times, "bytes_per_step": bytes_per_step}
    for variant in VARIANTS:
        ratios = [ours / base - 1.0 for ours, base in zip(times[variant.name], plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        added = bytes_per_step[variant.name] - bytes_per_step[PLAIN]
        table.add_row(
            variant.name,
            f"{100 * middle:+.1f} % ({100 * low:+.1f} .. {100 * high:+.1f})",
            f"{added:,.0f}",
            f"{100 * added / bytes_per_step[PLAIN]:.2f} %",
            str(repairs[variant.name]),
        )
    return [table], numbers


def _on_rank(send: Callable[[Any], None]) -> None:
    logging.disable(logging.WARNING)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    times: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    given: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="paft_cost_") as folder:
        engines = {variant.name: _engine(variant, f"{folder}/{n}") for n, variant in enumerate(VARIANTS)}
        for number in range(-1, ROUNDS):  # round -1 is for plans and buffers
            for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
                engine = engines[variant.name]
                with counted_bytes() as sent:
                    seconds = _turn(engine, variant, images, labels, rank)
                if number >= 0:
                    times[variant.name].append(seconds)
                given[variant.name] = sum(sent.values()) / TURN
        parameters = sum(p.numel() for p in engines[PLAIN].module.parameters())
        repairs = {}
        for n, variant in enumerate(VARIANTS):
            observer = ds_silent.observer_of(engines[variant.name])
            if observer is not None:
                observer.close()
            repairs[variant.name] = _repairs(f"{folder}/{n}/events.jsonl") if rank == 0 else 0
        send((times, given, parameters, repairs))


def _engine(variant: Variant, folder: str) -> Any:
    torch.manual_seed(0)
    model = ResNet18()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    block = variant.method.block(folder)
    if block is not None:
        config["silent_consistency"] = block
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    engine, *_ = ds_silent.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _turn(engine: Any, variant: Variant, images: Tensor, labels: Tensor, rank: int) -> float:
    """Seconds of ten steps, from a barrier to a barrier."""
    injection = Injection(reduction=partial(_wrong_at_first, [])) if variant.trouble == "fault" else NOTHING
    dist.barrier()
    started = time.perf_counter()
    with EngineHooks(engine, injection if rank == 1 else NOTHING) as hooks:
        for step in range(1, TURN + 1):
            if variant.trouble == "drift":
                _drift(engine, rank)
            loss = engine(images, labels)
            with hooks.backward(step, 0, last=True):
                engine.backward(loss)
                engine.step()
    dist.barrier()
    return time.perf_counter() - started


def _wrong_at_first(seen: list[int], under_way: Collective) -> None:
    """The turn's first reduction, and not its repetition."""
    under_way.run()
    if not seen:
        under_way.tensor[0] += 1.0
    seen.append(under_way.step)


def _drift(engine: Any, rank: int) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            own = engine.optimizer.state.get(parameter, {})
            for tensor in (parameter, *(value for value in own.values() if isinstance(value, Tensor))):
                tensor.view(-1)[0] += 1e-6 * rank


def _repairs(path: str) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            return sum('"repaired"' in line for line in file)
    except FileNotFoundError:
        return 0
