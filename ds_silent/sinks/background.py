"""A thread that writes and draws, so that a training step waits for no disk and no picture.

    sinks = Background([JsonlSink(directory), TensorBoardSink(directory / "tensorboard")])
    sinks.write(record)        # queued
    sinks.flush()              # returns when everything before it is written, and on disk
    sinks.close()

Every sink gets everything, in order, from one thread. One that raises is dropped with a sentence, see
:class:`~ds_silent.sinks.base.FanOut`; nothing else is ever dropped. What a step may cost:

* A call appends to the queue and returns. Where a sink has ``LONGEST`` entries waiting, the caller waits for it; from
  one record to the next for ``WAIT`` seconds at most, all waits together. After that the queue grows.
* An event of severity ``error`` overtakes what the other sinks wait for, and is written by the first sink (the one
  whose lines must not be lost) when the call returns, or ``WAIT`` seconds are over.
* A sink that does not return for ``STUCK`` seconds is told. A second thread serves the others, and nobody waits for the
  sink from then on: its entries stay in memory until it returns. Only ``close`` gives it ``STUCK`` seconds more, and
  tells how many are lost.
* Where a thread cannot be started, or dies, that is told, and the caller writes from then on.

``flush`` and ``close`` wait for every sink that is not stuck; what is left at the end of the process is written then. A
killed process loses what is queued, an error's event at most where a call of the first sink was slower than ``WAIT``.
A forked child writes nothing. No fork happens in the middle of a write, in which a library may hold a lock that the
child could never open: it waits for ``WAIT`` seconds at most.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from time import monotonic

from ds_silent.records import Event, Scores, StepRecord
from ds_silent.sinks.base import FanOut, Sink

logger = logging.getLogger("ds_silent")
LONGEST = 256
"""Entries that wait for one sink before a step waits for it."""
WAIT = 2.0
"""Seconds that a step waits at most."""
STUCK = 30.0
"""Seconds after which a call of a sink counts as one that may never return."""
_IDLE = 5.0  # seconds after which a thread without work ends; the next entry starts another one
_Entry = tuple[int, Callable[[Sink], None]]  # a number that grows, and what to do
_live: weakref.WeakSet[Background] = weakref.WeakSet()
_processes: set[int] = set()  # whose end writes what is left


class _Line:
    """What waits for one sink, in order. Its first entry is under way while ``since`` is known."""

    def __init__(self, sink: Sink, entries: Iterable[_Entry] = ()) -> None:
        self.name, self.sink = type(sink).__name__, FanOut([sink])
        self.entries = deque(entries)
        self.since: float | None = None
        self.stuck = False

    def has_done(self, number: int) -> bool:
        return not self.entries or self.entries[0][0] > number


class Background:
    """Hands everything to every sink, from a thread of its own.

    Args:
        sinks: in order of importance; the first one's lines are waited for where an event is an error.
        more: :meth:`add` will bring others, which get everything from the beginning.
    """

    def __init__(self, sinks: Iterable[Sink], *, more: bool = False) -> None:
        self._lines = [_Line(sink) for sink in sinks]
        self._early: list[_Entry] | None = [] if more else None
        self._changed = threading.Condition()  # guards all that is here
        self._thread: threading.Thread | None = None  # that serves; one that is stuck is not it any more
        self._alone = False  # there is no thread: the caller serves
        self._number = 0  # of the newest entry
        self._urgent = 0  # up to which the first sink comes first
        self._patience = WAIT  # seconds that this step may still wait
        self._forking = False
        self._process = os.getpid()
        _live.add(self)
        _drain_at_exit()

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(sink for line in self._lines for sink in line.sink.sinks)

    def add(self, sinks: Iterable[Sink]) -> None:
        """Sinks that come before the others, and first get what was written so far. Once, after ``more=True``."""
        if not self._is_parent():
            return
        with self._changed:
            early, self._early = self._early or (), None
            self._lines[:0] = [_Line(sink, early) for sink in sinks]
            self._employ()
        self._serve_alone()

    def write(self, record: StepRecord) -> None:
        self._patience = WAIT
        self._put(lambda sink: sink.write(record))

    def write_scores(self, scores: Scores) -> None:
        self._put(lambda sink: sink.write_scores(scores))

    def write_event(self, event: Event) -> None:
        urgent = event.severity == "error"
        number = self._put(lambda sink: sink.write_event(event), urgent)
        if urgent:
            self._wait_in_step(lambda: all(line.stuck or line.has_done(number) for line in self._lines[:1]))

    def flush(self) -> None:
        self._put(lambda sink: sink.flush())
        self.drain()

    def drain(self) -> None:
        """Wait until everything is written, though not yet on disk."""
        number = self._number
        self._wait(lambda: all(line.stuck or line.has_done(number) for line in self._lines), math.inf)

    def close(self) -> None:
        number = self._put(lambda sink: sink.close())
        self.drain()
        self._wait(lambda: all(line.has_done(number) for line in self._lines), STUCK)
        if not self._is_parent():  # its copy of the lock may never be opened
            return
        with self._changed:
            lines, self._lines, self._early = self._lines, [], None
            self._changed.notify_all()
        for line in lines:
            if line.entries:
                logger.warning("ds_silent: %s is stuck: its last %d entries are lost", line.name, len(line.entries))

    # -- the caller's side ---------------------------------------------------------------------------------------------

    def _is_parent(self) -> bool:
        return os.getpid() == self._process

    def _put(self, act: Callable[[Sink], None], urgent: bool = False) -> int:
        """Queue an entry for every sink; its number."""
        if not self._is_parent():
            return 0
        self._wait_in_step(lambda: all(line.stuck or len(line.entries) < LONGEST for line in self._lines))
        with self._changed:
            self._number += 1
            entry = self._number, act
            if self._early is not None:
                self._early.append(entry)
            for line in self._lines:
                line.entries.append(entry)
            self._urgent = self._number if urgent else self._urgent
            self._changed.notify_all()
            self._employ()
        self._serve_alone()
        return entry[0]

    def _wait_in_step(self, done: Callable[[], bool]) -> None:
        began = monotonic()
        self._wait(done, self._patience)
        self._patience = max(0.0, self._patience - (monotonic() - began))

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        until = monotonic() + seconds
        while self._is_parent():
            self._serve_alone()
            with self._changed:
                self._look_for_stuck()
                left = until - monotonic()
                if done() or left <= 0.0:
                    return
                self._changed.wait(min(left, 1.0))

    def _look_for_stuck(self) -> None:
        for line in self._lines:
            if line.since is not None and not line.stuck and monotonic() - line.since > STUCK:
                line.stuck, self._thread = True, None
                logger.warning(
                    "ds_silent: %s has not returned for %.0f s: what it is to write waits in memory, the training and "
                    "the other sinks go on",
                    line.name,
                    STUCK,
                )
        self._employ()

    def _employ(self) -> None:
        """A thread, where there is work and none that does it."""
        if self._alone or self._thread is not None or self._next() is None:
            return
        self._thread = threading.Thread(target=self._run, name="ds_silent writes", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many, or the interpreter is ending
            self._go_on_alone(error)

    def _go_on_alone(self, error: BaseException) -> None:
        self._alone, self._thread = True, None
        self._changed.notify_all()
        logger.warning(
            "ds_silent: the thread that writes the records is gone (%s: %s); the training thread writes from now on",
            type(error).__name__,
            error,
        )

    def _serve_alone(self) -> None:
        if self._alone:
            self._serve(0.0)

    # -- the thread's side ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve(_IDLE)
        except BaseException as error:  # a sink's SystemExit, or an error of this file: nobody else would hear of it
            with self._changed:
                if self._thread is threading.current_thread():
                    self._go_on_alone(error)

    def _serve(self, patience: float) -> None:
        """Write until there has been nothing to do for so many seconds, or another thread does it."""
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None or not self._lines, patience)
                serves = self._alone or self._thread is me
                line = self._next() if serves else None
                if line is None:
                    self._thread = None if serves else self._thread
                    self._employ()  # what a thread that was stuck leaves
                    return
                line.since = monotonic()
                act = line.entries[0][1]
            try:
                act(line.sink)
            finally:
                with self._changed:
                    line.entries.popleft()
                    line.since, line.stuck = None, False
                    if not line.sink.sinks:  # dropped, or closed
                        self._lines = [other for other in self._lines if other is not line]
                    self._changed.notify_all()

    def _next(self) -> _Line | None:
        """The line with the oldest entry; the first line, up to what is urgent."""
        free = [line for line in self._lines if line.entries and line.since is None]
        if not free or self._forking:
            return None
        if free[0] is self._lines[0] and not free[0].has_done(self._urgent):
            return free[0]
        return min(free, key=lambda line: line.entries[0][0])

    # -- a fork --------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no write from now on; wait for the one that is under way."""
        with self._changed:
            if not self._alone and self._thread is not threading.current_thread():  # else it is a sink that forks
                self._forking = True
                self._changed.wait_for(lambda: all(line.stuck or line.since is None for line in self._lines), WAIT)

    def go_on(self) -> None:
        """After :meth:`pause`."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()
            self._employ()


def _before_fork() -> None:
    for background in tuple(_live):
        if background._is_parent():
            background.pause()


def _after_fork() -> None:
    for background in tuple(_live):
        if background._is_parent():
            background.go_on()


def _drain_at_exit() -> None:
    """Not by ``atexit``, which a child that multiprocessing has started does not run."""
    if os.getpid() not in _processes:
        _processes.add(os.getpid())
        Finalize(None, _drain_all, exitpriority=1)


def _drain_all() -> None:
    for background in tuple(_live):
        background.drain()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
