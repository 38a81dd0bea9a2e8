"""What the ranks' observations say of their objectives: what is a fact at once, what must stay, what is by design."""

from __future__ import annotations

import pytest

from ds_silent.capture.same_objective import MOST_TURNS, UNCHANGED, SameObjective
from ds_silent.exchange.observation import Gathered
from tests.support.made_observations import gathered_of

TEMPERATURE = "code.loss_inputs"


def _step(same: SameObjective, ranks: int = 3, **columns: list[float]) -> SameObjective:
    """One observation more; what is not given is the same on all ranks."""
    return same.of(_gathered(ranks, **columns))


def _gathered(ranks: int = 3, **columns: list[float]) -> Gathered:
    given = {"code.objective": [7.0] * ranks, "loss.tokens": [0.0] * ranks}
    given |= {f"objective.{name}": [1.0] * ranks for name in ("known", "labels", "factor", "reduction", "count")}
    given |= {key if "." in key else f"objective.{key}": values for key, values in columns.items()}
    return gathered_of(1, ranks, **given)


def test_another_chain_is_a_fact_and_an_unknown_one_is_none() -> None:
    assert _step(SameObjective(), **{"code.objective": [7.0, 8.0, 7.0]}).parts == ((0, 2), (1,))
    assert _step(SameObjective(), **{"code.objective": [7.0, 0.0, 8.0]}).parts is None
    assert _step(SameObjective(), factor=[1.0, 0.0, 0.25]).parts is None
    assert _step(SameObjective()).parts is None


@pytest.mark.parametrize("ratio", [0.25, 4.0, 0.5, 3.0, 64.0, 1 / 63, 4096.0, -1.0])
def test_a_simple_ratio_of_a_mean_is_a_fact(ratio: float) -> None:
    assert _step(SameObjective(), factor=[0.7, 0.7 * ratio, 0.7]).parts == ((0, 2), (1,))
    assert _step(SameObjective(), factor=[0.7, 0.7 * ratio, 0.7], reduction=[2.0] * 3).parts is None
    # all terms of the loss are multiplied alike
    assert _step(SameObjective(), factor=[0.7, 0.7 * ratio, 0.7], others=[5.0, 6.0, 5.0]).parts == ((0, 2), (1,))


@pytest.mark.parametrize("ratio", [1.5, 0.7, 67.0, 0.9999])
def test_another_number_is_told_once_it_has_stayed(ratio: float) -> None:
    same = SameObjective()
    for step in range(1, UNCHANGED):
        same = _step(same, factor=[step, step * ratio, step])  # in proportion: it changes on all ranks alike
        assert same.parts is None, step
    assert _step(same, factor=[1.0, ratio, 1.0]).parts == ((0, 2), (1,))
    same = SameObjective()
    for step in range(3 * UNCHANGED):
        same = _step(same, factor=[1.0, ratio + 0.01 * (step % 5), 1.0])
        assert same.parts is None, step
    assert _step(SameObjective(), factor=[1.0, ratio, 1.0], count=[float(UNCHANGED)] * 3).parts == ((0, 2), (1,))


def test_rounding_is_no_difference() -> None:
    assert _step(SameObjective(), factor=[0.1, 0.1 * (1 + 1e-6), 0.1]).pattern == ()


@pytest.mark.parametrize("counts", ["labels", "loss.tokens"])
def test_a_factor_that_goes_with_a_known_count_is_by_design(counts: str) -> None:
    for factor in ([4.0, 2.0, 8.0], [2.0, 4.0, 1.0]):  # each label alike, and each rank's own mean
        same = SameObjective()
        for _ in range(2 * UNCHANGED):
            same = _step(same, factor=factor, **{"labels": [1.0] * 3, counts: [40.0, 20.0, 80.0]})
            assert same.parts is None
    assert _step(SameObjective(), factor=[4.0, 2.0, 4.0], labels=[40.0, 10.0, 40.0]).parts == ((0, 2), (1,))


@pytest.mark.parametrize("column", ["others", "class_weights"])
def test_counts_explain_no_factor_beside_other_terms_or_class_weights(column: str) -> None:
    same = SameObjective()
    for _ in range(UNCHANGED):
        same = _step(same, factor=[4.0, 2.8, 4.0], labels=[40.0, 28.0, 40.0], **{column: [5.0, 6.0, 5.0]})
    assert same.parts == ((0, 2), (1,))


def test_other_terms_and_class_weights_are_told_once_they_have_stayed() -> None:
    for column in ("others", "class_weights"):
        same = SameObjective()
        for step in range(UNCHANGED):
            assert same.parts is None, step
            same = _step(same, **{column: [5.0, 6.0, 5.0]})
        assert same.parts == ((0, 2), (1,))


def test_another_temperature_is_told_once_it_has_stayed_whatever_the_factors() -> None:
    """Of a distillation the factor is 1 over the selected tokens, which change: once nothing was told in 22 steps."""
    factors, same = SameObjective(), SameObjective()
    for step in range(UNCHANGED):
        assert (factors.parts, same.parts) == (None, None), step
        known = _gathered(factor=[0.1 / (90 + step), 0.1 / (80 + step % 3), 0.1 / 70], **{TEMPERATURE: [5.0, 6.0, 5.0]})
        factors, same = factors.of(known), same.of_inputs(known)
    assert (factors.parts, same.parts) == (None, ((0, 2), (1,)))
    assert same.of_inputs(_gathered(**{TEMPERATURE: [5.0] * 3})).parts is None
    assert same.of_inputs(_gathered(**{TEMPERATURE: [5.0, 0.0, 6.0]})).parts is None  # of one it is not known
    same = SameObjective()
    for step in range(3 * UNCHANGED):  # a number that comes from the rows
        same = same.of_inputs(_gathered(**{TEMPERATURE: [5.0, 6.0 + step, 5.0]}))
        assert same.parts is None, step


def test_ranks_that_differ_each_time_anew_do_so_by_design() -> None:
    told, same = [], SameObjective()
    for step in range(40):
        chains = [7.0, 7.0, 7.0]
        chains[step % 3] = 8.0
        same = _step(same, **{"code.objective": chains})
        told.append(same.parts is not None)
        same = _step(same)
    assert told == [True] * MOST_TURNS + [False] * (40 - MOST_TURNS)
    for _ in range(UNCHANGED):
        same = _step(same, **{"code.objective": [7.0, 8.0, 7.0]})
    assert same.parts == ((0, 2), (1,))


def test_of_two_ranks_neither_is_the_largest_part_by_right() -> None:
    assert _step(SameObjective(), ranks=2, factor=[1.0, 0.25]).parts == ((0,), (1,))
    assert _step(SameObjective(), ranks=4, factor=[1.0, 0.25, 0.25, 1.0]).parts == ((0, 3), (1, 2))
