"""A view as lines of text, exactly as many as the terminal has. Pure.

lines = draw(view, Wishes(), columns=80, rows=24, glyphs=BLOCKS, now=time.time())      # rich Texts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ds_silent.runs.watch.departures import METRICS, Metric
from ds_silent.runs.watch.watched import Said, Standing, View

# ----------------------------------------------------------------------------------------------------------------------
# Bars and sparklines of characters. Pure.


@dataclass(frozen=True)
class Glyphs:
    """What a terminal can show.

    Attributes:
        levels: of a sparkline, from low to high.
        parts: of a bar's last character, from the thinnest to a full one.
        rule: of a line across.
        hole: a value that is no number.
        up_down: the keys that scroll.
    """

    levels: str
    parts: str
    rule: str
    hole: str
    up_down: str

    def sparkline(self, values: Sequence[float], width: int) -> str:
        """The last ``width`` values, one character each, between their own lowest and highest."""
        shown = values[-width:] if width > 0 else ()
        finite = [value for value in shown if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        return "".join(self._level(value, low, high) for value in shown)

    def _level(self, value: float, low: float, high: float) -> str:
        if not math.isfinite(value):
            return self.hole
        span = high / 2 - low / 2  # halves, because the difference of two large numbers may be infinite
        if not span > 0.0:
            return self.levels[len(self.levels) // 2]
        return self.levels[min(int((value / 2 - low / 2) / span * len(self.levels)), len(self.levels) - 1)]

    def bar(self, share: float, width: int) -> str:
        """``share`` of ``width`` characters, 0 to 1; what is more than nothing is seen."""
        steps = len(self.parts)
        filled = max(round(min(max(share, 0.0), 1.0) * width * steps), 1 if share > 0.0 else 0)
        whole, rest = divmod(filled, steps)
        return self.parts[-1] * whole + (self.parts[rest - 1] if rest else "")


BLOCKS = Glyphs("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "─", "×", "↑↓")


PLAIN = Glyphs("_.-:=+*#", "#", "-", "x", "arrows")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Those that this encoding has."""
    try:
        "".join((BLOCKS.levels, BLOCKS.parts, BLOCKS.rule, BLOCKS.hole, BLOCKS.up_down)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BLOCKS


# -- A view as lines of text, exactly as many as the terminal has. Pure ------------------------------------------------


Sort = Literal["departure", "rank", "loss", "norm", "cosine"]
SORTS: tuple[Sort, ...] = ("departure", "rank", "loss", "norm", "cosine")
COLOURS: Mapping[str, str] = {
    "error": "bold red",
    "warning": "yellow",
    "info": "cyan",
    "ok": "green",
    "unknown": "dim",
}
WORST: Mapping[str, int] = {"error": 2, "warning": 1}
SMALLEST = (40, 10)
"""Columns and rows below which only the verdict is shown."""
_FULL_BAR = 10.0  # departures from which a bar is full
_NAMES: Mapping[Metric, str] = {"loss": "loss", "norm": "|g|", "cosine": "cosine"}
_LATE = 60.0  # seconds without a record that are worth a word, if a step takes less
_HELP = (
    ("q", "quit; the exit status says the verdict: 0 healthy, 1 warnings, 3 errors, 4 stale, 5 no records"),
    ("s S", "order the ranks by departure, rank, loss, norm or cosine; turn the order round"),
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
class Wishes:
    """What the person at the keys wants to see."""

    sort: Sort = "departure"
    turned: bool = False
    hosts: bool = False
    page: Literal["ranks", "events", "help"] = "ranks"
    paused: bool = False
    scroll: int = 0


@dataclass(frozen=True)
class _Row:
    """A rank, or a host by its rank that stands out most."""

    name: str
    place: str
    worst: Standing


def draw(view: View, wishes: Wishes, columns: int, rows: int, glyphs: Glyphs, now: float) -> list[Text]:
    """The whole screen: ``rows`` lines of at most ``columns`` cells. ``now``: in seconds since 1970."""
    if columns < SMALLEST[0] or rows < SMALLEST[1]:
        return _exactly(_wrap(view.verdict, columns, rows, COLOURS[view.level]), columns, rows)
    head = [_title(view, columns), *_verdict(view, columns), _state(view, now), *_data(view, columns)]
    if wishes.page == "help":
        body = _help_page(columns)
    elif wishes.page == "events":
        body = _events_page(view, wishes, columns, rows - len(head) - 1, glyphs)
    else:
        body = _ranks_page(view, wishes, columns, rows - len(head) - 1, glyphs)
    return [*_exactly([*head, *body], columns, rows - 1), *_exactly([_keys(wishes, columns, glyphs)], columns, 1)]


def most_scroll(view: View, wishes: Wishes) -> int:
    """How far one can move down on this page."""
    if wishes.page == "events":
        return max(0, len(view.events) - 1)
    return max(0, len(rows_of(view, wishes)) - 1)


def rows_of(view: View, wishes: Wishes) -> list[_Row]:
    """The ranks or hosts, in the order that is wished."""
    ranks = sorted(view.standings, key=_order(wishes.sort), reverse=wishes.turned)
    if not wishes.hosts:
        return [_Row(f"rank {one.rank}", one.spot, one) for one in ranks]
    hosts: dict[str, list[Standing]] = {}
    for one in ranks:
        hosts.setdefault(one.host or "?", []).append(one)
    return [_Row(host, _of(members), members[0]) for host, members in hosts.items()]


def _of(members: list[Standing]) -> str:
    return f"rank {members[0].rank}{f' of {len(members)}' if len(members) > 1 else ''}"


def _order(sort: Sort) -> Callable[[Standing], tuple[float, ...]]:
    """Worst first: what has an event, then what departs most; by a metric the highest first, no number before all."""

    def by_departure(one: Standing) -> tuple[float, ...]:
        times = one.departure.times if one.departure else 0.0
        return (-WORST.get(one.severity, 0), -times, one.rank)

    def by_value(one: Standing) -> tuple[float, ...]:
        value = one.values.get(sort) if sort in METRICS else None
        if value is None:
            return (1, 0.0, one.rank)
        return (0, -math.inf if math.isnan(value) else -value, one.rank)

    def by_rank(one: Standing) -> tuple[float, ...]:
        return (one.rank,)

    return by_departure if sort == "departure" else by_rank if sort == "rank" else by_value


# -- the head --------------------------------------------------------------------------------------------------------


def _title(view: View, columns: int) -> Text:
    step = "" if view.step is None else f"step {view.step:,}"
    epoch = "" if view.epoch is None else f"epoch {view.epoch:.2f}"
    ranks = f"{view.ranks:,} ranks" if view.ranks else ""
    right = "  ".join(part for part in (step, epoch, ranks) if part)
    left = set_cell_size(f"ds-silent watch {view.run}", max(columns - cell_len(right) - 2, 1))
    return Text(f"{left}  {right}", style="bold")


def _verdict(view: View, columns: int) -> list[Text]:
    return _wrap(view.verdict, columns, 2, COLOURS[view.level])


def _state(view: View, now: float) -> Text:
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
        parts.append(Text(f"{_rate(view.seconds)}"))
        if view.observe is not None:
            parts.append(Text(f"observing {view.observe / view.seconds:.1%}"))
    counted = [f"{count:,} {name}{'s' * (count != 1)}" for name, count in _by_severity(view) if count]
    parts.append(Text(f"events: {', '.join(counted) or 'none'}"))
    return Text("  ").join(parts)


def _data(view: View, columns: int) -> list[Text]:
    return _wrap(f"data: {view.data}", columns, 1, "dim") if view.data else []


def _by_severity(view: View) -> list[tuple[str, int]]:
    names = {"error": "error", "warning": "warning", "info": "note"}
    return [(name, view.counts.get(severity, 0)) for severity, name in names.items()]


def ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _rate(seconds: float) -> str:
    return f"{1 / seconds:.1f} steps/s" if seconds < 1.0 else f"{seconds:.1f} s/step"


# -- the pages -------------------------------------------------------------------------------------------------------


def _help_page(columns: int) -> list[Text]:
    lines = []
    for key, what in _HELP:
        first, *rest = _wrap(what, columns - 8, 3, "")
        lines += [Text(f"{key:<8}").append(first), *(Text(" " * 8).append(line) for line in rest)]
    return [*lines, Text(""), *_wrap(_HELP_OF_BARS, columns, 12, "dim")]


def _ranks_page(view: View, wishes: Wishes, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    curves = [_curve(view, metric, columns, glyphs) for metric in METRICS]
    all_rows = rows_of(view, wishes)
    left = rows - len(curves) - 2
    events = max(left // 3, left - max(len(all_rows), 1))  # what the ranks leave, a third at least
    events = max(min(events, len(view.events)), 1)
    shown = left - events
    first = min(wishes.scroll, max(len(all_rows) - shown, 0))
    page = all_rows[first : first + shown]
    body = [_table_row(row, columns, glyphs) for row in page] or [Text("no rank's values yet", style="dim")]
    said = [_event_line(event, columns) for event in reversed(view.events[-events:])] or [Text("none", style="dim")]
    place = f"{first + 1}-{first + len(page)} of {len(all_rows):,}" if len(page) < len(all_rows) else ""
    order = f"by {wishes.sort}{', turned' if wishes.turned else ''}"
    about = " ".join(part for part in ("hosts" if wishes.hosts else "ranks", order, place) if part)
    return [
        *curves,
        _table_head(about, columns, glyphs),
        *body,
        *[Text("")] * (shown - len(body)),
        _rule(f"last events, newest first{_left_out(view)}", columns, glyphs),
        *said,
    ]


def _left_out(view: View) -> str:
    """Where only ranks that stand out are written."""
    return f"; above: {len(view.standings):,} of {view.ranks:,} ranks" if 0 < len(view.standings) < view.ranks else ""


def _curve(view: View, metric: Metric, columns: int, glyphs: Glyphs) -> Text:
    curve = view.curves.get(metric, ())
    if not curve:
        return Text(f"{_NAMES[metric]:<7}not measured", style="dim")
    value = set_cell_size(f"{_short(curve[-1])} {view.spreads.get(metric, '')}", 26)
    line = Text(f"{_NAMES[metric]:<7}{value} ")
    line.append(glyphs.sparkline(curve, columns - cell_len(line.plain)), style="cyan")
    return line


def _table_head(about: str, columns: int, glyphs: Glyphs) -> Text:
    """A rule with the names of the columns in it."""
    left = set_cell_size(f"{glyphs.rule * 2} {about} ".ljust(columns, glyphs.rule), _before_values(columns))
    names = "".join(f" {name:>8}" for name in ("times", *_NAMES.values()))
    return Text(f"{left}{names} ".ljust(columns, glyphs.rule), style="dim")


def _table_row(row: _Row, columns: int, glyphs: Glyphs) -> Text:
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
    """Of the place and of the bar."""
    return (13, 12) if columns < 100 else (24, 24)


def _before_values(columns: int) -> int:
    return 12 + sum(_widths(columns))


def _event_line(event: Said, columns: int) -> Text:
    line = Text(f"{event.step:>8,} ")
    line.append(f"{event.severity:<7} ", style=COLOURS.get(event.severity, ""))
    line.append(f"{event.kind}  ", style="bold")
    line.append(f"{event.who + ': ' if event.who else ''}{event.message}")
    line.truncate(columns, overflow="ellipsis")
    return line


def _events_page(view: View, wishes: Wishes, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    newest = list(reversed(view.events))
    first = min(wishes.scroll, max(len(newest) - 1, 0))
    lines = [_rule(f"events {first + 1 if newest else 0} of the last {len(newest)}, newest first", columns, glyphs)]
    for event in newest[first : first + rows]:
        head = Text(f"step {event.step:,}  ")
        head.append(f"{event.severity.upper()}  {event.kind}", style=COLOURS.get(event.severity, ""))
        head.append(f"  {event.who}")
        lines += [head, *_wrap(event.message, columns, 8, "", "  ")]
        if event.remedy:
            lines += _wrap(event.remedy, columns, 4, "dim", "  ")
        if len(lines) >= rows:
            break
    return lines if newest else [*lines, Text("none", style="dim")]


def _rule(about: str, columns: int, glyphs: Glyphs) -> Text:
    return Text(f"{glyphs.rule * 2} {about} ".ljust(columns, glyphs.rule), style="dim")


def _keys(wishes: Wishes, columns: int, glyphs: Glyphs) -> Text:
    page = "e ranks" if wishes.page == "events" else "e events"
    keys = ["q quit", "s order", "h ranks" if wishes.hosts else "h hosts", page, f"{glyphs.up_down} move"]
    keys += ["p go on" if wishes.paused else "p pause", "? help"]
    return Text("  ".join(keys).ljust(columns), style="reverse")


# -- texts -----------------------------------------------------------------------------------------------------------


def _short(value: float) -> str:
    """A number in at most 8 characters."""
    if not math.isfinite(value):
        return str(value)
    said = f"{value:.3g}"
    return said if len(said) <= 8 else f"{value:.1e}"


def _wrap(text: str, columns: int, most: int, style: str, indent: str = "") -> list[Text]:
    """At most so many lines, broken at words; the last one says with its end that there is more."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}{word}")
    if len(lines) > most:
        lines[most - 1 :] = [" ".join(lines[most - 1 :])]
    found = []
    for line in lines or [indent]:
        made = Text(line, style=style)
        made.truncate(columns, overflow="ellipsis")
        found.append(made)
    return found


def _exactly(lines: list[Text], columns: int, rows: int) -> list[Text]:
    cut = [line.copy() for line in lines[:rows]]
    for line in cut:
        line.truncate(columns, overflow="ellipsis")
    return cut + [Text("")] * (rows - len(cut))
