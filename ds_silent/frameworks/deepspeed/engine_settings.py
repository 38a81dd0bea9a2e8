"""Which settings a DeepSpeed engine runs with, and which of them stand in the configuration that it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_silent.config.block_file import load_ds_config
from ds_silent.framework import Setting

_ASKED = {
    "gradient_clipping": ("gradient_clipping", "gradient_clipping"),
    "micro-batches of a step": ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
    "zero_optimization.stage": ("zero_optimization_stage", "zero_optimization.stage"),
    "zero_optimization.reduce_bucket_size": ("zero_reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
    "zero_optimization.allgather_bucket_size": (
        "zero_allgather_bucket_size",
        "zero_optimization.allgather_bucket_size",
    ),
    "zero_optimization.overlap_comm": ("zero_overlap_comm", "zero_optimization.overlap_comm"),
    "zero_optimization.contiguous_gradients": (
        "zero_contiguous_gradients",
        "zero_optimization.contiguous_gradients",
    ),
    "prescale_gradients": ("postscale_gradients", "prescale_gradients"),
    "gradient_predivide_factor": ("gradient_predivide_factor", "gradient_predivide_factor"),
}
"""Name: the engine's method (0.16.9 to 0.19.8), and the key of the configuration."""


def settings_of(engine: Any) -> dict[str, Setting]:
    """Return the engine's settings; "yours" where the configuration has the key."""
    config = load_ds_config(engine.config) if engine.config is not None else {}
    found = {}
    for name, (method, key) in _ASKED.items():
        if callable(ask := getattr(engine, method, None)):
            value = ask()
            value = not value if name == "prescale_gradients" else value
            found[name] = Setting(value, "yours" if _stands(config, key) else "default")
    communication = str(engine.communication_data_type).removeprefix("torch.")
    given = _stands(config, "communication_data_type")
    found["communication_data_type"] = Setting(communication, "yours" if given else "framework")
    scale = getattr(engine.optimizer, "loss_scale", None)
    if engine.fp16_enabled() and isinstance(scale, (int, float)):
        given = _stands(config, "fp16.loss_scale") or _stands(config, "fp16.initial_scale_power")
        found["loss scale at the start"] = Setting(float(scale), "yours" if given else "default")
    return found


def _stands(config: Mapping[str, Any], key: str) -> bool:
    """Tell whether a dotted key stands in a configuration with a value of the user's own; "auto" is none."""
    held: Any = config
    for part in key.split("."):
        if not isinstance(held, Mapping) or part not in held:
            return False
        held = held[part]
    return bool(held != "auto")
