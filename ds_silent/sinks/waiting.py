"""A sink in front of files that nobody can name yet."""

from __future__ import annotations

from ds_silent.records import Event, Scores, StepRecord
from ds_silent.sinks.base import Sink


class WaitingSink:
    """Keeps what is written until :meth:`open` says where it goes; then it only hands on."""

    def __init__(self) -> None:
        self._inner: Sink | None = None
        self._early: list[Event | Scores | StepRecord] = []

    def open(self, inner: Sink) -> None:
        """Hand everything to ``inner`` from now on, and first what has waited."""
        self._inner = inner
        early, self._early = self._early, []
        for one in early:
            if isinstance(one, Event):
                self.write_event(one)
            elif isinstance(one, Scores):
                self.write_scores(one)
            else:
                self.write(one)

    def write(self, record: StepRecord) -> None:
        if self._inner is None:
            self._early.append(record)
        else:
            self._inner.write(record)

    def write_scores(self, scores: Scores) -> None:
        if self._inner is None:
            self._early.append(scores)
        else:
            self._inner.write_scores(scores)

    def write_event(self, event: Event) -> None:
        if self._inner is None:
            self._early.append(event)
        else:
            self._inner.write_event(event)

    def flush(self) -> None:
        if self._inner is not None:
            self._inner.flush()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
