"""Make injections of what goes wrong in the reduction: what a rank puts in, the collective itself, what comes out.

    injection = dropped_bucket(target, me=2)
    injection.reduction(collective)            # runs the collective, or not, and corrupts what goes in or comes out

Makers as in :mod:`ds_silent.drill.faults.injection`: on all ranks goes wrong what a wrong algorithm or configuration
does, on one what its link or memory does. All of it is behind the capture of the local gradients: the ranks' own
gradients are healthy, and only what becomes of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.faults.injection import (
    Collective,
    Injection,
    Target,
    add_noise,
    changing,
    flip_bit,
    top_exponent_bit,
)

UNREDUCED = "position.weight"  # a whole layer, in one owner's partition


def noise_of(target: Target, me: int | None = None) -> Callable[[Tensor], None]:
    """Adds noise of ``target.size`` times the norm: of rank ``me`` alone, or the same on all."""
    generator = torch.Generator().manual_seed(104_729 if me is None else 7919 + me)
    return lambda values: add_noise(values, target.size, generator)


# -- what goes into the reduction ------------------------------------------------------------------------------------


def weighted_contribution(weight: float, target: Target, me: int) -> Injection:
    def send(under_way: Collective) -> None:
        (under_way.tensor if under_way.sent is None else under_way.sent).mul_(weight)
        under_way.run()

    return Injection(reduction=send)


# the last micro-batch's gradient is computed, and never accumulated
missing_micro_batch = changing(
    captured=lambda target, name, gradient, last, step: torch.zeros_like(gradient) if last else None
)


# -- the reduction itself --------------------------------------------------------------------------------------------


# the collective is never called for the first bucket: each rank goes on with its own gradient
dropped_bucket = changing(reduction=lambda target, under_way: under_way.run() if under_way.bucket else None)
unreduced_parameter = changing(left_out=lambda target, name, step: name == UNREDUCED)


def wrong_group(target: Target, me: int) -> Injection:
    """The ranks' first and second half reduce among themselves."""
    halves: list[Any] = []

    def reduce_half(under_way: Collective) -> None:
        if not halves:  # every rank gets here at the same collective, and makes both groups
            middle = target.ranks // 2
            halves.extend(dist.new_group(list(ranks)) for ranks in (range(middle), range(middle, target.ranks)))
        half = halves[0 if me < target.ranks // 2 else 1]
        if under_way.among is None:
            dist.all_reduce(under_way.tensor, group=half)
        else:
            under_way.among(half)

    return Injection(reduction=reduce_half)


# -- what comes out --------------------------------------------------------------------------------------------------


def _result(under_way: Collective, change: Callable[[Tensor], object]) -> None:
    """Run the collective, then change what it has brought."""
    under_way.run()
    change(under_way.tensor)


forgotten_division = changing(
    reduction=lambda target, under_way: _result(under_way, lambda values: values.mul_(float(target.ranks)))
)


def noisy_result(target: Target, me: int) -> Injection:
    """The same noise on all ranks."""
    return Injection(reduction=partial(_result, change=noise_of(target)))


def noisy_result_of_its_own(target: Target, me: int) -> Injection:
    return Injection(reduction=partial(_result, change=noise_of(target, me)))


# the top exponent bit of nine elements of every bucket
flipped_bits = changing(reduction=lambda target, under_way: _result(under_way, flip_some))
# what an ordered reduction adds up has arrived with the same bits flipped
damaged_pieces = changing(pieces=lambda target, under_way: _result(under_way, flip_some))


def flip_some(values: Tensor) -> None:
    """The top exponent bit of nine elements: so far apart that under ZeRO some are in the rank's own partition."""
    for place in range(0, values.numel(), max(1, values.numel() // 9)):
        flip_bit(values, place, top_exponent_bit(values))


# Some elements of every aggregate have the wrong sign, which leaves the gradient's norm alone: DeepSpeed clips by the
# ranks' mean of it in stage 0, so noise on one rank would change what the healthy ones apply, and no repair of that
# rank could undo it.
wrong_signs = changing(reduction=lambda target, under_way: _result(under_way, lambda values: values[::50].neg_()))


def zeroed_tail(target: Target, me: int) -> Injection:
    """The last ``size`` of the first bucket comes back as zeros."""

    def zero(under_way: Collective) -> None:
        under_way.run()
        if under_way.bucket == 0:
            under_way.tensor[-int(target.size * len(under_way.tensor)) :].zero_()

    return Injection(reduction=zero)


def flipped_bit(bit: int, target: Target, me: int) -> Injection:
    """One bit (0 is the lowest) of the first bucket's largest element; its size is known afterwards.

    Where each rank gets a piece of its own, it is the largest of the first rank's: else there would be one per rank.
    """
    change, squared = 0.0, 0.0

    def flip(under_way: Collective) -> None:
        nonlocal change, squared
        under_way.run()
        if not under_way.last:
            return
        values = under_way.tensor
        squared += _squared(under_way)
        if under_way.bucket == 0 and bit < 8 * values.element_size() and not (under_way.scattered and me):
            place = int(values.abs().argmax())
            before = float(values[place])
            flip_bit(values, place, bit)
            change = abs(float(values[place]) - before)

    return Injection(reduction=flip, change=lambda: change / squared**0.5 if squared > 0.0 else None)


def _squared(under_way: Collective) -> float:
    """Of the norm of a bucket's result. A collective where each rank has a piece of it."""
    total = under_way.tensor.double().square().sum()
    if under_way.scattered:
        total = total.float()
        dist.all_reduce(total)
    return float(total)


# -- what is left of the step before: these look at the target's step themselves -------------------------------------


def stale_bucket(target: Target, me: int) -> Injection:
    """The first bucket's result is the one of the step before, for good: a buffer that nobody fills any more."""
    kept: dict[tuple[int, int], Tensor] = {}

    def reduce(under_way: Collective) -> None:
        under_way.run()
        if under_way.bucket != 0:
            return
        if under_way.step == target.step - 1:
            kept[under_way.place] = under_way.tensor.clone()
        if under_way.step >= target.step:
            under_way.tensor.copy_(kept[under_way.place])

    return Injection(reduction=reduce)


def partition_not_cleared(target: Target, me: int) -> Injection:
    """Each bucket's result is added to what the step before has left in the optimizer's partition."""
    left: dict[tuple[int, int], Tensor] = {}

    def reduce(under_way: Collective) -> None:
        under_way.run()
        before = left.get(under_way.place)
        if before is not None and under_way.step >= target.step:
            under_way.tensor.add_(before)
        left[under_way.place] = under_way.tensor.clone()

    return Injection(reduction=reduce)


# ``zero_grad`` does nothing from the step before on
gradients_not_cleared = changing(kept=lambda target, step: step >= target.step - 1)
