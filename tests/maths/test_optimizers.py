"""The published formulas, element by element in Python's own floats; and the bound, in numbers of units."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_silent.maths.optimizers import Elements, Update, explanations, mistakes, shows, stepped, variants

STEPS, UNIT = 5, 2.0**-24


def start() -> list[float]:
    return [0.5, -0.25, 1e-3, 2.0, 0.0]


def gradients(step: int) -> list[float]:
    return [math.sin(7.0 * step + 3.0 * n) * 10.0 ** (n - 3) for n in range(5)]


def sgd(w: float, g: float, s: dict[str, float], t: int, u: Update) -> float:
    g += u.decay * w
    s["first"] = g if t == 1 else u.beta1 * s["first"] + (1 - u.dampening) * g
    return w - u.rate * (g + u.beta1 * s["first"] if u.nesterov else s["first"])


def adam(w: float, g: float, s: dict[str, float], t: int, u: Update) -> float:
    if u.decoupled:
        w -= u.rate * u.decay * w
    else:
        g += u.decay * w
    s["first"] = u.beta1 * s["first"] + (1 - u.beta1) * g
    s["second"] = u.beta2 * s["second"] + (1 - u.beta2) * g * g
    s["largest"] = max(s["largest"], s["second"])
    first, second = s["first"], s["largest" if u.amsgrad else "second"]
    if u.bias_correction:
        first, second = first / (1 - u.beta1**t), second / (1 - u.beta2**t)
    root = math.sqrt(second + u.eps) if u.eps_inside else math.sqrt(second) + u.eps
    return w - u.rate * first / root


def adagrad(w: float, g: float, s: dict[str, float], t: int, u: Update) -> float:
    g += u.decay * w
    s["second"] += g * g
    return w - u.rate / (1 + (t - 1) * u.rate_decay) * g / (math.sqrt(s["second"]) + u.eps)


def lion(w: float, g: float, s: dict[str, float], t: int, u: Update) -> float:
    mixed = u.beta1 * s["first"] + (1 - u.beta1) * g
    s["first"] = u.beta2 * s["first"] + (1 - u.beta2) * g
    return w - u.rate * u.decay * w - u.rate * (mixed > 0) + u.rate * (mixed < 0)


ADAM: dict[str, Any] = {"rate": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
FORMS: list[tuple[Callable[..., float], Update]] = [
    (sgd, Update("SGD", 0.1)),
    (sgd, Update("SGD", 0.1, decay=0.2, beta1=0.9, dampening=0.4)),
    (sgd, Update("SGD", 0.1, beta1=0.9, nesterov=True)),
    (adam, Update("Adam", **ADAM)),
    (adam, Update("Adam", **ADAM, decay=0.2)),
    (adam, Update("Adam", **ADAM, decay=0.2, decoupled=True, bias_correction=False)),
    (adam, Update("Adam", **ADAM, amsgrad=True, eps_inside=True)),
    (adagrad, Update("Adagrad", 0.1, decay=0.2, eps=1e-10, rate_decay=0.3)),
    (lion, Update("Lion", 0.01, decay=0.2, decoupled=True, beta1=0.9, beta2=0.99)),
]


def elements(weights: list[float]) -> Elements:
    nothing = np.zeros(5)
    return Elements(np.array(weights), nothing, nothing + 1, nothing, nothing, nothing)


@pytest.mark.parametrize(("by_hand", "update"), FORMS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_each_form_is_the_published_one(
    by_hand: Callable[..., float], update: Update, maximize: bool, shared: bool
) -> None:
    update = Update(**{**vars(update), "maximize": maximize})
    held, weights = elements(start()), start()
    if shared:  # one number for all elements
        held = held._replace(step=1.0, first=0.0, second=0.0, largest=0.0)
    states = [{"first": 0.0, "second": 0.0, "largest": 0.0} for _ in weights]
    for step in range(1, STEPS + 1):
        given = gradients(step)
        sign = -1.0 if maximize else 1.0
        weights = [by_hand(w, sign * g, s, step, update) for w, g, s in zip(weights, given, states, strict=True)]
        held, error = stepped(update, held._replace(gradient=np.array(given)), UNIT)
        assert held.weight.tolist() == pytest.approx(weights, rel=1e-12, abs=1e-15)
        assert np.broadcast_to(held.step, 5).tolist() == [step + 1.0] * 5
        assert bool((error > 0).all())


def some(n: int = 2000) -> Elements:
    drawn = np.random.default_rng(1)
    one = drawn.standard_normal(n)
    first, second = 1e-3 * drawn.standard_normal(n), 1e-6 * drawn.random(n)
    return Elements(0.05 * one, 1e-3 * drawn.standard_normal(n), one * 0 + 9, first, second, second)


def test_the_bound_of_adamw_is_a_few_units_of_the_weight_and_a_hundredth_of_the_update() -> None:
    old, update = some(), Update("Adam", 1e-3, decay=0.1, decoupled=True, beta1=0.9, beta2=0.999, eps=1e-8)
    new, error = stepped(update, old, UNIT)
    change = np.abs(new.weight - old.weight)
    assert float((error / (3.0 * UNIT * np.abs(old.weight) + 1e-2 * change + 1e-9)).max()) < 1.0
    assert float(np.median(change / error)) > 1000.0, "what is not applied is seen"


def test_a_sign_of_lion_that_rounding_may_turn_is_open() -> None:
    update, one = Update("Lion", 0.01, beta1=0.5, beta2=0.9), np.ones(5)
    _, error = stepped(update, elements(start())._replace(gradient=one, first=1e-9 - one), UNIT)
    assert bool((error >= 0.02).all())


@pytest.mark.parametrize(("by_hand", "update"), FORMS)
def test_every_mistake_explains_what_it_makes_and_never_what_is_right(by_hand: object, update: Update) -> None:
    old = some()
    right, bound = stepped(update, old, UNIT)
    assert float(np.median(bound)) < 3e-7
    for words, weight, error in [*mistakes(update, old, right.weight, UNIT)]:
        assert words in explanations(update, old, weight, UNIT)
        differs = bool((np.abs(weight - right.weight) > error).any())
        assert (words in explanations(update, old, right.weight, UNIT)) is not differs
        assert shows(words, update, old, right.weight, UNIT) is differs
    assert len({words for words, _ in variants(update)}) == len([*variants(update)])


@pytest.mark.parametrize("factor", [0.02, 0.5, 3.0, 50.0])
def test_a_factor_of_the_rate_is_named(factor: float) -> None:
    old, update = some(), Update("SGD", 0.1, beta1=0.9, nesterov=True)
    right, _ = stepped(update, old, UNIT)
    seen = old.weight + factor * (right.weight - old.weight)
    assert explanations(update, old, seen, UNIT)[0] == f"the rate is {factor:.3g} times the group's"


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_factor_is_as_uncertain_as_the_elements_that_show_it(factor: float) -> None:
    """Rounding has moved two of three alike elements up and one down: their median is none of the three's own."""
    one = np.ones(3)
    old, update = Elements(one, one, 1.0, 0.0, 0.0, 0.0), Update("SGD", 0.1)
    right, error = stepped(update, old, 2.0**-8)
    change, rounding = right.weight - old.weight, 0.9 * max(1.0, factor) * error
    seen = old.weight + factor * change + rounding * np.array([1.0, 1.0, -1.0])
    shown = factor + float((rounding / change)[0])
    assert explanations(update, old, seen, 2.0**-8) == [f"the rate is {shown:.3g} times the group's"]


def test_another_beta1_of_lion_is_named() -> None:
    old, update = some(), Update("Lion", 0.01, beta1=0.9, beta2=0.99)
    right, _ = stepped(replace(update, beta1=0.8), old, UNIT)
    assert explanations(update, old, right.weight, UNIT) == ["beta1 is 0.8 instead of 0.9"]


def test_a_coupled_decay_rounds_as_much_as_it_takes_from_the_weight() -> None:
    """It takes nearly all of the weight here, and fp32 rounds what it takes to more than what is left."""
    weight = np.random.default_rng(2).standard_normal(2000).astype(np.float32)
    update, nothing = Update("SGD", 1.0, decay=1.0 - 2.0**-12), np.zeros(2000)
    rounded = weight - np.float32(update.decay) * weight
    old = Elements(weight.astype(np.float64), nothing, 1.0, 0.0, 0.0, 0.0)
    right, error = stepped(update, old, UNIT)
    off = np.abs(right.weight - rounded)
    assert float((off / np.abs(right.weight)).max()) > 1000 * UNIT
    assert bool((off <= error).all())


def test_a_step_with_a_rate_of_0_shows_no_unknown_mistake() -> None:
    update, old = Update("SGD", 0.1), some()
    shown = [shows("of no list", one, old, old.weight, UNIT) for one in (update, replace(update, rate=0.0))]
    assert shown == [True, False]
