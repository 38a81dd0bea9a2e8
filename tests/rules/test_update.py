"""What an optimizer does against its formula: torch's own forms, mistakes put in their place, and what is none."""

from __future__ import annotations

import importlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_silent.patches import Patches
from ds_silent.rules.optimizer_update import SETTLED, TENSORS, UpdateRule
from ds_silent.rules.rule import Breach

STEPS = 40
OF_ADAM, OF_SGD = (importlib.import_module(f"torch.optim.{name}") for name in ("adam", "sgd"))


@dataclass
class Stand:
    """What a rule asks of a framework."""

    parameters: list[Tensor]
    names: list[str]
    held: list[Any]
    step: int = 1

    def optimizers(self) -> list[Any]:
        return self.held


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 20), nn.Linear(20, 5)).to(dtype)


Make = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Script:
    """One training; ``change`` and ``behind`` are called before and after each step."""

    make: Make
    dtype: torch.dtype = torch.float32
    interval: int = 1
    change: Callable[[Script, int], None] = lambda script, step: None
    behind: Callable[[Script, int], None] = lambda script, step: None
    step: Callable[[torch.optim.Optimizer, int], object] = lambda optimizer, step: optimizer.step()
    watched: bool = True

    def run(self, steps: int = STEPS) -> list[tuple[int, Breach]]:
        """Return what was found, with the step at which it was asked for."""
        self.model = net(self.dtype)
        self.optimizer = self.make(self.model)
        patches, named = Patches(), list(self.model.named_parameters())
        stand = Stand([p for _, p in named], [name for name, _ in named], [self.optimizer])
        rule = UpdateRule(stand, self.interval)  # type: ignore[arg-type]
        if self.watched:
            rule.connect(patches, lambda function, *given: function(*given))
        found = []
        for step in range(1, steps + 1):
            stand.step = step
            rows = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(self.dtype)
            self.model(rows).square().mean().backward()
            self.change(self, step)
            self.step(self.optimizer, step)
            self.behind(self, step)
            self.optimizer.zero_grad()
            if self.watched:
                found += [(step, breach) for breach in rule.breaches()]
        self.judged = rule
        patches.undo()
        assert not self.optimizer._optimizer_step_pre_hooks
        left = self.optimizer._optimizer_step_post_hooks.values()
        assert not [hook for hook in left if hook.__module__.startswith("ds_silent")]
        return found


def by(kind: Any, **settings: Any) -> Make:
    return lambda model: kind(model.parameters(), **settings)


FORMS = {
    "sgd": by(torch.optim.SGD, lr=0.1),
    "sgd-decay": by(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "sgd-momentum": by(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd-nesterov": by(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "adam": by(torch.optim.Adam, lr=1e-3),
    "adam-decay": by(torch.optim.Adam, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95)),
    "adam-amsgrad": by(torch.optim.Adam, lr=1e-3, amsgrad=True, eps=1e-6),
    "adamw": by(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "adamw-amsgrad": by(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw-one-beta": by(torch.optim.AdamW, lr=1e-3, betas=(0.0, 0.5), eps=1e-15),
    "adagrad": by(torch.optim.Adagrad, lr=0.05, weight_decay=0.01, lr_decay=0.1),
    "adagrad-begun": by(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.2),
}
FUSED = ("sgd", "sgd-momentum", "adam-decay", "adam-amsgrad", "adamw", "adagrad-begun")


def with_form(make: Make, **form: Any) -> Make:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        for group in optimizer.param_groups:
            group.update(form)
        return optimizer

    return made


def every_form() -> Iterator[Any]:
    """Each form alone, as one launch for all tensors, and fused where torch has that on the CPU."""
    for name, make in FORMS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            yield pytest.param(with_form(make, foreach=False), dtype, id=f"{name}-{dtype}"[:-2] + "-single")
            yield pytest.param(with_form(make, foreach=True), dtype, id=f"{name}-{dtype}-foreach")
        if name in FUSED:
            yield pytest.param(with_form(make, fused=True, foreach=None), torch.float32, id=f"{name}-fused")


@pytest.mark.parametrize(("make", "dtype"), list(every_form()))
def test_torch_does_what_the_formulas_say(make: Make, dtype: torch.dtype) -> None:
    script = Script(make, dtype)
    assert script.run() == []
    assert not script.judged._whole, "something was judged"


def test_a_count_that_lies_on_the_device_is_read_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of torch's fused forms on an accelerator; nothing waits for it."""
    monkeypatch.setattr("ds_silent.rules.known_optimizers.KnownForm.step", lambda *_: None)
    script = Script(FORMS["adamw"])
    assert script.run() == []
    assert not script.judged._whole, "something was judged"
    monkeypatch.setattr(OF_ADAM, "adam", adam_by_hand(inside=False, correct=True, more=1))
    assert script.run(3)[0][0] == 2, "the first step has no count yet"


BUILT = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "nowhere"))
OF_DEEPSPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "fused_adam": ("FusedAdam", {"adam_w_mode": True}),
    "cpu_adam": ("DeepSpeedCPUAdam", {"adamw_mode": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changed", [{}, {"mode": False}, {"bias_correction": False}, {"betas": (0.5, 0.6)}], ids=str)
@pytest.mark.parametrize("name", OF_DEEPSPEED)
def test_deepspeeds_kernels_do_what_the_formulas_say(name: str, changed: dict[str, Any], dtype: torch.dtype) -> None:
    if not (BUILT / name / f"{name}.so").is_file():
        pytest.skip(f"{name} is not built, which takes minutes")
    import deepspeed.ops.adam

    kind, own = OF_DEEPSPEED[name]
    mode = dict.fromkeys(own, changed.get("mode", True))
    settings = {key: value for key, value in changed.items() if key != "mode"}
    script = Script(by(getattr(deepspeed.ops.adam, kind), lr=1e-3, weight_decay=0.1, **mode, **settings), dtype)
    assert script.run(12) == []
    assert not script.judged._whole, "something was judged"


def launch_by_hand(chunk: int, flag: Tensor, lists: Lists, rate: float, beta1: float, beta2: float, *more: Any) -> None:
    """Stand for a launch of DeepSpeed's fused kernel: AdamW, the naive way."""
    eps, step, _, corrects, decay = more
    for gradient, weight, first, second in zip(*lists, strict=True):
        weight.data.mul_(1 - rate * decay)
        first.copy_(beta1 * first + (1 - beta1) * gradient)
        second.copy_(beta2 * second + (1 - beta2) * gradient**2)
        one, two = (1 - beta**step if corrects else 1.0 for beta in (beta1, beta2))
        weight.data.sub_(rate * first / one / ((second / two).sqrt() + eps))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Make]:
    """DeepSpeed's FusedAdam as it counts its steps, whether or not its kernel is built."""
    from deepspeed.ops.adam import fused_adam

    kernel = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=launch_by_hand))
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", lambda: kernel)
    return partial(by, fused_adam.FusedAdam, lr=1e-3, weight_decay=0.1)


def without_last(script: Script, step: int) -> None:
    script.optimizer.param_groups[0]["params"][-1].grad = None


def test_fused_adam_steps_by_the_counter_of_its_last_tensor_with_a_gradient(fused: Callable[..., Make]) -> None:
    script = Script(fused(), change=without_last)
    assert script.run(6) == []
    assert not script.judged._whole, "something was judged"
    counters = [state["step"] for state in script.optimizer.state.values()]
    assert counters == [0] * 6 + [6], "of the seven that have had a gradient"


def test_fused_adam_begins_with_the_count_of_an_older_checkpoint(fused: Callable[..., Make]) -> None:
    """Whose moments it does not have: that alone is told."""
    [key] = {breach.key for _, breach in Script(with_form(fused(), step=7)).run(4)}
    assert key == "update:FusedAdam:count"


def test_fused_adam_of_several_dtypes_is_not_judged(fused: Callable[..., Make]) -> None:
    """Each dtype's launch moves the last tensor's counter on: the others' steps are not known."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        model.register_parameter("extra", nn.Parameter(torch.ones(50, dtype=torch.bfloat16)))
        return fused()(model)

    def change(script: Script, step: int) -> None:
        script.model.extra.grad = torch.ones(50, dtype=torch.bfloat16)  # type: ignore[union-attr]

    script = Script(make, change=change)
    assert script.run(6) == []
    assert script.judged._whole, "nothing was judged"


def test_a_fused_adam_that_corrects_no_bias_cannot_count_ahead(fused: Callable[..., Make]) -> None:
    corrects, leaves = (Script(emptied(fused(bias_correction=on))).run(4) for on in (True, False))
    assert {breach.key for _, breach in corrects} == {"update:FusedAdam:count"}
    assert leaves == []


# -- what it costs -----------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Count torch's calls while a rule's own hooks and judging run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def calls_of_a_step(make: Make) -> list[Counter[str]]:
    """Return torch's calls in each of some later steps: with the hooks, then with what is asked at the next step."""
    model, counted = net(), []
    optimizer = make(model)
    named, patches = list(model.named_parameters()), Patches()
    stand = Stand([p for _, p in named], [name for name, _ in named], [optimizer])
    rule = UpdateRule(stand, 1)  # type: ignore[arg-type]
    under, inside = [Calls()], []

    def safely(function: Any, *given: Any) -> Any:
        with nullcontext() if inside else under[0]:
            inside.append(function)
            try:
                return function(*given)
            finally:
                inside.pop()

    rule.connect(patches, safely)
    for step in range(1, 8):
        stand.step, under[0] = step, Calls()
        model(torch.randn(8, 40, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        safely(rule.breaches)
        optimizer.step()
        optimizer.zero_grad()
        counted.append(under[0].names)
    patches.undo()
    return counted[4:]


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adamw", "adamw-amsgrad"])
def test_a_step_costs_few_calls_of_torchs_however_many_elements_are_judged(name: str) -> None:
    """A view for each place that is read, and two copies, which numpy looks at: 170 calls were 0.4 % of a step."""
    moments = {"sgd": 0, "sgd-momentum": 1, "adamw": 2, "adamw-amsgrad": 3}[name]
    for calls in calls_of_a_step(with_form(FORMS[name], foreach=False)):
        steps = calls.pop("_local_scalar_dense", 0)  # the tensors' own counts, on the host
        assert steps == (TENSORS if name.startswith("adamw") else 0)
        views = calls.pop("as_strided")
        assert views == TENSORS * (2 + moments) + TENSORS, "weight, gradient and moments before the step; then weights"
        assert calls.pop("cat") == 2
        assert sum(calls.values()) <= 2, calls  # detached, where numpy looks at it


# -- mistakes, put in place of what torch's optimizers call -----------------------------------------------------------

Lists = list[Any]


def adam_by_hand(inside: bool, correct: bool, more: int = 0) -> Callable[..., None]:
    """Adam, the naive way, with its epsilon inside the root, without bias correction, or with a count that is off."""

    def adam(params: Lists, grads: Lists, firsts: Lists, seconds: Lists, _: Lists, steps: Lists, **given: Any) -> None:
        for weight, gradient, first, second, step in zip(params, grads, firsts, seconds, steps, strict=True):
            step += 1
            weight.mul_(1 - given["lr"] * given["weight_decay"])
            first.copy_(given["beta1"] * first + (1 - given["beta1"]) * gradient)
            second.copy_(given["beta2"] * second + (1 - given["beta2"]) * gradient**2)
            one, two = (1 - given[name] ** (float(step) + more) if correct else 1.0 for name in ("beta1", "beta2"))
            root = (second / two + given["eps"]).sqrt() if inside else (second / two).sqrt() + given["eps"]
            weight.sub_(given["lr"] * first / one / root)

    return adam


def with_settings(original: Callable[..., None], **other: Any) -> Callable[..., None]:
    """The same, with other settings than the group's; a function is called with the group's own."""

    def call(*lists: Any, **given: Any) -> None:
        original(*lists, **{**given, **{k: v(given[k]) if callable(v) else v for k, v in other.items()}})

    return call


def twice(original: Callable[..., None]) -> Callable[..., None]:
    def call(*lists: Any, **given: Any) -> None:
        original(*lists, **given)
        original(*lists, **given)

    return call


def without_third(original: Callable[..., None]) -> Callable[..., None]:
    def call(*lists: Any, **given: Any) -> None:
        original(*([one for n, one in enumerate(each) if n != 2] for each in lists), **given)

    return call


ADAM, SGD = OF_ADAM.adam, OF_SGD.sgd
ADAMW = by(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-6)
MOMENTUM = by(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01)
HEAVY = by(torch.optim.SGD, lr=0.05, momentum=0.9)
MISTAKES = {
    "decay": (ADAMW, with_settings(ADAM, weight_decay=0.0), "AdamW", "no weight decay", 1),
    "coupled": (ADAMW, with_settings(ADAM, decoupled_weight_decay=False), "AdamW", "coupled with the gradient", 1),
    "decoupled": (
        by(torch.optim.Adam, lr=1e-3, weight_decay=0.1),
        with_settings(ADAM, decoupled_weight_decay=True), "Adam", "decoupled from the gradient", 1,
    ),
    "bias": (ADAMW, adam_by_hand(inside=False, correct=False), "AdamW", "no bias correction", 1),
    "inside": (ADAMW, adam_by_hand(inside=True, correct=True), "AdamW", "epsilon inside the root", 1),
    "count": (ADAMW, adam_by_hand(inside=False, correct=True, more=1), "AdamW", "is that of the step after", 1),
    "far count": (ADAMW, adam_by_hand(inside=False, correct=True, more=5), "AdamW", "none of the known mistakes", 1),
    "rate": (ADAMW, with_settings(ADAM, lr=lambda rate: 2.5 * rate), "AdamW", "the rate is 2.5 times", 1),
    "twice": (ADAMW, twice(ADAM), "AdamW", "applied twice", 1),
    "beta1": (ADAMW, with_settings(ADAM, beta1=0.8), "AdamW", "beta1 is 0.8 instead of 0.9", 2),
    "beta2": (ADAMW, with_settings(ADAM, beta2=0.999), "AdamW", "beta2 is 0.999 instead of 0.99", 2),
    "sign": (ADAMW, with_settings(ADAM, maximize=True), "AdamW", "sign of the gradient", 1),
    "one tensor": (ADAMW, without_third(ADAM), "AdamW", "was not applied", 1),
    "momentum": (HEAVY, with_settings(SGD, momentum=1e-30), "SGD", "momentum is not applied", 2),
    "dampening": (MOMENTUM, with_settings(SGD, dampening=0.0), "SGD", "dampening is not applied", 2),
    "nesterov": (HEAVY, with_settings(SGD, nesterov=True), "SGD", "Nesterov's form is used", 1),
    "half": (by(torch.optim.SGD, lr=0.1), with_settings(SGD, lr=lambda rate: rate / 2), "SGD", "rate is 0.5 times", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_what_explains_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wrong, kind, words, first = MISTAKES[name]
    monkeypatch.setattr(OF_SGD if kind == "SGD" else OF_ADAM, kind.lower().rstrip("w"), wrong)
    script = Script(with_form(make, foreach=False))
    found = script.run(6)
    assert {step for step, _ in found} == set(range(first, 7)), "at its first step, and at all others"
    step, breach = found[0]
    assert step == breach.since == first
    assert (breach.kind, breach.severity) == ("update-mismatch", "error")
    assert breach.message.startswith(f"{kind} does not do what its formula says with ")
    assert words in breach.message
    assert breach.where == ("1.weight" if name == "one tensor" else breach.where)
    assert len({breach.key for _, breach in found}) == 1, "the same fault has the same key at every step"


def test_what_begins_later_is_found_in_turn_and_what_is_over_is_not_told_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(script: Script, step: int) -> None:
        monkeypatch.setattr(OF_ADAM, "adam", without_third(ADAM) if 10 <= step < 20 else ADAM)

    found = Script(with_form(ADAMW, foreach=False), change=change).run()
    steps = [step for step, _ in found]
    assert 10 <= steps[0] <= 11, "eight tensors, four of which are looked at in each step"
    assert steps == list(range(steps[0], 20))


def test_with_an_interval_only_the_first_and_measured_steps_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(script: Script, step: int) -> None:
        monkeypatch.setattr(OF_ADAM, "adam", ADAM if step == 1 else with_settings(ADAM, weight_decay=0.0))

    found = Script(with_form(ADAMW, foreach=False), interval=5, change=change).run(12)
    assert [step for step, _ in found] == list(range(5, 13))
    assert {breach.since for _, breach in found} == {5}


# -- what is looked at -------------------------------------------------------------------------------------------------


def moved(*wrong: tuple[int, int], until: int = 99) -> Callable[..., None]:
    """SGD whose step also moves some elements: (place of the tensor, element)."""
    calls = []

    def sgd(params: Lists, *lists: Any, **given: Any) -> None:
        SGD(params, *lists, **given)
        calls.append(1)
        for tensor, element in wrong if 1 < len(calls) <= until else ():
            params[tensor].view(-1)[element] += 0.5

    return sgd


@pytest.mark.parametrize("tensor", range(8))
def test_each_tensor_has_its_turn_in_two_steps(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 tensors 4 are looked at in each step; the wrong one is so in all of its elements."""
    sizes = [one.numel() for one in net().parameters()]
    monkeypatch.setattr(OF_SGD, "sgd", moved(*[(tensor, element) for element in range(sizes[tensor])]))
    found = Script(by(torch.optim.SGD, lr=0.1, foreach=False)).run(4)
    assert found[0][1].since in (2, 3)


@pytest.mark.parametrize("tensor", range(8))
def test_each_tensor_has_its_turn_whatever_the_interval(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [one.numel() for one in net().parameters()]
    monkeypatch.setattr(OF_SGD, "sgd", moved(*[(tensor, element) for element in range(sizes[tensor])]))
    found = Script(by(torch.optim.SGD, lr=0.1, foreach=False), interval=2).run(4)
    assert found[0][1].since in (2, 4)


def test_an_optimizer_that_was_right_for_long_is_looked_at_in_every_second_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until something is wrong: then at each step again."""
    looked: list[int] = []
    take = UpdateRule.after

    def after(rule: UpdateRule, *given: Any) -> None:
        looked.extend([rule._framework.step] * (rule._open is not None))
        take(rule, *given)

    def change(script: Script, step: int) -> None:
        monkeypatch.setattr(OF_ADAM, "adam", ADAM if step < SETTLED + 9 else with_settings(ADAM, weight_decay=0.0))

    monkeypatch.setattr(UpdateRule, "after", after)
    found = Script(with_form(ADAMW, foreach=False), change=change).run(SETTLED + 12)
    assert looked == [*range(1, SETTLED + 1), *range(SETTLED + 2, SETTLED + 10, 2), *range(SETTLED + 10, SETTLED + 13)]
    assert {breach.since for _, breach in found} == {SETTLED + 10}


def test_elements_are_other_ones_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1200 some 64 are looked at: one that is wrong is among them after a while, wherever it lies."""
    monkeypatch.setattr(OF_SGD, "sgd", moved((0, 1)))
    assert Script(by(torch.optim.SGD, lr=0.1, foreach=False)).run(60) != []


def test_with_a_rate_of_0_all_tensors_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OF_ADAM, "adam", without_third(ADAM))
    found = Script(with_form(ADAMW, foreach=False), change=warmed_up).run(8)
    assert {breach.since for _, breach in found} == {6}, "the first step that moves anything"


def test_what_a_step_cannot_show_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(script: Script, step: int) -> None:
        script.optimizer.param_groups[0]["lr"] = 0.0 if step in (3, 4) else 1e-3

    monkeypatch.setattr(OF_ADAM, "adam", with_settings(ADAM, weight_decay=0.0))
    found = Script(with_form(ADAMW, foreach=False), change=pause).run(6)
    assert [(step, breach.since) for step, breach in found] == [(step, 1) for step in range(1, 7)]


def matrices_alone(model: nn.Module) -> torch.optim.Optimizer:
    held = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    return torch.optim.SGD(held, lr=0.1, weight_decay=0.5, foreach=False)


def test_a_mistake_keeps_its_name_where_a_plainer_one_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient a decay that is left out looks like no update at all."""

    def change(script: Script, step: int) -> None:
        if step == 3:
            nothing(script, step)

    monkeypatch.setattr(OF_SGD, "sgd", with_settings(SGD, weight_decay=0.0))
    found = Script(matrices_alone, change=change).run(4)
    assert {breach.key for _, breach in found} == {"update:SGD:0:no weight decay"}


@pytest.mark.parametrize("tensor", range(8))
def test_an_optimizer_that_begins_later_is_not_judged_by_a_few_tensors(tensor: int) -> None:
    """Of 8 tensors 4 are looked at then, which may all have moments of 0: as of a training that goes on."""
    model, patches = net(), Patches()
    first, second = torch.optim.SGD(net().parameters(), lr=0.1), emptied(by(torch.optim.AdamW, lr=1e-3))(model)
    second.state[list(model.parameters())[tensor]]["exp_avg"].fill_(1e-3)
    stand = Stand(list(model.parameters()), [name for name, _ in model.named_parameters()], [first, second])
    rule = UpdateRule(stand, 1)  # type: ignore[arg-type]
    rule.connect(patches, lambda function, *given: function(*given))
    for one in (first, second):
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    for stand.step in (1, 2, 3):
        first.step()
        assert rule.breaches() == ()
    stand.step = 4
    second.step()
    assert rule.breaches() == ()
    patches.undo()


def test_a_step_that_raises_leaves_nothing_for_another_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose step is not looked at, because a hook of the script's is the last before it."""
    model, patches = net(), Patches()
    one, other = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[3].parameters(), lr=0.1)  # type: ignore[index]
    rule = UpdateRule(Stand(list(model.parameters()), [n for n, _ in model.named_parameters()], [one, other]), 1)  # type: ignore[arg-type]
    rule.connect(patches, lambda function, *given: function(*given))
    model(torch.ones(2, 40)).sum().backward()
    monkeypatch.setattr(OF_ADAM, "adam", without_third)
    with pytest.raises(TypeError):
        one.step()
    other.register_step_pre_hook(lambda *_: None)
    with torch.no_grad():
        next(model[0].parameters()).add_(1.0)  # type: ignore[index]
    other.step()
    assert rule.breaches() == ()
    patches.undo()


def test_a_device_that_is_far_behind_holds_no_more_than_some_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.device.ReadLater.ready", False, raising=True)
    script = Script(by(torch.optim.SGD, lr=0.1))
    script.run(70)
    assert [at for at, *_ in script.judged._under_way] == list(range(7, 71))


# -- a count that begins too late --------------------------------------------------------------------------------------


def emptied(make: Make, times: int = 1) -> Make:
    """Step without gradients before the training, as some wrappers do to make the state."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(times):
            optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return made


def late(make: Make, steps: int, **settings: Any) -> list[Breach]:
    return [breach for _, breach in Script(make, **settings).run(steps)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("interval", [1, 10])
def test_a_step_that_was_counted_without_gradients_is_a_note(
    interval: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr("ds_silent.rules.known_optimizers.KnownForm.step", lambda *_: None)
    found = late(emptied(by(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95)), 2), 4, interval=interval)
    assert len(found) == 4, "it does not end"
    assert len(set(found)) == 1
    assert (found[0].kind, found[0].severity, found[0].since) == ("update-mismatch", "info", 1)
    assert found[0].message.startswith("AdamW counts 2 steps more than it has taken: ")
    assert "0.623, 0.762 and 0.833 times what" in found[0].message


def test_what_the_updates_are_is_that_many_times_the_formulas() -> None:
    def first_three(make: Make) -> list[Tensor]:
        weights = [net()[4].weight.detach()]  # type: ignore[index]
        script = Script(make, change=constant)
        script.behind = lambda script, _: weights.append(script.model[4].weight.detach().clone())  # type: ignore[index]
        script.run(3)
        return [new - old for old, new in pairwise(weights)]

    make = by(torch.optim.Adam, lr=1e-3)
    factors = [
        float((one / other).mean()) for one, other in zip(first_three(emptied(make)), first_three(make), strict=True)
    ]
    assert factors == pytest.approx([0.744, 0.858, 0.910], abs=6e-4)


def constant(script: Script, step: int) -> None:
    for parameter in script.model.parameters():
        parameter.grad.fill_(0.1 * step)  # type: ignore[union-attr]


def nothing(script: Script, step: int) -> None:
    for parameter in script.model.parameters():
        parameter.grad.zero_()  # type: ignore[union-attr]


def one_without(script: Script, step: int) -> None:
    """As a training that goes on, in which one parameter alone has never had a gradient: a LoRA's first factor."""
    for number, state in enumerate(script.optimizer.state.values()):
        if step == 1 and number != 2:
            state["exp_avg"].fill_(1e-3)


def forgotten(script: Script, step: int) -> None:
    for state in script.optimizer.state.values():
        state["exp_avg"].zero_()


WITHOUT = emptied(by(torch.optim.AdamW, lr=1e-3))
OTHER_STATES = {
    "no bias is corrected": Script(emptied(by(torch.optim.SGD, lr=0.1, momentum=0.9))),
    "coupled decay": Script(emptied(by(torch.optim.Adam, lr=1e-3, weight_decay=0.1))),
    "no gradient now": Script(WITHOUT, change=nothing),
    "one without": Script(WITHOUT, change=one_without),
    "moments forgotten later": Script(by(torch.optim.AdamW, lr=1e-3), change=forgotten),
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_another_state_is_no_such_note(name: str) -> None:
    assert OTHER_STATES[name].run(4) == []


# -- what is no mistake ------------------------------------------------------------------------------------------------


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Decay on matrices alone, a rate by layer, one group that does not move, and one that is empty."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    held = [{"params": [p], "lr": 1e-3 * 0.5**n, "weight_decay": 0.1} for n, p in enumerate(matrices)]
    return torch.optim.AdamW([*held, {"params": rest[:1], "lr": 0.0}, {"params": rest[1:], "betas": (0.5, 0.6)}])


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)  # type: ignore[index]
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def tied(model: nn.Module) -> torch.optim.Optimizer:
    model.extend([nn.Linear(5, 20), nn.Linear(20, 5)])  # type: ignore[operator]
    model[-1].weight = model[4].weight  # type: ignore[index]
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())  # type: ignore[index]
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def low_rank(model: nn.Module) -> torch.optim.Optimizer:
    model.requires_grad_(False)
    model[3].weight.requires_grad_(True)  # type: ignore[index]
    return torch.optim.Adam([model[3].weight], lr=1e-2)  # type: ignore[index]


def convolution(model: nn.Module) -> torch.optim.Optimizer:
    """Channels last."""
    model.insert(0, nn.Sequential(nn.Unflatten(1, (4, 5, 2)), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten()))  # type: ignore[operator]
    model.to(memory_format=torch.channels_last)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class OwnStep(torch.optim.AdamW):
    """A formula of its own."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.999)
        return result


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """The script's own hooks change gradient and weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def shift(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)

    optimizer.register_step_post_hook(shift)
    return optimizer


def add_hooks(script: Script, step: int) -> None:
    if step == 3:
        optimizer = script.optimizer
        held = list(script.model.parameters())

        def shrink(*_: Any) -> None:
            with torch.no_grad():
                for parameter in held:
                    parameter.grad.mul_(0.5)  # type: ignore[union-attr]

        def normalise(*_: Any) -> None:
            with torch.no_grad():
                held[0].div_(held[0].norm())

        script.handles = [  # type: ignore[attr-defined]
            optimizer.register_step_pre_hook(shrink),
            optimizer.register_step_post_hook(normalise),
        ]
    if step == STEPS:
        for handle in script.handles:  # type: ignore[attr-defined]
            handle.remove()


def normalised(script: Script, step: int) -> None:
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.clamp_(-0.1, 0.1)


def averaged(script: Script, step: int) -> None:
    """Weights are swapped with their moving average between two steps, and back."""
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.mul_(0.9).add_(0.1)


def warmed_up(script: Script, step: int) -> None:
    for group in script.optimizer.param_groups:
        group["lr"] = 1e-3 * max(0, step - 5) / 10


def clipped(script: Script, step: int) -> None:
    nn.utils.clip_grad_norm_(script.model.parameters(), 0.01)


def broken(script: Script, step: int) -> None:
    """Infinities and gradients that are missing or nothing."""
    for number, parameter in enumerate(script.model.parameters()):
        if parameter.grad is not None and step % 8 == 5:
            parameter.grad.fill_(math.inf if step == 37 else 0.0)
        if number == step % 11:
            parameter.grad = None


def lies_otherwise(script: Script, step: int) -> None:
    for parameter in script.model.parameters():
        if parameter.ndim == 2 and parameter.grad is not None:
            parameter.grad = parameter.grad.t().contiguous().t()


def closed(optimizer: torch.optim.Optimizer, step: int, named: bool = False) -> None:
    def again() -> float:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(-2.0)
        return 0.0

    if named:
        optimizer.step(closure=again)
    else:
        optimizer.step(again)


def scaled() -> Callable[[torch.optim.Optimizer, int], object]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scaler.get_scale() if number % 7 else math.inf)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()

    return step


def restarted(script: Script, step: int) -> None:
    """A checkpoint comes in the middle."""
    if step == 5:
        script.saved = script.optimizer.state_dict()  # type: ignore[attr-defined]
    if step == 20:
        script.optimizer.load_state_dict(script.saved)  # type: ignore[attr-defined]


PLAIN = by(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
CONTROLS: dict[str, Callable[[], Script]] = {
    "groups": lambda: Script(groups),
    "frozen": lambda: Script(frozen),
    "tied": lambda: Script(tied),
    "low rank": lambda: Script(low_rank),
    "channels last": lambda: Script(convolution),
    "own step": lambda: Script(by(OwnStep, lr=1e-3)),
    "hooks": lambda: Script(hooked, change=add_hooks),
    "weights clipped": lambda: Script(PLAIN, behind=normalised),
    "moving average": lambda: Script(PLAIN, behind=averaged),
    "warm-up from 0": lambda: Script(PLAIN, change=warmed_up),
    "gradient clipped": lambda: Script(PLAIN, change=clipped),
    "gradients lie otherwise": lambda: Script(with_form(PLAIN, foreach=False), change=lies_otherwise),
    "infinite, none": lambda: Script(PLAIN, change=broken),
    "closure": lambda: Script(PLAIN, step=closed),
    "closure by name": lambda: Script(PLAIN, step=partial(closed, named=True)),
    "scaler": lambda: Script(PLAIN, step=scaled()),
    "scaler, fused": lambda: Script(by(torch.optim.SGD, lr=0.1, fused=True), step=scaled()),
    "resumed": lambda: Script(PLAIN, change=restarted),
    "rmsprop": lambda: Script(by(torch.optim.RMSprop, lr=1e-3)),
    "rate in a tensor": lambda: Script(by(torch.optim.AdamW, lr=torch.tensor(1e-3), foreach=False)),
    "diverges": lambda: Script(by(torch.optim.SGD, lr=100.0, maximize=True)),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_is_told_where_nothing_is_wrong(name: str) -> None:
    assert CONTROLS[name]().run() == []


def test_updates_that_bf16_rounds_away_are_noted_and_are_no_other_formula() -> None:
    found = Script(by(torch.optim.AdamW, lr=1e-7, weight_decay=0.1), torch.bfloat16).run()
    assert {(breach.key, breach.severity) for _, breach in found} == {("update:lost", "info")}


def test_weights_and_random_numbers_are_as_without() -> None:
    def trained(watched: bool) -> tuple[bytes, ...]:
        script = Script(groups, watched=watched)
        script.run()
        state = torch.get_rng_state().numpy().tobytes()
        return state, *(p.detach().numpy().tobytes() for p in script.model.parameters())

    assert trained(True) == trained(False)
