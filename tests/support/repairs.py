"""Small trainings with a fault and a response, and what is left of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill import training as drill_training
from ds_silent.drill.faults.behind import flip_some, skipped
from ds_silent.drill.faults.injection import Maker, Target, add_noise, once, one
from ds_silent.drill.training import hash_of
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.patches import Patches
from tests.support.training import Case, engine_of, one_step

STEPS, FAULT, RANKS, ODD = 6, 3, 4, 2
Fault = Callable[[Any, Patches], None]


def block(**changes: Any) -> dict[str, Any]:
    return {"tensorboard": False, "preflight": False, "direction": {"sketch_size": 1024}, **changes}


RETRY = block(respond={"on_aggregation_error": "retry"}, integrity={"replica_interval": 1})
MAJORITY = block(respond={"on_replica_drift": "majority"}, integrity={"replica_interval": 1})


def trained(
    case: Case,
    output_dir: Path,
    settings: dict[str, Any] | None,
    fault: Fault | None = None,
    gather_limit: int = GATHER_LIMIT,
) -> str:
    """Hash of this rank's weights, optimizer state and counters after ``STEPS`` steps of always the same rows."""
    config = case.config(output_dir, enabled=False)
    if settings is not None:
        config["silent_consistency"] = {**copy.deepcopy(settings), "output_dir": str(output_dir)}
    engine = engine_of(config, gather_limit=gather_limit)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    patches = Patches()
    try:
        if fault is not None:
            fault(engine, patches)
        for _ in range(STEPS * case.accumulation):
            one_step(engine, generator)
    finally:
        patches.undo()
        engine.destroy()
    return state_of(engine)


def state_of(engine: Any) -> str:
    """The drill's hash, and the engine's counters."""
    held = drill_training.state_of(engine.module, engine.basic_optimizer)
    scale = getattr(engine.optimizer, "loss_scale", None) or getattr(engine.optimizer, "cur_scale", None)
    return hash_of((held, engine.global_steps, engine.skipped_steps, engine.get_lr(), scale))


# -- faults -----------------------------------------------------------------------------------------------------------


def corrupted(change: Callable[[Tensor], object], ranks: Sequence[int], times: int = 1, at: int = FAULT) -> Fault:
    """The result of the first gradient reductions of a step is changed on some ranks."""

    def fault(engine: Any, patches: Patches) -> None:
        left = times

        def reduce(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            result = original(tensor, *args, **kwargs)
            if engine.global_steps + 1 == at and tensor.numel() > 1000 and left:
                left -= 1
                if dist.get_rank() in ranks:
                    change(tensor)
            return result

        patches.wrap(deepspeed.comm, "all_reduce", reduce)

    return fault


def missing(engine: Any, patches: Patches) -> None:
    """The odd rank's gradient is missing from the first reductions of step ``FAULT``."""
    left = 1

    def reduce(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if engine.global_steps + 1 == FAULT and tensor.numel() > 1000 and left:
            left -= 1
            if dist.get_rank() == ODD:
                tensor.zero_()
        return original(tensor, *args, **kwargs)

    patches.wrap(deepspeed.comm, "all_reduce", reduce)


def noise(tensor: Tensor) -> None:
    add_noise(tensor, 1.0, torch.Generator().manual_seed(5))


def flip(tensor: Tensor) -> None:
    flip_some(tensor.view(-1))


def broken(tensor: Tensor) -> None:
    tensor.view(-1)[:: tensor.numel() // 9] = float("nan")


def updated(make: Maker) -> Fault:
    """A fault of the drill's that lies in the optimizer's step, at step ``FAULT``."""

    def fault(engine: Any, patches: Patches) -> None:
        update = once(make)(Target(ODD, RANKS, FAULT), dist.get_rank()).update

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run = partial(original, *args, **kwargs)
            return run() if update is None else update(engine.basic_optimizer, run, engine.global_steps + 1)

        patches.wrap(engine.basic_optimizer, "step", step)

    return fault


drifted = updated(one(skipped))
