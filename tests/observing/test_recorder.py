"""The training thread judges and tells; a thread of the sinks writes. Neither decides by how fast the other is."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.places import Places
from ds_silent.observing.recorder import Recorder
from ds_silent.records import Event, Place
from ds_silent.sinks import Background, FanOut
from ds_silent.sinks.jsonl import JsonlSink, read_event_records
from tests.sinks.example_records import event, full_record
from tests.sinks.recording import Recorder as RecordingSink

NOTHING: Any = SimpleNamespace()  # what measuring needs


def recorder_of(directory: Path) -> tuple[Recorder, FanOut]:
    sinks = FanOut([Background([JsonlSink(directory), RecordingSink(lambda call: time.sleep(0.01))])])
    return recorder_into(sinks, (0, 1), stop_on="error"), sinks


def recorder_into(sinks: FanOut, members: tuple[int, ...], stop_on: str = "never") -> Recorder:
    config = SilentConsistencyConfig.model_validate({"detectors": {"enabled": False, "stop_on": stop_on}})
    return Recorder(sinks, config, NOTHING, NOTHING, members)


def test_a_callback_finds_the_error_on_disk_and_the_decision_taken(tmp_path: Path) -> None:
    recorder, _ = recorder_of(tmp_path)
    seen: list[tuple[int, list[int], Event | None]] = []

    def listener(one: Event) -> None:
        on_disk = [event.step for event in read_event_records(tmp_path / "events.jsonl")]
        seen.append((one.step, on_disk, recorder.ends))

    recorder.on_event(listener)
    errors = [event(step) for step in range(1, 20)]
    for error in errors:
        recorder.report(error)
    assert seen == [(step, list(range(1, step + 1)), errors[step - 1]) for step in range(1, 20)]
    recorder.close()


def test_a_checkpoint_waits_until_everything_is_written(tmp_path: Path) -> None:
    recorder, sinks = recorder_of(tmp_path)
    for step in range(1, 30):
        sinks.write(full_record(step, layers=()))
    recorder.report(replace(event(29), severity="info"))
    assert recorder.state_dict(rows_waiting=False)["judge"] is None
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 29
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 1
    recorder.close()


def test_a_group_that_is_a_part_says_which_ranks_of_the_whole_it_names(tmp_path: Path) -> None:
    sinks = FanOut([JsonlSink(tmp_path)])
    recorder = recorder_into(sinks, (1, 3, 5))
    for ranks in ((1,), (0, 2), ()):
        recorder.report(replace(event(4), ranks=ranks, message="Odd."))
    recorder.close()
    told = list(read_event_records(tmp_path / "events.jsonl"))
    assert [(one.ranks, one.global_ranks) for one in told] == [((1,), (3,)), ((0, 2), (1, 5)), ((), None)]
    assert told[0].message == "Odd. Rank 1 of this data-parallel group is rank 3 of the whole training."
    assert told[1].message == "Odd. Ranks 0, 2 of this data-parallel group are ranks 1, 5 of the whole training."
    assert told[2].message == "Odd."


def test_a_group_that_is_the_whole_training_says_nothing_of_it(tmp_path: Path) -> None:
    recorder, _ = recorder_of(tmp_path)
    recorder.report(replace(event(4), ranks=(1,)))
    recorder.close()
    assert b"global_ranks" not in (tmp_path / "events.jsonl").read_bytes()


def test_events_pass_the_places_on_their_way(tmp_path: Path) -> None:
    sinks = FanOut([JsonlSink(tmp_path)])
    recorder = recorder_into(sinks, (0, 2, 4, 6))
    places = tuple(Place(rank, 2 * rank, f"node{rank // 2}", rank % 2, "cpu", None) for rank in range(4))
    recorder.places = Places(places, {})
    recorder.report(replace(event(4), ranks=(3,), message="The gradient of rank 3 is zero."))
    recorder.close()
    (told,) = read_event_records(tmp_path / "events.jsonl")
    assert told.places == (places[3],)
    assert told.global_ranks == (6,)
    assert told.message == (
        "The gradient of rank 3 (node1:1) is zero. Rank 3 of this data-parallel group is rank 6 of the whole training."
    )
