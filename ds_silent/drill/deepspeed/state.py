"""A training's state as one hash: the weights and everything that decides the next update.

Not the checksum that the responses themselves compare replicas with: who judges a repair must not believe it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


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
    digest = hashlib.sha256()
    for value in held:
        digest.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()
