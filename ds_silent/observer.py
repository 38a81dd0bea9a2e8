"""One step, from backward to sinks.

    backward -> capture -> LocalSample -> exchange -> measure -> judge -> respond -> sinks

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
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.conduct import Unlike
from ds_silent.capture.data_facts import DataFacts
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import Judge, log_steps
from ds_silent.exchange.gather import LEFT, Gathered, LocalSample, gather_on_host, make_exchange
from ds_silent.exchange.layout import REMEMBERED, layout_of, replicas_of
from ds_silent.exchange.row_ids import as_ids
from ds_silent.frameworks.base import Capture
from ds_silent.measure.record import Context
from ds_silent.measure.reduction import Audit
from ds_silent.ranks.lockstep import Lockstep
from ds_silent.recorder import Writer
from ds_silent.records import Event, Seconds, StepRecord
from ds_silent.replicas.compare import Drift
from ds_silent.respond.responder import Responder
from ds_silent.sinks.run_directory import RunDirectory

logger = logging.getLogger("ds_silent")
STOPPED = 3
"""Exit status of a training that ``detectors.stop_on`` ended."""


class Observer:
    """Watches one training. Made by :func:`ds_silent.initialize` or :func:`ds_silent.attach`, on every rank.

    Attributes:
        samples_per_epoch: rows of one epoch over all ranks, for ``epoch`` in the records; None where the loader that
            feeds the training is to say.
        shuffles: whether each epoch has an order of its own; None likewise.
        output_dir: where the writing rank writes, on every rank; in a directory that was in use, from step 1 on.
    """

    def __init__(self, capture: Capture, config: SilentConsistencyConfig, home: RunDirectory):
        self.samples_per_epoch: int | None = None
        self._home = home
        self._records_loaded: str | None = None  # whose records the checkpoint's are, once one was loaded
        self.shuffles: bool | None = None
        self._capture, self._config = capture, config
        self._together = capture.together
        self._alone, self._once, self._decided = self._together.alone, self._together.once, self._together.decided
        ranks = dist.get_world_size(capture.group)
        self._layout = layout_of(config, ranks, capture)
        self._exchange = make_exchange(self._layout, capture.group, capture.device)
        log_rate = log_steps(config.detectors, config.interval) + math.log(2.0)  # the reduction, and what is applied
        self._audit = Audit(self._layout, capture.arithmetic, capture.clip, log_rate, capture.layer_names)
        self._replicas = replicas_of(config, capture)
        self._responder = Responder(capture, self._exchange, self._audit, config)
        self._writer: Writer | None = None  # on the writing rank only
        if home.sinks is not None:
            judge = Judge(config.detectors, config.interval) if config.detectors.enabled else None
            self._writer = Writer(home.sinks, judge, self._audit, self._layout, ranks, config.detectors.stop_on)
        self._lockstep = Lockstep(capture.step)
        self._greeted = False  # a first sample tells all ranks' steps, whatever the interval
        self._idle = False  # a step without a backward before it: there is nothing that it could pair with
        self._posted: int | None = None  # step of the sample that was sent last
        self._replica_due = self._wants_comparison = False
        self._weights_due: str | None = None  # checksum in the checkpoint that was loaded
        self._contexts: dict[int, Context] = {}  # of the steps whose collective is under way
        self._written = -1  # step of the newest record
        self._conduct = capture.conduct
        self._observing, self._closed = True, False
        self._step_ended: float | None = None
        self._observe_seconds = 0.0
        capture.connect(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_leave_to_the_parent, weakref.ref(self)))

    # -- the step, in order ------------------------------------------------------------------------------------

    @property
    def scheduled(self) -> int:
        """The step under way as all ranks count it: what communicates is timed by it."""
        return self._lockstep.scheduled

    def measures(self, step: int) -> bool:
        return self._observing and step % self._config.interval == 0

    def measures_exactly(self, step: int) -> bool:
        direction = self._config.direction
        measurement = step // self._config.interval
        due = direction.exact_interval > 0 and measurement % direction.exact_interval == 0
        return direction.method == "exact" or (due and direction.method != "off")

    def before_step(self) -> None:
        """The gradients are aggregated, the optimizer has not run: publish the last sample, send this one. Played."""
        if not self._once(lambda: self._observing):
            return
        started, self._idle = time.perf_counter(), self._decided(lambda: not self._capture.came)
        if not self._idle:
            self._send(self._capture.step)
            self._observe_seconds = time.perf_counter() - started

    def before_reduction(self) -> None:
        """The gradients of a boundary are there, and stages 0 and 1 reduce them next. In an act that is played.

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
        if not (self._responder.communicates(due, self._replica_due) and self._someone_failed(step)):
            self._respond(step, partial(self._responder.before_update, step, due))

    def after_step(self) -> None:
        """The optimizer has run and the engine's counters have advanced. Played."""
        if not self._once(lambda: self._observing):
            return
        if self._idle:
            self._capture.end_step()
            return
        self._end_step(self._capture.step - 1)
        self._lockstep = self._decided(lambda: self._lockstep.stepped())

    def _end_step(self, step: int) -> None:
        now, due = time.perf_counter(), self._decided(lambda: self.scheduled)
        self._alone(self._note_context, step, due, now)
        self._capture.end_step()
        self._step_ended = now
        self._lockstep = self._decided(lambda: self._lockstep.passed())
        if self._responder.compares_replicas:
            asked = self._decided(lambda: self._replica_due)
            self._replica_due = False
            if not (self._responder.communicates(due, asked) and self._someone_failed(step)):
                self._respond(step, partial(self._responder.after_update, due, asked))

    def _someone_failed(self, step: int) -> bool:
        """Whether a rank has said with this step's sample that it will not be there; waits for the sample."""
        if self._posted != step or not self._observing:
            return False
        return bool((self._once(self._exchange.peek).scalars["failed"] > 0).any())

    def _respond(self, step: int, act: Callable[[], None]) -> None:
        """Nobody goes on after a response that broke off, see :class:`ds_silent.ranks.together.BrokeOff`."""
        if not self._observing:
            return
        act()
        why = self._once(lambda: self._responder.stop)
        if why is not None:
            self._end_suspect(step, why)

    def _sample(self, step: int, due: int) -> LocalSample:
        sample = LocalSample({"nothing": 1.0})
        if self.measures(due):
            replica = None
            if self._replicas is not None and not self._responder.compares_replicas:
                replica = self._alone(self._capture_replica, step)
            whole = self._capture.sample(exact=self.measures_exactly(due), replica=replica)
            sample = whole if self._lockstep.whole else _only_words(whole)
            self._alone(self._ask, sample)
        words = self._decided(lambda: self._lockstep.words(step))
        self._lockstep = self._decided(lambda: self._lockstep.told())
        sample.scalars.update({**words, **sample.scalars})
        return sample

    def _ask(self, sample: LocalSample) -> None:
        """What this rank wants of all ranks."""
        if self._wants_comparison:
            sample.scalars["compare"] = 1.0
            self._wants_comparison = False
        if self._writer is not None and self._writer.ends is not None:
            sample.scalars["stop"] = 1.0
        if self._audit.wants_micro_batches:  # on the writing rank
            sample.scalars["diagnose"] = 1.0

    def _gather_micro_batches(self, step: int) -> None:
        """A collective, in a step before which every rank has read that micro-batches are wanted."""
        if self._once(lambda: self._capture.keeps_micro_batches):
            own = self._capture.take_micro_batches(self._layout.layer_size)
            everybody = gather_on_host(own, self._capture.group, self._once)
            self._alone(lambda: self._audit.micro_batches(step, everybody.double()))

    def _capture_replica(self, step: int) -> Tensor | None:
        """Whether the replicas are compared depends on the step and on checkpoints, which all ranks write together."""
        assert self._replicas is not None
        interval = self._config.integrity.replica_interval
        due = self._replica_due or self._passed(step, interval)
        self._replica_due = False
        if due or self._passed(step, -(-interval // REMEMBERED)):
            self._replicas.remember(step)
        return self._replicas.check(step) if due else None

    def _passed(self, step: int, every: int) -> bool:
        """Whether a multiple of ``every`` lies behind the last measured step, and not behind this one."""
        return step // every != (step - self._config.interval) // every

    def _verify_weights(self, step: int) -> None:
        """Once after a resume, on the writing rank; the comparison of the replicas speaks for the others."""
        due, self._weights_due = self._weights_due, None
        if due is None or self._replicas is None or self._writer is None:
            return
        found = self._replicas.weights()
        if found != due:
            message = f"The weights that step {step} starts from ({found}) are not those of the checkpoint ({due})."
            remedy = "Load the checkpoint again, compare its files with their source, and do not go on from here."
            kind = "initial-weights-mismatch"
            self.report(Event(step, kind, "error", (), "checkpoint", None, None, message, remedy))

    def _publish(self, gathered: Gathered | None) -> None:
        """Judge and write one sample, and do what it asks of all ranks, which read it at the same step."""
        if gathered is None:
            return
        self._lockstep, apart = self._decided(lambda: self._lockstep.read(gathered))
        if apart is not None:
            self._switch_off(apart)
            return
        if bool((gathered.scalars["compare"] > 0).any()):
            self._replica_due = True
        if bool((gathered.scalars["nothing"] > 0).any()):
            self._contexts.pop(gathered.step, None)
            return
        if bool((gathered.scalars["diagnose"] > 0).any()):
            self._once(self._capture.keep_micro_batches)
        unlike = self._conduct.agree(gathered, self._capture.group, self._capture.device, self._together)
        self._alone(self._tell_conduct, gathered, unlike)
        drift = None
        if self._differ(gathered) and self._replicas is not None:
            drift = self._replicas.localise(self._capture.group, self._once)
        self._alone(self._write, gathered, drift)
        if bool((gathered.scalars["stop"] > 0).any()):
            self._end_training()

    def _tell_conduct(self, gathered: Gathered, unlike: tuple[Unlike, ...]) -> None:
        if self._writer is not None:
            self._writer.unlike = unlike
            note = self._conduct.note(gathered)
            if note is not None:
                self.report(note)

    def _write(self, gathered: Gathered, drift: Drift | None, wait: bool = False) -> None:
        """Each sample once; ``wait``: where it was published early, it is judged with ``drift`` later."""
        if gathered.step <= self._written:
            if self._writer is not None:
                self._writer.settle(drift, gathered.step)
            return
        self._written = gathered.step
        told = self._responder.take(gathered.step)
        if self._writer is not None:
            self._writer.sample(gathered, self._contexts.pop(gathered.step), drift, told, wait)

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
            if bool((gathered.scalars["nothing"] > 0).any()):
                continue
            if gathered.step > self._written:
                self._write(gathered, None, wait=self._differ(gathered))
            if self._closed and self._writer is not None:  # nobody is asked any more what it is that differs
                self._writer.end_unlike(self._conduct.unasked(gathered), gathered.step)

    def _differ(self, gathered: Gathered) -> bool:
        """Whether the replicas were compared and hold different bits."""
        if self._replicas is None or gathered.hashes is None or not bool((gathered.scalars["replica_seen"] > 0).all()):
            return False
        replicas = gathered.hashes[:, 0]
        return bool((replicas != replicas[0]).any())

    def report(self, event: Event) -> None:
        """Write an event and tell the callbacks; on the writing rank."""
        if self._writer is not None:
            self._writer.report(event)

    def _note_context(self, step: int, due: int, now: float) -> None:
        if self._writer is not None and self.measures(due):
            duration = None if self._step_ended is None else now - self._step_ended
            self._contexts[step] = self._context(Seconds(duration, self._observe_seconds))

    def _context(self, seconds: Seconds) -> Context:
        samples, walk = self._capture.samples, self._capture.walk
        shuffles = walk.facts.shuffles if self.shuffles is None else self.shuffles
        facts = DataFacts(self.samples_per_epoch or walk.facts.rows, shuffles)
        epoch = samples / facts.rows if facts.rows else None
        return Context(
            samples,
            self._capture.batch,
            epoch,
            seconds,
            self._capture.layer_names,
            facts.rows,
            self._capture.skipped,
            self._capture.update_skipped,
            replace(walk, facts=facts),
        )

    # -- for the training script -----------------------------------------------------------------------------------

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
        if self._writer is not None:
            self._writer.on_event(function)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: JSON values. The detectors' state is on the writing rank, whose
        ``client_state`` is the one that DeepSpeed keeps. Steps and samples are in the engine's own counters."""
        self._together.tried(self._publish_early)
        state: dict[str, Any] = {"version": 2, "samples_per_epoch": self.samples_per_epoch}
        return state | (self._alone(self._own_state) or {})

    def _own_state(self) -> dict[str, Any]:
        if self._writer is None:
            return {}
        weights = None if self._replicas is None else self._replicas.weights()
        state = self._writer.state_dict(self._capture.rows_waiting)
        return {**state, "records": self._home.identity(), "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a state that cannot be read is said and left, and judging starts anew."""
        self._records_loaded = state.get("records")
        self.samples_per_epoch = self.samples_per_epoch or state.get("samples_per_epoch") or None
        self._weights_due = state.get("weights")
        if self._responder.compares_replicas:
            self._wants_comparison = True  # this rank alone may have been asked: all hear of it first
        else:
            self._replica_due = True
        if self._writer is not None:
            self._writer.load_state_dict(state)

    @property
    def output_dir(self) -> str:
        """Where the writing rank writes."""
        return self._home.directory

    @property
    def last_record(self) -> StepRecord | None:
        """The newest record, on the rank that writes."""
        return None if self._writer is None else self._writer.last_record

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self._closed

    def flush(self) -> None:
        """Publish what is under way and put it on disk. No collective; every rank may call it at the same step."""
        self._together.tried(self._publish_early)
        if self._writer is not None:
            self._together.tried(self._writer.flush)

    def close(self) -> None:
        """Publish what is under way, close the sinks and leave the engine as it was. No collective."""
        if not self._closed:
            self._closed = True
            for act in (self._publish_early, self._last_words, self._say_goodbye, self._stop):
                self._together.tried(act)
            if self._writer is not None:
                self._together.tried(self._writer.close)
            self._together.tried(self._home.close)

    def _last_words(self) -> None:
        if self._writer is not None:
            self._writer.settle(None)  # nobody comes together any more to find the tensors
            self._writer.repairs(self._responder.take(self._capture.step).repairs)

    def forked(self) -> None:
        """This is a child, as a DataLoader's worker is: records, collectives and the end are the parent's."""
        self._observing, self._closed, self._writer = False, True, None

    def _say_goodbye(self) -> None:
        """If the other ranks go on, their next sample must not wait for this one. Nobody waits for it here either."""
        if self._observing and not self._together.over and dist.is_initialized():
            step, goodbye = self._capture.step, LocalSample({"failed": LEFT})
            self._together.play(lambda: self._exchange.post(step, goodbye, self._together))

    # -- the end -----------------------------------------------------------------------------------------------------

    def before_checkpoint(self) -> None:
        """A checkpoint is being written, by all ranks: what it holds is compared at the next measured step."""
        self._replica_due = True
        self.flush()

    def _end_training(self) -> None:
        """Every rank gets here at the same step, because every rank read the same word."""
        event = None if self._writer is None else self._writer.ends
        self.close()
        if event is not None:
            stop_on = self._config.detectors.stop_on
            logger.error(
                "ds_silent: the training ends here, because of the event %s of step %d and "
                'silent_consistency.detectors.stop_on "%s": %s',
                event.kind,
                event.step,
                stop_on,
                event.message,
            )
        raise SystemExit(STOPPED)

    def _end_suspect(self, step: int, why: str) -> None:
        """Every rank gets here at the same step, by the same word or the same comparison."""
        if self._writer is not None and self.measures(step):
            self._contexts.setdefault(step, self._context(Seconds()))
        self._publish(self._exchange.collect(self._once))
        directory, tag = Path(self.output_dir, "suspect"), f"suspect_step{step}"
        saved = self._once(lambda: self._save_suspect(directory, tag, why))
        self.close()
        if self._writer is not None:
            logger.error(
                "ds_silent: the training ends here, at step %d, because of silent_consistency.%s; events.jsonl in %s "
                "says what was wrong%s",
                step,
                why,
                self.output_dir,
                f", and {directory / tag} holds what the ranks have, marked as suspect" if saved else "",
            )
        raise SystemExit(STOPPED)

    def _save_suspect(self, directory: Path, tag: str, why: str) -> bool:
        """A checkpoint beside the user's own, which stay as they are. A collective."""
        try:
            self._capture.save_checkpoint(str(directory), tag, {"ds_silent_suspect": why})
            if self._writer is not None:
                (directory / tag / "SUSPECT").write_text(f"{why}; see ../../events.jsonl\n", encoding="utf-8")
            return True
        except Exception as error:  # the training ends in any case
            logger.warning("ds_silent: the suspect checkpoint could not be written: %s", error)
            return False

    def _switch_off(self, event: Event) -> None:
        """Every rank gets here at the same step, because every rank read the same words."""
        self._stop()
        if self._writer is not None:
            self._together.tried(self.report, event)

    def stand_down(self, event: Event) -> None:
        """Observe nothing and say why; the same call on every rank, before the first step."""
        self._stop()
        if self._writer is not None:
            logger.warning("ds_silent: %s", event.message)
            self.report(event)

    def _stop(self) -> None:
        self._observing = False
        self._capture.close()


def _leave_to_the_parent(reference: weakref.ref[Observer]) -> None:
    observer = reference()
    if observer is not None:
        observer.forked()


def _only_words(sample: LocalSample) -> LocalSample:
    """Where a part of the step was not seen: only whether this rank broke."""
    return LocalSample({"nothing": 1.0, **{name: word for name, word in sample.scalars.items() if name == "failed"}})
