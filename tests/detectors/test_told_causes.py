"""Every cause that can be found is told in one sentence, whether it names ranks or not."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest
import torch

from ds_silent.detectors.reduction_errors import reduction
from ds_silent.exchange.layout import Layout
from ds_silent.maths.causes import Cause, Kind
from ds_silent.maths.rounding_bound import AggregateCheck, Arithmetic
from ds_silent.measure.evidence import ReductionEvidence
from ds_silent.measure.reduction_check import ReductionSettings, handed_factors
from tests.support.made_observations import gathered_of
from tests.support.made_records import Run

LAYERS = ("embedding", "layers.0", "head")


@pytest.mark.parametrize("kind", typing.get_args(Kind))
@pytest.mark.parametrize("ranks", [(), (2,)])
def test_every_kind_is_told(kind: Kind, ranks: tuple[int, ...]) -> None:
    if kind == "unreduced" and not ranks:
        return  # it is this rank's gradient by definition
    cause = Cause(kind, (1,), 0.5, ranks, (1.0, 1.0, 0.0, 1.0))
    seen = ReductionEvidence(AggregateCheck(0.75, 1.0, 1e-6), cause, layers=LAYERS)
    (finding,) = reduction(Run().record(), seen)
    assert finding.kind == ("unreduced-gradient" if kind == "unreduced" else "aggregation-error")
    assert finding.ranks == ranks
    assert "the error is 0.75 of it, rounding explains at most 1e-06" in finding.message
    assert finding.message.count("layers.0") == 1
    assert finding.message.endswith(".")


def test_a_gradient_that_ranks_scale_unlike_before_the_step_is_told_with_their_factors() -> None:
    seen = ReductionEvidence(layers=LAYERS, handed=(0.5, 0.5, 4.0, 0.5), received={0: ((0, 1, 3), (2,))})
    (finding,) = reduction(Run().record(), seen)
    assert (finding.kind, finding.ranks) == ("aggregation-error", (2,))
    assert "ranks 0, 1 and 3 applied 0.5 times; rank 2 applied 4 times the aggregate" in finding.message
    two = ReductionEvidence(layers=LAYERS, handed=(1.0, 0.5))
    assert reduction(Run(2).record(), two)[0].ranks == ()  # either may be the odd one


FACTORS = {"reduced.seen": [1.0] * 4, "reduced.squared": [1.0] * 4}


@pytest.mark.parametrize(
    ("handed", "expected"),
    [
        ({}, None),  # no script has touched it
        ({"factor": [0.25] * 4, "squared": [0.0625] * 4}, None),  # all clip alike
        ({"factor": [0.25, 0.25, 1.0, 0.25], "squared": [0.0625, 0.0625, 1.0, 0.0625]}, (0.25, 0.25, 1.0, 0.25)),
        (
            {"factor": [0.0, 0.0, 4.0, 0.0], "squared": [0.0, 0.0, 16.0, 0.0], "seen": [0, 0, 1, 0]},
            (1.0, 1.0, 4.0, 1.0),
        ),
        ({"factor": [0.0, 0.0, 4.0, 0.0], "squared": [0.0, 0.0, 16.0, 0.0], "seen": [0, -1, 1, 0]}, None),  # unseen
        ({"factor": [1.0, 1.0, 0.9, 1.0], "squared": [1.0, 1.0, 0.9, 1.0], "error": [0.0, 0.0, 0.09, 0.0]}, None),
    ],
)
def test_only_multiples_of_the_aggregate_are_compared(
    handed: dict[str, list[float]], expected: tuple[float, ...] | None
) -> None:
    """What a script writes to one parameter may lie in one rank's share alone: that is its own affair."""
    known = {"seen": [float(bool(handed))] * 4, **handed}
    observation = gathered_of(3, 4, **FACTORS, **{f"reduced.handed_{name}": values for name, values in known.items()})
    arithmetic = Arithmetic(torch.float32, before=1, elements=1000, width=64)
    observation = replace(observation, aggregate=torch.ones(64, dtype=torch.float64))
    seen = handed_factors(observation, ReductionSettings(Layout(64), arithmetic, 12.0))
    assert seen is None if expected is None else seen == pytest.approx(expected)


def test_an_error_that_no_rule_explains_is_one_fault_whatever_the_guess() -> None:
    check = AggregateCheck(0.75, 1.0, 1e-6)
    guesses = (
        Cause("noise", (0, 1)),
        Cause("partial", (0, 1, 2), None, (), (1.0, 0.5)),
        Cause("scale", (1,), 0.25, unexplained=(0, 2)),
        None,
    )
    keys = {reduction(Run(2).record(), ReductionEvidence(check, guess, layers=LAYERS))[0].key for guess in guesses}
    assert len(keys) == 1
    ruled = reduction(Run(2).record(), ReductionEvidence(check, Cause("scale", (1,), 0.25), layers=LAYERS))[0].key
    assert ruled not in keys


def test_ranks_that_each_hold_their_own_gradient_are_told_as_one_thing() -> None:
    """Each checks its share of the parameters; a layer that lies in two shares no single rule explains."""
    alone = Cause("unreduced", (0,), 1.0, (0,), elsewhere=(Cause("unreduced", (2,), 1.0, (1,)),), unexplained=(1,))
    check, received = AggregateCheck(0.75, 1.0, 1e-6), {0: ((0,), (1,))}
    seen = ReductionEvidence(check, alone, layers=LAYERS, received=received)
    (finding,) = reduction(Run(2).record(), seen)
    assert (finding.kind, finding.ranks) == ("unreduced-gradient", ())
    assert finding.message.endswith(
        "1e-06. Every rank holds another one in all 3 layers, as far as it was checked its own: nothing was reduced."
    )
    only = replace(alone, elsewhere=(), unexplained=())
    (finding,) = reduction(Run(2).record(), replace(seen, cause=only))
    assert finding.message.endswith("as far as it was checked its own: they were not reduced there.")
    scaled = replace(seen, cause=replace(alone, factor=0.25))
    assert "it is 0.25 times the gradient of rank 0 alone" in reduction(Run(2).record(), scaled)[0].message
