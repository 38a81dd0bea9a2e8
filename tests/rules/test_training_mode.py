"""A model that was trained in training mode, was evaluated, and is trained in evaluation mode since."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_silent
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach
from ds_silent.rules.training_mode import TrainingMode
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import each, run_distributed

T, E, V, A = "train", "eval", "evaluate", "attack"  # steps in each mode; an evaluation; gradients that are not a step's


def model_of(drops: bool = True, norms: bool = False) -> nn.Sequential:
    last = nn.Dropout(0.2 if drops else 0.0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norms else nn.LayerNorm(4), last)


def told(model: nn.Module, *acts: str, frozen: bool = False) -> list[list[str]]:
    """What was found at each step."""
    return [[breach.message for breach in step] for step in breaches(model, *acts, frozen=frozen)]


def breaches(model: nn.Module, *acts: str, frozen: bool = False, stage: int = 99) -> list[tuple[Breach, ...]]:
    """``stage``: the step from which on another optimizer steps."""
    optimizers = [object(), object()]
    framework: Any = SimpleNamespace(module=model, step=0, optimizers=lambda: [optimizers[framework.step >= stage]])
    rule, patches, found = TrainingMode(framework), Patches(), []
    rule.connect(patches, lambda function, *given: function(*given))
    for act in acts:
        model.train(act == T)
        if frozen:
            model.get_submodule("1").eval()
        with torch.set_grad_enabled(act != V):
            model(torch.randn(3, 4))
        if act in (T, E):
            framework.step += 1
            found.append(rule.breaches())
    patches.undo()
    return found


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (model_of(), "dropout is off (in 2)"),
        (model_of(False, True), "running statistics are used and stand still (in 1)"),
        (model_of(True, True), "dropout is off (in 2) and running statistics"),
    ],
)
def test_a_model_that_stays_in_evaluation_mode_is_told_until_it_is_trained_again(model: nn.Module, says: str) -> None:
    found = told(model, T, T, V, E, E, E, T, T)
    assert [len(step) for step in found] == [0, 0, 0, 1, 1, 0, 0]
    assert "since step 3: " in found[3][0]
    assert says in found[3][0]
    assert found[4] == found[3]


@pytest.mark.parametrize(
    ("model", "acts", "frozen"),
    [
        (model_of(), (T, V, T, V, T), False),
        (model_of(), (E, V, E, E, E), False),  # never in training mode
        (model_of(), (T, T, E, E, E), False),  # a switch by design: no evaluation came before it
        (model_of(), (T, V, A, T, A, T, A, T), False),  # gradients of an attack in evaluation mode
        (model_of(), (T, V, E, T, V, E, T), False),  # steps of another kind, in turns
        (model_of(False), (T, V, E, E, E), False),  # nothing behaves otherwise
        (model_of(False, True), (T, V, T, T), True),  # normalisations alone, by design
    ],
)
def test_what_may_be_meant_is_silent(model: nn.Module, acts: Any, frozen: bool) -> None:
    assert not any(told(model, *acts, frozen=frozen))


@pytest.mark.parametrize(("stage", "severity"), [(3, "info"), (2, "warning"), (4, "warning"), (99, "warning")])
def test_a_stage_with_an_optimizer_of_its_own_may_be_meant_so(stage: int, severity: str) -> None:
    *_, [last] = breaches(model_of(), T, T, V, E, E, E, stage=stage)
    assert last.severity == severity
    assert last.message.endswith("Another optimizer steps since then.") is (severity == "info")
    assert last.remedy.startswith("Do nothing if the stage") is (severity == "info")


def trained(directory: str, everybody: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(1, 9):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            if step == 4 and (everybody or rank == 0):
                model.eval()
                with torch.no_grad():
                    model.module(torch.randn(3, 4))


def test_in_a_training(tmp_path: Path) -> None:
    run_distributed(each, 2, (trained, {who: (str(tmp_path / who), who == "all") for who in ("all", "one")}))

    def told(who: str) -> tuple[list[Any], list[Any]]:
        events = [e for e in read_events(tmp_path / who / "events.jsonl") if "mode" in (e["where"] or "")]
        return events, [(e["step"], e["kind"], e["severity"], e["ranks"]) for e in events]

    assert told("all")[1] == [(6, "update-mismatch", "warning", [])]
    events, found = told("one")
    assert found == [(5, "config-mismatch", "error", []), (6, "update-mismatch", "info", [0])]  # one fault, one alarm
    assert events[1]["message"].startswith("Follows from the config-mismatch of step 5 (training mode")
