"""The same small training in a loop of torch's own: DistributedDataParallel and an optimizer, as scripts write it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from benchmarks.probe import DTYPES, Probe
from tests.support.training import Case, Trace, batches_of, oracle_step, trace_of, whole


@dataclass(frozen=True)
class DDPCase(Case):
    """One cell: ``Case`` without what is DeepSpeed's."""

    static: bool = False
    views: bool = False  # gradients are views into the reducer's buckets
    reduces_each: bool = False  # the script forgets no_sync
    scaled: bool = False  # a GradScaler
    closure: bool = False  # the optimizer runs forward, backward and clipping
    hook: str | None = None  # a communication hook

    @property
    def looks_at_each(self) -> bool:
        return self.unused is not None or self.static or self.reduces_each


@dataclass(frozen=True)
class FSDP2Case(DDPCase):
    """The same under ``fully_shard``; ``stage`` 3 stands for: no rank holds a whole parameter."""

    stage: int = 3
    replicas: int = 1  # of the shards: HSDP
    reduce_dtype: str | None = None  # MixedPrecisionPolicy

    @property
    def looks_at_each(self) -> bool:
        return True


def build_fsdp2(case: FSDP2Case) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(1234)
    model = Probe(case.checkpointing).to(DTYPES[case.dtype])
    ranks = dist.get_world_size()
    shape = (ranks,) if case.replicas == 1 else (case.replicas, ranks // case.replicas)
    names = ("replicate", "shard")[-len(shape) :]
    named: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if case.reduce_dtype is not None:
        named["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, DTYPES[case.reduce_dtype])
    for layer in model.layers:
        fully_shard(layer, **named)
    fully_shard(model, **named)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def build(case: DDPCase) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1234)
    model = Probe(case.checkpointing).to(DTYPES[case.dtype])
    ddp = DistributedDataParallel(
        model,
        find_unused_parameters=case.unused is not None,
        static_graph=case.static,
        gradient_as_bucket_view=case.views,
        bucket_cap_mb=0.01,  # several buckets
    )
    if case.hook is not None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(None, getattr(default_hooks, case.hook))
    optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=1e-2)
    return ddp, optimizer


def train_ddp(case: DDPCase, output_dir: Path, steps: int, enabled: bool, oracle: bool = False) -> Trace:
    sharded = isinstance(case, FSDP2Case)
    ddp, optimizer = build_fsdp2(case) if sharded else build(case)
    module = ddp if sharded else ddp.module
    copy = Probe(None)
    observer = None
    if enabled:
        block = case.block(output_dir)
        observer = ds_silent.attach(ddp, block, optimizer=optimizer, accumulation=case.accumulation)
        assert observer is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if case.scaled else None
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    losses, expected = [], []
    for step in range(steps):
        batches = batches_of(case, generator)
        if oracle:
            expected.append(oracle_step([whole(p) for p in module.parameters()], copy, batches, case, step + 1))

        def micro_batches(batches: list[tuple[Tensor, bool]] = batches) -> None:
            for micro, (tokens, skip) in enumerate(batches):
                alone = micro < case.accumulation - 1 and not case.reduces_each
                if sharded:
                    ddp.set_requires_gradient_sync(not alone)
                with ddp.no_sync() if alone and not sharded else nullcontext():
                    loss = ddp(tokens, skip)
                    losses.append(float(loss.detach()))
                    share = loss / case.accumulation
                    (share if scaler is None else scaler.scale(share)).backward()
            if case.clipping:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(module.parameters(), case.clipping)

        if case.closure:
            optimizer.step(micro_batches)
            optimizer.zero_grad()
            continue
        micro_batches()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    if observer is not None:
        observer.close()
    output = output_dir if enabled else None
    return trace_of(case, output, module.parameters(), optimizer.state.values(), losses, expected)
