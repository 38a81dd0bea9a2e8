"""From a module in ``DistributedDataParallel`` and its optimizer to an observer."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ds_silent.config import ConfigError
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.extras import is_first, print_without_traceback
from ds_silent.frameworks.ddp.framework import DDPFramework
from ds_silent.frameworks.ddp.reduction import hook_of
from ds_silent.frameworks.torch_attach import Wrapped, attach_wrapped
from ds_silent.observing.attach import Given, idle_observer, is_alone
from ds_silent.observing.observer import Observer


def attach_ddp(
    model: DistributedDataParallel,
    optimizer: Any,
    config: Given = None,
    *,
    loader: Any = None,
    accumulation: int = 1,
    _gather_limit: int = GATHER_LIMIT,
) -> Observer | None:
    """Observe a ``DistributedDataParallel`` training; ``observer.close()`` undoes it. Every rank calls it.

    Args:
        model: the wrapped module, before its first step.
        optimizer: the torch optimizer, or several, that step its parameters.
        config: the block as a dict, parsed, or the path of a file that holds it (alone, or under its name); by default
            all defaults.
        loader: this rank's DataLoader or sampler, for the preflight and the size of an epoch. The rows are followed
            without it too.
        accumulation: micro-batches per step, where the script accumulates.
        _gather_limit: for tests: a few ranks can be above it.

    Returns:
        the observer, or None when the block says ``"enabled": false``.

    Raises:
        ConfigError: the block cannot be honoured; the same on every rank.
        SinkError: rank 0 cannot write to ``output_dir``; raised on every rank.
    """
    if not isinstance(model, DistributedDataParallel) and is_alone(model):
        return idle_observer(config)
    if not isinstance(model, DistributedDataParallel):
        print_without_traceback(ConfigError, tells=lambda _: is_first())
        raise ConfigError(
            f"attach_ddp takes a torch.nn.parallel.DistributedDataParallel, got {type(model).__name__}; wrap the "
            "module first"
        )
    wrapped = Wrapped(
        name="DistributedDataParallel",
        held=model,
        module=model.module,
        group=lambda: model.process_group,
        framework=lambda optimizers, config, rows, steps: DDPFramework(model, optimizers, config, rows, steps),
        facts=lambda: {
            "find_unused_parameters": bool(model.find_unused_parameters),
            "static_graph": bool(model.static_graph),
            "the communication hook": hook_of(model),
        },
        sharded=False,
    )
    return attach_wrapped(wrapped, optimizer, config, loader, accumulation, _gather_limit)
