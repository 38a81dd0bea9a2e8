"""Events, one group for each fault, however often it was told: none is left out, and all are counted.

log = EventLog()
log.add({"step": 12, "kind": "outlier-rank", "severity": "error", "ranks": [2], ...})
log.groups()          # worst first, then earliest
log.counts            # of the severities
"""

from __future__ import annotations

import bisect
import re
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ds_silent.runs.values import number, of, ranks, text, whole

SEVERITIES = ("error", "warning", "info")
"""Worst first."""
MOST_GROUPS = 2000
"""Further ones are counted together, by kind and severity."""
_MOST_SPANS = 200
_STILL, _ENDED, _FOLLOWS = "Still, since step", "Ended:", "Follows from the "
_SINCE = re.compile(r"(?:(?:that of|since|since about) step|those of steps) (\d{1,18})\b")
_AFTERWARDS = ("observer-off", "repaired")  # what was done, and no fault that goes on


@dataclass
class Place:
    """Where a rank runs, as far as it is known."""

    rank: int
    host: str
    spot: str  # "node0087:3"
    device: str = ""
    group: str = ""


@dataclass(frozen=True)
class Told:
    """One event, as short as a list of the newest shows it."""

    step: int
    kind: str
    severity: str
    ranks: tuple[int, ...]
    message: str


@dataclass
class EventGroup:
    """One fault: what was told of it, each time."""

    kind: str
    severity: str  # the worst
    where: str
    ranks: tuple[int, ...]
    ranks_total: int
    message: str  # the first of the worst severity
    remedy: str
    score: float | None = None
    threshold: float | None = None
    places: tuple[Place, ...] = ()
    global_ranks: tuple[int, ...] = ()
    steps: array[int] = field(default_factory=lambda: array("q"))  # of every event, ascending
    spans: list[list[int]] = field(default_factory=list)  # first and last step told; 1 where its end was told
    follows: bool = False  # from another fault, as its message says
    folded: int = 0  # faults in it, where it stands for many

    @property
    def first(self) -> int:
        """The step of the first event."""
        return self.steps[0]

    @property
    def last(self) -> int:
        """The step of the newest event."""
        return self.steps[-1]

    @property
    def count(self) -> int:
        """Events."""
        return len(self.steps)

    @property
    def ended(self) -> bool:
        """Whether its end was told last."""
        return bool(self.spans and self.spans[-1][2])

    @property
    def since(self) -> int:
        """From which step on, as the message knows it better than the step at which it was found."""
        found = _SINCE.search(self.message)
        return min(int(found[1]), self.first) if found else self.first

    @property
    def until(self) -> int:
        """The last step with it: its end is reported at the first step without it."""
        return max(self.since, self.last - 1) if self.ended else self.last

    def goes_on_as(self, other: EventGroup, world_size: int) -> bool:
        """Whether this is not over, though its end was told: ``other`` is open, and follows from it, or began before
        that end on the same ranks. Who is one of all ranks is known of none."""
        if other is self or other.ended or other.kind in _AFTERWARDS:
            return False
        if other.follows:
            place = f" ({self.where}): " if self.where else ": "
            return other.message.startswith(f"{_FOLLOWS}{self.kind} of ") and place in other.message
        ours, theirs = (set() if 0 < world_size <= one.ranks_total else {*one.ranks} for one in (self, other))
        same = not (ours and theirs) or bool(ours & theirs)
        return same and other.severity != "info" and self.since <= other.since <= self.last


class EventLog:
    """All events of a run."""

    def __init__(self) -> None:
        self._groups: dict[Any, EventGroup] = {}
        self.counts = dict.fromkeys(SEVERITIES, 0)
        self.findings = dict.fromkeys(SEVERITIES, 0)  # events but for reminders and ends of what was told before
        self.by_step: dict[str, array[int]] = {severity: array("q") for severity in SEVERITIES}
        self.recent: deque[Told] = deque(maxlen=50)  # the newest

    def __len__(self) -> int:
        return sum(self.counts.values())

    def add(self, line: dict[str, Any]) -> bool:
        """A line of events.jsonl; False where it is none. The same, written again by a resumed run, counts once."""
        step, kind = whole(line.get("step")), text(line.get("kind"), 60)
        if step is None or not kind:
            return False
        severity = line.get("severity")
        severity = severity if severity in SEVERITIES else "warning"  # a newer version's own word
        message = text(line.get("message"))
        where, named = text(line.get("where"), 500), ranks(line.get("ranks"))
        total = whole(line.get("ranks_total")) or len(named)
        follows = message.startswith(_FOLLOWS)
        key: Any = (kind, where, named, total, follows)
        effect = (*key[:-1], True)
        if message.startswith((_STILL, _ENDED)) and key not in self._groups and effect in self._groups:
            key, follows = effect, True
        folded = key not in self._groups and len(self._groups) >= MOST_GROUPS
        if folded:
            key, named, total = (kind, severity), (), 0
            where = "several"
        group = self._groups.get(key)
        if group is not None and _held(group.steps, step) and not group.folded:
            return True
        self.counts[severity] += 1
        again = message.startswith(_ENDED) or (message.startswith(_STILL) and group is not None)
        self.findings[severity] += not again
        bisect.insort(self.by_step[severity], step)
        self.recent.append(Told(step, kind, severity, named, message[:600]))
        if group is None:
            group = EventGroup(kind, severity, where, named, total, message, text(line.get("remedy")), follows=follows)
            self._groups[key] = group
            self._fill(group, line)
        elif SEVERITIES.index(severity) < SEVERITIES.index(group.severity):
            group.severity = severity
            if not message.startswith(_STILL):  # else it is the same, said again
                group.message, group.remedy = message, text(line.get("remedy"))
                self._fill(group, line)
        group.folded += folded
        bisect.insort(group.steps, step)
        _extend(group.spans, step, message)
        return True

    def _fill(self, group: EventGroup, line: dict[str, Any]) -> None:
        group.score, group.threshold = number(line.get("score")), number(line.get("threshold"))
        group.global_ranks = ranks(line.get("global_ranks"))
        group.places = places(line.get("places"))

    def groups(self) -> list[EventGroup]:
        """Worst first, then what does not follow from another, then earliest."""
        return sorted(
            self._groups.values(), key=lambda one: (SEVERITIES.index(one.severity), one.follows, one.first, one.kind)
        )


def places(value: Any) -> tuple[Place, ...]:
    """Of an event, or of ranks.json; those that are none are left out."""
    found = []
    for one in value if isinstance(value, list) else []:
        rank, host = whole(of(one, "rank"), 1 << 20), text(of(one, "host"), 64)
        if rank is not None and host:
            local, device = whole(of(one, "local_rank"), 1 << 20), text(of(one, "device"), 64)
            number_of = str(local) if local is not None else device.partition(":")[2]
            spot = f"{host}:{number_of}" if number_of else host
            found.append(Place(rank, host, spot, device, text(of(one, "group"), 64)))
    return tuple(found)


def _held(steps: array[int], step: int) -> bool:
    at = bisect.bisect_left(steps, step)
    return at < len(steps) and steps[at] == step


def _extend(spans: list[list[int]], step: int, message: str) -> None:
    """An event goes on with the span before it where it is a reminder, or its end."""
    goes_on = message.startswith((_STILL, _ENDED))
    if spans and (goes_on or len(spans) >= _MOST_SPANS) and not spans[-1][2]:
        spans[-1][1] = max(spans[-1][1], step)
    elif len(spans) < _MOST_SPANS:
        spans.append([step, step, 0])
    else:
        spans[-1][1:] = [max(spans[-1][1], step), 0]
    if message.startswith(_ENDED):
        spans[-1][2] = 1
