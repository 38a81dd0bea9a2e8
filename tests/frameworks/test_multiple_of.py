"""What no factor explains of an applied gradient is measured to a unit roundoff, whatever the gradient looks like."""

from __future__ import annotations

import pytest
import torch

from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF, multiple_of


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
