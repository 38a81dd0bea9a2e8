"""Follow a run's files and make snapshots of it to draw or print.

watched = Watched("runs/my-run")
while watched.poll():           # reads only what is new; may take as long as the file system does
    ...
snapshot = watched.snapshot()
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_silent.distributed.parts import SHOWN_RANKS
from ds_silent.runs.events import EventGroup, EventLine
from ds_silent.runs.lines import METRICS, Metric
from ds_silent.runs.run import RunReader
from ds_silent.runs.verdict import RunVerdict, verdict_of
from ds_silent.runs.watch.departures import Departure, Departures

FILES = ("metrics.jsonl", "events.jsonl", "scores.jsonl")
LONGEST_CURVE = 512
"""Points of a sparkline: more than any terminal has columns."""
MOST_ROWS = 4096
"""Ranks of which a snapshot has rows."""
VERDICT_SHARE = 0.005
"""Share of a core, at most, for a verdict of which only the count can change; a new event is judged at once."""


@dataclass(frozen=True)
class RankRow:
    """One rank: its newest values, how far it stands from the others, and the worst open event that names it."""

    rank: int
    host: str = ""
    spot: str = ""  # "node0087:3"
    departure: Departure | None = None
    values: Mapping[Metric, float] = field(default_factory=dict)
    severity: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: frozen, so that one thread may read on while another draws.

    Attributes:
        level: of the verdict: "ok", "warning", "error" or "unknown".
        measured: the number of steps in the records.
        curves, spreads: means over the ranks, oldest first; over the ranks at the newest record, as text.
        events, counts: the last ones, the newest last; by severity.
        seconds, observe: of a step, and of the observer's part of it.
        written: when the newest record came, in seconds since 1970; None where there is none.
        data, problem: how the rows are dealt, and why something cannot be read; "" where there is nothing to say.
        behind: records that are there already are still being read.
    """

    run: str
    verdict: str = "no record yet"
    level: str = "unknown"
    step: int | None = None
    epoch: float | None = None
    measured: int = 0
    ranks: int = 0
    curves: Mapping[Metric, tuple[float, ...]] = field(default_factory=lambda: dict.fromkeys(METRICS, ()))
    spreads: Mapping[Metric, str] = field(default_factory=dict)
    rows: tuple[RankRow, ...] = ()
    events: tuple[EventLine, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    observe: float | None = None
    written: float | None = None
    data: str = ""
    problem: str = ""
    behind: bool = False


class Watched:
    """Follows one run's directory, which need not be there yet. Raises nothing.

    ``heard`` is called with each line of ``events.jsonl``, in order; with None where the file begins anew.
    """

    def __init__(
        self, directory: str | Path, heard: Callable[[dict[str, Any] | None], None] = lambda line: None
    ) -> None:
        self._heard = heard
        self._reader = RunReader(directory, names=FILES, listen=self._line)
        self._departures = Departures()
        self._grown: float | None = None  # when, by this machine's clock
        self._written: float | None = None  # when, as the file system says
        self._size = -1
        self._verdict: RunVerdict | None = None
        self._blame: dict[int, EventGroup] = {}
        self._judged: tuple[int, bool] | None = None  # events, and whether there were records
        self._judge_again = 0.0  # when
        self._behind = False

    def poll(self) -> bool:
        """Read what is new; return whether there may be more already."""
        self._behind = self._reader.poll()
        try:
            status = (self._reader.run.directory / FILES[0]).stat()
        except OSError:
            return self._behind
        if status.st_size != self._size:
            # A file server's clock may be off by minutes, but something has certainly come in now.
            self._grown = time.time() if self._size >= 0 else None
            self._size = status.st_size
        self._written = status.st_mtime if status.st_size else None
        return self._behind

    def snapshot(self) -> Snapshot:
        """Return the run as it is now."""
        run, verdict = self._reader.run, self._judge()
        newest = run.steps.newest
        values = newest.values if newest else {}
        return Snapshot(
            run=run.name,
            verdict=verdict.sentence,
            level=verdict.severity,
            step=newest.step if newest else None,
            epoch=_finite(values.get("epoch")),
            measured=len(run.steps),
            ranks=run.steps.world_size or len(run.places),
            curves={metric: tuple(run.steps.recent(f"{metric} mean", LONGEST_CURVE)) for metric in METRICS},
            spreads=_spreads(values),
            rows=self._rows(),
            events=tuple(run.events.recent),
            counts=dict(run.events.counts),
            seconds=_finite(values.get("step seconds")),
            observe=_finite(values.get("observe seconds")),
            written=self._written and (self._grown or self._written),
            data=run.data,
            problem=" ".join(run.problems),
            behind=self._behind,
        )

    def _line(self, name: str, line: dict[str, Any] | None) -> None:
        newest = self._reader.run.steps.newest
        if name == "events.jsonl":
            self._heard(line)
        elif name == "metrics.jsonl" and line is None:
            self._departures = Departures()
        elif name == "metrics.jsonl" and newest is not None:
            self._departures.step(newest)

    def _judge(self) -> RunVerdict:
        run, began = self._reader.run, time.monotonic()
        judged = (len(run.events), len(run.steps) > 0)
        if self._verdict is not None and judged == self._judged and began < self._judge_again:
            return self._verdict
        self._judged, self._verdict = judged, verdict_of(run)
        now = time.monotonic()
        self._judge_again = now + (now - began) / VERDICT_SHARE
        self._blame = {}
        for group in run.events.groups():  # worst first
            if group.severity != "info" and not group.ended and group.ranks_total <= SHOWN_RANKS:
                for rank in group.ranks:
                    self._blame.setdefault(rank, group)
        return self._verdict

    def _rows(self) -> tuple[RankRow, ...]:
        """Return a row for each rank, or for those that stand out where the ranks are too many."""
        newest, values = self._reader.run.steps.newest, dict[int, dict[Metric, float]]()
        for metric, ranks in newest.ranks.items() if newest else ():
            for rank, value in ranks.by_rank().items():
                values.setdefault(rank, {})[metric] = value
        named = sorted(values.keys() | self._blame.keys() | self._departures.ranks())[:MOST_ROWS]
        return tuple(self._row(rank, values.get(rank, {})) for rank in named)

    def _row(self, rank: int, values: Mapping[Metric, float]) -> RankRow:
        place, blame = self._reader.run.places.get(rank), self._blame.get(rank)
        host, spot = (place.host, place.spot) if place else ("", "")
        severity, kind = (blame.severity, blame.kind) if blame else ("", "")
        return RankRow(rank, host, spot, self._departures.of(rank), values, severity, kind)


def _spreads(values: Mapping[str, float | None]) -> dict[Metric, str]:
    """Return the dispersion over the ranks, as text."""
    each: tuple[Metric, ...] = ("loss", "norm")
    found = {metric: f"± {std:.3g}" for metric in each if (std := values.get(f"{metric} std")) is not None}
    low, high = values.get("pair min"), values.get("pair max")
    if low is not None and high is not None:
        found["cosine"] = f"[{low:.3f}, {high:.3f}]"
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
