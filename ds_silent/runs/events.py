"""Events in one group per fault, however often each was reported: none is left out, and all are counted.

log = EventLog()
log.add({"step": 12, "kind": "outlier-rank", "severity": "error", "ranks": [2], ...})
log.groups()          # worst first, then earliest
log.counts            # of the severities
log.recent            # the last 200, one by one
"""

from __future__ import annotations

import bisect
import re
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_silent.distributed.parts import SHOWN_RANKS, ranks_of
from ds_silent.records import SAME_WORK
from ds_silent.runs.lines import MOST_RANKS, number, of, ranks, text, whole

SEVERITIES: Mapping[str, str] = {"error": "error", "warning": "warning", "info": "note"}
"""The worst first, and what people call each."""
_ORDER = {severity: order for order, severity in enumerate(SEVERITIES)}
MOST_GROUPS = 2000
"""Further ones are counted together, by kind and severity."""
_MOST_SPANS = 200
_SINCE = re.compile(r"(?:(?:that of|since|since about) step|those of steps) (\d{1,18})\b")
_OPEN = re.compile(r"\bsince ((?:about )?step [\d,]+)(?![\d,])")
_AFTERWARDS = ("observer-off", "repaired")  # actions, not faults that go on


@dataclass
class RankPlace:
    """Where a rank runs, as far as it is known."""

    rank: int
    host: str
    spot: str  # "node0087:3"


@dataclass(frozen=True)
class EventLine:
    """One event as it is listed: texts without control characters."""

    step: int
    severity: str
    kind: str
    who: str  # "rank 2", "ranks 0, 3", ""
    message: str
    remedy: str = ""
    where: str = ""


@dataclass
class EventGroup:
    """All events of one fault."""

    kind: str
    severity: str  # the worst
    where: str
    ranks: tuple[int, ...]
    ranks_total: int
    message: str  # the first of the worst severity
    remedy: str
    score: float | None = None
    threshold: float | None = None
    places: tuple[RankPlace, ...] = ()
    steps: array[int] = field(default_factory=lambda: array("q"))  # of every event, ascending
    spans: list[list[int]] = field(default_factory=list)  # first and last step; 1 where its end was reported
    is_open: bool = False  # the newest event says that it is there, and no other says that it is over
    follows: str = ""  # kind and place of the fault that it follows from
    folded: int = 0  # faults in it, where it stands for many

    @property
    def first(self) -> int:
        return self.steps[0]

    @property
    def last(self) -> int:
        return self.steps[-1]

    @property
    def count(self) -> int:
        return len(self.steps)

    @property
    def name(self) -> str:
        """As the faults that follow from it call it."""
        return f"{self.kind} ({self.where})" if self.where else self.kind

    @property
    def is_same_work(self) -> bool:
        """Whether ranks do the same work, and not on the same rows as far as is known."""
        return SAME_WORK in self.message

    @property
    def said(self) -> str:
        """The message; of a fault that is over, which was open when that was written, with its last step."""
        return _OPEN.sub(rf"from \1 to {self.until:,}", self.message) if self.ended else self.message

    @property
    def total(self) -> int:
        """The number of ranks, also of those that are not listed."""
        return max(self.ranks_total, len(self.ranks))

    @property
    def ended(self) -> bool:
        """Whether the newest event reports its end."""
        return bool(self.spans and self.spans[-1][2])

    @property
    def since(self) -> int:
        """The first step with it: the message may name one before the step at which it was found."""
        found = _SINCE.search(self.message)
        return min(int(found[1]), self.first) if found else self.first

    @property
    def until(self) -> int:
        """The last step with it: its end is reported at the first step without it."""
        return max(self.since, self.last - 1) if self.ended else self.last

    def goes_on_as(self, other: EventGroup, world_size: int) -> bool:
        """Return whether the fault goes on as ``other`` although its end was reported.

        ``other`` is open, and follows from it or began before that end on the same ranks; no rank named may be any.
        """
        if other is self or other.ended or other.kind in _AFTERWARDS:
            return False
        if other.follows:
            return other.follows == self.name
        ours, theirs = (set() if 0 < world_size <= one.ranks_total else {*one.ranks} for one in (self, other))
        same = not (ours and theirs) or bool(ours & theirs)
        return same and other.severity != "info" and self.since <= other.since <= self.last

    def has(self, step: int) -> bool:
        at = bisect.bisect_left(self.steps, step)
        return at < len(self.steps) and self.steps[at] == step

    def describe(self, line: Mapping[str, Any], message: str) -> None:
        """Take over what this event says of the fault."""
        self.message, self.remedy = message, text(line.get("remedy"))
        self.score, self.threshold = number(line.get("score")), number(line.get("threshold"))
        self.places = places(line.get("places"))

    def take(self, step: int, phase: str) -> None:
        """Count an event at this step; a reminder, or an end, belongs to the span before it."""
        bisect.insort(self.steps, step)
        spans, ended = self.spans, phase == "ended"
        if spans and (ended or phase == "ongoing" or len(spans) >= _MOST_SPANS) and not spans[-1][2]:
            spans[-1][1] = max(spans[-1][1], step)
        elif len(spans) < _MOST_SPANS:
            spans.append([step, step, 0])
        else:
            spans[-1][1:] = [max(spans[-1][1], step), 0]
        spans[-1][2] |= ended
        self.is_open = phase in ("started", "ongoing")


class EventLog:
    """All events of a run; those that a resumed run reports again count once.

    ``counts``: by severity; ``findings``: likewise, without reminders and ends; ``recent``: the newest last.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, EventGroup] = {}
        self._latest = -1
        self.counts = dict.fromkeys(SEVERITIES, 0)
        self.findings = dict.fromkeys(SEVERITIES, 0)
        self.recent: deque[EventLine] = deque(maxlen=200)

    def __len__(self) -> int:
        return sum(self.counts.values())

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add a line of events.jsonl; False where it is not one. What a resumed run writes again counts once."""
        step, kind = whole(line.get("step")), text(line.get("kind"), 60)
        if step is None or not kind:
            return False
        severity = text(line.get("severity"))
        if severity not in SEVERITIES:
            severity = "warning"  # a newer version's own word
        message, where, named = text(line.get("message")), text(line.get("where"), 500), ranks(line.get("ranks"))
        total = whole(line.get("ranks_total")) or len(named)
        who = f"{total:,} ranks" if total > SHOWN_RANKS else ranks_of(named) if named else ""
        listed = EventLine(step, text(line.get("severity"), 10), kind, who, message, text(line.get("remedy")), where)
        if step > self._latest or listed not in self.recent:
            self.recent.append(listed)
        self._latest = max(self._latest, step)
        phase, follows = text(line.get("phase"), 20), text(line.get("follows"), 600)
        still, ended = phase == "ongoing", phase == "ended"
        key: Any = (kind, where, named, total, bool(follows))
        effect = (*key[:-1], True)
        if (still or ended) and key not in self._groups and effect in self._groups:
            key = effect
        folded = key not in self._groups and len(self._groups) >= MOST_GROUPS
        if folded:
            key, named, total, where = (kind, severity), (), 0, "several"
        group = self._groups.get(key)
        if group is not None and not group.folded and group.has(step):
            return True
        self.counts[severity] += 1
        self.findings[severity] += not (ended or (still and group is not None))
        if group is None:
            group = self._groups[key] = EventGroup(kind, severity, where, named, total, message, "", follows=follows)
            group.describe(line, message)
        elif _ORDER[severity] < _ORDER[group.severity]:
            group.severity = severity
            if not still:
                group.describe(line, message)
        group.folded += folded
        group.take(step, phase)
        return True

    def groups(self) -> list[EventGroup]:
        """Return the faults: worst first, then what does not follow from another, then earliest, as they were told."""
        groups = self._groups.values()
        return sorted(groups, key=lambda one: (_ORDER[one.severity], bool(one.follows), one.first))


def causes_first(groups: Sequence[EventGroup]) -> list[EventGroup]:
    """Put the faults in the order in which they began, none before the one that it follows from; then the worst."""
    began = {group.name: group.since for group in reversed(groups)}

    def place(one: EventGroup) -> tuple[int, bool, int, int]:
        since = max(one.since, began.get(one.follows, 0))
        return since, bool(one.follows), _ORDER[one.severity], one.first

    return sorted(groups, key=place)


def in_words(counts: Mapping[str, int]) -> str:
    """Return counts by severity as "1 error, 2 notes"; "" for none."""
    counted = [(counts.get(severity, 0), name) for severity, name in SEVERITIES.items()]
    return ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for count, name in counted if count)


def done_alike(groups: Iterable[EventGroup]) -> str:
    """Return what several ranks did alike at some steps; "" where none did."""
    found = [one.is_same_work for one in groups if (one.kind, one.severity) == ("duplicate-data", "error")]
    return "" if not found else "did the same work" if all(found) else "took the same rows"


def places(value: Any) -> tuple[RankPlace, ...]:
    """Read the places of an event or of ranks.json; entries that are not places are left out."""
    found = []
    for one in value if isinstance(value, list) else []:
        rank, host = whole(of(one, "rank"), MOST_RANKS), text(of(one, "host"), 64)
        if rank is not None and host:
            local = whole(of(one, "local_rank"), MOST_RANKS)
            device = str(local) if local is not None else text(of(one, "device"), 64).partition(":")[2]
            found.append(RankPlace(rank, host, f"{host}:{device}" if device else host))
    return tuple(found)
