"""Real trainings from random weights, with warm-up and decay: everything moves, and nothing is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scratch import Scratch, train
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

STEPS = 48
CELLS = ((0, "fp32", 1), (1, "bf16", 2))


def trainings(folder: str) -> list[float]:
    return [
        train(Scratch(stage, dtype, accumulation, 7, STEPS, f"{folder}/{stage}", micro_batch=4))
        for stage, dtype, accumulation in CELLS
    ]


@pytest.mark.long
def test_the_first_steps_from_random_weights_are_no_event(tmp_path: Path) -> None:
    run_distributed(trainings, 4, (str(tmp_path),), timeout=400.0)
    for stage, *_ in CELLS:
        records = read_metrics(tmp_path / str(stage) / "metrics.jsonl")
        assert len(records) == STEPS
        assert records[0]["direction"]["mean_cosine"] > 0.8
        assert records[-1]["noise_scale"] > 3.0 * records[0]["noise_scale"]  # it did move
        path = tmp_path / str(stage) / "events.jsonl"
        assert (read_events(path) if path.exists() else []) == []
