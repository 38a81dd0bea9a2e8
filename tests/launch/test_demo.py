"""The demonstration's report: its sentences follow the figures, whatever those say."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from demo_report import (
    CASES,
    Case,
    Curves,
    draw,
    first_alarm,
    mean,
    panel_title,
    read_curves,
    replicated_sentence,
    report,
    running_mean,
    separation,
    sharded_sentence,
    table_of,
)
from tests.support.interpreter import interpreter

ROOT = Path(__file__).resolve().parents[2]


def curve(centre: float, spread: float, seed: int, steps: int = 30) -> tuple[tuple[int, float], ...]:
    values = centre + spread * np.random.default_rng(seed).standard_normal(steps)
    return tuple(enumerate(values.tolist(), start=1))


def usual() -> dict[Case, Curves]:
    """Figures as a healthy demonstration gives them."""
    centres = ((0.18, 0.16, 0.04, 1.0), (0.18, 0.16, 0.04, 0.684), (0.0, 0.0, 1.0, 0.25), (0.07, 0.07, 0.75, 0.44))
    found = {}
    for number, case in enumerate(CASES):
        std, cv, cosine, coverage = centres[min(number, 3)] if number < 4 else (0.18, 0.16, 0.04, 0.684)
        spread = 0.0 if number == 2 else 0.03
        curves = (curve(value, spread, 3 * number + k) for k, value in enumerate((std, cv, cosine)))
        found[case] = Curves(*curves, coverage)
    return found


def test_indistinguishable_sharded_scenarios_are_called_so_and_coverage_is_named() -> None:
    sentence = sharded_sentence(usual())
    assert "cannot be told apart" in sentence
    assert "100.0% of the rows with one seed and 68.4%" in sentence


def test_sharded_scenarios_that_differ_are_not_called_the_same() -> None:
    found = usual()
    found[CASES[1]] = Curves(curve(0.5, 0.03, 9), found[CASES[1]].norm_cv, found[CASES[1]].cosine, 0.684)
    sentence = sharded_sentence(found)
    assert "cannot be told apart" not in sentence
    assert "differ in loss std" in sentence


def test_unmeasured_metrics_are_said_to_be_so() -> None:
    found = {case: Curves((), (), (), 1.0) for case in CASES}
    assert "Too few steps" in sharded_sentence(found)
    assert "was not measured" in replicated_sentence(found)
    assert "not measured" in panel_title("loss std", "loss_std", found)


def test_a_cosine_of_one_is_called_duplicated_work_and_another_is_not() -> None:
    found = usual()
    assert "not health but duplicated work" in replicated_sentence(found)
    found[CASES[2]] = Curves(curve(0.1, 0, 1), curve(0.1, 0, 1), curve(0.5, 0, 1), 0.25)
    sentence = replicated_sentence(found)
    assert "duplicated" not in sentence
    assert "mean cosine of 0.500, not 1" in sentence


def test_separation_is_welchs_statistic() -> None:
    one, other = curve(0.0, 1.0, 1, 20), curve(1.0, 2.0, 2, 30)
    a, b = (np.array([value for _, value in c]) for c in (one, other))
    expected = abs(a.mean() - b.mean()) / math.sqrt(a.var(ddof=1) / 20 + b.var(ddof=1) / 30)
    assert separation(one, other) == pytest.approx(expected)
    assert separation(curve(1, 0, 1), curve(1, 0, 2)) == 0.0
    assert separation(curve(1, 0, 1), curve(2, 0, 2)) == math.inf
    assert math.isnan(separation(one, ()))


def test_records_are_read_and_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": {"std": 0.5}, "grad_norm": {"cv": None}, "direction": {"mean_cosine": "nan"}},
        {"step": 2, "loss": {"std": 1.5}, "grad_norm": {"cv": 0.25}, "direction": {"mean_cosine": 0.5}},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "coverage.json").write_text('{"epoch": 0.5}')
    found = read_curves(tmp_path)
    assert found == Curves(((1, 0.5), (2, 1.5)), ((2, 0.25),), ((2, 0.5),), 0.5)
    assert mean(found.loss_std) == 1.0


def test_the_first_alarm_is_named_and_a_healthy_run_has_none(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert first_alarm(path) == "none"
    events = [
        {"step": 0, "severity": "info", "kind": "config-mismatch"},
        {"step": 7, "severity": "warning", "kind": "low-coverage"},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert first_alarm(path) == "low-coverage, step 7"
    path.write_text(json.dumps({"step": 0, "severity": "error", "kind": "duplicate-data"}) + "\n")
    assert first_alarm(path) == "duplicate-data, preflight"


def test_the_running_mean_follows_from_the_start() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_table_and_picture(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of(usual()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "68.4%" in text
    assert "s1-2: rank 0 another seed" in text
    assert text.count("none") == len(CASES)
    draw(usual(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for case, found in usual().items():
        (tmp_path / case.name).mkdir()
        (tmp_path / case.name / "coverage.json").write_text(json.dumps({"epoch": found.coverage}))
        lines = [
            {"step": step, "loss": {"std": std}, "grad_norm": {"cv": cv}, "direction": {"mean_cosine": cosine}}
            for (step, std), (_, cv), (_, cosine) in zip(found.loss_std, found.norm_cv, found.cosine, strict=True)
        ]
        (tmp_path / case.name / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    report(tmp_path)
    shown = capsys.readouterr().out
    assert "tensorboard --logdir" in shown
    assert (tmp_path / "scenarios.png").is_file()


# -- what it prints ---------------------------------------------------------------------------------------------------

RANKS_THAT = """
import pathlib, sys
import demo as demo
from demo_report import CASES

if sys.argv[1:] == ["--worker"]:
    how = "HOW"
    for number, case in enumerate(CASES):
        print(*["much is said"] * 40, sep="\\n")
        if how == "break" and number == 2:
            sys.exit("rank 1: the disk is full")
        home = pathlib.Path("runs/demo") / case.name
        home.mkdir(parents=True)
        (home / "coverage.json").write_text('{"epoch": 0.5}')
        (home / "metrics.jsonl").write_text(
            '{"step": 1, "loss": {"std": 0.5}, "grad_norm": {"cv": 0.25}, "direction": {"mean_cosine": 0.125}}')
        print("demo: ended " + case.name, flush=True)
else:
    demo.RANKS = 1
    sys.exit(demo.main(sys.argv))
"""


def demonstrate(tmp_path: Path, how: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "small_demo.py"
    script.write_text(RANKS_THAT.replace("HOW", how))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}", "COLUMNS": "80"}
    return subprocess.run(
        [interpreter(), str(script), *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_row_per_scenario_and_what_the_ranks_say_in_a_file(tmp_path: Path) -> None:
    done = demonstrate(tmp_path, "end")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 11
    assert lines[1].split()[:2] == ["scenario", "sampler"]
    assert [line.split(":")[0] for line in lines[2:7]] == [case.scenario for case in CASES]
    assert all(line.endswith("0.500    0.250        0.125         50.0%  none") for line in lines[2:7])
    assert max(map(len, lines[1:7])) < 120
    assert done.stderr == ""
    said = (tmp_path / "runs" / "demo" / "console.log").read_text()
    assert said.count("much is said") == 40 * len(CASES)
    assert "demo: ended" not in said


def test_ranks_that_fail_are_quoted(tmp_path: Path) -> None:
    done = demonstrate(tmp_path, "break")
    assert done.returncode != 0
    assert len(done.stdout.splitlines()) == 4  # two scenarios had ended
    assert done.stderr.splitlines()[-1].startswith("demo: the training ended with exit code")
    assert str(Path("runs/demo/console.log")) in done.stderr
    assert "the disk is full" in (tmp_path / "runs" / "demo" / "console.log").read_text()


@pytest.mark.long
def test_verbose_shows_all(tmp_path: Path) -> None:
    done = demonstrate(tmp_path, "end", "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("much is said") == 40 * len(CASES)
    assert done.stdout.count("0.125         50.0%  none") == len(CASES)


def test_another_option_is_one_sentence(tmp_path: Path) -> None:
    done = demonstrate(tmp_path, "end", "--quiet")
    assert (done.returncode, done.stderr) == (2, "demo: the only option is --verbose, got --quiet\n")
