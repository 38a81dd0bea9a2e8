"""The configuration that the drill trains Megatron-core under, and what cannot be had there.

    setting = make_setting(load_ds_config("block.json"), ranks=4, stage=1)       # the distributed optimizer
    setting.why_not(FAULTS["weight-changed"])            # "each number has one owner: ..."
    setting.faults["layer-norms"]                        # and the faults of public issues

Stage 0 is Megatron's plain optimizer, stage 1 its distributed one. In bf16 gradients are accumulated and reduced in
fp32 and the optimizer updates fp32 copies, as Megatron's own training script has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.injection import NOTHING, Batch, Injection, Strike
from ds_silent.drill.setting import Dtype, Setting
from ds_silent.drill.torch_loop.setting import TorchSetting, read
from ds_silent.drill.training import Script, Training, state_of
from ds_silent.extras import installed, missing_sentence
from ds_silent.frameworks.megatron.buffers import inner_optimizers
from ds_silent.practice.hashing import hash_of
from ds_silent.practice.megatron_scenarios import SCENARIOS, Scenario, ScenarioTraining, training_of

# ----------------------------------------------------------------------------------------------------------------------
# A training of the drill in which a fault of a public issue of Megatron-LM goes wrong, or its healthy twin.
#
# Its rows are its own: ranks of one tensor-parallel group must hold the same.


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


# -- The configuration that the drill trains Megatron-core under, and what cannot be had there -------------------------


NAME = "Megatron-core"
RANKS = 4  # of the public faults' groups

_NO_GATHER = "every rank updates all weights, so none are gathered"
_ONE_OWNER = "each number has one owner: nobody else holds it, so nobody could differ"
_MASTERS = "its optimizer holds copies of its own, and nobody is asked which parameters they stand for"
_WHOLE = "every rank has the whole gradient, none a partition of it"
MEANINGLESS: Mapping[int, Mapping[str, str]] = {
    0: {
        "gathered-weights-stale": _NO_GATHER,
        "gathered-weights-bit": _NO_GATHER,
        "partition-not-cleared": _WHOLE,
        "parameter-trained-late": _MASTERS,
    },
    1: {
        "parameter-trained-late": _MASTERS,
        **dict.fromkeys(("aggregate-flip-one-rank", "weight-changed", "optimizer-state-changed"), _ONE_OWNER),
        "optimizer-without-layer": "the optimizer holds a rank's own shards, which have no name",
    },
}
"""By stage: faults that mean nothing, and why."""

# each rank keeps its own gradient of its own part of each bucket: a layer that lies in one part is its owner's alone,
# and no sum of whole gradients explains any other
_PARTS: dict[str, Any] = {"kinds": ("aggregation-error", "unreduced-gradient"), "who": "an owner"}
# the buffer holds zeros where no gradient came: a comparison with the other ranks finds that, some steps later
_ZEROS: dict[str, Any] = {"deterministic": False, "steps": 100}
EXPECTED: Mapping[int, Mapping[str, dict[str, Any]]] = {
    0: {"layer-without-gradient": _ZEROS},
    1: {
        "layer-without-gradient": _ZEROS,
        "bucket-dropped": {**_PARTS, "says": ("layers.3",)},
        "parameter-unreduced": {**_PARTS, "says": ("position",)},
        "wrong-group": {"who": "the pair or nobody"},  # of four ranks: layers in the first half's parts lack the second
    },
}
"""By stage: faults that are told in other words than under DeepSpeed."""


@dataclass(frozen=True)
class MegatronSetting(TorchSetting):
    """``config`` holds the block alone."""

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {**FAULTS, **PUBLIC}

    def own_healthy(self, faults: list[Fault]) -> list[str]:
        return list(dict.fromkeys(SCENARIOS[fault.name].healthy for fault in faults if fault.name in PUBLIC))

    def reference(self, name: str) -> str:
        return SCENARIOS[name].healthy if name in SCENARIOS else "healthy"

    @property
    def kind(self) -> str:
        return f"{NAME}, distributed optimizer" if self.stage else NAME

    @property
    def masters(self) -> bool:
        return self.dtype == "bf16"

    def facts(self) -> dict[str, Any]:
        return {"framework": self.framework, "distributed_optimizer": self.stage == 1}

    def refuse(self, config: dict[str, Any], block: SilentConsistencyConfig) -> None:
        if block.respond.on_aggregation_error == "retry" or block.reduction == "ordered":
            raise ConfigError("only a reduction of DeepSpeed can be repeated or ordered")
        if block.respond.on_replica_drift != "report" or block.resync.mode != "off":
            raise ConfigError("ds_silent does not write weights with Megatron-core")

    @property
    def reasons(self) -> Mapping[str, str]:
        return MEANINGLESS[self.stage]

    @property
    def told_otherwise(self) -> Mapping[str, dict[str, Any]]:
        return EXPECTED[self.stage]

    def meaningless(self, fault: Fault) -> str | None:
        if fault.name not in PUBLIC:
            return super().meaningless(fault)
        return None if self.ranks == RANKS else f"its groups are of {RANKS} ranks"

    def training(self, script: Script) -> AbstractContextManager[Training]:
        from ds_silent.drill.megatron import setting as public
        from ds_silent.drill.megatron import training

        train = public.train if script.trial.name in SCENARIOS else training.train
        return train(self, script)


def _nothing(strike: Strike, me: int) -> Injection:
    """What goes wrong is in the scenario."""
    return NOTHING


def _fault(name: str, scenario: Scenario) -> Fault:
    assert scenario.expected is not None
    return Fault(
        name,
        (scenario.expected,),
        scenario.who,
        "replica" if scenario.expected == "replica-drift" else "reduction",
        _nothing,
        f"{scenario.title} (Megatron-LM {scenario.issue})",
        first_step=scenario.first_step,
        says=scenario.says,
    )


PUBLIC: Mapping[str, Fault] = {name: _fault(name, scenario) for name, scenario in SCENARIOS.items() if scenario.issue}
"""Faults of public issues of Megatron-LM, in trainings of a small GPT of Megatron's own layers."""


def make_setting(
    given: Mapping[str, Any] | None, ranks: int, stage: int | None = None, dtype: Dtype | None = None
) -> MegatronSetting:
    """The drill's configuration.

    Args:
        given: the user's block, alone or in a configuration; None takes an empty block.
        ranks: data-parallel ranks of the drill.
        stage: 1 takes the distributed optimizer; 0 unless given.
        dtype: fp32 unless given.

    Raises:
        ConfigError: Megatron-core is not installed, there is no active block, or something cannot be honoured.
    """
    if not installed("megatron.core"):
        raise ConfigError(missing_sentence("ds-silent drill --framework megatron", ["megatron.core"], "megatron"))
    if stage not in (None, 0, 1):
        raise ConfigError(f"--stage must be 0, or 1 for the distributed optimizer, with {NAME}, got {stage}")
    block, micro, accumulation, config, notes = read(given, NAME)
    width: Dtype = "fp32" if dtype is None else dtype
    return MegatronSetting(config, block, ranks, micro, accumulation, stage or 0, width, notes, "megatron")
