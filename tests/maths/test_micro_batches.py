"""Micro-batches that do not reach the aggregate are named, some steps after the error; no weight notices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_silent
from ds_silent.exchange.collectives import gather_on_host
from ds_silent.maths.causes import explain_micro_batches
from ds_silent.patches import RegisteredHook
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, _hash_weights, build

RANKS, COUNT, LAYERS, SIZE = 2, 4, 3, 256
TOLERANCE = 1e-6


def sketches() -> Tensor:
    return torch.randn(RANKS, COUNT, LAYERS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def weighted(own: Tensor, weights: list[list[float]]) -> Tensor:
    """The aggregate by its definition, written with loops."""
    total = torch.zeros(LAYERS, SIZE, dtype=torch.float64)
    for rank, row in enumerate(weights):
        for micro_batch, weight in enumerate(row):
            total += weight * own[rank, micro_batch] / len(weights)
    return total


def test_the_weights_of_micro_batches_are_found() -> None:
    own = sketches()
    weights = [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 2.0, 0.0]]
    found = explain_micro_batches(7, own, weighted(own, weights), TOLERANCE)
    assert found is not None
    assert (found.step, found.layers) == (7, (0, 1, 2))
    torch.testing.assert_close(torch.tensor(found.weights), torch.tensor(weights), atol=1e-6, rtol=0.0)
    assert {micro: sorted(ranks) for micro, ranks in found.off.items()} == {0: [0], 1: [0], 2: [0, 1], 3: [1]}


def test_the_layers_in_which_it_happened_are_found() -> None:
    own = sketches()
    aggregate = weighted(own, [[1.0] * 4, [1.0] * 4])
    aggregate[1] = weighted(own, [[1.0, 1.0, 1.0, 0.0]] * 2)[1]
    found = explain_micro_batches(3, own, aggregate, TOLERANCE)
    assert found is not None
    assert found.layers == (1,)
    assert found.off.keys() == {3}


@pytest.mark.parametrize("what", ["right", "noise", "a rank's rule", "alike", "broken", "too many"])
def test_nothing_is_claimed_that_micro_batches_do_not_explain(what: str) -> None:
    own = sketches()
    aggregate = weighted(own, [[1.0] * 4, [1.0] * 4])
    if what == "noise":
        aggregate += torch.randn(LAYERS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    elif what == "a rank's rule":
        aggregate = weighted(own, [[1.0] * 4, [0.0] * 4])
    elif what == "alike":
        own[:, 1] = own[:, 0]
        aggregate = weighted(own, [[0.0, 1.0, 1.0, 1.0]] * 2)
    elif what == "broken":
        aggregate = weighted(own, [[0.0, 1.0, 1.0, 1.0]] * 2)
        own[1] = 0.0  # what a rank sends whose observer broke
    elif what == "too many":
        own, aggregate = own[..., :4], aggregate[..., :4] * 0.5
    assert explain_micro_batches(1, own, aggregate, TOLERANCE) is None


# -- in real trainings ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drop:
    """Micro-batches (from 0) that never reach the reduction, although they were captured, from ``step`` on."""

    ranks: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    step: int = 2
    until: int = 99


def dropping(case: Case, drop: Drop, directory: str, steps: int, enabled: bool) -> dict[str, Any]:
    engine, rank = build(case, Path(directory), enabled), dist.get_rank()
    now = {"step": 0, "micro": 0}

    def behind_the_observer(gradient: Tensor) -> Tensor | None:
        due = rank in drop.ranks and drop.step <= now["step"] < drop.until and now["micro"] in drop.micro_batches
        return torch.zeros_like(gradient) if due else None

    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(RegisteredHook(behind_the_observer))  # a script's own would be a note
    gathered = 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal gathered
        gathered += 1
        return gather_on_host(*arguments)

    from ds_silent.observing import step_loop as observing

    observing.gather_on_host = counted
    generator = torch.Generator().manual_seed(99 + rank)
    for step in range(1, steps + 1):
        for micro in range(case.accumulation):
            now.update(step=step, micro=micro)
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
            engine.backward(engine(tokens, False))
            engine.step()
    observing.gather_on_host = gather_on_host
    observer = ds_silent.observer_of(engine)
    if observer is not None:
        observer.close()
    weights = _hash_weights(engine)
    engine.destroy()
    path = Path(directory, "events.jsonl")
    events = read_events(path) if rank == 0 and path.exists() else []
    return {"weights": weights, "events": events, "gathered": gathered}


def all_of(cells: dict[str, tuple[Case, Drop]], directory: str, steps: int) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [dropping(case, drop, f"{directory}/{name}", steps, enabled) for enabled in (True, False)]
        for name, (case, drop) in cells.items()
    }


@pytest.mark.long
def test_dropped_micro_batches_are_named_and_weights_are_bit_identical(tmp_path: Path) -> None:
    everyone = (0, 1)
    cells = {
        "healthy": (Case(stage=2, accumulation=4), Drop()),
        "second": (Case(stage=2, accumulation=4), Drop(everyone, (1,))),
        "first three": (Case(stage=3, accumulation=4), Drop(everyone, (0, 1, 2))),
        "last of rank 1": (Case(stage=0, accumulation=4), Drop((1,), (3,))),
        "bf16": (Case(stage=2, dtype="bf16", accumulation=2, interval=2), Drop(everyone, (0,))),
        "round robin": (Case(stage=2, accumulation=4, zero={"round_robin_gradients": True}), Drop(everyone, (1,))),
        "over": (Case(stage=2, accumulation=4), Drop(everyone, (1,), until=3)),
    }
    zero, one = run_distributed(all_of, 2, (cells, str(tmp_path), 10), timeout=280.0)
    told = {}
    for name, (observed, plain) in zero.items():
        assert observed["weights"] == plain["weights"], name
        assert one[name][0]["weights"] == one[name][1]["weights"], name
        assert observed["gathered"] == one[name][0]["gathered"], name
        assert plain["gathered"] == 0, name
        told[name] = [e for e in observed["events"] if "micro-batches of step" in e["message"]]
    assert zero["healthy"][0]["gathered"] == 0
    assert not told["healthy"]
    assert not told["over"]  # it had ended before the micro-batches were looked at
    assert all(len(told[name]) == 1 for name in cells if name not in ("healthy", "over")), told
    for name, step, text, ranks in (
        ("second", 6, "Of the 4 micro-batches of step 6", ()),
        ("second", 6, "all 5 layers: number 2 of both ranks did not enter.", ()),
        ("round robin", 6, "all 5 layers: number 2 of both ranks did not enter.", ()),
        ("first three", 6, "all 5 layers: numbers 1 to 3 of both ranks did not enter.", ()),
        ("last of rank 1", 6, "all 5 layers: number 4 of rank 1 did not enter.", (1,)),
        ("bf16", 6, "Of the 2 micro-batches of step 6", ()),
        ("bf16", 6, "number 1 of both ranks did not enter.", ()),
    ):
        (event,) = told[name]
        assert text in event["message"], event["message"]
        assert (event["step"], tuple(event["ranks"])) == (step, ranks), name
        assert event["severity"] == "error"
    for name in ("second", "round robin"):
        first = next(e for e in zero[name][0]["events"] if e["kind"] == "aggregation-error")
        assert first["step"] == 2, name
    assert all(0 < zero[name][0]["gathered"] <= 3 for name in told if name != "healthy")
