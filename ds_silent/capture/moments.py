"""What one rank takes at each moment of a step, in the order of a step.

The local gradient comes from hooks on each trainable parameter, called with the gradient of one micro-batch before it
is accumulated. They return nothing (a returned tensor would replace the gradient) and keep no reference (that would
disable buffer stealing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_silent.capture.forwards import Forwards
from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.reduced_gradient import ReducedGradient
from ds_silent.distributed.together import Together
from ds_silent.exchange.observation import Applied
from ds_silent.framework import Framework


@dataclass(frozen=True)
class StepPlan:
    """What is done in one step, the same on every rank.

    Attributes:
        step: as all ranks count it; what communicates is timed by it.
        measures: whether it is measured.
        exact: whether the local gradients are exchanged piece by piece, too.
    """

    step: int
    measures: bool = False
    exact: bool = False


class StepMoments:
    """See the module docstring.

    Args:
        keep: keeps the local gradient, where a wrong reduction is to be repeated.

    Attributes:
        plan: of the step under way.
        came: whether a gradient has come, or a reduction has begun, since the last step.
        aggregate: this rank's share of it.
        forwards: rows and losses of the micro-batches.
        last_applied: what the optimizer used in the step before.
        scale: the factor on the step's gradients, as the gradient of its loss says it.
        gram: this rank's part of the exact inner products.
    """

    def __init__(
        self,
        framework: Framework,
        together: Together,
        local: LocalGradient,
        aggregate: ReducedGradient,
        forwards: Forwards,
        settings: LocalSettings,
        keep: Callable[..., None] | None,
    ):
        self._framework, self._together, self._local, self._settings = framework, together, local, settings
        self.aggregate, self.forwards, self._keep = aggregate, forwards, keep
        self.plan = StepPlan(framework.step)
        self.last_applied: Applied[float | Tensor] = Applied()
        self._start_step()

    def _start_step(self) -> None:
        self.came = self._reducing = self._applied = False
        self._settings.objective.start()
        self.scale: Tensor | None = None
        self.gram: Tensor | None = None

    def begins(self, stored: Callable[[], Iterable[tuple[int, Tensor]]]) -> None:
        """Take out what gradients hold before a step's first micro-batch, where its own gradient is not hooked."""
        if self.plan.measures:
            for index, values in stored():
                self._local.take_out(index, values)

    def root(self, root: Any, own: bool = False) -> None:
        """A backward begins with ``root``; ``own``: it surely reaches the model."""
        if self.plan.measures:
            self._settings.objective.begins(root, own)

    def scaled(self, factor: float, gradient: Tensor) -> None:
        """Take the factor on the step's gradients, from the gradient of its loss."""
        self.scale = gradient.detach().float() * factor

    def gradient(self, index: int, gradient: Tensor) -> None:
        """Observe one parameter's gradient of one micro-batch."""
        self.forwards.gradient_came()
        if self._measures():
            self._settings.objective.reached = True
            boundary = self._framework.hook_sees_full_gradient and self._framework.is_boundary()
            self._local.observe(index, gradient, boundary, self.plan.exact)

    def keep_for_retry(self, *args: Any, **kwargs: Any) -> None:
        """Keep the local gradient at the boundary, where a wrong reduction is to be repeated."""
        if self._keep is not None and self._framework.is_boundary():
            self._together.alone(self._keep, *args, **kwargs)

    def micro_batch_ended(self, boundary: bool) -> bool:
        """Observe what no hook did; return whether the exact inner products are due before the reduction."""
        alone = self._together.alone
        alone(self.forwards.backward_ended)
        if not self._measures():
            return False
        if boundary:
            self._reducing = True
            alone(self._local.observe_silent, self.plan.exact)
        alone(self._local.end_micro_batch)
        return boundary and self.plan.exact

    def exchange_exactly(self) -> None:
        """Exchange the local gradients before the reduction, where none is copied. A collective."""
        if not self._local.copied:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the local gradients piece by piece, once per step. A collective."""
        if self._together.once(lambda: self.gram is None):
            self.gram = self._local.exchange(self._framework.group, self._together)

    def reduced(self, again: bool = False) -> None:
        """Look at the reduction's result behind the boundary's backward, before scripts clip and scale it.

        Where this moment does not come, the step looks.

        Args:
            again: the reduction has ended only now, behind a backward whose result was looked at too early.
        """
        if self._reducing or (again and self.measured):
            self._reducing = False
            self.aggregate.reduced(self._framework.aggregated())

    def applying(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Observe what an optimizer applies; once per step, or per parameter group where a framework steps so."""
        self._applied = True
        if self._framework.observes_applied and self.measured:
            self.aggregate.apply(self._framework.applied(optimizer))

    def dropped(self) -> None:
        """Begin the step under way anew, with the forwards whose backward has not come."""
        self._together.alone(self._drop)
        self._start_step()

    def _drop(self) -> None:
        self._local.drop()
        self.forwards.drop()
        self.aggregate.start_step()

    def end_step(self) -> None:
        """Forget the step that was taken; an internal error stays until all ranks have read it."""
        self.last_applied = Applied()
        if self.measured and not self.skipped and self._framework.observes_applied:
            compared = self._together.alone(
                self.aggregate.compare_applied, self._applied, self._framework.counts.left_out
            )
            self.last_applied = compared or Applied()
        self.aggregate.start_step()
        self._local.start_step()
        self.forwards.end_step()
        self._start_step()
        self._local.micro_batches.start_step()

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not apply the step that was just taken, in search of its loss scale."""
        return self._framework.seeks_loss_scale(self._applied if self.measured else None)

    @property
    def measured(self) -> bool:
        """Whether the step under way is measured, and has begun."""
        return self.came and self.plan.measures

    def _measures(self) -> bool:
        """Whether the step is measured; with its first gradient, look at the modes."""
        first, self.came = not self.came, True
        if first and self.plan.measures:
            self._together.alone(self._settings.look_at_modes)
        return self.plan.measures
