"""Judge from events and losses whether a fault was found, and from states whether it was repaired. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ds_silent.drill.faults.fault import Fault, Response
from ds_silent.drill.faults.injection import Target

Answer = Literal["found", "missed", "wrong kind", "wrong ranks", "wrong cause", "false alarm", "below rounding"]


@dataclass(frozen=True)
class FaultVerdict:
    """``step`` and ``ranks`` are those of the event that decided; ``late``: a deterministic fault's came too late.

    ``below rounding``: the corruption was no larger than twice what rounding alone explains at that step, so it is not
    sure to be seen in the numbers, and nothing was said.
    """

    answer: Answer
    step: int | None = None
    kind: str | None = None
    ranks: tuple[int, ...] = ()
    late: bool = False
    also: tuple[str, ...] = ()  # other kinds that were reported

    @property
    def found(self) -> bool:
        return self.answer == "found"

    @property
    def right(self) -> bool:
        """Found in time; or too small to be seen, and no alarm."""
        return (self.found and not self.late) or self.answer == "below rounding"


def alarms(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events that ask for attention: information and ends do not."""
    return [event for event in events if event["severity"] != "info"]


def tells(event: Mapping[str, Any]) -> bool:
    """Whether it is about something that is wrong: an alarm, or an effect of a fault that another event tells."""
    return event["severity"] != "info" or event.get("follows") is not None


def judge_healthy(events: Sequence[Mapping[str, Any]]) -> FaultVerdict:
    """A run without a fault must end without an alarm."""
    raised = alarms(events)
    return FaultVerdict("missed") if not raised else _verdict("false alarm", raised[0], raised)


def judge(
    fault: Fault,
    target: Target,
    events: Sequence[Mapping[str, Any]],
    interval: int,
    replica_interval: int = 0,
    change: float | None = None,
    rounding: float | None = None,
) -> FaultVerdict:
    """Judge by the first event of the right kind, ranks and cause; any alarm before the fault is a false one.

    Args:
        interval: optimizer steps between measurements.
        replica_interval: optimizer steps between two comparisons of the replicas; 0 is never.
        change: relative length of the corruption, where the injection knows it.
        rounding: relative length of the largest error that rounding explains at the fault's step.
    """
    raised = alarms(events)
    # What is there from the start may be seen in the preflight, at step 0.
    start = target.step if target.step > 1 else 0
    for event in raised:
        if event["step"] < start:
            return _verdict("false alarm", event, raised)
    kinds = [event for event in events if event["kind"] in fault.kinds and tells(event)]
    expected = fault.expected_ranks(target)
    right = [event for event in kinds if tuple(event["ranks"]) in expected]
    # a "step before" that was not measured is not known
    told = [event for event in right if interval > 1 or says(event, target.named_in(fault.says))]
    if told:
        late = fault.deterministic and told[0]["step"] > due(fault, target, interval, replica_interval)
        return _verdict("found", told[0], raised, late)
    if right:
        return _verdict("wrong cause", right[0], raised)
    # rounding itself may take as much off the error as it may add to it: above twice the bound nothing can hide
    if not raised and change is not None and rounding is not None and change <= 2.0 * rounding:
        return FaultVerdict("below rounding")
    if kinds:
        return _verdict("wrong ranks", kinds[0], raised)
    return _verdict("wrong kind", raised[0], raised) if raised else FaultVerdict("missed")


def due(fault: Fault, target: Target, interval: int, replica_interval: int) -> int:
    """Return the optimizer step at which a deterministic fault must be found."""
    if fault.response is not None:
        return fault.response.compared(target.step)
    if fault.strikes == "replica" and replica_interval:
        return first_compared(target.step, interval, replica_interval) + (fault.comparisons - 1) * interval
    return first_measured(target.step, interval)


def first_compared(after: int, interval: int, replica_interval: int) -> int:
    """Return the first measured step that compares the replicas as the update of step ``after`` has left them."""
    step = first_measured(after + 1, interval)
    while step // replica_interval == (step - interval) // replica_interval:
        step += interval
    return step


def says(event: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Whether an event holds all these phrases, as whole words."""
    text = f"{event.get('message', '')} {event.get('where', '')}"
    return all(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) for phrase in words)


def first_measured(step: int, interval: int) -> int:
    """Return the first measured optimizer step that is not before ``step``; 0 is the preflight."""
    return -(-step // interval) * interval


def loss_shift(losses: Sequence[float], healthy: Sequence[float], first: int, last: int) -> float | None:
    """Measure how far the averaged loss went from the healthy run's during the fault, in the latter's deviations.

    Both runs start from the same weights and take the same rows, so at each step their losses are compared in pairs;
    a person who watches one curve has no such pair and sees less. None: no step of both runs lies within.

    Args:
        losses, healthy: averaged over the ranks at steps 1, 2, …
        first, last: steps at which the fault began, and at which it was found or the run ended.
    """
    pairs = list(zip(losses, healthy, strict=False))[max(first, 1) - 1 : last]
    if not pairs or len(healthy) < 2:
        return None
    mean = sum(a - b for a, b in pairs) / len(pairs)  # NaN stays NaN
    spread = statistics.stdev(healthy)
    return mean / spread if spread > 0 else None


def _verdict(
    answer: Answer, event: Mapping[str, Any], raised: Sequence[Mapping[str, Any]], late: bool = False
) -> FaultVerdict:
    also = dict.fromkeys(other["kind"] for other in raised if other["kind"] != event["kind"])
    return FaultVerdict(answer, event["step"], event["kind"], tuple(event["ranks"]), late, tuple(also))


# -- Was it repaired, and only what could be? --------------------------------------------------------------------------
#
# ``states`` and ``healthy`` hold a hash per rank for every step, the latter of the training without a fault: an event
# that says "repaired" is believed only when they agree.

States = Sequence[tuple[str, ...]]
RightRepair = Literal["untouched", "repaired", "given up"]
WrongRepair = Literal["not repaired", "claimed", "wrong step", "wrong ranks", "wrong words", "wrong state", "not said"]


@dataclass(frozen=True)
class RepairVerdict:
    """``step``: of the first ``repaired`` event, or of the error that says that it was not.

    ``untouched``: healthy, and left alone. ``given up``: it could not be repaired, and that was said. ``claimed``: said
    to be repaired where nothing was, or where nothing could be. ``wrong state``: weights or optimizer state are not
    what they must be: after a repair, or because a fault that cannot be repaired left no trace.
    """

    answer: RightRepair | WrongRepair
    step: int | None = None

    @property
    def right(self) -> bool:
        return self.answer in get_args(RightRepair)


def judge_repair(
    fault: Fault | None,
    target: Target,
    response: Response,
    events: Sequence[Mapping[str, Any]],
    states: States,
    healthy: States,
) -> RepairVerdict:
    """Judge what the response has made of a fault, or of none; ``healthy`` is at least as long as ``states``."""
    claims = [event for event in events if event["kind"] == "repaired"]
    first = claims[0]["step"] if claims else None
    alike = [own == other for own, other in zip(states, healthy, strict=False)]
    if not states or len(alike) < len(states) or not all(alike[: max(target.step - 1, 0)]):
        return RepairVerdict("wrong state", first)
    if fault is None:
        return RepairVerdict("claimed" if claims else "untouched" if all(alike) else "wrong state", first)
    settled = response.settled(target.step)
    if first is not None and not fault.again and target.step <= first < settled:
        settled = first  # a finding has the replicas compared before the interval does
    words = target.named_in(fault.repair_says)
    if not fault.repaired:
        if claims:
            return RepairVerdict("claimed", first)
        told = [e for e in events if tells(e) and e["step"] == settled and says(e, words)]
        if not told:
            return RepairVerdict("not said")
        if tuple(told[0]["ranks"]) != fault.mended_ranks(target):
            return RepairVerdict("wrong ranks", settled)
        return RepairVerdict("wrong state" if any(alike[settled - 1 :]) else "given up", settled)
    if not claims:
        return RepairVerdict("not repaired")
    expected = range(settled, len(states) + 1) if fault.again else (settled,)
    if [claim["step"] for claim in claims] != list(expected):
        return RepairVerdict("wrong step", first)
    if any(tuple(claim["ranks"]) != fault.mended_ranks(target) for claim in claims):
        return RepairVerdict("wrong ranks", first)
    if not all(says(claim, words) for claim in claims):
        return RepairVerdict("wrong words", first)
    equal = alike if response.exact else [len(set(ranks)) == 1 for ranks in states]
    return RepairVerdict("repaired" if all(equal[settled - 1 :]) else "wrong state", first)
