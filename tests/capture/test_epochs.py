"""Where epochs begin and end, and whether a sampler is told of a new one: rows dealt as loaders deal them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ds_silent.capture.loaders import DataFacts, Walk, data_facts
from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.exchange.row_ids import pack_ids
from ds_silent.measure.evidence import Evidence
from ds_silent.measure.row_tracker import RowsOfStep, RowTracker
from ds_silent.records import Event, StepRecord


class Deal:
    """Real samplers and loaders of every rank, cut into optimizer steps across the epochs; tracked and judged."""

    def __init__(
        self, rows: int, ranks: int, batch: int, accumulation: int, drop_last: bool, watched: bool, told: bool
    ):
        self.rows, self.ranks, self.watched, self.told = rows, ranks, watched, told
        self.facts = DataFacts(rows, True)
        self.accumulation, self.own_rows = accumulation, batch * accumulation
        data: Any = list(range(rows))
        self.samplers = [DistributedSampler(data, num_replicas=ranks, rank=r, seed=3) for r in range(ranks)]
        self.loaders = [DataLoader(data, batch, sampler=s, drop_last=drop_last) for s in self.samplers]
        self.tracker, self.judge = RowTracker(), Judge(DetectorsConfig())
        self.events: list[Event] = []
        self.said: list[RowsOfStep] = []
        self.steps_of_epochs: list[int] = []
        self._waiting: list[tuple[bool, list[torch.Tensor]]] = []

    def epoch(self, number: int | None, limit: int = 10**9) -> None:
        """One pass; ``number`` is given to ``set_epoch``, None is forgotten."""
        for sampler in self.samplers:
            if number is not None:
                sampler.set_epoch(number)
        for index, batches in enumerate(zip(*self.loaders, strict=True)):
            if index == limit:
                break
            self._waiting.append((index == 0, list(batches)))
            if len(self._waiting) == self.accumulation:
                self._step()
        self.steps_of_epochs.append(len(self.said))

    def _step(self) -> None:
        taken, self._waiting = self._waiting, []
        capacity = self.own_rows
        sent = torch.stack([pack_ids(torch.cat([m[r] for _, m in taken]), capacity) for r in range(self.ranks)])
        places = np.cumsum([0] + [len(m[0]) for _, m in taken])
        starts = tuple(int(p) for p, (first, _) in zip(places, taken, strict=False) if first)
        walk = Walk(self.facts, starts if self.watched else (), self.watched, self.told)
        told = self.tracker.step(sent.double(), self.own_rows, self.rows, walk)
        assert told is not None
        self.said.append(told)
        evidence = Evidence(
            duplicates=told.evidence.duplicates,
            rows_per_rank=told.evidence.rows_per_rank,
            own_rows=told.evidence.own_rows,
            own_repeats=told.evidence.own_repeats,
            coverage=told.evidence.coverage,
            same_order=told.evidence.same_order,
        )
        record = StepRecord(len(self.said), 0, None, self.ranks)
        self.events += self.judge.step(record, evidence)


class Buckets(DistributedSampler[int]):
    """Fill each bucket up to whole batches on every rank, as VITS does: each row comes in every epoch, some twice."""

    def __init__(self, buckets: tuple[int, ...], ranks: int, rank: int, batch: int):
        super().__init__(list(range(sum(buckets))), ranks, rank, seed=3)  # type: ignore[arg-type]
        self.buckets, self.batch_size = buckets, batch
        self.batches = [-(-size // (batch * ranks)) for size in buckets]

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        made, before, batch = [], 0, self.batch_size
        for size, batches in zip(self.buckets, self.batches, strict=True):
            rows = (before + torch.randperm(size, generator=generator)).repeat(batch * self.num_replicas)
            own = rows[: batches * batch * self.num_replicas][self.rank :: self.num_replicas].tolist()
            made += [own[place : place + batch] for place in range(0, len(own), batch)]
            before += size
        return iter([made[place] for place in torch.randperm(len(made), generator=generator).tolist()])

    def __len__(self) -> int:
        return sum(self.batches)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("buckets", [(19, 17, 18, 10), (33, 21, 40)])
def test_a_sampler_that_fills_up_its_buckets_leaves_no_row_out(
    buckets: tuple[int, ...], watched: bool, told: bool
) -> None:
    rows = sum(buckets)
    deal = Deal(rows, 2, 4, 1, False, watched, told)
    deal.samplers = [Buckets(buckets, 2, rank, 4) for rank in range(2)]
    deal.loaders = [DataLoader(list(range(rows)), batch_sampler=one) for one in deal.samplers]  # type: ignore[arg-type]
    deal.facts = data_facts(iter(deal.loaders[0]), 2)
    dealt = 2 * 4 * len(deal.samplers[0])
    assert deal.facts == DataFacts(rows, True, dealt - rows)
    for epoch in range(6):
        deal.epoch(epoch)
    assert deal.events == []
    for step in deal.steps_of_epochs if watched else ():
        coverage = deal.said[step - 1].coverage
        assert coverage.seen == 1.0
        assert coverage.repeated == pytest.approx((dealt - rows) / rows)


CUTS = [
    *((103, 4, 2, 1), (103, 4, 8, 4), (26, 4, 2, 4), (26, 4, 2, 1)),
    *((1000, 2, 8, 4), (1001, 3, 4, 4), (57, 2, 3, 1), (640, 4, 5, 3)),
]
"""Rows, ranks, rows of a micro-batch, micro-batches of a step."""


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("rows", "ranks", "batch", "accumulation"), CUTS)
@pytest.mark.long
def test_healthy_epochs_are_silent_wherever_they_end(
    rows: int, ranks: int, batch: int, accumulation: int, drop_last: bool, watched: bool
) -> None:
    """Short last batches, rows that the sampler fills up with, steps that an epoch ends in."""
    deal = Deal(rows, ranks, batch, accumulation, drop_last, watched, told=True)
    for epoch in range(12):
        deal.epoch(epoch)
    assert deal.events == []
    for told in deal.said:
        assert told.evidence.coverage is not None
        assert told.coverage.repeated is not None
        fill = (-rows) % ranks
        assert told.coverage.repeated <= (fill + (0 if watched else ranks)) / rows + 1e-9


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(("rows", "ranks", "batch", "accumulation"), CUTS)
def test_forgetting_set_epoch_is_told_in_the_second_epoch(
    rows: int, ranks: int, batch: int, accumulation: int, watched: bool, told: bool
) -> None:
    deal = Deal(rows, ranks, batch, accumulation, drop_last=False, watched=watched, told=told)
    for _ in range(3):
        deal.epoch(None)
    assert [(event.kind, event.severity, event.ranks) for event in deal.events] == [
        ("same-order", "warning", tuple(range(ranks)))
    ]
    assert "set_epoch" in deal.events[0].remedy
    first, second, third = deal.steps_of_epochs
    per_rank = -(-rows // ranks)  # the sum of log n over the rows that come again: too little for chance in tiny epochs
    enough = sum(np.log(rows - k) for k in range(min(per_rank, 64))) > 22.2
    assert first < deal.events[0].step <= (second if enough else third)


def test_set_epoch_called_at_last_ends_it() -> None:
    deal = Deal(120, 2, 4, 1, True, True, True)
    for epoch in (None, None, 1, 2, 3, 4, 5):
        deal.epoch(epoch)
    assert [(event.kind, event.severity) for event in deal.events] == [
        ("same-order", "warning"),
        ("same-order", "info"),
    ]


def test_a_trial_batch_before_the_training_is_no_epoch() -> None:
    deal = Deal(400, 2, 4, 1, True, True, True)
    deal.epoch(0, limit=1)
    deal.epoch(0)
    deal.epoch(1)
    assert deal.events == []


def test_epochs_that_are_broken_off_are_told_of_their_order_only() -> None:
    """Ten batches of each pass: with a new shuffle healthy, without one the same ten batches again and again."""
    healthy, forgotten = (Deal(400, 2, 4, 1, True, True, True) for _ in range(2))
    for epoch in range(8):
        healthy.epoch(epoch, limit=10)
        forgotten.epoch(None, limit=10)
    assert healthy.events == []
    [event] = forgotten.events
    assert event.kind == "same-order"
    assert event.message.endswith(" A pass is broken off after 80 of 400 rows.")
    assert event.remedy.startswith("Go on with one iterator")


@pytest.mark.parametrize("limit", [10, 25])
def test_a_training_that_begins_anew_may_take_its_first_rows_again(limit: int) -> None:
    """As behind a search for a learning rate: the pass that was broken off is no order that stays."""
    deal = Deal(400, 2, 4, 1, True, True, True)
    deal.epoch(0, limit=limit)
    for epoch in range(3):
        deal.epoch(epoch)
    assert deal.events == []


def always_in(order: Any, facts: DataFacts, told: bool) -> list[list[Event]]:
    """What each of 30 steps of two ranks finds, if every pass takes 40 rows in one order."""
    tracker, judge, found = RowTracker(), Judge(DetectorsConfig()), []
    for step in range(30):
        rows = [torch.from_numpy(order[(step * 8) % 40 :][r::2][:4]) for r in range(2)]
        sent = torch.stack([pack_ids(one, 4) for one in rows]).double()
        seen = tracker.step(sent, 4, facts.rows, Walk(facts, told=told))
        assert seen is not None
        evidence = Evidence(coverage=seen.evidence.coverage, same_order=seen.evidence.same_order)
        found.append(judge.step(StepRecord(step + 1, 0, None, 2), evidence))
    return found


SHUFFLED = np.random.default_rng(1).permutation(40) * 7919


@pytest.mark.parametrize("told", [True, False])
def test_the_same_order_by_design_is_healthy(told: bool) -> None:
    """Without shuffling; and where nobody knows, with ids in their own order or with hashes, which say nothing."""
    for facts, ids in ((DataFacts(40, False), True), (DataFacts(40), True), (DataFacts(None), told)):
        assert always_in(np.arange(40) if ids else SHUFFLED, facts, ids) == [[]] * 30


def test_an_order_that_comes_again_is_noted_of_a_sampler_that_is_told_of_epochs() -> None:
    found = [event for step in always_in(SHUFFLED, DataFacts(40, by_epoch=True), False) for event in step]
    assert [(event.kind, event.severity) for event in found] == [("same-order", "info")]
    assert found[0].remedy.startswith("If the order is meant to stay, do nothing. Else: Call sampler.set_epoch(epoch)")


def resumed(deal: Deal) -> None:
    """Go on as another process does, with what a checkpoint holds."""
    state = json.loads(json.dumps(deal.tracker.state_dict(False)))
    judged = json.loads(json.dumps(deal.judge.state_dict()))
    deal.tracker, deal.judge = RowTracker(), Judge(DetectorsConfig())
    deal.tracker.load_state_dict(state)
    deal.judge.load_state_dict(judged)


def test_a_resume_within_an_epoch_goes_on() -> None:
    """The loader is made anew for the rest of the epoch."""
    deal = Deal(160, 2, 4, 1, True, True, True)
    deal.epoch(0, limit=10)
    order = [list(iter(sampler)) for sampler in deal.samplers]
    resumed(deal)
    data: Any = list(range(160))
    whole, deal.loaders = deal.loaders, [DataLoader(data, 4, sampler=one[40:]) for one in order]
    deal.epoch(None)
    assert deal.said[-1].coverage.seen == 1.0
    deal.loaders = whole
    for epoch in range(1, 4):
        deal.epoch(epoch)
    assert deal.events == []


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("rows", "limit"), [(240, 13), (32, 5), (160, 10)])
def test_a_resume_that_begins_the_pass_anew_trains_rows_twice(rows: int, limit: int, told: bool) -> None:
    """It is a fact at the first step after the resume, and it ends with the epoch."""
    deal = Deal(rows, 2, 2, 1, True, True, told)
    deal.epoch(0, limit=limit)
    resumed(deal)
    deal.epoch(0, limit=3)
    twice = 3 * 4 / rows
    last = deal.said[-1].coverage
    assert (last.seen, last.repeated) == (pytest.approx(limit * 4 / rows), pytest.approx(twice))
    (event,) = deal.events
    assert (event.step, event.kind, event.severity, event.ranks, event.where) == (
        limit + 1,
        "data-order-mismatch",
        "warning",
        (0, 1),
        "resume",
    )
    assert "skip_first_batches" in event.remedy
    resumed(deal)  # once more, and the rest of the same pass
    order = [list(iter(sampler)) for sampler in deal.samplers]
    data: Any = list(range(rows))
    whole, deal.loaders = deal.loaders, [DataLoader(data, 2, sampler=one[6:]) for one in order]
    deal.epoch(None)
    assert deal.said[-1].coverage.seen == 1.0
    deal.loaders = whole
    for epoch in (1, 2, 3):
        deal.epoch(epoch)
        assert deal.said[-1].coverage.repeated == 0.0
    assert deal.events == [event]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resume_where_an_epoch_is_over_begins_the_next_one(shuffle: bool) -> None:
    """Without a shuffle the first rows come again, as they should; so they do where every pass is broken off."""
    for rows, limit, passes in ((160, 10**9, 1), (163, 10**9, 2), (160, 6, 2), (160, 6, 3)):
        deal = Deal(rows, 2, 4, 1, True, True, True)
        for sampler in deal.samplers:
            sampler.shuffle = shuffle
        for epoch in range(passes):
            deal.epoch(epoch, limit=limit)
        resumed(deal)
        for epoch in range(passes, passes + 3):
            deal.epoch(epoch, limit=limit)
            assert deal.said[-1].coverage.repeated == 0.0
        assert [event for event in deal.events if event.kind != "same-order"] == []


def test_a_first_pass_that_was_cut_short_may_be_meant_where_nothing_is_shuffled() -> None:
    deal = Deal(160, 2, 4, 1, True, True, True)
    for sampler in deal.samplers:
        sampler.shuffle = False
    deal.facts = DataFacts(160, False)
    deal.epoch(0, limit=6)
    resumed(deal)
    for _ in range(3):
        deal.epoch(0, limit=6)
    assert [(event.severity, event.where) for event in deal.events] == [("info", "resume")]


@pytest.mark.parametrize("limit", [2, 3, 4, 6])
def test_a_resume_that_takes_the_rest_from_another_order_repeats_rows(limit: int) -> None:
    """Of 32 rows, some come twice and as many never: another order is no new pass."""
    deal = Deal(32, 2, 2, 1, True, True, True)
    deal.epoch(0, limit=limit)
    state = json.loads(json.dumps(deal.tracker.state_dict(False)))
    deal.tracker = RowTracker()
    deal.tracker.load_state_dict(state)
    order = np.random.default_rng(limit).permutation(32)
    deal.loaders = [DataLoader(range(32), 2, sampler=order[r::2].tolist()) for r in range(2)]  # type: ignore[arg-type]
    deal.epoch(None, limit=8 - limit)
    first = [said.coverage.seen for said in deal.said]
    assert first == sorted(first)  # it does not fall
    last = deal.said[-1].coverage
    assert last.repeated is not None
    assert last.repeated > 0.0
    assert last.seen == 1.0 - last.repeated


@pytest.mark.parametrize("told", [True, False])
def test_own_permutations_are_told_by_ids_and_by_content(told: bool) -> None:
    """By content it is a warning that says what else it may be: the data may hold rows several times."""
    deal = Deal(1000, 4, 5, 1, True, True, told)
    for rank, sampler in enumerate(deal.samplers):
        sampler.seed = rank
    deal.epoch(0)
    severity = {event.kind: event.severity for event in deal.events}
    assert severity["data-order-mismatch"] == ("error" if told else "warning")
    assert ("the data hold several times" in deal.events[0].message) == (not told)


@pytest.mark.long
def test_rows_that_the_data_hold_twice_are_healthy_by_content() -> None:
    """Seven of a hundred rows are copies; by their ids they are rows like others."""
    order = np.random.default_rng(2)
    content = np.arange(2000) * 7919
    content[:140] = content[1000:1140]
    for told in (True, False):
        tracker, judge = RowTracker(), Judge(DetectorsConfig())
        for epoch in range(3):
            rows = order.permutation(2000)
            for step in range(250):
                taken = rows[step * 8 : step * 8 + 8]
                ids = torch.from_numpy(taken if told else content[taken])
                sent = torch.stack([pack_ids(ids[r::2], 4) for r in range(2)]).double()
                walk = Walk(DataFacts(2000, True), (0,) * (step == 0), True, told)
                seen = tracker.step(sent, 4, 2000, walk)
                assert seen is not None
                evidence = Evidence(coverage=seen.evidence.coverage, same_order=seen.evidence.same_order)
                assert judge.step(StepRecord(epoch * 250 + step + 1, 0, None, 2), evidence) == []


@pytest.mark.parametrize("watched", [True, False])
def test_data_without_a_length_tell_what_came_again(watched: bool) -> None:
    """An iterable data set: rows that came again since its loader began, against sets; nothing of an epoch."""
    tracker, visits = RowTracker(), list[int]()
    generator = np.random.default_rng(4)
    for step in range(20):
        begins = watched and step == 10
        rows = [torch.from_numpy(generator.integers(0, 60, 4)) for _ in range(3)]
        told = tracker.step(
            torch.stack([pack_ids(one, 4) for one in rows]).double(), 4, None, Walk(DataFacts(), (0,) * begins, watched)
        )
        visits = [*([] if begins else visits), *torch.cat(rows).tolist()]
        assert told is not None
        assert (told.coverage.seen, told.evidence.coverage) == (None, None)
        assert told.coverage.repeated == pytest.approx(1 - len(set(visits)) / len(visits), abs=1e-12)
