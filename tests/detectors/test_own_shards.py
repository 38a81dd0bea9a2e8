"""Each rank its own rows, again and again: no detector of rows takes that for a fault; a stuck loader is one still."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ds_silent.capture.deals import Deal
from ds_silent.capture.loaders import DataFacts, Walk
from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.exchange.row_ids import pack_ids
from ds_silent.measure import row_tracker as measured
from ds_silent.measure.record import Context
from ds_silent.records import Event, Seconds, StepRecord
from tests.support.made_observations import gathered_of

Rows = Any  # int64 (rows,)


def passes(rows: Rows, batch: int, shuffle: bool, drop_last: bool, seed: int) -> Iterator[Rows]:
    """What a loader of one rank gives, again and again."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(rows) if shuffle else rows
        end = len(rows) // batch * batch if drop_last else len(rows)
        for begin in range(0, end, batch):
            yield order[begin : min(begin + batch, end)]


class Run:
    """Ranks with a loader each, judged as in a training."""

    def __init__(self, loaders: list[Iterator[Rows]], interval: int = 1, **walk: Any) -> None:
        self.loaders, self.interval, self.step = loaders, interval, 0
        self.judge, self.tracker = Judge(DetectorsConfig(), interval), measured.RowTracker()
        self.rows_in_epoch: int | None = walk.pop("rows_in_epoch", None)
        self.walk, self.dealt = Walk(**walk), list[str]()
        self._last: list[Rows] = []
        self.held = [0.0] * len(loaders)  # hash of each rank's data set

    def go(self, steps: int, change: Callable[[int, Rows, Rows], Rows] = lambda rank, now, last: now) -> list[Event]:
        """``change``: what a rank takes in the place of its rows, from those of its last step."""
        events: list[Event] = []
        for _ in range(steps // self.interval):
            taken: list[list[Rows]] = []
            for _ in range(self.interval):
                now = [next(loader) for loader in self.loaders]
                if self._last:
                    now = [change(rank, one, self._last[rank]) for rank, one in enumerate(now)]
                self._last = now
                taken.append(now)
            self.step += self.interval
            events += self._measured([np.concatenate(each) for each in zip(*taken, strict=True)])
        return events

    def _measured(self, ids: list[Rows]) -> list[Event]:
        ranks, batch = len(ids), max(len(one) for one in self._last)
        room = max(len(one) for one in ids)
        sent = torch.stack([pack_ids(torch.from_numpy(one.astype(np.int64)), room) for one in ids]).double()
        words = [self.walk.deal.word] * ranks
        gathered = replace(gathered_of(self.step, ranks, **{"loss.order": words, "loss.data": self.held}), ids=sent)
        samples = self.step * ranks * batch
        context = Context(samples, batch, None, Seconds(), rows_in_epoch=self.rows_in_epoch, walk=self.walk)
        coverage, evidence = measured.row_evidence(gathered, self.tracker, context)
        self.dealt.append(evidence.dealt)
        return self.judge.step(StepRecord(self.step, samples, None, ranks, coverage=coverage), evidence)


def shards(sizes: list[int], batch: int = 8, shuffle: bool = True, drop_last: bool = True, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(99)
    names = generator.integers(0, 2**62, sum(sizes))  # hashes of the rows' content
    parts = np.split(names, np.cumsum(sizes)[:-1])
    return [passes(part, batch, shuffle, drop_last, seed + rank) for rank, part in enumerate(parts)]


def alarms(events: list[Event]) -> list[tuple[int, str, str]]:
    return [(event.step, event.kind, event.message) for event in events if event.severity != "info"]


SIZES = {
    "equal": [64, 64, 64, 64],
    "one of two steps": [16, 400, 400, 400],
    "one of three": [400, 24, 400, 400],
    "all unlike": [40, 64, 400, 800],
    "two ranks": [48, 640],
    "two ranks, one small": [640, 16],
    "one step each": [8, 8],
    "one of one step": [8, 400],
}


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_shards_that_begin_again(sizes: list[int], shuffle: bool, interval: int) -> None:
    run = Run(shards(sizes, shuffle=shuffle), interval, told=False)
    assert alarms(run.go(240)) == []


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("sizes", [SIZES["equal"], SIZES["one of two steps"], SIZES["all unlike"]])
def test_where_the_script_has_said_how_many_rows_there_are(sizes: list[int], told: bool) -> None:
    run = Run(shards(sizes), told=told, rows_in_epoch=sum(sizes))
    assert alarms(run.go(240)) == []
    assert run.dealt[0] == "unknown"
    assert run.dealt[-1] == "own-shard"


@pytest.mark.parametrize("interval", [1, 3, 6])
@pytest.mark.long
def test_the_last_batch_of_a_shard_is_short(interval: int) -> None:
    for sizes in ([20, 64, 64, 64], [4, 64, 64, 64], [64, 20], [4, 400], [12, 12, 64, 64]):
        run = Run(shards(sizes, drop_last=False), interval, told=False)
        assert alarms(run.go(240)) == [], sizes


def test_rows_that_the_data_hold_twice() -> None:
    for rows_in_epoch in (None, 1200):
        generator = np.random.default_rng(3)
        data = [generator.choice(generator.integers(0, 2**62, 280), 300) for _ in range(4)]
        run = Run(
            [passes(one, 8, True, True, r) for r, one in enumerate(data)], told=False, rows_in_epoch=rows_in_epoch
        )
        assert alarms(run.go(240)) == []


def test_files_that_are_read_in_their_order_are_a_note_at_most() -> None:
    order = Run(shards([256] * 4, shuffle=False), told=True)
    found = order.go(199)
    assert [(event.kind, event.severity) for event in found] == [("same-order", "info")]
    assert "sampler shuffles" not in found[0].message
    promised = Run(shards([256] * 4, shuffle=False), facts=DataFacts(None, True))
    assert [(event.kind, event.severity) for event in promised.go(199)] == [("same-order", "warning")]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", [[400] * 4, [40, 400, 400, 400], [800, 800]])
def test_a_loader_that_is_stuck_is_named(sizes: list[int], shuffle: bool, interval: int) -> None:
    for begins in (10, 100):
        run = Run(shards(sizes, shuffle=shuffle), interval, told=False)
        assert alarms(run.go(begins)) == []
        found = run.go(16 * interval, lambda rank, now, last: last if rank == len(sizes) - 1 else now)
        ranks = {event.ranks for event in found if event.kind == "data-order-mismatch" and event.severity == "error"}
        assert ranks == {(len(sizes) - 1,)}
        assert "the same rows again and again" in found[0].message


def test_a_loader_that_is_stuck_since_a_resume_is_named() -> None:
    before, after = (Run(shards([400] * 4), told=False) for _ in range(2))
    before.go(40)
    after.tracker.load_state_dict(json.loads(json.dumps(before.tracker.state_dict(unsent=False))))
    after.judge.load_state_dict(json.loads(json.dumps(before.judge.state_dict())))
    after.step = before.step
    found = after.go(16, lambda rank, now, last: last if rank == 2 else now)
    assert {event.ranks for event in found if event.severity == "error"} == {(2,)}


def test_where_one_pool_is_dealt_a_small_shard_is_no_excuse() -> None:
    """A rank that takes 16 rows only, of a sampler that deals all: its loader goes round."""
    deal = Deal("random", "DistributedSampler, shuffled", 7.0)
    found = Run(shards(SIZES["one of two steps"]), deal=deal).go(60)
    assert [(event.kind, event.severity, event.ranks) for event in found[:1]] == [
        ("data-order-mismatch", "error", (0,))
    ]


@pytest.mark.parametrize(("told", "severity"), [(True, "error"), (False, "warning")])
def test_ranks_with_permutations_of_their_own_are_told_still(told: bool, severity: str) -> None:
    """Each of 4 ranks takes its share of its own permutation: a third of the rows is never seen."""

    def share(rank: int) -> Iterator[Rows]:
        generator = np.random.default_rng(rank)
        while True:
            yield from generator.permutation(1600)[rank::4].reshape(-1, 8)

    events = Run([share(rank) for rank in range(4)], told=told, rows_in_epoch=1600).go(120)
    found = next(event for event in events if event.kind == "data-order-mismatch")
    assert (found.severity, found.step < 50) == (severity, True)
    assert found.remedy is not None
    assert found.remedy.startswith("If the data hold copies of rows, this is no fault: give ids") is not told
    assert ("low-coverage", "info") in [(event.kind, event.severity) for event in events]  # follows from it


def notes_of_few_rows(events: list[Event]) -> list[tuple[int, tuple[int, ...], str]]:
    found = [event for event in events if event.kind == "data-order-mismatch"]
    return [(event.step, event.ranks, event.severity) for event in found]


@pytest.mark.parametrize("interval", [1, 4])
def test_a_rank_that_goes_round_among_few_rows_is_noted_once(interval: int) -> None:
    """Eight batches in a list that is read again and again; a small shard of its own looks the same."""
    run = Run(shards([1600, 64, 1600, 1600], shuffle=False), interval, told=False)
    [(step, ranks, severity)] = notes_of_few_rows(run.go(160))
    assert (24 <= step <= 48, ranks, severity) == (True, (1,), "info")
    state = json.loads(json.dumps([run.judge.state_dict(), run.tracker.state_dict(unsent=False)]))
    run.judge.load_state_dict(state[0])
    run.tracker.load_state_dict(state[1])
    assert notes_of_few_rows(run.go(40)) == []


def test_where_others_begin_again_too_no_rank_is_noted() -> None:
    for sizes in ([64] * 4, [320, 400, 160, 400], [64, 64, 1600, 1600]):
        run = Run(shards(sizes), told=False)
        assert notes_of_few_rows(run.go(160)) == [], sizes


def test_a_state_of_before_has_no_notes_of_few_rows() -> None:
    run = Run(shards([400] * 4), told=False)
    run.go(4)
    tracked = run.tracker.state_dict(unsent=False)
    del tracked["recent"]["taken"]
    run.tracker.load_state_dict(tracked)
    assert notes_of_few_rows(run.go(40)) == []


def notes_of_overlap(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "duplicate-data"]


def all_rows(ranks: int, rows: int, begins: int = 0) -> list[Any]:
    """Each rank walks through the same rows, shuffled by a seed of its own."""
    names = np.random.default_rng(98).integers(0, 2**62, rows)
    return [passes(names[begins * rank :], 8, True, True, rank) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "interval"), [(2, 1), (2, 4), (4, 1), (8, 1)])
@pytest.mark.long
def test_ranks_that_read_all_data_in_orders_of_their_own_are_noted_once(ranks: int, interval: int) -> None:
    for severity in ("warning", "info"):
        deal = Deal(pass_rows=400 if severity == "warning" else None)
        run = Run(all_rows(ranks, 400), interval, told=False, deal=deal)
        [note] = notes_of_overlap(run.go(200))
        assert (note.severity, note.ranks, note.where) == (severity, tuple(range(ranks)), "loader")
    assert note.step <= 50  # the first pass
    state = json.loads(json.dumps([run.judge.state_dict(), run.tracker.state_dict(unsent=False)]))
    run.judge.load_state_dict(state[0])
    run.tracker.load_state_dict(state[1])
    assert notes_of_overlap(run.go(40)) == []


@pytest.mark.parametrize(("same", "known", "severity"), [((0, 2), True, "warning"), ((0, 2), False, "info"),
                                                         ((1, 2), True, "info")])  # fmt: skip
def test_of_ranks_that_read_the_same_data_the_others_are_not_named(
    same: tuple[int, int], known: bool, severity: str
) -> None:
    """Two of three ranks were given the same files; how many rows a pass has is known of rank 0."""
    alike, own = all_rows(2, 400), shards([400])
    run = Run([alike.pop() if rank in same else own[0] for rank in range(3)], told=False,
              deal=Deal(pass_rows=400 if known else None))  # fmt: skip
    [note] = notes_of_overlap(run.go(200))
    named = " and ".join(map(str, same))
    assert (note.ranks, note.severity) == (same, severity)
    assert note.message.startswith(f"Ranks read the same data, ranks {named} alone: ")
    assert (f"The loader of each of ranks {named} shuffles all rows" in note.message) is (severity == "warning")


def test_rows_that_come_again_within_a_batch_are_no_other_ranks() -> None:
    """Of four rows of its own each rank draws 32 at a step, with replacement."""
    names = np.random.default_rng(95).integers(0, 2**62, (3, 4))
    run = Run([drawn(names[rank], None, 32, 50 + rank) for rank in range(3)], told=False)
    assert notes_of_overlap(run.go(40)) == []


def test_ranks_that_share_a_part_of_their_data_have_not_the_same() -> None:
    """As where each has drawn its own selection of one pool, before the training."""
    names = np.random.default_rng(98).integers(0, 2**62, 1000)
    chosen = [np.random.default_rng(60 + rank).permutation(names)[:400] for rank in range(4)]
    run = Run(
        [passes(one, 8, True, True, rank) for rank, one in enumerate(chosen)], told=False, deal=Deal(pass_rows=400)
    )
    assert [note.severity for note in notes_of_overlap(run.go(100))] == ["info"]


def with_replacement(rows: Rows, seed: int) -> Iterator[Rows]:
    generator = np.random.default_rng(seed)
    while True:
        yield generator.choice(rows, 8)


def dealt_anew(rows: Rows, rank: int, ranks: int) -> Iterator[Rows]:
    """One permutation of all rows for each pass, which ranks share."""
    for seed in range(10_000):
        own = np.random.default_rng(seed).permutation(rows)[rank::ranks]
        yield from (own[at : at + 8] for at in range(0, len(own) - 7, 8))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.long
def test_rows_of_ones_own_or_drawn_from_one_pool_are_no_overlap(ranks: int) -> None:
    names = np.random.default_rng(97).integers(0, 2**62, 400)
    twice = np.concatenate([names, names[:100]])
    for run in (
        Run(shards([400] * ranks), told=False),
        Run([with_replacement(names, 40 + rank) for rank in range(ranks)], told=False),
        Run([dealt_anew(names, rank, ranks) for rank in range(ranks)], told=False),
        Run([dealt_anew(twice, rank, ranks) for rank in range(ranks)], told=False),
    ):
        assert notes_of_overlap(run.go(160)) == []


def drawn(names: Rows, weights: Any, batch: int, seed: int) -> Iterator[Rows]:
    """What a WeightedRandomSampler of each rank's own takes: rows with replacement, in batches of this size."""
    generator = np.random.default_rng(seed)
    while True:
        yield generator.choice(names, batch, p=weights)


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_are_drawn_with_replacement_are_shared_by_chance(batch: int, weighted: bool) -> None:
    """Of 4 ranks and few rows, half of a batch is another rank's too every now and then: it is no fault."""
    names = np.random.default_rng(96).integers(0, 2**62, 200)
    weights = np.where(np.arange(200) < 20, 10.0 if weighted else 1.0, 1.0)
    loaders = [drawn(names, weights / weights.sum(), batch, 50 + rank) for rank in range(4)]
    assert notes_of_overlap(Run(loaders, told=False).go(400)) == []


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_the_same_rows_are_told_among_rows_that_are_drawn_with_replacement(batch: int) -> None:
    names = np.random.default_rng(96).integers(0, 2**62, 1000)
    run = Run([drawn(names, None, batch, 50 + rank) for rank in range(4)], told=False)
    assert notes_of_overlap(run.go(200)) == []
    at: list[Rows] = [None]

    def copied(rank: int, now: Rows, last: Rows) -> Rows:
        at[0] = now if rank == 1 else at[0]
        return at[0] if rank == 3 else now

    found = notes_of_overlap(run.go(20, copied))
    assert [(event.ranks, event.severity) for event in found] == [((1, 3), "error")]
    assert found[0].step - 200 <= (1 if batch > 2 else 2)


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("contents", [4, 8, 16])
def test_a_few_contents_that_recur_are_no_rows_of_another_rank(batch: int, contents: int) -> None:
    """A truth table, or steps of a small game: every rank has them all."""
    names = np.random.default_rng(95).integers(0, 2**62, contents)
    for seed in range(2):
        loaders = [drawn(names, None, batch, 100 * seed + rank) for rank in range(4)]
        events = Run(loaders, told=False).go(100)
        assert [event for event in events if event.severity != "info"] == []


def dealt_with_copies(share: float, rows: int, batch: int, ranks: int) -> list[Any]:
    """A DistributedSampler's deal of data of which a share is copies of other rows."""
    names = np.random.default_rng(94).integers(0, 2**62, rows)
    names[: int(share * rows)] = names[-int(share * rows) :][::-1]

    def taken(rank: int) -> Iterator[Rows]:
        for epoch in range(1000):
            order = np.random.default_rng(epoch).permutation(rows)[rank::ranks]
            yield from (names[order[at : at + batch]] for at in range(0, len(order), batch))

    return [taken(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_copies_in_data_that_the_samplers_deal_are_a_note(share: float, ranks: int) -> None:
    """By their content they come again; that each comes once is known from the samplers of all ranks."""
    deal = Deal("random", "DistributedSampler, shuffled", 7.0)
    run = Run(dealt_with_copies(share, 1600, 8, ranks), told=False, deal=deal, rows_in_epoch=1600)
    events = [event for event in run.go(1600 // (8 * ranks) * 3) if event.phase != "ended"]
    assert {event.severity for event in events} == {"info"}
    assert {event.kind for event in events} <= {"data-order-mismatch", "low-coverage"}
    [once] = [event for event in events if event.kind == "data-order-mismatch"]
    assert "the data hold these rows several times" in once.message


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_data_sets_that_each_rank_has_shuffled_by_its_own_seed_are_told(ranks: int) -> None:
    """As dataset.shuffle(seed + rank) does, ahead of a sampler that deals one order to all ranks."""
    names = np.random.default_rng(92).integers(0, 2**62, 1600)

    def taken(rank: int) -> Iterator[Rows]:
        own = np.random.default_rng(1000 + rank).permutation(names)
        for epoch in range(1000):
            order = np.random.default_rng(epoch).permutation(1600)[rank::ranks]
            yield from (own[order[at : at + 8]] for at in range(0, len(order), 8))

    deal = Deal("random", "DistributedSampler, shuffled", 7.0)
    run = Run([taken(rank) for rank in range(ranks)], told=False, deal=deal, rows_in_epoch=1600)
    found = [event for event in run.go(1600 // (8 * ranks) * 3) if event.severity == "warning"]
    assert "data-order-mismatch" in {event.kind for event in found}
    first = next(event for event in found if event.kind == "data-order-mismatch")
    assert "Another rank had them, never the same" in first.message
    assert first.remedy is not None
    assert first.remedy.startswith("Shuffle the data set with the same seed on every rank")


def twice(loader: Iterator[Rows]) -> Iterator[Rows]:
    for batch in loader:
        yield batch
        yield batch.copy()


def collapsed(loader: Iterator[Rows]) -> Iterator[Rows]:
    """A collate function that takes the first row of each batch for all of them."""
    for batch in loader:
        yield np.repeat(batch[:1], len(batch))


@pytest.mark.parametrize("change", [twice, collapsed])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_that_one_rank_takes_again_are_no_copies(ranks: int, change: Any) -> None:
    deal = Deal("random", "DistributedSampler, shuffled", 7.0)
    loaders = [change(loader) for loader in dealt_with_copies(0.2, 1600, 8, ranks)]
    events = Run(loaders, told=False, deal=deal, rows_in_epoch=1600).go(60)
    found = [event for event in events if event.kind == "data-order-mismatch" and event.severity == "warning"]
    assert found


def test_the_rows_that_fill_up_an_epoch_of_one_step_are_no_rows_of_another_rank() -> None:
    """Six rows for four ranks of two: a DistributedSampler takes two of them twice, on the same pairs in each epoch."""
    names = np.random.default_rng(93).integers(0, 2**62, 6)

    def taken(rank: int) -> Iterator[Rows]:
        for epoch in range(1000):
            order = np.random.default_rng(epoch).permutation(6)
            yield names[np.concatenate([order, order[:2]])[rank::4]]

    for told in (False, True):
        events = Run([taken(rank) for rank in range(4)], told=told, rows_in_epoch=6).go(100)
        assert [event for event in events if event.severity != "info"] == []


@pytest.mark.parametrize(
    ("pools", "share", "severity", "says"),
    [
        ((0, 0, 0, 0), 1.0, "warning", "an epoch takes each row 4 times"),
        ((0, 0, 1, 1), 1.0, "warning", "an epoch takes each row 2 times"),
        ((0, 0, 0, 0), 0.9, "info", "Do nothing if each rank is meant to read all data"),
    ],
)
def test_what_the_loaders_hold_says_how_often_a_row_comes(
    pools: tuple[int, ...], share: float, severity: str, says: str
) -> None:
    """All of one data set; two nodes with one of their own each; each rank its own choice of nearly all rows."""
    names = [np.random.default_rng(80 + pool).integers(0, 2**62, 400) for pool in range(2)]
    held = [np.random.default_rng(60 + rank).permutation(names[pool]) for rank, pool in enumerate(pools)]
    loaders = [passes(rows[: int(share * 400)], 8, True, True, rank) for rank, rows in enumerate(held)]
    run = Run(loaders, told=False, deal=Deal(pass_rows=int(share * 400)))
    run.held = [1.0 + (pool if share == 1.0 else rank) for rank, pool in enumerate(pools)]
    note = notes_of_overlap(run.go(200))[-1]
    assert note.severity == severity
    assert says in f"{note.message} {note.remedy}"


def buffered(run: Run, buffers: int, passes: list[Any], rows: int = 32, step: int = 8) -> list[Event]:
    """Train ``rows`` rows of each rank from a buffer; ``passes``: orders of places in it, one after the other."""
    events: list[Event] = []
    for _ in range(buffers):
        data = [np.concatenate([next(loader) for _ in range(rows // 8)]) for loader in run.loaders]
        order = np.concatenate([one() for one in passes])
        total = run.walk.given[-1][1] + rows if run.walk.given else rows
        for number, part in enumerate(order.reshape(-1, step)):
            begins = (0,) if number == 0 and (total - rows) * len(data) % (run.rows_in_epoch or 1) == 0 else ()
            run.walk = replace(run.walk, given=((0, total),), starts=begins)
            run.step, run._last = run.step + 1, [one[part] for one in data]
            events += run._measured(run._last)
    return events


def dealt_to(ranks: int, rows: int) -> list[Iterator[Rows]]:
    """Each rank's share of one permutation, anew in each epoch."""

    def share(rank: int) -> Iterator[Rows]:
        generator = np.random.default_rng(7)
        while True:
            yield from generator.permutation(rows)[rank::ranks].reshape(-1, 8)

    return [share(rank) for rank in range(ranks)]


ANY, POOL = np.random.default_rng(11), Deal("random", "DistributedSampler, shuffled", 7.0)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("times", [2, 3, 6])
def test_a_buffer_that_is_trained_several_times_is_no_fault(times: int, left_out: bool, told: bool) -> None:
    """``left_out``: rows at a pass's end that are too few for a step, others in each pass."""
    run = Run(dealt_to(2, 640), told=told, watched=True, rows_in_epoch=640, deal=POOL)
    order = (lambda: ANY.permutation(32)[:24]) if left_out else partial(ANY.permutation, 32)
    events = buffered(run, 25, [order] * times, step=12 if left_out else 8)
    assert [(event.kind, event.severity) for event in events] == [("data-order-mismatch", "info")]
    assert f"trained {times} times" in events[0].message


@pytest.mark.parametrize("mistake", ["a batch twice", "one batch", "half of it again", "each batch twice"])
def test_rows_of_a_buffer_that_come_again_by_mistake_are_told(mistake: str) -> None:
    run = Run(dealt_to(2, 640), told=True, watched=True, rows_in_epoch=640, deal=POOL)
    once = partial(np.arange, 32)
    passes = {
        "a batch twice": [once, partial(np.arange, 8, 16)],
        "one batch": [partial(np.arange, 8)] * 4,
        "half of it again": [once, partial(np.arange, 16)],
        "each batch twice": [lambda: np.arange(32).reshape(4, 8).repeat(2, axis=0).reshape(-1)],
    }[mistake]
    events = buffered(run, 20, passes)
    assert ("data-order-mismatch", "error") in [(event.kind, event.severity) for event in events]
