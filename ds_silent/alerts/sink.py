"""Choose which events reach which destination, and queue them. On the writing rank only.

    alerts = Alerts(config.alerts, run=lambda: home.directory, monitor_write=engine.monitor.write_events)
    alerts.write_event(event)       # returns at once, whatever a destination does
    alerts.close()                  # waits END seconds at most

Each destination has a thread of its own, so that one that hangs delays no other, and no step.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from ds_silent.alerts.message import Alert, alert_of, reaches, summary_of
from ds_silent.alerts.senders import NotSent, Send, sender_of, why_of
from ds_silent.config import BLOCK, AlertConfig, ConfigError, SilentConsistencyConfig, parse
from ds_silent.config.destination import TRACKERS, Destination, WrongDestination, resolve
from ds_silent.extras import installed
from ds_silent.records import Event, Severity, StepRecord, from_json
from ds_silent.sinks.base import Sink
from ds_silent.sinks.scalars import MonitorWrite

logger = logging.getLogger("ds_silent")
HOUR = 3_600.0
LONGEST = 64
"""Alerts that wait for one destination."""
TRIES = 5
PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before the second try, doubled before each further one, and what a server may ask for at most."""
_JITTER = random.Random()  # the global generator is the script's
END = 5.0
"""Seconds that the end of a run waits for its last alerts, all destinations together."""


class OpenFaults:
    """Decide which events are news: of a fault that goes on, its beginning and its end, no reminder between."""

    def __init__(self, level: Severity) -> None:
        self._level = level
        self._open: set[tuple[str, str | None]] = set()
        self._last: Event | None = None

    def is_news(self, event: Event) -> bool:
        """Tell whether to send it, and remember that it was."""
        fault = (event.kind, event.where)
        is_open = fault in self._open
        if event.phase == "ended":  # of severity info: wanted where its beginning was
            self._open.discard(fault)
            return is_open
        if not reaches(event, self._level) or event == self._last or (is_open and event.phase == "ongoing"):
            return False
        self._open.add(fault)
        self._last = event
        return True


class Delivery:
    """Hold what waits for one destination, and send it from a thread, again where that may help.

    What does not fit, or is more than the hour's number, is counted, and the next alert says how many; when the hour
    is over and nothing else is to be sent, one that says only that. ``shown``: the destination without its secret.
    """

    def __init__(self, shown: str, at_most_per_hour: int, *, clock: Callable[[], float] = monotonic) -> None:
        self._shown, self._clock = shown, clock
        self._taken: deque[float] = deque(maxlen=at_most_per_hour)  # when the newest alerts were sent
        self._changed = threading.Condition()  # guards all that is here
        self._waiting: deque[tuple[Alert, Send]] = deque()
        self._left_out = 0
        self._newest_left: tuple[Alert, Send] | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._sending = False
        self._process = os.getpid()

    def put(self, alert: Alert, send: Send) -> None:
        """Queue an alert, which ``send`` is to send from the thread."""
        if os.getpid() != self._process or self._closing:
            return
        with self._changed:
            if len(self._waiting) < LONGEST:
                self._waiting.append((alert, send))
            else:
                self._leave_out(alert, send)
            self._changed.notify_all()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="ds_silent alerts", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # there are too many, or the interpreter is ending
                self._closing = True
                logger.warning("ds_silent: no thread can be started to send alerts to %s", self._shown)

    def stop(self) -> None:
        """Take no more, and wait no longer than one try for what is there."""
        if os.getpid() == self._process:
            with self._changed:
                self._closing = True
                self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """After :meth:`stop`: wait for what is under way, and log how many alerts were not sent."""
        if os.getpid() != self._process:
            return
        if self._thread is not None:
            self._thread.join(seconds)
        with self._changed:
            lost, self._left_out = len(self._waiting) + self._sending + self._left_out, 0
            self._waiting.clear()
        if lost:
            said = "ds_silent: %d alerts to %s were not sent; the events are in events.jsonl"
            logger.warning(said, lost, self._shown)

    # -- the thread's side ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            self._deliver(*taken)

    def _next(self) -> tuple[Alert, Send] | None:
        """Wait for what is to be sent; None at the end of the run."""
        with self._changed:
            self._sending = False
            while (taken := self._take()) is None and not self._closing:
                left = self._newest_left is not None
                self._changed.wait(max(0.0, self._free_at() - self._clock()) if left else None)
            self._sending = taken is not None
            return taken

    def _take(self) -> tuple[Alert, Send] | None:
        """Return what is to be sent now; count what the hour has no room for."""
        now = self._clock()
        if self._free_at() > now:
            while self._waiting:
                self._leave_out(*self._waiting.popleft())
            return None
        if self._waiting:
            alert, send = self._waiting.popleft()
            alert = replace(alert, left_out=self._left_out)
        elif self._newest_left is not None and not self._closing:
            alert, send = self._newest_left
            alert = summary_of(self._left_out, alert)
        else:
            return None
        self._left_out, self._newest_left = 0, None
        self._taken.append(now)
        return alert, send

    def _free_at(self) -> float:
        """Return when the hour has room again, by the clock."""
        return self._taken[0] + HOUR if len(self._taken) == self._taken.maxlen else 0.0

    def _leave_out(self, alert: Alert, send: Send) -> None:
        self._left_out += 1
        self._newest_left = alert, send

    def _deliver(self, alert: Alert, send: Send) -> None:
        for tries in range(1, TRIES + 1):
            try:
                send(alert)
                return
            except NotSent as error:
                failed = error
            except Exception as error:  # a tracker's own: what it says may quote a key
                failed = NotSent(why_of(error))
            # Not all runs of a cluster at once.
            pause = max(failed.after or 0.0, PAUSE * 2.0 ** (tries - 1) * _JITTER.uniform(0.8, 1.2))
            if not failed.again or tries == TRIES or pause > LONGEST_PAUSE or self._closes_within(pause):
                break
        why = f"{failed}" if tries == 1 else f"{failed} ({tries} tries)"
        logger.warning("ds_silent: an alert to %s was not sent, the training goes on: %s", self._shown, why)

    def _closes_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, seconds)


class _To(NamedTuple):
    delivery: Delivery
    faults: OpenFaults
    find_send: Callable[[], Send]  # called on the training thread, see sender_of


class Alerts(Sink):
    """Hand each event that is news to the destinations that want its severity. No thread is started before the first.

    Args:
        wanted: entries of the block's ``alerts``.
        run: what the messages call the training, asked at each.
        monitor_write: of DeepSpeed's monitor, where there is one. It draws numbers only, on the training thread: it
            gets how many events there were so far.

    Raises:
        WrongDestination: nothing can be sent to one of them, see :func:`usable`.
    """

    def __init__(
        self, wanted: Sequence[AlertConfig], run: Callable[[], str], *, monitor_write: MonitorWrite | None = None
    ) -> None:
        self._run, self._monitor_write = run, monitor_write
        self._monitor_level: Severity | None = None
        self._destinations: list[_To] = []
        self._counts: Counter[str] = Counter()
        self._samples = 0
        for one in wanted:
            destination = usable(one.address)
            if destination.form == "monitor":
                self._monitor_level = one.level
                continue
            delivery, faults = Delivery(destination.shown, one.at_most_per_hour), OpenFaults(one.level)
            self._destinations.append(_To(delivery, faults, partial(sender_of, destination, one.timeout)))

    def write(self, record: StepRecord) -> None:
        self._samples = record.samples

    def write_event(self, event: Event) -> None:
        for to in self._destinations:
            if to.faults.is_news(event):
                to.delivery.put(alert_of(event, self._run()), to.find_send())
        if self._monitor_write and self._monitor_level and reaches(event, self._monitor_level):
            tag = f"silent/events/{event.severity}"
            self._counts[tag] += 1
            self._monitor_write([(tag, float(self._counts[tag]), self._samples)])

    def note(self, event: Event) -> None:
        """Take an event for one that is known already: of its fault no reminder is sent, but its end."""
        for to in self._destinations:
            to.faults.is_news(event)

    def close(self) -> None:
        """Wait ``END`` seconds at most for what is under way, whatever the number of destinations."""
        for to in self._destinations:
            to.delivery.stop()
        until = monotonic() + END
        for to in self._destinations:
            to.delivery.join(max(0.0, until - monotonic()))


def usable(to: str, environment: Mapping[str, str] = os.environ) -> Destination:
    """Return the destination, where this process can send to it.

    Raises WrongDestination where it is none, its variable is not set, or the library that it needs is not installed.
    """
    destination = resolve(to, environment)
    if destination.form in TRACKERS and not installed(module := TRACKERS[destination.form]):
        must = f"name a tracker that is installed on the host of rank 0 ({module} is not)"
        package = module.replace("_", "-")
    elif destination.form == "apprise" and not installed("apprise"):
        must, package = "be reached by apprise, which is not installed on the host of rank 0", '"ds_silent[alerts]"'
    else:
        return destination
    raise WrongDestination(must, f'"{destination}"', f"pip install {package} there, or leave the alert out")


def refuse_unusable_alerts(wanted: Sequence[AlertConfig], environment: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`ConfigError` for the first of the block's ``alerts`` that this process cannot send to."""
    for number, one in enumerate(wanted):
        try:
            usable(one.address, environment)
        except WrongDestination as error:
            raise ConfigError(f"{BLOCK}.alerts[{number}].to {error}") from None


class FollowedEvents:
    """Send alerts from beside a run, of the warnings and errors that come into its ``events.jsonl``.

    Raises ConfigError where one of the destinations is none; one sentence without a secret.
    """

    def __init__(self, to: Sequence[str], run: str) -> None:
        config = parse({BLOCK: {"alerts": [{"to": each, "level": "warning"} for each in to]}}, "what was typed")
        assert isinstance(config, SilentConsistencyConfig)
        refuse_unusable_alerts(config.alerts)
        self._alerts = Alerts(config.alerts, lambda: run)
        self._known: set[tuple[Any, ...]] = set()  # a resumed run writes some again, a rotated file all
        self._take = self._alerts.note

    def line(self, line: Mapping[str, Any] | None) -> None:
        """Take a line of the file; what is no event is ignored."""
        try:
            event = from_json(Event, dict(line or {}))
        except ValueError:
            return
        identity = (event.step, event.kind, event.ranks, event.where, event.severity)
        if identity not in self._known:
            self._known.add(identity)
            self._take(event)

    def caught_up(self) -> None:
        """Send those that come from now on."""
        self._take = self._alerts.write_event

    def close(self) -> None:
        """Wait for what is under way, a few seconds at most."""
        self._alerts.close()
