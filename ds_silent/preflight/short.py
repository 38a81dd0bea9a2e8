"""Numbers as people write them: 0.15 and not 0.15000000000000002, as long as no two of them become one. Pure.

short_numbers(["0.15000000000000002", "0.3"])  # ["0.15", "0.3"]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

LONG = 9  # digits: fewer are what somebody wrote, or a version
RELATIVE = 1e-7  # to which the short number is the long one: about float32's own precision
_NUMBER = re.compile(r"(?<![\w.+-])-?\d+\.\d+(?:e[-+]?\d+)?(?![\w.])", re.IGNORECASE)


def short_numbers(texts: Sequence[str]) -> list[str]:
    """The same texts, that are read side by side, with each long number as the shortest of its float32.

    A number keeps all its digits where another one of the texts would look the same.
    """
    numbers = {number for text in texts for number in _NUMBER.findall(text)}
    shown = {number: _short(number) for number in numbers}
    values = {number: float(number) for number in numbers}
    looks = Counter(look for look, _ in {(float(shown[number]), values[number]) for number in numbers})
    kept = {number: short if looks[float(short)] == 1 else number for number, short in shown.items()}
    return [_NUMBER.sub(lambda found: kept[found.group()], text) for text in texts]


def _short(number: str) -> str:
    value = float(number)
    with np.errstate(all="ignore"):  # beyond float32's range it is not near, and stays as it is
        short = str(np.float32(value))
    near = abs(float(short) - value) <= RELATIVE * abs(value)
    return short if near and sum(map(str.isdigit, number)) > LONG else number
