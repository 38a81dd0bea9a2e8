"""Tell which framework an object belongs to, without importing one that the script has not imported."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ds_silent.observing import start


def is_fsdp2(module: Any) -> bool:
    """Whether ``fully_shard`` was called on it; its class is public from torch 2.6 on."""
    return issubclass(type(module), getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def is_fsdp1(module: Any) -> bool:
    """Whether it is a ``FullyShardedDataParallel``."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ()))


def is_deepspeed(training: Any) -> bool:
    """Whether it is an engine."""
    return isinstance(training, getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ()))


def is_megatron(training: Any) -> bool:
    """Whether it is one of Megatron-core's wrappers of a model, or a list whose first is."""
    first = training[0] if isinstance(training, (list, tuple)) and training else training
    base: Any = sys.modules.get("megatron.core.distributed.data_parallel_base")
    return isinstance(first, getattr(base, "_BaseDataParallel", ()))


def is_alone(training: Any) -> bool:
    """Whether the only process trains it, as a plain module: no framework has wrapped it, and no other rank waits."""
    first = training[0] if isinstance(training, (list, tuple)) and training else training
    return isinstance(first, nn.Module) and not is_fsdp1(first) and start.alone()
