"""Draw tables of numbers as pictures: ranks by steps, ranks by ranks, layers by steps. Pure.

tables = rank_tables(view)
panel = rank_heat(view, "norm", tables, shown_ranks(view, tables))     # None where no rank's values are known
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from ds_silent.runs.lines import METRICS, Metric
from ds_silent.runs.report.axis import rebinned, shown
from ds_silent.runs.report.figures import PlotContext
from ds_silent.runs.report.svg import Panel, cursor, diverging, image, rounded, sequential, x_labels

MOST_ROWS = 64
OF_MANY = 32
"""Rows of a run that has more than ``MOST_ROWS`` ranks."""
MOST_MATRICES = 6
Table = npt.NDArray[np.float32]
WORDS: dict[Metric, tuple[str, str]] = {
    "loss": ("Loss", "loss − median of the ranks"),
    "norm": ("Gradient norm", "norm / median of the ranks"),
    "cosine": ("Direction", "cosine − median of the ranks"),
}
"""Title and unit."""


def rank_tables(view: PlotContext) -> dict[Metric, Table]:
    """Return (N, B) by metric: each rank's value that lies furthest from the median of all ranks in each bin."""
    most = max((ranks for ranks, _ in view.run.spread.parts), default=0)
    tables: dict[Metric, Table] = {name: np.full((most, view.axis.bins), np.nan, dtype=np.float32) for name in METRICS}
    for ranks, envelope in view.run.spread.parts:
        buckets = envelope.buckets()
        if not len(buckets.steps):
            continue
        whole = rebinned(view.axis, buckets.steps, buckets.low, buckets.high)
        for at, name in enumerate(METRICS):
            if name == "cosine" and ranks == 2:  # both have one cosine, with each other
                continue
            part = whole[at * ranks : (at + 1) * ranks]
            held = tables[name][:ranks]
            tables[name][:ranks] = np.where(np.isnan(part), held, part)
    return {name: table for name, table in tables.items() if not np.isnan(table).all()}


def shown_ranks(view: PlotContext, tables: dict[Metric, Table]) -> list[int]:
    """Return the ranks of the verdict, then those of events, then the others by host; of many those that stand out."""
    ranks = max((len(table) for table in tables.values()), default=0)
    named = list(view.verdict.ranks) if len(view.verdict.ranks) < max(view.run.world_size, 1) else []
    for group in view.run.events.groups():
        if group.severity != "info" and group.ranks_total < max(view.run.world_size, 1):
            named += [rank for rank in group.ranks if rank not in named]
    named = [rank for rank in named if rank < ranks][: MOST_ROWS // 2]
    rest = [rank for rank in range(ranks) if rank not in set(named)]
    if ranks > MOST_ROWS:
        apart = np.zeros(ranks)
        for table in tables.values():
            away = np.abs(np.nan_to_num(table, nan=0.0, posinf=np.inf, neginf=-np.inf))
            apart = np.maximum(apart, (away / _limit(table)).max(axis=1))
        rest = sorted(rest, key=lambda rank: (-apart[rank], rank))[: max(OF_MANY - len(named), 0)]
    places = view.run.places
    return named + sorted(rest, key=lambda rank: (places[rank].host if rank in places else "", rank))


def rank_heat(view: PlotContext, name: Metric, tables: dict[Metric, Table], rows: list[int]) -> Panel | None:
    """Draw ranks by steps, of one metric."""
    if name not in tables or not rows:
        return None
    table = tables[name][rows]
    limit = _limit(tables[name])
    title, unit = WORDS[name]
    labels = [_row_label(view, rank) for rank in rows]
    guilty = sum(1 for rank in rows if rank in view.verdict.ranks) if len(view.verdict.ranks) < len(rows) else 0
    values = np.exp(np.clip(table, -80, 80)) if name == "norm" else table
    values = np.where(np.isinf(table), np.inf, values)
    markup, height = _picture(view, diverging(table, limit), labels, f"{title}: {unit}, rank by step", guilty)
    low, high = _far(name, limit)
    total, note = max(view.run.world_size, len(tables[name])), ""
    if len(rows) < total:
        note = f"{len(rows)} of {total:,} ranks: those that were named, then those that stand out most."
    data = {"rows": labels, "unit": unit, "values": [_cells(row) for row in values]}
    return Panel(markup, data, note, ((f"below: {low}", "below"), (f"above: {high}", "above")), wide=height > 260)


def layer_heat(view: PlotContext, which: int) -> Panel | None:
    """Draw layers by steps: 0 is the dispersion of the norm over the ranks, 1 the mean cosine."""
    layers = view.run.layers
    if layers.envelope is None or not layers.names:
        return None
    buckets = layers.envelope.buckets()
    count = len(layers.names)
    # of the cosine it is the lowest that matters, of the dispersion the highest
    chosen = (buckets.low if which else buckets.high)[:, which * count :][:, :count]
    table = rebinned(view.axis, buckets.steps, chosen, chosen)
    if not np.isfinite(table).any():
        return None
    table, names = table[:MOST_ROWS], layers.names[:MOST_ROWS]
    finite = table[np.isfinite(table)]
    bottom, top = (float(value) for value in np.quantile(finite, (0.02, 0.98)))
    png = sequential(1 - table, 1 - top, 1 - bottom) if which else sequential(table, bottom, top)
    labels = [name if len(name) <= 34 else f"…{name[-33:]}" for name in names]
    unit = "mean cosine" if which else "norm CV"
    markup, height = _picture(view, png, labels, f"{unit} of each layer by step", 0)
    data = {"rows": names, "unit": unit, "values": [_cells(row) for row in table]}
    note = f"The first {len(names)} of {count:,} layers." if count > len(names) else ""
    key = f"{unit} {shown(bottom)}" if which else f"{unit} {shown(top)}"
    return Panel(markup, data, note, ((key, "above"),), wide=height > 260)


def matrices(view: PlotContext) -> list[tuple[int, Panel]]:
    """Draw some matrices, with their steps: the first, the last, and those around the beginning of the fault."""
    kept = view.run.matrices.kept
    if not kept:
        return []
    chosen = {0, len(kept) - 1}
    if view.verdict.since:
        at = int(np.searchsorted([step for step, _ in kept], view.verdict.since))
        chosen |= {min(max(n, 0), len(kept) - 1) for n in (at - 1, at, at + 1)}
    for n in np.linspace(0, len(kept) - 1, MOST_MATRICES).round().astype(int).tolist():
        if len(chosen) < MOST_MATRICES:
            chosen.add(n)
    found = []
    for n in sorted(chosen)[:MOST_MATRICES]:
        step, rows = kept[n]
        table = np.array(rows, dtype=np.float32)
        off = table[~np.eye(len(table), dtype=bool)]
        off = off[np.isfinite(off)]
        limit = max(float(np.abs(off).max()) if len(off) else 1.0, 1e-3)
        label = f"Cosines between the ranks' gradients at step {step:,}"
        np.fill_diagonal(table, np.nan)
        picture = image(diverging(table, limit), "100%")
        markup = f'<svg class="matrix" role="img" aria-label="{escape(label)}" viewBox="0 0 100 100">{picture}</svg>'
        caption = f"{shown(float(off.min()))} … {shown(float(off.max()))}" if len(off) else "no number"
        data = {"step": step, "values": [rounded(row) for row in table]} if len(table) <= 64 else {}
        found.append((step, Panel(Markup(markup), data, caption)))
    return found


def _picture(view: PlotContext, png: bytes, labels: list[str], title: str, guilty: int) -> tuple[Markup, int]:
    row = 20 if len(labels) <= 10 else (13 if len(labels) <= 32 else 9)
    height = row * len(labels)
    size = "small" if row < 12 else ""
    texts = "".join(
        f'<text class="y {size}{" guilty" * (n < guilty)}" x="-8" y="{(n + 0.5) * row + 3.5:.1f}">{escape(one)}</text>'
        for n, one in enumerate(labels)
        if row > 9 or n % 2 == 0 or n < guilty
    )
    frame = f'<rect class="frame" width="100%" height="{height}"/>'
    if guilty:
        frame += f'<rect class="guilty" width="100%" height="{guilty * row}"/>'
    markup = f'<svg class="chart heat" role="img" aria-label="{escape(title)}" height="{height + 20}" data-row="{row}">'
    markup += f"{image(png, str(height))}{frame}{texts}{x_labels(view.axis, height)}{cursor(height)}</svg>"
    return Markup(markup), height


def _row_label(view: PlotContext, rank: int) -> str:
    place = view.run.places.get(rank)
    return f"{rank} · {place.spot}"[:22] if place is not None else f"rank {rank}"


def _limit(table: Table) -> float:
    """Return the value at which the colours end: four usual deviations, and at least 2 % of the largest."""
    finite = np.abs(table[np.isfinite(table)])
    return max(4 * 1.4826 * float(np.median(finite)), 0.02 * float(finite.max()), 1e-9) if len(finite) else 1.0


def _far(name: Metric, limit: float) -> tuple[str, str]:
    if name == "norm":
        return f"× {shown(math.exp(-limit), 2)}", f"× {shown(math.exp(min(limit, 80)), 2)}"
    return f"−{shown(limit, 2)}", f"+{shown(limit, 2)}"


def _cells(row: npt.NDArray[np.floating]) -> list[float | str | None]:
    return [None if math.isnan(v) else ("no number" if math.isinf(v) else float(f"{v:.3g}")) for v in row.tolist()]
