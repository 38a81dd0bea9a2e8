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

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_silent.capture.forwards import loss_in
from ds_silent.capture.loss_origin import Made, comes_of, made_by
from ds_silent.distributed.guard import WithinBackwardError
from ds_silent.framework import Moments, StepCounts
from ds_silent.frameworks import torch_common
from ds_silent.frameworks.torch_common import parameters_of_optimizer
from ds_silent.patches import Patches, behind_closure, outside_transforms
from ds_silent.patches.script_hooks import ScriptHooks


class TorchLoop:
    """Follow one loop; see the module docstring.

    Args:
        counts: of the steps; a GradScaler or the script may leave one out.
        synchronises: whether the current backward reduces its gradients: the step's last or only one.
        reduces_in_backward: the aggregate is there when the backward ends, else at :meth:`reduction_ended`.
    """

    _moments: Moments  # as soon as there is a hook
    _script_hooks: ScriptHooks
    _called_last: weakref.ref[TorchLoop] | None = None  # of all loops of this process
    left: Callable[[], Iterator[tuple[int, Tensor]]] | None = None  # what a step finds where its gradient is put later
    is_past_wrapper: Callable[[], bool] | None = None  # whether the forward that begins goes past it; None: never

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Any],
        counts: StepCounts,
        patches: Patches,
        synchronises: Callable[[], bool],
        reduces_in_backward: bool = True,
    ):
        self._module, self._optimizers, self._counts, self._patches = module, optimizers, counts, patches
        self._parameters: list[Any] = []
        self._ids: set[int] = set()  # of the parameters
        self.frozen: frozenset[int] = frozenset()  # places of those in no backward now, whatever their gradients hold
        self._came: set[int] = set()  # places of those whose gradients have come in this step
        self._hooked: list[Any] = []  # optimizers
        self._synchronises, self._reduces_in_backward = synchronises, reduces_in_backward
        self._forwards = 0  # depth of nested forward calls
        self._depth = 0  # of backward calls
        self._root: Tensor | None = None  # of the outermost
        self._unscaled: Tensor | None = None  # the GradScaler's last input
        self._scaled: Any = None  # its last result
        self._forward_loss: Made | None = None  # of the newest forward, if any
        self._called = self._anothers = False  # since the last step; the newest backward is another module's
        self._open = self._boundary = False  # the current backward has brought gradients; it reduces them
        self._raised = False  # the current backward, or the newest one
        self._past = self._pending = False  # all forwards since the newest backward went past the wrapper; and it, too
        self._backward_since = True  # the newest forward through the wrapper
        self._stepped: set[int] | None = None  # optimizers, while a step ends
        self._missing: set[int] = set()  # those that had not stepped when the last one ended
        self._inside: dict[int, int] = {}  # how deep in its step each is: torch hooks a subclass's and its parent's
        self._accumulated = self._reduced = False  # a backward has come since the last step; it was reduced
        self._uncleared = False  # gradients still hold what the last step applied

    def is_boundary(self) -> bool:
        """Tell whether the current micro-batch is reduced."""
        return self._boundary if self._open else self._synchronises()

    def connect(
        self,
        moments: Moments,
        parameters: Sequence[Any],
        stored: Sequence[Any],
        names: Sequence[str],
        script_hooks: ScriptHooks,
    ) -> None:
        """Register every hook; ``stored``: the parameters that hold the gradients."""
        self._moments, self._script_hooks, patches = moments, script_hooks, self._patches
        script_hooks.on_left = self._gradients_left
        forward, forwarded = map(outside_transforms, (self._forward, self._forwarded))
        patches.hook(self._module.register_forward_pre_hook, forward, with_kwargs=True)
        patches.hook(self._module.register_forward_hook, forwarded, always_call=True)
        gradient, self._loss_scaled = map(patches.in_backward, (self._gradient, moments.on_loss_scaled))
        for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            with torch_common.needing_gradient(parameter):  # another of several optimizers may have its turn
                script_hooks.register(patches, name, parameter, partial(gradient, index), stored[index])
        for optimizer in self._optimizers:
            self._hook(optimizer)
        self._parameters, self._ids = list(parameters), set(map(id, parameters))
        patches.add(register_optimizer_step_pre_hook(self._stepping))
        patches.wrap_method(nn.Module, "zero_grad", self._module_clearing)
        patches.wrap(torch.autograd, "backward", self._backward)
        scaler = torch.amp.GradScaler
        patches.wrap_method(scaler, "scale", self._scale)
        patches.wrap_method(scaler, "unscale_", self._unscale)
        patches.wrap_method(scaler, "step", self._scaler_step)
        torch_common.follow_accelerate(patches, moments)
        patches.also(self._forget)

    def _forget(self) -> None:
        self._root = self._unscaled = self._scaled = None

    # -- forward and backward ------------------------------------------------------------------------------------

    def _forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._forwards += 1
            if self._forwards > 1:
                return
            self._ended()
            self._inside.clear()
            self._forward_loss = None
            self._called, TorchLoop._called_last = True, weakref.ref(self)
            if self.is_past_wrapper is not None:
                past = self.is_past_wrapper()
                self._past = past and (self._past or self._backward_since)
                self._backward_since = self._backward_since and past
        self._moments.pre_forward(module, args, kwargs)

    def _forwarded(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._forwards = max(self._forwards - 1, 0)
            if self._forwards:
                return
            self._forward_loss = made_by(loss_in(output))
        self._moments.post_forward(module, args, output)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth == 0:
            if self._stepped:  # one optimizer has stepped, and this backward is the next one's
                self._ended()
            if self._pending:
                self._settle(False)
            self._root = tensors if isinstance(tensors, Tensor) and tensors.numel() == 1 else None
            self._anothers = self._is_anothers()
            if not self._anothers:
                self._moments.pre_backward(tensors)
        self._depth += 1
        self._script_hooks.take_left()  # a backward within another reads its own
        raised = True
        try:
            result = original(tensors, *args, **kwargs)
            raised = False
            return result
        finally:
            self._depth, self._raised = self._depth - 1, raised
            self._script_hooks.take_left()
            if self._depth == 0:
                self._pending = self._open and self._past
                self._backward_since = self._backward_since or self._open
                if not self._pending:
                    self._backward_ended()
                if isinstance(self._moments.guard.failure, WithinBackwardError):  # the ranks tell each other
                    self._begin_to_end()
                    self._ended()

    def _settle(self, steps: bool) -> None:
        """End a backward past the wrapper, as the step's own or one of several; drop it if its gradients are gone."""
        self._pending = False
        if any(self._parameters[place].grad is not None for place in self._came):
            self._boundary = self._boundary and steps and not self._reduced
            self._backward_ended()
        else:
            self._drop()

    def _drop(self) -> None:
        self._open = self._pending = self._accumulated = self._reduced = False
        self._came.clear()
        self._moments.on_gradient_dropped()

    def _is_anothers(self) -> bool:
        """Tell whether another module was called last that shares parameters, and this one not since its last step."""
        newest = self if TorchLoop._called_last is None else TorchLoop._called_last()
        return not (self._called or newest is None or newest is self or newest._ids.isdisjoint(self._ids))

    def _gradients_left(self, left: Collection[int]) -> None:
        self._came.update(left)
        self._moments.on_gradients_left(left, self._boundary)

    def _gradient(self, index: int, gradient: Tensor) -> None:
        if self._script_hooks.notes(index) or self._anothers:
            return
        self._came.add(index)
        if self._open and not self._moments.is_measured():
            return
        if not self._open:
            self._open, self._boundary = True, self._synchronises()
            if not self._accumulated and self.left is not None:
                self._moments.pre_step(self.left, apart=True)
            self._counts.scaled = self._unscaled is not None and self._root is self._scaled
            loss = self._root if self._unscaled is None else self._unscaled
            if loss is not None and not comes_of(loss, self._forward_loss):
                self._moments.on_loss_share(loss)
        self._moments.on_gradient(index, gradient)

    def _backward_ended(self) -> None:
        self._script_hooks.take_left()
        self._forget()
        if self._open:
            absent = set(range(len(self._parameters))) - self._came if len(self._came) < len(self._parameters) else ()
            self.frozen = frozenset(place for place in absent if not self._parameters[place].requires_grad)
            self._moments.post_backward()
            boundary, self._open = self._boundary, False
            self._accumulated = True
            self._reduced = self._reduced or boundary
            self._counts.unreduced = not self._reduced
            if boundary and self._reduces_in_backward and not self._raised:
                self._moments.post_reduction()

    def reduction_ended(self) -> None:
        """Take the result of a reduction that the script or its trainer runs after the backward."""
        if self._depth == 0 and self._reduced and self._stepped is None:
            self._moments.post_reduction(again=True)

    # -- the step ------------------------------------------------------------------------------------------------

    def _hook(self, optimizer: Any) -> None:
        self._hooked.append(optimizer)
        self._patches.hook(optimizer.register_step_pre_hook, self._applying)
        self._patches.hook(optimizer.register_step_post_hook, self._applied)
        self._patches.around(optimizer, "zero_grad", partial(self._clearing, optimizer))

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take an optimizer that the observer was not given, as the training's: it steps the same parameters.

        One that steps inside another is that one's affair (``ZeroRedundancyOptimizer``).
        """
        if torch.compiler.is_compiling() or any(self._inside.values()) or optimizer in self._optimizers:
            return
        if (self._anothers or self._pending) and not self._accumulated:
            return
        if self._steps_ours(optimizer):
            self._moments.guard.local(self._take, optimizer)

    def _steps_ours(self, optimizer: Any) -> bool:
        return not self._ids.isdisjoint(parameters_of_optimizer(optimizer))

    def _take(self, optimizer: Any) -> None:
        """Let it take the place of those that hold no other parameter of the model."""
        others = self._ids - parameters_of_optimizer(optimizer)
        stay = [one for one in self._optimizers if not others.isdisjoint(parameters_of_optimizer(one))]
        self._optimizers[:] = [*stay, optimizer]
        if any(optimizer is one for one in self._hooked):
            return
        self._hook(optimizer)
        self._missing.add(id(optimizer))
        torch_common.warn_of_another(optimizer, self._counts.step)

    def _applying(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Wait for the closure's end; torch uses the arguments that a step pre-hook returns."""
        if self._depth:  # the backward's own hooks step, one parameter after the other
            self._moments.guard.fail(WithinBackwardError("an optimizer steps within the backward"))
            return None
        self._inside[id(optimizer)] = depth = self._inside.get(id(optimizer), 0) + 1
        return None if depth > 1 else behind_closure(partial(self._applies, optimizer, args, kwargs), args, kwargs)

    def _applies(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepped is None and not self._accumulated and (self._anothers or id(optimizer) in self._missing):
            return  # it is another module's, or goes with the step that has ended
        self._begin_to_end()
        self._moments.pre_optimizer_step(optimizer, args, kwargs)

    def _begin_to_end(self, left_out: bool = False) -> None:
        if self._stepped is None:
            self._counts.left_out = left_out
            if self._pending:
                self._settle(True)
            else:
                self._backward_ended()
            self._uncleared = self._uncleared or self._accumulated
            self._stepped, self._reduced, self._accumulated = set(), False, False
            self._moments.pre_update()

    def _applied(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._inside[id(optimizer)] = depth = self._inside.get(id(optimizer), 1) - 1
        if self._stepped is not None and depth <= 0:
            self._stepped.add(id(optimizer))
            if self._stepped.issuperset(map(id, self._optimizers)):
                self._ended()

    def _module_clearing(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Follow ``zero_grad`` of our module or of one around it."""
        if torch_common.contains(module, self._module):
            self._clearing(None)
        return original(module, *args, **kwargs)

    def _clearing(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """End a step that no optimizer began, or drop what is to be of none: its gradients go; None: all of them.

        Behind a backward past the wrapper it need not be the step's gradient, which the script may put back.
        """
        if self._pending and self._reduced:
            self._open = self._pending = False
            return
        unreduced = (self._accumulated or self._pending) and not self._reduced
        unreduced = unreduced and (optimizer is None or self._ids <= parameters_of_optimizer(optimizer))
        if self._stepped is None and (unreduced or (self._accumulated and self._uncleared)):
            self._counts.cleared += self._accumulated and not self._uncleared
            self._drop()
        elif self._stepped is None and self._reduced:
            self._begin_to_end(left_out=True)
            self._ended(left_out=True)
        self._uncleared = False

    def _ended(self, skipped: bool = False, left_out: bool = False) -> None:
        """End the step, if one was ending."""
        if self._stepped is not None:
            missing = {id(optimizer) for optimizer in self._optimizers} - self._stepped
            partly, self._missing, self._stepped = bool(self._stepped and missing), missing, None
            self._counts.take(skipped, left_out, partly)
            self._came.clear()
            self._called = False
            self._moments.post_step()

    # -- a loss scale --------------------------------------------------------------------------------------------

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor) and outputs.numel() == 1 and outputs.requires_grad and scaler.is_enabled():
            self._unscaled = outputs
            outputs.register_hook(partial(self._loss_scaled, 1.0))  # type: ignore[no-untyped-call]
        self._scaled = original(scaler, outputs)
        return self._scaled

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        """torch does not count what this writes as a change of the gradients (2.13)."""
        if optimizer in self._optimizers or self._steps_ours(optimizer):
            self._moments.on_aggregate_written()
        return original(scaler, optimizer)

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._counts.step
        result = original(scaler, optimizer, *args, **kwargs)
        took_none = self._counts.step == before and self._stepped is None and self._accumulated
        if took_none and optimizer in self._optimizers:
            self._begin_to_end()
            self._ended(skipped=True)
        return result
