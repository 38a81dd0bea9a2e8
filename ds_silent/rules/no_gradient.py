"""Check that what is trainable gets a gradient, on every rank alike.

A parameter that needs a gradient and is held by an optimizer, and that has got none in any of the first measured steps,
stays what it was. That may be meant (a head that is not in use), so it is a note. It is a warning where its module runs
inside a reentrant checkpoint: that gives no gradient where none of its inputs needs one, as behind a frozen embedding.
Silent: frameworks that keep no gradient of each parameter (DeepSpeed's stages 1 to 3, Megatron-core).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_LOOKS = 16  # measured steps until something is told
_FOLLOWED = 8  # until the modules are followed
_SHOWN = 3
_FRAMES = 40  # of Python, between a checkpoint and a module within it


class NoGradient(Rule):
    """Follow this rank's parameters that have got no gradient so far."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._looks = self._since = self._vain = 0  # vain: measured steps that have reduced nothing that is kept
        self._held: list[int] | None = None  # places of what an optimizer is to train, as soon as one has looked
        self._without: list[int] = []  # of these
        self._checkpointed: set[int] = set()  # ids of modules that run inside a reentrant checkpoint
        self._modules: dict[int, nn.Module] = {}  # of each place in ``_without``
        self._patches: Patches | None = None
        self._safely: Callable[..., Any] = lambda function, *given: function(*given)

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        self._patches, self._safely = patches, safely

    def breaches(self) -> tuple[Breach, ...]:
        framework = self._framework
        if self._held is None:
            self._held, self._since = self._trainable(), framework.step
            self._without = self._held
        if not self._without or self._vain == _LOOKS:
            return ()
        if self._looks < _LOOKS and all(framework.reduced(place) is None for place in self._held):
            self._vain += 1  # this step reduced none, or the framework keeps none
            return ()
        self._looks += 1
        self._without = [place for place in self._without if framework.reduced(place) is None]
        if self._looks == _FOLLOWED:
            self._follow(self._without)
        return self._told(self._without) if self._looks >= _LOOKS and self._without else ()

    def _trainable(self) -> list[int]:
        """Return what an optimizer is to train."""
        groups = self._framework.parameter_groups() or []
        held = {id(parameter) for group in groups for parameter in group}
        parameters = enumerate(self._framework.parameters)
        return [place for place, one in parameters if one.requires_grad and id(one) in held]

    def _follow(self, without: list[int]) -> None:
        owners = {id(p): inner for inner in self._framework.module.modules() for p in inner.parameters(recurse=False)}
        for place in without:
            owner = owners.get(id(self._framework.parameters[place]))
            if owner is not None and self._patches is not None:
                self._modules[place] = owner
                self._patches.hook(owner.register_forward_pre_hook, partial(self._safely, self._forward))

    def _forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or id(module) in self._checkpointed:
            return
        if _in_reentrant_checkpoint(sys._getframe()):
            self._checkpointed.add(id(module))

    def _told(self, without: list[int]) -> tuple[Breach, ...]:
        checkpointed = [place for place in without if id(self._modules.get(place)) in self._checkpointed]
        others = [place for place in without if place not in checkpointed]
        found = []
        if checkpointed:
            where, got = self._named(checkpointed)
            message = (
                f"{got}: what they are in runs inside torch.utils.checkpoint with use_reentrant=True, which gives no "
                "gradient where none of its inputs needs one. They are not trained."
            )
            remedy = (
                "Use use_reentrant=False (gradient_checkpointing_kwargs), or let the inputs need a gradient "
                "(model.enable_input_require_grads())."
            )
            key = "no gradient:checkpoint"
            found.append(Breach(key, "update-mismatch", "warning", where, message, remedy, self._since))
        if others:
            where, got = self._named(others)
            message = f"{got}: no loss depends on them, or the script takes it away. They are not trained."
            remedy = (
                "If that is meant, do nothing; requires_grad_(False) says so. Else find where they are cut off: an "
                "output that is not used, detach(), no_grad(), .data, or grad = None behind the backward."
            )
            found.append(Breach("no gradient", "update-mismatch", "info", where, message, remedy, self._since))
        return tuple(found)

    def _named(self, places: list[int]) -> tuple[str, str]:
        names = [self._framework.names[place] for place in places]
        many, them = len(names), "parameter that an optimizer holds has"
        if many > 1:
            them = "parameters that an optimizer holds have"
        got = f"{many} trainable {them} got no gradient in {_LOOKS} measured steps, {listed(names, _SHOWN)}"
        return listed(names, _SHOWN), got


def _in_reentrant_checkpoint(frame: FrameType | None) -> bool:
    """Tell whether a reentrant checkpoint whose inputs need no gradient is among the callers; a deep stack says no."""
    code = inspect.unwrap(checkpoint.CheckpointFunction.forward).__code__  # another rule follows it
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code is code:
            return not any(isinstance(one, Tensor) and one.requires_grad for one in frame.f_locals.get("args", ()))
        frame = frame.f_back
    return False
