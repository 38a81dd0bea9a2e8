"""Decide when and on whom strikes what :mod:`inputs`, :mod:`aggregate` and :mod:`update` do wrong.

    one(from_on(scaled_gradient))       # one rank's gradient, from the strike's step on
    once(noisy_result)                  # every rank's aggregate, at the strike's step alone
    once(attempts(noisy_result, 2))     # and in the first repetition of that step's reduction

A *maker* is called once per training and rank with the strike and the rank, and returns what that rank does; the makers
of the three modules say what goes wrong, as if it did so at every step on every rank. Combinations can be pickled,
because faults travel to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

from ds_silent.drill.faults.injection import NOTHING, Collective, Injection, Strike, limited

Maker = Callable[[Strike, int], Injection]


def one(make: Maker) -> Maker:
    """Strike the strike's rank alone."""
    return partial(_one, make)


def once(make: Maker) -> Maker:
    """Strike at the strike's step alone."""
    return partial(_at, make)


def from_on(make: Maker) -> Maker:
    """Strike from the strike's step on."""
    return partial(_from, make)


def attempts(make: Maker, count: int | None = None) -> Maker:
    """Strike in the first ``count`` attempts to reduce a step's gradient, or in all; else the first alone is hit."""
    return partial(_attempts, make, count)


def both(first: Maker, second: Maker) -> Maker:
    """Let two things go wrong, in different places of the training."""
    return partial(_both, first, second)


def _one(make: Maker, strike: Strike, me: int) -> Injection:
    return make(strike, me) if me == strike.rank else NOTHING


def _at(make: Maker, strike: Strike, me: int) -> Injection:
    return limited(make(strike, me), lambda step: step == strike.step)


def _from(make: Maker, strike: Strike, me: int) -> Injection:
    return limited(make(strike, me), lambda step: step >= strike.step)


def _attempts(make: Maker, count: int | None, strike: Strike, me: int) -> Injection:
    injection = make(strike, me)
    hit = injection.reduction
    assert hit is not None

    def again(under_way: Collective) -> None:
        if count is None or under_way.attempt < count:
            hit(under_way)
        else:
            under_way.run()

    return replace(injection, repetition=again)


def _both(first: Maker, second: Maker, strike: Strike, me: int) -> Injection:
    one_, other = first(strike, me), second(strike, me)
    set_ = {f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) != getattr(NOTHING, f.name)}
    return replace(one_, **set_)
