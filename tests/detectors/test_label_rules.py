"""By which rule each rank's labels weigh: a fact where one rank's is not the others', else silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from ds_silent.capture.loss_graph import SUM, Constants
from ds_silent.capture.untrained import Unlike
from ds_silent.detectors.label_rules import STEPS, LabelRulesTest
from ds_silent.detectors.lifecycle import Episodes
from ds_silent.measure.evidence import Evidence, LabelWeights
from ds_silent.records import Event
from tests.support.made_records import Run, make

Rule = Callable[[float, float], float]  # labels of the rank and of all ranks -> weight of one label


def own(labels: float, everybody: float) -> float:
    return 1.0 / labels


def shared(labels: float, everybody: float) -> float:
    return 4.0 / everybody


def fixed(labels: float, everybody: float) -> float:
    return 0.01


def clamped(labels: float, everybody: float) -> float:
    return 1.0 / max(labels, 1.0)


def in_bf16(rule: Rule) -> Rule:
    def rounded(labels: float, everybody: float) -> float:
        weight = rule(labels, everybody)
        unit = 2.0 ** (np.floor(np.log2(weight)) - 7)
        return float(np.round(weight / unit) * unit)

    return rounded


def weights(rules: Iterable[Rule], labels: Iterable[float], noise: float = 0.0) -> LabelWeights:
    counts = np.array(list(labels), dtype=float)
    each = np.array([rule(count, counts.sum()) for rule, count in zip(rules, counts, strict=True)])
    largest = each * (1.0 + noise)
    totals = each * counts
    reductions, backwards = frozenset({SUM}), frozenset({1})
    return LabelWeights(
        totals, each, largest, reductions, backwards, Constants(by_tensor=True), labels=int(counts.sum())
    )


COUNTS = np.random.default_rng(0).integers(60, 110, (40, 4))


class Steps:
    """One run: the detector, and what becomes an event of its findings."""

    def __init__(self, ranks: int = 4) -> None:
        self.test, self.episodes, self.ranks, self.number = LabelRulesTest(), Episodes(), ranks, 0

    def step(self, evidence: Evidence) -> list[Event]:
        self.number += 1
        record = make(self.number, *[[1.0] * self.ranks] * 3)
        return self.episodes.update(self.number, self.test.step(record, evidence))


def told(rules: tuple[Rule, ...], counts: np.ndarray = COUNTS, made: Steps | None = None) -> list[Event]:
    made = made or Steps(len(rules))
    evidence = [Evidence(label_weights=weights(rules, labels)) for labels in counts[:, : len(rules)]]
    return [event for one in evidence for event in made.step(one)]


def test_a_rank_that_takes_a_mean_of_its_own_where_the_others_share_a_divisor_is_named_once() -> None:
    [event] = told((shared, own, shared, shared))
    assert (event.step, event.kind, event.severity, event.ranks) == (STEPS, "objective-mismatch", "error", (1,))
    times = COUNTS[STEPS - 1].sum() / 4.0 / COUNTS[STEPS - 1][1]
    assert event.effect == pytest.approx(times)
    assert event.message == (
        "The ranks' labels weigh by unlike rules: on ranks 0, 2, 3 each weighs 4 divided by the labels of all ranks; "
        "on rank 1 all of a step weigh 1 together, however many they are (a mean of its own). In this step one label "
        f"of rank 1 counts {times:.3g} times one of rank 0."
    )


@pytest.mark.parametrize(
    ("rules", "ranks"),
    [
        ((own, own, shared, own), (2,)),
        ((own, own, own, fixed), (3,)),
        ((fixed, shared, fixed, fixed), (1,)),
        ((shared, own), (0, 1)),
        ((shared, shared, own, own), (0, 1, 2, 3)),
        ((shared, own, fixed, shared), (0, 1, 2, 3)),
    ],
)
def test_each_pair_of_rules_is_told_apart_and_without_a_majority_nobody_is_named(
    rules: tuple[Rule, ...], ranks: tuple[int, ...]
) -> None:
    assert [(event.kind, event.ranks) for event in told(rules)] == [("objective-mismatch", ranks)]


def random(labels: float, everybody: float) -> float:
    return float(np.random.default_rng(int(labels * everybody)).uniform(0.5, 2.0))


@pytest.mark.parametrize("rule", [own, shared, fixed, clamped, random, in_bf16(own), in_bf16(shared)])
def test_ranks_that_follow_one_rule_are_silent(rule: Rule) -> None:
    assert told((rule,) * 4) == []
    few = COUNTS % 2 + 100  # numbers of labels so near to each other that bf16 does not tell them apart
    assert told((rule,) * 4, few) == []
    for constant in range(4):  # ranks whose numbers of labels do not change follow several rules
        counts = COUNTS.copy()
        counts[:, : constant + 1] = 80
        assert told((rule,) * 4, counts) == []


@pytest.mark.parametrize("odd", [own, random])
def test_what_shows_nothing_is_silent(odd: Rule) -> None:
    assert told((shared, odd, shared, shared), COUNTS[: STEPS - 1]) == []
    assert told((shared, random, shared, shared)) == []
    assert told((shared, odd, shared, shared), np.full((40, 4), 80)) == []  # a mean of its own is what a share is


def test_it_starts_and_ends_with_the_fault() -> None:
    made = Steps()
    assert told((shared,) * 4, COUNTS[:12], made) == []
    [event] = told((shared, own, shared, shared), COUNTS[12:24], made)
    assert (event.step, event.phase) == (12 + STEPS, "started")
    steady = np.full((12, 4), 80)  # no number of labels changes: nothing speaks against what was found
    assert told((shared,) * 4, steady, made) == []
    [ended] = told((shared,) * 4, COUNTS[24:], made)
    assert (ended.phase, ended.ranks) == ("ended", (1,))


def test_another_finding_on_the_objective_takes_its_place() -> None:
    unlike = Unlike("unlike:objective:(1,)", (1,), "loss", "Differs.", "Mend it.", 1, "objective-mismatch")
    made = Steps()
    assert [event.phase for event in told((shared, own, shared, shared), made=made)] == ["started"]
    given = [weights((shared, own, shared, shared), labels) for labels in COUNTS]
    events = [event for one in given for event in made.step(Evidence(label_weights=one, unlike=(unlike,)))]
    assert [event.phase for event in events] == ["ended"]


def test_numbers_of_labels_that_hardly_change_show_no_rule() -> None:
    near = COUNTS % 5 + 1000  # bf16 rounds as much as these differ
    assert told((own, shared, own, own), near) == []


def test_labels_of_one_rank_that_do_not_weigh_alike_follow_no_shared_number() -> None:
    made, noise = Steps(), np.random.default_rng(1)
    for labels in COUNTS:
        alike = weights((own, shared, own, own), labels)
        largest = alike.largest * np.array([1.0, 1.0 + noise.uniform(0.1, 0.5), 1.0, 1.0])
        assert made.step(Evidence(label_weights=replace(alike, largest=largest))) == []


def test_labels_of_a_rank_that_do_not_weigh_alike_follow_the_rule_of_their_sum_only() -> None:
    made = Steps()
    for labels in COUNTS:
        assert made.step(Evidence(label_weights=weights((own,) * 4, labels, noise=0.5))) == []


def test_it_goes_on_after_a_resume() -> None:
    made, later = Steps(), Steps()
    later.test.load(json.loads(json.dumps(made.test.save())))
    evidence = [Evidence(label_weights=weights((shared, own, shared, shared), labels)) for labels in COUNTS]
    for one in evidence[: STEPS - 1]:
        assert made.step(one) == []
    later.test.load(json.loads(json.dumps(made.test.save())))
    assert [event.ranks for event in later.step(evidence[STEPS - 1])] == [(1,)]


def test_the_judge_has_it_and_what_follows_from_it_is_no_second_alarm() -> None:
    made = Run(ranks=4)
    given = [Evidence(label_weights=weights((shared, own, shared, shared), labels)) for labels in COUNTS[:STEPS]]
    [event] = [event for one in given for event in made.judge.step(made.record(), one)]
    assert (event.kind, event.ranks) == ("objective-mismatch", (1,))
