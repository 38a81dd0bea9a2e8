"""Make one event of a fault when it starts, reminders at doubling intervals while it lasts, and one when it has ended.

Reminders and ends have the kind of the fault; an end has severity ``info``; ``phase`` says which it is.
A consequence of an open fault is no second alarm: it has severity ``info`` while its cause is open, see ``cause_of``.
When the cause ends first, its end names the consequence that goes on.

A fault that comes and goes would fill the log. So each time it returns, it must stay away twice as long as before to
count as ended.

The guessed cause of a wrong reduction may change from step to step: while one rank's wrong gradient outweighs all
others, it is also a factor of the whole. A guess that accuses no new rank continues the same event; where nobody was
accused, one about the same layers does, as while a gradient that nobody clears adds up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_silent.capture.breaches import KEY
from ds_silent.capture.untrained import Unlike
from ds_silent.detectors.finding import Detector, Finding, with_odds
from ds_silent.measure.evidence import Evidence
from ds_silent.preflight.items import HOOKS
from ds_silent.records import Event, EventKind, Phase, Severity, StepRecord

# ----------------------------------------------------------------------------------------------------------------------
# One fault, one alarm: which findings follow from an open fault.
#
# A rank with another learning rate, or one that skipped an update, drifts apart from its replicas; a rank with another
# batch size has another gradient. Such an effect is written in full, with the severity ``info`` and the name of the
# event that it follows from. It is an alarm of its own if anything speaks against that: other ranks, an earlier
# beginning, a graver severity, or a cause that has ended.


APPLIED = "applied gradient"  # the place of a finding about the optimizer's input
GRAVITY = ("info", "warning", "error")
_EFFECTS: dict[EventKind, tuple[str, ...]] = {
    "initial-weights-mismatch": ("replica-drift", "outlier-rank"),
    "replica-drift": ("outlier-rank", APPLIED),
    "unreduced-gradient": (APPLIED,),
    "objective-mismatch": ("outlier-rank",),
    "weights-mismatch": ("outlier-rank",),
    "zero-gradient": ("outlier-rank",),
    "batch-size-mismatch": ("outlier-rank",),
    "duplicate-data": ("duplicate-data", "low-coverage"),
    "data-order-mismatch": ("data-order-mismatch", "low-coverage", "outlier-rank"),
    "low-coverage": ("data-order-mismatch", "low-coverage"),
}
_BY_COMPARISON: tuple[EventKind, ...] = ("config-mismatch", "initial-weights-mismatch")
"""Without a majority they name no rank, so that any rank may be the one that differs."""
_OF_NOBODY: tuple[EventKind, ...] = ("aggregation-error",)  # whose gradient it is, is not always known
_UNSURE = 4
_SOON = 32  # steps, within which a statistic dates the beginning of what a fault of all ranks brings about
_OF_ROWS = ("data-order-mismatch", "low-coverage")  # whose fault it is, is often not known from rows
_OF_UPDATES = (
    *("learning rate", "weight decay", "betas", "eps", "optimizer", "hyper-parameters"),
    *("clipping", "schedul", "trainable"),
)
ELSEWHERE = ("checkpoint", "optimizer step")
"""The place of an event about ranks that go on from another state, see :mod:`ds_silent.observing.lockstep`."""
_OF_FORWARDS = ("settings of", "training mode")
_AUTOCAST = "autocast"  # gradients come in another order, in which ZeRO-1 and 2 fill their buckets (DeepSpeed 0.19.8)
_HOLDINGS = "optimizer's parameters"  # what no optimizer holds is not cleared by it either
PARTING: tuple[EventKind, ...] = ("aggregation-error", "unreduced-gradient", "update-mismatch", "config-mismatch")
"""After these the replicas are compared, whatever the interval says, and after an outlier, which other weights make."""


def may_part(event: Event) -> bool:
    """Tell whether the replicas are to be compared after an event."""
    parts = event.kind in PARTING and event.severity != "info"
    return (parts or event.kind == "outlier-rank") and event.phase not in ("ongoing", "ended")


_COMES_AND_GOES = ("integrity handed", "integrity idle")
"""Keys of a clip that not every gradient is long enough for, and of a step that is left out now and then."""
_SELDOM = 4  # such a fault is over after 2 to this power measured steps without it
FIRST_REMINDER = 128  # measured steps; then 256, 512, …
LONGEST_ABSENCE = 1024


@dataclass
class OpenFault:
    """Something that is going on, and when it is spoken of again."""

    kind: EventKind
    ranks: tuple[int, ...]
    where: str | None
    since: int
    last_seen: int
    age: int = 0  # measured steps in which it was there, or expected back
    next_reminder: int = FIRST_REMINDER
    absent: int = 0
    severity: Severity = "error"
    effects: tuple[str, ...] = ()  # kinds, places, or how keys begin, of what it brings about; besides its kind's
    cause: str | None = None  # key of the fault that it follows from
    family: str = ""  # see Finding

    @property
    def brings_about(self) -> set[str]:
        """Kinds, places, and how keys begin, of what follows from it, also by way of the weights that it parts."""
        effects = {*_EFFECTS.get(self.kind, ()), *self.effects}
        return effects | {"outlier-rank"} if "replica-drift" in effects or self.where == HOOKS else effects

    @classmethod
    def of(cls, finding: Finding, step: int, cause: str | None = None) -> OpenFault:
        names = ("kind", "ranks", "where", "since", "severity", "effects", "family")
        return cls(**{name: getattr(finding, name) for name in names}, last_seen=step, cause=cause)


def _explains(key: str, fault: OpenFault, finding: Finding, step: int) -> bool:
    """Return whether this finding of ``step`` follows from an open fault."""
    if key == finding.key:
        return False
    if any(finding.key.startswith(effect) for effect in fault.effects):  # this one, however grave
        soon = finding.log_excess is None or finding.since <= fault.since + _SOON
        return finding.since >= fault.since and soon
    if not {finding.kind, finding.where} & fault.brings_about:
        return False
    began = fault.since - (fault.where in ELSEWHERE)  # what the step before is said to have left
    if finding.log_excess is not None:  # since about then: the longer it took to be sure, the less is known of when
        began -= (step - finding.since) // _UNSURE
    if GRAVITY.index(finding.severity) > GRAVITY.index(fault.severity) or finding.since < began:
        return False
    if finding.kind in _OF_ROWS or (finding.kind in fault.effects and finding.kind in _OF_NOBODY and not finding.ranks):
        return True
    if not fault.ranks and (fault.kind in _BY_COMPARISON or "replica-drift" in fault.effects):
        return True  # whose it is, is not known, as of two ranks that go on from different gradients
    return set(finding.ranks) <= set(fault.ranks) if finding.ranks else not fault.ranks


def _not_before(finding: Finding, since: int) -> Finding:
    """Return a consequence as one that began with its cause at the earliest: a statistic knows only about when."""
    if finding.log_excess is None or finding.since >= since:
        return finding
    message = re.sub(rf"since (about )?step {finding.since}\b", f"since step {since}", finding.message)
    return replace(finding, message=message, since=since)


def effects_of_settings(kind: EventKind, where: str | None) -> tuple[str, ...]:
    """Return what follows from a setting that differs.

    A setting of the update makes the rank's replica drift; a setting of the forward changes its gradient, and so does a
    replica that has drifted.
    """
    place = (where or "").lower()
    if place in ELSEWHERE:
        return ("config-mismatch", "replica-drift", "outlier-rank", APPLIED)
    if kind != "config-mismatch":
        return ()
    if place.startswith(_HOLDINGS):
        return ("aggregation-error", "replica-drift", "outlier-rank", "zero-gradient", APPLIED)
    if place == _AUTOCAST:
        return ("outlier-rank", "replica-drift", "aggregation-error")
    if place.startswith(_OF_FORWARDS):
        return ("outlier-rank", "replica-drift", f"{KEY}mode")
    return ("replica-drift", "outlier-rank", APPLIED) if any(word in place for word in _OF_UPDATES) else ()


class SettingsDetector(Detector):
    """Report settings and code that differ between ranks, as :mod:`ds_silent.capture.settings_check` found."""

    of_any_step = True

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        return setting_findings(evidence.unlike)


def setting_findings(found: tuple[Unlike, ...]) -> list[Finding]:
    """Return one finding per group of settings and ranks; the event is of the step at which it was seen first."""
    findings = []
    for u in found:
        more = () if u.key.startswith(KEY) else effects_of_settings("config-mismatch", u.where)
        finding = Finding(u.key, u.kind, u.severity, u.ranks, u.where, None, None, u.message, u.remedy, u.since)
        findings.append(replace(finding, effects=(*u.effects, *more)))
    return findings


class Episodes:
    """Follow the faults that are open; ``rate``: stated false alarms per million steps, for the odds of events."""

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate
        self._active: dict[str, OpenFault] = {}
        self._returns: dict[str, int] = {}
        self._told: list[tuple[str, OpenFault]] = []  # those that are found elsewhere

    def told(self, event: Event) -> None:
        """Take in an open fault that another part of the observer has found: later findings may follow from it."""
        kind, where, since = event.kind, event.where, event.step
        effects = effects_of_settings(kind, where)
        fault = OpenFault(kind, event.ranks, where, since, since, severity=event.severity, effects=effects)
        self._told.append((f"told {kind}", fault))

    def update(self, step: int, findings: list[Finding]) -> list[Event]:
        """Return the events of this step, given everything that is wrong at this step."""
        events = []
        effects = tuple(effect for finding in findings for effect in finding.effects)
        follows = {finding.key for finding in findings if finding.key.startswith(effects) or finding.kind in effects}
        causes_first = sorted(findings, key=lambda one: (one.key in follows, one.kind != "config-mismatch"))
        present = {self._key(finding): finding for finding in causes_first}
        for key, finding in present.items():
            episode = self._active.get(key)
            if episode is None:
                causes = [(name, fault) for name, fault in self._open() if _explains(name, fault, finding, step)]
                name, cause = min(causes, key=lambda one: one[1].since, default=(None, None))
                finding = finding if cause is None else _not_before(finding, cause.since)
                self._active[key] = OpenFault.of(finding, step, name)
                event = self._event(step, finding, "") if cause is None else self._follows(step, finding, cause)
                events.append(self._explanation(event))
                continue
            episode.last_seen, episode.absent = step, 0
            episode.age += 1
            if GRAVITY.index(finding.severity) > GRAVITY.index(episode.severity):
                episode.severity, episode.since = finding.severity, finding.since
                episode.age, episode.next_reminder = 0, FIRST_REMINDER
                events.append(self._event(step, finding, ""))
            elif episode.age >= episode.next_reminder and finding.severity != "info":
                episode.next_reminder *= 2
                same = finding if episode.cause is None else _not_before(finding, episode.since)
                same = replace(same, where=episode.where)  # of the replicas, more tensors differ by and by
                reminder = self._event(step, same, f"Still, since step {episode.since}: ", "ongoing")
                is_open = episode.cause in {name for name, _ in self._open()}
                events.append(replace(reminder, severity="info") if is_open else reminder)
        for key, episode in list(self._active.items()):
            if key in present:
                continue
            episode.absent += 1
            left = [f for k, f in present.items() if self._active[k].cause == key]
            least = _SELDOM if key.startswith(_COMES_AND_GOES) else 0
            returns = self._returns.get(key, 0 if left else least)  # the first end tells at once what it has left
            if episode.absent >= min(2**returns, LONGEST_ABSENCE):
                del self._active[key]
                self._returns[key] = min(max(returns, least) + 1, 10)
                message = f"Ended: {episode.kind}, from step {episode.since} to step {episode.last_seen}."
                apart = "replica-drift" in episode.effects
                remedy = "Nothing to do, unless a replica-drift follows." if apart else "Nothing to do."
                if apart and any(finding.kind == "replica-drift" for finding in present.values()):
                    remedy = "Mend the replicas first: see the remedy of the replica-drift, which goes on."
                if episode.kind == "outlier-rank":  # statistics tell that they are no longer sure, and not why
                    remedy = "Nothing to do if its cause was mended; else it may be there still, too small to be sure."
                if key.startswith(KEY):
                    remedy = "It is no more so. What it has done stays: see the remedy of its first event."
                if left:
                    goes_on = min(left, key=lambda one: one.kind != "replica-drift")  # weights do not mend themselves
                    message += f" What it has left behind goes on: {goes_on.kind} of {goes_on.where}."
                    remedy = goes_on.remedy
                place = episode.ranks, episode.where
                events.append(Event(step, episode.kind, "info", *place, None, None, message, remedy, phase="ended"))
        return events

    def _key(self, finding: Finding) -> str:
        """Return the finding's key, or that of an open fault of which it is another explanation."""
        if finding.key in self._active or not finding.family:
            return finding.key
        for key, one in self._active.items():
            alike = (one.family, one.kind) == (finding.family, finding.kind)
            if alike and set(finding.ranks) <= set(one.ranks) and (one.ranks or finding.where == one.where):
                return key
        return finding.key

    def _open(self) -> list[tuple[str, OpenFault]]:
        """Return the faults that may be causes: those of :meth:`told`, then open ones that follow from no other."""
        return [*self._told, *((key, one) for key, one in self._active.items() if one.cause is None)]

    def _follows(self, step: int, finding: Finding, cause: OpenFault) -> Event:
        """Return the event of a consequence: in full, as an ``info``."""
        when = "the preflight" if cause.since == 0 else f"step {cause.since}"
        place = f" ({cause.where})" if cause.where else ""
        if any(finding.guesses):
            message = finding.message
            for guess in finding.guesses:
                message = message.replace(guess, "")
            remedy = "Mend what it follows from: it should end with it."
            finding = replace(finding, message=message.rstrip(), remedy=remedy)
        event = self._event(step, finding, f"Follows from the {cause.kind} of {when}{place}: ")
        return replace(event, severity="info", follows=f"{cause.kind}{place}")

    def _explanation(self, event: Event) -> Event:
        """Return a hook that changes gradients, as a note where its ranks are known to be unlike the others by now."""
        if event.where != HOOKS or not event.ranks:
            return event
        known = (one for _, one in self._open() if one.kind == "outlier-rank" and one.where != HOOKS)
        found = next((one for one in known if set(event.ranks) <= set(one.ranks)), None)
        if found is None:
            return event
        message = f"Explains the outlier-rank of step {found.since} ({found.where}): {event.message}"
        return replace(event, severity="info", message=message, follows=f"outlier-rank ({found.where})")

    def _event(self, step: int, finding: Finding, prefix: str, phase: Phase = "started") -> Event:
        f = finding
        step, message = step if f.step is None else f.step, prefix + f.message
        place = f.ranks, f.where, f.score, f.threshold
        told = Event(step, f.kind, f.severity, *place, message, f.remedy, effect=f.effect, phase=phase)
        return told if f.log_excess is None else with_odds(told, self._rate, f.log_excess)

    def explains(self, note: Event) -> bool:
        """Tell whether an open fault makes the ranks of a note other than the rest: the note would point elsewhere."""
        causes = [fault for _, fault in self._open() if note.kind in fault.brings_about]
        return bool(note.ranks) and any(set(note.ranks) <= set(fault.ranks) for fault in causes)

    def start(self, step: int, finding: Finding) -> list[Event]:
        """Return the event of one finding after the last step; none if the fault is open already."""
        if finding.key in self._active:
            return []
        self._active[finding.key] = OpenFault.of(finding, step)
        return [self._event(step, finding, "")]

    def state_dict(self) -> dict[str, Any]:
        return {"active": {key: asdict(episode) for key, episode in self._active.items()}, "returns": self._returns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._active = {
            key: OpenFault(**fault | {name: tuple(fault[name]) for name in ("ranks", "effects")})
            for key, fault in state["active"].items()
        }
        self._returns = dict(state["returns"])
