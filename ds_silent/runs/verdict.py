"""What a run's records say: in one sentence, and check by check. Pure.

verdict = verdict_of(run)
verdict.severity       # "error", "warning", "ok", or "unknown" where nothing was measured
verdict.sentence       # "Rank 2 (node0087:3) is not like the others, since step 12."
verdict.checks         # of each its name, its state and why
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ds_silent.distributed.parts import listed
from ds_silent.records import SAME_WORK
from ds_silent.runs.columns import finite
from ds_silent.runs.events import EventGroup
from ds_silent.runs.lines import METRICS, of, text, whole
from ds_silent.runs.run import RunRecords
from ds_silent.text import named

State = Literal["passed", "failed", "warned", "noted", "not observed"]
_STATES: Mapping[str, State] = {"error": "failed", "warning": "warned", "info": "noted"}
APPLIED = "applied gradient"
"""How the place of an event begins that is about what the optimizer applied."""
_DEALING = ("duplicate-data", "data-order-mismatch", "low-coverage")
_PREFLIGHT = ("initial-weights-mismatch", "seed-mismatch", "config-mismatch", *_DEALING)
_ROWS = (*_DEALING, "same-order", "batch-size-mismatch", "batch-suspect")
_REDUCTION = ("aggregation-error", "unreduced-gradient")
_RULES = ("objective-mismatch", "update-mismatch", "weights-mismatch", "batch-suspect")
"""Kinds of many faults each: what one says of itself is worth more than what can be said of all."""
_STATEMENT = re.compile(r"(?:\([^()]*\)|(?!(?:,? since step| \(step|[.:;](?:\s|$)))[^()])+")
_LONGEST = 160  # characters
_NEAR = 0.75  # of an alarm: what is no agreement any more
_SETTINGS = ("config-mismatch", "seed-mismatch", "objective-mismatch", "update-mismatch", "weights-mismatch")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, or was not; ``why``: a figure, the first finding, or why nothing was observed."""

    name: str
    state: State
    why: str


@dataclass(frozen=True)
class RunVerdict:
    """The first thing to know of a run.

    ``since``: the first step of the fault, 0 before the first; None where nothing is wrong. ``group``: the fault of the
    sentence, if there is one. ``others``: further findings of the severity "error" or "warning".
    """

    severity: Literal["error", "warning", "ok", "unknown"]
    sentence: str
    checks: tuple[Check, ...]
    ranks: tuple[int, ...] = ()
    since: int | None = None
    group: EventGroup | None = None
    others: int = 0


_SENTENCES: Mapping[str, tuple[str, str, str]] = {
    "outlier-rank": ("is not like the others", "are not like the others",
                     "One rank is not like the others, and which cannot be said"),
    "duplicate-data": ("works on rows of others", "work on the same rows", "Rows are worked on by several ranks"),
    "data-order-mismatch": ("takes rows again before the epoch is over", "take rows again before the epoch is over",
                            "Rows come again before the epoch is over"),
    "batch-size-mismatch": ("takes another number of rows", "take other numbers of rows",
                            "The ranks take different numbers of rows"),
    "non-finite": ("has NaN or infinity in its numbers", "have NaN or infinity in their numbers",
                   "There is NaN or infinity in the ranks' numbers"),
    "zero-gradient": ("has a gradient of zero in all parameters", "have a gradient of zero in all parameters",
                      "The gradient is zero in all parameters"),
    "unreduced-gradient": ("did not take part in the reduction", "did not take part in the reduction",
                           "Gradients were not reduced"),
    "aggregation-error": ("entered the reduction wrongly", "entered the reduction wrongly",
                          "The reduced gradient is not the mean of the ranks' gradients"),
    "objective-mismatch": ("has another loss than the rest", "have another loss than the rest",
                           "The loss is not normalised as its framework promises"),
    "update-mismatch": ("does not train what it should", "do not train what they should",
                        "Parameters are not trained as they are meant to be"),
    "weights-mismatch": ("computes with other weights than it trains", "compute with other weights than they train",
                         "The weights in use are not the right ones"),
    "batch-suspect": ("gets batches that cannot be meant so", "get batches that cannot be meant so",
                      "The batches cannot be meant so"),
    "replica-drift": ("holds other weights than the rest", "hold other weights than the rest",
                      "The replicas hold different weights"),
    "initial-weights-mismatch": ("started from other weights", "started from other weights",
                                 "The ranks started from different weights"),
    "seed-mismatch": ("has a seed that does not fit", "have seeds that do not fit together",
                      "The ranks' seeds do not fit together"),
    "config-mismatch": ("runs with other settings", "run with other settings", "The ranks run with different settings"),
    "low-coverage": ("leaves rows of the epoch out", "leave rows of the epoch out", "Rows of the epoch never come"),
    "same-order": ("sees every epoch in the same order", "see every epoch in the same order",
                   "Every epoch has the same order"),
    "observer-off": ("", "", "ds_silent switched itself off, and nothing is known after that"),
    "repaired": ("", "", "A fault was found and a repair tried"),
}  # fmt: skip
"""What is said of a rank, of several ranks, and where none is named."""
_AMONG_ALL: Mapping[str, str] = {
    "objective-mismatch": "The ranks do not compute the same loss",
    **{kind: _SENTENCES[kind][2] for kind in ("batch-size-mismatch", "replica-drift", "initial-weights-mismatch",
                                              "config-mismatch")},
}  # fmt: skip
"""What is said where all ranks are named: there are no others that theirs could be unlike."""
_BEFORE = {
    "data-order-mismatch": ("deals rows in another order than the rest", "The ranks' samplers do not fit together"),
    "duplicate-data": ("will work on rows of others", "Several ranks will work on the same rows"),
}
"""What the preflight sees coming: with the ranks that are named, and without."""


def verdict_of(run: RunRecords) -> RunVerdict:
    """Return the verdict on the worst fault and, among the worst, the first."""
    checks, lost = checks_of(run), run.broke_off
    groups = [group for group in run.events.groups() if group.severity in ("error", "warning")]
    wrong = [group for group in groups if not group.follows and group.kind != "repaired"] or groups
    if wrong:
        worst = min(wrong, key=lambda one: (one.severity != "error", one.since, one.first))
        goes_on = [one for one in run.events.groups() if worst.goes_on_as(one, run.world_size)]
        # first what is said to follow from it, and of that the weights, which do not mend by themselves
        now = min(goes_on, key=lambda one: (not one.follows, one.kind != "replica-drift"), default=None)
        sentence = f"{_what(worst, run)}{_when(worst, now)}.{lost and f' {lost}.'}"
        severity: Literal["error", "warning"] = "error" if worst.severity == "error" else "warning"
        return RunVerdict(severity, sentence, checks, worst.ranks, worst.since, worst, len(groups) - 1)
    healthy = _healthy(run, checks) if len(run.steps) else ""
    if lost:
        sentence = f"{lost}; until then {_within(healthy)}" if healthy else f"{lost}."
        # an interrupt is somebody's wish, and no fault
        return RunVerdict("warning" if not run.interrupted else "ok" if healthy else "unknown", sentence, checks)
    if healthy and (count := run.unread("events.jsonl")):
        sentence = f"{_unread(count, 'events.jsonl')}: a fault may be among them. Else {_within(healthy)}"
        return RunVerdict("warning", sentence, checks)
    if healthy:
        return RunVerdict("ok", healthy, checks)
    nothing = "Nothing has been measured yet."
    if run.empty:
        nothing = f"This directory {'holds no records yet' if run.directory.is_dir() else 'does not exist'}."
    return RunVerdict("unknown", nothing, checks)


def _what(group: EventGroup, run: RunRecords) -> str:
    who = run.who(group)
    everybody = who.startswith(("All", "Both"))
    one, many, said = _SENTENCES.get(group.kind, ("", "", f"There is an event of the kind {group.kind}"))
    by_itself = not who or (group.kind == "weights-mismatch" and not group.message.startswith("On "))
    if group.kind in _RULES and by_itself and (own := _headline(group.message)):
        return own
    if group.kind == "aggregation-error" and APPLIED in group.where:
        said = _headline(group.message) or "What the optimizer applied is not the reduced gradient"
        whose, plain = _within(who), named(group.ranks, run.world_size) if who else ""
        return said.replace(plain, whose, 1) if plain in said else f"{said} ({whose})"
    if group.kind == "duplicate-data" and group.is_same_work:
        return f"{who} {SAME_WORK}"
    if group.kind == "observer-off" and group.severity == "error" and who:
        verb = "are" if group.total > 1 else "is"
        return f"{who} {verb} out of step with the rest, and nothing is known after that"
    if group.where == "hooks on gradients":
        whose = f" ({_within(who)})" if who and not everybody else ""
        return f"A hook changes gradients on some ranks alone{whose}"
    if group.kind == "zero-gradient" and group.where not in ("", "gradient"):
        one, many = (f"{verb} a gradient of zero in {group.where}" for verb in ("has", "have"))
        if group.where == "parameters":
            one, many = (f"{verb} no gradient for some parameters that other ranks train" for verb in ("gets", "get"))
        return f"{who} {many if group.total > 1 else one}"
    if group.first == 0 and group.kind in _BEFORE and not everybody:
        one, said = _BEFORE[group.kind]
        return f"{who} {one}" if who and group.ranks_total < 2 else said
    if group.kind == "outlier-rank" and everybody:  # there are no others
        return "The two ranks disagree" if who.startswith("Both") else f"{who} disagree"
    if everybody and group.kind in _AMONG_ALL:
        return _AMONG_ALL[group.kind]
    if who and one:
        return f"{who} {many if group.total > 1 else one}"
    return f"{said} ({_within(who)})" if who else said


def _within(sentence: str) -> str:
    """Return it as it stands behind other words."""
    return sentence[:1].lower() + sentence[1:]


def _headline(message: str) -> str:
    """Return the statement that an event begins with, without its step; nothing where that is long."""
    stated = _STATEMENT.match(message)
    words = stated[0].rstrip(" ,") if stated else ""
    return words if len(words) <= _LONGEST else ""


def _when(group: EventGroup, now: EventGroup | None) -> str:
    """Return since when; ``now`` is the group as which it goes on after its own end."""
    since, last = group.since, group.until
    if group.first == 0:
        return ", seen before the first step"
    if group.ended and now is None:
        times = f"{len(group.spans):,} times " * (len(group.spans) > 1)
        return f", at step {since:,}" if last == since else f", {times}from step {since:,} to {last:,}"
    found = f" (found at step {group.first:,})" if since < group.first else ""
    goes_on = f", now as {now.kind}" if group.ended and now is not None else ""
    return f", since step {since:,}{found}{goes_on}"


def _healthy(run: RunRecords, checks: tuple[Check, ...]) -> str:
    """Return the sentence of a run without findings. Groups of outlier ranks can only be notes here."""
    world, count = run.world_size, len(run.steps)
    who = f"All {world:,} ranks" if world > 2 else ("Both ranks" if world == 2 else "The ranks")
    steps = "the one measured step" if count == 1 else f"all {count:,} measured steps"
    torn = run.unread("metrics.jsonl")
    missing = [check.name.lower() for check in checks if check.state == "not observed"]
    said, near = f"{who} agreed at {steps}", _nearest(run, "outlier", newest=True) or 0.0
    if near >= _NEAR:
        said = f"No alarm was raised at {steps}, and the comparison of the ranks is at {_percent(near)} of one by now"
    if torn:
        said += f" that are known; {_unread(torn, 'metrics.jsonl')}"
    said += noted(run)
    if not missing:
        return f"{said}."
    return f"{said}; not checked: {listed(missing, 3 if len(missing) > 4 else 4)}."


def noted(run: RunRecords) -> str:
    """Return what the notes of a run without findings say of its data and its rules; nothing where there are none."""
    notes = [group for group in run.events.groups() if not group.follows]
    unlike = {rank for group in notes if group.kind == "outlier-rank" for rank in group.ranks}
    whose = f"the data of {named(tuple(sorted(unlike)), run.world_size)} are of another kind" if unlike else ""
    said = f"; notes say that {whose if len(unlike) < run.world_size else 'the ranks have data of unlike kinds'}"
    kinds = (*_RULES, "duplicate-data", "low-coverage", "same-order", "unreduced-gradient")
    lasting = [group for group in notes if group.kind in kinds and not group.ended]
    headlines = [own for group in lasting if (own := _headline(group.message))]
    more = f" (and {len(headlines) - 1} more)" if len(headlines) > 1 else ""
    return said * bool(unlike) + (f"; noted: {headlines[0]}{more}" if headlines else "")


def _unread(count: int, name: str) -> str:
    return f"{count:,} line{'s' * (count != 1)} of {name} cannot be read"


# -- Which checks passed, failed or were not made, and why -------------------------------------------------------------

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
        state = _STATES[worst.severity]
        if state == "noted":  # or one is as bad as what it follows from, for which another check has failed
            causes = {one.name: one for one in reversed(run.events.groups())}
            worst = next((group for group in own if group.follows in causes), worst)
            state = _STATES[causes.get(worst.follows, worst).severity]
        if state != "noted" or not unobserved:
            who = run.who(worst)
            why = f"{worst.kind}{f', {_within(who)}' if who else ''}"
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
        known = int(steps.measured("seen").sum())
        figure = f"{min(share, 1):.0%} of the epoch seen"
        if 2 * known < len(steps):  # more rows come than there is room for, and what was seen says nothing
            figure = f"compared within each step; the epoch was followed at {known:,} of {len(steps):,} steps alone"
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


def _nearest(run: RunRecords, detector: str, where: str = "", newest: bool = False) -> float | None:
    """Return the largest score over its threshold.

    ``where``: only of numbers whose name begins so; ``newest``: only of the newest measured step.
    """
    curves = [curve for (one, at), curve in run.scores.curves.items() if one == detector and at.startswith(where)]
    last = max((curve.step[-1] for curve in curves if len(curve.step)), default=0)
    shares = [curve.shares()[np.array(curve.step) == last] if newest else curve.shares() for curve in curves]
    known = finite(np.concatenate([*shares, np.zeros(0)]))
    return float(known.max()) if len(known) else None


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
        without = "; running statistics of normalisations (as of BatchNorm), which may differ, are left out"
        left_out = without * (of(run.facts, "observed", "running statistics") is False)
        return "", f"equal bits, {count:,} comparison{'s' * (count != 1)}{left_out}"
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
