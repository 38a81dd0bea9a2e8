"""What TensorBoard itself reads back from the event files."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from ds_silent.records import DirectionStats, Event, LossStats, StepRecord
from ds_silent.sinks.base import SinkError
from ds_silent.sinks.matrix_image import _note, blocks_of, matrix_image, oddest, ranks_image
from ds_silent.sinks.scalars import MAX_RANKS_DRAWN
from ds_silent.sinks.tensorboard import TensorBoardSink, escaped, layout
from tests.sinks.example_records import empty_record, event, full_record

EXPECTED = {
    "silent/loss/mean": 2.31,
    "silent/loss/std": 0.18,
    "silent/loss/range": 0.52,
    "silent/grad_norm/mean": 1.02,
    "silent/grad_norm/std": 0.16,
    "silent/grad_norm/cv": 0.157,
    "silent/grad_norm/aggregated": 0.61,
    "silent/direction/mean_cosine": 0.041,
    "silent/direction/min_cosine": -0.011,
    "silent/direction/max_cosine": 0.091,
    "silent/direction/exact_check": 0.0015,
    "silent/noise_scale": 310.25,
    "silent/events/error": 0.0,
    "silent/events/warning": 0.0,
    "silent/coverage/duplicates": 3.0,
    "silent/coverage/seen": 0.25,
    "silent/coverage/repeated": 0.0625,
    "silent/integrity/relative_error": 1e-7,
    "silent/integrity/rounding_bound": 2e-6,
    "silent/integrity/replica_groups": 2.0,
    "silent/objective/weight_sum": 1.0625,
    "silent/objective/spread": 0.0021 / 0.0019,
    "silent/objective/mean_of_means_angle": 2.125,
    **{f"silent/per_rank/loss/rank_{rank}": 2.0 + 0.1 * rank for rank in range(4)},
    **{f"silent/per_rank/grad_norm/rank_{rank}": 0.9 + 0.01 * rank for rank in range(4)},
    **{f"silent/per_rank/cosine/rank_{rank}": 0.05 + 0.001 * rank for rank in range(4)},
    "silent/per_layer/mean_cosine/model.layers.0": 0.33,
    "silent/per_layer/mean_norm/model.layers.0": 0.7,
    "silent/per_layer/norm_cv/model.layers.0": 0.07,
    "silent/per_layer/mean_cosine/lm_head": 0.44,
    "silent/per_layer/mean_norm/lm_head": 0.8,
    "silent/per_layer/norm_cv/lm_head": 0.08,
}


def read(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def points(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in accumulator.Scalars(tag)]


def layout_in(accumulator: EventAccumulator) -> layout_pb2.Layout:
    """The newest: the one that TensorBoard shows."""
    layout = layout_pb2.Layout()
    layout.ParseFromString(accumulator.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return layout


def written(directory: Path, *given: StepRecord | Event, **how: Any) -> EventAccumulator:
    """What a sink makes of these, one after the other."""
    sink = TensorBoardSink(directory, **how)
    for one in given:
        if isinstance(one, Event):
            sink.write_event(one)
        else:
            sink.write(one)
    sink.close()
    return read(directory)


def plain(step: int, ranks: int = 4, **changes: object) -> StepRecord:
    """A record without layers and matrix."""
    return full_record(step, ranks, **{"layers": (), "cosine_matrix": None, **changes})


def test_every_tag_and_every_value(tmp_path: Path) -> None:
    found = written(tmp_path, full_record(12), full_record(13))
    assert set(found.Tags()["scalars"]) == set(EXPECTED)
    for tag, value in EXPECTED.items():
        assert points(found, tag) == [(12, pytest.approx(value, rel=1e-6)), (13, pytest.approx(value, rel=1e-6))]


def test_not_measured_is_no_point_and_nan_is_one(tmp_path: Path) -> None:
    odd = full_record(2, loss=LossStats(mean=float("nan"), std=float("inf")))
    found = written(tmp_path, empty_record(1), odd)
    (mean,) = found.Scalars("silent/loss/mean")
    assert mean.step == 2
    assert np.isnan(mean.value)
    assert points(found, "silent/loss/std") == [(2, float("inf"))]
    assert "silent/loss/range" not in found.Tags()["scalars"]


@pytest.mark.parametrize("ranks", [MAX_RANKS_DRAWN, MAX_RANKS_DRAWN + 1])
def test_per_rank_curves_only_where_they_can_be_read(tmp_path: Path, ranks: int) -> None:
    found = written(tmp_path, full_record(1, ranks=ranks, cosine_matrix=None))
    tags = found.Tags()["scalars"]
    every = ranks == MAX_RANKS_DRAWN
    shown = [f"rank_{rank}" for rank in range(ranks)] if every else ["min", "q10", "median", "q90", "max"]
    metrics = ("loss", "grad_norm", "cosine")
    expected = {f"silent/per_rank/{metric}/{curve}" for metric in metrics for curve in shown}
    assert {tag for tag in tags if tag.startswith("silent/per_rank/")} == expected
    assert "silent/loss/mean" in tags
    charts = [chart for one in layout(not every).category if "rank" in one.title.lower() for chart in one.chart]
    matched = {tag for tag in expected for one in charts for pattern in one.multiline.tag if re.match(pattern, tag)}
    within = {tag for one in charts for s in one.margin.series for tag in (s.value, s.lower, s.upper)}
    assert matched | within == expected
    if not every:
        bands = [points(found, f"silent/per_rank/loss/{name}")[0][1] for name in shown]
        assert bands == pytest.approx([2.0, 2.2, 2.8, 3.4, 3.6], rel=1e-6)  # 2.0 + 0.1 * rank, of 17 ranks


def test_ranks_that_an_event_names_have_curves_from_then_on(tmp_path: Path) -> None:
    each = enumerate([(), (12, 99), tuple(range(20, 40)), *[(rank,) for rank in range(60, 80)]], start=1)
    given = [one for step, named in each for one in (event(step, ranks=named), plain(step, 100))]
    found = written(tmp_path, *given, plain(24, 50))  # elastic: some are gone
    curves = [tag for tag in found.Tags()["scalars"] if tag.startswith("silent/per_rank/loss/rank_")]
    assert {int(tag.rpartition("_")[2]) for tag in curves} == {12, 99, *range(60, 74)}
    assert [step for step, _ in points(found, "silent/per_rank/loss/rank_12")] == list(range(2, 25))
    assert points(found, "silent/per_rank/cosine/rank_99")[0] == (2, pytest.approx(0.05 + 0.099))
    assert [step for step, _ in points(found, "silent/per_rank/loss/rank_99")] == list(range(2, 24))


def test_the_matrix_is_drawn_at_its_records_only(tmp_path: Path) -> None:
    records = [full_record(10 * n, ranks=2, layers=(), direction=DirectionStats()) for n in range(1, 202)]
    images = written(tmp_path, *records).Images("silent/direction/matrix")
    assert [image.step for image in images] == [10, 20, 50, 100, 200, 500, 1000, 2000]
    picture = Image.open(io.BytesIO(images[0].encoded_image_string))
    assert picture.size == (560, 500)


def test_the_layout_opens_on_tags_that_exist(tmp_path: Path) -> None:
    found = written(tmp_path, full_record(1, cosine_matrix=None))
    assert found.Tags()["images"] == []  # no matrix, no image
    there = layout_in(found)
    assert [category.title for category in there.category] == ["Consistency", "Per rank", "Health"]
    charts = {chart.title: list(chart.multiline.tag) for category in there.category for chart in category.chart}
    assert len(charts) == 10
    shown = {title: {tag for tag in EXPECTED if any(re.match(p, tag) for p in tags)} for title, tags in charts.items()}
    assert all(shown.values())
    assert shown["events so far"] == {"silent/events/error", "silent/events/warning"}
    assert shown["gradient norm"] == {f"silent/per_rank/grad_norm/rank_{rank}" for rank in range(4)}
    assert shown["gradient direction (cosine)"] == {f"silent/direction/{m}_cosine" for m in ("mean", "min", "max")}


def test_many_ranks_have_bands_that_tensorboard_draws_from_tags_of_one_length(tmp_path: Path) -> None:
    early = event(1, ranks=(5,))  # an event that comes first does not decide the layout
    found = written(tmp_path, early, *(plain(step, 1024) for step in (1, 2, 3)), resume_step=0)
    assert len(found.Tensors("custom_scalars__config__")) == 1
    there = layout_in(found).category
    assert [category.title for category in there] == ["Consistency", "Per rank", "Ranks named", "Health"]
    charts, of_named = ({chart.title: chart for chart in category.chart} for category in there[1:3])
    assert len(charts) == len(of_named) == 3
    cosine = "cosine with the mean of the others"
    for metric, title in (("loss", "loss"), ("grad_norm", "gradient norm"), ("cosine", cosine)):
        series = [(one.value, one.lower, one.upper) for one in charts[title].margin.series]
        names = [tuple(tag.removeprefix(f"silent/per_rank/{metric}/") for tag in tags) for tags in series]
        assert names == [("max", "min", "max"), ("median", "q10", "q90")]
        assert len({value for value, _, _ in series}) == 2  # TensorBoard draws one band of each value's tag
        for value, lower, upper in series:
            curves = [points(found, tag) for tag in (lower, value, upper)]
            assert [[step for step, _ in curve] for curve in curves] == [[1, 2, 3]] * 3
            assert curves[0][0][1] < curves[1][0][1] <= curves[2][0][1]
        (pattern,) = of_named[title].multiline.tag
        named = {tag for tag in found.Tags()["scalars"] if re.match(pattern, tag)}
        assert named == {f"silent/per_rank/{metric}/{curve}" for curve in ("rank_5", "median")}


def test_another_number_of_ranks_has_its_own_layout(tmp_path: Path) -> None:
    found = written(tmp_path, *(plain(step, ranks) for step, ranks in enumerate((4, 8, 32, 48, 16), start=1)))
    assert len(found.Tensors("custom_scalars__config__")) == 3
    assert len(layout_in(found).category[1].chart) == 3


def test_events_rise_beside_the_curves(tmp_path: Path) -> None:
    early, late = event(0), event(2)  # before any record: drawn with the first one; and found late
    others = [replace(event(2), severity=severity) for severity in ("warning", "info")]  # type: ignore[arg-type]
    found = written(tmp_path, early, plain(1), plain(2), *others, plain(3), late)
    assert points(found, "silent/events/error") == [(1, 1), (2, 1), (2, 1), (3, 1), (3, 2)]
    assert points(found, "silent/events/warning") == [(1, 0), (2, 0), (2, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_is_one_curve(tmp_path: Path, known: bool) -> None:
    written(tmp_path, *(plain(step, noise_scale=1.0) for step in range(1, 9)))
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.0000000001.earlier")  # readers go by the time in the name
    early = event(0, kind="config-mismatch")  # written before the checkpoint is loaded
    records = [plain(step, noise_scale=2.0) for step in (6, 7)]
    found = written(tmp_path, early, *records, resume_step=5 if known else None)
    assert points(found, "silent/noise_scale") == [(step, 1.0) for step in range(1, 6)] + [(6, 2.0), (7, 2.0)]
    assert [text.step for text in found.Tensors("silent/events/config-mismatch/text_summary")] == [0]


def test_a_run_that_goes_back_is_one_curve(tmp_path: Path) -> None:
    records = [plain(step, noise_scale=1.0) for step in range(1, 9)] + [plain(step, noise_scale=2.0) for step in (6, 7)]
    found = written(tmp_path, *records, event(7))
    assert points(found, "silent/noise_scale") == [(step, 1.0) for step in range(1, 6)] + [(6, 2.0), (7, 2.0)]
    assert points(found, "silent/events/error")[-2:] == [(7, 0), (7, 1)]


def text(accumulator: EventAccumulator, kind: str) -> list[str]:
    tensors = accumulator.Tensors(f"silent/events/{kind}/text_summary")
    return [tensor.tensor_proto.string_val[0].decode() for tensor in tensors]


def test_events_are_text(tmp_path: Path) -> None:
    early, late = text(written(tmp_path, event(1, message="Before any record."), plain(1), event(12)), "duplicate-data")
    assert "Before any record." in early
    assert late == (
        "**error** duplicate&#45;data, ranks 0, 3\n\nThese ranks read the same rows.\n\n"
        "Remedy: Give each rank its own sampler.\n\nWhere: train&#95;loader\n\nScore 8.5, threshold 6"
    )


def test_events_of_a_run_without_records_are_kept(tmp_path: Path) -> None:
    assert len(text(written(tmp_path, event(0)), "duplicate-data")) == 1


def test_hostile_text_is_inert() -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    hostile = (
        '<script>alert(1)</script> [x](javascript:alert(1)) **bold** # h\n\n- item `code` ![i](http://x/y.png) & "q"'
    )
    html = markdown_to_safe_html(escaped(hostile))
    assert re.findall(r"<(\w+)", html) == ["p"]  # one paragraph, no link, image, list or emphasis
    assert "alert(1)" in html


def test_a_hostile_kind_makes_no_strange_tag(tmp_path: Path) -> None:
    found = written(tmp_path, event(1, kind="../<b> x"))
    assert "silent/events/____b__x/text_summary" in found.Tags()["tensors"]


def test_flush_makes_points_visible(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.flush()
    sink.write(full_record(1))
    sink.flush()
    assert points(read(tmp_path), "silent/noise_scale") == [(1, 310.25)]
    sink.close()


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match="cannot be written"):
        TensorBoardSink(tmp_path / "file" / "tensorboard")


def cell(image: np.ndarray, row: int, column: int, ranks: int) -> np.ndarray:
    """The colour near a corner of a cell, where no number is printed; the axes' box is found by its frame."""
    dark = (image.sum(axis=2) < 30).astype(int)
    rows = np.flatnonzero(dark.sum(axis=1) > 250)
    columns = np.flatnonzero(dark[rows[0]])
    top, bottom, left, right = rows[0], rows[-1], columns[0], columns[-1]
    y = int(top + (row + 0.12) * (bottom - top) / ranks)
    x = int(left + (column + 0.12) * (right - left) / ranks)
    return image[y, x].astype(int)


def test_the_colours_of_the_matrix_are_fixed() -> None:
    nan = float("nan")
    image = matrix_image(((1.0, 0.0), (nan, -1.0)), step=3, method="sketch")
    assert image.dtype == np.uint8
    assert image.shape == (500, 560, 3)
    red, white = cell(image, 0, 0, 2), cell(image, 0, 1, 2)
    grey, blue = cell(image, 1, 0, 2), cell(image, 1, 1, 2)
    assert red[0] > 80 > red[1] + red[2] - 40
    assert white.min() > 240
    assert abs(grey - 153).max() < 3
    assert blue[2] > blue[0] + 60


def test_no_pair_hides_in_a_block() -> None:
    """Oracle: of every block, in plain loops, the pair furthest from the median; never the diagonal beside others."""
    random = np.random.default_rng(0)
    values = 0.1 + 0.02 * random.standard_normal((200, 200))
    np.fill_diagonal(values, 1.0)
    values[70, 3], values[150, 199], values[12, 13] = 1.0, -0.3, np.nan
    blocks = blocks_of(values, 4)
    off = [values[i, j] for i in range(200) for j in range(200) if i != j and np.isfinite(values[i, j])]
    usual = np.median(off)
    for row in range(50):
        for column in range(50):
            pairs = [(4 * row + i, 4 * column + j) for i in range(4) for j in range(4)]
            held = [values[i, j] for i, j in pairs if i != j]
            expected = np.nan if np.isnan(held).any() else max(held, key=lambda value: abs(value - usual))
            assert blocks[row, column] == pytest.approx(expected, nan_ok=True)
    assert blocks[17, 0] == 1.0
    assert blocks[37, 49] == -0.3
    assert blocks_of(values[:10, :10], 1).shape == (10, 10)
    assert blocks_of(values[:10, :10], 4).shape == (3, 3)
    assert blocks_of(np.eye(1), 4).tolist() == [[1.0]]


def test_the_oddest_ranks() -> None:
    values = np.array([0.1, 0.12, np.nan, -0.4, 0.11, 0.5, 0.13, 0.1])
    assert oddest(values)[:3] == [2, 3, 5]


def test_many_ranks_have_a_picture_of_each_ones_cosine(tmp_path: Path) -> None:
    found = written(tmp_path, plain(1, 64), plain(2, 65))
    assert [image.step for image in found.Images("silent/direction/ranks")] == [2]
    for ranks in (1, 65, 1024, 16_384):
        assert ranks_image([0.1] * ranks, step=1).shape == (500, 560, 3)  # type: ignore[union-attr]


def test_the_rank_that_is_odd_is_seen_in_its_cell() -> None:
    """The 64 cells of 8 lines of 8 are 49 pixels wide and 46 high, from column 73 and line 70 on."""
    values = [0.0] * 64
    values[8 * 5 + 2] = -1.0
    image = ranks_image(values, step=1)
    assert image is not None
    blue = (image[..., 2].astype(int) - image[..., 0] > 50) & (np.arange(560) < 460)
    rows, columns = np.nonzero(blue)
    assert 70 + 46 * 5 - 2 <= rows.min() <= rows.max() <= 70 + 46 * 6 + 2
    assert 73 + 49 * 2 - 2 <= columns.min() <= columns.max() <= 73 + 49 * 3 + 2


@pytest.mark.parametrize("ranks", [1, 16, 17, 64, 65, 1024])
def test_any_number_of_ranks(ranks: int) -> None:
    matrix = tuple(tuple(float(i == j) for j in range(ranks)) for i in range(ranks))
    assert matrix_image(matrix, step=1).shape == (500, 560, 3)


def test_without_matplotlib_the_picture_is_left_out_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ds_silent.sinks.matrix_image.installed", lambda package: False)
    _note.cache_clear()
    tags = written(tmp_path, full_record(1), full_record(2)).Tags()
    [note] = [message for message in caplog.messages if "matplotlib" in message]
    assert 'which is not installed: pip install "ds_silent[plots]"; everything else is written' in note
    assert tags["images"] == []
    assert "silent/loss/mean" in tags["scalars"]
