"""A rank whose loader is stuck is named; where all ranks take rows again, at the end of an epoch, nobody is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.repeats import RepeatTest, rate_of_others
from ds_silent.measure.coverage import EpochCoverage
from ds_silent.measure.evidence import Coverage, Evidence, OwnPasses, Trail
from ds_silent.measure.row_history import RecentRows
from ds_silent.records import Event, StepRecord
from tests.support.ids_by_rank import by_rank


class Run:
    """Sharded ranks that walk one permutation per epoch, some of them stuck; judged as in a training."""

    def __init__(self, ranks: int, batch: int, rows: int, seed: int = 1, known: bool = True) -> None:
        """``known``: whether the rows of an epoch are."""
        self.ranks, self.batch, self.rows, self.known = ranks, batch, rows, known
        self.judge, self.step = Judge(DetectorsConfig()), 0
        self._random = np.random.default_rng(seed)
        self._recent, self._epoch = RecentRows(), EpochCoverage()

    def go(self, steps: int, stuck: tuple[int, ...] = ()) -> list[Event]:
        events, per_epoch = [], self.rows // (self.ranks * self.batch)
        for _ in range(steps):
            if self.step % per_epoch == 0:
                self._order = self._random.permutation(self.rows)
                self._epoch.start_epoch()
            place = self.step % per_epoch
            dealt = self._order[place * self.ranks * self.batch :]
            ids = [dealt[r * self.batch : (r + 1) * self.batch] for r in range(self.ranks)]
            ids = [self._before[r] if r in stuck else one for r, one in enumerate(ids)]
            self._before, self.step = ids, self.step + 1
            self._epoch.update(np.concatenate(ids))
            seen, consumed = self._epoch.seen(self.rows).value, self._epoch.visits / self.rows
            evidence = Evidence(
                duplicates={},
                rows_per_rank=(self.batch,) * self.ranks,
                own_rows=(self.batch,) * self.ranks,
                own_repeats=self._recent.repeats(*by_rank(ids), self.ranks),
                coverage=Coverage(consumed, seen, consumed - seen, self.rows) if self.known else None,
            )
            record = StepRecord(self.step, self.step * self.ranks * self.batch, None, self.ranks)
            events += self.judge.step(record, evidence)
        return events


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("ranks", "stuck"), [(2, (1,)), (4, (2,)), (4, (0, 3)), (64, (17,))])
def test_who_is_stuck_is_named_once_and_it_ends(ranks: int, stuck: tuple[int, ...], known: bool) -> None:
    run = Run(ranks, batch=8, rows=ranks * 8 * 100, known=known)
    assert run.go(10) == []
    found = run.go(8, stuck)
    assert [(event.kind, event.severity, event.ranks) for event in found] == [("data-order-mismatch", "error", stuck)]
    assert found[0].step == 11 or (len(stuck) == 2 and found[0].step <= 14)
    assert "100% of the rows of this step" in found[0].message
    ended = run.go(10)
    assert [(event.severity, event.ranks) for event in ended] == [("info", stuck)]


def test_a_row_per_step_takes_a_few_steps() -> None:
    run = Run(4, batch=1, rows=400)
    run.go(3)
    ((step, ranks),) = [(event.step, event.ranks) for event in run.go(20, (2,))]
    assert (4 < step <= 20, ranks) == (True, (2,))


def test_where_all_ranks_are_stuck_nobody_is_singled_out() -> None:
    run = Run(4, batch=8, rows=3200)
    run.go(10)
    assert [(event.kind, event.ranks) for event in run.go(20, (0, 1, 2, 3))] == [("data-order-mismatch", (0, 1, 2, 3))]


def test_the_rate_of_the_others() -> None:
    assert rate_of_others(np.array([8.0, 0.0, 1.0]), np.array([8.0, 40.0, 40.0])).tolist() == [2 / 81, 10 / 49, 9 / 49]
    assert rate_of_others(np.full(4, 8.0), np.full(4, 8.0)).tolist() == [1.0] * 4


@pytest.mark.parametrize("steps_per_epoch", [1, 2, 5])
@pytest.mark.long
def test_short_epochs_are_no_fault(steps_per_epoch: int) -> None:
    for seed in range(5):
        assert Run(4, batch=8, rows=32 * steps_per_epoch, seed=seed).go(400) == []


def test_training_on_one_batch_on_purpose_is_no_fault() -> None:
    test = RepeatTest(16.0)
    for step in range(1000):
        evidence = Evidence(own_rows=(8,) * 4, own_repeats=(8 * (step > 0),) * 4)
        assert test.step(StepRecord(step, step, None, 4), evidence) == []
        assert test.attributed == 0.0


def test_chance_repeats_are_rare_enough() -> None:
    """Sampling with replacement from 40 rows: every fifth row comes again at once, on every rank."""
    random, test = np.random.default_rng(3), RepeatTest(16.0)
    for step in range(3000):
        repeats = tuple(int(n) for n in random.binomial(8, 0.2, size=4))
        evidence = Evidence(own_rows=(8,) * 4, own_repeats=repeats)
        assert test.step(StepRecord(step, step, None, 4), evidence) == []


def test_a_rank_that_follows_another_is_told_till_it_does_no_more() -> None:
    """The trail goes on with fewer observations where a step was unlike."""
    judge, events = Judge(DetectorsConfig()), list[Event]()
    for step, times in enumerate((7, 8, 9, 8, 7, 3, 1, 0, 5), 1):
        trails = {2: Trail(0, 80, times)} if times else {}
        passes = OwnPasses((8,) * 4, (100.0,) * 4, taken=(400,) * 4, trails=trails)
        events += judge.step(StepRecord(step, step, None, 4), Evidence(passes=passes))
    assert [(e.step, e.kind, e.severity, e.ranks, e.phase) for e in events] == [
        (2, "duplicate-data", "error", (0, 2), "started"),
        (8, "duplicate-data", "info", (0, 2), "ended"),
    ]
    assert events[0].message.startswith("Rank 2 trains on the rows that rank 0 took 80 rows before, one by one")


def test_it_goes_on_after_a_resume() -> None:
    one = Run(4, batch=1, rows=400)
    one.go(3)
    one.go(3, (2,))
    state = json.loads(json.dumps(one.judge.state_dict()))
    one.judge = Judge(DetectorsConfig())
    one.judge.load_state_dict(state)
    two = Run(4, batch=1, rows=400)
    two.go(3)
    assert [(e.step, e.ranks) for e in one.go(17, (2,))] == [(e.step, e.ranks) for e in two.go(20, (2,))]


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_whose_batches_are_drawn_again_by_chance_is_no_fault(seed: int) -> None:
    """CycleGAN's discriminators take one of the newest 20 batches of fakes: it was an error of 8 rows at once."""
    random, judge, recent, ranks = np.random.default_rng(seed), Judge(DetectorsConfig()), RecentRows(), 2
    for step in range(1, 801):
        newest = random.integers(max(0, step - 20), step, size=ranks)
        ids = [np.arange(8) + 8 * (batch + 10_000 * rank) for rank, batch in enumerate(newest)]
        repeats = recent.repeats(*by_rank(ids), ranks)
        passes = OwnPasses(recent.window, recent.distinct, taken=recent.taken)
        evidence = Evidence(own_rows=(8,) * ranks, own_repeats=repeats, passes=passes)
        events = judge.step(StepRecord(step, 16 * step, None, ranks), evidence)
        assert [event for event in events if event.severity != "info"] == [], step


def test_a_loader_that_is_stuck_is_told_where_batches_come_again_by_chance() -> None:
    random, judge, recent, ranks, told = np.random.default_rng(1), Judge(DetectorsConfig()), RecentRows(), 4, []
    for step in range(1, 121):
        newest = random.integers(max(0, step - 20), step, size=ranks)
        newest[2] = newest[2] if step < 100 else 77
        ids = [np.arange(8) + 8 * (batch + 10_000 * rank) for rank, batch in enumerate(newest)]
        repeats = recent.repeats(*by_rank(ids), ranks)
        evidence = Evidence(
            own_rows=(8,) * ranks, own_repeats=repeats, passes=OwnPasses(recent.window, recent.distinct)
        )
        told += judge.step(StepRecord(step, 32 * step, None, ranks), evidence)
    [event] = [event for event in told if event.severity != "info"]
    assert (event.kind, event.ranks) == ("data-order-mismatch", (2,))
    assert 100 < event.step <= 115
