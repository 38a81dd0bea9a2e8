"""Run one short real training with one fault in it, on every rank of the process group.

start = prepare(setting)                                   # once: warm weights, rows
run = run_trial(start, trial, output_dir)                  # a collective; the same arguments on every rank
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from ds_silent.drill.faults.injection import NOTHING, STEPS_PER_EPOCH, Batch, Injection, Shard
from ds_silent.drill.setting import FRAMEWORKS, DrillSetting
from ds_silent.drill.training import SEED, DrillTraining, Script, Trial
from ds_silent.drill.verdicts import alarms, judge
from ds_silent.practice.model import PracticeModel, PracticeRows, make_rows, warm_up
from ds_silent.sinks.jsonl import read_events, read_metrics

AFTER_FOUND = 2  # measured steps, to see whether the alarm says more


@dataclass(frozen=True)
class Start:
    """What every training of the drill starts from; the same on every rank."""

    setting: DrillSetting
    rows: PracticeRows
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class TrialRun:
    """Hold what came of a training, on rank 0; ``losses`` are averaged over the ranks, one per step taken.

    ``change``: how large the corruption was, relative to the aggregated gradient, where the injection knows;
    ``rounding``: how large an error rounding explains there, as the record of the first step says. ``states``: the hash
    of each rank's weights and optimizer state after every step, where the trial asks for them.
    """

    name: str
    events: tuple[dict[str, Any], ...]
    losses: tuple[float, ...]
    change: float | None = None
    rounding: float | None = None
    states: tuple[tuple[str, ...], ...] = ()


def prepare(setting: DrillSetting) -> Start:
    """Make rows, and weights that rank 0 warms up and sends to the others. A collective."""
    ranks = dist.get_world_size()
    count = STEPS_PER_EPOCH * setting.micro_batch * setting.accumulation * ranks
    torch.manual_seed(SEED)
    model = PracticeModel()
    if dist.get_rank() == 0:
        warm_up(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Start(setting, make_rows(count, seed=1), weights)


def run_trial(start: Start, trial: Trial, output_dir: Path) -> TrialRun:
    """Train until the fault is found (and a little longer) or ``trial.steps`` are over. A collective."""
    me, fault = dist.get_rank(), trial.fault
    setting = start.setting.answering(trial.response)
    start = replace(start, setting=setting.probing() if trial.of_language_model else setting)
    injection = NOTHING if fault is None else fault.inject(trial.target, me)
    losses: list[float] = []
    states: list[str] = []
    with _environment(injection.environment):
        # a loader, as far as the observer asks one for its sampler
        loader = SimpleNamespace(sampler=_sampler(len(start.rows.tokens), _shard(injection, me)))
        with _training(start.setting, Script(trial, injection, start.weights, loader, output_dir)) as training:
            training.observer.samples_per_epoch = len(start.rows.tokens)
            deal = _Deal(start, injection, loader.sampler)
            watch = _EventWatch(trial, output_dir, start.setting)
            for step in range(1, trial.steps + 1):
                losses.append(training.step(deal.batches(step), step))
                if trial.hashed:
                    states.append(training.state())
                if watch.over(step):
                    break
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (losses, states))
    means = tuple(sum(values) / len(values) for values in zip(*(own for own, _ in everyone), strict=True))
    hashes = tuple(zip(*(own for _, own in everyone), strict=True))
    if me != 0:
        return TrialRun(trial.name, (), means, states=hashes)
    change = None if injection.change is None else injection.change()
    rounding = _rounding(output_dir, trial.target.step)
    return TrialRun(trial.name, tuple(_events(output_dir)), means, change, rounding, hashes)


def _training(setting: DrillSetting, script: Script) -> AbstractContextManager[DrillTraining]:
    """Make a training, observed and with the script's fault in it; import its framework alone. A collective."""
    module, name = FRAMEWORKS[setting.framework].training.split(".")
    kind: type[DrillTraining] = getattr(importlib.import_module(f"ds_silent.drill.{module}"), name)
    return kind.running(setting, script)


def _events(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


def _rounding(output_dir: Path, step: int) -> float | None:
    path = output_dir / "metrics.jsonl"
    for record in read_metrics(path) if path.exists() else ():
        if record["step"] == step:
            bound = record["integrity"]["rounding_bound"]
            return bound if isinstance(bound, float) else None
    return None


@contextmanager
def _environment(changes: Any) -> Iterator[None]:
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]
        os.environ.update(before)


class _Deal:
    """Deals the rows of each step through torch's own sampler, as the injection lets this rank see it.

    ``sampler``: the one that the observer knows; it is told each epoch, as scripts do.
    """

    def __init__(self, start: Start, injection: Injection, sampler: DistributedSampler[int]) -> None:
        self._start, self._injection, self._sampler = start, injection, sampler
        self._me = dist.get_rank()
        self._shard = _shard(injection, self._me)
        setting = start.setting
        self._per_rank = setting.micro_batch * setting.accumulation
        self._order = lru_cache(maxsize=16)(self._shuffled)

    def batches(self, step: int) -> list[Batch]:
        injection, me = self._injection, self._me
        self._sampler.set_epoch((step - 1) // STEPS_PER_EPOCH)
        rows = self.rows_of(*(injection.rows(me, step) if injection.rows else (me, step)))
        content = self.rows_of(*injection.content(me, step)) if injection.content else rows
        size, known = self._start.setting.micro_batch, self._start.rows
        parts = zip(torch.split(rows, size), torch.split(content, size), strict=True)
        batches = [Batch(ids, known.tokens[own], known.labels[own]) for ids, own in parts]
        return batches if injection.batch is None else [injection.batch(batch, step) for batch in batches]

    def rows_of(self, rank: int, step: int) -> Tensor:
        shard = self._shard if rank == self._me else replace(self._shard, rank=rank)
        per_epoch = len(self._order(shard, 0)) // self._per_rank
        epoch, within = divmod(step - 1, per_epoch)
        return self._order(shard, epoch)[within * self._per_rank : (within + 1) * self._per_rank]

    def _shuffled(self, shard: Shard, epoch: int) -> Tensor:
        sampler = _sampler(len(self._start.rows.tokens), shard)
        sampler.set_epoch(epoch)
        return torch.tensor(list(sampler), dtype=torch.int64)


def _shard(injection: Injection, rank: int) -> Shard:
    shard = Shard(dist.get_world_size(), rank, SEED)
    return shard if injection.shard is None else injection.shard(shard)


def _sampler(rows: int, shard: Shard) -> DistributedSampler[int]:
    return DistributedSampler(
        range(rows),  # type: ignore[arg-type]  # anything with a length
        num_replicas=shard.ranks,
        rank=shard.rank,
        shuffle=True,
        seed=shard.seed,
        drop_last=True,
    )


class _EventWatch:
    """Rank 0 reads the events, all ranks end together."""

    def __init__(self, trial: Trial, output_dir: Path, setting: DrillSetting) -> None:
        self._trial, self._directory, self._setting = trial, output_dir, setting
        self._end: int | None = None
        self._read = 0

    def over(self, step: int) -> bool:
        """Whether this was the last step. A collective."""
        word = torch.zeros(1, dtype=torch.int32)
        if dist.get_rank() == 0:
            word.fill_(int(self._decided(step)))
        dist.broadcast(word, src=0)
        return bool(word.item())

    def _decided(self, step: int) -> bool:
        trial, setting = self._trial, self._setting
        if trial.fault is None or trial.response is not None:  # what was repaired must stay so
            return False
        if self._end is None:
            events = _events(self._directory)
            if len(events) > self._read and alarms(events):
                self._read = len(events)
                verdict = judge(trial.fault, trial.target, events, setting.interval, setting.replica_interval)
                if verdict.found or verdict.answer == "false alarm":
                    self._end = step + AFTER_FOUND * setting.interval
        return self._end is not None and step >= self._end
