"""What every detector does, and what it says: findings, of which events are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_silent.detectors.stored import Stored
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, EventKind, Score, Severity, StepRecord


@dataclass(frozen=True)
class Finding:
    """Something that a detector sees at this step. Whether it becomes an event is decided in ``lifecycle``."""

    key: str  # the same for the same fault at every step
    kind: EventKind
    severity: Severity
    ranks: tuple[int, ...]
    where: str | None
    score: float | None
    threshold: float | None
    message: str
    remedy: str
    since: int
    step: int | None = None  # of the event, where the finding is about an earlier step than the newest
    effects: tuple[str, ...] = ()  # what it brings about by itself on the same ranks, see ``lifecycle``
    guess: str = ""  # the part of the message about the likely cause: nothing to guess where the cause is known
    family: str = ""  # findings of one are one fault, as long as they name nobody else: its explanation may vary
    log_excess: float | None = None  # where chance is judged: nats by which the evidence exceeds what is asked for
    effect: float | None = None  # how large, as a ratio to what is usual


class Detector(Stored):
    """Judge one measured step after the other. ``Judge`` has a list of detectors, and calls them in its order.

    Attributes:
        key: the name of its entry in the judge's state; empty: it remembers nothing, or writes several entries.
        scores: what it weighed at the newest step, found or not.
        notes: events of the newest step that are no faults.
    """

    key: str = ""
    scores: tuple[Score, ...] = ()
    notes: tuple[Event, ...] = ()

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return what is wrong at this step.

        Args:
            before: what the detectors before this one have found at this step.
        """
        raise NotImplementedError

    def save(self) -> dict[str, Any]:
        """Return its entries of the judge's state."""
        return {self.key: self.state_dict()} if self.key else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save`; a state of an older version may lack the entry."""
        if self.key in state:
            self.load_state_dict(state[self.key])


def with_odds(event: Event, rate: float, log_excess: float) -> Event:
    """The event with its odds, as a number and in words.

    A threshold is log(1 / rate) and what does not depend on the rate; so evidence that exceeds it by x would just still
    be told at a rate e^x times smaller.

    Args:
        rate: stated false alarms per million steps.
        log_excess: nats by which the evidence exceeds what this rate asks for.
    """
    odds = math.exp(max(math.log(rate) - max(0.0, log_excess), math.log(_SMALLEST)))
    message = f"{event.message} By chance alone: at most once in {_many(1e6 / odds)} steps."
    return replace(event, message=message, false_alarms_per_million_steps=odds)


_SMALLEST = 1e-290  # false alarms per million steps
_POWERS = ("", "thousand", "million", "billion", "trillion")


def _many(steps: float) -> str:
    """Rounded down to a power of ten, in words: no reader compares its digits."""
    exponent = math.floor(math.log10(max(1.0, steps)) + 1e-9)
    if exponent >= 3 * len(_POWERS):
        return "more than a thousand trillion"
    count, power = ("one", "ten", "a hundred")[exponent % 3], _POWERS[exponent // 3]
    return f"{'a' if count == 'one' and power else count} {power}".strip()
