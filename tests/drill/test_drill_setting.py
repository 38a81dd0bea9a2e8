"""What the drill makes of the user's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_silent.config import ConfigError, RespondConfig
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import MAJORITY, RETRY
from ds_silent.drill.faults.promises import FORMULA_FAULTS
from ds_silent.drill.run_drill import HEALTHY, DrillOptions, trials_of
from ds_silent.drill.setting import make_setting

BLOCK: dict[str, Any] = {"silent_consistency": {}}


def test_what_decides_about_the_observer_is_kept_and_the_rest_is_named() -> None:
    given = {
        **BLOCK,
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 16,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Lamb", "params": {"lr": 1.0}},
        "wandb": {"enabled": True},
        "flops_profiler": {"enabled": True},
    }
    setting = make_setting(given, ranks=4)
    assert (setting.stage, setting.dtype, setting.micro_batch, setting.accumulation) == (2, "bf16", 16, 4)
    assert setting.config["train_batch_size"] == 16 * 4 * 4
    assert setting.config["gradient_clipping"] == 0.5
    assert setting.config["optimizer"]["type"] == "AdamW"
    assert setting.config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 40_000}
    assert "wandb" not in setting.config
    assert [note.split(":")[0] for note in setting.notes] == [
        "integrity.replica_interval",
        "flops_profiler",
        "zero_optimization.offload_optimizer",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ]
    assert given["zero_optimization"]["offload_optimizer"]  # the caller's dictionary is its own


def test_options_win_over_the_file_and_fp16_is_computed_in_bf16() -> None:
    fp16 = {**BLOCK, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert make_setting(fp16, 4).dtype == "bf16"
    assert "fp16" in make_setting(fp16, 4).notes[1]
    chosen = make_setting(fp16, 4, stage=0, dtype="fp32")
    assert (chosen.stage, chosen.dtype, chosen.config["bf16"]["enabled"]) == (0, "fp32", False)


def test_replicas_are_compared_soon_unless_the_configuration_says_when() -> None:
    setting = make_setting({"silent_consistency": {"interval": 3}}, 4)
    assert setting.replica_interval == setting.config["silent_consistency"]["integrity"]["replica_interval"] == 15
    assert "15 instead of the default 100" in setting.notes[0]
    chosen = make_setting({"silent_consistency": {"integrity": {"replica_interval": 40}}}, 4)
    assert (chosen.replica_interval, chosen.notes) == (40, ())


def test_responses_of_the_configuration_are_left_to_trainings_of_their_own() -> None:
    block = {"respond": {"on_replica_drift": "stop"}, "reduction": "ordered", "detectors": {"stop_on": "error"}}
    setting = make_setting({"silent_consistency": block}, 4)
    assert (setting.block.respond, setting.block.reduction) == (RespondConfig(), "native")
    assert setting.block.detectors.stop_on == setting.config["silent_consistency"]["detectors"].get("stop_on", "never")
    assert [note.split(":")[0] for note in setting.notes[1:]] == ["respond", "reduction", "detectors.stop_on"]
    retried = setting.answering(RETRY)
    assert retried.block.respond.on_aggregation_error == "retry"
    assert (retried.interval, retried.block.reduction) == (1, "native")
    assert setting.answering(None) is setting
    with pytest.raises(ConfigError, match="needs a full replica"):
        make_setting(BLOCK, 4, stage=1).answering(MAJORITY)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("ds_*.json")), ids=lambda path: path.name)
def test_every_shipped_configuration_can_be_drilled(path: Path) -> None:
    from ds_silent.config.block_file import load_ds_config

    setting = make_setting(load_ds_config(path), 4)
    assert '"auto"' not in json.dumps(setting.config)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "no active"),
        ({"silent_consistency": {"enabled": False}}, "no active"),
        ({"silent_consistency": {"interval": 0}}, "silent_consistency.interval must"),
        ({**BLOCK, "zero_optimization": {"stage": 7}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 7"),
        ({**BLOCK, "zero_optimization": {"stage": 1, "overlap": 1}}, "DeepSpeed refuses 'zero_optimization.overlap'"),
        ({**BLOCK, "train_micro_batch_size_per_gpu": "8"}, "train_micro_batch_size_per_gpu must be a whole number"),
        ({**BLOCK, "compile": {"deepcompile": True}}, "deepcompile"),
    ],
)
def test_a_configuration_that_cannot_be_drilled_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_setting(config, 4)


def test_with_an_interval_the_faults_strike_later_and_trainings_are_longer() -> None:
    options = DrillOptions(faults=("nan-loss", "learning-rate"))
    setting = make_setting({"silent_consistency": {"interval": 5}}, 4)
    trials, _ = trials_of(options, setting)
    strikes = {trial.name: trial for trial in trials}
    assert strikes["nan-loss"].target.step == 105  # a measured step
    assert strikes["nan-loss"].steps == 105 + 6 * 5
    assert strikes["learning-rate"].target.step == 0
    assert [trial.name for trial in trials[:3]] == list(HEALTHY)


def test_faults_that_mean_nothing_under_a_stage_are_left_out_and_named() -> None:
    behind = {name for name, fault in FAULTS.items() if fault.strikes in ("reduction", "update", "replica")}
    behind -= {fault.name for fault in FORMULA_FAULTS}  # in the optimizer's own formula, on every rank
    trials, skipped = trials_of(DrillOptions(), make_setting(BLOCK, 4, stage=3))
    assert set(skipped) == {
        "layer-without-gradient",
        *("loss-divided-twice", "loss-not-divided", "loss-divided-by-all"),
        *("weights-without-masters", "masters-without-weights"),
        *("later-tokens-attended", "other-documents-attended"),
        *("optimizer-without-layer", "optimizer-without-layer-everywhere", "parameter-in-two-groups"),
        "gathered-weights-kept",
        "frozen-trained",
        "initial-weights-tensor",
        "initial-weights-bit",
        *behind,
    }
    assert not set(skipped) & {trial.name for trial in trials}
    assert len(trials) == len(HEALTHY) + 1 + len(FAULTS) - len(skipped)  # 1: of a language model
    _, skipped = trials_of(DrillOptions(), make_setting(BLOCK, 4, stage=1, dtype="bf16"))
    assert {"micro-batch-missing", "aggregate-flip-byte-3", "weight-changed", "gradients-not-cleared"} <= set(skipped)
    assert "aggregate-flip-byte-1" not in skipped
    twice = {**BLOCK, "gradient_accumulation_steps": 2}
    trials, _ = trials_of(DrillOptions(), make_setting(twice, 4))
    assert "micro-batch-missing" in {trial.name for trial in trials}


def test_the_training_is_long_enough_for_the_configured_comparison_of_replicas() -> None:
    setting = make_setting({"silent_consistency": {"integrity": {"replica_interval": 50}}}, 4)
    trials, _ = trials_of(DrillOptions(faults=("frozen-parameter-changed",)), setting)
    assert trials[-1].steps == 52
    with pytest.raises(ConfigError, match=r"--steps must be at least 74, got 60: .* compared every 50 steps"):
        trials_of(DrillOptions(faults=("frozen-parameter-changed",), steps=60), setting)
