"""A copy of the local gradient from before the reduction, so that the reduction can be repeated."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ds_silent.frameworks.deepspeed.gradients import accumulated_gradients, whole_on_every_rank


class KeptGradients:
    """The gradients that go into the reduction of stages 0 and 1, kept until the optimizer has run.

    Takes as much memory as the gradients, from the first step on.
    """

    def __init__(self, engine: Any, parameters: list[Tensor]):
        self._engine, self._parameters = engine, parameters
        self._held = accumulated_gradients(engine, parameters)
        self.in_place = whole_on_every_rank(engine)  # the reduction writes where the gradients accumulate
        self._copies: list[Tensor | None] = [None] * len(parameters)
        self._present = [False] * len(parameters)

    def keep(self) -> None:
        """At the boundary, before the reduction."""
        for index in range(len(self._parameters)):
            gradient = self._held(index)
            self._present[index] = gradient is not None
            if gradient is None:
                continue
            copy = self._copies[index]
            if copy is None or copy.dtype != gradient.dtype:
                self._copies[index] = gradient.detach().clone()
            else:
                copy.copy_(gradient.detach())

    @property
    def bytes(self) -> int:
        """Of the gradients that were kept."""
        return sum(
            copy.numel() * copy.element_size()
            for copy, present in zip(self._copies, self._present, strict=True)
            if present and copy is not None
        )

    def put_back(self) -> None:
        """Everything as it was before the reduction, which may then be called again."""
        if self.in_place:
            self._put_back_in_place()
        else:
            self._put_back_freed()

    def _put_back_in_place(self) -> None:
        """Stage 0 reduces where the gradients accumulate; it gives zeros to parameters without a gradient."""
        for index, parameter in enumerate(self._parameters):
            gradient, copy = self._held(index), self._copies[index]
            if self._present[index]:
                assert gradient is not None
                assert copy is not None
                gradient.copy_(copy)
            elif gradient is not None and parameter.grad is gradient:
                parameter.grad = None

    def _put_back_freed(self) -> None:
        """``DeepSpeedZeroOptimizer`` of stage 1 frees what it has reduced and keeps ``averaged_gradients`` (0.16.9 to
        0.19.8: a list or a tensor per group, None once the step is over)."""
        optimizer = self._engine.optimizer
        assert isinstance(optimizer, ZeROOptimizer)
        name = "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"
        for index, parameter in enumerate(self._parameters):
            copy = self._copies[index]
            setattr(parameter, name, copy.clone() if self._present[index] and copy is not None else None)
        averaged = optimizer.averaged_gradients
        for group in list(averaged):
            averaged[group] = None
