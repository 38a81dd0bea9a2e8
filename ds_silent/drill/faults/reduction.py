"""What the drill does to gradients in and after their reduction, and to weights after the update.

    injection = dropped_contribution(strike, me=2)
    injection.reduction(collective)            # runs the collective and corrupts what goes in or comes out

As in :mod:`ds_silent.drill.faults.inputs`, a maker returns what one rank does differently. Faults of the reduction
itself are the same on all ranks (what a wrong algorithm or a wrong configuration does); those of one rank's link or
memory are on ``strike.rank`` alone. All of them strike behind the capture of the local gradients: the ranks' own
gradients are healthy, and only what becomes of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.deepspeed.seams import Collective, keep_gradients, leave_out_of_the_reduction
from ds_silent.drill.faults.inputs import NOTHING, Injection, Strike

Reduction = Callable[[Collective], None]
UNREDUCED = "position.weight"  # a whole layer, in one owner's partition
BITS = {2: torch.int16, 4: torch.int32}


def _from(strike: Strike, change: Reduction) -> Reduction:
    """``change`` from the first step on; the plain collective before."""
    return lambda under_way: change(under_way) if under_way.step >= strike.step else under_way.run()


def _on(rank: int, me: int, reduction: Reduction) -> Injection:
    return Injection(reduction=reduction) if me == rank else NOTHING


# -- what goes into the reduction ------------------------------------------------------------------------------------


def doubled_contribution(strike: Strike, me: int) -> Injection:
    return _on(strike.rank, me, _weighted_input(strike, 2.0))


def missing_contribution(strike: Strike, me: int) -> Injection:
    return _on(strike.rank, me, _weighted_input(strike, 0.0))


def _weighted_input(strike: Strike, weight: float) -> Reduction:
    def send(under_way: Collective) -> None:
        under_way.tensor.mul_(weight)
        under_way.run()

    return _from(strike, send)


def missing_micro_batch(strike: Strike, me: int) -> Injection:
    """The last micro-batch's gradient is computed, and never accumulated."""
    return _lost_micro_batch(strike) if me == strike.rank else NOTHING


def missing_micro_batch_everywhere(strike: Strike, me: int) -> Injection:
    return _lost_micro_batch(strike)


def _lost_micro_batch(strike: Strike) -> Injection:
    def lose(name: str, gradient: Tensor, step: int, last: bool) -> Tensor | None:
        return torch.zeros_like(gradient) if last and step >= strike.step else None

    return Injection(captured=lose)


# -- the reduction itself --------------------------------------------------------------------------------------------


def dropped_bucket(strike: Strike, me: int) -> Injection:
    """The collective is never called for the first bucket: each rank goes on with its own gradient."""

    def drop(under_way: Collective) -> None:
        if under_way.bucket != 0:
            under_way.run()

    return Injection(reduction=_from(strike, drop))


def unreduced_parameter(strike: Strike, me: int) -> Injection:
    return Injection(
        engine=lambda engine: leave_out_of_the_reduction(
            engine, UNREDUCED, lambda: engine.global_steps + 1 >= strike.step
        )
    )


def wrong_group(strike: Strike, me: int) -> Injection:
    """The ranks' first and second half reduce among themselves."""
    halves: list[Any] = []

    def reduce_half(under_way: Collective) -> None:
        if not halves:  # every rank gets here at the same collective, and makes both groups
            middle = strike.ranks // 2
            halves.extend(dist.new_group(list(ranks)) for ranks in (range(middle), range(middle, strike.ranks)))
        dist.all_reduce(under_way.tensor, group=halves[0 if me < strike.ranks // 2 else 1])

    return Injection(reduction=_from(strike, reduce_half))


# -- what comes out --------------------------------------------------------------------------------------------------


def _after(strike: Strike, change: Callable[[Collective], None]) -> Reduction:
    """Runs the collective at every step; ``change`` sees its result from the first step on."""

    def reduce(under_way: Collective) -> None:
        under_way.run()
        if under_way.step >= strike.step:
            change(under_way)

    return reduce


def forgotten_division(strike: Strike, me: int) -> Injection:
    return Injection(reduction=_after(strike, lambda under_way: _scale(under_way, float(strike.ranks))))


def _scale(under_way: Collective, factor: float) -> None:
    under_way.tensor.mul_(factor)


def noisy_aggregate(strike: Strike, me: int) -> Injection:
    return Injection(reduction=_after(strike, _noise(strike, me=None)))


def noisy_aggregate_one_rank(strike: Strike, me: int) -> Injection:
    return _on(strike.rank, me, _after(strike, _noise(strike, me)))


def noise_burst(strike: Strike, me: int) -> Injection:
    noise = _noise(strike, me=None)
    return Injection(reduction=_after(strike, lambda under_way: _once(strike, under_way, noise)))


def _once(strike: Strike, under_way: Collective, change: Callable[[Collective], None]) -> None:
    if under_way.step == strike.step:
        change(under_way)


def _noise(strike: Strike, me: int | None) -> Callable[[Collective], None]:
    """Of ``strike.size`` times the bucket's norm; the same numbers on all ranks where ``me`` is None."""
    generator = torch.Generator().manual_seed(104_729 if me is None else 7919 + me)

    def add(under_way: Collective) -> None:
        noise = torch.randn(under_way.tensor.shape, generator=generator)
        size = strike.size * float(under_way.tensor.float().norm()) / float(noise.norm())
        under_way.tensor.add_((noise * size).to(under_way.tensor))

    return add


def zeroed_tail(strike: Strike, me: int) -> Injection:
    """The last ``size`` of the first bucket comes back as zeros."""

    def zero(under_way: Collective) -> None:
        if under_way.bucket == 0:
            under_way.tensor[-int(strike.size * len(under_way.tensor)) :].zero_()

    return Injection(reduction=_after(strike, zero))


def stale_bucket(strike: Strike, me: int) -> Injection:
    """The first bucket's result is the one of the step before, for good: a buffer that nobody fills any more."""
    kept: dict[tuple[int, int], Tensor] = {}

    def reduce(under_way: Collective) -> None:
        under_way.run()
        if under_way.bucket != 0:
            return
        if under_way.step == strike.step - 1:
            kept[under_way.place] = under_way.tensor.clone()
        if under_way.step >= strike.step:
            under_way.tensor.copy_(kept[under_way.place])

    return Injection(reduction=reduce)


def partition_not_cleared(strike: Strike, me: int) -> Injection:
    """Each bucket's result is added to what the step before has left in the optimizer's partition."""
    left: dict[tuple[int, int], Tensor] = {}

    def reduce(under_way: Collective) -> None:
        under_way.run()
        before = left.get(under_way.place)
        if before is not None and under_way.step >= strike.step:
            under_way.tensor.add_(before)
        left[under_way.place] = under_way.tensor.clone()

    return Injection(reduction=reduce)


def gradients_not_cleared(strike: Strike, me: int) -> Injection:
    """``zero_grad`` does nothing from the step before on."""
    return Injection(
        engine=lambda engine: keep_gradients(engine, lambda: engine.global_steps + 1 >= max(strike.step - 1, 1))
    )


def flipped_bit(byte: int, strike: Strike, me: int) -> Injection:
    """The top bit of one byte (0 is the lowest) of the first bucket's largest element, at one step, on all ranks."""
    return _flipped(8 * byte + 7, strike)


def flipped_lowest_bit(strike: Strike, me: int) -> Injection:
    """On all ranks: smaller than the reduction's own rounding, so that no comparison of numbers can see it."""
    return _flipped(0, strike)


def flipped_bit_one_rank(strike: Strike, me: int) -> Injection:
    """The lowest bit, of one rank's copy alone."""
    return _flipped(0, strike) if me == strike.rank else NOTHING


def _flipped(bit: int, strike: Strike) -> Injection:
    change, squared = 0.0, 0.0

    def reduce(under_way: Collective) -> None:
        nonlocal change, squared
        under_way.run()
        if under_way.step != strike.step or not under_way.last:
            return
        values = under_way.tensor
        squared += float(values.double().square().sum())
        if under_way.bucket == 0 and bit < 8 * values.element_size():
            place = int(values.abs().argmax())
            before = float(values[place])
            flip_bit(values, place, bit)
            change = abs(float(values[place]) - before)

    return Injection(reduction=reduce, change=lambda: change / squared**0.5 if squared > 0.0 else None)


def flip_bit(values: Tensor, place: int, bit: int) -> None:
    """One bit of one element of a flat tensor, in place."""
    width = 8 * values.element_size()
    mask = 1 << bit if bit < width - 1 else -(1 << bit)
    values.detach().view(BITS[values.element_size()])[place] ^= mask


# -- between the reduction and the weights -----------------------------------------------------------------------------


def wrong_factor(strike: Strike, me: int) -> Injection:
    """The optimizer gets ``size`` times the gradient: a loss scale or a clip factor that is off."""

    def scaled(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        if step >= strike.step:
            for gradient in _gradients(optimizer):
                gradient.mul_(strike.size)
        return run()

    return Injection(update=scaled)


def wrong_factor_one_rank(strike: Strike, me: int) -> Injection:
    return wrong_factor(strike, me) if me == strike.rank else NOTHING


def noisy_update(strike: Strike, me: int) -> Injection:
    """Noise between the reduction and the optimizer, on one rank."""
    generator = torch.Generator().manual_seed(7919 + me)

    def noisy(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        for gradient in _gradients(optimizer) if step >= strike.step else ():
            noise = torch.randn(gradient.shape, generator=generator)
            gradient.add_((noise * (strike.size * float(gradient.norm()) / float(noise.norm()))).to(gradient))
        return run()

    return Injection(update=noisy) if me == strike.rank else NOTHING


def skipped_update(strike: Strike, me: int) -> Injection:
    """The optimizer of one rank does nothing, at one step."""
    return (
        Injection(update=lambda optimizer, run, step: None if step == strike.step else run())
        if me == strike.rank
        else NOTHING
    )


def _gradients(optimizer: Any) -> list[Tensor]:
    held = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [gradient for gradient in held if gradient is not None]


# -- replicas ----------------------------------------------------------------------------------------------------------


def changed_weight(strike: Strike, me: int) -> Injection:
    """One bit of one weight of one rank, as its optimizer leaves it.

    In bf16 the fp32 master is hit, at the lowest bit that reaches the bf16 weight: a flip in that weight itself would
    be overwritten by the next update.
    """

    def change(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        result = run()
        if step == strike.step:
            weight = optimizer.param_groups[0]["params"][0]
            flip_bit(weight.detach().view(-1), 0, 16 if strike.bf16 else 0)
        return result

    return Injection(update=change) if me == strike.rank else NOTHING


def changed_frozen_parameter(strike: Strike, me: int) -> Injection:
    return _memory(strike, me, lambda engine: flip_bit(engine.module.rescale.shift.view(-1), 0, 6))


def changed_buffer(strike: Strike, me: int) -> Injection:
    return _memory(strike, me, lambda engine: flip_bit(engine.module.rescale.gain.view(-1), 0, 6))


def changed_optimizer_state(strike: Strike, me: int) -> Injection:
    """Twice or half of one running mean: a lower bit would be forgotten before the replicas are compared."""

    def change(engine: Any) -> None:
        optimizer = engine.basic_optimizer
        moments = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].view(-1)
        flip_bit(moments, int(moments.abs().argmax()), 23)

    return _memory(strike, me, change)


def _memory(strike: Strike, me: int, change: Callable[[Any], None]) -> Injection:
    def afterwards(engine: Any, step: int) -> None:
        if step == strike.step:
            with torch.no_grad():
                change(engine)

    return Injection(afterwards=afterwards) if me == strike.rank else NOTHING


def stale_weights(strike: Strike, me: int) -> Injection:
    """One rank keeps its old weights in the piece that another rank sends, at every step."""

    def gather(under_way: Collective) -> None:
        piece = _piece(under_way.tensor, strike)
        before = piece.clone()
        under_way.run()
        piece.copy_(before)

    return _gathering(strike, me, gather)


def corrupted_weights(strike: Strike, me: int) -> Injection:
    """One bit of what one rank receives of the updated weights is wrong, at every step: a bad memory cell."""

    def gather(under_way: Collective) -> None:
        under_way.run()
        flip_bit(_piece(under_way.tensor, strike), 0, 6)

    return _gathering(strike, me, gather)


def _gathering(strike: Strike, me: int, gather: Callable[[Collective], None]) -> Injection:
    return Injection(gathering=_from(strike, gather)) if me == strike.rank else NOTHING


def _piece(gathered: Tensor, strike: Strike) -> Tensor:
    """The partner's, of the whole: a rank's own piece never travels."""
    size = len(gathered) // strike.ranks
    return gathered[strike.partner * size : (strike.partner + 1) * size]
