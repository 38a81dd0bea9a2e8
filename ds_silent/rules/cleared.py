"""Check that the gradients of a step's micro-batches are not cleared before its optimizer applies them.

``zero_grad()`` within the accumulation, on every rank alike, leaves the last micro-batch alone: a batch is smaller than
it is meant to be, its gradient is divided by all of them, and the loss falls. It is a note where no loss is divided: a
script may take a gradient for something else, such as the weights of its sources. Silent: a batch that is used again
(SAM, a probe of the gradient), weights that were changed between, one optimizer's parameters of several, what was
reduced before it was cleared (a step that the script leaves out), and DeepSpeed and Megatron, which clear themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.records import Severity
from ds_silent.rules.rule import Breach, Rule

_STEPS = 3  # measured, in a row
REPEATS = 32  # forwards on one batch; LBFGS evaluates its closure up to 25 times


class NewestBatch:
    """The tensors of the newest forward, without keeping them alive.

    Two batches of a loader are never the same tensors, even where their content is. A script that has moved one batch
    before its loop, and never another, is found out after ``REPEATS``.
    """

    def __init__(self) -> None:
        self._tensors: list[tuple[weakref.ref[Tensor], tuple[Any, ...] | None]] = []
        self._repeats = 0

    def repeated_by(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these are the tensors of the forward before, unchanged, or the same views of them."""
        found = [(tensor if tensor._base is None else tensor._base, _view_of(tensor)) for tensor in tensors]
        same = bool(found) and len(found) == len(self._tensors)
        for (source, view), (before, view_before) in zip(found, self._tensors, strict=False):
            same = same and source is before() and view is not None and view == view_before
        self._tensors = [(weakref.ref(source), view) for source, view in found]
        self._repeats = self._repeats + 1 if same else 0
        return 0 < self._repeats < REPEATS

    @property
    def same(self) -> bool:
        """Tell whether the newest were the tensors of the forward before, however often."""
        return self._repeats > 0


def _view_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what tells two uses of one tensor apart; None where nobody counts its changes."""
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    return tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride()


class ClearedGradients(Rule):
    """Follow the micro-batches of this rank whose gradients are cleared."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._newest = NewestBatch()  # of the training forwards
        self._version = -1  # of a weight then
        self._divided = False  # any of the backwards of the step so far
        self._meant = False  # since the last measured step: the same batch again, or weights that were changed
        self._steps = self._since = 0  # measured, with cleared micro-batches; the first

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at what each forward is given."""
        patches.hook(self._framework.module.register_forward_pre_hook, partial(safely, self._forward), with_kwargs=True)
        patches.before_backward(partial(safely, self._begins))

    def _begins(self, root: Any) -> None:
        """Look whether the loss comes out of a multiplication or a division, as each of an accumulation does."""
        made = getattr(root, "grad_fn", None)
        self._divided |= made is not None and made.name().startswith(("Div", "Mul"))

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        given = [*args, *kwargs.values()]
        plain = all(isinstance(one, (Tensor, int, float, type(None))) for one in given)  # nothing to look into
        leaves = given if plain else tree_leaves(given)
        again = self._newest.repeated_by([one for one in leaves if isinstance(one, Tensor)])
        weight = next(iter(self._framework.parameters), None)
        version = -1 if weight is None else weight._version
        if self._framework.counts.cleared:
            self._meant |= again or version != self._version
        self._version = version

    def breaches(self) -> tuple[Breach, ...]:
        times, meant, divided = self._framework.counts.cleared, self._meant, self._divided
        self._meant = self._divided = False
        self._steps = self._steps + 1 if times and not meant else 0
        if self._steps == 1:
            self._since = self._framework.step
        if self._steps < _STEPS:
            return ()
        several = "a micro-batch of each step is" if times == 1 else f"{times} micro-batches of each step are"
        counted = ", while a division by the number of micro-batches counts them" if divided else ""
        message = (
            f"zero_grad() clears gradients before the optimizer applies them, since step {self._since}: {several} "
            f"trained for nothing{counted}."
        )
        remedy = "Call zero_grad() once per optimizer step: behind optimizer.step(), or before the first micro-batch."
        remedy = remedy if divided else f"If the script takes those gradients for something else, do nothing. {remedy}"
        severity: Severity = "warning" if divided else "info"
        return (Breach("cleared", "update-mismatch", severity, "zero_grad", message, remedy, self._since),)
