"""Bars and sparklines of characters. Pure.

BLOCKS.sparkline([1.0, 2.0, 4.0], width=3)     # three characters, from low to high
BLOCKS.bar(0.4, width=10)                      # as long as 0.4 of ten characters
glyphs_for("ascii")                            # PLAIN: a terminal that cannot show blocks
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """What a terminal can show.

    Attributes:
        levels: of a sparkline, from low to high.
        parts: of a bar's last character, from the thinnest to a full one.
        rule: of a line across.
        hole: a value that is no number.
        up_down: the keys that scroll.
    """

    levels: str
    parts: str
    rule: str
    hole: str
    up_down: str

    def sparkline(self, values: Sequence[float], width: int) -> str:
        """The last ``width`` values, one character each, between their own lowest and highest."""
        shown = values[-width:] if width > 0 else ()
        finite = [value for value in shown if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        return "".join(self._level(value, low, high) for value in shown)

    def _level(self, value: float, low: float, high: float) -> str:
        if not math.isfinite(value):
            return self.hole
        span = high / 2 - low / 2  # halves, because the difference of two large numbers may be infinite
        if not span > 0.0:
            return self.levels[len(self.levels) // 2]
        return self.levels[min(int((value / 2 - low / 2) / span * len(self.levels)), len(self.levels) - 1)]

    def bar(self, share: float, width: int) -> str:
        """``share`` of ``width`` characters, 0 to 1; what is more than nothing is seen."""
        steps = len(self.parts)
        filled = max(round(min(max(share, 0.0), 1.0) * width * steps), 1 if share > 0.0 else 0)
        whole, rest = divmod(filled, steps)
        return self.parts[-1] * whole + (self.parts[rest - 1] if rest else "")


BLOCKS = Glyphs("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "─", "×", "↑↓")
PLAIN = Glyphs("_.-:=+*#", "#", "-", "x", "arrows")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Those that this encoding has."""
    try:
        "".join((BLOCKS.levels, BLOCKS.parts, BLOCKS.rule, BLOCKS.hole, BLOCKS.up_down)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BLOCKS
