"""Which optimizers' formulas are known: the settings of a group, and where its state lies.

    known = known_form(optimizer)            # None: not checked
    known.update(optimizer, group)           # ds_silent.maths.optimizers.Update; None where it cannot be read
    known.step(optimizer, group, parameter)  # the number of the step to come

Classes are known by their own name and never by their ancestors: a class that derives from one of them may have a
formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_silent.maths.optimizers import Elements, Kind, Update, late_correction, steps_without_gradient
from ds_silent.rules.rule import Breach

MOMENTS = ("first", "second", "largest")
Group = Mapping[str, Any]


@dataclass(frozen=True)
class KnownForm:
    """How one class of optimizers names its settings and its state.

    Attributes:
        state: what its state calls the moments of :class:`ds_silent.maths.optimizers.Elements`, by their names there.
        more: settings that not every form has; None where one of them cannot be read.
        step_of_last: all parameters of a group step by the counter of the last one.
    """

    kind: Kind
    state: Mapping[str, str]
    more: Callable[[Any, Group], dict[str, Any] | None]
    step_of_last: bool = False

    def update(self, optimizer: Any, group: Group) -> Update | None:
        """Return a group's settings; None where the step is a part of a graph, or a number cannot be read."""
        if group.get("capturable") or group.get("differentiable"):
            return None
        rate, decay, more = number(group["lr"]), number(group.get("weight_decay", 0.0)), self.more(optimizer, group)
        if rate is None or decay is None or more is None:
            return None
        return Update(self.kind, rate, decay, maximize=bool(group.get("maximize", False)), **more)

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
    return _OF_TORCH.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def _betas(group: Group) -> dict[str, Any] | None:
    beta1, beta2 = map(number, group["betas"])
    within = beta1 is not None and beta2 is not None and 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0
    return {"beta1": beta1, "beta2": beta2} if within else None


def _sgd(optimizer: Any, group: Group) -> dict[str, Any]:
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    return {"beta1": momentum, "dampening": dampening, "nesterov": bool(group["nesterov"])}


def _adam(optimizer: Any, group: Group) -> dict[str, Any] | None:
    if (betas := _betas(group)) is None:
        return None
    decoupled = type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False))
    return {**betas, "eps": float(group["eps"]), "decoupled": decoupled, "amsgrad": bool(group["amsgrad"])}


def _deepspeed_adam(optimizer: Any, group: Group) -> dict[str, Any] | None:
    if (betas := _betas(group)) is None:
        return None
    correction, decoupled = bool(group["bias_correction"]), bool(optimizer.adam_w_mode)
    return {**betas, "eps": float(group["eps"]), "decoupled": decoupled, "bias_correction": correction}


def _adagrad(optimizer: Any, group: Group) -> dict[str, Any]:
    return {"eps": float(group["eps"]), "rate_decay": float(group["lr_decay"])}


def _lion(optimizer: Any, group: Group) -> dict[str, Any] | None:
    return None if (betas := _betas(group)) is None else {**betas, "decoupled": True}


_MOMENTS_OF_ADAM = {"first": "exp_avg", "second": "exp_avg_sq", "largest": "max_exp_avg_sq"}
_ADAM, _LION = KnownForm("Adam", _MOMENTS_OF_ADAM, _adam), KnownForm("Lion", {"first": "exp_avg"}, _lion)
_OF_TORCH: dict[type, KnownForm] = {
    torch.optim.SGD: KnownForm("SGD", {"first": "momentum_buffer"}, _sgd),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: KnownForm("Adagrad", {"second": "sum"}, _adagrad),
}
_BY_NAME = {  # DeepSpeed 0.16.9 to 0.19.8
    "deepspeed.ops.adam.fused_adam.FusedAdam": KnownForm("Adam", _MOMENTS_OF_ADAM, _deepspeed_adam, step_of_last=True),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": KnownForm("Adam", _MOMENTS_OF_ADAM, _deepspeed_adam),
    "deepspeed.ops.lion.fused_lion.FusedLion": _LION,
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _LION,
}


def late_count(kind: str, corrected: Sequence[tuple[Update, Elements]], since: int) -> Breach | None:
    """Note an optimizer whose step counter is ahead of its moments, so that it corrects their bias as in later steps.

    Where the counter is past its beginning at the first step, and all moments are 0, something has stepped the
    optimizer without gradients. A resumed training has moments.

    Args:
        corrected: all tensors of the optimizer's first call whose bias is corrected, with their settings.
    """
    late = steps_without_gradient([old for _, old in corrected])
    if not late:
        return None
    first, second, third = (f"{late_correction(corrected[0][0], step, late):.3g}" for step in (1, 2, 3))
    return Breach(
        key=f"update:{kind}:count",
        kind="update-mismatch",
        severity="info",
        where="step counter",
        message=f"{kind} counts {late} step{'s' * (late > 1)} more than it has taken: its counter moved on while its "
        "moments stayed 0, as in a step without gradients. So its bias correction is that of later steps: its first "
        f"three updates are {first}, {second} and {third} times what the formula gives for steps 1, 2 and 3.",
        remedy="Do nothing: it is over after a few steps. DeepSpeed begins so in stage 0 with bf16 and fp16, not in "
        "stages 1 to 3. For the same updates set state['step'] of the optimizer at the bottom to 0 before training.",
        since=since,
    )
