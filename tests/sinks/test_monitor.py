"""DeepSpeed's monitor gets the same curves as TensorBoard, without what it cannot draw."""

from __future__ import annotations

from ds_silent.records import GradNormStats, LossStats
from ds_silent.sinks.scalars import MonitorSink, scalars
from tests.sinks.example_records import empty_record, event, full_record


def test_same_tags_and_values_on_the_axis_of_samples() -> None:
    written: list[list[tuple[str, float, int]]] = []
    sink = MonitorSink(written.append)
    record = full_record(12)
    sink.write(record)
    assert written == [[(tag, value, 768) for tag, value in scalars(record)]]
    assert ("silent/direction/mean_cosine", 0.041, 768) in written[0]
    assert ("silent/per_rank/loss/rank_3", 2.0 + 0.1 * 3, 768) in written[0]
    assert all(type(value) is float for _, value, _ in written[0])


def test_the_engines_of_one_process_do_not_share_a_tag() -> None:
    written: list[list[tuple[str, float, int]]] = []
    for label in (None, "engine-2"):
        MonitorSink(written.append, label).write(full_record(12))
    first, second = ([tag for tag, _, _ in points] for points in written)
    assert second == [f"engine-2/{tag}" for tag in first]


def test_only_finite_numbers() -> None:
    written: list[list[tuple[str, float, int]]] = []
    sink = MonitorSink(written.append)
    sink.write(
        full_record(
            1,
            loss=LossStats(float("nan"), 0.5, None, (1.0, float("inf"))),
            grad_norm=GradNormStats(mean=float("-inf")),
        )
    )
    tags = {tag for tag, _, _ in written[0]}
    assert "silent/loss/std" in tags
    assert "silent/per_rank/loss/rank_0" in tags
    assert not tags & {"silent/loss/mean", "silent/loss/range", "silent/per_rank/loss/rank_1", "silent/grad_norm/mean"}


def test_nothing_measured_is_no_call() -> None:
    written: list[list[tuple[str, float, int]]] = []
    sink = MonitorSink(written.append)
    sink.write(empty_record())
    sink.write_event(event())
    sink.flush()
    sink.close()
    assert written == []
