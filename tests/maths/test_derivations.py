"""The formulas that docs/mathematics.md derives, against numbers that know nothing of the derivations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ds_silent.detectors.sequential import WITHIN, SequentialTest
from ds_silent.maths.sketch import cosine_error, effective_size, make_plan, sketch_of
from ds_silent.maths.statistics import angle_between, mean_cosine_error, noise_scale

SIZE, DIMENSION, SEEDS = 256, 40_000, 400


@pytest.fixture(scope="module")
def gram() -> tuple[torch.Tensor, torch.Tensor]:
    """(3, 3) cosines of three gradients of length 1, and (SEEDS, 3, 3) inner products of sketches with other signs."""
    random = torch.Generator().manual_seed(3)
    shared = torch.randn(DIMENSION, generator=random)
    vectors = torch.stack([shared + scale * torch.randn(DIMENSION, generator=random) for scale in (0.5, 1.0, 2.0)])
    vectors /= vectors.norm(dim=1, keepdim=True)
    sketches = torch.stack(
        [
            torch.stack([sketch_of(plan, vector) for vector in vectors])
            for plan in (make_plan(DIMENSION, SIZE, seed=seed) for seed in range(SEEDS))
        ]
    ).double()
    return (vectors @ vectors.T).double(), sketches @ sketches.transpose(1, 2)


def test_inner_products_survive_with_the_covariance_that_is_stated(gram: tuple[torch.Tensor, torch.Tensor]) -> None:
    true, seen = gram
    assert (seen.mean(0) - true).abs().max() < 4 * math.sqrt(2 / SIZE / SEEDS)
    deviations = seen - true
    for i, j, k, m in itertools.product(range(3), repeat=4):
        stated = float(true[i, k] * true[j, m] + true[i, m] * true[j, k]) / effective_size(SIZE)
        measured = float((deviations[:, i, j] * deviations[:, k, m]).mean())
        assert measured == pytest.approx(stated, abs=0.25 * 2 / SIZE), (i, j, k, m)


def test_standard_errors_of_cosine_mean_and_norm(gram: tuple[torch.Tensor, torch.Tensor]) -> None:
    true, seen = gram
    lengths = seen.diagonal(dim1=1, dim2=2).sqrt()
    cosines = seen / (lengths[:, :, None] * lengths[:, None, :])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert float(cosines[:, i, j].std()) == pytest.approx(cosine_error(float(true[i, j]), SIZE), rel=0.15)
    assert float(lengths[:, 0].std()) == pytest.approx((2.0 * effective_size(SIZE)) ** -0.5, rel=0.15)
    pairs = cosines[:, [0, 0, 1], [1, 2, 2]]
    stated = mean_cosine_error(true, SIZE)
    assert float(pairs.mean(1).std()) == pytest.approx(stated, rel=0.15)
    as_if_independent = math.sqrt(float(pairs.var(0).sum())) / 3
    assert stated > 1.2 * as_if_independent  # pairs share ranks


def test_the_angle_of_two_weighted_sums_and_its_error(gram: tuple[torch.Tensor, torch.Tensor]) -> None:
    true, seen = gram
    equal = torch.ones(3, dtype=torch.float64)
    for weights in ((1.0, 2.0, 9.0), (3.0, 1.0, 1.0), (1.0, -1.0, 0.0), (-1.0, -1.0, -2.0)):
        other = torch.tensor(weights, dtype=torch.float64)
        dot, lengths = equal @ true @ other, (equal @ true @ equal).sqrt() * (other @ true @ other).sqrt()
        angle, none = angle_between(true, equal, other, 0)
        assert (angle, none) == (pytest.approx(math.degrees(math.acos(dot / lengths))), 0.0)
        estimates = torch.tensor([angle_between(one, equal, other, SIZE) for one in seen])
        stated = angle_between(true, equal, other, SIZE)[1]
        assert float(estimates[:, 0].mean()) == pytest.approx(angle, abs=4 * stated / math.sqrt(SEEDS) + 0.01 * stated)
        assert float(estimates[:, 0].std()) == pytest.approx(stated, rel=0.15)
        assert float(estimates[:, 1].mean()) == pytest.approx(stated, rel=0.05)
    assert angle_between(true, equal, 7.0 * equal, SIZE) == pytest.approx((0.0, 0.0), abs=1e-6)
    nothing = torch.zeros(3, dtype=torch.float64)
    for one, other, known in ((nothing, equal, true), (equal, nothing, true), (equal, equal, true * math.nan)):
        assert all(map(math.isnan, angle_between(known, one, other, SIZE)))


def test_the_noise_scale_and_the_cosine_that_follows_from_it() -> None:
    ranks, rows, dimension, spread = 8, 4, 20_000, 1.5
    random = np.random.default_rng(1)
    signal = np.full(dimension, dimension**-0.5)  # |G| = 1
    true = spread**2  # tr S / |G|^2, in rows
    estimates, cosines = [], []
    for _ in range(30):
        noise = spread * dimension**-0.5 * random.standard_normal((ranks, rows, dimension)).mean(axis=1)
        gradients = signal + noise
        mean_squared, squared_mean = (gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum()
        estimates.append(noise_scale(float(mean_squared), float(squared_mean), ranks, rows))
        units = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        cosines.append((np.sum(units @ units.T) - ranks) / (ranks * (ranks - 1)))
    assert np.mean(np.array(estimates, dtype=float)) == pytest.approx(true, rel=0.02)
    assert np.mean(cosines) == pytest.approx(1.0 / (1.0 + true / rows), rel=0.02)


@pytest.mark.parametrize(("ranks", "cosine"), [(4, 0.0), (4, 0.3), (64, 0.1)])
def test_the_error_that_a_missing_rank_makes(ranks: int, cosine: float) -> None:
    random = np.random.default_rng(2)
    own = random.standard_normal((ranks, 20_000))
    gradients = math.sqrt(cosine) * random.standard_normal(20_000) + math.sqrt(1.0 - cosine) * own
    mean, without = gradients.mean(0), gradients[1:].sum(0) / ranks
    error = np.linalg.norm(without - mean) / np.linalg.norm(mean)
    assert error == pytest.approx(1.0 / math.sqrt(ranks * (1.0 + (ranks - 1) * cosine)), rel=0.03)


def test_a_ranks_own_weight() -> None:
    ranks, weights = 64, {5: 0.0, 40: 1.5}
    random = np.random.default_rng(4)
    gradients = 0.3 * random.standard_normal(50_000) + random.standard_normal((ranks, 50_000))
    entered = np.array([weights.get(rank, 1.0) for rank in range(ranks)])
    mean = gradients.mean(0)
    error = entered @ gradients / ranks - mean
    for rank in (5, 40, 63):
        left = gradients[rank] - (gradients[rank] @ mean) / (mean @ mean) * mean
        found = 1.0 + ranks * (error @ left) / (left @ left)
        assert found == pytest.approx(entered[rank], abs=0.05)


@pytest.mark.parametrize("draw", ["standard_normal", "standard_cauchy"])
def test_the_evidence_of_a_step_has_mean_one_whatever_the_distribution(draw: str) -> None:
    test = SequentialTest(series=1, ranks=4, cap=50.0)
    random = np.random.default_rng(5)
    for step in range(20):
        test.step(step, getattr(random, draw)((1, 4)), np.ones(4, dtype=bool))
        within = np.exp(test.gain[0, : 2 * len(WITHIN)])  # each permutation is as likely: the mean over the ranks
        np.testing.assert_allclose(within.mean(axis=1), 1.0, rtol=1e-12)
        assert within.max() <= 4.0


def test_the_mean_time_to_a_false_alarm_is_at_least_what_is_asked_for() -> None:
    asked, times = 50.0, []
    random = np.random.default_rng(6)
    for _ in range(300):
        evidence, step = 0.0, 0
        while evidence < asked:
            step += 1
            z = random.standard_normal(4)
            evidence = (1.0 + evidence) * math.exp(z[0]) / float(np.mean(np.exp(z)))
        times.append(step)
    assert np.mean(times) > asked - 3 * np.std(times) / math.sqrt(len(times))


def test_rows_seen_where_each_rank_has_its_own_order() -> None:
    ranks, rows = 4, 20_000
    random = np.random.default_rng(7)
    shares = [random.permutation(rows)[rank::ranks] for rank in range(ranks)]
    for share in (0.5, 1.0):
        seen = len(set(np.concatenate([own[: int(share * len(own))] for own in shares]).tolist())) / rows
        assert seen == pytest.approx(1.0 - (1.0 - share / ranks) ** ranks, abs=0.01)
