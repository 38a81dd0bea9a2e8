"""DeepSpeed's own monitor (TensorBoard, Weights & Biases, CSV, Comet), where the user configured one."""

from __future__ import annotations

import math
from collections.abc import Callable

from ds_silent.records import Event, Scores, StepRecord
from ds_silent.sinks.scalars import Curves

MonitorWrite = Callable[[list[tuple[str, float, int]]], None]
"""``engine.monitor.write_events`` (deepspeed/monitor/monitor.py, 0.12-0.19): (tag, value, x) of each point."""


class MonitorSink:
    """Hands the scalars to ``write_events``. The x-axis is the monitor's own: samples, not steps.

    On the training thread, unlike the other sinks: the engine writes to the same monitor from there, and Weights &
    Biases drops a point that comes after one of more samples.

    A ``label`` stands before the tags: the engines of one process may share a monitor's run.
    """

    def __init__(self, write_events: MonitorWrite, label: str | None = None) -> None:
        self._write_events, self._curves = write_events, Curves()
        self._prefix = "" if label is None else f"{label}/"

    def write(self, record: StepRecord) -> None:
        # Not every backend takes NaN (CSV readers, Comet), and the JSON lines keep it anyway.
        values = self._curves.of(record)
        points = [(self._prefix + tag, value, record.samples) for tag, value in values if math.isfinite(value)]
        if points:
            self._write_events(points)

    def write_scores(self, scores: Scores) -> None:
        """They are in scores.jsonl."""

    def write_event(self, event: Event) -> None:
        """The monitor draws numbers only, those of the ranks that it names among them."""
        self._curves.write_event(event)

    def flush(self) -> None:
        """The monitor flushes itself."""

    def close(self) -> None:
        """The monitor belongs to the engine."""
