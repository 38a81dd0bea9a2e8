"""Do work beside the training, so that a step waits for no disk, no picture and no judging.

    sinks = Background([JsonlSink(directory), TensorBoardSink(directory / "tensorboard")])
    sinks.write(record)        # queued
    sinks.flush()              # returns when everything before it is written, and on disk
    sinks.close()

A :class:`Worker` serves queues from one thread, which starts with work and ends without. :class:`Background` has a
queue for each sink; :class:`OneTask` is a worker with one entry at a time, which judges a step.

Every sink gets everything, in order, from one thread. One that raises is dropped with a sentence
(:class:`~ds_silent.sinks.base.FanOut`); nothing else is ever dropped. What a step may cost:

* A call appends to the queue and returns. Where a sink has ``LONGEST`` entries waiting, the caller waits for it, from
  one record to the next ``WAIT`` seconds at most. After that the queue grows.
* An event of severity ``error`` overtakes what the other sinks wait for, and is written by the first sink (the one
  whose lines must not be lost) when the call returns, or ``WAIT`` seconds are over.
* A sink that does not return for ``STUCK`` seconds is reported. A second thread serves the others, and nobody waits for
  the sink from then on: its entries stay in memory until it returns. Only ``close`` gives it ``STUCK`` seconds more,
  and reports how many are lost.
* Where a thread cannot be started, or dies, that is reported, and the caller writes from then on.

``flush`` and ``close`` wait for every sink that is not stuck; what is left at the end of the process is written then. A
killed process loses what is queued, an error's event at most where a call of the first sink was slower than ``WAIT``.
A forked child writes nothing. No fork happens in the middle of a write, in which a library may hold a lock that the
child could never open: it waits for ``WAIT`` seconds at most.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any

from ds_silent.records import Event, Scores, StepRecord
from ds_silent.sinks.base import FanOut, Sink, logger

LONGEST = 256
"""Entries that wait for one sink before a step waits for it."""
WAIT = 2.0
"""Seconds that a step waits at most."""
STUCK = 30.0
"""Seconds after which a call of a sink counts as one that may never return."""
LATEST = 1.0
"""Seconds after which a task begins that nobody has let begin."""
PATIENT_FORK = 10.0
"""Seconds that a fork waits for a patient worker's entry."""
_IDLE = 5.0  # seconds after which a thread without work ends; the next entry starts another one
_Entry = tuple[int, Callable[[Any], None]]  # a number that grows, and what to do with the queue's target
_numbers = itertools.count()
_live: weakref.WeakValueDictionary[int, Worker] = weakref.WeakValueDictionary()  # in the order in which they were made
_processes: set[int] = set()  # whose end does what is left
_HANGS = (
    "ds_silent: %s has not returned for %.0f s: what it is to write waits in memory, the training and the other sinks "
    "go on"
)
_GONE = "ds_silent: the thread that writes the records is gone (%s: %s); the training thread writes from now on"


class WorkQueue:
    """What waits for one target, in order. Its first entry is under way while ``since`` is known.

    ``ended`` tells whether nothing more is to be done with the target.
    """

    def __init__(self, target: Any = None, name: str = "", ended: Callable[[], bool] = lambda: False) -> None:
        self.target, self.name, self.ended = target, name, ended
        self.entries: deque[_Entry] = deque()
        self.since: float | None = None
        self.stuck = False

    def has_done(self, number: int) -> bool:
        """Tell whether the entry of this number is behind it."""
        return not self.entries or self.entries[0][0] > number


class Worker:
    """Serves its queues from one daemon thread; where there is none (``alone``), the caller serves.

    An urgent entry is done by the first queue first. ``keeps``: keep every entry for the queues that :meth:`add` will
    bring. ``gone``: what is warned of where there is no thread any more. ``patient``: no entry counts as stuck, and a
    fork waits longer.
    """

    def __init__(
        self, name: str, queues: Iterable[WorkQueue], *, keeps: bool = False, gone: str = "", patient: bool = False
    ) -> None:
        self.queues = list(queues)
        self.alone = False
        self.opened = threading.Event()  # an entry may wait for it; nobody waits for an entry that does
        self._name, self._gone, self._patient = name, gone, patient
        self._kept: list[_Entry] | None = [] if keeps else None
        self._changed = threading.Condition()  # guards all that is here
        self._thread: threading.Thread | None = None  # that serves; one that is stuck is not it any more
        self._number = 0  # of the newest entry
        self._urgent = 0  # up to which the first queue comes first
        self._forking = False
        self._process = os.getpid()
        _live[next(_numbers)] = self
        _drain_at_exit()

    @property
    def is_parent(self) -> bool:
        """Whether this is no forked child, which does nothing."""
        return os.getpid() == self._process

    def add(self, queues: Sequence[WorkQueue]) -> None:
        """Put queues before the others; they first get what was put so far. Once, after ``keeps=True``."""
        if not self.is_parent:
            return
        with self._changed:
            kept, self._kept = self._kept or (), None
            for queue in queues:
                queue.entries.extend(kept)
            self.queues[:0] = queues
            self._employ()
        self._serve_alone()

    def put(self, act: Callable[[Any], None], urgent: bool = False) -> int:
        """Append an entry to every queue, and return its number."""
        if not self.is_parent:
            return 0
        with self._changed:
            self._number += 1
            entry = self._number, act
            if self._kept is not None:
                self._kept.append(entry)
            for queue in self.queues:
                queue.entries.append(entry)
            self._urgent = self._number if urgent else self._urgent
            self._changed.notify_all()
            self._employ()
        self._serve_alone()
        return entry[0]

    def drain(self) -> None:
        """Wait until everything is done but by what is stuck."""
        self.opened.set()
        number = self._number
        self.wait(lambda: all(queue.stuck or queue.has_done(number) for queue in self.queues), math.inf)

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until ``done()``, for so many seconds at most."""
        until = monotonic() + seconds
        while self.is_parent:
            self._serve_alone()
            with self._changed:
                self._look_for_stuck()
                left = until - monotonic()
                if done() or left <= 0.0:
                    return
                self._changed.wait(min(left, 1.0))

    def end(self) -> list[WorkQueue]:
        """Take nothing more, and return the queues that were left with entries."""
        if not self.is_parent:  # its copy of the lock may never be opened
            return []
        with self._changed:
            queues, self.queues, self._kept = self.queues, [], None
            self._changed.notify_all()
        return [queue for queue in queues if queue.entries]

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _look_for_stuck(self) -> None:
        for queue in () if self._patient else self.queues:
            if queue.since is not None and not queue.stuck and monotonic() - queue.since > STUCK:
                queue.stuck, self._thread = True, None
                logger.warning(_HANGS, queue.name, STUCK)
        self._employ()

    def _employ(self) -> None:
        """Start a thread, where there is work and none that does it."""
        if self.alone or self._thread is not None or self._next() is None:
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or the interpreter is ending
            self._go_on_alone(error)
        else:
            self._thread = thread

    def _go_on_alone(self, error: BaseException) -> None:
        self.alone, self._thread = True, None
        self._changed.notify_all()
        if self._gone:
            logger.warning(self._gone, type(error).__name__, error)

    def _serve_alone(self) -> None:
        if self.alone:
            self._serve(0.0)

    def _run(self) -> None:
        try:
            self._serve(_IDLE)
        except BaseException as error:  # a sink's SystemExit, or an error of this file: nobody else would hear of it
            with self._changed:
                if self._thread is threading.current_thread():
                    self._go_on_alone(error)

    def _serve(self, patience: float) -> None:
        """Work until there has been nothing to do for so many seconds, or another thread does it."""
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None or not self.queues, patience)
                serves = self.alone or self._thread is me
                queue = self._next() if serves else None
                if queue is None:
                    self._thread = None if serves else self._thread
                    self._employ()  # what a thread that was stuck leaves
                    return
                queue.since = monotonic()
                act = queue.entries[0][1]
            try:
                act(queue.target)
            finally:
                with self._changed:
                    queue.entries.popleft()
                    queue.since, queue.stuck = None, False
                    if queue.ended():
                        self.queues = [other for other in self.queues if other is not queue]
                    self._changed.notify_all()

    def _next(self) -> WorkQueue | None:
        """Return the queue with the oldest entry; the first queue, up to what is urgent."""
        free = [queue for queue in self.queues if queue.entries and queue.since is None]
        if not free or self._forking:
            return None
        if free[0] is self.queues[0] and not free[0].has_done(self._urgent):
            return free[0]
        return min(free, key=lambda queue: queue.entries[0][0])

    # -- a fork --------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no entry from now on; wait for the one that is under way."""
        self.opened.set()
        with self._changed:
            if not self.alone and self._thread is not threading.current_thread():  # else it is a sink that forks
                self._forking = True
                seconds = PATIENT_FORK if self._patient else WAIT
                self._changed.wait_for(lambda: all(q.stuck or q.since is None for q in self.queues), seconds)

    def resume(self) -> None:
        with self._changed:
            self._forking = False
            self._changed.notify_all()
            self._employ()


def _before_fork() -> None:
    for worker in reversed(list(_live.values())):  # one that was made later may hand something to one before it
        if worker.is_parent:
            worker.pause()


def _after_fork() -> None:
    for worker in list(_live.values()):
        if worker.is_parent:
            worker.resume()


def _drain_at_exit() -> None:
    """Not by ``atexit``, which a child that multiprocessing has started does not run."""
    if os.getpid() not in _processes:
        _processes.add(os.getpid())
        Finalize(None, _drain_all, exitpriority=1)


def _drain_all() -> None:
    for worker in reversed(list(_live.values())):
        worker.drain()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


class OneTask:
    """A thread that does one thing at a time; what breaks there is raised where it is waited for.

    The thread runs Python, and so slows down the training's thread wherever that does the same. It begins when
    :meth:`opens` is called, as a backward begins, or when somebody waits for it, or ``LATEST`` seconds later.
    """

    def __init__(self, name: str) -> None:
        self._worker = Worker(name, [WorkQueue()], patient=True)
        self._broke: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way."""
        return not any(queue.entries for queue in self._worker.queues)

    def begin(self, act: Callable[[], None]) -> None:
        """Begin behind what is under way, and wait for that; without a thread, do it."""
        self.wait()
        self._worker.opened.clear()
        self._worker.put(lambda _: self._do(act))
        if self._worker.alone:
            self.wait()

    def opens(self) -> None:
        """Let what is under way begin."""
        self._worker.opened.set()

    def _do(self, act: Callable[[], None]) -> None:
        if not self._worker.alone:
            self._worker.opened.wait(LATEST)
        try:
            act()
        except BaseException as error:
            self._broke = error

    def wait(self) -> None:
        """Wait for what is under way, and raise what has broken."""
        self._worker.drain()
        broke, self._broke = self._broke, None
        if broke is not None:
            raise broke

    def end(self) -> None:
        """Begin nothing more."""
        self._worker.end()


class Background(Sink):
    """Hands everything to every sink, from a thread of its own.

    An event that is an error is waited for (``WAIT`` seconds at most) until the first sink, that of ``events.jsonl``,
    has written it: the process may die next. After ``more=True``, :meth:`add` may put sinks before the others.
    """

    def __init__(self, sinks: Iterable[Sink], *, more: bool = False) -> None:
        self._worker = Worker("ds_silent writes", map(_queue_of, sinks), keeps=more, gone=_GONE)
        self._patience = WAIT  # seconds that this step may still wait

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(sink for queue in self._worker.queues for sink in queue.target.sinks)

    def add(self, sinks: Iterable[Sink]) -> None:
        """Put sinks before the others; they first get what was written so far. Once, after ``more=True``."""
        self._worker.add([_queue_of(sink) for sink in sinks])

    def write(self, record: StepRecord) -> None:
        self._patience = WAIT
        self._put(lambda sink: sink.write(record))

    def write_scores(self, scores: Scores) -> None:
        self._put(lambda sink: sink.write_scores(scores))

    def write_event(self, event: Event) -> None:
        urgent = event.severity == "error"
        number = self._put(lambda sink: sink.write_event(event), urgent)
        if urgent:
            self._wait_in_step(lambda: all(q.stuck or q.has_done(number) for q in self._worker.queues[:1]))

    def flush(self) -> None:
        self._put(lambda sink: sink.flush())
        self.drain()

    def drain(self) -> None:
        """Wait until everything is written, though not yet on disk."""
        self._worker.drain()

    def close(self) -> None:
        number = self._put(lambda sink: sink.close())
        self.drain()
        self._worker.wait(lambda: all(queue.has_done(number) for queue in self._worker.queues), STUCK)
        for queue in self._worker.end():
            logger.warning("ds_silent: %s is stuck: its last %d entries are lost", queue.name, len(queue.entries))

    def _put(self, act: Callable[[Sink], None], urgent: bool = False) -> int:
        """Queue an entry for every sink; its number."""
        self._wait_in_step(lambda: all(q.stuck or len(q.entries) < LONGEST for q in self._worker.queues))
        return self._worker.put(act, urgent)

    def _wait_in_step(self, done: Callable[[], bool]) -> None:
        began = monotonic()
        self._worker.wait(done, self._patience)
        self._patience = max(0.0, self._patience - (monotonic() - began))


def _queue_of(sink: Sink) -> WorkQueue:
    target = FanOut([sink])
    return WorkQueue(target, type(sink).__name__, ended=lambda: not target.sinks)  # dropped, or closed
