"""What every rank holds whole: parameters, buffers and, in stage 0, the optimizer's state."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from ds_silent.replicas import Items


def replicated_parameters(engine: Any) -> Items:
    """Every parameter, trainable or not, where each rank holds all of it; nothing under stage 3."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [(name, parameter) for name, parameter in engine.module.named_parameters()]


def replicated_state(engine: Any) -> Items:
    """Buffers, and in stage 0 without partitions the optimizer's tensors and its fp32 masters."""
    if engine.zero_optimization_stage() == 3:
        return []
    found = [(f"buffer {name}", buffer) for name, buffer in engine.module.named_buffers()]
    if engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer):
        return found
    basic = engine.basic_optimizer
    own = {id(parameter) for parameter in engine.module.parameters()}
    for g, group in enumerate(getattr(basic, "param_groups", ())):
        for p, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                found.append((f"master weights {g}.{p}", parameter))
            for key, value in basic.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found.append((f"optimizer {key} {g}.{p}", value))
    return found
