"""The drill under Megatron-core: some of each kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from ds_silent.drill.run_drill import DrillOptions, Outcome, exit_code, judged, to_json, trials_of
from ds_silent.drill.run_trial import TrialRun, run_trial
from ds_silent.drill.setting import DrillSetting
from ds_silent.drill.setting import make_setting as make
from ds_silent.drill.training import Trial
from ds_silent.extras import installed
from ds_silent.practice.ranks import on_ranks
from tests.drill.cold_start import QUIET, cold

needs_megatron = pytest.mark.skipif(not installed("megatron.core"), reason="megatron-core is not installed")
BLOCK: dict[str, Any] = {**QUIET, "detectors": {"enabled": True}}
RANKS = 3  # the fewest of which one can be outvoted
CELLS: tuple[tuple[int, Any, int, tuple[str, ...]], ...] = (
    (0, "fp32", 2, ("micro-batch-missing", "parameter-unreduced", "gradients-not-cleared", "weight-changed")),
    (1, "bf16", 1, ("bucket-dropped", "gradients-not-cleared", "gathered-weights-stale", "applied-factor-4-one-rank")),
)


make_setting = partial(make, framework="megatron")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting can be made whatever is installed."""
    monkeypatch.setattr(drill_setting, "installed", lambda package: True)


def setting_of(number: int) -> DrillSetting:
    stage, dtype, accumulation, _ = CELLS[number]
    return make_setting({"silent_consistency": BLOCK, "gradient_accumulation_steps": accumulation}, RANKS, stage, dtype)


def trials_of_cell(number: int) -> tuple[Trial, ...]:
    options = DrillOptions(faults=CELLS[number][3], ranks=RANKS, rank=1, steps=30, framework="megatron")
    trials, skipped = trials_of(options, setting_of(number))
    assert skipped == ()
    return (replace(trials[0], steps=6), *trials[3:])


def perform(send: Callable[[Any], None], directory: str) -> None:
    for number in range(len(CELLS)):
        start = cold(setting_of(number))
        for trial in trials_of_cell(number):
            send((number, run_trial(start, trial, Path(directory, str(number), trial.name))))


@needs_megatron
def test_they_are_found_as_under_deepspeed(tmp_path: Path) -> None:
    runs: dict[int, list[TrialRun]] = {number: [] for number in range(len(CELLS))}
    for number, run in on_ranks(perform, (str(tmp_path),), RANKS):
        runs[number].append(run)
    for number in range(len(CELLS)):
        setting, trials = setting_of(number), trials_of_cell(number)
        outcome = Outcome(setting, tuple(judged(trials, runs[number], setting)), ())
        wrong = {r.trial.name: (r.verdict, r.run.events) for r in outcome.results if not r.right}
        assert not wrong, "\n".join(f"{n}: {v[0]} {v[1]}" for n, v in wrong.items())
        assert exit_code(outcome) == 0
        assert to_json(outcome)["distributed_optimizer"] is bool(setting.stage)


# -- which faults, and why not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.usefixtures("there")
def test_every_fault_is_tried_or_has_a_reason(stage: int) -> None:
    setting = make_setting(None, 4, stage)
    trials, skipped = trials_of(DrillOptions(framework="megatron"), setting)
    tried = {trial.name for trial in trials if trial.fault is not None}
    assert tried | set(skipped) == set(FAULTS)
    assert not tried & set(skipped)
    variant = f"megatron-{stage}"
    assert {name for name, fault in FAULTS.items() if variant in fault.not_applicable} <= set(skipped)
    console = Console(width=4000, record=True, quiet=False)
    print_report(Outcome(setting, (), skipped), console)
    named = [
        name
        for line in console.export_text().splitlines()
        if line.startswith("Not applicable, because ")
        for name in line.rstrip(". ").rpartition(": ")[2].split(", ")
    ]
    assert sorted(named) == sorted(skipped)


@pytest.mark.usefixtures("there")
def test_nothing_is_repaired_there() -> None:
    setting = make_setting({"silent_consistency": {}}, 4)
    with pytest.raises(ConfigError, match="does not write weights with Megatron-core"):
        setting.answering(MAJORITY)
    with pytest.raises(ConfigError, match="only a reduction of DeepSpeed"):
        setting.answering(RETRY)
    with pytest.raises(ConfigError, match=r"--stage must be 0, or 1 for the distributed optimizer, .* got 2"):
        make_setting(None, 4, 2)


def test_where_it_is_not_installed_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill_setting, "installed", lambda package: False)
    result = CliRunner().invoke(app, ["drill", "--framework", "megatron"])
    assert result.exit_code == 2
    assert result.stderr == (
        "ds-silent: ds-silent drill --framework megatron needs megatron-core, which is not installed: "
        'pip install "ds_silent[megatron]"\n'
    )
