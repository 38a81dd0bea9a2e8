"""At which records the N x N matrix of cosines is drawn, and kept in ``matrices.jsonl``.

    is_drawn(3)        # False: the third matrix of this process; the first, second, fifth, ... hundredth are

Drawing one takes 0.1 s, and a line of 64 ranks 80 kB.
"""

from __future__ import annotations

_FIRST = (1, 2, 5, 10, 20, 50)
_INTERVAL = 100


def is_drawn(number: int) -> bool:
    """Whether the ``number``-th matrix since the process began, counted from 1, is drawn."""
    return number in _FIRST or number % _INTERVAL == 0
