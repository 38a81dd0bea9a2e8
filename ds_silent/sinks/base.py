"""What a sink is, and the fan-out that keeps a broken one from the training.

    sinks = FanOut([JsonlSink(output_dir), ConsoleSink()])
    sinks.write(record)

A sink only writes: it computes nothing and knows nothing of training. It runs on rank 0 only, and the caller sees
to that. Its calls come one after the other, though perhaps from a thread, see :mod:`ds_silent.sinks.worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ds_silent.records import Event, Scores, StepRecord

logger = logging.getLogger("ds_silent")


class SinkError(Exception):
    """A sink cannot be opened; the message is one sentence with the path and the remedy."""


class Sink:
    """Where records go; each method does nothing unless it is overridden, and may raise: see :class:`FanOut`."""

    broken = False  # it has raised, and writes nothing more

    def write(self, record: StepRecord) -> None:
        """Write one measured step; called once per measured step, in the order of the steps."""

    def write_scores(self, scores: Scores) -> None:
        """Write what the detectors saw at one step; called once per judged step, in the order of the steps."""

    def write_event(self, event: Event) -> None:
        """Write one event; called at any time, also before the first step."""

    def flush(self) -> None:
        """Put what was written on the disk; slow, so for checkpoints and the end, not for each step."""

    def close(self) -> None:
        """Flush and release everything; called once, last."""


class FanOut(Sink):
    """Hands everything to every sink. One that raises is dropped after one warning; nothing reaches the caller."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def write(self, record: StepRecord) -> None:
        self._each(lambda sink: sink.write(record))

    def write_scores(self, scores: Scores) -> None:
        self._each(lambda sink: sink.write_scores(scores))

    def write_event(self, event: Event) -> None:
        self._each(lambda sink: sink.write_event(event))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            try:
                act(sink)
            except Exception as error:  # whatever a disk or a library does, the training goes on
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        sink.broken = True
        said = "ds_silent: %s stops writing for the rest of this run, the training goes on: %s"
        logger.warning(said, type(sink).__name__, error)
        try:
            sink.close()
        except Exception as close_error:  # it is already broken: closing it is a courtesy to its other files
            logger.debug("ds_silent: closing %s failed too: %s", type(sink).__name__, close_error)
