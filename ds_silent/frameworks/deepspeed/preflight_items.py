"""What the preflight compares of one DeepSpeed engine, and of the model before there is an engine.

before = weights_hash(model, is_sharded)     # before deepspeed.initialize, which broadcasts rank 0's parameters
training = training_of(engine, ds_config)    # for ds_silent.preflight.inventory.local_items
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ds_silent.config import BLOCK, WRITERS_ALONE
from ds_silent.frameworks.deepspeed.shapes import expert_group
from ds_silent.frameworks.deepspeed.words import WORDS
from ds_silent.preflight.inventory import Training, config_item
from ds_silent.preflight.items import Item
from ds_silent.preflight.settings import groups_of

_SECTIONS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "data_types",
    "zero_optimization",
    "activation_checkpointing",
    "silent_consistency",
)
# Where a run writes and what it prints is a rank's own business.
_IGNORED_SECTIONS = {
    *("tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler", "autotuning"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "local_rank"),
}


def training_of(engine: Any, ds_config: Mapping[str, Any]) -> Training:
    """Of a DeepSpeedEngine before its first step.

    Args:
        ds_config: its configuration as a dictionary.
    """
    return Training(
        framework=WORDS.framework,
        module=engine.module,
        optimizer=engine.optimizer,
        scheduler=getattr(engine, "lr_scheduler", None),
        config=partial(config_items, ds_config),
        sharded=is_sharded,
        shape=_whole_shape,
        packages=("deepspeed",),
        groups=partial(model_groups, engine.optimizer),
    )


def model_groups(optimizer: Any) -> Sequence[Sequence[Tensor]]:
    """The model's parameters by group: a wrapper has them beside the flat copies that its base optimizer holds."""
    names = ("bf16_groups", "bit16_groups", "fp16_groups")  # 0.16.9 to 0.19.8
    held = next((getattr(optimizer, name) for name in names if getattr(optimizer, name, None)), None)
    return groups_of([optimizer]) if held is None else list(held)


def config_items(ds_config: Mapping[str, Any]) -> list[Item]:
    """The DeepSpeed configuration by section, without monitors, output paths and local paths."""
    kept = {key: value for key, value in ds_config.items() if key not in _IGNORED_SECTIONS}
    if isinstance(kept.get(BLOCK), Mapping):  # its alerts hold secrets, and what is compared is written down
        kept[BLOCK] = {key: value for key, value in kept[BLOCK].items() if key not in WRITERS_ALONE}
    rest = {key: value for key, value in kept.items() if key not in _SECTIONS}
    parts = [(f"ds_config {section}", kept.get(section)) for section in _SECTIONS] + [("ds_config: the rest", rest)]
    return [config_item(name, value) for name, value in parts]


def is_sharded(tensor: Tensor) -> bool:
    """ZeRO-3 marks its parameters so (``deepspeed/runtime/zero/partition_parameters.py``); experts have few owners."""
    return hasattr(tensor, "ds_id") or expert_group(tensor) is not None


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
