"""Make the ds_config that the drill trains under, from the user's own.

    config, dtype, notes = ds_config_of(load_ds_config("ds_config.json"), ranks=4, micro_batch=8, accumulation=1)

Kept are the ``silent_consistency`` block, ZeRO, the dtype, clipping, accumulation and the micro-batch. The optimizer
is the drill's own: a learning rate that suits another model would tear the practice model apart. Monitors and the like
would write where the user does not expect it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from ds_silent.config import BLOCK, ConfigError
from ds_silent.drill.training import LARGEST_BUCKET, LEARNING_RATE, WEIGHT_DECAY

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


def ds_config_of(
    given: Mapping[str, Any],
    ranks: int,
    micro_batch: int,
    accumulation: int,
    stage: int | None = None,
    dtype: str | None = None,
) -> tuple[dict[str, Any], str, list[str]]:
    """Return the ds_config without a block, the dtype, and what was changed.

    Args:
        given: the user's.
        ranks: data-parallel ranks of the drill, whatever the configuration was written for.
        micro_batch: rows.
        accumulation: micro-batches of a step.
        stage: replaces ``zero_optimization.stage``.
        dtype: replaces the dtype.

    Raises:
        ConfigError: DeepSpeed would refuse it.
    """
    notes = [f"{key}: not part of the drill" for key in given if key not in (*KEPT, *SILENT)]
    config = {key: given[key] for key in KEPT if key in given and given[key] != "auto"}
    zero, dropped = _zero(given.get("zero_optimization"), stage)
    dtype, note = _dtype(given, dtype)
    config |= {
        "zero_optimization": zero,
        "bf16": {**_section(given.get("bf16")), "enabled": dtype == "bf16"},
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * ranks,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "steps_per_print": 10**9,
    }
    return config, dtype, [*notes, *dropped, *note]


def _zero(given: Any, stage: int | None) -> tuple[dict[str, Any], list[str]]:
    """Leave out "auto", offloading (which needs compilers and moves no number) and buckets of a large model's size."""
    zero = _section(given)
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


def _dtype(given: Mapping[str, Any], asked: str | None) -> tuple[str, list[str]]:
    if asked is not None:
        return asked, []
    if _section(given.get("fp16")).get("enabled") is True:
        return "bf16", ["fp16: computed in bf16, because DeepSpeed has no fp16 on the CPU"]
    return ("bf16" if _section(given.get("bf16")).get("enabled") is True else "fp32"), []


def _section(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
