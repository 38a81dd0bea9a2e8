"""What the detectors saw at each step, told or not: the score of an event, and how near they were before it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from ds_silent.detectors import Judge
from ds_silent.detectors.jump import SEGMENT
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.measure.evidence import AppliedCheck, Coverage, Evidence, OrderAgain, ReductionEvidence
from ds_silent.records import Event, Score, Scores, StepRecord, from_json, to_json
from tests.detectors.test_layers import Layers
from tests.detectors.test_repeats import Run as Loaders
from tests.support.made_records import NOTHING, Run

Seen = tuple[Scores, list[Event]]


def judged(judge: Judge, record: StepRecord, evidence: Evidence = NOTHING) -> Seen:
    events = judge.step(record, evidence)
    assert judge.scores.step == record.step
    return judge.scores, events


def slow_outlier() -> Iterator[Seen]:
    run = Run(4)
    for step in range(200):
        yield judged(run.judge, run.record(scale=1.5 if step >= 60 else 1.0))


def far_outlier() -> Iterator[Seen]:
    run = Run(4)
    for step in range(70):
        yield judged(run.judge, run.record(loss=400.0 if step >= 60 else 0.0))


def one_layer() -> Iterator[Seen]:
    run, layers = Run(4), Layers(4, 8)
    for step in range(200):
        fault = {"factor": 3.0, "layer": 2} if step >= 60 else {}
        values = layers.values(**fault)  # type: ignore[arg-type]
        yield judged(run.judge, run.record(), Evidence(dealt="random", layers=values))


def stuck_loader() -> Iterator[Seen]:
    run = Loaders(4, batch=8, rows=3200)
    for step in range(20):
        events = run.go(1, (2,) if step >= 10 else ())
        yield run.judge.scores, events


def own_orders() -> Iterator[Seen]:
    run, rows = Run(4), 10_000
    for step in range(1, 40):
        epoch = step * 100 / rows
        evidence = Evidence(coverage=Coverage(epoch, epoch * 0.9, epoch * 0.1, rows))
        yield judged(run.judge, run.record(), evidence)


def same_order() -> Iterator[Seen]:
    run = Run(4)
    for step in range(3):
        again = OrderAgain(again=True, log_odds=10.0 * (step + 1), rows=64, shuffled=True)
        yield judged(run.judge, run.record(), Evidence(same_order=again))


def noise_jumps() -> Iterator[Seen]:
    run = Run(4)
    for step in range(8 * SEGMENT):
        yield judged(run.judge, run.record(spread=6.0 if step > 6 * SEGMENT else 1.0))


def wrong_reduction() -> Iterator[Seen]:
    run = Run(4)
    for error in (1e-9, 9e-7, 2e-6):
        check = AggregateCheck(error, expected=1.0, tolerance=1e-6, log_excess=3.0)
        yield judged(run.judge, run.record(), Evidence(reduction=ReductionEvidence(check)))


def wrong_factor() -> Iterator[Seen]:
    run = Run(4)
    for factor in (1.0, 1.0009, 1.5):
        applied = AppliedCheck(run.number, 1.0, (1.0, 1.0, factor, None), 1e-3, 0.0, 1e-6, (), ())
        yield judged(run.judge, run.record(), Evidence(reduction=ReductionEvidence(applied=applied)))


@pytest.mark.parametrize(
    ("detector", "where", "rank", "kind", "run"),
    [
        ("outlier", None, 2, "outlier-rank", slow_outlier),
        ("at-once", "loss", 2, "outlier-rank", far_outlier),
        ("layers", None, 3, "outlier-rank", one_layer),
        ("repeats", None, 2, "data-order-mismatch", stuck_loader),
        ("order", None, None, "data-order-mismatch", own_orders),
        ("same-order", None, None, "same-order", same_order),
        ("jump", "loss dispersion", None, "drift", noise_jumps),
        ("rounding", "aggregated gradient", None, "aggregation-error", wrong_reduction),
        ("rounding", "factor of the applied gradient", None, "aggregation-error", wrong_factor),
    ],
)
def test_an_event_has_the_score_that_was_seen_and_nothing_before_it_reached_the_threshold(
    detector: str, where: str | None, rank: int | None, kind: str, run: object
) -> None:
    before: list[float] = []
    for scores, events in run():  # type: ignore[operator]
        assert from_json(Scores, json.loads(json.dumps(to_json(scores), allow_nan=False))) == scores
        own = [score for score in scores.scores if (score.detector, score.where) == (detector, where)]
        told = [event for event in events if event.kind == kind and (kind != "drift" or event.where == where)]
        if told:
            assert [(score.score, score.threshold) for score in own] == [
                (pytest.approx(told[0].score, rel=1e-12), pytest.approx(told[0].threshold, rel=1e-12))
            ]
            assert own[0].score >= own[0].threshold
            assert own[0].rank == rank
            break
        for score in own:
            assert score.score < score.threshold or detector == "jump"  # which asks for more than evidence
            before.append(score.score)
    else:
        raise AssertionError("nothing was told")
    assert before
    assert all(type(score) is float for score in before)


def test_what_had_nothing_to_judge_is_not_among_them() -> None:
    run = Run(2)
    scores, _ = judged(run.judge, StepRecord(step=1, samples=8, epoch=None, world_size=2))
    assert scores == Scores(1, (Score("outlier", -math.inf, scores.scores[0].threshold, 0),))
    alone, _ = judged(Run(1).judge, StepRecord(step=1, samples=8, epoch=None, world_size=1))
    assert alone == Scores(1, ())
    shared = Evidence(duplicates={(0, 1): 8}, rows_per_rank=(8, 8))
    same, _ = judged(run.judge, run.record(), shared)  # ranks with the same rows are not compared
    assert same == Scores(1, ())


def test_a_line_is_short_however_many_ranks_there_are() -> None:
    run = Run(64)
    for step in range(1, 4):
        evidence = Evidence(
            dealt="random",
            coverage=Coverage(0.1 * step, 0.1 * step, 0.0, 10_000),
            own_rows=(8,) * 64,
            own_repeats=(0,) * 64,
            layers=Layers(64, 28).values(),
            reduction=ReductionEvidence(
                AggregateCheck(1e-9, 1.0, 1e-6), applied=AppliedCheck(1, 1.0, (1.0,), 1e-3, 0.0, 1e-6, (), ())
            ),
        )
        scores, _ = judged(run.judge, run.record(), evidence)
    assert len({(score.detector, score.where) for score in scores.scores}) == len(scores.scores) == 13
    assert len(json.dumps(to_json(scores))) < 1420
