"""The ds_config that the drill trains under: the user's own as far as it decides what the observer sees.

    setting = make_setting(load_ds_config("ds_config.json"), ranks=4)
    setting.config["zero_optimization"], setting.notes

Kept are the ``silent_consistency`` block, ZeRO, the dtype, clipping, accumulation and the micro-batch. The optimizer
is the drill's own: a learning rate that suits another model would tear the practice model apart. Monitors and the like
would write where the user does not expect it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, parse
from ds_silent.drill.faults.responses import Response
from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config

Dtype = Literal["fp32", "bf16"]
KEPT = (
    "zero_optimization",
    "bf16",
    "data_types",
    "gradient_clipping",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
)
# Read, replaced, or without meaning for numbers: no reason to speak of them.
SILENT = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("fp16", "steps_per_print", "wall_clock_breakdown", "tensorboard", "wandb", "csv_monitor", "comet", BLOCK),
)
MICRO_BATCH, LARGEST_MICRO_BATCH, LARGEST_ACCUMULATION = 8, 16, 4
LARGEST_BUCKET = 40_000  # elements, so that the practice model has several buckets, as a real one has
REPLICA_MEASUREMENTS = 5  # measured steps between two comparisons of the replicas, unless the ds_config says otherwise
LEARNING_RATE, WEIGHT_DECAY = 5e-5, 0.01


@dataclass(frozen=True)
class Setting:
    """A ds_config without an output directory, the same on every rank, and what was changed to get there."""

    config: dict[str, Any]
    block: SilentConsistencyConfig
    micro_batch: int
    accumulation: int
    stage: int
    dtype: Dtype
    notes: tuple[str, ...]

    @property
    def interval(self) -> int:
        """Optimizer steps between measurements."""
        return self.block.interval

    @property
    def replica_interval(self) -> int:
        """Optimizer steps between two comparisons of the replicas; 0 is never."""
        return self.block.integrity.replica_interval

    def answering(self, response: Response | None) -> Setting:
        """With this response switched on and every step measured; as it is without one.

        Raises:
            ConfigError: it cannot work under this configuration.
        """
        if response is None:
            return self
        own = self.config[BLOCK]
        direction = _section(own.get("direction"))
        if direction.get("method") == "off":
            direction["method"] = "sketch"
        integrity = {**_section(own.get("integrity")), "aggregation": True, **response.block.get("integrity", {})}
        block = {**own, **response.block, "interval": 1, "direction": direction, "integrity": integrity}
        config = {**self.config, BLOCK: block}
        parsed = parse(config)
        assert parsed is not None
        refuse_unsupported_config(config, parsed)
        return replace(self, config=config, block=parsed)


def make_setting(
    ds_config: Mapping[str, Any] | None, ranks: int, stage: int | None = None, dtype: Dtype | None = None
) -> Setting:
    """The drill's configuration.

    Args:
        ds_config: the user's; None takes an empty block, ZeRO stage 0 and fp32.
        ranks: data-parallel ranks of the drill, whatever the configuration was written for.
        stage: replaces ``zero_optimization.stage``.
        dtype: replaces the dtype.

    Raises:
        ConfigError: there is no block, it is switched off, or something in the configuration cannot be honoured.
    """
    given = copy.deepcopy(dict({BLOCK: {}} if ds_config is None else ds_config))
    own = given.get(BLOCK)
    if isinstance(own, Mapping):  # the trainer fills it in; here it is replaced
        given[BLOCK] = {key: value for key, value in own.items() if key != "output_dir"}
    block, replicas = _compared_soon(given)
    if block is None:
        raise ConfigError(f'the ds_config has no active "{BLOCK}" block to try; add "{BLOCK}": {{}} to it')
    refuse_unsupported_config(given, block)
    block, answers = _only_reporting(given, block)
    notes = [*replicas, *answers, *(f"{key}: not part of the drill" for key in given if key not in (*KEPT, *SILENT))]
    config = {key: given[key] for key in KEPT if key in given and given[key] != "auto"}
    zero, dropped = _zero(given.get("zero_optimization"), stage)
    notes += dropped
    dtype, note = _dtype(given, dtype)
    notes += note
    micro, accumulation, note = _batch(given)
    notes += note
    config |= {
        "zero_optimization": zero,
        "bf16": {**_section(given.get("bf16")), "enabled": dtype == "bf16"},
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * ranks,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "steps_per_print": 10**9,
        BLOCK: {**given[BLOCK], "tensorboard": False},
    }
    return Setting(config, block, micro, accumulation, zero["stage"], dtype, tuple(notes))


def _compared_soon(given: dict[str, Any]) -> tuple[SilentConsistencyConfig | None, list[str]]:
    """The block, with replicas that are compared every few measured steps where the ds_config leaves the default."""
    block = parse(given)
    if block is None or "replica_interval" in _section(given[BLOCK].get("integrity")):
        return block, []
    steps = REPLICA_MEASUREMENTS * block.interval
    given[BLOCK] = {
        **given[BLOCK],
        "integrity": {**_section(given[BLOCK].get("integrity")), "replica_interval": steps},
    }
    default = block.integrity.replica_interval
    return parse(given), [f"integrity.replica_interval: {steps} instead of the default {default}, to stay short"]


def _only_reporting(given: dict[str, Any], block: SilentConsistencyConfig) -> tuple[SilentConsistencyConfig, list[str]]:
    """The block without responses: a fault must be seen as it is, and one that ends a training would end the drill."""
    plain = SilentConsistencyConfig()
    notes = []
    for key in ("respond", "resync", "reduction"):
        if getattr(block, key) != getattr(plain, key):
            notes.append(f"{key}: responses are tried in trainings of their own, with values of the drill's")
        given[BLOCK] = {name: value for name, value in given[BLOCK].items() if name != key}
    if block.detectors.stop_on != plain.detectors.stop_on:
        notes.append("detectors.stop_on: not part of the drill")
        kept = {name: value for name, value in given[BLOCK]["detectors"].items() if name != "stop_on"}
        given[BLOCK] = {**given[BLOCK], "detectors": kept}
    parsed = parse(given)
    assert parsed is not None
    return parsed, notes


def _zero(section: Any, stage: int | None) -> tuple[dict[str, Any], list[str]]:
    """Without "auto", offloading (which needs compilers and moves no number) and buckets of a large model's size."""
    zero = _section(section)
    offloaded = [key for key in zero if "offload" in key]
    kept: dict[str, Any] = {k: v for k, v in zero.items() if v != "auto" and k not in offloaded}
    for key, value in kept.items():
        if key.endswith("_bucket_size") and isinstance(value, (int, float)):
            kept[key] = min(int(value), LARGEST_BUCKET)
    kept.setdefault("reduce_bucket_size", LARGEST_BUCKET)
    kept["stage"] = kept.get("stage", 0) if stage is None else stage
    if kept["stage"] not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {kept['stage']!a}")
    try:
        DeepSpeedZeroConfig(**kept)  # or each rank would find it out, minutes later
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise ConfigError(f"DeepSpeed refuses {key!a}: {first['msg']!a}; correct it in the ds_config") from None
    return kept, [f"zero_optimization.{key}: not part of the drill" for key in offloaded]


def _dtype(given: Mapping[str, Any], asked: Dtype | None) -> tuple[Dtype, list[str]]:
    if asked is not None:
        return asked, []
    if _section(given.get("fp16")).get("enabled") is True:
        return "bf16", ["fp16: computed in bf16, because DeepSpeed has no fp16 on the CPU"]
    return ("bf16" if _section(given.get("bf16")).get("enabled") is True else "fp32"), []


def _batch(given: Mapping[str, Any]) -> tuple[int, int, list[str]]:
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


def _section(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
