"""Act on what is wrong: the only code that changes a training, and only where the configuration asks for it.

    responder = Responder(capture, exchange, checker, config)
    responder.before_update(step, due)   # repeat the reduction until it is right; bring an averaging to its end
    responder.after_update(step, due)    # replicas are compared and made equal
    responder.take(step)                 # what was found and done up to a step, for its record and the events

Every rank calls every method at the same steps, and all take every decision alike: from what was gathered, or by a
vote; where one rank's own examination broke, it says so, and no rank responds. From the decision on a response is
irrevocable: what breaks in it ends the training, because ranks might differ. Nothing is called repaired that was not
compared again afterwards.

A fault that is there once is undone without a trace: a reduction is repeated from the local gradients, which are bit
for bit those of the first attempt, and a replica that drifted in an update gets its bits back before the next forward.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.parts import Parts
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.gather import Exchange
from ds_silent.exchange.observation import on_any
from ds_silent.kernels.checksums import Bits, Replica
from ds_silent.measure.evidence import ReductionCheck, ResponseLog
from ds_silent.measure.reduction_check import ReductionChecker
from ds_silent.records import Repair, RepairMethod
from ds_silent.replicas.compare import Comparison, Drift, compare, gathered
from ds_silent.replicas.repair import Averaging, average, restore

_Note = TypeVar("_Note")
_Result = TypeVar("_Result")
_UNKNOWN = 2  # beats every other vote
SAMPLE = 64  # every so many elements tell the drift, for the next interval of the dynamic averaging


class _Notes:
    """What was found and done, by step, until a record takes it."""

    def __init__(self) -> None:
        self.reductions: list[tuple[int, ReductionCheck]] = []
        self.comparisons: list[tuple[int, tuple[Parts, Drift | None]]] = []
        self.repairs: list[tuple[int, Repair]] = []

    def take(self, step: float) -> ResponseLog:
        """Everything up to ``step``, and forget it."""
        reductions, comparisons = _up_to(step, self.reductions), _up_to(step, self.comparisons)
        different = [compared for compared in comparisons if len(compared[0]) > 1]
        shown = different[:1] or comparisons[-1:]
        groups, drift = shown[0] if shown else (None, None)
        return ResponseLog(reductions[0] if reductions else None, groups, drift, tuple(_up_to(step, self.repairs)))


def _up_to(step: float, notes: list[tuple[int, _Note]]) -> list[_Note]:
    """Take what was noted at steps up to this one."""
    taken = [note for at, note in notes if at <= step]
    notes[:] = [(at, note) for at, note in notes if at > step]
    return taken


class Responder:
    """Run the responses of one training.

    Attributes:
        stop: why the training has to end now, the same on every rank; None when it may go on.
    """

    def __init__(
        self, capture: StepCapture, exchange: Exchange, checker: ReductionChecker, config: SilentConsistencyConfig
    ):
        self.stop: str | None = None
        self._capture = capture
        self._notes = _Notes()
        checks = config.respond.on_aggregation_error != "report"
        self._retry = _Retry(capture, exchange, checker, config) if checks else None
        framework = capture.framework
        keepers: list[_Keeper] = []
        on_drift, resync, attempts = config.respond.on_replica_drift, config.resync, config.respond.retries
        whole = resync.state == "all"
        if on_drift != "report":
            interval = config.integrity.replica_interval
            keepers.append(_Compare(capture, partial(framework.replica, True, True), interval, on_drift, attempts))
        if resync.mode == "periodic":
            replica = partial(framework.replica, whole, True)
            keepers.append(_Compare(capture, replica, resync.interval, "mean", attempts))
        if resync.mode == "dynamic":
            keepers.append(_Dynamic(capture, partial(framework.replica, whole, False), resync.interval))
        self._keepers = keepers

    @property
    def compares_replicas(self) -> bool:
        """Whether replicas are compared here, after an update, and need not be compared with the observations."""
        return bool(self._keepers)

    def communicates(self, step: int, due: bool) -> bool:
        """Whether ranks talk to each other about ``step``, by what all of them know."""
        return self._retry is not None or any(keeper.communicates(step, due) for keeper in self._keepers)

    def before_update(self, step: int, due: int) -> None:
        """Before the optimizer runs, after the step's observation was posted.

        ``step`` is the framework's own, ``due`` the same as all ranks count it (:mod:`ds_silent.observing.lockstep`).
        """
        if self._retry is not None:
            self.stop = self._retry.protect(step, self._notes)
        for keeper in self._keepers:
            self._to_the_end(step, partial(keeper.before_update, due, self._notes))

    def after_update(self, step: int, due: bool) -> None:
        """The optimizer has run. ``due``: compare now, whatever the interval says."""
        for keeper in self._keepers:
            self.stop = self._to_the_end(step, partial(keeper.after_update, step, due, self._notes)) or self.stop

    def _to_the_end(self, step: int, act: Callable[[], _Result]) -> _Result:
        return self._capture.guard.irrevocable(f"the response at step {step}", act)

    def take(self, step: float) -> ResponseLog:
        """What was found and done up to ``step``; it is forgotten then."""
        return self._notes.take(step)


class _Retry:
    """Let all ranks know that a reduction is right before an optimizer may use it."""

    def __init__(
        self, capture: StepCapture, exchange: Exchange, checker: ReductionChecker, config: SilentConsistencyConfig
    ):
        self._capture, self._exchange, self._checker, self._respond = capture, exchange, checker, config.respond

    def protect(self, step: int, notes: _Notes) -> str | None:
        """Why the training must stop, or None."""
        seen = self._examine(self._exchange.peek())
        if not self._anyone(None if seen is None else seen.wrong):
            return None
        guard = self._capture.guard
        return guard.irrevocable(f"the response at step {step}", lambda: self._correct(step, notes, seen))

    def _correct(self, step: int, notes: _Notes, seen: ReductionCheck | None) -> str | None:
        """The reduction is wrong, and every rank knows. ``seen``: by this one; None where its examination broke."""
        named = self._examine(self._exchange.in_full(self._capture.guard.collective))
        if seen is not None:
            notes.reductions.append((step, named or seen))
        if self._respond.on_aggregation_error == "stop":
            return 'respond.on_aggregation_error "stop"'
        if self._anyone(None if seen is None else seen.changed):
            # by the script, since the reduction: a repetition would apply what it has not changed
            return 'respond.on_failed_retry "stop"' if self._respond.on_failed_retry == "stop" else None
        framework = self._capture.framework
        started, sent = time.perf_counter(), 0
        for attempt in range(1, self._respond.retries + 1):
            sent += framework.reduce_again()
            self._exchange.post(step, self._capture.observation_again(), self._capture.guard)
            again = self._examine(self._exchange.peek())
            right = self._anyone(None if again is None else again.wrong) is False
            if right or attempt == self._respond.retries:
                check = None if again is None else again.check
                error, bound = (None, None) if check is None else (check.relative_error, check.rounding_bound)
                seconds = time.perf_counter() - started
                repair = Repair(step, "retry", right, attempt, sent, seconds, error=error, bound=bound)
                notes.repairs.append((step, repair))
            if right:
                return None
        return 'respond.on_failed_retry "stop"' if self._respond.on_failed_retry == "stop" else None

    def _examine(self, arrived: Arrived) -> ReductionCheck | None:
        """None where the observation itself broke, here or, as the status words say, on another rank."""
        if on_any(arrived.known.status.failed):
            return None
        if arrived.make is None:
            return ReductionCheck()  # the writing rank examines for all
        return self._capture.guard.local(lambda: self._checker.examine(arrived.all))

    def _anyone(self, wrong: bool | None) -> bool | None:
        """A vote, because the ranks' processors might round a bound differently. None: some rank cannot tell."""
        collective, vote = self._capture.guard.collective, _UNKNOWN if wrong is None else int(wrong)
        word = collective(lambda: torch.tensor([vote], dtype=torch.int32, device=self._capture.device))
        collective(lambda: dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._capture.group))
        highest = int(word.item())
        return None if highest == _UNKNOWN else bool(highest)


class _Keeper(ABC):
    """Keep replicas equal: compare them after updates, and make equal what is not."""

    def __init__(self, capture: StepCapture, replica: Callable[[], Replica], interval: int):
        self._capture, self._replica, self._interval = capture, replica, interval
        self._bits = Bits()
        self._last = 0  # step of the last comparison

    @abstractmethod
    def communicates(self, step: int, due: bool) -> bool:
        """Whether this rank does something with the others at this step."""

    def before_update(self, step: int, notes: _Notes) -> None:  # noqa: B027
        """Before the optimizer runs."""

    @abstractmethod
    def after_update(self, step: int, due: bool, notes: _Notes) -> str | None:
        """After it; why the training must stop, or None."""

    def _compare(self, step: int, notes: _Notes) -> tuple[Replica, Comparison]:
        replica, first, self._last = self._replica(), min(self._last + 1, step), step  # it may have gone back
        found = compare(replica.items, self._bits, self._capture.group)
        drift = None if found.equal else found.drift([name for name, _ in replica.items], step, first)
        notes.comparisons.append((step, (found.groups, drift)))
        return replica, found


class _Compare(_Keeper):
    """Every ``interval`` steps: compare, and make equal what is not."""

    def __init__(
        self,
        capture: StepCapture,
        replica: Callable[[], Replica],
        interval: int,
        response: Literal["majority", "mean", "stop"],
        attempts: int,
    ):
        super().__init__(capture, replica, interval)
        self._response, self._attempts = response, attempts

    def communicates(self, step: int, due: bool) -> bool:
        return due or step % self._interval == 0

    def after_update(self, step: int, due: bool, notes: _Notes) -> str | None:
        if not self.communicates(step, due):
            return None
        replica, found = self._compare(step, notes)
        if found.equal:
            return None
        if self._response == "stop":
            return 'respond.on_replica_drift "stop"'
        notes.repairs.append((step, self._repair(replica, found, step, self._response)))
        return None

    def _repair(self, replica: Replica, found: Comparison, step: int, response: Literal["majority", "mean"]) -> Repair:
        started, sent, attempts, still = time.perf_counter(), 0, 0, found
        group, device = self._capture.group, self._capture.device
        while not still.equal and still.comparable and attempts < self._attempts:
            attempts += 1
            if response == "majority":
                now = restore(replica.items, still, group, device)
            else:
                now, _ = average([replica.items[place][1] for place in still.apart], group, device)
            if not now:
                break  # no tensor has a majority: trying again would not find one
            sent += now
            replica.write_back()
            still = compare(replica.items, self._bits, group)
        return _repair_of(step, response, replica, found, still, attempts, sent, started)


class _Dynamic(_Keeper):
    """PAFT-Dyn (openreview cPZepCZlFW): the averaging of step t runs beside the forward and backward of step t + 1.

    What differs is copied after the update of step t and averaged while the next gradient is computed; before that is
    applied, the mean takes the place of the weights, so that the overlapped step is not lost: theta <- mean - eta g.
    The next comparison comes after H steps, the ranks' mean of |g| / |theta - mean|, both as root mean squares over
    every 64th element; at least 1, at most ``interval``, which is also what follows when nothing differs. Buffers are
    left alone, because the forward beside the averaging may have changed them.
    """

    def __init__(self, capture: StepCapture, replica: Callable[[], Replica], interval: int):
        super().__init__(capture, replica, interval)
        self._next = 1  # the first update says when the next is to be compared
        self._under_way: tuple[int, float, Replica, Comparison, Averaging] | None = None

    def communicates(self, step: int, due: bool) -> bool:
        return due or self._is_next(step) or self._under_way is not None

    def _is_next(self, step: int) -> bool:
        return step >= self._next or step + self._interval < self._next  # it has gone back

    def after_update(self, step: int, due: bool, notes: _Notes) -> str | None:
        if not due and not self._is_next(step):
            return None
        replica, found = self._compare(step, notes)
        self._next = step + self._interval
        if found.apart:
            started = time.perf_counter()
            tensors = [replica.items[place][1] for place in found.apart]
            averaging = Averaging(tensors, self._capture.group, self._capture.device).start()
            self._under_way = step, time.perf_counter() - started, replica, found, averaging
        return None

    def before_update(self, step: int, notes: _Notes) -> None:
        if self._under_way is None:
            return
        (begun, seconds, replica, found, averaging), self._under_way = self._under_way, None
        started = time.perf_counter() - seconds
        interval = self._next_interval(averaging)
        self._next = begun + interval
        repeated = averaging.finish()
        replica.write_back()
        still = compare(replica.items, self._bits, self._capture.group)
        sent = averaging.bytes * (repeated + 1)
        repair = _repair_of(step, "dynamic", replica, found, still, repeated + 1, sent, started, interval)
        notes.repairs.append((step, repair))

    def _next_interval(self, averaging: Averaging) -> int:
        """Every rank gets every rank's numbers and computes the same."""
        own = torch.cat((averaging.drift(SAMPLE), self._capture.gradient_sample(SAMPLE)))
        words = own.double().view(torch.int64).to(self._capture.device)
        everybody = gathered(words, self._capture.group).view(torch.float64)
        drift, gradient = (everybody[:, k] / everybody[:, k + 1].clamp(min=1.0) for k in (0, 2))
        mean = float((gradient / drift).sqrt().mean())  # infinite where the sampled elements do not differ
        return 1 if math.isnan(mean) else int(max(1.0, min(float(self._interval), mean)))


def _repair_of(
    step: int,
    method: RepairMethod,
    replica: Replica,
    found: Comparison,
    still: Comparison,
    attempts: int,
    sent: int,
    started: float,
    next_interval: int | None = None,
) -> Repair:
    names = tuple(replica.items[place][0] for place in found.apart)
    ranks = found.outvoted if method == "majority" else ()
    seconds = time.perf_counter() - started
    return Repair(step, method, still.equal, attempts, sent, seconds, names, ranks, next_interval=next_interval)
