"""Ranks with the same gradient, found from a few numbers of each, at any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from ds_silent.detectors.duplicate_data import COSINE_GAP, same_directions


def ranks(count: int, cosine: float, groups: list[tuple[int, ...]], seed: int = 0) -> tuple[np.ndarray, list, list]:
    """Unit vectors of that cosine with each other, folded to 16 numbers; those of a group but for rounding the same."""
    random = np.random.default_rng(seed)
    size = 1024
    shared, own = random.standard_normal(size), random.standard_normal((count, size))
    vectors = np.sqrt(cosine) * shared + np.sqrt(1.0 - cosine) * own
    losses, norms = 2.0 + 0.05 * random.standard_normal(count), 1.0 + 0.05 * random.standard_normal(count)
    for group in groups:
        for rank in group[1:]:
            noise = random.standard_normal(size)
            vectors[rank] = vectors[group[0]] + np.sqrt(2.0 * COSINE_GAP) / 2.0 * noise
            losses[rank], norms[rank] = losses[group[0]] * (1.0 + 2e-7), norms[group[0]] * (1.0 - 1e-4)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    signs = random.choice([-1.0, 1.0], size)
    return (units * signs).reshape(count, -1, 16).sum(1), losses.tolist(), norms.tolist()


@pytest.mark.parametrize("count", [20, 1024, 16384])
@pytest.mark.parametrize("cosine", [0.05, 0.9, 0.999])
def test_the_same_are_found_and_nobody_else(count: int, cosine: float) -> None:
    groups = [(2, 5), (4, 9, count - 1)]
    assert same_directions(*ranks(count, cosine, groups)) == groups
    assert same_directions(*ranks(count, cosine, [])) == []


def test_one_loss_for_all_hides_nobody() -> None:
    """A loss that is rounded to bf16 is the same on many ranks."""
    directions, losses, norms = ranks(2048, 0.3, [(7, 1500)])
    rounded = np.round(np.array(losses), 1).tolist()
    assert same_directions(directions, rounded, norms) == [(7, 1500)]


def test_all_may_be_the_same_and_a_rank_without_a_direction_is_nobodys_twin() -> None:
    directions, losses, norms = ranks(600, 0.1, [tuple(range(600))])
    assert same_directions(directions, losses, norms) == [tuple(range(600))]
    directions[3], directions[4] = np.nan, np.nan
    losses[3] = losses[4] = float("nan")
    assert same_directions(directions, losses, norms) == [tuple(r for r in range(600) if r not in (3, 4))]
