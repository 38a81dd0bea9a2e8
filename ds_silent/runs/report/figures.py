"""Draw what was measured: one function per figure, each from the run to a panel or None. Pure.

panel = loss(view)         # None where nothing of it was measured
panel.markup, panel.note
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ds_silent.runs.columns import Floats, finite
from ds_silent.runs.lines import Metric
from ds_silent.runs.report.axis import Axis, BinnedCurve, binned, shown, smoothed
from ds_silent.runs.report.svg import Mark, Panel, Series, chart
from ds_silent.runs.run import RunRecords
from ds_silent.runs.verdict import RunVerdict

_OF_FEW = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14, 8: 1.129, 9: 1.107}
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

    def column(self, name: str) -> BinnedCurve:
        """Return one of the steps' numbers in bins."""
        steps = self.run.steps
        return binned(self.axis, steps.step, steps[name], steps.measured(name))

    def usual(self, name: str) -> float | None:
        """Return the median of a number over the steps; None where it was never measured."""
        return _median(self.run.steps[name])

    @property
    def batch(self) -> float | None:
        """The rows of all ranks in one step."""
        samples, step = self.run.steps["samples"], self.run.steps.step
        if len(step) == 1 and samples[0] > 0:
            return float(samples[0] / step[0]) if step[0] else None
        rows = np.diff(samples) / np.maximum(np.diff(step), 1)
        return _median(rows[rows > 0])


def _median(values: Floats) -> float | None:
    known = finite(values)
    return float(np.median(known)) if len(known) else None


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


def _of_ranks(
    view: PlotContext, name: Metric, label: str, extra: Series | None = None, zero: bool = False, about: str = ""
) -> Panel | None:
    """Draw mean, lowest and highest rank, and where sampling noise puts them; ``about`` goes to the note."""
    middle, low, high, mean = (view.column(f"{name} {what}") for what in ("median", "low", "high", "mean"))
    if middle.empty and mean.empty:
        return None
    band = _noise_band(middle.mean, view.column(f"{name} spread").mean, view.run.world_size)
    series = [
        Series("sampling noise", band, "band", "quiet", key="band: where sampling noise alone puts all ranks"),
        Series("lowest rank", BinnedCurve.line(low.low), "thin", "b"),
        Series("highest rank", BinnedCurve.line(high.high), "thin", "c"),
        *([] if extra is None else [extra]),
        Series("mean", mean, "line", "a", key="mean over all pairs" if name == "cosine" else ""),
    ]
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
    both = np.isfinite(band.low) & np.isfinite(low)
    with np.errstate(invalid="ignore"):
        outside = int((both & ((low < band.low) | (high > band.high))).sum())
    if view.run.world_size < 3 or view.verdict.severity == "ok" or outside <= 0.01 * both.sum():
        return ""
    return f"A rank is outside of the band in {outside:,} of {int(both.sum()):,} places."


def loss(view: PlotContext) -> Panel | None:
    return _of_ranks(view, "loss", "Loss of each step: mean, lowest and highest rank, and the band of sampling noise")


def norm(view: PlotContext) -> Panel | None:
    """Draw the norms of the ranks' gradients, and of the reduced gradient."""
    aggregated = Series("after the reduction", view.column("norm aggregated"), "dash", "d")
    label = "Gradient norm of each step: mean, lowest and highest rank, after the reduction, and the noise band"
    return _of_ranks(view, "norm", label, aggregated, zero=True)


def cosine(view: PlotContext) -> Panel | None:
    """Draw the cosines of the ranks' gradients, and where the noise scale says their mean should be."""
    noise, batch, ranks, about = view.usual("noise scale"), view.batch, view.run.world_size, ""
    expects = noise is not None and batch is not None and ranks and noise > 0 and not view.run.done_alike
    expected = 1.0 / (1.0 + noise * ranks / batch) if expects else math.nan  # type: ignore[operator]
    if (view.usual("cosine mean") or 0.0) > 0.999:
        about = "A mean cosine of 1 is no health: the ranks do the same work."
    elif expects:
        about = f"By the usual noise scale the mean should be about {shown(expected)} (dashed)."
    label = "Cosine of each rank's gradient with the mean of the others, and the mean over all pairs"
    flat = BinnedCurve.line(np.full(view.axis.bins, expected))
    return _of_ranks(view, "cosine", label, Series("expected", flat, "dash", "d", hover=False), about=about)


def noise_scale(view: PlotContext) -> Panel | None:
    """Draw the noise scale beside the batch, and say what that means."""
    curve, batch = view.column("noise scale"), view.batch
    if curve.empty:
        return None
    known = finite(curve.mean)
    smooth = BinnedCurve.line(smoothed(curve.mean, 15))
    series = [Series("each step", curve, "thin", "quiet"), Series("smoothed", smooth, "line", "a")]
    log = bool(len(known)) and bool((known > 0).mean() > 0.9)
    keys = (("one step", "quiet"), ("smoothed", "a"), ("rows of one step", "level"))
    alike = view.run.done_alike
    note = _SAME_ROWS % alike if alike else _noise_words(view.usual("noise scale"), batch)
    label = "Gradient noise scale in samples, and the batch of all ranks"
    return chart(
        view.axis,
        series,
        label,
        log=log,
        level=batch,
        marks=view.marks,
        heavy=True,  # it divides by a square that may be near 0
        least=0.0,
        note=note,
        keys=keys,
    )


_SAME_ROWS = "Several ranks %s: what differs between the ranks says nothing about a larger batch."


def _noise_words(noise: float | None, batch: float | None) -> str:
    if noise is None:
        return ""
    if noise <= 0:
        return "Single steps cannot tell the signal from its noise: the noise scale is far above the batch."
    said = f"Usually about {shown(noise, 2)} samples"
    if batch is None:
        return f"{said}."
    said += f"; one step takes {shown(batch)}. "
    if noise > 4 * batch:
        return said + "A larger batch, or more ranks, would still pay nearly in full."
    if noise < batch / 4:
        return said + "The batch is far beyond it: more ranks hardly help."
    return said + "The two are of one size: more ranks pay in part."


def coverage(view: PlotContext) -> Panel | None:
    """Draw shares of the epoch, and say how many rows several ranks hold."""
    rows, note = finite(view.run.steps["duplicates"]), ""
    if len(rows):
        shared = f"{rows.sum():,.0f} times several ranks held the same row in one step."
        note = shared if rows.sum() else "No row was held by two ranks."
    lines = (("seen once or more", "seen", "a"), ("seen again", "repeated", "c"))
    return _lines(view, "Shares of the epoch's rows", note, *lines)


def integrity(view: PlotContext) -> Panel | None:
    """Draw the reduction's error against what rounding explains."""
    error, bound = view.column("integrity error"), view.column("integrity bound")
    if error.empty and bound.empty:
        return None
    series = [Series("bound", bound, "dash", "bad"), Series("error", error, "line", "a")]
    steps, label = view.run.steps, "Relative error of the reduced gradient and its rounding bound"
    with np.errstate(invalid="ignore"):
        over = int((steps["integrity error"] > steps["integrity bound"]).sum())
    without = int(np.isnan(steps["integrity error"]).sum())
    but = f" but {without:,}, where there is no error to compare" if without else ""
    note = f"Above its bound at {over:,} step{'s' * (over != 1)}." if over else f"Below its bound at every step{but}."
    keys = (("error", "a"), ("what rounding explains at most", "bad"))
    return chart(view.axis, series, label, log=True, marks=view.marks, note=note, keys=keys)


def cost(view: PlotContext) -> Panel | None:
    """Draw what observing took of each step's time."""
    taken, whole, note = view.run.steps["observe seconds"], view.run.steps["step seconds"], ""
    both = np.isfinite(taken) & np.isfinite(whole) & (whole > 0)
    if both.any():
        share, seconds = float(np.median(taken[both] / whole[both])), float(np.median(taken[both]))
        note = (
            f"Observing took {share:.1%} of the typical measured step ({shown(seconds * 1e3, 2)} ms), from the end of "
            "the backward to the optimizer; what its hooks add to forward and backward is not timed."
        )
    lines = (("step", "step seconds", "a"), ("observing", "observe seconds", "c"))
    return _lines(view, "Seconds of each step, and of observing it", note, *lines)


def _lines(view: PlotContext, label: str, note: str, *lines: tuple[str, str, str]) -> Panel | None:
    """Draw some of the steps' numbers from 0 on: the name in the legend, the column and the tone of each."""
    series = [Series(name, view.column(key), "line", tone) for name, key, tone in lines]
    if all(one.curve.empty for one in series):
        return None
    return chart(view.axis, series, label, zero=True, marks=view.marks, note=note)


def scores(view: PlotContext) -> list[tuple[str, Panel]]:
    """Draw each detector's score over its threshold; nearest first."""
    found = []
    for (detector, where), one in view.run.scores.curves.items():
        step, share = np.array(one.step, dtype=np.int64), one.shares()
        if not np.isfinite(share).any():
            continue
        nearest = int(np.nanargmax(np.where(np.isfinite(share), share, -1.0)))
        top, rank = float(share[nearest]), one.rank[nearest]
        title = f"{detector}: {where}" if where else detector
        near = f"{top:.0%}" if top < 100 else f"{shown(top)} times"
        note = f"nearest {near} at step {step[nearest]:,}{f', rank {rank}' if rank >= 0 else ''}"
        curve = BinnedCurve.line(binned(view.axis, step, share).high)
        series = [Series("score / threshold", curve, "line", "bad" if top >= 1 else "a")]
        label, ends = f"{title}: score over threshold", (0.0, max(1.15, min(top * 1.1, 3.0)))
        panel = chart(view.axis, series, label, height=56, level=1.0, y_count=2, between=ends, note=note)
        found.append((top, title, panel))
    found.sort(key=lambda one: -one[0])
    return [(title, panel) for _, title, panel in found]
