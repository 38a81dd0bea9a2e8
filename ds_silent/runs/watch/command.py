"""``ds-silent watch``: what is typed, and how it ends.

status = watch_command("runs/my-run", once=True, as_json=False, stale=None, every=1.0, alert=[])
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ds_silent.runs.watch.live import follow, look, silence_stdout
from ds_silent.runs.watch.once import WORDS, status_of, told_json, told_lines
from ds_silent.runs.watch.watched import Watched

WRONG, INTERRUPTED = 2, 130
"""Exit statuses of a mistake in what was typed, and of a program that Ctrl-C has ended."""


def watch_command(
    run: str, once: bool, as_json: bool, stale: float | None, every: float, alert: Sequence[str] = ()
) -> int:
    """Show a run; its exit status, see :mod:`ds_silent.runs.watch.once`.

    Args:
        run: the directory; it may come later, where somebody looks on.
        once: print and end; also where the output is no terminal.
        stale: minutes without a record after which a run counts as one that hangs.
        every: seconds between two looks at the files.
        alert: who is told of events that come from now on; then an output that is no terminal is no end.
    """
    seconds = None if stale is None else 60.0 * stale
    if Path(run).is_file():
        print(f"ds-silent: {run!a} is a file; give a directory, the output_dir of a run", file=sys.stderr)
        return WRONG
    if alert and (once or as_json):
        print(
            "ds-silent: --alert follows a run, so it goes with neither --once nor --json; leave them out",
            file=sys.stderr,
        )
        return WRONG
    try:
        if alert:
            return _alerting(run, every, seconds, alert)
        if once or as_json or not sys.stdout.isatty():
            return _once(Watched(run), as_json, seconds)
        return status_of(look(Watched(run), run, every), seconds, time.time())
    except KeyboardInterrupt:
        return INTERRUPTED


def _alerting(run: str, every: float, stale: float | None, alert: Sequence[str]) -> int:
    from ds_silent.alerts.sink import FollowedEvents  # slow: only who wants it pays
    from ds_silent.config import ConfigError

    try:
        alerts = FollowedEvents(alert, run)
    except ConfigError as error:
        print(f"ds-silent: {error}", file=sys.stderr)
        return WRONG
    watched = Watched(run, alerts.line)
    try:
        if sys.stdout.isatty():
            return status_of(look(watched, run, every, alerts.caught_up), stale, time.time())
        print(f"alerts of {run!a}: until this process is ended", flush=True)
        follow(watched, every, alerts.caught_up)
        return 0
    finally:
        alerts.close()


def _once(watched: Watched, as_json: bool, stale: float | None) -> int:
    while watched.poll():
        pass
    view, now = watched.view(), time.time()
    status = status_of(view, stale, now)
    if as_json:
        text = json.dumps(told_json(view, stale, now), allow_nan=False, indent=1)
    else:
        text = "\n".join([*told_lines(view, now), f"status: {WORDS[status]}"])
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
    except OSError:  # whoever was to read it has left
        silence_stdout()
    return status
