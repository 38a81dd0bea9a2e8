"""Optimizers that the observer was not given step the model: their steps are the training's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import ds_silent
from ds_silent.config import SilentConsistencyConfig
from ds_silent.frameworks.auto_attach import AutoAttach
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS = 9
CHANGES = 4  # the first step of another optimizer

Stepping = Callable[[int], list[Any]]
"""Which optimizers step at a step of that number."""


class Averaging(SGD):
    """Step an optimizer inside its own step, with the same parameters, as Lookahead does."""

    def __init__(self, inner: Any):
        super().__init__([p for group in inner.param_groups for p in group["params"]], lr=0.1)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


class Clamped(AdamW):
    """Limit the weights behind the parent's step: torch hooks the step of a class and of its parent."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-3.0, 3.0)
        return result


def replaced(model: nn.Module) -> tuple[Any, Stepping]:
    """A new optimizer takes the place of the old one."""
    old, new = AdamW(model.parameters(), lr=0.01), SGD(model.parameters(), lr=0.02)
    return old, lambda step: [old if step < CHANGES else new]


def of_another_model(model: nn.Module) -> tuple[Any, Stepping]:
    """The one that was given holds nothing of the model."""
    own = AdamW(model.parameters(), lr=0.01)
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1), lambda _: [own]


def alternating(model: nn.Module) -> tuple[Any, Stepping]:
    """Two optimizers of the same parameters take turns."""
    first, second = AdamW(model.parameters(), lr=0.01), SGD(model.parameters(), lr=0.02)
    return first, lambda step: [first if step % 2 else second]


def one_of_two(model: nn.Module) -> tuple[Any, Stepping]:
    """Two optimizers share the parameters, and the observer was given one."""
    parameters = list(model.parameters())
    weights, biases = AdamW(parameters[::2], lr=0.01), AdamW(parameters[1::2], lr=0.01)
    return weights, lambda _: [weights, biases]


def of_a_part(model: nn.Module) -> tuple[Any, Stepping]:
    """A second one steps some of the parameters, every other step."""
    whole, part = AdamW(model.parameters(), lr=0.01), SGD(list(model.parameters())[:1], lr=0.02)
    return whole, lambda step: [whole if step % 2 else part]


def both(model: nn.Module) -> tuple[Any, Stepping]:
    """Two optimizers share the parameters, and the observer was given both."""
    parameters = list(model.parameters())
    weights, biases = AdamW(parameters[::2], lr=0.01), AdamW(parameters[1::2], lr=0.01)
    return [weights, biases], lambda _: [weights, biases]


def in_turns(model: nn.Module) -> tuple[Any, Stepping]:
    """Two optimizers share the parameters; one of them steps every other step."""
    parameters = list(model.parameters())
    weights, biases = AdamW(parameters[::2], lr=0.01), AdamW(parameters[1::2], lr=0.01)
    return [weights, biases], lambda step: [weights, biases] if step % 2 else [weights]


def around(model: nn.Module) -> tuple[Any, Stepping]:
    """The observer was given the inner one of two."""
    inner = AdamW(model.parameters(), lr=0.01)
    outer = Averaging(inner)
    return inner, lambda _: [outer]


def inside(model: nn.Module) -> tuple[Any, Stepping]:
    """The observer was given the outer one of two, which steps the inner one."""
    outer = Averaging(AdamW(model.parameters(), lr=0.01))
    return outer, lambda _: [outer]


def calls_its_parents(model: nn.Module) -> tuple[Any, Stepping]:
    """A step that calls its parent's is one step."""
    AdamW([torch.zeros(1, requires_grad=True)])  # from now on torch has hooked the parent's step
    optimizer = Clamped(model.parameters(), lr=0.01)
    return optimizer, lambda _: [optimizer]


def strangers_too(model: nn.Module) -> tuple[Any, Stepping]:
    """Another model's optimizer steps as well."""
    own, other = AdamW(model.parameters(), lr=0.01), SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return own, lambda _: [other, own, other]


CASES = {
    case.__name__: case
    for case in (
        replaced,
        of_another_model,
        alternating,
        one_of_two,
        of_a_part,
        both,
        in_turns,
        around,
        inside,
        calls_its_parents,
        strangers_too,
    )
}


def train(name: str, scales: bool, directory: Path) -> None:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(module)
    given, stepping = CASES[name](module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=given)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, STEPS + 1):
        optimizers = stepping(step)
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        for optimizer in optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            else:
                optimizer.step()
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    observer.close()


def skip_one(directory: Path) -> None:
    """On rank 1 one of two optimizers misses a step."""
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(module)
    optimizers, _ = both(module)
    observer = ds_silent.attach(model, {"output_dir": str(directory), "tensorboard": False}, optimizer=optimizers)
    assert observer is not None
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, STEPS + 1):
        model(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers[: 1 if step == CHANGES and dist.get_rank() == 1 else 2]:
            optimizer.step()
        model.zero_grad()
    observer.close()


def freeze_in_turns(automatic: bool, directory: Path) -> None:
    """Each of two optimizers has its turn, in which the other one's parameters need no gradient; from the start on."""
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    block = SilentConsistencyConfig(output_dir=str(directory), tensorboard=False)
    watch = AutoAttach(block) if automatic else None
    model = DistributedDataParallel(module, find_unused_parameters=True)
    parts = [module[0], module[2]]
    optimizers = [AdamW(part.parameters(), lr=0.01) for part in parts]
    parts[1].requires_grad_(False)
    if not automatic:
        ds_silent.attach(model, block, optimizer=optimizers)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        for turn, optimizer in enumerate(optimizers):
            for part, own in zip(parts, (turn == 0, turn == 1), strict=True):
                part.requires_grad_(own)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            nn.utils.clip_grad_norm_(parts[turn].parameters(), 0.1)
            optimizer.step()
    observer = ds_silent.observer_of(model)
    assert observer is not None
    observer.close()
    if watch is not None:
        watch.undo()


def train_all(directory: Path) -> None:
    for name in CASES:
        for scales in (False, True):
            train(name, scales, directory / f"{name} {scales}")
    skip_one(directory / "skips one")
    for automatic in (False, True):
        freeze_in_turns(automatic, directory / f"frozen in turns {automatic}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all trainings."""
    directory = tmp_path_factory.mktemp("trained")
    run_distributed(train_all, 2, (directory,), timeout=280)
    return directory


@pytest.mark.parametrize("scales", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_recorded_and_nothing_is_told(name: str, scales: bool, trained: Path) -> None:
    directory = trained / f"{name} {scales}"
    records = list(read_metrics(directory / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [event["message"] for event in read_events(directory / "events.jsonl")] == []
    for record in records[: -1 if name == "of_a_part" else None]:  # whose last step ends with the next forward
        assert record["samples"] == 2 * 4 * record["step"]
        if (error := record["integrity"]["relative_error"]) is not None or name not in ("of_a_part", "in_turns"):
            assert error <= record["integrity"]["rounding_bound"]


def test_one_optimizer_that_misses_a_step_on_one_rank_is_told(trained: Path) -> None:
    first = next(event for event in read_events(trained / "skips one" / "events.jsonl") if event["severity"] != "info")
    assert (first["kind"], first["step"], first["ranks"]) == ("aggregation-error", CHANGES, [1])
    assert "did not step, although others' did" in first["message"]


@pytest.mark.parametrize("automatic", [False, True], ids=["attach", "by itself"])
def test_what_is_frozen_when_the_observer_comes_is_observed_in_its_turn(automatic: bool, trained: Path) -> None:
    directory = trained / f"frozen in turns {automatic}"
    records = list(read_metrics(directory / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 2 * STEPS + 1))
    assert [event["message"] for event in read_events(directory / "events.jsonl")] == []
    for record in records:
        assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"]
        assert record["grad_norm"]["aggregated"] <= record["grad_norm"]["mean"]
