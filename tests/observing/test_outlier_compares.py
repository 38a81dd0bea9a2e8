"""A rank that becomes an outlier may hold other weights: the replicas are compared then, whatever the interval says."""

from __future__ import annotations

from pathlib import Path

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
