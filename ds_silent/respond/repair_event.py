"""Make the event of a response: what was done, whether it is right now, and what it cost."""

from __future__ import annotations

from ds_silent.distributed.parts import listed
from ds_silent.records import Event, EventKind, Repair
from ds_silent.text import named, size_text

SHOWN = 3
_ATTEMPTS = {1: "once", 2: "twice"}


def repair_event(repair: Repair, world_size: int) -> Event:
    """``repaired`` where a check afterwards found everything right; else an error of the fault's own kind."""
    reduction = repair.method == "retry"
    where = "aggregated gradient" if reduction else _where(repair.tensors)
    cost = f"It took {repair.seconds:.3g} s and {size_text(repair.bytes)} sent per rank."
    times = _ATTEMPTS.get(repair.attempts, f"{repair.attempts} times")
    if repair.done:
        message = f"{_done(repair, times, where, world_size)} {cost}"
        remedy = "Nothing to do for this one; if it comes again, look at the hardware of the rank that the fault names."
        score, bound = repair.error, repair.bound
        return Event(repair.step, "repaired", "info", repair.ranks, where, score, bound, message, remedy)
    kind: EventKind = "aggregation-error" if reduction else "replica-drift"
    if reduction:
        message = f"The reduction of step {repair.step} was repeated {times} and stayed wrong."
        remedy = (
            "The fault is no passing one: look for what the event before this one names, and go back to the last "
            'checkpoint before it; with respond.on_failed_retry "report" the last result is applied, "stop" ends the '
            "training before that."
        )
    else:
        tried = f"{repair.method}, tried {times}"
        message = f"The replicas could not be made equal after step {repair.step} ({tried}): {_why(repair)}"
        remedy = 'Go back to a checkpoint whose hashes agree; respond.on_replica_drift "stop" would end the training.'
    message = f"{message} {cost}"
    return Event(repair.step, kind, "error", repair.ranks, where, repair.error, repair.bound, message, remedy)


def _done(repair: Repair, times: str, where: str, world_size: int) -> str:
    step = repair.step
    if repair.method == "retry":
        again = f"The reduction of step {step} was repeated {times} and is right now, before the optimizer used it"
        if repair.error is None or repair.bound is None:
            return f"{again}."
        return f"{again}: the error is {repair.error:.2g} of what it should be, rounding explains {repair.bound:.2g}."
    if repair.method == "majority":
        whose = named(repair.ranks, world_size)
        return f"After step {step} {whose} got the bits of the other ranks in {where}; all replicas are equal again."
    mean = f"in {where} every rank holds the ranks' mean; all replicas are equal again."
    if repair.method == "mean":
        return f"After step {step}, {mean}"
    beside = f"Averaged beside the forward and backward of step {step}: {mean}"
    assert repair.next_interval is not None
    return f"{beside} The next comparison comes after step {step - 1 + repair.next_interval}."


def _why(repair: Repair) -> str:
    if repair.method == "majority" and not repair.bytes:
        return f"no version of {_where(repair.tensors)} is held by more than half of the ranks."
    return f"they still differ after it, in {_where(repair.tensors)} or elsewhere."


def _where(tensors: tuple[str, ...]) -> str:
    return listed(tensors, SHOWN, "tensors") or "the replica"
