"""A rank that becomes an outlier may hold other weights: the replicas are compared then, whatever the interval says.

Or it has other inputs, which are compared at every step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed

CHANGED, STEPS = 20, 60


def train(directory: Path) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    block = {"output_dir": str(directory), "tensorboard": False, "integrity": {"replica_interval": 1000}}
    observer = ds_silent.attach(model, block, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, STEPS + 1):
        if step == CHANGED and dist.get_rank() == 1:  # an average that was put in for an evaluation, and not taken out
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3.0)
        rows = torch.randn(8, 8)
        (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


def test_an_outlier_compares_the_replicas(tmp_path: Path) -> None:
    run_distributed(train, 4, (tmp_path,))
    events = list(read_events(tmp_path / "events.jsonl"))
    outlier = next(event["step"] for event in events if event["kind"] == "outlier-rank")
    drift = next(event for event in events if event["kind"] == "replica-drift")
    assert drift["ranks"] == [1]
    assert CHANGED < outlier < drift["step"] <= outlier + 4


def train_on_raw_inputs(directory: Path, since: int) -> None:
    """Rank 2's inputs are bytes from 0 to 255 from that step on, the others' lie from 0 to 1."""
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, STEPS + 1):
        rows, labels = torch.rand(16, 32), torch.randint(0, 4, (16,))
        rows = rows * 255 if dist.get_rank() == 2 and step >= since else rows
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


@pytest.mark.parametrize(("since", "told"), [(1, 24), (CHANGED, CHANGED + 8)])
@pytest.mark.long
def test_an_outlier_with_inputs_of_another_size_is_told_so(tmp_path: Path, since: int, told: int) -> None:
    run_distributed(train_on_raw_inputs, 3, (tmp_path, since))
    first = next(event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "outlier-rank")
    assert first["ranks"] == [2]
    assert since <= first["step"] <= told
    assert "Most likely: its inputs are 25" in first["message"], first["message"]
    assert "they are not normalised as the others' are" in first["message"]
