"""A run at one moment, for a script: plain text, JSON, and the exit status. Pure.

lines = told_lines(view, now=time.time())
json.dumps(told_json(view, stale=None, now=time.time()))
status_of(view, stale=600.0, now=time.time())       # 0, 1, 3, 4 or 5
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ds_silent.records import to_json
from ds_silent.runs.watch.departures import METRICS
from ds_silent.runs.watch.drawing import Wishes, ago, rows_of
from ds_silent.runs.watch.watched import View

FORMAT = 1
"""Of the JSON; keys are added without a new number, none changes its meaning."""
HEALTHY, WARNING, ERROR, STALE, NOTHING = 0, 1, 3, 4, 5
"""Exit statuses; 2 is a mistake in what was typed, as in every command of ds-silent."""
WORDS: Mapping[int, str] = {
    HEALTHY: "healthy",
    WARNING: "warning",
    ERROR: "error",
    STALE: "stale",
    NOTHING: "no records",
}
SHOWN_RANKS, SHOWN_EVENTS = 16, 20


def status_of(view: View, stale: float | None, now: float) -> int:
    """What a scheduler is told.

    Args:
        stale: seconds without a record after which a run counts as one that hangs, whatever it said before.
    """
    if view.written is not None and stale is not None and now - view.written > stale:
        return STALE
    if view.level in ("error", "warning"):
        return ERROR if view.level == "error" else WARNING
    return NOTHING if view.step is None else HEALTHY


def told_lines(view: View, now: float) -> list[str]:
    """The same as the live view's first page, without an edge and without colours."""
    head = [view.run, f"verdict: {view.verdict}"]
    if view.problem:
        head.append(f"problem: {view.problem}")
    if view.step is not None:
        age = "" if view.written is None else f", written {ago(now - view.written)} ago"
        head.append(f"step {view.step}, {view.measured} measured here, {view.ranks} ranks{age}")
    if view.data:
        head.append(f"data: {view.data}")
    head.append("events: " + ", ".join(f"{count} {severity}" for severity, count in view.counts.items()))
    for metric in METRICS:
        curve = view.curves.get(metric)
        if curve:
            head.append(f"{metric}: {curve[-1]:.6g} {view.spreads.get(metric, '')}".rstrip())
    rows = rows_of(view, Wishes())[:SHOWN_RANKS]
    for row in rows:
        one = row.worst
        values = "  ".join(f"{metric} {one.values[metric]:.4g}" for metric in METRICS if metric in one.values)
        times = "-" if one.departure is None else f"{one.departure.times:.1f} ({one.departure.metric})"
        parts = (row.name, row.place, f"departure {times}", values, one.severity, one.kind)
        head.append("  ".join(part for part in parts if part))
    if len(view.standings) > len(rows):
        head.append(f"and {len(view.standings) - len(rows)} ranks that depart less")
    for event in view.events[-SHOWN_EVENTS:]:
        who = f"  {event.who}" if event.who else ""
        head.append(f"step {event.step}  {event.severity.upper()}  {event.kind}{who}: {event.message}")
    return head


def told_json(view: View, stale: float | None, now: float) -> dict[str, Any]:
    """JSON's own types; numbers that are not finite are "nan", "inf" and "-inf", as in the records."""
    status = status_of(view, stale, now)
    ranks = [row.worst for row in rows_of(view, Wishes())]
    return {
        "format": FORMAT,
        "run": view.run,
        "status": WORDS[status],
        "exit_status": status,
        "verdict": {"level": view.level, "sentence": view.verdict},
        "step": view.step,
        "epoch": view.epoch,
        "measured": view.measured,
        "world_size": view.ranks or None,
        "seconds_since_last_record": None if view.written is None else round(max(now - view.written, 0.0), 3),
        "seconds": {"step": view.seconds, "observe": view.observe},
        "events": {"counts": dict(view.counts), "last": [to_json(one) for one in view.events[-SHOWN_EVENTS:]]},
        "last": {metric: to_json(curve[-1]) if (curve := view.curves.get(metric)) else None for metric in METRICS},
        "ranks": [_rank(dataclasses.asdict(one)) for one in ranks],
        "data": view.data or None,
        "problem": view.problem or None,
    }


def _rank(one: dict[str, Any]) -> dict[str, Any]:
    return {key: to_json(value) if value != "" else None for key, value in one.items()}
