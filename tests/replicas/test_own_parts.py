"""What each rank holds of its own in health, buffers and states of optimizers, is a note; what else differs is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.runs import read_run, verdict_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_on_kept_ranks

STEPS, INTERVAL = 25, 10


class Normalised(nn.Module):
    """A running mean of the script's own, a constant, and a layer."""

    def __init__(self, counted: bool, synchronised: bool):
        super().__init__()
        self.layer, self.counted, self.synchronised = nn.Linear(6, 1), counted, synchronised
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            now = self.mean * 0.9 + rows.mean(0) * 0.1
            if self.synchronised:
                dist.all_reduce(now.div_(dist.get_world_size()))
            self.mean.copy_(now) if self.counted else self.mean.data.copy_(now)
        return self.layer(rows - self.mean) * self.constant[0]


class Dealt(torch.optim.Optimizer):
    """Update each parameter on one rank and send it to the others, as Muon does: its momentum is on that rank alone.

    Args:
        everywhere: each rank has a buffer for every momentum, and fills those of its own parameters.
    """

    def __init__(self, parameters: Any, everywhere: bool):
        super().__init__(parameters, {"lr": 1e-2})
        self.everywhere = everywhere

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                owner = place % dist.get_world_size()
                if owner == dist.get_rank() or self.everywhere:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                if owner == dist.get_rank():
                    parameter.sub_(momentum.lerp_(parameter.grad, 0.1), alpha=group["lr"])
                dist.broadcast(parameter.data, owner)


def observed(
    directory: str, model: Any, optimizer: Any, breaks: Callable[[int], None] = lambda step: None
) -> list[tuple[int, str, str]]:
    """Train, and return what is told of the replicas; ``breaks`` is called behind each step's update."""
    block = {"output_dir": directory, "tensorboard": False, "integrity": {"replica_interval": INTERVAL}}
    torch.manual_seed(1 + dist.get_rank())
    with ds_silent.observe(model, optimizer, config=block) as observer:
        for step in range(1, STEPS + 1):
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            breaks(step)
        observer.flush()
        dist.barrier()
    told = [event for event in read_events(Path(directory) / "events.jsonl") if event["kind"] == "replica-drift"]
    return [(event["step"], event["severity"], event["where"]) for event in told]


def train_states(directory: str, kind: str) -> list[tuple[int, str, str]]:
    """``kind``: how the optimizer deals its states; "gone wrong": one of plain SGD changes behind the update of 19."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1, bias=False)))
    plain = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def goes_wrong(step: int) -> None:
        if step == 19 and dist.get_rank() == 1:
            plain.state[plain.param_groups[0]["params"][0]]["momentum_buffer"].mul_(1.5)

    if kind == "gone wrong":
        return observed(directory, model, plain, goes_wrong)
    return observed(directory, model, Dealt(model.parameters(), kind == "everywhere"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_states_that_the_optimizer_deals_to_the_ranks_are_a_note(ranks: int, tmp_path: Path) -> None:
    """Released Muons' states were an error at the first comparison, while all weights were equal."""
    kinds = ("owners", "everywhere", "gone wrong")
    told = run_on_kept_ranks(each, ranks, (train_states, {kind: (str(tmp_path / kind), kind) for kind in kinds}))[0]
    assert told["owners"] == told["everywhere"] == [(11, "info", "optimizer momentum_buffer")]
    [(step, severity, where)] = told["gone wrong"]
    assert (step, severity) == (21, "error")
    assert "0.weight" in where


def train(directory: str, counted: bool = True, synchronised: bool = False, fault: str = "") -> dict[str, Any]:
    """``counted``: torch counts what the forward writes, which a kernel may not; ``fault``: what breaks at step 12."""
    torch.manual_seed(0)
    module = Normalised(counted, synchronised)
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def changes(step: int) -> None:
        if step == 12 and dist.get_rank() == 1 and fault:
            with torch.no_grad():
                (module.constant if fault == "constant" else module.layer.weight).data.add_(0.5)

    told = observed(directory, model, optimizer, changes)
    records = list(read_metrics(Path(directory) / "metrics.jsonl"))
    return {
        "told": told,
        "compared": [one["step"] for one in records if one["integrity"]["replica_groups"] is not None],
        "verdict": verdict_of(read_run(directory)).severity,
    }


CASES: dict[str, tuple[tuple[Any, ...], list[tuple[int, str, str]]]] = {
    "each rank's own": ((True,), [(3, "info", "buffer mean")]),
    "each rank's own, not counted": ((False,), [(10, "info", "buffer mean")]),
    "synchronised": ((True, True), []),
    "and a constant that one rank changes": (
        (True, False, "constant"),
        [(3, "info", "buffer mean"), (20, "error", "buffer constant")],
    ),
    "and weights that one rank changes": (
        (True, False, "weight"),
        [(3, "info", "buffer mean"), (13, "error", "layer.weight")],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("buffers")
    cases = {name: (str(folder / name), *case) for name, (case, _) in CASES.items()}
    return dict(run_on_kept_ranks(each, 2, (train, cases))[0])


@pytest.mark.parametrize("name", CASES)
def test_what_is_told(name: str, found: dict[str, Any]) -> None:
    expected = CASES[name][1]
    assert found[name]["told"] == expected

    assert (found[name]["verdict"] == "error") == any(one[1] == "error" for one in expected)


def test_the_rest_is_compared_once_more_without_them(found: dict[str, Any]) -> None:
    """A comparison that finds them says nothing of the others, and no record says that the replicas differ."""
    assert found["each rank's own"]["compared"][:4] == [1, 2, 4, 5]
    assert found["synchronised"]["compared"][:4] == [1, 2, 3, 4]
