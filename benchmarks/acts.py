"""What one act of a response costs, in steps of the training that it happens in.

    python benchmarks/acts.py                    # 4 ranks x 1 thread, about 20 M parameters, fp32, stage 0

One process group trains the model of ``benchmarks/overhead.py``. Again and again a fault is injected: a reduction whose
result is wrong once, a rank whose update is skipped (so that every tensor of its replica differs). The time of the act
is what its ``repaired`` event says, over the median plain step of the same process group; the shared machine's noise
hits both.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import deepspeed
import deepspeed.comm
import overhead
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from rich.table import Table

import ds_silent
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events

ODD = 1
QUIET = {"coverage": False, "preflight": False, "tensorboard": False, "detectors": {"enabled": False}}
OFF = {"aggregation": False, "replica_interval": 0}
ACTS: dict[str, dict[str, Any]] = {
    "retry": {"respond": {"on_aggregation_error": "retry"}, "integrity": {"replica_interval": 0}},
    "majority": {
        "respond": {"on_replica_drift": "majority"},
        "direction": {"method": "off"},
        "integrity": {"aggregation": False, "replica_interval": 1},
    },
    "mean (PAFT-Sync)": {
        "resync": {"mode": "periodic", "interval": 1},
        "direction": {"method": "off"},
        "integrity": OFF,
    },
    "mean beside the next step (PAFT-Dyn)": {
        "resync": {"mode": "dynamic", "interval": 1},
        "direction": {"method": "off"},
        "integrity": OFF,
    },
}


def wrong_once(patches: Patches) -> None:
    """The first reduction of a gradient arrives with noise, on all ranks."""
    left = [1]

    def reduce(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if left[0] and tensor.numel() > 1000:
            left[0] -= 1
            tensor.mul_(1.5)
        return result

    patches.wrap(deepspeed.comm, "all_reduce", reduce)


def skipped_once(engine: Any, patches: Patches) -> None:
    """One rank's optimizer leaves out a step: all its weights and all its optimizer state differ."""
    if dist.get_rank() == ODD:
        patches.wrap(engine.basic_optimizer, "step", lambda original, *args, **kwargs: None)


def worker(rank: int, settings: overhead.Settings, times: int) -> None:
    size = str(settings.ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_SIZE=size)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{settings.directory}/rendezvous", rank=rank, world_size=settings.ranks
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    engine = overhead.build(settings)
    tokens = torch.randint(0, 8192, (overhead.BATCH, settings.length), generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        overhead.step(engine, tokens)
    plain = []
    for name, block in ACTS.items():
        plain += [overhead.step(engine, tokens)[0] for _ in range(times)]
        folder = Path(settings.directory, re.sub(r"\W+", "-", name))
        observer = ds_silent.attach(engine, {**QUIET, **block, "output_dir": str(folder)})
        assert observer is not None
        for _ in range(times):
            overhead.step(engine, tokens)
            patches = Patches()
            wrong_once(patches) if name == "retry" else skipped_once(engine, patches)
            overhead.step(engine, tokens)
            patches.undo()
            overhead.step(engine, tokens)
        observer.close()
    if rank == 0:
        Path(settings.directory, "plain.json").write_text(json.dumps(plain))
    dist.barrier()
    dist.destroy_process_group()


def main(
    ranks: Annotated[int, typer.Option(min=3, help="gloo ranks, one thread each")] = 4,
    times: Annotated[int, typer.Option(min=1, help="faults per response")] = 5,
    length: Annotated[int, typer.Option(help="tokens per row")] = 64,
) -> None:
    """Measure each act over a plain step."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        settings = overhead.Settings(ranks, 0, "fp32", length, directory)
        multiprocessing.spawn(worker, args=(settings, times), nprocs=ranks)
        plain = statistics.median(json.loads(Path(directory, "plain.json").read_text()))
        title = f"{ranks} ranks x 1 thread, fp32, ZeRO 0, batch {overhead.BATCH} x {length}; plain step {plain:.2f} s"
        table = Table(title=title)
        for column in ("act", "repaired", "steps of time, median (range)", "sent into its collectives, per rank"):
            table.add_column(column)
        for name in ACTS:
            events = read_events(Path(directory, re.sub(r"\W+", "-", name), "events.jsonl"))
            found = [event["message"] for event in events if event["kind"] == "repaired"]
            costs = [re.search(r"took ([\d.e+-]+) s and ([\d.]+ \w+) sent", message) for message in found]
            shares = [float(cost.group(1)) / plain for cost in costs if cost]
            sent = {cost.group(2) for cost in costs if cost}
            spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} .. {max(shares):.2f})" if shares else "-"
            table.add_row(name, f"{len(found)} of {times}", spread, ", ".join(sorted(sent)))
        Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
