"""Which optimizers' formulas are known: the settings of a group, and where its state lies.

    known = known_form(optimizer)            # None: not checked
    known.update(optimizer, group)           # ds_silent.maths.optimizers.Update; None where it cannot be read
    known.step(optimizer, group, parameter)  # the number of the step to come

Classes are known by their own name and never by their ancestors: a class that derives from one of them may have a
formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_silent.maths.optimizers import Update

MOMENTS = ("first", "second", "largest")
Group = Mapping[str, Any]


@dataclass(frozen=True)
class KnownForm:
    """How one class of optimizers names its settings and its state.

    Attributes:
        state: what its state calls the moments of :class:`ds_silent.maths.optimizers.Elements`, by their names there.
        step_of_last: all parameters of a group step by the counter of the last one.
    """

    update: Callable[[Any, Group], Update | None]
    state: Mapping[str, str]
    step_of_last: bool = False

    def step(self, optimizer: Any, group: Group, parameter: Tensor) -> float | None:
        """Return the number of the step to come, from 1; None where a device would have to be asked."""
        state = optimizer.state.get(parameter) or {}
        if not state:
            return float(group.get("step", 0)) + 1.0 if self.step_of_last else 1.0
        if "step" not in state:  # no bias is corrected: 1 where there is no momentum yet
            return 1.0 + any(isinstance(state.get(name), Tensor) for name in self.state.values())
        return None if (taken := number(state["step"])) is None else taken + 1.0


def number(value: Any) -> float | None:
    """Return a setting as a number; None where it lies on a device, which a look would wait for, or is none."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def known_form(optimizer: Any) -> KnownForm | None:
    """Return the form of an optimizer; None for every class that is not one of them by itself."""
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return _SGD
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return _ADAM
    if kind is torch.optim.Adagrad:
        return _ADAGRAD
    return _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def _plain(group: Group) -> dict[str, Any] | None:
    """Return what every form has; None where the step is a part of a graph, or a number cannot be read."""
    if group.get("capturable") or group.get("differentiable"):
        return None
    rate, decay = number(group["lr"]), number(group.get("weight_decay", 0.0))
    if rate is None or decay is None:
        return None
    return {"rate": rate, "decay": decay, "maximize": bool(group.get("maximize", False))}


def _betas(group: Group) -> dict[str, Any] | None:
    beta1, beta2 = map(number, group["betas"])
    within = beta1 is not None and beta2 is not None and 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0
    return {"beta1": beta1, "beta2": beta2} if within else None


def _sgd(optimizer: Any, group: Group) -> Update | None:
    if (plain := _plain(group)) is None:
        return None
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    return Update("SGD", **plain, beta1=momentum, dampening=dampening, nesterov=bool(group["nesterov"]))


def _adam(optimizer: Any, group: Group) -> Update | None:
    plain, betas = _plain(group), _betas(group)
    if plain is None or betas is None:
        return None
    decoupled = type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))
    amsgrad = bool(group["amsgrad"])
    return Update("Adam", **plain, **betas, eps=float(group["eps"]), decoupled=decoupled, amsgrad=amsgrad)


def _deepspeed_adam(optimizer: Any, group: Group) -> Update | None:
    plain, betas = _plain(group), _betas(group)
    if plain is None or betas is None:
        return None
    correction, decoupled = bool(group["bias_correction"]), bool(optimizer.adam_w_mode)
    return Update("Adam", **plain, **betas, eps=float(group["eps"]), decoupled=decoupled, bias_correction=correction)


def _adagrad(optimizer: Any, group: Group) -> Update | None:
    if (plain := _plain(group)) is None:
        return None
    return Update("Adagrad", **plain, eps=float(group["eps"]), rate_decay=float(group["lr_decay"]))


def _lion(optimizer: Any, group: Group) -> Update | None:
    plain, betas = _plain(group), _betas(group)
    return None if plain is None or betas is None else Update("Lion", **plain, **betas, decoupled=True)


_MOMENTS_OF_ADAM = {"first": "exp_avg", "second": "exp_avg_sq", "largest": "max_exp_avg_sq"}
_SGD = KnownForm(_sgd, {"first": "momentum_buffer"})
_ADAM = KnownForm(_adam, _MOMENTS_OF_ADAM)
_ADAGRAD = KnownForm(_adagrad, {"second": "sum"})
_BY_NAME = {  # DeepSpeed 0.16.9 to 0.19.8
    "deepspeed.ops.adam.fused_adam.FusedAdam": KnownForm(_deepspeed_adam, _MOMENTS_OF_ADAM, step_of_last=True),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": KnownForm(_deepspeed_adam, _MOMENTS_OF_ADAM),
    "deepspeed.ops.lion.fused_lion.FusedLion": KnownForm(_lion, {"first": "exp_avg"}),
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": KnownForm(_lion, {"first": "exp_avg"}),
}
