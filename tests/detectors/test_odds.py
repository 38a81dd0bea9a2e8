"""Far smaller rates than one false alarm per million steps hold too, and events tell their odds."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Finding, Judge, log_steps
from ds_silent.detectors.finding import with_odds
from ds_silent.detectors.lifecycle import Episodes
from ds_silent.detectors.order import OrderTest
from ds_silent.detectors.repeats import RepeatTest
from ds_silent.maths.rounding_bound import Arithmetic, check_aggregate, rounding_tolerance, terms_of
from ds_silent.measure.evidence import Coverage, Evidence, ReductionEvidence
from ds_silent.records import Event, to_json
from tests.support.made_records import NOTHING, Run, make

RATES = (1000.0, 1.0, 1e-3, 1e-6, 1e-100, 5e-324)


def test_thresholds_follow_every_rate_that_is_accepted() -> None:
    for rate in RATES:
        steps = log_steps(DetectorsConfig(false_alarms_per_million_steps=rate), interval=1)
        assert steps == pytest.approx(math.log(4e6) - math.log(rate), rel=1e-12)
        assert math.isfinite(steps)


@pytest.mark.parametrize("rate", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_rank_that_is_off_is_named_at_every_rate(ranks: int, rate: float) -> None:
    run = Run(ranks, rate=rate)
    run.steps(60)
    steps, event = run.until_event(120, scale=1.5)
    assert (event.kind, event.ranks) == ("outlier-rank", (2,))
    assert event.score is not None
    assert event.threshold == pytest.approx(math.log(4e6 * 2 * 16 / 15 / rate) + math.log(ranks), rel=1e-12)
    expected = rate * math.exp(event.threshold - event.score)
    assert event.false_alarms_per_million_steps == pytest.approx(expected, rel=1e-9)
    assert rate / 100 < event.false_alarms_per_million_steps <= rate  # told as soon as the evidence sufficed
    assert steps > 3


def test_a_thousand_times_fewer_false_alarms_cost_some_steps() -> None:
    delays = []
    for rate in (1.0, 1e-3, 1e-6):
        run = Run(8, rate=rate, seed=1)
        run.steps(60)
        delays.append(run.until_event(200, scale=1.4)[0])
    assert delays[0] < delays[1] < delays[2] < 6 * delays[0]


@pytest.mark.parametrize("rate", [1.0, 1e-3, 1e-6])
def test_what_the_evidence_at_its_cap_says_is_an_alarm(rate: float) -> None:
    """Where one repeat rate is left, the cap less the logarithm of their number may round to below the threshold."""
    for extra in np.linspace(0.0, 1.0, 25):
        threshold = math.log(4e6 / rate) + extra
        order = OrderTest(threshold)
        for step in range(1, 40):
            # 2 % of the rows come again: far from all the other rates
            now = Coverage(epoch=0.01 * step, seen=0.0098 * step, repeated=0.0002 * step, rows=1_000_000)
            found = order.step(make(step, [2.0], [1.0], [0.1]), Evidence(coverage=now))
        assert [finding.kind for finding in found] == ["data-order-mismatch"]
        stuck = RepeatTest(threshold)
        for step in range(1, 40):
            extras = Evidence(own_rows=(8, 8, 8), own_repeats=(0, 8, 0))
            named = stuck.step(make(step, [2.0] * 3, [1.0] * 3, [0.1] * 3), extras)
        assert [finding.ranks for finding in named] == [(1,)]
        for finding in (*found, *named):
            assert finding.log_excess is not None
            assert finding.log_excess > 3.0  # of the newest step's evidence, which is not cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rounding_bound_widens_slowly_with_the_odds(dtype: torch.dtype) -> None:
    terms = terms_of(torch.randn(8, 16384, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    arithmetic = Arithmetic(dtype, elements=10_000_000, width=1_048_576)
    bounds = [rounding_tolerance(terms, arithmetic, math.log(8e6 / rate)) for rate in (1.0, 1e-3, 1e-6)]
    assert all(low < high < 1.02 * low for low, high in pairwise(bounds))


def test_the_odds_of_an_error_are_those_at_which_rounding_just_explains_it() -> None:
    generator = torch.Generator().manual_seed(1)
    terms = terms_of(torch.randn(4, 4096, generator=generator, dtype=torch.float64))
    arithmetic, log_rate = Arithmetic(torch.bfloat16, elements=1_000_000, width=131_072), math.log(8e6)
    direction = torch.randn(4096, generator=generator, dtype=torch.float64)
    for excess in (0.5, 7.0, 60.0):
        error = rounding_tolerance(terms, arithmetic, log_rate + excess) * direction / direction.norm()
        check = check_aggregate(terms, terms.expected + error, arithmetic, log_rate)
        assert check.wrong
        assert check.log_excess == pytest.approx(excess, abs=0.02)
    assert check_aggregate(terms, terms.expected, arithmetic, log_rate).log_excess is None
    assert check_aggregate(terms, terms.expected * math.nan, arithmetic, log_rate).log_excess is None
    huge = check_aggregate(terms, 3.0 * terms.expected, arithmetic, log_rate)
    assert huge.log_excess == 700.0
    record = make(5, [2.0] * 4, [1.0] * 4, [0.1] * 4)
    (event,) = Judge(DetectorsConfig()).step(record, Evidence(reduction=ReductionEvidence(check=huge, layers=("a",))))
    assert event.kind == "aggregation-error"
    assert 0.0 < (event.false_alarms_per_million_steps or 0.0) < 1e-280
    assert event.message.endswith("By chance alone: at most once in more than a thousand trillion steps.")


def test_a_drift_note_tells_its_odds() -> None:
    run, noted = Run(rate=1e-3), []
    run.steps(300)
    for _ in range(60):
        noted += [event for event in run.steps(1, spread=12.0) if event.kind == "drift"]
    assert noted
    for event in noted:
        assert event.false_alarms_per_million_steps is not None
        assert 0.0 < event.false_alarms_per_million_steps <= 1e-3
        assert "By chance alone: at most once in " in event.message


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (2e6, "one"),
        (1.0, "a million"),
        (0.3, "a million"),
        (1e-2, "a hundred million"),
        (1e-3, "a billion"),
        (1e-7, "ten trillion"),
        (1e-40, "more than a thousand trillion"),
    ],
)
def test_odds_in_words(rate: float, words: str) -> None:
    told = with_odds(Event(1, "drift", "info", (), None, 1.0, 1.0, "What.", "Do."), rate, 0.0)
    assert told.message == f"What. By chance alone: at most once in {words} steps."
    assert told.false_alarms_per_million_steps == pytest.approx(rate, rel=1e-9)


def test_facts_have_no_odds_and_no_key() -> None:
    fact = Finding("k", "non-finite", "error", (0,), None, None, None, "It is NaN.", "Do.", 3)
    chance = Finding("c", "outlier-rank", "warning", (0,), None, 20.0, 19.0, "Off.", "Do.", 3, log_excess=1.0)
    told = Episodes(rate=1e-3).update(3, [fact, chance])
    assert [event.false_alarms_per_million_steps for event in told] == [None, pytest.approx(1e-3 / math.e)]
    lines = [json.loads(json.dumps(to_json(event), allow_nan=False)) for event in told]
    assert "false_alarms_per_million_steps" not in lines[0]
    assert lines[1]["false_alarms_per_million_steps"] == pytest.approx(1e-3 / math.e)


def test_healthy_ranks_are_silent_at_every_rate() -> None:
    for rate in (1.0, 1e-3, 1e-6):
        assert Run(4, seed=3, rate=rate).steps(200, NOTHING) == []
