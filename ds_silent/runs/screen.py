"""A snapshot of a run as lines of text, exactly as many as the terminal has; and what its keys change. Pure.

lines = draw(snapshot, ScreenState(), columns=80, rows=24, glyphs=BLOCKS, now=time.time())      # rich Texts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ds_silent.runs.events import EventLine, in_words
from ds_silent.runs.lines import METRICS, Metric
from ds_silent.runs.watched import RankRow, Snapshot

SORTS = ("departure", "rank", *METRICS)
COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan", "ok": "green", "unknown": "dim"}
SMALLEST = (40, 10)
"""Columns and rows below which only the verdict is shown."""
_WORST = {"error": 2, "warning": 1}
_FULL_BAR = 10.0  # departures from which a bar is full
_LATE = 60.0  # seconds without a record that are worth a word, if a step takes less
Page = Literal["ranks", "events", "help"]
_PAGES: Mapping[str, Page] = {"e": "events", "?": "help", "\x1b": "ranks"}  # a second time: the ranks again
_HELP = (
    ("q", "quit; the exit status says the verdict: 0 healthy, 1 warnings, 3 errors, 4 stale, 5 no records"),
    ("s S", f"order the ranks by {', '.join(SORTS[:-1])} or {SORTS[-1]}; turn the order round"),
    ("h", "one line per host instead of one per rank"),
    ("e", "events on the whole page, in full"),
    ("p", "stop the picture; reading goes on"),
    ("arrows", "move in the ranks or the events; so do k, j, page up, page down, home and end"),
)
_HELP_OF_BARS = (
    "A bar is a rank's departure: how far it has stood from the ranks' median lately, in loss, gradient norm or "
    "cosine, over how far a rank usually stands from it. About 1 is what all have; a full bar is 10. It orders the "
    "ranks; its colour is the severity of the events that go on and name the rank."
)


@dataclass(frozen=True)
class Glyphs:
    """The characters that a terminal can show."""

    levels: str  # of a sparkline, from low to high
    parts: str  # of a bar's last character, from the thinnest to a full one
    rule: str  # of a line across
    hole: str  # a value that is not finite
    up_down: str  # the keys that scroll

    def sparkline(self, values: Sequence[float], width: int) -> str:
        """Draw the last ``width`` values, one character each, between their own lowest and highest."""
        shown, count = values[-width:] if width > 0 else (), len(self.levels)
        finite = [value / 2 for value in shown if math.isfinite(value)]  # the difference of large ones may be infinite
        low = min(finite, default=0.0)
        span = max(finite, default=0.0) - low
        shares = [(value / 2 - low) / span if span > 0.0 else 0.5 for value in shown]
        heights = zip(shown, shares, strict=True)
        return "".join(
            self.levels[min(int(share * count), count - 1)] if math.isfinite(value) else self.hole
            for value, share in heights
        )

    def bar(self, share: float, width: int) -> str:
        """Draw ``share``, 0 to 1, of ``width`` characters; more than nothing is always visible."""
        steps = len(self.parts)
        filled = max(round(min(max(share, 0.0), 1.0) * width * steps), 1 if share > 0.0 else 0)
        whole, rest = divmod(filled, steps)
        return self.parts[-1] * whole + (self.parts[rest - 1] if rest else "")


BLOCKS = Glyphs("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "─", "×", "↑↓")
PLAIN = Glyphs("_.-:=+*#", "#", "-", "x", "arrows")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return the characters that this encoding has."""
    try:
        "".join((BLOCKS.levels, BLOCKS.parts, BLOCKS.rule, BLOCKS.hole, BLOCKS.up_down)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BLOCKS


@dataclass(frozen=True)
class ScreenState:
    """What the user has chosen with the keys."""

    sort: str = "departure"  # one of SORTS
    reverse: bool = False
    hosts: bool = False
    page: Page = "ranks"
    paused: bool = False
    scroll: int = 0

    def after(self, key: str, page: int, most: int) -> ScreenState:
        """Return the state after this key; ``page``: lines that the keys for a page move; ``most``: how far down."""
        moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -self.scroll, "end": most}
        if key in moves:
            return replace(self, scroll=min(max(self.scroll + moves[key], 0), most))
        if key == "s":
            return replace(self, sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)], scroll=0)
        if key == "S":
            return replace(self, reverse=not self.reverse, scroll=0)
        if key == "h":
            return replace(self, hosts=not self.hosts, page="ranks", scroll=0)
        if key in _PAGES:
            return replace(self, page="ranks" if self.page == _PAGES[key] else _PAGES[key], scroll=0)
        return replace(self, paused=not self.paused) if key == "p" else self


class TableRow(NamedTuple):
    """A rank, or a host by its rank that stands out most."""

    name: str
    place: str
    worst: RankRow


def draw(view: Snapshot, state: ScreenState, columns: int, rows: int, glyphs: Glyphs, now: float) -> list[Text]:
    """Return ``rows`` lines of at most ``columns`` cells. ``now``: in seconds since 1970."""
    if columns < SMALLEST[0] or rows < SMALLEST[1]:
        return _exactly(_wrap(view.verdict, columns, rows, COLOURS[view.level]), columns, rows)
    head = [_title(view, columns), *_wrap(view.verdict, columns, 2, COLOURS[view.level]), _state(view, now)]
    if view.data:
        head += _wrap(f"data: {view.data}", columns, 1, "dim")
    body = _PAGE[state.page](view, state, columns, rows - len(head) - 1, glyphs)
    return [*_exactly([*head, *body], columns, rows - 1), *_exactly([_keys(state, columns, glyphs)], columns, 1)]


def most_scroll(view: Snapshot, state: ScreenState) -> int:
    """Return how far one can move down on this page."""
    return max(0, len(view.events if state.page == "events" else rows_of(view, state)) - 1)


def rows_of(view: Snapshot, state: ScreenState) -> list[TableRow]:
    """Return the ranks or hosts in the order that was chosen."""
    ranks = sorted(view.rows, key=lambda one: _order(one, state.sort), reverse=state.reverse)
    if not state.hosts:
        return [TableRow(f"rank {one.rank}", one.spot, one) for one in ranks]
    hosts: dict[str, list[RankRow]] = {}
    for one in ranks:
        hosts.setdefault(one.host or "?", []).append(one)
    return [
        TableRow(host, f"rank {worst.rank}{f' of {1 + len(rest)}' if rest else ''}", worst)
        for host, (worst, *rest) in hosts.items()
    ]


def _order(row: RankRow, sort: str) -> tuple[float, ...]:
    """Put ranks with an event first, then those that depart most; by a metric NaN, then the highest."""
    if sort == "rank":
        return (row.rank,)
    if sort == "departure":
        return -_WORST.get(row.severity, 0), -(row.departure.times if row.departure else 0.0), row.rank
    value = row.values.get(sort)
    if value is None:
        return 1, 0.0, row.rank
    return 0, -math.inf if math.isnan(value) else -value, row.rank


def _title(view: Snapshot, columns: int) -> Text:
    step = "" if view.step is None else f"step {view.step:,}"
    epoch = "" if view.epoch is None else f"epoch {view.epoch:.2f}"
    ranks = f"{view.ranks:,} ranks" if view.ranks else ""
    right = "  ".join(part for part in (step, epoch, ranks) if part)
    left = set_cell_size(f"ds-silent watch {view.run}", max(columns - cell_len(right) - 2, 1))
    return Text(f"{left}  {right}", style="bold")


def _state(view: Snapshot, now: float) -> Text:
    parts = []
    if view.problem:
        parts.append(Text(view.problem, style="yellow"))
    if view.behind:
        parts.append(Text("reading what is there ...", style="dim"))
    if view.written is not None:
        age = now - view.written
        late = age > max(_LATE, 20.0 * (view.seconds or 0.0))
        parts.append(Text(f"last record {ago(age)} ago", style="yellow" if late else ""))
    if view.seconds:
        fast = view.seconds < 1.0
        parts.append(Text(f"{1 / view.seconds:.1f} steps/s" if fast else f"{view.seconds:.1f} s/step"))
        if view.observe is not None:
            parts.append(Text(f"observing {view.observe / view.seconds:.1%}"))
    parts.append(Text(f"events: {in_words(view.findings) or 'none'}"))
    return Text("  ").join(parts)


def ago(seconds: float) -> str:
    """Return an age in the unit that suits it."""
    if seconds < 90:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _help_page(view: Snapshot, state: ScreenState, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    lines = []
    for key, what in _HELP:
        first, *rest = _wrap(what, columns - 8, 3, "")
        lines += [Text(f"{key:<8}").append(first), *(Text(" " * 8).append(line) for line in rest)]
    return [*lines, Text(""), *_wrap(_HELP_OF_BARS, columns, 12, "dim")]


def _ranks_page(view: Snapshot, state: ScreenState, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    curves = [_curve(view, metric, columns, glyphs) for metric in METRICS]
    all_rows = rows_of(view, state)
    left = rows - len(curves) - 2
    events = max(left // 3, left - max(len(all_rows), 1))  # what the ranks leave, a third at least
    events = max(min(events, len(view.events)), 1)
    shown = left - events
    first = min(state.scroll, max(len(all_rows) - shown, 0))
    page = all_rows[first : first + shown]
    body = [_table_row(row, columns, glyphs) for row in page] or [Text("no rank's values yet", style="dim")]
    said = [_event_line(event, columns) for event in reversed(view.events[-events:])] or [Text("none", style="dim")]
    about = f"{'hosts' if state.hosts else 'ranks'} by {state.sort}{', turned' if state.reverse else ''}"
    if len(page) < len(all_rows):
        about += f" {first + 1}-{first + len(page)} of {len(all_rows):,}"
    events_about = "last events, newest first"
    if 0 < len(view.rows) < view.ranks:  # only ranks that stand out are written
        events_about += f"; above: {len(view.rows):,} of {view.ranks:,} ranks"
    body += [Text("")] * (shown - len(body))
    return [*curves, _table_head(about, columns, glyphs), *body, _rule(events_about, columns, glyphs), *said]


def _curve(view: Snapshot, metric: Metric, columns: int, glyphs: Glyphs) -> Text:
    curve = view.curves.get(metric, ())
    if not curve:
        return Text(f"{METRICS[metric].label:<7}not measured", style="dim")
    value = set_cell_size(f"{_short(curve[-1])} {view.spreads.get(metric, '')}", 26)
    line = Text(f"{METRICS[metric].label:<7}{value} ")
    line.append(glyphs.sparkline(curve, columns - cell_len(line.plain)), style="cyan")
    return line


def _table_head(about: str, columns: int, glyphs: Glyphs) -> Text:
    """Return a rule with the names of the columns in it."""
    left = set_cell_size(f"{glyphs.rule * 2} {about} ".ljust(columns, glyphs.rule), 12 + sum(_widths(columns)))
    names = "".join(f" {name:>8}" for name in ("times", *(metric.label for metric in METRICS.values())))
    return Text(f"{left}{names} ".ljust(columns, glyphs.rule), style="dim")


def _table_row(row: TableRow, columns: int, glyphs: Glyphs) -> Text:
    one, (place_width, bar_width) = row.worst, _widths(columns)
    times = None if one.departure is None else one.departure.times
    line = Text(f"{set_cell_size(row.name, 10)} {set_cell_size(row.place, place_width)} ")
    bar = "" if times is None else glyphs.bar(times / _FULL_BAR, bar_width)
    line.append(set_cell_size(bar, bar_width), style=COLOURS.get(one.severity, "green"))
    line.append(f" {'-' if times is None else f'{times:.1f}':>8}")
    for metric in METRICS:
        value = one.values.get(metric)
        loud = one.departure is not None and one.departure.metric == metric and one.departure.times > 3.0
        line.append(f" {'-' if value is None else _short(value):>8}", style="bold" if loud else "")
    if one.kind:
        line.append(f" {one.kind}", style=COLOURS.get(one.severity, ""))
    return line


def _widths(columns: int) -> tuple[int, int]:
    """Return the widths of the place and of the bar."""
    return (13, 12) if columns < 100 else (24, 24)


def _event_line(event: EventLine, columns: int) -> Text:
    line = Text(f"{event.step:>8,} ")
    line.append(f"{event.severity:<7} ", style=COLOURS.get(event.severity, ""))
    line.append(f"{event.kind}  ", style="bold")
    line.append(f"{event.who + ': ' if event.who else ''}{event.message}")
    line.truncate(columns, overflow="ellipsis")
    return line


def _events_page(view: Snapshot, state: ScreenState, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    newest = list(reversed(view.events))
    first = min(state.scroll, max(len(newest) - 1, 0))
    lines = [_rule(f"events {first + 1 if newest else 0} of the last {len(newest)}, newest first", columns, glyphs)]
    for event in newest[first : first + rows]:
        head = Text(f"step {event.step:,}  ")
        head.append(f"{event.severity.upper()}  {event.kind}", style=COLOURS.get(event.severity, ""))
        head.append(f"  {event.who}{event.where and f'  at {event.where}'}")
        lines += [head, *_wrap(event.message, columns, 8, "", "  ")]
        if event.remedy:
            lines += _wrap(event.remedy, columns, 4, "dim", "  ")
        if len(lines) >= rows:
            break
    return lines if newest else [*lines, Text("none", style="dim")]


_PAGE = {"ranks": _ranks_page, "events": _events_page, "help": _help_page}


def _rule(about: str, columns: int, glyphs: Glyphs) -> Text:
    return Text(f"{glyphs.rule * 2} {about} ".ljust(columns, glyphs.rule), style="dim")


def _keys(state: ScreenState, columns: int, glyphs: Glyphs) -> Text:
    page = "e ranks" if state.page == "events" else "e events"
    keys = ["q quit", "s order", "h ranks" if state.hosts else "h hosts", page, f"{glyphs.up_down} move"]
    keys += ["p go on" if state.paused else "p pause", "? help"]
    return Text("  ".join(keys).ljust(columns), style="reverse")


def _short(value: float) -> str:
    """Return a number in at most 8 characters."""
    if not math.isfinite(value):
        return str(value)
    said = f"{value:.3g}"
    return said if len(said) <= 8 else f"{value:.1e}"


def _wrap(text: str, columns: int, most: int, style: str, indent: str = "") -> list[Text]:
    """Break a text at words into at most so many lines; the last one ends with an ellipsis where there is more."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}{word}")
    if len(lines) > most:
        lines[most - 1 :] = [" ".join(lines[most - 1 :])]
    return _exactly([Text(line, style=style) for line in lines or [indent]], columns, max(len(lines), 1))


def _exactly(lines: list[Text], columns: int, rows: int) -> list[Text]:
    cut = [line.copy() for line in lines[:rows]]
    for line in cut:
        line.truncate(columns, overflow="ellipsis")
    return cut + [Text("")] * (rows - len(cut))
