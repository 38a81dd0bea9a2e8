"""Check that the gradients of a step's micro-batches are not cleared before its optimizer applies them.

``zero_grad()`` within the accumulation, on every rank alike, leaves the last micro-batch alone: a batch is smaller than
it is meant to be, its gradient is divided by all of them, and the loss falls. Silent: a batch that is used again (SAM,
a probe of the gradient), weights that were changed between, one optimizer's parameters of several, what was reduced
before it was cleared (a step that the script leaves out), and DeepSpeed and Megatron, which clear by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_STEPS = 3  # measured, in a row


class ClearedGradients(Rule):
    """Follow the micro-batches of this rank whose gradients are cleared."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._newest: weakref.ref[Tensor] | None = None  # the first tensor that the newest training forward was given
        self._version = -1  # of a weight then
        self._meant = False  # since the last measured step: the same batch again, or weights that were changed
        self._steps = self._since = 0  # measured, with cleared micro-batches; the first

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at what each forward is given."""
        patches.hook(self._framework.module.register_forward_pre_hook, partial(safely, self._forward), with_kwargs=True)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        weight = next(iter(self._framework.parameters), None)
        version = -1 if weight is None else weight._version
        if self._framework.counts.cleared:
            again = given is not None and self._newest is not None and self._newest() is given
            self._meant |= again or version != self._version
        self._newest, self._version = None if given is None else weakref.ref(given), version

    def breaches(self) -> tuple[Breach, ...]:
        times, meant, self._meant = self._framework.counts.cleared, self._meant, False
        self._steps = self._steps + 1 if times and not meant else 0
        if self._steps == 1:
            self._since = self._framework.step
        if self._steps < _STEPS:
            return ()
        several = "a micro-batch of each step is" if times == 1 else f"{times} micro-batches of each step are"
        message = (
            f"zero_grad() clears gradients before the optimizer applies them, since step {self._since}: {several} "
            "trained for nothing, while a division by the number of micro-batches counts them."
        )
        remedy = "Call zero_grad() once per optimizer step: behind optimizer.step(), or before the first micro-batch."
        return (Breach("cleared", "update-mismatch", "warning", "zero_grad", message, remedy, self._since),)
