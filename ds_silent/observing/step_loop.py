"""One optimizer step, in order of time. All of it runs on the training thread, inside the framework's own calls.

steps = StepLoop(capture, config, home, end, first=0)
steps.before_reduction(); steps.before_update(); steps.after_update()

1. Forward and backward: hooks add rows, loss and gradients to this rank's numbers. No collective runs. Gradient hooks
   run on autograd's thread.
2. ``before_reduction``, as a backward ends: count the reduction; with exact directions exchange the gradients. Where
   the reduction overlaps with the backward, it has run by then.
3. The framework reduces; a hook sketches the result.
4. ``before_update``, as the first optimizer is about to step. Collectives, in this order: choose the directory (once),
   collect the observation that was posted last, ask about what differs, post this step's, act on a wrong reduction.
5. An observation is posted at measured steps (and the first), asynchronously, on the observer's own process group, and
   collected at the next optimizer step, whatever the ``interval``.
6. Rank 0 makes and judges the record on one thread, writes it on a second, sends alerts on one per destination. A
   measured step waits for the judging before it posts. With a response to wrong reductions, ``stop_on``, a monitor or
   several groups the training thread judges.
7. ``after_update``: call the event callbacks if judging is done, plan the next step, compare or repair replicas.
8. A rank that raises in a local part, or meets a sparse gradient or ``join()``, logs it once and still makes every
   collective. Its next observation says so; all ranks read that one optimizer step later and stop observing together.
9. What raises elsewhere runs once more (:mod:`ds_silent.distributed.guard`). The second time, or in a response, it ends
   the training on this rank; a time-out does so at once; a group that is broken ends observation on this rank only.

:attr:`StepLoop.plan` decides which of this a step does, from the configuration and what all ranks have read of each
other (:class:`~ds_silent.observing.lockstep.Lockstep`), never from what happened on one rank.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.step import StepCapture, StepPlan
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import log_steps
from ds_silent.distributed.guard import CollectiveCall
from ds_silent.distributed.stall import StallNotice
from ds_silent.exchange.collectives import gather_on_host
from ds_silent.exchange.gather import make_exchange
from ds_silent.exchange.layout import Layout, layout_of
from ds_silent.exchange.observation import Observation, Status, Wishes, on_any
from ds_silent.framework import Moments
from ds_silent.measure.reduction_check import ReductionChecker, ReductionSettings
from ds_silent.observing.leaving import Leaving
from ds_silent.observing.lockstep import Lockstep
from ds_silent.observing.publisher import make_publisher, model_of
from ds_silent.observing.records_directory import RunDirectory
from ds_silent.records import Event
from ds_silent.replicas.compare import ReplicaChecks
from ds_silent.respond.responder import Responder
from ds_silent.respond.stop import end_by_event, end_suspect, save_suspect

logger = logging.getLogger("ds_silent")


class StepLoop:
    """The steps of one training. Only ``guard.run`` calls its moments, as in :func:`moments_of`.

    Attributes:
        observing: False from the step on at which all ranks stop.
        publisher: writes what was gathered.
        replicas: when the replicas are compared.
        records_loaded: whose records the checkpoint's are, once one was loaded.
        leaving: publishes what is under way, and says goodbye to the other ranks.
    """

    def __init__(
        self,
        capture: StepCapture,
        config: SilentConsistencyConfig,
        home: RunDirectory,
        end: Callable[[], None],
        first: int,
    ):
        """``end``: closes the observer, where a step ends the training; ``first``: the step of rank 0."""
        self._capture, self._config, self._home, self._end = capture, config, home, end
        self._guard = guard = capture.guard
        self._layout = layout = layout_of(config, capture.shape)
        self._exchange = make_exchange(layout, capture.group, capture.device, capture.arithmetic.total)
        self._checker = _checker_of(capture, config, layout)
        self._stall = StallNotice(capture.group, lambda: capture.step)
        self._responder = responder = Responder(capture, self._exchange, self._checker, config)
        framework, compares = capture.framework, responder.compares_replicas
        part = partial(getattr, framework, "averages_weights")
        self.replicas = ReplicaChecks(config, framework.replicated(), capture.group, compares, part)
        self.publisher = make_publisher(capture, config, home, layout, self._checker, self.replicas, self._responder)
        self.records_loaded: str | None = None
        most, words = capture.framework.max_reductions_per_step, capture.framework.words
        guard.state = Lockstep(first, allowed=most, next_allowed=most, words=words)
        self.observing, self._idle, self._observe_seconds = True, False, 0.0
        self._capture.moments.plan = self.plan
        self.leaving = Leaving(capture, self._exchange, self.publisher, lambda: self.observing, self._switch_off)

    @property
    def lockstep(self) -> Lockstep:
        """Where the ranks are, in the guard's keeping: a second run begins with the one that the first began with."""
        lockstep: Lockstep = self._guard.state
        return lockstep

    @property
    def plan(self) -> StepPlan:
        """What is done in the step under way; the same on every rank."""
        return _plan_of(self._config, self.lockstep, self.measures(self.lockstep.scheduled))

    def measures(self, step: int) -> bool:
        """Whether ``step`` is measured; the same answer on every rank."""
        return self.observing and step % self._config.interval == 0

    def before_reduction(self, *args: Any, **kwargs: Any) -> bool:
        """End a backward, whose reduction comes next or has run in it; return whether exact inner products are due."""
        self._capture.moments.keep_for_retry(*args, **kwargs)
        due = self._micro_batch_ended()
        if due and self._config.reduction != "ordered":  # that one makes them as it reduces
            self._capture.moments.exchange_exactly()
        return due

    def _micro_batch_ended(self) -> bool:
        """A micro-batch's gradients are there. Return whether the inner products are due before the reduction."""
        boundary = self._capture.framework.is_boundary()
        if boundary:
            self._guard.state = self.lockstep.reduction()
            if not self.lockstep.whole:
                # a step was left out behind the last reduction: the others wait for this rank's observation of it
                self._exchange_step(self._capture.step)
                self._end_step(self._capture.step)
        return self._capture.moments.micro_batch_ended(boundary)

    def before_update(self, *_: Any, **__: Any) -> None:
        """Publish the observation posted last and post this step's: gradients are reduced, no optimizer has run."""
        started, self._idle = time.perf_counter(), not self._capture.moments.came
        self._guard.local(self.publisher.update_begins, self._idle, self._capture.step)
        if not self._idle:  # else there was no backward before it, and nothing that it could pair with
            self._exchange_step(self._capture.step)
            self._observe_seconds = time.perf_counter() - started

    def dropped(self) -> None:
        """What has come since the last step belongs to none: the step under way begins anew."""
        if not self._capture.moments.came:
            return
        self._capture.moments.dropped()
        self._guard.state = self.lockstep.stepped()

    def after_update(self) -> None:
        """The optimizer has run and the framework's counters have advanced."""
        if self._idle:
            self._capture.moments.end_step()
            return
        self._end_step(self._capture.step - 1)
        self._guard.state = self.lockstep.stepped()

    def _exchange_step(self, step: int) -> None:
        """Run a step's collectives, by the plan's count, which all ranks share; ``step``: this rank's, for records."""
        plan, local, collective = self.plan, self._guard.local, self._guard.collective
        self._home.settle(step - 1, self._capture.framework.counts.samples, self.records_loaded, collective)
        if plan.measures:
            local(self.publisher.recorder.finish)
        self._publish()
        local(self.publisher.look_around, step)
        if self.observing and plan.sends:
            observation = self._observation(plan, step)
            if self._guard.agreed(lambda: self._capture.kept.keeping):
                everybody = _gather_micro_batches(self._capture, self._layout, collective)
                local(lambda: self._checker.micro_batches(step, everybody.double()))
            self._exchange.post(step, observation, self._guard)
        self._respond(plan, step, self.replicas.due, partial(self._responder.before_update, step, plan.step))

    def _publish(self) -> None:
        """Read what was gathered of an earlier step: all ranks stop, or it is published."""
        with self._stall.waiting():
            arrived = self._exchange.collect(self._guard.collective)
        if arrived is None:
            return
        self._guard.state, event = self.lockstep.of(arrived)
        if event is not None and event.kind == "observer-off":
            self._switch_off(event)
            if event.severity == "error" and self._config.detectors.stop_on != "never":
                self._end_by(event if self.publisher.recorder.writes else None)
            return
        if event is not None:
            self.replicas.due = True
            self._guard.local(self.publisher.recorder.report, event)
        if self.publisher.publish(arrived):
            self._end_by(self.publisher.recorder.ends)

    def _observation(self, plan: StepPlan, step: int) -> Observation:
        observation, wishes = Observation(Status(nothing=1.0)), None
        if plan.measures:
            replica = self._guard.local(self.replicas.capture, step, plan.step)
            self._capture.moments.unpublished = not self.lockstep.whole
            observation = self._capture.observation(plan.exact, replica)
            if not self.lockstep.whole:  # a part of the step was not observed: only whether this rank broke
                observation = Observation(Status(nothing=1.0, failed=observation.status.failed))
            wishes = self._guard.local(self.publisher.wishes)
        status = self.lockstep.status(step, observation.status)
        self._guard.state, wishes = self.lockstep.sent(), wishes or Wishes()
        self._capture.said(status, wishes)
        return replace(observation, status=status, wishes=wishes)

    def _respond(self, plan: StepPlan, step: int, asked: bool, act: Callable[[], None]) -> None:
        """Let the responses act; skip those that need collectives if a rank reported failure in this step."""
        if not self.observing:
            return
        talks = self._responder.communicates(plan.step, asked)
        if talks and plan.sends and on_any(self._guard.collective(self._exchange.peek).known.status.failed):
            return
        act()
        if self._responder.stop is not None:
            self._end_suspect(step, self._responder.stop)

    def _end_step(self, step: int) -> None:
        """Forget the step, plan the next one, and let the responses look at what was updated."""
        now, plan, publisher = time.perf_counter(), self.plan, self.publisher
        self._guard.local(publisher.step_ended, self.lockstep.boundary, plan.measures, now, self._observe_seconds)
        self._guard.local(publisher.recorder.deliver)
        self._capture.moments.end_step()
        self._guard.state = self.lockstep.passed()
        self._capture.moments.plan = self.plan
        if self._responder.compares_replicas:
            asked = self._guard.agreed(self.replicas.take_due)
            self._respond(plan, step, asked, partial(self._responder.after_update, plan.step, asked))

    def backward_begins(self, root: Any, own: bool = False) -> None:
        """See :meth:`~ds_silent.capture.step.StepMoments.root`; and judge meanwhile."""
        self._capture.moments.root(root, own)
        self.publisher.recorder.backward_begins()

    def _end_suspect(self, step: int, why: str) -> None:
        """Every rank gets here at the same step, by the same word or the same comparison."""
        writes = self.publisher.recorder.writes
        if self.measures(step):
            self.publisher.cut_short(self.lockstep.boundary)
        self._publish()
        framework, directory = self._capture.framework, self._home.directory
        saved = self._guard.collective(lambda: save_suspect(framework, step, why, directory, marks=writes))
        self._end()
        raise end_suspect(step, why, directory, saved, tells=writes)

    def _end_by(self, event: Event | None) -> None:
        self._end()
        raise end_by_event(event, self._config.detectors.stop_on)

    def _switch_off(self, event: Event) -> None:
        """Every rank gets here at the same step, because every rank read the same words."""
        self.stop()
        self._guard.cleanup(self.publisher.recorder.report, event)

    def stop(self, ended: bool = False) -> None:
        """Observe nothing from now on; the framework is as it was. ``ended``: for good, and not because it broke."""
        self.observing, self._guard.over = False, True
        self._stall.close()
        self._capture.moments.plan = StepPlan(self.lockstep.scheduled)
        self._capture.close(ended)


def moments_of(capture: StepCapture, steps: StepLoop, save: Callable[[], None], end: Callable[[], None]) -> Moments:
    """What a framework calls, each guarded: see :mod:`ds_silent.distributed.guard`.

    Args:
        save: called as a checkpoint is written.
        end: called as the training ends.
    """
    guard, own = capture.guard, capture.moments
    local, cleanup, run = guard.local, guard.cleanup, guard.run
    return Moments(
        guard=guard,
        pre_step=partial(local, own.begins),
        pre_forward=partial(local, own.forwards.forward),
        post_forward=partial(local, own.forwards.forwarded),
        on_loss=partial(local, own.forwards.loss),
        on_loss_share=partial(local, own.forwards.share),
        on_loss_handed=partial(local, own.handed),
        pre_backward=partial(local, steps.backward_begins),
        on_loss_scaled=partial(local, own.scaled),
        on_gradient=partial(local, own.gradient),
        on_gradients_left=partial(local, own.leave),
        is_measured=lambda: own.plan.measures,
        on_accumulated=partial(local, own.accumulated),
        post_backward=partial(run, steps.before_reduction),
        post_reduction=partial(local, own.reduced),
        pre_update=partial(run, steps.before_update),
        pre_optimizer_step=partial(local, own.applying),
        on_aggregate_written=partial(local, own.aggregate.written),
        on_gradient_dropped=partial(run, steps.dropped),
        post_step=partial(run, steps.after_update),
        pre_checkpoint=partial(cleanup, _without_arguments, save),
        close=partial(cleanup, _without_arguments, end),
    )


def _checker_of(capture: StepCapture, config: SilentConsistencyConfig, layout: Layout) -> ReductionChecker:
    log_rate = log_steps(config.detectors, config.interval) + math.log(2.0)  # the reduction, and what is applied
    model = model_of(capture)
    norm = None if model is None else model.norm
    return ReductionChecker(
        ReductionSettings(layout, capture.arithmetic, log_rate, capture.layer_names, capture.clip, norm)
    )


def _plan_of(config: SilentConsistencyConfig, lockstep: Lockstep, measures: bool) -> StepPlan:
    step, direction = lockstep.scheduled, config.direction
    if not measures:
        return StepPlan(step, sends=lockstep.count == 0)  # a first is sent whatever the interval
    measurement = step // config.interval
    due = direction.exact_interval > 0 and measurement % direction.exact_interval == 0
    exact = direction.method == "exact" or (due and direction.method != "off")
    traces = config.trace is not None and measurement % config.trace.interval == 0
    return StepPlan(step, measures=True, exact=exact, sends=True, traces=traces)


def _gather_micro_batches(capture: StepCapture, layout: Layout, collective: CollectiveCall) -> Tensor:
    """Gather their sketches: a collective, in a step before which every rank has read that they are wanted."""
    own = capture.take_micro_batches(layout.layer_size)
    if layout.gathers:
        return gather_on_host(own, capture.group, collective)
    collective(lambda: dist.all_reduce(own, op=dist.ReduceOp.SUM, group=capture.group))  # more is not known of any
    return own.cpu()[None] / dist.get_world_size(capture.group)


def _without_arguments(act: Callable[[], None], *_: Any, **__: Any) -> None:
    act()
