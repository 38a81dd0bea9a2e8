"""One event per fault: when it starts, reminders at doubling intervals while it lasts, and one when it has ended.

A fault that comes and goes would fill the log; so each time the same one returns it must stay away twice as long as
before to count as ended. Reminders and ends have the kind of the fault; an end has severity ``info`` and a message that
begins with "Ended".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ds_silent.detectors.evidence import Finding
from ds_silent.records import Event

FIRST_REMINDER = 128  # measured steps; then 256, 512, …
LONGEST_ABSENCE = 1024


@dataclass
class _Episode:
    kind: str
    ranks: tuple[int, ...]
    where: str | None
    since: int
    last_seen: int
    age: int = 0  # measured steps in which it was there, or expected back
    next_reminder: int = FIRST_REMINDER
    absent: int = 0


class Episodes:
    """Which faults are going on."""

    def __init__(self) -> None:
        self._active: dict[str, _Episode] = {}
        self._returns: dict[str, int] = {}

    def update(self, step: int, findings: list[Finding]) -> list[Event]:
        """The events of this step, given everything that is wrong at this step."""
        events = []
        present = {finding.key: finding for finding in findings}
        for key, finding in present.items():
            episode = self._active.get(key)
            if episode is None:
                self._active[key] = _Episode(finding.kind, finding.ranks, finding.where, finding.since, step)
                events.append(_event(step, finding, ""))
                continue
            episode.last_seen, episode.absent = step, 0
            episode.age += 1
            if episode.age >= episode.next_reminder:
                episode.next_reminder *= 2
                events.append(_event(step, finding, f"Still, since step {episode.since}: "))
        for key, episode in list(self._active.items()):
            if key in present:
                continue
            episode.absent += 1
            returns = self._returns.get(key, 0)
            if episode.absent >= min(2**returns, LONGEST_ABSENCE):
                del self._active[key]
                self._returns[key] = min(returns + 1, 10)
                message = f"Ended: {episode.kind}, from step {episode.since} to step {episode.last_seen}."
                events.append(
                    Event(
                        step, episode.kind, "info", episode.ranks, episode.where, None, None, message, "Nothing to do."
                    )
                )
        return events

    def start(self, step: int, finding: Finding) -> list[Event]:
        """The event of one finding that comes alone, after the last step; none where it goes on already."""
        if finding.key in self._active:
            return []
        self._active[finding.key] = _Episode(finding.kind, finding.ranks, finding.where, finding.since, step)
        return [_event(step, finding, "")]

    def active(self, kind: str) -> bool:
        """Whether a fault of this kind is going on."""
        return any(episode.kind == kind for episode in self._active.values())

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"active": {key: asdict(episode) for key, episode in self._active.items()}, "returns": self._returns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._active = {
            key: _Episode(**{**episode, "ranks": tuple(episode["ranks"])}) for key, episode in state["active"].items()
        }
        self._returns = dict(state["returns"])


def _event(step: int, finding: Finding, prefix: str) -> Event:
    f = finding
    return Event(
        step if f.step is None else f.step,
        f.kind,
        f.severity,
        f.ranks,
        f.where,
        f.score,
        f.threshold,
        prefix + f.message,
        f.remedy,
    )
