"""A training's state as one hash: the weights and everything that decides the next update.

state_hash(engine)                   # of what this rank holds
full_parameters(engine)              # clones, whole on every rank
"""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import Tensor

from ds_silent.drill.training import state_of


def state_hash(engine: Any) -> str:
    """Of what this rank holds: parameters, frozen ones too, buffers, fp32 masters, the optimizer's state.

    Under ZeRO the masters and the optimizer's state are this rank's own shard, and differ from rank to rank.
    """
    return state_of(engine.module, engine.basic_optimizer)


def full_parameters(engine: Any) -> list[Tensor]:
    """Clones of every parameter, whole, in their training dtype."""
    parameters = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            parameters.append(parameter.detach().clone())
    return parameters
