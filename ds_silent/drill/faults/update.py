"""Make injections behind the reduction: what the optimizer gets, the weights that it leaves, the repair of both.

    injection = wrong_factor(target, me=2)
    injection.update(optimizer, run, step=21)  # the optimizer gets a multiple of the gradient
    injection = damaged_repair(1, target, me=2)
    injection.repair(values, step=21)          # what a collective of a repair has brought to this rank

Makers as in :mod:`ds_silent.drill.faults.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.drill.faults.aggregate import noise_of
from ds_silent.drill.faults.injection import (
    NOTHING,
    Collective,
    Injection,
    Memory,
    Target,
    changing,
    flip_bit,
    local_of,
    lowest_exponent_bit,
)

# -- between the reduction and the weights -----------------------------------------------------------------------------


def wrong_factor(target: Target, me: int) -> Injection:
    """The optimizer gets ``size`` times the gradient: a loss scale or a clip factor that is off."""
    return _applied(lambda gradient: gradient.mul_(target.size))


def noisy_gradient(target: Target, me: int) -> Injection:
    """The optimizer gets the gradient with noise of ``size`` of its norm."""
    return _applied(noise_of(target))


def noisy_gradient_of_its_own(target: Target, me: int) -> Injection:
    """The same, and another noise on each rank."""
    return _applied(noise_of(target, me))


def _applied(change: Callable[[Tensor], object]) -> Injection:
    def update(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                held = local_of(parameter.grad)
                if held is not None and held.numel():
                    change(held)
        return run()

    return Injection(update=update)


# the optimizer does nothing
skipped = changing(update=lambda target, optimizer, run, step: None)


def no_majority(target: Target, me: int) -> Injection:
    """Half of the ranks skip an update; of an odd number, one more goes another way, so that neither half prevails."""
    place, half = (me - target.rank) % target.ranks, target.ranks // 2
    if place < half:
        return skipped(target, me)
    return noisy_gradient(target, me) if place == 2 * half else NOTHING


# -- replicas ----------------------------------------------------------------------------------------------------------


def weight_bit(target: Target, me: int) -> Injection:
    """One bit of one weight, as the optimizer leaves it.

    In bf16 the fp32 master is hit, at the lowest bit that reaches the bf16 weight: a flip in that weight itself would
    be overwritten by the next update.
    """
    bit = 16 if target.bf16 else 0
    return Injection(updated=lambda module, optimizer, step: flip_bit(_weights(optimizer, 0).detach().view(-1), 0, bit))


def frozen_bit(module: nn.Module, optimizer: Any, step: int) -> None:
    """One bit of a parameter that no optimizer ever writes."""
    flip_bit(module.get_parameter("rescale.shift").view(-1), 0, 6)


def buffer_bit(module: nn.Module, optimizer: Any, step: int) -> None:
    flip_bit(module.get_buffer("rescale.gain").view(-1), 0, 6)


def halved_moment(module: nn.Module, optimizer: Any, step: int) -> None:
    """Twice or half of one running mean: a lower bit would be forgotten before the replicas are compared."""
    _flip_moment(optimizer, 0, None)


def moment_bit(module: nn.Module, optimizer: Any, step: int) -> None:
    """The lowest bit of one running mean."""
    _flip_moment(optimizer, -1, 0)


def _flip_moment(optimizer: Any, parameter: int, bit: int | None) -> None:
    """None: the lowest bit of the exponent."""
    moments = optimizer.state[_weights(optimizer, parameter)]["exp_avg"].view(-1)
    flip_bit(moments, int(moments.abs().argmax()), lowest_exponent_bit(moments) if bit is None else bit)


def _weights(optimizer: Any, number: int) -> Tensor:
    weights: Tensor = optimizer.param_groups[0]["params"][number]
    return weights


def in_update(change: Memory, target: Target, me: int) -> Injection:
    """``change`` while the framework steps: replicas are compared with it before the next forward."""
    return Injection(updated=torch.no_grad()(change))


def in_memory(change: Memory, target: Target, me: int) -> Injection:
    """``change`` when all of the step is over."""
    return Injection(afterwards=torch.no_grad()(change))


def bits_of_two(target: Target, me: int) -> Injection:
    """One bit of a weight of one rank, and of another tensor of its neighbour."""
    if me == target.rank:
        return weight_bit(target, me)
    return in_update(moment_bit, target, me) if me == target.partner else NOTHING


def stale_weights(target: Target, me: int) -> Injection:
    """The old weights are kept in the piece that another rank sends."""

    def gather(under_way: Collective) -> None:
        piece = _piece(under_way.tensor, target)
        before = piece.clone()
        under_way.run()
        piece.copy_(before)

    return Injection(gathering=gather)


def corrupted_weights(target: Target, me: int) -> Injection:
    """One bit of what arrives of the updated weights is wrong: a bad memory cell."""

    def gather(under_way: Collective) -> None:
        under_way.run()
        flip_bit(_piece(under_way.tensor, target), 0, 6)

    return Injection(gathering=gather)


def _piece(gathered: Tensor, target: Target) -> Tensor:
    """The partner's, of the whole: a rank's own piece never travels."""
    size = len(gathered) // target.ranks
    return gathered[target.partner * size : (target.partner + 1) * size]


# -- the repair itself -------------------------------------------------------------------------------------------------


def damaged_repair(times: int | None, target: Target, me: int) -> Injection:
    """A wrong bit in what the first ``times`` collectives of repairs bring, or all of them."""
    left = times

    def arrive(values: Tensor, step: int) -> None:
        nonlocal left
        if left != 0:
            left = None if left is None else left - 1
            flip_bit(values, 0, 3)

    return Injection(repair=arrive)
