"""SharedRows, repeats and the epoch, each against the most naive count there is."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch

from ds_silent.capture.loaders import Walk
from ds_silent.exchange.row_ids import Ids, Sampling, StepIds, pack_ids, pack_rows, unpack_ids
from ds_silent.maths.statistics import expected_coverage
from ds_silent.measure.coverage import ALL_PAIRS, EpochCoverage, SharedRows, epoch_is_over, shared_rows
from ds_silent.measure.row_history import RecentRows, RowsAgain
from ds_silent.measure.row_tracker import RowsOfStep, RowTracker, one_view
from finetune.sampler import Plan, ResumableSampler, step_positions
from tests.support.ids_by_rank import by_rank

# -- duplicates ------------------------------------------------------------------------------------------------------


def duplicates(ids: list[Ids]) -> SharedRows:
    return shared_rows(*by_rank(ids))


def naive(ids: list[Ids]) -> SharedRows:
    sets = [set(one.tolist()) for one in ids]
    holders = Counter(row for one in sets for row in one)
    pairs = [(i, j, len(sets[i] & sets[j])) for i, j in itertools.combinations(range(len(ids)), 2) if sets[i] & sets[j]]
    many = sum(count > 1 for count in holders.values())
    return SharedRows(many, tuple(sorted(pairs, key=lambda pair: (-pair[2], pair))))


def test_duplicates_against_sets() -> None:
    generator = np.random.default_rng(5)
    for ranks, rows, span in itertools.product((1, 2, 3, 8), (0, 1, 6), (4, 40, 2000)):
        ids = [generator.integers(-span, span, rows if rank else rows * 2) for rank in range(ranks)]
        assert duplicates(ids) == naive(ids)


def test_replicas_and_one_pair() -> None:
    same = [np.arange(8)] * 4
    assert duplicates(same).count == 8
    assert duplicates(same).pairs == tuple((i, j, 8) for i, j in itertools.combinations(range(4), 2))
    pair = [np.arange(8) + 100 * rank for rank in range(4)]
    pair[3] = pair[1][::-1]
    found = duplicates(pair)
    assert (found.count, found.pairs) == (8, ((1, 3, 8),))
    healthy = duplicates([np.arange(8) + 100 * rank for rank in range(4)])
    assert (healthy.count, healthy.pairs) == (0, ())


def test_pairs_of_any_number_of_ranks() -> None:
    pairs = tuple((rank, rank + 1, 1) for rank in range(0, 600, 2))
    assert duplicates([np.array([rank // 2]) for rank in range(600)]) == SharedRows(300, pairs)


def test_a_row_that_many_ranks_hold_makes_a_chain_of_pairs() -> None:
    ids = [np.array([7, 8, 100 + rank]) for rank in range(ALL_PAIRS)]
    assert duplicates(ids) == naive(ids)
    chain = tuple((rank, rank + 1, 2) for rank in range(ALL_PAIRS))
    assert duplicates([*ids, np.array([8, 7, 1])]) == SharedRows(2, chain)


# -- rows that a rank takes again ------------------------------------------------------------------------------------


def test_own_repeats_against_sets() -> None:
    generator = np.random.default_rng(6)
    for ranks, rows, span in itertools.product((1, 2, 5), (0, 1, 6), (4, 40)):
        recent, held = RecentRows(), [set[int]() for _ in range(ranks)]
        for _ in range(4):
            ids = [generator.integers(-span, span, rows) for _ in range(ranks)]
            expected = []
            for rank, one in enumerate(ids):
                taken = set(held[rank])
                again = 0
                for row in one.tolist():
                    again += row in taken
                    taken.add(row)
                expected.append(again)
                held[rank] = set(one.tolist())
            assert recent.repeats(*by_rank(ids), ranks) == tuple(expected)


def test_another_ranks_visit_is_no_repeat() -> None:
    recent = RecentRows()
    recent.repeats(*by_rank([np.array([1, 2]), np.array([3, 4])]), 2)
    assert recent.repeats(*by_rank([np.array([3, 4]), np.array([3, 2])]), 2) == (0, 1)


# -- the epoch -------------------------------------------------------------------------------------------------------


def test_exact_below_the_capacity() -> None:
    generator = np.random.default_rng(1)
    epoch, counts = EpochCoverage(capacity=512), Counter[int]()
    for _ in range(60):
        ids = generator.integers(-250, 250, 16)
        epoch.update(ids)
        counts.update(ids.tolist())
        assert epoch.seen(500).value == len(counts) / 500
        assert epoch.seen(500).standard_error == 0.0
    assert epoch._level == 0
    assert epoch.visits == 960
    assert epoch.seen(None).value == len(counts) / 960


def test_a_row_twice_in_one_update_is_one_row() -> None:
    epoch = EpochCoverage()
    epoch.update(np.array([1, 1, 2]))
    assert epoch.seen(4).value == 0.5
    assert epoch.visits == 3


def test_sampled_beyond_it_within_the_stated_error() -> None:
    """40 data sets of other ids: the errors must have the stated size, neither more nor less."""
    scores = []
    rows = 20_000
    for seed in range(40):
        generator = np.random.default_rng(seed)
        ids = generator.integers(-(2**63), 2**63 - 1, rows)
        visited = ids[generator.integers(0, rows, rows)]  # 63.2 % seen
        epoch = EpochCoverage(capacity=512)
        for part in np.array_split(visited, 50):
            epoch.update(part)
        assert epoch._level
        assert len(epoch._seen) <= 512
        seen = epoch.seen(rows)
        assert 0 < seen.standard_error < 0.07 * seen.value
        scores.append((seen.value - len(np.unique(visited)) / rows) / seen.standard_error)
    assert 0.7 < np.std(scores) < 1.35  # 40 draws: +- 0.11
    assert abs(np.mean(scores)) < 0.55  # +- 0.16
    assert np.abs(scores).max() < 4.5


def test_the_sample_does_not_depend_on_order_or_on_repetition() -> None:
    ids = np.random.default_rng(2).permutation(5000)
    one, other = EpochCoverage(capacity=100), EpochCoverage(capacity=100)
    for part in np.array_split(ids, 7):
        one.update(part)
    for part in np.array_split(np.concatenate([ids[::-1], ids[:50]]), 31):
        other.update(part)
    assert one._seen == other._seen


@pytest.mark.parametrize(
    ("world_size", "mode", "own_seeds", "seen"),
    [
        (4, "sharded", False, 1.0),
        (4, "sharded", True, 0.685),
        (8, "sharded", True, 0.658),
        (4, "replicated", False, 0.25),
    ],
)
def test_the_figures_of_the_seed_scenarios(world_size: int, mode: str, own_seeds: bool, seen: float) -> None:
    """52,002 Alpaca rows through the fine-tune's own sampler: FACTS' 68.5 % at 4 ranks, 65.8 % at 8."""
    plan = Plan(rows=52002, world_size=world_size, micro_batch=16, accumulation=1, mode=mode)  # type: ignore[arg-type]
    seeds = [42 + rank if own_seeds else 42 for rank in range(world_size)]
    walks = [
        [step_positions(plan, seed, rank, 0, step).reshape(-1) for step in range(plan.steps_per_epoch)]
        for rank, seed in enumerate(seeds)
    ]
    epoch = EpochCoverage()
    for parts in zip(*walks, strict=True):
        epoch.update(np.concatenate(parts))
    assert epoch._level == 0
    assert epoch.seen(52002).value == pytest.approx(seen, abs=0.003)
    if own_seeds:
        assert epoch.seen(52002).value == pytest.approx(expected_coverage(world_size), abs=0.003)


def walk(rows: int, own_seeds: bool, per_rank: int, ranks: int = 4) -> RowsOfStep:
    """One epoch of the fine-tune's sampler, its ids sent and tracked as in a training: what the last step says."""
    plan = Plan(rows=rows, world_size=ranks, micro_batch=per_rank, accumulation=1, mode="sharded")
    samplers = [ResumableSampler(plan, 42 + rank if own_seeds else 42, rank) for rank in range(ranks)]
    tracker, told = RowTracker(), None
    for _ in range(plan.steps_per_epoch):
        taken = [torch.from_numpy(np.concatenate(list(sampler.step()))) for sampler in samplers]
        told = tracker.step(torch.stack([pack_ids(ids, per_rank) for ids in taken]).double(), per_rank, rows)
    assert told is not None
    return told


@pytest.mark.parametrize(("rows", "sampled"), [(52_000, False), (200_000, True)])
def test_an_epoch_of_the_fine_tune_is_tracked_as_its_sampler_deals_it(rows: int, sampled: bool) -> None:
    """S1-3 at 4 ranks: 1 - (1 - 1/4)^4 = 68.4 % of the rows are seen. Of n rows, each seen with probability q, the
    share has a standard deviation below sqrt(q (1 - q) / n); the tracker says its own error. S1-1: all rows, once.
    """
    own, same = (walk(rows, own_seeds, per_rank=500) for own_seeds in (True, False))
    assert own.evidence.coverage is not None
    assert same.evidence.coverage is not None
    assert (own.evidence.coverage.error > 0) == (same.evidence.coverage.error > 0) == sampled
    chance = expected_coverage(4)
    deviation = math.hypot(math.sqrt(chance * (1 - chance) / rows), own.evidence.coverage.error)
    assert deviation < 0.005
    assert abs(own.evidence.coverage.seen - chance) < 4 * deviation
    assert own.evidence.coverage.epoch == same.evidence.coverage.epoch == 1.0
    assert own.evidence.coverage.repeated == pytest.approx(1.0 - own.evidence.coverage.seen)
    if sampled:
        assert abs(same.evidence.coverage.seen - 1.0) < 4 * same.evidence.coverage.error < 0.03
    else:
        assert (same.evidence.coverage.seen, same.evidence.coverage.repeated) == (1.0, 0.0)


@pytest.mark.parametrize(("later", "same"), [(False, False), (False, True), (True, False), (True, True)])
def test_rows_that_are_none_of_the_data_end_the_shares(later: bool, same: bool) -> None:
    """2 ranks, 4 rows a step each; with the fakes 8, of 80 rows: from the first pass on, or from the second.

    Where both ranks draw the same fakes, fewer rows are different: once an epoch of 80 was over before that was seen.
    """
    tracker, told = RowTracker(), []
    generator = np.random.default_rng(0)
    for step in range(20):
        real = np.arange(8).reshape(2, 4) + 8 * (step % 10)
        fake = generator.integers(1 << 40, 1 << 41, (2, 4)) if step >= 10 or not later else real[:, :0]
        fake = fake[[0, 0]] if same else fake
        rows = np.concatenate([real, fake], 1)
        ids = torch.stack([pack_ids(torch.from_numpy(one), 8) for one in rows]).double()
        walk = Walk(starts=(0,) if step % 10 == 0 else (), watched=True, told=False)
        found = tracker.step(ids, rows.shape[1], 80, walk, samples=8 * (step + 1))
        assert found is not None
        told.append(found.coverage.seen)
    first = 10 * later
    assert told[:first] == pytest.approx([(step + 1) / 10 for step in range(first)])
    shares = [0.15, 0.3] if same else [0.2, 0.4]
    assert (told[first : first + 2], set(told[first + 3 :])) == (pytest.approx(shares), {None})


def test_a_step_without_rows_is_known_once_rows_have_come() -> None:
    """As that of a GAN's generator; where rows are never seen, nobody knows."""
    tracker = RowTracker()
    rows, none = (torch.stack([pack_ids(torch.arange(n) + 4 * rank, 4) for rank in range(2)]) for n in (4, 0))
    found = [tracker.step(ids.double(), n, 80) for ids, n in ((none, 0), (rows, 4), (none, 0), (rows + 8, 4))]
    assert [one.evidence.no_rows for one in found] == [False, False, True, False]


def test_a_hundred_million_rows_stay_small() -> None:
    """The ids of 10^8 rows, thinned to those that a full table would keep: what update does then, without the wait."""
    epoch = EpochCoverage()
    for begin in range(0, 4_000_000, 200_000):
        epoch.update(np.arange(begin, begin + 200_000) * 25)
    assert 32768 <= len(epoch._seen) <= 65536
    estimate = epoch.seen(100_000_000)
    assert estimate.value == pytest.approx(0.04, abs=4 * estimate.standard_error)
    assert estimate.standard_error < 0.006 * estimate.value
    assert len(json.dumps(epoch.state_dict())) < 800_000


@pytest.mark.parametrize("rows", [90, 4000])
def test_it_resumes_where_it_was(rows: int) -> None:
    ids = np.random.default_rng(rows).integers(0, rows, rows)
    straight, before, after = (EpochCoverage(capacity=128) for _ in range(3))
    straight.update(ids)
    before.update(ids[: rows // 2])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.update(ids[rows // 2 :])
    assert after.state_dict() == straight.state_dict()
    assert after.seen(rows) == straight.seen(rows)


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    epoch = EpochCoverage(capacity=64)
    epoch.update(np.arange(40))
    good = epoch.state_dict()
    damaged = [
        {**good, "crc": good["crc"] ^ 1},
        {**good, "hashes": "AAAA"},
        {**good, "hashes": "not base64"},
        {**good, "rows": -1},
        {**good, "level": 64},
        {**good, "visits": 3},
        {key: value for key, value in good.items() if key != "level"},
    ]
    for state in damaged:
        with pytest.raises(ValueError, match="coverage in the checkpoint"):
            epoch.load_state_dict(state)
        assert epoch.state_dict() == good


def test_an_epoch_starts_again() -> None:
    epoch = EpochCoverage(capacity=16)
    epoch.update(np.arange(100))
    epoch.start_epoch()
    epoch.update(np.arange(4))
    assert (epoch.visits, epoch.seen(8).value, epoch._level) == (4, 0.5, 0)
    assert EpochCoverage().seen(None).value == 0.0


def test_where_an_epoch_ends() -> None:
    assert not epoch_is_over(0, 64, 52002, 8)
    assert epoch_is_over(812 * 64, 64, 52002, 8)  # drop_last: the 34 rows that are left make no step
    assert not epoch_is_over(812 * 64, 40, 52002, 8)  # the last, smaller batch, filled up to 5 rows per rank
    assert epoch_is_over(52008, 64, 52002, 8)


def test_the_formula() -> None:
    assert expected_coverage(1) == 1.0
    assert expected_coverage(4) == pytest.approx(0.68359375)


def test_an_update_costs_microseconds() -> None:
    """The bound of 100 us is for 64 rows; the fastest of many tries does not depend on who else computes."""
    epoch, ids = EpochCoverage(), np.random.default_rng(0).permutation(60_000)
    times = []
    for begin in range(0, 60_000 - 64, 64):
        started = time.perf_counter()
        epoch.update(ids[begin : begin + 64])
        times.append(time.perf_counter() - started)
    assert min(times) < 100e-6


# -- several views of each row in a micro-batch ------------------------------------------------------------------------

VIEWS = {  # rows of each rank's step of two micro-batches, and what is left of them; None: all
    "behind each other": ([1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
    "neighbours": ([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], [1, 2, 3, 4, 5, 6]),
    "three of each": ([1, 2, 1, 2, 1, 2, 4, 5, 4, 5, 4, 5], [1, 2, 4, 5]),
    "the same micro-batch twice": ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], None),
    "one row comes twice": ([1, 2, 3, 4, 5, 1, 6, 7, 8, 9, 10, 11], None),
    "in another order": ([1, 2, 3, 3, 1, 2, 4, 5, 6, 6, 4, 5], [1, 2, 3, 4, 5, 6]),
    "some of them": ([1, 2, 7, 8, 2, 1, 4, 5, 9, 6, 4, 5], [1, 2, 7, 8, 4, 5, 9, 6]),
    "other numbers": ([1, 2, 7, 8, 2, 1, 4, 5, 9, 6, 4, 3], None),
    "one row alone": ([7, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8], None),
}


def _sent(given: list[int], ranks: int, sampling: Sampling) -> StepIds:
    own = [pack_rows(torch.tensor([1000 * rank + row for row in given]), sampling) for rank in range(ranks)]
    return unpack_ids(torch.stack(own).double(), sampling)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (name, level)
        for name in VIEWS
        for level in (0, 1)
        if not level or name not in ("in another order", "some of them")
    ],
)
def test_views_of_a_row_count_once(name: str, level: int) -> None:
    (given, left), sampling = VIEWS[name], Sampling(12, 12, level)
    sent = _sent(given, 3, sampling)
    found, own_rows = one_view(sent, 12, 2)
    if left is None:
        assert found is sent
        assert own_rows == 12
        return
    expected = _sent(left, 3, sampling)
    assert own_rows == len(left)
    for field in ("values", "owners", "places", "taken", "looked", "sampled"):
        assert getattr(found, field).tolist() == getattr(expected, field).tolist(), field
    assert one_view(sent, 12, 0)[0] is sent  # nobody knows the micro-batches


def test_one_rank_alone_with_views_keeps_them() -> None:
    sampling = Sampling(12, 12)
    own = [torch.tensor(VIEWS["neighbours"][0]), torch.arange(100, 112)]
    sent = unpack_ids(torch.stack([pack_rows(rows, sampling) for rows in own]).double(), sampling)
    assert one_view(sent, 12, 2)[0] is sent


def test_rows_that_a_script_takes_again_beside_what_it_is_dealt() -> None:
    rows = RowsAgain()
    assert rows.of_step(8, 0, 1000, 128) == 0  # a resume: what was before is not known
    assert rows.of_step(16, 0, 1008, 128) == 8  # a replay within the step
    assert rows.of_step(8, 3, 1008, 128) == 8  # and one as a step of its own, with a few of the newest rows
    assert rows.of_step(8, 8, 1008, 128) == 0  # a batch that comes twice
    assert rows.of_step(16, 8, 1016, 128) == 0  # and within one step
    assert rows.of_step(8, 0, 1032, 128) == 0  # a batch is skipped
    assert [rows.of_step(8, 0, 1032, 128) for _ in range(18)] == [0, *[8] * 15, 0, 0]  # the script keeps its batches
    assert rows.of_step(16, 0, 1040, 128) == 8
