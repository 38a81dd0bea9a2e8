"""Train on one rank with a fault in it: the loop, and the places where an injection acts, for every framework.

    with DDPTraining(setting, script).reached() as training:      # a collective
        loss = training.step(batches, step=1)
        state_of(training.module, training.optimizer)             # one hash of what this rank holds

The order matters, for every framework: replicas are made equal as it wraps the model, so weights are changed after it;
the gradient hooks are registered before the observer's, so that it sees what they return; what strikes behind the
capture is registered, or patched, after it.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import BLOCK
from ds_silent.device import local_of
from ds_silent.drill.faults.fault import LANGUAGE_MODEL, Fault, Response
from ds_silent.drill.faults.injection import HEALTHY, Batch, Collective, Injection, Target
from ds_silent.observing.observer import Observer
from ds_silent.patches import Patches
from ds_silent.practice.model import LanguageModel, PracticeModel

if TYPE_CHECKING:
    from ds_silent.drill.setting import DrillSetting

SEED = 42
LEARNING_RATE, WEIGHT_DECAY = 5e-5, 0.01
LARGEST_BUCKET = 40_000  # elements, so that the practice model has several buckets, as a real one has


@dataclass(frozen=True)
class Trial:
    """One training: which fault (None: a healthy run), on whom and when, and for how many optimizer steps at most."""

    name: str
    fault: Fault | None
    target: Target
    steps: int
    ids: bool = True  # whether the script tells the row ids
    own_seeds: bool = False  # every rank draws its dropout from a generator of its own
    response: Response | None = None  # switched on in this training

    @property
    def of_language_model(self) -> bool:
        """Whether a model of transformers is trained, and probed."""
        return (self.name if self.fault is None else self.fault.healthy) == LANGUAGE_MODEL

    def wrapper_options(self, framework: str) -> dict[str, Any]:
        """Return what the framework's wrapper must be given for the fault to mean something."""
        return {} if self.fault is None else dict(self.fault.wrapper_options.get(framework, {}))

    def anywhere(self, *places: str) -> bool:
        """Whether the fault sets one of these places of an injection on any rank."""
        everyone = range(dist.get_world_size())
        return self.fault is not None and any(
            getattr(self.fault.inject(self.target, rank), place) is not None for rank in everyone for place in places
        )


@dataclass(frozen=True)
class Script:
    """One rank's script: the trial, what it does differently here, and where it starts."""

    trial: Trial
    injection: Injection
    weights: dict[str, Tensor]
    loader: Any  # of which the observer asks the sampler
    output_dir: Path

    def model(self) -> PracticeModel | LanguageModel:
        """Seed every generator, and make the model as the training begins."""
        seed_all(SEED)
        if self.trial.of_language_model:
            return LanguageModel()
        model = PracticeModel()
        model.load_state_dict(self.weights)
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's groups of what is trainable."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        count = 1 if self.trial.fault is None else self.trial.fault.groups
        return [{"params": trained[place::count]} for place in range(count)]


class Hooks:
    """Call the injection at its places in one rank's training, and count where the training is."""

    def __init__(self, injection: Injection) -> None:
        self.injection, self.patches = injection, Patches()
        self.step, self.micro_batch, self.last, self.attempt, self._buckets = 1, 0, True, 0, 0
        self.phase: Literal["step", "backward", "update", "repetition"] | None = None

    def begin(self, step: int, micro_batch: int, last: bool) -> None:
        """Note that a micro-batch begins, counted from 0; ``last`` of its step."""
        self.step, self.micro_batch, self.last, self.phase = step, micro_batch, last, "step"
        self._buckets, self.attempt = 0, 0

    def act(self, place: str, *given: Any) -> Any:
        """Do what the injection does at this place, or what a healthy training does."""
        return (getattr(self.injection, place) or HEALTHY[place])(*given)

    def collective(self, place: str, tensor: Tensor, run: Callable[[], object], **more: Any) -> None:
        """Run a collective, as far as the injection lets it."""
        number, self._buckets = (self.micro_batch, self._buckets), self._buckets + 1
        self.act(place, Collective(tensor.view(-1), run, self.step, number, self.last, self.attempt, **more))

    def gradient(self, name: str, gradient: Tensor) -> Any:
        return self.act("gradient", name, gradient, self.step)

    def captured(self, name: str, gradient: Tensor) -> Any:
        return self.act("captured", name, gradient, self.last, self.step)

    def damage_repairs(self) -> None:
        """Change what a repair's collectives bring.

        Repairs of replicas use ``torch.distributed.broadcast`` and asynchronous ``all_reduce`` of floating numbers,
        which nobody else does during an update (up to 64 ranks).
        """
        if self.injection.repair is not None:
            self.patches.wrap(dist, "broadcast", self._restore)
            self.patches.wrap(dist, "all_reduce", self._average)

    def _arrived(self, tensor: Tensor) -> None:
        self.act("repair", tensor.view(-1), self.step)

    def _restore(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if self.phase == "update":
            self._arrived(tensor)
        return result

    def _average(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if not (self.phase == "update" and kwargs.get("async_op") and tensor.is_floating_point()):
            return result

        def wait() -> None:
            result.wait()
            self._arrived(tensor)

        return SimpleNamespace(wait=wait)


class DrillTraining(ABC):
    """A training of the practice model; each framework has a subclass, whose ``__init__`` takes setting and script.

    Attributes:
        hooks: through which the injection acts.
        module: whose names the parameters go by.
        optimizer: the one that updates this rank's weights, below a framework's wrappers.
        leaves: the trainable parameters that a backward sees, with their names.
        observer: there once the training runs.
    """

    observer: Observer
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext  # in which it is made, and runs

    def __init__(
        self, setting: DrillSetting, script: Script, hooks: Hooks, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.setting, self.script, self.hooks = setting, script, hooks
        self.module, self.optimizer = module, optimizer
        self.leaves = self.trainable()

    @contextmanager
    def reached(self) -> Iterator[DrillTraining]:
        """Reach into the training and attach the observer; put everything back at the end. A collective."""
        script, hooks, injection = self.script, self.hooks, self.script.injection
        if script.trial.own_seeds:
            seed_all(SEED + dist.get_rank())
        if injection.model is not None:
            injection.model(self.module)
        if injection.optimizer is not None:
            injection.optimizer(self.optimizer)
        self.reach_below()
        if injection.seed is not None:
            injection.seed()
        if injection.gradient is not None:
            for name, leaf in self.leaves:
                leaf.register_hook(partial(hooks.gradient, name))  # type: ignore[no-untyped-call]
        observer = self.attach({**self.setting.config[BLOCK], "output_dir": str(script.output_dir)})
        assert observer is not None  # the setting's block is active
        self.observer = observer
        try:
            self.reach_behind()
            hooks.damage_repairs()
            yield self
        finally:
            hooks.patches.undo()
        observer.close()
        self.close()

    def step(self, batches: list[Batch], step: int) -> float:
        """Take one optimizer step, counted from 1; return this rank's loss, averaged over its micro-batches."""
        hooks, total = self.hooks, 0.0
        hooks.act("before", self.module, self.optimizer, step)
        for number, batch in enumerate(batches):
            hooks.begin(step, number, last=number == len(batches) - 1)
            if self.script.trial.ids:
                self.observer.observe_batch(batch.ids)
            total += float(self.train(batch, len(batches)).detach())
        hooks.phase = "update"
        self.update()
        hooks.phase = None
        hooks.act("afterwards", self.module, self.optimizer, step)
        return total / len(batches)

    def trainable(self) -> list[tuple[str, Tensor]]:
        """Return the leaves. A collective."""
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def reach_below(self) -> None:  # noqa: B027
        """Change what lies below the observer, before it is attached."""

    def reach_behind(self) -> None:
        """Change what lies behind the observer's capture of the local gradient: hooks run as they were registered."""
        if self.hooks.injection.captured is not None:
            for name, leaf in self.leaves:
                self.hooks.patches.hook(leaf.register_hook, partial(self.hooks.captured, name))

    @abstractmethod
    def attach(self, block: dict[str, Any]) -> Observer | None:
        """Attach an observer with this block."""

    @abstractmethod
    def train(self, batch: Batch, count: int) -> Tensor:
        """Run forward and backward of one of ``count`` micro-batches; return the loss."""

    def update(self) -> None:  # noqa: B027
        """Step the optimizer and clear the gradients, where the backward has not done so."""

    def close(self) -> None:  # noqa: B027
        """Release what the framework holds."""


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def state_of(module: nn.Module, optimizer: Any) -> str:
    """Hash a rank's parameters, frozen ones too, buffers, fp32 masters, optimizer's state.

    Of what is sharded it is this rank's own part, which differs from rank to rank.
    """
    held: list[Any] = [*module.parameters(), *module.buffers()]
    for group in optimizer.param_groups:
        held += [value for _, value in sorted(group.items()) if isinstance(value, (int, float))]
        for parameter in group["params"]:
            held.append(parameter)
            held += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return hash_of(local_of(value) for value in held)


def hash_of(values: Iterable[object]) -> str:
    """Return the sha256 of tensors' bits, and of anything else as Python shows it, in their order.

    Another function than the responses' own checksum: who judges a repair must not believe it.
    """
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
