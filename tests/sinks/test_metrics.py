"""The table of metrics: each row is a number of a record, and no name in a place stands for two of them."""

from __future__ import annotations

import pytest

from ds_silent.metrics import CHARTS, METRICS, RANK_METRICS
from ds_silent.sinks.per_rank import COLUMNS
from tests.sinks.example_records import empty_record, full_record


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
    assert [metric.of(record) for metric in RANK_METRICS] == [
        record.loss.per_rank,
        record.grad_norm.per_rank,
        record.direction.per_rank,
    ]
