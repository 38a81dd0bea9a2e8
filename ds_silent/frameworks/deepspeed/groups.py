"""Which ranks an engine's observers compare, and what those ranks must have alike."""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed
import torch.distributed as dist

from ds_silent.frameworks.deepspeed.gradients import numel_of


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
