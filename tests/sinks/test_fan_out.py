"""A sink that breaks is dropped with one warning; the training and the other sinks never notice."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from ds_silent.records import Scores
from ds_silent.sinks import FanOut, SinkError, open_files
from ds_silent.sinks.jsonl import JsonlSink, read_metrics
from tests.sinks.example_records import empty_record, event, full_record
from tests.sinks.recording import Recorder


def failing(calls: tuple[str, ...], error: BaseException) -> Recorder:
    """A sink that keeps what it is given, and fails in these calls."""

    def fails(call: str) -> None:
        if call.split()[0] in calls:
            sink.calls.append(call)
            raise error

    sink = Recorder(fails)
    return sink


def use(sinks: FanOut) -> None:
    sinks.write(empty_record(1))
    sinks.write_event(event(1))
    sinks.write_scores(Scores(1, ()))
    sinks.flush()
    sinks.write(empty_record(2))
    sinks.close()


ALL = ["write 1", "event 1 duplicate-data", "scores 1", "flush", "write 2", "close"]


@pytest.mark.parametrize(
    ("fail_in", "calls"),
    [
        ("", ALL),
        *((name, [*ALL[: n + 1], "close"]) for n, name in enumerate(("write", "event", "scores", "flush"))),
        ("close", [*ALL, "close"]),
    ],
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broken"), KeyError("x")])
def test_a_failing_sink_is_dropped_with_one_warning(
    fail_in: str, calls: list[str], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound, other = failing((fail_in,), error), Recorder(), Recorder()
    with caplog.at_level(logging.WARNING, logger="ds_silent"):
        use(FanOut([sound, broken, other]))
    assert sound.calls == other.calls == ALL
    assert broken.calls == calls
    said = f"ds_silent: Recorder stops writing for the rest of this run, the training goes on: {error}"
    assert caplog.messages == ([said] if fail_in else [])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_swallowed(stop: type[BaseException]) -> None:
    with pytest.raises(stop):
        FanOut([failing(("write",), stop())]).write(empty_record())


def test_a_fan_out_is_a_sink() -> None:
    inner = Recorder()
    use(FanOut([FanOut([inner])]))
    assert inner.calls == ALL


def names(sinks: FanOut) -> list[str]:
    return [type(sink).__name__ for sink in sinks.sinks]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_the_configuration_decides_which_sinks_open(tensorboard: bool, tmp_path: Path) -> None:
    sinks = open_files(tmp_path, tensorboard)
    assert names(sinks) == ["JsonlSink", "PerRankSink", "FactsSink", *["TensorBoardSink"] * tensorboard]
    sinks.close()
    sinks = open_files(tmp_path, tensorboard=False, trace=True)
    assert names(sinks) == ["JsonlSink", "PerRankSink", "FactsSink", "TraceSink"]
    sinks.close()
    assert (tmp_path / "tensorboard").is_dir() is tensorboard


@pytest.mark.parametrize("spoilt", ["run", "run/tensorboard"])
def test_an_output_dir_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, spoilt: str) -> None:
    (tmp_path / spoilt).parent.mkdir(exist_ok=True)
    (tmp_path / spoilt).write_text("a file")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(SinkError, match=r"silent_consistency.output_dir: '.*' cannot be written \(File exists\)"):
        open_files(tmp_path / "run", tensorboard=True)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_tmpfs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real small disk, where this machine lets us mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
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
