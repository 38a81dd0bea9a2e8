"""A script's own ``torch.autograd.grad`` on the observed model: nobody accumulates its gradients, so no event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad as imported_before
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.drill.training import hash_of
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

ROWS, ACCUMULATION, STEPS = 4, 2, 3
DEEPSPEED, TORCH = ("stage 0", "stage 1", "stage 2"), ("ddp", "fsdp2")
WAYS = {
    "plain": (*DEEPSPEED, *TORCH),
    "within the forward": (*DEEPSPEED, "ddp"),  # an energy's force; FSDP2 has given its weights back
    "before the backward": TORCH,  # DeepSpeed takes any backward through its engine's outputs for its own
    "parameter penalty": TORCH,
    "input penalty": ("ddp",),
    "behind the backward": (*DEEPSPEED, *TORCH),
    "other rows": (*DEEPSPEED, *TORCH),
}


class Energy(nn.Module):
    """A small model; ``forces`` makes its output depend on its own gradient."""

    def __init__(self, forces: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        self.forces = forces

    def forward(self, rows: Tensor) -> Tensor:
        if not self.forces:
            return self.layers(rows)  # type: ignore[no-any-return]
        rows = rows.detach().requires_grad_()
        energy: Tensor = self.layers(rows)
        (force,) = torch.autograd.grad(energy.sum(), rows, create_graph=True)
        return energy + force.square().sum(1, keepdim=True)


def build(framework: str, way: str, block: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The model as its framework wraps it, and an optimizer and observer where the script has them."""
    model = Energy(way == "within the forward")
    if framework in DEEPSPEED:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": ACCUMULATION,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": int(framework[-1])},
            "silent_consistency": block,
        }
        return ds_silent.initialize(model=model, config=config, model_parameters=model.parameters())[0], None, None
    if framework == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.layers[0], model.layers[2]):
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    return wrapped, optimizer, ds_silent.attach(wrapped, block, optimizer=optimizer, accumulation=ACCUMULATION)


def micro_batch(framework: str, way: str, model: Any, optimizer: Any, last: bool, generator: torch.Generator) -> None:
    rows, targets = (torch.randn(ROWS, width, generator=generator) for width in (6, 1))
    if framework == "ddp":
        model.require_backward_grad_sync = last
    elif framework == "fsdp2":
        model.set_requires_gradient_sync(last)
    output = model(rows.requires_grad_(way == "input penalty"))
    loss = mse_loss(output, targets)
    weights = list(model.parameters())  # under FSDP2 some are whole between forward and backward
    if way == "before the backward":
        imported_before(loss, weights, retain_graph=True, allow_unused=True)
    elif way == "parameter penalty":
        own = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        loss = loss + 0.01 * sum(one.square().sum() for one in own if one is not None)
    elif way == "input penalty":
        (own,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
        loss = loss + 0.1 * (own.norm(dim=1) - 1).square().mean()
    named = {"retain_graph": True} if way == "behind the backward" else {}
    if framework in DEEPSPEED:
        model.backward(loss, **named)
    else:
        loss.backward(**named)
    if way == "behind the backward":
        imported_before(loss, weights, allow_unused=True)
    elif way == "other rows":
        other = getattr(model, "module", model)(torch.randn(ROWS, 6, generator=generator))
        torch.autograd.grad(other.square().mean(), weights, allow_unused=True)
    if framework in DEEPSPEED:
        model.step()
    elif last:
        optimizer.step()
        optimizer.zero_grad()


def train(framework: str, way: str, block: dict[str, Any]) -> str:
    model, optimizer, observer = build(framework, way, block)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for number in range(STEPS * ACCUMULATION):
        micro_batch(framework, way, model, optimizer, number % ACCUMULATION == ACCUMULATION - 1, generator)
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    bits = hash_of([one.detach() for one in whole])
    if observer is not None:
        observer.close()
    if framework in DEEPSPEED:
        model.destroy()
    return bits


def trained(directory: str) -> dict[tuple[str, str], Any]:
    """Every way in every framework: bits with and without; on rank 0 records and events too."""
    results = {}
    for way, frameworks in WAYS.items():
        for framework in frameworks:
            folder = Path(directory, framework, way)
            block = {"output_dir": str(folder), "tensorboard": False, "preflight": False}
            bits = train(framework, way, {"enabled": False}), train(framework, way, block)
            written: Any = None
            if dist.get_rank() == 0:
                written = list(read_metrics(folder / "metrics.jsonl")), list(read_events(folder / "events.jsonl"))
            results[way, framework] = bits, written
    return results


@pytest.mark.long
def test_gradients_that_nobody_accumulates_are_none_of_the_step(tmp_path: Path) -> None:
    results = run_distributed(trained, 2, (str(tmp_path),), timeout=400.0)
    for case, ((without, observed), _) in [item for rank in results for item in rank.items()]:
        assert without == observed, case
    norms: dict[tuple[str, str], list[Any]] = {}
    for case, (_, (records, events)) in results[0].items():
        assert [event for event in events if event["severity"] != "info"] == [], case
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), case
        norms[case] = [record["grad_norm"]["per_rank"] for record in records]
    for framework in DEEPSPEED:  # the same training, asked for gradients besides
        assert norms["behind the backward", framework] == norms["plain", framework]


def test_a_hook_in_backward_follows_the_innermost_run_of_autograd() -> None:
    came: list[str] = []
    patches, weight = Patches(), torch.ones(2, requires_grad=True)
    weight.register_hook(patches.in_backward(lambda gradient: came.append(name)))

    class AsksWithin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            with torch.enable_grad():
                imported_before((weight * 3).sum(), weight)
            return gradient

    name = "grad"
    imported_before(weight.sum(), weight)
    torch.autograd.grad(weight.sum(), weight)
    assert came == []
    name = "backward"
    weight.sum().backward()  # type: ignore[no-untyped-call]
    AsksWithin.apply(weight).sum().backward()
    assert came == ["backward"] * 2
    with pytest.raises(RuntimeError):
        torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), weight)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    patches.undo()
    assert came == ["backward"] * 3
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
