"""Ranks whose loaders are unlike, or of which one has none: they are observed all the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks

STEPS = 12


def train(directory: Path, rows: tuple[int, int], cached: int | None) -> None:
    """``rows``: of a batch of each rank; ``cached``: the rank that holds its batches in a list."""
    torch.manual_seed(7)
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data: Any = torch.randn(STEPS * rows[rank], 8, generator=torch.Generator().manual_seed(rank))
    loader: DataLoader[Any] | None = DataLoader(data, batch_size=rows[rank])
    batches: Iterable[Any] = loader or ()
    if rank == cached:
        loader, batches = None, list(batches)
    block = {"output_dir": str(directory), "tensorboard": False}
    observer = ds_silent.attach(model, block, optimizer=optimizer, loader=loader)
    assert observer is not None
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


def test_a_rank_without_a_loader_is_observed(tmp_path: Path) -> None:
    run_on_kept_ranks(train, 2, (tmp_path, (4, 4), 1))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"] == []


def test_batches_of_unlike_sizes_are_told_as_such(tmp_path: Path) -> None:
    run_on_kept_ranks(train, 2, (tmp_path, (4, 96), None))
    events = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
    assert [event["kind"] for event in events] == ["batch-size-mismatch"]
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == STEPS
