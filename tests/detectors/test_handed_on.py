"""What all ranks' scripts do alike to a reduced gradient: clipped before the loss scale, or by the number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_silent.capture.loss_graph import MEAN, Constants
from ds_silent.detectors.lifecycle import Episodes
from ds_silent.detectors.script_changes import CLIPPED_STEPS as STEPS
from ds_silent.detectors.script_changes import HandedOnTest
from ds_silent.exchange.layout import Layout
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.measure.evidence import Evidence, HandedOn, LabelWeights, ReductionEvidence
from ds_silent.measure.reduction_check import ReductionSettings, handed_on
from ds_silent.records import Event
from tests.support.made_observations import gathered_of
from tests.support.made_records import Run, make

RANKS = 4
NORMS = np.random.default_rng(0).uniform(0.4, 3.0, 60)
SCALES = [2.0 ** (10 + step // 20) for step in range(60)]


def told(
    applied: Iterable[float | None],
    norms: Sequence[float] = NORMS.tolist(),
    scales: Sequence[float] = SCALES,
    weights: LabelWeights | None = None,
) -> list[Event]:
    """The events and notes of steps whose gradients have these norms, before and behind the script's changes."""
    test, episodes, events = HandedOnTest(), Episodes(), list[Event]()
    for step, (norm, after, scale) in enumerate(zip(norms, applied, scales, strict=False), start=1):
        again = HandedOnTest()
        again.load(json.loads(json.dumps(test.save())))  # a resume changes nothing
        test = again
        seen = None if after is None else HandedOn(after / norm, after, scale)
        record = make(step, *[[norm] * RANKS] * 3)
        record = replace(record, grad_norm=replace(record.grad_norm, aggregated=norm))
        evidence = Evidence(reduction=ReductionEvidence(handed_on=seen), label_weights=weights)
        events += episodes.update(step, test.step(record, evidence)) + list(test.notes)
    return events


def clipped(norm: float, most: float = 1.0) -> float:
    return min(norm, most)


def test_a_norm_that_goes_with_the_loss_scale_was_clipped_before_it_was_taken_out() -> None:
    [event] = told(clipped(norm * scale) / scale for norm, scale in zip(NORMS, SCALES, strict=True))
    assert (event.kind, event.severity, event.ranks, event.step) == ("update-mismatch", "warning", (), 21)
    assert event.message == (
        "The gradient is clipped before the loss scale is taken out, on all ranks alike: what is applied has the norm "
        "1 divided by the loss scale (0.000488 at this step), whatever the gradient's own norm is."
    )


def test_it_ends_when_the_scale_is_taken_out_first() -> None:
    first = [clipped(norm * scale) / scale for norm, scale in zip(NORMS[:30], SCALES[:30], strict=True)]
    events = told([*first, *(clipped(norm, 0.3) for norm in NORMS[30:])])
    assert [(event.step, event.phase) for event in events] == [(21, "started"), (31, "ended")]


@pytest.mark.parametrize("most", [0.3, 1.0, math.inf, 2.0**-10])
def test_clipping_in_its_order_is_silent(most: float) -> None:
    assert told(clipped(norm, most) for norm in NORMS) == []
    assert told((clipped(norm, most) for norm in NORMS), scales=[1.0] * 60) == []
    assert told((clipped(norm, most) / 2.0**12 for norm in NORMS), scales=[2.0**12] * 60) == []  # nobody can know


def test_a_gradient_that_only_seems_to_go_with_the_scale_is_silent() -> None:
    steady = [1.0 / scale for scale in SCALES]
    assert told(steady, norms=[2.0] * 60) == []  # the gradient does not change: any factor may be meant
    assert told(steady[21 - STEPS :][: STEPS - 1], scales=SCALES[21 - STEPS :]) == []
    assert told([None] * 60) == []


@pytest.mark.parametrize(("times", "done"), [(4.0, "multiplied by 4"), (0.25, "divided by 4")])
def test_the_number_of_ranks_as_a_factor_is_noted_once(times: float, done: str) -> None:
    [note] = told([times * norm for norm in NORMS], scales=[1.0] * 60)
    assert (note.kind, note.severity, note.step, note.ranks) == ("gradient-changed", "info", 3, ())
    assert f"the gradient is {done}, the number of ranks, on all of them alike" in note.message


def weights(total: float) -> LabelWeights:
    totals = np.full(4, total)
    return LabelWeights(totals, totals / 9, totals / 9, frozenset({MEAN}), frozenset({1}), Constants())


def test_a_factor_that_makes_a_mean_of_the_labels_is_none_too_many() -> None:
    applied = [4.0 * norm for norm in NORMS]
    assert told(applied, scales=[1.0] * 60, weights=weights(0.25)) == []
    assert len(told(applied, scales=[1.0] * 60, weights=weights(1.0))) == 1
    assert told([one * 0.5 for one in applied], scales=[1.0] * 60) == []
    now_and_then = [one if step % 3 else 0.1 * one for step, one in enumerate(applied)]
    assert told(now_and_then, scales=[1.0] * 60) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, HandedOn(0.5, 8.0, 1024.0)),
        ({"seen": [0.0] * 4}, None),
        ({"seen": [1.0, 1.0, -1.0, 1.0]}, None),
        ({"factor": [0.5 / 1024, 0.6 / 1024, 0.5 / 1024, 0.5 / 1024]}, None),
        ({"error": [1.0] * 4}, None),
    ],
)
def test_what_is_handed_on_is_measured_without_the_loss_scale(
    given: dict[str, list[float]], expected: HandedOn | None
) -> None:
    known = {"seen": [1.0] * 4, "factor": [0.5 / 1024] * 4, "squared": [16.0] * 4, "error": [0.0] * 4, **given}
    reduced = {f"reduced.handed_{name}": values for name, values in known.items()}
    reduced |= {"reduced.seen": [1.0] * 4, "reduced.squared": [64.0 * 1024**2] * 4, "loss.scale": [1024.0] * 4}
    observation = gathered_of(3, 4, **reduced)
    observation.aggregate.resize_(64).fill_(1024.0)
    arithmetic = Arithmetic(torch.float32, before=1, elements=1000, width=64, handed_unscaled=True)
    seen = handed_on(observation, ReductionSettings(Layout(64), arithmetic, 12.0))
    assert seen == expected
    wrapped = Arithmetic(torch.float32, before=1, elements=1000, width=64)  # its optimizer takes the scale out later
    assert handed_on(observation, ReductionSettings(Layout(64), wrapped, 12.0)) is None


def test_the_judge_has_it() -> None:
    made, events = Run(ranks=4), list[Event]()
    for _ in range(3):
        record = made.record()
        assert record.grad_norm.aggregated is not None
        seen = HandedOn(4.0, 4.0 * record.grad_norm.aggregated, 1.0)
        events += made.judge.step(record, Evidence(reduction=ReductionEvidence(handed_on=seen)))
    assert [event.kind for event in events] == ["gradient-changed"]
