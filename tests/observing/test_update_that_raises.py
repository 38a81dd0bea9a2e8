"""A training whose optimizer raises: the step that was under way is recorded, and nothing breaks in the observer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from tests.support.distributed import run_distributed


class Breaks(torch.optim.SGD):
    """Like a parameter that cannot be written: the second step finds it out."""

    steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("no more memory")
        super().step(closure)


def breaks(directory: str) -> str:
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = Breaks(model.parameters(), lr=0.1)
    config = {"output_dir": directory, "trace": {}, "tensorboard": False}
    try:
        with ds_silent.observe(model, optimizer, config=config):
            while True:
                optimizer.zero_grad()
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_the_step_under_way_is_recorded(tmp_path: Path) -> None:
    assert run_distributed(breaks, 2, (str(tmp_path),), timeout=100) == ["no more memory"] * 2
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
