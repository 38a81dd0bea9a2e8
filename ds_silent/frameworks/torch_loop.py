"""Find the moments of a loop that the script writes itself: torch's forward, backward and optimizer.

No object of such a loop knows what an optimizer step is, so the steps are counted here: a step begins to end when the
first optimizer is about to step, and ends when all have stepped or the next training forward or backward comes.

* **backward**: ``torch.autograd.backward``, which ``Tensor.backward`` looks up at each call. The outermost call begins
  and ends a micro-batch: a reentrant checkpoint's calls lie inside, and what overlaps with a backward is done when it
  returns (DDP, FSDP2). If the root does not come from the forward's loss, the root is a loss: the step's gradient is
  that of the roots' sum, so the roots are shares of the step's loss.
* **forward**: the outermost call; a module may call itself, as Lightning's training step calls its own ``forward``.
* **step**: hooks of the optimizers, and of any other that steps a parameter of the model. An optimizer that gets a
  closure runs forward and backward itself, so it begins to apply when the closure returns; each call of the closure is
  a step. A GradScaler that finds infinities does not call its optimizer: that step is skipped. If ``zero_grad`` clears
  a reduced gradient before any optimizer has stepped, the script leaves a step out: it ends there, so that no rank
  waits for another's observation. A GAN's generator runs its backward through the discriminator, whose optimizer does
  not step on it. So a backward over a gradient that was not cleared since the last step is dropped from the observation
  if ``zero_grad`` comes next: it was no step. So are micro-batches that are cleared before they were reduced.
* **past the wrapper**: behind forwards that go past the wrapper of the module nothing is reduced, as where one rank
  alone reads gradients. Such a backward ends as the optimizer steps, or another backward comes. Where its gradients are
  cleared first it is dropped, and a step of an optimizer that the observer was not given is none of the training's.
* **stages**: where another observed module holds some of the same parameters, such as a body under a new head, its
  backwards and steps are not this module's: those that come while it alone was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_silent.distributed.guard import WithinBackwardError
from ds_silent.framework import Moments, StepCounts
from ds_silent.frameworks import torch_common
from ds_silent.frameworks.torch_calls import Backwards, OptimizerCalls, TrainingForwards
from ds_silent.patches import Patches, outside_transforms
from ds_silent.patches.script_hooks import ScriptHooks


class TorchLoop:
    """Follow one loop; see the module docstring.

    Args:
        counts: of the steps; a GradScaler or the script may leave one out.
        synchronises: whether the current backward reduces its gradients: the step's last or only one.
        reduces_in_backward: the aggregate is there when the backward ends, else at :meth:`reduction_ended`.
    """

    _moments: Moments  # as soon as there is a hook

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Any],
        counts: StepCounts,
        patches: Patches,
        synchronises: Callable[[], bool],
        reduces_in_backward: bool = True,
    ):
        self._module, self._counts, self._patches = module, counts, patches
        self.forwards = TrainingForwards()
        self.backwards = Backwards(counts, self.forwards, synchronises, reduces_in_backward)
        self._optimizers = OptimizerCalls(optimizers, self.forwards.ids)
        self._uncleared = False  # gradients still hold what the last step applied

    def connect(
        self,
        moments: Moments,
        parameters: Sequence[Any],
        stored: Sequence[Any],
        names: Sequence[str],
        script_hooks: ScriptHooks,
    ) -> None:
        """Register every hook; ``stored``: the parameters that hold the gradients."""
        self._moments, patches = moments, self._patches
        forward, forwarded = map(outside_transforms, (self._forward, self._forwarded))
        patches.hook(self._module.register_forward_pre_hook, forward, with_kwargs=True)
        patches.hook(self._module.register_forward_hook, forwarded, always_call=True)
        self.forwards.ids.update(map(id, parameters))
        self.backwards.connect(moments, parameters, stored, names, script_hooks, patches)
        self._optimizers.connect(self._module, patches, self._may_step, self._applies, self._ended, self._clearing)
        patches.add(register_optimizer_step_pre_hook(self._stepping))
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap_method(torch.amp.GradScaler, "unscale_", self._unscale)
        patches.wrap_method(torch.amp.GradScaler, "step", self._scaler_step)
        torch_common.follow_accelerate(patches, moments)

    def _forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            if not self.forwards.enter():
                return
            self._ended()
            self._optimizers.leave_all()
            self.forwards.begin()
        self._moments.pre_forward(module, args, kwargs)

    def _forwarded(self, module: Any, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or self.forwards.leave(output):
            self._moments.post_forward(module, args, output)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = self.backwards.depth == 0
        if outermost and self._optimizers.stepped:  # one has stepped, and this backward is the next one's
            self._ended()
        try:
            return self.backwards.run(original, tensors, *args, **kwargs)
        finally:
            if outermost and isinstance(self._moments.guard.failure, WithinBackwardError):  # the ranks tell each other
                self._begin_to_end()
                self._ended()

    def reduction_ended(self) -> None:
        """Take the result of a reduction that the script or its trainer runs after the backward."""
        if self.backwards.depth == 0 and self.backwards.reduced and self._optimizers.stepped is None:
            self._moments.post_reduction(again=True)

    # -- the step ------------------------------------------------------------------------------------------------

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take an optimizer that the observer was not given, as the training's: it steps the same parameters."""
        if torch.compiler.is_compiling() or self._optimizers.is_within() or self._optimizers.has(optimizer):
            return
        if (self.backwards.are_anothers or self.backwards.pending) and not self.backwards.accumulated:
            return
        if self._optimizers.steps_ours(optimizer):
            self._moments.guard.local(self._take, optimizer)

    def _take(self, optimizer: Any) -> None:
        if self._optimizers.take(optimizer):
            torch_common.warn_of_another(optimizer, self._counts.step)

    def _may_step(self) -> bool:
        if self.backwards.depth:  # the backward's own hooks step, one parameter after the other
            self._moments.guard.fail(WithinBackwardError("an optimizer steps within the backward"))
        return self.backwards.depth == 0

    def _applies(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        begun = self._optimizers.stepped is not None or self.backwards.accumulated
        if not begun and (self.backwards.are_anothers or id(optimizer) in self._optimizers.missing):
            return  # it is another module's, or goes with the step that has ended
        self._begin_to_end()
        self._moments.pre_optimizer_step(optimizer, args, kwargs)

    def _begin_to_end(self, left_out: bool = False) -> None:
        if self._optimizers.stepped is None:
            self._counts.left_out = left_out
            self._uncleared = self.backwards.end_all() or self._uncleared
            self._optimizers.stepped = set()
            self._moments.pre_update()

    def _clearing(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """End a step that no optimizer began, or drop what is to be of none: its gradients go; None: all of them.

        Behind a backward past the wrapper it need not be the step's gradient, which the script may put back.
        """
        backwards = self.backwards
        if backwards.pending and backwards.reduced:
            backwards.drop_pending()
            return
        if self._optimizers.stepped is None:
            unreduced = (backwards.accumulated or backwards.pending) and not backwards.reduced
            dropped = unreduced and self._optimizers.clears_all(optimizer)
            if dropped or (backwards.accumulated and self._uncleared):
                self._counts.cleared += backwards.accumulated and not self._uncleared
                backwards.drop()
            elif backwards.reduced:
                self._begin_to_end(left_out=True)
                self._ended(left_out=True)
        self._uncleared = False

    def _ended(self, skipped: bool = False, left_out: bool = False) -> None:
        """End the step, if one was ending."""
        if self._optimizers.stepped is not None:
            self._counts.take(skipped, left_out, self._optimizers.end())
            self.backwards.step_ended()
            self.forwards.called = False
            self._moments.post_step()

    # -- a loss scale --------------------------------------------------------------------------------------------

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        """torch does not count what this writes as a change of the gradients (2.13)."""
        if self._optimizers.has(optimizer) or self._optimizers.steps_ours(optimizer):
            self._moments.on_aggregate_written()
        return original(scaler, optimizer)

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._counts.step
        result = original(scaler, optimizer, *args, **kwargs)
        took_none = self._counts.step == before and self._optimizers.stepped is None and self.backwards.accumulated
        if took_none and self._optimizers.has(optimizer):
            self._begin_to_end()
            self._ended(skipped=True)
        return result
