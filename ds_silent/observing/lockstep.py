"""Count where this rank is, and compare the ranks' counts: all must send their observations at the same place.

    lockstep = Lockstep(step, words=words)       # the same step on every rank: rank 0's
    lockstep.scheduled                           # the step by which everything that communicates is timed
    lockstep.status(step, own)                   # travels with every observation
    lockstep, event = lockstep.of(arrived)       # why all ranks stop observing, or that some count other steps, or None

A framework's own step is one rank's affair: a checkpoint loaded there, a step left out. What pairs between ranks, by
itself, is the training's reductions. So what communicates is timed by their number, and where the steps of all ranks
have moved together, by what all have read of each other. Where one rank alone counts another step than the others, as
with an older checkpoint, that is an error, and observation goes on by rank 0's step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ds_silent.distributed.parts import SHOWN_RANKS, outvoted, parts_of, ranks_of
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.observation import ASTRAY, BROKE, LEFT, UNEVEN, UNSEEN, WITHIN, Gathered, Status
from ds_silent.records import Event, EventKind, Severity
from ds_silent.text import TORCH, Words

EXACT = 1 << 24  # whole numbers below it are exact in fp32


@dataclass(frozen=True)
class Lockstep:
    """Count where this rank is; each moment returns a new value. See the module docstring.

    ``next_base`` and ``next_allowed`` take effect at the next boundary on every rank, even if ranks read them at
    different moments.
    """

    base: int
    count: int = 0
    reductions: int = 0  # since the last step
    allowed: int = 1  # of them, by all ranks alike
    unstepped: bool = False  # gradients were reduced without a step after it, and that was not sent yet
    next_base: int | None = None
    next_allowed: int = 1
    ahead_of_first: tuple[int, ...] = ()  # steps by which each rank counts more than the first; empty where none does
    words: Words = TORCH

    @property
    def scheduled(self) -> int:
        """Return the step under way, as all ranks count it."""
        return self.base + self.count

    @property
    def boundary(self) -> int:
        """Return the number of the step under way in this process, which no checkpoint takes back."""
        return self.count % EXACT

    @property
    def whole(self) -> bool:
        """Tell whether the step under way was observed from its beginning; not after a step that was left out."""
        return self.reductions <= self.allowed

    def reduction(self) -> Lockstep:
        """Count a reduction: the gradients of a boundary are about to be reduced."""
        more = replace(self, reductions=self.reductions + 1)
        return replace(more, unstepped=self.unstepped or not more.whole)

    def passed(self) -> Lockstep:
        """Begin the next step: the observation of this one has been sent, if it was due."""
        base = self.base if self.next_base is None else self.next_base
        return replace(self, count=self.count + 1, base=base, allowed=self.next_allowed)

    def stepped(self) -> Lockstep:
        """Forget the reductions: the optimizer has run, or what was reduced was never to be a step."""
        return replace(self, reductions=0)

    def sent(self) -> Lockstep:
        """Forget what the :meth:`status` that was sent has said."""
        return replace(self, unstepped=False)

    def status(self, step: int, own: Status[float | Tensor]) -> Status[float | Tensor]:
        """Add to an observation's status ``own`` where this rank is; ``step`` is the framework's own."""
        failed = own.failed if own.failed or not self.unstepped else ASTRAY
        return replace(own, failed=failed, step=float(step % EXACT), boundary=float(self.boundary))

    def of(self, arrived: Arrived) -> tuple[Lockstep, Event | None]:
        """Do as :meth:`read`, by what all ranks know; a rank that knows more words the event more exactly."""
        after, event = self.read(arrived.known)
        return after, event and ((arrived.make and self.read(arrived.all)[1]) or event)

    def read(self, gathered: Gathered) -> tuple[Lockstep, Event | None]:
        """Compare the ranks' observations; every rank reads all of them, in the same order."""
        status = gathered.status
        failed, steps, boundaries = (values.tolist() for values in (status.failed, status.step, status.boundary))
        if all(word == ASTRAY for word in failed):  # all alike: several backward passes make one step here
            return replace(self, next_allowed=self.allowed + 1), None
        if any(failed):
            return self, stop_event(gathered.step, failed, self.words)
        if len(set(boundaries)) > 1:
            return self, out_of_sync_event(gathered.step, boundaries)
        ahead = (int(steps[0]) - int(boundaries[0]) - self.base) % EXACT  # not 0 where all have moved together
        after = replace(self, next_base=self.base + (ahead - EXACT if ahead > EXACT // 2 else ahead))
        others = tuple(int(step - steps[0]) for step in steps) if len(set(steps)) > 1 else ()
        same = [*map(_sign, others)] == [*map(_sign, self.ahead_of_first)]  # one that steps twice goes on to part
        if same or not others:
            return replace(after, ahead_of_first=others), None
        return replace(after, ahead_of_first=others), elsewhere_event(gathered.step, steps, boundaries)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


_STOPS = {  # by the word that a rank has sent, the worst first: what is said of step and ranks, and the remedy
    BROKE: (
        "ds_silent broke on {ranks} at step {step} and stopped observing.",
        "The training is not affected; please report the warning that the rank printed.",
    ),
    UNSEEN: (
        "On {ranks} a gradient at step {step} is sparse, which cannot be observed; all stop observing.",
        "Make the module with sparse=False, if it is to be observed.",
    ),
    UNEVEN: (
        "From step {step} on the ranks may take different numbers of steps (join()); all stop observing.",
        "Give every rank the same number of batches, if it is to be observed: drop the last, or fill it up.",
    ),
    WITHIN: (
        "On {ranks} an optimizer steps within the backward, so that no gradient is ever whole; all stop observing.",
        "Step the optimizers behind the backward, if the training is to be observed.",
    ),
    ASTRAY: (
        "At step {step} gradients were reduced on {ranks} without a step after it, and not on the others: a step was "
        "left out there, or a backward came twice, and what the ranks reduce or apply does not belong together any "
        "more; all stop observing.",
        "Call {call} after every backward, on every rank.",
    ),
    LEFT: (
        "The observer was closed on {ranks} and not on the others; all stop observing at step {step}.",
        "Close it on every rank at the same step, or on none: it closes itself at the end.",
    ),
}


def stop_event(step: int, failed: list[float], words: Words) -> Event:
    """Make the event of the worst that some ranks have said."""
    code = next((code for code in _STOPS if code in failed), LEFT)
    ranks = tuple(rank for rank, word in enumerate(failed) if word == code)
    message, remedy = (text.format(ranks=ranks_of(ranks), step=step, call=words.step) for text in _STOPS[code])
    severity: Severity = "error" if code == ASTRAY else "warning"
    return Event(step, "observer-off", severity, ranks, None, None, None, message, remedy)


def out_of_sync_event(step: int, boundaries: list[float]) -> Event:
    """Make the event of ranks that have reduced gradients another number of times: what they send does not pair."""
    odd = outvoted(parts_of(boundaries))
    named = _named(odd, "have", "reduced gradients another number of times", boundaries)
    message = f"At step {step} {named}, so their gradients do not belong together; all stop observing."
    remedy = "Load the same checkpoint and take the same steps on every rank."
    return Event(step, "observer-off", "error", odd, None, None, None, message, remedy)


def elsewhere_event(step: int, steps: list[float], boundaries: list[float]) -> Event:
    """Make the event of ranks that count another step, after as many reductions.

    Their gradients pair, their states do not belong together. Before the first step that comes of a checkpoint.
    """
    odd = outvoted(parts_of(steps))
    named = _named(odd, "are", "at another step", steps)
    kind: EventKind
    if any(boundaries):
        message = f"At step {step} {named}: a checkpoint was loaded, or a step taken, there alone."
        kind, where = "config-mismatch", "optimizer step"
    else:
        message = f"At step {step} {named}: another checkpoint was loaded there, or none."
        kind, where = "initial-weights-mismatch", "checkpoint"
    message += " The ranks' weights, optimizers and schedules need not be the same any more."
    remedy = "Load the same checkpoint and take the same steps on every rank."
    return Event(step, kind, "error", odd, where, None, None, message, remedy)


def _named(odd: tuple[int, ...], verb: str, what: str, counts: list[float]) -> str:
    parts = {count: tuple(rank for rank, own in enumerate(counts) if own == count) for count in sorted(set(counts))}
    few = len(counts) <= SHOWN_RANKS
    each = [f"{int(count)} on {ranks_of(part) if few else f'{len(part)} of them'}" for count, part in parts.items()]
    shown = ", ".join(each[:3])
    if len(odd) == 1:
        verb = {"are": "is", "have": "has"}[verb]
    named = f"{ranks_of(odd)} {verb} {what} than the others" if odd else f"some ranks {verb} {what}"
    return f"{named} ({shown})"
