"""Which checks of a run passed, failed or were not made, and why. Pure.

for check in checks_of(run):
    check.name, check.state, check.why
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ds_silent.runs.events import EventGroup
from ds_silent.runs.lines import METRICS, of, text, whole
from ds_silent.runs.run import RunRecords

State = Literal["passed", "failed", "warned", "noted", "not observed"]
APPLIED = "applied gradient"
"""How the place of an event begins that is about what the optimizer applied."""
_PREFLIGHT = (
    "initial-weights-mismatch",
    "seed-mismatch",
    "config-mismatch",
    "duplicate-data",
    "data-order-mismatch",
    "low-coverage",
)
_ROWS = ("duplicate-data", "data-order-mismatch", "low-coverage", "same-order", "batch-size-mismatch")
_REDUCTION = ("aggregation-error", "unreduced-gradient")
_SETTINGS = ("config-mismatch", "seed-mismatch", "update-mismatch")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, or was not; ``why``: a figure, the first finding, or why nothing was observed."""

    name: str
    state: State
    why: str


_Looked = tuple[str, str]
"""Why nothing was observed ("" where something was), and a figure of what was."""


def checks_of(run: RunRecords) -> tuple[Check, ...]:
    """Return all that ds_silent can look at, in the order of a training."""
    groups = run.events.groups()
    before, later = ([one for one in groups if (one.first == 0) == early] for early in (True, False))
    applied, reduced = ([one for one in later if (APPLIED in one.where) == about] for about in (True, False))
    return (
        _check(run, "Before step 1", before, _PREFLIGHT, _preflight(run)),
        _check(run, "Rows", later, _ROWS, _rows(run)),
        _check(run, "Ranks alike", later, ("outlier-rank",), _ranks_alike(run)),
        _check(run, "Finite numbers", later, ("non-finite", "zero-gradient"), _judged(run)),
        _check(run, "Reduction", reduced, _REDUCTION, _reduction(run)),
        _check(run, "Applied gradient", applied, _REDUCTION, _applied_gradient(run)),
        _check(run, "Replicas", later, ("replica-drift",), _replicas(run)),
        _check(run, "Settings in use", later, _SETTINGS, _judged(run)),
    )


def _check(run: RunRecords, name: str, groups: Iterable[EventGroup], kinds: tuple[str, ...], looked: _Looked) -> Check:
    """Return what the events of these kinds say, or else what was looked at."""
    own, (unobserved, figure) = [group for group in groups if group.kind in kinds], looked
    if own:
        worst = own[0]
        state: State = {"error": "failed", "warning": "warned"}.get(worst.severity, "noted")  # type: ignore[assignment]
        if state == "noted" and any(group.follows for group in own):  # from what another check has failed for
            state = "failed"
        if state != "noted" or not unobserved:
            who = run.who(worst)
            why = f"{worst.kind}{f', {who[0].lower()}{who[1:]}' if who else ''}"
            return Check(name, state, why if worst.first == 0 else f"{why}, step {worst.since:,}")
    return Check(name, "not observed" if unobserved else "passed", unobserved or figure)


def _looked(run: RunRecords, *reasons: tuple[bool, str], figure: str = "") -> _Looked:
    """Return the first reason that holds why nothing was observed, that no step was measured among them last."""
    steps = len(run.steps)
    every = (*reasons, (not steps, "no step was measured"))
    return next((why for holds, why in every if holds), ""), figure or f"{steps:,} steps"


def _is(run: RunRecords, value: Any, *keys: str) -> tuple[bool, str]:
    """Return whether a value of the block is this one, as run.json has it; and the sentence."""
    given = of(run.facts, "block", *keys)
    return type(given) is type(value) and given == value, f"{'.'.join(keys)} is {str(value).lower()}"


def _judged(run: RunRecords) -> _Looked:
    return _looked(run, _is(run, False, "detectors", "enabled"))


def _preflight(run: RunRecords) -> _Looked:
    if not run.preflight:
        switched_off, why = _is(run, False, "preflight")
        return why if switched_off else "no preflight.json", ""
    items = run.preflight.get("items")
    return "", f"{len(items):,} items" if isinstance(items, list) else "no items"


def _rows(run: RunRecords) -> _Looked:
    steps, figure = run.steps, ""
    share, sampled = steps.last("seen"), steps.last("sampled")
    if share is not None:
        figure = f"{min(share, 1):.0%} of the epoch seen"
    if sampled and 0 < sampled < 1:
        figure = f"{figure or f'{len(steps):,} steps'}; 1 row in {1 / sampled:.0f} is followed"
    unknown = len(steps) > 0 and not (steps.any("duplicates") or steps.any("repeated"))
    return _looked(run, _is(run, False, "coverage"), (unknown, "no row ids were seen"), figure=figure)


def _ranks_alike(run: RunRecords) -> _Looked:
    missing = [metric for metric in METRICS if not run.steps.any(f"{metric} low")]
    none = len(missing) == len(METRICS)
    unobserved, figure = _judged(run)
    if unobserved or run.world_size == 1 or none:
        alone = "one rank has nobody to be compared with" if run.world_size == 1 else ""
        return unobserved or alone or "no rank's loss, norm or direction was measured", ""
    nearest = _nearest(run, "outlier")
    if nearest is not None:
        figure = f"at most {_percent(nearest)} of an alarm"
    if run.world_size == 2:
        return "", f"{figure}; of two, none is named"
    return "", f"{figure}; without {' and '.join(missing)}" if missing else figure


def _nearest(run: RunRecords, detector: str, where: str = "") -> float | None:
    """Return the largest score over its threshold; ``where``: only of numbers whose name begins so."""
    curves = run.scores.curves.items()
    shares = [curve.shares() for (one, at), curve in curves if one == detector and at.startswith(where)]
    finite = np.concatenate([*shares, np.zeros(0)])
    finite = finite[np.isfinite(finite)]
    return float(finite.max()) if len(finite) else None


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "less than 1%"
    return f"{share:.0%}" if share < 100 else "more than 100 times"


def _reduction(run: RunRecords) -> _Looked:
    error, bound, figure = run.steps["integrity error"], run.steps["integrity bound"], ""
    ok = np.isfinite(error) & np.isfinite(bound) & (bound > 0)
    if ok.any():
        with np.errstate(over="ignore"):
            figure = f"error at most {_percent(float((error[ok] / bound[ok]).max()))} of its bound"
    off = (_is(run, False, "integrity", "aggregation"), _is(run, "off", "direction", "method"))
    unknown = len(run.steps) > 0 and not run.steps.any("integrity error")
    return _looked(run, *off, (unknown, "the aggregated gradient was never seen"), figure=figure)


def _applied_gradient(run: RunRecords) -> _Looked:
    unobserved, figure = _looked(run, _is(run, False, "integrity", "aggregation"))
    if unobserved:
        return unobserved, ""
    if any(detector == "rounding" and APPLIED in where for detector, where in run.scores.curves):
        nearest = _nearest(run, "rounding", APPLIED)
        return "", figure if nearest is None else f"error at most {_percent(nearest)} of its bound"
    if of(run.facts, "observed", "applied gradient") is False:
        return f"not visible with {text(of(run.facts, 'framework'), 40) or 'this framework'} in this setting", ""
    return "what the optimizer applied was never seen" if run.scores.curves else "no scores.jsonl", ""


def _replicas(run: RunRecords) -> _Looked:
    if count := len(run.steps.replica_checks):
        return "", f"equal bits, {count:,} comparison{'s' * (count != 1)}"
    interval = whole(of(run.facts, "block", "integrity", "replica_interval"))
    last = int(run.steps.step[-1]) if len(run.steps) else 0
    reasons = (
        (whole(of(run.facts, "training", "ZeRO stage"), 9) == 3, "ZeRO stage 3 has no replicas"),
        (of(run.facts, "observed", "replicas") is False, "no parameter is held whole by every rank"),
        (interval == 0, "integrity.replica_interval is 0"),
        (last < (interval or 0), f"compared every {interval or 0:,} steps, and step {last:,} is the last"),
        (True, "they were never compared"),
    )
    return _looked(run, *reasons)
