"""What goes wrong, when and on whom are three things, and every maker can be combined with every moment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch

from ds_silent.drill import faults
from ds_silent.drill.faults import behind, inputs
from ds_silent.drill.faults.injection import (
    HEALTHY,
    NOTHING,
    Collective,
    Injection,
    Maker,
    Target,
    attempts,
    both,
    from_on,
    limited,
    once,
    one,
)

TARGET = Target(rank=2, ranks=4, step=3, size=4.0)
BEFORE_TRAINING = {"environment", "config", "shard", "seed", "model", "optimizer"}


def losses(make: Maker, me: int = 2) -> list[float]:
    change = make(TARGET, me).loss
    return [float(torch.tensor(1.0) if change is None else change(torch.tensor(1.0), step)) for step in range(1, 6)]


def test_one_fault_at_each_moment() -> None:
    assert losses(inputs.scaled_loss) == [4, 4, 4, 4, 4]
    assert losses(from_on(inputs.scaled_loss)) == [1, 1, 4, 4, 4]
    assert losses(once(inputs.scaled_loss)) == [1, 1, 4, 1, 1]
    assert losses(one(once(inputs.scaled_loss)), me=1) == [1, 1, 1, 1, 1]
    assert one(inputs.scaled_loss)(TARGET, 1) == NOTHING


@pytest.mark.parametrize(("count", "hit"), [(1, [True, False, False]), (2, [True, True, False]), (None, [True] * 3)])
def test_the_attempts_of_a_reduction(count: int | None, hit: list[bool]) -> None:
    injection = once(attempts(partial(behind.weighted_contribution, 0.0), count))(TARGET, 2)
    for step in (2, 3):
        zeroed = []
        for attempt in range(3):
            values = torch.ones(2)
            act = injection.repetition if attempt else injection.reduction
            assert act is not None
            act(Collective(values, lambda: None, step, (0, 0), True, attempt))
            zeroed.append(not bool(values.any()))
        assert zeroed == (hit if step == 3 else [False] * 3)


def test_two_things_at_once_and_each_at_its_moment() -> None:
    injection = both(once(behind.skipped), from_on(partial(behind.damaged_repair, None)))(TARGET, 2)
    assert injection.update is not None
    assert injection.repair is not None
    assert [injection.update(None, lambda: "ran", step) for step in (2, 3, 4)] == ["ran", None, "ran"]
    arrived = torch.zeros(3, 1, dtype=torch.int32)
    for step, values in zip((2, 3, 4), arrived, strict=True):
        injection.repair(values, step)
    assert arrived.flatten().tolist() == [0, 8, 8]


def test_every_place_of_a_step_has_its_healthy_act() -> None:
    assert set(HEALTHY) == {field.name for field in fields(Injection)} - BEFORE_TRAINING - {"change"}
    assert limited(NOTHING, lambda step: True) == NOTHING


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_faults_know_no_framework() -> None:
    for path in Path(faults.__path__[0]).glob("*.py"):
        for name in imported(path):
            assert not name.startswith(
                ("deepspeed", "ds_silent.drill.train", "ds_silent.drill.deepspeed", "ds_silent.frameworks")
            ), path.name
