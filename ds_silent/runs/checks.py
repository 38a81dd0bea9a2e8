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
    """One thing that was looked at, or was not.

    Attributes:
        why: a figure of what passed, the first finding, or why nothing was observed: stage, option, number of ranks.
    """

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


def _option(run: RunRecords, *keys: str) -> Any:
    """Return a value of the block, as run.json has it."""
    return of(run.facts, "block", *keys)


def _measured(run: RunRecords) -> _Looked:
    return "" if len(run.steps) else "no step was measured", f"{len(run.steps):,} steps"


def _judged(run: RunRecords) -> _Looked:
    disabled = _option(run, "detectors", "enabled") is False
    return ("detectors.enabled is false", "") if disabled else _measured(run)


def _preflight(run: RunRecords) -> _Looked:
    if not run.preflight:
        return "preflight is false" if _option(run, "preflight") is False else "no preflight.json", ""
    items = run.preflight.get("items")
    return "", f"{len(items):,} items" if isinstance(items, list) else "no items"


def _rows(run: RunRecords) -> _Looked:
    unobserved, figure = _measured(run)
    if _option(run, "coverage") is False:
        return "coverage is false", ""
    if not unobserved and not (run.steps.any("duplicates") or run.steps.any("repeated")):
        unobserved = "no row ids were seen"
    seen, sampled = run.steps.last("seen"), run.steps.last("sampled")
    if seen is not None:
        figure = f"{min(seen, 1):.0%} of the epoch seen"
    if sampled and 0 < sampled < 1:
        figure += f"; 1 row in {1 / sampled:.0f} is followed"
    return unobserved, figure


def _ranks_alike(run: RunRecords) -> _Looked:
    unobserved, figure = _judged(run)
    missing = [metric for metric in METRICS if not run.steps.any(f"{metric} low")]
    if unobserved:
        return unobserved, ""
    if run.world_size == 1:
        return "one rank has nobody to be compared with", ""
    if len(missing) == len(METRICS):
        return "no rank's loss, norm or direction was measured", ""
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
    known = np.concatenate([*shares, np.zeros(0)])
    known = known[np.isfinite(known)]
    return float(known.max()) if len(known) else None


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "less than 1%"
    return f"{share:.0%}" if share < 100 else "more than 100 times"


def _reduction(run: RunRecords) -> _Looked:
    unobserved, figure = _measured(run)
    if _option(run, "integrity", "aggregation") is False:
        return "integrity.aggregation is false", ""
    if _option(run, "direction", "method") == "off":
        return "direction.method is off", ""
    if not unobserved and not run.steps.any("integrity error"):
        unobserved = "the aggregated gradient was never seen"
    error, bound = run.steps["integrity error"], run.steps["integrity bound"]
    ok = np.isfinite(error) & np.isfinite(bound) & (bound > 0)
    if ok.any():
        with np.errstate(over="ignore"):
            figure = f"error at most {_percent(float((error[ok] / bound[ok]).max()))} of its bound"
    return unobserved, figure


def _applied_gradient(run: RunRecords) -> _Looked:
    unobserved, figure = _measured(run)
    if _option(run, "integrity", "aggregation") is False:
        return "integrity.aggregation is false", ""
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
    interval = whole(_option(run, "integrity", "replica_interval"))
    if whole(of(run.facts, "training", "ZeRO stage"), 9) == 3:
        return "ZeRO stage 3 has no replicas", ""
    if of(run.facts, "observed", "replicas") is False:
        return "no parameter is held whole by every rank", ""
    if interval == 0:
        return "integrity.replica_interval is 0", ""
    last = int(run.steps.step[-1]) if len(run.steps) else 0
    if interval is not None and last < interval:
        return f"compared every {interval:,} steps, and step {last:,} is the last", ""
    return "they were never compared", ""
