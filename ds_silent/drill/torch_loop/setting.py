"""The configuration that the drill trains DistributedDataParallel and FSDP2 under, and what cannot be had there.

    setting = make_setting(load_ds_config("block.json"), ranks=4, framework="ddp")
    setting.why_not(FAULTS["gathered-weights-bit"])      # "no weights are gathered: ..."

Of the user's file the ``silent_consistency`` block counts, alone or under its name, and beside it the micro-batch and
the accumulation in DeepSpeed's words. In bf16 a module in DistributedDataParallel is bf16 as a whole; under FSDP2 its
shards stay fp32, and forward, gradients and their reduction are bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.setting import Dtype, Setting, batch_of, compared_soon, only_reporting
from ds_silent.drill.training import Script, Training

Framework = Literal["ddp", "fsdp2", "megatron"]
NAMES: Mapping[str, str] = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}
READ = (BLOCK, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_THE_SCRIPTS = "between the reduction and the step a gradient is the script's to change"
_NO_CONFIG = "the script clips by itself: there is no configuration to read it from"
_ONE_OWNER = "each number has one owner: nobody else holds it, so nobody could differ"
_FOR_ONE_STEP = "gathered weights are freed behind each forward and backward: no copy of them is left to compare"
_REFUSED = "a parameter that takes no part in the reduction is refused as the observer is attached"
_WAITS = "the ranks' reductions then differ, and FSDP2 itself waits for ever or dies"
MEANINGLESS: Mapping[str, Mapping[str, str]] = {
    "ddp": {
        "config-value": _NO_CONFIG,
        "applied-factor-4": f"{_THE_SCRIPTS}, on all ranks alike",
        "partition-not-cleared": "every rank has the whole gradient, none a partition of it",
        "gathered-weights-stale": "every rank updates all weights, so none are gathered",
        "gathered-weights-bit": "every rank updates all weights, so none are gathered",
    },
    "fsdp2": {
        "config-value": _NO_CONFIG,
        "applied-factor-4": f"{_THE_SCRIPTS}, on all ranks alike",
        "applied-noise": f"{_THE_SCRIPTS}, and no other rank has the same piece to compare it with",
        "buffer-changed": "FSDP2 keeps no buffers alike: each rank's are its own",
        "layer-without-gradient": _WAITS,
        "frozen-trained": _WAITS,
        "parameter-unreduced": _REFUSED,
        "gathered-weights-stale": _FOR_ONE_STEP,
        "gathered-weights-bit": _FOR_ONE_STEP,
        **dict.fromkeys(
            (
                *("initial-weights-tensor", "initial-weights-bit", "aggregate-flip-one-rank"),
                *("weight-changed", "frozen-parameter-changed", "optimizer-state-changed"),
            ),
            _ONE_OWNER,
        ),
    },
}
"""Faults that mean nothing under a framework, and why."""

EXPECTED: Mapping[str, Mapping[str, dict[str, Any]]] = {
    # what the script has changed is no multiple of the aggregate: its bits are compared with those of the other ranks
    "ddp": {"applied-noise": {"says": ("received something else",)}},
    # each rank keeps its own gradient of its own rows: no sum of whole gradients, so no way to tell it from a lost part
    "fsdp2": {"bucket-dropped": {"kinds": ("aggregation-error",), "who": "nobody", "says": ("layers.3",)}},
}
"""Faults that are told in other words than under DeepSpeed, because the framework's ranks hold other things."""


@dataclass(frozen=True)
class TorchSetting(Setting):
    """``config`` holds the block alone."""

    framework: Framework = "ddp"

    @property
    def kind(self) -> str:
        return NAMES[self.framework]

    @property
    def reasons(self) -> Mapping[str, str]:
        """By fault: why it means nothing here, whatever else is configured."""
        return MEANINGLESS[self.framework]

    @property
    def told_otherwise(self) -> Mapping[str, dict[str, Any]]:
        """By fault: what of it must be another than under DeepSpeed."""
        return EXPECTED[self.framework]

    @property
    def masters(self) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        return {"framework": self.framework}

    def skipped_facts(self, faults: list[Fault]) -> dict[str, Any]:
        return {"not_applicable": {fault.name: self.why_not(fault) for fault in faults}}

    def refuse(self, config: dict[str, Any], block: SilentConsistencyConfig) -> None:
        if block.respond.on_aggregation_error == "retry" or block.reduction == "ordered":
            raise ConfigError("only a reduction of DeepSpeed can be repeated or ordered")
        if self.framework == "fsdp2" and (block.respond.on_replica_drift != "report" or block.resync.mode != "off"):
            raise ConfigError("a repair needs whole replicas, and FSDP2 shards them")

    def meaningless(self, fault: Fault) -> str | None:
        why = self.reasons.get(fault.name)
        if why is None and self.dtype not in fault.dtypes:
            why = f"it is tried in {', '.join(fault.dtypes)} only"
        if why is None and self.accumulation < fault.accumulation:
            why = f"it takes gradient_accumulation_steps {fault.accumulation} in the configuration"
        return why

    def expected(self, fault: Fault) -> Fault:
        return replace(fault, **self.told_otherwise.get(fault.name, {}))

    def left_out(self, faults: list[Fault]) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for fault in faults:
            reasons.setdefault(self.why_not(fault) or "", []).append(fault.name)
        return [f"Not applicable, because {why}: {', '.join(names)}." for why, names in reasons.items()]

    def training(self, script: Script) -> AbstractContextManager[Training]:
        from ds_silent.drill.torch_loop.training import train

        return train(self, script)


def make_setting(
    given: Mapping[str, Any] | None, ranks: int, framework: Framework, dtype: Dtype | None = None
) -> TorchSetting:
    """The drill's configuration.

    Args:
        given: the user's block, alone or in a configuration; None takes an empty block.
        ranks: data-parallel ranks of the drill.
        framework: who trains.
        dtype: fp32 unless given.

    Raises:
        ConfigError: there is no active block, or something in it cannot be honoured.
    """
    block, micro, accumulation, config, notes = read(given, NAMES[framework])
    return TorchSetting(
        config,
        block,
        ranks,
        micro,
        accumulation,
        {"ddp": 0, "fsdp2": 3}[framework],
        "fp32" if dtype is None else dtype,
        notes,
        framework,
    )


def read(
    given: Mapping[str, Any] | None, name: str
) -> tuple[SilentConsistencyConfig, int, int, dict[str, Any], tuple[str, ...]]:
    """(block, micro-batch, accumulation, configuration of the block alone, what was changed) of the user's file.

    Raises:
        ConfigError: see :func:`make_setting`.
    """
    held = copy.deepcopy(dict({BLOCK: {}} if given is None else given))
    if BLOCK not in held:
        held = {BLOCK: held}
    own = held[BLOCK]
    if isinstance(own, Mapping):
        held[BLOCK] = {key: value for key, value in own.items() if key != "output_dir"}
    block, replicas = compared_soon(held)
    if block is None:
        raise ConfigError(f'the configuration has no active "{BLOCK}" block to try; leave out "enabled": false')
    block, answers = only_reporting(held, block)
    micro, accumulation, sizes = batch_of(held)
    others = [f"{key}: not part of the drill of {name}" for key in held if key not in READ]
    notes = (*replicas, *answers, *others, *sizes)
    return block, micro, accumulation, {BLOCK: {**held[BLOCK], "tensorboard": False}}, notes
