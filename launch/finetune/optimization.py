"""Learning rate and weight decay as the Hugging Face trainer has them, which the paper used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def linear_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """The learning rate's factor for the optimizer step after ``step`` steps: up from 0, then down to 0."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def linear_schedule(warmup_ratio: float, total_steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """What DeepSpeed calls with its optimizer to get the scheduler."""
    warmup_steps = round(warmup_ratio * total_steps)
    return lambda optimizer: LambdaLR(optimizer, lambda step: linear_factor(step, warmup_steps, total_steps))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, matrices with ``weight_decay``, vectors (biases, norms) with none."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if _dimensions(p) > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    # ZeRO 3's zero.Init leaves an empty one-dimensional stub and keeps the shape beside it
    return len(getattr(parameter, "ds_shape", parameter.shape))
