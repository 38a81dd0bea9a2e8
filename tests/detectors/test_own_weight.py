"""A rank that is missing in the aggregate, by less than the noise of a single step: scores that are drawn here."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from ds_silent.detectors.finding import Finding
from ds_silent.detectors.own_weight import OwnWeightTest
from ds_silent.maths.causes import OwnWeights
from ds_silent.measure.evidence import Evidence, ReductionEvidence
from tests.detectors.test_detectors import make

RANKS, NOISE = 256, 0.4  # standard deviation of a weight that a rank finds


def known(weights: np.ndarray, scores: np.ndarray) -> OwnWeights:
    nothing = torch.zeros(RANKS)
    return OwnWeights(torch.from_numpy(weights), torch.from_numpy(scores), 6.0, torch.ones(RANKS, 1), nothing)


def follow(test: OwnWeightTest, steps: range, weight: float, random: np.random.Generator) -> list[list[Finding]]:
    """The findings of each step; rank 5 enters with ``weight``."""
    found = []
    for step in steps:
        weights = 1.0 + NOISE * random.standard_normal(RANKS)
        weights[5] += weight - 1.0
        own = known(weights, (weights - 1.0) / NOISE)
        found.append(
            test.step(
                make(step, [2.0] * RANKS, [1.0] * RANKS, [1.0] * RANKS), Evidence(reduction=ReductionEvidence(own=own))
            )
        )
    return found


@pytest.mark.parametrize(("weight", "most"), [(0.0, 40), (2.0, 40), (0.5, 160)])
def test_the_rank_is_named_with_its_weight(weight: float, most: int) -> None:
    random, test = np.random.default_rng(1), OwnWeightTest(22.0)
    assert not any(follow(test, range(1, 101), 1.0, random))
    found = follow(test, range(101, 101 + most), weight, random)
    named = [findings for findings in found if findings]
    assert named, f"not found in {most} steps"
    finding = named[0][0]
    assert (finding.kind, finding.ranks) == ("aggregation-error", (5,))
    assert abs(finding.since - 101) <= 15
    assert all(len(findings) == 1 for findings in named)
    said, error = map(float, re.findall(r"([-\d.]+) times, with a standard error of ([\d.]+\d)", finding.message)[0])
    assert 0.0 < error < 0.5
    assert abs(said - weight) < 4.0 * error  # told as soon as it stands out, so chance adds to it


def test_it_ends_and_is_kept_over_a_resume() -> None:
    random, test = np.random.default_rng(2), OwnWeightTest(22.0)
    assert follow(test, range(1, 60), 0.0, random)[-1]
    again = OwnWeightTest(22.0)
    again.load_state_dict(test.state_dict())
    assert [finding.key for finding in again.standing()] == ["own-weight:5"]
    assert not follow(again, range(60, 460), 1.0, random)[-1]
    assert again.scores
    again.step(make(460, [2.0] * RANKS, [1.0] * RANKS, [1.0] * RANKS), Evidence())
    assert again.scores == (), "nothing was weighed"


def test_health_names_nobody() -> None:
    """Heavy tails, and ranks that nobody knows of, are no evidence."""
    random, test = np.random.default_rng(3), OwnWeightTest(22.0)
    for step in range(1, 1501):
        weights = 1.0 + NOISE * random.standard_t(3, RANKS)
        scores = (weights - 1.0) / NOISE
        scores[7] = 0.0
        own = known(weights, scores)
        assert not test.step(
            make(step, [2.0] * RANKS, [1.0] * RANKS, [1.0] * RANKS), Evidence(reduction=ReductionEvidence(own=own))
        )
