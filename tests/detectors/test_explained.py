"""What covariates explain is taken out, and nothing else: a column without spread explains nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from ds_silent.detectors.comparisons import Explained
from ds_silent.detectors.outlier import OutlierTest
from ds_silent.measure.evidence import Evidence
from tests.support.made_records import make

LOG_STEPS = math.log(4e6)  # as at one false alarm per million steps
TOKENS = (1, 7, 100, 255, 511, 1023, 4095, 8191, 100_003, 1_000_000_007)
RANKS = (3, 4, 8, 16, 32, 48, 64, 1024)
HEALTHY, LIMIT = 20, 40  # steps before the fault, and after it


def found(
    ranks: int,
    tokens: Callable[[np.random.Generator, int], np.ndarray] | int,
    seed: int = 0,
    losses: Callable[[np.random.Generator], np.ndarray] | None = None,
    cosines: Callable[[np.random.Generator], np.ndarray] | None = None,
    healthy: int = HEALTHY,
) -> tuple[int | None, tuple[int, ...]]:
    """Steps from "rank 1's gradient is 10 times too long" to the finding, and the ranks of it."""
    random, test = np.random.default_rng(seed), OutlierTest(ranks, LOG_STEPS)
    for step in range(1, healthy + LIMIT + 1):
        loss = 2.0 + 0.2 * random.standard_normal(ranks) if losses is None else losses(random)
        cosine = 0.1 + 0.03 * random.standard_normal(ranks) if cosines is None else cosines(random)
        norms = np.exp(0.16 * random.standard_normal(ranks))
        if step > healthy:
            norms[1] *= 10.0
        dealt = (tokens,) * ranks if isinstance(tokens, int) else tuple(int(n) for n in tokens(random, step))
        findings = test.step(make(step, loss, norms, cosine, None), Evidence(dealt="random", label_tokens=dealt))
        if findings:
            return step - healthy, findings[0].ranks
    return None, ()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_gradient_ten_times_too_long_is_found_where_all_have_equal_tokens(ranks: int) -> None:
    results = {tokens: found(ranks, tokens, seed=tokens % 1000) for tokens in TOKENS}
    assert {tokens: who for tokens, (_, who) in results.items()} == dict.fromkeys(TOKENS, (1,))


def one_token_less(random: np.random.Generator, ranks: int) -> np.ndarray:
    """Packed rows, of which some end a token early."""
    return np.full(ranks, 4096) - random.integers(0, 2, ranks)


def one_rank_with_few(random: np.random.Generator, ranks: int) -> np.ndarray:
    return np.where(np.arange(ranks) == 2, 700, 4096)


def sometimes_short(random: np.random.Generator, ranks: int) -> np.ndarray:
    """Nearly constant; now and then a rank has a short batch."""
    dealt = one_token_less(random, ranks)
    if random.random() < 0.2:
        dealt[random.integers(ranks)] = 900
    return dealt


def a_billion(random: np.random.Generator, ranks: int) -> np.ndarray:
    return 1_000_000_000 + random.integers(-300, 300, ranks)


@pytest.mark.parametrize("tokens", [one_token_less, one_rank_with_few, sometimes_short, a_billion])
@pytest.mark.parametrize("ranks", [8, 32])
def test_nearly_constant_tokens_hide_nothing(
    ranks: int, tokens: Callable[[np.random.Generator, int], np.ndarray]
) -> None:
    for seed in range(3):
        assert found(ranks, lambda random, step: tokens(random, ranks), seed, healthy=100)[1] == (1,)


LEVELS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "constant": lambda random, ranks: np.full(ranks, 0.3),
    "rounding": lambda random, ranks: 0.3 + 1e-9 * random.standard_normal(ranks),
    "offset": lambda random, ranks: 1e9 + random.standard_normal(ranks),
    "zero": lambda random, ranks: np.zeros(ranks),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_losses_or_cosines_without_spread_hide_nothing(ranks: int, level: str) -> None:
    for tokens in (511, 8191):
        seed = ranks + tokens

        def flat(random: np.random.Generator) -> np.ndarray:
            return LEVELS[level](random, ranks)

        assert found(ranks, tokens, seed, losses=flat)[1] == (1,)
        assert found(ranks, tokens, seed, cosines=flat)[1] == (1,)
        assert found(ranks, tokens, seed, losses=flat, cosines=flat)[1] == (1,)


def residual_of(explained: Explained, y: np.ndarray, covariates: list[np.ndarray], peers: np.ndarray) -> np.ndarray:
    return explained.residuals(y[None], np.array(covariates)[None], peers)[0]


def test_a_level_common_to_all_ranks_changes_no_residual() -> None:
    random, peers = np.random.default_rng(0), np.ones(8, dtype=bool)
    low, high = Explained(1), Explained(1)
    for _ in range(50):
        x = random.standard_normal(8)
        y = 3.0 * x + 0.1 * random.standard_normal(8)
        near, far = residual_of(low, y, [x], peers), residual_of(high, y, [x + 1e6], peers)
        assert far == pytest.approx(near, abs=1e-6)
    assert near.std() < 0.3  # the slope was learnt


def test_a_statistic_that_is_its_own_covariate_keeps_its_outlier() -> None:
    random, peers = np.random.default_rng(1), np.ones(8, dtype=bool)
    explained = Explained(2)
    for _ in range(50):
        y = random.standard_normal(8)
        residual_of(explained, y, [y, y], peers)
    y[3] += 30.0
    residual = residual_of(explained, y, [y, y], peers)
    assert np.isfinite(residual).all()
    assert int(np.argmax(residual)) == 3
    assert residual[3] > 10.0  # beyond what was learnt nothing is explained


def test_columns_without_spread_have_no_coefficient_and_no_effect() -> None:
    random, peers = np.random.default_rng(2), np.ones(16, dtype=bool)
    alone, beside = Explained(1), Explained(3)
    for step in range(40):
        x = random.standard_normal(16)
        y = x + 0.1 * random.standard_normal(16)
        y[1] += 9.0 * (step > 20)
        flat = [np.full(16, math.log(255)), 1e9 * (1.0 + 1e-12 * random.standard_normal(16))]
        expected = residual_of(alone, y, [x], peers)
        assert residual_of(beside, y, [x, *flat], peers) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("ranks", [4, 48])
def test_equal_tokens_raise_no_alarm(ranks: int) -> None:
    """At a rate of which 400 steps allow 10 alarms by this detector."""
    random, rate, steps = np.random.default_rng(ranks), 0.025, 400
    test, alarms = OutlierTest(ranks, math.log(1.0 / rate)), 0
    flagged: set[str] = set()
    for step in range(steps):
        norms, cosine = np.exp(random.standard_cauchy(ranks).clip(-50, 50)), random.standard_normal(ranks)
        record = make(step, random.standard_normal(ranks), norms, cosine, None)
        now = {finding.key for finding in test.step(record, Evidence(dealt="random", label_tokens=(511,) * ranks))}
        alarms += len(now - flagged)
        flagged = now
    assert alarms <= steps * rate + 3 * math.sqrt(steps * rate)
