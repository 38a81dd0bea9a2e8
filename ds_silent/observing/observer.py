"""Give a training script its handle of the observation.

    backward -> capture -> Observation -> exchange -> respond                    every rank, before the update
                                                  \\-> measure -> judge -> sinks  the writing rank

:mod:`ds_silent.observing.step_loop` is that line, one step in the order of time.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ds_silent.capture.row_hashes import as_ids
from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.places import Places
from ds_silent.framework import Promise, whole_number
from ds_silent.observing.recorder import Recorder
from ds_silent.observing.records_directory import RunDirectory
from ds_silent.observing.step_loop import StepLoop, moments_of
from ds_silent.records import Event, StepRecord
from ds_silent.sinks.scalars import scalars
from ds_silent.text import shown

logger = logging.getLogger("ds_silent")
_VERSION = 2  # of the state


class Observer:
    """Watches one training. Made by :func:`ds_silent.initialize` or :func:`ds_silent.attach`, on every rank."""

    def __init__(self, capture: StepCapture, config: SilentConsistencyConfig, home: RunDirectory, first: int):
        """``first``: the step of rank 0, by which all begin to count."""
        self._capture, self._home = capture, home
        self._guard = capture.guard
        self._steps = StepLoop(capture, config, home, self.close, first)
        self._leaving = self._steps.leaving
        self._publisher, self._replicas = self._steps.publisher, self._steps.replicas
        self._closed = False
        self._handled = id(sys.exc_info()[1])  # of the exception in whose handler the training begins, if any
        self.closing: Callable[[], object] = list  # what is still to be done when it closes
        self.connect()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_leave_to_the_parent, weakref.ref(self)))

    def connect(self) -> None:
        """Put the framework's hooks in place."""
        self._capture.connect(moments_of(self._capture, self._steps, self.before_checkpoint, self.close))

    def __reduce__(self) -> tuple[Any, ...]:
        """Be None in a copy or a file of what holds it: neither is observed."""
        return type(None), ()

    # -- for the training script -----------------------------------------------------------------------------------

    @property
    def samples_per_epoch(self) -> int | None:
        """Rows of one epoch over all ranks, for ``epoch`` in the records; None: the loader that feeds the training is
        to say. May be set."""
        return self._publisher.rows_in_epoch

    @samples_per_epoch.setter
    def samples_per_epoch(self, rows: int | None) -> None:
        self._publisher.rows_in_epoch = rows

    @property
    def shuffles(self) -> bool | None:
        """Whether each epoch has an order of its own; None likewise. May be set."""
        return self._publisher.shuffles

    @shuffles.setter
    def shuffles(self, shuffles: bool | None) -> None:
        self._publisher.shuffles = shuffles

    @property
    def output_dir(self) -> str:
        """Where the writing rank writes, on every rank; in a directory that was in use, from step 1 on."""
        return self._home.directory

    @property
    def last_record(self) -> StepRecord | None:
        """The newest record, on the rank that writes."""
        return self._publisher.recorder.last_record

    @property
    def scalars(self) -> dict[str, float]:
        """The newest record's numbers by the tags of TensorBoard's curves, for a tracker of the script's own; empty on
        the ranks that do not write."""
        return {} if self.last_record is None else dict(scalars(self.last_record))

    @property
    def step(self) -> int | None:
        """Optimizer steps taken so far, on every rank; None in a single process, where nothing is observed."""
        return self._capture.framework.step - 1

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self._closed

    def measures(self, step: int) -> bool:
        """Whether ``step`` is measured."""
        return self._steps.measures(step)

    def observe_batch(self, sample_ids: Any) -> None:
        """Tell which rows this rank's next micro-batch holds, before its forward.

        Args:
            sample_ids: one integer per row that means the same row on every rank, such as the row's place in the data
                set: a list, a tuple, a numpy array or a 1-D tensor, of any integer dtype and on any device.

        Raises:
            TypeError, ValueError: they are something else (:func:`ds_silent.capture.batch_rows.as_ids`).
        """
        ids = as_ids(sample_ids)
        if self._steps.observing:
            self._capture.rows.given(ids)

    def promised(self, promise: Promise) -> None:
        """Take what the trainer around this training promises of its loss, on every rank."""
        self._capture.framework.promise = promise

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call ``function(event)`` for every event from now on, on the writing rank, between two optimizer steps."""
        self._publisher.recorder.on_event(function)

    def report(self, event: Event) -> None:
        """Write an event and tell the callbacks; on the writing rank."""
        self._publisher.recorder.report(event)

    def place(self, places: Places) -> None:
        """Write ``ranks.json``, and name hosts and devices from now on; on the writing rank."""
        if places.places:
            self._home.write_file("ranks.json", places.text())
            self._publisher.recorder.places = places

    # -- in a checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: JSON values. The detectors' state is on the writing rank, so it is that rank's
        which must be kept. Steps and samples are in the framework's own counters, and here where it has none."""
        self._guard.cleanup(self._leaving.publish_early, self._closed)
        state: dict[str, Any] = {"version": _VERSION, "samples_per_epoch": self.samples_per_epoch}
        if counted := self._capture.framework.counts.state_dict():
            state["counted"] = counted
        return state | (self._guard.local(self._own_state) or {})

    def _own_state(self) -> dict[str, Any]:
        recorder = self._publisher.recorder
        if not recorder.writes:
            return {}
        state = recorder.state_dict(self._capture.rows.waiting)
        return {**state, "records": self._home.identity(), "weights_checksum": self._replicas.weights()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; an unreadable state is logged and ignored, and judging starts anew."""
        self._guard.cleanup(self._leaving.publish_early, self._closed)  # before the way back
        try:
            self._check(state)
        except ValueError as error:
            level = logging.WARNING if self._publisher.recorder.writes else logging.INFO
            logger.log(level, "ds_silent: the observer's state in the checkpoint is not used: %s", error)
            state = {}
        self._steps.records_loaded = state.get("records")
        self.samples_per_epoch = self.samples_per_epoch or state.get("samples_per_epoch") or None
        self._replicas.loaded(state.get("weights_checksum"))
        self._publisher.recorder.load_state_dict(state)

    def _check(self, state: Any) -> None:
        """Take the counters of a saved state, which any version can read; raise ValueError for what is damaged."""
        if not isinstance(state, Mapping):
            raise ValueError(f"it must be an object, and is {shown(state)}")
        if "counted" in state:
            self._capture.framework.counts.load_state_dict(state["counted"])
        if state.get("version", _VERSION) != _VERSION:
            raise ValueError(f"it has version {shown(state['version'])}, this one reads {_VERSION}")
        if state.get("samples_per_epoch") is not None:
            whole_number(state, "samples_per_epoch", 0)
        for key in ("records", "weights_checksum"):
            if not isinstance(state.get(key), str | None):
                raise ValueError(f'"{key}" must be a text, and is {shown(state[key])}')

    def before_checkpoint(self) -> None:
        """A checkpoint is being written, by all ranks: what it holds is compared at the next measured step."""
        self._replicas.due = True
        self.flush()

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Publish what is under way and put it on disk. No collective; every rank may call it at the same step."""
        self._guard.cleanup(self._leaving.publish_early, self._closed)
        self._guard.cleanup(self._publisher.recorder.flush)

    def close(self, error: BaseException | None = None) -> None:
        """Publish what is under way, close the sinks and leave the framework as it was. No collective.

        Args:
            error: what has ended the training, for ``run.json``; None where nothing has, or the exception that is
                handled now: ``finally`` has no name for it.
        """
        if not self._closed:
            raised = sys.exc_info()[1]
            error = error or (None if id(raised) == self._handled else raised)
            self._closed = True
            cleanup, steps = self._guard.cleanup, self._steps
            broken = error is not None and not (isinstance(error, SystemExit) and not error.code)
            cleanup(self._leaving.publish_early, closed=True, broken=broken)
            cleanup(self._leaving.say_goodbye, broken)
            cleanup(lambda: self._publisher.last_words(self._capture.step))
            cleanup(steps.stop, ended=True)
            cleanup(self.closing)
            cleanup(self._home.ends, self._capture.step - 1, error or self._leaving.unanswered)
            cleanup(self._publisher.recorder.close)
            cleanup(self._home.close)

    def forked(self) -> None:
        """Do nothing in a child, as a DataLoader's worker is: records, collectives and the end are the parent's."""
        self._steps.observing, self._guard.over = False, True
        self._closed, self._publisher.recorder = True, Recorder()

    def stand_down(self, event: Event) -> None:
        """Observe nothing and say why; the same call on every rank, before the first step."""
        self._steps.stop()
        if self._publisher.recorder.writes:
            logger.warning("ds_silent: %s", event.message)
            self.report(event)


class IdleObserver(Observer):
    """Do nothing, where there is nothing to observe, so that the same script runs in one process.

    Args:
        output_dir: that of the block, in which nothing is written.
    """

    samples_per_epoch: int | None = None
    shuffles: bool | None = None
    output_dir = ""
    last_record = None
    step = None
    closed = False

    def __init__(self, output_dir: str):
        self.output_dir = output_dir

    def measures(self, step: int) -> bool:
        return False

    def observe_batch(self, sample_ids: Any) -> None:
        as_ids(sample_ids)

    def promised(self, promise: Promise) -> None:
        pass

    def on_event(self, function: Callable[[Event], None]) -> None:
        pass

    def report(self, event: Event) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def before_checkpoint(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, error: BaseException | None = None) -> None:
        self.closed = True


def _leave_to_the_parent(reference: weakref.ref[Observer]) -> None:
    observer = reference()
    if observer is not None:
        observer.forked()
