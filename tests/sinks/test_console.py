"""One line per n steps, beside a progress bar, on any terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, IntegrityStats, LossStats, StepRecord
from ds_silent.runs.summary import RunSummary
from ds_silent.sinks.base import FanOut, Sink
from ds_silent.sinks.console import ConsoleSink, event_line, step_line, wrapped
from tests.sinks.example_records import empty_record, event, full_record


def test_the_line() -> None:
    assert step_line(full_record(12)) == (
        "[ds_silent] step 12  loss 2.31 ± 0.18 (range 0.52)  |g| 1.02 ± 0.16 (cv 0.157)  "
        "cos 0.041 [-0.011, 0.091]  B_noise 310"
    )


def test_what_was_not_measured_is_not_mentioned() -> None:
    assert step_line(empty_record(3)) == "[ds_silent] step 3"
    assert step_line(full_record(3, loss=LossStats())).startswith("[ds_silent] step 3  |g| 1.02")
    line = step_line(full_record(3, loss=LossStats(mean=float("nan"), std=float("inf"))))
    assert "loss nan ± inf (range ?)" in line


def test_two_ranks_have_one_cosine_and_a_negative_noise_scale_is_no_number_of_rows() -> None:
    record = full_record(3, noise_scale=-312.0)
    assert step_line(record).endswith("cos 0.041 [-0.011, 0.091]  B_noise n/a")
    two = replace(record, world_size=2, direction=replace(record.direction, min_cosine=0.041, max_cosine=0.041))
    assert step_line(two).endswith("cos 0.041  B_noise n/a")


def test_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    for step in range(1, 26):
        sink.write(full_record(step))
    sink.close()
    printed = [int(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert printed == [1, 10, 20]


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training's own thread prints at the same time: its text must not come between a line and its end."""
    written: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", written.append)
    monkeypatch.setattr(sys, "stdout", stream)
    ConsoleSink().write(full_record(3))
    [line] = [text for text in written if text]
    assert line.startswith("[ds_silent] step 3  loss")
    assert line.endswith("\n")


def test_a_second_engine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(label="engine-2")
    sink.write(full_record(3))
    sink.write_event(event())
    step, told = capsys.readouterr().out.splitlines()
    assert step.startswith("[ds_silent engine-2] step 3  loss")
    assert told.startswith("[ds_silent engine-2] step 12  ERROR  duplicate-data")


def test_events_are_always_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.write_event(event())
    assert capsys.readouterr().out == (
        "[ds_silent] step 12  ERROR  duplicate-data  ranks 0, 3  at train_loader: "
        "These ranks read the same rows. Give each rank its own sampler.\n"
    )
    assert "  rank 3  at " in event_line(event(ranks=(3,)))
    assert "duplicate-data  at " in event_line(event(ranks=()))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What an event is on a terminal, or elsewhere."""

    def show(said: Event, terminal: bool = True, **environment: str) -> str:
        for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
            monkeypatch.setenv(name, value)
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stdout", stream)
        ConsoleSink().write_event(said)
        return stream.getvalue()

    return show


@pytest.mark.parametrize(("severity", "colour"), [("error", "1;31"), ("warning", "33"), ("info", "36")])
def test_a_terminal_shows_the_severity_in_colour(severity: Any, colour: str, shown: Callable[..., str]) -> None:
    said = replace(event(), severity=severity)
    line = shown(said)
    assert f"\x1b[{colour}m{severity.upper()}  duplicate-data\x1b[0m  ranks" in line
    assert line.replace(f"\x1b[{colour}m", "").replace("\x1b[0m", "") == event_line(said) + "\n"
    ConsoleSink().write(full_record(1))
    assert sys.stdout.getvalue()[len(line) : -1].isprintable()  # type: ignore[attr-defined]  # a step has none


LONG = event(message=f"The gradients of {'very ' * 60}different rows, as in {'/a/long/path' * 9}.")


@pytest.mark.parametrize(
    ("terminal", "environment"), [(False, {}), (True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"})]
)
def test_elsewhere_no_escape_code_is_written(
    terminal: bool, environment: dict[str, str], shown: Callable[..., str]
) -> None:
    assert shown(event(), terminal, **environment) == event_line(event()) + "\n"
    assert terminal or shown(LONG, terminal) == event_line(LONG) + "\n"  # a log has it on one line


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_a_terminal_shows_a_long_event_wrapped_at_words(columns: int, colour: bool, shown: Callable[..., str]) -> None:
    text = shown(LONG, COLUMNS=str(columns), NO_COLOR="" if colour else "1")
    assert ("\x1b[1;31mERROR  duplicate-data\x1b[0m" in text) is colour
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert len(lines) > 4
    assert all(len(line) <= columns for line in lines if "/a/long/path" not in line)
    assert all(re.match(r" {12}\S", line) for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == event_line(LONG)  # no word is broken, none is lost


def test_a_name_brings_no_colour_of_its_own(shown: Callable[..., str]) -> None:
    text = shown(event(kind="a\x1b[2Jb", message="c\x1b[2Jd"))
    assert re.findall(r"\x1b\[[0-9;]*[A-Za-z]", text) == ["\x1b[1;31m", "\x1b[0m"]


def test_two_hundred_characters_are_left_to_the_terminal() -> None:
    line = "a " * 99 + "bb"
    assert wrapped(line, 80, 4) == line
    assert wrapped(line + "b", 80, 4).count("\n") == 2


def test_a_lasting_fault_is_one_line_a_rare_reminder_and_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    judge, sink = Judge(DetectorsConfig()), ConsoleSink()
    for step in range(1, 260):
        shared = {(0, 3): 8} if 10 <= step < 250 else {}
        evidence = Evidence(duplicates=shared, rows_per_rank=(8, 8, 8, 8))
        for one in judge.step(empty_record(step, ranks=4), evidence):
            sink.write_event(one)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:4] for line in lines] == [["10", "ERROR"], ["138", "ERROR"], ["250", "INFO"]]
    assert "train on the same data: all 8 rows that a rank takes in this step are another's too." in lines[0]
    assert "Shard the data" in lines[0]
    assert "Still, since step 10: " in lines[1]
    assert "Ended: duplicate-data, from step 10 to step 249." in lines[2]


def test_control_characters_do_not_reach_the_terminal() -> None:
    line = event_line(event(message="a\x1b[2J\rb\nc\u202ed"))
    assert line.isprintable()
    assert "a [2J b c d" in line


def test_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    ConsoleSink().write(full_record(1))
    assert raw.getvalue().startswith(b"[ds_silent] step 1  loss 2.31 ? 0.18")


def test_a_progress_bar_is_cleared_before_and_drawn_again_after(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    with tqdm(total=3, file=screen, ncols=60) as bar:
        bar.update(1)
        ConsoleSink().write(full_record(1))
    line = next(part for part in screen.getvalue().split("\n") if "[ds_silent]" in part)
    assert line.split("\r")[-1].startswith("[ds_silent] step 1  loss")  # the bar is wiped, then the line starts at 0
    assert "1/3" in screen.getvalue().split("B_noise 310\n")[1]


def ended(summary: RunSummary, capsys: pytest.CaptureFixture[str]) -> list[str]:
    summary.close()
    return capsys.readouterr().out.splitlines()


def test_the_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "my run").mkdir(parents=True)
    summary = RunSummary()
    summary.directory = "runs/my run"
    for step in range(1, 1201):
        summary.write(full_record(step))
    for number, severity in enumerate(("error", "warning", "info", "warning"), start=10):
        summary.write_event(replace(event(number, ranks=(number - 9,)), severity=severity))  # type: ignore[arg-type]
    assert ended(summary, capsys) == [
        "[ds_silent] end  1,200 steps measured; 1 error, 2 warnings, 1 note; verdict: Rank 1 works on rows of others, "
        "since step 10. Records in runs/my run; see them: ds-silent report 'runs/my run'"
    ]
    assert ended(summary, capsys) == []  # once


def test_the_last_line_counts_a_fault_once(capsys: pytest.CaptureFixture[str]) -> None:
    summary, told = RunSummary(), event(10, ranks=(1,))
    message = "Ended: duplicate-data, from step 10 to step 399."
    end = replace(told, step=400, severity="info", message=message, phase="ended")
    still = replace(told, message="Still, since step 10: the same.", phase="ongoing")
    reminders = [replace(still, step=step) for step in (138, 266)]
    resumed = replace(still, where="since before the resume", message="Still, since step 3: the same.")
    for one in (told, *reminders, end, replace(told, step=500), resumed):
        summary.write_event(one)
    assert "; 3 errors; verdict: " in ended(summary, capsys)[0]


@pytest.mark.parametrize(
    ("integrity", "verdict"),
    [
        (full_record(1).integrity, "no fault was seen."),
        (replace(full_record(1).integrity, replica_groups=None), "no fault was seen; not checked: replicas."),
        (IntegrityStats(), "no fault was seen; not checked: reduction, replicas."),
    ],
)
def test_the_last_line_of_a_healthy_run_says_what_was_not_checked(
    integrity: IntegrityStats, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = RunSummary("engine-2")
    summary.write(full_record(1, integrity=integrity))
    line = f"[ds_silent engine-2] end  1 step measured; no events; verdict: {verdict} No records were written"
    assert ended(summary, capsys) == [line]


@pytest.mark.parametrize(
    ("ended_by", "broke_off"),
    [
        ({"error": "RuntimeError"}, "The training ended with RuntimeError after step 8"),
        ({"error": None, "interrupted": True}, "The training was interrupted after step 8"),
    ],
)
def test_the_last_line_of_a_training_that_broke_off_says_so(
    ended_by: dict[str, Any], broke_off: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = RunSummary()
    summary.ended = {"at": "2026-01-01T00:00:00+00:00", "step": 8, **ended_by}
    summary.write(full_record(8))
    healthy = (
        f"[ds_silent] end  1 step measured; no events; verdict: {broke_off}; until then no fault was seen. No records"
    )
    assert ended(summary, capsys) == [f"{healthy} were written"]
    summary.write(full_record(9))
    summary.write_event(event(9, ranks=(1,)))
    assert f"1 error; verdict: Rank 1 works on rows of others, since step 9. {broke_off}." in ended(summary, capsys)[0]


def test_the_last_line_does_not_send_anybody_to_records_that_are_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = RunSummary()
    summary.directory = str(tmp_path / "deleted")
    summary.write(full_record(8))
    [line] = ended(summary, capsys)
    gone = f"The records are gone: {tmp_path}/deleted was deleted or moved while the training ran"
    assert line == f"[ds_silent] end  1 step measured; no events; verdict: no fault was seen. {gone}"


def test_the_last_line_tells_of_records_that_are_not_complete(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A disk was full: the last line said "see them", and two of 64 steps were there."""

    class Full(Sink):
        def write(self, record: StepRecord) -> None:
            raise OSError(28, "No space left on device")

    summary, full = RunSummary(), Full()
    summary.directory, summary.files = str(tmp_path), (Sink(), full)
    FanOut([full, summary]).write(full_record(8))
    [line] = ended(summary, capsys)
    assert f"Records in {tmp_path}, not complete (Full has stopped writing); see them: ds-silent report" in line


def test_a_run_that_ends_before_its_first_step_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    summary = RunSummary()
    assert ended(summary, capsys) == []  # nothing was
    summary.directory = "runs\x1b[2J"
    summary.write_event(event(0, kind="seed-mismatch", ranks=(1,)))
    (line,) = ended(summary, capsys)
    verdict = "Rank 1 has a seed that does not fit, seen before the first step."
    assert f"0 steps measured; 1 error; verdict: {verdict}" in line
    assert line.isprintable()
