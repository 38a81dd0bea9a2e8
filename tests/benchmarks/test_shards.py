"""What benchmarks/shards.py trains is what its scenarios say: own rows, the same on every start, and healthy or not."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from shards import alarms, parsed, summary
from shards_data import IGNORED, SCENARIOS, Batch, Deal
from shards_training import Case, Fault, Outcome, Struck

STEPS = 40
FOR_ALL_RANKS = ("random", "sorted")  # one set for all ranks, from which each gets other rows in every epoch


def batches(name: str, rank: int, ranks: int = 2, steps: int = STEPS) -> list[Batch]:
    return list(islice(SCENARIOS[name].deal(Deal(rank, ranks, 0, steps)), steps))


def rows(name: str, rank: int) -> set[tuple[float, ...]]:
    return {tuple(row) for batch in batches(name, rank) for row in batch.inputs.flatten(1).tolist()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows_are_the_ranks_own_and_the_model_learns_from_them(name: str) -> None:
    if name not in FOR_ALL_RANKS:
        assert not {row for row in rows(name, 0) & rows(name, 1) if len(row) > 8}  # the shortest texts may be equal
    first, again = batches(name, 1), batches(name, 1)
    assert all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=False)
    )
    torch.manual_seed(0)
    model = SCENARIOS[name].model()
    loss = model(first[0].inputs, first[0].labels)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())


def test_only_the_random_deal_lets_rows_change_hands() -> None:
    assert rows("random", 0) & rows("random", 1)
    assert [name for name, scenario in SCENARIOS.items() if scenario.random] == ["random"]


def test_difficulty_is_the_share_of_labels_that_break_the_rule() -> None:
    from shards_data import by_rule, rule

    broken = []
    for rank, noise in enumerate((0.1, 0.8)):
        deal = Deal(rank, 2, 0, STEPS)
        inputs, labels = rule(deal, noise, rows=4000)
        broken.append(float((labels != by_rule(inputs, 0.0, deal, torch.Generator())).float().mean()))
    assert broken == pytest.approx([0.1 * 7 / 8, 0.8 * 7 / 8], abs=0.03)  # one of eight random labels is right


@pytest.mark.parametrize(("name", "step"), [("curriculum", 8), ("mixture", 20)])
def test_data_change_at_the_step_that_is_said(name: str, step: int) -> None:
    """Short texts of the curriculum's first rank end after 20 % of the steps; a mixture's at half time on all."""
    lengths = [int((batch.labels != IGNORED).sum(1).max()) for batch in batches(name, 0)]
    if name == "curriculum":
        assert max(lengths[:step]) <= 8
        assert min(lengths[step:]) >= 16
    else:
        other = batches(name, 1)
        before, after = rows_of(other[:step]), rows_of(other[step:])
        assert not before & after


def rows_of(some: list[Batch]) -> set[tuple[Any, ...]]:
    return {tuple(row) for batch in some for row in batch.inputs.tolist()}


def test_a_fault_begins_at_its_step() -> None:
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    labels = torch.tensor([[1, 2, 3, IGNORED]]).expand(8, 4)
    struck = Struck(Fault("labels", step=3), here=True, seed=0)
    struck.step = 2
    assert torch.equal(struck.batch(Batch(tokens, labels)).labels, labels)
    struck.step = 3
    wrong = struck.batch(Batch(tokens, labels)).labels
    assert (wrong != labels).any()
    assert torch.equal(wrong == IGNORED, labels == IGNORED)
    gradient = torch.ones(10_000)
    noisy = Struck(Fault("noise", 0.5, step=1), here=True, seed=0)
    noisy.step = 1
    assert float((noisy.gradient(gradient) - gradient).norm() / gradient.norm()) == pytest.approx(0.5, rel=1e-5)
    assert torch.equal(Struck(None, here=True, seed=0).gradient(gradient), gradient)


def test_reminders_are_no_alarms_and_a_delay_counts_the_first_step() -> None:
    events = [
        {"step": 5, "kind": "outlier-rank", "severity": "warning", "ranks": [0], "message": "Rank 0 has"},
        {"step": 9, "kind": "outlier-rank", "severity": "warning", "ranks": [0], "phase": "ongoing"},
        {"step": 11, "kind": "drift", "severity": "info", "ranks": [], "message": "The loss"},
        {"step": 12, "kind": "outlier-rank", "severity": "error", "ranks": [1], "message": "Rank 1 has"},
        {"step": 13, "kind": "outlier-rank", "severity": "error", "ranks": [3], "message": "Rank 3 has"},
        {"step": 14, "kind": "outlier-rank", "severity": "error", "ranks": [3], "phase": "ended"},
    ]
    outcome = Outcome(Case("heart", 4, 0, 20, fault=parsed("gradient:1.5", 10)), tuple(events), 1.0, 1.0)
    found, reminders = alarms(outcome)
    assert [event["step"] for event in found] == [5, 12, 13]
    assert [event["step"] for event in reminders] == [9, 14]
    row = summary(outcome)
    assert (row["warnings"], row["errors"], row["notes"], row["reminders"]) == (1, 0, 1, 2)
    assert (row["delay"], row["delay_right_rank"], row["first"]["step"]) == (3, 4, 5)
