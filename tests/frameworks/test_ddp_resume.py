"""An observer of DistributedDataParallel over the end of a process, and inside ``join()``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.ddp_training import DDPCase, build
from tests.support.distributed import run_on_kept_ranks


def steps_of(directory: str, count: int, state: dict[str, Any] | None = None, first: int = 0) -> dict[str, Any]:
    """``count`` steps, from ``first`` on; the observer's state behind them, and this rank's records."""
    model, optimizer = build(DDPCase())
    observer = ds_silent.attach(model, {"output_dir": directory, "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    if state is not None:
        observer.load_state_dict(state)
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = observer.state_dict()
    observer.close()
    return kept


def interrupted(directory: str) -> list[dict[str, Any]]:
    steps_of(directory, 3, steps_of(directory, 4), first=4)
    return list(read_metrics(Path(directory, "metrics.jsonl"))) if dist.get_rank() == 0 else []


def test_records_go_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    records = run_on_kept_ranks(interrupted, 2, (str(tmp_path),))[0]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["samples"] for record in records] == [2 * ROWS * step for step in range(1, 8)]


def records_of(directory: str, state: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    kept = steps_of(directory, 3, state, first=4)
    return list(read_metrics(Path(directory, "metrics.jsonl"))) if dist.get_rank() == 0 else [], kept["counted"]


def test_rows_of_all_ranks_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    of_two = run_on_kept_ranks(steps_of, 2, (str(tmp_path), 4))[0]
    (records, of_three), *_ = run_on_kept_ranks(records_of, 3, (str(tmp_path), of_two))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    expected = [2 * ROWS * step for step in range(1, 5)] + [2 * ROWS * 4 + 3 * ROWS * step for step in range(1, 4)]
    assert [record["samples"] for record in records] == expected
    [(back, _), *_] = run_on_kept_ranks(records_of, 2, (str(tmp_path / "back"), {"counted": of_three}))
    assert [record["samples"] for record in back] == [expected[-1] + 2 * ROWS * step for step in range(1, 4)]


def uneven(directory: str) -> tuple[int, list[dict[str, Any]]]:
    """Rank 1 has three batches more than rank 0."""
    model, optimizer = build(DDPCase())
    observer = ds_silent.attach(model, {"output_dir": directory, "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    taken = 0
    with model.join():
        for _ in range(4 + 3 * dist.get_rank()):
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
            model(tokens, False).backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
    observer.close()
    events = read_events(Path(directory, "events.jsonl")) if dist.get_rank() == 0 else []
    return taken, list(events)


def test_join_ends_the_observation_and_not_the_training(tmp_path: Path) -> None:
    (first, events), (second, _) = run_on_kept_ranks(uneven, 2, (str(tmp_path),))
    assert (first, second) == (4, 7)
    [event] = [event for event in events if event["kind"] == "observer-off"]
    assert "join()" in event["message"]
    assert event["step"] == 1
