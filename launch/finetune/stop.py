"""A signal's wish to stop, noted now and acted on at the next step's border."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, SIGTERM and SIGINT only set ``asked``; afterwards the handlers are as they were.

    Further signals change nothing: launchers send SIGTERM after the user's SIGINT, and both mean the same wish. A
    launcher that has lost patience uses SIGKILL.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
