"""Draw curves as SVG that fits any width, and tables as PNG: drawings are stretched, text and lines are not. Pure.

panel = chart(axis, [Series("mean", curve)], label="Loss of each step")
panel.markup      # <svg>, safe to put into a page
panel.data        # what hovering shows: {"series": [{"name", "mean", "low", "high"}]}
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape
from PIL import Image

from ds_silent.runs.columns import Floats, finite
from ds_silent.runs.report.axis import Axis, BinnedCurve, shown, ticks

WIDTH, HEIGHT = 1000, 100
"""Of the stretched drawing, in its own units."""
BELOW, ABOVE, BROKEN = (38, 110, 190), (214, 88, 28), (190, 24, 120)
"""Colours that suit a light and a dark page."""
_LARGEST, _SMALLEST = 1e300, 1e-290
_SIDES = 126  # shades on each side of nothing
_NOT_A_NUMBER = 2 * _SIDES + 1
_EMPTY = 2 * _SIDES + 2
Style = Literal["line", "thin", "dash", "band"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve; a ``band`` lies between its ``low`` and ``high``, a line has these two as a shade.

    ``tone``: a class of the style sheet; ``hover``: whether hovering gives its numbers; ``key``: its legend.
    """

    name: str
    curve: BinnedCurve
    style: Style = "line"
    tone: str = "a"
    hover: bool = True
    key: str = ""


@dataclass(frozen=True)
class Mark:
    """A step at which an event was reported."""

    step: int
    severity: str


@dataclass(frozen=True)
class Panel:
    """One drawing, the numbers behind it, and what is said of it.

    ``keys``: name and tone of each curve, for the legend; ``wide``: it is tall and wants all the room there is.
    """

    markup: Markup
    data: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    wide: bool = False


def diverging(values: npt.NDArray[np.float32], limit: float) -> bytes:
    """Make a PNG of (R, C): transparent at 0, stronger towards ``limit``; infinities have their own colour."""
    with np.errstate(all="ignore"):
        share = np.clip(np.nan_to_num(values / max(limit, 1e-30), nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
    index = (np.rint(share * _SIDES) + _SIDES).astype(np.uint8)
    index[np.isinf(values)] = _NOT_A_NUMBER
    index[np.isnan(values)] = _EMPTY
    alphas = [round(255 * float(n / _SIDES) ** 0.8) for n in range(1, _SIDES + 1)]
    shades = [*((*BELOW, alpha) for alpha in reversed(alphas)), (0, 0, 0, 0), *((*ABOVE, alpha) for alpha in alphas)]
    shades += [(*BROKEN, 255), (0, 0, 0, 0)]
    rows, columns = index.shape
    picture = Image.frombytes("P", (columns, rows), index.tobytes())
    picture.putpalette(b"".join(bytes(shade[:3]) for shade in shades))
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=bytes(shade[3] for shade in shades), bits=8, compress_level=9)
    return file.getvalue()


def sequential(values: npt.NDArray[np.float32], low: float, high: float) -> bytes:
    """Make a PNG of (R, C): transparent at ``low``, full at ``high``."""
    span = high - low
    with np.errstate(all="ignore"):
        share = (values - np.float32(low)) / np.float32(span if span > 0 else 1.0)
    return diverging(np.where(np.isinf(values), values, np.clip(share, 0.0, 1.0)).astype(np.float32), 1.0)


def image(png: bytes, height: str) -> str:
    """Return a picture as an element that is stretched to the width."""
    uri = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return f'<image class="pixels" width="100%" height="{height}" preserveAspectRatio="none" href="{uri}"/>'


def drawing(axis: Axis, kind: str, label: str, height: int, body: str, more: str = "", ticks: int = 6) -> Markup:
    """Return a drawing over the steps: ``body``, the steps below it, and the lines that the page's script moves.

    ``kind``: further classes of the style sheet; ``label``: for those who do not see it; ``more``: further attributes.
    """
    below = []
    for step in axis.ticks(ticks):
        share = axis.at(step)
        anchor = "start" if share < 0.03 else ("end" if share > 0.97 else "middle")
        below.append(f'<text class="x {anchor}" x="{share * 100:.2f}%" y="{height + 14}">{step:,}</text>')
    # the step under the pointer, and the marked one
    cursor = (f'<line class="{name}" x1="-9999" x2="-9999" y1="0" y2="{height}"/>' for name in ("pin", "at"))
    head = f'<svg class="chart{kind}" role="img" aria-label="{escape(label)}" height="{height + 20}"{more}>'
    return Markup(f"{head}{body}{''.join(below)}{''.join(cursor)}</svg>")


def chart(
    axis: Axis,
    series: Iterable[Series],
    label: str,
    *,
    log: bool = False,
    zero: bool = False,
    height: int = 150,
    level: float | None = None,
    marks: Sequence[Mark] = (),
    y_count: int = 4,
    between: Point | None = None,
    heavy: bool = False,
    least: float | None = None,
    note: str = "",
    keys: tuple[tuple[str, str], ...] | None = None,
) -> Panel:
    """Draw some curves over the steps, without those that are empty.

    ``log``: a logarithmic scale, without what is not above 0; ``zero``: 0 belongs to the picture; ``level``: a
    horizontal line; ``between``: the scale's ends; ``heavy``: many values lie far off, as those of a ratio do;
    ``least``: values below it mean nothing, and lie outside of a linear picture;
    ``keys``: of the legend, where they are not those of the series.
    """
    series = [one for one in series if not one.curve.empty]
    scaled = [replace(one, curve=_scaled(one.curve, log)) for one in series]
    low, high = between or _range(scaled, zero, level, log, heavy)
    if least is not None and not log and high > least:
        low = max(low, least)
    if between is None:
        note = f"{note} {_points_outside(scaled, low, high)}".strip()
    parts, clipped = [], []
    for mark in marks:
        x = f"{axis.at(mark.step) * WIDTH:.1f}"
        parts.append(f'<line class="told {escape(mark.severity)}" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/>')
    for one in scaled:
        parts += _shape(axis, one, low, high)
        clipped += _clipped(axis, one, low, high, height) if one.style != "band" else []
    if level is not None:
        y = _y(math.log10(level) if log else level, low, high)
        parts.append(f'<line class="level" x1="0" x2="{WIDTH}" y1="{y:.2f}" y2="{y:.2f}"/>')
    grid, labels = [], []
    for tick, text in _y_ticks(low, high, log, y_count):
        share = 1 - (tick - low) / (high - low)
        grid.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{share * HEIGHT:.2f}" y2="{share * HEIGHT:.2f}"/>')
        labels.append(f'<text class="y" x="-8" y="{share * height + 3.5:.1f}">{escape(text)}</text>')
    plot = f'class="plot" width="100%" height="{height}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"'
    body = f"<svg {plot}>{''.join(grid)}{''.join(parts)}</svg>{''.join(clipped)}{''.join(labels)}"
    markup = drawing(axis, "", label, height, body, ticks=3 if height < 100 else 6)
    keys = tuple((one.key or one.name, one.tone) for one in series) if keys is None else keys
    return Panel(markup, {"series": [_numbers(one) for one in series if one.hover]}, note, keys)


def _scaled(curve: BinnedCurve, log: bool) -> BinnedCurve:
    """Return the logarithm (none of 0), or the values within what can be subtracted and divided."""

    def scaled(values: Floats) -> Floats:
        if log:
            return np.where(values < 0, -np.inf, np.log10(np.where(values > 0, values, np.nan)))  # below all of it
        return np.where(np.abs(values) < _SMALLEST, 0.0, np.clip(values, -_LARGEST, _LARGEST))

    with np.errstate(all="ignore"):
        return BinnedCurve(scaled(curve.low), scaled(curve.mean), scaled(curve.high), curve.broken)


def _points_outside(series: Sequence[Series], low: float, high: float) -> str:
    """Say at how many places a line leaves the picture, where a sign marks it."""
    off = [(one.curve.low < low) | (one.curve.high > high) for one in series if one.style != "band"]
    count = int(np.logical_or.reduce(off).sum()) if off else 0
    return f"{count:,} point{'s lie' if count > 1 else ' lies'} outside of the picture (▲ ▼)." if count else ""


def _range(series: Sequence[Series], zero: bool, level: float | None, log: bool, heavy: bool) -> Point:
    """Return the scale's ends; where few bins lie far off, what the others need: the drawing marks the few."""
    each = [(one.curve.mean,) if one.style == "dash" else (one.curve.low, one.curve.high) for one in series]
    every = finite(np.concatenate([*(values for both in each for values in both), np.zeros(0)]))
    if not len(every):
        return 0.0, 1.0
    usual_low, usual_high = (float(value) for value in np.quantile(every, (0.25, 0.75) if heavy else (0.02, 0.98)))
    room = 2.5 * max(usual_high - usual_low, 1e-12 * max(abs(usual_low), abs(usual_high)))
    ends = [max(float(every.min()), usual_low - room), min(float(every.max()), usual_high + room)]
    ends += [] if level is None else [math.log10(level) if log else level]
    ends += [0.0] if zero and not log else []
    low, high = min(ends), max(ends)
    if not high > low:
        extra = abs(low) * 0.1 or 1.0
        low, high = low if zero and low == 0.0 else low - extra, high + extra
    margin = (high - low) * 0.06
    return low - (0.0 if zero and low == 0.0 else margin), high + margin


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))


def _shape(axis: Axis, one: Series, low: float, high: float) -> list[str]:
    def points(bins: Iterable[tuple[float, int]], values: Floats) -> list[Point]:
        return [(x * WIDTH, _y(float(values[n]), low, high)) for x, n in bins]

    def drawn(points: list[Point]) -> str:
        return " ".join(f"{x:.1f},{y:.2f}" for x, y in points)

    curve, parts = one.curve, []
    if one.style in ("band", "line") and (curve.high > curve.low).any():
        for run in _runs(curve.low + curve.high):
            bins = [(axis.centre(n), n) for n in run]
            if len(run) == 1:  # as wide as its bin
                bins = [(axis.centre(run[0]) + side * 0.5 / axis.bins, run[0]) for side in (-1, 1)]
            area = drawn(points(bins, curve.high) + points(reversed(bins), curve.low))
            parts.append(f'<polygon class="{one.style} {one.tone}" points="{area}"/>')
    for run in _runs(curve.mean) if one.style != "band" else ():
        line, dot = points(((axis.centre(n), n) for n in run), curve.mean), ""
        if len(line) == 1:  # a line of no length with round ends
            line, dot = [line[0], (line[0][0] + 0.01, line[0][1])], " dot"
        parts.append(f'<polyline class="{one.style} {one.tone}{dot}" points="{drawn(line)}"/>')
    return parts


def _runs(values: Floats) -> list[list[int]]:
    """Group neighbouring bins that hold something; where bins are often empty, an empty one between is no gap."""
    filled = np.flatnonzero(np.isfinite(values))
    if not len(filled):
        return []
    gaps = np.diff(filled)
    usual = max(1, round(float(np.median(gaps)))) if len(gaps) else 1
    return [part.tolist() for part in np.split(filled, np.flatnonzero(gaps > 4 * usual) + 1)]


def _clipped(axis: Axis, one: Series, low: float, high: float, height: int) -> list[str]:
    """Mark at the edge where a value lies outside the picture or is not finite, outside of what is stretched."""
    with np.errstate(invalid="ignore"):
        above, below = np.flatnonzero(one.curve.high > high), np.flatnonzero(one.curve.low < low)
    marked = ((above, one.tone, 7, "▲"), (below, one.tone, height - 1, "▼"), (one.curve.broken, "broken", 8, "✕"))
    return [
        f'<text class="off {tone}" x="{axis.centre(n) * 100:.2f}%" y="{y}">{sign}</text>'
        for bins, tone, y, sign in marked
        for n in bins.tolist()
    ]


def _y_ticks(low: float, high: float, log: bool, count: int) -> list[tuple[float, str]]:
    if not log:
        return [(tick, shown(tick if abs(tick) > 1e-12 * (high - low) else 0.0)) for tick in ticks(low, high, count)]
    first, last = math.ceil(low), math.floor(high)
    if last - first >= 2:
        every = -(-(last - first) // count)
        return [(float(n), f"1e{n}".replace("-", "−")) for n in range(first, last + 1, every)]
    # within a decade or two, round numbers of the values themselves
    return [(math.log10(tick), shown(tick)) for tick in ticks(10**low, 10**high, count) if tick > 0]


def _numbers(one: Series) -> dict[str, Any]:
    """Return what hovering shows."""
    curve = one.curve
    found: dict[str, Any] = {"name": one.name, "tone": one.tone}
    if one.style == "band":
        return found | {"low": rounded(curve.low), "high": rounded(curve.high)}
    if np.array_equal(curve.low, curve.high, equal_nan=True):
        found["mean"] = rounded(curve.mean)
    else:
        found |= {"low": rounded(curve.low), "mean": rounded(curve.mean), "high": rounded(curve.high)}
    if len(curve.broken):
        found["broken"] = curve.broken.tolist()
    return found


def rounded(values: Any) -> list[float | None]:
    """Return numbers for JSON: four digits, None for what is not finite."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in np.asarray(values).tolist()]
