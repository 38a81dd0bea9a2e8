"""One step, from backward to sinks.

    backward -> capture -> LocalSample -> exchange -> measure -> judge -> respond -> sinks

The observer only orders the others. Whether anything communicates depends on the step and the configuration, never
on what happened on one rank: a rank whose part broke still sends a sample, which says so, and one step later all
ranks read that and stop observing together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.audit import Audit
from ds_silent.capture.base import Capture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import Judge, log_steps
from ds_silent.exchange import Gathered, LocalSample, gather_on_host, make_exchange
from ds_silent.lockstep import LEFT, Lockstep
from ds_silent.measure import Context
from ds_silent.plan import REMEMBERED, layout_of, replicas_of
from ds_silent.records import Event, Seconds, StepRecord
from ds_silent.replicas import Drift
from ds_silent.respond import Responder
from ds_silent.sinks import Sink
from ds_silent.writer import Writer

logger = logging.getLogger("ds_silent")
STOPPED = 3
"""Exit status of a training that ``detectors.stop_on`` ended."""


class Observer:
    """Watches one training. Made by :func:`ds_silent.initialize` or :func:`ds_silent.attach`, on every rank.

    Attributes:
        samples_per_epoch: rows of one epoch over all ranks, for ``epoch`` in the records; None when not known.
        output_dir: where that rank writes.
    """

    def __init__(self, capture: Capture, config: SilentConsistencyConfig, sink: Sink | None):
        self.samples_per_epoch: int | None = None
        self.output_dir = config.output_dir
        self._capture, self._config = capture, config
        ranks = dist.get_world_size(capture.group)
        self._layout = layout_of(config, ranks, capture)
        self._exchange = make_exchange(self._layout, capture.group, capture.device)
        log_rate = log_steps(config.detectors, config.interval) + math.log(2.0)  # the reduction, and what is applied
        self._audit = Audit(self._layout, capture.arithmetic, capture.clip, log_rate, capture.layer_names)
        self._replicas = replicas_of(config, capture)
        self._responder = Responder(capture, self._exchange, self._audit, config)
        self._writer: Writer | None = None  # on the writing rank only
        if sink is not None:
            judge = Judge(config.detectors, config.interval) if config.detectors.enabled else None
            self._writer = Writer(sink, judge, self._audit, self._layout, ranks, config.detectors.stop_on)
        self._lockstep = Lockstep(capture.step)
        self._greeted = False  # a first sample tells all ranks' steps, whatever the interval
        self._idle = False  # a step without a backward before it: there is nothing that it could pair with
        self._posted: int | None = None  # step of the sample that was sent last
        self._replica_due = self._wants_comparison = False
        self._weights_due: str | None = None  # checksum in the checkpoint that was loaded
        self._contexts: dict[int, Context] = {}  # of the steps whose collective is under way
        self._owed: list[Gathered] = []  # published early: what they ask of all ranks is due at the next step
        self._observing, self._closed = True, False
        self._step_ended: float | None = None
        self._observe_seconds = 0.0
        capture.connect(self)

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
        """The gradients are aggregated, the optimizer has not run: publish the last sample, send this one."""
        started, self._idle = time.perf_counter(), not self._capture.came
        if not self._idle:
            self._send(self._capture.step)
            self._observe_seconds = time.perf_counter() - started

    def before_reduction(self) -> None:
        """The gradients of a boundary are there, and stages 0 and 1 reduce them next.

        Where a step was left out after the last reduction, the others' samples of it wait for this rank's, and they
        for the reduction: so it is sent now, and says so.
        """
        if self._lockstep.reduction():
            step = self._capture.step
            self._send(step)
            self._end_step(step)

    def _send(self, step: int) -> None:
        due = self.scheduled
        try:
            self._catch_up()
            self._publish(self._exchange.collect(), together=True)
            if self._weights_due is not None:
                self._verify_weights(step)
            if self.measures(due) or (self._observing and not self._greeted):
                sample = self._sample(step, due)
                sample.scalars.update({**self._lockstep.words(step), **sample.scalars})
                self._gather_micro_batches(step)
                self._exchange.post(step, sample)
                self._greeted, self._posted = True, step
        except Exception as error:  # only a broken process group gets here; the training meets it by itself
            logger.warning("ds_silent: observation ends on this rank, the training goes on: %s", error)
            self._stop()
        if not (self._responder.communicates(due, self._replica_due) and self._someone_failed(step)):
            self._respond(step, lambda _: self._responder.before_update(due))

    def after_step(self) -> None:
        """The optimizer has run and the engine's counters have advanced."""
        step = self._capture.step - 1
        if self._idle:
            self._capture.end_step()
            return
        self._end_step(step)
        self._lockstep.stepped()

    def _end_step(self, step: int) -> None:
        now, due = time.perf_counter(), self.scheduled
        if self._writer is not None and self.measures(due):
            duration = None if self._step_ended is None else now - self._step_ended
            self._contexts[step] = self._context(Seconds(duration, self._observe_seconds))
        self._capture.end_step()
        self._step_ended = now
        self._lockstep.passed()
        if self._responder.compares_replicas:
            asked, self._replica_due = self._replica_due, False
            if not (self._responder.communicates(due, asked) and self._someone_failed(step)):
                self._respond(step, lambda _: self._responder.after_update(due, asked))

    def _someone_failed(self, step: int) -> bool:
        """Whether a rank has said with this step's sample that it will not be there; waits for the sample."""
        if self._posted != step or not self._observing:
            return False
        return bool((self._exchange.peek().scalars["failed"] > 0).any())

    def _respond(self, step: int, act: Callable[[int], None]) -> None:
        """Nobody may go on after a response that broke off: the others would wait for this rank, or differ from it."""
        if not self._observing:
            return
        try:
            act(step)
        except Exception as error:
            raise RuntimeError(
                f"ds_silent: the response at step {step} broke off on rank {dist.get_rank(self._capture.group)} "
                f"({error}); the ranks may differ now: start again from the last checkpoint"
            ) from error
        if self._responder.stop is not None:
            self._end_suspect(step, self._responder.stop)

    def _sample(self, step: int, due: int) -> LocalSample:
        if not self.measures(due):
            return LocalSample({"nothing": 1.0})
        replica = None
        if self._replicas is not None and not self._responder.compares_replicas:
            replica = self._capture_replica(step)
        sample = self._capture.sample(exact=self.measures_exactly(due), replica=replica)
        if not self._lockstep.whole:
            sample = LocalSample({"nothing": 1.0, **{k: v for k, v in sample.scalars.items() if k == "failed"}})
        if self._writer is not None and self._writer.ends is not None:
            sample.scalars["stop"] = 1.0
        if self._wants_comparison:
            sample.scalars["compare"] = 1.0
            self._wants_comparison = False
        if self._audit.wants_micro_batches:  # on the writing rank
            sample.scalars["diagnose"] = 1.0
        return sample

    def _gather_micro_batches(self, step: int) -> None:
        """A collective, in a step before which every rank has read that micro-batches are wanted."""
        own = self._capture.take_micro_batches(self._layout.layer_size)
        if own is not None:
            self._audit.micro_batches(step, gather_on_host(own, self._capture.group).double())

    def _capture_replica(self, step: int) -> Tensor | None:
        """Whether the replicas are compared depends on the step and on checkpoints, which all ranks write together."""
        assert self._replicas is not None
        interval = self._config.integrity.replica_interval
        due = self._replica_due or self._passed(step, interval)
        self._replica_due = False
        try:
            if due or self._passed(step, -(-interval // REMEMBERED)):
                self._replicas.remember(step)
            return self._replicas.check(step) if due else None
        except Exception as error:  # this rank's own bug
            self._capture.fail(error)
            return None

    def _passed(self, step: int, every: int) -> bool:
        """Whether a multiple of ``every`` lies behind the last measured step, and not behind this one."""
        return step // every != (step - self._config.interval) // every

    def _verify_weights(self, step: int) -> None:
        """Once after a resume, on the writing rank; the comparison of the replicas speaks for the others."""
        due, self._weights_due = self._weights_due, None
        if self._replicas is None or self._writer is None:
            return
        found = self._replicas.weights()
        if found != due:
            message = f"The weights that step {step} starts from ({found}) are not those of the checkpoint ({due})."
            remedy = "Load the checkpoint again, compare its files with their source, and do not go on from here."
            kind = "initial-weights-mismatch"
            self.report(Event(step, kind, "error", (), "checkpoint", None, None, message, remedy))

    def _catch_up(self) -> None:
        """What samples that were published early, on some ranks or on all, ask of all ranks together."""
        while self._owed:
            gathered = self._owed.pop(0)
            drift = self._agree(gathered)
            if self._writer is not None:
                self._writer.settle(drift)
            self._stop_if_asked(gathered)

    def _publish(self, gathered: Gathered | None, together: bool) -> None:
        """Judge and write one sample.

        Args:
            gathered: the sample, or nothing.
            together: every rank is here at the same step and may communicate. If not, what the sample asks of all
                ranks waits for the next step, where every rank does it, whoever published early.
        """
        if gathered is None:
            return
        apart = self._lockstep.read(gathered)
        if apart is not None:
            self._switch_off(apart)
            return
        if bool((gathered.scalars["compare"] > 0).any()):
            self._replica_due = True
        if bool((gathered.scalars["nothing"] > 0).any()):
            self._contexts.pop(gathered.step, None)
            return
        drift = self._agree(gathered) if together else None
        if not together:
            self._owed.append(gathered)
        told = self._responder.take(gathered.step)
        if self._writer is not None:
            try:
                wait = not together and self._differ(gathered)
                self._writer.sample(gathered, self._contexts.pop(gathered.step), drift, told, wait)
            except Exception as error:  # this rank's own bug: its next sample says so, and all switch off together
                self._capture.fail(error)
        if together:
            self._stop_if_asked(gathered)

    def _agree(self, gathered: Gathered) -> Drift | None:
        """Once per sample, by all ranks at the same step, because all have read the same words."""
        if bool((gathered.scalars["diagnose"] > 0).any()):
            self._capture.keep_micro_batches()
        return self._replicas.localise(self._capture.group) if self._differ(gathered) and self._replicas else None

    def _differ(self, gathered: Gathered) -> bool:
        """Whether the replicas were compared and hold different bits."""
        if self._replicas is None or gathered.hashes is None or not bool((gathered.scalars["replica_seen"] > 0).all()):
            return False
        replicas = gathered.hashes[:, 0]
        return bool((replicas != replicas[0]).any())

    def _stop_if_asked(self, gathered: Gathered) -> None:
        if bool((gathered.scalars["stop"] > 0).any()):
            self._end_training()

    def report(self, event: Event) -> None:
        """Write an event and tell the callbacks; on the writing rank."""
        if self._writer is not None:
            self._writer.report(event)

    def _context(self, seconds: Seconds) -> Context:
        samples = self._capture.samples
        epoch = samples / self.samples_per_epoch if self.samples_per_epoch else None
        return Context(
            samples,
            self._capture.batch,
            epoch,
            seconds,
            self._capture.layer_names,
            self.samples_per_epoch,
            self._capture.skipped,
        )

    # -- for the training script -----------------------------------------------------------------------------------

    def observe_batch(self, sample_ids: Tensor) -> None:
        """Tell which rows this rank's next micro-batch holds: 1-D int64 ids that mean the same row on every rank.

        Raises:
            ValueError: ids of another shape or dtype.
        """
        if sample_ids.ndim != 1 or sample_ids.dtype.is_floating_point:
            raise ValueError(
                f"observe_batch needs a 1-D int64 tensor of row ids, got {sample_ids.dtype} of shape "
                f"{tuple(sample_ids.shape)}; pass one id per row of this rank's micro-batch"
            )
        if self._observing:
            self._capture.observe_batch(sample_ids)

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call ``function(event)`` for every event from now on, on the writing rank, between two optimizer steps."""
        if self._writer is not None:
            self._writer.on_event(function)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: JSON values. The detectors' state is on the writing rank, whose
        ``client_state`` is the one that DeepSpeed keeps. Steps and samples are in the engine's own counters."""
        self._drain()
        state: dict[str, Any] = {"version": 2, "samples_per_epoch": self.samples_per_epoch}
        if self._writer is not None:
            state |= self._writer.state_dict(self._capture.rows_waiting)
            state["weights"] = None if self._replicas is None else self._replicas.weights()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a state that cannot be read is said and left, and judging starts anew."""
        self.samples_per_epoch = state.get("samples_per_epoch") or None
        self._weights_due = state.get("weights")
        if self._responder.compares_replicas:
            self._wants_comparison = True  # this rank alone may have been asked: all hear of it first
        else:
            self._replica_due = True
        if self._writer is not None:
            self._writer.load_state_dict(state)

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
        self._drain()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Publish what is under way, close the sinks and leave the engine as it was. No collective."""
        if not self._closed:
            self._closed = True
            self._drain()
            if self._writer is not None:
                self._writer.settle(None)  # nobody comes together any more to find the tensors
                self._writer.repairs(self._responder.take(self._capture.step).repairs)
            self._say_goodbye()
            self._stop()
            if self._writer is not None:
                self._writer.close()

    def _say_goodbye(self) -> None:
        """If the other ranks go on, their next sample must not wait for this one. Nobody waits for it here either."""
        if self._observing and dist.is_initialized():
            try:
                self._exchange.post(self._capture.step, LocalSample({"failed": LEFT}))
            except Exception as error:  # a peer is gone, and so is the training
                logger.debug("ds_silent: the end could not be told to the other ranks: %s", error)

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
        self._publish(self._exchange.collect(), together=True)
        directory, tag = Path(self.output_dir, "suspect"), f"suspect_step{step}"
        self._responder.stop = None
        saved = self._save_suspect(directory, tag, why)
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

    def _drain(self) -> None:
        try:
            for gathered in self._exchange.drain():
                self._publish(gathered, together=False)
        except Exception as error:  # a peer is gone: what it did not send cannot be published
            logger.warning("ds_silent: the last measured step could not be collected: %s", error)

    def _switch_off(self, event: Event) -> None:
        """Every rank gets here at the same step, because every rank read the same words."""
        self._stop()
        if self._writer is not None:
            self.report(event)

    def stand_down(self, event: Event) -> None:
        """Observe nothing and say why; the same call on every rank, before the first step."""
        self._stop()
        if self._writer is not None:
            logger.warning("ds_silent: %s", event.message)
            self.report(event)

    def _stop(self) -> None:
        self._observing = False
        self._capture.close()
