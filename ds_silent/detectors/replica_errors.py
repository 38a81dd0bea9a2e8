"""Report replicas that differ: bits that must be equal are compared as bits.

Nobody is named where two ranks differ from each other and neither is more than half of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.distributed.parts import Parts, listed, outvoted
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, StepRecord
from ds_silent.replicas.compare import Drift
from ds_silent.replicas.own_parts import BUFFER, STATE
from ds_silent.text import named

SHOWN = 3


class ReplicaErrors(Detector):
    """Report replicas that differ. They are compared now and then: what was found stands until the next comparison."""

    of_any_step = True

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._equal_at: int | None = None  # the newest step at which they were seen equal

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        seen = evidence.reduction
        if seen is not None and seen.replicas is not None:
            self._found = replicas(record, seen.replicas, seen.drift, self._equal_at)
            self._equal_at = record.step if len(seen.replicas) == 1 else self._equal_at
        drift = None if seen is None else seen.drift
        self.notes = () if drift is None or not drift.own else (_own_parts(record, drift.own),)
        return self._found


def replicas(record: StepRecord, groups: Parts, drift: Drift | None, equal_at: int | None = None) -> list[Finding]:
    """Find replicas that differ in a comparison; ``equal_at``: a step that found them equal, where one did."""
    if len(groups) < 2:
        return []
    odd = outvoted(groups)
    if odd:
        versions = f"{named(odd, record.world_size)} {'differs' if len(odd) == 1 else 'differ'} from the others."
    else:
        shown = "; ".join(named(group) for group in groups[:4])
        versions = f"no group of equal ones is a majority ({shown}{'; …' if len(groups) > 4 else ''})."
    message = f"The replicas hold different bits: {versions}"
    where, since = "replica", record.step
    if drift is not None and drift.names:
        where = listed(drift.names, SHOWN)
        message += f" They differ in {where}."
        if drift.since is not None:
            since = max(drift.since, 0)
            first, which = since if drift.earliest is None else drift.earliest, f"that of step {since}"
            if first != since:
                before = "or they differed from the start" if since == 1 else "or an earlier one"
                which = f"one of those of steps {first} to {since}" if first else f"{which} {before}"
            message += f" The first update that left them apart was {which}."
    elif equal_at is not None and equal_at < record.step - 1:  # the others come no more: which tensors is not known
        message += f" The first update that left them apart was one of those of steps {equal_at} to {record.step - 1}."
        since = equal_at
    remedy = (
        "Copy a healthy rank's weights and optimizer state, or go back to a checkpoint whose hashes agree; look for "
        "a rank that skips updates, for code that writes weights on one rank only (an average put in, a checkpoint "
        "loaded), for memory errors, and for parameters that are never reduced."
    )
    return [Finding(f"replicas {groups}", "replica-drift", "error", odd, where, None, None, message, remedy, since)]


def _own_parts(record: StepRecord, names: tuple[str, ...]) -> Event:
    """Note buffers, or an optimizer's states, that differ between ranks and are compared no more."""
    where = listed(names, SHOWN)
    if names[0].startswith(STATE.strip()):
        message = f"The ranks hold other states of the optimizer, and equal weights still behind an update: {where}."
        message += " States are compared no more."
        remedy = "Do nothing where the optimizer deals its parameters to the ranks, as Muon's do. Else check its state."
        return Event(record.step, "replica-drift", "info", (), where, None, None, message, remedy)
    few = listed([name.removeprefix(BUFFER) for name in names], SHOWN)
    message = f"Buffers move on each rank by its own rows, differ, and are compared no more: {few}."
    remedy = (
        "Do nothing where they are running statistics. Reduce them over the ranks if they are meant to be equal, as a "
        "codebook or a router's bias is."
    )
    return Event(record.step, "replica-drift", "info", (), where, None, None, message, remedy)
