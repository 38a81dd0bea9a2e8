"""Follow a run's files and make snapshots of it to draw or print.

watched = Watched("runs/my-run")
while watched.poll():           # reads only what is new; may take as long as the file system does
    ...
snapshot = watched.snapshot()
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_silent.distributed.parts import SHOWN_RANKS
from ds_silent.runs.events import EventGroup, EventLine
from ds_silent.runs.lines import METRICS, Metric, RankValues, StepLine
from ds_silent.runs.run import RunReader
from ds_silent.runs.verdict import RunVerdict, verdict_of

FILES = ("metrics.jsonl", "events.jsonl", "scores.jsonl")
LONGEST_CURVE = 512
"""Points of a sparkline: more than any terminal has columns."""
MOST_ROWS = 4096
"""Ranks of which a snapshot has rows."""
VERDICT_SHARE = 0.005
"""Share of a core, at most, for a verdict of which only the count can change; a new event is judged at once."""
MEMORY = 32
"""Records over which the averages go, about."""
MOST = 99.0
"""The largest departure: of a value that is not a number, or that differs where all others are equal."""
_USUAL = 1.0  # of a rank that is not among the extremes that were written
_FORGOTTEN = 1.5  # below it a rank that is no longer written is like all others
_ROUNDING = 1e-6  # of the median: ranks whose values are equal but for this do not differ


@dataclass(frozen=True)
class Departure:
    """``times`` as far from the ranks' median as a rank usually is, in the metric in which that is the most."""

    times: float
    metric: Metric


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
    findings: Mapping[str, int] = field(default_factory=dict)
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
            findings=dict(run.events.findings),
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
    if low is not None and high is not None and low < high:  # two ranks have one
        found["cosine"] = f"[{low:.3f}, {high:.3f}]"
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# -- How far each rank has stood from the others lately, in the ranks' own spread --------------------------------------
#
# A rank's departure of one step is |value - median of the ranks|, over the median of that distance over all ranks; a
# healthy rank's is about 1 on average, whatever the metric and its noise. Both are averaged over some MEMORY records,
# and the largest of the three metrics counts. This orders and draws the ranks; judging is what the detectors do, with
# a stated false-alarm rate.


class _Average:
    """The departures of one metric, by rank."""

    def __init__(self) -> None:
        self._records = 0
        self._spread = 0.0
        self.times: dict[int, float] = {}

    def step(self, values: Mapping[int, float], median: float, spread: float) -> None:
        self._records += 1
        share = max(1.0 / self._records, 1.0 / MEMORY)
        self._spread += share * (spread - self._spread)
        scale = max(self._spread, _ROUNDING * abs(median), 1e-30)
        for rank, value in values.items():
            now = min(abs(value - median) / scale, MOST) if math.isfinite(value) else MOST
            before = self.times.get(rank, _USUAL if self._records > 1 else now)
            self.times[rank] = before + share * (now - before)
        for rank in self.times.keys() - values.keys():
            self.times[rank] += share * (_USUAL - self.times[rank])
            if self.times[rank] < _FORGOTTEN:
                del self.times[rank]


class Departures:
    """The departures of every rank that the records name."""

    def __init__(self) -> None:
        self._averages: dict[Metric, _Average] = {metric: _Average() for metric in METRICS}

    def step(self, line: StepLine) -> None:
        """Add a step; a metric that was not measured at it stays as it is."""
        for metric, ranks in line.ranks.items():
            if values := ranks.by_rank():
                self._averages[metric].step(values, *_middle(values, ranks))

    def of(self, rank: int) -> Departure | None:
        """Return a rank's departure; None where it is not known: the rank is not there, or like most."""
        found = [(average.times[rank], metric) for metric, average in self._averages.items() if rank in average.times]
        return Departure(*max(found, key=lambda one: one[0])) if found else None

    def ranks(self) -> set[int]:
        """Return the ranks whose departure is known."""
        return {rank for average in self._averages.values() for rank in average.times}


def _middle(values: Mapping[int, float], ranks: RankValues) -> tuple[float, float]:
    """Return the median over the ranks, and the median distance from it."""
    if ranks.quantiles is None:  # all ranks are here
        median = _median(values.values())
        spread = _median(abs(value - median) for value in values.values())
    else:
        _, low, median, high, _ = ranks.quantiles
        spread = (high - low) / 2.0
    return (median, spread) if math.isfinite(median) and math.isfinite(spread) else (0.0, 0.0)


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else 0.0
