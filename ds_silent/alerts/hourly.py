"""At most n in any hour. Pure: the caller has the clock.

hourly = Hourly(10)
if hourly.free_at(now) <= now: hourly.take(now)
"""

from __future__ import annotations

from collections import deque

HOUR = 3_600.0


class Hourly:
    """Remembers when the last ``most`` were taken."""

    def __init__(self, most: int) -> None:
        self._taken: deque[float] = deque(maxlen=most)

    def free_at(self, now: float) -> float:
        """Seconds of the clock from which on one more may be taken; ``now`` where it may be at once."""
        if len(self._taken) < (self._taken.maxlen or 0):
            return now
        return max(now, self._taken[0] + HOUR)

    def take(self, now: float) -> None:
        """One is taken now."""
        self._taken.append(now)
