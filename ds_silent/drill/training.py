"""What a training of the drill is made from, and what one step of it is, whatever the framework.

    script = Script(trial, injection, weights, loader, output_dir)
    with setting.training(script) as training:
        loss = training.step(batches, step=1)
        training.state()                             # one hash of what this rank holds

The order matters, for every framework: replicas are made equal as it wraps the model, so weights are changed after it;
the gradient hooks are registered before the observer's, so that it sees what they return; what strikes behind the
capture is registered, or patched, after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.drill.faults.damage import local_of
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.injection import Batch, Injection, Strike
from ds_silent.drill.faults.responses import Response
from ds_silent.observing.observer import Observer
from ds_silent.practice.hashing import hash_of
from ds_silent.practice.model import PracticeModel

SEED = 42


@dataclass(frozen=True)
class Trial:
    """One training: which fault (None: a healthy run), on whom and when, and for how many optimizer steps at most."""

    name: str
    fault: Fault | None
    strike: Strike
    steps: int
    ids: bool = True  # whether the script tells the row ids
    own_seeds: bool = False  # every rank draws its dropout from a generator of its own
    response: Response | None = None  # switched on in this training

    @property
    def hashed(self) -> bool:
        """Whether the state is needed: of a repaired training and of those that it is compared with."""
        return self.response is not None or self.fault is None


@dataclass(frozen=True)
class Script:
    """One rank's script: the trial, what it does differently here, and where it starts."""

    trial: Trial
    injection: Injection
    weights: dict[str, Tensor]
    loader: Any  # of which the observer asks the sampler
    output_dir: Path

    def model(self) -> PracticeModel:
        """Seeds every generator, and makes the model as the training begins."""
        seed_all(SEED)
        model = PracticeModel()
        model.load_state_dict(self.weights)
        return model

    def before_observer(self, module: nn.Module, optimizer: Any, reach_below: Callable[[], None]) -> None:
        """What is different from the start; ``reach_below`` changes what lies below the observer."""
        if self.trial.own_seeds:
            seed_all(SEED + dist.get_rank())
        if self.injection.model is not None:
            self.injection.model(module)
        if self.injection.optimizer is not None:
            self.injection.optimizer(optimizer)
        reach_below()
        if self.injection.seed is not None:
            self.injection.seed()


class Training(Protocol):
    """A framework's training with an observer."""

    observer: Observer

    def step(self, batches: list[Batch], step: int) -> float:
        """One optimizer step, counted from 1; the loss of this rank, averaged over its micro-batches."""

    def state(self) -> str:
        """Of what this rank holds."""


def state_of(module: nn.Module, optimizer: Any) -> str:
    """Hash of a rank's parameters, frozen ones too, buffers, fp32 masters, optimizer's state; its own of shards."""
    held: list[Any] = [*module.parameters(), *module.buffers()]
    for group in optimizer.param_groups:
        held += [value for _, value in sorted(group.items()) if isinstance(value, (int, float))]
        for parameter in group["params"]:
            held.append(parameter)
            held += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return hash_of(local_of(value) for value in held)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
