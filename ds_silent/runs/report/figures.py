"""Draw what was measured: one function per figure, each from the run to a panel or None. Pure.

panel = loss(view)         # None where nothing of it was measured
panel.markup, panel.note
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ds_silent.runs.columns import Floats
from ds_silent.runs.lines import Metric
from ds_silent.runs.report.axis import Axis, BinnedCurve, binned, shown, smoothed
from ds_silent.runs.report.svg import Mark, Panel, Series, chart
from ds_silent.runs.run import RunRecords
from ds_silent.runs.verdict import RunVerdict

_OF_FEW = {4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14}
"""By which a median of so few deviations is too small (Croux and Rousseeuw 1992)."""
_OUTSIDE = 1e-3
"""Share of the steps in which chance alone puts one of the ranks outside of the band."""


@dataclass(frozen=True)
class PlotContext:
    """A run, its verdict, and the bins and marks that all its figures share."""

    run: RunRecords
    verdict: RunVerdict
    axis: Axis
    marks: tuple[Mark, ...]


def plot_context(run: RunRecords, verdict: RunVerdict) -> PlotContext:
    """Put the bins over the measured steps, or over the events where none was measured."""
    steps, groups = run.steps.step, run.events.groups()
    if not len(steps):
        steps = np.array(sorted({step for group in groups for step in (group.first, group.last)}), dtype=np.int64)
    marks = {
        span[0]: Mark(span[0], group.severity)
        for group in reversed(groups[:200])
        if group.severity != "info" and not group.follows and group.first > 0
        for span in group.spans[:3]
    }
    return PlotContext(run, verdict, Axis.of(steps), tuple(marks[step] for step in sorted(marks)[:40]))


def column(view: PlotContext, name: str) -> BinnedCurve:
    """Return one of the steps' numbers in bins."""
    steps = view.run.steps
    return binned(view.axis, steps.step, steps[name], steps.measured(name))


def _of_ranks(
    view: PlotContext, name: Metric, label: str, extra: Series | None = None, zero: bool = False, about: str = ""
) -> Panel | None:
    """Draw mean, lowest and highest rank, and where sampling noise puts them; ``about`` goes to the note."""
    middle, low, high = (column(view, f"{name} {what}") for what in ("median", "low", "high"))
    mean = column(view, f"{name} mean")
    if middle.empty and mean.empty:
        return None
    band = _noise_band(middle.mean, column(view, f"{name} spread").mean, view.run.world_size)
    series = [
        Series("sampling noise", band, "band", "quiet", key="band: where sampling noise alone puts all ranks"),
        Series("lowest rank", BinnedCurve.line(low.low), "thin", "b"),
        Series("highest rank", BinnedCurve.line(high.high), "thin", "c"),
        *([] if extra is None else [extra]),
        Series("mean", mean, "line", "a", key="mean over all pairs" if name == "cosine" else ""),
    ]
    series = [one for one in series if not one.curve.empty]
    note = " ".join(part for part in (_outside(view, low.low, high.high, band), about) if part)
    return chart(view.axis, series, label, marks=view.marks, height=170, zero=zero, note=note)


def _noise_band(middle: Floats, spread: Floats, ranks: int) -> BinnedCurve:
    """Return median ± z robust deviations: chance puts a rank outside in one step of a thousand."""
    z = -NormalDist().inv_cdf(_OUTSIDE / 2 / max(ranks, 1)) * _OF_FEW.get(ranks, 1.0)
    with np.errstate(over="ignore"):
        away = z * smoothed(spread)
        return BinnedCurve(middle - away, middle, middle + away)


def _outside(view: PlotContext, low: Floats, high: Floats, band: BinnedCurve) -> str:
    """Say in how many of the drawn bins a rank is outside."""
    if view.run.world_size < 3:
        return ""
    known = np.isfinite(band.low) & np.isfinite(low)
    with np.errstate(invalid="ignore"):
        outside = int((known & ((low < band.low) | (high > band.high))).sum())
    if not known.any() or outside <= 0.01 * known.sum():
        return ""
    return f"A rank is outside of the band in {outside:,} of {int(known.sum()):,} places."


def loss(view: PlotContext) -> Panel | None:
    """Draw the ranks' losses."""
    return _of_ranks(view, "loss", "Loss of each step: mean, lowest and highest rank, and the band of sampling noise")


def norm(view: PlotContext) -> Panel | None:
    """Draw the norms of the ranks' gradients, and of the reduced gradient."""
    aggregated = Series("after the reduction", column(view, "norm aggregated"), "dash", "d")
    label = "Gradient norm of each step: mean, lowest and highest rank, after the reduction, and the noise band"
    return _of_ranks(view, "norm", label, aggregated, zero=True)


def cosine(view: PlotContext) -> Panel | None:
    """Draw the cosines of the ranks' gradients, and where the noise scale says their mean should be."""
    expected, about = _expected_cosine(view), ""
    flat = BinnedCurve.line(np.full(view.axis.bins, math.nan if expected is None else expected))
    usual = _usual(view, "cosine mean")
    if usual is not None and usual > 0.999:
        about = "A mean cosine of 1 is no health: the ranks do the same work."
    elif expected is not None:
        about = f"By the usual noise scale the mean should be about {shown(expected)} (dashed)."
    label = "Cosine of each rank's gradient with the mean of the others, and the mean over all pairs"
    return _of_ranks(view, "cosine", label, Series("expected", flat, "dash", "d", hover=False), about=about)


def batch_of(view: PlotContext) -> float | None:
    """Return the rows of all ranks in one step."""
    steps = view.run.steps
    samples, step = steps["samples"], steps.step
    if len(step) == 1 and samples[0] > 0:
        return float(samples[0] / step[0]) if step[0] else None
    rows = np.diff(samples) / np.maximum(np.diff(step), 1)
    rows = rows[np.isfinite(rows) & (rows > 0)]
    return float(np.median(rows)) if len(rows) else None


def _usual(view: PlotContext, name: str) -> float | None:
    """Return the median over the steps."""
    values = view.run.steps[name]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _expected_cosine(view: PlotContext) -> float | None:
    noise, batch, ranks = _usual(view, "noise scale"), batch_of(view), view.run.world_size
    if noise is None or batch is None or not ranks or noise <= 0:
        return None
    return 1.0 / (1.0 + noise * ranks / batch)


def noise_scale(view: PlotContext) -> Panel | None:
    """Draw the noise scale beside the batch, and say what that means."""
    curve = column(view, "noise scale")
    if curve.empty:
        return None
    finite, batch = curve.mean[np.isfinite(curve.mean)], batch_of(view)
    smooth = BinnedCurve.line(smoothed(curve.mean, 15))
    series = [Series("each step", curve, "thin", "quiet"), Series("smoothed", smooth, "line", "a")]
    log = bool((finite > 0).mean() > 0.9) if len(finite) else False
    keys = (("one step", "quiet"), ("smoothed", "a"), ("rows of one step", "level"))
    note = _noise_words(_usual(view, "noise scale"), batch)
    label = "Gradient noise scale in samples, and the batch of all ranks"
    return chart(view.axis, series, label, log=log, level=batch, marks=view.marks, note=note, keys=keys)


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


def coverage(view: PlotContext) -> Panel | None:
    """Draw shares of the epoch, and say how many rows several ranks hold."""
    named = (("seen once or more", "seen", "a"), ("seen again within an epoch", "repeated", "c"))
    series = [Series(name, column(view, key), "line", tone) for name, key, tone in named]
    series = [one for one in series if not one.curve.empty]
    if not series:
        return None
    rows, note = view.run.steps["duplicates"], ""
    rows = rows[np.isfinite(rows)]
    if len(rows):
        note = f"{rows.sum():,.0f} rows were held by several ranks in one step."
        note = note if rows.sum() else "No row was held by two ranks."
    return chart(view.axis, series, "Shares of the epoch's rows", zero=True, marks=view.marks, note=note)


def integrity(view: PlotContext) -> Panel | None:
    """Draw the reduction's error against what rounding explains."""
    error, bound = column(view, "integrity error"), column(view, "integrity bound")
    if error.empty and bound.empty:
        return None
    series = [Series("bound", bound, "dash", "bad"), Series("error", error, "line", "a")]
    steps, label = view.run.steps, "Relative error of the reduced gradient and its rounding bound"
    with np.errstate(invalid="ignore"):
        over = int((steps["integrity error"] > steps["integrity bound"]).sum())
    note = f"Above its bound at {over:,} step{'s' * (over != 1)}." if over else "Below its bound at every step."
    keys = (("error", "a"), ("what rounding explains at most", "bad"))
    return chart(view.axis, series, label, log=True, marks=view.marks, note=note, keys=keys)


def cost(view: PlotContext) -> Panel | None:
    """Draw what observing took of each step's time."""
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
    return chart(view.axis, series, "Seconds of each step, and of observing it", zero=True, marks=view.marks, note=note)


def scores(view: PlotContext) -> list[tuple[str, Panel]]:
    """Draw each detector's score over its threshold; nearest first."""
    found = []
    for (detector, where), held in view.run.scores.curves.items():
        step, share = np.array(held.step, dtype=np.int64), held.shares()
        if not np.isfinite(share).any():
            continue
        nearest = int(np.nanargmax(np.where(np.isfinite(share), share, -1.0)))
        top, rank = float(share[nearest]), held.rank[nearest]
        title = f"{detector}: {where}" if where else detector
        near = f"{top:.0%}" if top < 100 else f"{shown(top)} times"
        note = f"nearest {near} at step {step[nearest]:,}{f', rank {rank}' if rank >= 0 else ''}"
        curve, tone = binned(view.axis, step, share).high, "bad" if top >= 1 else "a"
        series, ends = (
            [Series("score / threshold", BinnedCurve.line(curve), "line", tone)],
            (0.0, max(1.15, min(top * 1.1, 3.0))),
        )
        label = f"{title}: score over threshold"
        panel = chart(view.axis, series, label, height=56, level=1.0, y_count=2, between=ends, note=note)
        found.append((top, title, panel))
    found.sort(key=lambda one: -one[0])
    return [(title, panel) for _, title, panel in found]
