"""How a key of the block is declared: its default, its bound, and the sentence for a value that is refused.

interval: int = whole(1, 1)
method: Literal["sketch", "off"] = choice("sketch", "off")
direction: DirectionConfig = inner(DirectionConfig)
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ds_silent.config.errors import OF_A_FIELD

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
