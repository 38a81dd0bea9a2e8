"""A trace can be folded from whatever is exchanged of a layer; what the optimizer used is one factor of all shares."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_silent.config import parse
from ds_silent.exchange.layout import ExchangeShape, layout_of
from ds_silent.exchange.observation import LEFT_OUT
from ds_silent.measure.record import Context
from ds_silent.measure.tracer import Tracer
from ds_silent.records import Seconds, StepRecord
from ds_silent.trace import Used, layer_size
from tests.support.made_observations import gathered_of


def test_what_is_exchanged_of_a_layer_is_folded_to_what_a_trace_holds() -> None:
    layers = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 500, 2048, 2049, 5000)
    for count, ranks, per_layer, size in product(layers, (1, 16, 17, 64, 65, 256, 4096), (False, True), (256, 16_384)):
        block = {"trace": {"size": 64}, "direction": {"per_layer": per_layer, "sketch_size": size}}
        for aggregation in (False, True):
            config = parse({"silent_consistency": block | {"integrity": {"aggregation": aggregation}}})
            assert config is not None
            layout = layout_of(config, ExchangeShape(ranks, count, 4, 1, False, weights=10))
            assert layout.layers == count
            assert layout.layer_aggregates
            assert layout.layer_size % layer_size(count) == 0
            assert (layout.weights, layout.rows) == (11, 6)


def test_without_a_trace_nothing_more_is_exchanged() -> None:
    config = parse({"silent_consistency": {"integrity": {"aggregation": False}}})
    assert config is not None
    layout = layout_of(config, ExchangeShape(4, 3, 4, 1, False, weights=10))
    assert (layout.layers, layout.layer_aggregates, layout.weights, layout.rows) == (0, False, 0, 0)


# -- what the optimizer used -------------------------------------------------------------------------------------------


def used(*steps: dict[str, list[float]]) -> list[tuple[int | None, Used | None]]:
    """What each of these steps tells of the one before."""
    config = parse({"silent_consistency": {"trace": {}}})
    assert config is not None
    capture: Any = SimpleNamespace(layer_names=("a",), traced=object())
    tracer = Tracer(capture, config, layout_of(config, ExchangeShape(2, 1, 0, 1, False)))
    told = []
    for step, known in enumerate(steps, start=1):
        gathered = gathered_of(step, 2, **{"loss.scale": [4.0, 4.0], "reduced.seen": [1.0, 1.0]} | known)
        traced = tracer.step(gathered, StepRecord(step, step, None, 2), Context(step, 1.0, None, Seconds()))
        assert traced.step is None  # none is due
        told.append((traced.of, traced.used))
    return told


def compared(shares: list[Tensor], applied: list[Tensor]) -> dict[str, list[float]]:
    """What each rank says of its share: applied = factor * share + error, by least squares."""
    factors = [float(one @ own / (own @ own)) for own, one in zip(shares, applied, strict=True)]
    errors = [float((one - c * own).square().sum()) for c, own, one in zip(factors, shares, applied, strict=True)]
    squares = [float(one.square().sum()) for one in applied]
    return {"applied.seen": [1.0, 1.0], "applied.factor": factors, "applied.error": errors, "applied.squared": squares}


@pytest.mark.parametrize("other", [1.0, 1.3])
def test_factors_of_shares_are_one_of_the_whole_and_what_that_leaves_is_an_error(other: float) -> None:
    generator = torch.Generator().manual_seed(1)
    shares = [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2)]
    noise = [0.01 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2)]
    handed = [0.25 * shares[0], 0.25 * shares[1] + noise[1]]  # unscaled by the script: the loss scale was 4
    applied = [0.5 * handed[0] + noise[0], 0.5 * other * handed[1]]
    moved = compared(shares, handed)
    first = {
        "reduced.squared": [float(one.square().sum()) for one in shares],
        "reduced.handed_seen": [1.0, 1.0],
        "reduced.handed_factor": moved["applied.factor"],
        "reduced.handed_error": moved["applied.error"],
    }
    [(_, nothing), (of, found)] = used(first, compared(handed, applied))
    assert nothing is None
    assert of == 1
    assert found is not None
    reduced, together = torch.cat(shares) / 4.0, torch.cat(applied)
    factor = float(together @ reduced / (reduced @ reduced))
    error = float((together - found.factor * reduced).norm() / together.norm())
    assert found.factor == pytest.approx(factor, rel=1e-2 if other == 1.0 else 0.1)
    assert found.error == pytest.approx(error, rel=0.05)


def test_a_step_left_out_used_nothing_and_one_that_was_never_seen_is_not_known() -> None:
    took = {"applied.seen": [1.0, 1.0], "applied.factor": [0.25, 0.25], "applied.squared": [2.0, 3.0]}
    skipped, left_out = {"applied.seen": [-1.0, -1.0]}, {"applied.seen": [LEFT_OUT, LEFT_OUT]}
    assert used({}, took, skipped, {}) == [(None, None), (1, Used(1.0, 0.0)), (2, Used(0.0, 0.0)), (3, None)]
    assert used({}, skipped, left_out) == [(None, None), (1, None), (2, Used(0.0, 0.0))]
    one_took = took | {"applied.seen": [1.0, -1.0]}
    hidden = {"reduced.seen": [1.0, 0.0]}
    assert used({}, one_took, hidden, took) == [(None, None), (1, None), (2, None), (None, None)]
    assert used({}, took | {"applied.squared": [float("nan"), 1.0]})[1] == (1, None)
    assert used({}, took | {"applied.squared": [0.0, 0.0]})[1] == (1, None)
    assert used({}, took | {"applied.factor": [float("nan"), 0.5], "applied.squared": [0.0, 3.0]})[1] == (
        1,
        Used(2.0, 0.0),
    )
