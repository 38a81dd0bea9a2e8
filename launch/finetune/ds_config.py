"""The DeepSpeed config of a run: which file, and what it and the command line make of the Trainer's arguments.

    config = read_config(settings)
    sizes = resolve_batch(config, settings, world_size=4)
    arguments = TrainingArguments(deepspeed=config, **arguments_of(config, settings, sizes, total_steps=813))

The Trainer fills ``"auto"`` from its arguments and refuses a number that is not theirs. So a number in the file becomes
the argument; a number in the file and another one on the command line contradict each other and are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_silent.config import BLOCK, find_block, parse
from ds_silent.config.block_file import load_ds_config
from ds_silent.device import kind
from finetune.settings import CONFIGS, Settings, UserError

DEFAULT_CONFIG = {"cuda": "ds_gpu_zero1.json", "npu": "ds_ascend_zero1.json"}
MICRO_BATCH, ACCUMULATION = 2, 4  # the paper's
LEARNING_RATE, WEIGHT_DECAY = 5e-5, 0.01
# sized by the model in other trainers; without them DeepSpeed has defaults that are right for most models
SIZED_BY_DEEPSPEED = (
    *("reduce_bucket_size", "allgather_bucket_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
)


@dataclass(frozen=True)
class BatchSizes:
    """Rows per rank and forward pass; forward passes per optimizer step."""

    micro_batch: int
    accumulation: int


def read_config(settings: Settings) -> dict[str, Any]:
    """The file, by default the one of ``configs/`` that suits the accelerator, with what the Trainer does not add.

    That is AdamW where the file names no optimizer, the run's directory in a ``silent_consistency`` block that has
    none, and whether the accelerator can bf16 or fp16 where that is ``"auto"``.

    Raises:
        ConfigError: it is missing, is no JSON object, or its ``silent_consistency`` block has a mistake.
        UserError: its optimizer or its dtypes make no sense.
    """
    config = load_ds_config(settings.deepspeed_config or CONFIGS / DEFAULT_CONFIG.get(kind(), "ds_cpu_demo.json"))
    find_block(config)
    block = config.get(BLOCK)
    if isinstance(block, dict) and block.get("output_dir", "auto") == "auto":
        block["output_dir"] = str(settings.output)
    parse(config)
    for key, supported in (("bf16", "is_bf16_supported"), ("fp16", "is_fp16_supported")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            taken = key == "fp16" and _enabled(config, "bf16")
            section["enabled"] = not taken and bool(getattr(get_accelerator(), supported)())
    if _enabled(config, "bf16") and _enabled(config, "fp16"):
        raise UserError("bf16.enabled and fp16.enabled are both true: keep one of them")
    if "optimizer" not in config:
        offloaded = bool((config.get("zero_optimization") or {}).get("offload_optimizer"))
        # torch's own AdamW needs no compiler and is the same on every accelerator; offloading needs DeepSpeed's
        config["optimizer"] = {"type": "AdamW", "params": {} if offloaded else {"torch_adam": True}}
    section = config["optimizer"]
    if not isinstance(section, dict) or not isinstance(section.setdefault("params", {}), dict):
        raise UserError('optimizer must be an object such as {"type": "AdamW", "params": {"lr": "auto"}}')
    for key in ("lr", "weight_decay"):
        section["params"].setdefault(key, "auto")
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        config["zero_optimization"] = {
            key: value for key, value in zero.items() if not (key in SIZED_BY_DEEPSPEED and value == "auto")
        }
    return config


def resolve_batch(config: Mapping[str, Any], settings: Settings, world_size: int) -> BatchSizes:
    """The two batch sizes on which the file, the command line and the number of ranks agree.

    Raises:
        UserError: they do not.
    """
    micro_batch = _one_value(config, "train_micro_batch_size_per_gpu", "--micro-batch", settings.micro_batch)
    accumulation = _one_value(config, "gradient_accumulation_steps", "--accumulation", settings.accumulation)
    total = _one_value(config, "train_batch_size", "", None)
    if total is not None and accumulation is None and micro_batch is not None:
        accumulation = max(1, total // (micro_batch * world_size))
    elif total is not None and micro_batch is None:
        accumulation = accumulation or 1
        micro_batch = max(1, total // (accumulation * world_size))
    sizes = BatchSizes(micro_batch or MICRO_BATCH, accumulation or ACCUMULATION)
    product = sizes.micro_batch * sizes.accumulation * world_size
    if total is not None and total != product:
        raise UserError(
            f"train_batch_size {total} must be train_micro_batch_size_per_gpu {sizes.micro_batch} x "
            f"gradient_accumulation_steps {sizes.accumulation} x {world_size} ranks = {product}: change one of them, "
            'start another number of ranks, or write "auto" for train_batch_size'
        )
    return sizes


def arguments_of(
    config: dict[str, Any], settings: Settings, sizes: BatchSizes, world_size: int, total_steps: int
) -> dict[str, Any]:
    """The TrainingArguments that stand in the config as well, and what it needs and the Trainer does not fill."""
    params = config["optimizer"]["params"]
    prefix = "optimizer.params."
    lr = _one_value(params, "lr", "--lr", settings.learning_rate, prefix)
    decay = _one_value(params, "weight_decay", "--weight-decay", settings.weight_decay, prefix)
    config["train_micro_batch_size_per_gpu"] = sizes.micro_batch
    config["gradient_accumulation_steps"] = sizes.accumulation
    config["train_batch_size"] = sizes.micro_batch * sizes.accumulation * world_size
    config.setdefault("steps_per_print", total_steps + 1)  # the run's own log has the lines
    betas = _number(params, "betas", [0.9, 0.999])
    return {
        "per_device_train_batch_size": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulation,
        "max_steps": total_steps,
        "learning_rate": LEARNING_RATE if lr is None else lr,
        "weight_decay": WEIGHT_DECAY if decay is None else decay,
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_epsilon": _number(params, "eps", 1e-8),
        "max_grad_norm": _number(config, "gradient_clipping", 1.0),
        "warmup_steps": round(settings.warmup_ratio * total_steps),
        "bf16": _enabled(config, "bf16"),
        "fp16": _enabled(config, "fp16"),
    }


def refuse_auto(config: Mapping[str, Any]) -> None:
    """Raise UserError for an ``"auto"`` that the Trainer has left and does not fill later."""
    left = re.findall(r'"(?!(?:total|warmup)_num_steps")(\w+)": "auto"', json.dumps(config))
    if left:
        raise UserError(f'{left[0]} is "auto", which the Trainer has no value for: write a value, or leave it out')


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The parameters' dtype that a config asks for."""
    if _enabled(config, "bf16"):
        return torch.bfloat16
    return torch.float16 if _enabled(config, "fp16") else torch.float32


def zero_stage(config: Mapping[str, Any]) -> int:
    """``zero_optimization.stage``, 0 when the config is silent."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _number(section: Mapping[str, Any], key: str, default: Any) -> Any:
    value = section.get(key, "auto")
    return default if value == "auto" else value


def _one_value(section: Mapping[str, Any], key: str, option: str, given: Any, prefix: str = "") -> Any:
    written = section.get(key, "auto")
    if written == "auto":
        return given
    if isinstance(written, bool) or not isinstance(written, (int, float)):
        raise UserError(f'{prefix}{key} must be a number or "auto", got {written!r}')
    if not prefix and (not isinstance(written, int) or written < 1):
        raise UserError(f'{prefix}{key} must be a whole number of at least 1, or "auto", got {written!r}')
    if given is not None and given != written:
        raise UserError(
            f"{option} {given} contradicts {prefix}{key} {written} of the DeepSpeed config: leave {option} out, or "
            'write "auto" there'
        )
    return written


def _enabled(config: Mapping[str, Any], key: str) -> bool:
    block = config.get(key)
    return isinstance(block, Mapping) and block.get("enabled", False) is True
