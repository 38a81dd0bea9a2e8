"""Was it repaired, and only what could be? Pure: events and states in, a judgement out.

    outcome = judge_repair(fault, strike, response, events, states, healthy)
    outcome.right, outcome.answer, outcome.step

``states`` and ``healthy`` hold a hash per rank for every step, the latter of the training without a fault: an event
that says "repaired" is believed only when they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.injection import Strike
from ds_silent.drill.faults.responses import Response
from ds_silent.drill.verdicts.found import says, tells

States = Sequence[tuple[str, ...]]
Answer = Literal[
    "untouched",
    "repaired",
    "given up",
    "not repaired",
    "claimed",
    "wrong step",
    "wrong ranks",
    "wrong words",
    "wrong state",
    "not said",
]
RIGHT = ("untouched", "repaired", "given up")


@dataclass(frozen=True)
class RepairVerdict:
    """``step``: of the first ``repaired`` event, or of the error that says that it was not.

    ``untouched``: healthy, and left alone. ``given up``: it could not be repaired, and that was said. ``claimed``: said
    to be repaired where nothing was, or where nothing could be. ``wrong state``: weights or optimizer state are not
    what they must be: after a repair, or because a fault that cannot be repaired left no trace.
    """

    answer: Answer
    step: int | None = None

    @property
    def right(self) -> bool:
        return self.answer in RIGHT


def judge_repair(
    fault: Fault | None,
    strike: Strike,
    response: Response,
    events: Sequence[Mapping[str, Any]],
    states: States,
    healthy: States,
) -> RepairVerdict:
    """What the response has made of a fault, or of none.

    Args:
        fault: what was injected; None is a healthy training.
        strike: on whom and when.
        response: that was switched on.
        events: all of the run.
        states: after steps 1, 2, …, one hash per rank.
        healthy: of the reference, at least as long.
    """
    claims = [event for event in events if event["kind"] == "repaired"]
    first = claims[0]["step"] if claims else None
    alike = [own == other for own, other in zip(states, healthy, strict=False)]
    if not states or len(alike) < len(states) or not all(alike[: max(strike.step - 1, 0)]):
        return RepairVerdict("wrong state", first)
    if fault is None:
        return RepairVerdict("claimed" if claims else "untouched" if all(alike) else "wrong state", first)
    settled = response.settled(strike.step)
    if first is not None and not fault.again and strike.step <= first < settled:
        settled = first  # a finding has the replicas compared before the interval does
    words = tuple(phrase.format(rank=strike.rank, ranks=strike.ranks, step=strike.step) for phrase in fault.repair_says)
    if not fault.repaired:
        if claims:
            return RepairVerdict("claimed", first)
        told = [e for e in events if tells(e) and e["step"] == settled and says(e, words)]
        if not told:
            return RepairVerdict("not said")
        if tuple(told[0]["ranks"]) != fault.mended_ranks(strike):
            return RepairVerdict("wrong ranks", settled)
        return RepairVerdict("wrong state" if any(alike[settled - 1 :]) else "given up", settled)
    if not claims:
        return RepairVerdict("not repaired")
    expected = range(settled, len(states) + 1) if fault.again else (settled,)
    if [claim["step"] for claim in claims] != list(expected):
        return RepairVerdict("wrong step", first)
    if any(tuple(claim["ranks"]) != fault.mended_ranks(strike) for claim in claims):
        return RepairVerdict("wrong ranks", first)
    if not all(says(claim, words) for claim in claims):
        return RepairVerdict("wrong words", first)
    equal = alike if response.exact else [len(set(ranks)) == 1 for ranks in states]
    return RepairVerdict("repaired" if all(equal[settled - 1 :]) else "wrong state", first)
