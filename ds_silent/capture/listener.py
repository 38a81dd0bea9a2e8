"""Who hears of a step: what :class:`ds_silent.capture.step.StepCapture` calls."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """The observer's steps; the last four are played."""

    @property
    def scheduled(self) -> int:
        """The step under way as all ranks count it, by which ``measures`` is asked."""

    def measures(self, step: int) -> bool:
        """Whether a step is measured; the same answer on every rank."""

    def measures_exactly(self, step: int) -> bool:
        """Whether a measured step is also measured exactly; the same answer on every rank."""

    def before_reduction(self) -> None:
        """A boundary's gradients are there, and reduced next where reductions come behind the backward."""

    def before_step(self) -> None:
        """The gradients are aggregated, the optimizer has not run."""

    def dropped(self) -> None:
        """What was reduced since the last step belongs to none."""

    def after_step(self) -> None:
        """The optimizer has run and the framework's counters have advanced."""


class Owner(Protocol):
    """The observer, as a training sees it that saves and ends."""

    @property
    def closed(self) -> bool:
        """Whether it ended for good, and not because it broke."""

    def before_checkpoint(self) -> None:
        """A checkpoint is about to be written: put on disk what is known."""

    def close(self) -> None:
        """The training ends."""
