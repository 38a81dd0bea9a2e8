"""A training of the drill in which a fault of a public issue of Megatron-LM goes wrong, or its healthy twin.

Its rows are its own: ranks of one tensor-parallel group must hold the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ds_silent.config import BLOCK
from ds_silent.drill.faults.injection import Batch
from ds_silent.drill.setting import Setting
from ds_silent.drill.training import Script, state_of
from ds_silent.frameworks.megatron.buffers import inner_optimizers
from ds_silent.practice.hashing import hash_of
from ds_silent.practice.megatron_scenarios import SCENARIOS, ScenarioTraining, training_of


class PublicTraining:
    """See :class:`ds_silent.drill.training.Training`."""

    def __init__(self, training: ScenarioTraining) -> None:
        self.observer = training.observer
        self._training = training

    def step(self, batches: list[Batch], step: int) -> float:
        return self._training.step()

    def state(self) -> str:
        module = self._training.chunk.module
        return hash_of(state_of(module, inner) for _, inner in inner_optimizers(self._training.optimizer))


@contextmanager
def train(setting: Setting, script: Script) -> Iterator[PublicTraining]:
    """The training with its observer, until it is over."""
    block = {**setting.config[BLOCK], "output_dir": str(script.output_dir)}
    with training_of(SCENARIOS[script.trial.name], block) as training:
        yield PublicTraining(training)
