"""The sink that tells: which events reach which destination, on the writing rank.

    alerts = open_alerts(config.alerts, run=lambda: home.directory, monitor_write=engine.monitor.write_events)
    alerts.write_event(event)

Who follows the files of a run uses the same: ``open_alerts([AlertConfig(to=...)], run=...)`` and ``write_event`` of
each new event. Nothing here waits: see :mod:`ds_silent.alerts.delivery`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Any, Protocol

from ds_silent.alerts.delivery import END, Delivery, Send
from ds_silent.alerts.mail import send_mail
from ds_silent.alerts.message import Alert, alert_of, payload, plain_text, reaches
from ds_silent.alerts.program import run_command
from ds_silent.alerts.trackers import run_of
from ds_silent.alerts.webhook import post
from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, parse
from ds_silent.destination import TRACKERS, Destination, WrongDestination, resolve
from ds_silent.extras import installed
from ds_silent.records import ENDED, STILL, Event, Scores, Severity, StepRecord, from_json

# ----------------------------------------------------------------------------------------------------------------------
# Which events are news: a reminder of a fault that was told is none. Pure.


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


# -- The sink that tells -----------------------------------------------------------------------------------------------


MonitorWrite = Callable[[list[tuple[str, float, int]]], None]


class Wanted(Protocol):
    """An entry of the block's ``alerts``, see :class:`ds_silent.config.AlertConfig`."""

    @property
    def address(self) -> str: ...
    @property
    def level(self) -> Severity: ...
    @property
    def at_most_per_hour(self) -> int: ...
    @property
    def timeout(self) -> float: ...


class Alerts:
    """Hands each event that is news to the destinations that want its severity."""

    def __init__(self, run: Callable[[], str], destinations: Sequence[_One], monitor: _Monitor | None = None) -> None:
        self._run, self._destinations, self._monitor = run, tuple(destinations), monitor

    def write(self, record: StepRecord) -> None:
        if self._monitor is not None:
            self._monitor.samples = record.samples

    def write_scores(self, scores: Scores) -> None:
        """Nothing that somebody must be told."""

    def write_event(self, event: Event) -> None:
        for one in self._destinations:
            if one.wants(event):
                one.delivery.put(alert_of(event, self._run()), one.find_send())
        if self._monitor is not None:
            self._monitor.count(event)

    def note(self, event: Event) -> None:
        """Take an event for one that is known already: of its fault no reminder is told, but its end."""
        for one in self._destinations:
            one.wants(event)

    def flush(self) -> None:
        """A checkpoint does not wait for a server."""

    def close(self) -> None:
        """Waits ``END`` seconds at most for what is under way, whatever the number of destinations."""
        for one in self._destinations:
            one.delivery.stop()
        until = monotonic() + END
        for one in self._destinations:
            one.delivery.join(max(0.0, until - monotonic()))


class _One:
    def __init__(self, delivery: Delivery, level: Severity, find_send: Callable[[], Send]) -> None:
        self.delivery, self.find_send = delivery, find_send
        self._level, self._told = level, ToldFaults()

    def wants(self, event: Event) -> bool:
        if event.message.startswith(ENDED):  # severity info: wanted where its beginning was
            return self._told.is_news(event)
        return reaches(event, self._level) and self._told.is_news(event)


class _Monitor:
    """The number of events so far, as points of DeepSpeed's monitor: it draws nothing else. On the training thread,
    as :class:`ds_silent.sinks.monitor.MonitorSink`."""

    def __init__(self, write_events: MonitorWrite, level: Severity) -> None:
        self.samples = 0
        self._write_events, self._level = write_events, level
        self._counts: dict[str, int] = {}

    def count(self, event: Event) -> None:
        if reaches(event, self._level):
            tag = f"silent/events/{event.severity}"
            self._counts[tag] = self._counts.get(tag, 0) + 1
            self._write_events([(tag, float(self._counts[tag]), self.samples)])


def open_alerts(
    wanted: Sequence[Wanted],
    run: Callable[[], str],
    *,
    monitor_write: MonitorWrite | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Alerts:
    """The sink of these destinations. On the writing rank only; nothing is sent, no thread started yet.

    Args:
        wanted: entries of the block's ``alerts``.
        run: what the messages call the training, asked at each.
        monitor_write: of DeepSpeed's monitor, where there is one.

    Raises:
        WrongDestination: nothing can be sent to one of them, see :func:`usable`.
    """
    destinations, monitor = [], None
    for one in wanted:
        destination = usable(one.address, environment)
        if destination.form == "monitor":
            monitor = None if monitor_write is None else _Monitor(monitor_write, one.level)
            continue
        delivery = Delivery(destination.shown, one.at_most_per_hour)
        destinations.append(_One(delivery, one.level, partial(sender_of, destination, one.timeout)))
    return Alerts(run, destinations, monitor)


def usable(to: str, environment: Mapping[str, str] = os.environ) -> Destination:
    """The destination, where this process can send to it.

    Raises:
        WrongDestination: it is none, its variable is not set, or the library that it needs is not installed.
    """
    destination = resolve(to, environment)
    module = TRACKERS.get(destination.form)
    if module is not None and not installed(module):
        raise WrongDestination(
            f"name a tracker that is installed on the host of rank 0 ({module} is not)",
            f'"{destination}"',
            f"pip install {module.replace('_', '-')} there, or leave the alert out",
        )
    return destination


def refuse_unusable_alerts(wanted: Sequence[Wanted], environment: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`ConfigError` for the first of the block's ``alerts`` that this process, the writing rank, cannot
    serve."""
    for number, one in enumerate(wanted):
        try:
            usable(one.address, environment)
        except WrongDestination as error:
            raise ConfigError(f"{BLOCK}.alerts[{number}].to {error}") from None


def sender_of(destination: Destination, seconds: float) -> Send:
    """What sends one alert there, and raises NotSent. For trackers: called on the training thread, see
    :mod:`.trackers`."""
    if destination.form in TRACKERS:
        return run_of(destination.form)
    if destination.mail is not None:
        return lambda alert: send_mail(destination.mail, *_mail_of(alert), seconds)  # type: ignore[arg-type]
    if destination.form == "command":
        return lambda alert: run_command(destination.address, {"source": "ds_silent", **asdict(alert)}, seconds)
    return lambda alert: post(destination.address, payload(destination.form, alert), seconds)


def _mail_of(alert: Alert) -> tuple[str, str]:
    return f"[ds_silent] {alert.title}", plain_text(alert)


# ----------------------------------------------------------------------------------------------------------------------
# Alerts from beside a run: the lines that come into its ``events.jsonl`` while somebody follows them.


_Identity = tuple[int, str, tuple[int, ...], str | None, str]


class FollowedEvents:
    """Args:
        to: destinations, as in the block.
        run: what the messages call it.
        level: events of this severity or worse.

    Raises:
        ConfigError: one of them is none; one sentence without a secret.
    """

    def __init__(self, to: Sequence[str], run: str, level: Severity = "warning") -> None:
        config = parse({BLOCK: {"alerts": [{"to": each, "level": level} for each in to]}}, "what was typed")
        assert isinstance(config, SilentConsistencyConfig)
        refuse_unusable_alerts(config.alerts)
        self._alerts = open_alerts(config.alerts, lambda: run)
        self._known: set[_Identity] = set()  # a resumed run writes some again, a rotated file all
        self._new = False

    def line(self, line: Mapping[str, Any] | None) -> None:
        """A line of the file; what is no event is nobody's business here."""
        if line is None:
            return
        try:
            event = from_json(Event, dict(line))
        except ValueError:
            return
        identity = (event.step, event.kind, event.ranks, event.where, event.severity)
        if identity in self._known:
            return
        self._known.add(identity)
        if self._new:
            self._alerts.write_event(event)
        else:
            self._alerts.note(event)

    def caught_up(self) -> None:
        """From now on lines are new."""
        self._new = True

    def close(self) -> None:
        """Waits for what is under way, a few seconds at most."""
        self._alerts.close()
