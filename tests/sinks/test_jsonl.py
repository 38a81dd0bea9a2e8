"""metrics.jsonl survives what kills its writer, and its reader gives one record per step."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_silent.records import CosineMatrix, Score, Scores, to_json
from ds_silent.sinks.base import SinkError
from ds_silent.sinks.files import LineFile
from ds_silent.sinks.jsonl import (
    JsonlSink,
    read_event_records,
    read_events,
    read_matrices,
    read_metrics,
    read_records,
    read_scores,
)
from tests.sinks.example_records import empty_record, event, full_record

ROOT = Path(__file__).resolve().parents[2]


def write_steps(directory: Path, steps: list[int], **changes: object) -> None:
    sink = JsonlSink(directory)
    for step in steps:
        sink.write(full_record(step, **changes))
    sink.close()


def scores(step: int) -> Scores:
    return Scores(
        step, (Score("outlier", -math.inf, 17.5, 2), Score("rounding", 1e-7, 2e-6, where="aggregated gradient"))
    )


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read_back_as_objects_and_as_records(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "er"
    sink = JsonlSink(directory)
    odd = [full_record(step, noise_scale=value) for step, value in ((3, math.inf), (4, math.nan))]
    records = [full_record(1), empty_record(2), *odd]
    chance = replace(event(13), false_alarms_per_million_steps=1e-3, score=None)
    for record in records:
        sink.write(record)
        assert (directory / "metrics.jsonl").read_text().endswith("}\n")  # at once
        sink.write_scores(scores(record.step))
    for one in (event(), chance):
        sink.write_event(one)
    sink.flush()
    sink.close()
    assert names_in(directory) == [f"{name}.jsonl" for name in ("events", "layers", "matrices", "metrics", "scores")]
    assert read_metrics(directory / "metrics.jsonl") == [to_json(record) for record in records]
    assert read_events(directory / "events.jsonl") == [to_json(event()), to_json(chance)]
    layers = read_metrics(directory / "layers.jsonl")
    assert layers == [{"step": step, "layers": to_json(records[0].layers)} for step in (1, 3, 4)]
    *first, last = read_records(directory / "metrics.jsonl")
    lines = [replace(record, cosine_matrix=None, layers=(), exact_check=None) for record in records]
    assert first == lines[:3]
    assert math.isnan(last.noise_scale or 0)
    assert replace(last, noise_scale=0.0) == replace(lines[3], noise_scale=0.0)
    assert list(read_event_records(directory / "events.jsonl")) == [event(), chance]
    assert list(read_scores(directory / "scores.jsonl")) == [scores(step) for step in (1, 2, 3, 4)]
    matrices = [CosineMatrix(step, "sketch", records[0].cosine_matrix) for step in (1, 3)]
    assert list(read_matrices(directory / "matrices.jsonl")) == matrices


def test_what_is_no_record_is_counted_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        path.read_text() + '{"step": 3}\n{"step": 4, "samples": 1, "world_size": 2, "newer": 1}\n{"step": 5'
    )
    assert [record.step for record in read_records(path)] == [1, 2, 4]
    assert "1 torn or foreign lines skipped" in caplog.text
    assert "1 lines are no StepRecord, skipped" in caplog.text
    assert len(read_metrics(path)) == 4


def test_the_matrix_is_kept_at_the_records_at_which_it_is_drawn(tmp_path: Path) -> None:
    write_steps(tmp_path, list(range(10, 2020, 10)), ranks=2)
    drawn = [10, 20, 50, 100, 200, 500, 1000, 2000]
    assert [matrix.step for matrix in read_matrices(tmp_path / "matrices.jsonl")] == drawn
    write_steps(tmp_path, [110, 120])  # a run that resumes after step 100 draws its first ones again
    torn = (tmp_path / "matrices.jsonl").read_bytes()
    (tmp_path / "matrices.jsonl").write_bytes(torn[:-5])
    assert [matrix.step for matrix in read_matrices(tmp_path / "matrices.jsonl")] == [*drawn[:4], 110]


def test_without_layers_matrices_and_scores_there_are_no_such_files(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(full_record(1, cosine_matrix=None, layers=()))
    sink.write_scores(Scores(1, ()))
    sink.close()
    assert names_in(tmp_path) == ["events.jsonl", "metrics.jsonl"]


def test_text_with_newlines_stays_one_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    hostile = 'first\nsecond\u2028third"}\r\n{"step": 99, "kind": "x"}'
    sink.write_event(event(message=hostile))
    sink.close()
    assert (tmp_path / "events.jsonl").read_bytes().count(b"\n") == 1
    assert [e["message"] for e in read_events(tmp_path / "events.jsonl")] == [hostile]


@pytest.mark.parametrize("cut", [1, 2, 40, 300])
def test_a_torn_last_line_is_skipped_and_later_ones_are_not_lost(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    torn = [1, 2, 3] if cut == 1 else [1, 2]  # with only its newline missing the line is still whole
    assert [record["step"] for record in read_metrics(path)] == torn
    write_steps(tmp_path, [4, 5])
    caplog.clear()
    assert [record["step"] for record in read_metrics(path)] == [*torn, 4, 5]
    assert path.read_bytes().startswith(whole[:-cut] + b"\n")  # nothing is cut off what was there
    assert ("1 torn or foreign lines skipped" in caplog.text) == (cut > 1)


def test_foreign_lines_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ["", "null", "[]", '{"step": "1"}', '{"step": true}', "\x00\x00", '{"no": 1}', '{"step": 7}', "[" * 99_999]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    assert read_metrics(path) == [{"step": 7}]
    assert "8 torn or foreign lines skipped" in caplog.text


def test_lines_of_a_newer_version_are_left_out_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "version": 1}\n{"step": 2, "version": 2}\n{"step": 3, "version": 2}\n{"step": 4}\n')
    assert [record["step"] for record in read_metrics(path)] == [1, 4]
    assert caplog.messages == [
        f"ds_silent: '{path}': 2 lines of version 2 are skipped, because this ds_silent reads version 1; install a "
        "newer ds_silent to read them"
    ]


@pytest.mark.parametrize(
    ("again", "kept"),
    [
        ([4, 5], [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]),
        ([1], [(1, 2.0)]),  # a run that starts again
    ],
)
def test_a_resumed_run_retires_what_lay_ahead_of_its_checkpoint(
    again: list[int], kept: list[tuple[int, float]], tmp_path: Path
) -> None:
    write_steps(tmp_path, [1, 2, 3, 4, 5, 6], noise_scale=1.0)
    write_steps(tmp_path, again, noise_scale=2.0)
    assert [(one["step"], one["noise_scale"]) for one in read_metrics(tmp_path / "metrics.jsonl")] == kept


def test_an_event_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for written in [event(5), event(5, ranks=(1,)), event(3), event(5, message="again")]:
        sink.write_event(written)
    sink.close()
    read = read_events(tmp_path / "events.jsonl")
    assert [(e["step"], e["ranks"]) for e in read] == [(3, [0, 3]), (5, [0, 3]), (5, [1])]
    assert read[1]["message"] == "again"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "metrics.jsonl").mkdir()
    below = f"silent_consistency.output_dir: '{tmp_path}/file/run' cannot be written (Not a directory); choose"
    named = "metrics.jsonl' cannot be written (Is a directory); choose a directory"
    for directory, said in ((tmp_path / "file" / "run", below), (tmp_path, named)):
        with pytest.raises(SinkError, match=re.escape(said)):
            JsonlSink(directory)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SinkError, match="Permission denied"):
        JsonlSink(tmp_path / "run")


def test_a_full_disk_is_an_error_of_the_write() -> None:
    file = LineFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.append("x")
    file.close()


def test_a_removed_file_is_an_error_and_not_a_silent_loss(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(full_record(1, layers=()))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(OSError, match="was removed while the run was writing it"):
        sink.write(full_record(2, layers=()))
    sink.close()


def program(text: str, directory: Path) -> subprocess.Popen[str]:
    """A process that writes to ``sink``."""
    head = f"""
import resource, signal, sys
from ds_silent.sinks.jsonl import JsonlSink
from tests.sinks.example_records import full_record
sink = JsonlSink({str(directory)!r})
"""
    return subprocess.Popen([sys.executable, "-c", head + text], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_disk_that_fills_up_inside_a_line(tmp_path: Path) -> None:
    """The size limit of a file stands for the disk: the first write is short, the next one fails."""
    text = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
for step in range(1, 100):
    try:
        sink.write(full_record(step, layers=()))
    except OSError:
        sys.exit(step)
"""
    with program(text, tmp_path) as writer:
        refused = writer.wait(60)
    path = tmp_path / "metrics.jsonl"
    assert path.stat().st_size == 3000
    assert refused > 1
    assert [record["step"] for record in read_metrics(path)] == list(range(1, refused))
    write_steps(tmp_path, [refused])  # there is room again, and the run resumes
    assert [record["step"] for record in read_metrics(path)] == list(range(1, refused + 1))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 3000


def test_kill_9_tears_at_most_the_last_line(tmp_path: Path) -> None:
    text = """
step = 0
while True:
    step += 1
    sink.write(full_record(step, layers=()))
    if step == 200:
        print("far enough", flush=True)
"""
    with program(text, tmp_path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "far enough\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(timeout=60) == -signal.SIGKILL
    *whole, last = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
    assert len(whole) >= 200
    assert last == b""
    write_steps(tmp_path, [len(whole) + 1])
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(whole) + 1
