"""Run one short real training with one fault in it, on every rank of the process group.

start = prepare(setting)                                   # once: warm weights, rows
run = run_trial(start, trial, output_dir)                  # a collective; the same arguments on every rank
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from ds_silent.drill.faults.injection import NOTHING, STEPS_PER_EPOCH, Batch, Injection, Shard
from ds_silent.drill.setting import FRAMEWORKS, DrillSetting
from ds_silent.drill.training import SEED, DrillTraining, Script, Trial, state_of
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
    if trial.of_language_model:
        setting = setting.probing()
    injection = NOTHING if fault is None else fault.inject(trial.target, me)
    deal = _Deal(setting, start.rows, injection)
    loader = SimpleNamespace(sampler=deal.sampler)  # a loader, as far as the observer asks one
    losses: list[float] = []
    states: list[str] = []
    end: int | None = None
    with (
        patch.dict(os.environ, injection.environment),
        _training(setting, Script(trial, injection, start.weights, loader, output_dir)) as training,
    ):
        training.observer.samples_per_epoch = len(start.rows.tokens)
        for step in range(1, trial.steps + 1):
            losses.append(training.step(deal.batches(step), step))
            if fault is None or trial.response is not None:  # to the last step: what was repaired must stay so
                states.append(state_of(training.module, training.optimizer))
            elif end is None and _decided(trial, output_dir, setting):
                end = step + AFTER_FOUND * setting.interval
            if step == end:
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


@contextmanager
def _training(setting: DrillSetting, script: Script) -> Iterator[DrillTraining]:
    """Make a training, observed and with the script's fault in it; import its framework alone. A collective."""
    module, name = FRAMEWORKS[setting.framework].training.split(".")
    kind: type[DrillTraining] = getattr(importlib.import_module(f"ds_silent.drill.{module}"), name)
    with kind.surroundings(), kind(setting, script).reached() as training:  # type: ignore[call-arg]
        yield training


def _decided(trial: Trial, output_dir: Path, setting: DrillSetting) -> bool:
    """Whether rank 0 has read an event that says whether the fault was found. A collective."""
    word = torch.zeros(1, dtype=torch.int32)
    if dist.get_rank() == 0 and trial.fault is not None and alarms(events := _events(output_dir)):
        verdict = judge(trial.fault, trial.target, events, setting.interval, setting.replica_interval)
        word.fill_(verdict.answer in ("found", "false alarm"))
    dist.broadcast(word, src=0)
    return bool(word.item())


def _events(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


def _rounding(output_dir: Path, step: int) -> float | None:
    path = output_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else ()
    bound = next((record["integrity"]["rounding_bound"] for record in records if record["step"] == step), None)
    return bound if isinstance(bound, float) else None


class _Deal:
    """Deals the rows of each step through torch's own sampler, as the injection lets this rank see it.

    ``sampler``: the one that the observer knows; it is told each epoch, as scripts do.
    """

    def __init__(self, setting: DrillSetting, rows: PracticeRows, injection: Injection) -> None:
        self._rows, self._injection, self._micro_batch = rows, injection, setting.micro_batch
        self._per_rank = setting.micro_batch * setting.accumulation
        shard = Shard(dist.get_world_size(), dist.get_rank(), SEED)
        self._shard = shard if injection.shard is None else injection.shard(shard)
        self._order = lru_cache(maxsize=16)(self._shuffled)
        self.sampler = self._sampler(self._shard)

    def batches(self, step: int) -> list[Batch]:
        injection, me, known = self._injection, dist.get_rank(), self._rows
        self.sampler.set_epoch((step - 1) // STEPS_PER_EPOCH)
        rows = self._rows_of(*(injection.rows(me, step) if injection.rows else (me, step)))
        content = self._rows_of(*injection.content(me, step)) if injection.content else rows
        parts = zip(torch.split(rows, self._micro_batch), torch.split(content, self._micro_batch), strict=True)
        batches = [Batch(ids, known.tokens[own], known.labels[own]) for ids, own in parts]
        return batches if injection.batch is None else [injection.batch(batch, step) for batch in batches]

    def _rows_of(self, rank: int, step: int) -> Tensor:
        shard = self._shard if rank == dist.get_rank() else replace(self._shard, rank=rank)
        per_epoch = len(self._order(shard, 0)) // self._per_rank
        epoch, within = divmod(step - 1, per_epoch)
        return self._order(shard, epoch)[within * self._per_rank : (within + 1) * self._per_rank]

    def _shuffled(self, shard: Shard, epoch: int) -> Tensor:
        sampler = self._sampler(shard)
        sampler.set_epoch(epoch)
        return torch.tensor(list(sampler), dtype=torch.int64)

    def _sampler(self, shard: Shard) -> DistributedSampler[int]:
        rows: Any = range(len(self._rows.tokens))  # anything with a length
        return DistributedSampler(rows, shard.ranks, shard.rank, shuffle=True, seed=shard.seed, drop_last=True)
