"""What every rank of a plain data-parallel training holds whole, from the module and its optimizers alone.

items = [*parameters_of(module), *rest_of(module, optimizers)]
replica = replica_of(module, optimizers, optimizer_state=True, buffers=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ds_silent.kernels.checksums import Items, Replica


def parameters_of(module: nn.Module) -> Items:
    """Every parameter, trainable or not."""
    return list(module.named_parameters())


def rest_of(module: nn.Module, optimizers: Sequence[Any]) -> Items:
    """Buffers, masters and the optimizers' own state."""
    return [*buffers_of(module), *masters_of(module, optimizers), *states_of(optimizers)]


def buffers_of(module: nn.Module) -> Items:
    """Without running statistics of a batch, which are each rank's own unless they are synchronised."""
    own = {
        id(buffer)
        for inner in module.modules()
        if isinstance(inner, _NormBase) and not isinstance(inner, nn.SyncBatchNorm)
        for buffer in inner.buffers(recurse=False)
    }
    return [(f"buffer {name}", buffer) for name, buffer in module.named_buffers() if id(buffer) not in own]


def masters_of(module: nn.Module, optimizers: Sequence[Any]) -> Items:
    """Parameters that only the optimizers have: fp32 masters."""
    own = {id(parameter) for parameter in module.parameters()}
    groups = _groups(optimizers)
    return [
        (f"master weights {g}.{p}", parameter)
        for g, group in enumerate(groups)
        for p, parameter in enumerate(group["params"])
        if id(parameter) not in own
    ]


def states_of(optimizers: Sequence[Any]) -> Items:
    """The optimizers' own tensors."""
    places = ((g, p, state) for g, p, state in _states(optimizers))
    return [
        (f"optimizer {key} {g}.{p}", value)
        for g, p, state in places
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]


def replica_of(module: nn.Module, optimizers: Sequence[Any], optimizer_state: bool, buffers: bool) -> Replica:
    """All that makes one replica; without the optimizers' own state, or buffers, if they are not wanted.

    Some optimizers count their steps in ``param_groups[...]["step"]`` or ``state[...]["step"]`` as plain numbers:
    these travel as a tensor and are written back.
    """
    items = [*parameters_of(module), *(buffers_of(module) if buffers else ()), *masters_of(module, optimizers)]
    if not optimizer_state:
        return Replica(items, lambda: None)
    numbers = _step_numbers(optimizers)
    counts = torch.tensor([int(where[key]) for where, key in numbers], dtype=torch.int64)

    def write_back() -> None:
        for (where, key), count in zip(numbers, counts.tolist(), strict=True):
            where[key] = type(where[key])(count)

    items += states_of(optimizers)
    return Replica([*items, ("optimizer step numbers", counts)] if numbers else items, write_back)


def _groups(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]


def _states(optimizers: Sequence[Any]) -> list[tuple[int, int, dict[str, Any]]]:
    found = []
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            found.append([optimizer.state.get(parameter, {}) for parameter in group["params"]])
    return [(g, p, state) for g, states in enumerate(found) for p, state in enumerate(states)]


def _step_numbers(optimizers: Sequence[Any]) -> list[tuple[dict[str, Any], str]]:
    places = [*_groups(optimizers), *(state for _, _, state in _states(optimizers))]
    return [(where, "step") for where in places if isinstance(where.get("step"), (int, float))]
