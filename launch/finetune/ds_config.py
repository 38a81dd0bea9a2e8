"""The DeepSpeed config of a run: which file, its ``"auto"`` values filled, its batch made consistent.

    config = read_config(settings.deepspeed_config)
    batch = resolve_batch(config, settings, world_size=4)
    config = fill(config, settings, batch, world_size=4, total_steps=813)

As in the Hugging Face trainer, ``"auto"`` (or an absent key) means: from the command line, or its default. A number in
the file and another one on the command line contradict each other and are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_silent.config import BLOCK, find_block, parse
from ds_silent.config_file import load_ds_config
from ds_silent.device import kind
from finetune.settings import CONFIGS, Settings, UserError

DEFAULT_CONFIG = {"cuda": "ds_gpu_zero1.json", "npu": "ds_ascend_zero1.json"}
MICRO_BATCH, ACCUMULATION = 2, 4  # the paper's
LEARNING_RATE, WEIGHT_DECAY = 5e-5, 0.01
# sized by the model in other trainers; without them DeepSpeed has defaults that are right for most models
SIZED_BY_DEEPSPEED = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


@dataclass(frozen=True)
class BatchSizes:
    """Rows per rank and forward pass; forward passes per optimizer step."""

    micro_batch: int
    accumulation: int


def read_config(path: str | None) -> dict[str, Any]:
    """The file as it is; ``None`` takes the one of ``configs/`` that suits the accelerator.

    Raises:
        ConfigError: it is missing, is no JSON object, or its ``silent_consistency`` block has a mistake.
    """
    chosen = path or CONFIGS / DEFAULT_CONFIG.get(kind(), "ds_cpu_demo.json")
    config = load_ds_config(chosen)
    find_block(config)
    block = config.get(BLOCK)
    if isinstance(block, dict) and block.get("output_dir") == "auto":
        del block["output_dir"]  # fill() names it
    parse(config)
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


def fill(
    config: Mapping[str, Any], settings: Settings, sizes: BatchSizes, world_size: int, total_steps: int
) -> dict[str, Any]:
    """A copy of ``config`` with no ``"auto"`` left, which ``initialize`` takes.

    Adds AdamW when the file names no optimizer, and the run's directory to the ``silent_consistency`` block when that
    has none. A scheduler is filled when the file names one; otherwise the trainer brings its own.
    """
    filled = copy.deepcopy(dict(config))
    filled["train_micro_batch_size_per_gpu"] = sizes.micro_batch
    filled["gradient_accumulation_steps"] = sizes.accumulation
    filled["train_batch_size"] = sizes.micro_batch * sizes.accumulation * world_size
    if filled.get("gradient_clipping") == "auto":
        filled["gradient_clipping"] = 1.0
    _fill_dtype(filled)
    _fill_optimizer(filled, settings)
    _fill_scheduler(filled, settings, total_steps)
    zero = filled.get("zero_optimization")
    if isinstance(zero, dict):
        for key in SIZED_BY_DEEPSPEED:
            if zero.get(key) == "auto":
                del zero[key]
    block = filled.get(BLOCK)
    if isinstance(block, dict):
        block.setdefault("output_dir", str(settings.output))
    filled.setdefault("steps_per_print", total_steps + 1)  # the trainer prints for itself
    left = _first_auto(filled, ())
    if left:
        raise UserError(
            f'{".".join(left)} is "auto", which this trainer has no value for: write a value, or leave it out'
        )
    return filled


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The parameters' dtype that a filled (or unfilled) config asks for."""
    copied = {key: copy.deepcopy(config[key]) for key in ("bf16", "fp16") if key in config}
    _fill_dtype(copied)
    if _enabled(copied, "bf16"):
        return torch.bfloat16
    return torch.float16 if _enabled(copied, "fp16") else torch.float32


def zero_stage(config: Mapping[str, Any]) -> int:
    """``zero_optimization.stage``, 0 when the config is silent."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _fill_dtype(config: dict[str, Any]) -> None:
    for key, supported in (
        ("bf16", get_accelerator().is_bf16_supported),
        ("fp16", get_accelerator().is_fp16_supported),
    ):
        block = config.get(key)
        if isinstance(block, dict) and block.get("enabled") == "auto":
            block["enabled"] = (
                bool(supported()) if key == "bf16" else not _enabled(config, "bf16") and bool(supported())
            )
    if _enabled(config, "bf16") and _enabled(config, "fp16"):
        raise UserError("bf16.enabled and fp16.enabled are both true: keep one of them")


def _fill_optimizer(config: dict[str, Any], settings: Settings) -> None:
    if "optimizer" not in config:
        zero = config.get("zero_optimization")
        offloaded = isinstance(zero, dict) and bool(zero.get("offload_optimizer"))
        params: dict[str, Any] = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        # torch's own AdamW needs no compiler and is the same on every accelerator; offloading needs DeepSpeed's
        config["optimizer"] = {"type": "AdamW", "params": params if offloaded else {**params, "torch_adam": True}}
    section = config["optimizer"]
    if not isinstance(section, dict) or not isinstance(section.setdefault("params", {}), dict):
        raise UserError('optimizer must be an object such as {"type": "AdamW", "params": {"lr": "auto"}}')
    params = section["params"]
    lr = _one_value(params, "lr", "--lr", settings.learning_rate, prefix="optimizer.params.")
    decay = _one_value(params, "weight_decay", "--weight-decay", settings.weight_decay, prefix="optimizer.params.")
    params["lr"] = LEARNING_RATE if lr is None else lr
    params["weight_decay"] = WEIGHT_DECAY if decay is None else decay
    for key, value in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if params.get(key) == "auto":
            params[key] = value


def _fill_scheduler(config: dict[str, Any], settings: Settings, total_steps: int) -> None:
    section = config.get("scheduler")
    params = section.get("params") if isinstance(section, dict) else None
    if not isinstance(params, dict):
        return
    values = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": config["optimizer"]["params"]["lr"],
        "warmup_num_steps": max(1, round(settings.warmup_ratio * total_steps)),
        "total_num_steps": total_steps,
    }
    for key, value in values.items():
        if params.get(key) == "auto":
            params[key] = value


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


def _first_auto(value: Any, path: tuple[str, ...]) -> tuple[str, ...]:
    if value == "auto":
        return path
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = [(str(index), child) for index, child in enumerate(value)]
    for key, child in children:
        found = _first_auto(child, (*path, key))
        if found:
            return found
    return ()
