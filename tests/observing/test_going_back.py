"""A training that goes back to an earlier step in the same process: what it takes again is recorded and judged again."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.runs import read_run, verdict_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.ddp_training import DDPCase
from tests.support.ddp_training import build as build_ddp
from tests.support.distributed import run_distributed
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
    Back("ddp-update", stage=None, state=True, undecayed=True),
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
def test_every_step_that_is_taken_again_is_recorded_again(case: Back, trained: tuple[Path, list[list[int]]]) -> None:
    directory, counted = trained
    assert counted[CASES.index(case)] == [case.first, case.to, case.last]
    lines = [json.loads(line) for line in (directory / case.name / "metrics.jsonl").read_text().splitlines()]
    taken = [*range(1, case.first + 1), *range(case.to + 1, case.last + 1)]
    assert [line["step"] for line in lines] == [step for step in taken if step % case.interval == 0]
    records = read_metrics(directory / case.name / "metrics.jsonl")
    assert [record["step"] for record in records] == [step for step in range(1, case.last + 1) if not step % case.interval]
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_reads_as_a_run_that_was_resumed(case: Back, trained: tuple[Path, list[list[int]]]) -> None:
    run = read_run(trained[0] / case.name)
    steps = [step for step in range(1, case.last + 1) if step % case.interval == 0]
    assert list(run.steps.step) == steps
    assert f" {len(steps)} measured steps" in verdict_of(run).sentence or case.broken or case.undecayed
