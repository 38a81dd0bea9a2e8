"""The configuration that the drill trains under: the user's own as far as it decides what the observer sees.

    setting = make_setting(options)                  # of ds_silent.drill.deepspeed.setting or torch_loop.setting
    setting.answering(MAJORITY)                      # with this response switched on
    setting.why_not(fault)                           # None, or why the fault means nothing here
    with setting.training(script) as training: ...   # a collective

What is here is the same for every framework. One that is added has a class of its own, whose :meth:`Setting.training`
makes its training and reaches into its reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, parse
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.responses import Response

if TYPE_CHECKING:
    from ds_silent.drill.training import Script, Training

Dtype = Literal["fp32", "bf16"]
MICRO_BATCH, LARGEST_MICRO_BATCH, LARGEST_ACCUMULATION = 8, 16, 4
LARGEST_BUCKET = 40_000  # elements, so that the practice model has several buckets, as a real one has
REPLICA_MEASUREMENTS = 5  # measured steps between two comparisons of the replicas, unless the configuration says when
LEARNING_RATE, WEIGHT_DECAY = 5e-5, 0.01


@dataclass(frozen=True)
class Setting(ABC):
    """A configuration without an output directory, the same on every rank, and what was changed to get there.

    ``stage``: who holds what, in ZeRO's words: 0 is whole replicas, from 1 on each rank has a part of its own.
    """

    config: dict[str, Any]
    block: SilentConsistencyConfig
    ranks: int
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
        direction = section(own.get("direction"))
        if direction.get("method") == "off":
            direction["method"] = "sketch"
        integrity = {**section(own.get("integrity")), "aggregation": True, **response.block.get("integrity", {})}
        block = {**own, **response.block, "interval": 1, "direction": direction, "integrity": integrity}
        config = {**self.config, BLOCK: block}
        parsed = parse(config)
        assert parsed is not None
        self.refuse(config, parsed)
        return replace(self, config=config, block=parsed)

    def why_not(self, fault: Fault) -> str | None:
        """Why a fault means nothing in such a training; None where it does."""
        why = self.meaningless(fault)
        if why is not None or fault.response is None:
            return why
        if self.ranks < fault.response.least_ranks:
            return f"needs at least {fault.response.least_ranks} ranks"
        try:
            self.answering(fault.response)
        except ConfigError as error:
            return str(error)
        return None

    # -- of each framework ---------------------------------------------------------------------------------------

    @property
    def faults(self) -> Mapping[str, Fault]:
        """All that there are, by name: the catalogue, and what only this framework can do wrong."""
        return FAULTS

    def own_healthy(self, faults: list[Fault]) -> list[str]:
        """Names of more healthy trainings, which some of these faults are compared with."""
        return []

    def reference(self, name: str) -> str:
        """The healthy training whose loss that of training ``name`` is compared with."""
        return "healthy"

    @property
    @abstractmethod
    def kind(self) -> str:
        """Framework and kind of training, as a person would say it."""

    @property
    @abstractmethod
    def masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of weights of another dtype."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the JSON file says of the framework."""

    @abstractmethod
    def refuse(self, config: dict[str, Any], block: SilentConsistencyConfig) -> None:
        """Raise :class:`ConfigError` for what the framework cannot honour."""

    @abstractmethod
    def meaningless(self, fault: Fault) -> str | None:
        """Why the fault means nothing here, whatever response is on."""

    def expected(self, fault: Fault) -> Fault:
        """The fault, with what must be said of it here."""
        return fault

    def skipped_facts(self, faults: list[Fault]) -> dict[str, Any]:
        """What the JSON file says of faults that are left out, beside their names."""
        return {}

    @abstractmethod
    def left_out(self, faults: list[Fault]) -> list[str]:
        """Lines that name faults that are left out."""

    @abstractmethod
    def training(self, script: Script) -> AbstractContextManager[Training]:
        """A training, observed and with the script's fault in it. A collective."""


def compared_soon(given: dict[str, Any]) -> tuple[SilentConsistencyConfig | None, list[str]]:
    """The block, with replicas that are compared every few measured steps where ``given`` leaves the default."""
    block = parse(given)
    if block is None or "replica_interval" in section(given[BLOCK].get("integrity")):
        return block, []
    steps = REPLICA_MEASUREMENTS * block.interval
    given[BLOCK] = {
        **given[BLOCK],
        "integrity": {**section(given[BLOCK].get("integrity")), "replica_interval": steps},
    }
    default = block.integrity.replica_interval
    return parse(given), [f"integrity.replica_interval: {steps} instead of the default {default}, to stay short"]


def only_reporting(given: dict[str, Any], block: SilentConsistencyConfig) -> tuple[SilentConsistencyConfig, list[str]]:
    """The block without responses: a fault must be seen as it is, and one that ends a training would end the drill.

    Nobody is alerted of faults that the drill has made.
    """
    plain = SilentConsistencyConfig()
    notes = []
    if block.alerts:
        notes.append("alerts: nobody is told of the drill's faults")
    told = ("alerts", "metrics_port")
    given[BLOCK] = {name: value for name, value in given[BLOCK].items() if name not in told}
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


def batch_of(given: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Rows of a micro-batch, micro-batches of a step, and what was changed."""
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


def section(value: Any) -> dict[str, Any]:
    """A part of a configuration, its own to change."""
    return dict(value) if isinstance(value, Mapping) else {}
