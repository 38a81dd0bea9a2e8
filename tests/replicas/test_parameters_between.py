"""Between two comparisons of all that is replicated the parameters' checksums are compared, which are there anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS, INTERVAL = 34, 100


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(rows))) * self.scale[0]


def trained(directory: str, strike: Callable[[int, Any], None], interval: int) -> None:
    torch.manual_seed(0)
    model = Scaled()
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    block = {"output_dir": directory, "tensorboard": False, "integrity": {"replica_interval": interval}}
    observer = ds_silent.attach(ddp, block, optimizer=optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, STEPS + 1):
        ddp(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        strike(step, (model, observer))
    observer.close()


def overwritten(step: int, training: Any) -> None:
    """As weights of an average that were loaded for an evaluation, and not taken out again."""
    if step == 25 and dist.get_rank() == 1:
        with torch.no_grad():
            training[0].second.weight.mul_(1.001)


def buffer_changed(step: int, training: Any) -> None:
    if step == 15 and dist.get_rank() == 1:
        training[0].scale[1] += 1.0


def asked_on_one_rank(step: int, training: Any) -> None:
    """One rank alone writes a checkpoint before a step at which all have the parameters' checksums."""
    if step == 19 and dist.get_rank() == 0:
        training[1].before_checkpoint()


def trainings(directory: str) -> None:
    trained(f"{directory}/overwritten", overwritten, INTERVAL)
    trained(f"{directory}/buffer", buffer_changed, 20)
    trained(f"{directory}/asked", asked_on_one_rank, INTERVAL)


def test_weights_that_are_overwritten_shortly_before_the_end_are_reported(tmp_path: Path) -> None:
    run_distributed(trainings, 2, (str(tmp_path),))

    def found(name: str) -> list[tuple[Any, ...]]:
        events = [one for one in read_events(tmp_path / name / "events.jsonl") if one["kind"] == "replica-drift"]
        return [(one["step"], one["ranks"], one["where"], one["phase"]) for one in events]

    def compared(name: str) -> list[int]:
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        return [record["step"] for record in records if record["integrity"]["replica_groups"] is not None]

    assert found("overwritten") == [(30, [], "second.weight", "started")]
    assert compared("overwritten") == [10, 20, 30]
    assert found("buffer") == [(20, [], "buffer scale", "started")]
    assert compared("buffer") == [*range(2, 21, 2)]  # equal parameters do not say that the buffers are equal again
    assert (found("asked"), compared("asked")) == ([], [10, 30])
