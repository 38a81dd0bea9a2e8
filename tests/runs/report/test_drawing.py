"""Many steps in few bins: what stands out at one of them is still there, and the pictures hold what the tables hold."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_silent.records import Event
from ds_silent.runs import read_run, verdict_of
from ds_silent.runs.report import heat
from ds_silent.runs.report.axis import Axis, binned, rebinned, shown, ticks
from ds_silent.runs.report.figures import cosine, noise_scale, plot_context
from ds_silent.runs.report.svg import Series, chart, diverging
from ds_silent.sinks.jsonl import JsonlSink
from tests.support.made_records import Run


@pytest.mark.parametrize(("first", "last", "every"), [(1, 30, 1), (10, 3000, 10), (1, 100_000, 1), (7, 7, 1)])
def test_every_step_has_one_bin_and_its_place_is_in_it(first: int, last: int, every: int) -> None:
    steps = np.arange(first, last + 1, every)
    axis = Axis.of(steps)
    assert axis.bins == min(len(steps), 400)
    where = axis.bin_of(steps)
    assert (np.diff(where) >= 0).all()
    assert set(where) == set(range(axis.bins))
    for step, index in zip(
        steps.tolist()[:: max(len(steps) // 50, 1)], where.tolist()[:: max(len(steps) // 50, 1)], strict=True
    ):
        assert axis.steps()[index][0] <= step <= axis.steps()[index][1]
        assert abs(axis.at(step) - axis.centre(index)) <= 0.5 / axis.bins + 1e-9


def test_bins_hold_lowest_mean_and_highest() -> None:
    random = np.random.default_rng(0)
    steps, values = np.arange(1, 5001), random.standard_normal(5000)
    values[1234], values[77], values[4000] = 50.0, np.nan, np.inf
    axis = Axis.of(steps)
    curve = binned(axis, steps, values, np.ones(5000, dtype=bool))
    where = axis.bin_of(steps)
    for n in range(axis.bins):
        own = [
            value for value, at in zip(values.tolist(), where.tolist(), strict=True) if at == n and np.isfinite(value)
        ]
        assert curve.low[n] == min(own)
        assert curve.high[n] == max(own)
        assert curve.mean[n] == pytest.approx(sum(own) / len(own))
    assert curve.broken.tolist() == sorted({int(where[77]), int(where[4000])})


def test_what_lies_outside_of_the_picture_is_marked() -> None:
    steps = np.arange(1, 101)
    values = np.sin(steps)
    values[40] = 1e6
    figure = chart(Axis.of(steps), [Series("x", binned(Axis.of(steps), steps, values))], "x")
    assert figure.markup.count("▲") == 1
    assert figure.note == "1 point lies outside of the picture (▲ ▼)."
    assert figure.data["series"][0]["mean"][40] == 1e6


def test_what_means_nothing_below_0_is_not_drawn_there() -> None:
    steps = np.arange(1, 101)
    values = np.where(steps % 4 == 0, -3.0, 5.0 + np.sin(steps))
    figure = chart(Axis.of(steps), [Series("x", binned(Axis.of(steps), steps, values))], "x", heavy=True, least=0.0)
    assert figure.note == "25 points lie outside of the picture (▲ ▼)."
    assert figure.markup.count("▼") == 25
    assert not re.search(r'class="y"[^>]*>−', figure.markup)


def test_the_picture_of_nothing_but_zeros_begins_at_0() -> None:
    steps = np.arange(1, 31)
    figure = chart(Axis.of(steps), [Series("x", binned(Axis.of(steps), steps, np.zeros(30)))], "x", zero=True)
    assert re.findall(r'class="y"[^>]*>([^<]*)<', figure.markup)[0] == "0"


def test_a_noise_scale_that_is_often_extreme_does_not_squeeze_the_rest(tmp_path: Path) -> None:
    sink, run = JsonlSink(tmp_path), Run()
    for step in range(1, 21):
        extreme = {7: -2e16, 12: 3e9}.get(step)
        sink.write(replace(run.record(), noise_scale=100.0 + step if extreme is None else extreme))
    sink.close()
    found = read_run(tmp_path)
    panel = noise_scale(plot_context(found, verdict_of(found)))
    assert panel is not None
    assert panel.note.endswith(" 2 points lie outside of the picture (▲ ▼).")
    labels = [float(text.replace(",", "")) for text in re.findall(r'<text class="y"[^>]*>([^<]*)<', panel.markup)]
    assert len(labels) >= 3
    assert 0 <= min(labels) < max(labels) < 200
    assert panel.data["series"][0]["mean"][6] == -2e16


def test_rows_that_ranks_share_give_no_advice_about_more_ranks(tmp_path: Path) -> None:
    """The report advised against more ranks: the noise between ranks that did the same work was far too small."""
    sink, run, notes = JsonlSink(tmp_path), Run(), []
    for _ in range(5):
        sink.write(replace(run.record(), noise_scale=1.0))
    for events in range(2):
        if events:
            sink.write_event(Event(2, "duplicate-data", "error", (0, 1), "rows", 1.0, 0.5, "Same rows.", "Shard."))
        sink.flush()
        found = read_run(tmp_path)
        view = plot_context(found, verdict_of(found))
        notes += [panel.note for panel in (noise_scale(view), cosine(view)) if panel is not None]
    sink.close()
    assert "more ranks hardly help" in notes[0]
    assert "By the usual noise scale" in notes[1]
    assert notes[2] == (
        "Several ranks took the same rows: what differs between the ranks says nothing about a larger batch."
    )
    assert "noise scale" not in notes[3]


def test_buckets_that_lie_across_bins_are_lost_in_none() -> None:
    axis = Axis.of(np.arange(1, 11))
    spans = np.array([[1, 4], [5, 10]])
    low, high = np.array([[-3.0], [-1.0]], dtype=np.float32), np.array([[1.0], [2.0]], dtype=np.float32)
    assert rebinned(axis, spans, low, high).tolist() == [[-3.0] * 4 + [2.0] * 6]


def test_the_picture_holds_the_table() -> None:
    table = np.array([[0.0, 1.0, -1.0], [np.nan, np.inf, 0.5]], dtype=np.float32)
    png = diverging(table, 1.0)
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        chunks[png[at + 4 : at + 8]] = png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(png[at + 4 : at + 8 + size])
        at += 12 + size
    width, height, depth, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (width, height, depth, kind) == (3, 2, 8, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(2, 4)[:, 1:]
    alpha = [[chunks[b"tRNS"][index] for index in row] for row in rows.tolist()]
    colour = [[tuple(chunks[b"PLTE"][3 * index : 3 * index + 3]) for index in row] for row in rows.tolist()]
    assert alpha[0] == [0, 255, 255]
    assert alpha[1][:2] == [0, 255]
    assert 100 < alpha[1][2] < 200
    assert len({colour[0][1], colour[0][2], colour[1][1]}) == 3  # above, below, no number


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1,234"), (0.12345, "0.123"), (-2.5, "−2.5"), (3.2e-8, "3.2e−8"), (1e7, "1e7"), (12.0, "12")],
)
def test_numbers_as_a_person_reads_them(value: float, text: str) -> None:
    assert shown(value) == text


def test_ticks_are_round_numbers_of_the_range() -> None:
    assert ticks(0.0, 1.0, 4) == pytest.approx([0.0, 0.5, 1.0])
    assert ticks(3.0, 3.0, 4) == [3.0]
    assert all(0.13 <= tick <= 0.97 for tick in ticks(0.13, 0.97, 4))


def test_a_long_run_of_many_ranks_hides_nothing(tmp_path: Path) -> None:
    from report_scale import make_run  # type: ignore[import-not-found]

    make_run(tmp_path, steps=3000, ranks=80)
    run = read_run(tmp_path)
    view = plot_context(run, verdict_of(run))
    assert view.axis.bins == 400
    tables = heat.rank_tables(view)
    rows = heat.shown_ranks(view, tables)
    assert rows[:2] == [5, 37]
    assert len(rows) == heat.OF_MANY
    jumped = tables["loss"][5]
    assert np.flatnonzero(jumped > 30).tolist() == [int(view.axis.bin_of(np.array([900]))[0])]  # of one step in 3,000
    larger = tables["norm"][37]
    assert np.median(larger[250:]) > np.log(1.3) > np.median(np.abs(larger[:230]))
    errors = sorted(step for group in run.events.groups() if group.severity == "error" for step in group.steps)
    assert errors == [900, 1808, 1936, 2192, 2704]  # reminders after 128, 256, 512
