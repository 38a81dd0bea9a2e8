"""Judging beside the training: the writing rank's recorder, a step behind, on a thread of its own.

    recorder = DeferredRecorder(inner)
    recorder.step(gathered, context, drift, told, wait=False)    # begins; the step before has ended
    recorder.deliver()                                           # callbacks of what has been found meanwhile

A step's judging has the time until the next measured step. Who comes earlier waits for it, so that there is never more
than one under way, and what is found does not depend on who was faster. Whatever else is asked of the recorder waits
too. Callbacks run on the training's thread, between two steps, as they would without this one.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ds_silent.capture.conduct import Unlike
from ds_silent.distributed.places import Places
from ds_silent.exchange.observation import Gathered
from ds_silent.measure.evidence import ResponseLog
from ds_silent.measure.record import Context
from ds_silent.observing.recorder import Recorder, WritingRecorder
from ds_silent.records import Event, Repair, StepRecord
from ds_silent.replicas.compare import Drift

LONGEST = 10.0
"""Seconds that a fork waits for the judging, which may hold a lock that the child could never open."""
_live: weakref.WeakSet[DeferredRecorder] = weakref.WeakSet()


class DeferredRecorder(Recorder):
    """What :class:`ds_silent.observing.recorder.WritingRecorder` is, one measured step later.

    Attributes:
        unlike: what ranks do not do alike, from the next step on.
        wants_micro_batches: as :meth:`finish` has found it.
        ends: None: where an event may end the training, it is not judged here.
    """

    writes = True

    def __init__(self, inner: WritingRecorder):
        self.wants_micro_batches = self._parted = False
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, "ds_silent judges")
        self._under_way: Future[None] | None = None
        self._found: deque[Event] = deque()
        self._telling = False
        self._listeners: list[Callable[[Event], None]] = []
        inner.on_event(self._found.append)
        _live.add(self)

    # -- beside the training -------------------------------------------------------------------------------------------

    def step(
        self, gathered: Callable[[], Gathered], context: Context, drift: Drift | None, told: ResponseLog, wait: bool
    ) -> None:
        """Begin what the inner one does with a step, behind the step before."""
        try:
            self._wait()
            self._inner.unlike = self.unlike
            try:
                self._under_way = self._thread.submit(self._inner.step, gathered, context, drift, told, wait)
            except RuntimeError:  # no thread can be started any more: there are too many, or the interpreter is ending
                self._thread.shutdown(wait=False, cancel_futures=True)  # it has kept the step for a thread to come
                self._inner.step(gathered, context, drift, told, wait)
        finally:
            self._tell()  # behind it: a callback that flushes begins the next step

    def finish(self) -> None:
        """A measured step is about to send what this rank wants: by all that was begun before it."""
        inner = self._end()
        self.wants_micro_batches, self._parted = inner.wants_micro_batches, inner.take_parted()

    def take_parted(self) -> bool:
        """As :meth:`finish` has found it."""
        parted, self._parted = self._parted, False
        return parted

    def deliver(self) -> None:
        """Call the callbacks for what has been found, and raise what has broken, without waiting for either."""
        if self._under_way is not None and self._under_way.done():
            self._end()

    def _end(self) -> WritingRecorder:
        """Wait for what is under way; the inner one is nobody else's then."""
        try:
            self._wait()
        finally:
            self._tell()
        return self._inner

    def _wait(self) -> None:
        under_way = self._under_way
        if under_way is not None:
            wait([under_way])  # where that is interrupted, it is under way still
            self._under_way = None
            under_way.result()

    def _tell(self) -> None:
        if self._telling:  # a callback asks for something: what else was found comes after it
            return
        self._telling = True
        try:
            while self._found:
                event = self._found.popleft()
                for listener in self._listeners:
                    self._inner.call(listener, event)
        finally:
            self._telling = False

    def before_fork(self) -> None:
        """Nothing runs beside a fork."""
        if self._under_way is not None:
            wait([self._under_way], LONGEST)

    # -- what waits ----------------------------------------------------------------------------------------------------

    @property
    def last_record(self) -> StepRecord | None:  # type: ignore[override]
        return self._end().last_record

    @property
    def places(self) -> Places | None:
        return self._end().places

    @places.setter
    def places(self, places: Places | None) -> None:
        self._end().places = places

    def settle(self, drift: Drift | None, step: int | None = None) -> None:
        self._end().settle(drift, step)
        self._tell()

    def end_unlike(self, unlike: tuple[Unlike, ...], step: int) -> None:
        self._end().end_unlike(unlike, step)
        self._tell()

    def repairs(self, repairs: tuple[Repair, ...]) -> None:
        self._end().repairs(repairs)
        self._tell()

    def report(self, event: Event) -> None:
        try:
            self._end()
        finally:  # it may be about what broke there
            self._inner.report(event)
            self._tell()

    def on_event(self, function: Callable[[Event], None]) -> None:
        self._end()
        self._listeners.append(function)

    def flush(self) -> None:
        self._end().flush()

    def close(self) -> None:
        try:
            self._end()
        finally:
            self._inner.close()
            self._thread.shutdown(wait=False)

    def state_dict(self, rows_waiting: bool) -> dict[str, Any]:
        return self._end().state_dict(rows_waiting)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._end().load_state_dict(state)


def _before_fork() -> None:
    for recorder in tuple(_live):
        recorder.before_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
