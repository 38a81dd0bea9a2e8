"""When replicas are compared: at the first measured step behind each multiple of the interval."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_silent.config import parse
from ds_silent.replicas.compare import ReplicaChecks


@pytest.mark.parametrize(
    ("interval", "measured", "compared"),
    [
        (1, range(1, 41), [10, 20, 30, 40]),
        (1, range(1, 41, 2), [11, 21, 31]),  # each step is followed by another, of the same gradient
        (4, range(4, 41, 4), [12, 20, 32, 40]),
        (1, [8, 9, 10, 8, 9, 10, 11], [10, 10]),  # a checkpoint was loaded
    ],
)
def test_replicas_are_compared_behind_each_multiple(interval: int, measured: Any, compared: list[int]) -> None:
    config = parse({"silent_consistency": {"interval": interval, "integrity": {"replica_interval": 10}}})
    assert config is not None
    checks = ReplicaChecks(config, ([("weight", torch.ones(4))], list), None, False, lambda: False)  # type: ignore[arg-type]
    found = [checks.capture(step, step) for step in measured]
    assert [step for step, one in zip(measured, found, strict=True) if one is not None and one.seen == 1.0] == compared
