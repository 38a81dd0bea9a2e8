"""DeepSpeed counts micro-batches in ``engine.step()``: a script that calls it once per accumulation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.frameworks.deepspeed.engine_rules import ConfigOptimizer
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed
from tests.support.training import Case, build

UPDATES, PARTS = 3, 3
KINDS = ("behind each backward", "once per accumulation", "behind two backwards of one forward", "as accelerate does")


def _train(directory: str) -> list[int]:
    steps = []
    for kind in KINDS:
        parts = 2 if kind == KINDS[2] else PARTS
        engine: Any = build(Case(accumulation=parts), Path(directory, kind))
        generator = torch.Generator().manual_seed(dist.get_rank())
        late = kind == KINDS[1]
        for micro_batch in range(1, UPDATES * parts * (parts if late else 1) + 1):
            if kind == KINDS[3]:
                engine.set_gradient_accumulation_boundary(micro_batch % parts == 0)
            loss = engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False)
            if kind == KINDS[2]:
                engine.backward(loss / 2, retain_graph=True)
                engine.backward(loss / 2)
            else:
                engine.backward(loss)
            if micro_batch % parts == 0 or kind in (KINDS[0], KINDS[2]):
                engine.step()
        steps.append(int(engine.global_steps))
        engine.destroy()
    return steps


def test_a_step_that_is_called_once_per_accumulation_is_told_before_what_follows(tmp_path: Path) -> None:
    steps = run_distributed(_train, 2, (str(tmp_path),), timeout=300)[0]
    assert steps == [UPDATES] * 4
    told = {}
    for kind in KINDS:
        events = [event for event in read_events(tmp_path / kind / "events.jsonl") if event["severity"] != "info"]
        told[kind] = [(event["kind"], event["where"], event["severity"], event["ranks"]) for event in events]
    assert told.pop(KINDS[1]) == [("objective-mismatch", "engine.step", "error", [])]
    assert not any(told.values())


ASKED = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": "auto", "eps": 1e-6}}


@pytest.mark.parametrize(
    ("asked", "given", "sentence"),
    [
        (ASKED, {"lr": 0.1, "eps": 1e-6}, "says lr 0.01, where the optimizer has 0.1."),
        (ASKED, {"lr": 0.1}, "says lr 0.01, where the optimizer has 0.1; eps 1e-06, where the optimizer has 1e-08."),
        (ASKED, {"lr": 0.01, "eps": 1e-6}, None),
        (ASKED, None, None),  # the engine has made it
        (None, {"lr": 0.1}, None),
    ],
)
def test_an_optimizer_of_the_configuration_that_is_not_used_is_noted(asked: Any, given: Any, sentence: Any) -> None:
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **(given or {"lr": 0.3}))
    LambdaLR(made, lambda step: 0.5)  # a schedule's rate is no other
    config = {"train_batch_size": 2, **({"optimizer": asked} if asked else {})}
    engine = SimpleNamespace(client_optimizer=made if given else None, config=config)
    told = ConfigOptimizer(engine, lambda: [made]).breaches()
    assert [(one.severity, one.message.partition("configuration ")[2]) for one in told] == (
        [("info", sentence)] if sentence else []
    )


def _train_without_a_layer(directory: str) -> None:
    engine = build(Case(stage=1, dtype="bf16"), Path(directory))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        engine.backward(engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), True))
        engine.step()
    engine.destroy()


def test_parameters_that_no_rank_uses_are_zero_on_none_alone(tmp_path: Path) -> None:
    """ZeRO gives them zeros in the share of the rank that updates them (HelloDeepSpeed's pooler)."""
    run_distributed(_train_without_a_layer, 2, (str(tmp_path),), timeout=300)
    assert "zero-gradient" not in {event["kind"] for event in read_events(tmp_path / "events.jsonl")}
