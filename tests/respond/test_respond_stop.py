"""A response that ends the training, and ranks that die in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.repairs import (
    FAULT,
    ODD,
    RANKS,
    Fault,
    block,
    corrupted,
    drifted,
    missing,
    noise,
    trained,
)
from tests.support.training import Case, engine_of, one_step


@dataclass(frozen=True)
class Stop:
    """What ends a training, and what is said of it."""

    respond: dict[str, Any]
    why: str
    fault: Fault
    kind: str = "aggregation-error"
    stage: int = 0
    applied: int = 2
    limit: int = 64  # of the gathering: 1, 0: of 4 ranks as of very many
    ranks: list[int] | None = None  # that the error names; None: not looked at


ONCE, ALWAYS = (corrupted(noise, (0, 1, 2, 3), times) for times in (1, 10**6))
AGGREGATION = ({"on_aggregation_error": "stop"}, 'respond.on_aggregation_error "stop"')
RETRIES = {"on_aggregation_error": "retry", "on_failed_retry": "stop", "retries": 2}
DRIFT = ({"on_replica_drift": "stop"}, 'respond.on_replica_drift "stop"')
STOPS = {
    "stage 0": Stop(*AGGREGATION, ONCE),
    "stage 2": Stop(*AGGREGATION, ONCE, stage=2),
    "retries": Stop(RETRIES, 'respond.on_failed_retry "stop"', ALWAYS),
    "drift": Stop(*DRIFT, drifted, "replica-drift", applied=3),
    "constant size": Stop(*AGGREGATION, missing, limit=1, ranks=[ODD]),
    "in blocks": Stop(*AGGREGATION, missing, limit=0, ranks=[ODD]),
}


def stopped(directory: str) -> list[dict[str, Any]]:
    """Each training, one after another in the same processes."""
    results = []
    for name, case in STOPS.items():
        config = Case(stage=case.stage).config(Path(directory), enabled=False)
        settings = block(respond=case.respond, integrity={"replica_interval": 1})
        config["silent_consistency"] = {**settings, "output_dir": str(Path(directory, name))}
        engine, patches = engine_of(config, gather_limit=case.limit), Patches()
        generator = torch.Generator().manual_seed(dist.get_rank())
        case.fault(engine, patches)
        status, steps = None, 0
        try:
            while steps < 8:
                steps += 1
                one_step(engine, generator)
        except SystemExit as end:
            status = end.code
        finally:
            patches.undo()
        results.append({"status": status, "steps": steps, "applied": int(engine.global_steps)})
        engine.destroy()
    return results


def test_stop_saves_a_suspect_checkpoint_and_ends_all_ranks(tmp_path: Path) -> None:
    """Above the gather limit, the rank is named before the training ends."""
    for results in run_distributed(stopped, RANKS, (str(tmp_path),), timeout=280):
        assert results == [{"status": 3, "steps": 3, "applied": case.applied} for case in STOPS.values()]
    for name, case in STOPS.items():
        errors = [e for e in read_events(tmp_path / name / "events.jsonl") if e["severity"] == "error"]
        assert (errors[0]["kind"], errors[0]["step"]) == (case.kind, FAULT), name
        assert case.ranks in (None, errors[0]["ranks"]), name
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["step"] == FAULT, name
        folder = tmp_path / name / "suspect" / f"suspect_step{FAULT}"
        assert case.why in (folder / "SUSPECT").read_text(), name
        assert any(path.suffix == ".pt" for path in folder.iterdir()), name


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
