"""The ``silent_consistency`` block of a ``ds_config``: what may stand in it, and one sentence for what may not.

    ds_config = load_ds_config("ds_config.json")     # ds_silent.config.block_file
    config = parse(ds_config)                        # None when the block is absent or "enabled": false

Every mistake is a :class:`ConfigError` with one sentence that names the key, the bound, the value and the remedy.
DeepSpeed says nothing about a top-level key that it does not know, so a block whose name is misspelt would simply never
be read: :func:`find_block` points it out.

A new key is a field, and its docstring the explanation for people. The field may also say

* ``check=(title, text)``: the line of ``ds-silent check`` where the key is switched on, ``{key}`` for its value;
* ``drill="why"``: the drill trains with the default, and says why (or nothing);
* ``writer=True``: only the rank that writes looks at it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator

from ds_silent.config.destination import MUST, environment_name, parse_destination
from ds_silent.config.fields import (
    Block,
    about,
    above_0,
    checked_keys,
    choice,
    field,
    inner,
    is_power_of_two,
    optional,
    plain,
    power_of_two,
    share,
    switch,
    value_error,
    whole,
)
from ds_silent.text import shown

BLOCK = "silent_consistency"
_SHORT_NAMES = ("silent", "dssilent")
_COMMENT_MARKS = ("_", "#", "/")  # how people take a key out of a JSON file without deleting it


class ConfigError(ValueError):
    """The configuration is wrong; the message is one sentence for the person who wrote it."""


class WriterError(ConfigError):
    """What only the rank that writes looks at is wrong: the ranks do not differ in it."""


class DirectionConfig(Block):
    """How the ranks' gradient directions are compared."""

    method: Literal["sketch", "exact", "off"] = choice("sketch", "exact", "off")
    """``sketch``: k numbers per rank. ``exact``: the true cosine matrix, for the traffic of one reduce-scatter."""

    sketch_size: int = power_of_two(16_384, 256, 1_048_576)
    """k, fp32 numbers per rank and step; the standard error of one cosine is about 1/sqrt(k)."""

    exact_interval: int = whole(0, 0)
    """Every n-th measurement is also made exactly, as a check of the sketch; 0 is never."""

    exact_memory_mb: int = whole(64, 1, 65_536)
    """MiB of extra communication memory that the exact method may take; less memory means more, smaller pieces."""

    per_layer: bool = switch(
        False, check=("per layer", "one more sketch of each layer is sent; its size grows with the number of layers")
    )
    """Norm and direction of every layer too (up to 64 ranks; above, the cost per rank must not grow)."""

    _power_of_two = field_validator("sketch_size")(is_power_of_two)


class DetectorsConfig(Block):
    """What becomes an event."""

    enabled: bool = switch(True)
    """Judge the records; off: only measure."""

    false_alarms_per_million_steps: float = above_0(1.0, 1e6)
    """The stated rate of false alarms, from which every threshold follows."""

    dealt: Literal["random", "own-shard"] | None = field('be null, "random" or "own-shard"', None, strict=None)
    """How rows come to ranks, where neither sampler nor rows say it. With ``random`` ranks are compared directly."""

    stop_on: Literal["never", "error", "warning"] = choice("never", "error", "warning", drill="not part of the drill")
    """End the training on all ranks, with exit status 3, after an event of this severity or worse."""


class EffectsConfig(Block):
    """How large a difference between ranks must be; below, a finding is a note."""

    loss: float = share(0.05)
    """Relative difference of a rank's loss from the others', where rows are dealt at random."""

    gradient_norm: float = share(0.05)
    """Relative difference of a rank's gradient norm from the others', where rows are dealt at random."""

    direction: float = share(0.02)
    """Difference of a rank's cosine from the others' cosines."""

    layer: float = share(0.1)
    """Relative difference of one layer's gradient norm on a rank from the others', where rows are dealt at random."""

    changed_norm: float = share(0.25)
    """Relative change of a rank's gradient norm beside a loss as before, where each rank may have rows of its own."""

    changed_loss: float = share(1.0)
    """How far a loss is above the highest of the run (1.0: twice), where each rank may have rows of its own."""


class IntegrityConfig(Block):
    """Is the aggregated gradient right, do the replicas agree?"""

    aggregation: bool = switch(True)
    """Compare the sketch of the aggregated gradient with the mean of the ranks' sketches, at every measurement."""

    replica_interval: int = whole(100, 0)
    """Optimizer steps between two comparisons of the replicas; 0 is never. From 10 on, parameters are compared at each
    tenth of it."""

    reread: bool = switch(False)
    """Read on the CPU what the optimizer applies, even if nothing seems to be written to it since it was read."""


class RespondConfig(Block):
    """What is done about an error; anything but ``report`` changes the training."""

    on_aggregation_error: Literal["report", "retry", "stop"] = choice("report", "retry", "stop")
    """A reduction whose result is not the mean of its inputs. ``retry`` keeps a copy of the local gradient."""

    retries: int = whole(3, 1, 100)
    """How often a step's reduction is repeated, and a repair is tried, before it counts as failed."""

    on_failed_retry: Literal["report", "stop"] = choice("report", "stop")
    """When no repetition was right: go on with the last result and say so, or end the training."""

    on_replica_drift: Literal["report", "majority", "mean", "stop"] = choice("report", "majority", "mean", "stop")
    """Replicas that hold different parameters."""


class ResyncConfig(Block):
    """Averaging of the replicas against drift (PAFT)."""

    mode: Literal["off", "periodic", "dynamic"] = choice("off", "periodic", "dynamic")
    """``dynamic`` overlaps the averaging with the next step and chooses the next interval from the drift found."""

    interval: int = whole(100, 1)
    """Optimizer steps between two averagings; with ``dynamic`` the most, where little or nothing differs."""

    state: Literal["all", "parameters"] = choice("all", "parameters")
    """``all``: the optimizer's states too."""


class OrderedConfig(Block):
    """How ``"reduction": "ordered"`` adds up."""

    micro_batches: Literal["contiguous", "interleaved"] = choice("contiguous", "interleaved")
    """Which of the step's micro-batches are a rank's: ``contiguous`` neighbours, or ``interleaved`` every N-th."""

    memory_mb: int = whole(64, 1, 65_536)
    """MiB of extra communication memory; less memory means more, smaller pieces."""


class TraceConfig(Block):
    """Write ``trace.jsonl``: two of them show where two trainings part. Absent: none is written."""

    interval: int = whole(1, 1)
    """Measurements from one line to the next."""

    size: int = power_of_two(256, 64, 16_384)
    """Numbers of a gradient's sketch in a line."""

    _power_of_two = field_validator("size")(is_power_of_two)


class AlertConfig(Block):
    """Where events are sent, off the training thread; only the rank that writes looks at it."""

    to: SecretStr = field(MUST, ..., secret=True)
    """Where to. Addresses of webhooks, passwords and commands are never shown; ``env:NAME`` keeps them in the
    environment of rank 0."""

    level: Literal["warning", "error", "info"] = choice("warning", "error", "info")
    """Events of this severity or worse, and the ends of faults that were reported."""

    at_most_per_hour: int = whole(10, 1, 1_000)
    """More are counted, and the next message says how many."""

    timeout: float = above_0(10.0, 60)
    """Seconds that one try may take."""

    @field_validator("to")
    @classmethod
    def _is_a_destination(cls, value: SecretStr) -> SecretStr:
        to = value.get_secret_value()
        if environment_name(to) is None:  # else the host of rank 0 knows it
            parse_destination(to)
        return value

    @property
    def address(self) -> str:
        """``to``, its secret included: for the sender only."""
        return self.to.get_secret_value()


_ANSWERED = "responses are tried in trainings of their own, with values of the drill's"
_SERVED = "for Prometheus at http://{metrics_address}:{metrics_port}/metrics, from rank 0"


class SilentConsistencyConfig(Block):
    """The whole block; every field has a default, so ``"silent_consistency": {}`` switches everything on."""

    enabled: bool = switch(True)
    """``false``: as if the block were not there; nothing else in it is looked at."""

    interval: int = whole(1, 1)
    """Optimizer steps between measurements."""

    output_dir: str = field("be the name of a directory", "runs/silent", min_length=1)
    """Directory of the records; refused at start if it cannot be written."""

    direction: DirectionConfig = inner(DirectionConfig)
    coverage: bool = switch(True)
    """Follow the sample ids: duplicates between ranks, share of the epoch seen."""

    preflight: bool = switch(True)
    """Before step 1: do the ranks agree on what must agree?"""

    rules: bool = switch(True)
    """Check what needs no other rank: what the optimizer does, its rates, what a batch says of itself."""

    probe: bool = switch(False, drill="", check=("probe", "the first training forward is repeated a few times"))
    """Repeat the first training forward of a causal model with other tokens: no logits before them may change."""

    detectors: DetectorsConfig = inner(DetectorsConfig)
    effects: EffectsConfig = inner(EffectsConfig)
    integrity: IntegrityConfig = inner(IntegrityConfig)
    respond: RespondConfig = inner(RespondConfig, drill=_ANSWERED)
    resync: ResyncConfig = inner(ResyncConfig, drill=_ANSWERED)
    reduction: Literal["native", "ordered"] = choice("native", "ordered", drill=_ANSWERED)
    """``ordered``: a reduction whose bits do not depend on the order or the number of ranks."""

    ordered: OrderedConfig = inner(OrderedConfig)

    trace: TraceConfig | None = optional(drill="the drill compares no trainings")
    """Absent or null: no trace."""

    tensorboard: bool = switch(True)
    """Write TensorBoard event files below ``output_dir``."""

    alerts: tuple[AlertConfig, ...] = Field(
        default=(),
        max_length=16,
        json_schema_extra={
            "must": "be a list of at most 16 objects in braces",
            "writer": True,
            "drill": "nobody is told of the drill's faults",
        },
    )
    """Where events are sent: webhooks, mail, commands, trackers."""

    metrics_port: int = whole(0, 0, 65_535, writer=True, drill="", check=("metrics", _SERVED))
    """Port on which rank 0 serves its numbers to Prometheus; 0 is none."""

    metrics_address: str = field(
        "be an address of rank 0's host", "127.0.0.1", min_length=1, pattern=r"^[A-Za-z0-9.:_-]+$", writer=True
    )
    """Address to listen on; by default only this host can connect. ``0.0.0.0``: every host."""

    places: str | None = field("be the path of a JSON file, or null", None, min_length=1, writer=True)
    """A file on rank 0's host with each host's switch group, ``{"node0001": "A", ...}``, for events to name."""

    @field_validator("output_dir", "places")
    @classmethod
    def _names_a_path(cls, value: str | None) -> str | None:
        if value is not None:
            if not value.strip() or "\0" in value:
                raise ValueError("blank")
            os.fsencode(value)  # half of a surrogate pair names nothing
        return value


WRITERS_ALONE = tuple(
    name for name in SilentConsistencyConfig.model_fields if "writer" in about(SilentConsistencyConfig, name)
)
"""Keys that only the rank that writes looks at: ranks may differ in them, and they are neither compared nor shown."""


_MOST_NAMED = 5
"""Mistakes; all are counted."""


def parse(ds_config: Mapping[str, Any], name: str = "the ds_config") -> SilentConsistencyConfig | None:
    """The block of ``ds_config``, checked; ``None`` when it is absent or has ``"enabled": false``.

    Args:
        name: what its user calls ``ds_config``.

    Raises:
        ConfigError: a sentence about the first mistake, in the order of the block, and the next ones in parentheses.
    """
    block = find_block(ds_config, name)
    if block is None or block.get("enabled") is False:
        return None
    values, errors = checked_keys(SilentConsistencyConfig, block, BLOCK)
    try:
        config = SilentConsistencyConfig(**values)
        errors += _contradictions(config)
    except ValidationError as error:
        errors += [value_error(SilentConsistencyConfig, BLOCK, one) for one in error.errors()]
    if errors:
        raise ConfigError(_together(errors))
    return config


def _together(errors: Sequence[str]) -> str:
    """Return the first mistake, and of the next ones what is wrong without the remedy."""
    first, *others = errors
    shorter = [one.partition("; ")[0].removeprefix(f"{BLOCK} has ").removeprefix(f"{BLOCK}.") for one in others]
    named = "; ".join([*shorter[: _MOST_NAMED - 1], *(["..."] if len(errors) > _MOST_NAMED else [])])
    return f"{first} (and {len(others)} more: {named})" if others else first


def _contradictions(config: SilentConsistencyConfig) -> list[str]:
    """A protection that was asked for and silently is not there is worse than none."""
    on_error, on_drift = config.respond.on_aggregation_error, config.respond.on_replica_drift
    answers, key = on_error != "report", f'{BLOCK}.respond.on_aggregation_error "{on_error}"'
    checked, method, trace = config.integrity.aggregation, config.direction.method, config.trace
    rules = (
        (
            answers and (not checked or method == "off"),
            f"{key} needs the check of the aggregated gradient, got integrity.aggregation {shown(checked)} and "
            f'direction.method {shown(method)}; set them to true and "sketch"',
        ),
        (
            answers and config.interval != 1,
            f"{key} must see every step, so interval must be 1, got {config.interval}; what a step that is not "
            "measured has applied cannot be taken back",
        ),
        (
            on_drift != "report" and not config.integrity.replica_interval,
            f'{BLOCK}.respond.on_replica_drift "{on_drift}" needs comparisons of the replicas, so '
            "integrity.replica_interval must be at least 1, got 0",
        ),
        (
            config.resync.mode != "off" and on_drift in ("majority", "mean"),
            f'{BLOCK}.resync.mode "{config.resync.mode}" averages what respond.on_replica_drift "{on_drift}" would '
            "repair; use one of them and leave the other at its default",
        ),
        (
            trace is not None and method == "off",
            f'{BLOCK}.trace needs sketches, got direction.method "off"; set it to "sketch" or leave trace out',
        ),
        (
            trace is not None and trace.size > config.direction.sketch_size,
            f"{BLOCK}.trace.size must be at most direction.sketch_size, got {trace and trace.size} and "
            f"{config.direction.sketch_size}; lower it",
        ),
    )
    return [sentence for broken, sentence in rules if broken]


def find_block(ds_config: Mapping[str, Any], name: str = "the ds_config") -> Mapping[str, Any] | None:
    """The ``silent_consistency`` object of ``ds_config``, unchecked; ``None`` when it is absent. ``name``: see parse.

    Raises:
        ConfigError: the block is not an object, or a top-level key looks like a misspelling of its name.
    """
    for key in ds_config:
        if key != BLOCK and _means_the_block(key):
            raise ConfigError(f'{name} has a key {shown(key)}, which nothing reads; did you mean "{BLOCK}"?')
    if BLOCK not in ds_config:
        return None
    block = ds_config[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(f'{BLOCK} must be an object in braces, got {shown(block)}; write "{BLOCK}": {{}}')
    return block


def _means_the_block(key: object) -> bool:
    if not isinstance(key, str) or key.startswith(_COMMENT_MARKS):
        return False
    name = plain(key)
    return name in _SHORT_NAMES or difflib.SequenceMatcher(None, name, plain(BLOCK)).ratio() >= 0.8
