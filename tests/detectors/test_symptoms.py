"""One rank against the others over steps with known directions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ds_silent.detectors.likely_causes import likely_causes
from ds_silent.detectors.symptoms import Recent
from ds_silent.measure.evidence import Evidence
from tests.support.made_records import make


def struck(ranks: int, *, cosine: float, loss: float, norm: float, pairs: bool = True) -> Recent:
    """20 healthy steps and 2 in which the last rank's loss and norm are so many times theirs and its cosine is this."""
    random, recent = np.random.default_rng(0), Recent(ranks)
    for step in range(1, 23):
        matrix = 0.3 + 0.02 * random.standard_normal((ranks, ranks))
        matrix = (matrix + matrix.T) / 2
        losses = 1.0 + 0.05 * random.standard_normal(ranks)
        norms = np.exp(0.3 * random.standard_normal(ranks))
        if step > 20:
            matrix[-1], matrix[:, -1] = cosine, cosine
            losses[-1] *= loss
            norms[-1] *= norm
        np.fill_diagonal(matrix, 1.0)
        means = (matrix.sum(1) - 1.0) / (ranks - 1)
        held = tuple(map(tuple, matrix.tolist())) if pairs else None
        recent.append(make(step, losses, norms, means, matrix=held), Evidence())
    return recent


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_directions_now_and_before(ranks: int) -> None:
    seen = struck(ranks, cosine=0.01, loss=7.0, norm=4.0).symptoms(ranks - 1, range(ranks - 1), 21)
    assert seen.cosine == pytest.approx(0.01)
    assert seen.past_cosine == pytest.approx(0.3, abs=0.02)
    assert (seen.peers_cosine is None) == (ranks == 2)
    if ranks > 2:
        assert seen.peers_cosine == pytest.approx(0.3, abs=0.02)
        assert seen.past_peers_cosine == pytest.approx(0.3, abs=0.02)
        assert 0.0 < seen.cosine_noise < 0.03 / math.sqrt(2)  # a mean over the others, in two steps
    assert seen.usual_cosine == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("ranks", [3, 4, 16])
@pytest.mark.parametrize("norm", [4.0, 7.0])
def test_shuffled_labels_are_data_and_a_multiplied_loss_is_code(ranks: int, norm: float) -> None:
    shuffled = struck(ranks, cosine=0.01, loss=7.0, norm=norm).symptoms(ranks - 1, range(ranks - 1), 21)
    assert likely_causes(shuffled)[0].name == "other-data"
    multiplied = struck(ranks, cosine=0.29, loss=7.0, norm=7.0).symptoms(ranks - 1, range(ranks - 1), 21)
    assert "multiplied" in likely_causes(multiplied)[0].text


def test_without_pairs_the_directions_are_those_with_the_sum_of_the_others() -> None:
    recent = struck(80, cosine=0.01, loss=7.0, norm=7.0, pairs=False)
    seen = recent.symptoms(79, range(79), 21)
    assert (seen.cosine, seen.past_cosine) == (pytest.approx(0.01), pytest.approx(0.3, abs=0.01))
    assert likely_causes(seen)[0].name == "other-data"


def test_a_fault_since_the_first_step_has_no_past() -> None:
    seen = struck(4, cosine=0.01, loss=7.0, norm=4.0).symptoms(3, range(3), 1)
    assert (seen.past_cosine, seen.past_peers_cosine) == (None, None)


def test_the_noise_of_few_cosines_is_larger_than_their_spread() -> None:
    """Of a healthy rank no direction is off, however few steps say how far cosines of noise are from each other."""
    turned = []
    for seed in range(400):
        random, recent = np.random.default_rng(seed), Recent(4)
        for step in range(1, 1 + seed % 8 + 1):
            matrix = 0.05 + 0.05 * random.standard_normal((4, 4))
            matrix = (matrix + matrix.T) / 2
            np.fill_diagonal(matrix, 1.0)
            recent.append(
                make(step, [1.0] * 4, [1.0] * 4, [0.05] * 4, matrix=tuple(map(tuple, matrix.tolist()))), Evidence()
            )
        turned += [recent.symptoms(rank, [r for r in range(4) if r != rank], 1).direction for rank in range(4)]
    assert sum(direction in ("off", "opposite") for direction in turned) <= 1
    assert "right" in turned
    assert None in turned


def test_a_norm_that_is_cut_to_one_value_is_constant() -> None:
    random, recent = np.random.default_rng(0), Recent(4)
    for step in range(1, 7):
        norms = np.exp(0.3 * random.standard_normal(4))
        norms[3] = 0.05
        recent.append(make(step, [1.0] * 4, norms, [0.1] * 4), Evidence())
    assert [recent.symptoms(r, [o for o in range(4) if o != r], 1).norm_constant for r in range(4)] == [False] * 3 + [
        True
    ]
    assert not recent.symptoms(3, range(3), 5).norm_constant  # two steps say nothing


def with_inputs(before: float, after: float) -> Recent:
    """20 steps in which rank 2's inputs are so many times as large as the others', and 2 in which they are so many."""
    recent = Recent(3)
    for step in range(1, 23):
        inputs = (0.9, 1.1, after if step > 20 else before)
        recent.append(make(step, [1.0] * 3, [1.0] * 3, [0.3] * 3), Evidence(input_sizes=inputs))
    return recent


def test_inputs_of_another_size_are_a_cause_if_they_were_not_so_before() -> None:
    assert with_inputs(1.0, 50.0).symptoms(2, [0, 1], 21).inputs == pytest.approx(50.0)
    assert with_inputs(50.0, 50.0).symptoms(2, [0, 1], 1).inputs == pytest.approx(50.0)  # from the first step on
    assert with_inputs(50.0, 50.0).symptoms(2, [0, 1], 21).inputs is None
    assert with_inputs(0.0, 0.0).symptoms(2, [0, 1], 21).inputs is None  # ids


@pytest.mark.parametrize(("sizes", "factor"), [((4.0, 40.0), 10.0), ((4.0, 0.09), 10.0), ((50.0, 60.0), 1.2)])
def test_inputs_are_beyond_what_those_of_any_rank_have_been(sizes: tuple[float, float], factor: float) -> None:
    """Ranks 0 and 1 have 0.9 and 1.1, rank 2 its own rows; the change is dated up to LATE steps after it came."""
    recent = Recent(3)
    for step in range(1, 61):
        inputs = (0.9, 1.1, sizes[step > 50])
        recent.append(make(step, [1.0] * 3, [1.0] * 3, [0.3] * 3), Evidence(input_sizes=inputs))
    assert recent.inputs_beyond(2, 51) == recent.inputs_beyond(2, 59) == pytest.approx(factor)
    assert recent.inputs_beyond(0, 51) == 1.0  # larger than its own have been, or smaller, but not than any rank's
    assert recent.inputs_beyond(2, 29) is None  # 20 steps of 3 ranks are too few


def test_an_older_state_has_no_inputs() -> None:
    recent, again = with_inputs(1.0, 50.0), Recent(3)
    state = [[step, row[:6]] for step, row in recent.state_dict()]
    again.load_state_dict(state)
    assert again.symptoms(2, [0, 1], 21).inputs is None
    assert again.symptoms(2, [0, 1], 21).loss == pytest.approx(1.0)
    again.load_state_dict(recent.state_dict())
    assert again.symptoms(2, [0, 1], 21).inputs == pytest.approx(50.0)
