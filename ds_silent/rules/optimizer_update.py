"""Does the optimizer do what its formula says? New weights of some elements, against what the old ones should become.

    rule = UpdateRule(framework, interval=1)
    rule.connect(patches, safely)                # hooks of the optimizers at the bottom
    rule.breaches()                              # by parameter group and mistake

Promise: an optimizer whose class is known (:mod:`ds_silent.rules.known_optimizers`) makes of weight, gradient and
state what its published formula makes of them, up to rounding (:mod:`ds_silent.maths.optimizers`).

* **Which elements**: every n-th of a tensor, some 64 of it, beginning elsewhere at each step, the same on all ranks.
  Of all tensors at the first step and up to the first whose rate is not 0, of a few in turn at each later measured
  step, behind 64 right ones at every second, and always of those that were wrong.
* **When**: the last hook before the step but for the observer's own, and the first behind it. What a script changes
  before or after is none of it: a moving average, clipped or normalised weights, a repair.
* **The count** of an optimizer that corrects a bias, at its first step.
* **On an accelerator** the samples are copied to the host and judged when the copy has ended; nothing waits for it.

Silent: a class that is not known, gradients that the step itself unscales, a step that is a part of a graph, fp16
weights without fp32 masters, sparse gradients, tensors that lie differently in memory than their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_silent.device import ReadLater
from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.maths.optimizers import Elements, Numbers, Update, explanations, shows, stepped
from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF
from ds_silent.patches import Patches, behind_closure
from ds_silent.rules.known_optimizers import MOMENTS, KnownForm, known_form, late_count
from ds_silent.rules.lost_updates import LostUpdates
from ds_silent.rules.rule import Breach, Rule

SAMPLES = 64  # of a tensor
TENSORS = 4  # per step, in turn
SETTLED = 64  # measured steps, behind which every second one is looked at, as long as nothing is wrong
SAMPLES_OF_CALL = TENSORS * SAMPLES  # at least, of a step's call that has fewer tensors, as ZeRO's flat partitions
AT_FIRST = 4  # times as many where all tensors are looked at
SHOWN = 3
LARGEST = 2.0**62  # of what is judged: its square is a number of fp32
UNKNOWN = "none of the known mistakes explains it"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)


class TensorSample(NamedTuple):
    """One tensor of a call: of which group, with which settings, and the samples' places."""

    parameter: Tensor
    name: str
    group: int
    update: Update
    step: float | None  # None: it lies on the device, and is the sample's last number
    state: tuple[str, ...]  # the moments that lie in the sample, in order
    unit: float
    begin: int
    stride: int
    size: int


Part = list[TensorSample]
"""Tensors that one formula steps: of equal settings and dtypes. Their samples lie kind by kind, see :func:`_old`."""
Judged = tuple[TensorSample, Elements, Numbers]
"""One tensor: what it was before the step, and the weights behind it."""


@dataclass(frozen=True)
class Wrong:
    """One tensor whose last judged update was not as it should be."""

    group: int
    kind: str  # of the optimizer
    name: str
    cause: str
    difference: float  # the largest, in units of what rounding explains
    since: int


class UpdateRule(Rule):
    """Compare updates on this rank, of every ``interval``-th step; see the module docstring."""

    def __init__(self, framework: Framework, interval: int):
        self._framework, self._interval = framework, interval
        self._names = dict(zip(map(id, framework.parameters), framework.names, strict=True))
        self._groups: dict[int, int] = {}
        self._wrong: dict[int, Wrong] = {}  # by id of the tensor
        self._whole = True  # all tensors are looked at
        self._step, self._position, self._cycle, self._first = 0, 0, 0, 0
        self._judged = self._newest = 0  # steps so far, and the last of them
        self._due = False  # the step under way is looked at
        self._begun: set[int] = set()  # ids of the optimizers that have been looked at
        self._late: dict[str, Breach] = {}  # by kind of the optimizer, whose count has begun too late
        self._lost = LostUpdates()
        self._open: tuple[Any, bool, list[Part], ReadLater] | None = None  # between the two hooks of a step
        self._under_way: list[tuple[int, str, bool, list[Part], ReadLater, ReadLater]] = []

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        numbers = 0
        for optimizer in self._framework.optimizers():
            if (form := known_form(optimizer)) is None or not hasattr(optimizer, "register_step_pre_hook"):
                continue
            for group in optimizer.param_groups:
                self._groups[id(group)], numbers = numbers, numbers + 1
            before = _BeforeStep(self, form, safely)
            before.handle = optimizer.register_step_pre_hook(partial(safely, before))
            after = optimizer.register_step_post_hook(partial(safely, self.after))
            optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
            patches.add(before.handle)
            patches.add(after)

    def breaches(self) -> tuple[Breach, ...]:
        while self._under_way and self._under_way[0][-2].ready and self._under_way[0][-1].ready:
            self._judge(*self._under_way.pop(0))
        found: dict[tuple[int, str], list[Wrong]] = {}
        for one in self._wrong.values():
            found.setdefault((one.group, one.cause.partition(" is ")[0]), []).append(one)  # without a number
        return (*(_breach(key, wrong) for key, wrong in sorted(found.items())), *self._late.values(), *self._lost.found)

    # -- the two hooks -----------------------------------------------------------------------------------------------

    def before(self, optimizer: Any, form: KnownForm) -> None:
        """Take the samples of this call, as the step finds them."""
        self._open, first = None, id(optimizer) not in self._begun
        self._begun.add(id(optimizer))
        if not self._looks() and not first:
            return
        parts: dict[Any, list[tuple[TensorSample, list[Tensor]]]] = {}
        device, settings = None, _Settings(optimizer, form, SAMPLES_OF_CALL * (AT_FIRST if self._whole else 1))
        with torch.no_grad():
            for parameter, group in self._chosen(optimizer):
                found = self._taken(settings, parameter, group)
                if found is not None and device in (None, found[1][0].device):
                    one, device = found[0], found[1][0].device
                    parts.setdefault((one.update, one.unit, one.state, one.step is None), []).append(found)
            pieces = []
            for members in parts.values():
                for kind in range(2 + len(members[0][0].state)):
                    pieces += [_sampled(tensors[kind], one) for one, tensors in members]
                pieces += [tensors[-1].expand(one.size) for one, tensors in members if one.step is None]
            if pieces:
                chosen = [[one for one, _ in members] for members in parts.values()]
                self._open = optimizer, first and self._whole, chosen, ReadLater(torch.cat(pieces))

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take the same places of the weights, as the step leaves them."""
        if torch.compiler.is_compiling() or self._open is None or self._open[0] is not optimizer:
            return
        (_, first, parts, old), self._open = self._open, None
        with torch.no_grad():
            new = ReadLater(torch.cat([_sampled(_local(one.parameter), one) for part in parts for one in part]))
        self._under_way.append((self._framework.step, type(optimizer).__name__, first, parts, old, new))
        del self._under_way[:-64]  # a device that is that far behind

    def _looks(self) -> bool:
        step = self._framework.step
        if step != self._step:
            self._step, self._cycle, self._position = step, self._position or self._cycle, 0
            number, rest = divmod(step, self._interval)
            self._due = rest == 0 and (self._judged < SETTLED or number % 2 == 0 or bool(self._wrong))
            self._first = (self._first + TENSORS * self._due) % max(self._cycle, 1)
        return self._due

    def _chosen(self, optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the parameters that are looked at in this call, with their groups."""
        for group in optimizer.param_groups:
            parameters, begin = group["params"], self._position
            self._position += len(parameters)
            if self._whole:
                places = set(range(len(parameters)))
            else:
                turn = ((self._first + n) % max(self._cycle, 1) - begin for n in range(TENSORS))
                places = {place for place in turn if 0 <= place < len(parameters)}
            if self._wrong and not self._whole:
                places |= {place for place, one in enumerate(parameters) if id(one) in self._wrong}
            for place in sorted(places):
                yield parameters[place], group

    def _taken(
        self, settings: _Settings, parameter: Tensor, group: dict[str, Any]
    ) -> tuple[TensorSample, list[Tensor]] | None:
        """Return what is taken of one tensor, and where it lies: weight, gradient, moments, and a step on the device.

        None where it cannot be judged.
        """
        form, gradient, state = settings.form, parameter.grad, settings.state.get(parameter) or {}
        if gradient is None or gradient.is_sparse or (update := settings.update(group)) is None:
            return None
        counted = parameter
        if form.step_of_last:
            all_counted = [p for p in group["params"] if p.grad is not None]
            if any(p.dtype != parameter.dtype for p in all_counted):
                return None  # each dtype moves that counter on
            counted = all_counted[-1]
        step = form.step(settings.optimizer, group, counted)
        held = {name: value for name, key in settings.moments if isinstance(value := state.get(key), Tensor)}
        local = list(map(_local, (parameter, gradient, *held.values())))
        on_device = step is None and isinstance(state.get("step"), Tensor) and state["step"].numel() == 1
        if not (_alike(local) and (step is not None or on_device)):
            return None
        numel, most = local[0].numel(), settings.most
        stride = max(1, numel // most) | 1
        begin = self._framework.step // self._interval * 7919 % min(stride, numel)
        unit = max(UNIT_ROUNDOFF[tensor.dtype] for tensor in (local[0], *local[2:]))
        place, name = self._groups.get(id(group), 0), self._names.get(id(parameter), "")
        count = min(most, -(-(numel - begin) // stride))
        if step is None:
            local.append(_local(state["step"]).reshape(1))
        return TensorSample(parameter, name, place, update, step, tuple(held), unit, begin, stride, count), local

    # -- judging -----------------------------------------------------------------------------------------------------

    @np.errstate(all="ignore")  # what is not finite says nothing
    def _judge(self, at: int, kind: str, first: bool, parts: list[Part], old: ReadLater, new: ReadLater) -> None:
        """Judge a part's tensors together, else one by one; ``first``: these are all of an optimizer's first call."""
        self._judged, self._newest = self._judged + (at != self._newest), at
        values, weights = _numbers(old.values), _numbers(new.values)
        offset = begin = 0
        corrected: list[tuple[Update, Elements]] = []
        for part in parts:
            size, kinds = sum(one.size for one in part), 2 + len(part[0].state) + (part[0].step is None)
            before = _old(part, values[offset : offset + kinds * size].reshape(kinds, size))
            seen = weights[begin : begin + size]
            offset, begin = offset + kinds * size, begin + size
            if part[0].update.kind == "Adam" and part[0].update.bias_correction:
                corrected.append((part[0].update, before))
            right, error = stepped(part[0].update, before, part[0].unit)
            if self._wrong or _misses(right, error, before, seen):
                self._judge_each(at, kind, _single(part, before, seen))
            elif part[0].parameter.dtype is torch.bfloat16:
                self._lost.take(at, part[0].update.rate, before, right.weight, seen)
            self._whole = self._whole and part[0].update.rate == 0.0
        if first and (late := late_count(kind, corrected, at)) is not None:
            self._late[kind] = late

    def _judge_each(self, at: int, kind: str, members: Iterable[Judged]) -> None:
        """Tell right from wrong tensors, and find what explains all of the wrong ones; else each by itself."""
        wrong: list[Judged] = []
        for one, old, seen in members:
            before = self._wrong.get(id(one.parameter))
            if _misses(*stepped(one.update, old, one.unit), old, seen):
                finite = np.isfinite(old.gradient) & np.isfinite(old.weight)
                wrong.append((one, Elements(*(np.asarray(values)[finite] for values in old)), seen[finite]))
            elif before is not None and shows(before.cause, one.update, old, seen, one.unit):
                del self._wrong[id(one.parameter)]
        if not wrong:
            return
        first = wrong[0][0]
        joined = Elements(*map(np.concatenate, zip(*(old for _, old, _ in wrong), strict=True)))
        of_all = explanations(first.update, joined, np.concatenate([seen for *_, seen in wrong]), first.unit)
        for one, old, seen in wrong:
            before = self._wrong.get(id(one.parameter))
            causes = of_all or explanations(one.update, old, seen, one.unit) or [UNKNOWN]
            cause = before.cause if before is not None and before.cause in causes else causes[0]
            right, error = stepped(one.update, old, one.unit)
            times = float(np.nan_to_num(np.abs(right.weight - seen) / error, nan=np.inf, posinf=np.inf).max())
            since = at if before is None else before.since
            self._wrong[id(one.parameter)] = Wrong(one.group, kind, one.name, cause, times, since)


class _Settings:
    """What a call reads once for all tensors of a group."""

    def __init__(self, optimizer: Any, form: KnownForm, samples: int):
        """``samples``: of the call, where its tensors are so few that each has more than ``SAMPLES``."""
        self.optimizer, self.form, self.state = optimizer, form, optimizer.state
        self.moments = [(name, form.state[name]) for name in MOMENTS if name in form.state]
        tensors = sum(len(group["params"]) for group in optimizer.param_groups)
        self.most = max(SAMPLES, samples // max(tensors, 1))
        self._updates: dict[int, Update | None] = {}

    def update(self, group: dict[str, Any]) -> Update | None:
        """Return a group's settings; None where they cannot be read."""
        if id(group) not in self._updates:
            self._updates[id(group)] = self.form.update(self.optimizer, group)
        return self._updates[id(group)]


class _BeforeStep:
    """The last hook of one optimizer before its step."""

    handle: Any

    def __init__(self, rule: UpdateRule, form: KnownForm, safely: Callable[..., Any]):
        self._rule, self._form, self._safely = rule, form, safely
        self._keys: tuple[int, ...] = ()  # of the optimizer's hooks
        self._last = False  # none behind this one is a script's, which may change things

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Look now, or when the closure returns, with which a step of every known form begins."""
        unscales = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        keys = (*optimizer._optimizer_step_pre_hooks,)
        if keys != self._keys:
            later = keys[keys.index(self.handle.id) + 1 :] if self.handle.id in keys else keys
            self._last = all(_is_ours(optimizer._optimizer_step_pre_hooks[key]) for key in later)
            self._keys = keys
        if unscales or not self._last or torch.compiler.is_compiling():
            return None
        return behind_closure(partial(self._safely, self._rule.before, optimizer, self._form), args, kwargs)


def _is_ours(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("ds_silent")


def _local(tensor: Tensor) -> Tensor:
    """Return a rank's own part of a tensor."""
    if type(tensor) in _PLAIN or not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def _alike(tensors: list[Tensor]) -> bool:
    """Tell whether places in memory are the same elements of all tensors, and their numbers are judged."""
    first = tensors[0]
    shape, stride, device = first.shape, first.stride(), first.device
    if any(type(one) not in _PLAIN or one.dtype not in _DTYPES or one.device != device for one in tensors):
        return False
    if any(one.shape != shape or one.stride() != stride for one in tensors):
        return False
    dense = first.is_contiguous() or (first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last))
    return dense and first.numel() > 0


def _sampled(tensor: Tensor, one: TensorSample) -> Tensor:
    return tensor.as_strided((one.size,), (one.stride,), tensor.storage_offset() + one.begin)


def _old(part: Part, rows: Numbers) -> Elements:
    """Return what a part was; ``rows``: weights, gradients, moments, and the steps taken where a device has them."""
    weight, gradient, *moments = rows
    steps = [one.step for one in part]
    step: Numbers | float | None = steps[0]
    if step is None:
        step = moments.pop() + 1.0
    elif len(set(steps)) > 1:
        step = np.repeat(np.array(steps, np.float64), [one.size for one in part])
    held = dict(zip(part[0].state, moments, strict=True))
    return Elements(weight, gradient, step, *(held.get(name, 0.0) for name in MOMENTS))


def _numbers(values: Tensor) -> Numbers:
    """Numpy, which has no bf16, converts for less than torch."""
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy().astype(np.float64)


def _single(part: Part, old: Elements, seen: Numbers) -> Iterator[Judged]:
    """Yield each tensor's own."""
    end, all_of_old = 0, [np.broadcast_to(values, seen.shape) for values in old]
    for one in part:
        begin, end = end, end + one.size
        yield one, Elements(*(values[begin:end] for values in all_of_old)), seen[begin:end]


def _misses(right: Elements, error: Numbers, old: Elements, seen: Numbers) -> bool:
    """Tell whether rounding does not explain a weight; what is not finite, or whose square is not, says nothing."""
    fits = np.abs(right.weight - seen) <= error
    if bool(fits.all()):
        return False
    known = np.isfinite(right.weight) & np.isfinite(error)
    for values in (old.gradient, old.first, np.sqrt(old.second), right.weight):
        known &= np.abs(values) < LARGEST
    return bool((known & ~fits).any())


def _breach(key: tuple[int, str], wrong: list[Wrong]) -> Breach:
    group, cause = key
    first = min(wrong, key=lambda one: one.since)
    names = sorted({one.name for one in wrong if one.name})
    where = listed(names, SHOWN, "parameters") if names else f"parameter group {group}"
    times = max(one.difference for one in wrong)
    said = first.cause if first.cause != UNKNOWN else f"the new weights are others, and {UNKNOWN}"
    return Breach(
        key=f"update:{first.kind}:{group}:{cause}",
        kind="update-mismatch",
        severity="error",
        where=where,
        message=f"{first.kind} does not do what its formula says with {where}: {said}. On sampled elements the new "
        f"weights are up to {times:.3g} times as far from the formula as rounding explains.",
        remedy="Look at what replaces the optimizer's step (a fused or patched kernel, an integration, another version)"
        "; train a few steps with torch's own optimizer, foreach=False, and compare.",
        since=first.since,
    )
