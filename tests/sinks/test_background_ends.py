"""The thread that writes, at the end of a process and across forks: nothing is lost, nothing hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_silent.sinks import worker as module
from ds_silent.sinks.jsonl import JsonlSink, read_event_records
from ds_silent.sinks.worker import Background
from tests.sinks.example_records import empty_record, full_record
from tests.sinks.recording import SLACK, Gate, Recorder, note, seconds_of

ROOT = Path(__file__).resolve().parents[2]


# -- the end of a process ----------------------------------------------------------------------------------------------

HEAD = """
import sys, time
from ds_silent.sinks.worker import Background
from ds_silent.sinks.jsonl import JsonlSink
from tests.sinks.example_records import full_record
from tests.sinks.recording import Recorder, note
sinks = Background([JsonlSink(sys.argv[1]), Recorder(lambda call: time.sleep(0.002))])
"""


def program(text: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + text, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def steps_in(directory: Path) -> list[int]:
    """Raw lines: a reader would drop what is there twice."""
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def child_that_ends(directory: str) -> None:
    sinks = Background([JsonlSink(directory), Recorder(lambda call: time.sleep(0.001))])
    for step in range(1, 200):
        sinks.write(full_record(step, layers=()))


@pytest.mark.parametrize("started", ["by itself", "by multiprocessing"])
def test_a_process_that_just_ends_has_written_everything(started: str, tmp_path: Path) -> None:
    if started == "by itself":
        text = """
for step in range(1, 200):
    sinks.write(full_record(step, layers=()))
sinks.write_event(note(199))
sys.exit(3)
"""
        with program(text, tmp_path) as process:
            assert process.wait(60) == 3
        assert [one.step for one in read_event_records(tmp_path / "events.jsonl")] == [199]
    else:
        child = multiprocessing.get_context("fork").Process(target=child_that_ends, args=(str(tmp_path),))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    assert steps_in(tmp_path) == list(range(1, 200))


def test_kill_9_takes_the_last_lines_at_most_and_no_error(tmp_path: Path) -> None:
    text = """
step = 0
while True:
    step += 1
    sinks.write(full_record(step, layers=()))
    if step % 50 == 0:
        sinks.write_event(note(step, severity="error"))
        print(step, flush=True)
"""
    process = program(text, tmp_path)
    assert process.stdout is not None
    for _ in range(10):
        told = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()
    *whole, last = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert last == b""
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
    assert len(whole) >= told == 500  # the error came after them
    assert [one.step for one in read_event_records(tmp_path / "events.jsonl")][:10] == list(range(50, 501, 50))


# -- forks -------------------------------------------------------------------------------------------------------------


def forked(act: Callable[[], None]) -> int:
    """Exit status of a child; one that hangs is ended by an alarm."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            act()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_child_neither_writes_nor_hangs_and_the_parent_goes_on(tmp_path: Path) -> None:
    other = Recorder(lambda call: time.sleep(0.001))
    sinks = Background([JsonlSink(tmp_path), other])

    def uses() -> None:
        sinks.write(empty_record(1000))
        sinks.write_event(note(1000, severity="error"))
        sinks.flush()
        sinks.add([Recorder()])
        sinks.drain()
        sinks.close()
        module._drain_all()
        os._exit(0)

    for step in range(1, 10):
        sinks.write(full_record(step, layers=()))
        assert forked(uses) == 0
    sinks.close()
    assert steps_in(tmp_path) == list(range(1, 10))
    assert other.calls == [*(f"write {step}" for step in range(1, 10)), "close"]
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_no_fork_in_the_middle_of_a_write(bounds: Callable[..., None]) -> None:
    """Where a library holds a lock that the child could never open."""
    bounds(wait=60.0)
    lock = threading.Lock()

    def locks(call: str) -> None:
        with lock:
            time.sleep(0.01)

    def takes_the_lock() -> None:
        os._exit(0 if lock.acquire(timeout=5) else 1)

    sink = Recorder(locks)
    sinks = Background([sink])
    for step in range(15):
        sinks.write(empty_record(2 * step))
        sinks.write(empty_record(2 * step + 1))
        time.sleep(0.003)  # it is in the middle of one
        assert forked(takes_the_lock) == 0
    sinks.close()
    assert sink.calls == [*(f"write {step}" for step in range(30)), "close"]


def test_a_fork_waits_for_a_hanging_sink_no_longer_than_the_bound(bounds: Callable[..., None]) -> None:
    bounds(wait=0.2)
    gate = Gate()
    sink = Recorder(gate)
    sinks = Background([sink])
    sinks.write(empty_record(1))
    assert gate.reached.wait(10)
    assert seconds_of(lambda: forked(lambda: os._exit(0))) < 0.2 + SLACK
    gate.opened.set()
    sinks.close()
    assert sink.calls == ["write 1", "close"]


def test_a_sink_that_forks_does_not_wait_for_itself(bounds: Callable[..., None]) -> None:
    bounds(wait=60.0)

    def forks(call: str) -> None:
        assert forked(lambda: os._exit(0)) == 0

    sink = Recorder(forks)
    sinks = Background([sink])
    sinks.write(empty_record(1))
    assert seconds_of(sinks.close) < 30.0
    assert sink.calls == ["write 1", "close"]
