"""Each statistic against its formula, written out naively; NaN and zero are never hidden."""

from __future__ import annotations

import math

import pytest
import torch

from ds_silent.maths import sketch, statistics
from tests.support.training import oracle


def random_gradients(ranks: int, numel: int = 400, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator, dtype=torch.float64)
    return common + torch.randn(ranks, numel, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_direction_norm_and_noise_match_the_naive_oracle(ranks: int) -> None:
    gradients = random_gradients(ranks)
    truth = oracle([0.0] * ranks, [{"p": g} for g in gradients], 1, samples=12 * ranks)
    norms = gradients.norm(dim=1)
    cosines = statistics.cosines_of(gradients)
    gram = statistics.gram_of(cosines, norms)
    direction = statistics.direction_stats(gram, cosines, "exact", 1024)
    assert direction.mean_cosine == pytest.approx(truth["mean_cosine"], rel=1e-12)
    assert direction.per_rank == pytest.approx(truth["per_rank_cosine"], rel=1e-12)
    low = min((truth["cosine"][i][j], (i, j)) for i in range(ranks) for j in range(i + 1, ranks))
    assert (direction.min_cosine, direction.min_pair) == (pytest.approx(low[0]), low[1])
    noise = statistics.noise_scale(float(gram.diagonal().mean()), float(gram.mean()), ranks, 12.0)
    assert noise == pytest.approx(truth["noise_scale"], rel=1e-9)
    stats = statistics.norm_stats(norms, "exact", None)
    assert stats.std == pytest.approx(truth["grad_norm"]["std"], rel=1e-12)


def test_noise_scale_follows_from_the_mean_cosine() -> None:
    """With equal norms c = 1 / (1 + B_noise / b): FACTS of the gradient noise scale, the other way round."""
    cosine, batch, ranks = 0.2, 8.0, 4
    gram = torch.full((ranks, ranks), cosine, dtype=torch.float64).fill_diagonal_(1.0)
    noise = statistics.noise_scale(1.0, float(gram.mean()), ranks, batch)
    assert cosine == pytest.approx(1 / (1 + noise / batch), rel=1e-12)


def test_standard_error_of_the_mean_cosine_is_the_spread_over_sketches() -> None:
    gradients = random_gradients(5, numel=3000, seed=1).float()
    true = statistics.cosines_of(gradients.double())
    first, second = torch.triu_indices(5, 5, offset=1)
    estimates = []
    for seed in range(300):
        plan = sketch.make_plan(3000, 256, seed=seed)
        cosines = statistics.cosines_of(torch.stack([sketch.sketch_of(plan, g) for g in gradients]).double())
        estimates.append(float(cosines[first, second].mean()))
    spread = float(torch.tensor(estimates, dtype=torch.float64).std())
    claimed = statistics.mean_cosine_error(true, 256)
    assert spread == pytest.approx(claimed, rel=0.2)  # 300 samples know a standard deviation to 4 %


def test_two_ranks_have_the_error_of_one_cosine() -> None:
    cosines = torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
    assert statistics.mean_cosine_error(cosines, 1024) == pytest.approx(sketch.cosine_error(0.3, 1024), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 7, 100])
def test_constant_size_form_agrees_with_the_pairs(ranks: int) -> None:
    cosine = 0.15
    vectors = torch.linalg.cholesky(
        torch.full((ranks, ranks), cosine, dtype=torch.float64).fill_diagonal_(1.0)
    )  # rows of unit length with equal cosines
    pairs = statistics.direction_stats(vectors @ vectors.T, statistics.cosines_of(vectors), "sketch", 4096)
    sums = statistics.constant_size_direction(vectors.sum(0), None, ranks, 4096)
    assert sums.mean_cosine == pytest.approx(pairs.mean_cosine, rel=1e-9)
    assert sums.standard_error == pytest.approx(pairs.standard_error, rel=1e-9)
    assert sums.min_cosine is None


def test_a_rank_without_gradient_is_seen_not_averaged_away() -> None:
    gradients = random_gradients(3)
    gradients[1] = 0.0
    cosines = statistics.cosines_of(gradients)
    stats = statistics.direction_stats(statistics.gram_of(cosines, gradients.norm(dim=1)), cosines, "exact", 1024)
    assert math.isnan(stats.mean_cosine)
    assert stats.min_pair == stats.max_pair == (0, 2)  # the others are compared with each other
    assert stats.min_cosine == pytest.approx(float(cosines[0, 2]))
    assert math.isnan(stats.per_rank[1])
    assert not math.isnan(stats.per_rank[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_rank_is_seen(bad: float) -> None:
    gradients = random_gradients(3)
    gradients[2, 5] = bad
    norms = gradients.norm(dim=1)
    assert not math.isfinite(statistics.norm_stats(norms, "exact", None).mean)
    cosines = statistics.cosines_of(gradients)
    stats = statistics.direction_stats(statistics.gram_of(cosines, norms), cosines, "exact", 1024)
    assert math.isnan(stats.mean_cosine)
    healthy = gradients[:2]
    whole = float(healthy[0] @ healthy[1] / healthy[0].norm() / healthy[1].norm())
    assert stats.min_pair == stats.max_pair == (0, 1)
    assert stats.min_cosine == pytest.approx(whole, rel=1e-12)
    assert stats.per_rank[:2] == pytest.approx((whole, whole), rel=1e-12)  # each with the other healthy one
    assert math.isnan(stats.per_rank[2])


def test_without_two_healthy_ranks_there_is_no_pair_to_name() -> None:
    gradients = random_gradients(2)
    gradients[1, 0] = math.nan
    cosines = statistics.cosines_of(gradients)
    stats = statistics.direction_stats(gradients @ gradients.T, cosines, "exact", 1024)
    assert math.isnan(stats.min_cosine)
    assert stats.min_pair == (0, 1)
    assert all(math.isnan(value) for value in stats.per_rank)


def test_identical_ranks() -> None:
    gradients = random_gradients(1).repeat(4, 1)
    cosines = statistics.cosines_of(gradients)
    stats = statistics.direction_stats(statistics.gram_of(cosines, gradients.norm(dim=1)), cosines, "sketch", 1024)
    assert stats.mean_cosine == pytest.approx(1.0, abs=1e-12)
    assert stats.standard_error == pytest.approx(0.0, abs=1e-6)
    assert statistics.loss_stats(torch.full((4,), 2.5, dtype=torch.float64)).std == 0.0
