"""The ``silent_consistency`` block of a ``ds_config``: what may stand in it, and one sentence for what may not.

    ds_config = load_ds_config("ds_config.json")     # ds_silent.config_file
    config = parse(ds_config)                        # None when the block is absent or "enabled": false

Every mistake is a :class:`ConfigError` with one sentence that names the key, the bound, the value and the remedy.
DeepSpeed says nothing about a top-level key that it does not know, so a block whose name is misspelt would simply never
be read: :func:`find_block` points it out.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from ds_silent.destination import MUST, WrongDestination, environment_name, masked, parse_destination

BLOCK = "silent_consistency"
_SHORT_NAMES = ("silent", "dssilent")
_COMMENT_MARKS = ("_", "#", "/")  # how people take a key out of a JSON file without deleting it
SKETCH_SIZES = (256, 1_048_576)
LARGEST = 2**31 - 1
"""Of any whole number: more would not fit into what is sent and written."""


WRITERS_ALONE = ("places", "alerts", "metrics_port", "metrics_address")
"""Keys that only the rank that writes looks at: ranks may differ in them, and they are neither compared nor shown."""


class ConfigError(ValueError):
    """The configuration is wrong; the message is one sentence for the person who wrote it."""


class WriterError(ConfigError):
    """What only the rank that writes looks at is wrong: the ranks do not differ in it."""


def _is(must: str, default: Any, **bounds: Any) -> Any:
    """A strict field (``true`` is no number, ``"1"`` neither) that knows the sentence for a value it refuses."""
    return Field(default, strict=True, json_schema_extra={"must": must}, **bounds)


def _whole(default: int, low: int, high: int | None = None) -> Any:
    upper = "" if high is None else f" and at most {high}"
    bounds = {"ge": low, "le": LARGEST if high is None else high}
    return _is(f"be a whole number, at least {low}{upper}", default, **bounds)


def _share(default: float) -> Any:
    return _is("be a number, at least 0 and at most 1000", default, ge=0, le=1000, allow_inf_nan=False)


def _switch(default: bool) -> Any:
    return _is("be true or false", default)


def _choice(*values: str) -> Any:
    """One of ``values``; the first is the default."""
    listed = ", ".join(f'"{value}"' for value in values[:-1]) + f' or "{values[-1]}"'
    return Field(values[0], json_schema_extra={"must": f"be {listed}"})


class _Block(BaseModel):
    """Unknown keys are forbidden, and nobody edits the configuration of a running job."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class DirectionConfig(_Block):
    """How the ranks' gradient directions are compared."""

    method: Literal["sketch", "exact", "off"] = _choice("sketch", "exact", "off")
    """``sketch``: k numbers per rank. ``exact``: the true cosine matrix, for the traffic of one reduce-scatter."""

    sketch_size: int = _is("be a power of two between {} and {}".format(*SKETCH_SIZES), 16_384, ge=256, le=1_048_576)
    """k, fp32 numbers per rank and step; the standard error of one cosine is about 1/sqrt(k)."""

    exact_interval: int = _whole(0, 0)
    """Every n-th measurement is also made exactly, as a check of the sketch; 0 is never."""

    exact_memory_mb: int = _whole(64, 1, 65_536)
    """MiB of extra communication memory that the exact method may take; less memory means more, smaller pieces."""

    per_layer: bool = _switch(False)
    """Norm and direction of every layer too (up to 64 ranks; above, the cost per rank must not grow)."""

    @field_validator("sketch_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two")
        return value


class DetectorsConfig(_Block):
    """What becomes an event."""

    enabled: bool = _switch(True)
    """Judge the records; off: only measure."""

    false_alarms_per_million_steps: float = _is(
        "be a number greater than 0 and at most 1000000", 1.0, gt=0, le=1e6, allow_inf_nan=False
    )
    """The stated rate of false alarms, from which every threshold follows."""

    dealt: Literal["random", "own-shard"] | None = Field(
        default=None, json_schema_extra={"must": 'be null, "random" or "own-shard"'}
    )
    """How rows come to ranks, where neither sampler nor rows say it. With ``random`` ranks are compared directly."""

    stop_on: Literal["never", "error", "warning"] = _choice("never", "error", "warning")
    """End the training on all ranks, with exit status 3, after an event of this severity or worse."""


class EffectsConfig(_Block):
    """How large a difference between ranks must be; below, a finding is a note."""

    loss: float = _share(0.05)
    """Relative difference of a rank's loss from the others', where rows are dealt at random."""

    gradient_norm: float = _share(0.05)
    """Relative difference of a rank's gradient norm from the others', where rows are dealt at random."""

    direction: float = _share(0.02)
    """Difference of a rank's cosine from the others' cosines."""

    layer: float = _share(0.1)
    """Relative difference of one layer's gradient norm on a rank from the others', where rows are dealt at random."""

    changed_norm: float = _share(0.25)
    """Relative change of a rank's gradient norm beside a loss as before, where each rank may have rows of its own."""

    changed_loss: float = _share(1.0)
    """How far a loss is above the highest of the run (1.0: twice), where each rank may have rows of its own."""


class IntegrityConfig(_Block):
    """Is the aggregated gradient right, do the replicas agree?"""

    aggregation: bool = _switch(True)
    """Compare the sketch of the aggregated gradient with the mean of the ranks' sketches, at every measurement."""

    replica_interval: int = _whole(100, 0)
    """Optimizer steps between two comparisons of the replicas' parameters; 0 is never."""


class RespondConfig(_Block):
    """What is done about an error; anything but ``report`` changes the training."""

    on_aggregation_error: Literal["report", "retry", "stop"] = _choice("report", "retry", "stop")
    """A reduction whose result is not the mean of its inputs. ``retry`` keeps a copy of the local gradient."""

    retries: int = _whole(3, 1, 100)
    """How often a step's reduction is repeated, and a repair is tried, before it counts as failed."""

    on_failed_retry: Literal["report", "stop"] = _choice("report", "stop")
    """When no repetition was right: go on with the last result and say so, or end the training."""

    on_replica_drift: Literal["report", "majority", "mean", "stop"] = _choice("report", "majority", "mean", "stop")
    """Replicas that hold different parameters."""


class ResyncConfig(_Block):
    """Averaging of the replicas against drift (PAFT)."""

    mode: Literal["off", "periodic", "dynamic"] = _choice("off", "periodic", "dynamic")
    """``dynamic`` overlaps the averaging with the next step and chooses the next interval from the drift found."""

    interval: int = _whole(100, 1)
    """Optimizer steps between two averagings; with ``dynamic`` the most, where little or nothing differs."""

    state: Literal["all", "parameters"] = _choice("all", "parameters")
    """``all``: the optimizer's states too."""


class OrderedConfig(_Block):
    """How ``"reduction": "ordered"`` adds up."""

    micro_batches: Literal["contiguous", "interleaved"] = _choice("contiguous", "interleaved")
    """Which of the step's micro-batches are a rank's: ``contiguous`` neighbours, or ``interleaved`` every N-th."""

    memory_mb: int = _whole(64, 1, 65_536)
    """MiB of extra communication memory; less memory means more, smaller pieces."""


_SECRET: Any = {"must": MUST, "secret": True}


class AlertConfig(_Block):
    """Where events are sent, off the training thread; only the rank that writes looks at it."""

    to: SecretStr = Field(strict=True, json_schema_extra=_SECRET)
    """Where to. Addresses of webhooks, passwords and commands are never shown; ``env:NAME`` keeps them in the
    environment of rank 0."""

    level: Literal["warning", "error", "info"] = _choice("warning", "error", "info")
    """Events of this severity or worse, and the ends of faults that were reported."""

    at_most_per_hour: int = _whole(10, 1, 1_000)
    """More are counted, and the next message says how many."""

    timeout: float = _is("be a number greater than 0 and at most 60", 10.0, gt=0, le=60, allow_inf_nan=False)
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


class SilentConsistencyConfig(_Block):
    """The whole block; every field has a default, so ``"silent_consistency": {}`` switches everything on."""

    enabled: bool = _switch(True)
    """``false``: as if the block were not there; nothing else in it is looked at."""

    interval: int = _whole(1, 1)
    """Optimizer steps between measurements."""

    output_dir: str = _is("be the name of a directory", "runs/silent", min_length=1)
    """Directory of the records; refused at start if it cannot be written."""

    direction: DirectionConfig = Field(default_factory=DirectionConfig)
    coverage: bool = _switch(True)
    """Follow the sample ids: duplicates between ranks, share of the epoch seen."""

    preflight: bool = _switch(True)
    """Before step 1: do the ranks agree on what must agree?"""

    detectors: DetectorsConfig = Field(default_factory=DetectorsConfig)
    effects: EffectsConfig = Field(default_factory=EffectsConfig)
    integrity: IntegrityConfig = Field(default_factory=IntegrityConfig)
    respond: RespondConfig = Field(default_factory=RespondConfig)
    resync: ResyncConfig = Field(default_factory=ResyncConfig)
    reduction: Literal["native", "ordered"] = _choice("native", "ordered")
    """``ordered``: a reduction whose bits do not depend on the order or the number of ranks."""

    ordered: OrderedConfig = Field(default_factory=OrderedConfig)

    tensorboard: bool = _switch(True)
    """Write TensorBoard event files below ``output_dir``."""

    alerts: tuple[AlertConfig, ...] = Field(
        default=(), max_length=16, json_schema_extra={"must": "be a list of at most 16 objects in braces"}
    )
    """Where events are sent: webhooks, mail, commands, trackers."""

    metrics_port: int = _whole(0, 0, 65_535)
    """Port on which rank 0 serves its numbers to Prometheus; 0 is none."""

    metrics_address: str = _is(
        "be an address of rank 0's host", "127.0.0.1", min_length=1, pattern=r"^[A-Za-z0-9.:_-]+$"
    )
    """Address to listen on; by default only this host can connect. ``0.0.0.0``: every host."""

    places: str | None = _is("be the path of a JSON file, or null", None, min_length=1)
    """A file on rank 0's host with each host's switch group, ``{"node0001": "A", ...}``, for events to name."""

    @field_validator("output_dir", "places")
    @classmethod
    def _names_a_path(cls, value: str | None) -> str | None:
        if value is not None:
            if not value.strip() or "\0" in value:
                raise ValueError("blank")
            os.fsencode(value)  # half of a surrogate pair names nothing
        return value


def parse(ds_config: Mapping[str, Any], name: str = "the ds_config") -> SilentConsistencyConfig | None:
    """The block of ``ds_config``, checked; ``None`` when it is absent or has ``"enabled": false``.

    Args:
        name: what its user calls ``ds_config``.

    Raises:
        ConfigError: one sentence about the first mistake, in the order of the block, and how many more there are.
    """
    block = find_block(ds_config, name)
    if block is None or block.get("enabled") is False:
        return None
    errors = _spelling_errors(SilentConsistencyConfig, block, (BLOCK,))
    config = None
    try:
        config = SilentConsistencyConfig(**_known(SilentConsistencyConfig, block))
    except ValidationError as error:
        errors += [_value_error(item["loc"], item["input"], item["type"] == "missing") for item in error.errors()]
    if config is not None:
        errors += _contradictions(config)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ConfigError(errors[0] + more)
    return config


def block_type(model: type[BaseModel], key: str) -> type[_Block] | None:
    """Return what an object in a field must be: the block within the block, or the entry of a list of blocks."""
    kind = model.model_fields[key].annotation if key in model.model_fields else None
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return kind if isinstance(kind, type) and issubclass(kind, _Block) else None


def is_list(model: type[BaseModel], key: str) -> bool:
    """Tell whether a field is a list of blocks."""
    return get_origin(model.model_fields[key].annotation) is tuple


def _inner_blocks(model: type[_Block], key: str, value: Any) -> Iterator[tuple[str, type[_Block], Mapping[str, Any]]]:
    """The objects in a field: its name in sentences, what it must be, its value."""
    inner = block_type(model, key)
    if inner is None:
        return
    named = {key: value}
    if is_list(model, key):
        entries = value if isinstance(value, (list, tuple)) else ()
        named = {f"{key}[{number}]": one for number, one in enumerate(entries)}
    for name, one in named.items():
        if isinstance(one, Mapping):
            yield name, inner, one


def _known(model: type[_Block], block: Any) -> Any:
    """``block`` without what _spelling_errors has reported, so that the values beside it are still checked."""
    if not isinstance(block, Mapping):
        return block
    return {
        key: _known_value(model, key, value)
        for key, value in block.items()
        if key in model.model_fields and not _is_auto(value)
    }


def _known_value(model: type[_Block], key: str, value: Any) -> Any:
    inner = block_type(model, key)
    if inner is None:
        return value
    if not is_list(model, key):
        return _known(inner, value)
    return [_known(inner, one) for one in value] if isinstance(value, (list, tuple)) else value


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"  # an array would compare element by element


def _spelling_errors(model: type[_Block], block: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Keys that do not exist, and ``"auto"``, which other parts of a ``ds_config`` have filled in later."""
    errors = []
    for key, value in block.items():
        if key not in model.model_fields:
            errors.append(_unknown_key(key, model, path))
        elif _is_auto(value):
            errors.append(
                f'{".".join((*path, key))} must not be "auto", because nothing here is filled in later; '
                f"{_remedy(model, key)}"
            )
        else:
            for name, inner, one in _inner_blocks(model, key, value):
                errors += _spelling_errors(inner, one, (*path, name))
    return errors


def _unknown_key(key: object, model: type[_Block], path: tuple[str, ...]) -> str:
    guess = _nearest(str(key), model.model_fields)
    remedy = f'did you mean "{guess}"?' if guess else f"the keys here are {', '.join(model.model_fields)}"
    holds_secrets = any(field.json_schema_extra == _SECRET for field in model.model_fields.values())
    what = masked(key) if holds_secrets and not guess and not re.fullmatch(r"\w{1,40}", str(key)) else shown(key)
    return f"{'.'.join(path)} has no key {what}; {remedy}"


def _value_error(location: tuple[int | str, ...], value: object, missing: bool) -> str:
    """The sentence for the field at ``location``, from what the field itself says it must be."""
    model: type[_Block] = SilentConsistencyConfig
    name, key, place = BLOCK, "", BLOCK
    for part in location:
        model = block_type(model, key) or model
        place, name = name, f"{name}[{part}]" if isinstance(part, int) else f"{name}.{part}"
        key = part if isinstance(part, str) else key
    if isinstance(location[-1], int):
        return f'{name} must be an object in braces, got {masked(value)}; write {{"to": "env:NAME"}} or leave it out'
    if block_type(model, key) and not is_list(model, key):
        return f'{name} must be an object in braces, got {shown(value)}; write "{key}": {{}} or leave it out'
    field: Any = model.model_fields[key]
    must = str(field.json_schema_extra["must"])
    if missing:
        return f'{place} has no key "{key}", which must {must}; write "{key}": "env:NAME"'
    if field.json_schema_extra.get("secret"):
        return f"{name} {_why_no_destination(value)}"
    if type(value) is int and value > LARGEST and "at most" not in must:
        must += f" and at most {LARGEST}"
    got = _shown_list(value) if is_list(model, key) else shown(value)
    return f"{name} must {must}, got {got}; {_remedy(model, key, value)}"


def _shown_list(value: object) -> str:
    """A list of what may hold secrets."""
    return f"{len(value)} of them" if isinstance(value, (list, tuple)) else masked(value)


def _why_no_destination(value: object) -> str:
    try:
        parse_destination(value if isinstance(value, str) else "")
    except WrongDestination as error:
        return str(error) if isinstance(value, str) else f"must {MUST}, got {masked(value)}; see docs/alerts.md"
    return f"must {MUST}; see docs/alerts.md"


def _remedy(model: type[_Block], key: str, value: object = None) -> str:
    if block_type(model, key) and not is_list(model, key):
        return f'write "{key}": {{}} or leave it out'
    if model.model_fields[key].is_required():
        return f'write "{key}": "env:NAME"'
    default = shown(model.model_fields[key].default)
    if key == "sketch_size" and type(value) is int:
        low, high = SKETCH_SIZES
        power = min(max(2 ** round(math.log2(max(value, 1))), low), high)
        return f"the nearest is {power}" + f", the default {default}" * (shown(power) != default)
    return f"write {default}, the default, or leave it out"


def _contradictions(config: SilentConsistencyConfig) -> list[str]:
    """A protection that was asked for and silently is not there is worse than none."""
    errors = []
    on_error, on_drift = config.respond.on_aggregation_error, config.respond.on_replica_drift
    if on_error != "report":
        key = f'{BLOCK}.respond.on_aggregation_error "{on_error}"'
        if not config.integrity.aggregation or config.direction.method == "off":
            errors.append(
                f"{key} needs the check of the aggregated gradient, got integrity.aggregation "
                f"{shown(config.integrity.aggregation)} and direction.method {shown(config.direction.method)}; set "
                'them to true and "sketch"'
            )
        if config.interval != 1:
            errors.append(
                f"{key} must see every step, so interval must be 1, got {config.interval}; what a step that is not "
                "measured has applied cannot be taken back"
            )
    if on_drift != "report" and not config.integrity.replica_interval:
        errors.append(
            f'{BLOCK}.respond.on_replica_drift "{on_drift}" needs comparisons of the replicas, so '
            "integrity.replica_interval must be at least 1, got 0"
        )
    if config.resync.mode != "off" and on_drift in ("majority", "mean"):
        errors.append(
            f'{BLOCK}.resync.mode "{config.resync.mode}" averages what respond.on_replica_drift "{on_drift}" would '
            "repair; use one of them and leave the other at its default"
        )
    return errors


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


def shown(value: object, longest: int = 80) -> str:
    """``value`` as JSON writes it, on one line and short enough for a sentence, whatever it holds."""
    try:
        text = json.dumps(value)  # ASCII only, so control characters of a hostile text stay escaped
    except (TypeError, ValueError, RecursionError):
        text = ascii(f"a {type(value).__name__}")
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _nearest(key: str, names: Iterable[str]) -> str | None:
    """The name that ``key`` was probably meant to be."""
    by_plain_name = {_plain(name): name for name in names}
    found = difflib.get_close_matches(_plain(key), by_plain_name, n=1, cutoff=0.6)
    return by_plain_name[found[0]] if found else None


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _means_the_block(key: object) -> bool:
    if not isinstance(key, str) or key.startswith(_COMMENT_MARKS):
        return False
    plain = _plain(key)
    return plain in _SHORT_NAMES or difflib.SequenceMatcher(None, plain, _plain(BLOCK)).ratio() >= 0.8
