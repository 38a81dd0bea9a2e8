"""No setting that changes the reduction's or the optimizer's arithmetic in health is told as a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.healthy import SETTINGS, STEPS, Setting, Trace, train
from tests.training import DTYPES

RANKS = 3  # no power of two: the division rounds
BLOCK: dict[str, Any] = {
    "tensorboard": False,
    "integrity": {"replica_interval": 2},
    "direction": {"sketch_size": 1024},
}
HARMLESS = ("outlier-rank", "drift", "data-order-mismatch", "low-coverage")  # not about what is reduced or applied


def run(settings: tuple[Setting, ...], directory: str) -> list[tuple[Trace, Trace]]:
    """On every rank: each setting with the block and without it."""
    results = []
    for setting in settings:
        folder = Path(directory) / setting.name
        results.append((train(setting, folder, BLOCK), train(setting, folder, None)))
    return results


def check(settings: tuple[Setting, ...], results: list[list[tuple[Trace, Trace]]]) -> None:
    for number, setting in enumerate(settings):
        for rank, of_rank in enumerate(results):
            observed, plain = of_rank[number]
            assert observed.state == plain.state, (setting, rank)
        check_records(setting, results[0][number][0], len(results))


def check_records(setting: Setting, trace: Trace, ranks: int) -> None:
    told = [event for event in trace.events if event["kind"] not in HARMLESS]
    notes = [event for event in told if event["severity"] == "info"]
    assert notes == told, (setting.name, told)
    assert len(notes) == setting.noted, (setting.name, notes)
    assert len(trace.records) == STEPS, setting
    unit = torch.finfo(DTYPES[setting.travels]).eps / 2
    finite = [record["integrity"] for record in trace.records if not isinstance(record["loss"]["mean"], str)]
    checked = [found for found in finite if isinstance(found["relative_error"], float)]
    overflows = "fp16" in (setting.case.dtype, setting.travels) or "torch_autocast" in setting.case.top
    assert len(checked) >= (1 if overflows else STEPS), setting
    for found in checked:
        assert 0.0 < found["relative_error"] < found["rounding_bound"] < 24 * unit, (setting, found)


@pytest.mark.timeout(600)
def test_what_is_healthy_is_not_told(tmp_path: Path) -> None:
    quick = tuple(setting for setting in SETTINGS if setting.quick)
    check(quick, run_distributed(run, RANKS, (quick, str(tmp_path)), timeout=550))


def chunks(settings: tuple[Setting, ...], size: int) -> list[tuple[Setting, ...]]:
    return [settings[first : first + size] for first in range(0, len(settings), size)]


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("settings", chunks(SETTINGS, 12), ids=lambda settings: settings[0].name)
def test_every_healthy_setting(settings: tuple[Setting, ...], tmp_path: Path) -> None:
    check(settings, run_distributed(run, 2, (settings, str(tmp_path)), timeout=1100))
