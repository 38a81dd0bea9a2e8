"""What the demonstration shows, read from its records only: a table, a picture and two computed sentences.

    report(Path("runs/demo"))

Nothing is claimed that the figures do not say: a run that shows something else is described as it is.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ds_silent.extras import installed, missing_sentence
from ds_silent.sinks.jsonl import read_events
from finetune.settings import SamplerMode, Scenario

PICTURE = "scenarios.png"
APART = 4.0  # standard errors from which two scenarios count as told apart; three metrics are compared at once
SAME_DIRECTION = 0.999  # a mean cosine from which gradients are copies of each other, but for rounding


@dataclass(frozen=True)
class Case:
    """One run of the demonstration."""

    scenario: Scenario
    sampler: SamplerMode
    title: str

    @property
    def name(self) -> str:
        """Its directory below ``runs/demo``."""
        return f"{self.sampler}-{self.scenario}"


CASES = (
    Case("s1-1", "sharded", "sharded, same seed"),
    Case("s1-3", "sharded", "sharded, each rank its own seed"),
    Case("s1-1", "replicated", "replicated, same seed"),
    Case("s1-2", "replicated", "replicated, rank 0 another seed"),
    Case("s1-3", "replicated", "replicated, each rank its own seed"),
)


@dataclass(frozen=True)
class Curves:
    """One value per measured step; steps at which a metric was not measured or not finite are left out of it."""

    loss_std: tuple[tuple[int, float], ...]
    norm_cv: tuple[tuple[int, float], ...]
    cosine: tuple[tuple[int, float], ...]
    coverage: float  # share of the rows that a whole epoch visits, found by walking the sampler, not by training
    alarm: str = "none"  # the first, as kind and step


METRICS = (("loss_std", "loss std"), ("norm_cv", "gradient norm CV"), ("cosine", "mean cosine"))


def report(directory: Path) -> None:
    """Prints sentences and where to look further; writes ``scenarios.png`` into ``directory``."""
    curves = {case: read_curves(directory / case.name) for case in CASES}
    console = Console(soft_wrap=True)
    drawable = installed("matplotlib")
    if drawable:
        draw(curves, directory / PICTURE)
    for sentence in (sharded_sentence(curves), replicated_sentence(curves)):
        console.print(sentence, highlight=False, markup=False)
    picture = directory / PICTURE if drawable else missing_sentence("it", ["matplotlib"], "plots")
    console.print(
        f"picture: {picture}   curves: .venv/bin/tensorboard --logdir {directory}", highlight=False, markup=False
    )


def read_curves(directory: Path) -> Curves:
    """The records of one run, from its ``metrics.jsonl``, ``events.jsonl`` and ``coverage.json``."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]

    def curve(group: str, name: str) -> tuple[tuple[int, float], ...]:
        values = ((record["step"], record[group][name]) for record in records)
        numbers = ((step, float(value)) for step, value in values if value is not None)  # "nan" is one of float's words
        return tuple((step, value) for step, value in numbers if math.isfinite(value))

    epoch = json.loads((directory / "coverage.json").read_text(encoding="utf-8"))["epoch"]
    curves = curve("loss", "std"), curve("grad_norm", "cv"), curve("direction", "mean_cosine")
    return Curves(*curves, epoch, first_alarm(directory / "events.jsonl"))


def first_alarm(path: Path) -> str:
    """The first event that asks for somebody's attention, in a few words; "none" in a healthy run."""
    for event in read_events(path) if path.is_file() else []:
        if event["severity"] != "info":
            return f"{event['kind']}, {'preflight' if event['step'] == 0 else 'step ' + str(event['step'])}"
    return "none"


def mean(curve: Sequence[tuple[int, float]]) -> float:
    """Over the steps; NaN for a curve without any."""
    return statistics.fmean(value for _, value in curve) if curve else math.nan


def separation(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> float:
    """Difference of two curves' means in standard errors (Welch); NaN when either has fewer than two steps."""
    if min(len(one), len(other)) < 2:
        return math.nan
    squares = sum(statistics.variance([value for _, value in curve]) / len(curve) for curve in (one, other))
    difference = abs(mean(one) - mean(other))
    if squares == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / math.sqrt(squares)


_COLUMNS = ("<30", "<11", ">8", ">9", ">13", ">14", "<1")


def heading() -> str:
    """Above the rows: means over all steps; the share of the rows that an epoch visits is counted by walking it."""
    return _columns("scenario", "sampler", "loss std", "norm CV", "mean cosine", "epoch visits", "  first alarm")


def row_of(case: Case, found: Curves) -> str:
    """One scenario on one line."""
    numbers = [f"{mean(getattr(found, key)):.3f}" for key, _ in METRICS]
    name = f"{case.scenario}: {case.title.split(', ')[1]}"
    return _columns(name, case.sampler, *numbers, f"{found.coverage:.1%}", f"  {found.alarm}")


def table_of(curves: Mapping[Case, Curves]) -> str:
    """One row per scenario: the means over its steps, the rows that an epoch of it visits, and the first alarm."""
    return "\n".join([heading(), *(row_of(case, found) for case, found in curves.items())])


def _columns(*cells: str) -> str:
    return "".join(f"{cell:{width}}" for cell, width in zip(cells, _COLUMNS, strict=True))


def sharded_sentence(curves: Mapping[Case, Curves]) -> str:
    """Whether the three metrics tell the sharded scenarios apart, and what coverage says of them."""
    same, own = CASES[0], CASES[1]
    apart = {label: separation(getattr(curves[same], key), getattr(curves[own], key)) for key, label in METRICS}
    figures = ", ".join(f"{label} {value:.1f}" for label, value in apart.items())
    coverage = f"an epoch visits {curves[same].coverage:.1%} of the rows with one seed and {curves[own].coverage:.1%}"
    if any(math.isnan(value) for value in apart.values()):
        return f"Too few steps were measured to compare the sharded scenarios; {coverage} with a seed per rank."
    if max(apart.values()) < APART:
        return (
            f"The sharded scenarios cannot be told apart by these metrics (their means differ by {figures} standard "
            f"errors), although {coverage} with a seed per rank."
        )
    worst = max(apart, key=lambda label: apart[label])
    return (
        f"In this run the sharded scenarios differ in {worst} by {apart[worst]:.1f} standard errors ({figures}); "
        f"{coverage} with a seed per rank."
    )


def replicated_sentence(curves: Mapping[Case, Curves]) -> str:
    """Whether a mean cosine of 1 was seen, and that it means duplicated work."""
    copies, healthy = CASES[2], CASES[0]
    cosine, reference = mean(curves[copies].cosine), mean(curves[healthy].cosine)
    covered = f"an epoch visits {curves[copies].coverage:.1%} of the rows"
    if math.isnan(cosine):
        return "The mean cosine of the replicated scenario with one seed was not measured."
    if cosine >= SAME_DIRECTION:
        return (
            f"A mean cosine of {cosine:.3f} with a loss std of {mean(curves[copies].loss_std):.3f} ({copies.title}) is "
            f"not health but duplicated work: all ranks computed the same gradient from the same rows, {covered}, and "
            f"correctly sharded ranks show {reference:.3f}."
        )
    return (
        f"In this run the replicated ranks with one seed had a mean cosine of {cosine:.3f}, not 1: they did not "
        f"compute the same gradient (correctly sharded ranks show {reference:.3f}; {covered})."
    )


def panel_title(label: str, key: str, curves: Mapping[Case, Curves]) -> str:
    """What a panel shows, from its figures: the scenario that stands out, and where the others are."""
    means = {case: mean(getattr(found, key)) for case, found in curves.items()}
    finite = {case: value for case, value in means.items() if math.isfinite(value)}
    if len(finite) < 2:
        return f"{label}: not measured"
    centre = statistics.median(finite.values())
    outlier = max(finite, key=lambda case: abs(finite[case] - centre))
    others = [value for case, value in finite.items() if case is not outlier]
    return f"{label}: {finite[outlier]:.2f} {outlier.title},\n{min(others):.2f} to {max(others):.2f} the others"


def running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    """Of the last ``window`` values at each step, fewer at the start."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw(curves: Mapping[Case, Curves], path: Path) -> None:
    """The three metrics' curves side by side, thin as measured and thick as a running mean of 5 steps, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(METRICS))
    for axis, (key, label) in zip(axes, METRICS, strict=True):
        for position, (case, found) in enumerate(curves.items()):
            steps = [step for step, _ in getattr(found, key)]
            values = [value for _, value in getattr(found, key)]
            style = "-" if case.sampler == "sharded" else "--"
            axis.plot(steps, values, color=f"C{position}", linewidth=0.7, alpha=0.35)
            axis.plot(steps, running_mean(values), style, color=f"C{position}", label=case.title, linewidth=2.0)
        axis.set_title(panel_title(label, key, curves), fontsize=11)
        axis.set_xlabel("optimizer step (thick: mean of 5)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
