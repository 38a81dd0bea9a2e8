"""What was gathered of a step: every rank acts by it, the writing rank judges and writes it.

published = Published(capture, recorder, replicas, responder)
published.step(arrived)                  # played: every rank, at the same step
published.early(arrived, closed=False)   # no collective: what is under way at a checkpoint or at the end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_silent.capture.data_facts import DataFacts
from ds_silent.capture.step import StepCapture
from ds_silent.distributed.parts import Parts
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.observation import Gathered, on_all, on_any
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.measure.record import Context
from ds_silent.observing.recorder import Recorder
from ds_silent.records import Event, Seconds
from ds_silent.replicas.compare import Drift, ReplicaChecks
from ds_silent.respond.responder import Responder

# ----------------------------------------------------------------------------------------------------------------------
# What the writing rank knows of a step without asking the others, kept until the others' observations are there.


class Contexts:
    """Of the steps whose collective is under way.

    Attributes:
        rows_in_epoch: rows of one epoch over all ranks; None where the loader that feeds the training is to say.
        shuffles: whether each epoch has an order of its own; None likewise.
    """

    def __init__(self, capture: StepCapture):
        self.rows_in_epoch: int | None = None
        self.shuffles: bool | None = None
        self._capture = capture
        self._ended: float | None = None  # when the last step did
        self._of_step: dict[int, Context] = {}

    def ended(self, step: int, measured: bool, now: float, observing: float) -> None:
        """A step has ended at ``now``, of which the observer took ``observing`` seconds."""
        if measured:
            duration = None if self._ended is None else now - self._ended
            self._of_step[step] = self._context(Seconds(duration, observing))
        self._ended = now

    def cut_short(self, step: int) -> None:
        """A step does not end, because the training does."""
        self._of_step.setdefault(step, self._context(Seconds()))

    def take(self, step: int) -> Context:
        """The context of a step, which is forgotten."""
        return self._of_step.pop(step)

    def drop(self, step: int) -> None:
        """Nobody will want it."""
        self._of_step.pop(step, None)

    def _context(self, seconds: Seconds) -> Context:
        capture, counts, walk = self._capture, self._capture.framework.counts, self._capture.walk
        shuffles = walk.facts.shuffles if self.shuffles is None else self.shuffles
        facts = DataFacts(self.rows_in_epoch or walk.facts.rows, shuffles)
        return Context(
            counts.samples,
            counts.batch,
            counts.samples / facts.rows if facts.rows else None,
            seconds,
            capture.layer_names,
            facts.rows,
            capture.moments.skipped,
            counts.update_skipped,
            replace(walk, facts=facts),
            capture.rows.sampling,
        )


# -- What was gathered of a step ---------------------------------------------------------------------------------------


class Published:
    """Each step once, in order.

    Attributes:
        recorder: writes and judges; on all ranks but one it does nothing.
        contexts: what this rank alone knows of the steps that are under way.
    """

    def __init__(
        self,
        capture: StepCapture,
        recorder: Recorder,
        replicas: ReplicaChecks,
        responder: Responder,
        model: WholeModel | None = None,
    ):
        """``model``: where other groups hold the rest of it, on the writing rank."""
        self.recorder, self._model = recorder, model
        self.contexts = Contexts(capture)
        self._capture, self._replicas, self._responder = capture, replicas, responder
        self._settings_check = capture.settings_check
        self._alone, self._once = capture.together.alone, capture.together.once
        self._decided = capture.together.decided
        self._written = -1  # step of the newest record
        self._parting: tuple[object, ...] = ()  # at the step before

    def step(self, arrived: Arrived) -> bool:
        """Judge and write one step, and do what it asks of all ranks, which read it at the same step. Played.

        Returns:
            whether the training is to end by what was written.
        """
        known = arrived.known
        if on_any(known.wishes.compare):
            self._replicas.due = True
        if on_any(known.status.nothing):
            self.contexts.drop(known.step)
            return False
        if on_any(known.wishes.diagnose):
            self._once(self._capture.kept.ask)
        unlike = self._settings_check.agree(arrived, self._capture.group, self._capture.device, self._capture.together)
        self.recorder.unlike = unlike
        parting = self._decided(lambda: parting_of(known, self._settings_check.differing))
        if self._decided(lambda: parting != self._parting):  # it begins or ends
            self._replicas.due = True
        self._parting = parting
        drift = self._replicas.localise(self._once) if self._replicas.differ(known) else None
        self._alone(self._write, arrived, drift)
        self._alone(self._note_same_draws, known)  # behind the record: a callback may publish what is under way
        return on_any(known.wishes.stop)

    def early(self, arrived: Arrived, closed: bool) -> None:
        """Write what is under way. What it asks of all ranks waits for its step, where every rank does it, whoever
        published early. ``closed``: nobody comes to that step any more."""
        known = arrived.known
        if on_any(known.status.nothing):
            return
        if known.step > self._written:
            self._write(arrived, None, wait=self._replicas.differ(known))
        if closed and self.recorder.writes:  # nobody is asked any more what it is that differs
            self.recorder.end_unlike(self._settings_check.unasked(arrived), known.step)

    def weights_verified(self, step: int) -> None:
        """What a resume found; on the writing rank, the comparison of the replicas speaks for the others."""
        if self.recorder.writes:
            found = self._replicas.verify(step)
            if found is not None:
                self.report(found)

    def last_words(self, step: int) -> None:
        """The training ends at ``step``: nobody comes together any more to find the tensors that differ."""
        self.recorder.settle(None)
        self.recorder.repairs(self._responder.take(step).repairs)

    def report(self, event: Event) -> None:
        """Write an event and tell the callbacks; on the writing rank."""
        self.recorder.report(event)

    def _note_same_draws(self, known: Gathered) -> None:
        if self.recorder.writes:
            note = self._settings_check.note(known, self._capture.shape.ranks)
            if note is not None:
                self.report(note)

    def _write(self, arrived: Arrived, drift: Drift | None, wait: bool = False) -> None:
        """``wait``: where it was published early, it is judged with ``drift`` later."""
        step = arrived.step
        if step <= self._written:
            self.recorder.settle(drift, step)
            return
        self._written = step
        log = self._responder.take(step)
        if self.recorder.writes:
            self.recorder.step(lambda: self._everything(arrived), self.contexts.take(step), drift, log, wait)

    def _everything(self, arrived: Arrived) -> Gathered:
        return arrived.all if self._model is None else self._model.exchange(arrived.all)


def parting_of(known: Gathered, settings: Mapping[str, Parts]) -> tuple[object, ...]:
    """What all ranks know of a step that can part their replicas, empty in health: settings that differ, a step that
    only some optimizers took, an aggregate of other bits."""
    seen, hashes = known.applied.seen, known.hashes
    found: list[object] = [*settings.items()]
    if bool((seen != 0).all()) and on_any(seen) and not on_all(seen):
        found.append((seen > 0).tolist())
    if hashes is not None and on_all(known.reduced.seen) and bool((hashes[:, 1:] != hashes[0, 1:]).any()):
        found.append("aggregate")
    return tuple(found)
