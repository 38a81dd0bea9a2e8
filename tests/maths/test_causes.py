"""Buckets and partitions end inside of layers: what several rules explain together, and whose part is gone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_silent.detectors.reduction_errors import reduction
from ds_silent.maths.causes import Cause, Pieces, explain
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.measure.evidence import AppliedCheck, ReductionEvidence
from tests.support.made_records import Run

RANKS, LAYERS, SMALL, LARGE = 4, 5, 64, 16_384
NAMES = ("embedding", "layers.0", "layers.1", "layers.2", "norm")
TOLERANCES = torch.full((LAYERS,), 1e-6, dtype=torch.float64)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOCAL = normal(1, RANKS, LAYERS, SMALL) + 0.4 * normal(2, LAYERS, SMALL)
WHOLE = normal(3, RANKS, LARGE) + 0.4 * normal(4, LARGE)


def explained(aggregate: Tensor, error: Tensor | None = None, before: Tensor | None = None) -> Cause:
    error = normal(5, LARGE) if error is None else error
    return explain(Pieces(LOCAL, aggregate, error, WHOLE.mean(0), before, WHOLE), TOLERANCES)


def changed(layers: dict[int, Tensor]) -> Tensor:
    aggregate = LOCAL.mean(0)
    for layer, values in layers.items():
        aggregate[layer] = values
    return aggregate


def told(cause: Cause) -> str:
    seen = ReductionEvidence(AggregateCheck(0.75, 1.0, 1e-6), cause, layers=NAMES)
    (finding,) = reduction(Run().record(), seen)
    assert finding.ranks == cause.blamed
    return finding.message


def test_a_bucket_that_ends_within_a_layer_is_known_by_its_whole_layers() -> None:
    before = normal(6, LAYERS, SMALL)
    half = (torch.arange(SMALL) < 32).double()
    mixed = half * before[2] + (1 - half) * LOCAL.mean(0)[2]
    cause = explained(changed({0: before[0], 1: before[1], 2: mixed}), before=before)
    assert (cause.kind, cause.layers, cause.unexplained, cause.wrong) == ("stale", (0, 1), (2,), (0, 1, 2))
    assert "In embedding, layers.0 it is that of the step before. No single rule explains layers.1." in told(cause)


def test_pieces_of_several_owners_that_were_not_reduced_blame_nobody() -> None:
    cause = explained(changed({0: LOCAL[0, 0] / RANKS, 1: LOCAL[0, 1] / RANKS, 4: LOCAL[3, 4] / RANKS}))
    assert (cause.kind, cause.layers, cause.ranks, cause.factor) == ("unreduced", (0, 1), (0,), pytest.approx(0.25))
    assert [(other.kind, other.layers, other.ranks) for other in cause.elsewhere] == [("unreduced", (4,), (3,))]
    assert cause.blamed == ()
    assert "rank 0 alone" in told(cause)
    assert "rank 3 alone" in told(cause)


def test_one_ranks_gradient_everywhere_is_that_the_others_did_not_enter() -> None:
    cause = explained(LOCAL[1] / RANKS)
    assert (cause.kind, cause.ranks) == ("weights", (0, 2, 3))
    assert explained(changed({2: LOCAL[1, 2] / RANKS})).kind == "unreduced"


def test_two_ranks_that_hold_different_bits_need_not_be_unreduced() -> None:
    groups = {1: ((0,), (1,))}
    for kind, expected in (("noise", "aggregation-error"), ("unreduced", "unreduced-gradient")):
        cause = Cause(kind, (1,), 0.5, (0,) if kind == "unreduced" else ())
        seen = ReductionEvidence(AggregateCheck(0.75, 1.0, 1e-6), cause, groups, layers=NAMES)
        (finding,) = reduction(Run(ranks=2).record(), seen)
        assert (finding.kind, finding.ranks) == (expected, ())


def test_two_groups_of_ranks_that_reduced_apart() -> None:
    first, second = LOCAL[:2].sum(0) / RANKS, LOCAL[2:].sum(0) / RANKS
    cause = explained(changed({0: first[0], 1: first[1], 3: second[3], 4: second[4]}))
    assert {cause.kind, *(other.kind for other in cause.elsewhere)} == {"weights"}
    assert sorted([cause.ranks, *(other.ranks for other in cause.elsewhere)]) == [(0, 1), (2, 3)]
    assert cause.blamed == ()
    text = told(cause)
    assert "rank 2 0.00 times, rank 3 0.00 times" in text
    assert "-0.00" not in text


def test_a_factor_is_told_with_the_digits_that_rounding_leaves() -> None:
    assert "It is 4 times the mean in all 5 layers." in told(explained(3.999 * LOCAL.mean(0)))
    assert "It is 1.0003 times the mean in all 5 layers." in told(explained(1.0003 * LOCAL.mean(0)))


def test_what_the_step_before_left_in_a_partition() -> None:
    before = normal(6, LAYERS, SMALL)
    assert explained(LOCAL.mean(0) + before, before=before).kind == "leftover"
    assert explained(LOCAL.mean(0) + 0.5 * before, before=before).kind != "leftover"


def test_a_part_of_one_ranks_gradient_names_the_rank() -> None:
    """A micro-batch that never arrived: half of the rank's gradient, another half at each element."""
    lost = 0.5 * WHOLE[2] + 0.5 * normal(7, LARGE)
    cause = explained(LOCAL.mean(0) + 0.1 * normal(8, LAYERS, SMALL), error=-lost / RANKS)
    assert (cause.kind, cause.ranks) == ("partial", (2,))
    assert cause.weights == pytest.approx((1, 1, 0.5, 1), abs=0.05)
    assert "of rank 2 is missing or counted more than once" in told(cause)


@pytest.mark.parametrize("share", [0.02, 0.01])
def test_one_parameter_of_one_ranks_gradient_names_the_rank(share: float) -> None:
    """Of the rank's squared norm it has a small share: of its layer's sketches no weight explains it."""
    part = share * WHOLE + (share * (1.0 - share)) ** 0.5 * normal(7, RANKS, LARGE) * WHOLE.norm() / RANKS / 64.0
    layer = LOCAL.mean(0) + 0.02 * normal(8, LAYERS, SMALL)
    cause = explained(layer, error=2.0 * part[2] / RANKS)  # it counts three times
    assert (cause.kind, cause.ranks) == ("partial", (2,))
    assert "of rank 2 is missing or counted more than once" in told(cause)
    assert explained(layer, error=2.0 * part.mean(0)).ranks == ()


def test_a_rank_is_named_although_the_others_gradients_are_like_the_part_that_counts_twice() -> None:
    """Once 1.41 on the rank itself and 1.01 and 0.94 on the others: each was off by more than noise."""
    error = (0.41 * WHOLE[1] + 0.01 * WHOLE[0] - 0.06 * WHOLE[2]) / RANKS + 0.0001 * normal(7, LARGE)
    cause = explained(LOCAL.mean(0) + 0.02 * normal(8, LAYERS, SMALL), error=error)
    assert (cause.kind, cause.ranks) == ("partial", (1,))


def test_parts_of_all_ranks_gradients_blame_nobody_and_noise_is_no_part() -> None:
    lost = (0.5 * WHOLE + 0.5 * normal(7, RANKS, LARGE)).mean(0)
    noisy = LOCAL.mean(0) + 0.1 * normal(8, LAYERS, SMALL)
    cause = explained(noisy, error=-lost)
    assert (cause.kind, cause.ranks) == ("partial", ())
    assert "of all 4 ranks is missing" in told(cause)
    three = explained(noisy, error=-(0.5 * WHOLE + 0.5 * normal(7, RANKS, LARGE))[1:].sum(0) / RANKS)
    assert (three.kind, three.ranks) == ("partial", ())
    for seed in range(20):
        assert explained(noisy, error=0.05 * normal(100 + seed, LARGE)).kind == "noise"


def test_a_rank_whose_weight_only_stands_first_is_not_named() -> None:
    """An expert of another rank's: each one's weight is off, and only one by more than its own noise."""
    uneven = torch.tensor((-0.15, 0.76, 1.65, -0.44), dtype=torch.float64)
    noise = torch.nn.functional.normalize(normal(7, LARGE), dim=0)
    error = (uneven @ WHOLE + 10.0 * WHOLE.norm() * noise) / RANKS
    cause = explained(LOCAL.mean(0) + 0.1 * normal(8, LAYERS, SMALL), error=error)
    assert (cause.kind, cause.ranks) == ("partial", ())


def test_where_all_ranks_are_a_tenth_short_the_first_of_them_is_not_named() -> None:
    short = torch.tensor((-0.104, -0.097, -0.096, -0.098), dtype=torch.float64)
    error = short @ WHOLE / RANKS
    for layer_noise in (normal(8, LAYERS, SMALL), normal(9, LAYERS, SMALL)):
        cause = explained(LOCAL.mean(0) + 0.1 * layer_noise, error=error + 0.001 * normal(7, LARGE))
        assert (cause.kind, cause.ranks) == ("partial", ())


def test_a_rule_that_only_helps_noise_below_rounding_explains_nothing() -> None:
    noisy = LOCAL.mean(0) + 0.06 * normal(9, LAYERS, SMALL)
    error = noisy - LOCAL.mean(0)
    nearly = 0.999 * error.norm(dim=1)  # each layer's error is just above what rounding explains
    cause = explain(Pieces(LOCAL, noisy, 0.05 * normal(10, LARGE), WHOLE.mean(0), None, WHOLE), nearly)
    assert (cause.kind, cause.layers) == ("noise", (0, 1, 2, 3, 4))


def test_noise_in_what_was_applied_is_not_called_a_factor_as_well() -> None:
    def applied(factors: tuple[float, ...], error: float) -> AppliedCheck:
        return AppliedCheck(4, 1.0, factors, 1e-6, error, 1e-6, (2,), ())

    assert applied((1.0, 1.0, 1.001, 1.0), 0.02).wrong_factor == ()
    assert applied((1.0, 1.0, 1.001, 1.0), 1e-8).wrong_factor == (2,)
    assert applied((1.0, 1.0, 4.0, 1.0), 0.02).wrong_factor == (2,)
