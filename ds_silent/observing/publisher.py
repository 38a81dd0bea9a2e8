"""Publish a gathered step: every rank does what it asks of all, the writing rank judges and writes it.

publisher = make_publisher(capture, config, home, layout, checker, replicas, responder)
publisher.publish(arrived)                       # every rank, at the same step; the guard runs it
publisher.early(arrived, closed=False)           # no collective: what is under way at a checkpoint or at the end
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.loaders import DataFacts
from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.device import local_of
from ds_silent.distributed.parts import Parts
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import Gathered, Wishes, on_all, on_any
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.measure.record import Context
from ds_silent.measure.reduction_check import ReductionChecker
from ds_silent.measure.tracer import Tracer
from ds_silent.observing.recorder import Recorder
from ds_silent.observing.records_directory import RunDirectory
from ds_silent.records import Event, Seconds
from ds_silent.replicas.compare import Drift, ReplicaChecks
from ds_silent.respond.responder import Responder
from ds_silent.sinks.scalars import MonitorSink

_IDLE = 8  # updates in a row without a backward before them, from which on they are told


class Publisher:
    """Publish each gathered step once, with what this rank knows of it by itself.

    Attributes:
        recorder: writes and judges; on all ranks but one it does nothing.
        rows_in_epoch: rows of one epoch over all ranks; None where the loader that feeds the training is to say.
        shuffles: whether each epoch has an order of its own; None likewise.
    """

    def __init__(
        self,
        capture: StepCapture,
        recorder: Recorder,
        replicas: ReplicaChecks,
        responder: Responder,
        tracer: Tracer | None = None,
    ):
        self.recorder, self._capture, self._replicas, self._responder = recorder, capture, replicas, responder
        self._tracer = tracer
        self.rows_in_epoch: int | None = None
        self.shuffles: bool | None = None
        self._model = model_of(capture)
        self._ended: float | None = None  # when the last step did
        self._contexts: dict[int, Context] = {}  # by boundary, of the steps whose observations are under way
        self._early: set[int] = set()  # boundaries of those that are written already
        self._newest = -1  # step of the newest record
        self._parting: tuple[object, ...] = ()  # at the step before
        self._idle = 0  # updates in a row that no backward came before

    # -- what this rank knows of a step by itself ------------------------------------------------------------------

    def step_ended(self, boundary: int, measured: bool, now: float, observing: float) -> None:
        """Keep the context of a step that has ended at ``now``, of which the observer took ``observing`` seconds.

        Args:
            boundary: its number in this process: behind a checkpoint that was loaded, a step may be under way twice.
        """
        if measured and self.recorder.writes:
            duration = None if self._ended is None else now - self._ended
            self._contexts[boundary] = self._context(Seconds(duration, observing))
        self._ended = now

    def update_begins(self, idle: bool, step: int) -> None:
        """Report optimizers that step again and again and find no gradient; ``idle``: no backward reached the model."""
        self._idle = self._idle + 1 if idle else 0
        if self._idle == _IDLE and self.recorder.writes and not self._script_has_gradients():
            self.recorder.report(nothing_trained(step - _IDLE + 1))

    def _script_has_gradients(self) -> bool:
        """Tell whether the script writes gradients itself, as evolution strategies do; once, since the device waits."""
        held = [one.grad for one in self._capture.framework.parameters if one.grad is not None]
        return any(bool(local_of(one).any()) for one in held)

    def cut_short(self, boundary: int) -> None:
        """Keep the context of a step that does not end, because the training does."""
        if self.recorder.writes:
            self._contexts.setdefault(boundary, self._context(Seconds()))

    def _context(self, seconds: Seconds) -> Context:
        capture, counts, walk = self._capture, self._capture.framework.counts, self._capture.walk
        objective = capture.settings.objective
        if self._tracer is not None:
            self._tracer.begin(objective.backwards)
        shuffles = walk.facts.shuffles if self.shuffles is None else self.shuffles
        facts = walk.facts if self.rows_in_epoch in (None, walk.facts.rows) else DataFacts(self.rows_in_epoch)
        facts = replace(facts, shuffles=shuffles)
        of_data = capture.moments.forwards.rows_of_data
        return Context(
            counts.samples,
            counts.batch,
            counts.samples / facts.rows if facts.rows and of_data.known else None,
            seconds,
            capture.layer_names,
            None if of_data.unlike and not walk.told else facts.rows,
            capture.moments.skipped,
            counts.update_skipped,
            replace(walk, facts=facts),
            capture.rows.sampling,
            objective.constants,
            objective.promise,
            capture.framework.promise,
            objective.items is not None,
            objective.items is None and objective.is_undivided(capture.framework.micro_batches),
            objective.counted_beside(capture.shape.ranks),
            capture.framework.micro_batches,
            None if self._tracer is None else self._tracer.step,
            capture.moments.plan.traces,
            () if capture.traced is None else capture.traced.rates,
            objective.crossing.found,
            tuple(capture.framework.script_hooks.changed),
            capture.framework.names,
        )

    # -- what was gathered of a step -------------------------------------------------------------------------------

    def publish(self, arrived: Arrived) -> bool:
        """Do what a gathered step asks of all ranks, who read it at the same step, and write it.

        Returns:
            whether the training is to end by what was written.
        """
        guard, capture, known = self._capture.guard, self._capture, arrived.known
        if on_any(known.wishes.compare):
            self._replicas.due = True
        if on_any(known.status.nothing):
            self._contexts.pop(_boundary_of(known), None)
            return False
        if on_any(known.wishes.diagnose):
            guard.agreed(capture.kept.ask)
        self.recorder.unlike = (*capture.settings_check.agree(arrived), *capture.breach_check.agree(arrived))
        parting = parting_of(known, capture.settings_check.differing)
        if guard.agreed(lambda: parting != self._parting):  # it begins or ends
            self._replicas.due = True
        self._parting = parting
        drift = self._replicas.localise(guard.collective) if self._replicas.differ(known) else None
        guard.local(self._in_turn, arrived, drift)
        guard.local(self._note_same_draws, known)  # behind the record: a callback may publish what is under way
        return on_any(known.wishes.stop)

    def wishes(self) -> Wishes[float | Tensor]:
        """Return what this rank wants of all ranks; to stop and to diagnose on the writing rank only."""
        compare, self._replicas.wanted = self._replicas.wanted or self.recorder.take_parted(), False
        stop, diagnose = self.recorder.ends is not None, self.recorder.wants_micro_batches
        return Wishes(float(stop), float(diagnose), float(compare))

    def _in_turn(self, arrived: Arrived, drift: Drift | None) -> None:
        """Write a step whose turn has come, or judge it with ``drift`` where it was published early."""
        boundary = _boundary_of(arrived.known)
        if boundary in self._early:
            self._early.remove(boundary)
            self.recorder.settle(drift, arrived.step)
        else:
            self._write(arrived, drift)

    def _write(self, arrived: Arrived, drift: Drift | None, wait: bool = False) -> None:
        """Write a step's record and judge it. ``wait``: it was published early, and is judged with ``drift`` later."""
        step, context = arrived.step, self._contexts.pop(_boundary_of(arrived.known), None)
        log = self._responder.take(step if step > self._newest else math.inf)  # gone back: what waits is of before
        self._newest = step
        if self.recorder.writes:
            assert context is not None
            self.recorder.step(lambda: self._everything(arrived), context, drift, log, wait)

    def _everything(self, arrived: Arrived) -> Gathered:
        return arrived.all if self._model is None else self._model.exchange(arrived.all)

    def early(self, arrived: Arrived, closed: bool) -> None:
        """Write what is under way. What it asks of all ranks waits for its step, where every rank does it, whoever
        published early. ``closed``: no rank comes to that step any more."""
        known = arrived.known
        if on_any(known.status.nothing):
            return
        if (boundary := _boundary_of(known)) not in self._early:
            self._early.add(boundary)  # first: a callback may publish
            if closed and boundary not in self._contexts:  # the step has not ended, and will not: an optimizer has
                self._capture.framework.counts.take_rows()  # raised, or some have not stepped
                self.cut_short(boundary)
            self._write(arrived, None, wait=self._replicas.differ(known))
        if closed and self.recorder.writes:  # no rank is asked any more what it is that differs
            unlike = self._capture.settings_check.unasked(arrived), self._capture.breach_check.unasked(arrived)
            self.recorder.end_unlike(sum(unlike, ()), known.step)

    def _note_same_draws(self, known: Gathered) -> None:
        """Report once that the ranks' first forwards drew the same random numbers."""
        if self.recorder.writes:
            note = self._capture.settings_check.note(known, self._capture.shape.ranks)
            if note is not None:
                self.recorder.report(note)

    def look_around(self, step: int) -> None:
        """Report what is found beside the observations: by a resume, and by what other groups hold alike."""
        if self.recorder.writes:  # the comparison of the replicas speaks for the others
            found = self._replicas.verify(step)
            if found is not None:
                self.recorder.report(found)
        peers = self._capture.framework.peers
        for event in peers.compare(step) if peers else ():
            self.recorder.report(event)

    def last_words(self, step: int) -> None:
        """Judge what still waits, as the training ends at ``step``: the tensors that differ stay unnamed."""
        self.recorder.settle(None)
        self.recorder.repairs(self._responder.take(step).repairs)


def _boundary_of(known: Gathered) -> int:
    """Return the number of a step in this process; ranks that count otherwise have stopped observing."""
    return int(known.status.boundary[0])


def parting_of(known: Gathered, settings: Mapping[str, Parts]) -> tuple[object, ...]:
    """Return what all ranks know of a step that can part their replicas, empty in health: settings that differ, a step
    that only some optimizers took, an aggregate of other bits."""
    seen, hashes = known.applied.seen, known.hashes
    found: list[object] = [*settings.items()]
    if bool((seen != 0).all()) and on_any(seen) and not on_all(seen):
        found.append((seen > 0).tolist())
    if hashes is not None and on_all(known.reduced.seen) and bool((hashes[:, 1:] != hashes[0, 1:]).any()):
        found.append("aggregate")
    return tuple(found)


def nothing_trained(step: int) -> Event:
    """Make the event of updates since ``step`` that find no gradient: no backward reaches the model any more."""
    message = (
        f"Since step {step} the optimizer steps, and no backward before it has brought the model a gradient: nothing "
        "is trained, and no step is measured."
    )
    remedy = (
        "Look at what needs a gradient (requires_grad) and at what cuts the loss off from the model: loading a second "
        "adapter freezes the first in some versions of peft; detach() and no_grad() do. If that is meant, do nothing."
    )
    return Event(step, "update-mismatch", "warning", (), "gradient", None, None, message, remedy)


def model_of(capture: StepCapture) -> WholeModel | None:
    """Return what other groups hold of the model; on the writing rank, where there are others."""
    return capture.framework.peers.model if capture.framework.peers else None


def make_publisher(
    capture: StepCapture,
    config: SilentConsistencyConfig,
    home: RunDirectory,
    layout: Layout,
    checker: ReductionChecker,
    replicas: ReplicaChecks,
    responder: Responder,
) -> Publisher:
    """Make the publisher, with the recorder of this rank."""
    members, framework = dist.get_process_group_ranks(capture.group), capture.framework
    # Judged beside the next step where nothing waits for what is found: no response, no word to end the training, no
    # other group; and where nothing is written in the training's own order, as a framework's monitor is.
    responds = config.respond.on_aggregation_error != "report" or config.detectors.stop_on != "never"
    monitored = home.sinks is not None and any(isinstance(sink, MonitorSink) for sink in home.sinks.sinks)
    beside = not (responds or monitored or model_of(capture) is not None)
    ranks_comparable = framework.ranks_comparable
    tracer = Tracer(capture, config, layout) if config.trace is not None and home.sinks is not None else None
    recorder = Recorder(home.sinks, config, checker, layout, members, framework.words, ranks_comparable, beside)
    return Publisher(capture, recorder, replicas, responder, tracer)
