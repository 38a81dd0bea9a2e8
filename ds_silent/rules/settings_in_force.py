"""What a training runs with after all defaults, and where each value comes from: ``settings`` of ``run.json``.

    settings = settings_in_force(framework)      # {"lr": Setting(0.001, "default"), ...}, of this rank

Two runs of the same script are compared by it where a default has changed between two versions. Nothing is judged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_silent.comparison.defaults import OF_MODEL
from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework, Origin, Setting
from ds_silent.preflight.settings import PROBABILITIES, settings_of
from ds_silent.rules.known_optimizers import known_form

MOST_GROUPS, SHOWN = 8, 6
_PLAIN = (bool, int, float, str, type(None))
_DROPPED = frozenset({"p", *PROBABILITIES})  # a setting of its own
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}


def settings_in_force(framework: Framework) -> dict[str, Setting]:
    """Return every setting by its name; what a framework says of itself comes first."""
    found = dict(framework.settings())
    if framework.micro_batches > 1:  # 1 is also what a loop says that has not been asked
        found.setdefault("micro-batches of a step", Setting(framework.micro_batches, "yours"))
    found["precision of the trainable parameters"] = Setting(_dtypes(framework.parameters), "framework")
    optimizers = framework.optimizers()
    for place, optimizer in enumerate(optimizers):
        prefix = f"optimizer {place}: " if len(optimizers) > 1 else ""
        found.update({prefix + name: setting for name, setting in _of_optimizer(optimizer, framework)})
    for scheduler in framework.schedulers():
        found["schedule of the learning rate"] = Setting(type(scheduler).__name__, "yours")
    attention = getattr(getattr(framework.module, "config", None), "_attn_implementation", None)
    if isinstance(attention, str):
        found["attention implementation"] = Setting(attention, "framework")
    return found | _of_modules(framework.module) | _of_torch()


def _of_modules(module: Any) -> dict[str, Setting]:
    """Return the fractions and words that modules are set to, such as a norm's epsilon: of an attribute all values."""
    found: dict[str, set[float | str]] = {}
    for inner in module.modules():
        for name in settings_of(inner):
            value = inner.__dict__[name]
            if isinstance(value, (float, str)) and name not in _DROPPED:
                found.setdefault(name, set()).add(value)
    return {
        f"{OF_MODEL}{name}": Setting(listed(sorted(map(str, values)), SHOWN, "values"), "framework")
        for name, values in sorted(found.items())
    }


def _of_torch() -> dict[str, Setting]:
    """Return how an accelerator rounds the factors of fp32 products. torch 2.9 has a second name for each switch."""
    backends = torch.backends
    product: Any = _either(torch.get_float32_matmul_precision, lambda: backends.cuda.matmul.fp32_precision)
    convolution: Any = _either(lambda: backends.cudnn.allow_tf32, lambda: backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
    return {
        "TF32: precision of fp32 matrix products": Setting(product, "default" if product == "highest" else "yours"),
        "TF32 in cuDNN": Setting(convolution, "default" if convolution is True else "yours"),
    }


def _either(read: Callable[[], Any], newer: Callable[[], Any]) -> Any:
    """Read a switch; by its newer name once the script has set it so, because torch then refuses the older one."""
    try:
        return read()
    except RuntimeError:
        return newer()


def _of_optimizer(optimizer: Any, framework: Framework) -> Iterator[tuple[str, Setting]]:
    yield "optimizer", Setting(type(optimizer).__name__, "yours")
    yield "optimizer's update", Setting("not checked" if known_form(optimizer) is None else "checked", "framework")
    groups = optimizer.param_groups
    if dtypes := _dtypes(p for group in groups for p in group["params"]):  # ZeRO stage 3 fills them within a step
        yield "precision of what the optimizer steps", Setting(dtypes, "framework")
    defaults = _defaults_of(type(optimizer))
    for name in dict.fromkeys(key for group in groups for key in group if key not in {"params", *_OF_SCHEDULES}):
        for label, value in _by_group(name, [_plain(group.get(name)) for group in groups]):
            origin: Origin = "default" if name in defaults and _plain(defaults[name]) == value else "yours"
            scheduled = name == "lr" and any("initial_lr" in group for group in groups)
            if name not in defaults or scheduled or (name == "lr" and framework.schedulers()):
                origin = "framework"
            yield label, Setting(value, origin)
    known = dict(zip(map(id, framework.parameters), framework.names, strict=True))
    without = [known[id(p)] for g in groups if not _plain(g.get("weight_decay")) for p in g["params"] if id(p) in known]
    if without and any(_plain(group.get("weight_decay")) for group in groups):
        yield "without weight decay", Setting(listed(without, SHOWN, "parameters"), "yours")


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _by_group(name: str, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield one value where all groups have the same, else each group's."""
    if all(value == values[0] for value in values):
        yield name, values[0]
        return
    for group, value in enumerate(values[:MOST_GROUPS]):
        yield f"{name} of group {group}", value
    if len(values) > MOST_GROUPS:
        yield f"{name} of {len(values) - MOST_GROUPS} more groups", "not listed"


def _defaults_of(kind: type) -> Mapping[str, Any]:
    """Return what the constructor takes without being told, and its ancestors' where it passes on what it is given."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in base.__dict__ or base in (object, torch.optim.Optimizer):
            continue
        parameters = inspect.signature(base.__dict__["__init__"]).parameters.values()
        found = {one.name: one.default for one in parameters if one.default is not one.empty} | found
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break
    return found


def _plain(value: Any) -> Any:
    """Return what JSON can write, and nothing that a device would be waited for."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else "on the device"
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value][:SHOWN]
    return value if isinstance(value, _PLAIN) else type(value).__name__
