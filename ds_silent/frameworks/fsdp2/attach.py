"""From a module under ``fully_shard`` and its optimizer to an observer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ds_silent.config import ConfigError
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.extras import is_first, print_without_traceback
from ds_silent.frameworks.fsdp2.framework import FSDP2Framework
from ds_silent.frameworks.fsdp2.modules import group_of, mesh_of, reshard
from ds_silent.frameworks.torch_attach import Wrapped, attach_wrapped
from ds_silent.observing.attach import Given, idle_observer, is_alone
from ds_silent.observing.observer import Observer


def attach_fsdp2(
    model: nn.Module,
    optimizer: Any,
    config: Given = None,
    *,
    loader: Any = None,
    accumulation: int = 1,
    _gather_limit: int = GATHER_LIMIT,
) -> Observer | None:
    """Observe an FSDP2 training; ``observer.close()`` undoes it. Every rank calls it. A collective: it unshards once.

    Args:
        model: the root module that ``fully_shard`` has returned, before its first step.
        optimizer, config, loader, accumulation, _gather_limit: as :func:`ds_silent.attach_ddp` takes them.

    Returns:
        the observer, or None when the block says ``"enabled": false``.

    Raises:
        ConfigError: the block or the model's layout cannot be honoured; the same on every rank.
        SinkError: rank 0 cannot write to ``output_dir``; raised on every rank.
    """
    if not isinstance(model, FSDPModule) and is_alone(model):
        return idle_observer(config)
    if not isinstance(model, FSDPModule):
        print_without_traceback(ConfigError, tells=lambda _: is_first())
        raise ConfigError(f"attach_fsdp2 takes a module under fully_shard, got {type(model).__name__}")
    reshard(model)
    wrapped = Wrapped(
        name="fully_shard",
        held=model,
        module=model,
        group=lambda: group_of(mesh_of([(name, p) for name, p in model.named_parameters() if p.requires_grad])),
        framework=lambda optimizers, config, rows, steps: FSDP2Framework(model, optimizers, config, rows, steps),
        facts=dict,
        sharded=True,
    )
    return attach_wrapped(wrapped, optimizer, config, loader, accumulation, _gather_limit)
