"""What is drawn of a run, at one moment: frozen, so that one thread may read on while another draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_silent.runs.watch.departures import METRICS, Departure, Metric


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
