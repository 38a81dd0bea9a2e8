"""A rank with a fraction of the others' label tokens, step after step: a note, and no alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ds_silent.detectors.batch_size import FULL_STEPS, TOKEN_STEPS, FullLabelsTest, LabelTokensTest
from ds_silent.detectors.lifecycle import Episodes
from ds_silent.detectors.sequential import others
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Dealt, Event
from tests.support.made_records import Run, make


def run(tokens: list[list[int]]) -> list[Event]:
    made = Run(ranks=len(tokens[0]))
    return [event for one in tokens for event in made.judge.step(made.record(), Evidence(label_tokens=tuple(one)))]


def notes(events: list[Event]) -> list[tuple[int, str, str, tuple[int, ...]]]:
    return [(e.step, e.kind, e.severity, e.ranks) for e in events if e.where == "label tokens"]


@pytest.mark.parametrize(("ranks", "factor"), [(2, 0.33), (4, 0.33), (4, 3.0)])
def test_a_third_at_every_step_is_a_note_that_names_the_rank(ranks: int, factor: float) -> None:
    random = np.random.default_rng(3)
    tokens = [[int(n * (factor if rank == 1 else 1.0)) for rank, n in enumerate(one)]
              for one in random.integers(900, 1100, (TOKEN_STEPS + 4, ranks))]  # fmt: skip
    events = run(tokens)
    odd = 1 if factor < 1 or ranks > 2 else 0
    assert notes(events) == [(TOKEN_STEPS, "batch-size-mismatch", "info", (odd,))]
    [note] = [event for event in events if event.where == "label tokens"]
    assert f"had {3 if odd != 1 or factor > 1 else 0.33} times" in note.message


@pytest.mark.long
def test_other_steps_other_tokens_is_health() -> None:
    """Lengths over two orders of magnitude, and a rank that is low for a while."""
    random = np.random.default_rng(5)
    for ranks in (2, 4, 16):
        assert notes(run(random.integers(10, 1000, (400, ranks)).tolist())) == []
    while_low = [[1000, 100 if step % TOKEN_STEPS else 900, 1000] for step in range(100)]
    assert notes(run(while_low)) == []
    assert notes(run([[0, 100, 100]] * 60)) == []  # told as what it is: no labels


def test_the_count_survives_a_checkpoint() -> None:
    made, test, other = Run(ranks=3), LabelTokensTest(), LabelTokensTest()
    for _ in range(TOKEN_STEPS - 1):
        assert test.step(made.record(), Evidence(label_tokens=(900, 300, 900))) == []
    other.load_state_dict(json.loads(json.dumps(test.state_dict())))
    assert len(other.step(made.record(), Evidence(label_tokens=(900, 300, 900)))) == 1


def test_medians_of_others_are_those_of_numpy() -> None:
    random = np.random.default_rng(7)
    for size in (2, 3, 4, 5, 17):
        values = random.integers(1, 9, size).astype(np.float64)
        naive = [np.median(np.delete(values, rank)) for rank in range(size)]
        assert others(values[None])[0][0].tolist() == naive


LENGTH = 576


def labelled(ranks: int, steps: int, full: int | None = None) -> list[list[int]]:
    """Label tokens of rows of which a few are left out, on rank ``full`` none."""
    random = np.random.default_rng(9)
    counts = random.integers(LENGTH - 60, LENGTH - 10, (steps, ranks))
    if full is not None:
        counts[:, full] = LENGTH
    return counts.tolist()


def found(tokens: list[list[int]], dealt: Dealt = "random") -> list[tuple[int, str, tuple[int, ...]]]:
    test, episodes, events = FullLabelsTest(), Episodes(), list[Event]()
    for step, one in enumerate(tokens, start=1):
        again = FullLabelsTest()
        again.load(json.loads(json.dumps(test.save())))  # a resume changes nothing
        test = again
        findings = test.step(make(step, *[[1.0] * len(one)] * 3), Evidence(label_tokens=tuple(one), dealt=dealt))
        events += episodes.update(step, findings)
    assert all((event.kind, event.where) == ("batch-size-mismatch", "labels") for event in events)
    return [(event.step, event.severity, event.ranks) for event in events if event.phase == "started"]


@pytest.mark.parametrize(("dealt", "severity"), [("random", "warning"), ("own-shard", "info"), ("unknown", "info")])
def test_a_rank_that_leaves_no_label_out_is_named(dealt: Dealt, severity: str) -> None:
    for ranks in (2, 4):
        assert found(labelled(ranks, FULL_STEPS - 1, full=1), dealt) == []
        assert found(labelled(ranks, FULL_STEPS + 9, full=1), dealt) == [(FULL_STEPS, severity, (1,))]


def test_where_others_are_as_full_or_the_rank_is_not_always_nothing_is_said() -> None:
    assert found(labelled(4, 400)) == []
    both = [[LENGTH, *one[1:]] for one in labelled(4, 99, full=2)]
    assert found(both) == []  # two ranks leave nothing out: rows of unlike kinds
    now_and_then = [[one[0], one[1], LENGTH if step % 7 == 0 else one[2], one[3]]
                    for step, one in enumerate(labelled(4, 99, full=1))]  # fmt: skip
    assert found(now_and_then) == []
    assert found([[LENGTH] * 4] * 99) == []
    seldom = labelled(4, 99, full=1)
    for step in range(0, 99, FULL_STEPS - 1):
        seldom[step][1] -= 1
    assert found(seldom) == []
    assert found([[LENGTH, 500, 500]] * 99) == []  # three numbers that never change are another batch size


def test_the_judge_has_it_and_unequal_rows_say_nothing() -> None:
    for rows, count in (((4, 4), 1), ((4, 8), 0)):
        made, test = Run(ranks=2), FullLabelsTest()
        given = [Evidence(label_tokens=tuple(one), rows_taken=rows) for one in labelled(2, FULL_STEPS, full=1)]
        assert len([one for one in given if test.step(made.record(), one)]) == count
    tokens = labelled(2, FULL_STEPS, full=1)
    assert [event.severity for event in run(tokens) if event.where == "labels"] == ["info"]
