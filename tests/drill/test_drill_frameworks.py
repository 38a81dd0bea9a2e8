"""The drill under DistributedDataParallel, FSDP2 and Megatron-core: some of each kind of fault, in real trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.config import ConfigError
from ds_silent.drill import setting as drill_setting
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import MAJORITY, RETRY
from ds_silent.drill.printing import print_report
from ds_silent.drill.run_drill import DrillOptions, Outcome, exit_code, judged, to_json, trial_of, trials_of
from ds_silent.drill.run_trial import TrialRun, run_trial
from ds_silent.drill.setting import DrillSetting, make_setting
from ds_silent.drill.training import Trial
from ds_silent.extras import installed
from ds_silent.practice.ranks import on_ranks
from tests.drill.cold_start import QUIET, cold

BLOCK: dict[str, Any] = {**QUIET, "detectors": {"enabled": True}}
RANKS = 3  # the fewest of which one can be outvoted


@dataclass(frozen=True)
class Cell:
    framework: str
    dtype: str
    accumulation: int
    faults: tuple[str, ...]
    stage: int | None = None
    repairs: tuple[tuple[str, str], ...] = ()  # what comes of the trainings with a response

    @property
    def setting(self) -> DrillSetting:
        given = {"silent_consistency": BLOCK, "gradient_accumulation_steps": self.accumulation}
        return make_setting(given, RANKS, self.stage, self.dtype, self.framework)

    @property
    def trials(self) -> tuple[Trial, ...]:
        options = DrillOptions(faults=self.faults, ranks=RANKS, rank=1, steps=30, framework=self.framework)
        trials, skipped = trials_of(options, self.setting)
        assert skipped == ()
        return (replace(trials[0], steps=9), *trials[3:])  # as long as the healthy training with a response


CELLS = {
    "ddp": Cell(
        "ddp",
        "fp32",
        1,
        (
            *("contribution-missing", "parameter-unreduced", "update-skipped", "mean-update-noisy"),
            *("optimizer-without-layer-everywhere", "parameter-in-two-groups", "step-counted-late"),
        ),
        repairs=(("healthy-mean", "untouched"), ("mean-update-noisy", "repaired")),
    ),
    "ddp-bf16": Cell("ddp", "bf16", 2, ("micro-batch-missing", "gradients-not-cleared", "weight-changed")),
    "fsdp2": Cell(
        "fsdp2",
        "fp32",
        1,
        (
            *("bucket-dropped", "aggregate-flip-byte-3", "update-skipped", "division-forgotten"),
            *("gathered-weights-overwritten", "gathered-weights-kept", "decay-where-none-is-set"),
            "gradients-not-cleared-one-rank",
        ),
    ),
    "fsdp2-bf16": Cell(
        "fsdp2",
        "bf16",
        2,
        (
            *("micro-batch-missing", "partition-not-cleared", "gradients-not-cleared-one-rank"),
            "applied-factor-4-one-rank",
        ),
    ),
    "megatron": Cell(
        "megatron",
        "fp32",
        2,
        ("micro-batch-missing", "parameter-unreduced", "gradients-not-cleared", "weight-changed"),
        stage=0,
    ),
    "megatron-bf16": Cell(
        "megatron",
        "bf16",
        1,
        ("bucket-dropped", "gradients-not-cleared", "gathered-weights-stale", "applied-factor-4-one-rank"),
        stage=1,
    ),
}
Runs = dict[str, list[TrialRun]]


def perform(send: Callable[[Any], None], names: list[str], directory: str) -> None:
    for name in names:
        start = cold(CELLS[name].setting)
        for trial in CELLS[name].trials:
            send((name, run_trial(start, trial, Path(directory, name, trial.name))))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Runs]:
    """The trainings of Megatron-core, or those of the others, when they are asked for."""

    @cache
    def of(megatron: bool) -> Runs:
        found: Runs = {name: [] for name, cell in CELLS.items() if (cell.framework == "megatron") == megatron}
        for name, run in on_ranks(perform, (list(found), str(tmp_path_factory.mktemp("drill"))), RANKS):
            found[name].append(run)
        return found

    return of


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.long
def test_they_are_found_as_under_deepspeed(name: str, runs: Callable[[bool], Runs]) -> None:
    cell = CELLS[name]
    if cell.framework == "megatron" and not installed("megatron.core"):
        pytest.skip("megatron-core is not installed")
    found = runs(cell.framework == "megatron")[name]
    outcome = Outcome(cell.setting, tuple(judged(cell.trials, found, cell.setting)), ())
    wrong = {r.trial.name: (r.verdict, r.repair, r.run.events) for r in outcome.results if not r.right}
    assert not wrong, "\n".join(f"{n}: {v[0]} {v[1]} {v[2]}" for n, v in wrong.items())
    assert exit_code(outcome) == 0
    assert to_json(outcome)["framework"] == cell.framework
    assert to_json(outcome).get("distributed_optimizer") == (None if cell.stage is None else cell.stage == 1)
    assert {r.trial.name: r.repair.answer for r in outcome.results if r.repair is not None} == dict(cell.repairs)


# -- which faults, and why not -----------------------------------------------------------------------------------------


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting can be made whatever is installed."""
    monkeypatch.setattr(drill_setting, "installed", lambda package: True)


@pytest.mark.parametrize(
    ("framework", "stage", "variant"),
    [("ddp", None, "ddp"), ("fsdp2", None, "fsdp2"), ("megatron", 0, "megatron-0"), ("megatron", 1, "megatron-1")],
)
@pytest.mark.usefixtures("there")
def test_every_fault_is_tried_or_has_a_reason(framework: str, stage: int | None, variant: str) -> None:
    setting = make_setting(None, 4, stage, framework=framework)
    trials, skipped = trials_of(DrillOptions(framework=framework), setting)
    tried = {trial.name for trial in trials if trial.fault is not None}
    assert tried | set(skipped) == set(FAULTS)
    assert not tried & set(skipped)
    assert {name for name, fault in FAULTS.items() if variant in fault.not_applicable} <= set(skipped)
    console = Console(width=4000, record=True, quiet=False)
    print_report(Outcome(setting, (), skipped), console)
    text = console.export_text()
    lines = [line for line in text.splitlines() if line.startswith("Not applicable, because ")]
    named = [name for line in lines for name in line.rstrip(". ").rpartition(": ")[2].split(", ")]
    assert sorted(named) == sorted(skipped)
    assert set(to_json(Outcome(setting, (), skipped))["not_applicable"]) == set(skipped)


@pytest.mark.usefixtures("there")
def test_nothing_is_repaired_under_megatron() -> None:
    setting = make_setting({"silent_consistency": {}}, 4, framework="megatron")
    with pytest.raises(ConfigError, match="does not write weights with Megatron-core"):
        setting.answering(MAJORITY)
    with pytest.raises(ConfigError, match="only a reduction of DeepSpeed"):
        setting.answering(RETRY)
    with pytest.raises(ConfigError, match=r"--stage must be 0, or 1 for the distributed optimizer, .* got 2"):
        make_setting(None, 4, 2, framework="megatron")


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


def test_where_megatron_is_not_installed_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill_setting, "installed", lambda package: False)
    result = CliRunner().invoke(app, ["drill", "--framework", "megatron"])
    assert result.exit_code == 2
    assert result.stderr == (
        "ds-silent: ds-silent drill --framework megatron needs megatron-core, which is not installed: "
        'pip install "ds_silent[megatron]"\n'
    )


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
