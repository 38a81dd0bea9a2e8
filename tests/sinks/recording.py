"""A sink that remembers what it was given, and what a training hands out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ds_silent.records import Event, Scores, StepRecord
from tests.sinks.example_records import empty_record, event


class Recorder:
    """Keeps what it is given, in order; ``act`` is done before each call."""

    def __init__(self, act: Callable[[str], None] = lambda call: None) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.act = act

    def _call(self, name: str) -> None:
        self.act(name)
        self.threads.add(threading.get_ident())
        self.calls.append(name)

    def write(self, record: StepRecord) -> None:
        self._call(f"write {record.step}")

    def write_scores(self, scores: Scores) -> None:
        self._call(f"scores {scores.step}")

    def write_event(self, event: Event) -> None:
        self._call(f"event {event.step} {event.kind}")

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")


class Gate:
    """Lets no call through while it is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, call: str) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def note(step: int, kind: str = "drift", severity: str = "info") -> Event:
    return replace(event(step, kind), severity=severity)  # type: ignore[arg-type]


def run_of(sinks: Any, steps: range) -> list[str]:
    """What a training hands out, and what each sink should have been called with."""
    calls = []
    for step in steps:
        sinks.write(empty_record(step))
        sinks.write_scores(Scores(step, ()))
        calls += [f"write {step}", f"scores {step}"]
        if step % 7 == 0:
            sinks.write_event(note(step))
            calls.append(f"event {step} drift")
    return calls


def seconds_of(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


SLACK = 3.0  # seconds by which a busy machine may be late
