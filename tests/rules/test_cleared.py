"""Micro-batches that are cleared before their step: what is told of real loops on two ranks, and what is meant so."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS, PARTS, ROWS = 6, 4, 8


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, factor: Tensor, rows: Any) -> Tensor:
        result: Tensor = self.layers((rows["rows"] if isinstance(rows, dict) else rows) * factor)
        return result


def _train(directory: str, kind: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    factor = torch.ones(1)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for _ in range(STEPS):
            batch = torch.randn(ROWS, 8)
            for part in range(PARTS):
                if kind == "one buffer":
                    batch.copy_(torch.randn(ROWS, 8))
                elif kind not in ("the same batch", "the same, in a dictionary"):
                    batch = torch.randn(ROWS, 8)
                if kind != "healthy":
                    model.zero_grad() if kind == "by the model" else optimizer.zero_grad()
                if kind == "other weights" and part:
                    with torch.no_grad():
                        next(model.parameters()).mul_(0.9)
                with contextlib.nullcontext() if part == PARTS - 1 else model.no_sync():
                    rows = {"rows": batch} if kind == "the same, in a dictionary" else batch
                    loss = model(factor, rows).square().mean()
                    (loss if kind == "undivided" else loss / PARTS).backward()
            optimizer.step()
            optimizer.zero_grad()


def _thrown_away(directory: str, kind: str) -> None:
    """Backwards on the same made-up rows of all ranks, whose gradients are read or forgotten, and never applied."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(3 * STEPS):
            torch.manual_seed(step)
            looks = step == 0 if kind == "warm-up" else step % STEPS == 3
            if looks and ("rank 0" not in kind or dist.get_rank() == 0):
                held = [one.detach().clone() for one in net.parameters()]
                own = torch.optim.SGD(net.parameters(), lr=0.05) if "adapted" in kind else None
                for _ in range(1 if kind == "warm-up" else 4):
                    called = net if "past the wrapper" in kind else model
                    called(torch.randn(ROWS, 8)).square().mean().backward()
                    if own is not None:
                        own.step()
                        own.zero_grad()
                    elif "kept" not in kind:
                        optimizer.zero_grad()
                with torch.no_grad():
                    for one, before in zip(net.parameters(), held, strict=True):
                        one.copy_(before)
                net.zero_grad()
            torch.manual_seed(100 * step + dist.get_rank())
            called = net if kind == "trained past the wrapper" else model
            called(torch.randn(ROWS, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


THROWN_AWAY = (
    "warm-up",
    "gradients that are read",
    "read past the wrapper",
    "read past the wrapper, by rank 0 alone",
    "kept past the wrapper, by rank 0 alone",
    "adapted past the wrapper, by rank 0 alone",
)
FAULTS = ("fault", "by the model", "one buffer")
MEANT = ("the same batch", "the same, in a dictionary", "other weights")
KINDS = ("healthy", *FAULTS, *MEANT, "undivided")


def _each(directory: str) -> None:
    for kind in KINDS:
        _train(f"{directory}/{kind}", kind)
    for kind in (*THROWN_AWAY, "trained past the wrapper"):
        _thrown_away(f"{directory}/{kind}", kind)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cleared")
    run_distributed(_each, 2, (str(directory),))
    return directory


def _told(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(directory / "events.jsonl") if event["severity"] != "info"]


@pytest.mark.parametrize("kind", FAULTS)
def test_micro_batches_that_are_cleared_are_told_at_the_third_step(kind: str, runs: Path) -> None:
    """Once "no fault was seen", and the records counted the labels of all micro-batches.

    The first argument is always the same tensor, which says nothing of the batch.
    """
    [event] = _told(runs / kind)
    assert (event["kind"], event["severity"], event["where"]) == ("update-mismatch", "warning", "zero_grad")
    assert (event["step"], event["ranks"]) == (3, [])
    assert "since step 1: 3 micro-batches of each step are trained for nothing" in event["message"]
    objectives = [record["objective"] for record in read_metrics(runs / kind / "metrics.jsonl")]
    assert [(one["labels"], one["weight_sum"]) for one in objectives] == [(2 * ROWS, 1 / PARTS)] * STEPS


def test_gradients_that_nothing_divides_may_be_meant_for_something_else(runs: Path) -> None:
    """As those of rows by which a script weighs its sources of data: a warning, once."""
    [event] = [one for one in read_events(runs / "undivided" / "events.jsonl") if one["where"] == "zero_grad"]
    assert (event["severity"], event["step"]) == ("info", 3)
    assert event["message"].endswith("3 micro-batches of each step are trained for nothing.")
    assert event["remedy"].startswith("If the script takes those gradients for something else, do nothing.")


@pytest.mark.parametrize("kind", ["healthy", *MEANT])
def test_what_is_meant_so_is_silent(kind: str, runs: Path) -> None:
    """SAM takes a batch twice, with other weights the second time."""
    assert _told(runs / kind) == []
    labels = [record["objective"]["labels"] for record in read_metrics(runs / kind / "metrics.jsonl")]
    assert labels == [2 * ROWS * (PARTS if kind == "healthy" else 1)] * STEPS


@pytest.mark.parametrize("kind", THROWN_AWAY)
def test_of_steps_that_the_script_throws_away_nothing_is_said(kind: str, runs: Path) -> None:
    """Once errors: the same rows on all ranks, and gradients that nothing has reduced."""
    assert _told(runs / kind) == []
    steps = len(read_metrics(runs / kind / "metrics.jsonl"))
    assert steps - 3 * STEPS == {"warm-up": 1, "gradients that are read": 12}.get(kind, 0)  # through the wrapper


def test_what_is_trained_past_the_wrapper_is_told_at_the_first_step(runs: Path) -> None:
    first, *_ = _told(runs / "trained past the wrapper")
    assert (first["step"], first["kind"], first["severity"]) == (1, "unreduced-gradient", "error")
    assert first["remedy"].startswith("Call the wrapper itself in every training forward")
