"""Inject each fault of the catalogue into a short real training and ask the observer: does the alarm work?

    options = DrillOptions(config="ds_config.json", faults=("nan-loss",))
    outcome = run_drill(options)              # minutes; starts the ranks, prints nothing
    print_report(outcome, Console())
    sys.exit(exit_code(outcome))              # 0 all found, 1 not, 2 was an exception: the user's mistake

First runs without a fault, which must end without an alarm; then one training per fault, all in one group of ranks.
Some faults are answered: their trainings, and healthy ones, have a response switched on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_silent.config import ConfigError
from ds_silent.config.block_file import load_ds_config
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import ORDERED, WARM, Fault
from ds_silent.drill.faults.injection import Target
from ds_silent.drill.run_trial import TrialRun, prepare, run_trial
from ds_silent.drill.setting import FRAMEWORKS, DrillSetting, make_setting
from ds_silent.drill.training import Trial
from ds_silent.drill.verdicts import FaultVerdict, RepairVerdict, due, judge, judge_healthy, judge_repair, loss_shift
from ds_silent.practice.ranks import on_ranks
from ds_silent.records import to_json as plain

HEALTHY_STEPS = 64
HEALTHY_RESPONSE_STEPS = 9  # longer than any training with a response
LONGEST = 400  # optimizer steps, unless the user says otherwise
HEALTHY = ("healthy", "healthy-without-ids", "healthy-own-seeds")


@dataclass(frozen=True)
class DrillOptions:
    """What the user asks for. ``faults``: names, all when empty; ``rank`` is the one that most faults strike."""

    config: str | None = None
    faults: tuple[str, ...] = ()
    ranks: int = 4
    rank: int = 2
    steps: int = LONGEST
    stage: int | None = None
    dtype: str | None = None
    framework: str = "deepspeed"


@dataclass(frozen=True)
class Result:
    """One training: ``fault`` is None for a healthy one; ``loss_shift`` in deviations of the healthy run's loss.

    ``repair``: what the response did, where there was one.
    """

    trial: Trial
    run: TrialRun
    verdict: FaultVerdict
    loss_shift: float | None
    repair: RepairVerdict | None = None

    @property
    def right(self) -> bool:
        """Found in time where there was a fault, silent where there was none; and repaired as expected."""
        seen = self.verdict.right if self.trial.fault is not None else self.verdict.answer == "missed"
        return seen and (self.repair is None or self.repair.right)


@dataclass(frozen=True)
class Outcome:
    """The whole drill; ``skipped`` are faults that mean nothing in such a training: the setting knows why."""

    setting: DrillSetting
    results: tuple[Result, ...]
    skipped: tuple[str, ...]


def run_drill(options: DrillOptions, heard: Callable[[str], None] = lambda name: None) -> Outcome:
    """Start the ranks, run everything, judge; ``heard`` is called with the name of each training that has ended.

    Raises:
        ConfigError: a mistake in the options or the configuration.
        RankBroke: a training ended by an error; the message holds its last lines.
    """
    setting = setting_of(options)
    trials, skipped = trials_of(options, setting)
    runs = []
    with tempfile.TemporaryDirectory(prefix="ds_silent_drill_") as directory:
        for run in on_ranks(perform, (options, setting, directory), options.ranks):
            runs.append(run)
            heard(run.name)
    return Outcome(setting, tuple(judged(trials, runs, setting)), skipped)


def setting_of(options: DrillOptions) -> DrillSetting:
    """Make the configuration of the drill under the framework that was asked for.

    Raises:
        ConfigError: a mistake in it, or in the options.
    """
    if options.dtype not in (None, "fp32", "bf16"):
        raise ConfigError(f"--dtype must be fp32 or bf16, got {options.dtype!a}")
    if options.framework not in FRAMEWORKS:
        *first, last = FRAMEWORKS
        raise ConfigError(f"--framework must be {', '.join(first)} or {last}, got {options.framework!a}")
    if not 0 <= options.rank < options.ranks:
        raise ConfigError(
            f"--rank must be one of the {options.ranks} ranks, 0 to {options.ranks - 1}, got {options.rank}"
        )
    given = None if options.config is None else load_ds_config(options.config)
    return make_setting(given, options.ranks, options.stage, options.dtype, options.framework)


def perform(send: Callable[[TrialRun], None], options: DrillOptions, setting: DrillSetting, directory: str) -> None:
    """Run all trainings, on one rank; a collective. Rank 0's ``send`` gets each run as it ends."""
    start = prepare(setting)
    for trial in trials_of(options, setting)[0]:  # made here: a fault's functions cannot be pickled
        send(run_trial(start, trial, Path(directory, trial.name)))


def trials_of(options: DrillOptions, setting: DrillSetting) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    """Return the trainings in their order, healthy ones first, and the names of faults that are left out.

    Raises:
        ConfigError: an unknown fault, or too few steps.
    """
    interval = setting.interval
    for name in options.faults:
        if name not in FAULTS:
            raise ConfigError(f"there is no fault {name!a}; ds-silent drill --list names them")
    chosen = [fault for name, fault in FAULTS.items() if not options.faults or name in options.faults]
    able = [fault for fault in chosen if setting.why_not(fault) is None]
    skipped = tuple(fault.name for fault in chosen if fault not in able)
    compared = any(fault.strikes == "replica" and not fault.response for fault in able) and setting.replica_interval
    shortest = max((WARM + 6) * interval, WARM * interval + setting.replica_interval + 3 * interval if compared else 0)
    if options.steps < shortest:
        raise ConfigError(
            f"--steps must be at least {shortest}, got {options.steps}: most faults strike at step {WARM * interval}"
            + (f" and replicas are compared every {setting.replica_interval} steps" if compared else "")
        )
    nobody = Target(options.rank, options.ranks, 0)
    healthy = Trial(HEALTHY[0], None, nobody, min(options.steps, HEALTHY_STEPS * interval))
    short = replace(healthy, steps=HEALTHY_RESPONSE_STEPS)
    responses = {fault.response.name: fault.response for fault in able if fault.response is not None}
    # with the healthy training that others are compared with
    ordered = [ORDERED] if any(response.reference == ORDERED.healthy for response in responses.values()) else []
    trials = [
        healthy,
        replace(healthy, name=HEALTHY[1], ids=False),
        replace(healthy, name=HEALTHY[2], own_seeds=True),
        *(replace(short, name=response.healthy, response=response) for response in [*ordered, *responses.values()]),
        *(replace(short, name=name) for name in dict.fromkeys(fault.healthy for fault in able) if name != HEALTHY[0]),
        *(trial_of(fault, options, setting) for fault in able),
    ]
    return tuple(trials), skipped


def trial_of(fault: Fault, options: DrillOptions, setting: DrillSetting) -> Trial:
    """Return one fault's training.

    Steps count in measured ones: with ``interval`` 10 a history of 20 measurements takes 200 steps. What happens at one
    step only happens at a measured one.
    """
    setting, fault = setting.answering(fault.response), fault.under(setting.variant)
    interval = setting.interval
    first = fault.first_step * interval if fault.first_step > 1 else fault.first_step
    of_training = setting.stage, setting.masters, setting.accumulation
    target = Target(options.rank, options.ranks, first, fault.size, *of_training)
    last = max(first + fault.steps * interval, due(fault, target, interval, setting.replica_interval) + 2 * interval)
    return Trial(fault.name, fault, target, min(options.steps, last), ids=fault.ids, response=fault.response)


def judged(trials: tuple[Trial, ...], runs: list[TrialRun], setting: DrillSetting) -> Iterator[Result]:
    """Judge every run, against a healthy one."""
    named = {run.name: run for run in runs}
    for trial, run in zip(trials, runs, strict=True):
        fault, target, response, repair = trial.fault, trial.target, trial.response, None
        if response is not None:
            reference = named[response.reference].states
            repair = judge_repair(fault, target, response, run.events, run.states, reference)
        if fault is None:
            yield Result(trial, run, judge_healthy(run.events), None, repair)
            continue
        interval = setting.answering(response).interval
        verdict = judge(fault, target, run.events, interval, setting.replica_interval, run.change, run.rounding)
        last = verdict.step if verdict.found and verdict.step is not None else len(run.losses)
        healthy = named.get(fault.healthy, runs[0]).losses
        shift = None if last == 0 else loss_shift(run.losses, healthy, target.step, last)
        yield Result(trial, run, verdict, shift, repair)


def exit_code(outcome: Outcome) -> int:
    """Return 0 when every fault was found in time (or provably below rounding), what was answered was repaired, and the
    healthy runs were silent; else 1."""
    return 0 if outcome.results and all(result.right for result in outcome.results) else 1


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return what ``--json`` writes: numbers that are not finite are strings."""
    setting = outcome.setting
    reasons = {name: setting.why_not(FAULTS[name]) for name in outcome.skipped}
    return {
        "version": 1,
        "all_found": exit_code(outcome) == 0,
        **setting.facts(),
        "dtype": setting.dtype,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "notes": list(setting.notes),
        "skipped": list(outcome.skipped),
        # with DeepSpeed their names are enough, because stage and dtype say why
        **({} if setting.framework == "deepspeed" else {"not_applicable": reasons}),
        "trainings": [_result_json(result) for result in outcome.results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    trial, fault, described = result.trial, result.trial.fault, {}
    if fault is not None:
        described = {
            "expected_kinds": list(fault.kinds),
            "expected_ranks": [list(ranks) for ranks in fault.expected_ranks(trial.target)],
            "strikes": fault.strikes,
            "deterministic": fault.deterministic,
            "first_step": trial.target.step,
            "size": fault.size,
            "change": plain(result.run.change),
            "rounding": plain(result.run.rounding),
            "can_be_repaired": None if fault.response is None else fault.repaired,
        }
    return {
        "name": trial.name,
        "fault": fault is not None,
        **described,
        "right": result.right,
        "verdict": plain(result.verdict),
        "response": None if trial.response is None else trial.response.name,
        "repair": None if result.repair is None else {**plain(result.repair), "right": result.repair.right},
        "loss_shift": plain(result.loss_shift),
        "steps": len(result.run.losses),
        "losses": plain(list(result.run.losses)),
        "events": plain(list(result.run.events)),
    }
