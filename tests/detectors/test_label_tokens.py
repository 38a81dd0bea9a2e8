"""A rank with a fraction of the others' label tokens, step after step: a note, and no alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ds_silent.detectors.batch_size import TOKEN_STEPS, LabelTokensTest
from ds_silent.detectors.sequential import others
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event
from tests.support.made_records import Run


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
