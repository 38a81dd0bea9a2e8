"""What a run's records say, in one sentence. Pure.

verdict = verdict_of(run)
verdict.severity       # "error", "warning", "ok", or "unknown" where nothing was measured
verdict.sentence       # "Rank 2 (node0087:3) is not like the others, since step 12."
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_silent.runs.checks import APPLIED, Check, checks_of
from ds_silent.runs.events import EventGroup
from ds_silent.runs.run import RunRecords
from ds_silent.text import named


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

    @property
    def unchecked(self) -> tuple[Check, ...]:
        """The checks that were not made."""
        return tuple(check for check in self.checks if check.state == "not observed")


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
    "zero-gradient": ("has a gradient of zero", "have a gradient of zero", "The gradient is zero"),
    "unreduced-gradient": ("did not take part in the reduction", "did not take part in the reduction",
                           "Gradients were not reduced"),
    "aggregation-error": ("entered the reduction wrongly", "entered the reduction wrongly",
                          "The reduced gradient is not the mean of the ranks' gradients"),
    "objective-mismatch": ("has another loss than the rest", "have another loss than the rest",
                           "The ranks' losses are not made alike"),
    "update-mismatch": ("does not train what it should", "do not train what they should",
                        "Parameters get a gradient that nothing applies"),
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
        now = min(goes_on, key=lambda one: not one.follows, default=None)  # what is said to follow from it first
        sentence = f"{_what(worst, run)}{_when(worst, now)}.{lost and f' {lost}.'}"
        severity: Literal["error", "warning"] = "error" if worst.severity == "error" else "warning"
        return RunVerdict(severity, sentence, checks, worst.ranks, worst.since, worst, len(groups) - 1)
    healthy = _healthy(run, RunVerdict("ok", "", checks).unchecked) if len(run.steps) else ""
    if lost:
        sentence = f"{lost}; until then {healthy[0].lower()}{healthy[1:]}" if healthy else f"{lost}."
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
    if group.kind == "aggregation-error" and APPLIED in group.where:
        said = "What the optimizer applied is not the reduced gradient"
    elif group.first == 0 and group.kind in _BEFORE and not everybody:
        one, said = _BEFORE[group.kind]
        return f"{who} {one}" if who and group.ranks_total < 2 else said
    elif group.kind == "outlier-rank" and everybody:  # there are no others
        return "The two ranks disagree" if who.startswith("Both") else f"{who} disagree"
    elif who and one:
        return f"{who} {many if group.total > 1 else one}"
    return f"{said} ({who[0].lower()}{who[1:]})" if who else said


def _when(group: EventGroup, now: EventGroup | None) -> str:
    """Return since when; ``now`` is the group as which it goes on after its own end."""
    since, last = group.since, group.until
    if group.first == 0:
        return ", seen before the first step"
    if group.ended and now is None:
        return f", at step {since:,}" if last == since else f", from step {since:,} to {last:,}"
    found = f" (found at step {group.first:,})" if since < group.first else ""
    goes_on = f", now as {now.kind}" if group.ended and now is not None else ""
    return f", since step {since:,}{found}{goes_on}"


def _healthy(run: RunRecords, unchecked: tuple[Check, ...]) -> str:
    """Return the sentence of a run without findings. Groups of outlier ranks can only be notes here."""
    world, count = run.world_size, len(run.steps)
    who = f"All {world:,} ranks" if world > 2 else ("Both ranks" if world == 2 else "The ranks")
    steps = "the one measured step" if count == 1 else f"all {count:,} measured steps"
    missing = [check.name.lower() for check in unchecked]
    unlike = {rank for group in run.events.groups() if group.kind == "outlier-rank" for rank in group.ranks}
    said = f"{who} agreed at {steps}"
    if unlike:
        said += f"; notes say that the data of {named(tuple(sorted(unlike)), world)} are of another kind"
    if not missing:
        return f"{said}."
    more = f" and {len(missing) - 3} more" if len(missing) > 4 else ""
    listed = missing if not more else missing[:3]
    return f"{said}; not checked: {', '.join(listed)}{more}."
