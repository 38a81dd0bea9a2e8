"""A jump against the run's own past: exact expectation, counted rate, found in time, no trends."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_silent.detectors import jump as drift
from ds_silent.detectors.jump import _TILTS, BLOCK, FEWEST, SEGMENT, JumpTest, _log_gains, _Series
from ds_silent.records import Event
from tests.support.made_records import Run, make


def feed(test: JumpTest, values: np.ndarray, first: int = 1) -> list[Event]:
    """Noise scales alone."""
    records = (make(first + k, [math.nan], [math.nan], [0.1], noise=float(v)) for k, v in enumerate(values))
    return [event for record in records for event in test.follow(record)]


@pytest.mark.parametrize("trend", [1.0, 0.6])
@pytest.mark.parametrize("segment", [5, SEGMENT])
def test_evidence_is_the_number_of_bets_in_the_mean_over_all_orders(
    segment: int, trend: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the past says whether to bet; and each segment begins with nothing."""
    monkeypatch.setattr(drift, "SEGMENT", segment)
    monkeypatch.setattr(drift, "REFERENCE", 3)
    monkeypatch.setattr(drift, "TREND", trend)
    orders = list(itertools.permutations([0.3, -1.0, 2.5, 0.1, 1e9, -7.0]))
    total, opened = np.zeros((6, len(_TILTS))), 0
    for order in orders:
        series = _Series(start=0)
        for count, value in enumerate(order):
            series.add(count, value, 0.1)
            total[count] += np.exp(series.evidence)
            opened += count == 4 and series.usual is not None
    assert opened == len(orders) if trend == 1.0 else 0 < opened < len(orders)
    bets = np.array([0.0, 0.0, 0.0, 1.0, 2.0, 3.0 if segment > 5 else 0.0]) * opened / len(orders)
    assert total / len(orders) == pytest.approx(np.tile(bets[:, None], len(_TILTS)), rel=1e-12, abs=1e-200)


def test_gains_favour_the_ends_and_have_mean_one() -> None:
    for count in (1, 2, 17, SEGMENT):
        gains = np.exp(_log_gains(count))
        assert gains.mean(axis=1) == pytest.approx(1.0, rel=1e-12)
        assert (np.argmax(gains, axis=1) == [count - 1, 0]).all()
        assert gains.max() < SEGMENT  # one value can never be an alarm at any rate that is used


@pytest.mark.parametrize("law", ["normal", "cauchy"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.long
def test_false_notes_stay_below_the_stated_rate(law: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence alone is bounded, and not by silence; what a note needs besides can only make it rarer."""
    if alone:
        monkeypatch.setattr(_Series, "jumped", lambda series, deviations: series.usual is not None)
    random, steps, mean_steps = np.random.default_rng(11), 20_000, 150.0
    values = getattr(random, f"standard_{law}")((steps, 3))
    made = zip(values, np.exp(np.clip(values, -300, 300)), strict=True)
    test, found = JumpTest(math.log(mean_steps)), 0
    for step, ((noise, *_), (_, std, cv)) in enumerate(made, start=1):
        found += len(test.follow(drift_record(step, noise, std, cv)))
    expected = steps / mean_steps
    assert found <= expected + 3 * math.sqrt(expected)
    assert found > (0.15 * expected if alone else 0)  # evidence begins anew with each segment, which costs some


def drift_record(step: int, noise: float, std: float, cv: float):  # type: ignore[no-untyped-def]
    record = make(step, [1.0], [1.0], [0.1], noise=float(noise))
    return replace(record, loss=replace(record.loss, std=float(std)), grad_norm=replace(record.grad_norm, cv=float(cv)))


@pytest.mark.parametrize("start", range(256, 256 + SEGMENT, 16))
def test_a_jump_is_told_once_and_in_time_wherever_the_segments_stand(start: int) -> None:
    values = np.random.default_rng(start).standard_normal(start + 300)
    values[start:] += 3.0
    (event,) = feed(JumpTest(math.log(3e6)), values)
    assert start < event.step <= start + 36
    assert (event.kind, event.severity, event.where) == ("drift", "info", "noise scale")
    before, after = (float(word.strip(".")) for word in event.message.split() if word.strip(".-")[0].isdigit())
    assert before < 0.7
    assert after > 1.7


def test_a_slow_trend_is_no_jump() -> None:
    values = np.random.default_rng(0).standard_normal(4000)
    trend = np.linspace(0.0, 4000 / SEGMENT, 4000)  # by a standard deviation in every segment
    assert feed(JumpTest(math.log(3e6)), values + trend) == []


def test_trainings_from_random_weights_say_nothing() -> None:
    """Recorded: noise scale and both dispersions, 600 steps, warm-up and decay (benchmarks/scratch.py)."""
    recorded = json.loads((Path(__file__).parents[1] / "data" / "cold_starts.json").read_text(encoding="utf-8"))
    assert len(recorded) >= 3
    for name, numbers in recorded.items():
        test = JumpTest(math.log(4e6))
        values = zip(*(numbers[key] for key in ("noise_scale", "loss_std", "grad_norm_cv")), strict=True)
        for step, (noise, std, cv) in enumerate(values, start=1):
            assert test.follow(drift_record(step, noise, std, cv)) == [], (name, step)


def test_a_jump_after_a_cold_start_is_told() -> None:
    recorded = json.loads((Path(__file__).parents[1] / "data" / "cold_starts.json").read_text(encoding="utf-8"))
    random = np.random.default_rng(3)
    start = np.array(next(iter(recorded.values()))["noise_scale"])[:300]
    warm = 40.0 + 8.0 * random.standard_normal(500)  # then it stands still
    warm[400:] *= 3.0
    (event,) = feed(JumpTest(math.log(4e6)), np.concatenate([start, warm]))
    assert 700 < event.step <= 720


@pytest.mark.parametrize("deviations", [1.0, 4.0, 30.0])
def test_a_trend_of_any_size_is_no_jump(deviations: float) -> None:
    """In standard deviations of the noise per segment; bent, as the way to a plateau is."""
    random = np.random.default_rng(7)
    for bend in (np.arange(900) / SEGMENT, 5.0 * (1.0 - np.exp(-np.arange(900) / 300))):
        assert feed(JumpTest(math.log(4e6)), random.standard_normal(900) + deviations * bend) == []


def test_a_level_that_always_moves_does_not_jump_when_it_moves_again() -> None:
    random = np.random.default_rng(5)
    levels = np.repeat(np.cumsum(1.5 * random.choice([-1.0, 1.0], 40)), 50)
    assert feed(JumpTest(math.log(4e6)), levels + random.standard_normal(2000)) == []


def test_nothing_is_said_before_the_usual_moves_are_known() -> None:
    values = np.random.default_rng(6).standard_normal(FEWEST * BLOCK + 20)
    values[-50:] += 20.0
    assert feed(JumpTest(math.log(4e6)), values) == []


@pytest.mark.parametrize("log_threshold", [math.log(4e9), math.log(4e12)])
def test_jumps_are_found_at_much_rarer_false_notes_too(log_threshold: float) -> None:
    for seed in range(6):
        values = np.random.default_rng(seed).standard_normal(640)
        values[300 + 21 * seed :] += 5.0
        (event,) = feed(JumpTest(log_threshold), values)
        assert 0 < event.step - (300 + 21 * seed) <= 45


def test_a_constant_series_is_silent_until_it_changes() -> None:
    test = JumpTest(math.log(3e6))
    assert feed(test, np.full(1000, 0.25)) == []
    (event,) = feed(test, np.full(200, 0.5), first=1001)
    assert event.step < 1030


def test_a_spike_and_numbers_that_are_none_say_nothing_and_hide_nothing() -> None:
    values = np.random.default_rng(1).standard_normal(800)
    values[300:303], values[150], values[400:600:7] = 1e300, math.inf, math.nan
    values[700:] += 4.0
    (event,) = feed(JumpTest(math.log(3e6)), values)
    assert 700 < event.step < 730


def test_a_resume_through_json_changes_nothing() -> None:
    values = np.random.default_rng(2).standard_normal(600)
    values[360:] += 2.0
    whole = feed(JumpTest(math.log(1e4)), values)
    first, second = JumpTest(math.log(1e4)), JumpTest(math.log(1e4))
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
