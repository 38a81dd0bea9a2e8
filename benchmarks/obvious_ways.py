"""For overhead.py: two obvious ways to watch gradients, gathered or a synchronised norm per bucket; and the limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

BUCKET = 25 * 2**20  # bytes, DDP's default bucket


@contextmanager
def gathered_gradients(engine: Any, settings: Any) -> Iterator[None]:
    """All-gather of every gradient before the reduction, then all pairwise cosines: the formula taken literally."""
    original = engine.allreduce_gradients

    def gather_first(*args: Any, **kwargs: Any) -> Any:
        mine = torch.cat([p.grad.reshape(-1).float() for p in engine.module.parameters() if p.grad is not None])
        everybody = [torch.empty_like(mine) for _ in range(settings.ranks)]
        dist.all_gather(everybody, mine)
        for i in range(settings.ranks):
            for j in range(i + 1, settings.ranks):
                torch.nn.functional.cosine_similarity(everybody[i], everybody[j], dim=0).item()
        return original(*args, **kwargs)

    engine.__dict__["allreduce_gradients"] = gather_first
    yield
    del engine.__dict__["allreduce_gradients"]


@contextmanager
def synchronised_norms(engine: Any, settings: Any) -> Iterator[None]:
    """One norm and one ``.item()`` per bucket of 25 MB, then a scalar all-reduce, as in the paper's released code."""
    bucket: list[torch.Tensor] = []
    size = 0

    def hook(gradient: torch.Tensor) -> None:
        nonlocal size
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= BUCKET:
            flush()

    def flush() -> None:
        nonlocal size
        total = torch.tensor([sum(g.detach().float().norm().item() ** 2 for g in bucket)])
        dist.all_reduce(total)
        total.item()
        bucket.clear()
        size = 0

    original = engine._take_model_step

    def take(*args: Any, **kwargs: Any) -> Any:
        if bucket:
            flush()
        return original(*args, **kwargs)

    handles = [p.register_hook(hook) for p in engine.module.parameters()]
    engine.__dict__["_take_model_step"] = take
    yield
    for handle in handles:
        handle.remove()
    del engine.__dict__["_take_model_step"]


@contextmanager
def summed_gradients(engine: Any, settings: Any) -> Iterator[None]:
    """Two sums over all gradients and one over this rank's share of them: what reads as much cannot cost less."""
    original = engine.step

    def sum_first() -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        for gradient in (*gradients, *gradients):
            gradient.sum()
        for gradient in gradients:
            gradient.view(-1)[: gradient.numel() // settings.ranks].sum()
        original()

    engine.__dict__["step"] = sum_first
    yield
    del engine.__dict__["step"]
