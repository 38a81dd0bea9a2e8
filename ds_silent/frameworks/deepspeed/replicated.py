"""What every rank holds whole: parameters, buffers and, in stage 0, the optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ds_silent.replicas.checksums import Items, Replica


def replicated_parameters(engine: Any) -> Items:
    """Every parameter, trainable or not, where each rank holds all of it; nothing under stage 3."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [(name, parameter) for name, parameter in engine.module.named_parameters()]


def replicated_state(engine: Any) -> Items:
    """Buffers, and in stage 0 without partitions the optimizer's tensors and its fp32 masters."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [*_buffers(engine), *_masters(engine), *_optimizer_tensors(engine)]


def replica_of(engine: Any, optimizer_state: bool, buffers: bool) -> Replica:
    """All that makes one replica in stage 0; without the optimizer's own state, or buffers, if they are not wanted.

    ``FusedAdam`` counts its steps in ``param_groups[...]["step"]``, ``DeepSpeedCPUAdam`` in ``state[...]["step"]``:
    these numbers travel as a tensor and are written back.
    """
    items = [*replicated_parameters(engine), *(_buffers(engine) if buffers else ()), *_masters(engine)]
    if not optimizer_state:
        return Replica(items, lambda: None)
    numbers = _step_numbers(engine)
    counts = torch.tensor([int(where[key]) for where, key in numbers], dtype=torch.int64)

    def write_back() -> None:
        for (where, key), count in zip(numbers, counts.tolist(), strict=True):
            where[key] = type(where[key])(count)

    items += _optimizer_tensors(engine)
    return Replica([*items, ("optimizer step numbers", counts)] if numbers else items, write_back)


def _buffers(engine: Any) -> Items:
    """Without running statistics of a batch, which are each rank's own unless they are synchronised."""
    own = {
        id(buffer)
        for module in engine.module.modules()
        if isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    return [(f"buffer {name}", buffer) for name, buffer in engine.module.named_buffers() if id(buffer) not in own]


def _whole_optimizer(engine: Any) -> Any:
    """The base optimizer where each rank's steps all parameters, else None."""
    sharded = engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer)
    return None if sharded else engine.basic_optimizer


def _masters(engine: Any) -> Items:
    own = {id(parameter) for parameter in engine.module.parameters()}
    groups = getattr(_whole_optimizer(engine), "param_groups", ())
    return [
        (f"master weights {g}.{p}", parameter)
        for g, group in enumerate(groups)
        for p, parameter in enumerate(group["params"])
        if id(parameter) not in own
    ]


def _optimizer_tensors(engine: Any) -> Items:
    basic = _whole_optimizer(engine)
    return [
        (f"optimizer {key} {g}.{p}", value)
        for g, group in enumerate(getattr(basic, "param_groups", ()))
        for p, parameter in enumerate(group["params"])
        for key, value in basic.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


def _step_numbers(engine: Any) -> list[tuple[dict[str, Any], str]]:
    basic = _whole_optimizer(engine)
    groups = list(getattr(basic, "param_groups", ()))
    places = [*groups, *(basic.state.get(p, {}) for group in groups for p in group["params"])]
    return [(where, "step") for where in places if isinstance(where.get("step"), (int, float))]
