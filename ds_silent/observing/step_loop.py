"""One step, in the order of time: what was gathered of an earlier one is published, this one is observed and sent, the
responses act, the update passes.

steps = StepLoop(capture, config, home, end, first=0)
steps.before_reduction(); steps.before_step(); steps.after_step()

What is done in a step is decided once, as the step before ends: a frozen plan that follows from what all ranks have
agreed on, handed down to whoever acts by it.

Whether anything communicates depends on the step and the configuration, and on what all ranks have read, never on what
happened on one rank: a rank whose part broke still sends an observation, which says so, and one step later all ranks
read that and stop observing together. :mod:`ds_silent.distributed.together` has the rule: what is called by ``_alone``
may break, what by ``_once`` is the same on every rank, and the lines between are played twice.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.moments import StepPlan
from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import log_steps
from ds_silent.distributed.together import Once
from ds_silent.exchange.collectives import Arrived, gather_on_host
from ds_silent.exchange.gather import Exchange, make_exchange
from ds_silent.exchange.layout import Layout, layout_of
from ds_silent.exchange.observation import LEFT, Observation, Status, Wishes, on_any
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.framework import Framework, Moments
from ds_silent.measure.reduction_check import ReductionChecker
from ds_silent.observing.lockstep import Lockstep
from ds_silent.observing.published import Published
from ds_silent.observing.recorder import Recorder
from ds_silent.observing.run_directory import RunDirectory
from ds_silent.records import Event
from ds_silent.replicas.compare import ReplicaChecks
from ds_silent.respond.responder import Responder
from ds_silent.respond.stop import end_by_event, end_suspect, save_suspect
from ds_silent.sinks.scalars import MonitorSink

logger = logging.getLogger("ds_silent")


class StepLoop:
    """The steps of one training.

    Attributes:
        observing: False from the step on at which all ranks stop.
        published: what becomes of what was gathered.
        records_loaded: whose records the checkpoint's are, once one was loaded.
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
        self._together = capture.together
        self._alone, self._once, self._decided = self._together.alone, self._together.once, self._together.decided
        self._layout = layout_of(config, capture.shape)
        self._exchange = make_exchange(self._layout, capture.group, capture.device, capture.arithmetic.total)
        self._audit = _audit_of(capture, config, self._layout)
        self._responder = Responder(capture, self._exchange, self._audit, config)
        replicated, after_updates = capture.framework.replicated(), self._responder.compares_replicas
        self.replicas = ReplicaChecks(config, replicated, capture.group, after_updates)
        self.published = _published_of(capture, config, home, self._layout, self._audit, self.replicas, self._responder)
        self.records_loaded: str | None = None
        self.observing = True
        most, words = capture.framework.max_reductions_per_step, capture.framework.words
        self._lockstep = Lockstep(first, allowed=most, next_allowed=most, words=words)
        self._plan = capture.moments.plan = _plan_of(config, first, self.measures)
        self._idle = False  # a step without a backward before it: there is nothing that it could pair with
        self._posted: int | None = None  # step of the last observation; a first is sent whatever the interval
        self._observe_seconds = 0.0

    def measures(self, step: int) -> bool:
        """Whether ``step`` is measured; the same answer on every rank."""
        return self.observing and step % self._config.interval == 0

    def before_reduction(self, *args: Any, **kwargs: Any) -> bool:
        """Called at the end of every backward; at the boundary, before the reduction (where overlapped: while)."""
        self._capture.moments.keep_for_retry(*args, **kwargs)
        due = self._micro_batch_ended()
        if due and self._config.reduction != "ordered":  # that one makes them as it reduces
            self._capture.moments.exchange_exactly()
        return due

    def _micro_batch_ended(self) -> bool:
        """A micro-batch's gradients are there. Return whether the inner products are due before the reduction."""
        boundary = self._capture.framework.is_boundary()
        if boundary and self._once(lambda: self.observing):
            plan = self._decided(lambda: self._plan)
            self._lockstep = self._decided(lambda: self._lockstep.reduction())
            if not self._lockstep.whole:
                # A step was left out after the last reduction: the others' observations of it wait for this rank's,
                # and they for the reduction. So it is sent now, and says so.
                step = self._capture.step
                self._send(plan, step)
                self._pass(plan, step)
        return self._capture.moments.micro_batch_ended(boundary)

    def before_step(self, *_: Any, **__: Any) -> None:
        """The gradients are aggregated, the optimizer has not run: publish the last step, send this one."""
        if not self._once(lambda: self.observing):
            return
        started, self._idle = time.perf_counter(), self._decided(lambda: not self._capture.moments.came)
        if not self._idle:
            self._send(self._plan, self._capture.step)
            self._observe_seconds = time.perf_counter() - started

    def dropped(self) -> None:
        """What was reduced since the last step belongs to none: the step under way begins anew."""
        self._capture.moments.dropped()
        self._lockstep = self._decided(lambda: self._lockstep.stepped())

    def after_step(self) -> None:
        """The optimizer has run and the framework's counters have advanced."""
        if not self._once(lambda: self.observing):
            return
        if self._idle:
            self._capture.moments.end_step()
            return
        self._pass(self._decided(lambda: self._plan), self._capture.step - 1)
        self._lockstep = self._decided(lambda: self._lockstep.stepped())

    def _send(self, plan: StepPlan, step: int) -> None:
        """``step`` is the framework's own; what communicates is timed by the plan's, which all ranks count."""
        self._home.settle(step - 1, self._capture.framework.counts.samples, self.records_loaded, self._once)
        if plan.measures:
            self._alone(self.published.recorder.finish)
        self._publish(self._exchange.collect(self._once))
        self._alone(self.published.weights_verified, step)
        self._alone(_look_beside, self._capture.framework, self.published, step)
        if self._decided(lambda: self.observing and (plan.measures or self._posted is None)):
            observation = self._observation(plan, step)
            if self._once(lambda: self._capture.kept.keeping):
                everybody = _gather_micro_batches(self._capture, self._layout, self._once)
                self._alone(lambda: self._audit.micro_batches(step, everybody.double()))
            self._exchange.post(step, observation, self._together)
            self._posted = step
        talk = self._responder.communicates(plan.step, self.replicas.due)
        self._respond(step, talk, partial(self._responder.before_update, step, plan.step))

    def _publish(self, arrived: Arrived | None) -> None:
        if arrived is None:
            return
        self._lockstep, differs = self._decided(lambda: self._lockstep.of(arrived))
        if differs is not None and differs.kind == "observer-off":
            self.switch_off(differs)
            if differs.severity == "error" and self._config.detectors.stop_on != "never":
                self._end_by(differs if self.published.recorder.writes else None)
            return
        if differs is not None:
            self.replicas.due = True
            self._alone(self.published.report, differs)
        if self.published.step(arrived):
            self._end_by(self.published.recorder.ends)

    def _observation(self, plan: StepPlan, step: int) -> Observation:
        observation, wishes = Observation(Status(nothing=1.0)), None
        if plan.measures:
            replica = self._alone(self.replicas.capture, step, plan.step)
            observation = self._capture.observation(plan.exact, replica)
            if not self._lockstep.whole:  # a part of the step was not observed: only whether this rank broke
                observation = Observation(Status(nothing=1.0, failed=observation.status.failed))
            wishes = self._alone(_wishes_of, self.published.recorder, self.replicas)
        status = self._decided(lambda: self._lockstep.status(step, observation.status))
        self._lockstep = self._decided(lambda: self._lockstep.sent())
        return replace(observation, status=status, wishes=wishes or Wishes())

    def _respond(self, step: int, communicates: bool, act: Callable[[], None]) -> None:
        """Let the responses act, but where they talk and a rank has said in this step that it will not be there."""
        if not self.observing:
            return
        if communicates and self._posted == step and on_any(self._once(self._exchange.peek).known.status.failed):
            return
        act()
        if (why := self._once(lambda: self._responder.stop)) is not None:
            self._end_suspect(step, why)

    def _pass(self, plan: StepPlan, step: int) -> None:
        """End the step: forget it, plan the next one, and let the responses look at what was updated."""
        now, published = time.perf_counter(), self.published
        measured = published.recorder.writes and self.observing and plan.measures
        self._alone(published.contexts.ended, step, measured, now, self._observe_seconds)
        self._alone(published.recorder.deliver)
        self._capture.moments.end_step()
        self._lockstep = self._decided(lambda: self._lockstep.passed())
        planned = partial(_plan_of, self._config, self._lockstep.scheduled, self.measures)
        self._plan = self._capture.moments.plan = self._decided(planned)
        if self._responder.compares_replicas:
            asked = self._decided(self.replicas.take_due)
            talk = self._responder.communicates(plan.step, asked)
            self._respond(step, talk, partial(self._responder.after_update, plan.step, asked))

    def publish_early(self, closed: bool) -> None:
        """Write what is under way, as far as it goes without the others. ``closed``: they come no more."""
        for arrived in _under_way(self._exchange) if self.observing else ():
            _, differs = self._lockstep.of(arrived)
            if differs is not None and differs.kind == "observer-off":
                if closed and not _all_leave(arrived):
                    self.switch_off(differs)
                return
            if differs is not None and closed:
                self._together.tried(self.published.report, differs)
            self._together.tried(self.published.early, arrived, closed)  # what comes after it all ranks read alike

    def say_goodbye(self) -> None:
        """If the other ranks go on, their next observation must not wait for this one. Nobody waits for it here."""
        if self.observing and not self._together.over and dist.is_initialized():
            step, goodbye = self._capture.step, Observation(Status(failed=LEFT))
            self._together.play(lambda: self._exchange.post(step, goodbye, self._together))

    def _end_suspect(self, step: int, why: str) -> None:
        """Every rank gets here at the same step, by the same word or the same comparison."""
        writes = self.published.recorder.writes
        if writes and self.measures(step):
            self.published.contexts.cut_short(step)
        self._publish(self._exchange.collect(self._once))
        framework, directory = self._capture.framework, self._home.directory
        saved = self._once(lambda: save_suspect(framework, step, why, directory, marks=writes))
        self._end()
        raise end_suspect(step, why, directory, saved, tells=writes)

    def _end_by(self, event: Event | None) -> None:
        self._end()
        raise end_by_event(event, self._config.detectors.stop_on)

    def switch_off(self, event: Event) -> None:
        """Every rank gets here at the same step, because every rank read the same words."""
        self.stop()
        self._together.tried(self.published.report, event)

    def stop(self, ended: bool = False) -> None:
        """Observe nothing from now on; the framework is as it was. ``ended``: for good, and not because it broke."""
        self.observing = False
        self._plan = self._capture.moments.plan = StepPlan(self._plan.step)
        self._capture.close(ended)


def moments_of(capture: StepCapture, steps: StepLoop, save: Callable[[], None], end: Callable[[], None]) -> Moments:
    """What a framework calls, each guarded: see :mod:`ds_silent.distributed.together`.

    Args:
        save: called as a checkpoint is written.
        end: called as the training ends.
    """
    together, own = capture.together, capture.moments
    alone, tried, play = together.alone, together.tried, together.play
    return Moments(
        together=together,
        pre_step=partial(alone, own.begins),
        pre_forward=partial(alone, own.forwards.forward),
        post_forward=partial(alone, own.forwards.forwarded),
        on_loss=partial(alone, own.forwards.loss),
        on_loss_share=partial(alone, own.forwards.share),
        pre_backward=partial(alone, own.root),
        on_loss_scaled=partial(alone, own.scaled),
        on_gradient=partial(alone, own.gradient),
        post_backward=partial(play, steps.before_reduction),
        post_reduction=partial(alone, own.reduced),
        pre_update=partial(play, steps.before_step),
        pre_optimizer_step=partial(alone, own.applying),
        on_gradient_dropped=partial(play, steps.dropped),
        post_step=partial(play, steps.after_step),
        pre_checkpoint=partial(tried, _without_arguments, save),
        close=partial(tried, _without_arguments, end),
    )


def _without_arguments(act: Callable[[], None], *_: Any, **__: Any) -> None:
    act()


def _plan_of(config: SilentConsistencyConfig, step: int, measures: Callable[[int], bool]) -> StepPlan:
    if not measures(step):
        return StepPlan(step)
    direction, measurement = config.direction, step // config.interval
    due = direction.exact_interval > 0 and measurement % direction.exact_interval == 0
    exact = direction.method == "exact" or (due and direction.method != "off")
    return StepPlan(step, measures=True, exact=exact)


def _audit_of(capture: StepCapture, config: SilentConsistencyConfig, layout: Layout) -> ReductionChecker:
    log_rate = log_steps(config.detectors, config.interval) + math.log(2.0)  # the reduction, and what is applied
    model = _model_of(capture)
    whole_norm = None if model is None else model.norm
    return ReductionChecker(layout, capture.arithmetic, capture.clip, log_rate, capture.layer_names, whole_norm)


def _published_of(
    capture: StepCapture,
    config: SilentConsistencyConfig,
    home: RunDirectory,
    layout: Layout,
    audit: ReductionChecker,
    replicas: ReplicaChecks,
    responder: Responder,
) -> Published:
    framework, model = capture.framework, _model_of(capture)
    members, alike = dist.get_process_group_ranks(capture.group), framework.ranks_comparable
    beside = _may_judge_beside(config, home, model)
    recorder = Recorder(home.sinks, config, audit, layout, members, framework.words, alike, beside)
    return Published(capture, recorder, replicas, responder, model)


def _model_of(capture: StepCapture) -> WholeModel | None:
    return capture.framework.peers.model if capture.framework.peers else None


def _may_judge_beside(config: SilentConsistencyConfig, home: RunDirectory, model: WholeModel | None) -> bool:
    """Tell whether nothing waits for what is found: no response, no word to end the training, no other group; and
    nothing is written in the training's own order, as a framework's monitor is."""
    responds = config.respond.on_aggregation_error != "report" or config.detectors.stop_on != "never"
    monitored = home.sinks is not None and any(isinstance(sink, MonitorSink) for sink in home.sinks.sinks)
    return not (responds or monitored or model is not None)


def _look_beside(framework: Framework, published: Published, step: int) -> None:
    for event in framework.peers.compare(step) if framework.peers else ():
        published.report(event)


def _wishes_of(recorder: Recorder, replicas: ReplicaChecks) -> Wishes[float | Tensor]:
    """Return what this rank wants of all ranks; the last two on the writing rank."""
    compare, replicas.wanted = replicas.wanted or recorder.take_parted(), False
    stop, diagnose = recorder.ends is not None, recorder.wants_micro_batches
    return Wishes(float(stop), float(diagnose), float(compare))


def _gather_micro_batches(capture: StepCapture, layout: Layout, once: Once) -> Tensor:
    """Gather them: a collective, in a step before which every rank has read that micro-batches are wanted."""
    own = capture.take_micro_batches(layout.layer_size)
    if layout.gathers:
        return gather_on_host(own, capture.group, once)
    once(lambda: dist.all_reduce(own, op=dist.ReduceOp.SUM, group=capture.group))  # more is not known of any
    return own.cpu()[None] / dist.get_world_size(capture.group)


def _under_way(exchange: Exchange) -> Iterator[Arrived]:
    try:
        yield from exchange.under_way()
    except Exception as error:  # a peer is gone: what it did not send cannot be published
        logger.warning("ds_silent: the last measured step could not be collected: %s", error)


def _all_leave(arrived: Arrived) -> bool:
    """Whether the other ranks have only left, as this one does now: an interrupt finds them at different places."""
    return set(arrived.known.status.failed.tolist()) <= {0.0, LEFT}
