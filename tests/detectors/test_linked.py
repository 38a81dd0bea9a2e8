"""One fault, one alarm: what follows from an open fault names it; a second fault is never hidden."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_silent.detectors.episodes import Episodes
from ds_silent.detectors.finding import Finding
from ds_silent.records import Event, EventKind, Severity

PREFLIGHT = Event(0, "config-mismatch", "error", (2,), "learning rate", None, None, "lr differs.", "Start alike.")


def finding(kind: EventKind, ranks: tuple[int, ...], where: str, since: int, severity: Severity = "error") -> Finding:
    return Finding(
        key=f"{kind} {ranks}",
        kind=kind,
        severity=severity,
        ranks=ranks,
        where=where,
        message=f"{kind} here.",
        remedy="Do this.",
        since=since,
    )


DRIFT = finding("replica-drift", (2,), "embedding", 1)


def test_a_learning_rate_that_the_preflight_told_explains_the_drift_of_its_rank() -> None:
    episodes = Episodes()
    episodes.told(PREFLIGHT)
    [event] = episodes.update(100, [DRIFT])
    assert (event.kind, event.severity, event.ranks) == ("replica-drift", "info", (2,))
    assert event.message == ("Follows from the config-mismatch of the preflight (learning rate): replica-drift here.")


@pytest.mark.parametrize(
    "other",
    [
        replace(DRIFT, key="b", ranks=(1,)),  # another rank
        replace(DRIFT, key="b", ranks=(1, 2)),
        replace(DRIFT, key="b", ranks=()),  # nobody knows which
        finding("aggregation-error", (2,), "aggregated gradient", 1),  # no effect of a learning rate
        finding("non-finite", (2,), "loss", 1),
    ],
)
def test_a_second_fault_stays_an_alarm(other: Finding) -> None:
    episodes = Episodes()
    episodes.told(PREFLIGHT)
    assert [event.severity for event in episodes.update(100, [DRIFT, other])] == ["info", "error"]


@pytest.mark.parametrize("where", ["ds_config zero_optimization", "CUBLAS_WORKSPACE_CONFIG", "torch"])
def test_a_setting_that_enters_no_update_explains_no_drift(where: str) -> None:
    episodes = Episodes()
    episodes.told(replace(PREFLIGHT, where=where))
    assert episodes.update(100, [DRIFT])[0].severity == "error"


def skipped(step: int) -> Finding:
    return replace(finding("aggregation-error", (2,), "applied gradient", step), effects=("replica-drift",))


def test_a_skipped_update_and_the_drift_it_leaves_are_one_alarm_and_the_end_says_what_goes_on() -> None:
    episodes = Episodes()
    drift = replace(DRIFT, since=4)
    events = episodes.update(5, [skipped(4), drift])
    assert [(e.kind, e.severity) for e in events] == [("aggregation-error", "error"), ("replica-drift", "info")]
    [end] = episodes.update(6, [drift])
    assert end.message.endswith("What it has left behind goes on: replica-drift of embedding.")
    assert end.remedy == drift.remedy
    later = [event for step in range(7, 300) for event in episodes.update(step, [drift])]
    assert {(e.severity, e.message.split(",")[0]) for e in later} == {("error", "Still")}  # its cause is over


def test_a_drift_that_began_before_is_not_its_effect() -> None:
    events = Episodes().update(5, [skipped(4), replace(DRIFT, since=3)])
    assert [e.severity for e in events] == ["error", "error"]


def test_after_its_cause_has_ended_a_drift_is_an_alarm() -> None:
    episodes = Episodes()
    episodes.update(5, [skipped(4)])
    episodes.update(6, [])
    assert episodes.update(100, [replace(DRIFT, since=90)])[0].severity == "error"


def test_a_graver_finding_is_no_effect_of_a_lesser_one() -> None:
    stale = finding("zero-gradient", (2,), "parameters", 3, "warning")
    outlier = finding("outlier-rank", (2,), "gradient norm", 5, "warning")
    assert [e.severity for e in Episodes().update(5, [stale, outlier])] == ["warning", "info"]
    assert [e.severity for e in Episodes().update(5, [stale, replace(outlier, severity="error")])] == [
        "warning",
        "error",
    ]


def test_the_links_survive_a_resume() -> None:
    episodes, other = Episodes(), Episodes()
    episodes.update(5, [skipped(4)])
    other.load_state_dict(json.loads(json.dumps(episodes.state_dict())))
    drift = replace(DRIFT, since=4)
    assert episodes.update(6, [skipped(4), drift]) == other.update(6, [skipped(4), drift])
    assert other.state_dict() == episodes.state_dict()
