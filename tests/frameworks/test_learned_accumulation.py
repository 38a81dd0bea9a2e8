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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_on_kept_ranks

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


CASES = (("ddp", 2, False), ("ddp", 2, True), ("ddp", 3, False), ("fsdp2", 2, True))


def test_nothing_is_told_while_the_number_is_learned(tmp_path: Path) -> None:
    run_on_kept_ranks(each, 2, (train, {case: (*case, tmp_path / str(case)) for case in CASES}))
    for framework, accumulation, clips in CASES:
        case = str((framework, accumulation, clips))
        assert list(read_events(tmp_path / case / "events.jsonl")) == [], case
        records = list(read_metrics(tmp_path / case / "metrics.jsonl"))
        assert [record["step"] for record in records] == list(range(2, STEPS + 1)), case
        for record in records:
            assert record["samples"] == 2 * 4 * accumulation * record["step"], case
            assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"], case


def over_rows(directory: Path) -> None:
    """A step of one micro-batch, then steps of two, of a loader's rows."""
    torch.manual_seed(7)
    model: Any = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), 4, sampler=DistributedSampler(range(160)))
    with ds_silent.observe(model, optimizer, config={"output_dir": str(directory), "tensorboard": False}):
        for place, (rows,) in enumerate(loader):
            (model(rows).square().mean() / (2 if place else 1)).backward()
            if place % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


def test_rows_of_the_step_without_a_record_are_seen(tmp_path: Path) -> None:
    run_on_kept_ranks(over_rows, 2, (tmp_path,))
    assert list(read_events(tmp_path / "events.jsonl")) == []
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, *range(3, 11)]
    for record in records:
        assert record["samples"] == 8 * (2 * record["step"] - 1)
        assert record["coverage"]["seen"] == pytest.approx(record["samples"] / 160)
