"""What rounding may grow to, and what leans: on numbers that are made up, with their laws known."""

from __future__ import annotations

import numpy as np
import pytest

from ds_silent.comparison.levels import (
    CHAOS,
    EARLY_STEPS,
    FIRST_MARGIN,
    LARGE,
    LEAST_STEPS,
    Bounds,
    LeanTest,
    Level,
    Repetition,
    bounds_of,
)
from tests.support.traced import Traced, Training

RNG = np.random.default_rng(3)


def learnt(values: list[float], bound: float = 1e-6, count: int = 5) -> Level:
    level = Level(bound, count)
    for value in values:
        level.learn(np.full(count, value))
    return level


def test_the_first_step_has_the_bound() -> None:
    assert (Level(1e-6, 3).allowed() == FIRST_MARGIN * 1e-6).all()


def test_below_the_bound_nothing_is_learnt_of_growth() -> None:
    level = learnt([1e-8, 2e-7, 1e-7, 9e-7])
    assert level.growth == 1.0
    assert level.allowed() == pytest.approx(CHAOS.least * 1e-6)


@pytest.mark.parametrize("growth", [1.0, 1.5, 2.0, 4.0, 9.0])
def test_steady_growth_is_allowed_for_ever(growth: float) -> None:
    level, value = Level(1e-6, 5), 1e-7
    while not level.saturated and level.steps < 40:
        values = value * np.exp(RNG.normal(0.0, 0.3, 5))
        assert (values < level.allowed()).all()
        level.learn(values)
        value = min(value * growth, 1.0)


@pytest.mark.parametrize("growth", [1.0, 1.5])
def test_a_jump_beyond_the_growth_is_not(growth: float) -> None:
    level, value = Level(1e-6, 5), 1e-7
    for step in range(20):
        level.learn(value * np.exp(RNG.normal(0.0, 0.3, 5)))
        value *= growth
        if step >= EARLY_STEPS:
            assert (1000.0 * max(value, 1e-7) > level.allowed()).all()


def test_no_early_jump_to_what_is_large() -> None:
    assert (learnt([1e-2], bound=0.02).allowed() == LARGE).all()


def test_one_layer_may_differ_as_much_as_the_median_one_has() -> None:
    level = Level(1e-6, 5)
    level.learn(np.array([1e-7, 4e-5, 4e-5, 5e-5, 6e-5]))
    assert level.allowed()[0] == pytest.approx(100.0 * 4e-5)


def test_a_lean_is_found_where_it_begins() -> None:
    series = LeanTest()
    for step in range(1, 61):
        values = RNG.normal(0.0, 1e-3, 4)
        values[2] += 8e-3 if step >= 13 else 0.0
        series.add(step, values)
    found = series.leaning(1e-3)
    assert found is not None
    which, mean, begin = found
    assert which == 2
    assert mean == pytest.approx(8e-3, rel=0.1)
    assert 10 <= begin <= 16


def test_noise_leans_nowhere() -> None:
    for _ in range(300):
        series = LeanTest()
        drift = np.cumsum(RNG.normal(0.0, 2e-4, (LEAST_STEPS + 20, 30)), 0)  # runs that stay apart for a while
        for step, values in enumerate(RNG.normal(0.0, 1e-3, drift.shape) + drift):
            series.add(step, values)
        assert series.leaning(5e-4) is None


def test_too_few_steps_say_nothing() -> None:
    series = LeanTest()
    for step in range(LEAST_STEPS - 1):
        series.add(step, np.array([1.0]))
    assert series.leaning(0.1) is None


def test_a_repetition_takes_the_place_of_growth() -> None:
    bounds = Bounds(1e-6, 1e-6, 1e-5, 1e-4, 0.0, 2.0**-24, 1e-6)
    envelope, by_growth = Repetition(bounds), np.full(3, 0.5)
    assert (envelope.allowed("local", by_growth) == by_growth).all()
    envelope.learn("local", np.zeros(3))  # the repetition had every bit of A: nothing is known of growth
    assert (envelope.allowed("local", by_growth) == by_growth).all()
    envelope.learn("local", np.array([1e-9, 1e-9, 1e-9]))
    assert envelope.allowed("local", by_growth) == pytest.approx(FIRST_MARGIN * 1e-6)
    envelope.learn("local", np.array([1e-3, 1e-5, 1e-5]))
    allowed = envelope.allowed("local", by_growth)
    assert allowed == pytest.approx(FIRST_MARGIN * 1e-6 * 1e4)  # it has grown ten thousand times


def test_the_coarser_of_two_trainings_sets_the_bound() -> None:
    fine, coarse = (Traced(Training(dtype=dtype)).head() for dtype in ("fp32", "bf16"))
    assert bounds_of(fine, fine, None).gradient < 1e-5 < 1e-2 < bounds_of(fine, coarse, None).gradient
    assert bounds_of(coarse, fine, None) == bounds_of(coarse, coarse, None)
    wide = bounds_of(fine, fine, 0.05)
    assert min(wide.gradient, wide.loss, wide.update, wide.factor, wide.tolerance) == 0.05
