"""One fault, one alarm: which finding is what an open one brings about by itself.

    cause = cause_of(finding, open_faults)          # an OpenFault, or None: a fault of its own

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
_GRAVITY = ("info", "warning", "error")
_EFFECTS: dict[EventKind, tuple[str, ...]] = {
    "initial-weights-mismatch": ("replica-drift", "outlier-rank"),
    "replica-drift": ("outlier-rank", APPLIED),
    "zero-gradient": ("outlier-rank",),
    "batch-size-mismatch": ("outlier-rank",),
    "duplicate-data": ("duplicate-data",),
    "data-order-mismatch": ("data-order-mismatch", "low-coverage", "outlier-rank"),
    "low-coverage": ("data-order-mismatch", "low-coverage"),
}
_OF_ROWS = ("data-order-mismatch", "low-coverage")  # whose fault it is, is often not known from rows
_OF_UPDATES = ("learning rate", "weight decay", "betas", "eps", "optimizer", "hyper-parameters", "clipping", "schedul")


@dataclass(frozen=True)
class OpenFault:
    """Something that is going on."""

    key: str
    kind: EventKind
    severity: Severity
    ranks: tuple[int, ...]
    where: str | None
    since: int
    effects: tuple[str, ...] = ()  # kinds, or places, of what it brings about; besides those of its kind


def told_before(event: Event) -> OpenFault:
    """A fault that another part of the observer has told, and that goes on: what the preflight found."""
    return OpenFault(
        f"told {event.kind}", event.kind, event.severity, event.ranks, event.where, event.step, _configured(event)
    )


def cause_of(finding: Finding, faults: Iterable[OpenFault]) -> OpenFault | None:
    """The first of the open faults that brings this finding about."""
    return next((fault for fault in faults if _explains(fault, finding)), None)


def _explains(fault: OpenFault, finding: Finding) -> bool:
    effects = (*_EFFECTS.get(fault.kind, ()), *fault.effects)
    if fault.key == finding.key or not ({finding.kind, finding.where} & set(effects)):
        return False
    if _GRAVITY.index(finding.severity) > _GRAVITY.index(fault.severity) or finding.since < fault.since:
        return False
    if finding.kind in _OF_ROWS:
        return True
    return set(finding.ranks) <= set(fault.ranks) if finding.ranks else not fault.ranks


def _configured(event: Event) -> tuple[str, ...]:
    """Settings that enter the update on one rank alone take its replica away from the others'."""
    where = (event.where or "").lower()
    if event.kind == "config-mismatch" and any(word in where for word in _OF_UPDATES):
        return ("replica-drift", APPLIED)
    return ()
