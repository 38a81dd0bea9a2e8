"""Weights that nothing has initialised are named before what follows from them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_on_kept_ranks

KINDS = ("DDP", "DDP, initialised", "FSDP2")


def _train(directory: str) -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2))
        with torch.no_grad():
            if "initialised" not in kind:
                model[0].weight[-1, -1] = math.nan  # in the second rank's shard
                model[2].bias[0] = -math.inf
        wrapped = fully_shard(model) if kind == "FSDP2" else DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
        config = {"output_dir": f"{directory}/{kind}", "tensorboard": False}
        with ds_silent.observe(wrapped, optimizer, config=config):
            for _ in range(3):
                optimizer.zero_grad()
                wrapped(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("initial")
    run_on_kept_ranks(_train, 2, (str(directory),))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_before_the_first_step(kind: str, runs: Path) -> None:
    events = [one for one in read_events(runs / kind / "events.jsonl") if one["kind"] == "non-finite"]
    if "initialised" in kind:
        assert events == []
        return
    first = [one for one in events if "before the first step" in one["message"]]
    whole = [("error", [], "0.weight, 2.bias")]
    parts = [("error", [0], "2.bias"), ("error", [1], "0.weight")]
    assert {one["step"] for one in first} == {1}
    found = sorted((one["severity"], one["ranks"], one["where"]) for one in first)
    assert found == (parts if kind == "FSDP2" else whole)
    others = [one for one in events if one not in first]
    assert others
    assert {one["severity"] for one in others} == {"info"}, "they follow from it"
