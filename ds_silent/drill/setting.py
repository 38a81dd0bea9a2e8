"""Make the configuration that the drill trains under: the user's own as far as it decides what the observer sees.

    setting = make_setting(load_ds_config("block.json"), ranks=4, framework="ddp")
    setting.answering(MAJORITY)                          # with this response switched on
    setting.why_not(FAULTS["gathered-weights-bit"])      # "every rank updates all weights, so none are gathered"

Of DeepSpeed's configuration what :mod:`ds_silent.drill.train_deepspeed` names is kept. For another framework the
``silent_consistency`` block counts, alone or under its name, and beside it the micro-batch and the accumulation in
DeepSpeed's words.

With Megatron-core stage 0 is its plain optimizer, stage 1 its distributed one; in bf16 gradients are accumulated and
reduced in fp32 and the optimizer updates fp32 copies, as Megatron's own training script has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, parse
from ds_silent.config.block_file import section, under_its_name
from ds_silent.config.fields import about
from ds_silent.drill.faults.fault import LANGUAGE_MODEL, Fault, Response
from ds_silent.extras import installed, missing_sentence


@dataclass(frozen=True)
class DrillFramework:
    """What the drill can train under.

    ``title``: as a person says it. ``training``: module and class, which the ranks import. ``stage``: unless the user
    says otherwise. ``no_repair``: why replicas cannot be repaired.
    """

    title: str
    training: str
    stage: int = 0
    no_repair: str = ""


FRAMEWORKS: Mapping[str, DrillFramework] = {
    "deepspeed": DrillFramework("DeepSpeed", "train_deepspeed.DeepSpeedTraining"),
    "ddp": DrillFramework("DistributedDataParallel", "train_torch.DDPTraining"),
    "fsdp2": DrillFramework(
        "FSDP2", "train_torch.FSDP2Training", 3, "a repair needs whole replicas, and FSDP2 shards them"
    ),
    "megatron": DrillFramework(
        "Megatron-core",
        "train_torch.MegatronTraining",
        no_repair="ds_silent does not write weights with Megatron-core",
    ),
}
"""By what is typed."""
READ = (BLOCK, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MICRO_BATCH, LARGEST_MICRO_BATCH, LARGEST_ACCUMULATION = 8, 16, 4
REPLICA_MEASUREMENTS = 5  # measured steps between two comparisons of the replicas, unless the configuration says when


@dataclass(frozen=True)
class DrillSetting:
    """A configuration without an output directory, the same on every rank, and what was changed to get there.

    ``config``: a ds_config, or the block alone under its name. ``stage``: who holds what, in ZeRO's words: 0 is whole
    replicas, from 1 on each rank has a part of its own.
    """

    config: dict[str, Any]
    block: SilentConsistencyConfig
    ranks: int
    micro_batch: int
    accumulation: int
    stage: int
    dtype: str
    notes: tuple[str, ...]
    framework: str = "deepspeed"

    @property
    def interval(self) -> int:
        """Optimizer steps between measurements."""
        return self.block.interval

    @property
    def replica_interval(self) -> int:
        """Optimizer steps between two comparisons of the replicas; 0 is never."""
        return self.block.integrity.replica_interval

    @property
    def kind(self) -> str:
        """Framework and kind of training, as a person would say it."""
        if self.framework == "deepspeed":
            return f"ZeRO stage {self.stage}"
        distributed = self.framework == "megatron" and self.stage
        return FRAMEWORKS[self.framework].title + (", distributed optimizer" if distributed else "")

    @property
    def variant(self) -> str:
        """The key of a fault's exceptions."""
        return f"megatron-{self.stage}" if self.framework == "megatron" else self.framework

    @property
    def masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of weights of another dtype."""
        return self.dtype == "bf16" and self.framework in ("deepspeed", "megatron")

    def facts(self) -> dict[str, Any]:
        """Return what the JSON file says of the framework."""
        if self.framework == "deepspeed":
            return {"zero_stage": self.stage}
        distributed = {"distributed_optimizer": self.stage == 1} if self.framework == "megatron" else {}
        return {"framework": self.framework, **distributed}

    def answering(self, response: Response | None) -> DrillSetting:
        """Switch this response on, and measure every step; leave all as it is without one.

        Raises:
            ConfigError: it cannot work under this configuration.
        """
        if response is None:
            return self
        own = self.config[BLOCK]
        direction = dict(section(own, "direction"))
        if direction.get("method") == "off":
            direction["method"] = "sketch"
        integrity = {**section(own, "integrity"), "aggregation": True, **response.block.get("integrity", {})}
        answering = self._with({**response.block, "interval": 1, "direction": direction, "integrity": integrity})
        answering._refuse()
        return answering

    def probing(self) -> DrillSetting:
        return self._with({"probe": True})

    def why_not(self, fault: Fault) -> str | None:
        """Say why a fault means nothing in such a training; None where it does."""
        fault, response = fault.under(self.variant), fault.response
        if fault.healthy == LANGUAGE_MODEL and not installed("transformers"):
            return "transformers is not installed"
        other_dtype, too_few = self.dtype not in fault.dtypes, self.accumulation < fault.accumulation
        if self.framework == "deepspeed":
            if self.stage not in fault.stages or other_dtype or too_few:
                return f"means nothing under {self._cell}"
        elif self.variant in fault.not_applicable:
            return fault.not_applicable[self.variant]
        elif other_dtype:
            return f"it is tried in {', '.join(fault.dtypes)} only"
        elif too_few:
            return f"it takes gradient_accumulation_steps {fault.accumulation} in the configuration"
        if response is not None and self.ranks < response.least_ranks:
            return f"needs at least {response.least_ranks} ranks"
        try:
            self.answering(response)
        except ConfigError as error:
            return str(error)
        return None

    def left_out(self, faults: list[Fault]) -> list[str]:
        """Name faults that are left out, in lines for the report."""
        if self.framework == "deepspeed":
            return [f"Left out under {self._cell}: {', '.join(fault.name for fault in faults)}."]
        reasons: dict[str, list[str]] = {}
        for fault in faults:
            reasons.setdefault(self.why_not(fault) or "", []).append(fault.name)
        return [f"Not applicable, because {why}: {', '.join(names)}." for why, names in reasons.items()]

    @property
    def _cell(self) -> str:
        return f"{self.kind}, {self.dtype}, accumulation {self.accumulation}"

    def _with(self, changes: Mapping[str, Any]) -> DrillSetting:
        """Return the setting with other values of the block's keys."""
        config = {**self.config, BLOCK: {**self.config[BLOCK], **changes}}
        block = parse(config)
        assert block is not None
        return replace(self, config=config, block=block)

    def _refuse(self) -> None:
        """Raise :class:`ConfigError` for what the framework cannot honour."""
        respond, why = self.block.respond, FRAMEWORKS[self.framework].no_repair
        if self.framework == "deepspeed":
            from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config  # it may not be installed

            refuse_unsupported_config(self.config, self.block)
        elif respond.on_aggregation_error == "retry" or self.block.reduction == "ordered":
            raise ConfigError("only a reduction of DeepSpeed can be repeated or ordered")
        elif why and (respond.on_replica_drift != "report" or self.block.resync.mode != "off"):
            raise ConfigError(why)


def make_setting(
    given: Mapping[str, Any] | None,
    ranks: int,
    stage: int | None = None,
    dtype: str | None = None,
    framework: str = "deepspeed",
) -> DrillSetting:
    """Make the drill's configuration.

    Args:
        given: the user's; None takes an empty block, stage 0 and fp32.
        ranks: data-parallel ranks of the drill, whatever the configuration was written for.
        stage: replaces ``zero_optimization.stage``; with Megatron-core 1 is the distributed optimizer.
        dtype: replaces the dtype.
        framework: who trains, a key of ``FRAMEWORKS``.

    Raises:
        ConfigError: there is no active block, or something in the configuration cannot be honoured.
    """
    name, deepspeed = FRAMEWORKS[framework].title, framework == "deepspeed"
    if framework == "megatron":
        if not installed("megatron.core"):
            raise ConfigError(missing_sentence("ds-silent drill --framework megatron", ["megatron.core"], "megatron"))
        if stage not in (None, 0, 1):
            raise ConfigError(f"--stage must be 0, or 1 for the distributed optimizer, with {name}, got {stage}")
    elif stage is not None and not deepspeed:
        raise ConfigError(f"--stage {stage} is DeepSpeed's; leave it out with --framework {framework}")
    held = dict({BLOCK: {}} if given is None else under_its_name(given))
    if not deepspeed and BLOCK not in held:
        held = {BLOCK: held}
    if isinstance(held.get(BLOCK), Mapping):  # the trainer fills it in; here it is replaced
        held[BLOCK] = {key: value for key, value in held[BLOCK].items() if key != "output_dir"}
    block = parse(held)
    if block is None and deepspeed:
        raise ConfigError(f'the ds_config has no active "{BLOCK}" block to try; add "{BLOCK}": {{}} to it')
    if block is None:
        raise ConfigError(f'the configuration has no active "{BLOCK}" block to try; leave out "enabled": false')
    if deepspeed:
        from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config

        refuse_unsupported_config(held, block)
    own, replicas = compared_soon(block, held[BLOCK])
    own, answers = _without(block, own, "")
    micro_batch, accumulation, sizes = batch_of(held)
    config: dict[str, Any] = {}
    if deepspeed:
        from ds_silent.drill.train_deepspeed import ds_config_of  # it need not be installed for the others

        config, dtype, notes = ds_config_of(held, ranks, micro_batch, accumulation, stage, dtype)
        stage = config["zero_optimization"]["stage"]
    else:
        notes = [f"{key}: not part of the drill of {name}" for key in held if key not in READ]
    stage = FRAMEWORKS[framework].stage if stage is None else stage
    config[BLOCK], block = {**own, "tensorboard": False}, parse({BLOCK: own})
    assert block is not None
    notes = [*replicas, *answers, *notes, *sizes]
    return DrillSetting(
        config, block, ranks, micro_batch, accumulation, stage, dtype or "fp32", tuple(notes), framework
    )


def compared_soon(block: SilentConsistencyConfig, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the block's keys with replicas that are compared every few measured steps, unless they say when."""
    integrity = section(given, "integrity")
    if "replica_interval" in integrity:
        return dict(given), []
    steps, default = REPLICA_MEASUREMENTS * block.interval, block.integrity.replica_interval
    kept = {**given, "integrity": {**integrity, "replica_interval": steps}}
    return kept, [f"integrity.replica_interval: {steps} instead of the default {default}, to stay short"]


def _without(block: BaseModel, given: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Leave out the keys whose fields have a ``drill`` that says why: their defaults hold, and the notes say so.

    A fault must be seen as it is: a response would change it, and one that ends a training would end the drill.
    """
    kind = type(block)
    dropped = [key for key in kind.model_fields if "drill" in about(kind, key)]
    changed = [key for key in dropped if getattr(block, key) != getattr(kind(), key) and about(kind, key)["drill"]]
    changed.sort(key=lambda key: "writer" not in about(kind, key))
    kept, notes = {key: value for key, value in given.items() if key not in dropped}, []
    for key, value in kept.items():
        inner = getattr(block, key)
        if isinstance(inner, BaseModel):
            kept[key], more = _without(inner, value, f"{prefix}{key}.")
            notes += more
    return kept, [*(f"{prefix}{key}: {about(kind, key)['drill']}" for key in changed), *notes]


def batch_of(given: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Return rows of a micro-batch, micro-batches of a step, and what was changed."""
    notes, sizes = [], []
    for key, default, largest in (
        ("train_micro_batch_size_per_gpu", MICRO_BATCH, LARGEST_MICRO_BATCH),
        ("gradient_accumulation_steps", 1, LARGEST_ACCUMULATION),
    ):
        value = given.get(key, "auto")
        if value == "auto":
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f'{key} must be a whole number of at least 1, or "auto", got {value!a}')
        if value > largest:
            notes.append(f"{key}: {largest} instead of {value}, to stay short")
        sizes.append(min(value, largest))
    return sizes[0], sizes[1], notes
