"""Do all ranks send their samples at the same place of the training? Counted here, compared when a sample is read.

    lockstep = Lockstep(step)          # the same step on every rank, agreed before
    lockstep.scheduled                 # the step by which everything that communicates is timed
    lockstep.words(step)               # travel with every sample
    lockstep.read(gathered)            # why all ranks stop observing, or None; the same on every rank

A framework's own step is one rank's affair: a checkpoint loaded there, a step left out. What pairs between ranks, by
itself, is the training's reductions. So what communicates is timed by their number, and where the steps of all ranks
have moved together, by what all have read of each other.
"""

from __future__ import annotations

from ds_silent.exchange import Gathered
from ds_silent.records import Event

BROKE, LEFT, ASTRAY, UNSEEN = 1.0, 2.0, 3.0, 4.0
"""Values of the scalar ``failed``: an internal error; the observer was closed there; gradients were reduced and no step
taken; a gradient that cannot be observed."""
EXACT = 1 << 24  # whole numbers below it are exact in fp32


class SparseGradientError(Exception):
    """A gradient that cannot be observed: not an error of ours."""


class Lockstep:
    """See the module docstring."""

    def __init__(self, step: int):
        self._base, self._count = step, 0
        self._read = step, 1  # base and allowed as read; valid from the next boundary on, whenever a rank has read them
        self._reductions, self._allowed = 0, 1  # since the last step, of all ranks alike
        self._astray = False

    @property
    def scheduled(self) -> int:
        """The step under way."""
        return self._base + self._count

    @property
    def whole(self) -> bool:
        """Whether the step under way has been observed from its beginning."""
        return self._reductions <= self._allowed

    def reduction(self) -> bool:
        """The gradients of a boundary are about to be reduced; whether the step before was left out."""
        self._reductions += 1
        self._astray |= not self.whole
        return not self.whole

    def passed(self) -> None:
        """The sample of the step under way has been sent, if it was due: the next one begins."""
        self._count += 1
        self._base, self._allowed = self._read

    def stepped(self) -> None:
        """The optimizer has run."""
        self._reductions = 0

    def words(self, step: int) -> dict[str, float]:
        """Scalars of a sample; ``step`` is the framework's own."""
        words = {"step": float(step % EXACT), "boundary": float(self._count % EXACT)}
        if self._astray:
            words["failed"] = ASTRAY
            self._astray = False
        return words

    def read(self, gathered: Gathered) -> Event | None:
        """What a sample says of all ranks; every rank reads every sample, in the same order."""
        failed, steps, boundaries = (gathered.scalars[name].tolist() for name in ("failed", "step", "boundary"))
        if all(word == ASTRAY for word in failed):  # all alike: several backward passes make one step here
            self._read = self._read[0], self._allowed + 1
            return None
        if any(failed):
            return stopping(gathered.step, failed)
        if len(set(steps)) > 1 or len(set(boundaries)) > 1:
            return apart(gathered.step, steps, boundaries)
        ahead = (int(steps[0]) - int(boundaries[0]) - self._base) % EXACT  # not 0 where all have moved together
        self._read = self._base + (ahead - EXACT if ahead > EXACT // 2 else ahead), self._read[1]
        return None


def stopping(step: int, failed: list[float]) -> Event:
    """The event of the worst that some ranks have said."""
    code = next(code for code in (BROKE, UNSEEN, ASTRAY, LEFT) if code in failed or code == LEFT)
    ranks = tuple(rank for rank, word in enumerate(failed) if word == code)
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    remedy = "The training is not affected; please report the warning that the rank printed."
    if code == LEFT:
        message = f"The observer was closed on {names} and not on the others; all stop observing at step {step}."
        remedy = "Close it on every rank at the same step, or on none: it closes itself at the end."
    elif code == ASTRAY:
        message = f"At step {step} gradients were reduced on {names} without a step after it; all stop observing."
        remedy = "Call engine.step() after every backward, on every rank."
    elif code == UNSEEN:
        message = f"On {names} a gradient at step {step} is sparse, which cannot be observed; all stop observing."
        remedy = "Make the module with sparse=False, if it is to be observed."
    else:
        message = f"ds_silent broke on {names} at step {step} and stopped observing."
    return Event(step, "observer-off", "warning", ranks, None, None, None, message, remedy)


def apart(step: int, steps: list[float], boundaries: list[float]) -> Event:
    """The event of ranks that count another step, or another number of reductions."""
    values = list(zip(steps, boundaries, strict=True))
    most = max(values, key=values.count)
    odd = tuple(r for r, value in enumerate(values) if value != most) if 2 * values.count(most) > len(values) else ()
    which = steps if len(set(steps)) > 1 else boundaries
    what = "are at another step" if which is steps else "have reduced gradients another number of times"
    shown = ", ".join(f"{int(value)} on {which.count(value)} of them" for value in sorted(set(which))[:3])
    named = f"ranks {', '.join(map(str, odd))} {what} than the others" if len(odd) > 1 else f"some ranks {what}"
    if len(odd) == 1:
        named = f"rank {odd[0]} {what.replace('are', 'is', 1).replace('have', 'has', 1)} than the others"
    message = f"At step {step} {named} ({shown}), so their gradients do not belong together; all stop observing."
    remedy = "Load the same checkpoint and take the same steps on every rank."
    return Event(step, "observer-off", "warning", odd, None, None, None, message, remedy)
