"""Follow one kind of call each of a loop that the script writes: forwards, losses, backwards, optimizers.

:class:`~ds_silent.frameworks.torch_loop.TorchLoop` puts them together to steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.capture.forwards import loss_in
from ds_silent.capture.loss_origin import Made, comes_of, made_by
from ds_silent.framework import Moments, StepCounts
from ds_silent.frameworks.closures import under_way
from ds_silent.frameworks.torch_common import contains, needing_gradient, parameters_of_optimizer
from ds_silent.patches import Patches, behind_closure
from ds_silent.patches.script_hooks import ScriptHooks


class TrainingForwards:
    """The training forwards of one module.

    Attributes:
        ids: of the module's parameters.
        called: since the last step.
        past: all since the newest backward went past the module's wrapper.
        is_past_wrapper: whether the forward that begins goes past it; None: never.
        loss: of the newest, if any.
    """

    is_past_wrapper: Callable[[], bool] | None = None
    _newest: weakref.ref[TrainingForwards] | None = None  # whose was the newest, of all modules of this process

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.called = self.past = False
        self.loss: Made | None = None
        self._depth = 0
        self._backward_since = True  # the newest forward through the wrapper

    def enter(self) -> bool:
        """Take a call that begins; return whether it is the outermost: a module may call itself."""
        self._depth += 1
        return self._depth == 1

    def begin(self) -> None:
        """Begin the outermost call."""
        self.loss = None
        self.called, TrainingForwards._newest = True, weakref.ref(self)
        if self.is_past_wrapper is not None:
            past = self.is_past_wrapper()
            self.past = past and (self.past or self._backward_since)
            self._backward_since = self._backward_since and past

    def leave(self, output: Any) -> bool:
        """Take a call that ends; return whether it is the outermost."""
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return False
        self.loss = made_by(loss_in(output))
        return True

    def backward_ended(self, came: bool) -> None:
        """Take in whether a backward has brought gradients of the module."""
        self._backward_since = self._backward_since or came

    def are_anothers(self) -> bool:
        """Tell whether another module was called last that shares parameters, and this one not since its last step."""
        newest = self if TrainingForwards._newest is None else TrainingForwards._newest()
        return not (self.called or newest is None or newest is self or newest.ids.isdisjoint(self.ids))


class BackwardLoss:
    """The loss of the outermost backward: its root, or what a GradScaler has scaled to it."""

    def __init__(self) -> None:
        self._root: Tensor | None = None
        self._unscaled: Tensor | None = None  # the GradScaler's last input
        self._scaled: Any = None  # its last result

    def connect(self, patches: Patches, scaled: Callable[..., object]) -> None:
        """Follow GradScalers; ``scaled(1.0, gradient)`` takes the gradient of each loss before it was scaled."""

        def scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
            if isinstance(outputs, Tensor) and outputs.numel() == 1 and outputs.requires_grad and scaler.is_enabled():
                self._unscaled = outputs
                outputs.register_hook(partial(scaled, 1.0))  # type: ignore[no-untyped-call]
            self._scaled = original(scaler, outputs)
            return self._scaled

        patches.wrap_method(torch.amp.GradScaler, "scale", scale)
        patches.also(self.forget)

    def begin(self, tensors: Any) -> None:
        """Take what a backward begins with."""
        self._root = tensors if isinstance(tensors, Tensor) and tensors.numel() == 1 else None

    def is_scaled(self) -> bool:
        """Tell whether the root is a GradScaler's result."""
        return self._unscaled is not None and self._root is self._scaled

    def share(self, forwards_loss: Made | None) -> Tensor | None:
        """Return the loss before it was scaled, if it does not come from the forward's."""
        loss = self._root if self._unscaled is None else self._unscaled
        return None if loss is None or comes_of(loss, forwards_loss) else loss

    def forget(self) -> None:
        """Let the losses go, and their graphs with them."""
        self._root = self._unscaled = self._scaled = None


class Backwards:
    """The backwards of the step under way: which gradients have come, and whether they are reduced.

    Attributes:
        left: what a step finds where its gradient is put later.
        frozen: places of the parameters in no backward now, whatever their gradients hold.
        depth: of the calls.
        are_anothers: the newest is another module's.
        pending: the newest went past the wrapper, and is not ended.
        accumulated: one has come since the last step.
        reduced: and was reduced.
    """

    _moments: Moments  # as soon as there is a hook
    _script_hooks: ScriptHooks
    left: Callable[[], Iterator[tuple[int, Tensor]]] | None = None

    def __init__(
        self,
        counts: StepCounts,
        forwards: TrainingForwards,
        synchronises: Callable[[], bool],
        reduces_in_backward: bool,
    ):
        self._counts, self._forwards, self._loss = counts, forwards, BackwardLoss()
        self._synchronises, self._reduces_in_backward = synchronises, reduces_in_backward
        self._parameters: list[Any] = []
        self._came: set[int] = set()  # places of those whose gradients have come in this step
        self.frozen: frozenset[int] = frozenset()
        self.depth = 0
        self._open = self._boundary = False  # the current one has brought gradients; it reduces them
        self._raised = False  # the current one did, or the newest
        self.are_anothers = self.pending = self.accumulated = self.reduced = False

    def connect(
        self,
        moments: Moments,
        parameters: Sequence[Any],
        stored: Sequence[Any],
        names: Sequence[str],
        script_hooks: ScriptHooks,
        patches: Patches,
    ) -> None:
        """Hook the parameters; ``stored``: those that hold the gradients."""
        self._moments, self._script_hooks, self._parameters = moments, script_hooks, list(parameters)
        script_hooks.on_left = self._gradients_left
        gradient, loss_scaled = map(patches.in_backward, (self._gradient, moments.on_loss_scaled))
        for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            with needing_gradient(parameter):  # another of several optimizers may have its turn
                script_hooks.register(patches, name, parameter, partial(gradient, index), stored[index])
        self._loss.connect(patches, loss_scaled)

    def is_boundary(self) -> bool:
        """Tell whether the current micro-batch is reduced."""
        return self._boundary if self._open else self._synchronises()

    def run(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``torch.autograd.backward``; the outermost call is a micro-batch."""
        if self.depth == 0:
            if self.pending:
                self._settle(False)
            self._loss.begin(tensors)
            self.are_anothers = self._forwards.are_anothers()
            if not self.are_anothers:
                self._moments.pre_backward(tensors)
        self.depth += 1
        self._script_hooks.take_left()  # a backward within another reads its own
        raised = True
        try:
            result = original(tensors, *args, **kwargs)
            raised = False
            return result
        finally:
            self.depth, self._raised = self.depth - 1, raised
            self._script_hooks.take_left()
            if self.depth == 0:
                self.pending = self._open and self._forwards.past
                self._forwards.backward_ended(came=self._open)
                if not self.pending:
                    self._end()

    def _gradients_left(self, left: Collection[int]) -> None:
        self._came.update(left)
        self._moments.on_gradients_left(left, self._boundary)

    def _gradient(self, index: int, gradient: Tensor) -> None:
        if self._script_hooks.notes(index) or self.are_anothers:
            return
        self._came.add(index)
        if self._open and not self._moments.is_measured():
            return
        if not self._open:
            self._open = True
            self._boundary = self._synchronises() and not (self.reduced and self._forwards.past)
            if not self.accumulated and self.left is not None:
                self._moments.pre_step(self.left, apart=True)
            self._counts.scaled = self._loss.is_scaled()
            if (share := self._loss.share(self._forwards.loss)) is not None:
                self._moments.on_loss_share(share)
        self._moments.on_gradient(index, gradient)

    def _end(self) -> None:
        self._script_hooks.take_left()
        self._loss.forget()
        if self._open:
            absent = set(range(len(self._parameters))) - self._came if len(self._came) < len(self._parameters) else ()
            self.frozen = frozenset(place for place in absent if not self._parameters[place].requires_grad)
            self._moments.post_backward()
            boundary, self._open = self._boundary, False
            self.accumulated = True
            self.reduced = self.reduced or boundary
            self._counts.unreduced = not self.reduced
            if boundary and self._reduces_in_backward and not self._raised:
                self._moments.post_reduction()

    def _settle(self, steps: bool) -> None:
        """End one past the wrapper, as the step's own or one of several; drop it if its gradients are gone."""
        self.pending = False
        if any(self._parameters[place].grad is not None for place in self._came):
            self._boundary = self._boundary and steps and not self.reduced
            self._end()
        else:
            self.drop()

    def end_all(self) -> bool:
        """End the newest, as an optimizer is about to step; return whether one has come since the last step."""
        if self.pending:
            self._settle(True)
        else:
            self._end()
        came, self.reduced, self.accumulated = self.accumulated, False, False
        return came

    def drop(self) -> None:
        """Forget all since the last step: they were of none."""
        self._open = self.pending = self.accumulated = self.reduced = False
        self._came.clear()
        self._moments.on_gradient_dropped()

    def drop_pending(self) -> None:
        """Forget the newest, which went past the wrapper."""
        self._open = self.pending = False

    def step_ended(self) -> None:
        """Forget which gradients have come."""
        self._came.clear()


class OptimizerCalls:
    """The optimizers of one model: which have stepped, in the step that ends.

    Attributes:
        stepped: the ids of those; None while no step ends.
        missing: those that had not stepped when the last one ended.
    """

    def __init__(self, optimizers: list[Any], ids: set[int]):
        """``optimizers``: changed in place, where others take over; ``ids``: of the model's parameters."""
        self._optimizers, self._ids = optimizers, ids
        self._hooked: list[Any] = []
        self._inside: dict[int, int] = {}  # how deep in its step each is: torch hooks a subclass's and its parent's
        self.stepped: set[int] | None = None
        self.missing: set[int] = set()

    def connect(
        self,
        module: nn.Module,
        patches: Patches,
        begins: Callable[[], bool],
        applies: Callable[[Any, Any, Any], None],
        ended: Callable[[], None],
        clears: Callable[..., None],
    ) -> None:
        """Hook the optimizers and what clears their gradients.

        Args:
            module: a ``zero_grad`` of it, or of one around it, clears all gradients.
            begins: whether a call of an optimizer's step may be a step of the training.
            applies: ``(optimizer, args, kwargs)``, as it is about to apply a gradient.
            ended: all have stepped.
            clears: ``(optimizer, *anything)``; None: all gradients.
        """
        self._patches, self._begins, self._applies, self._ended, self._clears = patches, begins, applies, ended, clears
        for optimizer in self._optimizers:
            self._hook(optimizer)
        for step in under_way(self._optimizers):
            step.behind.append(partial(self._applies, step.optimizer, step.args, step.kwargs))
            patches.also(step.behind.clear)

        def clear(original: Callable[..., Any], cleared: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if contains(cleared, module):
                clears(None)
            return original(cleared, *args, **kwargs)

        patches.wrap_method(nn.Module, "zero_grad", clear)

    def _hook(self, optimizer: Any) -> None:
        self._hooked.append(optimizer)
        self._patches.hook(optimizer.register_step_pre_hook, self._applying)
        self._patches.hook(optimizer.register_step_post_hook, self._applied)
        self._patches.around(optimizer, "zero_grad", partial(self._clears, optimizer))

    def leave_all(self) -> None:
        """Forget the calls that have not returned: a training forward begins."""
        self._inside.clear()

    def is_within(self) -> bool:
        """Tell whether an optimizer steps now: what steps inside is its affair (``ZeroRedundancyOptimizer``)."""
        return any(self._inside.values())

    def has(self, optimizer: Any) -> bool:
        """Tell whether it is one of the model's optimizers."""
        return optimizer in self._optimizers

    def steps_ours(self, optimizer: Any) -> bool:
        """Tell whether it steps a parameter of the model."""
        return not self._ids.isdisjoint(parameters_of_optimizer(optimizer))

    def clears_all(self, optimizer: Any) -> bool:
        """Tell whether its ``zero_grad`` clears every gradient of the model; None: all are cleared."""
        return optimizer is None or self._ids <= parameters_of_optimizer(optimizer)

    def take(self, optimizer: Any) -> bool:
        """Let one take the place of those that hold no other parameter of the model; return whether it is new."""
        others = self._ids - parameters_of_optimizer(optimizer)
        stay = [one for one in self._optimizers if not others.isdisjoint(parameters_of_optimizer(one))]
        self._optimizers[:] = [*stay, optimizer]
        if any(optimizer is one for one in self._hooked):
            return False
        self._hook(optimizer)
        self.missing.add(id(optimizer))
        return True

    def end(self) -> bool:
        """End the step; return whether some have stepped and others have not."""
        missing = {id(optimizer) for optimizer in self._optimizers} - (self.stepped or set())
        partly, self.missing, self.stepped = bool(self.stepped and missing), missing, None
        return partly

    def _applying(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Wait for the closure's end; torch uses the arguments that a step pre-hook returns."""
        if not self._begins():
            return None
        self._inside[id(optimizer)] = depth = self._inside.get(id(optimizer), 0) + 1
        return None if depth > 1 else behind_closure(partial(self._applies, optimizer, args, kwargs), args, kwargs)

    def _applied(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._inside[id(optimizer)] = depth = self._inside.get(id(optimizer), 1) - 1
        if self.stepped is not None and depth <= 0:
            self.stepped.add(id(optimizer))
            if self.stepped.issuperset(map(id, self._optimizers)):
                self._ended()
