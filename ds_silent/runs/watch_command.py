"""``ds-silent watch``: a run in the live view, or at one moment as text or JSON; and the exit status.

In the live view a thread reads, this one draws and listens to the keys: however long a file system takes, neither waits
for it. A file that cannot be read is a line of the picture.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live

from ds_silent.distributed.parts import listed
from ds_silent.records import to_json
from ds_silent.runs.events import in_words
from ds_silent.runs.lines import METRICS
from ds_silent.runs.run import ReadingError, find_runs, newest_of, newest_run
from ds_silent.runs.screen import ScreenState, ago, draw, glyphs_for, most_scroll, rows_of
from ds_silent.runs.watched import RankRow, Snapshot, Watched
from ds_silent.text import mistake, printable

try:
    import termios
    import tty
except ImportError:  # not a Unix terminal: it is drawn, and Ctrl-C ends it
    termios = tty = None  # type: ignore[assignment]

HEALTHY, WARNING, ERROR, STALE, NOTHING, INTERRUPTED = 0, 1, 3, 4, 5, 130
"""Exit statuses; 2 is a mistake in the command, as in every command of ds-silent."""
WORDS: Mapping[int, str] = {
    HEALTHY: "healthy", WARNING: "warning", ERROR: "error", STALE: "stale", NOTHING: "no records"
}  # fmt: skip
JSON_FORMAT = 1
"""Keys are added without a new number; none changes its meaning."""
SHOWN_ROWS, SHOWN_EVENTS = 16, 20
_NAMED_RUNS = 8
TICK = 0.5
"""Seconds between two looks at the terminal's size."""
REDRAW = 1.0
"""Seconds between two pictures where no key is pressed."""
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home", "g": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end", "G": "end",
}  # fmt: skip
_KEY = re.compile(r"\x1b[\[O\d;]*.?|.", re.DOTALL)


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
        return mistake(f"{run!a} is a file; give a directory, the output_dir of a run")
    newest = os.fspath(newest_run(Path(run)))
    if newest != os.fspath(Path(run)):
        print(f"ds-silent: {run!a} holds several runs; this is the newest, {newest!a}", file=sys.stderr)
        run = newest
    if said := _runs_below(Path(run)):
        print(f"ds-silent: {said}", file=sys.stderr)
        if not as_json:
            return NOTHING
    if alert and (once or as_json):
        return mistake("--alert follows a run, so it goes with neither --once nor --json; leave them out")
    try:
        if alert:
            return _alerting(run, every, seconds, alert)
        if once or as_json or not can_draw():
            return _once(Watched(run), as_json, seconds)
        return status_of(look(Watched(run), run, every), seconds, time.time())
    except KeyboardInterrupt:
        return INTERRUPTED


def _runs_below(directory: Path) -> str:
    """Return what to watch instead where there are no records, and runs below; "" otherwise."""
    try:
        found = find_runs(directory)
    except ReadingError:  # nothing is there yet: that is waited for
        return ""
    if directory in found:
        return ""
    shown = listed([ascii(os.fspath(one)) for one in found], _NAMED_RUNS)
    which = "one run" if len(found) == 1 else f"{len(found)} runs"
    newest = shlex.quote(os.fspath(newest_of(found)))
    return (
        f"{os.fspath(directory)!a} holds no records itself, but {which} below: {shown}; "
        f"{'the newest: ' if len(found) > 1 else ''}ds-silent watch {newest}"
    )


def _alerting(run: str, every: float, stale: float | None, alert: Sequence[str]) -> int:
    from ds_silent.alerts.sink import FollowedEvents  # slow: only those who want it pay
    from ds_silent.config import ConfigError

    try:
        alerts = FollowedEvents(alert, run)
    except ConfigError as error:
        return mistake(error)
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
    lines.append(f"events: {in_words(view.findings) or 'none'}")
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
        place = [part for part in (event.who, event.where and f"at {event.where}") if part]
        head = "  ".join([f"step {event.step}", event.severity.upper(), event.kind, *place])
        lines.append(f"{head}: {event.message} {event.remedy}".rstrip())
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


class Following(threading.Thread):
    """Reads a run every so many seconds; ``snapshot`` is the newest, None before the first.

    ``caught_up`` is called in this thread after a snapshot of everything that there is.
    """

    def __init__(self, watched: Watched, every: float, caught_up: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="ds_silent watch reads", daemon=True)  # a read that hangs must not keep the process
        self._watched, self._every, self._caught_up = watched, every, caught_up
        self._left = threading.Event()
        self.snapshot: Snapshot | None = None

    def run(self) -> None:
        while not self._left.is_set():
            more = self._watched.poll()
            self.snapshot = self._watched.snapshot()
            if not more:
                self._caught_up()
            self._left.wait(0.0 if more else self._every)

    def leave(self) -> None:
        """Stop reading; does not wait for a read in progress."""
        self._left.set()


def can_draw() -> bool:
    """Return whether the output is a terminal on which lines can be drawn at their places."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def look(watched: Watched, name: str, every: float, caught_up: Callable[[], None] = lambda: None) -> Snapshot:
    """Draw until the user presses q or the terminal is gone; return the newest snapshot.

    Raises:
        KeyboardInterrupt: Ctrl-C; the terminal is as it was before.
        SystemExit: SIGTERM; likewise.
    """
    following = Following(watched, every, caught_up)
    before = signal.signal(signal.SIGTERM, _end)
    # A shell that starts a job in the background has its commands ignore SIGINT, and children inherit that.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = Snapshot(run=name, verdict="reading ...")
    console = Console(force_terminal=True, force_interactive=True, highlight=False, markup=False, emoji=False)
    following.start()
    try:
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with keys_from(sys.stdin) as keys, live:
            _draw_until_left(following, keys, live, nothing)
    except OSError:  # of the terminal: all others are lines of the picture
        silence_stdout()
    finally:
        following.leave()
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    return following.snapshot or nothing


def follow(watched: Watched, every: float, caught_up: Callable[[], None]) -> None:
    """Read without a picture until this process is ended, by Ctrl-C (KeyboardInterrupt) or SIGTERM (SystemExit)."""
    signal.signal(signal.SIGTERM, _end)
    following = Following(watched, every, caught_up)
    following.start()
    while following.is_alive():
        following.join(TICK)


def _draw_until_left(following: Following, keys: Keys, live: Live, view: Snapshot) -> None:
    state, glyphs, drawn_at, size = ScreenState(), glyphs_for(sys.stdout.encoding), 0.0, (0, 0)
    while True:
        fresh = following.snapshot
        if fresh is not None and not state.paused:
            waited, view = view.verdict == "reading ...", fresh
            drawn_at = 0.0 if waited else drawn_at
        if time.monotonic() - drawn_at >= REDRAW or live.console.size != size:
            drawn_at, size = time.monotonic(), live.console.size
            live.update(Group(*draw(view, state, *size, glyphs, time.time())), refresh=True)
        for key in keys(TICK):
            if key in ("q", "Q", "\x04"):
                return
            state = state.after(key, max(size[1] // 2, 1), most_scroll(view, state))
            drawn_at = 0.0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def silence_stdout() -> None:
    """Send what Python still flushes at its end nowhere: the reader of the output is gone."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


Keys = Callable[[float], list[str]]
"""Returns the keys that are pressed within so many seconds, as soon as there is one; "q" if the terminal is gone."""


@contextmanager
def keys_from(stream: TextIO) -> Iterator[Keys]:
    """Read a terminal's keys, without Return and without an echo; none where the input is not a terminal."""

    def none(seconds: float) -> list[str]:
        time.sleep(seconds)
        return []

    def pressed(seconds: float) -> list[str]:
        if not select.select([stream], [], [], seconds)[0]:
            return []
        return keys_of(os.read(stream.fileno(), 256)) or ["q"]

    if termios is None or not stream.isatty():
        yield none
        return
    before = termios.tcgetattr(stream)
    try:
        tty.setcbreak(stream)
        now = termios.tcgetattr(stream)
        now[6][termios.VSUSP] = b"\0"  # stopped in the middle, it would leave the terminal as it is
        termios.tcsetattr(stream, termios.TCSADRAIN, now)
        yield pressed
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


def keys_of(data: bytes) -> list[str]:
    """Return the names of the keys behind what a terminal has sent; "" for one that means nothing here."""
    return [_KEYS.get(key, key if len(key) == 1 else "") for key in _KEY.findall(data.decode("latin-1"))]
