"""What every rank holds whole: parameters, buffers and, in stage 0, the optimizer's state."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_silent.frameworks import replicated
from ds_silent.frameworks.deepspeed.shapes import expert_group
from ds_silent.kernels.checksums import Items, Replica


def replicated_parameters(engine: Any) -> Items:
    """Every parameter, trainable or not, where each rank holds all of it; nothing under stage 3, no other's experts."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [(name, p) for name, p in replicated.parameters_of(engine.module) if expert_group(p) is None]


def replicated_state(engine: Any) -> Items:
    """Buffers, and in stage 0 without partitions the optimizer's tensors and its fp32 masters."""
    if engine.zero_optimization_stage() == 3:
        return []
    experts = any(expert_group(parameter) for parameter in engine.module.parameters())
    optimizers = [] if experts else _whole_optimizers(engine)
    return replicated.rest_of(engine.module, optimizers)


def replica_of(engine: Any, optimizer_state: bool, buffers: bool) -> Replica:
    """All that makes one replica in stage 0; without the optimizer's own state, or buffers, if they are not wanted.

    ``FusedAdam`` counts its steps in ``param_groups[...]["step"]``, ``DeepSpeedCPUAdam`` in ``state[...]["step"]``.
    """
    return replicated.replica_of(engine.module, _whole_optimizers(engine), optimizer_state, buffers)


def _whole_optimizers(engine: Any) -> list[Any]:
    """The base optimizer where each rank's steps all parameters."""
    sharded = engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer)
    return [] if sharded or engine.basic_optimizer is None else [engine.basic_optimizer]
