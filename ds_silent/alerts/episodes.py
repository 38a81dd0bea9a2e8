"""Which events are news: a reminder of a fault that was told is none. Pure.

told = ToldFaults()
told.is_news(event)      # of each event, in order
"""

from __future__ import annotations

from ds_silent.records import ENDED, STILL, Event


class ToldFaults:
    """Faults that go on and were told. An end is news where its beginning was; a reminder, where it was not."""

    def __init__(self) -> None:
        self._open: set[tuple[str, str | None]] = set()
        self._last: Event | None = None

    def is_news(self, event: Event) -> bool:
        """Whether to tell it; remembers that it was."""
        key = (event.kind, event.where)
        if event.message.startswith(ENDED):
            known = key in self._open
            self._open.discard(key)
            return known
        if event.message.startswith(STILL) and key in self._open:
            return False
        if event == self._last:
            return False
        self._open.add(key)
        self._last = event
        return True
