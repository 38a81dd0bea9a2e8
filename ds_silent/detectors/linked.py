"""One fault, one alarm: which finding is what an open one brings about by itself.

    cause = cause_of(finding, open_faults, step)    # an OpenFault, or None: a fault of its own

A rank with another learning rate drifts apart from its replicas; one that skipped an update does so too; a rank with
another batch size has another gradient. Such an effect is still written, in full, with the severity ``info`` and the
name of the event that it follows from. It is an alarm of its own where anything speaks against that: other ranks, an
earlier beginning, a graver severity, or a cause that has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_silent.detectors.finding import Finding
from ds_silent.records import Event, EventKind, Severity

FOLLOWS = "Follows from the "  # how the message of such an effect begins
APPLIED = "applied gradient"  # the place of a finding about the optimizer's input
GRAVITY = ("info", "warning", "error")
_EFFECTS: dict[EventKind, tuple[str, ...]] = {
    "initial-weights-mismatch": ("replica-drift", "outlier-rank"),
    "replica-drift": ("outlier-rank", APPLIED),
    "objective-mismatch": ("outlier-rank",),
    "zero-gradient": ("outlier-rank",),
    "batch-size-mismatch": ("outlier-rank",),
    "duplicate-data": ("duplicate-data",),
    "data-order-mismatch": ("data-order-mismatch", "low-coverage", "outlier-rank"),
    "low-coverage": ("data-order-mismatch", "low-coverage"),
}
_BY_COMPARISON: tuple[EventKind, ...] = ("config-mismatch", "initial-weights-mismatch")
"""Without a majority they name no rank, so that any rank may be the one that differs."""
_OF_NOBODY: tuple[EventKind, ...] = ("aggregation-error",)  # whose gradient it is, is not always known
_UNSURE = 4
_OF_ROWS = ("data-order-mismatch", "low-coverage")  # whose fault it is, is often not known from rows
_OF_UPDATES = ("learning rate", "weight decay", "betas", "eps", "optimizer", "hyper-parameters", "clipping", "schedul")
ELSEWHERE = ("checkpoint", "optimizer step")
"""The place of an event about ranks that go on from another state, see :mod:`ds_silent.observing.lockstep`."""
_OF_FORWARDS = ("settings of", "training mode", "autocast")
_HOLDINGS = "optimizer's parameters"  # what no optimizer holds is not cleared by it either


@dataclass(frozen=True)
class OpenFault:
    """Something that is going on."""

    key: str
    kind: EventKind
    severity: Severity
    ranks: tuple[int, ...]
    where: str | None
    since: int
    effects: tuple[str, ...] = ()  # kinds, places, or how keys begin, of what it brings about; besides its kind's


def told_before(event: Event) -> OpenFault:
    """A fault that another part of the observer has told, and that goes on: what the preflight found."""
    return OpenFault(
        f"told {event.kind}",
        event.kind,
        event.severity,
        event.ranks,
        event.where,
        event.step,
        effects_of_settings(event.kind, event.where),
    )


def cause_of(finding: Finding, faults: Iterable[OpenFault], step: int) -> OpenFault | None:
    """The first of the open faults that brings this finding of ``step`` about."""
    return next((fault for fault in faults if _explains(fault, finding, step)), None)


def _explains(fault: OpenFault, finding: Finding, step: int) -> bool:
    effects = (*_EFFECTS.get(fault.kind, ()), *fault.effects)
    if any(finding.key.startswith(effect) for effect in fault.effects):  # this one, however grave
        return fault.key != finding.key and finding.since >= fault.since
    if fault.key == finding.key or not ({finding.kind, finding.where} & set(effects)):
        return False
    began = fault.since - (fault.where in ELSEWHERE)  # what the step before is said to have left
    if finding.log_excess is not None:  # since about then: the longer it took to be sure, the less is known of when
        began -= (step - finding.since) // _UNSURE
    if GRAVITY.index(finding.severity) > GRAVITY.index(fault.severity) or finding.since < began:
        return False
    if finding.kind in _OF_ROWS or (finding.kind in fault.effects and finding.kind in _OF_NOBODY and not finding.ranks):
        return True
    if not fault.ranks and fault.kind in _BY_COMPARISON:
        return True
    return set(finding.ranks) <= set(fault.ranks) if finding.ranks else not fault.ranks


def effects_of_settings(kind: EventKind, where: str | None) -> tuple[str, ...]:
    """Settings of one rank alone that enter the update take its replica away from the others'; those of the forward
    change its gradient, and so does a replica that has gone away."""
    place = (where or "").lower()
    if place in ELSEWHERE:
        return ("config-mismatch", "replica-drift", "outlier-rank", APPLIED)
    if kind != "config-mismatch":
        return ()
    if place.startswith(_HOLDINGS):
        return ("aggregation-error", "replica-drift", "outlier-rank", "zero-gradient", APPLIED)
    if place.startswith(_OF_FORWARDS):
        return ("outlier-rank", "replica-drift")
    return ("replica-drift", "outlier-rank", APPLIED) if any(word in place for word in _OF_UPDATES) else ()
