"""Buffers that each rank's forwards write by its own rows differ in health; what moves on one rank alone is a fault."""

from __future__ import annotations

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
from tests.support.distributed import each, run_distributed

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


def train(directory: str, counted: bool = True, synchronised: bool = False, fault: str = "") -> dict[str, Any]:
    """``counted``: torch counts what the forward writes, which a kernel may not; ``fault``: what breaks at step 12."""
    torch.manual_seed(0)
    module = Normalised(counted, synchronised)
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    block = {"output_dir": directory, "tensorboard": False, "integrity": {"replica_interval": INTERVAL}}
    torch.manual_seed(1 + dist.get_rank())
    with ds_silent.observe(model, optimizer, config=block) as observer:
        for step in range(1, STEPS + 1):
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 12 and dist.get_rank() == 1 and fault:
                with torch.no_grad():
                    (module.constant if fault == "constant" else module.layer.weight).data.add_(0.5)
        observer.flush()
        dist.barrier()
    told = [event for event in read_events(Path(directory) / "events.jsonl") if event["kind"] == "replica-drift"]
    records = list(read_metrics(Path(directory) / "metrics.jsonl"))
    return {
        "told": [(event["step"], event["severity"], event["where"]) for event in told],
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
    return dict(run_distributed(each, 2, (train, cases))[0])


@pytest.mark.parametrize("name", CASES)
def test_what_is_told(name: str, found: dict[str, Any]) -> None:
    expected = CASES[name][1]
    assert found[name]["told"] == expected

    assert (found[name]["verdict"] == "error") == any(one[1] == "error" for one in expected)


def test_the_rest_is_compared_once_more_without_them(found: dict[str, Any]) -> None:
    """A comparison that finds them says nothing of the others, and no record says that the replicas differ."""
    assert found["each rank's own"]["compared"][:4] == [1, 2, 4, 5]
    assert found["synchronised"]["compared"][:4] == [1, 2, 3, 4]
