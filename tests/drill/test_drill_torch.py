"""The drill under DistributedDataParallel and FSDP2: some of each kind of fault, in real trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.config import ConfigError
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import MAJORITY, RETRY
from ds_silent.drill.printing import print_report
from ds_silent.drill.run_drill import DrillOptions, Outcome, exit_code, judged, to_json, trial_of, trials_of
from ds_silent.drill.run_trial import TrialRun, run_trial
from ds_silent.drill.setting import DrillSetting, make_setting
from ds_silent.drill.training import Trial
from ds_silent.practice.ranks import on_ranks
from tests.drill.cold_start import QUIET, cold

BLOCK: dict[str, Any] = {**QUIET, "detectors": {"enabled": True}}
RANKS = 3  # the fewest of which one can be outvoted
CELLS: tuple[tuple[str, Any, int, tuple[str, ...]], ...] = (
    (
        "ddp",
        "fp32",
        1,
        (
            *("contribution-missing", "parameter-unreduced", "update-skipped", "mean-update-noisy"),
            *("optimizer-without-layer-everywhere", "parameter-in-two-groups", "step-counted-late"),
        ),
    ),
    ("ddp", "bf16", 2, ("micro-batch-missing", "gradients-not-cleared", "weight-changed")),
    (
        "fsdp2",
        "fp32",
        1,
        (
            *("bucket-dropped", "aggregate-flip-byte-3", "update-skipped", "division-forgotten"),
            *("gathered-weights-overwritten", "gathered-weights-kept", "decay-where-none-is-set"),
        ),
    ),
    ("fsdp2", "bf16", 2, ("micro-batch-missing", "partition-not-cleared", "applied-factor-4-one-rank")),
)


def setting_of(number: int) -> DrillSetting:
    framework, dtype, accumulation, _ = CELLS[number]
    given = {"silent_consistency": BLOCK, "gradient_accumulation_steps": accumulation}
    return make_setting(given, RANKS, dtype=dtype, framework=framework)


def trials_of_cell(number: int) -> tuple[Trial, ...]:
    options = DrillOptions(faults=CELLS[number][3], ranks=RANKS, rank=1, steps=30)
    trials, skipped = trials_of(options, setting_of(number))
    assert skipped == ()
    return (replace(trials[0], steps=9), *trials[3:])  # as long as the healthy training with a response


def perform(send: Callable[[Any], None], directory: str) -> None:
    for number in range(len(CELLS)):
        start = cold(setting_of(number))
        for trial in trials_of_cell(number):
            send((number, run_trial(start, trial, Path(directory, str(number), trial.name))))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[TrialRun]]:
    found: dict[int, list[TrialRun]] = {number: [] for number in range(len(CELLS))}
    for number, run in on_ranks(perform, (str(tmp_path_factory.mktemp("torch")),), RANKS):
        found[number].append(run)
    return found


@pytest.mark.parametrize("number", range(len(CELLS)), ids=lambda number: "-".join(map(str, CELLS[number][:3])))
def test_they_are_found_as_under_deepspeed(number: int, runs: dict[int, list[TrialRun]]) -> None:
    setting, trials = setting_of(number), trials_of_cell(number)
    outcome = Outcome(setting, tuple(judged(trials, runs[number], setting)), ())
    wrong = {r.trial.name: (r.verdict, r.repair, r.run.events) for r in outcome.results if not r.right}
    assert not wrong, "\n".join(f"{n}: {v[0]} {v[1]} {v[2]}" for n, v in wrong.items())
    assert exit_code(outcome) == 0
    assert to_json(outcome)["framework"] == setting.framework
    repairs = {r.trial.name: r.repair.answer for r in outcome.results if r.repair is not None}
    assert repairs == ({"healthy-mean": "untouched", "mean-update-noisy": "repaired"} if number == 0 else {})


# -- which faults, and why not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_every_fault_is_tried_or_has_a_reason(framework: str) -> None:
    setting = make_setting(None, 4, framework=framework)
    trials, skipped = trials_of(DrillOptions(framework=framework), setting)
    tried = {trial.name for trial in trials if trial.fault is not None}
    assert tried | set(skipped) == set(FAULTS)
    assert not tried & set(skipped)
    assert {name for name, fault in FAULTS.items() if framework in fault.not_applicable} <= set(skipped)
    console = Console(width=4000, record=True, quiet=False)
    print_report(Outcome(setting, (), skipped), console)
    text = console.export_text()
    lines = [line for line in text.splitlines() if line.startswith("Not applicable, because ")]
    named = [name for line in lines for name in line.rstrip(". ").rpartition(": ")[2].split(", ")]
    assert sorted(named) == sorted(skipped)
    assert set(to_json(Outcome(setting, (), skipped))["not_applicable"]) == set(skipped)


def test_what_only_deepspeed_can_do_is_not_tried_elsewhere() -> None:
    ddp, fsdp2 = (make_setting(None, 4, framework=framework) for framework in ("ddp", "fsdp2"))
    assert ddp.answering(MAJORITY).block.respond.on_replica_drift == "majority"
    with pytest.raises(ConfigError, match="needs whole replicas"):
        fsdp2.answering(MAJORITY)
    for setting in (ddp, fsdp2):
        with pytest.raises(ConfigError, match="only a reduction of DeepSpeed"):
            setting.answering(RETRY)
    assert ddp.why_not(FAULTS["micro-batch-missing"]) == "it takes gradient_accumulation_steps 2 in the configuration"
    half = make_setting(None, 4, dtype="bf16", framework="ddp")
    assert half.why_not(FAULTS["rate-doubled-in-the-step"]) == "it is tried in fp32 only"
    two = make_setting(None, 2, framework="ddp").why_not(FAULTS["majority-tie"])
    assert two == "needs at least 3 ranks"
    assert trial_of(FAULTS["nan-loss"], DrillOptions(), fsdp2).target.stage == 3


def test_the_block_may_stand_alone_or_in_a_configuration() -> None:
    alone = make_setting({"interval": 3, "output_dir": "elsewhere"}, 4, framework="ddp")
    whole = {"silent_consistency": {"interval": 3}, "zero_optimization": {"stage": 1}}
    inside = make_setting(whole, 4, dtype="bf16", framework="fsdp2")
    assert alone.interval == inside.interval == 3
    assert (alone.stage, alone.dtype, inside.stage, inside.dtype) == (0, "fp32", 3, "bf16")
    assert inside.notes[-1] == "zero_optimization: not part of the drill of FSDP2"
    with pytest.raises(ConfigError, match="no active"):
        make_setting({"enabled": False}, 4, framework="ddp")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--framework", "horovod"], "--framework must be deepspeed, ddp, fsdp2 or megatron, got 'horovod'"),
        (["--framework", "ddp", "--stage", "1"], "--stage 1 is DeepSpeed's; leave it out with --framework ddp"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["drill", *arguments])
    assert result.exit_code == 2
    assert result.stderr == f"ds-silent: {sentence}\n"
