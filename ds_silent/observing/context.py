"""What the writing rank knows of a step without asking the others, kept until the others' observations are there.

contexts = Contexts(capture)
contexts.ended(step, True, now, observing)     # at the end of a measured step, before the capture forgets it
context = contexts.take(step)                  # a step or two later, with what was gathered
"""

from __future__ import annotations

from dataclasses import replace

from ds_silent.capture.data_facts import DataFacts
from ds_silent.capture.step import StepCapture
from ds_silent.measure.record import Context
from ds_silent.records import Seconds


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
        capture, walk = self._capture, self._capture.walk
        shuffles = walk.facts.shuffles if self.shuffles is None else self.shuffles
        facts = DataFacts(self.rows_in_epoch or walk.facts.rows, shuffles)
        return Context(
            capture.samples,
            capture.batch,
            capture.samples / facts.rows if facts.rows else None,
            seconds,
            capture.layer_names,
            facts.rows,
            capture.skipped,
            capture.update_skipped,
            replace(walk, facts=facts),
            capture.sampling,
        )
