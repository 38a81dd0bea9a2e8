"""The curves of two runs: intervals of mean differences against series whose mean is known."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ds_silent.commands.compare_runs import compare_command
from ds_silent.runs.curves import COMPARED, block_length, compare_curves, difference, mean_interval

ANGLE = "mean of means angle"


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


def write(directory: Path, loss: np.ndarray, first: int = 1, **others: np.ndarray) -> Path:
    """A run's records; others: std of the losses, norm (its mean), angle (of the mean of means)."""
    directory.mkdir()

    def of(name: str, at: int) -> float | None:
        return float(others[name][at]) if name in others else None

    lines = [
        {
            "step": first + at,
            "samples": 8 * (first + at),
            "world_size": 2,
            "loss": {"mean": float(value), "std": of("std", at), "range": None},
            "grad_norm": {"mean": of("norm", at)},
            "objective": {"mean_of_means_angle": of("angle", at)},
        }
        for at, value in enumerate(loss)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no table be broken: a runner of tests may say how wide the terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


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
    assert compare_command([str(a), str(runs["lower in B"])], curves=True) == 0
    assert "lower in B" in capsys.readouterr().out
    file = str(tmp_path / "found.json")
    assert compare_command([str(a), str(runs["too few steps"])], curves=True, json_path=file) == 0
    (one,) = json.loads((tmp_path / "found.json").read_text())["curves"]
    assert (one["metric"], one["low"], one["verdict"]) == ("loss mean", "nan", "too few steps")


def test_the_answer_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(7)
    loss, std, norm, angle = rng.standard_normal((4, 80))
    a = write(tmp_path / "a", loss, std=std, norm=norm, angle=angle)
    b = write(tmp_path / "b", rng.standard_normal(80), std=std + 1.0, norm=norm - 1.0, angle=angle)
    short = write(tmp_path / "short", loss[:40] + rng.standard_normal(40))
    differ = "the curves differ: B is higher in loss std; B is lower in norm mean"
    every = "Over 80 steps every metric is the same in A and B."
    for other, answer in (
        (b, f"Over 80 steps {differ}; no difference is shown in loss mean."),
        (short, "Over 40 steps no curve is shown to differ: too few steps for loss mean."),
        (a, every),
    ):
        file = str(tmp_path / "found.json")
        assert compare_command([str(a), str(other)], curves=True, json_path=file) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[:3] == [answer, f"A: {a}", f"B: {other}"]
        assert json.loads((tmp_path / "found.json").read_text())["sentence"] == answer
        assert [line.count(f"needs {compare_curves(a, short)[0].needed} steps") for line in said[6:-1]] == (
            [1] if other is short else [0] * (len(said) - 7)
        )


def test_what_only_rounding_parts_is_the_same(tmp_path: Path) -> None:
    """Replicas that all hold one batch: a cosine of 1 or 1 - 1e-16, an angle of 0 or 1e-15."""
    loss = np.random.default_rng(8).standard_normal(100)
    a = write(tmp_path / "a", loss, std=np.zeros(100), angle=np.zeros(100))
    b = write(tmp_path / "b", loss * (1.0 + 2.0**-25), std=np.zeros(100), angle=np.full(100, 1e-15))
    found = compare_curves(a, b)
    assert {one.metric: one.verdict for one in found} == dict.fromkeys(("loss mean", "loss std", ANGLE), "the same")
    c = write(tmp_path / "c", loss * (1.0 + 2.0**-22) + 1e-6, std=np.zeros(100), angle=np.zeros(100))
    assert compare_curves(a, c)[0].verdict == "higher in B"


def test_what_has_no_mean_or_bounds_another_number_is_not_compared() -> None:
    names = {one.column for one in COMPARED}
    assert not {"noise scale", "integrity bound", "mean of means angle error", "step seconds", "samples"} & names
    assert {"loss mean", "loss std", "norm mean", "cosine mean", "integrity error", "label weights", ANGLE} <= names


def test_a_long_run_needs_no_more_memory_than_a_short_one() -> None:
    """A block a step would be 4,000 draws of 300,000 numbers: 10 GB."""
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((2, 300_000))
    tracemalloc.start()
    found = difference("loss mean", a, b + 0.1, 0.99)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.block, found.blocks, found.verdict) == (300, 1000, "higher in B")
    assert most < 300e6
    assert found.high - found.low == pytest.approx(2 * 2.576 * (2.0 / 300_000) ** 0.5, rel=0.1)


def test_the_spread_of_few_blocks_is_not_underrated(tmp_path: Path) -> None:
    """Blocks of 6 of 60 steps spread around their own mean a tenth less than around the mean of the series."""
    series = np.random.default_rng(2).standard_normal(60)
    low, high = mean_interval(series, 6, 0.95)
    means = np.array([np.take(series, range(at, at + 6), mode="wrap").mean() for at in range(60)])
    drawn = means[np.random.default_rng(0).integers(0, 60, (4000, 10))]
    ratios = np.sort((drawn.mean(1) - series.mean()) / (drawn.std(1, ddof=1) / 10**0.5))
    error = means.std() / 10**0.5 * (1 / 0.9) ** 0.5
    at = 0.975 * 4001  # of ranks from 1 on
    above = ratios[int(at) - 1] + (at - int(at)) * (ratios[int(at)] - ratios[int(at) - 1])
    assert low == pytest.approx(series.mean() - above * error, rel=1e-9)
    assert high > series.mean()


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
        assert compare_command([str(one) for one in runs], curves=True) == 2
        sentence = capsys.readouterr().err
        assert told in sentence
        assert sentence.count("\n") == 1
