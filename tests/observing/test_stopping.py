"""An event ends the training on all ranks at once; a resume verifies the weights against the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.training import Case, build, engine_of, one_step


def ended_by_an_event(directory: str, stop_on: str) -> dict[str, Any]:
    """Rank 1's replica is changed before step 3; stage 0, compared at every step."""
    config = Case().config(Path(directory) / "on", enabled=True)
    config["silent_consistency"]["integrity"] = {"replica_interval": 1}
    config["silent_consistency"]["detectors"] = {"stop_on": stop_on}
    engine = engine_of(config)
    generator, steps, status = torch.Generator().manual_seed(dist.get_rank()), 0, None
    try:
        for steps in range(1, 9):
            if steps == 3 and dist.get_rank() == 1:
                with torch.no_grad():
                    engine.module.frozen.weight[0, 0] += 1.0
            one_step(engine, generator)
    except SystemExit as end:
        status = end.code
    return {"steps": steps, "status": status}


@pytest.mark.parametrize(("stop_on", "steps", "status"), [("never", 8, None), ("error", 5, 3), ("warning", 5, 3)])
def test_an_event_ends_the_training_on_all_ranks_at_once(
    stop_on: str, steps: int, status: int | None, tmp_path: Path
) -> None:
    results = run_distributed(ended_by_an_event, 2, (str(tmp_path), stop_on))
    assert results == [{"steps": steps, "status": status}] * 2
    [event] = [e for e in read_events(tmp_path / "on" / "events.jsonl") if e["kind"] == "replica-drift"]
    assert (event["where"], event["ranks"], event["severity"]) == ("frozen.weight", [], "error")  # two cannot outvote
    assert "that of step 2" in event["message"]
    records = read_metrics(tmp_path / "on" / "metrics.jsonl")
    assert [record["integrity"]["replica_groups"] for record in records][:3] == [[[0, 1]], [[0, 1]], [[0], [1]]]


def resumed_with_other_weights(directory: str, changed: bool) -> None:
    engine = build(Case(), Path(directory) / "on")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        one_step(engine, generator)
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    state = observer.state_dict()
    if changed:  # on every rank alike, so that only the checkpoint knows
        with torch.no_grad():
            engine.module.frozen.weight[0, 0] += 1.0
    observer.load_state_dict(state)
    for _ in range(2):
        one_step(engine, generator)
    observer.close()


@pytest.mark.parametrize("changed", [True, False])
def test_a_resume_verifies_the_weights(changed: bool, tmp_path: Path) -> None:
    run_distributed(resumed_with_other_weights, 2, (str(tmp_path), changed))
    found = [e for e in read_events(tmp_path / "on" / "events.jsonl") if e["kind"] == "initial-weights-mismatch"]
    assert [(e["step"], e["where"]) for e in found] == ([(3, "checkpoint")] if changed else [])
    groups = [r["integrity"]["replica_groups"] for r in read_metrics(tmp_path / "on" / "metrics.jsonl")]
    assert groups == [None, None, [[0, 1]], [[0, 1]]]  # compared after the resume, and at step 4


def flushed_on_one_rank(directory: str, limit: int) -> list[int]:
    """Rank 0 alone publishes early, after every step; rank 2's replica changes before step 3, compared at step 4."""
    engine = build(Case(), Path(directory) / "on", gather_limit=limit)
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 8):
        if step == 3 and dist.get_rank() == 2:
            with torch.no_grad():
                engine.module.frozen.weight[0, 0] += 1.0
        one_step(engine, generator)
        if dist.get_rank() == 0:
            observer.flush()
            observer.state_dict()
    observer.close()
    return [int(engine.global_steps)]


@pytest.mark.parametrize("limit", [64, 1, 0], ids=["gathered", "constant size", "in blocks"])
def test_a_rank_that_publishes_early_leaves_no_other_waiting(limit: int, tmp_path: Path) -> None:
    results = run_distributed(flushed_on_one_rank, 3, (str(tmp_path), limit), timeout=60)
    assert results == [[7]] * 3
    [event] = [e for e in read_events(tmp_path / "on" / "events.jsonl") if e["kind"] == "replica-drift"]
    assert (event["step"], event["where"], event["ranks"]) == (4, "frozen.weight", [2])
    assert [record["step"] for record in read_metrics(tmp_path / "on" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
