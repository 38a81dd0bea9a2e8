"""What stands on the screen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from ds_silent.runs.events import EventLine
from ds_silent.runs.lines import METRICS
from ds_silent.runs.screen import BLOCKS, PLAIN, SORTS, ScreenState, draw, glyphs_for, most_scroll, rows_of
from ds_silent.runs.watch_command import keys_of
from ds_silent.runs.watched import Departure, RankRow, Snapshot

NOW = 1_000_000.0


def standing(rank: int, times: float, severity: str = "", **values: float) -> RankRow:
    known: Any = {metric: values.get(metric, 1.0 + rank) for metric in METRICS}
    departure = Departure(times, "norm")
    return RankRow(
        rank, f"node{rank // 2}", f"node{rank // 2}:{rank % 2}", departure, known, severity, "x" * bool(severity)
    )


RANKS = (standing(0, 1.0), standing(1, 9.0), standing(2, 2.0, "error"), standing(3, 3.0, "warning"))
VIEW = Snapshot(
    run="runs/my-run",
    verdict="Rank 2 (node1:0) is not like the others, since step 66.",
    level="error",
    step=12_345,
    epoch=0.25,
    measured=100,
    ranks=4,
    curves={metric: tuple(float(k % 7) for k in range(200)) for metric in METRICS},
    spreads={"loss": "± 0.2"},
    rows=RANKS,
    events=tuple(
        EventLine(step, "warning", "outlier-rank", "rank 2", f"message {step}", "Look.") for step in range(30)
    ),
    counts={"error": 2, "warning": 1, "info": 0},
    findings={"error": 2, "warning": 1, "info": 0},
    seconds=0.1,
    observe=0.002,
    written=NOW - 3,
)
PAGES = [ScreenState(page=page, hosts=hosts) for page in ("ranks", "events", "help") for hosts in (False, True)]  # type: ignore[arg-type]


def screen(view: Snapshot = VIEW, state: ScreenState = ScreenState(), columns: int = 80, rows: int = 24) -> list[str]:  # noqa: B008
    return [line.plain for line in draw(view, state, columns, rows, BLOCKS, NOW)]


def test_it_fits_any_terminal() -> None:
    hostile = replace(
        VIEW,
        run="日本" * 60,
        verdict="語" * 300,
        rows=tuple(RankRow(rank, "字" * 40, "字" * 40) for rank in range(100)),
        events=(EventLine(10**18, "severe" * 9, "字" * 60, "ranks" * 30, "字" * 4000, "r" * 4000),),
    )
    for view in (VIEW, hostile, Snapshot(run="x"), replace(VIEW, step=None, ranks=0)):
        for columns, rows in ((80, 24), (1, 1), (20, 5), (40, 10), (79, 11), (200, 60), (500, 12)):
            for state in PAGES:
                for glyphs in (BLOCKS, PLAIN):
                    lines = draw(view, replace(state, scroll=3), columns, rows, glyphs, NOW)
                    assert len(lines) == rows
                    assert all(cell_len(line.plain) <= columns for line in lines), (columns, rows, state)
                    assert all("\n" not in line.plain for line in lines)


def test_what_is_on_the_first_page() -> None:
    lines = screen()
    assert lines[0].startswith("ds-silent watch runs/my-run")
    assert lines[0].endswith("step 12,345  epoch 0.25  4 ranks")
    assert lines[1] == VIEW.verdict
    assert lines[2] == "last record 3 s ago  10.0 steps/s  observing 2.0%  events: 2 errors, 1 warning"
    assert [line.split()[0] for line in lines[3:6]] == ["loss", "|g|", "cosine"]
    assert lines[3].startswith("loss   3 ± 0.2")
    assert [line[:6] for line in lines[7:11]] == ["rank 2", "rank 3", "rank 1", "rank 0"]  # events, then departure
    assert "node1:0" in lines[7]
    assert lines[11].startswith("── last events, newest first")
    assert [int(line.split()[0]) for line in lines[12:15]] == [29, 28, 27]
    for key in ("q quit", "s order", "h hosts", "e events", "p pause", "? help"):
        assert key in lines[-1]


def test_a_bar_is_as_long_as_the_departure() -> None:
    lines = screen()
    bars = {line[:6]: sum(line.count(part) for part in BLOCKS.parts) for line in lines[7:11]}
    assert bars == {"rank 2": 3, "rank 3": 4, "rank 1": 11, "rank 0": 2}  # 12 characters are a departure of 10


def test_the_colour_of_a_bar_is_the_severity_of_the_events() -> None:
    styles = [str(line.spans[0].style) for line in draw(VIEW, ScreenState(), 80, 24, BLOCKS, NOW)[7:11]]
    assert styles == ["bold red", "yellow", "green", "green"]


def test_every_order() -> None:
    view = replace(VIEW, rows=(*RANKS, standing(4, 0.5, loss=math.nan), RankRow(5)))
    orders = {sort: [row.worst.rank for row in rows_of(view, ScreenState(sort=sort))] for sort in SORTS}
    assert orders == {
        "departure": [2, 3, 1, 0, 4, 5],
        "rank": [0, 1, 2, 3, 4, 5],
        "loss": [4, 3, 2, 1, 0, 5],
        "norm": [4, 3, 2, 1, 0, 5],
        "cosine": [4, 3, 2, 1, 0, 5],
    }
    assert [row.worst.rank for row in rows_of(view, ScreenState(sort="rank", reverse=True))] == [5, 4, 3, 2, 1, 0]


def test_hosts() -> None:
    rows = rows_of(VIEW, ScreenState(hosts=True))
    assert [(row.name, row.place) for row in rows] == [("node1", "rank 2 of 2"), ("node0", "rank 1 of 2")]


def test_scrolling_shows_every_rank() -> None:
    view = replace(VIEW, rows=tuple(standing(rank, 1.0) for rank in range(50)))
    state, seen = ScreenState(sort="rank"), set()
    for _ in range(12):
        seen |= {line[:7].strip() for line in screen(view, state) if line.startswith("rank ")}
        state = state.after("page down", 8, most_scroll(view, state))
    assert seen == {f"rank {rank}" for rank in range(50)}
    assert state.scroll == 49


def test_late_and_unread_are_said() -> None:
    line = screen(replace(VIEW, written=NOW - 7200, problem="metrics.jsonl cannot be read: Stale file handle."))[2]
    assert "last record 2 h ago" in line
    assert "Stale file handle" in line


def test_keys() -> None:
    assert keys_of(b"q\x1b[A\x1bOB\x1b[6~jG") == ["q", "up", "down", "page down", "down", "end"]
    assert keys_of(b"\x1b[1;5C") == [""]  # one that means nothing
    assert keys_of(b"\x1b") == ["\x1b"]
    assert keys_of(bytes(range(256)))  # whatever comes
    state = ScreenState()
    assert state.after("up", 5, 9).scroll == 0
    assert replace(state, scroll=4).after("home", 5, 9).scroll == 0
    assert state.after("end", 5, 9).scroll == 9
    assert [replace(state, sort=sort).after("s", 5, 9).sort for sort in SORTS] == [*SORTS[1:], SORTS[0]]
    assert state.after("e", 5, 9).after("e", 5, 9) == state
    assert state.after("?", 5, 9).page == "help"
    assert state.after("p", 5, 9).paused
    assert state.after("x", 5, 9) == state


def test_sparklines_and_bars() -> None:
    assert BLOCKS.sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == BLOCKS.levels
    assert BLOCKS.sparkline([9.0, 0.0, 7.0], 2) == "▁█"
    assert BLOCKS.sparkline([math.nan, 1.0, math.inf, 2.0], 9) == "×▁×█"
    assert BLOCKS.sparkline([3.0, 3.0], 9) == "▅▅"
    assert BLOCKS.sparkline([-1.7e308, 1.7e308], 9) == "▁█"
    assert BLOCKS.sparkline([5e-324, 0.0], 9) == "▅▅"
    assert BLOCKS.sparkline([], 9) == BLOCKS.sparkline([1.0], 0) == ""
    assert [BLOCKS.bar(share, 4) for share in (0.0, 0.001, 0.5, 1.0, 9.0)] == ["", "▏", "██", "████", "████"]
    assert PLAIN.bar(0.5, 4) == "##"


@pytest.mark.parametrize(
    ("encoding", "glyphs"), [("utf-8", BLOCKS), ("ascii", PLAIN), (None, PLAIN), ("no-such", PLAIN)]
)
def test_a_terminal_that_has_no_blocks(encoding: str | None, glyphs: object) -> None:
    assert glyphs_for(encoding) is glyphs
    if glyphs is PLAIN:
        "".join(line.plain for line in draw(VIEW, ScreenState(), 80, 24, PLAIN, NOW)[6:]).encode("ascii", "ignore")
