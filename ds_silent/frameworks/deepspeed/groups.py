"""Joining a process group that is there, and what the ranks of an engine must have alike."""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed

from ds_silent.frameworks.deepspeed.gradients import numel_of


def join() -> None:
    """Make DeepSpeed use the gloo process group that is there, without a word."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


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
    }


def parameters_held(engine: Any) -> list[list[Any]]:
    """The model's parameters by the groups of the optimizer; a wrapper's own groups hold flat copies of them.

    Stages 1 and 2 have ``bit16_groups``, ``BF16_Optimizer`` ``bf16_groups``, fp16 wrappers and stage 3 ``fp16_groups``
    (0.16.9 to 0.19.8).
    """
    optimizer = engine.optimizer
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, name, None)
        if groups:
            return list(groups)
    own: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
    return own
