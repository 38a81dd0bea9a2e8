"""One way in for whatever a script holds: the framework is recognised by what it has made.

    observer = attach(engine)                                    # DeepSpeed
    observer = attach(ddp, optimizer=optimizer, config=block)    # DistributedDataParallel
    with observe(model, optimizer, config=block) as observer:    # the same, closed on every path
        ...

A framework that the script has not imported is not imported here either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ds_silent.frameworks.torch_common import idle_or_refused, is_fsdp1
from ds_silent.observing.observe import Given
from ds_silent.observing.observer import Observer

_EARLY_FSDP2 = "torch.distributed._composable.fsdp"
"""Where ``fully_shard`` was before it was public, in torch 2.4 and 2.5."""
_KNOWN = (
    "a DeepSpeedEngine, a DistributedDataParallel, a module under fully_shard, or Megatron-core's model or model chunks"
)


def attach(
    training: Any,
    config: Given = None,
    *,
    optimizer: Any = None,
    loader: Any = None,
    accumulation: int | None = None,
) -> Observer | None:
    """Observe a training that someone else made; ``observer.close()`` undoes it. Every rank calls it.

    Args:
        training: a DeepSpeedEngine, a DistributedDataParallel, a module under ``fully_shard``, or Megatron-core's model
            or list of chunks, before its first step; or what ``torch.compile`` has made of it.
        config: the block as a dict, parsed, or the path of a file that holds it (alone, or under its name); by default
            an engine's own, else all defaults.
        optimizer: the torch optimizer (or accelerate's around it), or several, or Megatron-core's; an engine has its
            own.
        loader: this rank's DataLoader or sampler, for the preflight and the size of an epoch; an engine may have one.
            The rows are followed without it too.
        accumulation: micro-batches per step, where the script accumulates, by default 1; an engine knows it, and
            Megatron-core may.

    Returns:
        the observer, or None when the block says ``"enabled": false`` or the engine has no optimizer. Of a plain module
        that one process trains, an observer that does nothing.

    Raises:
        ConfigError: the block or the model cannot be honoured; the same on every rank.
        SinkError: a group's first rank cannot write to its directory; raised on every rank of the group.
    """
    training = getattr(training, "_orig_mod", training)  # of torch.compile
    if isinstance(training, DistributedDataParallel):
        from ds_silent.frameworks.ddp import attach_ddp

        return attach_ddp(training, optimizer, config, loader=loader, accumulation=accumulation or 1)
    if is_fsdp2(training):
        from ds_silent.frameworks.fsdp2 import attach_fsdp2

        return attach_fsdp2(training, optimizer, config, loader=loader, accumulation=accumulation or 1)
    if is_deepspeed(training):
        from ds_silent.frameworks.deepspeed.attach_deepspeed import attach_engine

        return attach_engine(training, config, loader=loader)
    if is_megatron(training):
        from ds_silent.frameworks.megatron.megatron_framework import attach_megatron

        return attach_megatron(training, optimizer, config, loader=loader, accumulation=accumulation)
    return idle_or_refused(training, config, _not_known(training), plain=not _is_early_fsdp2(training))


@contextmanager
def observe(training: Any, optimizer: Any = None, config: Given = None, **named: Any) -> Iterator[Observer | None]:
    """:func:`attach`, and :meth:`~ds_silent.Observer.close` on every way out."""
    observer = attach(training, config, optimizer=optimizer, **named)
    try:
        yield observer
    except BaseException as error:
        if observer is not None:
            observer.close(error)
        raise
    if observer is not None:
        observer.close()


# -- which framework an object belongs to, without importing one that the script has not imported ----------------------


def is_fsdp2(module: Any) -> bool:
    """Tell whether ``fully_shard`` was called on it; its class is public from torch 2.6 on."""
    return issubclass(type(module), getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def is_deepspeed(training: Any) -> bool:
    """Tell whether it is an engine."""
    return isinstance(training, getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ()))


def is_megatron(training: Any) -> bool:
    """Tell whether it is one of Megatron-core's wrappers of a model, or a list whose first is."""
    first = training[0] if isinstance(training, (list, tuple)) and training else training
    base: Any = sys.modules.get("megatron.core.distributed.data_parallel_base")
    return isinstance(first, getattr(base, "_BaseDataParallel", ()))


def _is_early_fsdp2(training: Any) -> bool:
    return any(base.__module__.startswith(_EARLY_FSDP2) for base in type(training).__mro__)


def _not_known(training: Any) -> str:
    got = type(training).__name__
    if is_fsdp1(training):
        return (
            f"ds_silent cannot observe a {got} (FSDP1), whose gradients are hidden in flat parameters; use fully_shard"
        )
    if _is_early_fsdp2(training):
        return (
            f"ds_silent observes fully_shard (FSDP2) from torch 2.6 on, and this is torch {torch.__version__}; "
            "upgrade torch, or use DistributedDataParallel"
        )
    return f"ds_silent.attach takes {_KNOWN}, got {got}; give it what the framework has made of the model"
