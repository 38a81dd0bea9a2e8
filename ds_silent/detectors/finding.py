"""What every detector does, says and remembers: findings, of which events are made, and what a resume restores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, EventKind, Score, Severity, StepRecord


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at this step. ``lifecycle`` decides whether it becomes an event."""

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
    guesses: tuple[str, ...] = ()  # parts of the message about the likely cause, left out where the cause is known
    family: str = ""  # findings of one are one fault, as long as they name nobody else: its explanation may vary
    log_excess: float | None = None  # where chance is judged: nats by which the evidence exceeds what is asked for
    effect: float | None = None  # how large, as a ratio to what is usual

    def by_chance(self) -> Finding:
        """Return it as one whose score and threshold are logarithms of evidence."""
        if self.score is None or self.threshold is None:
            return self
        return replace(self, log_excess=self.score - self.threshold)


class Stored:
    """Save and restore the attributes ``_name`` of each ``name`` in ``stored``.

    They are numbers, arrays, tuples, rank -> step, or ``Stored`` themselves, also several of those in a list or tuple.

    What JSON cannot hold becomes minus infinity, the logarithm of no evidence; in the arrays of ``unknown`` NaN.
    """

    stored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def state_dict(self) -> Any:
        """Return what continues it after a resume, as JSON values."""
        return {name: _saved(getattr(self, f"_{name}")) for name in self.stored} if self.stored else None

    def load_state_dict(self, state: Any) -> None:
        """Continue from :meth:`state_dict`."""
        for name in self.stored:
            missing = math.nan if name in self.unknown else -math.inf
            setattr(self, f"_{name}", _restored(getattr(self, f"_{name}"), state[name], missing))


class Detector(Stored):
    """Judge one measured step after the other. ``Judge`` has a list of detectors, and calls them in its order.

    Attributes:
        key: the name of its entry in the judge's state; empty: what it remembers are entries of their own there.
        scores: of the newest step, whether they reach their thresholds or not.
        notes: events of the newest step that are no faults.
        of_any_step: whether it also judges a step whose gradient the script has thrown away on all ranks.

    Several detectors, and the tests that they are made of, take ``log_threshold``: the log of the mean number of
    measured steps between their false alarms; ``words``: the framework's terms, for messages; ``sizes``: effects below
    which a finding is a note; ``alike``: whether ranks can be compared with each other.
    """

    key: str = ""
    scores: tuple[Score, ...] = ()
    notes: tuple[Event, ...] = ()
    of_any_step = False

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return what is wrong at this step; ``before``: what the detectors before this one have found at it."""
        raise NotImplementedError

    def save(self) -> dict[str, Any]:
        """Return its entries of the judge's state."""
        return {self.key: self.state_dict()} if self.key else self.state_dict() or {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save`."""
        self.load_state_dict(state[self.key] if self.key else state)


def with_odds(event: Event, rate: float, log_excess: float) -> Event:
    """Return the event with its odds, as a number and in words.

    A threshold is log(1 / rate) plus what does not depend on the rate. So evidence that exceeds it by x would still be
    reported at a rate e^x times smaller.

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


# -- what a resume restores --------------------------------------------------------------------------------------------


def listed(values: npt.NDArray[Any]) -> Any:
    """Return an array as lists, with None for what is not finite: JSON has no NaN."""
    whole = values.astype(object)
    whole[~np.isfinite(values)] = None
    return whole.tolist()


def unlisted(values: Any, unknown: float = -math.inf) -> npt.NDArray[np.float64]:
    """Return the array of :func:`listed`, with minus infinity for None: the logarithm of no evidence."""
    array = np.array(values, dtype=np.float64)
    return np.where(np.isnan(array), unknown, array)


def _saved(value: Any) -> Any:
    if isinstance(value, Stored):
        return value.state_dict()
    if isinstance(value, np.ndarray):
        return listed(value)
    if isinstance(value, dict):
        return sorted(value.items())
    return [_saved(one) for one in value] if isinstance(value, (list, tuple)) else value


def _restored(before: Any, state: Any, missing: float) -> Any:
    if isinstance(before, Stored):
        before.load_state_dict(state)
        return before
    if isinstance(before, (list, tuple)) and before and isinstance(before[0], Stored):
        return [_restored(one, saved, missing) for one, saved in zip(before, state, strict=True)]
    if isinstance(before, np.ndarray):
        array = unlisted(state, missing).astype(before.dtype)
        return array if array.ndim == before.ndim else array.reshape(-1, *before.shape[1:])
    if isinstance(before, dict):
        return {int(key): int(value) for key, value in state}
    return tuple(state) if isinstance(before, tuple) else state
