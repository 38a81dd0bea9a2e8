"""Which ranks an engine's observers compare, a communicator of their own, and what those ranks must have alike."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import deepspeed
import torch.distributed as dist

from ds_silent.frameworks.deepspeed.gradients import numel_of

logger = logging.getLogger("ds_silent")
_own: dict[tuple[int, tuple[int, ...]], dist.ProcessGroup] = {}  # of a training's group and its members


def join() -> None:
    """Make DeepSpeed use the gloo process group that is there, without a word."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def data_parallel_group(engine: Any) -> dist.ProcessGroup | None:
    """The ranks that hold the same parameters and average their gradients; None where there is no such group."""
    if not dist.is_initialized():
        return None
    # engine.data_parallel_group may be None; the sequence-data-parallel group is the dense one
    group = getattr(engine, "seq_data_parallel_group", None)
    return group if group is not None else dist.distributed_c10d._get_default_group()


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks with a communicator that only observers use, made once. Every rank of ``group`` calls it.

    Collectives of one communicator pair by their order. What an observer sends may come at another place in the order
    of the training's own on one rank: a step left out, an observer closed there. On a communicator of its own it then
    meets what the other ranks' observers send, and never a gradient.
    """
    members = tuple(dist.get_process_group_ranks(group))
    key = (id(dist.distributed_c10d._get_default_group()), members)
    if key not in _own:
        # no rank outside of the group needs to come, nor may it be waited for
        _own[key] = dist.new_group(list(members), timeout=_timeout(group), use_local_synchronization=True)
    return _own[key]


def _timeout(group: dist.ProcessGroup) -> Any:
    """The training's own, so that nothing is given up earlier than the training would (torch 2.4 to 2.13)."""
    try:
        return dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    except Exception as error:
        logger.debug("ds_silent: the default time-out of new groups is used: %s", error)
        return None


def engine_facts(engine: Any) -> dict[str, Any]:
    """What the ranks' collectives follow from, by the names that a person would look for; JSON values."""
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    listed = hashlib.sha256(repr([(name, numel_of(p)) for name, p in named]).encode()).hexdigest()[:8]
    return {
        "ZeRO stage": int(engine.zero_optimization_stage()),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "the optimizer's wrapper": type(engine.optimizer).__name__,
        "the dtypes of the trainable parameters": sorted({str(p.dtype) for _, p in named}),
        "the list of trainable parameters": f"{len(named)} [{listed}]",
        "the step": int(engine.global_steps),
    }
