"""Judging beside the training, without one: what judges a step is a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ds_silent.config import SilentConsistencyConfig
from ds_silent.measure.evidence import ResponseLog
from ds_silent.observing.recorder import Recorder
from ds_silent.records import Event
from tests.sinks.recording import Recorder as RecordingSink


class Judging(Recorder):
    """Finds ``events`` in every step, once ``may_end`` is set."""

    def __init__(self, events: int = 0) -> None:
        nothing: Any = SimpleNamespace(wants_micro_batches=False)
        sink = RecordingSink(lambda call: self.flushed_in.append(self._busy) if call == "flush" else None)
        config = SilentConsistencyConfig.model_validate({"detectors": {"enabled": False}})
        super().__init__(sink, config, nothing, nothing, (0, 1), beside=True)
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()
        self.steps: list[int] = []
        self.flushed_in: list[bool] = []  # whether a step was under way
        self._events, self._busy = events, False

    def _write(self, gathered: Any, context: Any, drift: Any, told: ResponseLog, wait: bool, unlike: Any) -> None:
        self._busy = True
        self.began.set()
        assert self.may_end.wait(20.0)
        self.steps.append(context)
        self._newest = context
        for number in range(self._events):
            self._report(event(context, str(number)))
        self._busy = False


def event(step: int, message: str) -> Event:
    return Event(step, "drift", "info", (), None, None, None, message, "")


def begin(recorder: Judging, step: int) -> None:
    recorder.step(cast(Any, None), cast(Any, step), None, ResponseLog(), wait=False)


@pytest.fixture
def made() -> Iterator[Callable[[Judging], Judging]]:
    recorders = []

    def make(inner: Judging) -> Judging:
        recorders.append(inner)
        return recorders[-1]

    yield make
    for recorder in recorders:
        recorder.close()


def test_events_come_in_order_to_a_callback_that_looks_at_the_newest_record(
    made: Callable[[Judging], Judging],
) -> None:
    recorder = made(Judging(events=3))
    told: list[Any] = []
    recorder.on_event(lambda found: told.append((recorder.last_record, found.message)))
    recorder.on_event(lambda found: told.append(found.message))
    begin(recorder, 1)
    recorder.finish()
    assert told == [(1, "0"), "0", (1, "1"), "1", (1, "2"), "2"]


def test_what_is_interrupted_while_it_waits_leaves_the_judging_to_its_thread(
    made: Callable[[Judging], Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does where the script catches it and closes the observer."""
    inner = Judging()
    recorder = made(inner)
    inner.may_end.clear()
    begin(recorder, 1)
    assert inner.began.wait(20.0)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(threading.Condition, "wait", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            recorder.flush()
    threading.Timer(0.2, inner.may_end.set).start()
    recorder.flush()
    assert (inner.steps, inner.flushed_in) == ([1], [False])


def _interrupt(*args: Any, **named: Any) -> bool:
    raise KeyboardInterrupt


def test_a_step_for_which_no_thread_starts_is_judged_once(
    made: Callable[[Judging], Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Judging()
    recorder = made(inner)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        begin(recorder, 1)
    for step in (2, 3):
        begin(recorder, step)
    recorder.flush()
    assert inner.steps == [1, 2, 3]
