"""An event ends the training on all ranks at once; a resume verifies the weights against the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_on_kept_ranks
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


def test_an_event_ends_the_training_on_all_ranks_at_once(tmp_path: Path) -> None:
    ended = {"steps": 5, "status": 3}
    ends = {"never": {"steps": 8, "status": None}, "error": ended, "warning": ended}
    cases = {stop_on: (str(tmp_path / stop_on), stop_on) for stop_on in ends}
    assert run_on_kept_ranks(each, 2, (ended_by_an_event, cases)) == [ends] * 2
    for stop_on in ends:
        directory = tmp_path / stop_on / "on"
        [event] = [e for e in read_events(directory / "events.jsonl") if e["kind"] == "replica-drift"]
        told = event["where"], event["ranks"], event["severity"]
        assert told == ("frozen.weight", [], "error"), stop_on  # two cannot outvote
        assert "that of step 2" in event["message"], stop_on
        groups = [record["integrity"]["replica_groups"] for record in read_metrics(directory / "metrics.jsonl")]
        assert groups[:3] == [[[0, 1]], [[0, 1]], [[0], [1]]], stop_on


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


def test_a_resume_verifies_the_weights(tmp_path: Path) -> None:
    cases = {changed: (str(tmp_path / str(changed)), changed) for changed in (True, False)}
    run_on_kept_ranks(each, 2, (resumed_with_other_weights, cases))
    for changed in cases:
        directory = tmp_path / str(changed) / "on"
        found = [e for e in read_events(directory / "events.jsonl") if e["kind"] == "initial-weights-mismatch"]
        assert [(e["step"], e["where"]) for e in found] == ([(3, "checkpoint")] if changed else [])
        groups = [r["integrity"]["replica_groups"] for r in read_metrics(directory / "metrics.jsonl")]
        assert groups == [None, None, [[0, 1]], [[0, 1]]], changed  # compared after the resume, and at step 4


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


def test_a_rank_that_publishes_early_leaves_no_other_waiting(tmp_path: Path) -> None:
    cases = {limit: (str(tmp_path / str(limit)), limit) for limit in (64, 1, 0)}  # gathered, constant size, in blocks
    assert run_on_kept_ranks(each, 3, (flushed_on_one_rank, cases)) == [{64: [7], 1: [7], 0: [7]}] * 3
    for limit in cases:
        directory = tmp_path / str(limit) / "on"
        [event] = [e for e in read_events(directory / "events.jsonl") if e["kind"] == "replica-drift"]
        assert (event["step"], event["where"], event["ranks"]) == (4, "frozen.weight", [2]), limit
        steps = [record["step"] for record in read_metrics(directory / "metrics.jsonl")]
        assert steps == [1, 2, 3, 4, 5, 6, 7], limit
