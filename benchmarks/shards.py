"""False alarms of real healthy trainings in which rows are not dealt anew at random: each rank reads its own shard.

    python benchmarks/shards.py --ranks 4 --scenario heart            # one training of 600 steps, 15 s on 2 cores
    python benchmarks/shards.py --ranks 2 --ranks 4 --ranks 8 --seeds 3                 # every scenario of the table
    python benchmarks/shards.py --ranks 4 --scenario rule --fault gradient:1.5 --fault-step 300    # how soon it is told
    python benchmarks/shards.py --ranks 4 --record runs/shards        # keeps the records
    python benchmarks/shards.py --replay runs/shards                  # judges them once more, by the code of today

The scenarios are in ``shards_data.py``, the training in ``shards_training.py``: gloo ranks, everything by default,
every step observed. Warnings and errors of a healthy training are false alarms; reminders of one (``Still``,
``Ended``) are counted by themselves. With ``--fault`` the alarms from its first step on are what is asked for, and the
delay counts that step. The exit code is 1 when there was a false alarm.

A fault is ``gradient:FACTOR``, ``loss:FACTOR``, ``hidden:FACTOR`` (of a loss whose graph does not show it),
``noise:LENGTH`` (against the gradient's), ``clip:NORM`` (each parameter's gradient, before the reduction),
``phase:FACTOR`` (of two tasks in turn, one with so much larger a loss, it has the other one) or ``labels``, on the last
rank.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from rich.console import Console
from rich.table import Table
from shards_data import SCENARIOS
from shards_training import FAULTS, Case, Fault, Outcome, train_all

SILENCE = 1800.0  # seconds that one training may take
CONSOLE = Console(width=160)


def alarms(outcome: Outcome) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Warnings and errors, and those of them that only remind."""
    bad = [event for event in outcome.events if event["severity"] in ("warning", "error")]
    reminders = [event for event in bad if event.get("phase") in ("ongoing", "ended")]
    return [event for event in bad if event not in reminders], reminders


def summary(outcome: Outcome) -> dict[str, Any]:
    """What is written of a run, and shown."""
    case = outcome.case
    found, reminders = alarms(outcome)
    since = case.steps + 1 if case.fault is None else case.fault.step
    false, true = ([e for e in found if (e["step"] >= since) == late] for late in (False, True))
    right = [event for event in true if case.ranks == 2 or event["ranks"] == [case.ranks - 1]]
    first = (false or true or [None])[0]
    return {
        **asdict(case),
        "loss": outcome.loss,
        "seconds": round(outcome.seconds, 1),
        "notes": sum(event["severity"] == "info" for event in outcome.events),
        "warnings": sum(event["severity"] == "warning" for event in false),
        "errors": sum(event["severity"] == "error" for event in false),
        "reminders": len(reminders),
        "kinds": dict(Counter(event["kind"] for event in false)),
        "delay": true[0]["step"] - since + 1 if true else None,
        "delay_right_rank": right[0]["step"] - since + 1 if right else None,
        "first": None if first is None else {key: first[key] for key in ("step", "kind", "ranks", "message")},
        "alarms": found,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """All runs."""
    shown = Table(title="Trainings whose rows are not dealt anew at random")
    for column in ("scenario", "ranks", "seed", "steps", "notes", "warnings", "errors", "reminders"):
        shown.add_column(column, justify="left" if column == "scenario" else "right")
    struck = any(row["fault"] for row in rows)
    for column in ("fault", "steps until an alarm", "of that rank") if struck else ():
        shown.add_column(column, justify="left" if column == "fault" else "right")
    shown.add_column("first alarm")
    for row in rows:
        keys = ("ranks", "seed", "steps", "notes", "warnings", "errors", "reminders")
        fault = "" if row["fault"] is None else Fault(**row["fault"]).name
        delays = (fault, shown_number(row["delay"]), shown_number(row["delay_right_rank"])) if struck else ()
        shown.add_row(label(row), *(str(row[key]) for key in keys), *delays, sentence(row["first"]))
    return shown


def shown_number(number: int | None) -> str:
    return "" if number is None else str(number)


def label(row: dict[str, Any]) -> str:
    setting = "" if (row["framework"], row["dtype"]) == ("ddp", "fp32") else f" {row['framework']} {row['dtype']}"
    return row["scenario"] + setting


def sentence(event: dict[str, Any] | None) -> str:
    return "" if event is None else f"{event['step']}: {event['kind']}: {event['message']}"


def train_here(cases: list[Case]) -> Iterator[Outcome]:
    """One start of the ranks for all cases of a world size."""
    from ds_silent.practice.ranks import on_ranks

    for ranks, group in itertools.groupby(cases, key=lambda case: case.ranks):
        yield from on_ranks(train_all, (tuple(group),), ranks, SILENCE)


def replayed(folder: Path) -> Iterator[Outcome]:
    """Every recording below ``folder``, judged by a new judge."""
    from ds_silent.config import DetectorsConfig
    from ds_silent.detectors import Judge
    from ds_silent.records import Event, to_json

    for path in sorted(folder.rglob("judged.pickle")):
        known = json.loads((path.parent / "case.json").read_text(encoding="utf-8"))
        case = Case(**{**known, "fault": None if known["fault"] is None else Fault(**known["fault"])})
        judge, events, started = Judge(DetectorsConfig()), [], time.perf_counter()
        with path.open("rb") as file:
            while True:
                try:
                    given = pickle.load(file)
                except EOFError:
                    break
                if isinstance(given, Event):
                    judge.told(given)
                    events.append(given)
                else:
                    events += judge.step(*given)
        written = tuple(json.loads(json.dumps(to_json(event))) for event in events)
        yield Outcome(case, written, float("nan"), time.perf_counter() - started)


def parsed(fault: str, step: int) -> Fault:
    """``gradient:1.5``."""
    kind, _, size = fault.partition(":")
    if kind not in FAULTS:
        raise typer.BadParameter(f"must begin with one of {', '.join(FAULTS)}; got {fault!r}", param_hint="--fault")
    return Fault(kind, float(size or 1.0), step)


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="world sizes, by default 2, 4 and 8")] = None,
    scenario: Annotated[list[str] | None, typer.Option(help="by default all; may be given several times")] = None,
    seeds: Annotated[int, typer.Option(help="trainings of each scenario")] = 1,
    seed: Annotated[int, typer.Option(help="of the first")] = 0,
    steps: Annotated[int, typer.Option(help="optimizer steps of each")] = 600,
    framework: Annotated[str, typer.Option(help="ddp, zero1 or fsdp2")] = "ddp",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    fault: Annotated[list[str] | None, typer.Option(help="see above; may be given several times")] = None,
    fault_step: Annotated[int, typer.Option(help="the first with the fault")] = 300,
    record: Annotated[Path | None, typer.Option(help="folder for the records; else they are thrown away")] = None,
    replay: Annotated[Path | None, typer.Option(help="judge the records below this folder; trains nothing")] = None,
    output: Annotated[Path, typer.Option("--json", help="what was found, as JSON")] = Path("runs/shards.json"),
) -> None:
    """Counts the alarms of healthy trainings, or the steps until a fault is told."""
    for value, known, hint in ((framework, ("ddp", "zero1", "fsdp2"), "framework"), (dtype, ("fp32", "bf16"), "dtype")):
        if value not in known:
            raise typer.BadParameter(f"must be one of {', '.join(known)}; got {value!r}", param_hint=f"--{hint}")
    for name in scenario or ():
        if name not in SCENARIOS:
            raise typer.BadParameter(f"must be one of {', '.join(SCENARIOS)}; got {name!r}", param_hint="--scenario")
    faults = [parsed(one, fault_step) for one in fault or ()] or [None]
    cases, choices = [], itertools.product(ranks or (2, 4, 8), scenario or SCENARIOS, range(seeds), faults)
    for size, name, number, struck in choices:
        cases.append(Case(name, size, seed + number, steps, framework, dtype, struck))
    if record is not None:
        cases = [replace(case, keep=str(kept(case, record.resolve()))) for case in cases]
    started, rows = time.perf_counter(), []
    for outcome in train_here(cases) if replay is None else replayed(replay):
        row = summary(outcome)
        rows.append(row)
        struck = "" if row["fault"] is None else f", {Fault(**row['fault']).name}: told after {row['delay']}"
        CONSOLE.print(
            f"{label(row)}, {row['ranks']} ranks, seed {row['seed']}, {row['steps']} steps{struck}: {row['warnings']} "
            f"warnings, {row['errors']} errors, loss {row['loss']:.3f}, {row['seconds']:.0f} s; "
            f"{sentence(row['first'])}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(rows, indent=1, allow_nan=True), encoding="utf-8")
    CONSOLE.print(table(rows))
    false = sum(row["warnings"] + row["errors"] for row in rows)
    runs = sum(row["warnings"] + row["errors"] > 0 for row in rows)
    CONSOLE.print(f"{false} false alarms in {runs} of {len(rows)} trainings, {time.perf_counter() - started:.0f} s")
    raise SystemExit(1 if false else 0)


def kept(case: Case, folder: Path) -> Path:
    """Where a case's records go; what it was stands beside them."""
    fault = "healthy" if case.fault is None else case.fault.name.replace(" ", "")
    path = folder / f"{case.framework}-{case.dtype}" / fault / f"{case.scenario}-{case.ranks}-{case.seed}-{case.steps}"
    if (path / "case.json").exists():
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
    return path


if __name__ == "__main__":
    typer.run(main)
