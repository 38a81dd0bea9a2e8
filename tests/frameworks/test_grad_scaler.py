"""A GradScaler's unscaling is no change by the script, what the optimizer then applies is checked, and a scale beyond
what the square of a gradient's norm may be makes nothing infinite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS, WRONG = 14, 10
FEW, BROKEN = 6, 4


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


def train_at(directory: Path, power: int, breaks: bool) -> bool:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=1000)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, FEW + 1):
        loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss * (torch.nan if breaks and step == BROKEN else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    observer.close()
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def train_times(directory: Path, factor: float, method: str) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 / factor)
    block = {"output_dir": str(directory), "tensorboard": False, "direction": {"method": method}}
    observer = ds_silent.attach(model, block, optimizer=optimizer)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(FEW):
        (factor * model(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


SCALES, EXPLICIT = (2.0**8, 2.0**24), (False, True)
PLAIN_POWER, POWERS = 8, (16, 60, 80, 110)
FACTORS, METHODS = (1e21, 1e-23), ("sketch", "exact")


def train_all(directory: Path) -> dict[int, bool]:
    """Return, by the power of the loss scale, whether all weights are finite."""
    for scale in SCALES:
        for explicit in EXPLICIT:
            train(scale, explicit, False, directory / f"scaled {scale} {explicit}")
    train(SCALES[0], True, True, directory / "clips by another norm")
    finite = {power: train_at(directory / f"at {power}", power, False) for power in (PLAIN_POWER, *POWERS)}
    train_at(directory / "breaks", 80, True)
    for method in METHODS:
        for factor in (1.0, *FACTORS):
            train_times(directory / f"times {factor} {method}", factor, method)
    return finite


@dataclass(frozen=True)
class Trained:
    directory: Path
    finite: list[dict[int, bool]]  # by rank

    def events(self, name: str) -> list[dict[str, Any]]:
        return list(read_events(self.directory / name / "events.jsonl"))

    def records(self, name: str) -> list[dict[str, Any]]:
        return list(read_metrics(self.directory / name / "metrics.jsonl"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("trained")
    return Trained(directory, run_distributed(train_all, 2, (directory,), timeout=280))


@pytest.mark.parametrize("explicit", EXPLICIT)
@pytest.mark.parametrize("scale", SCALES, ids=["never skips", "skips its first steps"])
def test_scaling_is_silent(scale: float, explicit: bool, trained: Trained) -> None:
    name = f"scaled {scale} {explicit}"
    assert trained.events(name) == []
    assert [record["step"] for record in trained.records(name)] == list(range(1, STEPS + 1))


def test_a_rank_that_clips_by_another_norm_is_told(trained: Trained) -> None:
    [event] = [event for event in trained.events("clips by another norm") if event["severity"] == "error"]
    assert (event["step"], event["kind"], event["where"]) == (WRONG, "aggregation-error", "applied gradient")


@pytest.mark.parametrize("power", POWERS)
def test_a_large_loss_scale_is_no_infinity(power: int, trained: Trained) -> None:
    assert [finite[power] for finite in trained.finite] == [True, True]
    assert not [event for event in trained.events(f"at {power}") if event["severity"] != "info"]
    norms, expected = (
        [record["grad_norm"]["aggregated"] for record in trained.records(f"at {one}")] for one in (power, PLAIN_POWER)
    )
    assert len(norms) == FEW
    assert norms == pytest.approx(expected, rel=0.1 if power >= 80 else 1e-3)  # beyond fp32 by a sketch of 72 numbers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("factor", FACTORS)
def test_gradients_whose_squares_fp32_cannot_hold_are_neither_infinite_nor_zero(
    factor: float, method: str, trained: Trained
) -> None:
    name, plain = f"times {factor} {method}", f"times 1.0 {method}"
    assert not [event for event in trained.events(name) if event["severity"] != "info"]
    for which in ("aggregated", "mean"):
        found, expected = ([record["grad_norm"][which] for record in trained.records(one)] for one in (name, plain))
        assert found == pytest.approx([factor * norm for norm in expected], rel=0.1)  # by a sketch of 72 numbers
    checked = [record["integrity"]["relative_error"] for record in trained.records(name)]
    assert max(checked) < 1e-6


def test_a_loss_that_is_no_number_is_told_at_such_a_scale(trained: Trained) -> None:
    told = [event["step"] for event in trained.events("breaks") if event["kind"] == "non-finite"]
    assert told[0] == BROKEN
