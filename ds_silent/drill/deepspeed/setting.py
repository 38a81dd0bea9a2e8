"""The ds_config that the drill trains under: the user's own as far as it decides what the observer sees.

    setting = make_setting(load_ds_config("ds_config.json"), ranks=4)
    setting.config["zero_optimization"], setting.notes

Kept are the ``silent_consistency`` block, ZeRO, the dtype, clipping, accumulation and the micro-batch. The optimizer
is the drill's own: a learning rate that suits another model would tear the practice model apart. Monitors and the like
would write where the user does not expect it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.setting import (
    LARGEST_BUCKET,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Dtype,
    Setting,
    batch_of,
    compared_soon,
    only_reporting,
    section,
)
from ds_silent.drill.training import Script, Training
from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config

KEPT = (
    "zero_optimization",
    "bf16",
    "data_types",
    "gradient_clipping",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
)
# Read, replaced, or without meaning for numbers: no reason to speak of them.
SILENT = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("fp16", "steps_per_print", "wall_clock_breakdown", "tensorboard", "wandb", "csv_monitor", "comet", BLOCK),
)


@dataclass(frozen=True)
class DeepSpeedSetting(Setting):
    """``config`` is a ds_config."""

    @property
    def kind(self) -> str:
        return f"ZeRO stage {self.stage}"

    @property
    def masters(self) -> bool:
        return self.dtype == "bf16"

    def facts(self) -> dict[str, Any]:
        return {"zero_stage": self.stage}

    def refuse(self, config: dict[str, Any], block: SilentConsistencyConfig) -> None:
        refuse_unsupported_config(config, block)

    def meaningless(self, fault: Fault) -> str | None:
        possible = fault.possible(self.stage, self.dtype, self.accumulation)
        return None if possible else f"means nothing under {self.kind}, {self.dtype}, accumulation {self.accumulation}"

    def left_out(self, faults: list[Fault]) -> list[str]:
        names = ", ".join(fault.name for fault in faults)
        return [f"Left out under {self.kind}, {self.dtype}, accumulation {self.accumulation}: {names}."]

    def training(self, script: Script) -> AbstractContextManager[Training]:
        from ds_silent.drill.deepspeed.training import train

        return train(self, script)


def make_setting(
    ds_config: Mapping[str, Any] | None, ranks: int, stage: int | None = None, dtype: Dtype | None = None
) -> DeepSpeedSetting:
    """The drill's configuration.

    Args:
        ds_config: the user's; None takes an empty block, ZeRO stage 0 and fp32.
        ranks: data-parallel ranks of the drill, whatever the configuration was written for.
        stage: replaces ``zero_optimization.stage``.
        dtype: replaces the dtype.

    Raises:
        ConfigError: there is no block, it is switched off, or something in the configuration cannot be honoured.
    """
    given = copy.deepcopy(dict({BLOCK: {}} if ds_config is None else ds_config))
    own = given.get(BLOCK)
    if isinstance(own, Mapping):  # the trainer fills it in; here it is replaced
        given[BLOCK] = {key: value for key, value in own.items() if key != "output_dir"}
    block, replicas = compared_soon(given)
    if block is None:
        raise ConfigError(f'the ds_config has no active "{BLOCK}" block to try; add "{BLOCK}": {{}} to it')
    refuse_unsupported_config(given, block)
    block, answers = only_reporting(given, block)
    notes = [*replicas, *answers, *(f"{key}: not part of the drill" for key in given if key not in (*KEPT, *SILENT))]
    config = {key: given[key] for key in KEPT if key in given and given[key] != "auto"}
    zero, dropped = _zero(given.get("zero_optimization"), stage)
    notes += dropped
    dtype, note = _dtype(given, dtype)
    notes += note
    micro, accumulation, note = batch_of(given)
    notes += note
    config |= {
        "zero_optimization": zero,
        "bf16": {**section(given.get("bf16")), "enabled": dtype == "bf16"},
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * ranks,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "steps_per_print": 10**9,
        BLOCK: {**given[BLOCK], "tensorboard": False},
    }
    return DeepSpeedSetting(config, block, ranks, micro, accumulation, zero["stage"], dtype, tuple(notes))


def _zero(given: Any, stage: int | None) -> tuple[dict[str, Any], list[str]]:
    """Without "auto", offloading (which needs compilers and moves no number) and buckets of a large model's size."""
    zero = section(given)
    offloaded = [key for key in zero if "offload" in key]
    kept: dict[str, Any] = {k: v for k, v in zero.items() if v != "auto" and k not in offloaded}
    for key, value in kept.items():
        if key.endswith("_bucket_size") and isinstance(value, (int, float)):
            kept[key] = min(int(value), LARGEST_BUCKET)
    kept.setdefault("reduce_bucket_size", LARGEST_BUCKET)
    kept["stage"] = kept.get("stage", 0) if stage is None else stage
    if kept["stage"] not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {kept['stage']!a}")
    try:
        DeepSpeedZeroConfig(**kept)  # or each rank would find it out, minutes later
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise ConfigError(f"DeepSpeed refuses {key!a}: {first['msg']!a}; correct it in the ds_config") from None
    return kept, [f"zero_optimization.{key}: not part of the drill" for key in offloaded]


def _dtype(given: Mapping[str, Any], asked: Dtype | None) -> tuple[Dtype, list[str]]:
    if asked is not None:
        return asked, []
    if section(given.get("fp16")).get("enabled") is True:
        return "bf16", ["fp16: computed in bf16, because DeepSpeed has no fp16 on the CPU"]
    return ("bf16" if section(given.get("bf16")).get("enabled") is True else "fp32"), []
