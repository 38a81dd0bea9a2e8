"""The configs that are shipped, and how their "auto" values are filled."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from finetune.ds_config import (
    BatchSizes,
    arguments_of,
    dtype_of,
    read_config,
    refuse_auto,
    resolve_batch,
    zero_stage,
)
from finetune.sampler import Plan
from finetune.settings import CONFIGS, Settings, UserError, checked
from finetune.trainer import parameter_groups

SHIPPED = sorted(CONFIGS.glob("*.json"))
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def by_the_trainer(settings: Settings, world_size: int, total_steps: int) -> dict[str, Any]:
    """The config when transformers' Trainer has filled it from our arguments; it raises where one is not the file's."""
    config = read_config(settings)
    sizes = resolve_batch(config, settings, world_size)
    arguments = arguments_of(config, settings, sizes, world_size, total_steps)
    filler = HfTrainerDeepSpeedConfig(config)
    warmup = arguments["warmup_steps"]
    given = {"world_size": world_size, "save_on_each_node": False, "fp16_full_eval": False, "bf16_full_eval": False}
    trainers = SimpleNamespace(**arguments, **given, get_warmup_steps=lambda total: warmup)
    filler.trainer_config_process(trainers)
    filler.trainer_config_finalize(trainers, None, total_steps)
    refuse_auto(filler.config)
    return dict(filler.config)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_can_be_read_and_filled(path: Path) -> None:
    filled = by_the_trainer(Settings(output=Path("runs/x"), deepspeed_config=str(path)), 8, 813)
    assert "auto" not in repr(filled)
    assert filled["train_batch_size"] == 64
    assert filled["optimizer"]["params"]["lr"] == 5e-5
    assert filled["silent_consistency"]["output_dir"] == "runs/x"
    assert zero_stage(filled) == int(path.stem[-1] if path.stem[-1].isdigit() else 0)
    assert dtype_of(filled) == (torch.float32 if "cpu" in path.stem else torch.bfloat16)


def test_the_shipped_configs_are_the_ones_that_the_documentation_names() -> None:
    by_stage = {f"ds_{kind}_zero{stage}" for kind in ("gpu", "ascend") for stage in range(3)}
    others = {"ds_paper_8npu", "ds_cpu_demo", "ds_repair_zero0", "ds_ordered_zero0"}
    assert {path.stem for path in SHIPPED} == others | by_stage
    documentation = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in SHIPPED if f"`{path.name}`" not in documentation] == []


def test_the_paper_setting_has_813_steps() -> None:
    config = read_config(Settings(deepspeed_config=str(CONFIGS / "ds_paper_8npu.json")))
    sizes = resolve_batch(config, Settings(), world_size=8)
    plan = Plan(52_002, 8, sizes.micro_batch, sizes.accumulation, "sharded", drop_last=False)
    assert (sizes, plan.global_batch, plan.steps_per_epoch) == (BatchSizes(2, 4), 64, 813)
    assert config["gradient_clipping"] == 1.0
    with pytest.raises(UserError, match=r"train_batch_size 64 must be .* 4 ranks = 32"):
        resolve_batch(config, Settings(), world_size=4)


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, {}, (2, 4)),
        (AUTO, {"micro_batch": 3}, (3, 4)),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3}, {}, (3, 4)),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 2}, {}, (6, 2)),
        ({"train_batch_size": 48}, {"accumulation": 3}, (4, 3)),
        ({"train_micro_batch_size_per_gpu": 5}, {"micro_batch": 5, "accumulation": 1}, (5, 1)),
    ],
)
def test_batch_sizes_agree(config: dict[str, Any], options: dict[str, int], expected: tuple[int, int]) -> None:
    assert resolve_batch(config, Settings(**options), world_size=4) == BatchSizes(*expected)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 5}, {"micro_batch": 4}, "--micro-batch 4 contradicts"),
        ({"train_batch_size": 50, "train_micro_batch_size_per_gpu": 3}, {}, "4 ranks = 48"),
        ({"gradient_accumulation_steps": 1.5}, {}, "whole number of at least 1"),
        ({"gradient_accumulation_steps": True}, {}, "must be a number"),
        ({"train_batch_size": "many"}, {}, 'must be a number or "auto"'),
    ],
)
def test_batch_sizes_that_contradict_are_refused(config: dict[str, Any], options: dict[str, int], said: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_batch(config, Settings(**options), world_size=4)
    assert said in str(error.value)


def filled(directory: Path, config: dict[str, Any], **options: Any) -> dict[str, Any]:
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config))
    return by_the_trainer(Settings(deepspeed_config=str(path), **options), 4, 100)


def test_absent_optimizer_is_torch_adamw_and_offloading_takes_deepspeeds(tmp_path: Path) -> None:
    params = filled(tmp_path, {}, learning_rate=1e-3)["optimizer"]["params"]
    assert params == {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert "torch_adam" not in filled(tmp_path, {"zero_optimization": zero})["optimizer"]["params"]


def test_scheduler_and_sizes_are_filled_as_elsewhere(tmp_path: Path) -> None:
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(keys, "auto")},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"betas": "auto", "eps": "auto"}},
    }
    result = filled(tmp_path, config, warmup_ratio=0.1)
    assert result["scheduler"]["params"] == dict(zip(keys, (0.0, 5e-5, 10, 100), strict=True))
    assert result["zero_optimization"] == {"stage": 2}
    assert result["gradient_clipping"] == 1.0
    assert result["optimizer"]["params"] == {"lr": 5e-5, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}


def test_numbers_in_the_file_are_kept(tmp_path: Path) -> None:
    params = {"lr": 2e-4, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6}
    config = {"gradient_clipping": 0.5, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": params}}
    result = filled(tmp_path, config)
    assert (result["optimizer"]["params"], result["gradient_clipping"]) == (params, 0.5)


def test_an_auto_without_a_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'^project is "auto"'):
        filled(tmp_path, {"wandb": {"project": "auto"}})
    with pytest.raises(UserError, match=r"--lr 0\.1 contradicts optimizer\.params\.lr 0\.2"):
        filled(tmp_path, {"optimizer": {"type": "AdamW", "params": {"lr": 0.2}}}, learning_rate=0.1)


def test_both_half_precisions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both true"):
        filled(tmp_path, {"bf16": {"enabled": True}, "fp16": {"enabled": True}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scenario": "s9"}, "--scenario must be one of s1-1, s1-2, s1-3, got 's9'"),
        ({"max_length": 2}, "--max-length must be at least 8 tokens, got 2"),
        ({"seed": 2**31}, "--seed must be between 0 and"),
        ({"learning_rate": float("nan")}, "--lr must be above 0"),
        ({"warmup_ratio": 1.0}, "--warmup-ratio must be at least 0 and below 1"),
        ({"eval_every": 5}, "add --eval-rows"),
        ({"epochs": 0}, "--epochs must be at least 1"),
    ],
)
def test_settings_out_of_bounds_get_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        checked(Settings(**options))
    assert said in str(error.value)


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
    model[2].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.01)
    assert (len(decayed["params"]), decayed["weight_decay"]) == (1, 0.01)
    assert (len(plain["params"]), plain["weight_decay"]) == (4, 0.0)
