"""One destination: a queue with a bound, and a thread that sends, repeats and counts what it must leave out.

    delivery = Delivery("https://hooks.slack.com/…", at_most_per_hour=10)
    delivery.put(alert, send)       # returns at once, whatever the destination does
    delivery.close()                # waits END seconds at most

Each destination has its own thread, so that one that hangs delays no other, and no step: ``put`` appends to a queue.
What does not fit into it, or is more than the hour's number, is counted, and the next alert says how many; when the
hour is over and nothing else was to be told, one that says only that. A send that fails is repeated where that may
help, after 1, 2, 4 ... seconds or what the server asks for; then one sentence in the log says why, without a secret.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from ds_silent.alerts.failure import NotSent, why_of
from ds_silent.alerts.message import Alert, summary_of

# ----------------------------------------------------------------------------------------------------------------------
# At most n in any hour. Pure: the caller has the clock.


HOUR = 3_600.0


class Hourly:
    """Remembers when the last ``most`` were taken."""

    def __init__(self, most: int) -> None:
        self._taken: deque[float] = deque(maxlen=most)

    def free_at(self, now: float) -> float:
        """Seconds of the clock from which on one more may be taken; ``now`` where it may be at once."""
        if len(self._taken) < (self._taken.maxlen or 0):
            return now
        return max(now, self._taken[0] + HOUR)

    def take(self, now: float) -> None:
        """One is taken now."""
        self._taken.append(now)


logger = logging.getLogger("ds_silent")

# -- One destination ---------------------------------------------------------------------------------------------------


LONGEST = 64
"""Alerts that wait for one destination."""
TRIES = 5
PAUSE = 1.0
"""Seconds before the second try; doubled before each further one."""
LONGEST_PAUSE = 300.0
"""Seconds that a server may ask for; one that asks for more is not asked again."""
END = 5.0
"""Seconds that the end of a run waits for its last alerts, all destinations together."""
Send = Callable[[Alert], None]


class Delivery:
    """What waits for one destination.

    Args:
        shown: the destination without its secret, for the log.
        clock: seconds, for tests of the hour.
    """

    def __init__(self, shown: str, at_most_per_hour: int, *, clock: Callable[[], float] = monotonic) -> None:
        self.shown = shown
        self._clock, self._hourly = clock, Hourly(at_most_per_hour)
        self._changed = threading.Condition()  # guards all that is here
        self._waiting: deque[tuple[Alert, Send]] = deque()
        self._left_out = 0
        self._newest_left: tuple[Alert, Send] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._sending = False
        self._process = os.getpid()

    def put(self, alert: Alert, send: Send) -> None:
        """Queue an alert, which ``send`` is to send from the thread."""
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) < LONGEST:
                self._waiting.append((alert, send))
            else:
                self._leave_out(alert, send)
            self._changed.notify_all()
            self._employ()

    def stop(self) -> None:
        """Take no more, and wait no longer than one try for what is there."""
        if os.getpid() == self._process:
            with self._changed:
                self._closing = True
                self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """After :meth:`stop`: wait for what is under way, and say what was not told."""
        if os.getpid() != self._process:
            return
        until = monotonic() + seconds
        with self._changed:
            while (self._waiting or self._sending) and self._thread is not None and monotonic() < until:
                self._changed.wait(max(0.0, until - monotonic()))
            lost, self._left_out = len(self._waiting) + self._sending + self._left_out, 0
            self._waiting.clear()
            self._changed.notify_all()
        if lost:
            logger.warning("ds_silent: %d alerts to %s were not sent; the events are in events.jsonl", lost, self.shown)

    def close(self, seconds: float = END) -> None:
        """:meth:`stop` and :meth:`join`."""
        self.stop()
        self.join(seconds)

    # -- the thread's side ---------------------------------------------------------------------------------------------

    def _employ(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ds_silent alerts", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # there are too many, or the interpreter is ending
                self._thread, self._closing = None, True
                logger.warning("ds_silent: no thread can be started to send alerts to %s", self.shown)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                taken = self._next()
                while taken is None:
                    if self._closing:
                        return
                    self._changed.wait(self._patience())
                    taken = self._next()
                self._sending = True
            self._deliver(*taken)

    def _next(self) -> tuple[Alert, Send] | None:
        """What is to be sent now; what the hour has no room for is counted."""
        now = self._clock()
        if self._hourly.free_at(now) > now:
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
        self._hourly.take(now)
        return alert, send

    def _leave_out(self, alert: Alert, send: Send) -> None:
        self._left_out += 1
        self._newest_left = alert, send

    def _patience(self) -> float | None:
        """Seconds until a summary may be sent; None while there is nothing to sum up."""
        if self._newest_left is None:
            return None
        now = self._clock()
        return max(0.0, self._hourly.free_at(now) - now)

    def _deliver(self, alert: Alert, send: Send) -> None:
        tries = 0
        while True:
            tries += 1
            try:
                send(alert)
                return
            except NotSent as error:
                failed = error
            except Exception as error:  # a tracker's own: what it says may quote a key
                failed = NotSent(why_of(error))
            pause = _pause(tries, failed.after)
            if not failed.again or tries >= TRIES or pause > LONGEST_PAUSE or not self._paused(pause):
                times = "" if tries == 1 else f" ({tries} tries)"
                logger.warning(
                    "ds_silent: an alert to %s was not sent, the training goes on: %s%s", self.shown, failed, times
                )
                return

    def _paused(self, seconds: float) -> bool:
        """Whether there is a time after the pause: at the end of a run there is none."""
        until = monotonic() + seconds
        with self._changed:
            while not self._closing and monotonic() < until:
                self._changed.wait(until - monotonic())
            return not self._closing


def _pause(tries: int, asked: float | None) -> float:
    """Not all runs of a cluster at once."""
    return max(asked or 0.0, PAUSE * 2.0 ** (tries - 1) * random.uniform(0.8, 1.2))
