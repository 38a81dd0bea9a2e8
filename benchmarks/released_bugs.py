"""Released bugs that are wrong on every rank alike: by a number that knows nothing of ds_silent, and what it tells.

    python benchmarks/released_bugs.py                       # all of released_bugs_list.py: make test-real-bugs
    python benchmarks/released_bugs.py --only warmup dpo     # rows whose names have one of these parts
    python benchmarks/released_bugs.py --json found.json
    python benchmarks/released_bugs.py --compare             # where wrong and right release part: make compare-releases

Each row names a release in which something is wrong and, where there is one, a release in which it is right. Releases
are laid over the environment, each package in a folder of its own below build/released-bugs. Both train a few steps on
two gloo ranks, observed and not. The number is computed by hand in released_bugs_deepspeed.py, _trainer.py, _rows.py
and _adapters.py: the wrong release must be wrong by it, with and without ds_silent alike, the right one right and
silent. The exit status is 0 only then, and where each row is told as it says: by an event of that kind, at the first
wrong step or before it; or not at all, with the reason. With ``--compare`` both are traced, too, and
``ds_silent.compare`` must name the link that the list names, at the step at which the number is wrong first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import released_bugs_adapters
import released_bugs_deepspeed
import released_bugs_rows
import released_bugs_trainer
from released_bugs_base import CASES, Found, Watch
from released_bugs_list import LIST, Bug

from ds_silent.comparison.releases import ImpossibleError, laid_over

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "released-bugs"
TRAININGS = (released_bugs_adapters, released_bugs_deepspeed, released_bugs_trainer, released_bugs_rows)
"""Their functions are in CASES once they are imported."""
TRACES = "RELEASED_BUGS_TRACES"
"""Environment variable: the folder in which a release's traces are kept; without it nothing is traced."""
TOLERANCE = 1e-3
"""From which error on a release is wrong; fp32's own roundings stay below 1e-4 in all of them."""


@dataclass(frozen=True)
class Run:
    """One release's training: both numbers, and what was told."""

    observed: Found | None
    alone: Found | None
    events: tuple[dict[str, Any], ...] = ()
    objective: dict[str, Any] | None = None  # of the first record
    failure: str = ""
    trace: str = ""  # directory of the observed training's records

    @property
    def wrong_since(self) -> int | None:
        """The first step at which the number is wrong, by the training without ds_silent; None: all are right."""
        errors = () if self.alone is None else self.alone.errors
        return next((step for step, error in enumerate(errors, 1) if not error <= TOLERANCE), None)

    @property
    def told(self) -> dict[str, Any] | None:
        """The first event that is no information."""
        return next((event for event in self.events if event["severity"] != "info"), None)


# -- inside one release -----------------------------------------------------------------------------------------------


def inside(names: Sequence[str], out: Path) -> None:
    """Each training twice on two ranks: this process was started with the releases' own PYTHONPATH."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="released_bugs_") as directory:
        torch.multiprocessing.start_processes(_rank_main, (names, directory, out), 2, start_method="fork")


def _rank_main(rank: int, names: Sequence[str], directory: str, out: Path) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", rank=rank, world_size=2)
    runs = {}
    for place, name in enumerate(names):
        runs[name] = asdict(
            _both(next(bug for bug in LIST if bug.name == name), Path(directory, str(place), str(rank)))
        )
        if rank == 0:
            out.write_text(json.dumps(runs))
    dist.barrier()
    dist.destroy_process_group()


def _both(bug: Bug, directory: Path) -> Run:
    """Train observed, and not. Rank 0's events are the run's."""
    import torch.distributed as dist

    found: dict[str, Found | None] = {}
    kept = os.environ.get(TRACES, "")
    traced: dict[str, Any] = {"trace": {}} if kept else {}
    for part in ("observed", "alone"):
        own = directory / part
        own.mkdir(parents=True)
        block = {"output_dir": str(own / "silent"), "tensorboard": False, **traced} if part == "observed" else None
        try:
            found[part] = CASES[bug.case](Watch(own, block), **bug.given)
        except Exception as error:
            frames = "".join(traceback.format_exception(error)[-4:])
            return Run(None, None, failure=f"{type(error).__name__}: {error}\n{frames}"[:3000])
        dist.barrier()
    events, records = (_lines(directory / "observed" / "silent" / f"{name}.jsonl") for name in ("events", "metrics"))
    objective = records[0].get("objective") if records else None
    trace = Path(kept, f"{LIST.index(bug)}.jsonl") if kept and records else None
    if trace is not None:
        shutil.copy(directory / "observed" / "silent" / "trace.jsonl", trace)
    return Run(found["observed"], found["alone"], tuple(events), objective, trace=str(trace or ""))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- outside ----------------------------------------------------------------------------------------------------------


def runs_of(release: Sequence[str], names: Sequence[str], traces: Path | None = None) -> dict[str, Run]:
    """Train these rows with one release, in fresh processes; ``traces``: keep theirs there."""
    try:
        folders = [laid_over(CACHE / one.replace("==", "-"), (one,)) for one in release]
    except ImpossibleError as error:
        return {name: Run(None, None, failure=str(error)) for name in names}
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    variables = {**os.environ, **quiet, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (*folders, ROOT)))
    if traces is not None:
        traces.mkdir(parents=True)
        variables[TRACES] = str(traces)
    with tempfile.TemporaryDirectory(prefix="released_bugs_") as directory:
        out = Path(directory, "runs.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", str(out), *names]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=directory)
        read = json.loads(out.read_text()) if out.exists() else {}
    last = ended.stderr.strip()[-1500:] or f"exit {ended.returncode}"
    return {name: _run_from(read[name]) if name in read else Run(None, None, failure=last) for name in names}


def _run_from(read: dict[str, Any]) -> Run:
    numbers = [Found(tuple(one["errors"]), one["number"]) if one else None for one in (read["observed"], read["alone"])]
    return Run(numbers[0], numbers[1], tuple(read["events"]), read["objective"], read["failure"], read["trace"])


def verdict_on_wrong(bug: Bug, run: Run) -> str:
    """Empty where the release is wrong by the number, the same without ds_silent, and is told as the list says."""
    if run.failure:
        return f"FAILED: {run.failure}"
    if run.wrong_since is None:
        return "NOT WRONG"
    if run.observed != run.alone:
        return "CHANGED BY OBSERVING"
    told = run.told
    if bug.told is None:
        return "" if told is None else "TOLD, AND THE LIST SAYS IT IS NOT"
    if told is None:
        return "MISSED"
    return "" if told["kind"] == bug.told and told["step"] <= run.wrong_since else "NOT AS THE LIST SAYS"


def verdict_on_right(bug: Bug, run: Run) -> str:
    """Empty where the release is right by the number, and nothing is told but the other bug that it has."""
    if run.failure:
        return f"FAILED: {run.failure}"
    if run.wrong_since is not None:
        return "WRONG"
    others = [one for one in run.events if one["severity"] != "info" and one["kind"] != bug.beside]
    return "FALSE ALARM" if others else ""


def verdict_on_pair(bug: Bug, wrong: Run, right: Run) -> tuple[str, str]:
    """Return where the two part, and what is not as the list says; empty where all is."""
    from ds_silent.comparison import ComparisonError, TraceError, compare

    try:
        found = compare(right.trace, wrong.trace)
    except (ComparisonError, TraceError) as error:
        return str(error), "NOT COMPARED"
    step = bug.parts_at or wrong.wrong_since
    as_listed = found.parted and found.link == bug.parts and found.step == step
    return found.sentence, "" if as_listed else f"NOT AS THE LIST SAYS: {bug.parts} at step {step}"


def row(release: Sequence[str], run: Run, verdict: str, reason: str = "") -> str:
    """The release, its number, and what was told."""
    lines = [f"  {', '.join(release) or 'this environment'}: {run.alone.number if run.alone else ''} {verdict}"]
    if run.objective is not None and run.objective["known"]:
        lines.append(f"    the record's objective: the step's labels weigh {run.objective['weight_sum']:.4g} together")
    for event in [one for one in run.events if one["severity"] != "info"][:3]:
        lines.append(f"    step {event['step']}, {event['kind']} ({event['severity']}): {event['message']}")
    if run.told is None and reason:
        lines.append(f"    not told: {reason}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the rows' names")
    parser.add_argument("--json", type=Path, help="also write all runs here")
    parser.add_argument("--compare", action="store_true", help="also say where a wrong and a right release part")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside[1:], Path(arguments.inside[0]))
        return 0
    chosen = [bug for bug in LIST if any(part.lower() in bug.name.lower() for part in arguments.only)]
    by_release: dict[tuple[str, ...], list[str]] = {}
    for bug in chosen:
        for release in filter(lambda one: one is not None, (bug.wrong, bug.right)):
            by_release.setdefault(release, []).append(bug.name)
    runs = {}
    traces = Path(tempfile.mkdtemp(prefix="released_bugs_traces_")) if arguments.compare else None
    for number, (release, names) in enumerate(by_release.items()):
        started = time.monotonic()
        runs[release] = runs_of(release, names, traces and traces / str(number))
        print(f"{', '.join(release) or 'this environment'}: {len(names)} rows in {time.monotonic() - started:.0f} s")
        sys.stdout.flush()
    failed, told, kept = 0, 0, []
    for bug in chosen:
        print(f"\n{bug.name}: {bug.source}")
        verdicts = []
        for release in (bug.wrong, bug.right):
            if release is None:
                continue
            run = runs[release][bug.name]
            verdict = verdict_on_wrong(bug, run) if release == bug.wrong else verdict_on_right(bug, run)
            verdicts.append(verdict)
            print(row(release, run, verdict, bug.reason if release == bug.wrong else ""))
            kept.append({"bug": bug.name, "release": release, "verdict": verdict, **asdict(run)})
        if traces is not None and bug.right is not None:
            sentence, verdict = verdict_on_pair(bug, runs[bug.wrong][bug.name], runs[bug.right][bug.name])
            verdicts.append(verdict)
            print(f"  {sentence} {verdict}")
        failed += any(verdicts)
        told += runs[bug.wrong][bug.name].told is not None
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1))
    print(f"\n{len(chosen)} released bugs, {told} told, {failed} not as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
