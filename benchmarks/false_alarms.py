"""False alarms of real healthy trainings: the embedded model on 4 CPU ranks, through the observer as a user has it.

    python benchmarks/false_alarms.py                    # 6 trainings of 200 steps, about 10 minutes on 2 cores
    python benchmarks/false_alarms.py --steps 50
    python benchmarks/false_alarms.py --scratch --steps 600     # a small GPT from random weights (``scratch.py``)

``--scratch``: warm-up, plateaus and decay in every training, 2 to 3 minutes each on 2 cores. ``--keep FOLDER`` keeps
the records; ``--cell`` chooses.

Sharded sampler, one seed for all ranks (S1-1), ZeRO stage 0, 1 and 2 in fp32 and bf16, with gradient accumulation 1
and 2 in turn; each training has a seed of its own. Everything that judges is on. Warnings and errors are false
alarms, each of which is printed; "drift" is information about the whole run and counted by itself.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "launch"))  # the fine-tune's modules
RANKS = 4
MICRO_BATCH = 2
WORKER = "DS_SILENT_FALSE_ALARMS"  # what the ranks are told, as JSON
CONSOLE = Console(width=110)


@dataclass(frozen=True)
class Cell:
    """One healthy training."""

    stage: int
    dtype: str
    accumulation: int

    @property
    def name(self) -> str:
        return f"zero{self.stage}-{self.dtype}-accumulation{self.accumulation}"


CELLS = tuple(
    Cell(stage, dtype, 1 + (stage + number) % 2)  # every pair of two of the three choices occurs
    for stage, (number, dtype) in itertools.product((0, 1, 2), enumerate(("fp32", "bf16")))
)


def ds_config(cell: Cell, folder: Path) -> Path:
    """The demonstration's configuration with the cell's stage and dtype, written below ``folder``."""
    config = json.loads((ROOT / "configs" / "ds_cpu_demo.json").read_text(encoding="utf-8"))
    config["zero_optimization"]["stage"] = cell.stage
    config["bf16"]["enabled"] = cell.dtype == "bf16"
    config["silent_consistency"]["tensorboard"] = False  # draws what is judged already
    path = folder / f"{cell.name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def work(order: dict[str, Any]) -> None:
    """All trainings, on one rank."""
    import scratch
    import torch.distributed as dist

    from finetune.ranks import join
    from finetune.settings import Settings, checked
    from finetune.trainer import train

    ranks, folder = join(), Path(order["folder"])
    for number, cell in enumerate(CELLS):
        if order["cells"] and cell.name not in order["cells"]:
            continue
        started = time.perf_counter()
        if order["scratch"]:
            seed, output = order["seed"] + number, str(folder / cell.name)
            told = scratch.Scratch(cell.stage, cell.dtype, cell.accumulation, seed, order["steps"], output)
            loss = scratch.train(told)
            if ranks.is_first:
                print(f"{cell.name}: loss {loss:.2f}, {time.perf_counter() - started:.0f} s", flush=True)
            continue
        settings = Settings(
            template="alpaca-with-input",  # what the embedded model was warmed up on
            seed=order["seed"] + number,
            output=folder / cell.name,
            deepspeed_config=str(folder / f"{cell.name}.json"),
            micro_batch=MICRO_BATCH,
            accumulation=cell.accumulation,
            max_steps=order["steps"],
            save_model=False,
            progress=False,
            log_every=order["steps"],
        )
        train(checked(settings), ranks)
        if ranks.is_first:
            print(f"{cell.name}: {time.perf_counter() - started:.0f} s", flush=True)
    dist.destroy_process_group()


def report(folder: Path, seed: int) -> int:
    """Prints the table; the number of false alarms."""
    from ds_silent.sinks.jsonl import read_events, read_metrics

    table = Table(title=f"Real healthy trainings on {RANKS} ranks (seeds from {seed})")
    for column in ("training", "steps", "epochs", "mean cosine", "warnings and errors", "drift notes"):
        table.add_column(column, justify="left" if column == "training" else "right")
    total, steps = 0, 0
    for cell in CELLS:
        if not (folder / cell.name).exists():
            continue
        records = read_metrics(folder / cell.name / "metrics.jsonl")
        path = folder / cell.name / "events.jsonl"
        events = read_events(path) if path.exists() else []
        alarms = [event for event in events if event["severity"] in ("warning", "error")]
        drifts = [event for event in events if event["kind"] == "drift"]
        for event in alarms + drifts:
            CONSOLE.print(f"{cell.name}, step {event['step']}, {event['kind']}: {event['message']}", markup=False)
        total, steps = total + len(alarms), steps + len(records)
        cosines, epoch = [record["direction"]["mean_cosine"] for record in records], records[-1]["epoch"]
        row = (f"{min(cosines):.2f} to {max(cosines):.2f}", str(len(alarms)), str(len(drifts)))
        table.add_row(cell.name, str(len(records)), "" if epoch is None else f"{epoch:.2f}", *row)
    CONSOLE.print(table)
    CONSOLE.print(f"{total} false alarms in {steps:,} steps")
    return total


def main(
    seed: Annotated[int, typer.Option(help="of the first training; each of the others has the next one")] = 42,
    steps: Annotated[int, typer.Option(help="optimizer steps of each training")] = 200,
    scratch: Annotated[bool, typer.Option("--scratch", help="a small GPT from random weights")] = False,
    cell: Annotated[list[str] | None, typer.Option(help="one training; may be given several times")] = None,
    keep: Annotated[Path | None, typer.Option(help="folder for the records; else they are thrown away")] = None,
) -> None:
    """Counts the events of healthy trainings; exit code 1 when there was a false alarm."""
    unknown = set(cell or ()) - {known.name for known in CELLS}
    if unknown:
        names = ", ".join(known.name for known in CELLS)
        raise typer.BadParameter(f"must be among {names}; got {min(unknown)!r}", param_hint="--cell")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ds_silent_false_alarms_") as directory:
        folder = Path(directory) if keep is None else keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for one in CELLS:
            ds_config(one, folder)
        told = {"folder": str(folder), "seed": seed, "steps": steps, "scratch": scratch, "cells": cell or []}
        order = json.dumps(told)
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {**os.environ, WORKER: order, "PYTHONPATH": str(ROOT)}
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), __file__]
        code = subprocess.run([sys.executable, *launch], env=environment, check=False).returncode
        if code:
            raise SystemExit(f"the trainings ended with exit code {code}; the reason stands above")
        alarms = report(folder, seed)
    CONSOLE.print(f"{time.perf_counter() - started:.0f} s")
    raise SystemExit(1 if alarms else 0)


if __name__ == "__main__":
    if WORKER in os.environ:
        work(json.loads(os.environ[WORKER]))
    else:
        typer.run(main)
