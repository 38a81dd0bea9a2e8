"""Records are written by a thread: none is lost or out of order, and no step waits longer than is stated."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_silent.sinks import worker as module
from ds_silent.sinks.base import FanOut
from ds_silent.sinks.jsonl import JsonlSink, read_event_records, read_records
from ds_silent.sinks.worker import Background, OneTask
from tests.sinks.example_records import empty_record, full_record
from tests.sinks.recording import SLACK, Gate, Recorder, note, run_of, seconds_of


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def until(done: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + 10
    while not done() and time.monotonic() < end:
        act()
        time.sleep(0.01)


# -- healthy sinks -----------------------------------------------------------------------------------------------------


def test_every_sink_gets_everything_in_order_from_one_other_thread() -> None:
    first, second = Recorder(), Recorder()
    sinks = Background([first, second])
    expected = run_of(sinks, range(1, 1001))
    sinks.flush()
    assert first.calls == second.calls == [*expected, "flush"]
    expected = first.calls + run_of(sinks, range(1001, 1010))
    sinks.close()
    assert first.calls == second.calls == [*expected, "close"]
    assert len(first.threads) == 1
    assert first.threads == second.threads != {threading.get_ident()}
    sinks.write(empty_record(2000))  # after the end: as a closed fan-out, nothing
    sinks.flush()
    sinks.close()
    assert first.calls[-1] == "close"


def test_what_comes_later_gets_everything_from_the_beginning() -> None:
    console, lines = Recorder(), Recorder()
    sinks = Background([console], more=True)
    sinks.write_event(note(0, severity="error"))
    expected = ["event 0 drift", *run_of(sinks, range(1, 20))]
    sinks.drain()
    assert console.calls == expected
    sinks.add([lines])
    expected += run_of(sinks, range(20, 40))
    sinks.close()
    assert lines.calls == console.calls == [*expected, "close"]


def test_the_thread_ends_when_it_has_nothing_to_do_and_another_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE", 0.01)
    before, sink = threading.active_count(), Recorder()
    sinks = Background([sink])
    for step in range(3):
        sinks.write(empty_record(step))
        sinks.drain()
        until(lambda: threading.active_count() <= before)
        assert threading.active_count() == before
    assert sink.calls == ["write 0", "write 1", "write 2"]


def test_a_sink_that_raises_is_dropped_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    def fails(call: str) -> None:
        if call == "write 3":
            raise OSError(28, "No space left on device")

    broken, sound = Recorder(fails), Recorder()
    sinks = Background([broken, sound])
    expected = run_of(sinks, range(1, 20))
    sinks.close()
    assert sound.calls == [*expected, "close"]
    assert broken.calls == ["write 1", "scores 1", "write 2", "scores 2", "close"]
    (sentence,) = warnings(caplog)
    assert sentence.startswith("ds_silent: Recorder stops writing for the rest of this run, the training goes on: ")


# -- slow and hanging sinks --------------------------------------------------------------------------------------------


def test_a_full_queue_costs_a_step_no_more_than_the_bound_and_loses_nothing(bounds: Callable[..., None]) -> None:
    bounds(longest=8, wait=0.2)
    gate = Gate()
    slow, sound = Recorder(gate), Recorder()
    sinks = Background([sound, slow])
    seconds, expected = [], []
    for step in range(1, 9):
        seconds.append(seconds_of(lambda step=step: expected.extend(run_of(sinks, range(step, step + 1)))))  # type: ignore[misc]
    gate.opened.set()
    sinks.flush()  # of a queue that is fuller than full
    assert slow.calls == sound.calls == [*expected, "flush"]
    assert max(seconds) < 0.2 + SLACK
    assert sum(second > 0.19 for second in seconds) >= 4  # it did wait, before it grew
    sinks.close()


def test_a_slow_sink_slows_the_training_down_before_the_queue_grows(bounds: Callable[..., None]) -> None:
    bounds(longest=8, wait=60.0)
    slow = Recorder(lambda call: time.sleep(0.005))
    sinks = Background([slow])
    longest, expected = 0, []
    for step in range(1, 60):
        expected += run_of(sinks, range(step, step + 1))
        longest = max(longest, len(sinks._worker.queues[0].entries))
    sinks.close()
    assert slow.calls == [*expected, "close"]
    assert longest <= 8


def test_a_sink_that_hangs_takes_no_other_with_it(
    bounds: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bounds(longest=8, wait=0.2, stuck=0.5)
    gate = Gate()
    sound, hangs, other = Recorder(), Recorder(gate), Recorder()
    sinks = Background([sound, hangs, other])
    expected = run_of(sinks, range(1, 3))
    assert gate.reached.wait(10)
    assert seconds_of(sinks.flush) < 0.5 + SLACK
    expected.append("flush")
    assert sound.calls == other.calls == expected
    (sentence,) = warnings(caplog)
    assert "Recorder has not returned for 0 s" in sentence
    seconds = seconds_of(lambda: expected.extend(run_of(sinks, range(3, 100))))
    assert seconds < 0.2 * 97 / 2  # nobody waits for it any more
    sinks.flush()
    expected.append("flush")
    assert sound.calls == other.calls == expected
    assert hangs.calls == []
    gate.opened.set()
    until(lambda: len(hangs.calls) >= len(expected), sinks.drain)
    assert hangs.calls == expected  # what has waited, in order
    assert len(warnings(caplog)) == 1
    sinks.close()
    assert hangs.calls == [*expected, "close"]


def test_a_sink_that_hangs_until_the_end_is_told_with_what_is_lost(
    bounds: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bounds(stuck=0.5)
    gate = Gate()
    sound, hangs = Recorder(), Recorder(gate)
    sinks = Background([sound, hangs])
    expected = run_of(sinks, range(1, 5))
    assert seconds_of(sinks.close) < 1.0 + SLACK
    assert sound.calls == [*expected, "close"]
    assert warnings(caplog)[-1] == "ds_silent: Recorder is stuck: its last 9 entries are lost"
    gate.opened.set()


# -- events ------------------------------------------------------------------------------------------------------------


def test_an_error_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    sinks = Background([JsonlSink(tmp_path), Recorder()])
    for step in range(1, 100):
        sinks.write(empty_record(step))
        if step % 10 == 0:
            sinks.write_event(note(step, severity="error"))
            assert [one.step for one in read_event_records(tmp_path / "events.jsonl")] == list(range(10, step + 1, 10))
            assert [one.step for one in read_records(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    sinks.close()


def test_an_error_overtakes_what_the_other_sinks_wait_for(bounds: Callable[..., None]) -> None:
    bounds(wait=60.0)
    order: list[str] = []
    gate = Gate()
    lines, slow = Recorder(lambda call: order.append(f"lines {call}")), Recorder(order.append)
    sinks = Background([lines, slow, Recorder(gate)])
    for step in range(1, 4):
        sinks.write(empty_record(step))
    assert gate.reached.wait(10)  # the thread is at the first record in the last sink
    caller = threading.Thread(target=sinks.write_event, args=(note(3, severity="error"),))
    caller.start()
    while len(sinks._worker.queues[0].entries) < 3:
        time.sleep(0.001)
    gate.opened.set()
    caller.join(60)
    assert order[:5] == ["lines write 1", "write 1", "lines write 2", "lines write 3", "lines event 3 drift"]
    sinks.close()
    assert slow.calls == lines.calls == ["write 1", "write 2", "write 3", "event 3 drift", "close"]


def test_an_error_waits_for_slow_lines_no_longer_than_the_bound(bounds: Callable[..., None]) -> None:
    bounds(wait=0.2)
    gate = Gate()
    slow = Recorder(gate)
    sinks = Background([slow])
    sinks.write(empty_record(1))
    assert 0.19 < seconds_of(lambda: [sinks.write_event(note(1, severity="error")) for _ in range(30)]) < 0.2 + SLACK
    gate.opened.set()
    sinks.close()
    assert slow.calls == ["write 1", *["event 1 drift"] * 30, "close"]


# -- without the thread ------------------------------------------------------------------------------------------------


def test_a_thread_that_dies_is_told_and_the_caller_writes(caplog: pytest.LogCaptureFixture) -> None:
    def leaves(call: str) -> None:
        if call == "write 3" and threading.current_thread() is not threading.main_thread():
            raise SystemExit(7)

    leaver, sound = Recorder(leaves), Recorder()
    sinks = Background([leaver, sound])
    expected = run_of(sinks, range(1, 30))
    sinks.flush()
    expected += ["flush", *run_of(sinks, range(30, 60))]
    assert sound.calls == expected  # at once
    sinks.close()
    assert sound.calls == [*expected, "close"]
    assert leaver.calls == [call for call in sound.calls if call != "write 3"]
    assert warnings(caplog) == [
        "ds_silent: the thread that writes the records is gone (SystemExit: 7); the training thread writes from now on"
    ]


def interrupted(call: str) -> None:
    raise KeyboardInterrupt


def test_where_no_thread_can_be_started_the_caller_writes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    sink = Recorder()
    sinks = Background([sink])
    expected = run_of(sinks, range(1, 30))
    assert sink.calls == expected
    assert sink.threads == {threading.get_ident()}
    sinks.close()
    assert len(warnings(caplog)) == 1
    with pytest.raises(KeyboardInterrupt):  # and an interrupt is not swallowed there
        Background([Recorder(interrupted)]).write(empty_record(1))


# -- the same files ----------------------------------------------------------------------------------------------------


def test_the_files_are_those_that_the_caller_would_write(tmp_path: Path) -> None:
    for name, kind in (("caller", FanOut), ("thread", Background)):
        sinks = kind([JsonlSink(tmp_path / name)])
        for step in range(1, 120):
            sinks.write(full_record(step, noise_scale=float(step)))
            sinks.write_event(note(step, severity="error" if step % 9 == 0 else "info"))
        sinks.close()
        files = [f"{file}.jsonl" for file in ("events", "layers", "matrices", "metrics")]
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == files
    for path in (tmp_path / "caller").iterdir():
        assert path.read_bytes() == (tmp_path / "thread" / path.name).read_bytes()


# -- one task ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lets", [OneTask.opens, OneTask.wait, lambda task: task._worker.pause()])
def test_a_task_begins_when_it_may_or_somebody_waits_for_it(lets: Callable[[OneTask], None]) -> None:
    task, done = OneTask("judges"), threading.Event()
    task.begin(done.set)
    assert not done.wait(0.3)
    lets(task)
    assert done.wait(5)
    task.begin(done.clear)  # the next one waits anew
    assert done.is_set()
    task._worker.resume()
    task.wait()
    assert not done.is_set()
    task.end()


def test_a_task_that_nobody_lets_begin_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATEST", 0.2)
    task, done = OneTask("judges"), threading.Event()
    began = time.monotonic()
    task.begin(done.set)
    assert done.wait(5)
    assert time.monotonic() - began >= 0.2
    task.end()
