"""What rows that come again say of the deal: against deals that are known, drawn here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ds_silent.capture.deals import Deal
from ds_silent.measure.deal import SLOTS, DealFollower, RowOwners
from ds_silent.measure.evidence import LONG_TRAIL
from ds_silent.measure.row_history import RecentRows
from tests.support.ids_by_rank import by_rank

Deals = Iterator[list[Any]]


def at_random(ranks: int, rows: int, batch: int, passes: int, seed: int = 0) -> Deals:
    """One permutation per pass, cut among the ranks."""
    generator = np.random.default_rng(seed)
    for _ in range(passes):
        order = generator.permutation(rows)
        for begin in range(0, rows - ranks * batch + 1, ranks * batch):
            yield list(order[begin : begin + ranks * batch].reshape(ranks, batch))


def files(ranks: int, rows: int, batch: int, passes: int, turn: int, seed: int = 0) -> Deals:
    """A file per rank, shuffled in each pass; in each pass it goes ``turn`` ranks on."""
    generator = np.random.default_rng(seed)
    size = rows // ranks
    for number in range(passes):
        own = [((rank + number * turn) % ranks) * size + generator.permutation(size) for rank in range(ranks)]
        for begin in range(0, size - batch + 1, batch):
            yield [one[begin : begin + batch] for one in own]


def each_from_all(ranks: int, rows: int, batch: int, passes: int, seed: int = 0) -> Deals:
    """Every rank shuffles all rows by itself."""
    generator = np.random.default_rng(seed)
    for _ in range(passes):
        own = [generator.permutation(rows) for _ in range(ranks)]
        for begin in range(0, rows - batch + 1, batch):
            yield [one[begin : begin + batch] for one in own]


def half_in_blocks(ranks: int, rows: int, batch: int, passes: int, seed: int = 0) -> Deals:
    """Of each rank's rows a half is dealt at random, the other is a file that goes on to the next rank."""
    dealt = at_random(ranks, rows, batch // 2, passes, seed)
    blocks = files(ranks, rows, batch - batch // 2, passes, 1, seed)
    for one, other in zip(dealt, blocks, strict=True):
        yield [np.concatenate([a, rows + b]) for a, b in zip(one, other, strict=True)]


def take(rows: RowOwners, ids: list[Any]) -> None:
    owners = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    rows.step(np.concatenate(ids).astype(np.int64), owners, len(ids))


def decided(deals: Deals) -> str:
    rows = RowOwners()
    for ids in deals:
        take(rows, ids)
    return " ".join(name for name in ("random", "own", "blocks") if getattr(rows, name).decided)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.long
def test_deals_that_are_known(ranks: int) -> None:
    size = 128 * ranks  # 16 steps of 8 rows
    assert decided(at_random(ranks, size, 8, 24)) == "random"
    assert decided(at_random(ranks, size, 8, 1)) == ""  # nothing has come again
    assert decided(files(ranks, size, 8, 24, turn=0)) == "own blocks"
    assert decided(files(ranks, size, 8, 24, turn=1)) == "blocks"
    assert "random" not in decided(half_in_blocks(ranks, size, 8, 24))
    assert "own" not in decided(each_from_all(ranks, 512, 8, 6))


def test_more_rows_than_are_remembered() -> None:
    rows = 16 * SLOTS
    assert decided(at_random(4, rows, 256, 2)) == "random"
    assert decided(files(4, rows, 256, 2, turn=0)) == "own blocks"
    assert decided(files(4, rows, 256, 2, turn=1)) == "blocks"


def test_a_loader_that_is_stuck_is_no_shard() -> None:
    batch = [np.arange(8) + 8 * rank for rank in range(4)]
    assert decided(iter([batch] * 200)) == ""


@pytest.mark.long
def test_wrong_decisions_are_rare() -> None:
    """The stated bound is one in 10^8 pairs; at one in e^4 some may come in 400 runs, and not more than stated."""
    wrong = 0
    for seed in range(400):
        rows = RowOwners()
        for ids in half_in_blocks(4, 256, 8, 3, seed):
            take(rows, ids)
            wrong += rows.random.log > 4.0
    pairs = 400 * 2 * 256 / 2
    assert wrong < pairs / np.exp(4.0)


def test_a_resume_goes_on() -> None:
    straight, before, after = RowOwners(), RowOwners(), RowOwners()
    deals = list(at_random(4, 512, 8, 24))
    for ids in deals:
        take(straight, ids)
    for ids in deals[:200]:
        take(before, ids)
    state = json.loads(json.dumps(before.state_dict()))
    assert len(json.dumps(state)) < 200_000
    after.load_state_dict(state)
    for ids in deals[200:]:
        take(after, ids)
    assert (straight.random.decided, after.random.decided) == (True, True)
    with pytest.raises(ValueError, match="rows in the checkpoint"):
        after.load_state_dict({**state, "hashes": state["hashes"][:16]})
    with pytest.raises(ValueError, match="rows in the checkpoint"):
        after.load_state_dict({**state, "hashes": "?"})
    take(after, [np.arange(3)] * 8)  # other ranks: it begins anew
    assert not after.random.decided


def test_rows_decide_over_samplers() -> None:
    random = Deal("random", "DistributedSampler, shuffled", 7.0)
    for deals, said, expected in [
        (files(4, 512, 8, 6, 0), random, "own-shard"),
        (files(4, 512, 8, 6, 1), random, "unknown"),
        (files(4, 512, 8, 6, 1), Deal(), "unknown"),
        (at_random(4, 512, 8, 24), random, "random"),
        (at_random(4, 512, 8, 24), Deal(), "random"),
        (at_random(4, 512, 8, 24), Deal(by="LengthGroupedSampler", by_content=True), "unknown"),
    ]:
        follower, known = DealFollower(), []
        for step, ids in enumerate(deals):
            take(follower.rows, ids)
            words = torch.full((4,), said.word, dtype=torch.float64)
            known.append(follower.step(words, said, (step + 1) * 32, 32, None).dealt)
        assert known[0] == said.dealt
        assert known[-1] == expected, said


# -- a rank that follows another one ---------------------------------------------------------------------------------


def stream(steps: int, ranks: int, rows: int, lags: dict[int, int], seed: int = 0) -> list[list[Any]]:
    """Rows of each rank and step; those in ``lags`` take the first rank's, so many rows behind it."""
    own = np.random.default_rng(seed).integers(0, 2**62, (ranks, steps * rows + 64))
    for rank, lag in lags.items():
        own[rank, lag:] = own[0, : own.shape[1] - lag]
    return [[own[rank, step * rows : (step + 1) * rows] for rank in range(ranks)] for step in range(steps)]


def _counted(steps: int) -> list[list[Any]]:
    """Two ranks: the first counts on, the other has rows of its own."""
    return [[np.arange(step * 8, step * 8 + 8), 10**6 + np.arange(step * 8, step * 8 + 8)] for step in range(steps)]


@pytest.mark.parametrize("lag", [8, 11, 30])
def test_a_rank_that_is_behind_another_in_one_stream_is_followed(lag: int) -> None:
    owners = RowOwners()
    for ids in stream(16, 3, 8, {2: lag}):
        take(owners, ids)
    assert [(rank, *trail[:2]) for rank, trail in owners.trails.items()] == [(2, 0, lag)]
    assert owners.trails[2].times >= LONG_TRAIL
    for ids in stream(16, 3, 8, {2: lag}):  # of few data rows come again
        take(owners, ids)
    assert owners.trails[2].times >= LONG_TRAIL


@pytest.mark.parametrize(
    "deals",
    [
        stream(64, 4, 8, {}),
        list(at_random(4, 512, 8, 24)),
        files(4, 512, 8, 6, 0),
        files(4, 512, 8, 6, 1),  # whole files change hands from pass to pass
        [[np.arange(step * 24 + rank * 8, step * 24 + rank * 8 + 8) % 104 for rank in range(3)] for step in range(99)],
        [
            [own[0], own[1], n * 8 - 16 + np.random.default_rng(n).permutation(8)]
            for n, own in enumerate(_counted(64), 1)
        ],
    ],
    ids=["new rows", "at random", "own files", "other files", "one order that does not fit into the ranks", "replayed"],
)
def test_rows_that_change_hands_or_come_in_another_order_are_followed_by_none(deals: list[list[Any]]) -> None:
    owners, longest = RowOwners(), 0
    for ids in deals:
        take(owners, ids)
        longest = max([longest, *(trail.times for trail in owners.trails.values())])
    assert longest < LONG_TRAIL / 2


# -- different rows of a rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 16, 100, 200, 1000, 20_000])
def test_how_many_different_rows_a_rank_has_had(rows: int) -> None:
    """64 registers: a standard error of 1.04 / 8 = 13 %, of 40 draws 2 % of the mean."""
    found = []
    for seed in range(40):
        recent = RecentRows()
        ids = np.random.default_rng(seed).integers(0, 2**62, rows)
        for _ in range(2):
            for part in np.array_split(ids, 4):
                recent.repeats(*by_rank([part, part[:1]]), 2)
        again = RecentRows()
        again.load_state_dict(json.loads(json.dumps(recent.state_dict())))
        assert again.distinct == recent.distinct
        found.append(recent.distinct[0] / rows)
        assert recent.distinct[1] < 8
        assert recent.window[0] == sum(map(len, np.array_split(ids, 4)[2:]))
    assert abs(np.mean(found) - 1.0) < 0.09
    assert np.std(found) < 0.19
