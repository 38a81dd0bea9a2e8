"""A script that clears a reduced gradient instead of stepping: on one rank that is a fault, on all ranks it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.ddp_training import DDPCase, FSDP2Case, build, build_fsdp2
from tests.support.distributed import run_distributed

STEPS, LEFT_OUT = 6, 3
CASES = {  # FSDP2?, where zero_grad is called, is a scheduler stepped before it
    "ddp": (False, "behind the step", False),
    "fsdp2": (True, "before the forward", False),
    "behind a scheduler": (False, "behind the step", True),
}


def train(directory: str) -> dict[tuple[str, bool], Any]:
    """Every case in one process group: what rank 0 has written of each."""
    cases = [(name, everywhere) for name in CASES for everywhere in (False, True)]
    return {case: train_once(Path(directory, "-".join(map(str, case))), *CASES[case[0]], case[1]) for case in cases}


def train_once(folder: Path, sharded: bool, cleared: str, scheduled: bool, everywhere: bool) -> Any:
    model, optimizer = build_fsdp2(FSDP2Case()) if sharded else build(DDPCase())
    block = {"output_dir": str(folder), "tensorboard": False, "preflight": False, "integrity": {"replica_interval": 0}}
    generator = torch.Generator().manual_seed(dist.get_rank())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    with ds_silent.observe(model, optimizer, config=block):
        for step in range(1, STEPS + 1):
            if cleared == "before the forward":
                optimizer.zero_grad()
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            if step != LEFT_OUT or not (everywhere or dist.get_rank() == 1):
                optimizer.step()
            if scheduled:
                scheduler.step()
            if cleared != "before the forward":
                optimizer.zero_grad()
    if dist.get_rank():
        return None
    events = [event for event in read_events(folder / "events.jsonl") if event["severity"] != "info"]
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")], events


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    found: dict[Any, Any] = run_distributed(train, 2, (str(tmp_path_factory.mktemp("left")),))[0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_on_one_rank_it_is_told_and_the_observation_goes_on(name: str, told: dict[Any, Any]) -> None:
    steps, events = told[name, False]
    assert steps == list(range(1, STEPS + 1))
    first = events[0]
    assert (first["kind"], first["step"], first["ranks"]) == ("aggregation-error", LEFT_OUT, [1]), first
    assert "did not step, although others' did" in first["message"]
    assert not [event for event in events if event["where"] == "learning rate"]


@pytest.mark.parametrize("name", CASES)
def test_on_all_ranks_it_is_their_own_affair(name: str, told: dict[Any, Any]) -> None:
    steps, events = told[name, True]
    assert steps == list(range(1, STEPS + 1))
    assert events == []
