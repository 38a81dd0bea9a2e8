"""The two pictures; each reads results of trainings only."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import cells
from .cells import VARIANCES, cell
from .errors import Noise
from .methods import TITLES
from .store import Store
from .tables import divergences, mean_of, replica_score

COLOURS = {"none": "C3", "sync-5": "C0", "sync-10": "C2", "sync-50": "C1", "dynamic": "C4"}


def draw_divergence(store: Store, seeds: int, path: Path) -> None:
    """Measured and expected E |mean theta - theta_m|^2 against the step, plain SGD."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    steps = range(1, cells.STEPS + 1)
    for method, measured, expected in divergences(store, seeds):
        axes.plot(steps, measured, color=COLOURS[method], lw=2.5, alpha=0.6, label=TITLES[method])
        axes.plot(steps, expected, color="black", lw=0.8, ls="--", label="formula" if method == "none" else None)
    axes.set(xlabel="optimizer step", ylabel="mean over ranks of $|\\bar\\theta - \\theta_m|^2$", ylim=(0, None))
    axes.set_title(
        "Replicas walk apart as the formula says; an averaging brings them back to 0\n"
        f"digits, 4 ranks, plain SGD, $\\sigma^2$ = {cells.DIVERGENCE_VARIANCE:g}, {seeds} seeds",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_accuracy(store: Store, seeds: int, path: Path) -> None:
    """Accuracy of the replicas over sigma^2, with standard errors, SGD with momentum."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    variances = VARIANCES["sgd"]
    for number, method in enumerate(COLOURS):
        places, means = [], []
        for place, variance in enumerate(variances):
            done = [t for s in range(seeds) if (t := cell("digits", "sgd", method, Noise(variance), s)) in store]
            if done:
                places.append(place + 0.03 * (number - 2))
                means.append(mean_of([replica_score(store[t]) for t in done]))
        errors = [mean.error for mean in means]
        values = [mean.value for mean in means]
        axes.errorbar(places, values, errors, color=COLOURS[method], marker="o", ms=4, capsize=2, label=TITLES[method])
    healthy = [t for s in range(seeds) if (t := cell("digits", "sgd", "none", None, s)) in store]
    if healthy:
        axes.axhline(mean_of([replica_score(store[t]) for t in healthy]).value, color="grey", ls=":", label="no error")
    axes.set_xticks(range(len(variances)), [f"{variance:g}" for variance in variances])
    axes.set(xlabel="$\\sigma^2$ of the error on each rank's aggregated gradient", ylabel="accuracy, %", ylim=(0, 100))
    axes.set_title(
        "Averaging often saves most of what a noisy reduction costs; every 50 steps is too seldom\n"
        f"digits, 4 ranks, SGD with momentum, {seeds} seeds",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
