"""What a run's records say, in one sentence, and which checks passed, failed or were not made. Pure.

verdict = verdict_of(run)
verdict.severity       # "error", "warning", "ok", or "unknown" where nothing was measured
verdict.sentence       # "Rank 2 (node0087:3) is not like the others, since step 12."
for check in verdict.checks:
    check.name, check.state, check.why
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ds_silent.runs.events import EventGroup, Place
from ds_silent.runs.run import Run
from ds_silent.runs.values import of, text, whole
from ds_silent.text import named

State = Literal["passed", "failed", "warned", "noted", "not observed"]
SHOWN_RANKS = 4
SHOWN_HOSTS = 2


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, or was not.

    Attributes:
        why: a figure of what passed, the first finding, or why nothing was observed: stage, option, number of ranks.
    """

    name: str
    state: State
    why: str
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is to be known first.

    Attributes:
        sentence: one.
        ranks: that are named; empty where nobody can be.
        since: the step from which on it is so; None where nothing is wrong. 0: before the first.
        group: what the sentence is about; None where nothing is wrong, or the run has only broken off.
        others: findings of the severity "error" or "warning" beside it.
    """

    severity: Literal["error", "warning", "ok", "unknown"]
    sentence: str
    ranks: tuple[int, ...]
    places: tuple[Place, ...]
    since: int | None
    group: EventGroup | None
    others: int
    checks: tuple[Check, ...]

    @property
    def unchecked(self) -> tuple[Check, ...]:
        """What was not observed."""
        return tuple(check for check in self.checks if check.state == "not observed")


_NAMED = {
    "outlier-rank": ("is not like the others", "are not like the others"),
    "duplicate-data": ("works on rows of others", "work on the same rows"),
    "data-order-mismatch": ("takes rows again before the epoch is over", "take rows again before the epoch is over"),
    "batch-size-mismatch": ("takes another number of rows", "take other numbers of rows"),
    "non-finite": ("has NaN or infinity in its numbers", "have NaN or infinity in their numbers"),
    "zero-gradient": ("has a gradient of zero", "have a gradient of zero"),
    "unreduced-gradient": ("did not take part in the reduction", "did not take part in the reduction"),
    "aggregation-error": ("entered the reduction wrongly", "entered the reduction wrongly"),
    "update-mismatch": ("does not train what it should", "do not train what they should"),
    "replica-drift": ("holds other weights than the rest", "hold other weights than the rest"),
    "initial-weights-mismatch": ("started from other weights", "started from other weights"),
    "seed-mismatch": ("has a seed that does not fit", "have seeds that do not fit together"),
    "config-mismatch": ("runs with other settings", "run with other settings"),
    "low-coverage": ("leaves rows of the epoch out", "leave rows of the epoch out"),
    "same-order": ("sees every epoch in the same order", "see every epoch in the same order"),
}
_NOBODY = {
    "outlier-rank": "One rank is not like the others, and which cannot be said",
    "duplicate-data": "Rows are worked on by several ranks",
    "data-order-mismatch": "Rows come again before the epoch is over",
    "low-coverage": "Rows of the epoch never come",
    "same-order": "Every epoch has the same order",
    "batch-size-mismatch": "The ranks take different numbers of rows",
    "non-finite": "There is NaN or infinity in the ranks' numbers",
    "zero-gradient": "The gradient is zero",
    "unreduced-gradient": "Gradients were not reduced",
    "aggregation-error": "The reduced gradient is not the mean of the ranks' gradients",
    "update-mismatch": "Parameters get a gradient that nothing applies",
    "replica-drift": "The replicas hold different weights",
    "initial-weights-mismatch": "The ranks started from different weights",
    "seed-mismatch": "The ranks' seeds do not fit together",
    "config-mismatch": "The ranks run with different settings",
    "observer-off": "ds_silent switched itself off, and nothing is known after that",
    "repaired": "A fault was found and a repair tried",
}
_BEFORE = {
    "data-order-mismatch": ("deals rows in another order than the rest", "The ranks' samplers do not fit together"),
    "duplicate-data": ("will work on rows of others", "Several ranks will work on the same rows"),
}
"""Of the preflight: what is to come. With ranks that are named, and without."""
_APPLIED = "applied gradient"
_DISTURBING = ("error", "warning")


def verdict_of(run: Run) -> Verdict:
    """The sentence for what is worst and, of that, first."""
    checks = checks_of(run)
    groups = [group for group in run.events.groups() if group.severity in _DISTURBING]
    wrong = [group for group in groups if not group.follows and group.kind != "repaired"] or groups
    lost = run.broke_off
    if wrong:
        worst = min(wrong, key=lambda one: (one.severity != "error", one.since, one.first))
        goes_on = [one for one in run.events.groups() if worst.goes_on_as(one, run.world_size)]
        now = min(goes_on, key=lambda one: not one.follows, default=None)  # what is said to follow from it first
        sentence = f"{_what(worst, run)}{_when(worst, now)}.{lost and f' {lost}.'}"
        severity: Literal["error", "warning"] = "error" if worst.severity == "error" else "warning"
        named = _ranks(worst, run)
        return Verdict(
            severity,
            sentence,
            worst.ranks,
            tuple(place for rank in named for place in [_place(rank, worst, run)] if place is not None),
            worst.since,
            worst,
            len(groups) - 1,
            checks,
        )
    if lost:
        healthy = _healthy(run, checks) if len(run.steps) else ""
        sentence = f"{lost}; until then {healthy[0].lower()}{healthy[1:]}" if healthy else f"{lost}."
        return Verdict("warning", sentence, (), (), None, None, 0, checks)
    if not len(run.steps):
        said = "Nothing has been measured yet."
        if run.empty:
            said = f"This directory {'holds no records yet' if run.directory.is_dir() else 'does not exist'}."
        return Verdict("unknown", said, (), (), None, None, 0, checks)
    return Verdict("ok", _healthy(run, checks), (), (), None, None, 0, checks)


def who_of(group: EventGroup, run: Run) -> str:
    """The ranks as a person reads them, with hosts where they are known: "Rank 2 (node0087:3)"; "" for nobody."""
    ranks, total = group.ranks, max(group.ranks_total, len(group.ranks))
    if not ranks:
        return ""
    world = run.world_size
    if world and total >= world > 1:
        return f"All {world:,} ranks" if world > 2 else "Both ranks"
    each = []
    for rank in ranks[:SHOWN_RANKS]:
        place = _place(rank, group, run)
        each.append(f"{rank} ({place.spot})" if place is not None else str(rank))
    more = f" and {total - len(each):,} more" if total > len(each) else ""
    return f"Rank{'s' * (total > 1)} {', '.join(each)}{more}"


def _what(group: EventGroup, run: Run) -> str:
    who = who_of(group, run)
    if group.kind == "aggregation-error" and _APPLIED in group.where:
        applied = "What the optimizer applied is not the reduced gradient"
        return f"{applied} ({who[0].lower()}{who[1:]})" if who else applied
    if group.first == 0 and group.kind in _BEFORE and not who.startswith(("All", "Both")):
        named, nobody = _BEFORE[group.kind]
        return f"{who} {named}" if who and group.ranks_total < 2 else nobody
    if group.kind == "outlier-rank" and who.startswith(("All", "Both")):  # there are no others
        return "The two ranks disagree" if who.startswith("Both") else f"{who} disagree"
    if who and group.kind in _NAMED:
        one, many = _NAMED[group.kind]
        return f"{who} {many if max(group.ranks_total, len(group.ranks)) > 1 else one}"
    said = _NOBODY.get(group.kind, f"There is an event of the kind {group.kind}")
    return f"{said} ({who[0].lower()}{who[1:]})" if who else said


def _when(group: EventGroup, now: EventGroup | None) -> str:
    """``now``: as what it goes on, where its own end was told."""
    since, last = group.since, group.until
    if group.first == 0:
        return ", seen before the first step"
    if group.ended and now is None:
        return f", at step {since:,}" if last == since else f", from step {since:,} to {last:,}"
    found = f" (found at step {group.first:,})" if since < group.first else ""
    goes_on = f", now as {now.kind}" if group.ended and now is not None else ""
    return f", since step {since:,}{found}{goes_on}"


def _healthy(run: Run, checks: tuple[Check, ...]) -> str:
    world, count = run.world_size, len(run.steps)
    who = f"All {world:,} ranks" if world > 2 else ("Both ranks" if world == 2 else "The ranks")
    steps = "the one measured step" if count == 1 else f"all {count:,} measured steps"
    missing = [check.name.lower() for check in checks if check.state == "not observed"]
    # notes: nothing worse is here
    unlike = {rank for group in run.events.groups() if group.kind == "outlier-rank" for rank in group.ranks}
    said = f"{who} agreed at {steps}"
    if unlike:
        said += f"; notes say that the data of {named(tuple(sorted(unlike)), world)} are of another kind"
    if not missing:
        return f"{said}."
    more = f" and {len(missing) - 3} more" if len(missing) > 4 else ""
    listed = missing if not more else missing[:3]
    return f"{said}; not checked: {', '.join(listed)}{more}."


def _ranks(group: EventGroup, run: Run) -> tuple[int, ...]:
    total = max(group.ranks_total, len(group.ranks))
    return () if run.world_size and total >= run.world_size else group.ranks[:SHOWN_RANKS]


def _place(rank: int, group: EventGroup, run: Run) -> Place | None:
    told = next((place for place in group.places if place.rank == rank), None)
    return told if told is not None else run.places.get(rank)


def checks_of(run: Run) -> tuple[Check, ...]:
    """All that ds_silent can look at, in the order of a training."""
    option, stage = _options(run), _stage(run)
    steps = len(run.steps)
    return (
        _check(run, "Before step 1", _PREFLIGHT, _no_preflight(run, option), _preflight_figure(run), before=True),
        _check(run, "Rows", _ROWS, _no_rows(run, option), _rows_figure(run)),
        _check(run, "Ranks alike", ("outlier-rank",), _no_outlier(run, option), _outlier_figure(run)),
        _check(run, "Finite numbers", ("non-finite", "zero-gradient"), _no_judge(run, option), f"{steps:,} steps"),
        _check(run, "Reduction", _REDUCTION, _no_reduction(run, option), _reduction_figure(run), applied=False),
        _check(run, "Applied gradient", _REDUCTION, _no_applied(run, option), _applied_figure(run), applied=True),
        _check(run, "Replicas", ("replica-drift",), _no_replicas(run, option, stage), _replicas_figure(run)),
        _check(run, "Settings in use", _SETTINGS, _no_judge(run, option), f"{steps:,} steps", before=False),
    )


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


def _check(
    run: Run,
    name: str,
    kinds: tuple[str, ...],
    unobserved: str,
    figure: str,
    before: bool | None = False,
    applied: bool | None = None,
) -> Check:
    """What its events say; without any, ``unobserved`` or else ``figure``.

    Args:
        before: only events of the preflight, or only others.
        applied: only events about what the optimizer applied, or only others; None: both.
    """
    own = [
        group
        for group in run.events.groups()
        if group.kind in kinds
        and (before is None or (group.first == 0) == before)
        and (applied is None or (_APPLIED in group.where) == applied)
    ]
    if own:
        worst = own[0]
        state: State = {"error": "failed", "warning": "warned"}.get(worst.severity, "noted")  # type: ignore[assignment]
        if state == "noted" and any(group.follows for group in own):  # from what another check has failed for
            state = "failed"
        if state != "noted" or not unobserved:
            who = who_of(worst, run)
            told = f"{worst.kind}{f', {who[0].lower()}{who[1:]}' if who else ''}"
            return Check(name, state, told if worst.first == 0 else f"{told}, step {worst.since:,}", kinds)
    if unobserved:
        return Check(name, "not observed", unobserved, kinds)
    return Check(name, "passed", figure, kinds)


def _options(run: Run) -> Any:
    """The block, as run.json has it; {} where it is not known."""
    block = of(run.facts, "block")
    return block if isinstance(block, dict) else {}


def _stage(run: Run) -> int | None:
    return whole(of(run.facts, "training", "ZeRO stage"), 9)


def _no_judge(run: Run, option: Any) -> str:
    if of(option, "detectors", "enabled") is False:
        return "detectors.enabled is false"
    return "" if len(run.steps) else "no step was measured"


def _no_preflight(run: Run, option: Any) -> str:
    if run.preflight:
        return ""
    return "preflight is false" if option.get("preflight") is False else "no preflight.json"


def _preflight_figure(run: Run) -> str:
    items = run.preflight.get("items")
    return f"{len(items):,} items" if isinstance(items, list) else "no items"


def _no_rows(run: Run, option: Any) -> str:
    if option.get("coverage") is False:
        return "coverage is false"
    if not len(run.steps):
        return "no step was measured"
    return "" if run.steps.any("duplicates") or run.steps.any("repeated") else "no row ids were seen"


def _rows_figure(run: Run) -> str:
    seen, sampled = run.steps.last("seen"), run.steps.last("sampled")
    share = f"; 1 row in {1 / sampled:.0f} is followed" if sampled and 0 < sampled < 1 else ""
    return (f"{min(seen, 1):.0%} of the epoch seen" if seen is not None else f"{len(run.steps):,} steps") + share


def _no_outlier(run: Run, option: Any) -> str:
    if reason := _no_judge(run, option):
        return reason
    if run.world_size == 1:
        return "one rank has nobody to be compared with"
    seen = any(run.steps.any(f"{of} low") for of in ("loss", "norm", "cosine"))
    return "" if seen else "no rank's loss, norm or direction was measured"


def _outlier_figure(run: Run) -> str:
    missing = [name for name in ("loss", "norm", "cosine") if not run.steps.any(f"{name} low")]
    nearest = _nearest(run, lambda detector, where: detector == "outlier")
    figure = f"at most {_percent(nearest)} of an alarm" if nearest is not None else f"{len(run.steps):,} steps"
    if run.world_size == 2:
        return f"{figure}; of two, none is named"
    return f"{figure}; without {' and '.join(missing)}" if missing else figure


def _nearest(run: Run, chosen: Any) -> float | None:
    """The largest score over its threshold."""
    largest = None
    for (detector, where), curve in run.scores.curves.items():
        if chosen(detector, where) and len(curve.score):
            score, threshold = np.array(curve.score), np.array(curve.threshold)
            ok = (threshold > 0) & np.isfinite(score)
            if ok.any():
                with np.errstate(over="ignore"):
                    share = float((score[ok] / threshold[ok]).max())
                largest = share if largest is None else max(largest, share)
    return None if largest is None else max(largest, 0.0)


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "less than 1%"
    return f"{share:.0%}" if share < 100 else "more than 100 times"


def _no_reduction(run: Run, option: Any) -> str:
    if of(option, "integrity", "aggregation") is False:
        return "integrity.aggregation is false"
    if of(option, "direction", "method") == "off":
        return "direction.method is off"
    if not len(run.steps):
        return "no step was measured"
    return "" if run.steps.any("integrity error") else "the aggregated gradient was never seen"


def _reduction_figure(run: Run) -> str:
    error, bound = run.steps["integrity error"], run.steps["integrity bound"]
    ok = np.isfinite(error) & np.isfinite(bound) & (bound > 0)
    if not ok.any():
        return f"{len(run.steps):,} steps"
    with np.errstate(over="ignore"):
        share = float((error[ok] / bound[ok]).max())
    return f"error at most {_percent(share)} of its bound"


def _no_applied(run: Run, option: Any) -> str:
    if of(option, "integrity", "aggregation") is False:
        return "integrity.aggregation is false"
    if not len(run.steps):
        return "no step was measured"
    if any(_APPLIED in where for detector, where in run.scores.curves if detector == "rounding"):
        return ""
    if of(run.facts, "observed", "applied gradient") is False:
        return f"not visible with {text(of(run.facts, 'framework'), 40) or 'this framework'} in this setting"
    if not run.scores.curves:
        return "no scores.jsonl"
    return "what the optimizer applied was never seen"


def _applied_figure(run: Run) -> str:
    nearest = _nearest(run, lambda detector, where: detector == "rounding" and where.startswith(_APPLIED))
    return f"error at most {_percent(nearest)} of its bound" if nearest is not None else f"{len(run.steps):,} steps"


def _no_replicas(run: Run, option: Any, stage: int | None) -> str:
    if run.steps.replica_checks:
        return ""
    interval = whole(of(option, "integrity", "replica_interval"))
    if stage == 3:
        return "ZeRO stage 3 has no replicas"
    if of(run.facts, "observed", "replicas") is False:
        return "no parameter is held whole by every rank"
    if interval == 0:
        return "integrity.replica_interval is 0"
    last = int(run.steps.step[-1]) if len(run.steps) else 0
    if interval is not None and last < interval:
        return f"compared every {interval:,} steps, and step {last:,} is the last"
    return "they were never compared"


def _replicas_figure(run: Run) -> str:
    count = len(run.steps.replica_checks)
    return f"equal bits, {count:,} comparison{'s' * (count != 1)}"
