"""Faults that a response must undo, each in one step, and faults that also hit the repair itself.

    injection = twice(strike, me=2)
    injection.repetition(collective)           # a repeated reduction, collective.attempt counts from 1
    injection.repair(values, step)             # what a collective of the repair has brought to this rank

The makers of :mod:`ds_silent.drill.faults.reduction` strike for good or at one step; here everything passes, unless
its name says otherwise, because only what passes can be repaired without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_silent.drill.deepspeed.seams import Collective
from ds_silent.drill.faults.inputs import NOTHING, Injection, Strike
from ds_silent.drill.faults.reduction import flip_bit

Change = Callable[[Tensor], None]


# -- the reduction -----------------------------------------------------------------------------------------------------


def burst(strike: Strike, me: int) -> Injection:
    """Noise of ``size`` times each bucket's norm, the same on all ranks; the repetition is clean."""
    return Injection(reduction=_at(strike, _after(_noise(strike))))


def burst_twice(strike: Strike, me: int) -> Injection:
    """The first repetition is hit too."""
    hit = _at(strike, _after(_noise(strike)))
    return Injection(reduction=hit, repetition=lambda again: hit(again) if again.attempt == 1 else again.run())


def burst_always(strike: Strike, me: int) -> Injection:
    """Every attempt of every step is hit from the first step on."""
    hit = _after(_noise(strike))

    def always(under_way: Collective) -> None:
        if under_way.step >= strike.step:
            hit(under_way)
        else:
            under_way.run()

    return Injection(reduction=always, repetition=always)


def flips_one_rank(strike: Strike, me: int) -> Injection:
    """The top exponent bit of nine elements of every bucket, as one rank receives it."""
    return _alone(strike, me, _after(_flips))


def missing_contribution(strike: Strike, me: int) -> Injection:
    """One rank sends zeros."""

    def send(under_way: Collective) -> None:
        under_way.tensor.zero_()
        under_way.run()

    return _alone(strike, me, send)


def dropped_bucket(strike: Strike, me: int) -> Injection:
    """The collective of the first bucket is never called: each rank goes on with its own gradient."""

    def drop(under_way: Collective) -> None:
        if under_way.bucket != 0:
            under_way.run()

    return Injection(reduction=_at(strike, drop))


def damaged_pieces(strike: Strike, me: int) -> Injection:
    """What one rank adds up in an ordered reduction has arrived damaged."""
    return Injection(pieces=_at(strike, _after(_flips))) if me == strike.rank else NOTHING


def _alone(strike: Strike, me: int, change: Callable[[Collective], None]) -> Injection:
    return Injection(reduction=_at(strike, change)) if me == strike.rank else NOTHING


def _at(strike: Strike, change: Callable[[Collective], None]) -> Callable[[Collective], None]:
    """``change`` at the fault's step; the plain collective before and after."""
    return lambda under_way: change(under_way) if under_way.step == strike.step else under_way.run()


def _after(change: Change) -> Callable[[Collective], None]:
    def reduce(under_way: Collective) -> None:
        under_way.run()
        change(under_way.tensor)

    return reduce


def _noise(strike: Strike) -> Change:
    generator = torch.Generator().manual_seed(104_729)  # the same numbers on all ranks

    def add(values: Tensor) -> None:
        noise = torch.randn(values.shape, generator=generator)
        size = strike.size * float(values.float().norm()) / float(noise.norm())
        values.add_((noise * size).to(values))

    return add


def _flips(values: Tensor) -> None:
    """Spread over the bucket, so that under ZeRO some are in the rank's own partition."""
    for place in range(0, values.numel(), max(1, values.numel() // 9)):
        flip_bit(values, place, 8 * values.element_size() - 2)


# -- replicas ----------------------------------------------------------------------------------------------------------


def skipped_update(strike: Strike, me: int) -> Injection:
    """One rank's optimizer does nothing."""
    return _skipping(strike) if me == strike.rank else NOTHING


def _skipping(strike: Strike) -> Injection:
    return Injection(update=lambda optimizer, run, step: None if step == strike.step else run())


def noisy_update(strike: Strike, me: int) -> Injection:
    """Noise of ``size`` of its norm between one rank's reduction and its optimizer."""
    add = _noise(strike)

    def noisy(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        for gradient in _gradients(optimizer) if step == strike.step else ():
            add(gradient)
        return run()

    return Injection(update=noisy) if me == strike.rank else NOTHING


def _gradients(optimizer: Any) -> Iterable[Tensor]:
    held = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return (gradient for gradient in held if gradient is not None)


def wrong_signs(strike: Strike, me: int) -> Injection:
    """One rank receives some elements of every aggregate with the wrong sign, from the first step on.

    Signs leave the gradient's norm alone. DeepSpeed clips by the ranks' mean of it in stage 0, so that noise on one
    rank would change what the healthy ones apply, and no repair of that rank could undo it.
    """

    def receive(under_way: Collective) -> None:
        under_way.run()
        if under_way.step >= strike.step:
            under_way.tensor[::50].neg_()

    return Injection(reduction=receive) if me == strike.rank else NOTHING


def changed_weight(strike: Strike, me: int) -> Injection:
    """One bit of one weight; in bf16 of its fp32 master, where it reaches the weight."""
    return _changed(strike, me, lambda engine: flip_bit(_first(engine), 0, 16 if strike.bf16 else 0))


def changed_frozen_parameter(strike: Strike, me: int) -> Injection:
    """One bit of a parameter that no optimizer ever writes."""
    return _changed(strike, me, lambda engine: flip_bit(engine.module.rescale.shift.view(-1), 0, 6))


def changed_buffer(strike: Strike, me: int) -> Injection:
    """One bit of a buffer."""
    return _changed(strike, me, lambda engine: flip_bit(engine.module.rescale.gain.view(-1), 0, 6))


def changed_optimizer_state(strike: Strike, me: int) -> Injection:
    """One bit of a running mean."""
    return _changed(strike, me, _change_moments)


def changed_on_two_ranks(strike: Strike, me: int) -> Injection:
    """One bit of a weight of one rank, and of another tensor of its neighbour."""
    if me == strike.rank:
        return changed_weight(strike, me)
    return _changed(replace(strike, rank=strike.partner), me, _change_moments)


def no_majority(strike: Strike, me: int) -> Injection:
    """Half of the ranks skip an update; of an odd number, one more goes another way, so that neither half prevails."""
    place, half = (me - strike.rank) % strike.ranks, strike.ranks // 2
    if place < half:
        return _skipping(strike)
    if place == 2 * half:
        return noisy_update(replace(strike, rank=me), me)
    return NOTHING


def _first(engine: Any) -> Tensor:
    weight: Tensor = engine.basic_optimizer.param_groups[0]["params"][0].detach()
    return weight.view(-1)


def _change_moments(engine: Any) -> None:
    optimizer = engine.basic_optimizer
    moments = optimizer.state[optimizer.param_groups[0]["params"][-1]]["exp_avg"].view(-1)
    flip_bit(moments, int(moments.abs().argmax()), 0)


def _changed(strike: Strike, me: int, change: Callable[[Any], None]) -> Injection:
    """``change(engine)`` while the optimizer of the rank steps: what it leaves is compared before the next forward."""
    engines: list[Any] = []

    def update(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        result = run()
        if step == strike.step:
            with torch.no_grad():
                change(engines[0])
        return result

    return Injection(engine=engines.append, update=update) if me == strike.rank else NOTHING


# -- the repair itself -------------------------------------------------------------------------------------------------


def repair_damaged(strike: Strike, me: int) -> Injection:
    """A skipped update; then what the first collective of its repair brings to the same rank has a wrong bit."""
    return _damaged(strike, 1) if me == strike.rank else NOTHING


def repair_always_damaged(strike: Strike, me: int) -> Injection:
    """The same, for good."""
    return _damaged(strike, None) if me == strike.rank else NOTHING


def _damaged(strike: Strike, times: int | None) -> Injection:
    left = times

    def arrive(values: Tensor, step: int) -> None:
        nonlocal left
        if step >= strike.step and left != 0:
            left = None if left is None else left - 1
            flip_bit(values, 0, 3)

    return replace(_skipping(strike), repair=arrive)
