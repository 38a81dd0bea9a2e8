"""The rates that DeepSpeed's groups come with, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch import nn

import ds_silent
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed

CASES = ("right", "first group's", "one for all", "made by the script")


def train(folder: Path, case: str) -> list[dict[str, Any]] | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(model, (0.1, 0.02), strict=True)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    named: dict[str, Any] = {"warmup_num_steps": 4, "warmup_type": "linear"}
    if case == "one for all":
        named["warmup_max_lr"] = 0.1
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "silent_consistency": {"output_dir": str(folder), "tensorboard": False, "preflight": False},
    }
    given: dict[str, Any] = {}
    if case == "made by the script":
        given["lr_scheduler"] = lr_schedules.WarmupLR(optimizer, 0.0, 0.1, **named)
    else:
        config["scheduler"] = {"type": "WarmupLR", "params": named}
    engine, *_ = ds_silent.initialize(model=model, optimizer=optimizer, config=config, **given)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        engine.backward(engine(torch.randn(2, 4, generator=generator)).square().mean())
        engine.step()
    engine.destroy()
    return list(read_events(folder / "events.jsonl")) if dist.get_rank() == 0 else None


def every_case(directory: str) -> dict[str, Any]:
    right, found = lr_schedules._format_param, {}

    def of_first(optimizer: Any, value: Any, name: str) -> Any:
        """As DeepSpeed 0.19.3 makes a list of what was not given."""
        return right(optimizer, value[0] if isinstance(value, list) else value, name)

    for case in CASES:
        lr_schedules._format_param = of_first if case == "first group's" else right
        found[case] = train(Path(directory, case), case)
    lr_schedules._format_param = right
    return found


def test_groups_rise_to_the_rates_they_came_with(tmp_path: Path) -> None:
    found = run_distributed(every_case, 2, (str(tmp_path),), timeout=200.0)[0]
    told = found.pop("first group's")
    assert [(event["step"], event["kind"], event["where"]) for event in told if event["severity"] != "info"] == [
        (3, "update-mismatch", "learning rate of group 1")
    ]
    assert "is 0.025, but WarmupLR gives 0.005 for this group at its step 1" in told[0]["message"]
    for case, events in found.items():
        assert [event for event in events if event["severity"] != "info"] == [], case
