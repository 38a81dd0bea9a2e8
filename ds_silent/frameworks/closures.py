"""Steps of optimizers that run the forward themselves, by a closure: a training may be attached within one.

Its hooks have not seen that step begin, and are too late to be called with what it was given. So whoever attaches in
forwards lets each closure be followed, and a training that is attached within is told as the closure returns.

patches.add(register_optimizer_step_pre_hook(follow))     # before any forward
for step in under_way(optimizers):                        # of those of the training that begins
    step.behind.append(act)                               # each time that the closure returns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_silent.patches import with_closure

_running: list[StepUnderWay] = []  # of this process, while their closures run


class StepUnderWay:
    """One step of an optimizer with a closure.

    Attributes:
        optimizer, args, kwargs: as torch's step hooks get them.
        behind: what is called each time that the closure returns.
    """

    def __init__(self, optimizer: Any, args: Any, kwargs: Any):
        self.optimizer, self.args, self.kwargs = optimizer, args, kwargs
        self.behind: list[Callable[[], object]] = []

    def evaluate(self, closure: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call the closure."""
        _running.append(self)
        try:
            result = closure(*given, **named)
        finally:
            _running.remove(self)
        for act in self.behind:
            act()
        return result


def follow(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Follow the closure of an optimizer's step, if it has one; a step pre-hook."""
    if torch.compiler.is_compiling():
        return None
    return with_closure(StepUnderWay(optimizer, args, kwargs).evaluate, args, kwargs)


def under_way(optimizers: Sequence[Any]) -> list[StepUnderWay]:
    """Return the steps of these whose closures run, one of each: torch hooks a subclass's step and its parent's."""
    found = {id(step.optimizer): step for step in _running}
    return [found[id(optimizer)] for optimizer in optimizers if id(optimizer) in found]
