"""The same training under each framework, for the benchmark of what watching costs: one object, one way to step.

    engine = deepspeed_engine(model, stage=1, dtype="bf16", batch=4)
    engine = TorchEngine(model, "fsdp2", "bf16")
    observer = observed(engine, {"interval": 10})       # attached; engine.observable lets go of it

In bf16 a module in DistributedDataParallel is bf16 as a whole; under FSDP2 its shards stay fp32, and forward, gradients
and their reduction are bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_silent

FRAMEWORKS = ("deepspeed", "ddp", "fsdp2")
LEARNING_RATE = 5e-5


def deepspeed_engine(model: nn.Module, stage: int, dtype: str, batch: int) -> Any:
    """An engine that nobody observes yet."""
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": 10**9,
        "silent_consistency": {"enabled": False},
    }
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


class TorchEngine:
    """A loop of torch's own, in the words of an engine."""

    def __init__(self, model: nn.Module, framework: str, dtype: str) -> None:
        self.module, self.global_steps = model, 0
        self.wrapped = _in_ddp(model, dtype) if framework == "ddp" else _sharded(model, dtype)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def __call__(self, **batch: Any) -> Any:
        return self.wrapped(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1


def _in_ddp(model: nn.Module, dtype: str) -> nn.Module:
    if dtype == "bf16":
        model.to(torch.bfloat16)
    return torch.nn.parallel.DistributedDataParallel(model)


def _sharded(model: Any, dtype: str) -> nn.Module:
    """One group per layer of a transformers model, and one of the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16) if dtype == "bf16" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
    return sharded


def observed(engine: Any, block: dict[str, Any]) -> Any:
    """Its observer. The engine lets go of it at once, so that another may be attached."""
    if isinstance(engine, TorchEngine):
        held = engine.wrapped
        observer = ds_silent.attach(held, block, optimizer=engine.optimizer)
    else:
        held = engine
        observer = ds_silent.attach(engine, block)
    assert observer is not None
    del held.__dict__["_ds_silent_observer"]
    return observer
