"""Check that what a loop calls for a step stands where it has an effect on it, on every rank alike.

* ``clip_grad_norm_`` behind the step: the gradients that it makes smaller are never applied, so nothing is clipped.
  Within the accumulation: each rank clips by the norm of its own gradients, before they are reduced. With a limit of 0:
  nothing is left. Of no parameter: what it is given is a generator that an optimizer has read to its end. Silent: a
  limit of infinity, by which scripts read the norm, clippings without an effect, and norms that lie in shards.
* A parameter that is stepped, and stepped again before another backward: two optimizers that hold it, or a step that is
  called twice. A note. Silent: a step within another's, as where an optimizer wraps one.
* ``zero_grad()`` between the backward and the step: the optimizer finds no gradient.
* One ``autocast`` around the whole loop: it keeps the weights as it has cast them first, until it is left.
* A loss that ``GradScaler.scale`` has multiplied, and ``optimizer.step()`` instead of ``scaler.step(optimizer)``: the
  gradients that are applied are too large by the scale. Silent: ``unscale_`` before it, and a script that asks for the
  scale, because it may divide by it itself.
* A forward in fp16 (``autocast``), and a loss that nothing scales: the smallest gradients are 0. A note, since a script
  may scale by itself; of loops alone: DeepSpeed and Megatron scale by their own settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_TIMES = 3  # in a row
_FORMS = 4096  # of an optimizer's groups: a few, and one for each tensor under ZeRO-3
_READS = 8  # norms that are read, each of which waits for the device


class Clipping(Rule):
    """Follow the calls of ``clip_grad_norm_`` that do not do what they are called for."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._own = set(map(id, framework.parameters))
        self._stepped: dict[int, Any] = {}  # optimizers, since the last backward, by id
        self._reads = 0
        self._local: tuple[float, float] | None = None  # norm and limit of one before the reduction, and no step since
        self._given: set[bool] = set()  # whether the clippings since the last step were given anything
        self._rows = {how: _InARow() for how in _CLIPPED}
        self._found: dict[str, Breach] = {}

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each backward, step and clipping."""
        clipping = torch.nn.utils.clip_grad

        def clip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            safely(self._clips, *args, **kwargs)
            return original(*args, **kwargs)

        if not hasattr(clipping, "_clip_grads_with_norm_"):  # torch 2.6
            return
        patches.wrap(clipping, "_clip_grads_with_norm_", clip)
        patches.before_backward(partial(safely, self._backward))
        for optimizer in self._framework.optimizers():
            patches.hook(optimizer.register_step_post_hook, partial(safely, self._steps))

    def _backward(self, root: Any) -> None:
        self._stepped.clear()
        if self._local is not None:
            self._counts("local", *self._local)
            self._local = None

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepped[id(optimizer)] = optimizer
        self._local = None  # nothing was reduced in this step, which is a fault of its own
        if self._given:
            row = self._rows["nothing"]
            row.count(self._given == {False}, self._framework.step)
            self._given.clear()
            if row.times >= _TIMES and "nothing" not in self._found:
                self._finds("nothing", row, "")

    def _finds(self, how: str, row: _InARow, clipped: str) -> None:
        message, remedy = (text.format(clipped=clipped, since=row.since) for text in _CLIPPED[how])
        where = "clip_grad_norm_"
        self._found[how] = Breach(f"clipped:{how}", "update-mismatch", "warning", where, message, remedy, row.since)

    def _clips(self, parameters: Any, max_norm: float, total_norm: Any, *_: Any, **__: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        self._given.add(given != [])
        if not isinstance(given, (list, tuple)) or not given or id(given[0]) not in self._own:
            return  # what can be read once is left to the clipping
        groups = [group["params"] for optimizer in self._stepped.values() for group in optimizer.param_groups]
        applied = {id(parameter) for group in groups for parameter in group}
        behind, local = applied and applied.issuperset(map(id, given)), self._framework.counts.unreduced and not applied
        how = "behind" if behind else "local" if local else "to 0" if max_norm == 0.0 else None
        if how is None:  # the last one of an accumulation may be right
            for one in ("behind", "to 0"):
                self._rows[one].times = 0
            return
        if how in self._found or self._reads == _READS or not math.isfinite(max_norm) or type(total_norm) is not Tensor:
            return  # a norm that lies in shards is a collective to read
        self._reads += 1
        if how == "local":
            self._local = float(total_norm), max_norm
        else:
            self._counts(how, float(total_norm), max_norm)

    def _counts(self, how: str, norm: float, max_norm: float) -> None:
        row = self._rows[how]
        if norm > max_norm:
            row.count(True, self._framework.step - (how == "behind"))
        if row.times >= _TIMES and how not in self._found:
            self._finds(how, row, f"a norm of {norm:.3g} to {max_norm:.3g}")

    def breaches(self) -> tuple[Breach, ...]:
        return tuple(self._found.values())


_CLIPPED = {
    "behind": (
        "clip_grad_norm_ is called behind optimizer.step(), since step {since}, on gradients that were applied already "
        "({clipped}): no update is clipped.",
        "Call it between backward() and optimizer.step(); under a GradScaler behind scaler.unscale_(optimizer).",
    ),
    "local": (
        "clip_grad_norm_ is called within the accumulation, since step {since}, on gradients that are not reduced yet "
        "({clipped}): each rank clips by the norm of its own, and what is reduced is no mean of the losses' gradients.",
        "Call it once per step, behind the last backward, which reduces (accelerate: if accelerator.sync_gradients).",
    ),
    "to 0": (
        "clip_grad_norm_ is called with a limit of 0, since step {since} ({clipped}): it makes every gradient 0, and "
        "nothing is trained.",
        "Leave it out, or give it a limit above 0.",
    ),
    "nothing": (
        "clip_grad_norm_ is given no parameter, since step {since}: no gradient is clipped.",
        "Give it model.parameters() anew at each call, or a list: a generator is empty once an optimizer has read it.",
    ),
}
"""Message and remedy of each."""


@dataclass
class _InARow:
    """Count steps in a row at which something is wrong, and keep the number of the first."""

    times: int = 0
    since: int = 0

    def count(self, wrong: bool, step: int) -> None:
        self.times = self.times + 1 if wrong else 0
        if self.times == 1:
            self.since = step


class _WrongSteps(Rule):
    """Count the optimizers' steps in a row at which something is wrong."""

    def __init__(self, framework: Framework):
        self._framework, self._row = framework, _InARow()

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at what each step finds."""
        for optimizer in self._framework.optimizers():
            patches.hook(optimizer.register_step_pre_hook, partial(safely, self._stepping))

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _count(self, wrong: bool) -> None:
        self._row.count(wrong, self._framework.step)

    @property
    def _by_all(self) -> int:
        """Steps in a row that are enough, where each optimizer takes one in turn."""
        return _TIMES * max(1, len(self._framework.optimizers()))


class EmptyStep(_WrongSteps):
    """Follow the steps of all optimizers of which no parameter has a gradient, behind a reduction."""

    def __init__(self, framework: Framework):
        super().__init__(framework)
        self._own = set(map(id, framework.parameters))

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        closure = len(args) > 1 or kwargs  # it runs the backward in the step; masters may keep gradients elsewhere
        self._count(not (closure or any(one.grad is not None or id(one) not in self._own for one in held)))

    def breaches(self) -> tuple[Breach, ...]:
        if self._row.times < self._by_all:
            return ()
        message = (
            "No optimizer.step() finds a gradient in any parameter, although the backward has brought some, since step "
            f"{self._row.since}: they are cleared before the step, and nothing is trained."
        )
        remedy = "Call zero_grad() behind optimizer.step(), or before the first backward of a step, and not between."
        return (Breach("empty", "update-mismatch", "error", "zero_grad", message, remedy, self._row.since),)


class SteppedAgain(_WrongSteps):
    """Follow the steps of gradients that a step since the newest backward has applied already."""

    def __init__(self, framework: Framework):
        super().__init__(framework)
        self._held: dict[Any, frozenset[int]] = {}  # ids of an optimizer's parameters, by what its groups were
        self._applied: list[tuple[Any, frozenset[int]]] = []  # what has stepped since the newest backward
        self._inside = 0  # steps under way
        self._again = self._doubtful = ""  # what has applied a gradient once more; or will, if its closure brings none

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each backward, and at both ends of each step."""
        patches.before_backward(partial(safely, self._backward))
        super().connect(patches, safely)
        for optimizer in self._framework.optimizers():
            patches.hook(optimizer.register_step_post_hook, partial(safely, self._stepped))

    def _backward(self, root: Any) -> None:
        if self._inside:  # a closure's
            self._doubtful, self._applied = "", []
        elif self._applied:
            self._row.count(bool(self._again), self._framework.step - 1)
            self._applied, self._again = [], self._again if self._row.times else ""

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        held = self._holds(optimizer)
        for one, applied in self._applied if not self._inside else ():
            if not held.isdisjoint(applied) and _have_gradients(optimizer, held & applied):
                whose = "the same optimizer" if one is optimizer else "another optimizer, which holds them too,"
                self._doubtful = f"{whose} steps again"
        self._inside += 1

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self._again, self._doubtful = self._doubtful or self._again, ""
            self._applied.append((optimizer, self._holds(optimizer)))

    def _holds(self, optimizer: Any) -> frozenset[int]:
        """Return the ids of its parameters now: ZeRO steps one group at a time, which it puts in the place of all."""
        groups = [group["params"] for group in optimizer.param_groups]
        key = id(optimizer), *((id(held[0]), len(held)) for held in groups if held)
        if key not in self._held:
            if len(self._held) >= _FORMS:
                self._held.clear()
            self._held[key] = frozenset(id(parameter) for held in groups for parameter in held)
        return self._held[key]

    def breaches(self) -> tuple[Breach, ...]:
        if self._row.times < _TIMES:
            return ()
        message = (
            f"Parameters are stepped twice by the same gradient, since step {self._row.since}: {self._again} before "
            "another backward."
        )
        remedy = "Do nothing if both are meant. Else give each parameter to one optimizer, and call its step once."
        return (Breach("again", "update-mismatch", "info", "optimizer.step()", message, remedy, self._row.since),)


def _have_gradients(optimizer: Any, ids: frozenset[int]) -> bool:
    return any(p.grad is not None and id(p) in ids for group in optimizer.param_groups for p in group["params"])


class ScaledStep(_WrongSteps):
    """Follow the steps that apply gradients of a scaled loss as they are, and those of fp16 losses without a scale."""

    def __init__(self, framework: Framework):
        super().__init__(framework)
        self._unscaled: set[int] = set()  # ids of the optimizers whose next step is right
        self._inside = self._by_hand = False  # of GradScaler.step; the script has asked for the scale
        self._half = False  # the newest training forward began in fp16
        self._bare = _InARow()  # steps of such forwards without a scale

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each of a GradScaler's calls, and at each step."""
        scaler = torch.amp.GradScaler

        def unscale(original: Callable[..., Any], own: Any, optimizer: Any) -> Any:
            safely(self._unscaled.add, id(optimizer))
            return original(own, optimizer)

        def step(original: Callable[..., Any], own: Any, *args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, True
            try:
                return original(own, *args, **kwargs)
            finally:
                self._inside = outer

        def asked(original: Callable[..., Any], own: Any) -> Any:
            self._by_hand = self._by_hand or not self._inside
            return original(own)

        for name, call in (("unscale_", unscale), ("step", step), ("get_scale", asked)):
            patches.wrap_method(scaler, name, call)
        patches.hook(self._framework.module.register_forward_pre_hook, partial(safely, self._forward))
        super().connect(patches, safely)

    def _forward(self, module: Any, args: Any) -> None:
        first = next(iter(self._framework.parameters), None)
        if first is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            kind = first.device.type
            self._half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        scaled = self._framework.counts.scaled
        right = self._inside or self._by_hand or id(optimizer) in self._unscaled or not scaled
        self._unscaled.discard(id(optimizer))
        self._count(not right)
        bare = self._half and scaled is False and not (self._inside or self._by_hand)
        self._bare.count(bare, self._framework.step)

    def breaches(self) -> tuple[Breach, ...]:
        if self._bare.times >= self._by_all:
            message = (
                f"The forward runs in fp16 (autocast) and nothing scales the loss, since step {self._bare.since}: "
                "a gradient below 3e-8 is 0 in fp16."
            )
            remedy = (
                "Use torch.amp.GradScaler, or autocast to bfloat16, which needs none. Do nothing if the script "
                "multiplies its loss by a scale of its own."
            )
            return (Breach("bare", "update-mismatch", "info", "GradScaler", message, remedy, self._bare.since),)
        if self._row.times < _TIMES:
            return ()
        message = (
            f"The gradients of a loss that GradScaler.scale has multiplied are applied as they are, since step "
            f"{self._row.since}: optimizer.step() is called instead of scaler.step(optimizer), and nothing divides by "
            "the scale."
        )
        remedy = (
            "Call scaler.step(optimizer) and scaler.update(); to clip, call scaler.unscale_(optimizer) before. bf16 "
            "needs no scaler."
        )
        return (Breach("scaled", "update-mismatch", "warning", "GradScaler", message, remedy, self._row.since),)


class StaleCasts(_WrongSteps):
    """Follow steps within an ``autocast`` that the forwards before and behind them lie in, too."""

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each step, and at what empties autocast's cache: leaving the outermost context does."""
        patches.around(torch, "clear_autocast_cache", partial(safely, self._left))
        super().connect(patches, safely)

    def _left(self) -> None:
        self._row.times = 0

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        first = next(iter(self._framework.parameters), None)
        if first is None or first.dtype != torch.float32 or not torch.is_autocast_cache_enabled():
            return
        if torch.is_autocast_enabled(first.device.type):
            self._count(True)

    def breaches(self) -> tuple[Breach, ...]:
        if self._row.times <= self._by_all:
            return ()
        message = (
            f"One autocast lies around forwards and steps since step {self._row.since}: it keeps the weights as it "
            "has cast them first, so that each forward since uses those of that step."
        )
        remedy = "Put autocast around the forward alone, or set cache_enabled=False."
        return (Breach("autocast", "weights-mismatch", "warning", "autocast", message, remedy, self._row.since),)
