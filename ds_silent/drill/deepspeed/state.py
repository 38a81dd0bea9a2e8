"""A training's state as one hash: the weights and everything that decides the next update.

state_hash(engine)                   # of what this rank holds
full_parameters(engine)              # clones, whole on every rank
"""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import Tensor

from ds_silent.practice.hashing import hash_of


def state_hash(engine: Any) -> str:
    """Of what this rank holds: parameters, frozen ones too, buffers, fp32 masters, the optimizer's state.

    Under ZeRO the masters and the optimizer's state are this rank's own shard, and differ from rank to rank.
    """
    optimizer = engine.basic_optimizer
    held: list[Any] = [*engine.module.parameters(), *engine.module.buffers()]
    for group in optimizer.param_groups:
        held += [value for _, value in sorted(group.items()) if isinstance(value, (int, float))]
        for parameter in group["params"]:
            held.append(parameter)
            held += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return hash_of(held)


def full_parameters(engine: Any) -> list[Tensor]:
    """Clones of every parameter, whole, in their training dtype."""
    parameters = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            parameters.append(parameter.detach().clone())
    return parameters
