"""Which rank sees which rows, against naive counting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from finetune.sampler import Plan, ResumableSampler, epoch_coverage, permutation, step_positions
from finetune.settings import UserError

PLAN = Plan(rows=100, world_size=4, micro_batch=3, accumulation=2, mode="sharded")


def epoch_of(plan: Plan, rank: int, seed: int = 7, epoch: int = 0) -> list[int]:
    steps = range(plan.steps_per_epoch)
    return [int(p) for step in steps for p in step_positions(plan, seed, rank, epoch, step).reshape(-1)]


def test_a_permutation_holds_every_row_once_and_changes_with_seed_and_epoch() -> None:
    orders = [tuple(permutation(seed, epoch, 50).tolist()) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 3


def test_a_permutation_has_the_same_bits_on_every_machine() -> None:
    assert permutation(42, 0, 8).tolist() == [int(i) for i in np.argsort(_pcg64_raw(42, 0, 8))]


def _pcg64_raw(seed: int, epoch: int, count: int) -> list[int]:
    """PCG64 (XSL-RR 128/64) written out from its publication, seeded with numpy's seed sequence."""
    words = [int(w) for w in np.random.SeedSequence([seed, epoch]).generate_state(4, np.uint64)]
    mask, multiplier = 2**128 - 1, 0x2360ED051FC65DA44385DF649FCCF645
    increment = ((words[2] << 64 | words[3]) << 1 | 1) & mask
    state = (increment + (words[0] << 64 | words[1])) & mask
    state = (state * multiplier + increment) & mask
    found = []
    for _ in range(count):
        state = (state * multiplier + increment) & mask
        mixed, turn = (state >> 64) ^ (state & (2**64 - 1)), state >> 122
        found.append((mixed >> turn | mixed << (64 - turn) % 64) & (2**64 - 1))
    return found


def test_sharded_ranks_share_an_epoch_without_overlap() -> None:
    seen = [position for rank in range(4) for position in epoch_of(PLAN, rank)]
    assert len(seen) == len(set(seen)) == PLAN.steps_per_epoch * 24 == 96


def test_without_drop_last_the_last_batch_is_completed() -> None:
    plan = replace(PLAN, drop_last=False)
    seen = [position for rank in range(4) for position in epoch_of(plan, rank)]
    assert plan.steps_per_epoch == 5
    assert len(seen) == 120
    assert set(seen) == set(range(100))


def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks() -> None:
    one = Plan(rows=100, world_size=1, micro_batch=3, accumulation=8, mode="sharded")
    for step in range(4):
        ours = [int(p) for rank in range(4) for p in step_positions(PLAN, 7, rank, 0, step).reshape(-1)]
        assert sorted(ours) == sorted(int(p) for p in step_positions(one, 7, 0, 0, step).reshape(-1))


def test_replicated_ranks_with_one_seed_see_the_same_rows() -> None:
    plan = replace(PLAN, mode="replicated")
    assert epoch_of(plan, 0) == epoch_of(plan, 3)
    assert plan.steps_per_epoch == PLAN.steps_per_epoch
    assert epoch_of(plan, 0, seed=1) != epoch_of(plan, 0, seed=2)


@pytest.mark.parametrize(
    ("mode", "seeds", "share"),
    [
        ("sharded", [42, 42, 42, 42], 1.0),
        ("sharded", [42, 43, 44, 45], 1 - 0.75**4),
        ("replicated", [42, 42, 42, 42], 0.25),
        ("replicated", [43, 42, 42, 42], 1 - 0.75**2),
        ("replicated", [42, 43, 44, 45], 1 - 0.75**4),
    ],
)
def test_epoch_coverage_is_what_the_formula_says(mode: str, seeds: list[int], share: float) -> None:
    plan = Plan(rows=16_000, world_size=4, micro_batch=4, accumulation=1, mode=mode)  # type: ignore[arg-type]
    # the share of 16,000 rows has a standard deviation below 0.4 %
    assert epoch_coverage(plan, seeds) == pytest.approx(share, abs=0.016 if 0 < share < 1 else 0)


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 9])
def test_a_resumed_sampler_goes_on_with_the_same_rows(stop: int) -> None:
    whole, first, second = (ResumableSampler(PLAN, 7, 1) for _ in range(3))
    expected = [np.stack(list(whole.step())).tolist() for _ in range(12)]
    for _ in range(stop):
        first.step()
    second.go_to(stop)
    assert second.peek().tolist() == first.peek().tolist() == expected[stop]
    assert [np.stack(list(second.step())).tolist() for _ in range(12 - stop)] == expected[stop:]


def test_a_loader_gets_what_is_left_of_an_epoch() -> None:
    whole, later = ResumableSampler(PLAN, 7, 1), ResumableSampler(PLAN, 7, 1)
    later.go_to(PLAN.steps_per_epoch + 3)
    first, second = list(whole), list(whole)
    assert len(first) == len(second) == len(whole) == PLAN.steps_per_epoch * PLAN.accumulation
    assert list(later) == second[3 * PLAN.accumulation :]
    assert [position for micro_batch in first for position in micro_batch] == epoch_of(PLAN, 1)
    assert (whole.epoch, later.epoch) == (2, 2)


def test_too_few_rows_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        UserError, match=r"23 training rows are fewer than one global batch of 24 \(4 ranks x 3 rows x 2"
    ):
        replace(PLAN, rows=23).checked()
    assert replace(PLAN, rows=23, drop_last=False).checked().steps_per_epoch == 1
