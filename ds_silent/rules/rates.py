"""Is each group's learning rate what its scheduler's formula gives for its step?

Promise: the rate that a scheduler has set is what its documented formula gives for its own counter and for *each*
group's own base (:mod:`ds_silent.rules.schedules`). DeepSpeed's WarmupLR and WarmupDecayLR without ``warmup_max_lr``
rise to the rate that each group came with. A schedule that was made for a number of steps ends with the training.

Silent: a rate that is not the one which the scheduler set last, because then the script has set it; schedules that
make each rate of the last one, from the first such change on; several schedulers of one optimizer; a factor that a
script has written itself, but that it is the same for all groups; how often a scheduler steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.records import Severity
from ds_silent.rules.known_optimizers import number
from ds_silent.rules.rule import Breach, Rule
from ds_silent.rules.schedules import Schedule, end_of, schedule_of, schedulers_of, step_of

_AFTER_END, _AFTER_END_SHARE = 8, 0.05  # steps, and of its length: a schedule may end a little before the training
TOLERANCE = 1e-5  # of the largest rate that the group has had: a rate may be held in fp32, or be made of many products


class RateRule(Rule):
    """Compare rates on this rank; see the module docstring."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._found: list[tuple[Any, Schedule]] | None = None  # schedulers that are known, as soon as one is looked for
        self._changed: set[int] = set()  # those of chained schedules whose rates a script has set, by id
        self._at: dict[int, int] = {}  # the step that such a schedule has come to by itself
        self._bases: dict[int, list[Any]] = {}  # of each scheduler, when it was found
        self._begun: dict[int, int] = {}  # the step that each was at then
        self._largest: dict[tuple[int, int], float] = {}
        self._broken: dict[tuple[int, int], Breach] = {}
        self._trained = False  # at a rate above 0
        self._at_0 = self._since = 0  # measured steps at rates of 0; the first
        self._stays: dict[int, int] = {}  # since when a schedule is at its last step, by id
        self._past: dict[int, int] = {}  # since when one is behind it: it may step several times per step
        self._patches = Patches()
        self._safely: Callable[..., Any] = lambda function, *given: function(*given)

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        self._safely = safely
        patches.also(self._patches.undo)

    def breaches(self) -> tuple[Breach, ...]:
        if self._found is None:
            self._found = self._schedulers()
        for scheduler, schedule in self._found:
            self._look(scheduler, schedule)
        return (*self._broken.values(), *self._ended())

    def _ended(self) -> tuple[Breach, ...]:
        """Tell where a schedule is over, or every rate of the training has become 0, and the training goes on."""
        rates = [number(group["lr"]) for one in self._framework.optimizers() for group in one.param_groups]
        self._trained = self._trained or any(rates)
        self._at_0 = self._at_0 + 1 if rates and self._trained and not any(rate != 0.0 for rate in rates) else 0
        if self._at_0 == 1:
            self._since = self._framework.step
        ends = [(one, end) for one, _ in self._found or () if (end := end_of(one)) is not None and step_of(one) > end]
        self._past = {id(one): self._past.get(id(one), self._framework.step) for one, _ in ends}
        for scheduler, end in ends:
            taken = self._framework.step - self._past[id(scheduler)]
            if step_of(scheduler) > end * (1.0 + _AFTER_END_SHARE) and taken >= _AFTER_END:
                return (self._over(scheduler, end),)
        for scheduler, _ in self._found or ():
            since = self._at_last_since(scheduler)
            if since is not None and self._framework.step - since > max(
                _AFTER_END, scheduler.total_steps * _AFTER_END_SHARE
            ):
                return (self._over(scheduler, scheduler.total_steps),)
        if ends or self._at_0 < _AFTER_END:
            return ()
        message = f"The learning rate of every parameter group is 0 since step {self._since}: no step changes a weight."
        remedy = "If that is meant, do nothing. Else look at the schedule's length, and at how often it steps."
        return (Breach("rates at 0", "update-mismatch", "info", "learning rate", message, remedy, self._since),)

    def _at_last_since(self, scheduler: Any) -> int | None:
        """Return since which step a schedule that refuses to go on is at its last one; None where it is not."""
        if type(scheduler) is not OneCycleLR or step_of(scheduler) < scheduler.total_steps - 1:
            self._stays.pop(id(scheduler), None)
            return None
        return self._stays.setdefault(id(scheduler), self._framework.step)

    def _over(self, scheduler: Any, end: int) -> Breach:
        rates = [f"{rate:.3g}" for rate in _rates(scheduler) if rate is not None]
        stays = self._stays.get(id(scheduler))
        at = f"is at its step {step_of(scheduler)}" if stays is None else f"stays at its last, since step {stays}"
        message = (
            f"The schedule of the learning rate ({type(scheduler).__name__}) is over, and the training goes on: it was "
            f"made for {end} steps and {at}. The rate is {' and '.join(rates[:2])} now."
        )
        remedy = (
            "Make it as long as the training, in the steps that it takes: it may step once per micro-batch, and under "
            "accelerate once per rank."
        )
        severity: Severity = "warning"
        if type(scheduler) is CosineAnnealingLR:  # cycles may be meant
            severity, remedy = "info", f"If the rate is meant to rise and fall, do nothing. Else: {remedy}"
            message += " It rises again behind T_max, and falls behind twice that."
        return Breach(
            "schedule over", "update-mismatch", severity, "learning rate", message, remedy, self._framework.step
        )

    def _schedulers(self) -> list[tuple[Any, Schedule]]:
        """Find them once, and let those of chained schedules tell when they are about to step."""
        came_with, schedulers = self._framework.came_with, schedulers_of(self._framework)
        found = [(one, known) for one in schedulers if (known := schedule_of(one, came_with)) is not None]
        for scheduler, schedule in found:
            self._bases[id(scheduler)], self._begun[id(scheduler)] = _bases_of(scheduler), step_of(scheduler)
            if schedule.chained:
                self._patches.wrap_method(type(scheduler), "step", partial(self._stepping, scheduler))
                self._at[id(scheduler)] = step_of(scheduler)
                rates = zip(_rates(scheduler), schedule.rates(scheduler), strict=False)
                if not all(now is None or right is None or _close(now, right) for now, right in rates):
                    self._changed.add(id(scheduler))
        return found

    def _stepping(self, own: Any, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._safely(self._about_to_step, own, scheduler, bool(args or kwargs))
        result = original(scheduler, *args, **kwargs)
        self._safely(self._stepped, own, scheduler)
        return result

    def _about_to_step(self, own: Any, scheduler: Any, told: bool) -> None:
        if scheduler is own and (told or not self._by_itself(own)):
            self._changed.add(id(own))  # the script has set a rate, or the step

    def _stepped(self, own: Any, scheduler: Any) -> None:
        if scheduler is own:
            self._at[id(own)] = step_of(own)

    def _by_itself(self, scheduler: Any) -> bool:
        """Tell whether step and rates are those that the scheduler has set last.

        Before its first step DeepSpeed's WarmupCosineLR of 0.18.9 sets the first group's rate alone.
        """
        last = [number(rate) for rate in getattr(scheduler, "_last_lr", ())]
        stepped = self._at.get(id(scheduler), step_of(scheduler))
        same = bool(last) and last == _rates(scheduler)[: len(last)]
        return stepped == step_of(scheduler) and same and None not in last

    def _look(self, scheduler: Any, schedule: Schedule) -> None:
        now = _rates(scheduler)
        if _bases_of(scheduler) != self._bases[id(scheduler)]:
            self._changed.add(id(scheduler))  # a group more, or a base that the script has set
        if id(scheduler) in self._changed or not self._by_itself(scheduler):
            if schedule.chained:
                self._changed.add(id(scheduler))
            for group in range(len(now)):
                self._broken.pop((id(scheduler), group), None)
            return
        right = schedule.rates(scheduler)
        if len(right) != len(now) or 0 < step_of(scheduler) == self._begun[id(scheduler)]:
            return  # rates from a checkpoint, which may have had a schedule of another length
        for group, (rate, meant) in enumerate(zip(now, right, strict=True)):
            key = id(scheduler), group
            if rate is None or meant is None or math.isnan(meant):
                continue
            self._largest[key] = largest = max(self._largest.get(key, 0.0), abs(rate), abs(meant))
            if abs(rate - meant) <= TOLERANCE * largest:
                self._broken.pop(key, None)
            elif key not in self._broken:
                self._broken[key] = _breach(scheduler, group, rate, right, self._framework.step)


def _bases_of(scheduler: Any) -> list[Any]:
    """Return the base rates, and the number of groups: what a script changes to train more parameters from now on."""
    return [len(scheduler.optimizer.param_groups), *map(number, getattr(scheduler, "base_lrs", ()))]


def _rates(scheduler: Any) -> list[float | None]:
    return [number(group["lr"]) for group in scheduler.optimizer.param_groups]


def _close(rate: float, other: float) -> bool:
    return math.isclose(rate, other, rel_tol=TOLERANCE)


def _breach(scheduler: Any, group: int, rate: float, right: Sequence[float | None], step: int) -> Breach:
    kind, meant = type(scheduler).__name__, right[group]
    others = [place for place, one in enumerate(right) if place != group and one is not None and _close(one, rate)]
    as_other = f", and {rate:.6g} is what it gives group {others[0]}" if others else ""
    return Breach(
        key=f"rate:{kind}:{group}",
        kind="update-mismatch",
        severity="error",
        where=f"learning rate of group {group}",
        message=f"The learning rate of parameter group {group} is {rate:.6g}, but {kind} gives {meant:.6g} for this "
        f"group at its step {step_of(scheduler)}{as_other}.",
        remedy=f"Look at what {kind} does in this version with several groups, and at how it was built; set each "
        "group's rate by hand, or use another scheduler.",
        since=step,
    )
