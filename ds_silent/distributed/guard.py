"""Keep collectives matched across ranks when one rank raises. The one rule of every line that runs in a step:

    guard = CollectiveGuard(group)
    guard.run(step)                               # an entry: the training calls it, on every rank at the same moments
        guard.local(measure, gradient)            # in it: what touches only this rank
        guard.collective(lambda: all_reduce(x))   # in it: a collective, or what decides whether there is one

``local()`` may fail; ``collective()`` runs on every rank; if anything else raises, the block is run once more with the
recorded results.

* **local**: the first error is kept and logged once. From then on this rank skips its local parts, and its next
  observation says "failed". Every rank reads that at its next step, and all stop observing together.
* **collective**: every rank makes the same calls in the same order. In a second run a call returns what it returned in
  the first, so this rank reaches the collectives that its peers wait in. One that has returned is not made again.
* **agreed**: the same without a collective: for a value read from state that this block changes. The second run must
  see the first run's value. :attr:`CollectiveGuard.state` needs no such call, as a second run begins with the first's.
* **cleanup**: what is tried also after a failure, such as removing a hook.

What raises in both runs, or in a response (:meth:`CollectiveGuard.irrevocable`), which changes the training, ends the
training on this rank with a sentence. Its peers wait until its process ends (gloo: their collective raises; launchers
end all) and no longer than the group's timeout. A collective that has waited for the whole time-out ends the training
with the transport's own error, because the training's next one would wait for the same peer as long once more. One that
breaks otherwise in the second run ends the observation on this rank only.
Only :class:`Exception` is caught: a KeyboardInterrupt or SystemExit goes its way.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

logger = logging.getLogger("ds_silent")
_Result = TypeVar("_Result")


class CollectiveCall(Protocol):
    """Type of :meth:`CollectiveGuard.collective` and of :func:`unguarded`."""

    def __call__(self, function: Callable[[], _Result], /) -> _Result: ...


def unguarded(function: Callable[[], _Result], /) -> _Result:
    """Stand in for :meth:`CollectiveGuard.collective` or ``local``, where an error may reach the caller."""
    return function()


class Unobservable(Exception):
    """Raise for what cannot be observed of a training: not an internal error."""


class SparseGradientError(Unobservable):
    """Raise for a gradient of which only some rows are there."""


class UnevenInputsError(Unobservable):
    """Raise where the ranks take different numbers of steps, by design."""


class WithinBackwardError(Unobservable):
    """Raise where an optimizer steps from a backward's own hooks."""


class BrokeOff(RuntimeError):
    """End the training: the other ranks would wait for this one, or differ from it."""


class _GroupBroke(Exception):
    """Carry the error of a collective."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def _timed_out(error: Exception) -> bool:
    """Tell whether a transport has timed out; gloo, NCCL and HCCL all raise a RuntimeError that says so in words."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)


class _Attempts:
    """Keep the results of a block's calls, in order, how many the run under way has come to, and how it began."""

    def __init__(self, call: Any = None, state: Any = None):
        self.call, self.state, self.place = call, state, 0
        self.made: list[Any] = []


class CollectiveGuard:
    """Guard one rank's part of every step; see the module docstring.

    Attributes:
        failure: the first internal error; it stays, for all ranks switch off when they read that there was one.
        over: nothing is run any more, because the observation has ended or the process group is broken.
        state: a frozen value that all ranks have alike; a second run begins with the one that the first began with.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.failure: Exception | None = None
        self.over = False
        self.state: Any = None
        self._group = group
        self._runs = [
            _Attempts()
        ]  # the innermost last: a callback within one may close the observer, which runs a block too
        self._irrevocable = False

    def fail(self, error: Exception) -> None:
        """Remember the first internal error and say it once; the next observation tells all ranks."""
        if self.failure is None:
            error = error.error if isinstance(error, _GroupBroke) else error
            self.failure = error
            if isinstance(error, Unobservable):
                logger.warning("ds_silent: %s", error)
                return
            raised = traceback.extract_tb(error.__traceback__)[-1:]
            where = "".join(f" ({os.path.basename(one.filename)}, line {one.lineno}: {one.line})" for one in raised)
            rank, kind = dist.get_rank(), type(error).__name__
            logger.warning("ds_silent: internal error on rank %d: %s: %s%s", rank, kind, error, where)

    def local(self, function: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result | None:
        """Run what touches only this rank. Return None where it raises, and without a call ever after."""
        try:
            if self.failure is None:
                return function(*arguments, **named)
        except Exception as error:
            self.fail(error)
        return None

    def cleanup(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Run what has to be tried also after a failure, such as removing a hook."""
        try:
            function(*arguments, **named)
        except Exception as error:
            self.fail(error)

    def run(self, act: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result | None:
        """Run a block, and once more where it raises.

        Returns:
            its result; None where the process group is broken, which the training is about to meet by itself.

        Raises:
            BrokeOff: it raised twice, or in what cannot be run twice.
            RuntimeError: a collective's own, which has timed out.
        """
        try:
            if self.over:
                return None
            self._runs.append(_Attempts(named, self.state))
            # in one statement: a block that has ended is never run again, with its calls forgotten
            return (act(*arguments, **named), self._runs.pop())[0]
        except BrokeOff:
            raise
        except Exception as error:
            return self._again(error, act, arguments, named)

    def _again(self, error: Exception, act: Callable[..., _Result], arguments: Any, named: Any) -> _Result | None:
        self._end_if_timed_out(error)
        self.fail(error)
        if self._runs[-1].call is not named:  # it broke before it had begun
            self._runs.append(_Attempts(named, self.state))
        self._runs[-1].place, self._irrevocable, self.state = 0, False, self._runs[-1].state
        try:
            return act(*arguments, **named)
        except BrokeOff:
            raise
        except _GroupBroke as broken:
            self._end_if_timed_out(broken)
            self.over = True
            logger.warning("ds_silent: observation ends on this rank, the training goes on: %s", broken)
            return None
        except Exception as second:
            raise self._broke_off("what all ranks do together", second) from second
        finally:
            self._runs.pop()

    def _end_if_timed_out(self, error: Exception) -> None:
        """Raise what has timed out: no rank waits again, in a second run or in the training's own next collective."""
        if isinstance(error, _GroupBroke) and _timed_out(error.error):
            self.failure, self.over = self.failure or error.error, True
            raise error.error

    def collective(self, function: Callable[[], _Result]) -> _Result:
        """Make a call that every rank makes; in a second run, return what it returned in the first."""

        def called() -> _Result:
            try:
                return function()
            except BrokeOff:
                raise
            except Exception as error:
                raise _GroupBroke(error) from error

        return function() if self._irrevocable else self.agreed(called)

    def agreed(self, function: Callable[[], _Result]) -> _Result:
        """Return a value that every rank has alike; in a second run, the one of the first."""
        if self._irrevocable:
            return function()
        block = self._runs[-1]
        if block.place == len(block.made):
            block.made.append(function())
        block.place += 1
        result: _Result = block.made[block.place - 1]
        return result

    def irrevocable(self, what: str, function: Callable[[], _Result]) -> _Result:
        """Run once, to the end, what changes the training: many collectives that are not repeated one by one.

        Raises:
            BrokeOff: it broke; ``what`` names it.
        """
        return self.collective(lambda: self._to_the_end(what, function))

    def _to_the_end(self, what: str, function: Callable[[], _Result]) -> _Result:
        self._irrevocable = True
        try:
            return function()
        except Exception as error:
            raise self._broke_off(what, error) from error
        finally:
            self._irrevocable = False

    def _broke_off(self, what: str, error: Exception) -> BrokeOff:
        return BrokeOff(
            f"ds_silent: {what} broke off on rank {dist.get_rank(self._group)} ({error}); the ranks may differ now: "
            "start again from the last checkpoint"
        )
