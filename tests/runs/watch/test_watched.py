"""A run that is followed, whatever happens to its files; and what a script is told of it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.runs.watch_command import ERROR, HEALTHY, NOTHING, STALE, WARNING, status_of
from ds_silent.runs.watched import Snapshot, Watched
from tests.runs.watch.runs import made, write, write_places
from tests.sinks.example_records import event

RECORDS, EVENTS = made(ranks=4, steps=80, bad_from=40)


def seen(watched: Watched) -> Snapshot:
    while watched.poll():
        pass
    return watched.snapshot()


def watch(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)], catch_exceptions=False)


def test_a_run_that_grows(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run")
    assert seen(watched).step is None
    write(tmp_path / "run", RECORDS[:30])
    write_places(tmp_path / "run", 4)
    early = seen(watched)
    assert (early.step, early.level, early.ranks, len(early.curves["loss"])) == (30, "ok", 4, 30)
    assert early.curves["norm"][-1] == RECORDS[29].grad_norm.mean
    write(tmp_path / "run", RECORDS[30:], EVENTS)
    late = seen(watched)
    assert (late.step, late.measured, late.level) == (80, 80, "warning")
    assert late.verdict == "Rank 2 (node0001:0) is not like the others, since step 40 (found at step 44)."
    assert [(one.kind, one.who) for one in late.events] == [("outlier-rank", "rank 2")]
    (blamed,) = [one for one in late.rows if one.severity]
    assert (blamed.rank, blamed.spot, blamed.kind) == (2, "node0001:0", "outlier-rank")
    assert blamed.departure is not None
    assert blamed.departure.metric == "norm"
    assert late.written is not None
    write(tmp_path / "run", RECORDS[75:80])  # a resumed run has each step once
    again = seen(Watched(tmp_path / "run"))
    assert (again.step, again.measured, len(again.curves["loss"])) == (80, 80, 80)


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, RECORDS)
    watched = Watched(tmp_path)
    seen(watched)
    parsed: list[bytes] = []
    from ds_silent.runs import run

    parse = run.parsed_line
    monkeypatch.setattr(run, "parsed_line", lambda line, keys: (parsed.append(line), parse(line, keys))[1])
    seen(watched)
    assert parsed == []
    write(tmp_path, made(4, 82)[0][80:])
    assert seen(watched).step == 82
    assert len(parsed) == 2


@pytest.mark.parametrize("way", ["truncated", "rotated", "replaced"])
def test_files_that_begin_anew(tmp_path: Path, way: str) -> None:
    write(tmp_path, RECORDS, EVENTS)
    watched = Watched(tmp_path)
    assert seen(watched).level == "warning"
    for path in list(tmp_path.glob("*.jsonl")):
        if way == "truncated":
            os.truncate(path, 0)
        elif way == "rotated":
            path.rename(path.with_suffix(".jsonl.1"))
        else:
            path.unlink()
    seen(watched)  # nothing is there for a moment
    write(tmp_path, made(4, 5, seed=3)[0])
    view = seen(watched)
    assert (view.step, view.measured, len(view.curves["loss"]), view.events) == (5, 5, 5, ())
    assert (view.level, view.problem) == ("ok", "")


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    write(tmp_path, RECORDS[:3])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    (tmp_path / "metrics.jsonl").write_bytes(whole[: last + 40])
    watched = Watched(tmp_path)
    assert seen(watched).step == 2
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(whole[last + 40 :])
    view = seen(watched)
    assert (view.step, view.problem) == (3, "")


def test_a_directory_that_disappears(tmp_path: Path) -> None:
    write(tmp_path / "run", RECORDS[:3])
    watched = Watched(tmp_path / "run")
    assert seen(watched).step == 3
    shutil.rmtree(tmp_path / "run")
    seen(watched)
    assert seen(watched).step is None


HOSTILE = (
    b"",
    b"\n\n\x00\x00\xff\xfe",
    b"{" * 5000,
    b"[]\n3\nnull\n" + b'"x"\n',
    b'{"step": -1}\n{"step": 1e9}\n{"step": true}\n{"step": 99999999999999999999999}\n',
    b'{"step": 1, "world_size": 0, "loss": {"mean": "nan", "per_rank": []}}\n',
    b'{"step": 1, "world_size": 1e400, "loss": {"mean": 1e308, "std": "x", "per_rank": [1e308, -1e308]}}\n',
    b'{"step": 1, "loss": {"per_rank": "\\u001b[2J", "extremes": {"\\u001b[2J": 3}}, "direction": [1, 2]}\n',
    b'{"step": 1, "grad_norm": {"per_rank": ["inf", null, {}, []]}, "seconds": {"step": 0, "observe": "inf"}}\n',
    b'{"step": 1, "epoch": "nan", "seconds": {"step": "nan", "observe": 1}, "loss": {"mean": %d}}\n' % 10**400,
    b'{"step": 1, "kind": "\\u001b]0;x\\u0007<b>", "severity": "\\u001b[31mfatal", "ranks": "all", "message": 7}\n',
    b'{"step": 1, "kind": "drift", "severity": "error", "ranks": [1, -4, "x"], "message": "\\ud800\\u202e\\u001b[2J"}\n',  # noqa: E501
    b'{"step": 1, "kind": "drift", "ranks": [0], "ranks_total": 1e99, "severity": "error"}\n' * 50,
)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_records_give_a_picture_and_no_escape_code(tmp_path: Path, number: int) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "scores.jsonl", "ranks.json"):
        (tmp_path / name).write_bytes(HOSTILE[number])
    for options in ((), ("--json",)):
        result = watch(tmp_path, "--once", *options)
        assert result.exit_code in (HEALTHY, WARNING, ERROR, NOTHING)
        assert all(character.isprintable() or character == "\n" for character in result.stdout)
    json.loads(result.stdout, parse_constant=lambda constant: pytest.fail(constant))


@pytest.mark.parametrize(
    ("severities", "status"),
    [((), HEALTHY), (("info",), HEALTHY), (("warning", "info"), WARNING), (("warning", "error"), ERROR)],
)
def test_the_exit_status_is_the_severity(tmp_path: Path, severities: tuple[str, ...], status: int) -> None:
    events = [replace(event(step=5), severity=severity, where=severity) for severity in severities]  # type: ignore[arg-type]
    write(tmp_path, RECORDS[:10], events)
    assert watch(tmp_path, "--once").exit_code == status
    told = json.loads(watch(tmp_path, "--once", "--json").stdout)
    assert told["exit_status"] == status
    assert told["events"]["counts"] == {name: severities.count(name) for name in ("error", "warning", "info")}


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ({"": "2026-01-01T00:00:00+00:00", "run-2": "2026-01-02T00:00:00+00:00"}, "run-2"),
        ({"": "2026-01-03T00:00:00+00:00", "run-2": "2026-01-02T00:00:00+00:00"}, ""),  # resumed
        ({"": None, "run-2": None, "run-10": None}, "run-10"),  # as older versions write them
        ({"run-2": "2026-01-02T00:00:00+00:00"}, "run-2"),
        ({"": "2026-01-01T00:00:00+00:00", "engine-2": "2026-01-02T00:00:00+00:00"}, ""),  # of the same training
    ],
)
def test_of_several_runs_the_one_that_began_last_is_shown(
    started: dict[str, str | None], shown: str, tmp_path: Path
) -> None:
    for name, when in started.items():
        write(tmp_path / name, RECORDS[: 3 + len(name)])
        if when is not None:
            (tmp_path / name / "run.json").write_text(json.dumps({"version": 1, "started": when}))
    result = watch(tmp_path, "--once", "--json")
    told = json.loads(result.stdout)
    assert (told["run"], told["step"]) == (str(tmp_path / shown), 3 + len(shown))
    said = f"ds-silent: {str(tmp_path)!a} holds several runs; this is the newest, {str(tmp_path / shown)!a}\n"
    assert result.stderr == (said if shown else "")


def test_no_records(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        result = watch(directory, "--once")
        assert result.exit_code == NOTHING
        assert str(directory) in result.stdout
    assert watch(tmp_path / "none", "--json").exit_code == NOTHING


def test_of_a_directory_above_several_runs_the_runs_are_named(tmp_path: Path) -> None:
    """It said that there were no records yet."""
    for name, when in {"b": "2026-01-02T00:00:00+00:00", "a": None, "old one": "2026-01-01T00:00:00+00:00"}.items():
        write(tmp_path / name, RECORDS[:3])
        if when is not None:
            (tmp_path / name / "run.json").write_text(json.dumps({"version": 1, "started": when}))
    result = watch(tmp_path, "--once")
    named = ", ".join(repr(str(tmp_path / name)) for name in ("a", "b", "old one"))
    assert (result.exit_code, result.stdout) == (NOTHING, "")
    assert result.stderr == (
        f"ds-silent: {str(tmp_path)!r} holds no records itself, but 3 runs below: {named}; "
        f"the newest: ds-silent watch {tmp_path / 'b'}\n"
    )
    assert json.loads(watch(tmp_path, "--json").stdout)["exit_status"] == NOTHING
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    said, left = watch(tmp_path, "--once").stderr, str(tmp_path / "old one")
    assert said.endswith(f"but one run below: {left!r}; ds-silent watch '{left}'\n")


def test_a_stale_run(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, EVENTS)
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    assert watch(tmp_path, "--once").exit_code == WARNING
    result = watch(tmp_path, "--once", "--stale", 10)
    assert result.exit_code == STALE
    assert result.stdout.splitlines()[-1] == "status: stale"
    os.utime(tmp_path / "metrics.jsonl")
    assert watch(tmp_path, "--once", "--stale", 10).exit_code == WARNING
    late = Snapshot("x", level="error", step=3, written=0.0)
    orders = [status_of(late, stale, 100.0) for stale in (None, 99.0, 101.0)]
    assert orders == [ERROR, STALE, ERROR]  # a run that hangs is restarted, whatever it said before
    assert status_of(Snapshot("x"), 1.0, 100.0) == NOTHING


def test_the_text_and_the_json(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, EVENTS)
    told = json.loads(watch(tmp_path, "--json").stdout)
    assert (told["format"], told["status"], told["step"], told["world_size"]) == (1, "warning", 80, 4)
    assert told["last"]["loss"] == RECORDS[-1].loss.mean
    assert told["ranks"][0]["rank"] == 2
    assert told["ranks"][0]["values"]["norm"] == RECORDS[-1].grad_norm.per_rank[2]  # type: ignore[index]
    assert told["events"]["last"][0]["remedy"] == EVENTS[0].remedy
    assert told["seconds_since_last_record"] < 60
    write_places(tmp_path, 4)
    lines = watch(tmp_path, "--once").stdout.splitlines()
    assert lines[1] == "verdict: Rank 2 (node0001:0) is not like the others, since step 40 (found at step 44)."
    assert lines[2].startswith("step 80, 80 measured here, 4 ranks, written ")
    found = EVENTS[0]
    assert lines[-2] == f"step 44  WARNING  outlier-rank  rank 2  at {found.where}: {found.message} {found.remedy}"
    assert told["events"]["last"][0]["where"] == found.where
    ranks = [line.split()[1] for line in lines if line.startswith("rank ")]
    assert ranks[0] == "2"
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert lines[-1] == "status: warning"


@pytest.mark.parametrize(("high", "said"), [(0.041, "cosine: 0.041"), (0.091, "cosine: 0.041 [0.041, 0.091]")])
def test_the_one_cosine_of_two_ranks_is_said_once(high: float, said: str, tmp_path: Path) -> None:
    direction = replace(RECORDS[0].direction, mean_cosine=0.041, min_cosine=0.041, max_cosine=high)
    write(tmp_path, [replace(RECORDS[0], direction=direction)])
    assert said in watch(tmp_path, "--once").stdout.splitlines()


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = watch(tmp_path / "file", "--once")
    assert result.exit_code == 2
    assert result.stderr.startswith("ds-silent: ")
    assert len(result.stderr.splitlines()) == 1
    assert watch(tmp_path, "--once", "--stale", "-1").exit_code == 2
    assert watch().exit_code == 2
