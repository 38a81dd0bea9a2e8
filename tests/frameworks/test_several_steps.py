"""Several optimizers of one model, with something between their steps, and optimizers within the backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.drill.training import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS = 6
KINDS = ("clipped between", "clipped between on one rank", "within the backward")


def _train(directory: str, kind: str, observed: bool) -> str:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    parameters = list(model.parameters())
    within = kind == KINDS[2]
    wrapped: Any = fully_shard(model) if within else DistributedDataParallel(model)
    parameters = list(model.parameters())
    parts = [[one] for one in parameters] if within else [parameters[:3], parameters[3:]]
    optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
    if within:
        for parameter, optimizer in zip(parameters, optimizers, strict=True):

            def steps(_: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(steps)
    config = {"output_dir": directory, "tensorboard": False, "coverage": False, "integrity": {"replica_interval": 1}}
    observer = ds_silent.attach(wrapped, config, optimizer=optimizers) if observed else None
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(1, STEPS + 1):
        wrapped(torch.randn(8, 8, generator=generator)).square().mean().backward()
        if within:
            continue
        optimizers[0].step()
        if kind == KINDS[0] or (step == 3 and dist.get_rank() == 1):
            nn.utils.clip_grad_norm_(parts[1], 1e-3)
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    if observer is not None:
        observer.close()
    return hash_of([getattr(one, "full_tensor", lambda one=one: one)().detach() for one in parameters])


def _each(directory: str) -> list[bool]:
    return [_train("", kind, False) == _train(f"{directory}/{kind}", kind, True) for kind in KINDS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("several")
    assert all(map(all, run_distributed(_each, 2, (str(directory),))))  # the weights are those without an observer
    return directory


def _told(directory: Path) -> list[tuple[Any, ...]]:
    events = [one for one in read_events(directory / "events.jsonl") if one["severity"] != "info"]
    return [(one["step"], one["kind"], one["ranks"]) for one in events]


def test_what_the_script_clips_between_two_steps_is_its_own_affair(runs: Path) -> None:
    assert _told(runs / KINDS[0]) == []
    assert len(list(read_metrics(runs / KINDS[0] / "metrics.jsonl"))) == STEPS


def test_on_one_rank_alone_the_replicas_part(runs: Path) -> None:
    assert _told(runs / KINDS[1])[:1] == [(4, "replica-drift", [])]


def test_optimizers_within_the_backward_end_the_observation_with_a_sentence(runs: Path) -> None:
    assert _told(runs / KINDS[2]) == [(1, "observer-off", [0, 1])]
    (event,) = read_events(runs / KINDS[2] / "events.jsonl")
    assert "an optimizer steps within the backward" in event["message"]
