"""Draw tables of numbers as pictures: ranks by steps, ranks by ranks, layers by steps. Pure.

panel = rank_heats(view).get("norm")     # None where no rank's values are known
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from ds_silent.runs.columns import finite
from ds_silent.runs.lines import METRICS, Metric
from ds_silent.runs.report.axis import rebinned, shown
from ds_silent.runs.report.figures import PlotContext
from ds_silent.runs.report.svg import Panel, diverging, drawing, image, rounded, sequential

MOST_ROWS = 64
OF_MANY = 32
"""Rows of a run that has more than ``MOST_ROWS`` ranks."""
MOST_MATRICES = 6
Table = npt.NDArray[np.float32]


def rank_tables(view: PlotContext) -> dict[Metric, Table]:
    """Return (N, B) by metric: each rank's value that lies furthest from the median of all ranks in each bin."""
    parts = view.run.steps.spread.parts
    most = max((ranks for ranks, _ in parts), default=0)
    tables: dict[Metric, Table] = {name: np.full((most, view.axis.bins), np.nan, dtype=np.float32) for name in METRICS}
    for ranks, envelope in parts:
        buckets = envelope.buckets()
        whole = rebinned(view.axis, buckets.steps, buckets.low, buckets.high)
        for at, name in enumerate(METRICS):
            if name == "cosine" and ranks == 2:  # both have one cosine, with each other
                continue
            part = whole[at * ranks : (at + 1) * ranks]
            tables[name][:ranks] = np.where(np.isnan(part), tables[name][:ranks], part)
    return {name: table for name, table in tables.items() if not np.isnan(table).all()}


def shown_ranks(view: PlotContext, tables: dict[Metric, Table]) -> list[int]:
    """Return the ranks of the verdict, then those of events, then the others by host; of many those that stand out."""
    ranks = max((len(table) for table in tables.values()), default=0)
    world = max(view.run.world_size, 1)
    blamed = [list(view.verdict.ranks)] if len(view.verdict.ranks) < world else []
    blamed += [[*one.ranks] for one in view.run.events.groups() if one.severity != "info" and one.ranks_total < world]
    named = [rank for rank in dict.fromkeys(chain(*blamed)) if rank < ranks][: MOST_ROWS // 2]
    rest = [rank for rank in range(ranks) if rank not in set(named)]
    if ranks > MOST_ROWS:
        off = np.zeros(ranks)
        for table in tables.values():
            away = np.abs(np.nan_to_num(table, nan=0.0, posinf=np.inf, neginf=-np.inf))
            off = np.maximum(off, (away / _limit(table)).max(axis=1))
        rest = sorted(rest, key=lambda rank: (-off[rank], rank))[: max(OF_MANY - len(named), 0)]
    places = view.run.places
    return named + sorted(rest, key=lambda rank: (places[rank].host if rank in places else "", rank))


def rank_heats(view: PlotContext) -> dict[Metric, Panel]:
    """Draw ranks by steps, of each metric that is known."""
    tables = rank_tables(view)
    rows = shown_ranks(view, tables)
    return {name: _rank_heat(view, name, table, rows) for name, table in tables.items()}


def _rank_heat(view: PlotContext, name: Metric, of_all: Table, rows: list[int]) -> Panel:
    table, places = of_all[rows], view.run.places
    limit, unit = _limit(of_all), METRICS[name].unit
    labels = [f"{rank} · {places[rank].spot}"[:22] if rank in places else f"rank {rank}" for rank in rows]
    guilty = sum(1 for rank in rows if rank in view.verdict.ranks) if len(view.verdict.ranks) < len(rows) else 0
    values = np.exp(np.clip(table, -80, 80)) if METRICS[name].ratio else table
    values = np.where(np.isinf(table), np.inf, values)
    title = f"{METRICS[name].heading}: {unit}, rank by step"
    markup, height = _picture(view, diverging(table, limit), labels, title, guilty)
    low, high = f"−{shown(limit, 2)}", f"+{shown(limit, 2)}"
    if METRICS[name].ratio:
        low, high = f"× {shown(math.exp(-limit), 2)}", f"× {shown(math.exp(min(limit, 80)), 2)}"
    total, note = max(view.run.world_size, len(of_all)), ""
    if len(rows) < total:
        note = f"{len(rows)} of {total:,} ranks: those that were named, then those that stand out most."
    data = {"rows": labels, "unit": unit, "values": _cells(values)}
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
    table, names = rebinned(view.axis, buckets.steps, chosen, chosen)[:MOST_ROWS], layers.names[:MOST_ROWS]
    if not np.isfinite(table).any():
        return None
    bottom, top = (float(value) for value in np.quantile(finite(table), (0.02, 0.98)))
    png = sequential(1 - table, 1 - top, 1 - bottom) if which else sequential(table, bottom, top)
    labels = [name if len(name) <= 34 else f"…{name[-33:]}" for name in names]
    unit = "mean cosine" if which else "norm CV"
    markup, height = _picture(view, png, labels, f"{unit} of each layer by step", 0)
    data = {"rows": names, "unit": unit, "values": _cells(table)}
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
        off = finite(table[~np.eye(len(table), dtype=bool)])
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
    body = f"{image(png, str(height))}{frame}{texts}"
    return drawing(view.axis, " heat", title, height, body, f' data-row="{row}"'), height


def _limit(table: Table) -> float:
    """Return the value at which the colours end: four usual deviations, and at least 2 % of the largest."""
    away = np.abs(finite(table))
    return max(4 * 1.4826 * float(np.median(away)), 0.02 * float(away.max()), 1e-9) if len(away) else 1.0


def _cells(table: npt.NDArray[np.floating]) -> list[list[float | str | None]]:
    def cell(value: float) -> float | str | None:
        return None if math.isnan(value) else ("no number" if math.isinf(value) else float(f"{value:.3g}"))

    return [[cell(value) for value in row] for row in table.tolist()]
