"""Prometheus: the newest record's numbers and the count of events, for whoever scrapes the writing rank.

    sink = open_prometheus(9400, "127.0.0.1", run=lambda: "runs/my-run")    # None where the port is taken
    curl http://127.0.0.1:9400/metrics

A scrape sees one record whole, never parts of two. What was not measured is absent, never 0. The registry is this
sink's own: a script's metrics stay the script's.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

from ds_silent.metrics import METRICS
from ds_silent.records import Event, EventKind, Scores, Severity, StepRecord

logger = logging.getLogger("ds_silent")


_SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class Family:
    """What is scraped under one name: a value for each set of labels."""

    name: str
    help: str
    kind: str  # "gauge" or "counter"
    samples: tuple[tuple[Mapping[str, str], float], ...]


class Seen:
    """What was written so far, as families. Pure but for the clock.

    Attributes:
        observing: False once an event has said that nothing is observed any more.
    """

    def __init__(self, run: Callable[[], str]) -> None:
        self._run, self._written = run, 0.0
        self._record: StepRecord | None = None
        self._replica_groups: int | None = None  # of the last comparison: few steps have one
        # From the beginning, because the increase of a series that begins at 1 is 0 to Prometheus.
        self._counts: dict[tuple[str, str], int] = dict.fromkeys(product(get_args(EventKind), _SEVERITIES), 0)
        self._last: dict[tuple[str, str], int] = {}
        self.observing = True

    def record(self, record: StepRecord) -> None:
        groups = record.integrity.replica_groups
        if groups is not None:
            self._replica_groups = len(groups)
        self._record, self._written = record, time.time()

    def event(self, event: Event) -> None:
        key = (event.kind, event.severity)
        self._counts = {**self._counts, key: self._counts.get(key, 0) + 1}  # a scrape may be reading the one before
        self._last = {**self._last, key: event.step}
        self.observing = self.observing and event.kind != "observer-off"

    def families(self) -> Iterator[Family]:
        """Yield them in the order of :data:`~ds_silent.metrics.METRICS`; what is not known has no family."""
        record, counts, last = self._record, self._counts, self._last
        yield Family("ds_silent_run_info", "Where the records are.", "gauge", (({"output_dir": self._run()}, 1.0),))
        yield _one("ds_silent_observing", "1 while the ranks are observed, 0 when that has ended.", self.observing)
        if record is not None:
            for metric in METRICS:
                value = metric.of(record) if metric.gauge else None
                if value is not None:
                    yield _one(f"ds_silent_{metric.gauge}", metric.help, value)
            help = "When the newest record was written, by this host's clock."
            yield _one("ds_silent_last_record_timestamp_seconds", help, self._written)
        if self._replica_groups is not None:
            help = "Groups of replicas with the same bits, as compared last; 1 is right."
            yield _one("ds_silent_replica_groups", help, self._replica_groups)
        events = tuple(({"kind": kind, "severity": severity}, float(n)) for (kind, severity), n in counts.items())
        yield Family("ds_silent_events", "Events since the start, by kind and severity.", "counter", events)
        steps = tuple(({"kind": kind, "severity": severity}, float(n)) for (kind, severity), n in last.items())
        if steps:
            yield Family("ds_silent_last_event_step", "Optimizer step of the last such event.", "gauge", steps)


def _one(name: str, help: str, value: float) -> Family:
    return Family(name, help, "gauge", (({}, float(value)),))


class PrometheusSink:
    """Keeps what a scrape asks for, and ends the server with the run."""

    def __init__(self, seen: Seen, end: Callable[[], None]) -> None:
        self._seen, self._end = seen, end

    def write(self, record: StepRecord) -> None:
        self._seen.record(record)

    def write_scores(self, scores: Scores) -> None:
        """They are in scores.jsonl."""

    def write_event(self, event: Event) -> None:
        self._seen.event(event)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self._end()


class _Collector:
    """In the words of prometheus_client."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._seen.families():
            names = list(family.samples[0][0])
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = made(family.name, family.help, labels=names)
            for labels, value in family.samples:
                metric.add_metric(list(labels.values()), value)
            yield metric


def open_prometheus(port: int, address: str, run: Callable[[], str]) -> PrometheusSink | None:
    """The sink, its server listening; None, after one warning, where it cannot listen: no reason to stop a training.

    Args:
        port: TCP; 0 takes a free one, for tests.
        address: that it listens on.
        run: where the records are, asked at each scrape.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    seen, registry = Seen(run), CollectorRegistry()
    registry.register(_Collector(seen))
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        logger.warning(
            "ds_silent: no metrics are served for %s, the training goes on: %s port %d cannot be listened on (%s); set "
            "silent_consistency.metrics_port to a free one",
            ascii(run()),
            ascii(address),
            port,
            error.strerror,
        )
        return None
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(_leave_to_the_parent, weakref.ref(server)))
    logger.info("ds_silent: metrics at http://%s:%d/metrics", address, server.server_port)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return PrometheusSink(seen, end)


def _leave_to_the_parent(reference: weakref.ref[Any]) -> None:
    """A child, as a DataLoader's worker, would keep the port after its parent's end."""
    server = reference()
    if server is not None:
        server.socket.close()
