"""Leave the other ranks: publish what is under way, and say that nothing more comes from this rank.

leaving.publish_early(closed=True)      # the last measured step, as far as it goes without the others
leaving.say_goodbye(broken=False)       # if they go on, they do not wait for this rank's next observation
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.distributed as dist

from ds_silent.capture.step import StepCapture
from ds_silent.distributed.communicator import outlive_python
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.gather import Exchange
from ds_silent.exchange.observation import LEFT, Observation, Status, on_any
from ds_silent.observing.lockstep import Lockstep
from ds_silent.observing.publisher import Publisher
from ds_silent.records import Event

logger = logging.getLogger("ds_silent")

_PATIENCE = 5.0  # seconds, in which ranks that are well send what they have measured
_GOODBYE = Observation(Status(nothing=1.0, failed=LEFT))


class Leaving:
    """The end of one training, or of a part of it.

    Attributes:
        unanswered: what a collective raised as its result was read, the newest; None where all have come.
    """

    def __init__(
        self,
        capture: StepCapture,
        exchange: Exchange,
        publisher: Publisher,
        observing: Callable[[], bool],
        switch_off: Callable[[Event], None],
    ):
        """``observing``: whether this rank does; ``switch_off``: stops all ranks, which have read why."""
        self._capture, self._exchange, self._publisher = capture, exchange, publisher
        self._guard, self._observing, self._switch_off = capture.guard, observing, switch_off
        self.unanswered: Exception | None = None

    @property
    def _lockstep(self) -> Lockstep:
        lockstep: Lockstep = self._guard.state
        return lockstep

    def publish_early(self, closed: bool, broken: bool = False) -> None:
        """Write what is under way, as far as it goes without the others.

        ``closed``: they come no more. ``broken``: this rank alone may have ended, while the others wait for it in the
        training's own collectives, and never send what is waited for here.
        """
        for arrived in self._under_way(_PATIENCE if broken else None) if self._observing() else ():
            _, event = self._lockstep.of(arrived)
            if event is not None and event.kind == "observer-off":
                if not (closed and _all_measured(arrived)):
                    if closed and not _all_leave(arrived):
                        self._switch_off(event)
                    return
            elif event is not None and closed:
                self._guard.cleanup(self._publisher.recorder.report, event)
            self._guard.cleanup(self._publisher.early, arrived, closed)  # what comes after it all ranks read alike

    def _under_way(self, seconds: float | None) -> Iterator[Arrived]:
        """Wait for what was posted last; for so long, if that is not None."""
        try:
            if seconds is not None and not self._exchange.arrives(seconds):
                raise TimeoutError(f"the others have sent nothing for {seconds:g} s")
            yield from self._exchange.under_way()
        except Exception as error:  # a peer is gone: what it did not send cannot be published
            self.unanswered = error
            logger.warning("ds_silent: the last measured step could not be collected: %s", error)

    def say_goodbye(self, broken: bool) -> None:
        """If the other ranks go on, their next observation must not wait for this one. No rank waits for it here.

        They may never come to that: where this rank has broken off, they wait for it elsewhere. ``broken``: an error
        ends the training here. If it ends all ranks in the same step, as a gradient of NaN does, that step is judged.
        """
        if self._guard.over or not dist.is_initialized():
            return
        last = (self._guard.local(self._unfinished) if broken and self.unanswered is None else None) or _GOODBYE
        self._guard.run(lambda: self._exchange.post(self._capture.step, last, self._guard))
        if last is not _GOODBYE:
            self.publish_early(closed=True, broken=True)
        outlive_python(self._capture.group)

    def _unfinished(self) -> Observation | None:
        """Observe a step whose gradient is reduced, and which may not be sent yet; None where there is no such step."""
        moments, lockstep = self._capture.moments, self._lockstep
        if not (moments.measured and moments.reduction_read and lockstep.whole):
            return None
        observation = self._capture.observation(exact=False)
        status = lockstep.status(self._capture.step, observation.status)
        return None if status.failed else replace(observation, status=replace(status, failed=LEFT))


def _all_leave(arrived: Arrived) -> bool:
    """Whether the other ranks have only left, as this one does now: an interrupt finds them at different places."""
    return set(arrived.known.status.failed.tolist()) <= {0.0, LEFT}


def _all_measured(arrived: Arrived) -> bool:
    """Whether all ranks left in the same step, each with what it has measured of it."""
    status = arrived.known.status
    same = len(set(status.boundary.tolist())) == 1
    return same and arrived.make is not None and bool((status.failed == LEFT).all()) and not on_any(status.nothing)
