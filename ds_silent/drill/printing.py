"""Carry ``ds-silent drill`` out, and print its report: a table, a sentence.

code = drill_command(DrillOptions(faults=("nan-loss",)))     # 0 all found, 1 not all, 2 a mistake of the user
print_report(outcome, Console())
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_silent.commands.measuring import carried_out, console_of_stdout
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.run_drill import DrillOptions, Outcome, Result, exit_code, run_drill, to_json
from ds_silent.drill.verdicts import due

_REPAIR_NOTE = (
    "repaired: weights and optimizer state were hashed after every step. retry and majority: from the repair on they "
    "are the healthy run's, bit for bit, on every rank; mean, periodic, dynamic: the same on all ranks. given up: it "
    "cannot be repaired, and an error says so. untouched: healthy, and bit for bit what it is without the response."
)
_LOSS_NOTE = (
    "mean loss: its change between the fault and the alarm, against the same steps of the healthy run, in standard "
    "deviations of that run's steps. Whoever watches that curve alone sees nothing below about 2 σ."
)


def drill_command(options: DrillOptions, list_faults: bool = False, json_path: str | None = None) -> int:
    """Run the drill and print its report, or the list of faults; return the exit status."""
    if list_faults:
        print_list(FAULTS.values(), console_of_stdout())
        return 0
    return carried_out(partial(run_drill, options), print_report, to_json, exit_code, json_path)


def print_list(faults: Iterable[Fault], console: Console) -> None:
    """Print each with its expected event, and what must come of it where a response is on."""
    for fault in faults:
        then = "" if fault.response is None else f", {'repaired' if fault.repaired else 'given up'}"
        console.print(f"{fault.name} → {fault.kind}{then}", style="bold", markup=False, highlight=False)
        console.print(f"  {fault.description}", markup=False, highlight=False)


def print_report(outcome: Outcome, console: Console) -> None:
    """Print the table, what was left out, and one sentence that says whether the alarm works."""
    setting = outcome.setting
    console.print(
        f"ds_silent drill: {setting.kind}, {setting.dtype}, micro-batch {setting.micro_batch}, "
        f"accumulation {setting.accumulation}",
        markup=False,
    )
    for note in setting.notes:
        console.print(f"  {note}", markup=False, highlight=False)
    console.print(_table(outcome))
    below = setting.left_out([FAULTS[name] for name in outcome.skipped]) if outcome.skipped else []
    below += [*_notes(outcome), *([_REPAIR_NOTE] if any(result.repair for result in outcome.results) else [])]
    for line in (*below, _LOSS_NOTE, sentence(outcome)):
        console.print(line, markup=False, highlight=False)


def _notes(outcome: Outcome) -> list[str]:
    """Say when a replica's fault is due, and what was too small to be seen."""
    notes, setting = [], outcome.setting
    trials = [(result.trial.fault, result.trial.target) for result in outcome.results if not result.trial.response]
    replicas = [(fault, target) for fault, target in trials if fault and fault.strikes == "replica"]
    if replicas and setting.replica_interval:
        fault, target = replicas[0]
        step = due(fault, target, setting.interval, setting.replica_interval)
        notes.append(
            f"Replicas are compared every {setting.replica_interval} steps: what the update of step "
            f"{target.step} leaves apart is due at step {step}."
        )
    for result in outcome.results:
        if result.verdict.answer == "below rounding":
            notes.append(
                f"{result.trial.name} changed the aggregated gradient by {result.run.change:.1e} of its norm, and "
                f"rounding explains up to {result.run.rounding:.1e}: what is below twice that is not sure to be seen."
            )
    return notes


def sentence(outcome: Outcome) -> str:
    """Say whether the alarm works, and what to look at when it does not."""
    faults = [result for result in outcome.results if result.trial.fault is not None]
    missed = [result.trial.name for result in faults if not result.verdict.right]
    false = [r.trial.name for r in outcome.results if r.trial.fault is None and r.verdict.answer != "missed"]
    hidden = sum(result.verdict.answer == "below rounding" for result in faults)
    found = f"{len(faults) - len(missed) - hidden} of {len(faults)} faults found with the right kind and ranks"
    found += f" ({hidden} below rounding)" if hidden else ""
    silent = "the healthy runs stayed silent" if not false else f"a false alarm in {', '.join(false)}"
    repairs = _repairs(outcome)
    if all(result.right for result in outcome.results):
        return f"The alarm works: {found}, and {silent}.{repairs}"
    return f"The alarm does not work everywhere: {found} (not: {', '.join(missed) or 'none'}); {silent}.{repairs}"


def _repairs(outcome: Outcome) -> str:
    """Say what came of the faults that were answered; nothing where none was."""
    answered = [(r.trial.fault, r.trial.name, r.repair) for r in outcome.results if r.trial.fault and r.repair]
    if not answered:
        return ""
    able = [repair.right for fault, _, repair in answered if fault.repaired]
    hopeless = [repair.right for fault, _, repair in answered if not fault.repaired]
    told = f" {sum(able)} of {len(able)} faults that can be repaired were"
    if hopeless:
        told += f", and {sum(hopeless)} of {len(hopeless)} that cannot were left with an error that says so"
    wrong = ", ".join(name for _, name, repair in answered if not repair.right)
    changed = ", ".join(r.trial.name for r in outcome.results if not r.trial.fault and r.repair and not r.repair.right)
    told += f" (not: {wrong})" if wrong else ""
    return told + (f"; a response has changed {changed}." if changed else ".")


def _table(outcome: Outcome) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("fault", "expected event", "struck", "found", "ranks", "repaired", "mean loss"):
        table.add_column(title, no_wrap=title in ("fault", "expected event"))
    for result in outcome.results:
        fault, step, shift = result.trial.fault, result.trial.target.step, result.loss_shift
        struck = "" if fault is None else "at start" if step <= 1 else f"step {step}"
        loss = "" if shift is None else f"{shift:+.1f} σ" if math.isfinite(shift) else "not finite"
        kind = "none" if fault is None else fault.kind
        table.add_row(result.trial.name, kind, struck, _answer(result), _who(result), _repaired(result), loss)
    return table


def _repaired(result: Result) -> Text:
    """Say nothing where there was no response; a healthy training must be what it is without one."""
    repair = result.repair
    if repair is None:
        return Text("")
    place = "" if repair.step is None else f" at step {repair.step}"
    if not repair.right:
        return Text(f"{repair.answer}{place}", "bold red")
    return Text(f"step {repair.step}" if repair.answer == "repaired" else repair.answer, "green")


def _answer(result: Result) -> Text:
    verdict = result.verdict
    if result.trial.fault is None:
        alarm = "no alarm" if verdict.kind is None else f"{verdict.kind} at step {verdict.step}"
        return Text("silent", "green") if result.right else Text(alarm, "bold red")
    if verdict.found:
        place = "preflight" if verdict.step == 0 else f"step {verdict.step}"
        return Text(f"{place}{' (late)' if verdict.late else ''}", "bold red" if verdict.late else "green")
    if verdict.answer == "below rounding":
        return Text("below rounding", "green")
    if verdict.answer == "missed":
        return Text(f"not in {len(result.run.losses)} steps", "bold red")
    return Text(f"{verdict.answer}: {verdict.kind} at step {verdict.step}", "bold red")


def _who(result: Result) -> Text:
    fault, verdict = result.trial.fault, result.verdict
    if verdict.answer in ("missed", "wrong kind", "below rounding"):
        return Text("")
    shown = ", ".join(map(str, verdict.ranks))
    if verdict.answer == "wrong ranks" and fault is not None:
        expected = ", ".join(map(str, fault.expected_ranks(result.trial.target)[0]))
        return Text(f"{shown}, should be {expected}", "bold red")
    return Text(shown)
