"""Faults of a reduction and of an optimizer's input, for the trainings of tests/support/healthy.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.patches import Patches
from tests.support.healthy import Fault

FAULTY = 3  # the step
Reduce = Callable[[Tensor, Callable[[], Any]], Any]


def _reducing(engine: Any, patches: Patches, change: Reduce) -> None:
    """From step ``FAULTY`` on, ``change(tensor, run)`` stands for every reduction that a backward makes."""
    inside = False

    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = engine.global_steps + 1 >= FAULTY
        result = original(*args, **kwargs)
        inside = False
        return result

    def reduce(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = partial(original, tensor, *args, **kwargs)
        return change(tensor, run) if inside else run()

    patches.wrap(engine, "backward", backward)
    for name in ("all_reduce", "reduce"):
        patches.wrap(deepspeed.comm, name, reduce)


def contribution(factor: float, rank: int) -> Fault:
    """One rank's gradients enter every reduction ``factor`` times."""

    def change(tensor: Tensor, run: Callable[[], Any]) -> Any:
        if dist.get_rank() == rank:
            tensor.mul_(factor)
        return run()

    return lambda engine, patches: _reducing(engine, patches, change)


def division(factor: float) -> Fault:
    """The reductions' results are ``factor`` times what they should be, on all ranks."""

    def change(tensor: Tensor, run: Callable[[], Any]) -> Any:
        result = run()
        tensor.mul_(factor)
        return result

    return lambda engine, patches: _reducing(engine, patches, change)


def unreduced(engine: Any, patches: Patches) -> None:
    """No bucket is reduced."""
    _reducing(engine, patches, lambda tensor, run: None)


def missing_micro_batch(number: int, rank: int) -> Fault:
    """One rank's micro-batch ``number`` does not enter where every micro-batch is reduced on its own."""

    def fault(engine: Any, patches: Patches) -> None:
        def change(tensor: Tensor, run: Callable[[], Any]) -> Any:
            if dist.get_rank() == rank and engine.micro_steps % engine.gradient_accumulation_steps() == number:
                tensor.zero_()
            return run()

        _reducing(engine, patches, change)

    return fault


def applied(factor: float, rank: int) -> Fault:
    """One rank's optimizer gets ``factor`` times the gradient, behind everything that the script does."""

    def fault(engine: Any, patches: Patches) -> None:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if engine.global_steps + 1 >= FAULTY and dist.get_rank() == rank:
                for parameter in engine.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.data.mul_(factor)
            return original(*args, **kwargs)

        patches.wrap(engine, "clip_fp32_gradients", step)

    return fault


def clipped_differently(rank: int) -> Fault:
    """The script clips by another norm on one rank."""

    def fault(engine: Any, patches: Patches) -> None:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if engine.global_steps + 1 >= FAULTY and dist.get_rank() == rank:
                torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.02)
            return original(*args, **kwargs)

        patches.wrap(engine, "step", step)

    return fault
