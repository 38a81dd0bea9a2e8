"""A GradScaler's unscaling is no change by the script, and what the optimizer then applies is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS, WRONG = 14, 10


def train(scale: float, explicit: bool, wrong: bool, directory: Path) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, STEPS + 1):
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        if explicit:
            scaler.unscale_(optimizer)
            limit = 0.05 if wrong and step == WRONG and dist.get_rank() == 1 else 0.1
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
    observer.close()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("scale", [2.0**8, 2.0**24], ids=["never skips", "skips its first steps"])
def test_scaling_is_silent(scale: float, explicit: bool, tmp_path: Path) -> None:
    run_distributed(train, 2, (scale, explicit, False, tmp_path))
    assert list(read_events(tmp_path / "events.jsonl")) == []
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_a_rank_that_clips_by_another_norm_is_told(tmp_path: Path) -> None:
    run_distributed(train, 2, (2.0**8, True, True, tmp_path))
    [event] = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] == "error"]
    assert (event["step"], event["kind"], event["where"]) == (WRONG, "aggregation-error", "applied gradient")
