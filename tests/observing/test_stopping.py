"""An event ends the training on all ranks at once; a resume verifies the weights against the checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_distributed, run_on_kept_ranks
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


def raised_behind_the_reduction(directory: str, bad: int) -> str | None:
    """Rank 1's rows of step ``bad`` hold a NaN, and the script refuses a norm that is not finite before it steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    try:
        with ds_silent.observe(model, optimizer, config={"output_dir": directory}):
            for step in range(1, 6):
                rows = torch.randn(3, 4, generator=generator)
                if step == bad and dist.get_rank() == 1:
                    rows[0, 0] = torch.nan
                model(rows).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return None


def test_the_step_in_which_a_script_refuses_its_gradient_is_judged(tmp_path: Path) -> None:
    cases = {bad: (str(tmp_path / str(bad)), bad) for bad in (1, 3, 6)}
    for raised in run_on_kept_ranks(each, 2, (raised_behind_the_reduction, cases)):
        assert raised[6] is None
        assert "is non-finite" in raised[1]
        assert "is non-finite" in raised[3]
    for bad in (1, 3):
        directory = tmp_path / str(bad)
        found = [e for e in read_events(directory / "events.jsonl") if e["severity"] == "error"]
        assert [(e["step"], e["ranks"]) for e in found] == [(bad, [1])], found
        assert [record["step"] for record in read_metrics(directory / "metrics.jsonl")] == [*range(1, bad + 1)]
    assert [e for e in read_events(tmp_path / "6" / "events.jsonl") if e["severity"] == "error"] == []


def fail(*_: object) -> None:
    raise KeyError("a mistake of the script's own")


def raised_in_the_third_step(directory: str, where: str, ranks: tuple[int, ...]) -> None:
    """``ranks`` raise; the others go on to their fourth step, for which no peer is left."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with suppress(KeyError), ds_silent.observe(model, optimizer, config={"output_dir": directory}):
        for step in range(1, 4):
            raises = step == 3 and dist.get_rank() in ranks
            if raises and where == "within the backward":  # behind the second layer's gradients, before the first's
                layers[0].register_full_backward_hook(fail)
            model(torch.randn(3, 4, generator=generator)).square().mean().backward()
            if raises and where == "behind the backward":
                fail()
            if raises:
                optimizer.register_step_pre_hook(fail)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("where", "ranks", "recorded"),
    [
        ("behind the backward", (0, 1), 3),
        ("behind the backward", (0,), 2),
        ("behind the backward", (1,), 2),
        ("within the backward", (0, 1), 2),
        ("in the update", (0, 1), 3),
    ],
)
def test_a_script_that_raises_for_reasons_of_its_own_is_no_fault_of_the_ranks(
    where: str, ranks: tuple[int, ...], recorded: int, tmp_path: Path
) -> None:
    run_distributed(raised_in_the_third_step, 2, (str(tmp_path), where, ranks))
    assert [e for e in read_events(tmp_path / "events.jsonl") if e["severity"] != "info"] == []
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, recorded + 1)]
