"""How far each rank stands from the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_silent.records import StepRecord, to_json
from ds_silent.runs.lines import StepLine, read_step
from ds_silent.runs.watched import MOST, Departures
from ds_silent.sinks.files import written_record
from tests.support.made_records import Run, make


def step(line: dict[str, Any]) -> StepLine:
    found = read_step({"step": 1} | line)
    assert found is not None
    return found


def departures_of(records: list[StepRecord]) -> Departures:
    departures = Departures()
    for record in records:
        departures.step(step(to_json(written_record(record))))
    return departures


def times(departures: Departures, rank: int) -> float:
    found = departures.of(rank)
    assert found is not None
    return found.times


@pytest.mark.parametrize("ranks", [4, 16, 64])
@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_healthy_ranks_are_alike_whatever_the_noise(ranks: int, spread: float) -> None:
    run = Run(ranks)
    departures = departures_of([run.record(spread=spread) for _ in range(200)])
    assert departures.ranks() == set(range(ranks))
    assert all(0.7 < times(departures, rank) < 2.5 for rank in range(ranks))


@pytest.mark.parametrize("ranks", [4, 64, 1024])
@pytest.mark.parametrize(
    ("fault", "metric"), [({"scale": 3.0}, "norm"), ({"loss": 2.0}, "loss"), ({"cosine": -0.4}, "cosine")]
)
def test_the_rank_that_is_off_stands_out_in_its_metric(ranks: int, fault: dict[str, float], metric: str) -> None:
    run = Run(ranks, seed=1)
    departures = departures_of([run.record(bad=3, **fault) for _ in range(60)])
    found = departures.of(3)
    assert found is not None
    assert found.metric == metric
    assert found.times > 2 * max(times(departures, rank) for rank in departures.ranks() - {3})


def test_the_scale_is_the_ranks_own_distance() -> None:
    """Oracle: median 2.5, distances 1.5, 0.5, 0.5, 1.5 with the median 1."""
    departures = departures_of([make(1, [1.0, 2.0, 3.0, 4.0], [1.0] * 4, [0.1] * 4)])
    assert [times(departures, rank) for rank in range(4)] == pytest.approx([1.5, 0.5, 0.5, 1.5])


def test_two_ranks_are_equally_far() -> None:
    departures = departures_of([make(number, [2.0, 2.0 + number], [1.0, 1.0], [0.1, 0.1]) for number in range(1, 40)])
    assert times(departures, 0) == times(departures, 1)


def test_a_rank_without_a_number_stands_furthest() -> None:
    departures = departures_of([make(1, [2.0, np.nan, 2.1, 1.9], [1.0] * 4, [0.1] * 4)])
    assert times(departures, 1) == MOST
    assert times(departures, 0) < 2


def test_ranks_that_differ_by_rounding_only_do_not_differ() -> None:
    departures = departures_of([make(1, [2.0, 2.0, 2.0, 2.0 + 1e-9], [1.0] * 4, [0.1] * 4)])
    assert times(departures, 3) < 0.01


def test_a_fault_that_has_ended_fades() -> None:
    run = Run(4)
    records = [run.record(scale=3.0) for _ in range(50)]
    assert times(departures_of(records), 2) > 5
    records += [run.record() for _ in range(300)]
    assert times(departures_of(records), 2) < 2.5


def test_above_64_ranks_only_those_that_stand_out_are_kept() -> None:
    run = Run(1024)
    departures = departures_of([run.record(bad=700, scale=3.0) for _ in range(200)])
    assert 700 in departures.ranks()
    assert len(departures.ranks()) < 200


@pytest.mark.parametrize(
    "value", [None, 3, "x", [], ["x", None], {"a": 1}, {"-1": 2.0, "1e9": 3.0, "١": 4.0, "7": "nan"}]
)
def test_foreign_values_are_left_out(value: object) -> None:
    for key in ("per_rank", "extremes"):
        line = step({"loss": {key: value}})
        assert set(line.ranks["loss"].by_rank()) <= {0, 1, 7}
        Departures().step(line)
    Departures().step(step({"loss": value}))


def test_huge_numbers() -> None:
    departures = Departures()
    for _ in range(3):
        departures.step(step({"loss": {"per_rank": [1e308, -1e308, 1e308, 10**400]}}))
    assert all(0.0 <= times(departures, rank) <= MOST for rank in departures.ranks())
