"""What the optimizer applies, on every stage and wrapper: four times too much, noise, or nothing on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.frameworks.deepspeed.reduction import base_optimizers
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed
from tests.support.matrix import FP32_ACCUMULATION, OFFLOAD
from tests.support.training import Case, engine_of, one_step

CASES = (
    Case(),
    Case(dtype="bf16", clipping=0.5),
    Case(stage=1, clipping=0.5),
    Case(stage=1, dtype="bf16", top=FP32_ACCUMULATION, clipping=0.5),
    Case(stage=1, zero=OFFLOAD),
    Case(stage=2, dtype="bf16", clipping=0.5),
    Case(stage=3, clipping=0.5),
    Case(stage=3, dtype="bf16"),
)
TRIALS = (*((case, 1) for case in CASES), (CASES[0], 3), (CASES[2], 3), (CASES[5], 3))
"""A case, and the steps between two measurements."""
FACTOR_AT, NOISE_AT, IDLE_AT, STEPS = 3, 6, 9, 12


def train(case: Case, interval: int, folder: Path) -> None:
    """Faults strike between DeepSpeed and its base optimizer, ahead of the observer's own look."""
    engine = engine_of(case.config(folder, enabled=False))

    def corrupt(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for gradient in held:
            if engine.global_steps + 1 == FACTOR_AT:
                gradient.mul_(4.0)
            elif engine.global_steps + 1 == NOISE_AT:
                gradient.add_(torch.randn_like(gradient) * (1e-2 * gradient.norm() / gradient.numel() ** 0.5))

    for optimizer in base_optimizers(engine):
        optimizer.register_step_pre_hook(corrupt)
    block = case.config(folder, enabled=True)["silent_consistency"]
    observer = ds_silent.attach(engine, {**block, "preflight": False, "interval": interval})
    assert observer is not None
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    for step in range(1, STEPS + 1):
        if step == IDLE_AT and case.stage == 0 and dist.get_rank() == 1:
            engine.basic_optimizer.step = lambda *args, **kwargs: None
        one_step(engine, generator)
        engine.basic_optimizer.__dict__.pop("step", None)
    observer.close()
    engine.destroy()


def train_all(directory: str) -> None:
    for number, (case, interval) in enumerate(TRIALS):
        train(case, interval, Path(directory) / str(number))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Events about the applied gradient, of each case."""
    directory = tmp_path_factory.mktemp("applied")
    run_distributed(train_all, 2, (str(directory),), timeout=280)
    events = [read_events(directory / str(number) / "events.jsonl") for number in range(len(TRIALS))]
    return [[e for e in of_case if e["where"] == "applied gradient" and e["severity"] == "error"] for of_case in events]


@pytest.mark.parametrize("number", range(len(TRIALS)), ids=lambda number: f"{TRIALS[number]}"[6:60])
@pytest.mark.long
def test_what_is_applied_is_checked_at_its_step(number: int, found: list[list[dict[str, Any]]]) -> None:
    factor, noise, *idle = found[number]
    assert (factor["step"], factor["kind"], factor["ranks"]) == (FACTOR_AT, "aggregation-error", [])
    assert "The optimizer applied 4 times the aggregated gradient" in factor["message"]
    assert noise["step"] == NOISE_AT
    assert "no multiple of the aggregated gradient" in noise["message"]
    assert noise["score"] == pytest.approx(1e-2, rel=0.3)
    if TRIALS[number][0].stage == 0:
        [skipped] = idle
        assert (skipped["step"], skipped["ranks"]) == (IDLE_AT, [1])
    else:
        assert idle == []
