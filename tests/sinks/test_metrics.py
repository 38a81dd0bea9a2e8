"""The table of metrics, and DeepSpeed's monitor, which gets the same curves as TensorBoard."""

from __future__ import annotations

import pytest

from ds_silent.metrics import CHARTS, METRICS, RANK_METRICS
from ds_silent.records import GradNormStats, LossStats
from ds_silent.sinks.per_rank import COLUMNS
from ds_silent.sinks.scalars import MonitorSink, scalars
from tests.sinks.example_records import empty_record, event, full_record


def test_every_metric_is_a_number_of_a_record() -> None:
    record = full_record(3)
    for metric in METRICS:
        value = metric.of(record)
        assert value is None or isinstance(value, (int, float)), metric.path
    assert METRICS[0].of(record) == 3
    measured = [metric.path for metric in METRICS if metric.of(empty_record(3)) is not None]
    assert {"step", "samples", "world_size"} <= set(measured)
    assert "loss.mean" not in measured


@pytest.mark.parametrize("place", ["path", "column", "tag", "gauge"])
def test_a_name_stands_for_one_metric(place: str) -> None:
    names = [getattr(metric, place) for metric in METRICS if getattr(metric, place)]
    assert len(names) == len(set(names)) > 15


def test_a_chart_has_a_curve_and_a_gauge_has_a_help() -> None:
    titles = {title for charts in CHARTS.values() for title in charts}
    assert {metric.chart for metric in METRICS if metric.chart} == titles
    assert all(metric.tag for metric in METRICS if metric.chart)
    assert all(bool(metric.help) == bool(metric.gauge) for metric in METRICS)


def test_the_columns_of_per_rank_bin_keep_their_order() -> None:
    assert COLUMNS == ("loss", "grad_norm", "cosine")
    record = full_record(1)
    each = [record.loss.per_rank, record.grad_norm.per_rank, record.direction.per_rank]
    assert [metric.of(record) for metric in RANK_METRICS] == each


def monitored(*records: object, label: str | None = None) -> list[list[tuple[str, float, int]]]:
    """What the monitor is given."""
    written: list[list[tuple[str, float, int]]] = []
    sink = MonitorSink(written.append, label)
    for record in records:
        sink.write(record)  # type: ignore[arg-type]
    sink.write_event(event())
    sink.flush()
    sink.close()
    return written


def test_the_monitor_gets_the_same_tags_and_values_on_the_axis_of_samples() -> None:
    record = full_record(12)
    written = monitored(record)
    assert written == [[(tag, value, 768) for tag, value in scalars(record)]]
    assert ("silent/direction/mean_cosine", 0.041, 768) in written[0]
    assert ("silent/per_rank/loss/rank_3", 2.0 + 0.1 * 3, 768) in written[0]
    assert all(type(value) is float for _, value, _ in written[0])
    assert monitored(empty_record()) == []  # nothing measured is no call
    second = monitored(record, label="engine-2")  # the engines of one process do not share a tag
    assert [tag for tag, *_ in second[0]] == [f"engine-2/{tag}" for tag, *_ in written[0]]


def test_the_monitor_gets_only_finite_numbers() -> None:
    loss = LossStats(float("nan"), 0.5, None, (1.0, float("inf")))
    (points,) = monitored(full_record(1, loss=loss, grad_norm=GradNormStats(mean=float("-inf"))))
    tags = {tag for tag, _, _ in points}
    assert "silent/loss/std" in tags
    assert "silent/per_rank/loss/rank_0" in tags
    assert not tags & {"silent/loss/mean", "silent/loss/range", "silent/per_rank/loss/rank_1", "silent/grad_norm/mean"}
