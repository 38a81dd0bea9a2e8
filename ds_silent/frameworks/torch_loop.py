"""The moments of a training loop that a script writes itself: torch's forward, backward and optimizer.

loop = TorchLoop(module, optimizers, synchronises)
loop.connect(moments, parameters)        # parameters: whose gradients a hook sees before they are accumulated
loop.close()

No object of such a loop knows what an optimizer step is, so the steps are counted here: one begins to end when the
first optimizer is about to step, and has ended when all have, or when the next training forward comes.

* **backward**: ``torch.autograd.backward``, which ``Tensor.backward`` looks up when it is called. Its outermost call
  begins and ends a micro-batch: a reentrant checkpoint's calls lie inside, and whatever overlaps with a backward is
  done behind it (DDP, FSDP2). Where it does not begin with a loss that the forward gave, its root is one: the step's
  gradient is that of the roots' sum, so they are shares of the step's loss.
* **forward**: the outermost one; a module may call itself, as Lightning's training step calls its own ``forward``.
* **step**: hooks of the optimizers. One that is given a closure runs forward and backward itself, so it begins to apply
  when the closure has returned; each call of it is a step. A GradScaler leaves its optimizer out without a word where
  it finds infinities: that step is a skipped one. A reduced gradient that ``zero_grad`` clears before any optimizer
  has stepped was a step that the script leaves out: it ends there, so that no rank waits for the observation of one
  that goes on. It was none where nobody had cleared what the step before has applied: no script means to step with
  that, so the backward was another module's, through this one (a GAN's generator), and is dropped from the observation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.capture.forwards import loss_in
from ds_silent.capture.loss_graph import Made, comes_of, made_by
from ds_silent.capture.row_hashes import batch_tensors
from ds_silent.framework import Moments
from ds_silent.frameworks.torch_common import StepCounts
from ds_silent.patches import Patches


class TorchLoop:
    """See the module docstring.

    Attributes:
        counts: the steps; a GradScaler or the script may have left one out.
        scaled: whether a GradScaler is at work.
        bypassed: whether a gradient came of a forward that did not go through the wrapper.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Any], synchronises: Callable[[], bool]):
        """``synchronises``: whether the backward under way reduces, which is the step's last or only one."""
        self._module, self._optimizers = module, list(optimizers)
        self._synchronises = synchronises
        self._patches = Patches()
        self._moments: Moments | None = None
        self.counts, self.scaled = StepCounts(), False
        self._rows = 0  # of the step under way
        self._rows_behind = 0  # of them: whose backward has come, or never will
        self._forwards = 0  # of calls under way, one inside the other
        self._depth = 0  # of backward calls
        self._root: Tensor | None = None  # of the outermost
        self._unscaled: Tensor | None = None  # what the GradScaler has scaled last
        self._forward_loss: Made | None = None  # of the newest forward, where it gave one
        self._open = False  # gradients have come in the backward under way
        self._stepped: set[int] | None = None  # optimizers, while a step ends
        self._accumulated = False  # a backward has come since the last step
        self._reduced = False  # and its gradients were reduced
        self._uncleared = False  # the gradients still hold what the last step has applied
        self._boundary = False

    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is reduced."""
        return self._boundary if self._open else self._synchronises()

    def connect(self, moments: Moments, parameters: Sequence[Any]) -> None:
        """Register every hook."""
        self._moments = moments
        patches = self._patches
        patches.add(self._module.register_forward_pre_hook(self._forward, with_kwargs=True))
        patches.add(self._module.register_forward_hook(self._forwarded, always_call=True))
        for index, parameter in enumerate(parameters):
            patches.add(parameter.register_hook(partial(self._gradient, index)))
        for optimizer in self._optimizers:
            patches.add(optimizer.register_step_pre_hook(self._applying))
            patches.add(optimizer.register_step_post_hook(self._applied))
            patches.around(optimizer, "zero_grad", self._clearing)
        patches.wrap_method(nn.Module, "zero_grad", self._module_clearing)
        patches.wrap(torch.autograd, "backward", self._backward)
        scaler = torch.amp.GradScaler
        patches.wrap_method(scaler, "scale", self._scale)
        patches.wrap_method(scaler, "step", self._scaler_step)

    def close(self) -> None:
        """Take every hook off; what was counted stays."""
        self._patches.undo()
        self._root = self._unscaled = None

    # -- forward and backward ------------------------------------------------------------------------------------

    def _forward(self, module: Any, args: Any, kwargs: Any) -> None:
        assert self._moments is not None
        if torch.is_grad_enabled():
            self._forwards += 1
            if self._forwards > 1:
                return
            self._ended()
            self._forward_loss = None
            self._rows += self._moments.guard.local(rows_in, args, kwargs) or 0
        self._moments.forward(module, args, kwargs)

    def _forwarded(self, module: Any, args: Any, output: Any) -> None:
        assert self._moments is not None
        if torch.is_grad_enabled():
            self._forwards = max(self._forwards - 1, 0)
            if self._forwards:
                return
            self._forward_loss = made_by(loss_in(output))
        self._moments.forwarded(module, args, output)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth == 0:
            self._root = tensors if isinstance(tensors, Tensor) and tensors.numel() == 1 else None
            if self._moments is not None:
                self._moments.root(tensors)
        self._depth += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._backward_ended()

    def _gradient(self, index: int, gradient: Tensor) -> None:
        assert self._moments is not None
        if not self._open:
            self._open, self._boundary = True, self._synchronises()
            loss = self._root if self._unscaled is None else self._unscaled
            if loss is not None and not comes_of(loss, self._forward_loss):
                self._moments.share(loss)
        self._moments.gradient(index, gradient)

    def _backward_ended(self) -> None:
        self._root = self._unscaled = None
        if self._open:
            assert self._moments is not None
            self._moments.micro_batch_ended()
            boundary, self._open = self._boundary, False
            self._accumulated, self._rows_behind = True, self._rows
            if boundary:
                self._reduced = True
                self._moments.reduced()

    def reduced_behind(self) -> None:
        """A reduction has ended that the script, or its trainer, runs behind the backward: look at its result."""
        if self._depth == 0 and self._reduced and self._stepped is None:
            assert self._moments is not None
            self._moments.reduced(again=True)

    # -- the step ------------------------------------------------------------------------------------------------

    def _applying(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A step pre-hook; torch takes the arguments that it returns."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._applies(optimizer, args, kwargs)
            return None

        def evaluated(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            self._applies(optimizer, args, kwargs)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _applies(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        assert self._moments is not None
        self._begin_to_end()
        self._moments.applying(optimizer, args, kwargs)

    def _begin_to_end(self) -> None:
        assert self._moments is not None
        if self._stepped is None:
            self._backward_ended()
            self._uncleared = self._uncleared or self._accumulated
            self._stepped, self._reduced, self._accumulated = set(), False, False
            self._moments.before_update()

    def _applied(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepped is not None:
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self._optimizers):
                self._ended()

    def _module_clearing(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``zero_grad`` of a module: of ours, or of one around it."""
        if module is self._module or any(inner is self._module for inner in module.modules()):
            self._clearing()
        return original(module, *args, **kwargs)

    def _clearing(self, *args: Any, **kwargs: Any) -> None:
        """The gradients go: with them a step that no optimizer has begun, or what was never to be one."""
        if self._stepped is None and self._accumulated and self._uncleared:
            self._drop()
        elif self._stepped is None and self._reduced:
            self._begin_to_end()
            self._ended(left_out=True)
        self._uncleared = False

    def _drop(self) -> None:
        assert self._moments is not None
        self._accumulated = self._reduced = False
        self._rows, self._rows_behind = self._rows - self._rows_behind, 0
        self._moments.dropped()

    def _ended(self, skipped: bool = False, left_out: bool = False) -> None:
        """The step is over, if one was ending."""
        if self._stepped is not None:
            assert self._moments is not None
            self._stepped = None
            self.counts.take(self._rows, skipped, left_out)
            self._rows = self._rows_behind = 0
            self._moments.updated()

    # -- a loss scale --------------------------------------------------------------------------------------------

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor) and outputs.numel() == 1 and outputs.requires_grad and scaler.is_enabled():
            assert self._moments is not None
            self.scaled, self._unscaled = True, outputs
            outputs.register_hook(partial(self._moments.scaled, 1.0))  # type: ignore[no-untyped-call]
        return original(scaler, outputs)

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.counts.step
        result = original(scaler, optimizer, *args, **kwargs)
        if self.counts.step == before and self._stepped is None and any(optimizer is own for own in self._optimizers):
            self._begin_to_end()
            self._ended(skipped=True)
        return result


def rows_in(args: Any, kwargs: Any) -> int:
    """Rows of a micro-batch: the first dimension of the first tensor that has one."""
    tensors, _ = batch_tensors(args, kwargs)
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.ndim), 0)
