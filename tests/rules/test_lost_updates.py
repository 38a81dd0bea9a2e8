"""Updates that bf16 weights round away are counted, and noted where they are most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_silent
from ds_silent.maths.optimizers import Elements
from ds_silent.rules.lost_updates import WINDOW, LostUpdates
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import each, run_distributed


def after(rates: list[float], size: float = 0.02, gradient: float = 1.0) -> LostUpdates:
    """Weights of about ``size`` under a plain descent, one call of two tensors per step."""
    lost = LostUpdates()
    generator = torch.Generator().manual_seed(1)
    for step, rate in enumerate(rates, 1):
        for _ in range(2):
            weight = (size * (0.5 + torch.rand(64, generator=generator))).bfloat16()
            slope = torch.full((64,), gradient)
            meant = weight.double() - rate * slope.double()
            old = Elements(weight.double().numpy(), slope.double().numpy(), 1.0, 0.0, 0.0, 0.0)
            lost.take(step, rate, old, meant.numpy(), meant.bfloat16().double().numpy())
    return lost


def test_updates_below_half_the_last_bit_are_noted_once_a_window_is_full() -> None:
    assert after([1e-5] * (WINDOW - 1)).found == ()
    [breach] = after([1e-5] * WINDOW).found
    assert (breach.kind, breach.severity, breach.since) == ("update-mismatch", "info", WINDOW)
    assert breach.message.startswith("100% of the weights")
    assert "at a learning rate of 1e-05 (samples of steps 1 to 32)" in breach.message


@pytest.mark.parametrize(
    ("rates", "more"),
    [
        ([1e-3] * WINDOW, {}),  # more than the last bit
        ([1e-5] * WINDOW, {"size": 1e-3}),  # small weights move
        ([1e-5] * WINDOW, {"gradient": 0.0}),  # rows of an embedding that no batch holds
        ([1e-5 * step / 1000 for step in range(1, 200)], {}),  # a warm-up
        ([1e-3] * WINDOW + [1e-5] * 2 * WINDOW, {}),  # the end of a decay
    ],
)
def test_what_moves_or_is_to_move_little_is_silent(rates: list[float], more: Any) -> None:
    assert after(rates, **more).found == ()


def test_a_share_is_what_a_count_by_hand_gives() -> None:
    lost, weight = LostUpdates(), torch.tensor([0.02, 0.001, 0.5, 0.003]).bfloat16()
    meant = weight.double() - 1e-5
    still = (meant.bfloat16() == weight).tolist()
    assert still == [True, False, True, False]
    old = Elements(weight.double().numpy(), np.ones(4), 1.0, 0.0, 0.0, 0.0)
    for step in range(1, WINDOW + 1):
        lost.take(step, 1e-5, old, meant.numpy(), meant.bfloat16().double().numpy())
    assert lost.found == ()  # half is not most
    lost.take(WINDOW + 1, 1e-5, Elements(old.weight[:1], np.ones(1), 1.0, 0, 0, 0), meant[:1].numpy(), old.weight[:1])
    [breach] = lost.found
    assert breach.message.startswith("50% of the weights")


def trained(directory: str, dtype: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    torch.manual_seed(dist.get_rank())
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for _ in range(WINDOW + 3):
            optimizer.zero_grad()
            rows = torch.randn(8, 16).to(next(model.parameters()).dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                loss = model(rows).float().square().mean()
            loss.backward()
            optimizer.step()


def test_in_a_training(tmp_path: Path) -> None:
    run_distributed(each, 2, (trained, {dtype: (str(tmp_path / dtype), dtype) for dtype in ("bf16", "autocast")}))
    for dtype, expected in (("bf16", [("info", "bf16 moments", []), ("info", "bf16 weights", [])]), ("autocast", [])):
        found = [e for e in read_events(tmp_path / dtype / "events.jsonl") if e["kind"] == "update-mismatch"]
        assert [(e["severity"], e["where"], e["ranks"]) for e in found] == expected, dtype
