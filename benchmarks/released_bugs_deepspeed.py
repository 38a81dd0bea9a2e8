"""released_bugs.py: trainings by DeepSpeed's engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from released_bugs_base import (
    RATE,
    SEED,
    STEPS,
    Found,
    Watch,
    against,
    case,
    flat,
    load,
    mean_over_ranks,
)


def engine_of(watch: Watch, model: Any, config: dict[str, Any], groups: Any = None) -> tuple[Any, Any]:
    """Start DeepSpeed's engine, observed or not, and its scheduler."""
    import deepspeed

    import ds_silent

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an operator for inference: a minute to compile
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}} if groups is None else {}
    block = {} if watch.block is None else {"silent_consistency": watch.block}
    whole = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **optimizer,
        **config,
        **block,
    }
    parameters = groups or [parameter for parameter in model.parameters() if parameter.requires_grad]
    given: dict[str, Any] = {"model_parameters": parameters}
    if groups is not None:
        import torch

        given = {"optimizer": torch.optim.SGD(groups, lr=RATE)}
    engine, _, _, scheduler = ds_silent.initialize(model=model, config=whole, **given)
    return engine, scheduler


def finish(engine: Any) -> None:
    """Close the observer, so that its events are written."""
    import ds_silent

    observer = ds_silent.observer_of(engine)
    if observer is not None:
        observer.close()
    engine.destroy()


def token_batches(count: int) -> list[Any]:
    """This rank's rows, of the practice model's form."""
    import torch
    import torch.distributed as dist
    from probe import LENGTH, ROWS
    from probe import VOCABULARY as TOKENS

    rows = torch.Generator().manual_seed(99 + dist.get_rank())
    return [torch.randint(0, TOKENS, (ROWS, LENGTH), generator=rows) for _ in range(count)]


def mean_gradients(plain: Any, batches: Sequence[Any]) -> list[Any]:
    """Float64, per trained parameter: the mean over ranks and micro-batches, at the weights of ``plain``."""
    import torch

    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained]
    for tokens in batches:
        for sum_of, one in zip(total, torch.autograd.grad(plain(tokens, False), trained), strict=True):
            sum_of += one.double() / len(batches)
    return [mean_over_ranks(one) for one in total]


@case
def schedule(watch: Watch, kind: str, params: dict[str, Any], promised: str) -> Found:
    """Two groups with rates of their own: the rate at which each really moved, against the schedule's formula.

    DeepSpeed's schedules start before their own step 0: the first two steps have the same rate.
    """
    import torch
    from probe import Probe

    torch.manual_seed(SEED)
    model = Probe(None)
    plain = copy.deepcopy(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bases = (RATE, RATE / 5)
    groups = [{"params": part, "lr": base} for part, base in zip((trained[:4], trained[4:]), bases, strict=True)]
    engine, _ = engine_of(watch, model, {"scheduler": {"type": kind, "params": params}}, groups)
    ratio = FORMULAS[promised]
    errors, said = [], ""
    for step, tokens in enumerate(token_batches(STEPS)):
        load(plain, model.parameters())
        gradients = mean_gradients(plain, [tokens])
        before = [parameter.detach().double().clone() for parameter in trained]
        engine.backward(engine(tokens, False))
        engine.step()
        moved = [old - new.detach().double() for old, new in zip(before, trained, strict=True)]
        worst = 0.0
        for group, base in enumerate(bases):
            part = slice(0, 4) if group == 0 else slice(4, None)
            change, gradient = flat(moved[part]), flat(gradients[part])
            rate, right = float(change @ gradient / (gradient @ gradient)), base * ratio(max(0, step - 1), params)
            worst = max(worst, abs(rate - right) / base)
            if abs(rate - right) > 1e-3 * base and not said:
                said = f"group {group + 1} moves at {rate:.4g} at step {step + 1}, the schedule says {right:.4g}"
        errors.append(worst)
    finish(engine)
    return Found(tuple(errors), said or "each group at its own schedule")


def _warmup_linear(step: int, params: dict[str, Any]) -> float:
    return min(1.0, step / params["warmup_num_steps"])


def _warmup_cosine(step: int, params: dict[str, Any]) -> float:
    """As documented: from 0 to 1 linearly, then half a cosine down to ``cos_min_ratio`` at ``total_num_steps``."""
    warm, total, least = params["warmup_num_steps"], params["total_num_steps"], params["cos_min_ratio"]
    if step < warm:
        return step / warm
    done = min(1.0, (step - warm + 1) / (total - warm))
    return float(least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


FORMULAS = {"linear": _warmup_linear, "cosine": _warmup_cosine}


@case
def accumulated(
    watch: Watch,
    config: dict[str, Any],
    accumulation: int = 4,
    scaled: bool = False,
    clipping: float = 0.0,
    rate: float = RATE,
    rounds: float = 0.0,
) -> Found:
    """Plain SGD over micro-batches: the step against the mean of all micro-batches and ranks.

    ``scaled``: the script divides by the number of micro-batches itself, and says so by ``scale_wrt_gas=False``.
    ``rate``: larger, where the weights are bf16 and round small steps; ``rounds``: an error which that still may be.
    """
    import torch
    from probe import Probe

    torch.manual_seed(SEED)
    model = Probe(None)
    plain = copy.deepcopy(model)
    counted = {"gradient_accumulation_steps": accumulation, "gradient_clipping": clipping}
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": rate}}}
    engine, _ = engine_of(watch, model, {**counted, **optimizer, **config})
    batches = token_batches(STEPS * accumulation)
    applied, true = [], []
    for step in range(STEPS):
        own = batches[step * accumulation : (step + 1) * accumulation]
        load(plain, engine.module.parameters())
        mean = flat(mean_gradients(plain, own))
        before = flat(one for one in engine.module.parameters() if one.requires_grad)
        for tokens in own:
            loss = engine(tokens, False)
            if scaled:
                engine.backward(loss / accumulation, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            engine.step()
        after = flat(one for one in engine.module.parameters() if one.requires_grad)
        applied.append((before - after) / rate)
        true.append(mean * min(1.0, clipping / float(mean.norm())) if clipping else mean)
    finish(engine)
    found = against(applied, true, "the clipped mean" if clipping else "the mean")
    return replace(found, errors=tuple(error if error > rounds else 0.0 for error in found.errors))
