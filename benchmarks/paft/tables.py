"""What the trainings say: tables over the seeds, and the same numbers for ``--json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from . import cells
from .cells import SPARSE, SPARSE_METHODS, VARIANCES, cell
from .errors import Error, Noise
from .methods import METHODS, TITLES
from .store import Store
from .tasks import TASKS
from .theory import expected_divergence
from .training import RANKS, Training

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """Over the seeds: mean and its standard error (0 with one seed)."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.1f} ± {self.error:.1f}"


def mean_of(values: Sequence[float]) -> Mean:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Mean(statistics.fmean(values), error)


def replica_score(result: dict[str, Any]) -> float:
    """Mean over the ranks of what each rank's own replica scores."""
    return statistics.fmean(result["scores"])


def noise_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    """Accuracy and size of the noise, per optimizer."""
    tables, numbers = [], {}
    for optimizer, variances in VARIANCES.items():
        for name, score in (("each rank's own replica", replica_score), ("the mean of the replicas", _of_mean)):
            table, found = _grid(
                f"Digits, {optimizer}, {seeds} seeds: accuracy (%) of {name}, ± standard error",
                lambda method, error, o=optimizer: [cell("digits", o, method, error, seed) for seed in range(seeds)],
                *(store, cells.METHODS_OF[optimizer], variances, score),
            )
            tables.append(table)
            numbers[f"{optimizer}, {name}"] = found
    return tables, numbers


def language_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    table, found = _grid(
        f"Language model, SGD with momentum, {seeds} seeds: loss on held-out rows (each rank's own replica)",
        lambda method, error: [cell("language", "sgd", method, error, seed) for seed in range(seeds)],
        *(store, cells.LANGUAGE_METHODS, cells.LANGUAGE_VARIANCES, replica_score),
        digits=3,
    )
    return [table], {"language": found}


def _of_mean(result: dict[str, Any]) -> float:
    return float(result["score_of_mean"])


def _grid(
    title: str,
    trainings: Callable[[str, Error], list[Training]],
    store: Store,
    methods: Sequence[str],
    variances: Sequence[float],
    score: Callable[[dict[str, Any]], float],
    digits: int = 1,
) -> tuple[Table, Numbers]:
    table, numbers = Table(title=title), {}
    for column in ("sigma²", *(f"{variance:g}" for variance in variances)):
        table.add_column(column, justify="left" if column == "sigma²" else "right")

    def row(name: str, method: str, errors: Sequence[Error], score: Callable[[dict[str, Any]], float]) -> None:
        means = []
        for error in errors:
            done = [training for training in trainings(method, error) if training in store]
            means.append(mean_of([score(store[training]) for training in done]) if done else None)
        table.add_row(name, *("" if m is None else f"{m.value:.{digits}f} ± {m.error:.{digits}f}" for m in means))
        numbers[name] = [None if m is None else [m.value, m.error] for m in means]

    noisy = [Noise(variance) for variance in variances]
    row("no error", "none", [None] * len(variances), score)
    for method in methods:
        row(TITLES[method], method, noisy, score)
    row("|eps| / |g|, no mitigation", "none", noisy, lambda result: result["relative_noise"])
    return table, numbers


def burst_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    """Per fault and method: accuracy, what is lost against the same seed without an error, and equal weights."""
    table = Table(title=f"Digits, SGD, {seeds} seeds, a fault every {cells.EVERY} steps: accuracy (%) ± standard error")
    lost = Table(
        title="Accuracy lost against the same seed without an error; in brackets: seeds with identical weights"
    )
    for each in (table, lost):
        each.add_column("fault")
        for method in SPARSE_METHODS:
            each.add_column(TITLES[method], justify="right")
    numbers: Numbers = {}
    for name, error in {"no error": None, **SPARSE}.items():
        accuracies, losses = [], []
        for method in SPARSE_METHODS:
            pairs = [
                (store[trained], store[healthy])
                for seed in range(seeds)
                if (trained := cell("digits", "sgd", method, error, seed)) in store
                and (healthy := cell("digits", "sgd", "none", None, seed)) in store
            ]
            if not pairs:
                accuracies.append("")
                losses.append("")
                continue
            accuracy = mean_of([replica_score(ours) for ours, _ in pairs])
            loss = mean_of([replica_score(plain) - replica_score(ours) for ours, plain in pairs])
            same = sum(ours["hash"] == plain["hash"] for ours, plain in pairs)
            accuracies.append(str(accuracy))
            losses.append(f"{loss} ({same})")
            numbers[f"{name}, {method}"] = {
                "accuracy": [accuracy.value, accuracy.error],
                "lost": [loss.value, loss.error],
                "identical": same,
                "seeds": len(pairs),
                "attempts": statistics.fmean(ours["attempts"] for ours, _ in pairs),
            }
        table.add_row(name, *accuracies)
        lost.add_row(name, *losses)
    return [table, lost], numbers


def expected_for(method: str) -> list[float]:
    """The formula's curve for one training of the part ``divergence``."""
    elements = sum(parameter.numel() for parameter in TASKS["digits"].model(0).parameters())
    rates = [cells.DIVERGENCE_RATE] * cells.STEPS
    return expected_divergence(rates, cells.DIVERGENCE_VARIANCE, elements, RANKS, METHODS[method].period)


def divergence_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    """At the last step, and the worst ratio to the formula over all steps where replicas differ."""
    table = Table(title=f"Plain SGD, sigma² {cells.DIVERGENCE_VARIANCE:g}, {seeds} seeds: E |mean theta - theta_m|²")
    for column in ("method", "measured, last step", "formula", "measured / formula over the steps"):
        table.add_column(column, justify="left" if column == "method" else "right")
    numbers: Numbers = {}
    for method in ("none", "sync-50", "sync-10"):
        runs = [store[t]["divergences"] for t in cells.divergence(seeds) if t.method == method and t in store]
        if not runs:
            continue
        measured = [statistics.fmean(values) for values in zip(*runs, strict=True)]
        expected = expected_for(method)
        ratios = [m / e for m, e in zip(measured, expected, strict=True) if e > 0]
        spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
        table.add_row(TITLES[method], f"{measured[-1]:.4f}", f"{expected[-1]:.4f}", spread)
        numbers[method] = {"measured": measured, "expected": expected}
    return [table], numbers
