"""What an optimizer's formula makes of some elements, in float64, and how far rounding may take the result from it.

    after, error = stepped(Update("Adam", rate=1e-3, decay=0.1, decoupled=True, beta1=0.9, beta2=0.999, eps=1e-8),
                           before, unit)
    wrong = (after.weight - seen).abs() > error
    explanations(update, before, seen, unit)     # ["no weight decay"]; empty where no known mistake explains it

Formulas as published and as torch documents them: SGD with momentum, dampening and Nesterov (Sutskever et al. 2013),
Adam (Kingma and Ba 2015) with amsgrad (Reddi et al. 2018), AdamW (Loshchilov and Hutter 2019), Adagrad (Duchi et al.
2011), Lion (Chen et al. 2023).

**The bound.** Let u be the coarsest unit roundoff of weight and state, and s that of scalars, which kernels hold in
fp32: s = min(u, 2^-24). To first order in u:

* a sum x + y is off by u |x + y|, after what x and y are off by. So the first moment m' is off by at most
  10 u (|m| + G), with G = |g| + decay |w| where the decay is coupled: kernels round differences, products and the sum,
  and some hold 1 - beta as the difference of two fp32 numbers, which is off by s;
* the second moment is a sum of positive terms: (4 u + s / (1 - beta2)) v', and 4 u (1 - beta2) |g'| G of a coupled
  gradient that cancels. Its root s' is off by (2 u + s / (1 - beta2)) s' + 2 u sqrt(1 - beta2) G, and by the root of
  the smallest normal number where g'^2 may be flushed to zero;
* 1 - beta^t is off by s t beta^t / (1 - beta^t) + s <= s / (1 - beta) + s, relatively;
* the new weight is rounded once, the decayed one once more, and its factor 1 - rate * decay is off by s.

Fused kernels divide and take roots approximately (2 to 4 units in the last place): 16 u instead of the 8 u of exactly
rounded operations. For AdamW in fp32 all this comes to some 1.5 units in the last place of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF

TINY = 2.0**-126  # the smallest normal number of fp32 and bf16: a square below it may be flushed to zero
_FACTORS = 1e-3, 1e3  # of the rate that are looked for
_BETA1, _BETA2 = (0.0, 0.8, 0.85, 0.9, 0.95), (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)

Kind = Literal["SGD", "Adam", "Adagrad", "Lion"]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Update:
    """The settings of one parameter group."""

    kind: Kind
    rate: float
    decay: float = 0.0
    decoupled: bool = False  # the decay: of the weight itself, not of the gradient
    maximize: bool = False
    beta1: float = 0.0  # of SGD: the momentum
    beta2: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    eps: float = 0.0
    eps_inside: bool = False  # the root: no published form has it there
    bias_correction: bool = True
    amsgrad: bool = False
    rate_decay: float = 0.0


class Elements(NamedTuple):
    """Some elements of a parameter, each (n,), or a number that all of them share."""

    weight: Numbers
    gradient: Numbers
    step: Numbers | float  # that is to be taken, from 1; of SGD: 1 where there is no momentum yet
    first: Numbers | float  # the first moment, or the momentum; 0 where there is none
    second: Numbers | float  # the second moment, or Adagrad's sum
    largest: Numbers | float  # of the second moments, for amsgrad


def stepped(update: Update, old: Elements, unit: float) -> tuple[Elements, Numbers]:
    """Return the elements behind one step, and how far rounding may take the weights from that, (n,).

    Args:
        unit: the coarsest unit roundoff of weight and state.
    """
    unit = unit + 2.0**-50  # what is computed here is rounded itself
    scalar = min(unit, UNIT_ROUNDOFF[torch.float32])
    weight, gradient = old.weight, -old.gradient if update.maximize else old.gradient
    size, kept = np.abs(gradient), weight
    if update.decay and update.decoupled:
        kept = weight * (1.0 - update.rate * update.decay)
    elif update.decay:
        gradient = gradient + update.decay * weight
        size = size + abs(update.decay) * np.abs(weight)
    act = {"SGD": _sgd, "Adam": _adam, "Adagrad": _adagrad, "Lion": _lion}[update.kind]
    new, change, error = act(update, old, gradient, size, unit, scalar)
    after = kept - change
    error = error + unit * np.abs(after) + TINY
    if update.decay and update.decoupled:
        error = error + (unit + scalar) * np.abs(weight)
    return new._replace(weight=after, step=old.step + 1), error


_Change = tuple[Elements, Numbers, Numbers]
"""The new state, what is subtracted from the weight, and how far that may be off."""


def _sgd(update: Update, old: Elements, gradient: Numbers, size: Numbers, unit: float, scalar: float) -> _Change:
    momentum, new, change = update.beta1, old, gradient
    if momentum:
        begun = old.step > 1
        first = np.where(begun, momentum * old.first + (1.0 - update.dampening) * gradient, gradient)
        held = np.where(begun, abs(momentum) * np.abs(old.first) + abs(1.0 - update.dampening) * size, size)
        new, change = old._replace(first=first), gradient + momentum * first if update.nesterov else first
        size = size + abs(momentum) * held if update.nesterov else held
    return new, update.rate * change, 8.0 * unit * abs(update.rate) * size


def _adam(update: Update, old: Elements, gradient: Numbers, size: Numbers, unit: float, scalar: float) -> _Change:
    beta1, beta2 = update.beta1, update.beta2
    first = beta1 * old.first + (1.0 - beta1) * gradient
    second = beta2 * old.second + (1.0 - beta2) * gradient * gradient
    largest = np.maximum(old.largest, second) if update.amsgrad else old.largest
    correction1, correction2 = (1.0 - beta1**old.step, 1.0 - beta2**old.step) if update.bias_correction else (1.0, 1.0)
    held = largest if update.amsgrad else second
    inside = held / correction2 + (update.eps if update.eps_inside else 0.0)
    root = np.sqrt(inside) + (0.0 if update.eps_inside else update.eps)
    change = update.rate / correction1 * first / root
    # how far each may be off
    of_first = 10.0 * unit * (np.abs(old.first) + size)
    of_root = (2.0 * unit + scalar / (1.0 - beta2)) * np.sqrt(held) + 2.0 * unit * math.sqrt(1.0 - beta2) * size
    of_root = (of_root + math.sqrt(TINY)) / np.sqrt(correction2)
    relative = 16.0 * unit + scalar * (1.0 / (1.0 - beta1) + 1.0 / (1.0 - beta2)) + of_root / root
    error = np.abs(change) * relative + abs(update.rate) / correction1 / root * of_first
    return old._replace(first=first, second=second, largest=largest), change, error


def _adagrad(update: Update, old: Elements, gradient: Numbers, size: Numbers, unit: float, scalar: float) -> _Change:
    total = old.second + gradient * gradient
    rate = update.rate / (1.0 + (old.step - 1.0) * update.rate_decay)
    root = np.sqrt(total) + update.eps
    change = rate * gradient / root
    of_root = 3.0 * unit * np.sqrt(total) + 2.0 * unit * size + math.sqrt(TINY)
    error = np.abs(change) * (16.0 * unit + of_root / root) + np.abs(rate) / root * 2.0 * unit * size
    return old._replace(second=total), change, error


def _lion(update: Update, old: Elements, gradient: Numbers, size: Numbers, unit: float, scalar: float) -> _Change:
    mixed = update.beta1 * old.first + (1.0 - update.beta1) * gradient
    first = update.beta2 * old.first + (1.0 - update.beta2) * gradient
    open_sign = np.abs(mixed) <= 10.0 * unit * (np.abs(old.first) + size) + TINY
    error = np.where(open_sign, 2.0, 2.0 * unit) * abs(update.rate)
    return old._replace(first=first), update.rate * np.sign(mixed), error


def steps_without_gradient(corrected: Sequence[Elements]) -> int:
    """Return how many steps an optimizer has counted before its first one with a gradient.

    Args:
        corrected: what all its tensors are before that step.
    """
    if any(np.any(old.first) for old in corrected) or not any(np.any(old.gradient) for old in corrected):
        return 0
    return int(min(float(np.min(old.step)) for old in corrected)) - 1


def late_correction(update: Update, step: int, late: int) -> float:
    """Return how many times the right one Adam's update is if its count is ``late`` steps ahead, epsilon aside."""
    of_first = (1.0 - update.beta1**step) / (1.0 - update.beta1 ** (step + late))
    return of_first * math.sqrt((1.0 - update.beta2 ** (step + late)) / (1.0 - update.beta2**step))


# -- what is not as the formula says -----------------------------------------------------------------------------------


def explanations(update: Update, old: Elements, seen: Numbers, unit: float) -> list[str]:
    """Return every known mistake that explains all elements up to rounding, the plainest first."""
    found = mistakes(update, old, seen, unit)
    return [words for words, weight, error in found if bool((np.abs(weight - seen) <= error).all())]


def shows(words: str, update: Update, old: Elements, seen: Numbers, unit: float) -> bool:
    """Tell whether that mistake would be seen in these elements; what no list has always would."""
    for name, weight, error in mistakes(update, old, seen, unit):
        if name == words:
            return bool((np.abs(weight - seen) > error).any())
    return update.rate != 0.0


def mistakes(update: Update, old: Elements, seen: Numbers, unit: float) -> Iterator[tuple[str, Numbers, Numbers]]:
    """Yield each mistake in words, with the weights that it leaves and how far rounding may take them from that."""
    right, error = stepped(update, old, unit)
    yield "the update was not applied", old.weight, unit * np.abs(old.weight)
    twice, more = stepped(update, right, unit)
    yield "the update was applied twice", twice.weight, error + more
    for words, other in variants(update):
        after, bound = stepped(other, old, unit)
        yield words, after.weight, bound
    for words, by in (("before", -1.0), ("after", 1.0)) if update.kind == "Adam" and update.bias_correction else ():
        if np.min(old.step) + by >= 1.0:
            after, bound = stepped(update, old._replace(step=old.step + by), unit)
            yield f"the bias correction is that of the step {words}", after.weight, bound
    change, moved = right.weight - old.weight, seen - old.weight
    known = np.abs(change) > 4.0 * error
    if bool(known.any()):
        factor = float(np.median(moved[known] / change[known]))
        if _FACTORS[0] < factor < _FACTORS[1] and f"{factor:.3g}" != "1":
            # the factor itself is as uncertain as the best known element
            doubt = float((error[known] / np.abs(change[known])).min()) * max(1.0, factor)
            words = f"the rate is {factor:.3g} times the group's"
            yield words, old.weight + factor * change, error * max(1.0, factor) + np.abs(change) * doubt


def variants(update: Update) -> Iterator[tuple[str, Update]]:
    """Yield mistakes that are settings: in words, and as an update."""
    momentum = "momentum" if update.kind == "SGD" else "beta1"
    if update.decay:
        yield "no weight decay", replace(update, decay=0.0)
        if update.kind == "Adam":
            other = "coupled with the gradient" if update.decoupled else "decoupled from the gradient"
            yield f"the weight decay is {other}", replace(update, decoupled=not update.decoupled)
    if update.kind == "Adam":
        other = "no bias correction" if update.bias_correction else "a bias correction that is switched off"
        yield other, replace(update, bias_correction=not update.bias_correction)
        yield "epsilon inside the root", replace(update, eps_inside=True)
        yield "epsilon is not added", replace(update, eps=0.0)
    if update.kind == "SGD" and update.beta1:
        yield "momentum is not applied", replace(update, beta1=0.0)
        yield "dampening is not applied", replace(update, dampening=0.0)
        other = "Nesterov's form is not used" if update.nesterov else "Nesterov's form is used"
        yield other, replace(update, nesterov=not update.nesterov)
    yield "the sign of the gradient is turned", replace(update, maximize=not update.maximize)
    if update.kind in ("Adam", "Lion") or update.beta1:
        for value in _BETA1:
            if value != update.beta1:
                yield f"{momentum} is {value:g} instead of {update.beta1:g}", replace(update, beta1=value)
    if update.kind == "Adam":  # Lion's has no part in this step's weights
        for value in _BETA2:
            if value != update.beta2:
                yield f"beta2 is {value:g} instead of {update.beta2:g}", replace(update, beta2=value)
