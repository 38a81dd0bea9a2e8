"""Make injections behind the capture: the reduction, what the optimizer gets, the weights that it leaves, repairs.

    injection = dropped_bucket(target, 2)
    injection.reduction(collective)            # runs the collective, or not, and corrupts what goes in or comes out
    injection = wrong_factor(target, 2)
    injection.update(optimizer, run, step=21)  # the optimizer gets a multiple of the gradient
    injection = damaged_repair(1, target, 2)
    injection.repair(values, step=21)          # what a collective of a repair has brought to this rank

Makers as in :mod:`ds_silent.drill.faults.injection`: on all ranks goes wrong what a wrong algorithm or configuration
does, on one what its link or memory does. The ranks' own gradients are healthy; only what becomes of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.device import local_of
from ds_silent.drill.faults.injection import (
    NOTHING,
    Collective,
    Injection,
    Maker,
    Memory,
    Target,
    acting,
    add_noise,
    changing,
    flip_bit,
    lowest_exponent_bit,
    top_exponent_bit,
)

UNREDUCED = "position.weight"  # a whole layer, in one owner's partition
Change = Callable[[Tensor], object]


def noise_of(target: Target, seed: int = 104_729) -> Change:
    """Adds noise of ``target.size`` times the norm, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return lambda values: add_noise(values, target.size, generator)


def noise_of_its_own(target: Target) -> Change:
    """The same, of the target's rank."""
    return noise_of(target, 7919 + target.rank)


# -- what goes into the reduction ------------------------------------------------------------------------------------


@acting("reduction")
def weighted_contribution(weight: float, target: Target, under_way: Collective) -> None:
    (under_way.tensor if under_way.sent is None else under_way.sent).mul_(weight)
    under_way.run()


# the last micro-batch's gradient is computed, and never accumulated
missing_micro_batch = changing(
    captured=lambda target, name, gradient, last, step: torch.zeros_like(gradient) if last else None
)

# -- the reduction itself --------------------------------------------------------------------------------------------

# the collective is never called for the first bucket: each rank goes on with its own gradient
dropped_bucket = changing(reduction=lambda target, under_way: under_way.run() if under_way.bucket else None)
unreduced_parameter = changing(left_out=lambda target, name, step: name == UNREDUCED)


@acting("reduction", memory=lambda target: [])
def wrong_group(target: Target, halves: list[Any], under_way: Collective) -> None:
    """The ranks' first and second half reduce among themselves."""
    middle = target.ranks // 2
    if not halves:  # every rank gets here at the same collective, and makes both groups
        halves.extend(dist.new_group(list(ranks)) for ranks in (range(middle), range(middle, target.ranks)))
    half = halves[0 if dist.get_rank() < middle else 1]
    if under_way.among is None:
        dist.all_reduce(under_way.tensor, group=half)
    else:
        under_way.among(half)


# -- what comes out --------------------------------------------------------------------------------------------------


def _result(memory: Callable[[Target], Change], place: str = "reduction") -> Maker:
    """Run the collective, then change what it has brought, by what ``memory`` makes for the training."""

    @acting(place, memory)
    def changed(target: Target, change: Change, under_way: Collective) -> None:
        under_way.run()
        change(under_way.tensor)

    return changed


def flip_some(values: Tensor) -> None:
    """The top exponent bit of nine elements: so far apart that under ZeRO some are in the rank's own partition."""
    for place in range(0, values.numel(), max(1, values.numel() // 9)):
        flip_bit(values, place, top_exponent_bit(values))


forgotten_division = _result(lambda target: lambda values: values.mul_(float(target.ranks)))
noisy_result = _result(noise_of)
noisy_result_of_its_own = _result(noise_of_its_own)
flipped_bits = _result(lambda target: flip_some)  # of every bucket
damaged_pieces = _result(lambda target: flip_some, "pieces")  # what an ordered reduction adds up
# Some elements of every aggregate have the wrong sign, which leaves the gradient's norm alone: DeepSpeed clips by the
# ranks' mean of it in stage 0, so noise on one rank would change what the healthy ones apply, and no repair of that
# rank could undo it.
wrong_signs = _result(lambda target: lambda values: values[::50].neg_())


@acting("reduction")
def zeroed_tail(target: Target, under_way: Collective) -> None:
    """The last ``size`` of the first bucket comes back as zeros."""
    under_way.run()
    if under_way.bucket == 0:
        under_way.tensor[-int(target.size * len(under_way.tensor)) :].zero_()


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
        norm = values.double().square().sum()
        if under_way.scattered:  # this rank has a piece of the bucket
            norm = norm.float()
            dist.all_reduce(norm)
        squared += float(norm)
        if under_way.bucket == 0 and bit < 8 * values.element_size() and not (under_way.scattered and me):
            place = int(values.abs().argmax())
            before = float(values[place])
            flip_bit(values, place, bit)
            change = abs(float(values[place]) - before)

    return Injection(reduction=flip, change=lambda: change / squared**0.5 if squared > 0.0 else None)


# -- what is left of the step before: these look at the target's step themselves -------------------------------------

Kept = dict[tuple[int, int], Tensor]
"""Results, by the place of their collective."""


@acting("reduction", memory=lambda target: {})
def stale_bucket(target: Target, kept: Kept, under_way: Collective) -> None:
    """The first bucket's result is the one of the step before, for good: a buffer that nobody fills any more."""
    under_way.run()
    if under_way.bucket != 0:
        return
    if under_way.step == target.step - 1:
        kept[under_way.place] = under_way.tensor.clone()
    if under_way.step >= target.step:
        under_way.tensor.copy_(kept[under_way.place])


@acting("reduction", memory=lambda target: {})
def partition_not_cleared(target: Target, left: Kept, under_way: Collective) -> None:
    """Each bucket's result is added to what the step before has left in the optimizer's partition."""
    under_way.run()
    before = left.get(under_way.place)
    if before is not None and under_way.step >= target.step:
        under_way.tensor.add_(before)
    left[under_way.place] = under_way.tensor.clone()


# ``zero_grad`` does nothing from the step before on
gradients_not_cleared = changing(kept=lambda target, step: step >= target.step - 1)

# -- between the reduction and the weights -----------------------------------------------------------------------------


def _applied(memory: Callable[[Target], Change]) -> Maker:
    """The optimizer gets what the function that ``memory`` makes for the training has made of the gradient."""

    @acting("update", memory)
    def update(target: Target, change: Change, optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                held = local_of(parameter.grad)
                if held is not None and held.numel():
                    change(held)
        return run()

    return update


wrong_factor = _applied(lambda target: lambda gradient: gradient.mul_(target.size))  # a loss scale that is off
noisy_gradient = _applied(noise_of)
noisy_gradient_of_its_own = _applied(noise_of_its_own)
skipped = changing(update=lambda target, optimizer, run, step: None)


def no_majority(target: Target, me: int) -> Injection:
    """Half of the ranks skip an update; of an odd number, one more goes another way, so that neither half prevails."""
    place, half = (me - target.rank) % target.ranks, target.ranks // 2
    if place < half:
        return skipped(target, me)
    return noisy_gradient(target, me) if place == 2 * half else NOTHING


# -- replicas ----------------------------------------------------------------------------------------------------------


@acting("updated")
def weight_bit(target: Target, module: nn.Module, optimizer: Any, step: int) -> None:
    """One bit of one weight, as the optimizer leaves it.

    In bf16 the fp32 master is hit, at the lowest bit that reaches the bf16 weight: a flip in that weight itself would
    be overwritten by the next update.
    """
    flip_bit(_weights(optimizer, 0).detach().view(-1), 0, 16 if target.bf16 else 0)


def frozen_bit(module: nn.Module, optimizer: Any, step: int) -> None:
    """One bit of a parameter that no optimizer ever writes."""
    flip_bit(module.get_parameter("rescale.shift").view(-1), 0, 6)


def buffer_bit(module: nn.Module, optimizer: Any, step: int) -> None:
    flip_bit(module.get_buffer("rescale.gain").view(-1), 0, 6)


def halved_moment(module: nn.Module, optimizer: Any, step: int) -> None:
    """Twice or half of one running mean: a lower bit would be forgotten before the replicas are compared."""
    _flip_moment(optimizer, 0, lowest_exponent_bit)


def moment_bit(module: nn.Module, optimizer: Any, step: int) -> None:
    """The lowest bit of one running mean."""
    _flip_moment(optimizer, -1, lambda moments: 0)


def _flip_moment(optimizer: Any, parameter: int, bit_of: Callable[[Tensor], int]) -> None:
    moments = optimizer.state[_weights(optimizer, parameter)]["exp_avg"].view(-1)
    flip_bit(moments, int(moments.abs().argmax()), bit_of(moments))


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


@acting("gathering")
def stale_weights(target: Target, under_way: Collective) -> None:
    """The old weights are kept in the piece that another rank sends."""
    piece = _piece(under_way.tensor, target)
    before = piece.clone()
    under_way.run()
    piece.copy_(before)


@acting("gathering")
def corrupted_weights(target: Target, under_way: Collective) -> None:
    """One bit of what arrives of the updated weights is wrong: a bad memory cell."""
    under_way.run()
    flip_bit(_piece(under_way.tensor, target), 0, 6)


def _piece(gathered: Tensor, target: Target) -> Tensor:
    """The partner's, of the whole: a rank's own piece never travels."""
    size = len(gathered) // target.ranks
    return gathered[target.partner * size : (target.partner + 1) * size]


# -- the repair itself -------------------------------------------------------------------------------------------------


@acting("repair", memory=lambda target: [])
def damaged_repair(times: int | None, target: Target, hit: list[int], values: Tensor, step: int) -> None:
    """A wrong bit in what the first ``times`` collectives of repairs bring, or all of them."""
    if times is None or len(hit) < times:
        hit.append(step)
        flip_bit(values, 0, 3)
