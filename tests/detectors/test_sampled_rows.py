"""Ranks with the same rows, of which a sample is known: found in the steps that the formula says, none in health."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.same_rows import SampledRowsTest, chance_of_a_row
from ds_silent.exchange.row_ids import Sampling, pack_rows, sampling_of
from ds_silent.maths.mixing import mix64
from ds_silent.measure.evidence import Coverage, Evidence
from ds_silent.measure.row_tracker import RowsOfStep, RowTracker
from ds_silent.records import StepRecord
from tests.support.made_records import make

LOG_STEPS = math.log(4e6)


def packed(shards: np.ndarray, sampling: Sampling) -> torch.Tensor:
    """What :func:`pack_rows` makes of each rank's rows, for all ranks at once."""
    ranks, batch = shards.shape
    hashes = mix64(np.ascontiguousarray(shards, dtype=np.int64).view(np.uint64))
    smallest = np.argsort(hashes, 1)[:, : sampling.slots]
    chosen = np.take_along_axis(hashes, smallest, 1)
    second = (chosen >> np.uint64(24)) % np.uint64(4096) * np.uint64(4096) + smallest.astype(np.uint64)
    numbers = np.stack([chosen % np.uint64(2**24), second], 2) * (chosen < 2 ** (64 - sampling.level))[:, :, None]
    header = np.stack([np.full(ranks, batch), np.full(ranks, batch), (hashes < 2 ** (64 - sampling.level)).sum(1)], 1)
    return torch.from_numpy(np.concatenate([header, numbers.reshape(ranks, -1)], 1).astype(np.float64))


def test_the_ranks_of_these_tests_send_what_ranks_send() -> None:
    shards, sampling = np.random.default_rng(3).permutation(1600).reshape(100, 16), Sampling(16, 3, 2)
    sent = torch.stack([pack_rows(torch.from_numpy(one), sampling) for one in shards])
    assert torch.equal(packed(shards, sampling), sent.double())


class Deal:
    """Each step, each rank's own shard of a permutation, but for what is done to it; through the real tracker."""

    def __init__(self, ranks: int, rows: int, batch: int = 8, seed: int = 1):
        self.ranks, self.rows, self.batch = ranks, rows, batch
        self.sampling = sampling_of(ranks, batch)
        self.tracker, self.test = RowTracker(), SampledRowsTest(LOG_STEPS)
        self.generator = np.random.default_rng(seed)
        self.epoch, self.step_number = np.empty(0, np.int64), 0

    def shards(self) -> np.ndarray:
        taken = self.ranks * self.batch
        if len(self.epoch) < taken:
            self.epoch = self.generator.permutation(self.rows)
        taken_rows, self.epoch = self.epoch[:taken], self.epoch[taken:]
        return taken_rows.reshape(self.ranks, self.batch)

    def tell(self, shards: np.ndarray) -> RowsOfStep:
        self.step_number += 1
        told = self.tracker.step(packed(shards, self.sampling), self.batch, self.rows, sampling=self.sampling)
        assert told is not None
        return told

    def evidence(self, told: RowsOfStep) -> Evidence:
        return Evidence(
            duplicates=told.evidence.duplicates,
            rows_per_rank=told.evidence.rows_per_rank,
            rows_sampled=told.evidence.rows_sampled,
            coverage=told.evidence.coverage,
        )

    def judge(self, shards: np.ndarray) -> list[tuple[tuple[int, ...], str]]:
        record = StepRecord(self.step_number + 1, 0, None, self.ranks)
        findings = self.test.step(record, self.evidence(self.tell(shards)))
        return [(finding.ranks, finding.message) for finding in findings]


def steps_until_named(deal: Deal, most: int, pair: tuple[int, int]) -> int:
    for step in range(1, most + 1):
        shards = deal.shards()
        shards[pair[1]] = deal.generator.permutation(shards[pair[0]])
        found = deal.judge(shards)
        assert all(ranks == pair for ranks, _ in found)
        if found:
            return step
    return most + 1


def test_a_pair_is_named_as_soon_as_the_formula_says() -> None:
    """At 2,048 ranks: counted over trials, against the binomial formula with K from the module's docstring."""
    ranks, batch, trials = 2048, 8, 12
    rate = sampling_of(ranks, batch).rate
    assert rate == 0.5
    needed = math.ceil((LOG_STEPS + math.log(ranks * (ranks - 1) / 2)) / math.log(ranks / 2))
    assert needed == 5
    took = [steps_until_named(Deal(ranks, 10**6, batch, seed), 9, (17, 1040)) for seed in range(trials)]
    for steps in (1, 2):
        rows = steps * batch
        chance = sum(math.comb(rows, k) * rate**k * (1 - rate) ** (rows - k) for k in range(needed, rows + 1))
        deviation = math.sqrt(chance * (1 - chance) / trials)
        assert abs(np.mean(np.array(took) <= steps) - chance) < 3.5 * deviation + 1e-9
    assert max(took) <= 4


def test_what_is_said_of_a_pair_and_of_many() -> None:
    deal = Deal(4096, 10**6)
    for _ in range(20):
        shards = deal.shards()
        shards[9] = shards[3]
        found = deal.judge(shards)
        if found:
            break
    ((ranks, message),) = found
    assert ranks == (3, 9)
    assert "about 100% of the rows" in message
    assert "sample of one row in 4" in message
    for _ in range(20):
        shards = deal.shards()
        shards[1::2] = shards[::2]
        found = deal.judge(shards)
    ((ranks, message),) = found
    assert ranks == tuple(range(4096))
    assert message.startswith("2048 groups of ranks")
    assert len(message) < 400


def test_all_ranks_with_the_same_rows_are_one_group() -> None:
    deal = Deal(2048, 10**6)
    for _ in range(4):
        shards = deal.shards()
        shards[:] = shards[0]
        found = deal.judge(shards)
    ((ranks, message),) = found
    assert ranks == tuple(range(2048))
    assert message.startswith("All 2048 ranks train on the same data")


def test_health_names_nobody() -> None:
    """Shards that are filled up with one row of another rank, and ranks that draw with replacement from few rows."""
    filled, drawing = Deal(2048, 10**6), Deal(2048, 60_000, seed=4)
    shared = 0
    for step in range(60):
        shards = filled.shards()
        if step % 12 == 0:
            shards[1, 3] = shards[0, 2]
        assert filled.judge(shards) == []
        told = drawing.tell(drawing.generator.integers(0, 60_000, (2048, 8)))
        shared += sum(told.evidence.duplicates.values())
        assert drawing.test.step(StepRecord(step + 1, 0, None, 2048), drawing.evidence(told)) == []
    assert shared > 60 * 500  # chance alone makes that many pairs


def test_a_resume_goes_on_where_it_was() -> None:
    deal, judge = Deal(2048, 10**6), Judge(DetectorsConfig())
    told = []
    for step in range(1, 4):
        shards = deal.shards()
        shards[9] = shards[3]
        found = deal.tell(shards)
        record = StepRecord(step, 0, None, 2048)
        events = judge.step(record, deal.evidence(found))
        told += [event for event in events if event.kind == "duplicate-data"]
        again = Judge(DetectorsConfig())
        again.load_state_dict(json.loads(json.dumps(judge.state_dict())))
        assert again.state_dict() == judge.state_dict()
        judge = again
    assert [event.ranks for event in told] == [(3, 9)]


def test_the_chance_that_is_allowed_for() -> None:
    rows = Evidence(rows_per_rank=(4,) * 100, rows_sampled=0.5)
    assert chance_of_a_row(rows, 100) == 0.01
    known = Evidence(rows_per_rank=(4,) * 100, rows_sampled=0.5, coverage=Coverage(0.5, 0.5, 0.0, 200))
    assert chance_of_a_row(known, 100) == 8 / 200
    tiny = Evidence(rows_per_rank=(4,) * 100, rows_sampled=0.5, coverage=Coverage(0.5, 0.5, 0.0, 9))
    assert chance_of_a_row(tiny, 100) == 0.25


# -- the epoch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_an_epoch_of_which_a_sample_is_known(own: bool) -> None:
    """All rows once: exactly so, whatever the sample. Each rank's own permutation: 1 - (1 - 1/N)^N of them."""
    ranks, batch, steps = 512, 64, 6
    rows = ranks * batch * steps
    sampling, tracker = Sampling(batch, 30, 3), RowTracker()
    generator = np.random.default_rng(9)
    dealt = generator.permutation(rows).reshape(steps, ranks, batch)
    if own:
        share = rows // ranks
        dealt = np.stack([generator.permutation(rows)[:share] for _ in range(ranks)], 1).reshape(steps, batch, ranks)
        dealt = dealt.transpose(0, 2, 1)
    for shards in dealt:
        told = tracker.step(packed(shards, sampling), batch, rows, sampling=sampling)
    assert told is not None
    assert told.evidence.coverage is not None
    assert told.coverage.sampled == 0.125
    assert told.evidence.coverage.epoch == 1.0
    really = len(np.unique(dealt)) / rows
    if own:
        assert 0 < told.evidence.coverage.error < 0.01
        assert abs(told.evidence.coverage.seen - really) < 4 * told.evidence.coverage.error
        assert abs(told.evidence.coverage.seen - (1 - (1 - 1 / ranks) ** ranks)) < 5 * told.evidence.coverage.error
    else:
        assert (told.evidence.coverage.seen, told.evidence.coverage.repeated, told.evidence.coverage.error) == (
            1.0,
            0.0,
            0.0,
        )
        duplicates = np.repeat(dealt[0][:1], ranks, 0)
        told = tracker.step(packed(duplicates, sampling), batch, rows, sampling=sampling)
        assert told is not None
        assert told.coverage.duplicates is not None
        assert abs(told.coverage.duplicates - batch) <= 4 * math.sqrt(batch * 8)
        assert told.coverage.duplicates % 8 == 0


def test_one_rank_has_nobody_to_share_rows_with() -> None:
    sampled = Evidence(rows_sampled=0.5, duplicates={}, rows_per_rank=(4,))
    assert SampledRowsTest(16.0).step(make(1, [1.0], [1.0], [1.0]), sampled) == []
