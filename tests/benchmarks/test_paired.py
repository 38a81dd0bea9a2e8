"""The statistics of benchmarks/overhead.py: do intervals hold what they should, in the noise of a shared machine?"""

from __future__ import annotations

import math

import numpy as np
import pytest
import typer
from overhead import FLOOR, VARIANTS, Pairs, added, chosen_variants
from paired import Shift, mean_ratio, mixture, shift


def naive_centre(values: list[float]) -> float:
    means = sorted((values[i] + values[j]) / 2 for i in range(len(values)) for j in range(i, len(values)))
    middle = len(means) // 2
    return means[middle] if len(means) % 2 else (means[middle - 1] + means[middle]) / 2


def test_centre_is_the_median_of_all_means_of_two() -> None:
    values = [0.3, -0.1, 7.0, 0.2, 0.25, -0.4]
    assert shift(values).middle == pytest.approx(naive_centre(values), abs=1e-15)


@pytest.mark.parametrize("noise", ["normal", "laplace", "student"])
def test_interval_holds_the_truth_as_often_as_it_says(noise: str) -> None:
    drawn = np.random.default_rng(1)
    draw = {"normal": drawn.normal, "laplace": drawn.laplace, "student": lambda size: drawn.standard_t(2, size)}[noise]
    truth, inside, trials = 0.01, 0, 1000
    for _ in range(trials):
        found = shift(list(truth + 0.05 * draw(size=60)))
        inside += found.low <= truth <= found.high
    # 95 % of 1,000, and four standard deviations of that count
    assert abs(inside - 0.95 * trials) < 4 * math.sqrt(trials * 0.95 * 0.05)


def test_outliers_move_the_interval_little() -> None:
    values = list(np.random.default_rng(2).normal(0.01, 0.01, 200))
    spoiled = [*values[:190], *([5.0] * 10)]  # ten steps were preempted
    assert abs(shift(spoiled).middle - shift(values).middle) < 0.002
    assert shift(spoiled).half_width < 0.004


def test_few_pairs_say_little() -> None:
    one = shift([0.1])
    assert (one.low, one.middle, one.high) == (0.1, 0.1, 0.1)
    two = shift([0.1, 0.3])
    assert (two.low, two.high) == (0.1, 0.3)


def test_mean_ratio_counts_what_happens_rarely() -> None:
    plain = [1.0] * 100
    ours = [1.0] * 99 + [2.0]
    found = mean_ratio(ours, plain)
    assert found.middle == pytest.approx(math.log(1.01), abs=1e-12)
    assert found.low < math.log(1.01) < found.high


def test_a_training_at_interval_ten_has_a_tenth_of_its_steps_measured() -> None:
    kinds = {
        "measured": vars(Pairs([0.10] * 50, [1.1] * 50, [1.0] * 50)),  # half of the pairs
        "not measured": vars(Pairs([0.01] * 50, [1.01] * 50, [1.0] * 50)),
    }
    wall, work = added(kinds, interval=10)
    assert wall.middle == pytest.approx(0.1 * 0.10 + 0.9 * 0.01)
    assert work.middle == pytest.approx(0.1 * math.log(1.1) + 0.9 * math.log(1.01))


def test_mixture_adds_half_widths_as_errors_add() -> None:
    found = mixture([(0.5, Shift(0.1, 0.0, 0.2)), (0.5, Shift(0.3, 0.2, 0.4))])
    assert found.middle == pytest.approx(0.2)
    assert found.half_width == pytest.approx(math.sqrt(2) * 0.05)


def test_pairs_compare_with_the_neighbours_on_both_sides() -> None:
    pairs = Pairs()
    pairs.add([1.0, 1.0], [1.1, 1.1], [1.21, 3.0])
    assert pairs.wall == [pytest.approx(0.0)]  # the machine slowed down by a tenth per step, the variant did nothing
    assert pairs.plain_cpu == [2.0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_variants_that_need_more_ranks_are_left_out_and_said(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = chosen_variants(ranks, [], everything=True)
    said = capsys.readouterr().out
    for name, variant in VARIANTS.items():
        assert (name in chosen) == (variant.least_ranks <= ranks and "deepspeed" in variant.frameworks)
        assert (f'"{name}" is left out: it needs at least 3 ranks, not 2' in said) == (variant.least_ranks > ranks)
    assert chosen[0] == FLOOR


def test_a_variant_that_does_not_exist_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as refused:
        chosen_variants(2, ["no such variant"], everything=False)
    assert refused.value.exit_code == 2
    assert "no such variant" in capsys.readouterr().err
