"""The simulated orders of a reduction against naive sums in float64 and against gloo."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.numerics.rounding import (
    DTYPES,
    ORDERS,
    changed_bits,
    chunk_length,
    reference_mean,
    relative_error,
    settled_loss_scale,
    spread,
    terms_of_mean,
)
from tests.support.distributed import run_distributed

BITS = {"fp32": 24, "bf16": 8, "fp16": 11}  # of the significand


def gradients_of(ranks: int, elements: int, seed: int = 0) -> Tensor:
    """Of magnitudes that differ, as those of layers do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 0, elements)
    return torch.randn(ranks, elements, generator=generator) * sizes


def rounded(value: float, bits: int) -> float:
    """To ``bits`` significant bits, ties to even. A float64 sum that is rounded again is as good as an exact one."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def naive_sum(values: list[float], bits: int) -> float:
    total = values[0]
    for value in values[1:]:
        total = rounded(total + value, bits)
    return total


def naive_tree(values: list[float], bits: int) -> float:
    if len(values) == 1:
        return values[0]
    pairs = []
    for i in range(0, len(values) - 1, 2):
        pairs.append(rounded(values[i] + values[i + 1], bits))
    if len(values) % 2:
        pairs.append(values[-1])
    return naive_tree(pairs, bits)


def naive(order: str, values: list[float], chunk: int, bits: int) -> float:
    ranks = list(range(len(values)))
    if order == "tree":
        return naive_tree(values, bits)
    if order == "one rank adds":
        return naive_sum(values, bits)
    if order == "ring":  # ends at the rank of the chunk
        members = ranks[chunk + 1 :] + ranks[: chunk + 1]
    elif order == "ring rotated":
        end = (chunk + 1) % len(ranks)
        members = ranks[end + 1 :] + ranks[: end + 1]
    else:
        members = list(reversed(ranks[:chunk])) + list(reversed(ranks[chunk:]))
    return naive_sum([values[rank] for rank in members], bits)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_an_order_is_the_naive_sum_with_a_rounding_after_every_addition(order: str, dtype: str, ranks: int) -> None:
    terms = terms_of_mean(gradients_of(ranks, 97), DTYPES[dtype])
    before = terms.clone()
    result = ORDERS[order](terms)
    chunk = math.ceil(math.ceil(97 / (2 * ranks)) * 2)  # two segments for each rank
    expected = [
        naive(order, terms[:, element].double().tolist(), element // chunk, BITS[dtype]) for element in range(97)
    ]
    assert result.dtype == DTYPES[dtype]
    assert result.double().tolist() == expected
    assert torch.equal(terms, before)


def test_the_orders_are_not_all_the_same() -> None:
    """Else the test above could not tell them apart."""
    terms = terms_of_mean(gradients_of(5, 97), torch.bfloat16)
    results = [ORDERS[order](terms) for order in ORDERS]
    for number, one in enumerate(results):
        for other in results[:number]:
            assert changed_bits(one, other) > 0.1


def all_reduced(ranks: int) -> list[tuple[str, int, Tensor]]:
    found = []
    for dtype in DTYPES:
        for elements in (5, 1003, 2_200_009)[: 3 if dtype == "fp32" else 2]:
            mine = terms_of_mean(gradients_of(ranks, elements), DTYPES[dtype])[dist.get_rank()].clone()
            dist.all_reduce(mine)
            found.append((dtype, elements, mine))
    return found


def test_gloo_is_the_reversed_ring_bit_for_bit() -> None:
    """With fewer elements than segments, and with more than two segments of 1 MiB for each rank."""
    assert chunk_length(2_200_009, 4, 4) == 3 * math.ceil(2_200_009 / 12) != 2 * math.ceil(2_200_009 / 8)
    for results in run_distributed(all_reduced, 4, (4,)):
        assert len(results) == 7
        for dtype, elements, result in results:
            terms = terms_of_mean(gradients_of(4, elements), DTYPES[dtype])
            assert changed_bits(result, ORDERS["ring reversed"](terms)) == 0.0, (dtype, elements)
            if elements > 1000:
                assert changed_bits(result, ORDERS["ring"](terms)) > 0.1


def test_two_ranks_have_one_order() -> None:
    terms = terms_of_mean(gradients_of(2, 501), torch.float16)
    assert all(torch.equal(ORDERS["ring"](terms), ORDERS[order](terms)) for order in ORDERS)


def test_reference_and_error_against_plain_float64() -> None:
    gradients = gradients_of(4, 33)
    expected = [sum(column) / 4 for column in gradients.double().T.tolist()]
    assert reference_mean(gradients).tolist() == pytest.approx(expected, rel=1e-15)
    result = ORDERS["tree"](terms_of_mean(gradients, torch.bfloat16))
    squares = sum((a - b) ** 2 for a, b in zip(result.double().tolist(), expected, strict=True))
    length = sum(b * b for b in expected)
    assert relative_error(result, reference_mean(gradients)) == pytest.approx(math.sqrt(squares / length), rel=1e-12)


def test_spread_is_the_mean_of_each_ranks_micro_batches() -> None:
    micro_batches = gradients_of(8, 11)
    assert torch.equal(spread(micro_batches, 8), micro_batches)
    two = spread(micro_batches, 2)
    for rank in range(2):
        own = micro_batches[4 * rank : 4 * rank + 4]
        assert torch.equal(two[rank], (own[0] + own[1] + own[2] + own[3]) / 4)
        assert torch.equal(two[rank], spread(own, 1)[0])  # as the real processes make it, each its own


def test_changed_bits_looks_at_bits() -> None:
    assert changed_bits(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([-0.0, 1.0, 2.0, 3.0])) == 0.25
    nan = torch.tensor([math.nan, 1.0], dtype=torch.bfloat16)
    assert changed_bits(nan, nan.clone()) == 0.0


def test_the_loss_scale_settles_just_below_overflow() -> None:
    gradients = gradients_of(8, 97)
    scale = settled_loss_scale(gradients)
    assert math.log2(scale).is_integer()
    largest = float(gradients.abs().amax(1).sum())
    assert largest * scale <= 65504 / 2 < largest * 2 * scale
    undivided = (gradients * scale).half()
    assert all(bool(add(undivided).isfinite().all()) for add in ORDERS.values())
    assert settled_loss_scale(torch.zeros(2, 3)) == 1.0
