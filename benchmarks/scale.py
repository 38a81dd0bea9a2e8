"""What observing costs at any number of ranks, and what is found there: the real code, of simulated ranks.

    python benchmarks/scale.py                                 # both tables
    python benchmarks/scale.py --part cost --ranks 1024        # bytes, host time, length of a record
    python benchmarks/scale.py --part detection --ranks 1024
    python benchmarks/scale.py --part healthy --ranks 1024 --steps 20000       # false alarms, half an hour

**cost.** The writing rank's own exchange, audit, detectors and sinks run over torch's fake process group, which moves
nothing; what the collectives would have brought is drawn (``simulated_ranks.py``). Bytes follow from the sizes of the
buffers: a ring all-reduce sends and receives twice its buffer, an all-gather what all others send. Times are CPU
seconds of the thread, median of the steps.

**detection.** Faults of some ranks, from the tenth step on: the first event that is about it, and whom it names.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from simulated_ranks import Fault, SimulatedRanks

from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import log_steps
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.gather import make_exchange
from ds_silent.exchange.layout import WORDS, ExchangeShape, Layout, layout_of
from ds_silent.exchange.observation import Local, Loss, Observation, Reduced, Status
from ds_silent.exchange.rows import DECIDE
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.measure.evidence import ResponseLog
from ds_silent.measure.record import Context
from ds_silent.measure.reduction_check import ReductionChecker, ReductionSettings
from ds_silent.observing.lockstep import Lockstep
from ds_silent.observing.recorder import Recorder
from ds_silent.records import Event, Seconds
from ds_silent.sinks.base import FanOut
from ds_silent.sinks.jsonl import JsonlSink

CONSOLE = Console(width=130)
LAYERS, PARAMETERS = 28, 1_155_912_192  # of openPangu-1B
STRUCK = 10  # step of a fault
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Step:
    """CPU seconds of one measured step on the writing rank."""

    training: float  # on the training's thread: packing, sending, reading what came
    judging: float  # measuring, examining, judging, handing over to the sinks


class Writer:
    """The writing rank of so many: its exchange, over a process group that moves nothing, and its recorder."""

    def __init__(self, ranks: int, directory: Path, dtype: torch.dtype = torch.float32, size: int = 16384):
        dist.init_process_group("fake", rank=0, world_size=ranks)
        self.group = dist.group.WORLD
        block = {"output_dir": str(directory), "coverage": False, "direction": {"sketch_size": size}}
        self.config = SilentConsistencyConfig.model_validate(block)
        self.layout: Layout = layout_of(self.config, ExchangeShape(ranks, LAYERS, 0, 1, False))
        self.exchange: Any = make_exchange(self.layout, self.group, torch.device("cpu"))
        after = (torch.bfloat16,) if dtype is torch.bfloat16 else ()
        arithmetic = Arithmetic(dtype, after=after, elements=PARAMETERS, width=8 * self.layout.size)
        rate = log_steps(self.config.detectors, 1) + math.log(2.0)
        names = tuple(f"layers.{number}" for number in range(LAYERS))
        audit = ReductionChecker(ReductionSettings(self.layout, arithmetic, rate, names))
        self.recorder = Recorder(FanOut([JsonlSink(directory)]), self.config, audit, self.layout, range(ranks))
        self.events: list[Event] = []
        self.recorder.on_event(self.events.append)
        self._own = torch.randn(LAYERS, self.layout.size)
        self._lockstep = Lockstep(1)
        self._names = names

    def close(self) -> None:
        self.recorder.close()
        dist.destroy_process_group()

    def step(self, step: int, rows: torch.Tensor, sums: torch.Tensor | None) -> Step:
        """One measured step: what this rank sends is its own, what it receives is given."""
        started = time.thread_time()
        arrived: Arrived | None = self.exchange.collect(lambda function: function())
        if arrived is not None:
            self._lockstep.of(arrived)
        self.exchange.post(step, self._observation(step), CollectiveGuard())
        training = time.thread_time() - started
        if sums is not None:
            self.exchange._sums.copy_(sums)
        received = self.exchange._rows.received
        received.view(len(rows), -1).copy_(rows)
        started = time.thread_time()
        if arrived is not None:
            context = Context(8 * step, 8.0, None, Seconds(0.6, 0.001), self._names)
            self.recorder.step(lambda: arrived.all, context, None, ResponseLog(), False)
        return Step(training, time.thread_time() - started)

    def _observation(self, step: int) -> Observation:
        squares = self._own.square().sum(1)
        return Observation(
            Status(step=float(step)),
            loss=Loss(2.0, 1.0, 1.0, 1000.0),
            local=Local(seen=1.0, norm_seen=1.0, squared=squares.sum()),
            reduced=Reduced(seen=1.0, squared=squares.sum()),
            sketch=self._own[0],
            aggregate=self._own[1],
            layer_squares=squares,
            layer_sketches=self._own,
            layer_aggregates=self._own,
        )


def sent(layout: Layout, ranks: int) -> tuple[int, int]:
    """Bytes that a rank sends, and receives, for one measured step."""
    if layout.gathers:
        return (4 * (ranks - 1) * sum(layout.parts),) * 2
    summed = 2 * 4 * sum(layout.sums) * (ranks - 1) // ranks
    row, block = 4 * (layout.scalars + layout.pairs), layout.block or ranks
    both = summed + (block - 1) * row
    if not layout.block:
        return both, both
    extremes = 2 * 4 * 2 * (len(DECIDE) + WORDS)
    return both + extremes, both + extremes


def cost(ranks: int, steps: int) -> tuple[str, ...]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(ranks, Path(directory))
        simulated = SimulatedRanks(writer.layout, ranks)
        seen = [writer.step(step, *simulated.step(step, Fault())) for step in range(1, steps + 1)][3:]
        out, into = sent(writer.layout, ranks)
        writer.close()
        lines = Path(directory, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        longest = max(map(len, lines))
        json.loads(lines[-1])
    judging = statistics.median(step.judging for step in seen)
    training = statistics.median(step.training for step in seen)
    return (
        f"{ranks:,}",
        f"{out / 1e6:.2f} MB",
        f"{into / 1e6:.2f} MB",
        f"{1e3 * judging:.1f} ms",
        f"{1e3 * training:.1f} ms",
        f"{longest / 1e3:.1f} kB",
    )


FAULTS = (
    Fault("gradient zero", 1, gradient=0.0),
    Fault("gradient x 1.5", 1, gradient=1.5),
    Fault("gradient x 10", 1, gradient=10.0),
    Fault("sign flipped", 1, gradient=-1.0),
    Fault("loss + 0.5", 1, loss=0.5),
    Fault("twins", 1, twin=True),
    Fault("1 rank missing", 1, weight=0.0),
    Fault("8 ranks missing", 8, weight=0.0),
    Fault("aggregate x 0.5", 0, aggregate=0.5),
)


def detection(
    ranks: int, noise: float, dtype: torch.dtype, tokens: float, steps: int, chosen: list[str], size: int
) -> Iterator[tuple[str, ...]]:
    """Rows of the table."""
    for fault in (Fault(), *FAULTS):
        if chosen and not any(part in fault.name for part in chosen):
            continue
        with tempfile.TemporaryDirectory() as directory:
            writer = Writer(ranks, Path(directory), dtype, size)
            simulated = SimulatedRanks(writer.layout, ranks, seed=1, noise=noise, tokens=tokens)
            found, early = None, 0
            for step in range(1, steps + 1):
                writer.step(step, *simulated.step(step, fault if step >= STRUCK else Fault()))
                told = [event for event in writer.events if event.severity != "info"]
                early = sum(event.step < STRUCK for event in told)
                found = next((event for event in told if event.step >= STRUCK), None)
                if found is not None and fault.name != "none":
                    break
            writer.close()
        if found is None:
            yield fault.name, "nothing", "", "", str(early)
            continue
        right = set(found.ranks) <= set(range(max(fault.ranks, 1 + fault.twin * fault.ranks)))
        named = ", ".join(map(str, found.ranks[:9])) + ("" if right else " (others!)")
        yield fault.name, found.kind, f"{found.step - STRUCK}", named or "nobody", str(early)


def healthy(ranks: int, steps: int, size: int) -> tuple[str, ...]:
    """A row of the table: what is told although nothing is wrong."""
    told: list[Event] = []
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(ranks, Path(directory), size=size)
        simulated = SimulatedRanks(writer.layout, ranks, seed=2)
        for step in range(1, steps + 1):
            writer.step(step, *simulated.step(step, Fault()))
            if len(writer.events) > len(told):
                told = list(writer.events)
                CONSOLE.print(f"step {step}: {told[-1].kind} {told[-1].ranks}")
        writer.close()
    wrong = [event for event in told if event.severity != "info"]
    return f"{ranks:,}", f"{steps:,}", str(len(wrong)), ", ".join(sorted({event.kind for event in wrong}))


@app.command()
def main(
    part: Annotated[str, typer.Option(help="cost, detection, both, or healthy")] = "both",
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="may be repeated")] = None,
    steps: Annotated[int, typer.Option(min=5, help="of each training")] = 12,
    fault: Annotated[list[str] | None, typer.Option(help="only faults whose name contains this")] = None,
    limit: Annotated[int, typer.Option(min=STRUCK + 2, help="steps in which a fault must be found")] = 60,
    size: Annotated[
        int | None,
        typer.Option(min=256, help="of the sketch: drawing them takes long; default: 16384, for healthy 1024"),
    ] = None,
) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    if part == "healthy":
        table = Table(
            title=f"What is told of healthy ranks, k = {size or 1024:,}, one false alarm in a million steps asked for"
        )
        for column in ("ranks", "steps", "told", "kinds"):
            table.add_column(column, justify="right")
        for count in ranks or [1024]:
            table.add_row(*healthy(count, steps, size or 1024))
        CONSOLE.print(table)
    if part in ("cost", "both"):
        table = Table(title="Cost of a measured step, 28 layers, k = 16,384, no row ids")
        for column in ("ranks", "sent", "received", "judging", "training thread", "line"):
            table.add_column(column, justify="right")
        for count in ranks or [8, 64, 1024, 16384, 65536]:
            table.add_row(*cost(count, steps if count < 65536 else min(steps, 6)))
        CONSOLE.print(table)
    if part in ("detection", "both"):
        for count in ranks or [8, 64, 1024]:
            for dtype, noise in ((torch.float32, 1e-7), (torch.bfloat16, 0.0053 * count**0.25)):
                for tokens in (0.2, 0.0):
                    kind = str(dtype).removeprefix("torch.")
                    table = Table(
                        title=f"{count:,} ranks, {kind} (noise {noise:g}), {'uneven' if tokens else 'equal'} tokens"
                    )
                    for column in ("fault", "event", "steps later", "ranks named", "before it"):
                        table.add_column(column)
                    for row in detection(count, noise, dtype, tokens, limit, fault or [], size or 16384):
                        table.add_row(*row)
                    CONSOLE.print(table)


if __name__ == "__main__":
    app()
