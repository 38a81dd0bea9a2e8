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


class ForwardOrder:
    """See the module docstring."""

    def __init__(self, framework: Framework, guard: CollectiveGuard):
        self._framework, self._guard = framework, guard
        self._begun = False
        self._hooks: list[Any] = []
        self._reached: dict[int, None] = {}  # parameters, in their order

    def begin(self) -> None:
        """Hook the modules, once. The outermost forward has begun: its own hooks are not called any more."""
        if self._begun:
            return
        self._begun = True
        modules = list(self._framework.module.modules())
        if torch.compiler.is_compiling() or any(map(_is_compiled, modules)):
            return
        known = {id(parameter): index for index, parameter in enumerate(self._framework.parameters)}
        for module in modules:
            own = [known[id(p)] for p in module.parameters(recurse=False) if id(p) in known]
            if own and module is self._framework.module:
                self._reach(own)
            elif own:
                reach = partial(self._guard.local, self._reach, own)
                self._hooks.append(module.register_forward_pre_hook(_ignoring_arguments(reach)))

    def _reach(self, parameters: list[int]) -> None:
        for index in parameters:
            self._reached.setdefault(index)

    def end(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def of_parameters(self) -> list[int | None]:
        """Return the place of each parameter among those that were reached."""
        places: dict[int, int] = {index: place for place, index in enumerate(self._reached)}
        return [places.get(index) for index in range(len(self._framework.parameters))]


def _ignoring_arguments(act: Any) -> Any:
    def hook(*_: Any) -> None:
        act()

    return hook


def _is_compiled(module: nn.Module) -> bool:
    """``torch.compile(module)`` wraps it, ``module.compile()`` keeps the compiled call beside it (2.4 to 2.13)."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
