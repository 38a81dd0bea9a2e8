"""Scripts that accumulate and reduce each micro-batch, and do not say how many: the number is learned, in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS = 8


def train(framework: str, accumulation: int, clips: bool, directory: Path) -> None:
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if framework == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        for _ in range(accumulation):
            (model(torch.randn(4, 8)).square().mean() / accumulation).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


@pytest.mark.parametrize(
    ("framework", "accumulation", "clips"),
    [("ddp", 2, False), ("ddp", 2, True), ("ddp", 3, False), ("fsdp2", 2, True)],
)
def test_nothing_is_told_while_the_number_is_learned(
    framework: str, accumulation: int, clips: bool, tmp_path: Path
) -> None:
    run_distributed(train, 2, (framework, accumulation, clips, tmp_path))
    assert list(read_events(tmp_path / "events.jsonl")) == []
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(2, STEPS + 1))
    for record in records:
        assert record["samples"] == 2 * 4 * accumulation * record["step"]
        assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"]
