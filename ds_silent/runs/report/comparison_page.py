"""A comparison of two trainings as one page: only what differs, and each link's curve with what rounding allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from markupsafe import Markup

from ds_silent.comparison.output import COLUMNS, STATES, cells, lists_of
from ds_silent.comparison.result import PHRASES, LinkResult, TrainingComparison
from ds_silent.runs.report.axis import Axis, binned
from ds_silent.runs.report.page import policy, template, text_of
from ds_silent.runs.report.svg import Mark, Series, chart
from ds_silent.text import one_line


def comparison_page(found: TrainingComparison) -> str:
    """Return the page; its text is escaped, and it holds no script."""
    return template("comparison.html").render(
        title=f"{'Parted' if found.parted else 'Not parted'} · ds_silent compare",
        worst="error" if found.parted else "ok",
        headline=one_line(found.sentence),
        runs=[("A", one_line(found.a)), ("B", one_line(found.b))],
        columns=COLUMNS,
        rows=[(one.state, cells(one)) for one in found.links],
        lists=lists_of(found),
        same=[PHRASES[one.link] for one in found.links if one.state == "equal"],
        panels=[
            (PHRASES[one.link], STATES[one.state], _curve(one, found.step)) for one in found.links if _differs(one)
        ],
        style=Markup(text_of("page.css")),  # ours
        policy=policy("page.css"),
    )


def write_comparison(found: TrainingComparison, path: str | Path) -> None:
    """Write the page; OSError where it cannot be written."""
    Path(path).write_text(comparison_page(found), encoding="utf-8")


def _differs(one: LinkResult) -> bool:
    return one.link not in ("rows", "rates") and any(size > 0.0 for _, size, _ in one.curve)


def _curve(one: LinkResult, parted: int | None) -> Markup:
    """Draw the differences and what was allowed, on a logarithmic scale; what is 0 is not drawn."""
    steps = np.array([step for step, *_ in one.curve], dtype=np.int64)
    values = np.array([both for _, *both in one.curve], dtype=np.float64)
    axis = Axis.of(steps)
    size, allowed = (binned(axis, steps, np.where(column > 0.0, column, np.nan)) for column in values.T)
    series = [Series("difference", size, tone="a"), Series("allowed", allowed, "dash", tone="quiet")]
    marks = [] if parted is None else [Mark(parted, "error")]
    return chart(axis, series, f"{PHRASES[one.link]}: relative difference by step", log=True, marks=marks).markup
