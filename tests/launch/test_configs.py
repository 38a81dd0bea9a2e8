"""The configs that are shipped, and how their "auto" values are filled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.ds_config import BatchSizes, dtype_of, fill, read_config, resolve_batch, zero_stage
from finetune.optimization import linear_factor, parameter_groups
from finetune.sampler import Plan
from finetune.settings import CONFIGS, Settings, UserError, checked

SHIPPED = sorted(CONFIGS.glob("*.json"))
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_can_be_read_and_filled(path: Path) -> None:
    config = read_config(str(path))
    sizes = resolve_batch(config, Settings(), world_size=8)
    filled = fill(config, Settings(output=Path("runs/x")), sizes, 8, 813)
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
    config = read_config(str(CONFIGS / "ds_paper_8npu.json"))
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


def filled(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    before = copy.deepcopy(config)
    result = fill(config, Settings(**options), BatchSizes(2, 4), 4, 100)
    assert config == before  # the caller's is untouched
    return result


def test_absent_optimizer_is_torch_adamw_and_offloading_takes_deepspeeds() -> None:
    params = filled({}, learning_rate=1e-3)["optimizer"]["params"]
    assert params == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}
    offloaded = filled({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert "torch_adam" not in offloaded["optimizer"]["params"]


def test_scheduler_and_sizes_are_filled_as_elsewhere() -> None:
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(keys, "auto")},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "gradient_clipping": "auto",
    }
    result = filled(config, warmup_ratio=0.1)
    assert result["scheduler"]["params"] == dict(zip(keys, (0.0, 5e-5, 10, 100), strict=True))
    assert result["zero_optimization"] == {"stage": 2}
    assert result["gradient_clipping"] == 1.0


def test_an_auto_without_a_value_is_named() -> None:
    with pytest.raises(UserError, match=r'^wandb\.project is "auto"'):
        filled({"wandb": {"project": "auto"}})
    with pytest.raises(UserError, match=r"--lr 0\.1 contradicts optimizer\.params\.lr 0\.2"):
        filled({"optimizer": {"type": "AdamW", "params": {"lr": 0.2}}}, learning_rate=0.1)


def test_both_half_precisions_are_refused() -> None:
    with pytest.raises(UserError, match="both true"):
        dtype_of({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


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


def test_linear_decay_with_and_without_warm_up() -> None:
    assert [linear_factor(step, 0, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [linear_factor(step, 2, 4) for step in range(5)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
    model[2].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.01)
    assert (len(decayed["params"]), decayed["weight_decay"]) == (1, 0.01)
    assert (len(plain["params"]), plain["weight_decay"]) == (4, 0.0)
