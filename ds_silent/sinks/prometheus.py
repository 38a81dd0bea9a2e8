"""Prometheus: the newest record's numbers and the count of events, for whoever scrapes the writing rank.

    sink = open_prometheus(9400, "127.0.0.1", run=lambda: "runs/my-run")    # None where the port is taken
    curl http://127.0.0.1:9400/metrics

A scrape sees one record whole, never parts of two. What was not measured is absent, never 0. The registry is this
sink's own: a script's metrics stay the script's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, get_args

from ds_silent.metrics import METRICS
from ds_silent.records import Event, EventKind, Severity, StepRecord
from ds_silent.sinks.base import Sink, logger
from ds_silent.sinks.files import in_children

_Counts = Mapping[tuple[str, str], int]
"""By kind and severity."""


class PrometheusSink(Sink):
    """Keeps what a scrape asks for, as a collector of ``prometheus_client``, and ends the server with the run."""

    def __init__(self, run: Callable[[], str]) -> None:
        self._run, self._written = run, 0.0
        self._record: StepRecord | None = None
        self._replica_groups: int | None = None  # of the last comparison: few steps have one
        # From the beginning, because the increase of a series that begins at 1 is 0 to Prometheus.
        self._counts: _Counts = dict.fromkeys(product(get_args(EventKind), get_args(Severity)), 0)
        self._last: _Counts = {}
        self._observing = True
        self.end: Callable[[], None] = lambda: None

    def write(self, record: StepRecord) -> None:
        groups = record.integrity.replica_groups
        if groups is not None:
            self._replica_groups = len(groups)
        self._record, self._written = record, time.time()

    def write_event(self, event: Event) -> None:
        key = (event.kind, event.severity)
        self._counts = {**self._counts, key: self._counts.get(key, 0) + 1}  # a scrape may be reading the one before
        self._last = {**self._last, key: event.step}
        self._observing = self._observing and event.kind != "observer-off"

    def close(self) -> None:
        self.end()

    def collect(self) -> Iterator[Any]:
        """Yield families in the order of :data:`~ds_silent.metrics.METRICS`; what is not known has no family."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, help: str, value: float) -> Any:
            return GaugeMetricFamily(f"ds_silent_{name}", help, value=float(value))

        def by_kind(family: Any, counts: _Counts) -> Any:
            for key, count in counts.items():
                family.add_metric(key, float(count))
            return family

        record, counts, last = self._record, self._counts, self._last
        info = GaugeMetricFamily("ds_silent_run_info", "Where the records are.", labels=["output_dir"])
        info.add_metric([self._run()], 1.0)
        yield info
        yield gauge("observing", "1 while the ranks are observed, 0 when that has ended.", self._observing)
        if record is not None:
            for metric in METRICS:
                value = metric.of(record) if metric.gauge else None
                if value is not None:
                    yield gauge(metric.gauge, metric.help, value)
            help = "When the newest record was written, by this host's clock."
            yield gauge("last_record_timestamp_seconds", help, self._written)
        if self._replica_groups is not None:
            help = "Groups of replicas with the same bits, as compared last; 1 is right."
            yield gauge("replica_groups", help, self._replica_groups)
        labels, help = ["kind", "severity"], "Events since the start, by kind and severity."
        yield by_kind(CounterMetricFamily("ds_silent_events", help, labels=labels), counts)
        if last:
            help = "Optimizer step of the last such event."
            yield by_kind(GaugeMetricFamily("ds_silent_last_event_step", help, labels=labels), last)


def open_prometheus(port: int, address: str, run: Callable[[], str]) -> PrometheusSink | None:
    """Return the sink, its server listening; None, after one warning, where it cannot listen: the training goes on.

    ``port``: TCP, 0 takes a free one; ``run``: where the records are, asked at each scrape.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    sink, registry = PrometheusSink(run), CollectorRegistry()
    registry.register(sink)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        said = (
            "ds_silent: no metrics are served for %s, the training goes on: %s port %d cannot be listened on (%s); set "
            "silent_consistency.metrics_port to a free one"
        )
        logger.warning(said, ascii(run()), ascii(address), port, error.strerror)
        return None
    # a child, as a DataLoader's worker, would keep the port after its parent's end
    in_children(server, lambda inherited: inherited.socket.close())
    logger.info("ds_silent: metrics at http://%s:%d/metrics", address, server.server_port)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    sink.end = end
    return sink
