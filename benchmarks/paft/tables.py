"""What the trainings say: tables over the seeds, and the same numbers for ``--json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
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
from .training import RANKS

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
    """Per optimizer: accuracy of the replicas, of their mean, and what the methods did."""
    tables, numbers = [], {}
    for optimizer, variances in VARIANCES.items():
        methods = cells.METHODS_OF[optimizer]
        grid = _Grid(store, "digits", optimizer, variances, seeds)
        title = f"Digits, {optimizer}, {seeds} seeds"
        rows = [("no error", grid.healthy(replica_score))]
        rows += [(TITLES[method], grid.noisy(method, replica_score)) for method in methods]
        tables.append(_table(f"{title}: accuracy (%) of each replica, ± standard error", variances, rows))
        means = [(TITLES[method], grid.noisy(method, _of_mean)) for method in methods if method in cells.PAFT]
        tables.append(_table(f"{title}: accuracy (%) of their mean, ± standard error", variances, means))
        done = [("|eps| / |g|, no mitigation", grid.noisy("none", _relative_noise))]
        done += [
            (f"averagings, {TITLES[method]}", grid.noisy(method, _repairs)) for method in methods if method != "none"
        ]
        done.append(("attempts per step, retry", grid.noisy("retry", _attempts)))
        tables.append(_table(f"Digits, {optimizer}: what happened", variances, done))
        numbers[optimizer] = {"replicas": dict(rows), "mean of replicas": dict(means), "done": dict(done)}
    return tables, numbers


def language_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    variances = cells.LANGUAGE_VARIANCES
    grid = _Grid(store, "language", "sgd", variances, seeds)
    rows = [("no error", grid.healthy(replica_score))]
    rows += [(TITLES[method], grid.noisy(method, replica_score)) for method in cells.LANGUAGE_METHODS]
    rows.append(("|eps| / |g|, no mitigation", grid.noisy("none", _relative_noise)))
    title = f"Language model, sgd, {seeds} seeds: held-out loss"
    return [_table(title, variances, rows, digits=3)], {"language": dict(rows)}


Scores = list[list[float]]
"""One list for each column: a number per seed, none where it has not been run."""


def _of_mean(result: dict[str, Any]) -> float:
    return float(result["score_of_mean"])


def _relative_noise(result: dict[str, Any]) -> float:
    return float(result["relative_noise"])


def _repairs(result: dict[str, Any]) -> float:
    return float(len(result["repaired_steps"]))


def _attempts(result: dict[str, Any]) -> float:
    return float(result["attempts"])


@dataclass(frozen=True)
class _Grid:
    """Trainings under constant noise, one column for each variance."""

    store: Store
    task: str
    optimizer: str
    variances: Sequence[float]
    seeds: int

    def noisy(self, method: str, score: Callable[[dict[str, Any]], float]) -> Scores:
        return [self._scores(method, Noise(variance), score) for variance in self.variances]

    def healthy(self, score: Callable[[dict[str, Any]], float]) -> Scores:
        return [self._scores("none", None, score) for _ in self.variances]

    def _scores(self, method: str, error: Error, score: Callable[[dict[str, Any]], float]) -> list[float]:
        trainings = [cell(self.task, self.optimizer, method, error, seed) for seed in range(self.seeds)]
        return [score(self.store[training]) for training in trainings if training in self.store]


def _table(title: str, variances: Sequence[float], rows: Sequence[tuple[str, Scores]], digits: int = 1) -> Table:
    table = Table(title=title)
    for column in ("sigma²", *(f"{variance:g}" for variance in variances)):
        table.add_column(column, justify="left" if column == "sigma²" else "right")
    for name, scores in rows:
        means = [mean_of(values) if values else None for values in scores]
        if any(means):
            table.add_row(name, *("" if m is None else f"{m.value:.{digits}f} ± {m.error:.{digits}f}" for m in means))
    return table


def burst_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    """Per fault and method: accuracy, what is lost against the same seed without an error, and equal weights."""
    table = Table(title=f"Digits, SGD, {seeds} seeds, a fault every {cells.EVERY} steps: accuracy (%) ± standard error")
    lost = Table(title="Accuracy lost against the same seed without an error (seeds with bit-identical weights)")
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
                if (trained := cell("digits", "sgd", method, error and cells.representative(method, error), seed))
                in store
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


def divergences(store: Store, seeds: int) -> Iterator[tuple[str, list[float], list[float]]]:
    """Method, and per step the squared distance of the replicas from their mean: over the seeds' runs, and expected."""
    for method in ("none", "sync-50", "sync-10"):
        runs = [store[t]["divergences"] for t in cells.divergence(seeds) if t.method == method and t in store]
        if runs:
            yield method, [statistics.fmean(values) for values in zip(*runs, strict=True)], expected_for(method)


def divergence_tables(store: Store, seeds: int) -> tuple[list[Table], Numbers]:
    """At the last step, and the worst ratio to the formula over all steps where replicas differ."""
    table = Table(title=f"Plain SGD, sigma² {cells.DIVERGENCE_VARIANCE:g}, {seeds} seeds: E |mean theta - theta_m|²")
    for column in ("method", "measured, last step", "formula", "measured / formula over the steps"):
        table.add_column(column, justify="left" if column == "method" else "right")
    numbers: Numbers = {}
    for method, measured, expected in divergences(store, seeds):
        ratios = [m / e for m, e in zip(measured, expected, strict=True) if e > 0]
        spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
        table.add_row(TITLES[method], f"{measured[-1]:.4f}", f"{expected[-1]:.4f}", spread)
        numbers[method] = {"measured": measured, "expected": expected}
    return [table], numbers
