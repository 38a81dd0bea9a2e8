"""Runs for the tests of ``ds-silent watch``, written through the real sinks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_silent.records import Event, Place, Seconds, StepRecord, to_json
from ds_silent.sinks import open_files
from tests.support.made_records import NOTHING, Run


def made(ranks: int, steps: int, bad_from: int | None = None, seed: int = 0) -> tuple[list[StepRecord], list[Event]]:
    """Records, and what the real detectors say of them; from one step on rank 2's gradient is three times too long."""
    run, records, events = Run(ranks, seed), [], []
    for step in range(1, steps + 1):
        record = run.record(scale=3.0 if bad_from is not None and step >= bad_from else 1.0)
        records.append(replace(record, seconds=Seconds(0.1, 0.004)))
        events += run.judge.step(record, NOTHING)
    return records, events


def write(directory: Path, records: Sequence[StepRecord], events: Sequence[Event] = ()) -> None:
    """Append them, as a training does."""
    files = open_files(directory, tensorboard=False)
    for record in records:
        files.write(record)
    for event in events:
        files.write_event(event)
    files.close()


def write_places(directory: Path, ranks: int, per_host: int = 2) -> None:
    """``ranks.json``."""
    places = [
        Place(rank, rank, f"node{rank // per_host:04d}", rank % per_host, f"cuda:{rank % per_host}", None)
        for rank in range(ranks)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ranks.json").write_text(json.dumps({"version": 1, "ranks": to_json(places)}))
