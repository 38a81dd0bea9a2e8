"""A sink that breaks is dropped with one warning; the training and the other sinks never notice."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_silent.records import Event, Scores, StepRecord
from ds_silent.sinks import FanOut, SinkError, open_files
from ds_silent.sinks.jsonl import JsonlSink, read_metrics
from tests.sinks.example_records import empty_record, event, full_record


class Recorder:
    """A sink that keeps what it is given, and fails where it is told to."""

    def __init__(self, fail_in: str = "", error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._fail_in = fail_in
        self._error = error or OSError(28, "No space left on device")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] == self._fail_in:
            raise self._error

    def write(self, record: StepRecord) -> None:
        self._call(f"write {record.step}")

    def write_scores(self, scores: Scores) -> None:
        self._call(f"write_scores {scores.step}")

    def write_event(self, event: Event) -> None:
        self._call(f"write_event {event.step}")

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")


def use(sinks: FanOut) -> None:
    sinks.write(empty_record(1))
    sinks.write_event(event(1))
    sinks.write_scores(Scores(1, ()))
    sinks.flush()
    sinks.write(empty_record(2))
    sinks.close()


ALL = ["write 1", "write_event 1", "write_scores 1", "flush", "write 2", "close"]


@pytest.mark.parametrize(
    ("fail_in", "calls"),
    [
        ("", ALL),
        ("write", ["write 1", "close"]),
        ("write_event", ["write 1", "write_event 1", "close"]),
        ("write_scores", ["write 1", "write_event 1", "write_scores 1", "close"]),
        ("flush", ["write 1", "write_event 1", "write_scores 1", "flush", "close"]),
        ("close", [*ALL, "close"]),
    ],
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broken"), KeyError("x")])
def test_a_failing_sink_is_dropped_with_one_warning(
    fail_in: str, calls: list[str], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound, other = Recorder(fail_in, error), Recorder(), Recorder()
    with caplog.at_level(logging.WARNING, logger="ds_silent"):
        use(FanOut([sound, broken, other]))
    assert sound.calls == other.calls == ALL
    assert broken.calls == calls
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (1 if fail_in else 0)
    if fail_in:
        assert warnings[0] == (
            f"ds_silent: Recorder stops writing for the rest of this run, the training goes on: {error}"
        )


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_swallowed(stop: type[BaseException]) -> None:
    class Interrupted(Recorder):
        def write(self, record: StepRecord) -> None:
            raise stop

    with pytest.raises(stop):
        FanOut([Interrupted()]).write(empty_record())


def test_a_fan_out_is_a_sink() -> None:
    inner = Recorder()
    use(FanOut([FanOut([inner])]))
    assert inner.calls == ALL


def names(sinks: FanOut) -> list[str]:
    return [type(sink).__name__ for sink in sinks.sinks]


def test_the_configuration_decides_which_sinks_open(tmp_path: Path) -> None:
    plain = open_files(tmp_path / "a", tensorboard=False)
    assert names(plain) == ["JsonlSink", "PerRankSink", "FactsSink"]
    plain.close()
    assert not (tmp_path / "a" / "tensorboard").exists()
    every = open_files(tmp_path / "b", tensorboard=True)
    assert names(every) == ["JsonlSink", "PerRankSink", "FactsSink", "TensorBoardSink"]
    every.close()
    assert (tmp_path / "b" / "tensorboard").is_dir()


def spoil_root(directory: Path) -> None:
    directory.write_text("a file")


def spoil_tensorboard(directory: Path) -> None:
    directory.mkdir()
    (directory / "tensorboard").write_text("a file")


@pytest.mark.parametrize("spoil", [spoil_root, spoil_tensorboard])
def test_an_output_dir_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path / "run")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(SinkError, match=r"silent_consistency.output_dir: '.*' cannot be written \(File exists\)"):
        open_files(tmp_path / "run", tensorboard=True)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_tmpfs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real small disk, where this machine lets us mount one."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        sound = Recorder()
        sinks = FanOut([JsonlSink(tmp_path), sound])
        for step in range(1, 301):
            sinks.write(full_record(step, layers=()))
        assert names(sinks) == ["Recorder"]
        assert len(sound.calls) == 300
        steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert 10 < len(steps) < 300
        assert caplog.text.count("stops writing") == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)
