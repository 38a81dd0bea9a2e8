"""A jump against the run's own past: exact expectation, counted rate, found in time, no trends."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ds_silent.detectors import drift
from ds_silent.detectors.drift import _TILTS, SEGMENT, DriftTest, _log_gains, _Series
from ds_silent.records import Event
from tests.made_records import Run, make


def feed(test: DriftTest, values: np.ndarray, first: int = 1) -> list[Event]:
    """Noise scales alone."""
    records = (make(first + k, [math.nan], [math.nan], [0.1], noise=float(v)) for k, v in enumerate(values))
    return [event for record in records for event in test.step(record)]


@pytest.mark.parametrize("segment", [3, SEGMENT])
def test_evidence_is_the_number_of_steps_in_the_mean_over_all_orders(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "SEGMENT", segment)
    orders = list(itertools.permutations([0.3, -1.0, 2.5, 0.1, 1e9, -7.0]))
    total = np.zeros((6, len(_TILTS)))
    for order in orders:
        series = _Series(start=0)
        for count, value in enumerate(order):
            series.add(count, value)
            total[count] += np.exp(series.evidence)
    expected = np.tile(np.arange(1.0, 7.0)[:, None], len(_TILTS))
    assert total / len(orders) == pytest.approx(expected, rel=1e-12)


def test_gains_favour_the_ends_and_have_mean_one() -> None:
    for count in (1, 2, 17, SEGMENT):
        gains = np.exp(_log_gains(count))
        assert gains.mean(axis=1) == pytest.approx(1.0, rel=1e-12)
        assert (np.argmax(gains, axis=1) == [count - 1, 0]).all()
        assert gains.max() < SEGMENT  # one value can never be an alarm at any rate that is used


@pytest.mark.parametrize("law", ["normal", "cauchy"])
def test_false_notes_stay_below_the_stated_rate(law: str) -> None:
    random, steps, mean_steps = np.random.default_rng(11), 20_000, 150.0
    values = getattr(random, f"standard_{law}")((steps, 3))
    made = zip(values, np.exp(np.clip(values, -300, 300)), strict=True)
    test, found = DriftTest(math.log(mean_steps)), 0
    for step, ((noise, *_), (_, std, cv)) in enumerate(made, start=1):
        found += len(test.step(drift_record(step, noise, std, cv)))
    expected = steps / mean_steps
    assert 0.2 * expected < found <= expected + 3 * math.sqrt(expected)  # bounded, and not by silence


def drift_record(step: int, noise: float, std: float, cv: float):  # type: ignore[no-untyped-def]
    record = make(step, [1.0], [1.0], [0.1], noise=float(noise))
    return replace(record, loss=replace(record.loss, std=float(std)), grad_norm=replace(record.grad_norm, cv=float(cv)))


@pytest.mark.parametrize("start", range(256, 256 + SEGMENT, 16))
def test_a_jump_is_told_once_and_in_time_wherever_the_segments_stand(start: int) -> None:
    values = np.random.default_rng(start).standard_normal(start + 300)
    values[start:] += 3.0
    (event,) = feed(DriftTest(math.log(3e6)), values)
    assert start < event.step <= start + 36
    assert (event.kind, event.severity, event.where) == ("drift", "info", "noise scale")
    before, after = (float(word.strip(".")) for word in event.message.split() if word.strip(".-")[0].isdigit())
    assert before < 0.7
    assert after > 1.7


def test_a_slow_trend_is_no_jump() -> None:
    values = np.random.default_rng(0).standard_normal(4000)
    trend = np.linspace(0.0, 4000 / SEGMENT, 4000)  # by a standard deviation in every segment
    assert feed(DriftTest(math.log(3e6)), values + trend) == []


def test_a_constant_series_is_silent_until_it_changes() -> None:
    test = DriftTest(math.log(3e6))
    assert feed(test, np.full(1000, 0.25)) == []
    (event,) = feed(test, np.full(200, 0.5), first=1001)
    assert event.step < 1030


def test_a_spike_and_numbers_that_are_none_say_nothing_and_hide_nothing() -> None:
    values = np.random.default_rng(1).standard_normal(800)
    values[300:303], values[150], values[400:600:7] = 1e300, math.inf, math.nan
    values[700:] += 4.0
    (event,) = feed(DriftTest(math.log(3e6)), values)
    assert 700 < event.step < 730


def test_a_resume_through_json_changes_nothing() -> None:
    values = np.random.default_rng(2).standard_normal(600)
    values[360:] += 2.0
    whole = feed(DriftTest(math.log(1e4)), values)
    first, second = DriftTest(math.log(1e4)), DriftTest(math.log(1e4))
    events = feed(first, values[:365])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert events + feed(second, values[365:], first=366) == whole
    assert whole


def test_dispersions_are_followed_too_and_a_slow_change_of_them_is_not_told() -> None:
    run = Run(seed=2)
    for step in range(500):
        assert run.steps(1, spread=1.0 + step / 500) == []
    events = run.steps(40, spread=40.0)
    assert {(e.kind, e.severity) for e in events} == {("drift", "info")}
    assert {e.where for e in events} == {"loss dispersion", "gradient-norm dispersion"}
