"""Local gradients that are read together, as a backward ends, and not as hooks bring them: before any is reduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ds_silent
from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.config import DirectionConfig
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_on_kept_ranks

WIDTH, STEPS = 6, 4


class Model(nn.Module):
    """Layers in reentrant checkpoints below a head; the rows do not pass an embedding that is trained."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        held = rows.requires_grad_()
        for layer in self.layers:
            held = checkpoint(layer, held, use_reentrant=True).relu()
        return self.head(held).square().mean()


def train(directory: Path, case: str) -> list[float]:
    """Return the norm of this rank's own gradient at each step, in fp64 and of a copy that nobody reduces."""
    torch.manual_seed(3)
    rank, layers = dist.get_rank(), 1 if case == "one checkpoint" else 3
    model, copy = Model(layers), Model(layers).double()
    wrapped: Any = fully_shard(model) if case == "fsdp2" else DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    block = {"output_dir": str(directory), "tensorboard": False}
    observer = ds_silent.attach(wrapped, block, optimizer=optimizer)
    assert observer is not None
    generator, norms = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        rows = torch.randn(4, WIDTH, generator=generator)
        whole = {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}
        copy.load_state_dict({name: value.detach().double() for name, value in whole.items()})
        own = torch.autograd.grad(_plain(copy, rows.double()), list(copy.parameters()))
        norms.append(float(torch.cat([one.flatten() for one in own]).norm()))
        wrapped(rows).backward()
        optimizer.step()
        if case != "never cleared":
            optimizer.zero_grad(set_to_none=case != "zeros")
    observer.close()
    return norms


def _plain(model: Model, rows: Tensor) -> Tensor:
    for layer in model.layers:
        rows = layer(rows).relu()
    loss: Tensor = model.head(rows).square().mean()
    return loss


def test_the_local_gradient_is_read_before_the_reduction_writes_to_it(tmp_path: Path) -> None:
    """The last bucket is complete inside a checkpoint's own backward, which ends before the training's does."""
    cases = {
        case: (tmp_path / case, case) for case in ("reentrant", "one checkpoint", "zeros", "never cleared", "fsdp2")
    }
    ranks = run_on_kept_ranks(each, 2, (train, cases))
    for case in cases:
        records = list(read_metrics(tmp_path / case / "metrics.jsonl"))
        assert [record["grad_norm"]["per_rank"] for record in records] == [
            pytest.approx([norms[case][step] for norms in ranks], rel=1e-5) for step in range(STEPS)
        ], case


def accumulate(directory: Path, case: str) -> list[int]:
    """Return how many gradients of each micro-batch a hook has looked at by itself."""
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in layers if case == "fsdp2" else ():
        fully_shard(layer)
    model: Any = fully_shard(layers) if case == "fsdp2" else DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    block = {"output_dir": str(directory), "tensorboard": False}
    observer = ds_silent.attach(model, block, optimizer=optimizer, accumulation=2)
    assert observer is not None
    local = observer._capture._local
    calls, observe = [0], local.observe

    def counted(*given: Any, **named: Any) -> bool:
        calls[-1] += 1
        return observe(*given, **named)

    local.observe = counted  # type: ignore[method-assign]
    for micro_batch in range(2 * STEPS):
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * micro_batch + dist.get_rank()))
        if case == "fsdp2":
            model.set_requires_gradient_sync(bool(micro_batch % 2))
        model.require_backward_grad_sync = bool(micro_batch % 2)
        model(rows).square().mean().backward()
        if micro_batch % 2:
            optimizer.step()
            optimizer.zero_grad()
        calls.append(0)
    observer.close()
    return calls[:-1]


def test_one_gradient_of_a_backward_speaks_for_the_others(tmp_path: Path) -> None:
    """Two ranks, two micro-batches. FSDP2 adds the second one's to the first one's, and is asked for it alone."""
    cases = {case: (tmp_path / case, case) for case in ("ddp", "fsdp2")}
    assert run_on_kept_ranks(each, 2, (accumulate, cases)) == [{"ddp": [1, 1] * STEPS, "fsdp2": [1, 8] * STEPS}] * 2
    for case in cases:
        checks = [record["integrity"] for record in read_metrics(tmp_path / case / "metrics.jsonl")]
        assert len(checks) == STEPS
        assert all(check["relative_error"] <= check["rounding_bound"] for check in checks)
        assert [event for event in read_events(tmp_path / case / "events.jsonl") if event["severity"] != "info"] == []


def test_hooks_read_where_nobody_calls_back() -> None:
    """What was reduced before it could be read is said to be unseen, and never taken for local."""
    gradients: list[Tensor | None] = [torch.ones(4), torch.full((4,), 2.0)]
    local = LocalGradient(
        [4, 4],
        [0, 0],
        DirectionConfig(),
        torch.device("cpu"),
        lambda index: None,
        additive=False,
        norms_add_up=True,
        copied=False,
        by_layer=False,
    )
    seen = []
    for _ in range(2):
        for index, gradient in enumerate(gradients):
            assert gradient is not None
            local.observe(index, gradient, boundary=True, exact=False, together=True)
        local.end_micro_batch()
        squared = local.accumulator.take()[1].sum()
        observed = local.observed(squared, None)
        seen.append((observed.seen, float(squared)))
        local.start_step()
    assert seen == [(0.0, 0.0), (1.0, pytest.approx(20.0))]


def changed(directory: Path, case: str) -> None:
    """Rank 1's gradient is halved between the observer's hook and the reduction, from step 3 on."""
    torch.manual_seed(3)
    model = Model()
    wrapped: Any = fully_shard(model) if case == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    observer = ds_silent.attach(wrapped, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    step = 0

    def halve(weight: Tensor) -> None:
        if step >= 3 and dist.get_rank() == 1 and weight.grad is not None:
            weight.grad *= 0.5

    if case == "fsdp2":
        wrapped.unshard()
    for parameter in model.parameters():
        if case == "accumulated":
            parameter.register_post_accumulate_grad_hook(halve)
        else:
            parameter.register_hook(lambda g: g * 0.5 if step >= 3 and dist.get_rank() == 1 else g)
    if case == "fsdp2":
        wrapped.reshard()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 6):  # noqa: B007  # the hooks read it
        wrapped(torch.randn(4, WIDTH, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


def test_what_changes_behind_the_observers_hook_is_a_fact_still(tmp_path: Path) -> None:
    cases = {case: (tmp_path / case, case) for case in ("tensor", "accumulated", "fsdp2")}
    run_on_kept_ranks(each, 2, (changed, cases))
    for case in cases:
        events = [event for event in read_events(tmp_path / case / "events.jsonl") if event["severity"] == "error"]
        assert {event["kind"] for event in events} == {"aggregation-error"}, case
        assert events[0]["step"] == 3, case
