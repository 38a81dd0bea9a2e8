"""One step is enough where no noise explains a rank, and is not where anything does."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ds_silent.capture.loss_graph import SUM, Constants
from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.at_once import LASTING, AtOnce
from ds_silent.measure.evidence import Evidence, LabelWeights
from tests.support.made_records import NOTHING, Run, make

LOG_A = math.log(4e6 * 16)  # 1 false alarm per million steps
UNKNOWN = np.full(4, np.nan)
ALL = np.ones(4, dtype=bool)


def one_step(losses, norms, tokens=UNKNOWN):  # type: ignore[no-untyped-def]
    count = len(losses)
    test = AtOnce(count, LOG_A)
    return test.step(
        1, np.array(losses, float), np.array(norms, float), np.array(tokens, float)[:count], np.ones(count, bool)
    )


def test_a_summed_loss_is_told_at_the_very_first_step() -> None:
    judge = Judge(DetectorsConfig())
    tokens = (189, 180, 193, 175)
    record = make(1, [5.7, 5.6, 1098.0, 5.8], [1.0, 1.1, 190.0, 0.95], [0.1, 0.1, 0.1, 0.1])
    [event] = judge.step(record, Evidence(dealt="random", label_tokens=tokens))
    assert (event.kind, event.severity, event.step, event.ranks) == ("outlier-rank", "error", 1, (2,))
    assert "at this step: no noise explains it" in event.message
    assert "is about its number of label tokens (193): the loss is summed over them" in event.message
    assert "swap" not in event.message + event.remedy
    assert "hardware" not in event.message + event.remedy


def test_the_first_step_of_two_or_three_ranks_is_not_enough_and_a_few_more_are() -> None:
    assert one_step([5.7, 1098.0], [1.0, 190.0]) is None
    assert one_step([5.7, 5.6, 1098.0], [1.0, 1.1, 190.0]) is None
    for ranks in (2, 3):
        run = Run(ranks=ranks)
        assert run.steps(8) == []
        [event] = run.steps(1, loss=1100.0, scale=190.0, bad=1)
        assert (event.severity, event.ranks) == ("error", (0, 1) if ranks == 2 else (1,))
        assert ("nobody can say" in event.message) == (ranks == 2)
        assert "loss is multiplied" in event.message


@pytest.mark.parametrize(
    ("losses", "norms", "tokens"),
    [
        ([5.7, 5.6, 20.0, 5.8], [1.0, 1.1, 3.0, 0.9], UNKNOWN),  # a hard batch
        ([5.7, 5.6, 5.9, 5.8], [1.0, 1.1, 300.0, 0.9], [180, 190, 2, 185]),  # two label tokens
        ([0.3, -0.2, 900.0, 0.1], [1.0, 1.1, 1.2, 0.9], UNKNOWN),  # a loss that may be negative has no ratio
        ([5.7, math.nan, math.inf, 0.0], [1.0, math.nan, 0.0, 0.9], UNKNOWN),
        ([0.01, 3.0, 0.4, 40.0], [0.05, 2.0, 0.6, 30.0], UNKNOWN),  # ranks that differ much from each other
    ],
)
def test_what_noise_or_tokens_explain_is_not_told(losses, norms, tokens) -> None:  # type: ignore[no-untyped-def]
    assert one_step(losses, norms, tokens) is None


def lasting(factor, ranks=4, quantity="loss"):  # type: ignore[no-untyped-def]
    """Step at which a fault from the first step on is told, and its first step."""
    test, rng = AtOnce(ranks, LOG_A), np.random.default_rng(0)
    for step in range(1, 31):
        losses, norms = 5.7 * np.exp(0.05 * rng.standard_normal(ranks)), np.exp(0.2 * rng.standard_normal(ranks))
        (losses if quantity == "loss" else norms)[1] *= factor
        apart = test.step(step, losses, norms, np.full(ranks, np.nan), np.ones(ranks, bool))
        if apart is not None:
            return step, apart.since, apart.rank, apart.quantity
    return None


@pytest.mark.parametrize(("factor", "ranks", "by"), [(47.0, 4, 3), (16.0, 4, 4), (16.0, 8, 4), (47.0, 3, 3)])
@pytest.mark.parametrize("quantity", ["loss", "gradient norm"])
def test_steps_one_after_the_other_add_up(factor: float, ranks: int, by: int, quantity: str) -> None:
    """A fault from the first step on is never what this training is like."""
    told = lasting(factor, ranks, quantity)
    assert told is not None
    assert told[0] <= by
    assert told[1:] == (1, 1, quantity)
    assert lasting(6.0, ranks, quantity) is None  # what a rank's share of the data may be like


@pytest.mark.parametrize(("factor", "ranks", "by"), [(1 / 22, 4, 5), (1 / 22, 8, 4), (1 / 22, 3, 8), (1 / 200, 4, 3)])
def test_a_norm_far_below_the_others_is_told_after_some_steps(factor: float, ranks: int, by: int) -> None:
    told = lasting(factor, ranks, "gradient norm")
    assert told is not None
    assert LASTING <= told[0] <= by
    assert told[1:] == (1, 1, "gradient norm")
    assert lasting(1 / 6, ranks, "gradient norm") is None
    assert lasting(1 / 200, ranks, "loss") is None  # rows that are known by heart


def test_rows_that_are_known_by_heart_are_no_fault() -> None:
    """One batch in twenty has no gradient to speak of, whichever rank takes it."""
    test, rng = AtOnce(4, LOG_A), np.random.default_rng(0)
    for step in range(1, 2001):
        norms = np.exp(0.3 * rng.standard_normal(4)) * np.where(rng.random(4) < 0.05, 1e-4, 1.0)
        assert test.step(step, np.ones(4), norms, UNKNOWN, ALL) is None


def test_an_odd_batch_is_learnt_from_when_it_is_over() -> None:
    test, far = AtOnce(4, LOG_A), np.array([1.0, 1.0, 20.0, 1.0])
    for step in range(20):
        assert test.step(step, far if step == 5 else np.ones(4), np.ones(4), UNKNOWN, ALL) is None
    assert max(test.state_dict()["gaps"][0]) == pytest.approx(math.log(20.0))
    assert test.state_dict()["runs"] == [None, None, None]


def test_what_was_as_large_before_is_no_surprise() -> None:
    """A hard row late in a training is not larger than everything was in its beginning."""
    test, rng = AtOnce(4, LOG_A), np.random.default_rng(0)
    for level in (11.0, 5.0, 1.0, 0.1, 0.02):
        for _ in range(20):
            healthy = level * np.exp(0.05 * rng.standard_normal(4))
            assert test.step(1, healthy, np.ones(4), UNKNOWN, ALL) is None
    other = copy.deepcopy(test)
    assert test.step(1, np.array([0.02, 0.02, 9.0, 0.02]), np.ones(4), UNKNOWN, ALL) is None
    assert other.step(1, np.array([0.02, 0.02, 9000.0, 0.02]), np.ones(4), UNKNOWN, ALL) is not None


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("kind", ["cauchy", "log-normal", "hard rows", "cold start"])
def test_no_false_alarm_on_heavy_tails_at_the_stated_rate(kind: str, ranks: int) -> None:
    found = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        test, unknown, everyone = AtOnce(ranks, LOG_A), np.full(ranks, np.nan), np.ones(ranks, bool)
        for step in range(200):
            noise = rng.standard_normal((2, ranks))
            hard = np.where(rng.random(ranks) < 2e-3, 20.0, 1.0)
            losses, norms = {
                "cauchy": np.abs(rng.standard_cauchy((2, ranks))),
                "log-normal": np.exp(noise),
                "hard rows": np.exp(0.2 * noise) * hard,
                "cold start": 10.8 * math.exp(-step / 60) * np.exp((0.002 + min(step, 100) / 200) * noise),
            }[kind]
            found += test.step(step, losses, norms, unknown, everyone) is not None
    assert found == 0


def test_the_state_goes_on() -> None:
    rng, first = np.random.default_rng(1), AtOnce(4, LOG_A)
    for _ in range(30):
        first.step(1, np.exp(0.2 * rng.standard_normal(4)), np.exp(0.4 * rng.standard_normal(4)), UNKNOWN, ALL)
    second = AtOnce(4, LOG_A)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    odd = np.array([1.0, 1.0, 25.0, 1.0])
    assert first.step(1, odd, odd, UNKNOWN, ALL) is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    off = np.array([1.0, 1.0, 400.0, 1.0])
    assert first.step(1, off, off, UNKNOWN, ALL) == second.step(1, off, off, UNKNOWN, ALL) is not None


def test_a_fault_that_lasts_is_one_event_and_ends() -> None:
    run = Run()
    run.steps(20)
    assert [e.severity for e in run.steps(60, loss=400.0, scale=200.0)] == ["error"]
    assert [(e.severity, e.kind) for e in run.steps(30)] == [("info", "outlier-rank")]


def test_a_micro_batch_that_is_left_out_is_no_other_batch_size() -> None:
    run = Run(ranks=3)
    seen = Evidence(dealt="random", rows_taken=(12, 8, 12), micro_batches=(3, 2, 3))
    [event] = [event for _ in range(6) for event in run.judge.step(run.record(), seen)]
    assert (event.kind, event.ranks) == ("batch-size-mismatch", (1,))
    assert "Rank 1 takes 2 micro-batches per measured step, the others 3, since step 1: 8 rows" in event.message
    assert "micro-batches that are left out" in event.remedy
    assert "batch size" not in event.remedy


def test_other_batch_sizes_are_told_with_the_fact_and_explain_the_outlier() -> None:
    run, found = Run(), []
    rows = Evidence(dealt="random", rows_taken=(4, 4, 8, 4))
    for _ in range(60):
        found += run.judge.step(run.record(scale=0.5), rows)
    assert [(e.kind, e.severity, e.ranks, e.step) for e in found] == [
        ("batch-size-mismatch", "warning", (2,), 4),
        ("outlier-rank", "info", (2,), found[-1].step),
    ]
    assert "takes 8 rows per measured step, the others 4" in found[0].message
    assert "Follows from the batch-size-mismatch of step 1" in found[1].message
    assert "Most likely" not in found[1].message  # its cause is known
    alike = LabelWeights(np.ones(4), *[np.full(4, 1 / 20)] * 2, frozenset({SUM}), frozenset({1}), Constants())
    weighed = Run()  # by the rows of all ranks: what each has more of counts no more, and no less
    for _ in range(60):
        both = replace(rows, label_weights=alike, label_tokens=(4, 4, 16, 4))
        events = weighed.judge.step(weighed.record(scale=0.5), both)
        assert [event for event in events if event.kind == "batch-size-mismatch"] == []
        assert weighed.judge.state_dict()["label_tokens"] == {"steps": []}
    short = Run()
    for step in range(40):  # the last batch of an epoch, and batches filled by tokens
        taken = (4, 4, 2, 4) if step % 5 < 3 else (4, 3, 5, 6)
        assert short.judge.step(short.record(), Evidence(dealt="random", rows_taken=taken)) == []
    assert run.judge.state_dict()["batch_size"]["rows"] == [4, 4, 8, 4]
    assert NOTHING.rows_taken is None
