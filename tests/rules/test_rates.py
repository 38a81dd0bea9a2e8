"""Learning rates against their schedules: every form by a float64 oracle, mistakes of schedulers, and what is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import nn
from torch.optim import lr_scheduler

from ds_silent.patches import Patches
from ds_silent.rules.rates import TOLERANCE, RateRule
from ds_silent.rules.rule import Breach
from ds_silent.rules.schedules import schedule_of

STEPS, BASES = 40, (1e-2, 3e-4)


@dataclass
class Stand:
    """What the rule asks of a framework."""

    held: list[Any]
    given: list[Any]
    came_with: tuple[float, ...] | None = None
    step: int = 1

    def optimizers(self) -> list[Any]:
        return self.held

    def schedulers(self) -> list[Any]:
        return self.given


def optimizer_of_two() -> torch.optim.Optimizer:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    return torch.optim.AdamW(
        [{"params": m.parameters(), "lr": rate} for m, rate in zip((first, second), BASES, strict=True)]
    )


Make = Callable[[torch.optim.Optimizer], Any]


def run(
    make: Make,
    given: bool = False,
    change: Callable[[torch.optim.Optimizer, Any, int], None] = lambda *_: None,
    behind: Callable[[torch.optim.Optimizer, Any, int], None] = lambda *_: None,
    rates: list[list[float]] | None = None,
    came_with: tuple[float, ...] | None = None,
    steps: int = STEPS,
) -> list[tuple[int, Breach]]:
    """Return what is found; ``change`` comes ahead of the scheduler's step, ``behind`` after it."""
    optimizer = optimizer_of_two()
    scheduler, patches = make(optimizer), Patches()
    stand = Stand([optimizer], [scheduler] if given else [], came_with)
    rule = RateRule(stand)  # type: ignore[arg-type]
    rule.connect(patches, lambda function, *args: function(*args))
    before = type(scheduler).__dict__.get("step")
    found = []
    for step in range(1, steps + 1):
        stand.step = step
        found += [(step, breach) for breach in rule.breaches()]
        if rates is not None:
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        change(optimizer, scheduler, step)
        scheduler.step(*((1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))
        behind(optimizer, scheduler, step)
    patches.undo()
    assert type(scheduler).__dict__.get("step") is before
    return found


def of_torch(name: str, *given: Any, **named: Any) -> Make:
    return lambda optimizer: getattr(lr_scheduler, name)(optimizer, *given, **named)


def of_deepspeed(name: str, *given: Any, **named: Any) -> Make:
    return lambda optimizer: getattr(lr_schedules, name)(optimizer, *given, **named)


def by_transformers(optimizer: torch.optim.Optimizer) -> Any:
    from transformers.optimization import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 10, 50)


Oracle = Callable[[int, float], float]
TORCH: dict[str, tuple[Make, Oracle]] = {
    "lambda": (of_torch("LambdaLR", lambda step: 1 / (1 + step)), lambda step, base: base / (1 + step)),
    "transformers": (
        by_transformers,
        lambda n, base: base * (n / 10 if n < 10 else 0.5 + 0.5 * math.cos(math.pi * (n - 10) / 40)),
    ),
    "step": (of_torch("StepLR", 7, 0.5), lambda step, base: base * 0.5 ** (step // 7)),
    "multi": (of_torch("MultiStepLR", [3, 3, 20]), lambda n, base: base * (1 if n < 3 else 1e-2 if n < 20 else 1e-3)),
    "exponential": (of_torch("ExponentialLR", 0.9), lambda step, base: base * 0.9**step),
    "constant": (of_torch("ConstantLR", 0.25, 6), lambda step, base: base * (0.25 if step < 6 else 1)),
    "linear": (of_torch("LinearLR", 0.1, 0.8, 20), lambda n, base: base * (0.1 + 0.7 * min(n, 20) / 20)),
    "polynomial": (of_torch("PolynomialLR", 60, 2.0), lambda n, base: base * (1 - n / 60) ** 2),
    "cosine": (
        of_torch("CosineAnnealingLR", 45, 1e-5),
        lambda n, base: 1e-5 + (base - 1e-5) * (1 + math.cos(math.pi * n / 45)) / 2,
    ),
    "restarts": (
        of_torch("CosineAnnealingWarmRestarts", 10),
        lambda n, base: base * (1 + math.cos(math.pi * (n % 10) / 10)) / 2,
    ),
}  # fmt: skip
DEEPSPEED: dict[str, tuple[Make, Oracle]] = {
    "warm-up": (
        of_deepspeed("WarmupLR", warmup_num_steps=10, warmup_type="linear"),
        lambda n, base: base * min(1.0, max(n - 1, 0) / 10),
    ),
    "warm-up, log": (
        of_deepspeed("WarmupLR", warmup_num_steps=10),
        lambda n, base: base * (math.log(max(n, 1)) / math.log(10) if n < 11 else 1.0),
    ),
    "decay": (
        of_deepspeed("WarmupDecayLR", 35, 0.0, [*BASES], 5, "linear"),
        lambda n, base: base * ((n - 1) / 5 if n < 6 else max(0, 35 - n + 1) / 30) if n else 0.0,
    ),
    "cosine": (
        of_deepspeed("WarmupCosineLR", 60, warmup_num_steps=4, warmup_type="linear", cos_min_ratio=0.1),
        lambda n, base: base * (max(n - 1, 0) / 4 if n < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * (n - 4) / 56)) / 2),
    ),
    "range": (
        of_deepspeed("LRRangeTest", [*BASES], 10, 2.0),
        lambda n, base: base * (1 + 2 * n / 10),
    ),
    "range, in stairs": (
        of_deepspeed("LRRangeTest", [*BASES], 10, 2.0, True),
        lambda n, base: base * (1 + 2 * (n // 10)),
    ),
}
CASES = {**{("torch", k): v for k, v in TORCH.items()}, **{("deepspeed", k): v for k, v in DEEPSPEED.items()}}


@pytest.mark.parametrize("name", CASES, ids=":".join)
def test_a_formula_gives_what_the_scheduler_sets(name: tuple[str, str]) -> None:
    make, oracle = CASES[name]
    rates: list[list[float]] = []
    assert run(make, given=name[0] == "deepspeed", rates=rates) == []
    scheduler = make(optimizer_of_two())
    assert schedule_of(scheduler) is not None
    for step, of_groups in enumerate(rates):
        assert of_groups == pytest.approx([oracle(step, base) for base in BASES], rel=1e-9, abs=1e-15), step


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_goes_as_torch_says(strategy: str, three_phase: bool) -> None:
    named = {"max_lr": [0.1, 0.2], "total_steps": STEPS + 1, "anneal_strategy": strategy, "three_phase": three_phase}
    make, rates = of_torch("OneCycleLR", **named), []  # type: ignore[var-annotated]
    assert run(make, rates=rates) == []
    scheduler = make(optimizer_of_two())
    schedule = schedule_of(scheduler)
    assert schedule is not None
    for step, of_groups in enumerate(rates):
        scheduler.last_epoch = step
        assert list(schedule.rates(scheduler)) == pytest.approx(of_groups, rel=1e-12)


def test_a_second_group_that_follows_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lr_schedules.WarmupCosineLR.get_lr

    def of_first(self: Any) -> list[float]:
        return [wrong(self)[0]] * 2

    monkeypatch.setattr(lr_schedules.WarmupCosineLR, "get_lr", of_first)
    found = run(DEEPSPEED["cosine"][0], given=True)
    assert found[0][0] == 3, "at step 2 both are 0"
    assert {breach.key for _, breach in found} == {"rate:WarmupCosineLR:1"}
    assert found[0][1].message == (
        "The learning rate of parameter group 1 is 0.0025, but WarmupCosineLR gives 7.5e-05 for this group at its step "
        "1, and 0.0025 is what it gives group 0."
    )


def flat(optimizer: torch.optim.Optimizer) -> Any:
    return lr_schedules.WarmupLR(optimizer, 0.0, BASES[0], 10, "linear")


def flat_decay(optimizer: torch.optim.Optimizer) -> Any:
    return lr_schedules.WarmupDecayLR(optimizer, 35, 0.0, BASES[0], 5, "linear")


@pytest.mark.parametrize(("make", "steps"), [(flat, 10), (flat_decay, 5)])
def test_a_group_that_does_not_rise_to_the_rate_it_came_with_is_told(make: Make, steps: int) -> None:
    """As DeepSpeed 0.19.3 does it: without ``warmup_max_lr`` all groups rise to the first one's rate."""
    found = run(make, given=True, came_with=BASES)
    assert found[0][0] == 3, "before, both are 0"
    assert {breach.where for _, breach in found} == {"learning rate of group 1"}
    assert f"is {BASES[0] / steps:.6g}, but" in found[0][1].message
    assert f"gives {BASES[1] / steps:.6g} for this group at its step 1" in found[0][1].message
    assert run(make, given=True) == [], "the script may have said that all rise to one rate"


@pytest.mark.parametrize("name", ["warm-up", "warm-up, log", "decay"])
def test_groups_that_rise_to_the_rates_they_came_with_are_right(name: str) -> None:
    assert run(DEEPSPEED[name][0], given=True, came_with=BASES) == []


def test_a_group_that_is_left_out_before_the_first_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed 0.18.9 does it: one rate for all groups, and ``zip`` gives it to the first."""
    right = lr_schedules.WarmupCosineLR.get_lr

    def one_alone(self: Any) -> list[float]:
        return [0.0] if self.last_batch_iteration < 0 else right(self)

    monkeypatch.setattr(lr_schedules.WarmupCosineLR, "get_lr", one_alone)
    found = run(DEEPSPEED["cosine"][0], given=True)
    assert {step for step, _ in found} == {1}
    assert found[0][1].message == (
        "The learning rate of parameter group 1 is 0.0003, but WarmupCosineLR gives 0 for this group at its step -1."
    )


def test_a_group_that_keeps_its_rate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``zip`` leaves out what the shorter list lacks."""

    def first_alone(groups: Any, rates: Any) -> list[float]:
        groups[0]["lr"] = rates[0]
        return [group["lr"] for group in groups]

    monkeypatch.setattr(lr_schedules, "update_lr", first_alone)
    found = run(DEEPSPEED["warm-up"][0], given=True)
    assert found[0][0] == 2
    assert {breach.where for _, breach in found} == {"learning rate of group 1"}
    assert max(step for step, _ in found) == 11, "after the warm-up it has the right one"


@pytest.mark.parametrize("name", ["step", "lambda", "cosine", "linear", "exponential", "polynomial", "restarts"])
def test_a_factor_that_is_off_from_some_step_on_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = TORCH[name][0]
    kind = type(make(optimizer_of_two()))
    right = kind.get_lr

    def off(self: Any) -> list[float]:
        rates = right(self)
        return [rates[0], rates[1] * 1.5] if self.last_epoch >= 8 else rates

    monkeypatch.setattr(kind, "get_lr", off)
    found = run(make)
    assert found[0][0] == 9
    assert {breach.where for _, breach in found} == {"learning rate of group 1"}


def test_a_factor_of_transformers_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both groups are off alike, which no comparison of the two shows."""
    right = lr_scheduler.LambdaLR.get_lr
    monkeypatch.setattr(lr_scheduler.LambdaLR, "get_lr", lambda self: [2.0 * rate for rate in right(self)])
    found = run(by_transformers)
    assert {breach.key for _, breach in found} == {"rate:LambdaLR:0", "rate:LambdaLR:1"}
    assert found[0][0] == 2, "at step 0 it is 0"


def by_hand(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
    if step in (6, 14):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1


def one_by_hand(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
    if step == 6:
        optimizer.param_groups[1]["lr"] = 0.5


def loaded(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
    if step == 9:
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 2})


class OwnCosine(lr_scheduler.CosineAnnealingLR):
    """Something else."""

    def get_lr(self) -> Any:
        return [0.1 * (1 + self.last_epoch)] * 2


def counting(optimizer: torch.optim.Optimizer) -> Any:
    calls = 0

    def factor(step: int) -> float:
        nonlocal calls
        calls += 1
        return calls / 7

    return lr_scheduler.LambdaLR(optimizer, [factor, lambda step: 0.5**step])


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


@pytest.mark.parametrize("name", [*CASES], ids=":".join)
@pytest.mark.parametrize("change", [by_hand, one_by_hand])
@pytest.mark.parametrize("when", ["change", "behind"])
def test_what_a_script_sets_by_hand_is_its_own(name: tuple[str, str], change: Any, when: str) -> None:
    assert run(CASES[name][0], name[0] == "deepspeed", **{when: change}) == []


@pytest.mark.parametrize(
    ("make", "behind"),
    [
        (of_torch("ReduceLROnPlateau", patience=2), None),
        (of_torch("CyclicLR", 1e-4, 1e-2, 5, cycle_momentum=False), None),
        (of_torch("MultiplicativeLR", lambda step: 0.9), None),
        (of_torch("LinearLR", total_iters=0), None),
        (lambda optimizer: OwnCosine(optimizer, 10), None),
        (counting, None),
        (in_sequence, None),
        (chained, None),
        (TORCH["step"][0], loaded),
    ],
)
def test_what_has_no_formula_of_its_own_is_not_checked(make: Make, behind: Any) -> None:
    assert run(make, **({} if behind is None else {"behind": behind})) == []


def test_the_way_back_of_a_cosine_is_noted_and_its_rates_are_not_checked() -> None:
    found = run(of_torch("CosineAnnealingLR", 7))
    assert {(step, breach.key, breach.severity) for step, breach in found} == {
        (step, "schedule over", "info") for step in range(17, STEPS + 1)
    }
    assert "it was made for 7 steps and is at its step 16." in found[0][1].message


class Prepared(torch.optim.Optimizer):
    """As accelerate wraps an optimizer, on which transformers' Trainer makes its scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def times(steps: int) -> Callable[[torch.optim.Optimizer, Any, int], None]:
    """Step a scheduler so often per step of the training, as accelerate does for each rank."""
    return lambda optimizer, scheduler, step: [scheduler.step() for _ in range(steps - 1)] and None


def linear(length: int, wrappers: int = 1) -> Make:
    """A linear schedule on an optimizer in so many wrappers."""
    from transformers.optimization import get_linear_schedule_with_warmup

    def make(optimizer: torch.optim.Optimizer) -> Any:
        for _ in range(wrappers):
            optimizer = Prepared(optimizer)
        return get_linear_schedule_with_warmup(optimizer, 2, length)

    return make


@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_a_scheduler_of_a_wrapped_optimizer_is_found(wrappers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(linear(STEPS, wrappers)) == []
    found = run(linear(10, wrappers), behind=times(4))
    assert [(step, breach.key, breach.severity) for step, breach in found][:1] == [(12, "schedule over", "warning")]
    assert "it was made for 10 steps and is at its step 44." in found[0][1].message
    right = lr_scheduler.LambdaLR.get_lr
    monkeypatch.setattr(lr_scheduler.LambdaLR, "get_lr", lambda self: [2.0 * rate for rate in right(self)])
    assert {breach.key for _, breach in run(linear(STEPS, wrappers))} == {"rate:LambdaLR:0", "rate:LambdaLR:1"}


def test_a_schedule_that_steps_once_per_rank_may_end_a_few_steps_of_the_training_early() -> None:
    """Under accelerate a last batch for each of 8 ranks is 8 steps of the schedule, and one of the training."""
    assert run(linear(8 * (STEPS - 7)), behind=times(8)) == []
    assert [step for step, _ in run(linear(8 * (STEPS - 10)), behind=times(8))] == [STEPS]


def test_two_schedulers_of_a_wrapped_optimizer_are_not_checked() -> None:
    def both(optimizer: torch.optim.Optimizer) -> Any:
        made = linear(4)(optimizer)
        made.other = linear(4, 0)(optimizer)
        return made

    assert {breach.key for _, breach in run(both)} == {"rates at 0"}


@pytest.mark.parametrize("name", ["cosine", "step", "lambda", "restarts"])
def test_a_group_that_is_added_late_and_bases_that_a_script_sets_are_its_own(name: str) -> None:
    def add(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
        if step == 10:
            optimizer.add_param_group({"params": nn.Linear(2, 2).parameters(), "lr": 1e-4, "initial_lr": 1e-4})
            scheduler.base_lrs.append(1e-4)
            scheduler._last_lr.append(1e-4)
            if hasattr(scheduler, "lr_lambdas"):
                scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])

    def halve(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
        if step == 10:
            scheduler.base_lrs = [base / 2 for base in scheduler.base_lrs]

    assert run(TORCH[name][0], behind=add) == []
    assert run(TORCH[name][0], behind=halve) == []


def slower(scheduler: Any) -> list[float]:
    """The second group falls faster than it should."""
    rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    return rates if scheduler.last_epoch == 0 else [rates[0] * 0.9, rates[1] * 0.8]


def test_a_rate_that_is_too_low_is_told_until_the_script_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_hand(optimizer: Any, scheduler: Any, step: int) -> None:
        if step == 20:
            optimizer.param_groups[0]["lr"] = 0.5

    monkeypatch.setattr(lr_scheduler.ExponentialLR, "get_lr", slower)
    found = run(of_torch("ExponentialLR", 0.9), behind=by_hand)
    assert [step for step, _ in found] == list(range(2, 21))
    assert {(breach.where, breach.since) for _, breach in found} == {("learning rate of group 1", 2)}


def test_a_factor_that_is_no_number_is_not_compared() -> None:
    assert run(of_torch("LambdaLR", [lambda step: math.nan if step > 3 else 1.0, lambda step: 1.0])) == []


def test_what_is_left_of_a_rate_is_compared_with_the_largest_that_it_has_been() -> None:
    """Torch makes each rate of the last one, in fp32 here, where the factor itself is rounded."""

    def in_fp32(optimizer: torch.optim.Optimizer) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return lr_scheduler.ExponentialLR(optimizer, 0.97)

    rates: list[list[float]] = []
    assert run(in_fp32, rates=rates, steps=1000) == []
    assert abs(rates[-1][0] / (BASES[0] * 0.97**999) - 1) > 1.5 * TOLERANCE, "far off for its own size"


def test_a_step_that_a_script_names_is_its_own() -> None:
    """A fraction of an epoch, of which the step that is counted is a part."""

    def name(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
        scheduler.step(step + 0.5)

    def by_keyword(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
        scheduler.step(epoch=step + 0.5)

    rates: list[list[float]] = []
    assert run(TORCH["exponential"][0], behind=name, rates=rates) == []
    assert rates[1][0] == pytest.approx(BASES[0] * 0.9**1.5), "the rate is of the fraction"
    assert run(TORCH["exponential"][0], behind=by_keyword) == []


def beside(behind: Callable[[Any, Any, int], None]) -> list[tuple[int, str]]:
    """Return what is found of the first of two exponential schedulers; ``behind`` is called with both after a step."""
    optimizers, patches = [optimizer_of_two(), optimizer_of_two()], Patches()
    own, other = schedulers = [lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
    stand = Stand(optimizers, [own])
    rule = RateRule(stand)  # type: ignore[arg-type]
    rule.connect(patches, lambda function, *args: function(*args))
    found = []
    for stand.step in range(1, 7):
        found += [(stand.step, breach.key) for breach in rule.breaches()]
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        behind(own, other, stand.step)
    patches.undo()
    return found


def test_a_step_that_another_scheduler_is_given_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_scheduler.ExponentialLR, "get_lr", slower)
    found = beside(lambda own, other, step: other.step(2))
    assert found == [(step, "rate:ExponentialLR:1") for step in range(2, 7)]


def test_a_step_of_another_scheduler_is_none_of_a_step_that_a_script_has_set() -> None:
    def back(own: Any, other: Any, step: int) -> None:
        if step == 3:
            own.last_epoch = 1
            other.step()

    assert beside(back) == []


@pytest.mark.parametrize("name", ["step", "exponential", "cosine", "linear"])
def test_rates_that_a_script_has_set_before_it_is_observed_are_its_own(name: str) -> None:
    def begun(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = TORCH[name][0](optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 0.3
        optimizer.step()
        scheduler.step()
        return scheduler

    assert run(begun) == []
