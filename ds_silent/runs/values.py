"""Single values of a record that somebody else may have written: each as what it should be, or None. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ds_silent.text import one_line

MOST_STEP = 2**62
"""A step beyond it is no step."""
MOST_RANKS = 1 << 20
LONGEST_TEXT = 4000
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def number(value: Any) -> float | None:
    """A float, not finite perhaps; None where nothing was measured, or it is no number."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if -(2**1000) < value < 2**1000 else (math.inf if value > 0 else -math.inf)
    return _NOT_FINITE.get(value) if type(value) is str else None


def whole(value: Any, most: int = MOST_STEP) -> int | None:
    """A whole number from 0 to ``most``."""
    return value if type(value) is int and 0 <= value <= most else None


def text(value: Any, longest: int = LONGEST_TEXT) -> str:
    """A text without control characters; "" for what is none."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= longest else f"{value[: longest - 1]}…"
    return one_line(cut)


def ranks(value: Any, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Ranks, at most the first 64, in their order; those that are none are left out."""
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(one for one in value[:64] if whole(one, most) is not None)


def of(value: Any, *keys: str) -> Any:
    """What stands under these keys, one in the other; None where there is no such thing."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def numbers(value: Any) -> list[float] | None:
    """A list of numbers, NaN where one is none; None where it is no list, or an empty one."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or len(value) > MOST_RANKS:
        return None
    return [math.nan if (known := number(one)) is None else known for one in value]
