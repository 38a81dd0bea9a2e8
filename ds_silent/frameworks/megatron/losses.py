"""The losses of Megatron's schedules, which no module returns: the script's ``forward_step`` names a function for them.

watch_losses(patches, chunks, loss)      # loss(value) of each training micro-batch, from now on

``schedules.forward_step`` is looked up by every schedule when it is called; it is the only place that all go through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_silent.patches import Patches

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def watch_losses(patches: Patches, chunks: Sequence[Any], tell: Callable[[Tensor], object]) -> None:
    """Call ``tell`` with the loss of each micro-batch of these chunks, on the ranks that compute one."""
    own = {id(chunk) for chunk in chunks}

    def forward_step(original: Callable[..., Any], script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = args[1] if len(args) > 1 else kwargs.get("model")
        return original(_told(script, tell) if id(model) in own else script, *args, **kwargs)

    schedules = sys.modules.get(_SCHEDULES)
    if hasattr(schedules, "forward_step"):
        patches.wrap(schedules, "forward_step", forward_step)


def _told(script: Callable[..., Any], tell: Callable[[Tensor], object]) -> Callable[..., Any]:
    """The script's ``forward_step``, whose loss function tells what it returns."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = script(*args, **kwargs)
        if loss_function is None or not torch.is_grad_enabled():
            return output, loss_function

        def told(*given: Any, **named: Any) -> Any:
            result = loss_function(*given, **named)
            if isinstance(result, tuple) and isinstance(result[0], Tensor) and result[0].numel() == 1:
                tell(_mean(result))
            return result

        return output, told

    return forward_step


def _mean(result: tuple[Any, ...]) -> Tensor:
    """(mean, ..), or (sum over tokens, tokens, ..): a copy, because the schedule divides it in place."""
    loss: Tensor = result[0].detach().clone()
    return loss / torch.as_tensor(result[1], device=loss.device).clamp(min=1) if len(result) == 3 else loss
