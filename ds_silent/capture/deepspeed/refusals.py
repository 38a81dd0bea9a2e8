"""What reduces gradients where they cannot be seen is refused with a sentence, the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_silent.config import ConfigError

ONE_BIT_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def refuse_unsupported_config(ds_config: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for what reduces gradients where they cannot be seen; equal on all ranks."""
    zero = ds_config.get("zero_optimization") or {}
    optimizer = str((ds_config.get("optimizer") or {}).get("type", ""))
    found = None
    if (ds_config.get("compile") or {}).get("deepcompile"):
        found = "compile.deepcompile true (it reduces gradients inside the compiled graph)"
    elif isinstance(zero, Mapping) and zero.get("zenflow"):
        found = "zero_optimization.zenflow (it applies parts of the gradient at different steps)"
    elif re.sub(r"[^a-z0-9]", "", optimizer.lower()) in ONE_BIT_OPTIMIZERS:
        found = f"optimizer.type {optimizer} (it communicates compressed momentum, not gradients)"
    elif ds_config.get("sparse_gradients"):
        found = "sparse_gradients true (they are gathered, not reduced)"
    if found:
        raise ConfigError(
            f'silent_consistency cannot observe {found}; remove it, or set "silent_consistency": {{"enabled": false}}'
        )


def refuse_unsupported_engine(engine: Any) -> None:
    """Raise :class:`ConfigError` for parallelism whose ranks do not hold the same parameters; equal on all ranks."""
    found = None
    if isinstance(engine, PipelineEngine):
        found = "pipeline parallelism"
    elif engine.mp_world_size > 1:
        found = "tensor parallelism"
    elif engine.sequence_parallel_size > 1:
        found = "sequence parallelism"
    elif engine.has_moe_layers:
        found = "mixture-of-experts layers"
    if found:
        raise ConfigError(
            f"silent_consistency does not support {found} in this version, because it compares ranks that hold the "
            'same parameters; set "silent_consistency": {"enabled": false}'
        )
