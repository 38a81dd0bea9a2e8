"""PAFT and its alternatives under gradient aggregation errors: real trainings on 4 gloo ranks of this machine.

    python benchmarks/paft.py --part noise --seeds 5       # N(0, sigma^2) on every rank's aggregated gradient
    python benchmarks/paft.py --part bursts                # bursts, bit flips, dropped and stale buckets
    python benchmarks/paft.py --part language              # noise, on the drill's language model
    python benchmarks/paft.py --part divergence            # replicas' distance against its formula; draws the pictures
    python benchmarks/paft.py --part cost                  # bytes and time

Each training's result is appended to ``--results`` as it comes, and what stands there is not run again: to begin anew,
delete the file.
"""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

from paft.cells import PARTS
from paft.cost import measure_cost
from paft.pictures import draw_accuracy, draw_divergence
from paft.store import Store
from paft.tables import burst_tables, divergence_tables, language_tables, noise_tables

PICTURES = Path("build")


class Part(str, Enum):
    noise = "noise"
    bursts = "bursts"
    cost = "cost"
    divergence = "divergence"
    language = "language"


TABLES = {
    Part.noise: noise_tables,
    Part.bursts: burst_tables,
    Part.language: language_tables,
    Part.divergence: divergence_tables,
}


def main(
    part: Annotated[Part, typer.Option(help="which trainings")],
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each kind")] = 5,
    results: Annotated[Path, typer.Option(help="where the results of trainings are kept")] = Path(
        "runs/paft/results.jsonl"
    ),
    keep: Annotated[Path | None, typer.Option("--json", help="write the tables' numbers here")] = None,
    method: Annotated[list[str] | None, typer.Option(help="only these methods; may be repeated")] = None,
) -> None:
    """Run what is missing of one part, and print its tables."""
    store = Store(results)
    if part is Part.cost:
        tables, numbers = measure_cost()
    else:
        store.complete(training for training in PARTS[part.value](seeds) if not method or training.method in method)
        tables, numbers = TABLES[part](store, seeds)
    console = Console(width=150)
    console.print(*tables)
    PICTURES.mkdir(exist_ok=True)
    if part is Part.divergence:
        draw_divergence(store, seeds, PICTURES / "paft_divergence.png")
    if part is Part.noise:
        draw_accuracy(store, seeds, PICTURES / "paft_accuracy.png")
    if keep is not None:
        keep.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
