"""A training of the drill under DeepSpeed.

What strikes behind the capture goes through :mod:`ds_silent.drill.deepspeed.seams`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from torch import Tensor

import ds_silent
from ds_silent.config import BLOCK
from ds_silent.drill.deepspeed.seams import Seams, reach_below
from ds_silent.drill.faults.injection import Batch, Injection
from ds_silent.drill.setting import Setting
from ds_silent.drill.training import Script, state_of
from ds_silent.observing.observer import Observer

# ----------------------------------------------------------------------------------------------------------------------
# A training's state as one hash: the weights and everything that decides the next update.


def state_hash(engine: Any) -> str:
    """Of what this rank holds: parameters, frozen ones too, buffers, fp32 masters, the optimizer's state.

    Under ZeRO the masters and the optimizer's state are this rank's own shard, and differ from rank to rank.
    """
    return state_of(engine.module, engine.basic_optimizer)


def full_parameters(engine: Any) -> list[Tensor]:
    """Clones of every parameter, whole, in their training dtype."""
    parameters = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            parameters.append(parameter.detach().clone())
    return parameters


# -- A training of the drill under DeepSpeed ---------------------------------------------------------------------------


class DeepSpeedTraining:
    """See :class:`ds_silent.drill.training.Training`."""

    def __init__(self, engine: Any, observer: Observer, seams: Seams, script: Script) -> None:
        self.observer = observer
        self._engine, self._seams, self._script = engine, seams, script

    def step(self, batches: list[Batch], step: int) -> float:
        engine, seams, injection = self._engine, self._seams, self._script.injection
        seams.forward(step)
        total = 0.0
        for number, batch in enumerate(batches):
            if self._script.trial.ids:
                self.observer.observe_batch(batch.ids)
            loss = engine(batch.tokens, batch.labels)
            if injection.loss is not None:
                loss = injection.loss(loss, step)
            with seams.backward(step, number, last=number == len(batches) - 1):
                engine.backward(loss)
            with seams.update(step):
                engine.step()
            total += float(loss.detach())
        return total / len(batches)

    def state(self) -> str:
        return state_hash(self._engine)


@contextmanager
def train(setting: Setting, script: Script) -> Iterator[DeepSpeedTraining]:
    """The engine with its observer, until the training is over."""
    engine = _engine(setting, script)
    observer = ds_silent.observer_of(engine)
    assert observer is not None  # the setting's block is active
    with Seams(engine, script.injection) as seams:
        yield DeepSpeedTraining(engine, observer, seams, script)
    observer.close()
    engine.destroy()


def _engine(setting: Setting, script: Script) -> Any:
    injection = script.injection
    config = copy.deepcopy(setting.config)
    config[BLOCK]["output_dir"] = str(script.output_dir)
    if injection.config is not None:
        config = injection.config(config)
    model = script.model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    script.before_observer(engine.module, engine.optimizer, lambda: reach_below(engine, injection))
    if injection.gradient is not None:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(_corrupting(injection, name, engine))
    engine.training_dataloader = script.loader
    ds_silent.attach(engine)
    return engine


def _corrupting(injection: Injection, name: str, engine: Any) -> Any:
    corrupt = injection.gradient
    assert corrupt is not None
    return lambda gradient: corrupt(name, gradient, engine.global_steps + 1)
