"""A pass over the data that is broken off, and its rest by accelerate's ``skip_first_batches``: one permutation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import SkipBatchSampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ds_silent
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

ROWS, BATCH = 48, 4


def rest_of(loader: Any, batches: int) -> Any:
    """As accelerate 1.0 to 1.15 makes it."""
    return DataLoader(loader.dataset, batch_sampler=SkipBatchSampler(loader.batch_sampler, batches))


def firsts(watch: LoaderWatch, loader: Any, batches: int, forwards: int = 1) -> list[bool]:
    """Train some batches of a pass; return what each forward is told: whether it is the first of a pass."""
    told = []
    for place, _ in enumerate(loader):
        if place == batches:
            break
        told += [watch.forward() for _ in range(forwards)]
    return told


def test_the_rest_of_a_pass_belongs_to_it() -> None:
    watch = LoaderWatch(1).connect()
    try:
        loader: Any = DataLoader(list(range(ROWS)), BATCH, shuffle=True)  # type: ignore[arg-type]
        assert firsts(watch, loader, 5) == [True] + [False] * 4
        evaluation = DataLoader(list(range(8)), 2)  # type: ignore[arg-type]
        assert len(list(evaluation)) == 4
        rest = rest_of(loader, 5)
        assert firsts(watch, rest, 2) == [False] * 2
        assert firsts(watch, rest_of(rest, 2), 99) == [False] * 5, "broken off again"
        assert firsts(watch, loader, 99) == [True] + [False] * 11
    finally:
        watch.remove()


@pytest.mark.parametrize("case", ["another count", "another sampler", "two forwards", "whole", "nothing before"])
def test_a_loader_that_skips_for_another_reason_begins_a_pass(case: str) -> None:
    watch = LoaderWatch(1).connect()
    try:
        first, other = (DataLoader(list(range(ROWS)), BATCH, shuffle=True) for _ in range(2))  # type: ignore[arg-type]
        if case != "nothing before":
            firsts(watch, first, 99 if case == "whole" else 5, 2 if case == "two forwards" else 1)
        skipping = rest_of(other if case == "another sampler" else first, 4 if case == "another count" else 5)
        assert firsts(watch, skipping, 1) == [True]
    finally:
        watch.remove()


def train(folder: Path, right: bool) -> Any:
    """Two passes; the second is broken off after 3 batches, and its rest comes in its own order or the first one's."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    sampler: Any = DistributedSampler(rows, seed=3)  # type: ignore[arg-type]
    loader: Any = DataLoader(rows, BATCH, sampler=sampler)  # type: ignore[arg-type]
    block = {"output_dir": str(folder), "tensorboard": False, "preflight": False}
    observer = ds_silent.attach(model, block, optimizer=optimizer)
    assert observer is not None
    for number, batches, taken in ((0, loader, 6), (1, loader, 3), (1 if right else 0, rest_of(loader, 3), 3)):
        sampler.set_epoch(number)
        for place, batch in enumerate(batches):
            if place == taken:
                break
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    observer.close()
    if dist.get_rank():
        return None
    return list(read_metrics(folder / "metrics.jsonl")), list(read_events(folder / "events.jsonl"))


def both(directory: str) -> tuple[Any, Any]:
    return train(Path(directory, "right"), True), train(Path(directory, "wrong"), False)


def test_a_rest_in_another_order_is_told_when_the_pass_is_over(tmp_path: Path) -> None:
    (right, events), (wrong, told) = run_distributed(both, 2, (str(tmp_path),))[0]
    assert [event for event in events if event["severity"] != "info"] == []
    assert [round(record["coverage"]["seen"] * 6) for record in right] == [1, 2, 3, 4, 5, 6] * 2
    (event,) = [event for event in told if event["severity"] != "info"]
    assert (event["step"], event["kind"], event["severity"]) == (12, "low-coverage", "warning")
    order = [DistributedSampler(range(ROWS), 2, rank, seed=3) for rank in range(2)]  # type: ignore[arg-type]
    rows: set[int] = set()
    for sampler in order:
        sampler.set_epoch(1)
        rows |= set(list(sampler)[:12])
        sampler.set_epoch(0)
        rows |= set(list(sampler)[12:])
    assert wrong[-1]["coverage"]["seen"] == pytest.approx(len(rows) / ROWS)
    assert f"{100 * len(rows) / ROWS:.1f} % of its rows seen" in event["message"]
