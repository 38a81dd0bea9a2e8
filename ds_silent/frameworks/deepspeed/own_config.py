"""Would DeepSpeed take this configuration? Its own classes are asked, and what they say becomes one sentence.

    refuse_broken(ds_config, ranks=8)            # ConfigError names the key, the value and the remedy

Where DeepSpeed is not installed only the types of the values that are named here are checked.

``DeepSpeedConfig`` (deepspeed/runtime/config.py, 0.16.9 to 0.19.8) checks most sections with pydantic and leaves some
values as they are, which fail in the middle of an initialisation or are multiplied as strings; those that are read
here or decide about the gradients are checked first.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from ds_silent.config import BLOCK, ConfigError
from ds_silent.config.block_file import without_auto
from ds_silent.config.fields import LARGEST
from ds_silent.distributed.parts import listed
from ds_silent.extras import installed
from ds_silent.frameworks.deepspeed.refusals import ONE_BIT_OPTIMIZERS
from ds_silent.text import shortened, shown

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DEEPEST = 64
"""Objects within objects; the deepest that DeepSpeed knows has six."""

_WHOLE = (TypeAdapter(Annotated[int, Field(strict=True, ge=1, le=LARGEST)]), f"a whole number from 1 to {LARGEST}")
_FINITE = Field(strict=True, allow_inf_nan=False)
_NOT_NEGATIVE = (TypeAdapter(Annotated[float, _FINITE, Field(ge=0)]), "a finite number, at least 0")
_POSITIVE = (TypeAdapter(Annotated[float, _FINITE, Field(gt=0)]), "a finite number greater than 0")
_SWITCH = (TypeAdapter(Annotated[bool, Field(strict=True)]), "true or false")
_NAME = (TypeAdapter(Annotated[str, Field(strict=True)]), "a name in quotes")
_OBJECT = (TypeAdapter(Mapping[Any, Any]), "an object in braces")
_ZERO = (TypeAdapter(bool | Mapping[Any, Any]), 'an object in braces, such as {"stage": 1}')
_TYPES: Mapping[tuple[str, ...], tuple[TypeAdapter[Any], str]] = {
    **{(key,): _WHOLE for key in BATCH},
    ("gradient_clipping",): _NOT_NEGATIVE,
    ("gradient_predivide_factor",): _POSITIVE,
    ("prescale_gradients",): _SWITCH,
    ("sparse_gradients",): _SWITCH,
    ("managed_gradient_accumulation",): _SWITCH,
    ("zero_allow_untested_optimizer",): _SWITCH,
    ("zero_force_ds_cpu_optimizer",): _SWITCH,
    ("wall_clock_breakdown",): _SWITCH,
    ("communication_data_type",): _NAME,
    ("optimizer",): _OBJECT,
    ("optimizer", "type"): _NAME,
    ("optimizer", "params"): _OBJECT,
    ("optimizer", "params", "lr"): _NOT_NEGATIVE,
    ("optimizer", "params", "weight_decay"): _NOT_NEGATIVE,
    ("scheduler",): _OBJECT,
    ("scheduler", "type"): _NAME,
    ("scheduler", "params"): _OBJECT,
    ("bf16",): _OBJECT,
    ("bfloat16",): _OBJECT,
    ("fp16",): _OBJECT,
    ("compile",): _OBJECT,
    ("torch_autocast",): _OBJECT,
    ("data_types",): _OBJECT,
    ("data_types", "grad_accum_dtype"): _NAME,
    ("zero_optimization",): _ZERO,
    ("zero_optimization", "stage"): (TypeAdapter(Annotated[int, Field(ge=0, le=3)]), "0, 1, 2 or 3"),
}


def refuse_broken(ds_config: Mapping[str, Any], ranks: int | None = None) -> int:
    """What DeepSpeed would refuse, or take and stumble over later, as one sentence.

    Values that are ``"auto"`` are left out: the Hugging Face Trainer fills them in, DeepSpeed never sees them. So are
    batch sizes where there are none.

    Args:
        ds_config: all of it; the ``silent_consistency`` block is not looked at.
        ranks: data-parallel ranks that the batch sizes must suit; None: some number of ranks must.

    Returns:
        ``ranks``, or a number of ranks that suits.

    Raises:
        ConfigError: the sentence.
    """
    own = {key: value for key, value in ds_config.items() if key != BLOCK}
    _refuse_odd_values(own)
    own = without_auto(own)
    _refuse_types(own)
    _refuse_unknown_optimizer(own)
    ranks = _suiting(ds_config, own, ranks)
    rest = {key: value for key, value in own.items() if key not in BATCH}
    whole = _error(rest, 1)
    if whole is None:
        return ranks
    for key, value in rest.items():
        error = _error({key: value}, 1)
        if error is not None:
            raise ConfigError(_sentence(key, value, error))
    without = [key for key in rest if _error({k: v for k, v in rest.items() if k != key}, 1) is None]
    found = " with ".join(f"{key} {shown(rest[key])}" for key in without) or "this configuration"
    raise ConfigError(f"DeepSpeed {_version()} refuses {found} ({_reason(whole)}); change one of them")


def left_to_fill_in(ds_config: Mapping[str, Any]) -> list[str]:
    """Notes, not errors: what somebody must fill in before DeepSpeed reads it."""
    own = {key: value for key, value in ds_config.items() if key != BLOCK}
    notes = []
    autos = [".".join(path) for path, value in _leaves(own) if isinstance(value, str) and value == "auto"]
    if autos:
        notes.append(f"""{'"auto"':<12}{listed(autos, 4)}: for the Hugging Face Trainer to fill in""")
    if own.get(BATCH[0]) is None and own.get(BATCH[1]) is None:
        notes.append(f"batch       {BATCH[0]} and {BATCH[1]} are absent; DeepSpeed needs one of them from the script")
    return notes


def ranks_known_from(ds_config: Mapping[str, Any]) -> str:
    """Say from where :func:`refuse_broken` has a number of ranks that nobody has given."""
    sized = all(isinstance(ds_config.get(key), int) for key in BATCH)
    return "from the batch sizes" if sized else "assumed; --world-size says how many"


def _suiting(ds_config: Mapping[str, Any], own: Mapping[str, Any], ranks: int | None) -> int:
    """The number of ranks for which DeepSpeed takes the batch sizes."""
    sizes = {key: own[key] for key in BATCH if own.get(key) is not None}
    total, micro, steps = (sizes.get(key) for key in BATCH)
    candidates = [ranks] if ranks is not None else [8, 1]
    if ranks is None and total is not None:
        candidates = [8, max(1, total // ((micro or 1) * (steps or 1))), 4, 2, 1]
    filled_in_later = any(isinstance(ds_config.get(key), str) for key in BATCH) or (total is None and micro is None)
    for candidate in candidates:
        if filled_in_later or _error(sizes, candidate) is None:
            return candidate
    factors = [f"{key} {sizes[key]}" for key in BATCH[1:] if key in sizes]
    factors += [] if ranks is None else [f"{ranks} ranks"]
    product = math.prod([micro or 1, steps or 1, ranks or 1])
    must = "must be" if len(factors) == 3 else "must be a multiple of"
    raise ConfigError(
        f"{BATCH[0]} {must} {' x '.join(factors)}{f' = {product}' * (len(factors) > 1)}, got {total}; change one of "
        "them, or the number of ranks"
    )


def _version() -> str:
    import deepspeed

    return str(deepspeed.__version__)


def _reader(ranks: int) -> Callable[[dict[str, Any]], object]:
    """DeepSpeed's own, for a number of ranks that are not there."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Sized(DeepSpeedConfig):  # type: ignore[misc]
        def _configure_train_batch_size(self) -> None:
            self.world_size = ranks
            super()._configure_train_batch_size()

    return Sized


def _error(own: Mapping[str, Any], ranks: int) -> Exception | None:
    """What DeepSpeed raises; None where it is not there to be asked."""
    if not installed("deepspeed"):
        return None
    from deepspeed.utils import logger as deepspeed_logger

    sizes = {} if any(key in own for key in BATCH) else {BATCH[1]: 1}
    reader = _reader(ranks)
    disabled, deepspeed_logger.disabled = deepspeed_logger.disabled, True  # it would print what it reads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader({**copy.deepcopy(dict(own)), **sizes})
        return None
    except Exception as error:  # assertions, pydantic's, and whatever a value of a wrong type does inside
        return error
    finally:
        deepspeed_logger.disabled = disabled


def _sentence(key: str, value: Any, error: Exception) -> str:
    """From an error about one top-level key; pydantic knows the place inside it."""
    name = key
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        for part in first["loc"]:
            if not isinstance(value, Mapping) or part not in value:
                break
            name, value = f"{name}.{part}", value[part]
        if first["type"] == "extra_forbidden":
            return f"{_plain(name)} is a key that DeepSpeed {_version()} refuses; correct or remove it"
        reason = _one_line(first["msg"])
    else:
        reason = _reason(error)
    return f"DeepSpeed {_version()} refuses {_plain(name)} {shown(value)} ({reason}); correct or remove it"


def _reason(error: Exception) -> str:
    text = re.split(r"(?<=[a-z]{3})\. ", _one_line(error), maxsplit=1)[0]
    return text if isinstance(error, (AssertionError, ValueError)) and text else f"{type(error).__name__}: {text}"


def _one_line(text: object) -> str:
    try:
        line = " ".join(ascii(str(text))[1:-1].replace("\\n", " ").split())
    except (ValueError, RecursionError):  # a number too long to be written
        line = ""
    return shortened(line, 160).rstrip(".")


def _plain(name: str) -> str:
    return shortened(ascii(name)[1:-1], 80)


def _refuse_odd_values(own: Mapping[str, Any]) -> None:
    for path, value in _leaves(own):
        name = _plain(".".join(path))
        if len(path) > DEEPEST:
            raise ConfigError(f"{_plain(path[0])} is nested deeper than {DEEPEST} objects; correct it")
        odd = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, str):  # what Hjson makes of it, the comma included
            odd = re.fullmatch(r"-?(NaN|Infinity)[\s,}\]]*", value.strip()) is not None
        if odd:
            raise ConfigError(f"{name} must be a finite number, got {shown(value)}; write one or leave it out")


def _leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of everything that holds nothing further, in order; too deep is a leaf."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        path, value = waiting.pop()
        children: list[tuple[Any, Any]] = []
        if len(path) <= DEEPEST:
            children = list(value.items()) if isinstance(value, Mapping) else []
            children = list(enumerate(value)) if isinstance(value, (list, tuple)) else children
        if children:
            waiting += [((*path, str(key)), child) for key, child in reversed(children)]
        elif path:
            yield path, value


def _refuse_types(own: Mapping[str, Any]) -> None:
    for path, (adapter, must) in _TYPES.items():
        section: Any = own
        for key in path[:-1]:
            section = section.get(key) if isinstance(section, Mapping) else None
        value = section.get(path[-1]) if isinstance(section, Mapping) else None
        if value is None:  # absent; DeepSpeed's own classes say where null is no value
            continue
        try:
            adapter.validate_python(value)
        except (ValidationError, OverflowError):
            raise ConfigError(
                f"{'.'.join(path)} must be {must}, got {shown(value)}; correct it or leave it out"
            ) from None


def _refuse_unknown_optimizer(own: Mapping[str, Any]) -> None:
    """DeepSpeed takes its own and those of ``torch.optim`` (``DeepSpeedEngine._configure_basic_optimizer``)."""
    if not installed("deepspeed"):
        return
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    name = (own.get("optimizer") or {}).get("type")
    plain = re.sub(r"[^a-z0-9]", "", str(name).lower())
    if name is None or name.lower() in DEEPSPEED_OPTIMIZERS or plain in ONE_BIT_OPTIMIZERS:
        return
    if not isinstance(getattr(torch.optim, name, None), type):
        raise ConfigError(
            f"optimizer.type must be one of {', '.join(DEEPSPEED_OPTIMIZERS)} or a class of torch.optim, got "
            f"{shown(name)}; correct it, or make the optimizer in the script"
        )
