"""A sample of the rows: the same rows on every rank, in the room that was reckoned, and said where it is too small."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_silent.exchange.row_ids import MAX_BYTES, UNSENT, Sampling, pack_rows, sampling_of, unpack_ids
from ds_silent.maths.mixing import mix64
from ds_silent.measure.coverage import shared_rows


def hash_of(row: int) -> int:
    """splitmix64 with Python's integers."""
    x = (row + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def naive(rows: list[int], sampling: Sampling) -> tuple[list[int], list[int], int]:
    """Ids and places of what one rank sends of its newest rows, and how many are in the sample."""
    newest = rows[-sampling.capacity :]
    inside = [(hash_of(row), place) for place, row in enumerate(newest) if hash_of(row) >> (64 - sampling.level) == 0]
    kept = sorted(sorted(inside)[: sampling.slots], key=lambda pair: pair[1])
    return [value % 2**36 for value, _ in kept], [place for _, place in kept], len(inside)


@pytest.mark.parametrize("sampling", [Sampling(40, 6, 2), Sampling(40, 40, 1), Sampling(300, 4, 6), Sampling(16, 1, 3)])
def test_what_is_sent_against_the_formula(sampling: Sampling) -> None:
    generator = np.random.default_rng(sampling.level)
    given = [generator.integers(-(2**63), 2**63 - 1, length).tolist() for length in (0, 1, 5, 16, 40, 41, 300, 800)]
    packed = torch.stack([pack_rows(torch.tensor(rows, dtype=torch.int64), sampling) for rows in given])
    assert packed.shape == (8, sampling.numbers)
    step = unpack_ids(packed.double(), sampling)
    for rank, rows in enumerate(given):
        ids, places, sampled = naive(rows, sampling)
        mine = step.owners == rank
        assert (step.values[mine].tolist(), step.places[mine].tolist()) == (ids, places)
        assert (step.taken[rank], step.looked[rank]) == (len(rows), min(len(rows), sampling.capacity))
        assert step.sampled[rank] == sampled
    assert step.unsent == sum(max(0, naive(rows, sampling)[2] - sampling.slots) for rows in given)
    assert step.complete == (sampling.capacity >= 800)
    assert step.rate == 2.0**-sampling.level
    assert [hash_of(row) for row in given[4]] == mix64(np.array(given[4]).view(np.uint64)).tolist()


def test_the_hundred_and_fourth_row_counts() -> None:
    """Places up to the last that a rank can have."""
    sampling = Sampling(4096, 4096, 1)
    step = unpack_ids(pack_rows(torch.arange(4096), sampling)[None].double(), sampling)
    assert step.places.tolist() == naive(list(range(4096)), sampling)[1]
    assert step.places.max() > 4000


def test_numbers_that_nobody_sent_are_no_rows() -> None:
    sampling = Sampling(16, 2, 1)
    good = pack_rows(torch.arange(16), sampling)
    assert good[2] > 2  # more than there is room for
    bad = [good.clone() for _ in range(5)]
    bad[0][4], bad[1][0], bad[2][1], bad[3][2], bad[4][3] = torch.nan, -1.0, 17.0, 17.0, 2.0**24
    step = unpack_ids(torch.stack([good, *bad, torch.zeros(sampling.numbers)]).double(), sampling)
    assert step.taken.tolist() == [16, -1, -1, -1, -1, -1, 0]
    assert step.counts.tolist() == [2, 0, 0, 0, 0, 0, 0]


def test_few_ranks_send_all_rows() -> None:
    for ranks, rows in ((2, 4096), (8, 1024), (64, 128), (1024, 8)):
        assert sampling_of(ranks, rows) == Sampling(rows, rows)
        assert sampling_of(ranks, rows).numbers == 3 * rows + 1
    assert sampling_of(2, 0).level == 0
    assert (sampling_of(1025, 8).level, sampling_of(70_000, 1).level) == (1, 1)


@pytest.mark.parametrize("ranks", [1_025, 4_096, 16_384, 65_536])
@pytest.mark.parametrize("rows", [8, 80, 4_096])
def test_what_all_ranks_send_is_bounded(ranks: int, rows: int) -> None:
    """The rows that are sent are 64 kB or half a row of each rank; drawn at random, they fit into the room."""
    sampling = sampling_of(ranks, rows)
    sent = ranks * rows * sampling.rate
    assert 8 * sent <= max(MAX_BYTES, 8 * ranks)
    assert sent / ranks >= 0.5
    assert 4 * sampling.numbers <= 220
    drawn = np.random.default_rng(5).binomial(rows, sampling.rate, 400_000)
    left_out = np.maximum(drawn - sampling.slots, 0).sum() / drawn.sum()
    assert left_out < 1.5 * UNSENT
    if sampling.slots > 1:  # and one slot less would not do
        assert np.maximum(drawn - sampling.slots + 1, 0).sum() / drawn.sum() > UNSENT / 2


def test_ranks_with_the_same_rows_send_the_same() -> None:
    """In any order, and where there is too little room; ranks with other rows share nothing."""
    generator, sampling = np.random.default_rng(7), Sampling(64, 3, 3)
    shards = generator.permutation(64 * 200).reshape(200, 64)
    shards[150] = generator.permutation(shards[31])
    sent = torch.stack([pack_rows(torch.from_numpy(one), sampling) for one in shards])
    step = unpack_ids(sent.double(), sampling)
    assert step.unsent > 0
    found = shared_rows(step.values, step.owners)
    assert found.pairs == ((31, 150, step.counts[31]),)
    assert step.counts[31] == 3
