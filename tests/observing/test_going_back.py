"""A training goes back to an earlier step in its own process: what it takes again is recorded and judged again."""

from __future__ import annotations

import copy
import importlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.agreement import Board
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.layout import GATHER_LIMIT, Layout
from ds_silent.kernels.checksums import Replica
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.measure.evidence import Evidence, ReductionEvidence
from ds_silent.measure.reduction_check import AppliedChecker, ReductionChecker, ReductionSettings
from ds_silent.observing.publisher import Publisher
from ds_silent.observing.recorder import Recorder, _Judgement
from ds_silent.records import Event
from ds_silent.replicas.compare import Drift
from ds_silent.respond.responder import _Dynamic
from ds_silent.runs import read_run, verdict_of
from ds_silent.sinks import FanOut
from ds_silent.sinks.jsonl import read_events, read_metrics
from ds_silent.text import TORCH
from tests.sinks.example_records import full_record
from tests.support.ddp_training import DDPCase
from tests.support.ddp_training import build as build_ddp
from tests.support.distributed import run_distributed
from tests.support.made_observations import gathered_of
from tests.support.made_records import Run
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, build

CLIP = 0.05
"""Far below every norm: a factor that belongs to another step is off by the ratio of two norms."""


@dataclass(frozen=True)
class Back:
    """One training: so many steps, back to ``to``, and so many in all again."""

    name: str
    stage: int | None = 0  # None: DistributedDataParallel
    first: int = 6
    to: int = 3
    last: int = 9
    interval: int = 1
    state: bool = False  # the observer's state goes back with the checkpoint
    early: bool = False  # what is under way is published before the way back
    gather_limit: int = GATHER_LIMIT
    same_rows: bool = False  # the steps that are taken again have the rows that they had
    broken: int = 0  # step, taken again, in which rank 1's loss is not finite
    undecayed: bool = False  # no weight decays in the steps that are taken again


CASES = (
    Back("stage-0"),
    Back("stage-1", stage=1, state=True),
    Back("early", early=True),
    Back("early-1", stage=1, early=True, state=True),
    Back("interval", interval=2, first=7),
    Back("by-one", to=5, early=True, gather_limit=1),
    Back("many", stage=1, gather_limit=1, state=True),
    Back("many-early", gather_limit=1, early=True),
    Back("broken", broken=5),
    Back("ddp", stage=None, state=True),
    Back("ddp-early", stage=None, state=True, early=True, broken=5),
    Back("ddp-rows", stage=None, state=True, same_rows=True),
    Back("rows", same_rows=True),
    Back("rows-by-one", to=5, same_rows=True),
    Back("ddp-update", stage=None, state=True, undecayed=True, first=9, to=2, last=10),
)


class _Loop:
    """The same few calls whatever the framework."""

    def __init__(self, case: Back, directory: Path):
        self._case, self._directory, self._kept = case, directory, None
        if case.stage is None:
            self._model, self._optimizer = build_ddp(DDPCase())
            block = {"output_dir": str(directory), "tensorboard": False, "direction": {"sketch_size": 1024}}
            self.observer = ds_silent.attach(self._model, block, optimizer=self._optimizer)
        else:
            ours = Case(stage=case.stage, clipping=CLIP, interval=case.interval)
            self._engine = build(ours, directory, gather_limit=case.gather_limit)
            self.observer = ds_silent.observer_of(self._engine)
        assert self.observer is not None
        self.observer.samples_per_epoch = ROWS * dist.get_world_size() * case.last  # all steps are one epoch

    def take(self, step: int, again: bool) -> None:
        other = again and not self._case.same_rows
        generator = torch.Generator().manual_seed(1000 * step + 10 * other + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        factor = float("nan") if again and step == self._case.broken and dist.get_rank() == 1 else 1.0
        if self._case.stage is None:
            (self._model(tokens, False) * factor).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
            self._update(undecayed=again and self._case.undecayed)
            self._optimizer.zero_grad()
        else:
            self._engine.backward(self._engine(tokens, False) * factor)
            self._engine.step()

    def _update(self, undecayed: bool) -> None:
        of_adam = importlib.import_module("torch.optim.adam")
        original = of_adam.adam
        if undecayed:
            of_adam.adam = lambda *lists, **settings: original(*lists, **{**settings, "weight_decay": 0.0})
        self._optimizer.step()
        of_adam.adam = original

    def save(self) -> None:
        state = self.observer.state_dict() if self._case.state else None
        if self._case.stage is None:
            self._kept = copy.deepcopy([state, self._model.state_dict(), self._optimizer.state_dict()])
        else:
            self._kept = state
            self._engine.save_checkpoint(str(self._directory) + "-checkpoint", tag="kept")

    def load(self) -> None:
        if self._case.early:
            self.observer.flush()
        if self._case.stage is None:
            for one, state in zip((self.observer, self._model, self._optimizer), self._kept, strict=True):
                one.load_state_dict(state)
            return
        self._engine.load_checkpoint(str(self._directory) + "-checkpoint", tag="kept")
        if self._kept is not None:
            self.observer.load_state_dict(self._kept)


def went_back(directory: str, cases: tuple[Back, ...]) -> list[list[int]]:
    """Return the steps that the engines count at the ends."""
    counted = []
    for case in cases:
        loop, steps = _Loop(case, Path(directory, case.name)), []
        for step in range(1, case.first + 1):
            loop.take(step, again=False)
            if step == case.to:
                loop.save()
        steps.append(loop.observer.step)
        loop.load()
        steps.append(loop.observer.step)
        for step in range(case.to + 1, case.last + 1):
            loop.take(step, again=True)
        steps.append(loop.observer.step)
        loop.observer.close()
        counted.append(steps)
    return counted


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    directory = tmp_path_factory.mktemp("back")
    return directory, run_distributed(went_back, 2, (str(directory), CASES), timeout=400)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.long
def test_every_step_that_is_taken_again_is_recorded_again(case: Back, trained: tuple[Path, list[list[int]]]) -> None:
    directory, counted = trained
    assert counted[CASES.index(case)] == [case.first, case.to, case.last]
    lines = [json.loads(line) for line in (directory / case.name / "metrics.jsonl").read_text().splitlines()]
    taken = [*range(1, case.first + 1), *range(case.to + 1, case.last + 1)]
    assert [line["step"] for line in lines] == [step for step in taken if step % case.interval == 0]
    records = read_metrics(directory / case.name / "metrics.jsonl")
    assert [record["step"] for record in records] == [
        step for step in range(1, case.last + 1) if not step % case.interval
    ]
    before = {line["step"]: line["loss"]["per_rank"] for line in lines[: case.first // case.interval]}
    for record in records:
        if case.to < record["step"] <= case.first and not case.same_rows:
            assert record["loss"]["per_rank"] != before[record["step"]], "the record of the step that was taken back"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_going_back_is_no_fault_and_hides_none(case: Back, trained: tuple[Path, list[list[int]]]) -> None:
    path = trained[0] / case.name / "events.jsonl"
    events = read_events(path) if path.exists() else []
    told = [(event["kind"], event["step"], event["ranks"]) for event in events if event["severity"] != "info"]
    expected = [("non-finite", case.broken, [1])] if case.broken else []
    expected += [("update-mismatch", case.to + 2, [])] if case.undecayed else []  # found in the first, read in the next
    assert told == expected, events


@pytest.mark.parametrize("case", [case for case in CASES if case.same_rows], ids=lambda case: case.name)
def test_rows_that_are_taken_again_are_no_second_visit(case: Back, trained: tuple[Path, list[list[int]]]) -> None:
    covered = read_metrics(trained[0] / case.name / "metrics.jsonl")[-1]["coverage"]
    followed = case.last if case.state else case.last - case.to  # without its state the observer knows of no others
    assert covered["seen"] == pytest.approx(followed / case.last)
    assert covered["repeated"] == covered["duplicates"] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_reads_as_a_run_that_was_resumed(case: Back, trained: tuple[Path, list[list[int]]]) -> None:
    run = read_run(trained[0] / case.name)
    steps = [step for step in range(1, case.last + 1) if step % case.interval == 0]
    assert list(run.steps.step) == steps
    assert f" {len(steps)} measured steps" in verdict_of(run).sentence or case.broken or case.undecayed


# -- what keeps steps, each by itself ----------------------------------------------------------------------------------


def test_what_others_have_told_outlives_what_was_learned() -> None:
    nothing: Any = SimpleNamespace()
    judgement = _Judgement(SilentConsistencyConfig.model_validate({}), nothing, nothing, TORCH, True)
    told = Event(0, "config-mismatch", "error", (1,), "optimizer", None, None, "Other rates.", "Mend it.")
    judgement.told(told)
    before, rows = judgement.judge, judgement._tracker
    judgement.load_state_dict({"judge": {"version": 99}}, 2)  # which cannot be read
    assert before is not None
    assert judgement.judge not in (None, before)
    assert judgement._tracker is not rows
    assert judgement.judge._episodes._told == before._episodes._told != []


def test_a_state_that_is_not_whole_leaves_nothing_loaded() -> None:
    nothing: Any = SimpleNamespace()
    judgement = _Judgement(SilentConsistencyConfig.model_validate({}), nothing, nothing, TORCH, True)
    run = Run(2)
    run.steps(60)
    state = run.judge.state_dict()
    fresh, learned = judgement.state_dict(False), {"rows": judgement.state_dict(False)["rows"], "ranks": 2}
    judgement.load_state_dict({**learned, "judge": state}, 2)
    assert judgement.state_dict(False) != fresh
    del state["drift"]  # what comes before it was read already
    judgement.load_state_dict({**learned, "judge": state}, 2)
    assert judgement.state_dict(False) == fresh


def test_what_responses_had_still_to_tell_is_told_with_the_first_record_after_the_way_back() -> None:
    taken: list[float] = []
    framework = SimpleNamespace(peers=None)
    responder = SimpleNamespace(take=lambda step: taken.append(step))
    parts = SimpleNamespace(framework=framework, writes=False)
    publisher: Any = Publisher(parts, parts, parts, responder, None)  # type: ignore[arg-type]
    for boundary, step in enumerate((6, 7, 4, 5)):
        status = {"status.boundary": [boundary] * 2}
        publisher._in_turn(Arrived(gathered_of(step, 2, **status), None), None)
    assert taken == [6, 7, math.inf, 5]


def test_of_two_observations_of_one_step_each_is_judged_with_its_own_drift(tmp_path: Path) -> None:
    config = SilentConsistencyConfig.model_validate({"detectors": {"enabled": False}})
    recorder, judged = Recorder(FanOut([]), config), []
    recorder._judged = lambda record, evidence: judged.append((record, evidence.reduction.drift))  # type: ignore[method-assign]
    records = [full_record(6), replace(full_record(6), samples=1), full_record(5)]
    recorder._unjudged = [(record, Evidence(reduction=ReductionEvidence(None, None, None))) for record in records]
    drifts = [Drift((name,), (), None) for name in "ab"]
    recorder.settle(drifts[0], 6)
    recorder.settle(drifts[1], 6)
    assert judged == [(records[0], drifts[0]), (records[1], drifts[1])]
    recorder.settle(None)
    assert judged[2:] == [(records[2], None)]


def test_what_was_applied_before_the_way_back_is_not_compared() -> None:
    checker = AppliedChecker(ReductionSettings(Layout(64), Arithmetic(torch.float32, elements=64), 16.0))
    reduced = {"reduced.seen": [1, 1], "reduced.squared": [0.5, 0.5], "loss.scale": [1, 1]}
    checker.remember(replace(gathered_of(6, 2, **reduced), aggregate=torch.ones(64)), alike=True)
    applied = {"applied.seen": [1, 1], "applied.squared": [1, 1], "applied.factor": [0.5, 0.5], "loss.scale": [1, 1]}
    found = checker.check(gathered_of(7, 2, **applied))
    assert found is not None
    assert found.wrong_factor
    assert [checker.check(gathered_of(step, 2, **applied)) for step in (4, 6)] == [None, None]


def test_the_micro_batches_of_a_step_taken_again_are_the_newest() -> None:
    checker = ReductionChecker(ReductionSettings(Layout(64), Arithmetic(torch.float32), 16.0))
    for step in (*range(1, 10), 5, 3, 4):
        checker.micro_batches(step, torch.full((1,), float(step)))
    assert list(checker._micro_batches) == [9, 5, 3, 4]


def left_on_a_board() -> list[Any]:
    """Rank 0 goes back from step 6 to 5 before rank 1 does."""
    board, heard = Board("steps", range(2)), []
    me = dist.get_rank()
    for step, said in ((5, "old"), (6, "old"), (5, "new")):
        if me == 1 and said == "new":
            dist.barrier()
        board.leave(step, said)
        if me == 0 and said == "new":
            heard.append(board.heard(5, 1))
            dist.barrier()
    dist.barrier()
    return [*heard, board.heard(5, 1 - me), board.heard(6, 1 - me)]


def test_what_was_left_before_the_way_back_is_not_heard_behind_it() -> None:
    assert run_distributed(left_on_a_board, 2) == [[None, "new", None], ["new", None]]


def test_a_response_that_waits_for_a_step_waits_no_longer_than_its_interval() -> None:
    capture: Any = SimpleNamespace()
    dynamic = _Dynamic(capture, lambda: Replica([], lambda: None), 10)
    dynamic._next = 107
    assert [dynamic.communicates(step, False) for step in (99, 106, 107, 97, 96, 3)] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]
