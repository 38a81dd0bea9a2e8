"""Draw the numbers of a record as curves: their tags and values, and the sink for DeepSpeed's own monitor.

scalars(record)                    # [("silent/loss/mean", 2.31), ...]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ds_silent.distributed.parts import SHOWN_RANKS
from ds_silent.metrics import METRICS, RANK_METRICS
from ds_silent.records import Event, StepRecord
from ds_silent.sinks.base import Sink
from ds_silent.sinks.files import quantiles_of

MAX_RANKS_DRAWN = 16
"""Ranks up to which each has curves of its own: nobody can read more, and every viewer crawls."""
BANDS = ("min", "q10", "median", "q90", "max")
"""Quantiles that are drawn of more ranks."""
MonitorWrite = Callable[[list[tuple[str, float, int]]], None]
"""``engine.monitor.write_events`` (deepspeed/monitor/monitor.py, 0.12-0.19): (tag, value, x) of each point."""


class CurvesSink(Sink):
    """Remembers which ranks have curves of their own where not all have: the first 16 that events have named."""

    def __init__(self) -> None:
        self._named: dict[int, None] = {}  # in the order in which they were named

    def write_event(self, event: Event) -> None:
        """Remember whom it names; an event about many ranks names nobody."""
        for rank in event.ranks if len(event.ranks) <= SHOWN_RANKS else ():
            if len(self._named) < MAX_RANKS_DRAWN:
                self._named[rank] = None


def scalars(record: StepRecord, named: Iterable[int] = ()) -> list[tuple[str, float]]:
    """Return ``(tag, value)`` of everything measured in ``record``, without what is ``None`` but with NaN and inf.

    ``named``: ranks that have curves of their own where the ranks are too many for all to have them.
    """
    values = [(metric.tag, metric.of(record)) for metric in METRICS if metric.tag]
    everybody = record.world_size <= MAX_RANKS_DRAWN
    for metric in RANK_METRICS:
        each, tag = metric.of(record) or (), f"per_rank/{metric.name}"
        shown = range(record.world_size) if everybody else named
        values += [(f"{tag}/rank_{rank}", each[rank]) for rank in shown if rank < len(each)]
        quantiles = None if everybody else quantiles_of(each)
        if quantiles is not None:
            values += [(f"{tag}/{name}", getattr(quantiles, name)) for name in BANDS]
    for layer in record.layers:
        values += [(f"per_layer/{name}/{layer.name}", getattr(layer, name)) for name in _OF_LAYERS]
    return [(f"silent/{tag}", float(value)) for tag, value in values if value is not None]


_OF_LAYERS = ("mean_cosine", "mean_norm", "norm_cv")


class MonitorSink(CurvesSink):
    """Hands the scalars to DeepSpeed's own monitor (TensorBoard, Weights & Biases, CSV, Comet), where there is one.

    The x-axis is the monitor's own: samples, not steps. On the training thread, unlike the other sinks: the engine
    writes to the same monitor from there, and Weights & Biases drops a point that comes after one of more samples. A
    ``label`` stands before the tags: the engines of one process may share a monitor's run.
    """

    def __init__(self, write_events: MonitorWrite, label: str | None = None) -> None:
        super().__init__()
        self._write_events = write_events
        self._prefix = "" if label is None else f"{label}/"

    def write(self, record: StepRecord) -> None:
        # Not every backend takes NaN (CSV readers, Comet), and the JSON lines keep it anyway.
        values = scalars(record, self._named)
        points = [(self._prefix + tag, value, record.samples) for tag, value in values if math.isfinite(value)]
        if points:
            self._write_events(points)
