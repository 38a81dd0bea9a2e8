"""Responses on real ranks: what is repaired is bit for bit what a training without the fault would have had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_silent
from ds_silent.drill.faults.behind import no_majority
from ds_silent.drill.verdicts import tells
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.collectives import Call, check_collectives, record_collectives
from tests.support.distributed import run_on_kept_ranks
from tests.support.repairs import (
    FAULT,
    MAJORITY,
    ODD,
    RANKS,
    RETRY,
    Fault,
    block,
    broken,
    corrupted,
    drifted,
    flip,
    missing,
    noise,
    trained,
    updated,
)
from tests.support.training import Case, build, one_step

# -- retry ------------------------------------------------------------------------------------------------------------


def retried(directory: str, case: Case) -> dict[str, Any]:
    faults = {
        "noise everywhere": corrupted(noise, tuple(range(RANKS))),
        "flip on one rank": corrupted(flip, (ODD,)),
        "nan on one rank": corrupted(broken, (ODD,)),
        "twice": corrupted(noise, (0, ODD), times=2),
    }
    if case.dtype == "fp16":
        del faults["nan on one rank"]  # looks like an overflow, which the loss scale answers by skipping the step
    results = {"clean": trained(case, Path(directory), None), "guarded": trained(case, Path(directory, "on"), RETRY)}
    for name, fault in faults.items():
        results[name] = trained(case, Path(directory, name), RETRY, fault)
    results["unmitigated"] = trained(case, Path(directory), None, faults["noise everywhere"])
    return results


SCHEDULED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}}
SCALED = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}


@pytest.mark.parametrize(
    "case",
    [
        Case(clipping=0.1, top=SCHEDULED),
        Case(dtype="bf16", accumulation=2),
        Case(stage=1, accumulation=2, clipping=0.1, top=SCHEDULED),
        Case(stage=1, dtype="bf16"),
        Case(stage=1, dtype="fp16", top=SCALED),
    ],
    ids=["0-fp32", "0-bf16", "1-fp32", "1-bf16", "1-fp16"],
)
@pytest.mark.long
def test_a_passing_fault_is_undone_bit_for_bit(case: Case, tmp_path: Path) -> None:
    for result in run_on_kept_ranks(retried, RANKS, (str(tmp_path), case), timeout=240):
        clean, unmitigated = result.pop("clean"), result.pop("unmitigated")
        assert result == dict.fromkeys(result, clean)
        assert unmitigated != clean
    notes = read_events(tmp_path / "on" / "events.jsonl")
    assert [event for event in notes if event["severity"] != "info"] == []
    grown = [event["step"] for event in notes if "next step's loss scale: 0.5 times" in event["message"]]
    assert grown == ([3, 5] if case.dtype == "fp16" else [])  # the scale doubles every second step
    for name, attempts in [("noise everywhere", "once"), ("flip on one rank", "once"), ("twice", "twice")]:
        events = [
            e
            for e in read_events(tmp_path / name / "events.jsonl")
            if e["severity"] != "info" or e["kind"] == "repaired"
        ]
        assert [e["kind"] for e in events[:2]] == ["aggregation-error", "repaired"], (name, events)
        assert len(events) == 2
        assert events[0]["step"] == events[1]["step"] == FAULT
        assert f"was repeated {attempts} and is right now" in events[1]["message"]
        errors = [r["integrity"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]
        assert all(e["relative_error"] < e["rounding_bound"] for e in errors)  # of what was applied


def counted_behind_a_retry(directory: str) -> list[int]:
    """Return the step by which all ranks count, while an engine takes steps 2 to 6 and repeats a reduction."""
    engine, counted = build(Case(), Path(directory), enabled=False), []
    engine.global_steps = FAULT - 2
    observer, patches = ds_silent.attach(engine, config={**RETRY, "output_dir": directory}), Patches()
    assert observer is not None
    corrupted(noise, tuple(range(RANKS)))(engine, patches)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        counted.append(observer._steps.plan.step)
        one_step(engine, generator)
    patches.undo()
    engine.destroy()
    return counted


def test_what_a_rank_says_of_where_it_is_is_said_again_with_a_repeated_reduction(tmp_path: Path) -> None:
    assert run_on_kept_ranks(counted_behind_a_retry, RANKS, (str(tmp_path),)) == [[2, 3, 4, 5, 6]] * RANKS
    assert "repaired" in [event["kind"] for event in read_events(tmp_path / "events.jsonl")]


def retried_by_many(directory: str) -> list[bool]:
    """Of 4 ranks as of very many: sums of sketches alone, and rows only on the writing rank (0)."""
    same = []
    for limit in (1, 0):
        clean = trained(Case(), Path(directory, f"clean {limit}"), RETRY, gather_limit=limit)
        same.append(clean == trained(Case(), Path(directory, f"{limit}"), RETRY, missing, limit))
    return same


def test_above_the_gather_limit_the_rank_is_named_before_the_reduction_is_repeated(tmp_path: Path) -> None:
    assert run_on_kept_ranks(retried_by_many, RANKS, (str(tmp_path),), timeout=240) == [[True, True]] * RANKS
    for limit in (1, 0):
        assert [e for e in read_events(tmp_path / f"clean {limit}" / "events.jsonl") if e["severity"] != "info"] == []
        events = list(read_events(tmp_path / f"{limit}" / "events.jsonl"))
        fault = next(e for e in events if e["severity"] == "error")
        assert (fault["step"], fault["ranks"]) == (FAULT, [ODD]), fault
        assert [e["step"] for e in events if e["kind"] == "repaired"] == [FAULT]


# -- replicas ---------------------------------------------------------------------------------------------------------


def kept(directory: str, case: Case) -> dict[str, str]:
    """A skipped update, under every response; and no fault, under those that average."""
    away = {"respond": {"on_replica_drift": "report"}, "integrity": {"replica_interval": 0}}
    settings = {
        "majority": MAJORITY,
        "mean": block(respond={"on_replica_drift": "mean"}, integrity={"replica_interval": 2}),
        "periodic": block(**away, resync={"mode": "periodic", "interval": 2}),
        "weights": block(**away, resync={"mode": "periodic", "interval": 2, "state": "parameters"}),
        "dynamic": block(**away, resync={"mode": "dynamic", "interval": 2}),
    }
    results = {"clean": trained(case, Path(directory), None), "drifted": trained(case, Path(directory), None, drifted)}
    for name, chosen in settings.items():
        results[f"healthy {name}"] = trained(case, Path(directory, f"healthy {name}"), chosen)
        results[name] = trained(case, Path(directory, name), chosen, drifted)
    return results


@pytest.mark.parametrize("case", [Case(), Case(dtype="bf16", accumulation=2)], ids=["fp32", "bf16"])
def test_replicas_are_made_equal_and_healthy_ones_left_alone(case: Case, tmp_path: Path) -> None:
    results = run_on_kept_ranks(kept, RANKS, (str(tmp_path), case), timeout=300)
    clean = results[0]["clean"]
    assert len({result["drifted"] for result in results}) == 2  # the fault is one
    for name in ("majority", "mean", "periodic", "weights", "dynamic"):
        assert {result[f"healthy {name}"] for result in results} == {clean}
        assert [e["kind"] for e in read_events(tmp_path / f"healthy {name}" / "events.jsonl")] == []
    assert {result["majority"] for result in results} == {clean}  # found in the step's own update: nothing is lost
    for name in ("mean", "periodic", "dynamic"):
        assert len({result[name] for result in results}) == 1
        assert results[0][name] != clean
    assert len({result["weights"] for result in results}) == 2  # the optimizer's state still differs
    for name, step in [("majority", 3), ("mean", 4), ("periodic", 4), ("dynamic", 4)]:
        events = [
            e for e in read_events(tmp_path / name / "events.jsonl") if e["kind"] in ("replica-drift", "repaired")
        ]
        # a skipped update is told as such at its step, and the drift as what follows from it
        first = [e for e in events if e["kind"] == "replica-drift" and tells(e)]
        first += [e for e in events if e["kind"] == "repaired"]
        assert [e["kind"] for e in first] == ["replica-drift", "repaired"], (name, events)
        assert first[0]["ranks"] == [ODD]
        assert first[1]["step"] == step
        assert "all replicas are equal again" in first[1]["message"]


def damaged_on_the_way(times: int) -> Fault:
    """A skipped update, and then the first broadcasts of the repair arrive with a wrong bit on the odd rank."""

    def fault(engine: Any, patches: Patches) -> None:
        drifted(engine, patches)
        left = times

        def damage(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            result = original(tensor, *args, **kwargs)
            if dist.get_rank() == ODD and left:
                left -= 1
                tensor[0] ^= 1
            return result

        patches.wrap(dist, "broadcast", damage)

    return fault


def averaged_wrongly(times: int) -> Fault:
    """A skipped update, and then the first averages arrive with a wrong number on the odd rank."""

    def fault(engine: Any, patches: Patches) -> None:
        drifted(engine, patches)
        left = times

        class Damaged:
            def __init__(self, work: Any, tensor: Tensor):
                self._work, self._tensor = work, tensor

            def wait(self) -> None:
                nonlocal left
                self._work.wait()
                if dist.get_rank() == ODD and left:
                    left -= 1
                    self._tensor[0] += 1

        def damage(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            large = tensor.dtype == torch.float32 and tensor.numel() > 1000
            return Damaged(result, tensor) if kwargs.get("async_op") and large else result

        patches.wrap(dist, "all_reduce", damage)

    return fault


def repaired_with_trouble(directory: str) -> dict[str, str]:
    mean = block(respond={"on_replica_drift": "mean"}, integrity={"replica_interval": 1})
    runs = {
        "tie": (MAJORITY, updated(no_majority)),
        "damaged": (MAJORITY, damaged_on_the_way(2)),
        "always damaged": (MAJORITY, damaged_on_the_way(10**6)),
        "averaged wrongly": (mean, averaged_wrongly(2)),
        "always averaged wrongly": (mean, averaged_wrongly(10**6)),
    }
    results = {
        "clean": trained(Case(), Path(directory), None),
        "drifted": trained(Case(), Path(directory), None, drifted),
    }
    for name, (chosen, fault) in runs.items():
        results[name] = trained(Case(), Path(directory, name), chosen, fault)
    return results


@pytest.mark.long
def test_nothing_is_called_repaired_that_is_not(tmp_path: Path) -> None:
    results = run_on_kept_ranks(repaired_with_trouble, RANKS, (str(tmp_path),), timeout=300)
    clean = results[0]["clean"]

    def events(name: str) -> list[dict[str, Any]]:
        found = read_events(tmp_path / name / "events.jsonl")
        return [e for e in found if e["kind"] == "repaired" or (e["kind"], e["severity"]) == ("replica-drift", "error")]

    assert len({result["tie"] for result in results}) == 2
    assert [e["kind"] for e in events("tie")][:2] == ["replica-drift", "replica-drift"]
    assert "no version of" in events("tie")[1]["message"]
    assert "repaired" not in [e["kind"] for e in events("tie")]

    assert {result["damaged"] for result in results} == {clean}
    assert [e["kind"] for e in events("damaged")] == ["replica-drift", "repaired"]
    assert len({result["averaged wrongly"] for result in results}) == 1
    assert [e["kind"] for e in events("averaged wrongly")] == ["replica-drift", "repaired"]
    for result in results:
        assert result["always damaged"] == result["drifted"]  # what arrives damaged is not written
    for name in ("always damaged", "always averaged wrongly"):
        assert len({result[name] for result in results}) == 2
        assert "repaired" not in [e["kind"] for e in events(name)]
        assert "could not be made equal" in events(name)[1]["message"]
        assert "tried 3 times" in events(name)[1]["message"]


# -- collectives -------------------------------------------------------------------------------------------------------


def respond_in_every_way(directory: str) -> list[Call]:
    seen = record_collectives()
    mean = block(respond={"on_replica_drift": "mean"}, integrity={"replica_interval": 1})
    dynamic = block(resync={"mode": "dynamic", "interval": 1}, integrity={"replica_interval": 0})
    faults = {"retry": corrupted(noise, (0, 1, 2)), "majority": drifted, "mean": drifted, "dynamic": drifted}
    for case in (Case(), Case(dtype="bf16")):
        for (name, fault), settings in zip(faults.items(), (RETRY, MAJORITY, mean, dynamic), strict=True):
            trained(case, Path(directory, f"{name}-{case.dtype}"), settings, fault)
    return seen


@pytest.mark.long
def test_repairs_use_what_every_backend_has(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(respond_in_every_way, 3, (str(tmp_path),))
    check_collectives(ranks, {"all_gather_into_tensor", "all_reduce", "broadcast", "all_gather"})
