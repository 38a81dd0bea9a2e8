"""What each rank says of itself, above four gather limits: the writing rank gets it all, the others what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.communicator import own_group
from ds_silent.distributed.guard import CollectiveGuard, unguarded
from ds_silent.exchange.gather import ConstantSizeExchange
from ds_silent.exchange.layout import ExchangeShape, layout_of
from ds_silent.exchange.observation import BROKE, LEFT, Local, Loss, Observation, Status, Wishes
from ds_silent.exchange.rows import digit_of, failures_in
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.training import Case, build, one_step

RANKS = 5  # blocks of two: (0, 1), (2, 3), (4)


def exchanged(directory: str) -> list[dict[str, Any]]:
    """Three steps: in the second one rank has a wish and another is at another step, in the third two have failed."""
    rank, group = dist.get_rank(), own_group(dist.group.WORLD)
    config = SilentConsistencyConfig.model_validate({"output_dir": directory, "coverage": False})
    layout = layout_of(config, ExchangeShape(RANKS, 3, 0, 1, False, gather_limit=0))
    exchange = ConstantSizeExchange(layout, group, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    guard, seen = CollectiveGuard(group), []
    for step in (1, 2, 3, 4):
        failed = {1: BROKE, 3: LEFT}.get(rank, 0.0) if step == 3 else 0.0
        observation = Observation(
            Status(step=float(step + (step == 2 and rank == 3)), failed=failed),
            Wishes(compare=float(step == 2 and rank == 2)),
            Loss(total=1.5 * rank, count=1.0),
            Local(seen=1.0),
            sketch=torch.randn(layout.size, generator=generator),
            hashes=torch.full((layout.hashes,), 1 << 40, dtype=torch.int64) + (step == 2) * rank,
        )
        exchange.post(step, observation, guard)
        got = exchange.peek()
        exchange.collect(unguarded)
        known, whole = got.known, None if got.make is None else got.all
        seen.append(
            {
                "failed": known.status.failed.tolist(),
                "losses": None if whole is None else whole.loss.total.tolist(),
                "steps": sorted(set(known.status.step.tolist())),
                "compare": known.wishes.compare.tolist(),
                "hashes": len(set(known.hashes[:, 0].tolist())),
            }
        )
        if step == 3:
            return seen
    return seen


def test_all_ranks_decide_by_the_same_and_the_writing_rank_knows_the_rest(tmp_path: Path) -> None:
    ranks = run_distributed(exchanged, RANKS, (str(tmp_path),), timeout=60)
    for rank, steps in enumerate(ranks):
        for step, seen in enumerate(steps, start=1):
            writes = rank == 0 and step < 3  # of a step in which some failed, rows may never come
            assert seen["losses"] == ([0.0, 1.5, 3.0, 4.5, 6.0] if writes else None)
            assert seen["failed"] == ([0.0, BROKE, 0.0, LEFT, 0.0] if step == 3 else [0.0] * RANKS)
            if step == 3 and rank == 3:  # it has left, and reads nothing
                continue
            assert seen["steps"] == ([2.0, 3.0] if step == 2 else [float(step)])
            assert (max(seen["compare"]) > 0) is (step == 2)
            assert seen["hashes"] == (2 if step == 2 else 1)


def test_the_digits_of_a_sum_say_who_failed() -> None:
    generator = torch.Generator().manual_seed(0)
    failed = torch.randint(0, 6, (71,), generator=generator)
    sums = torch.zeros(9)
    for rank in torch.randperm(71, generator=generator).tolist():  # in any order, all in fp32
        place, digit = digit_of(float(failed[rank]), rank)
        sums[place] += digit
    assert failures_in(sums.double(), 71).tolist() == failed.tolist()
    full = torch.zeros(1)
    for rank in range(8):
        full[0] += digit_of(5.0, rank)[1]
    assert failures_in(full.double(), 8).tolist() == [5.0] * 8


# -- in trainings ------------------------------------------------------------------------------------------------------


def trained(directory: str) -> None:
    for limit in (1, 0):
        engine = build(Case(), Path(directory) / str(limit), gather_limit=limit)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(1, 8):
            if step == 3 and dist.get_rank() == 4:
                with torch.no_grad():
                    engine.module.frozen.weight[0, 0] += 1.0
            one_step(engine, generator)
        ds_silent.observer_of(engine).close()
        engine.destroy()


def disturbed(directory: str) -> list[tuple[bool, int]]:
    """A block's first rank closes its observer after three steps; in the next training one counts another step.

    In this order: who leaves passes nothing on any more, and nothing of that meets what the next training sends.
    """
    results = []
    for name in ("left", "astray"):
        engine = build(Case(), Path(directory) / name, gather_limit=0)
        observer, generator = ds_silent.observer_of(engine), torch.Generator().manual_seed(dist.get_rank())
        for step in range(1, 7):
            if (name, step, dist.get_rank()) == ("astray", 3, 3):
                engine.global_steps += 5
            one_step(engine, generator)
            if (name, step, dist.get_rank()) == ("left", 3, 2):
                observer.close()
        results.append((observer.measures(1), int(engine.global_steps)))
        observer.close()
        engine.destroy()
    return results


def all_trained(directory: str) -> list[tuple[bool, int]]:
    trained(directory)
    return disturbed(directory)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("rows")
    return folder, run_distributed(all_trained, RANKS, (str(folder),), timeout=240)


def test_records_are_those_of_ranks_that_all_know_everything(results: tuple[Path, list[Any]]) -> None:
    everybody, blocks = (read_metrics(results[0] / limit / "metrics.jsonl") for limit in ("1", "0"))
    for record in (*everybody, *blocks):
        del record["seconds"]
    assert [record["step"] for record in blocks] == [1, 2, 3, 4, 5, 6, 7]
    assert blocks == everybody


def test_a_replica_that_drifts_is_named(results: tuple[Path, list[Any]]) -> None:
    one, other = (list(read_events(results[0] / limit / "events.jsonl")) for limit in ("1", "0"))
    assert other == one
    assert [(e["kind"], e["where"], e["ranks"]) for e in other] == [("replica-drift", "frozen.weight", [4])]


def test_a_rank_that_leaves_is_named_and_waited_for_by_nobody(results: tuple[Path, list[Any]]) -> None:
    folder, ranks = results
    assert [left for left, _ in ranks] == [(False, 6)] * RANKS
    [event] = [e for e in read_events(folder / "left" / "events.jsonl") if e["kind"] == "observer-off"]
    assert event["ranks"] == [2]


def test_a_rank_at_another_step_is_named(results: tuple[Path, list[Any]]) -> None:
    folder, ranks = results
    assert [observing for _, (observing, _) in ranks] == [True] * RANKS
    events = list(read_events(folder / "astray" / "events.jsonl"))
    [event] = [e for e in events if e["severity"] != "info"]
    assert (event["kind"], event["where"], event["ranks"]) == ("config-mismatch", "optimizer step", [3])
    assert [record["step"] for record in read_metrics(folder / "astray" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
