"""Whether the records are byte for byte what they were, after code was moved: ``make unchanged``.

    python benchmarks/unchanged.py --keep        # before: trains, and keeps a hash of every record
    python benchmarks/unchanged.py               # after: trains again; exit status 1 where a record differs

Trainings of the drill, under DeepSpeed, DDP, FSDP2 and Megatron-core, healthy and with faults of every room, each to
its last step. What differs from one run to the next of the same code is left out: times, this process, the directory.
The hashes are this machine's, and are not committed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ds_silent.drill import run_trial
from ds_silent.drill.run_drill import DrillOptions, perform, setting_of
from ds_silent.practice.ranks import on_ranks

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "unchanged.json"
FAULTS = (
    "same-batch-pair",
    "repeated-batch",
    "learning-rate",
    "nan-loss",
    "loss-quartered",
    "gradient-scaled-1000",
    "layer-scaled-2",
    "dropout-p-later",
    "contribution-missing",
    "bucket-dropped",
    "aggregate-flip-byte-2",
    "weight-changed",
    "retry-burst",
    "ordered-pieces-damaged",
    "majority-weight-changed",
    "dynamic-update-noisy",
)
"""As far as they mean something under a framework."""
CELLS = {
    "zero0-fp32": DrillOptions(stage=0, dtype="fp32"),
    "zero1-bf16": DrillOptions(stage=1, dtype="bf16"),
    "ddp": DrillOptions(framework="ddp"),
    "fsdp2": DrillOptions(framework="fsdp2"),
    "megatron": DrillOptions(framework="megatron"),
}
VOLATILE = {"seconds", "started", "ended", "process", "places", "output_dir", "memory", "time", "at", "pid", "host"}
"""Fields that the same code writes otherwise each time."""


def main(
    keep: Annotated[bool, typer.Option(help="keep the hashes of today's code, instead of comparing with them")] = False,
    cell: Annotated[list[str] | None, typer.Option(help="only this; may be given several times")] = None,
) -> None:
    """Compare the records of today's code with those that were kept."""
    console = Console()
    if not keep and not KEPT.exists():
        console.print(f"there is nothing to compare with: run {sys.argv[0]} --keep on the code before", markup=False)
        raise typer.Exit(2)
    found = {}
    for name in cell or CELLS:
        found |= {f"{name}/{path}": lines for path, lines in records_of(CELLS[name]).items()}
        console.print(f"{name}: {sum(path.startswith(f'{name}/') for path in found)} files")
    if keep:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(found, indent=0))
        return
    before = {
        path: lines for path, lines in json.loads(KEPT.read_text()).items() if path.split("/")[0] in (cell or CELLS)
    }
    differences = list(differing(before, found))
    for line in differences[:40]:
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(found)} files, {len(differences)} differ")
    raise typer.Exit(1 if differences else 0)


def differing(before: dict[str, list[str]], after: dict[str, list[str]]) -> Iterator[str]:
    """A line for each file that is not the same, with the first line of it that is not."""
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old is None or new is None:
            yield f"{path}: {'is new' if old is None else 'is gone'}"
        elif old != new:
            line = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            yield f"{path}: line {line + 1} differs ({len(old)} lines before, {len(new)} now)"


def records_of(options: DrillOptions) -> dict[str, list[str]]:
    """A hash of every line of every file that the trainings of one cell write."""
    given = (replace(options, faults=FAULTS), setting_of(options))
    with tempfile.TemporaryDirectory(prefix="ds_silent_unchanged_") as directory:
        for _ in on_ranks(perform_all, (*given, directory), options.ranks):
            pass
        files = sorted(path for path in Path(directory).rglob("*") if path.suffix in (".json", ".jsonl"))
        return {str(path.relative_to(directory)): list(lines_of(path, directory)) for path in files}


def perform_all(send: Any, options: Any, setting: Any, directory: str) -> None:
    """On every rank. No training ends when rank 0 has read of its fault, which it does sooner or later."""
    run_trial.AFTER_FOUND = 10**6
    perform(send, options, setting, directory)


def lines_of(path: Path, directory: str) -> Iterator[str]:
    text = path.read_text().replace(directory, "")
    for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
        plain = json.dumps(without(json.loads(line)), sort_keys=False)
        yield hashlib.sha256(plain.encode()).hexdigest()[:12]


def without(value: Any) -> Any:
    """The same without what is volatile."""
    if isinstance(value, dict):
        if value.get("group") == "code":  # hashes of the package's own files
            return {}
        return {key: without(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [without(inner) for inner in value]
    return re.sub(r"\d+(\.\d+)? (ms|s)\b", "", value) if isinstance(value, str) else value


if __name__ == "__main__":
    typer.run(main)
