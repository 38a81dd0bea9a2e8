"""Check that what a checkpoint computes again in the backward can be what it has computed in the forward.

``torch.utils.checkpoint`` gives the random generators back to the second computation as they were in the first, unless
it is told not to (``preserve_rng_state=False``, which is faster where nothing is random). With dropout inside, the
second one then has other masks: the loss is of one function, the gradient of another. A fact: the function was told so,
and the generators moved while it ran. Silent: where nothing draws, and what draws from Python's or numpy's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint

from ds_silent.device import generator_state, kind
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_LOOKS = 64  # functions that draw nothing, after which none is expected to
_Safely = Callable[..., Any]
_REENTRANT, _OTHER = "forward", "_checkpoint_without_reentrant_generator"


class RecomputedDraws(Rule):
    """Look at the first functions that run under a checkpoint without the generators' states."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._left = _LOOKS
        self._since: int | None = None

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Stand around both kinds of checkpoints: below their function, which scripts import by its name."""
        patches.wrap_method(checkpoint.CheckpointFunction, _REENTRANT, partial(self._reentrant, safely))
        if hasattr(checkpoint, _OTHER):  # torch 2.4 to 2.13
            patches.wrap(checkpoint, _OTHER, partial(self._other, safely))

    def _reentrant(self, safely: _Safely, original: Callable[..., Any], context: Any, function: Any, *args: Any) -> Any:
        before = None if not args or args[0] else safely(self._before)
        result = original(context, function, *args)
        safely(self._look, before)
        return result

    def _other(
        self,
        safely: Callable[..., Any],
        original: Callable[..., Any],
        function: Any,
        preserves: Any,
        *args: Any,
        **kw: Any,
    ) -> Iterator[None]:
        steps = original(function, preserves, *args, **kw)
        return steps if preserves or not self._left else self._around(safely, steps)

    def _around(self, safely: _Safely, steps: Any) -> Iterator[None]:
        """Do as torch's generator does, which waits at its one ``yield`` while the function runs."""
        next(steps)
        before = safely(self._before)
        try:
            yield
        except BaseException as error:
            steps.throw(error)
            raise
        safely(self._look, before)
        next(steps, None)

    def _before(self) -> list[torch.Tensor] | None:
        if not self._left or torch.compiler.is_compiling():
            return None
        self._left -= 1
        return _states()

    def _look(self, before: list[torch.Tensor] | None) -> None:
        if before is not None and not all(map(torch.equal, before, _states())):
            self._since, self._left = self._framework.step, 0

    def breaches(self) -> tuple[Breach, ...]:
        if self._since is None:
            return ()
        message = (
            "Activations are recomputed with other random numbers than the forward had (preserve_rng_state=False, and "
            "dropout or another draw inside): the gradient is not that of the loss."
        )
        remedy = (
            "Leave preserve_rng_state out (in gradient_checkpointing_kwargs, too), or set the dropout inside to 0. "
            "Go back to the checkpoint before this was switched on if it matters."
        )
        where = "activation checkpointing"
        return (Breach("recomputed", "update-mismatch", "warning", where, message, remedy, self._since),)


def _states() -> list[torch.Tensor]:
    """Return those of torch's generators, on the host."""
    return [torch.get_rng_state(), *([] if kind() == "cpu" else [generator_state()])]
