"""How a key of the block is declared: its default, its bound, and what it must be; one sentence for each mistake.

    interval: int = whole(1, 1)
    method: Literal["sketch", "off"] = choice("sketch", "off")
    direction: DirectionConfig = inner(DirectionConfig)

A sentence names the key, what it must be, what stands there, and the remedy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

from ds_silent.config.destination import MUST, WrongDestination, masked, parse_destination
from ds_silent.text import shown

OF_A_FIELD = ("must", "secret", "power_of_two", "writer", "check", "drill")
"""What the field of a key knows of it beside pydantic's own: see :mod:`ds_silent.config`."""
LARGEST = 2**31 - 1
"""Of any whole number: more would not fit into what is sent and written."""


def field(must: str, default: Any, strict: bool | None = True, **more: Any) -> Any:
    """A strict field (``true`` is no number, ``"1"`` neither) that knows the sentence for a value it refuses."""
    own = {name: more.pop(name) for name in OF_A_FIELD if name in more}
    return Field(default, strict=strict, json_schema_extra={"must": must, **own}, **more)


def whole(default: int, low: int, high: int | None = None, **more: Any) -> Any:
    upper = "" if high is None else f" and at most {high}"
    return field(f"be a whole number, at least {low}{upper}", default, ge=low, le=high or LARGEST, **more)


def share(default: float) -> Any:
    return field("be a number, at least 0 and at most 1000", default, ge=0, le=1000, allow_inf_nan=False)


def above_0(default: float, most: float) -> Any:
    must = f"be a number greater than 0 and at most {most:.0f}"
    return field(must, default, gt=0, le=most, allow_inf_nan=False)


def switch(default: bool, **more: Any) -> Any:
    return field("be true or false", default, **more)


def choice(*values: str, **more: Any) -> Any:
    """One of ``values``; the first is the default."""
    listed = ", ".join(f'"{value}"' for value in values[:-1]) + f' or "{values[-1]}"'
    return field(f"be {listed}", values[0], strict=None, **more)


def power_of_two(default: int, low: int, high: int) -> Any:
    """A power of two; the class validates it with :func:`is_power_of_two`."""
    must = f"be a power of two between {low} and {high}"
    return field(must, default, ge=low, le=high, power_of_two=(low, high))


def is_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("not a power of two")
    return value


def inner(kind: type[Block], **own: Any) -> Any:
    """A block within the block."""
    return Field(default_factory=kind, json_schema_extra=own or None)


def optional(**own: Any) -> Any:
    """A block within the block that is off where it is absent."""
    return Field(default=None, json_schema_extra=own or None)


class Block(BaseModel):
    """Unknown keys are forbidden, and nobody edits the configuration of a running job."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


def about(model: type[BaseModel], key: str) -> Mapping[str, Any]:
    """Return what a field knows of its key, by the names of ``OF_A_FIELD``."""
    extra = model.model_fields[key].json_schema_extra
    return extra if isinstance(extra, dict) else {}


def block_type(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return what an object in a field must be: the block within the block, or the entry of a list of blocks."""
    kind = model.model_fields[key].annotation if key in model.model_fields else None
    kind = get_args(kind)[0] if get_origin(kind) in (tuple, UnionType) else kind
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def is_list(model: type[BaseModel], key: str) -> bool:
    return get_origin(model.model_fields[key].annotation) is tuple


def checked_keys(model: type[BaseModel], block: Any, name: str) -> tuple[Any, list[str]]:
    """Return ``block`` without the keys that are wrong themselves, and a sentence for each of those.

    They are the keys that do not exist, and those with ``"auto"``, which other parts of a ``ds_config`` have filled in
    later. What is left is checked all the same.
    """
    if not isinstance(block, Mapping):
        return block, []
    known: dict[str, Any] = {}
    errors: list[str] = []
    for key, value in block.items():
        inner = block_type(model, key)
        if key not in model.model_fields:
            errors.append(_unknown_key(key, model, name))
        elif isinstance(value, str) and value == "auto":  # an array would compare element by element
            why = "because nothing here is filled in later"
            errors.append(f'{name}.{key} must not be "auto", {why}; {_remedy(model, key)}')
        elif inner is None or (is_list(model, key) and not isinstance(value, (list, tuple))):
            known[key] = value
        elif is_list(model, key):
            entries = [checked_keys(inner, one, f"{name}.{key}[{place}]") for place, one in enumerate(value)]
            known[key] = [entry for entry, _ in entries]
            errors += [sentence for _, sentences in entries for sentence in sentences]
        else:
            known[key], sentences = checked_keys(inner, value, f"{name}.{key}")
            errors += sentences
    return known, errors


def value_error(model: type[BaseModel], block: str, error: ErrorDetails) -> str:
    """Return the sentence for a value that pydantic has refused, from what its field says it must be.

    Args:
        model: of the block.
        block: its name.
        error: one of the ``ValidationError``.
    """
    location, value, key, name, place = error["loc"], error["input"], "", block, block
    for part in location:
        model = block_type(model, key) or model
        place, name = name, f"{name}[{part}]" if isinstance(part, int) else f"{name}.{part}"
        key = part if isinstance(part, str) else key
    if isinstance(location[-1], int):
        return f'{name} must be an object in braces, got {masked(value)}; write {{"to": "env:NAME"}} or leave it out'
    listed, field = is_list(model, key), about(model, key)
    must = "be an object in braces" if block_type(model, key) and not listed else str(field["must"])
    if error["type"] == "missing":
        return f'{place} has no key "{key}", which must {must}; {_remedy(model, key)}'
    if "secret" in field:
        return f"{name} {_why_no_destination(value)}"
    if error["type"] == "less_than_equal" and "at most" not in must:
        must += f" and at most {error['ctx']['le']}"
    got = shown(value)
    if listed:  # of what may hold secrets
        got = f"{len(value)} of them" if isinstance(value, (list, tuple)) else masked(value)
    return f"{name} must {must}, got {got}; {_remedy(model, key, value)}"


def _unknown_key(key: object, model: type[BaseModel], place: str) -> str:
    guess = nearest(str(key), model.model_fields)
    remedy = f'did you mean "{guess}"?' if guess else f"the keys here are {', '.join(model.model_fields)}"
    holds_secrets = any("secret" in about(model, name) for name in model.model_fields)
    what = masked(key) if holds_secrets and not guess and not re.fullmatch(r"\w{1,40}", str(key)) else shown(key)
    return f"{place} has no key {what}; {remedy}"


def _why_no_destination(value: object) -> str:
    try:
        parse_destination(value if isinstance(value, str) else "")
    except WrongDestination as error:
        return str(error) if isinstance(value, str) else f"must {MUST}, got {masked(value)}; see docs/alerts.md"
    return f"must {MUST}; see docs/alerts.md"


def _remedy(model: type[BaseModel], key: str, value: object = None) -> str:
    if block_type(model, key) and not is_list(model, key):
        return f'write "{key}": {{}} or leave it out'
    if model.model_fields[key].is_required():
        return f'write "{key}": "env:NAME"'
    default = shown(model.model_fields[key].default)
    if "power_of_two" in about(model, key) and type(value) is int:
        low, high = about(model, key)["power_of_two"]
        power = min(max(2 ** round(math.log2(max(value, 1))), low), high)
        return f"the nearest is {power}" + f", the default {default}" * (shown(power) != default)
    return f"write {default}, the default, or leave it out"


def nearest(key: str, names: Iterable[str]) -> str | None:
    """Return the name that ``key`` was probably meant to be."""
    by_plain_name = {plain(name): name for name in names}
    found = difflib.get_close_matches(plain(key), by_plain_name, n=1, cutoff=0.6)
    return by_plain_name[found[0]] if found else None


def plain(name: str) -> str:
    """Return a name without what people vary in it."""
    return re.sub(r"[\W_]", "", name).lower()
