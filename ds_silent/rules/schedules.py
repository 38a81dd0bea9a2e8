"""What the learning rates should be, by the documented formula of each scheduler; nothing of a script is called.

    schedule = schedule_of(scheduler)        # None: not checked
    schedule.rates(scheduler)                # of each parameter group, None where it is not known
    schedule.chained                         # each rate is made of the last one, so that a script's own change stays

A scheduler is known by its own class and never by its ancestors.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import lr_scheduler

from ds_silent.framework import Framework
from ds_silent.rules.known_optimizers import number

Rates = Sequence[float | None]
_WRAPPERS = 8  # around an optimizer, at most
_PURE = "transformers.optimization"
"""The module whose factors are functions of the step alone. A script's own may count their calls."""


@dataclass(frozen=True)
class Schedule:
    """How one class of schedulers makes rates of its base rates and its step."""

    formula: Callable[[Any], Rates]
    chained: bool = False

    def rates(self, scheduler: Any) -> Rates:
        """Return the rate of each group; none at all where its attributes are not those that the formula knows."""
        try:
            return self.formula(scheduler)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return []


def schedule_of(scheduler: Any, came_with: Rates | None = None) -> Schedule | None:
    """Return the schedule; None for every class that is not one of them by itself.

    ``came_with``: the groups' rates before the scheduler was made, where it has promised to rise to them.
    """
    kind = type(scheduler)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if came_with is not None and name in _RISING:
        return _deepspeed(partial(_RISING[name], maxima=came_with))
    return _OF_TORCH.get(kind) or _BY_NAME.get(name)


def schedulers_of(framework: Framework) -> list[Any]:
    """Return the framework's schedulers, else each optimizer's only one, which may be made for a wrapper around it."""
    optimizers = [_innermost(one) for one in framework.optimizers()]
    if framework.schedulers() or not optimizers:
        return list(framework.schedulers())
    alive = [one for one in gc.get_objects() if issubclass(type(one), lr_scheduler.LRScheduler)]
    of_each = [[one for one in alive if _innermost(getattr(one, "optimizer", None)) is own] for own in optimizers]
    return [held[0] for held in of_each if len(held) == 1]


def _innermost(optimizer: Any) -> Any:
    """Return what a wrapper's ``optimizer`` is, as accelerate's is; of several wrappers the last one's."""
    for _ in range(_WRAPPERS):
        if (inner := getattr(optimizer, "optimizer", None)) is None:
            break
        optimizer = inner
    return optimizer


def step_of(scheduler: Any) -> int:
    """Return the step that a scheduler is at, as it counts."""
    return int(getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", -1)))


def end_of(scheduler: Any) -> int | None:
    """Return the last step that a schedule was made for; None where it has none."""
    end: Any = None
    if type(scheduler) in (lr_scheduler.LinearLR, lr_scheduler.PolynomialLR):
        end = scheduler.total_iters if getattr(scheduler, "end_factor", 0.0) == 0.0 else None
    elif type(scheduler) is lr_scheduler.LambdaLR:
        ends = {
            _is_pure(one) and getattr(one, "keywords", {}).get("num_training_steps") for one in scheduler.lr_lambdas
        }
        end = ends.pop() if len(ends) == 1 else None
    elif type(scheduler) is lr_scheduler.CosineAnnealingLR:
        end = scheduler.T_max
    elif type(scheduler).__module__ == _OF_DEEPSPEED:
        end = getattr(scheduler, "total_num_steps", None)
    return end if type(end) is int else None


# -- torch -------------------------------------------------------------------------------------------------------------


def _times(factor: Callable[[Any, int], float]) -> Schedule:
    """Return the chained schedule that multiplies each base rate by what ``factor`` gives for a step."""

    def rates(scheduler: Any) -> Rates:
        times = factor(scheduler, int(scheduler.last_epoch))
        return [None if base is None else base * times for base in map(number, scheduler.base_lrs)]

    return Schedule(rates, chained=True)


def _linear(scheduler: Any, step: int) -> float:
    first, last, steps = scheduler.start_factor, scheduler.end_factor, scheduler.total_iters
    return float(first + (last - first) * min(step, steps) / steps)


def _cosine(scheduler: Any) -> Rates:
    """Up to its end: what follows is made of a rate that is nearly 0, and as wrong as that."""
    if scheduler.last_epoch > scheduler.T_max:
        return [None] * len(scheduler.base_lrs)
    return _on_cosine(scheduler, scheduler.last_epoch / scheduler.T_max)


def _on_cosine(scheduler: Any, part: float) -> Rates:
    low, share = float(scheduler.eta_min), (1.0 + math.cos(math.pi * part)) / 2.0
    return [None if base is None else low + (base - low) * share for base in map(number, scheduler.base_lrs)]


def _lambdas(scheduler: Any) -> Rates:
    """A factor that is not called is that of the first group which has the same function."""
    groups, step = scheduler.optimizer.param_groups, int(scheduler.last_epoch)
    rates: list[float | None] = []
    factors: dict[int, float | None] = {}
    for base, group, function in zip(map(number, scheduler.base_lrs), groups, scheduler.lr_lambdas, strict=False):
        if id(function) not in factors:
            if _is_pure(function):
                factors[id(function)] = float(function(step))
            else:
                rate = number(group["lr"])
                factors[id(function)] = rate / base if rate is not None and base else None
        factor = factors[id(function)]
        rates.append(None if factor is None or base is None else base * factor)
    return rates


def _is_pure(function: Any) -> bool:
    """Tell whether a factor, or what a partial holds, is a function of the step alone: see ``_PURE``."""
    return getattr(getattr(function, "func", function), "__module__", None) == _PURE


def _one_cycle(scheduler: Any) -> Rates:
    """From ``initial_lr`` to ``max_lr`` and down to ``min_lr`` of each group, by way of ``initial_lr`` in 3 phases."""
    step, groups, phases = float(scheduler.last_epoch), scheduler.optimizer.param_groups, scheduler._schedule_phases
    ends = [float(phase["end_step"]) for phase in phases]
    at = min(bisect_left(ends, step), len(ends) - 1)
    begin = ends[at - 1] if at else 0.0
    part = (step - begin) / (ends[at] - begin)
    if scheduler._anneal_func_type == "cos":
        part = (1.0 - math.cos(math.pi * part)) / 2.0
    bounds = [(float(group[phases[at]["start_lr"]]), float(group[phases[at]["end_lr"]])) for group in groups]
    return [low + (high - low) * part for low, high in bounds]


_OF_TORCH: dict[type, Schedule] = {
    lr_scheduler.LambdaLR: Schedule(_lambdas),
    lr_scheduler.OneCycleLR: Schedule(_one_cycle),
    lr_scheduler.CosineAnnealingWarmRestarts: Schedule(lambda one: _on_cosine(one, one.T_cur / one.T_i)),
    lr_scheduler.CosineAnnealingLR: Schedule(_cosine, chained=True),
    lr_scheduler.StepLR: _times(lambda one, step: one.gamma ** (step // one.step_size)),
    lr_scheduler.MultiStepLR: _times(
        lambda one, step: one.gamma ** bisect_right(sorted(one.milestones.elements()), step)
    ),
    lr_scheduler.ExponentialLR: _times(lambda one, step: one.gamma**step),
    lr_scheduler.ConstantLR: _times(lambda one, step: one.factor if step < one.total_iters else 1.0),
    lr_scheduler.LinearLR: _times(_linear),
    lr_scheduler.PolynomialLR: _times(
        lambda one, step: (1.0 - min(step, one.total_iters) / one.total_iters) ** one.power
    ),
}


# -- DeepSpeed, 0.16.9 to 0.19.8 ---------------------------------------------------------------------------------------


def _warm(scheduler: Any) -> float | None:
    """Return how far the warm-up is, from 0 to 1; None when it is over."""
    step, steps = scheduler.last_batch_iteration, scheduler.warmup_num_steps
    if step >= steps:
        return None
    if scheduler.warmup_type == "log":
        return math.log(step + 1) / math.log(steps)
    return float(step / steps) if scheduler.warmup_type == "linear" else math.nan


def _between(scheduler: Any, part: float, maxima: Rates | None) -> Rates:
    bounds = zip(map(number, scheduler.min_lrs), maxima or map(number, scheduler.max_lrs), strict=True)
    return [None if low is None or high is None else low + (high - low) * part for low, high in bounds]


def _warmup(scheduler: Any, maxima: Rates | None = None) -> Rates:
    part = _warm(scheduler)
    return _between(scheduler, 1.0 if part is None else part, maxima)


def _warmup_decay(scheduler: Any, maxima: Rates | None = None) -> Rates:
    part, left = _warm(scheduler), scheduler.total_num_steps - scheduler.last_batch_iteration
    decayed = max(0.0, left / max(1.0, scheduler.total_num_steps - scheduler.warmup_num_steps))
    return _between(scheduler, decayed if part is None else part, maxima)


def _warmup_cosine(scheduler: Any) -> Rates:
    if scheduler.last_batch_iteration < 0:
        return [0.0] * len(scheduler.org_lrs)
    part, low = _warm(scheduler), float(scheduler.cos_min_ratio)
    if part is not None:
        ratio = scheduler.warmup_min_ratio + (1.0 - scheduler.warmup_min_ratio) * part
    else:
        done = scheduler.last_batch_iteration - scheduler.warmup_num_steps + 1
        total = max(1, scheduler.total_num_steps - scheduler.warmup_num_steps)
        if done > total:  # older versions go up again
            return [None] * len(scheduler.org_lrs)
        ratio = max(0.0, low + (1.0 - low) * (1.0 + math.cos(math.pi * done / total)) / 2.0)
    return [None if base is None else base * ratio for base in map(number, scheduler.org_lrs)]


def _range_test(scheduler: Any) -> Rates:
    done = (scheduler.last_batch_iteration + 1) / scheduler.step_size
    times = 1.0 + scheduler.step_rate * (math.floor(done) if scheduler.staircase else done)
    return [float(low) * times for low in scheduler.min_lr]


def _deepspeed(rates: Callable[[Any], Rates]) -> Schedule:
    """Before its first step a scheduler sets what its constructor says."""
    return Schedule(
        lambda one: rates(one) if one.last_batch_iteration >= 0 else [None] * len(one.optimizer.param_groups)
    )


_OF_DEEPSPEED = "deepspeed.runtime.lr_schedules"
_RISING: dict[str, Callable[..., Rates]] = {
    f"{_OF_DEEPSPEED}.WarmupLR": _warmup,
    f"{_OF_DEEPSPEED}.WarmupDecayLR": _warmup_decay,
}
_BY_NAME = {
    **{name: _deepspeed(rates) for name, rates in _RISING.items()},
    f"{_OF_DEEPSPEED}.LRRangeTest": _deepspeed(_range_test),
    f"{_OF_DEEPSPEED}.WarmupCosineLR": Schedule(_warmup_cosine),
}
