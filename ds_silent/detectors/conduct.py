"""Ranks whose code does not do the same: a fact, told with what :mod:`ds_silent.capture.conduct` found."""

from __future__ import annotations

from ds_silent.capture.conduct import Unlike
from ds_silent.detectors.finding import Finding
from ds_silent.detectors.lifecycle import effects_of_settings


def unlike(found: tuple[Unlike, ...]) -> list[Finding]:
    """One finding per group of settings and ranks; the event is of the step at which it was seen first."""
    return [
        Finding(
            key=one.key,
            kind=one.kind,
            severity=one.severity,
            ranks=one.ranks,
            where=one.where,
            message=one.message,
            remedy=one.remedy,
            since=one.since,
            effects=(*one.effects, *effects_of_settings("config-mismatch", one.where)),
        )
        for one in found
    ]
