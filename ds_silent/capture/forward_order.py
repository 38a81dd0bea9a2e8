"""In which order a module's first training forward comes to its parameters, for a trace.

    order = ForwardOrder(framework, guard)
    order.begin()                # at every training forward; the first puts hooks in place
    order.end()                  # as soon as that is over: they are gone
    order.of_parameters()        # [0, 2, None, ...]; None where it is not known

A parameter is reached with the module that holds it, one that several hold (tied weights) with the first of them. A
compiled module is left alone: its hooks would be compiled too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.framework import Framework
from ds_silent.patches import Patches


class ForwardOrder:
    """See the module docstring. Made while the modules hold the framework's parameters: a forward may hold others."""

    def __init__(self, framework: Framework, guard: CollectiveGuard):
        self._local, self._count = guard.local, len(framework.parameters)
        known = {id(parameter): index for index, parameter in enumerate(framework.parameters)}
        self._root = framework.module
        self._holders: list[tuple[nn.Module, list[int]]] | None = [
            (module, own)
            for module in framework.module.modules()
            if (own := [known[id(p)] for p in module.parameters(recurse=False) if id(p) in known])
        ]
        self._patches = Patches()
        self._reached: dict[int, None] = {}  # parameters, in their order

    def begin(self) -> None:
        """Hook the modules, once. The outermost forward has begun: its own hooks are not called any more."""
        holders, self._holders = self._holders, None
        if holders is None or torch.compiler.is_compiling() or any(map(_is_compiled, self._root.modules())):
            return
        for module, own in holders:
            if module is self._root:
                self._reach(own)
            else:
                self._patches.hook(module.register_forward_pre_hook, partial(self._local, self._forward, own))

    def _forward(self, parameters: list[int], *_: Any) -> None:
        self._reach(parameters)

    def _reach(self, parameters: list[int]) -> None:
        for index in parameters:
            self._reached.setdefault(index)

    def end(self) -> None:
        """Remove the hooks."""
        self._patches.undo()

    def of_parameters(self) -> list[int | None]:
        """Return the place of each parameter among those that were reached."""
        places = {index: place for place, index in enumerate(self._reached)}
        return [places.get(index) for index in range(self._count)]


def _is_compiled(module: nn.Module) -> bool:
    """``torch.compile(module)`` wraps it, ``module.compile()`` keeps the compiled call beside it (2.4 to 2.13)."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
