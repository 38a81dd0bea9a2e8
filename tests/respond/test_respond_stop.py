"""A response that ends the training, and ranks that die in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.repairs import (
    FAULT,
    ODD,
    RANKS,
    block,
    corrupted,
    drifted,
    missing,
    noise,
    trained,
)
from tests.support.training import Case, Probe, one_step

STOP = block(respond={"on_aggregation_error": "stop"}, integrity={"replica_interval": 1})


def stopped(directory: str, stage: int, settings: dict[str, Any], always: bool) -> dict[str, Any]:
    case, times = Case(stage=stage), 10**6 if always else 1
    fault = drifted if settings["respond"].get("on_replica_drift") == "stop" else corrupted(noise, (0, 1, 2, 3), times)
    config = case.config(Path(directory), enabled=False)
    config["silent_consistency"] = {**settings, "output_dir": directory}
    torch.manual_seed(1234)
    model = Probe(None)
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator, patches = torch.Generator().manual_seed(dist.get_rank()), Patches()
    fault(engine, patches)
    status, steps = None, 0
    try:
        while steps < 8:
            steps += 1
            one_step(engine, generator)
    except SystemExit as end:
        status = end.code
    patches.undo()
    return {"status": status, "steps": steps, "applied": int(engine.global_steps)}


@pytest.mark.parametrize(
    ("stage", "respond", "applied", "kind", "why"),
    [
        (0, {"on_aggregation_error": "stop"}, 2, "aggregation-error", 'respond.on_aggregation_error "stop"'),
        (2, {"on_aggregation_error": "stop"}, 2, "aggregation-error", 'respond.on_aggregation_error "stop"'),
        (
            0,
            {"on_aggregation_error": "retry", "on_failed_retry": "stop", "retries": 2},
            2,
            "aggregation-error",
            'respond.on_failed_retry "stop"',
        ),
        (0, {"on_replica_drift": "stop"}, 3, "replica-drift", 'respond.on_replica_drift "stop"'),
    ],
)
def test_stop_saves_a_suspect_checkpoint_and_ends_all_ranks(
    stage: int, respond: dict[str, Any], applied: int, kind: str, why: str, tmp_path: Path
) -> None:
    settings = block(respond=respond, integrity={"replica_interval": 1})
    results = run_distributed(stopped, RANKS, (str(tmp_path), stage, settings, "retries" in respond))
    assert results == [{"status": 3, "steps": 3, "applied": applied}] * RANKS
    errors = [e for e in read_events(tmp_path / "events.jsonl") if e["severity"] == "error"]
    assert errors[0]["kind"] == kind
    assert errors[0]["step"] == FAULT
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == FAULT
    folder = tmp_path / "suspect" / f"suspect_step{FAULT}"
    assert why in (folder / "SUSPECT").read_text()
    assert any(path.suffix == ".pt" for path in folder.iterdir())


def stopped_among_many(directory: str) -> list[int | None]:
    """Of 4 ranks as of very many; see :func:`stopped`."""
    status: list[int | None] = []
    for limit in (1, 0):
        config = Case().config(Path(directory), enabled=False)
        config["silent_consistency"] = {**STOP, "output_dir": str(Path(directory, str(limit)))}
        torch.manual_seed(1234)
        model, patches = Probe(None), Patches()
        engine, *_ = ds_silent.initialize(
            model=model, model_parameters=model.parameters(), config=config, _gather_limit=limit
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        missing(engine, patches)
        try:
            for _ in range(FAULT):
                one_step(engine, generator)
            status.append(None)
        except SystemExit as end:
            status.append(end.code if isinstance(end.code, int) else None)
        finally:
            patches.undo()
            engine.destroy()
    return status


def test_above_the_gather_limit_the_rank_is_named_before_the_training_ends(tmp_path: Path) -> None:
    assert run_distributed(stopped_among_many, RANKS, (str(tmp_path),), timeout=240) == [[3, 3]] * RANKS
    for limit in (1, 0):
        errors = [e for e in read_events(tmp_path / f"{limit}" / "events.jsonl") if e["severity"] == "error"]
        assert (errors[0]["kind"], errors[0]["step"], errors[0]["ranks"]) == ("aggregation-error", FAULT, [ODD])


def killed(directory: str, response: str) -> None:
    """The odd rank dies in the middle of the repair."""

    def fault(engine: Any, patches: Patches) -> None:
        drifted(engine, patches)

        def die(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == ODD and engine.global_steps >= FAULT:
                os._exit(9)
            return original(*args, **kwargs)

        patches.wrap(dist, "broadcast" if response == "majority" else "all_reduce", die)

    settings = block(respond={"on_replica_drift": response}, integrity={"replica_interval": 1})
    trained(Case(), Path(directory), settings, fault)


@pytest.mark.parametrize("response", ["majority", "mean"])
def test_a_rank_that_dies_in_a_repair_leaves_no_hang_and_no_claim(response: str, tmp_path: Path) -> None:
    run_distributed(killed, RANKS, (str(tmp_path), response), timeout=60, may_die=(0, 1, 2, 3))
    assert "repaired" not in [e["kind"] for e in read_events(tmp_path / "events.jsonl")]
