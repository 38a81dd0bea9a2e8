"""The rounding bound holds for every order of every reduction, and a fault is above it and is told by its cause."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_silent.maths.causes import Cause, Pieces, explain
from ds_silent.maths.rounding_bound import (
    UNIT_ROUNDOFF,
    Arithmetic,
    check_aggregate,
    multiple_of,
    rounding_tolerance,
    terms_of,
    terms_of_sums,
)
from ds_silent.maths.sketch import make_plan, sketch_of

NUMEL, SIZE = 60_000, 1024
PLAN = make_plan(NUMEL, SIZE)
LOG_RATE = math.log(1e6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(ranks: int, dtype: torch.dtype, seed: int, shape: str = "normal") -> Tensor:
    """(N, NUMEL) gradients that share a direction, in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    common, own = torch.randn(NUMEL, generator=generator), torch.randn(ranks, NUMEL, generator=generator)
    values = 0.1 * common + 0.3 * own
    if shape == "heavy":  # a few elements hold nearly everything
        values[:, :3] *= 1e3
    elif shape == "sparse":
        values[:, 1000:] = 0.0
    elif shape == "aligned":
        values = common.expand(ranks, -1) * 0.3 + 1e-3 * own
    return values.to(dtype)


def rank_order(terms: Tensor, generator: random.Random) -> Tensor:
    """One after the other, in random order, each sum rounded: the naive loop."""
    order = list(range(len(terms)))
    generator.shuffle(order)
    total = terms[order[0]].clone()
    for index in order[1:]:
        total = total + terms[index]
    return total


def tree_order(terms: Tensor, generator: random.Random) -> Tensor:
    """Pairs, then pairs of pairs."""
    parts = list(terms)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + parts[len(parts) & ~1 :]
    return parts[0]


def sketches_of(values: Tensor) -> Tensor:
    return torch.stack([sketch_of(PLAN, row).double() for row in values])


def arithmetic(dtype: torch.dtype, ranks: int) -> Arithmetic:
    exact_division = ranks & (ranks - 1) == 0
    return Arithmetic(dtype, before=0 if exact_division else 1, elements=NUMEL, width=PLAN.width)


@pytest.mark.parametrize("shape", ["normal", "heavy", "sparse", "aligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_order_of_a_right_reduction_is_above_the_bound(ranks: int, dtype: torch.dtype, shape: str) -> None:
    generator = random.Random(ranks)
    for seed in range(4):
        values = gradients(ranks, dtype, seed, shape)
        terms = values / ranks
        local = sketches_of(values)
        for algorithm in (rank_order, tree_order):
            result = algorithm(terms, generator)
            check = check_aggregate(
                terms_of(local), sketch_of(PLAN, result).double(), arithmetic(dtype, ranks), LOG_RATE
            )
            assert not check.wrong
            error, bound = check.relative_error, check.rounding_bound
            assert error is not None
            assert bound is not None
            truth = float((result.double() - values.double().mean(0)).norm() / values.double().mean(0).norm())
            if dtype != torch.float32:  # in fp32 the sketch's own rounding is as large
                assert error == pytest.approx(truth, rel=0.15)
                # no wild bound either: one to two digits above what really happens
                assert bound < (60 if shape == "heavy" else 15) * truth


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_corruption_above_the_bound_is_found_with_its_size(dtype: torch.dtype) -> None:
    """Relative 1e-5 in fp32, 2e-2 in 16 bits, of 8 ranks."""
    size = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    generator = torch.Generator().manual_seed(5)
    for seed in range(20):
        values = gradients(8, dtype, seed)
        result = rank_order(values / 8, random.Random(seed)).double()
        noise = torch.randn(NUMEL, generator=generator, dtype=torch.float64)
        wrong = result + size * noise / noise.norm() * result.norm()
        check = check_aggregate(
            terms_of(sketches_of(values)), sketch_of(PLAN, wrong.float()).double(), arithmetic(dtype, 8), LOG_RATE
        )
        assert check.wrong
        assert check.relative_error is not None
        assert check.relative_error == pytest.approx(size, rel=0.3)


def test_several_reductions_may_round_more_and_one_is_not_allowed_to() -> None:
    values = gradients(4, torch.bfloat16, 0)
    once = Arithmetic(torch.bfloat16, elements=NUMEL, width=PLAN.width)
    often = Arithmetic(torch.bfloat16, reductions=4, accumulation=torch.bfloat16, elements=NUMEL, width=PLAN.width)
    terms = terms_of(sketches_of(values))
    assert rounding_tolerance(terms, often, LOG_RATE, 2.0) > 1.4 * rounding_tolerance(terms, once, LOG_RATE)


def test_the_bound_without_the_ranks_sketches_is_near_the_one_with_them() -> None:
    """Above the gather limit only the mean sketch and the norms are known."""
    for shape in ("normal", "aligned"):
        local = sketches_of(gradients(8, torch.bfloat16, 3, shape))
        with_all = rounding_tolerance(terms_of(local), arithmetic(torch.bfloat16, 8), LOG_RATE)
        sums = terms_of_sums(local.mean(0), float(local.square().sum()) / 8, 8)
        assert rounding_tolerance(sums, arithmetic(torch.bfloat16, 8), LOG_RATE) == pytest.approx(with_all, rel=0.3)


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_sum_is_expected_with_weights_of_one(ranks: int) -> None:
    """With all sketches and without them, and with the bound of N times the mean, but for the division."""
    values = gradients(ranks, torch.bfloat16, 2)
    local, total = sketches_of(values), rank_order(values, random.Random(1))
    plain = Arithmetic(torch.bfloat16, before=0, elements=NUMEL, width=PLAN.width, total=float(ranks))
    sums = terms_of_sums(local.mean(0), float(local.square().sum()) / ranks, ranks, plain.total)
    for terms in (terms_of(local, plain.total), sums):
        right = check_aggregate(terms, sketch_of(PLAN, total).double(), plain, LOG_RATE)
        divided = check_aggregate(terms, sketch_of(PLAN, total / ranks).double(), plain, LOG_RATE)
        assert not right.wrong
        assert divided.relative_error == pytest.approx(1 - 1 / ranks, rel=1e-2)
        assert divided.wrong
    ratio = rounding_tolerance(terms_of(local, plain.total), plain, LOG_RATE)
    mean = replace(plain, total=1.0)
    assert ratio == pytest.approx(ranks * rounding_tolerance(terms_of(local), mean, LOG_RATE), rel=1e-6)
    assert (plain.result(ranks), mean.result(ranks)) == ("sum", "mean")


def test_a_gradient_that_is_not_finite_is_not_called_wrong() -> None:
    local = sketches_of(gradients(2, torch.float32, 0))
    aggregate = local.mean(0)
    aggregate[3] = math.nan
    assert not check_aggregate(terms_of(local), aggregate, arithmetic(torch.float32, 2), LOG_RATE).wrong


# -- causes --------------------------------------------------------------------------------------------------------


def layered(ranks: int = 4, layers: int = 5, size: int = 4096) -> Tensor:
    """(N, L, m) sketches."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(layers, size, generator=generator, dtype=torch.float64)
    return 0.4 * common + torch.randn(ranks, layers, size, generator=generator, dtype=torch.float64)


def one_layer(local: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """The right aggregate, but in layer 2."""
    aggregate = local.mean(0)
    aggregate[2] = make(local[:, 2])
    return aggregate


def pieces(local: Tensor, aggregate: Tensor, previous: Tensor | None = None) -> Pieces:
    """With the layers' sketches themselves as the whole's."""
    return Pieces(local, aggregate, (aggregate - local.mean(0)).flatten(), local.mean(0).flatten(), previous)


def test_every_rule_is_told_from_the_others() -> None:
    local = layered()
    tolerances = torch.full((5,), 1e-6, dtype=torch.float64)
    before = torch.randn(5, 4096, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    dropped = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    doubled = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    half = (torch.arange(4096) < 2048).double()
    element = torch.zeros(4096, dtype=torch.float64).index_fill(0, torch.tensor([7]), 3.0)
    cases: dict[str, Tensor] = {
        "zeroed": one_layer(local, lambda s: 0 * s[0]),
        "stale": one_layer(local, lambda s: before[2]),
        "scale": one_layer(local, lambda s: 4 * s.mean(0)),
        "weights": one_layer(local, lambda s: dropped @ s / 4),
        "unreduced": one_layer(local, lambda s: s[3]),
        "partly-zeroed": one_layer(local, lambda s: s.mean(0) * half),
        "element": one_layer(local, lambda s: s.mean(0) + element),
        "noise": one_layer(local, lambda s: s.mean(0) + 0.1 * noise),
    }
    for kind, aggregate in cases.items():
        cause = explain(pieces(local, aggregate, before), tolerances)
        assert (cause.kind, cause.layers) == (kind, (2,))
    assert explain(pieces(local, cases["scale"]), tolerances).factor == pytest.approx(4.0)
    missing = explain(pieces(local, cases["weights"]), tolerances)
    assert missing.ranks == (1,)
    assert missing.weights == pytest.approx((1, 0, 1, 1), abs=1e-6)
    twice = explain(pieces(local, one_layer(local, lambda s: doubled @ s / 4)), tolerances)
    assert (twice.kind, twice.ranks) == ("weights", (3,))
    assert explain(pieces(local, cases["unreduced"]), tolerances).ranks == (3,)
    share = float((local[:, 2].mean(0) * (1 - half)).square().sum() / local.mean(0).square().sum())
    assert explain(pieces(local, cases["partly-zeroed"]), tolerances).factor == pytest.approx(share)
    assert explain(pieces(local, cases["noise"]), tolerances, leftover=(1,)) == Cause("leftover", (2,), ranks=(1,))


def test_nobody_is_named_where_ranks_cannot_be_told_apart() -> None:
    local = layered()
    local[1] = local[0]  # two ranks with the same rows
    weights = torch.tensor([0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    aggregate = one_layer(local, lambda s: torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64) @ s / 4)
    cause = explain(pieces(local, aggregate), torch.full((5,), 1e-6, dtype=torch.float64))
    assert cause.ranks == ()
    assert torch.equal((weights[:, None] * local[:, 2]).sum(0), local.sum(0)[2])  # the same sum: no rule can tell


def test_noise_is_never_taken_for_a_missing_piece() -> None:
    """The projection of small noise on the mean is near minus its squared length, as a missing piece's is."""
    local = layered()
    tolerances = torch.full((5,), 1e-6, dtype=torch.float64)
    for seed in range(40):
        noise = torch.randn(4096, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for size in (1e-3, 1e-2, 1e-1):
            aggregate = local.mean(0)
            aggregate[2] += size * noise
            assert explain(pieces(local, aggregate), tolerances).kind == "noise", (seed, size)


# -- what no factor explains of an applied gradient --------------------------------------------------------------------


@pytest.mark.parametrize("tail", [0.0, 1.0, 2.0, 3.0])
def test_a_rounded_multiple_leaves_its_rounding_alone(tail: float) -> None:
    """With a few large elements, as the embeddings of a trained model have, one dot product is off by 10 roundoffs."""
    unit = UNIT_ROUNDOFF[torch.float32]
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(16_384, generator=generator)
        aggregate = values * torch.exp(tail * torch.randn(16_384, generator=generator))
        exact = 0.1 + torch.rand((), generator=generator)
        total = exact * aggregate
        factor, error = multiple_of(total, aggregate)
        # the total's own rounding, and that of the aggregate times the factor
        assert float(error.double().norm()) <= 2.0**0.5 * unit * float(total.double().norm())
        assert float(factor) == pytest.approx(float(exact), rel=4 * unit)


def test_what_is_no_multiple_is_told_in_full() -> None:
    generator = torch.Generator().manual_seed(1)
    aggregate, noise = torch.randn(2, 4096, generator=generator)
    noise -= noise @ aggregate / (aggregate @ aggregate) * aggregate
    factor, error = multiple_of(0.5 * aggregate + 0.01 * noise, aggregate)
    assert float(factor) == pytest.approx(0.5, rel=1e-5)
    assert float(error.norm()) == pytest.approx(0.01 * float(noise.norm()), rel=1e-4)


def test_without_an_aggregate_everything_is_error() -> None:
    total = torch.ones(4)
    factor, error = multiple_of(total, torch.zeros(4))
    assert (float(factor), error.tolist()) == (0.0, [1.0] * 4)
