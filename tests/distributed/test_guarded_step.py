"""Whatever breaks in the observer's own step on one rank: no rank waits, and the training ends as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.exchange import gather
from ds_silent.exchange import layout as packing
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.repairs import corrupted, noise
from tests.support.training import Case, build, engine_of, one_step
from tests.support.training import _hash_weights as hash_weights
from tests.support.walk import CELLS, Outcome, Place, Walked, walk

STEPS = 6


def run(directory: Path, broken: int | None, where: str, limit: int) -> dict[str, Any]:
    """Five steps; before the collective of step 3 one rank's own code raises."""
    engine = build(Case(), directory, enabled=broken is not None, gather_limit=limit)
    gathers = limit >= dist.get_world_size()
    observer = ds_silent.observer_of(engine)
    if observer is not None and where == "weights":
        observer.load_state_dict({"weights_checksum": "0" * 16})  # a resume: verified at the first step
    if observer is not None and dist.get_rank() == broken:
        owner, name = {
            "pack": (packing if gathers else gather, "pack_scalars"),
            "weights": (observer._replicas._replicas, "weights"),
            "read": (gather, "unpack"),
        }[where]
        original, calls = getattr(owner, name), []
        at = 1 if where == "weights" else 3
        if where == "read" and limit == 0 and broken == 0:
            at = 5  # the writing rank reads what all know, and what it knows

        def breaks(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                setattr(owner, name, original)
                raise RuntimeError("injected")
            return original(*args, **kwargs)

        setattr(owner, name, breaks)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        one_step(engine, generator)
    observing = None if observer is None else observer.measures(1)
    steps = int(engine.global_steps)
    weights = hash_weights(engine)
    engine.destroy()
    return {"observing": observing, "steps": steps, "weights": weights}


PLACES = ("pack", "weights", "read")
LIMITS = (64, 1, 0)  # gathered, constant size, in blocks


def broken_before_the_collective(directory: str) -> list[list[dict[str, Any]]]:
    """For each place and limit: without an observer, and with each rank broken."""
    return [
        [run(Path(directory, f"{where} {limit}", str(broken)), broken, where, limit) for broken in (None, 0, 1)]
        for where in PLACES
        for limit in LIMITS
    ]


@pytest.mark.long
def test_what_breaks_before_the_collective_leaves_nobody_waiting(tmp_path: Path) -> None:
    ranks = run_distributed(broken_before_the_collective, 2, (str(tmp_path),), timeout=400)
    cases = [(where, limit) for where in PLACES for limit in LIMITS]
    for (where, limit), *results in zip(cases, *ranks, strict=True):
        for broken in range(2):
            folder = tmp_path / f"{where} {limit}" / str(broken)
            kinds = [event["kind"] for event in read_events(folder / "events.jsonl")]
            for plain, *observed in results:
                result = observed[broken]
                assert (result["steps"], result["weights"]) == (STEPS, plain["weights"]), folder
                # only the writing rank compares the weights with a checkpoint's
                assert result["observing"] is (where == "weights" and broken == 1), folder
            if where != "weights" or broken == 0:
                assert kinds.count("observer-off") == 1, folder
            assert read_metrics(folder / "metrics.jsonl") or where == "weights", folder


# -- every statement ------------------------------------------------------------------------------------------------


def verify(
    cell: str, directory: Path, share: float, steps: int, timeout: float, walked: Walked | None = None
) -> Walked:
    """All ranks observe or none does, the training is what it would have been, and one event says what happened."""
    late = 2 * CELLS[cell].block.get("interval", 1)  # sent in the next measured step, read in the one after
    ranks: list[list[Outcome]] = run_distributed(
        walk, 2, (CELLS[cell], str(directory), share, steps, walked), timeout=timeout
    )
    assert ranks[0]
    for outcomes in zip(*ranks, strict=True):
        place, struck = outcomes[0].place, outcomes[outcomes[0].rank]
        told = (place, outcomes)
        assert struck.fired is not None, told
        assert all(outcome.alike and outcome.steps == steps for outcome in outcomes), told
        assert len({outcome.observing for outcome in outcomes}) == 1, told
        if struck.failed and struck.fired <= steps - late:
            assert not struck.observing, told
        heard = struck.failed and struck.fired <= steps  # what breaks behind the last step is never sent
        assert outcomes[0].off == (1 if heard else 0), told
        assert not any(outcome.failed for outcome in outcomes if outcome is not struck), told
    return frozenset((outcome.rank, outcome.place) for outcome in ranks[0])


@pytest.mark.parametrize(
    ("name", "share"), [("retry", 0.01), *(pytest.param(one, 0.02, marks=pytest.mark.long) for one in CELLS)]
)
def test_a_statement_that_breaks_on_one_rank_leaves_nobody_waiting(name: str, share: float, tmp_path: Path) -> None:
    steps = 2 + 2 * CELLS[name].block.get("interval", 1)
    verify(name, tmp_path, share=share, steps=steps, timeout=280)


WALKED: set[tuple[int, Place]] = set()


@pytest.mark.matrix
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CELLS)
def test_every_statement_may_break(name: str, tmp_path: Path) -> None:
    """Each cell is walked through where no cell before it was, and through a twentieth of the rest."""
    steps = 2 + 2 * CELLS[name].block.get("interval", 1)
    WALKED.update(verify(name, tmp_path, share=0.05, steps=steps, timeout=7100, walked=frozenset(WALKED)))


# -- what cannot be played again --------------------------------------------------------------------------------------


def broken_for_good(directory: str, what: str) -> None:
    """Rank 1 breaks in a response, or whenever it does its part; the others wait for it until its process ends."""
    case, rank = Case(), dist.get_rank()
    config = case.config(Path(directory, "on"), enabled=True)
    config["silent_consistency"]["respond"] = {"on_aggregation_error": "retry"}
    engine = engine_of(config)
    observer = ds_silent.observer_of(engine)
    assert observer is not None

    def breaks(*_: Any) -> Any:
        raise RuntimeError("injected")

    patches = Patches()
    corrupted(noise, (0, 1, 2))(engine, patches)
    if rank == 1:
        owner, name = (
            (observer._capture.framework, "reduce_again") if what == "response" else (observer._steps, "measures")
        )
        setattr(owner, name, breaks)
    generator = torch.Generator().manual_seed(rank)
    try:
        for _ in range(STEPS):
            one_step(engine, generator)
    except Exception as error:
        Path(directory, f"error_{rank}").write_text(str(error))
        raise
    finally:
        patches.undo()


@pytest.mark.parametrize("what", ["response", "always"])
def test_what_breaks_for_good_ends_all_ranks_with_a_sentence(what: str, tmp_path: Path) -> None:
    run_distributed(broken_for_good, 3, (str(tmp_path), what), timeout=100, may_die=(0, 1, 2))
    said = (tmp_path / "error_1").read_text()
    subject = "the response at step 3 broke off" if what == "response" else "what all ranks do together broke off"
    assert f"{subject} on rank 1 (injected)" in said
    assert all((tmp_path / f"error_{rank}").exists() for rank in (0, 2))
