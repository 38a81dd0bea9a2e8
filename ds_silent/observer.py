"""One step, from backward to sinks.

    backward -> capture -> Observation -> exchange -> measure -> judge -> respond -> sinks

The observer only orders the others. Whether anything communicates depends on the step and the configuration, and on
what all ranks have read, never on what happened on one rank: a rank whose part broke still sends a sample, which says
so, and one step later all ranks read that and stop observing together. :mod:`ds_silent.ranks.together` has the rule:
what is called by ``_alone`` may break, what by ``_once`` is the same on every rank, and the lines between are played
twice.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.conduct import Unlike
from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import log_steps
from ds_silent.exchange.collectives import gather_on_host
from ds_silent.exchange.gather import make_exchange
from ds_silent.exchange.layout import layout_of
from ds_silent.exchange.observation import LEFT, Gathered, Observation, Status, Wishes, on_any
from ds_silent.exchange.row_ids import as_ids
from ds_silent.frameworks.base import SavesSuspect
from ds_silent.measure.context import Contexts
from ds_silent.measure.reduction import Audit
from ds_silent.ranks.lockstep import Lockstep
from ds_silent.recorder import make_recorder
from ds_silent.records import Event, StepRecord
from ds_silent.replicas.compare import Drift
from ds_silent.replicas.timing import ReplicaChecks
from ds_silent.respond.responder import Responder
from ds_silent.respond.stop import end_by_event, end_suspect, save_suspect
from ds_silent.sinks.run_directory import RunDirectory

logger = logging.getLogger("ds_silent")


class Observer:
    """Watches one training. Made by :func:`ds_silent.initialize` or :func:`ds_silent.attach`, on every rank."""

    def __init__(self, capture: StepCapture, config: SilentConsistencyConfig, home: RunDirectory):
        self._capture, self._config, self._home = capture, config, home
        self._together = capture.together
        self._alone, self._once, self._decided = self._together.alone, self._together.once, self._together.decided
        self._layout = layout_of(config, capture.shape)
        self._exchange = make_exchange(self._layout, capture.group, capture.device)
        log_rate = log_steps(config.detectors, config.interval) + math.log(2.0)  # the reduction, and what is applied
        self._audit = Audit(self._layout, capture.arithmetic, capture.clip, log_rate, capture.layer_names)
        self._responder = Responder(capture, self._exchange, self._audit, config)
        after_updates = self._responder.compares_replicas
        self._replicas = ReplicaChecks(config, capture.framework.replicated(), capture.group, after_updates)
        self._recorder = make_recorder(home.sinks, config, self._audit, self._layout, capture.shape.ranks)
        self._contexts = Contexts(capture)
        self._conduct = capture.conduct
        self._lockstep = Lockstep(capture.step)
        self._greeted = False  # a first sample tells all ranks' steps, whatever the interval
        self._idle = False  # a step without a backward before it: there is nothing that it could pair with
        self._posted: int | None = None  # step of the sample that was sent last
        self._written = -1  # step of the newest record
        self._records_loaded: str | None = None  # whose records the checkpoint's are, once one was loaded
        self._observe_seconds = 0.0
        self._observing, self._closed = True, False
        capture.connect(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_leave_to_the_parent, weakref.ref(self)))

    # -- the step, in order ------------------------------------------------------------------------------------

    @property
    def scheduled(self) -> int:
        """The step under way as all ranks count it: what communicates is timed by it."""
        return self._lockstep.scheduled

    def measures(self, step: int) -> bool:
        """Whether ``step`` is measured."""
        return self._observing and step % self._config.interval == 0

    def measures_exactly(self, step: int) -> bool:
        """Whether ``step``, if it is measured, is measured exactly too."""
        direction = self._config.direction
        measurement = step // self._config.interval
        due = direction.exact_interval > 0 and measurement % direction.exact_interval == 0
        return direction.method == "exact" or (due and direction.method != "off")

    def before_reduction(self) -> None:
        """The gradients of a boundary are there, and reduced next where that comes behind the backward. Played.

        Where a step was left out after the last reduction, the others' samples of it wait for this rank's, and they
        for the reduction: so it is sent now, and says so.
        """
        if not self._once(lambda: self._observing):
            return
        self._lockstep = self._decided(lambda: self._lockstep.reduction())
        if not self._lockstep.whole:
            step = self._capture.step
            self._send(step)
            self._end_step(step)

    def before_step(self) -> None:
        """The gradients are aggregated, the optimizer has not run: publish the last sample, send this one. Played."""
        if not self._once(lambda: self._observing):
            return
        started, self._idle = time.perf_counter(), self._decided(lambda: not self._capture.came)
        if not self._idle:
            self._send(self._capture.step)
            self._observe_seconds = time.perf_counter() - started

    def after_step(self) -> None:
        """The optimizer has run and the framework's counters have advanced. Played."""
        if not self._once(lambda: self._observing):
            return
        if self._idle:
            self._capture.end_step()
            return
        self._end_step(self._capture.step - 1)
        self._lockstep = self._decided(lambda: self._lockstep.stepped())

    def _send(self, step: int) -> None:
        """``step`` is the framework's own; what communicates is timed by the one that all ranks count."""
        due = self._decided(lambda: self.scheduled)
        self._home.settle(step - 1, self._capture.samples, self._records_loaded, self._once)
        self._publish(self._exchange.collect(self._once))
        self._alone(self._verify_weights, step)
        if self._decided(lambda: self._observing and (self.measures(due) or not self._greeted)):
            sample = self._sample(step, due)
            self._gather_micro_batches(step)
            self._exchange.post(step, sample, self._together)
            self._greeted, self._posted = True, step
        if not (self._responder.communicates(due, self._replicas.due) and self._someone_failed(step)):
            self._respond(step, partial(self._responder.before_update, step, due))

    def _end_step(self, step: int) -> None:
        now, due = time.perf_counter(), self._decided(lambda: self.scheduled)
        self._alone(
            self._contexts.ended, step, self._recorder.writes and self.measures(due), now, self._observe_seconds
        )
        self._capture.end_step()
        self._lockstep = self._decided(lambda: self._lockstep.passed())
        if self._responder.compares_replicas:
            asked = self._decided(self._replicas.take_due)
            if not (self._responder.communicates(due, asked) and self._someone_failed(step)):
                self._respond(step, partial(self._responder.after_update, due, asked))

    def _someone_failed(self, step: int) -> bool:
        """Whether a rank has said with this step's sample that it will not be there; waits for the sample."""
        if self._posted != step or not self._observing:
            return False
        return on_any(self._once(self._exchange.peek).status.failed)

    def _respond(self, step: int, act: Callable[[], None]) -> None:
        """Nobody goes on after a response that broke off, see :class:`ds_silent.ranks.together.BrokeOff`."""
        if not self._observing:
            return
        act()
        why = self._once(lambda: self._responder.stop)
        if why is not None:
            self._end_suspect(step, why)

    def _sample(self, step: int, due: int) -> Observation:
        sample, wishes = Observation(Status(nothing=1.0)), None
        if self.measures(due):
            replica = self._alone(self._replicas.capture, step)
            whole = self._capture.sample(exact=self.measures_exactly(due), replica=replica)
            sample = whole if self._lockstep.whole else _only_words(whole)
            wishes = self._alone(self._wishes)
        status = self._decided(lambda: self._lockstep.status(step, sample.status))
        self._lockstep = self._decided(lambda: self._lockstep.told())
        return replace(sample, status=status, wishes=wishes or Wishes())

    def _wishes(self) -> Wishes[float | Tensor]:
        """What this rank wants of all ranks; the last two on the writing rank."""
        compare, self._replicas.wanted = self._replicas.wanted, False
        stop, diagnose = self._recorder.ends is not None, self._audit.wants_micro_batches
        return Wishes(float(stop), float(diagnose), float(compare))

    def _gather_micro_batches(self, step: int) -> None:
        """A collective, in a step before which every rank has read that micro-batches are wanted."""
        if self._once(lambda: self._capture.keeps_micro_batches):
            own = self._capture.take_micro_batches(self._layout.layer_size)
            everybody = gather_on_host(own, self._capture.group, self._once)
            self._alone(lambda: self._audit.micro_batches(step, everybody.double()))

    def _verify_weights(self, step: int) -> None:
        """On the writing rank; the comparison of the replicas speaks for the others."""
        if self._recorder.writes:
            found = self._replicas.verify(step)
            if found is not None:
                self.report(found)

    # -- what was gathered -------------------------------------------------------------------------------------------

    def _publish(self, gathered: Gathered | None) -> None:
        """Judge and write one sample, and do what it asks of all ranks, which read it at the same step."""
        if gathered is None:
            return
        self._lockstep, apart = self._decided(lambda: self._lockstep.read(gathered))
        if apart is not None:
            self._switch_off(apart)
            return
        if on_any(gathered.wishes.compare):
            self._replicas.due = True
        if on_any(gathered.status.nothing):
            self._contexts.drop(gathered.step)
            return
        if on_any(gathered.wishes.diagnose):
            self._once(self._capture.keep_micro_batches)
        unlike = self._conduct.agree(gathered, self._capture.group, self._capture.device, self._together)
        self._alone(self._tell_conduct, gathered, unlike)
        drift = self._replicas.localise(self._once) if self._replicas.differ(gathered) else None
        self._alone(self._write, gathered, drift)
        if on_any(gathered.wishes.stop):
            event = self._recorder.ends
            self.close()
            raise end_by_event(event, self._config.detectors.stop_on)

    def _tell_conduct(self, gathered: Gathered, unlike: tuple[Unlike, ...]) -> None:
        self._recorder.unlike = unlike
        if self._recorder.writes:
            note = self._conduct.note(gathered)
            if note is not None:
                self.report(note)

    def _write(self, gathered: Gathered, drift: Drift | None, wait: bool = False) -> None:
        """Each sample once; ``wait``: where it was published early, it is judged with ``drift`` later."""
        if gathered.step <= self._written:
            self._recorder.settle(drift, gathered.step)
            return
        self._written = gathered.step
        told = self._responder.take(gathered.step)
        if self._recorder.writes:
            self._recorder.sample(gathered, self._contexts.take(gathered.step), drift, told, wait)

    def _publish_early(self) -> None:
        """Write what is under way. What it asks of all ranks waits for its step, where every rank does it, whoever
        published early."""
        if not self._observing:
            return
        try:
            under_way = self._exchange.under_way()
        except Exception as error:  # a peer is gone: what it did not send cannot be published
            logger.warning("ds_silent: the last measured step could not be collected: %s", error)
            return
        for gathered in under_way:
            _, apart = self._lockstep.read(gathered)
            if apart is not None:
                if self._closed:  # nobody comes to that step any more
                    self._switch_off(apart)
                return
            if on_any(gathered.status.nothing):
                continue
            if gathered.step > self._written:
                self._write(gathered, None, wait=self._replicas.differ(gathered))
            if self._closed and self._recorder.writes:  # nobody is asked any more what it is that differs
                self._recorder.end_unlike(self._conduct.unasked(gathered), gathered.step)

    def report(self, event: Event) -> None:
        """Write an event and tell the callbacks; on the writing rank."""
        self._recorder.report(event)

    # -- for the training script -----------------------------------------------------------------------------------

    @property
    def samples_per_epoch(self) -> int | None:
        """Rows of one epoch over all ranks, for ``epoch`` in the records; None: the loader that feeds the training is
        to say. May be set."""
        return self._contexts.rows_in_epoch

    @samples_per_epoch.setter
    def samples_per_epoch(self, rows: int | None) -> None:
        self._contexts.rows_in_epoch = rows

    @property
    def shuffles(self) -> bool | None:
        """Whether each epoch has an order of its own; None likewise. May be set."""
        return self._contexts.shuffles

    @shuffles.setter
    def shuffles(self, shuffles: bool | None) -> None:
        self._contexts.shuffles = shuffles

    @property
    def output_dir(self) -> str:
        """Where the writing rank writes, on every rank; in a directory that was in use, from step 1 on."""
        return self._home.directory

    @property
    def last_record(self) -> StepRecord | None:
        """The newest record, on the rank that writes."""
        return self._recorder.last_record

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self._closed

    def observe_batch(self, sample_ids: Any) -> None:
        """Tell which rows this rank's next micro-batch holds, before its forward.

        Args:
            sample_ids: one integer per row that means the same row on every rank, such as the row's place in the data
                set: a list, a tuple, a numpy array or a 1-D tensor, of any integer dtype and on any device.

        Raises:
            TypeError, ValueError: they are something else (:func:`ds_silent.exchange.row_ids.as_ids`).
        """
        ids = as_ids(sample_ids)
        if self._observing:
            self._capture.observe_batch(ids)

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call ``function(event)`` for every event from now on, on the writing rank, between two optimizer steps."""
        self._recorder.on_event(function)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: JSON values. The detectors' state is on the writing rank, whose
        ``client_state`` is the one that DeepSpeed keeps. Steps and samples are in the engine's own counters."""
        self._together.tried(self._publish_early)
        state: dict[str, Any] = {"version": 2, "samples_per_epoch": self.samples_per_epoch}
        return state | (self._alone(self._own_state) or {})

    def _own_state(self) -> dict[str, Any]:
        if not self._recorder.writes:
            return {}
        state = self._recorder.state_dict(self._capture.rows_waiting)
        return {**state, "records": self._home.identity(), "weights": self._replicas.weights()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a state that cannot be read is said and left, and judging starts anew."""
        self._records_loaded = state.get("records")
        self.samples_per_epoch = self.samples_per_epoch or state.get("samples_per_epoch") or None
        self._replicas.loaded(state.get("weights"))
        self._recorder.load_state_dict(state)

    # -- the end -----------------------------------------------------------------------------------------------------

    def before_checkpoint(self) -> None:
        """A checkpoint is being written, by all ranks: what it holds is compared at the next measured step."""
        self._replicas.due = True
        self.flush()

    def flush(self) -> None:
        """Publish what is under way and put it on disk. No collective; every rank may call it at the same step."""
        self._together.tried(self._publish_early)
        self._together.tried(self._recorder.flush)

    def close(self) -> None:
        """Publish what is under way, close the sinks and leave the engine as it was. No collective."""
        if not self._closed:
            self._closed = True
            for act in (self._publish_early, self._last_words, self._say_goodbye, self._stop):
                self._together.tried(act)
            self._together.tried(self._recorder.close)
            self._together.tried(self._home.close)

    def _last_words(self) -> None:
        self._recorder.settle(None)  # nobody comes together any more to find the tensors
        self._recorder.repairs(self._responder.take(self._capture.step).repairs)

    def _say_goodbye(self) -> None:
        """If the other ranks go on, their next sample must not wait for this one. Nobody waits for it here either."""
        if self._observing and not self._together.over and dist.is_initialized():
            step, goodbye = self._capture.step, Observation(Status(failed=LEFT))
            self._together.play(lambda: self._exchange.post(step, goodbye, self._together))

    def forked(self) -> None:
        """This is a child, as a DataLoader's worker is: records, collectives and the end are the parent's."""
        self._observing, self._closed, self._recorder = False, True, make_recorder(None)

    def _end_suspect(self, step: int, why: str) -> None:
        """Every rank gets here at the same step, by the same word or the same comparison."""
        writes = self._recorder.writes
        if writes and self.measures(step):
            self._contexts.cut_short(step)
        self._publish(self._exchange.collect(self._once))
        framework = self._capture.framework
        assert isinstance(framework, SavesSuspect)  # the responses that stop are refused elsewhere
        saved = self._once(lambda: save_suspect(framework, step, why, self.output_dir, marks=writes))
        self.close()
        raise end_suspect(step, why, self.output_dir, saved, tells=writes)

    def _switch_off(self, event: Event) -> None:
        """Every rank gets here at the same step, because every rank read the same words."""
        self._stop()
        self._together.tried(self.report, event)

    def stand_down(self, event: Event) -> None:
        """Observe nothing and say why; the same call on every rank, before the first step."""
        self._stop()
        if self._recorder.writes:
            logger.warning("ds_silent: %s", event.message)
            self.report(event)

    def _stop(self) -> None:
        self._observing = False
        self._capture.close()


def _leave_to_the_parent(reference: weakref.ref[Observer]) -> None:
    observer = reference()
    if observer is not None:
        observer.forked()


def _only_words(sample: Observation) -> Observation:
    """Where a part of the step was not seen: only whether this rank broke."""
    return Observation(Status(nothing=1.0, failed=sample.status.failed))
