"""A run whose files are followed: what is new of it becomes the view that is drawn.

watched = Watched("runs/my-run")
while watched.poll():           # reads only what is new; may take as long as the file system does
    ...
view = watched.view()
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_silent.distributed.parts import SHOWN_RANKS, ranks_of
from ds_silent.runs import RunReader, Verdict, verdict_of
from ds_silent.runs.events import EventGroup
from ds_silent.runs.values import number, of, ranks, text, whole
from ds_silent.runs.watch.departures import KEYS, METRICS, Departure, Departures, Metric, values_of

# ----------------------------------------------------------------------------------------------------------------------
# What is drawn of a run, at one moment: frozen, so that one thread may read on while another draws.


@dataclass(frozen=True)
class Said:
    """An event as it is shown: texts without control characters."""

    step: int
    severity: str
    kind: str
    who: str  # "rank 2", "ranks 0, 3", ""
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Standing:
    """One rank: how far it stands from the others, what is open against it, and its newest values."""

    rank: int
    host: str = ""
    spot: str = ""  # "node0087:3"
    departure: Departure | None = None
    values: Mapping[Metric, float] = field(default_factory=dict)
    severity: str = ""  # of the worst event that goes on and names it
    kind: str = ""


@dataclass(frozen=True)
class View:
    """All that is drawn of a run.

    Attributes:
        verdict: one sentence.
        level: of the verdict: "ok", "warning", "error" or "unknown".
        curves: of all ranks together, oldest first; they end with the newest record.
        spreads: of the ranks at the newest record, beside each curve.
        events: the last ones, the newest last.
        counts: events by severity.
        written: when the newest record came, in seconds since 1970; None where there is none.
        data: how the rows come to the ranks; "" where nobody says.
        problem: why something cannot be read; "" where all can.
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
    standings: tuple[Standing, ...] = ()
    events: tuple[Said, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None  # of a step
    observe: float | None = None  # of the observer's part of it
    written: float | None = None
    data: str = ""
    problem: str = ""
    behind: bool = False  # what is there already is still being read


# -- A run whose files are followed ------------------------------------------------------------------------------------


FILES = ("metrics.jsonl", "events.jsonl", "scores.jsonl")
LAST_EVENTS = 200
LONGEST_CURVE = 512
"""Points of a sparkline that are kept: more than any terminal has columns."""
MOST_ROWS = 4096
"""Ranks of which a view has rows."""
VERDICT_SHARE = 0.005
"""Of a core, at most, for a verdict that only counts on; one that may be another is found at once."""
_MEANS: Mapping[Metric, str] = {"loss": "mean", "norm": "mean", "cosine": "mean_cosine"}


class Watched:
    """One run's directory; it need not be there yet. Raises nothing.

    Args:
        heard: of each line of ``events.jsonl``, in order; None where the file begins anew.
    """

    def __init__(
        self, directory: str | Path, heard: Callable[[dict[str, Any] | None], None] = lambda line: None
    ) -> None:
        self._heard = heard
        self._reader = RunReader(directory, names=FILES, listen=self._line)
        self._departures = Departures()
        self._curves = _no_curves()
        self._events: deque[Said] = deque(maxlen=LAST_EVENTS)
        self._last: dict[str, Any] = {}
        self._measured = 0
        self._grown: float | None = None  # when, by this machine's clock
        self._written: float | None = None  # when, as the file system says
        self._size = -1
        self._verdict: Verdict | None = None
        self._blame: dict[int, EventGroup] = {}
        self._judged: tuple[int, bool] | None = None  # events, and whether there were records
        self._judge_again = 0.0  # when
        self._behind = False

    @property
    def verdict(self) -> Verdict | None:
        """As the last view has it; None before the first one."""
        return self._verdict

    def poll(self) -> bool:
        """Take up what is new; whether there may be more already."""
        self._behind = self._reader.poll()
        try:
            status = (self._reader.run.directory / FILES[0]).stat()
        except OSError:
            return self._behind
        if status.st_size != self._size:
            # A file server's clock may be off by minutes; that something has come in now is sure.
            self._grown = time.time() if self._size >= 0 else None
            self._size = status.st_size
        self._written = status.st_mtime if status.st_size else None
        return self._behind

    def view(self) -> View:
        """As it stands."""
        run = self._reader.run
        self._judge()
        verdict = self._verdict
        assert verdict is not None
        seconds, line = of(self._last, "seconds"), self._last
        return View(
            run=run.name,
            verdict=verdict.sentence,
            level=verdict.severity,
            step=whole(line.get("step")),
            epoch=_finite(line.get("epoch")),
            measured=self._measured,
            ranks=whole(line.get("world_size")) or len(run.places),
            curves={metric: tuple(curve) for metric, curve in self._curves.items()},
            spreads=_spreads(line),
            standings=self._standings(),
            events=tuple(self._events),
            counts=dict(run.events.counts),
            seconds=_finite(of(seconds, "step")),
            observe=_finite(of(seconds, "observe")),
            written=self._written and (self._grown or self._written),
            data=run.data,
            problem=" ".join(run.problems),
            behind=self._behind,
        )

    def _line(self, name: str, line: dict[str, Any] | None) -> None:
        """A record that the reader has taken up; None: what was told of this file before is no more."""
        if name == "events.jsonl":
            self._event(line)
            self._heard(line)
        elif name == "metrics.jsonl":
            self._record(line)

    def _event(self, line: dict[str, Any] | None) -> None:
        if line is None:
            self._events.clear()
            return
        event = said(line)
        if event not in self._events:  # a resumed run tells it again
            self._events.append(event)

    def _record(self, line: dict[str, Any] | None) -> None:
        if line is None:
            self._departures, self._curves, self._last, self._measured = Departures(), _no_curves(), {}, 0
            return
        self._last, self._measured = line, self._measured + 1
        self._departures.step(line)
        for metric, curve in self._curves.items():
            mean = number(of(line, KEYS[metric], _MEANS[metric]))
            if mean is not None:
                curve.append(mean)

    def _judge(self) -> None:
        known, began = (len(self._reader.run.events), self._measured > 0), time.monotonic()
        if known == self._judged and began < self._judge_again:
            return
        self._judged = known
        self._verdict = verdict_of(self._reader.run)
        now = time.monotonic()
        self._judge_again = now + (now - began) / VERDICT_SHARE
        self._blame = {}
        for group in self._reader.run.events.groups():  # worst first
            if group.severity != "info" and not group.ended and group.ranks_total <= SHOWN_RANKS:
                for rank in group.ranks:
                    self._blame.setdefault(rank, group)

    def _standings(self) -> tuple[Standing, ...]:
        """Of all ranks, or of those that stand out where the ranks are too many."""
        values: dict[int, dict[Metric, float]] = {}
        for metric in METRICS:
            for rank, value in values_of(self._last, metric).items():
                values.setdefault(rank, {})[metric] = value
        known = sorted(values.keys() | self._blame.keys() | self._departures.ranks())[:MOST_ROWS]
        return tuple(self._standing(rank, values.get(rank, {})) for rank in known)

    def _standing(self, rank: int, values: Mapping[Metric, float]) -> Standing:
        place, blame = self._reader.run.places.get(rank), self._blame.get(rank)
        return Standing(
            rank,
            "" if place is None else place.host,
            "" if place is None else place.spot,
            self._departures.of(rank),
            values,
            "" if blame is None else blame.severity,
            "" if blame is None else blame.kind,
        )


def said(event: Mapping[str, Any]) -> Said:
    """A line of events.jsonl, for people."""
    named = ranks(event.get("ranks"))
    total = whole(event.get("ranks_total")) or len(named)
    who = f"{total:,} ranks" if total > SHOWN_RANKS else ranks_of(named) if named else ""
    return Said(
        whole(event.get("step")) or 0,
        text(event.get("severity"), 10),
        text(event.get("kind"), 60),
        who,
        text(event.get("message")),
        text(event.get("remedy")),
    )


def _spreads(line: Mapping[str, Any]) -> dict[Metric, str]:
    """Beside the mean: the dispersion over the ranks."""
    found: dict[Metric, str] = {}
    for metric in ("loss", "norm"):
        std = number(of(line, KEYS[metric], "std"))
        if std is not None:
            found[metric] = f"± {std:.3g}"
    low, high = (number(of(line, "direction", key)) for key in ("min_cosine", "max_cosine"))
    if low is not None and high is not None:
        found["cosine"] = f"[{low:.3f}, {high:.3f}]"
    return found


def _finite(value: Any) -> float | None:
    known = number(value)
    return known if known is not None and math.isfinite(known) else None


def _no_curves() -> dict[Metric, deque[float]]:
    return {metric: deque(maxlen=LONGEST_CURVE) for metric in METRICS}
