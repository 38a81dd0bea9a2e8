"""What a trace adds to a step: the CPU time of the functions that nothing but a trace calls, on each rank.

    python benchmarks/overhead.py --part trace --framework ddp

Steps with a trace and without it differ by less than a shared machine shows; the CPU time of a few functions depends
less on what else runs. Every second step is plain, for the comparison. What is in none of the functions: the few kB
more that the ranks exchange, and the hooks of the first forward.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from overhead_pieces import Steps
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_silent.capture.traced import TraceCapture
from ds_silent.measure.tracer import Tracer
from ds_silent.sinks.jsonl import TraceSink

FUNCTIONS = {"weights and rows": (TraceCapture, "observed"), "the line": (Tracer, "step"), "file": (TraceSink, "write")}
"""The first runs on the training's thread of every rank, the others beside it on rank 0."""
PLAIN = "plain step"


def measure(engine: Any, tokens: Tensor, directory: str, pairs: int) -> None:
    """Every rank calls it, and leaves ``trace-RANK.json``: seconds of CPU time by step."""
    steps = Steps(engine, tokens, directory, {"interval": 1, "trace": {}})
    for _ in range(5):
        steps.observed()
    spent: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    kept = {name: getattr(kind, method) for name, (kind, method) in FUNCTIONS.items()}
    try:
        for name, (kind, method) in FUNCTIONS.items():
            setattr(kind, method, timed(kept[name], spent[name]))
        spent[PLAIN] = []
        for _ in range(pairs):
            spent[PLAIN].append(steps.plain()[2])
            steps.observed()
    finally:
        for name, (kind, method) in FUNCTIONS.items():
            setattr(kind, method, kept[name])
    Path(directory, f"trace-{dist.get_rank()}.json").write_text(json.dumps(spent))


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Add the CPU time of each call on its own thread."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - began)

    return call


def report(directory: str, title: str) -> None:
    """Print a line for each rank that has left its file."""
    table = Table(title=title, caption="CPU time of one step in ms, typical and (mean)")
    for column in ("rank", PLAIN, *FUNCTIONS, "together"):
        table.add_column(column, justify="right")
    for file in sorted(Path(directory).glob("trace-*.json")):
        spent = json.loads(file.read_text())
        both = [[middle(spent[name]) for name in (PLAIN, *FUNCTIONS)] for middle in (median, mean)]
        cells = [f"{1e3 * one:.2f} ({1e3 * other:.2f})" for one, other in zip(*both, strict=True)]
        shares = [100 * sum(found[1:]) / found[0] for found in both]
        table.add_row(file.stem.rpartition("-")[2], *cells, f"{shares[0]:.2f} % ({shares[1]:.2f} %)")
    Console(width=150).print(table)


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0
