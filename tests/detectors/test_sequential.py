"""The evidence that adds up: its expectation is what the derivation says, and so is the rate of false alarms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ds_silent.detectors.sequential import (
    WITHIN,
    Add,
    Array,
    Ranks,
    SequentialTest,
    highest,
    median,
    median_of_known,
    others,
)
from tests.support.made_records import NOTHING, Run, make


@pytest.mark.parametrize("values", [[0.3, -1.0, 2.5, 0.1], [1e9, 0.0, 0.0, -1e-9], [1.0, 1.0, 1.0, 5.0]])
def test_evidence_of_a_step_has_expectation_one_over_all_permutations(values: list[float]) -> None:
    total = np.zeros((2 * len(WITHIN), 4))
    orders = list(itertools.permutations(values))
    for order in orders:
        test = SequentialTest(1, 4, cap=math.inf)
        test.step(1, np.array([order]), np.ones(4, dtype=bool))
        total += np.exp(test._evidence[0, : 2 * len(WITHIN)])  # M_1 = L_1
    assert total / len(orders) == pytest.approx(1.0, rel=1e-12)


def test_the_others_median_and_deviation_are_those_of_the_others() -> None:
    for count in (2, 3, 4, 7, 8):
        x = np.random.default_rng(count).standard_normal(count) * 1e3 + 1e6
        medians, deviations = (rows[0] for rows in others(x[None]))
        for index in range(count):
            rest = np.delete(x, index)
            assert medians[index] == pytest.approx(np.median(rest), rel=1e-12)
            expected = rest.std(ddof=1) if count > 2 else 0.0
            assert deviations[index] == pytest.approx(expected, rel=1e-6)


def test_the_others_median_of_equal_values_is_that_of_the_others() -> None:
    random = np.random.default_rng(0)
    for count in (2, 3, 4, 7, 8):
        x = random.integers(0, 3, (200, count)).astype(float)
        assert others(x)[0].tolist() == [[np.median(np.delete(row, r)) for r in range(count)] for row in x]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_medians_are_those_of_numpy(count: int) -> None:
    random = np.random.default_rng(count)
    for values in (
        random.standard_normal((20, 5, count)),
        random.choice([-math.inf, 0.5, 1.0, math.nan], (300, count)),
    ):
        with np.errstate(all="ignore"):
            naive = np.median(values, axis=-1)
        assert np.array_equal(median(values), naive, equal_nan=True)
        known = np.where(np.isinf(values), 2.0, values)
        found = median_of_known(known, -7.0).flatten().tolist()
        rows = [row[~np.isnan(row)] for row in known.reshape(-1, count)]
        assert found == [float(np.median(row)) if len(row) else -7.0 for row in rows]


def test_the_highest_of_many_ranks_is_that_of_all_exact_scores() -> None:
    random, exact = np.random.default_rng(0), []
    logs = random.standard_normal((18, 1000)) * 3.0
    logs[:, 500] = logs[:, 400]  # the first of equal ones
    logs[:, 700:] = -np.inf

    def score(ranks: Ranks, add: Add) -> Array:
        scores = add(logs[:, ranks], axis=0)
        exact.append(len(scores) if add == np.logaddexp.reduce else 0)
        return scores

    every = np.logaddexp.reduce(logs, axis=0)
    for among in (np.ones(1000, dtype=bool), random.random(1000) < 0.5, np.arange(1000) % 2 == 1, np.arange(1000) < 9):
        candidates = np.where(among, every, -np.inf)
        assert highest(score, among) == (int(np.argmax(candidates)), candidates.max())
    assert max(exact) == 9  # nearly all scores of many ranks are made roughly
    assert highest(score, np.arange(1000) >= 700) == (0, -math.inf)
    assert highest(score, np.arange(1000) >= 990) == (0, -math.inf)
    assert highest(score, np.zeros(1000, dtype=bool)) == (0, -math.inf)
    logs -= 1e6  # where exp is 0
    assert highest(score, np.ones(1000, dtype=bool))[0] == int(np.argmax(every))


@pytest.mark.parametrize("law", ["cauchy", "skewed", "restless"])
@pytest.mark.long
def test_false_alarms_stay_below_the_stated_rate_without_any_assumption_on_the_values(law: str) -> None:
    run, steps, rate = Run(rate=1e5, seed=5), 1000, 1e5
    random, found = run.random, 0
    for step in range(1, steps + 1):
        restless = 1.0 + 9.0 * (step // 100 % 2)
        draw = {
            "cauchy": lambda: random.standard_cauchy(4),
            "skewed": lambda: np.exp(2 * random.standard_normal(4)),
            "restless": lambda r=restless: r * random.standard_normal(4),
        }[law]
        events = run.judge.step(make(step, draw(), np.exp(np.clip(draw(), -50, 50)), draw(), noise=None), NOTHING)
        found += sum(e.kind == "outlier-rank" and e.severity == "warning" for e in events)
    expected = rate * steps / 1e6 / 4  # the outlier detector's share
    assert found <= expected + 3 * math.sqrt(expected)


def test_a_stated_rate_makes_the_threshold() -> None:
    few, many, rare = (
        next(event.threshold for event in run.steps(400, scale=1.5) if event.kind == "outlier-rank")
        for run in (Run(rate=1.0), Run(rate=1e4), Run(interval=10))
    )
    # a quarter of the rate, half of it the layers', a sixteenth of the rest that of the test at once; four ranks
    assert few == pytest.approx(math.log(4e6 * 2 * 16 / 15) + math.log(4), rel=1e-9)
    assert few - many == pytest.approx(math.log(1e4), rel=1e-9)
    assert rare == pytest.approx(few - math.log(10))


def test_healthy_ranks_are_silent() -> None:
    for ranks in (1, 2, 4, 8):
        assert Run(ranks, seed=ranks).steps(400) == []


def test_what_a_state_does_not_know_is_unknown_where_it_was_known_before() -> None:
    random, early, late = np.random.default_rng(3), SequentialTest(1, 4, cap=40.0), SequentialTest(1, 4, cap=40.0)
    for test, steps in ((early, 3), (late, 80)):
        for step in range(steps):
            test.step(step, random.standard_normal((1, 4)), np.ones(4, dtype=bool))
    late.load_state_dict(early.state_dict())
    for own, restored in ((early._spreads, late._spreads), (early._pool, late._pool)):
        assert np.isnan(own).any()
        assert np.array_equal(own, restored, equal_nan=True)


@pytest.mark.parametrize("ranks", [4, 1024, 1025, 3000])
def test_every_number_of_ranks_has_a_history_and_resumes_with_it(ranks: int) -> None:
    random, test = np.random.default_rng(ranks), SequentialTest(1, ranks, cap=40.0)
    for step in range(3):
        values = random.standard_normal((1, ranks))
        values[0, 7 % ranks] += 50.0 * (step == 2)
        test.step(step, values, np.ones(ranks, dtype=bool))
    within, remembering = (
        test.gain[0, : 2 * len(WITHIN), 7 % ranks].max(),
        test.gain[0, 2 * len(WITHIN) :, 7 % ranks].max(),
    )
    assert remembering > within + 0.1  # the step before is looked at too
    again = SequentialTest(1, ranks, cap=40.0)
    again.load_state_dict(test.state_dict())
    values = random.standard_normal((1, ranks))
    for one in (test, again):
        one.step(3, values, np.ones(ranks, dtype=bool))
    assert (again.log_evidence() == test.log_evidence()).all()
