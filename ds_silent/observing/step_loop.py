"""One step, in the order of time: what was gathered of an earlier one is published, this one is observed and sent, the
responses act, the update passes.

steps = StepLoop(capture, config, home, end)      # the listener of every moment of the capture
steps.before_reduction(); steps.before_step(); steps.after_step()

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

import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import log_steps
from ds_silent.distributed.together import Once
from ds_silent.exchange.collectives import Arrived, gather_on_host
from ds_silent.exchange.gather import Exchange, make_exchange
from ds_silent.exchange.layout import Layout, layout_of
from ds_silent.exchange.observation import LEFT, Observation, Status, Wishes, on_any
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.framework import HasPeers, SavesSuspect
from ds_silent.measure.reduction_check import ReductionChecker
from ds_silent.observing.lockstep import Lockstep
from ds_silent.observing.published import Published
from ds_silent.observing.recorder import Recorder, make_recorder
from ds_silent.observing.run_directory import RunDirectory
from ds_silent.records import Event
from ds_silent.replicas.compare import ReplicaChecks
from ds_silent.respond.responder import Responder
from ds_silent.respond.stop import end_by_event, end_suspect, save_suspect
from ds_silent.sinks.scalars import MonitorSink

logger = logging.getLogger("ds_silent")


class _Schedule:
    """Which steps are observed, and how: the same on every rank."""

    observing: bool
    _config: SilentConsistencyConfig
    _lockstep: Lockstep

    @property
    def scheduled(self) -> int:
        """The step under way as all ranks count it: what communicates is timed by it."""
        return self._lockstep.scheduled

    def measures(self, step: int) -> bool:
        """Whether ``step`` is measured."""
        return self.observing and step % self._config.interval == 0

    def measures_exactly(self, step: int) -> bool:
        """Whether ``step``, if it is measured, is measured exactly too."""
        direction = self._config.direction
        measurement = step // self._config.interval
        due = direction.exact_interval > 0 and measurement % direction.exact_interval == 0
        return direction.method == "exact" or (due and direction.method != "off")


class StepLoop(_Schedule):
    """The steps of one training.

    Attributes:
        observing: False from the step on at which all ranks stop.
        published: what becomes of what was gathered.
        replicas: when they are compared.
        records_loaded: whose records the checkpoint's are, once one was loaded.
    """

    def __init__(
        self,
        capture: StepCapture,
        config: SilentConsistencyConfig,
        home: RunDirectory,
        end: Callable[[], None],
        first: int | None = None,
    ):
        """``end``: closes the observer, where a step ends the training; ``first``: the step of rank 0."""
        self._capture, self._config, self._home, self._end = capture, config, home, end
        self._together = capture.together
        self._alone, self._once, self._decided = self._together.alone, self._together.once, self._together.decided
        self._layout = layout_of(config, capture.shape)
        self._exchange = make_exchange(self._layout, capture.group, capture.device, capture.arithmetic.total)
        self._audit = _audit_of(capture, config, self._layout)
        self._responder = Responder(capture, self._exchange, self._audit, config)
        after_updates = self._responder.compares_replicas
        self.replicas = ReplicaChecks(config, capture.framework.replicated(), capture.group, after_updates)
        self.published = _published_of(capture, config, home, self._layout, self._audit, self.replicas, self._responder)
        self.records_loaded: str | None = None
        self.observing = True
        most = capture.framework.boundaries
        first = capture.step if first is None else first
        self._lockstep = Lockstep(first, allowed=most, next_allowed=most, words=capture.framework.words)
        self._greeted = False  # a first observation tells all ranks' steps, whatever the interval
        self._idle = False  # a step without a backward before it: there is nothing that it could pair with
        self._posted: int | None = None  # step of the observation that was sent last
        self._observe_seconds = 0.0

    # -- the step, in order --------------------------------------------------------------------------------------

    def before_reduction(self) -> None:
        """The gradients of a boundary are there, and reduced next where that comes behind the backward. Played.

        Where a step was left out after the last reduction, the others' observations of it wait for this rank's, and
        they for the reduction: so it is sent now, and says so.
        """
        if not self._once(lambda: self.observing):
            return
        self._lockstep = self._decided(lambda: self._lockstep.reduction())
        if not self._lockstep.whole:
            step = self._capture.step
            self._send(step)
            self._pass(step)

    def before_step(self) -> None:
        """The gradients are aggregated, the optimizer has not run: publish the last step, send this one. Played."""
        if not self._once(lambda: self.observing):
            return
        started, self._idle = time.perf_counter(), self._decided(lambda: not self._capture.came)
        if not self._idle:
            self._send(self._capture.step)
            self._observe_seconds = time.perf_counter() - started

    def dropped(self) -> None:
        """What was reduced since the last step belongs to none: the step under way begins anew. Played."""
        self._lockstep = self._decided(lambda: self._lockstep.stepped())

    def after_step(self) -> None:
        """The optimizer has run and the framework's counters have advanced. Played."""
        if not self._once(lambda: self.observing):
            return
        if self._idle:
            self._capture.end_step()
            return
        self._pass(self._capture.step - 1)
        self._lockstep = self._decided(lambda: self._lockstep.stepped())

    def _send(self, step: int) -> None:
        """``step`` is the framework's own; what communicates is timed by the one that all ranks count."""
        due = self._decided(lambda: self.scheduled)
        self._home.settle(step - 1, self._capture.samples, self.records_loaded, self._once)
        if self.measures(due):
            self._alone(self.published.recorder.finish)
        self._publish(self._exchange.collect(self._once))
        self._alone(self.published.weights_verified, step)
        if isinstance(self._capture.framework, HasPeers):
            self._alone(_look_beside, self._capture.framework, self.published, step)
        if self._decided(lambda: self.observing and (self.measures(due) or not self._greeted)):
            observation = self._observation(step, due)
            if self._once(lambda: self._capture.keeps_micro_batches):
                everybody = _gather_micro_batches(self._capture, self._layout, self._once)
                self._alone(lambda: self._audit.micro_batches(step, everybody.double()))
            self._exchange.post(step, observation, self._together)
            self._greeted, self._posted = True, step
        if not (self._responder.communicates(due, self.replicas.due) and self._someone_failed(step)):
            self._respond(step, partial(self._responder.before_update, step, due))

    def _publish(self, arrived: Arrived | None) -> None:
        if arrived is None:
            return
        self._lockstep, apart = self._decided(lambda: self._lockstep.of(arrived))
        if apart is not None and apart.kind == "observer-off":
            self.switch_off(apart)
            if apart.severity == "error" and self._config.detectors.stop_on != "never":
                self._end()
                raise end_by_event(apart if self.published.recorder.writes else None, self._config.detectors.stop_on)
            return
        if apart is not None:
            self.replicas.due = True
            self._alone(self.published.report, apart)
        if self.published.step(arrived):
            event = self.published.recorder.ends
            self._end()
            raise end_by_event(event, self._config.detectors.stop_on)

    def _observation(self, step: int, due: int) -> Observation:
        observation, wishes = Observation(Status(nothing=1.0)), None
        if self.measures(due):
            replica = self._alone(self.replicas.capture, step, due)
            seen = self._capture.observation(exact=self.measures_exactly(due), replica=replica)
            observation = seen if self._lockstep.whole else _only_words(seen)
            wishes = self._alone(_wishes_of, self.published.recorder, self.replicas)
        status = self._decided(lambda: self._lockstep.status(step, observation.status))
        self._lockstep = self._decided(lambda: self._lockstep.told())
        return replace(observation, status=status, wishes=wishes or Wishes())

    def _someone_failed(self, step: int) -> bool:
        """Whether a rank has said in this step's observation that it will not be there; waits for it."""
        if self._posted != step or not self.observing:
            return False
        return on_any(self._once(self._exchange.peek).known.status.failed)

    def _respond(self, step: int, act: Callable[[], None]) -> None:
        """Nobody goes on after a response that broke off, see :class:`ds_silent.distributed.together.BrokeOff`."""
        if not self.observing:
            return
        act()
        why = self._once(lambda: self._responder.stop)
        if why is not None:
            self._end_suspect(step, why)

    def _pass(self, step: int) -> None:
        """The step is over."""
        now, due = time.perf_counter(), self._decided(lambda: self.scheduled)
        published = self.published
        measured = published.recorder.writes and self.measures(due)
        self._alone(published.contexts.ended, step, measured, now, self._observe_seconds)
        self._alone(published.recorder.deliver)
        self._capture.end_step()
        self._lockstep = self._decided(lambda: self._lockstep.passed())
        if self._responder.compares_replicas:
            asked = self._decided(self.replicas.take_due)
            if not (self._responder.communicates(due, asked) and self._someone_failed(step)):
                self._respond(step, partial(self._responder.after_update, due, asked))

    # -- the end -------------------------------------------------------------------------------------------------

    def publish_early(self, closed: bool) -> None:
        """Write what is under way, as far as it goes without the others. ``closed``: they come no more."""
        for arrived in _under_way(self._exchange) if self.observing else ():
            _, apart = self._lockstep.of(arrived)
            if apart is not None and apart.kind == "observer-off":
                if closed and not _all_leave(arrived):
                    self.switch_off(apart)
                return
            if apart is not None and closed:
                self._together.tried(self.published.report, apart)
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
        assert isinstance(framework, SavesSuspect)  # the responses that stop are refused elsewhere
        saved = self._once(lambda: save_suspect(framework, step, why, directory, marks=writes))
        self._end()
        raise end_suspect(step, why, directory, saved, tells=writes)

    def switch_off(self, event: Event) -> None:
        """Every rank gets here at the same step, because every rank read the same words."""
        self.stop()
        self._together.tried(self.published.report, event)

    def stop(self) -> None:
        """Observe nothing from now on; the framework is as it was."""
        self.observing = False
        self._capture.close()


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
    members, alike = dist.get_process_group_ranks(capture.group), framework.ranks.alike
    beside = _may_judge_beside(config, home, model)
    recorder = make_recorder(home.sinks, config, audit, layout, members, framework.words, alike, beside)
    return Published(capture, recorder, replicas, responder, model)


def _model_of(capture: StepCapture) -> WholeModel | None:
    return capture.framework.model if isinstance(capture.framework, HasPeers) else None


def _may_judge_beside(config: SilentConsistencyConfig, home: RunDirectory, model: WholeModel | None) -> bool:
    """Tell whether nothing waits for what is found: no response, no word to end the training, no other group; and
    nothing is written in the training's own order, as a framework's monitor is."""
    responds = config.respond.on_aggregation_error != "report" or config.detectors.stop_on != "never"
    monitored = home.sinks is not None and any(isinstance(sink, MonitorSink) for sink in home.sinks.sinks)
    return not (responds or monitored or model is not None)


def _look_beside(framework: HasPeers, published: Published, step: int) -> None:
    for event in framework.beside(step):
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


def _only_words(observation: Observation) -> Observation:
    """Where a part of the step was not seen: only whether this rank broke."""
    return Observation(Status(nothing=1.0, failed=observation.status.failed))
