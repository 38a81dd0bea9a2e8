"""torch hooks the step of a class and of its parent: an optimizer whose step calls its parent's steps once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS = 5


class Clamped(torch.optim.AdamW):
    """Limit the weights behind the parent's step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-3.0, 3.0)
        return result


def train(directory: Path) -> None:
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # from now on torch has hooked the parent's step
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = Clamped(model.parameters(), lr=0.01)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


def test_a_step_that_calls_its_parents_is_one_step(tmp_path: Path) -> None:
    run_distributed(train, 2, (tmp_path,))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert not [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
