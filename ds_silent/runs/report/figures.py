"""What is drawn of a run: one function per figure, each from the run to a panel or None. Pure.

panel = loss(view)         # None where nothing of it was measured
panel.figure.markup, panel.note
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from ds_silent.runs import RunRecords, RunVerdict
from ds_silent.runs.report.axis import Axis, Curve, Floats, binned, shown, smoothed
from ds_silent.runs.report.drawing import Figure, Mark, Series, chart

_OF_FEW = {4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14}
"""By which a median of so few deviations is too small (Croux and Rousseeuw 1992)."""
_OUTSIDE = 1e-3
"""Share of the steps in which chance alone puts one of the ranks outside of the band."""


@dataclass(frozen=True)
class View:
    """A run, its verdict, and the bins that all its figures share."""

    run: RunRecords
    verdict: RunVerdict
    axis: Axis
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Panel:
    """One drawing with what it says.

    Attributes:
        keys: name and tone of what is drawn, for the legend.
    """

    figure: Figure
    note: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    wide: bool = field(default=False)


def view_of(run: RunRecords, verdict: RunVerdict) -> View:
    """The bins go over the measured steps, or over the events where none was measured."""
    steps = run.steps.step
    if not len(steps):
        told = sorted({step for group in run.events.groups() for step in (group.first, group.last)})
        steps = np.array(told, dtype=np.int64)
    marks = {
        span[0]: Mark(span[0], group.severity)
        for group in reversed(run.events.groups()[:200])
        if group.severity != "info" and not group.follows and group.first > 0
        for span in group.spans[:3]
    }
    return View(run, verdict, Axis.of(steps), tuple(marks[step] for step in sorted(marks)[:40]))


def column(view: View, name: str) -> Curve:
    """Of the steps' numbers."""
    steps = view.run.steps
    return binned(view.axis, steps.step, steps[name], steps.measured(name))


def _of_ranks(view: View, name: str, label: str, extra: list[Series] | None = None, zero: bool = False) -> Panel | None:
    """The middle of the ranks, the lowest and the highest, and where sampling noise puts them."""
    middle, low, high = (column(view, f"{name} {what}") for what in ("median", "low", "high"))
    mean = column(view, f"{name} mean")
    if middle.empty and mean.empty:
        return None
    ranks = view.run.world_size
    band = _noise_band(middle.mean, column(view, f"{name} spread").mean, ranks)
    series = [
        Series("sampling noise", band, "band", "quiet"),
        Series("lowest rank", Curve(low.low, low.low, low.low, low.broken[:0]), "thin", "b"),
        Series("highest rank", Curve(high.high, high.high, high.high, high.broken[:0]), "thin", "c"),
        *(extra or []),
        Series("mean", mean, "line", "a"),
    ]
    series = [one for one in series if not one.curve.empty]
    figure = chart(view.axis, series, label, marks=view.marks, height=170, zero=zero)
    names = {"band": "band: where sampling noise alone puts all ranks"}
    keys = tuple((names.get(one.style, one.name), one.tone) for one in series)
    return Panel(figure, _outside(view, name, band), keys)


def _noise_band(middle: Floats, spread: Floats, ranks: int) -> Curve:
    """Median ± z robust deviations, so that chance puts a rank outside in one step of a thousand."""
    z = -NormalDist().inv_cdf(_OUTSIDE / 2 / max(ranks, 1)) * _OF_FEW.get(ranks, 1.0)
    usual = smoothed(spread)
    with np.errstate(over="ignore"):
        return Curve(middle - z * usual, middle, middle + z * usual, np.zeros(0, dtype=np.intp))


def _outside(view: View, name: str, band: Curve) -> str:
    """In how many of the drawn bins a rank is outside."""
    if view.run.world_size < 3:
        return ""
    low, high = column(view, f"{name} low").low, column(view, f"{name} high").high
    known = np.isfinite(band.low) & np.isfinite(low)
    with np.errstate(invalid="ignore"):
        outside = int((known & ((low < band.low) | (high > band.high))).sum())
    if not known.any() or outside <= 0.01 * known.sum():
        return ""
    return f"A rank is outside of the band in {outside:,} of {int(known.sum()):,} places."


def loss(view: View) -> Panel | None:
    """Losses of the ranks."""
    return _of_ranks(view, "loss", "Loss of each step: mean, lowest and highest rank, and the band of sampling noise")


def norm(view: View) -> Panel | None:
    """Norms of the ranks' gradients, and of what came out of the reduction."""
    aggregated = Series("after the reduction", column(view, "norm aggregated"), "dash", "d")
    label = "Gradient norm of each step: mean, lowest and highest rank, after the reduction, and the noise band"
    return _of_ranks(view, "norm", label, [aggregated], zero=True)


def cosine(view: View) -> Panel | None:
    """Cosines of the ranks' gradients, and where the noise scale says their mean should be."""
    expected = _expected_cosine(view)
    flat = np.full(view.axis.bins, math.nan if expected is None else expected)
    extra = [Series("expected", Curve(flat, flat, flat, np.zeros(0, dtype=np.intp)), "dash", "d", told=False)]
    label = "Cosine of each rank's gradient with the mean of the others, and the mean over all pairs"
    panel = _of_ranks(view, "cosine", label, extra)
    if panel is None:
        return None
    mean = view.run.steps["cosine mean"]
    known = mean[np.isfinite(mean)]
    notes = [panel.note] if panel.note else []
    if len(known) and float(np.median(known)) > 0.999:
        notes.append("A mean cosine of 1 is no health: the ranks do the same work.")
    elif expected is not None:
        notes.append(f"By the usual noise scale the mean should be about {shown(expected)} (dashed).")
    keys = tuple(("mean over all pairs" if name == "mean" else name, tone) for name, tone in panel.keys)
    return Panel(panel.figure, " ".join(notes), keys)


def batch_of(view: View) -> float | None:
    """Rows of all ranks in one step."""
    steps = view.run.steps
    samples, step = steps["samples"], steps.step
    if len(step) == 1 and samples[0] > 0:
        return float(samples[0] / step[0]) if step[0] else None
    rows = np.diff(samples) / np.maximum(np.diff(step), 1)
    rows = rows[np.isfinite(rows) & (rows > 0)]
    return float(np.median(rows)) if len(rows) else None


def usual_noise(view: View) -> float | None:
    """The median over the steps."""
    noise = view.run.steps["noise scale"]
    noise = noise[np.isfinite(noise)]
    return float(np.median(noise)) if len(noise) else None


def _expected_cosine(view: View) -> float | None:
    noise, batch, ranks = usual_noise(view), batch_of(view), view.run.world_size
    if noise is None or batch is None or not ranks or noise <= 0:
        return None
    return 1.0 / (1.0 + noise * ranks / batch)


def noise_scale(view: View) -> Panel | None:
    """The noise scale beside the batch, and what that means."""
    curve = column(view, "noise scale")
    if curve.empty:
        return None
    middle = smoothed(curve.mean, 15)
    smooth = Curve(middle, middle, middle, np.zeros(0, dtype=np.intp))
    batch = batch_of(view)
    series = [Series("each step", curve, "thin", "quiet"), Series("smoothed", smooth, "line", "a")]
    label = "Gradient noise scale in samples, and the batch of all ranks"
    log = bool((curve.mean[np.isfinite(curve.mean)] > 0).mean() > 0.9) if np.isfinite(curve.mean).any() else False
    figure = chart(view.axis, series, label, log=log, level=batch, marks=view.marks)
    keys = (("one step", "quiet"), ("smoothed", "a"), ("rows of one step", "level"))
    return Panel(figure, _noise_words(usual_noise(view), batch), keys)


def _noise_words(noise: float | None, batch: float | None) -> str:
    if noise is None:
        return ""
    if noise <= 0:
        return "Single steps cannot tell the signal from its noise: the noise scale is far above the batch."
    if batch is None:
        return f"Usually about {shown(noise, 2)} samples."
    said = f"Usually about {shown(noise, 2)} samples; one step takes {shown(batch)}. "
    if noise > 4 * batch:
        return said + "A larger batch, or more ranks, would still pay nearly in full."
    if noise < batch / 4:
        return said + "The batch is far beyond it: more ranks hardly help."
    return said + "The two are of one size: more ranks pay in part."


def coverage(view: View) -> Panel | None:
    """Shares of the epoch, and rows that several ranks hold."""
    curves = [
        ("seen once or more", column(view, "seen"), "a"),
        ("seen again within an epoch", column(view, "repeated"), "c"),
    ]
    drawn = [Series(name, curve, "line", tone) for name, curve, tone in curves if not curve.empty]
    if not drawn:
        return None
    steps = view.run.steps
    rows = steps["duplicates"]
    total = float(rows[np.isfinite(rows)].sum()) if np.isfinite(rows).any() else None
    figure = chart(view.axis, drawn, "Shares of the epoch's rows", zero=True, marks=view.marks)
    said = (
        ""
        if total is None
        else (
            "No row was held by two ranks."
            if total == 0
            else f"{total:,.0f} rows were held by several ranks in one step."
        )
    )
    return Panel(figure, said, tuple((one.name, one.tone) for one in drawn))


def integrity(view: View) -> Panel | None:
    """The reduction's error against what rounding explains."""
    error, bound = column(view, "integrity error"), column(view, "integrity bound")
    if error.empty and bound.empty:
        return None
    series = [Series("bound", bound, "dash", "bad"), Series("error", error, "line", "a")]
    figure = chart(
        view.axis, series, "Relative error of the reduced gradient and its rounding bound", log=True, marks=view.marks
    )
    steps = view.run.steps
    with np.errstate(invalid="ignore"):
        over = int((steps["integrity error"] > steps["integrity bound"]).sum())
    note = f"Above its bound at {over:,} step{'s' * (over != 1)}." if over else "Below its bound at every step."
    return Panel(figure, note, (("error", "a"), ("what rounding explains at most", "bad")))


def cost(view: View) -> Panel | None:
    """What observing took of each step's time."""
    step, observe = column(view, "step seconds"), column(view, "observe seconds")
    series = [Series("step", step, "line", "a"), Series("observing", observe, "line", "c")]
    series = [one for one in series if not one.curve.empty]
    if not series:
        return None
    taken, whole = view.run.steps["observe seconds"], view.run.steps["step seconds"]
    known = np.isfinite(taken) & np.isfinite(whole) & (whole > 0)
    note = ""
    if known.any():
        share, seconds = float(np.median(taken[known] / whole[known])), float(np.median(taken[known]))
        note = f"Observing took {share:.1%} of the typical measured step ({shown(seconds * 1e3, 2)} ms)."
    figure = chart(view.axis, series, "Seconds of each step, and of observing it", zero=True, marks=view.marks)
    return Panel(figure, note, tuple((one.name, one.tone) for one in series))


def scores(view: View) -> list[tuple[str, Panel]]:
    """Each detector's score over its threshold; nearest first."""
    found = []
    for (detector, where), held in view.run.scores.curves.items():
        step = np.array(held.step, dtype=np.int64)
        with np.errstate(all="ignore"):
            share = np.array(held.score) / np.array(held.threshold)
        share = np.where(np.array(held.threshold) > 0, np.maximum(share, 0.0), np.nan)
        if not len(step) or not np.isfinite(share).any():
            continue
        curve = binned(view.axis, step, share)
        nearest = int(np.nanargmax(np.where(np.isfinite(share), share, -1.0)))
        top = float(share[nearest])
        title = f"{detector}: {where}" if where else detector
        upper = Curve(np.zeros(view.axis.bins), curve.high, curve.high, curve.broken)
        series = [
            Series(
                "score / threshold",
                Curve(upper.mean, upper.mean, upper.mean, upper.broken),
                "line",
                "bad" if top >= 1 else "a",
            )
        ]
        figure = chart(
            view.axis,
            series,
            f"{title}: score over threshold",
            height=56,
            level=1.0,
            y_count=2,
            between=(0.0, max(1.15, min(top * 1.1, 3.0))),
        )
        rank = held.rank[nearest]
        whose = f", rank {rank}" if rank >= 0 else ""
        found.append((top, title, Panel(figure, f"nearest {_percent(top)} at step {step[nearest]:,}{whose}")))
    found.sort(key=lambda one: -one[0])
    return [(title, panel) for _, title, panel in found]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 100 else f"{shown(share)} times"


CURVES: tuple[tuple[str, str, str, Callable[[View], Panel | None]], ...] = (
    ("loss", "Loss", "Of each rank's own rows.", loss),
    ("norm", "Gradient norm", "Of each rank's own gradient, before the reduction.", norm),
    ("cosine", "Gradient direction", "Cosine of each rank's gradient with the mean of the others.", cosine),
)
FURTHER: tuple[tuple[str, str, str, Callable[[View], Panel | None]], ...] = (
    (
        "integrity",
        "Is the reduction right?",
        "Distance of the reduced gradient from the mean of the ranks' gradients.",
        integrity,
    ),
    ("noise", "Noise scale", "The batch, in samples, beyond which more data parallelism hardly helps.", noise_scale),
    ("coverage", "Rows", "What the ranks have taken of the epoch.", coverage),
    ("cost", "What observing costs", "Wall time of the writing rank, in seconds.", cost),
)
