"""The JSON form of the records is the format that was promised."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from ds_silent.records import (
    CosineMatrix,
    DirectionStats,
    Event,
    GradNormStats,
    IntegrityStats,
    LayerStats,
    LossStats,
    Score,
    Scores,
    Seconds,
    StepRecord,
    from_json,
    to_json,
)
from tests.sinks.example_records import empty_record, event, full_record

NAN = float("nan")

FORMAT = {
    "step": None,
    "samples": None,
    "epoch": None,
    "world_size": None,
    "loss": ["mean", "std", "range", "per_rank"],
    "grad_norm": ["method", "mean", "std", "cv", "range", "aggregated", "per_rank"],
    "direction": [
        "method",
        "mean_cosine",
        "standard_error",
        "min_cosine",
        "max_cosine",
        "min_pair",
        "max_pair",
        "per_rank",
    ],
    "noise_scale": None,
    "coverage": ["duplicates", "seen", "repeated"],
    "integrity": ["relative_error", "rounding_bound", "replica_groups"],
    "objective": [
        "weight_sum",
        "weight_min",
        "weight_max",
        "labels",
        "known",
        "mean_of_means_angle",
        "mean_of_means_angle_error",
    ],
    "seconds": ["step", "observe"],
}


def test_exactly_the_promised_keys_in_their_order() -> None:
    full = StepRecord(
        step=1,
        samples=8,
        epoch=None,
        world_size=2,
        cosine_matrix=((1.0, 0.5), (0.5, 1.0)),
        layers=(LayerStats("layer", 1.0, 0.1, 0.5, 0.0),),
        exact_check=0.1,
    )
    written = to_json(full)
    assert list(written) == list(FORMAT)
    for key, inner in FORMAT.items():
        if inner is not None:
            assert list(written[key]) == inner


def test_not_measured_is_null_and_never_zero() -> None:
    written = to_json(StepRecord(step=1, samples=8, epoch=None, world_size=2))
    for key, inner in FORMAT.items():
        if inner is not None:
            assert set(written[key].values()) == {None}
    assert written["noise_scale"] is None
    assert "null" in json.dumps(written)


@pytest.mark.parametrize(("value", "text"), [(NAN, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_numbers_are_text_and_come_back(value: float, text: str) -> None:
    record = StepRecord(
        step=1,
        samples=8,
        epoch=value,
        world_size=2,
        loss=LossStats(mean=value, per_rank=(1.0, value)),
        grad_norm=GradNormStats(cv=value),
        noise_scale=value,
    )
    read = json.loads(json.dumps(to_json(record), allow_nan=False))
    assert read["epoch"] == read["loss"]["mean"] == read["grad_norm"]["cv"] == read["noise_scale"] == text
    assert read["loss"]["per_rank"] == [1.0, text]
    back = from_json(Seconds, {"step": text}).step
    assert back is not None
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_finite_numbers_survive_bit_for_bit() -> None:
    for value in (0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3):
        back = from_json(Seconds, json.loads(json.dumps(to_json(Seconds(value))))).step
        assert back is not None
        assert back.hex() == value.hex()
    assert from_json(Seconds, {"step": None}).step is None


def test_tuples_become_lists() -> None:
    record = StepRecord(
        step=1,
        samples=8,
        epoch=0.5,
        world_size=4,
        direction=DirectionStats(min_pair=(0, 3), per_rank=(0.1, 0.2)),
        integrity=IntegrityStats(replica_groups=((0, 1, 2), (3,))),
    )
    written = to_json(record)
    assert written["direction"]["min_pair"] == [0, 3]
    assert written["integrity"]["replica_groups"] == [[0, 1, 2], [3]]


def test_event_format() -> None:
    event = Event(12, "outlier-rank", "warning", (3,), "layers.0", NAN, 6.0, "what", "do")
    assert to_json(event) == {
        "step": 12,
        "kind": "outlier-rank",
        "severity": "warning",
        "ranks": [3],
        "where": "layers.0",
        "score": "nan",
        "threshold": 6.0,
        "message": "what",
        "remedy": "do",
    }


def test_records_are_frozen() -> None:
    record = StepRecord(step=1, samples=8, epoch=None, world_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.step = 2  # type: ignore[misc]


# -- and back ----------------------------------------------------------------------------------------------------------


def read_back(record: object) -> object:
    return from_json(type(record), json.loads(json.dumps(to_json(record), allow_nan=False)))


def unwritten(record: StepRecord) -> StepRecord:
    """As a line holds it."""
    return dataclasses.replace(record, cosine_matrix=None, layers=(), exact_check=None)


@pytest.mark.parametrize("record", [full_record(), full_record(7, ranks=2), empty_record()])
def test_a_record_reads_back_as_it_was(record: StepRecord) -> None:
    assert StepRecord.from_json(to_json(record)) == read_back(record) == unwritten(record)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1 / 3, 1.7976931348623157e308, None])
def test_each_number_reads_back_bit_for_bit_and_null_stays_null(value: float | None) -> None:
    record = StepRecord(
        step=1,
        samples=8,
        epoch=value,
        world_size=2,
        loss=LossStats(mean=value, per_rank=(1.0, value)) if value is not None else LossStats(),
        integrity=IntegrityStats(relative_error=value),
    )
    back = read_back(record)
    assert repr(back) == repr(record)  # as ==, but a NaN is a NaN and -0.0 is not 0.0
    assert value is None or type(back.epoch) is float


@pytest.mark.parametrize(
    "record",
    [
        event(),
        event(ranks=()),
        Event(0, "nan", "info", (), None, None, -math.inf, "inf", "", 1e-290),
        Event(3, "outlier-rank", "warning", (1,), "nan", 16.0, 15.0, "nan", "-inf"),
        CosineMatrix(5, "exact", ((1.0, -0.25), (-0.25, 1.0))),
        Scores(5, (Score("outlier", -math.inf, 17.5, 2), Score("order", 3.25, 16.0))),
        Scores(5, ()),
    ],
)
def test_the_other_records_read_back_as_they_were(record: object) -> None:
    assert read_back(record) == record  # text that looks like a number stays text


def test_what_a_newer_or_an_older_version_has_written() -> None:
    written = to_json(full_record())
    newer = {**written, "more": 1, "loss": {**written["loss"], "median": 2.0}, "cosine_matrix": "elsewhere"}
    assert StepRecord.from_json(newer) == unwritten(full_record())
    older = {key: value for key, value in written.items() if key not in ("epoch", "coverage", "noise_scale")}
    back = StepRecord.from_json(older)
    assert (back.epoch, back.noise_scale) == (None, None)
    assert set(dataclasses.asdict(back.coverage).values()) == {None}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": None},
        {"step": 1.5},
        {"step": True},
        {"step": "1"},
        {"samples": None},
        {"epoch": "much"},
        {"epoch": True},
        {"epoch": []},
        {"loss": 2.0},
        {"loss": None},
        {"loss": {"per_rank": [1.0, None]}},
        {"loss": {"per_rank": 1.0}},
        {"direction": {"min_pair": [1, 2, 3]}},
        {"direction": {"method": 3}},
    ],
)
def test_what_is_no_record_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"is no|is an object|zip"):
        StepRecord.from_json({**to_json(full_record()), **changes})
    with pytest.raises(ValueError, match="is an object"):
        StepRecord.from_json([])


def test_a_record_of_a_newer_version_is_refused() -> None:
    written = to_json(full_record())
    assert StepRecord.from_json({**written, "version": 1}) == unwritten(full_record())
    with pytest.raises(ValueError, match="a StepRecord of version 2 is newer than this ds_silent reads"):
        StepRecord.from_json({**written, "version": 2})
