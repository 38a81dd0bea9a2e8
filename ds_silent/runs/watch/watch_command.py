"""``ds-silent watch``: a run in the live view, or at one moment as text or JSON; and the exit status.

status = watch_command("runs/my-run", once=True, as_json=False, stale=None, every=1.0, alert=[])
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_silent.records import to_json
from ds_silent.runs.lines import METRICS
from ds_silent.runs.watch.live import can_draw, follow, look, silence_stdout
from ds_silent.runs.watch.screen import ScreenState, ago, rows_of
from ds_silent.runs.watch.watched import RankRow, Snapshot, Watched
from ds_silent.text import printable

HEALTHY, WARNING, ERROR, STALE, NOTHING, INTERRUPTED = 0, 1, 3, 4, 5, 130
"""Exit statuses; 2 is a mistake in the command, as in every command of ds-silent."""
WORDS: Mapping[int, str] = {
    HEALTHY: "healthy", WARNING: "warning", ERROR: "error", STALE: "stale", NOTHING: "no records"
}  # fmt: skip
JSON_FORMAT = 1
"""Keys are added without a new number; none changes its meaning."""
SHOWN_ROWS, SHOWN_EVENTS = 16, 20


def watch_command(
    run: str, once: bool, as_json: bool, stale: float | None, every: float, alert: Sequence[str] = ()
) -> int:
    """Show a run and return the exit status.

    Args:
        once: print and end; also where the output is not a terminal that can be drawn on.
        stale: minutes without a record after which a run counts as hanging.
        every: seconds between two looks at the files.
        alert: destinations to tell of events that come from now on; then the command goes on without a terminal.
    """
    seconds = None if stale is None else 60.0 * stale
    if Path(run).is_file():
        return _mistake(f"{run!a} is a file; give a directory, the output_dir of a run")
    if alert and (once or as_json):
        return _mistake("--alert follows a run, so it goes with neither --once nor --json; leave them out")
    try:
        if alert:
            return _alerting(run, every, seconds, alert)
        if once or as_json or not can_draw():
            return _once(Watched(run), as_json, seconds)
        return status_of(look(Watched(run), run, every), seconds, time.time())
    except KeyboardInterrupt:
        return INTERRUPTED


def _mistake(sentence: str) -> int:
    print(f"ds-silent: {sentence}", file=sys.stderr)
    return 2


def _alerting(run: str, every: float, stale: float | None, alert: Sequence[str]) -> int:
    from ds_silent.alerts.sink import FollowedEvents  # slow: only those who want it pay
    from ds_silent.config import ConfigError

    try:
        alerts = FollowedEvents(alert, run)
    except ConfigError as error:
        return _mistake(str(error))
    watched = Watched(run, alerts.line)
    try:
        if can_draw():
            return status_of(look(watched, run, every, alerts.caught_up), stale, time.time())
        print(f"alerts of {run!a}: until this process is ended", flush=True)
        follow(watched, every, alerts.caught_up)
        return 0
    finally:
        alerts.close()


def _once(watched: Watched, as_json: bool, stale: float | None) -> int:
    while watched.poll():
        pass
    view, now = watched.snapshot(), time.time()
    status = status_of(view, stale, now)
    if as_json:
        text = json.dumps(json_of(view, stale, now), allow_nan=False, indent=1)
    else:
        text = "\n".join([*lines_of(view, now), f"status: {WORDS[status]}"])
    try:
        print(printable(text), flush=True)
    except OSError:  # the reader has left
        silence_stdout()
    return status


def status_of(view: Snapshot, stale: float | None, now: float) -> int:
    """Return the exit status; a run without a record for ``stale`` seconds hangs, whatever its verdict."""
    if view.written is not None and stale is not None and now - view.written > stale:
        return STALE
    if view.level in ("error", "warning"):
        return ERROR if view.level == "error" else WARNING
    return NOTHING if view.step is None else HEALTHY


def lines_of(view: Snapshot, now: float) -> list[str]:
    """Return the content of the live view's first page, without edges and colours."""
    lines = [view.run, f"verdict: {view.verdict}"]
    if view.problem:
        lines.append(f"problem: {view.problem}")
    if view.step is not None:
        age = "" if view.written is None else f", written {ago(now - view.written)} ago"
        lines.append(f"step {view.step}, {view.measured} measured here, {view.ranks} ranks{age}")
    if view.data:
        lines.append(f"data: {view.data}")
    lines.append("events: " + ", ".join(f"{count} {severity}" for severity, count in view.counts.items()))
    for metric in METRICS:
        if curve := view.curves.get(metric):
            lines.append(f"{metric}: {curve[-1]:.6g} {view.spreads.get(metric, '')}".rstrip())
    for row in rows_of(view, ScreenState())[:SHOWN_ROWS]:
        one = row.worst
        values = "  ".join(f"{metric} {one.values[metric]:.4g}" for metric in METRICS if metric in one.values)
        times = "-" if one.departure is None else f"{one.departure.times:.1f} ({one.departure.metric})"
        parts = (row.name, row.place, f"departure {times}", values, one.severity, one.kind)
        lines.append("  ".join(part for part in parts if part))
    if len(view.rows) > SHOWN_ROWS:
        lines.append(f"and {len(view.rows) - SHOWN_ROWS} ranks that depart less")
    for event in view.events[-SHOWN_EVENTS:]:
        who = f"  {event.who}" if event.who else ""
        lines.append(f"step {event.step}  {event.severity.upper()}  {event.kind}{who}: {event.message}")
    return lines


def json_of(view: Snapshot, stale: float | None, now: float) -> dict[str, Any]:
    """Return JSON's own types; numbers that are not finite are "nan", "inf" and "-inf", as in the records."""
    status = status_of(view, stale, now)
    return {
        "format": JSON_FORMAT,
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
        "events": {"counts": dict(view.counts), "last": to_json(view.events[-SHOWN_EVENTS:])},
        "last": {metric: to_json(curve[-1]) if (curve := view.curves.get(metric)) else None for metric in METRICS},
        "ranks": [_rank(row.worst) for row in rows_of(view, ScreenState())],
        "data": view.data or None,
        "problem": view.problem or None,
    }


def _rank(row: RankRow) -> dict[str, Any]:
    return {key: to_json(value) if value != "" else None for key, value in dataclasses.asdict(row).items()}
