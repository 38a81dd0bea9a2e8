"""The curves of two runs: intervals of mean differences against series whose mean is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds_silent.commands.compare_runs import CompareOptions, compare_command
from ds_silent.runs.curves import block_length, compare_curves, mean_interval


def autoregressive(steps: int, phi: float, rng: np.random.Generator) -> np.ndarray:
    noise, series = rng.standard_normal(steps + 100), np.zeros(steps + 100)
    for step in range(1, steps + 100):
        series[step] = phi * series[step - 1] + noise[step]
    return series[100:]


@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_an_interval_misses_the_mean_as_often_as_it_says(phi: float) -> None:
    rng, missed, trials = np.random.default_rng(3), 0, 200
    for trial in range(trials):
        series = autoregressive(400, phi, rng) + 7.0
        low, high = mean_interval(series, block_length(series), 0.95, trial)
        missed += not low <= 7.0 <= high
    assert 2 <= missed <= 24  # 10 are expected; 24 has a probability of 3e-5


def test_blocks_are_longer_where_neighbours_are_alike() -> None:
    rng = np.random.default_rng(0)
    lengths = [np.median([block_length(autoregressive(500, phi, rng)) for _ in range(20)]) for phi in (0.0, 0.5, 0.9)]
    assert lengths[0] <= 6 < lengths[1] < lengths[2] <= 500 // 3 * 2
    assert block_length(np.ones(100)) == 1


def write(directory: Path, loss: np.ndarray, first: int = 1) -> Path:
    directory.mkdir()
    lines = [
        {"step": step, "samples": 8 * step, "world_size": 2, "loss": {"mean": float(value), "std": None, "range": None}}
        for step, value in enumerate(loss, first)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(5)
    noise = autoregressive(800, 0.5, rng)
    a = write(tmp_path / "a", noise)
    runs = {
        "higher in B": write(tmp_path / "higher", autoregressive(800, 0.5, rng) + 1.0),
        "lower in B": write(tmp_path / "lower", autoregressive(800, 0.5, rng) - 1.0),
        "no difference shown": write(tmp_path / "alike", autoregressive(800, 0.5, rng)),
        "the same": write(tmp_path / "same", noise),
        "too few steps": write(tmp_path / "short", noise[:30] + 1.0),
    }
    for verdict, b in runs.items():
        (found,) = compare_curves(a, b)
        assert (found.metric, found.verdict) == ("loss mean", verdict)
    (found,) = compare_curves(a, runs["higher in B"])
    other = [json.loads(line)["loss"]["mean"] for line in (runs["higher in B"] / "metrics.jsonl").open()]
    assert found.difference == pytest.approx(np.mean(other) - noise.mean(), abs=1e-12)
    assert found.low < found.difference < found.high
    assert compare_command([str(a), str(runs["lower in B"])], None, CompareOptions(curves=True)) == 0
    assert "lower in B" in capsys.readouterr().out
    command = CompareOptions(curves=True, json_path=str(tmp_path / "found.json"))
    assert compare_command([str(a), str(runs["too few steps"])], None, command) == 0
    (one,) = json.loads((tmp_path / "found.json").read_text())["curves"]
    assert (one["metric"], one["low"], one["verdict"]) == ("loss mean", "nan", "too few steps")


def test_steps_are_paired_by_number(tmp_path: Path) -> None:
    series = np.arange(200.0)
    (found,) = compare_curves(write(tmp_path / "a", series), write(tmp_path / "b", series[100:], first=101))
    assert (found.steps, found.difference, found.verdict) == (100, 0.0, "the same")


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", np.ones(3)), write(tmp_path / "b", np.ones(3), first=9)
    for runs, told in (
        ([a, b], "no step of the same number"),
        ([a], "compare takes two runs"),
        ([a, b, a], "--curves takes two runs, A and B, got 3"),
        ([a, tmp_path / "none"], "none"),
    ):
        assert compare_command([str(one) for one in runs], None, CompareOptions(curves=True)) == 2
        sentence = capsys.readouterr().err
        assert told in sentence
        assert sentence.count("\n") == 1
