"""Every cause that can be found is told in one sentence, whether it names ranks or not."""

from __future__ import annotations

import typing

import pytest

from ds_silent.detectors.result import reduction
from ds_silent.maths.causes import Cause, Kind
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.measure.evidence import ReductionEvidence
from tests.made_records import Run

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
