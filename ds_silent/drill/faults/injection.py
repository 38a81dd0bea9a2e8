"""Describe what one rank does differently in a training with a fault, for every framework.

    injection = Injection(loss=lambda loss, step: 4.0 * loss)
    injection == NOTHING                            # False; what is not set changes nothing
    one(from_on(scaled_gradient))                   # a maker: one rank's gradient, from the target's step on
    once(attempts(noisy_result, 2))                 # at that step alone, and in the first repetition of its reduction

An injection has a function for each place of a training that it changes; the training calls it there. A *maker* is
called once per training and rank with the target and the rank, and returns what that rank does. Those of
:mod:`inputs` and :mod:`behind` say what goes wrong, as if it did so at every step on every rank; here is when, and on
whom. What is done to numbers is at the end: a flipped bit, or noise of a known size, in place and reproducible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS_PER_EPOCH = 16


@dataclass(frozen=True)
class Target:
    """Whom a fault hits, among how many, from which optimizer step on (counted from 1), and how hard.

    ``stage`` and ``bf16``: of the training, because they decide who holds what; ``accumulation``: micro-batches a step.
    """

    rank: int
    ranks: int
    step: int
    size: float = 1.0
    stage: int = 0
    bf16: bool = False
    accumulation: int = 1

    @property
    def partner(self) -> int:
        """The other rank of a fault that needs two."""
        return (self.rank + 1) % self.ranks

    def named_in(self, phrases: Iterable[str]) -> list[str]:
        """Return phrases with {rank}, {ranks} and {step} filled in."""
        return [phrase.format(rank=self.rank, ranks=self.ranks, step=self.step) for phrase in phrases]


@dataclass(frozen=True)
class Shard:
    """What a rank's sampler believes: how many ranks, which one it is, the seed of the permutation."""

    ranks: int
    rank: int
    seed: int


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch: ids (rows,) int64; tokens and labels (rows, length) int64."""

    ids: Tensor
    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Collective:
    """One collective under way on this rank; it runs when ``run`` is called, and not at all when nobody does.

    ``tensor`` is flat: input and result of a reduction, result of an all-gather. ``place`` counts micro-batches and,
    within one, buckets from 0; ``last`` says that the micro-batch is the step's last one; ``attempt`` counts the
    repetitions of the step's reduction, 0 is the first. ``sent``: the input where it is another tensor, of all ranks'
    pieces; ``tensor`` is this rank's own then. ``among``: reduces over the ranks of a group instead; by default an
    all-reduce.
    """

    tensor: Tensor
    run: Callable[[], Any]
    step: int
    place: tuple[int, int]
    last: bool
    attempt: int = 0
    sent: Tensor | None = None
    among: Callable[[dist.ProcessGroup], object] | None = None

    @property
    def scattered(self) -> bool:
        """Whether each rank gets a piece of its own."""
        return self.sent is not None and len(self.sent) != len(self.tensor)

    @property
    def bucket(self) -> int:
        return self.place[1]


Config = dict[str, Any]
Dealt = tuple[int, int]
"""The rows that the sampler deals to a rank at a step."""
Memory = Callable[[nn.Module, Any, int], None]
"""Changes the module or its base optimizer, at a step."""


@dataclass(frozen=True)
class Injection:
    """What is different on one rank; a field that is not set changes nothing.

    Once, before the framework has the model: ``environment``, ``config``, ``shard``; and behind that, because
    DeepSpeed makes the replicas equal in ``initialize``, but before the observer is attached: ``seed``, ``model``,
    ``optimizer``. The others are called at every step, which is their last argument.

    Into the gradient: ``rows`` (rank and step whose rows are taken, from this rank and step), ``content`` (the same, of
    rows that come under the ids of others), ``batch`` (what is in them), ``before`` (the step's first forward),
    ``loss``, ``gradient`` (of one micro-batch, by the parameter's name).

    Behind the capture of the local gradient: ``captured`` (name, gradient, whether the micro-batch is the step's last
    one; None leaves it), ``left_out`` (whether a parameter, by its name, takes no part in the reduction),
    ``reduction``, ``kept`` (whether gradients are not cleared), ``update`` (base optimizer, its step to be called),
    ``updated`` (behind that step), ``gathering`` (of updated weights), ``afterwards`` (behind all that the framework
    does at the step). And what a response does: ``repetition`` (of a reduction; clean where it is not set), ``pieces``
    (that an ordered reduction exchanges), ``repair`` (what a collective of a repair has brought).

    ``change``: how large the corruption was, relative to the aggregated gradient, where that is known.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Config], Config] | None = None
    shard: Callable[[Shard], Shard] | None = None
    seed: Callable[[], None] | None = None
    model: Callable[[nn.Module], None] | None = None
    optimizer: Callable[[Any], None] | None = None
    rows: Callable[[int, int], Dealt] | None = None
    content: Callable[[int, int], Dealt] | None = None
    batch: Callable[[Batch, int], Batch] | None = None
    before: Memory | None = None
    loss: Callable[[Tensor, int], Tensor] | None = None
    gradient: Callable[[str, Tensor, int], Tensor] | None = None
    captured: Callable[[str, Tensor, bool, int], Tensor | None] | None = None
    left_out: Callable[[str, int], bool] | None = None
    reduction: Callable[[Collective], None] | None = None
    repetition: Callable[[Collective], None] | None = None
    pieces: Callable[[Collective], None] | None = None
    kept: Callable[[int], bool] | None = None
    update: Callable[[Any, Callable[[], Any], int], Any] | None = None
    updated: Memory | None = None
    gathering: Callable[[Collective], None] | None = None
    repair: Callable[[Tensor, int], None] | None = None
    afterwards: Memory | None = None
    change: Callable[[], float | None] | None = None


NOTHING = Injection()

HEALTHY: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("rows", "content"), lambda me, step: (me, step)),
    **dict.fromkeys(("batch", "loss"), lambda given, step: given),
    "gradient": lambda name, gradient, step: gradient,
    **dict.fromkeys(("left_out", "kept"), lambda *given: False),
    **dict.fromkeys(("reduction", "repetition", "pieces", "gathering"), lambda under_way: under_way.run()),
    "update": lambda optimizer, run, step: run(),
    **dict.fromkeys(("before", "captured", "updated", "repair", "afterwards"), lambda *given: None),
}
"""What a training without a fault does in the places that are called at every step."""


def limited(injection: Injection, due: Callable[[int], bool]) -> Injection:
    """Do what ``injection`` does at the steps that are due, and nothing at all others."""

    def act(place: str, *given: Any) -> Any:
        step = given[-1].step if isinstance(given[-1], Collective) else given[-1]
        return (getattr(injection, place) if due(step) else HEALTHY[place])(*given)

    places: dict[str, Any] = {p: partial(act, p) for p in HEALTHY if getattr(injection, p) is not None}
    return replace(injection, **places)


# -- when, and on whom -------------------------------------------------------------------------------------------------

Maker = Callable[[Target, int], Injection]
Making = Callable[..., Injection]
"""A maker that is given more ahead of the target."""


def acting(place: str, memory: Callable[[Target], Any] | None = None) -> Callable[[Callable[..., Any]], Making]:
    """Make a maker of the function below, which the training calls at ``place``.

        @acting("loss")
        def scaled(factor: float, target: Target, loss: Tensor, step: int) -> Tensor: ...

        maker = partial(scaled, 2.0)

    With ``memory`` the function gets, behind the target, what ``memory(target)`` has made once for the training.
    """

    def of(act: Callable[..., Any]) -> Making:
        def make(*given: Any) -> Injection:
            *more, target, _ = given
            kept = [] if memory is None else [memory(target)]
            changes: dict[str, Any] = {place: partial(act, *more, target, *kept)}
            return Injection(**changes)

        return make

    return of


def changing(**place: Callable[..., Any]) -> Maker:
    """Make a maker of one place's function, which gets the target ahead of what the training gives."""
    [(name, act)] = place.items()
    return acting(name)(act)


def one(make: Maker) -> Maker:
    """Strike the target's rank alone."""
    return lambda target, me: make(target, me) if me == target.rank else NOTHING


def once(make: Maker) -> Maker:
    """Strike at the target's step alone."""
    return lambda target, me: limited(make(target, me), lambda step: step == target.step)


def from_on(make: Maker) -> Maker:
    """Strike from the target's step on."""
    return lambda target, me: limited(make(target, me), lambda step: step >= target.step)


def attempts(make: Maker, count: int | None = None) -> Maker:
    """Strike in the first ``count`` attempts to reduce a step's gradient, or in all; else the first alone is hit."""

    def repeated(target: Target, me: int) -> Injection:
        injection = make(target, me)
        hit = injection.reduction
        assert hit is not None

        def again(under_way: Collective) -> None:
            if count is None or under_way.attempt < count:
                hit(under_way)
            else:
                under_way.run()

        return replace(injection, repetition=again)

    return repeated


def both(first: Maker, second: Maker) -> Maker:
    """Let two things go wrong, in different places of the training."""

    def make(target: Target, me: int) -> Injection:
        added = {name: act for name, act in vars(second(target, me)).items() if act != getattr(NOTHING, name)}
        return replace(first(target, me), **added)

    return make


# -- what is done to numbers -----------------------------------------------------------------------------------------


WORDS = {2: torch.int16, 4: torch.int32}
"""Integers by the bytes of a number."""


def flip_bit(values: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element of a flat tensor, in place; bit 0 is the lowest, the highest the sign."""
    width = 8 * values.element_size()
    mask = 1 << bit if bit < width - 1 else -(1 << bit)
    values.detach().view(WORDS[values.element_size()])[element] ^= mask


def top_exponent_bit(values: Tensor) -> int:
    """Of 2- and 4-byte numbers: 0 in every number below 2 in size; flipped, it makes one above 2, often far above."""
    return 8 * values.element_size() - 2


def lowest_exponent_bit(values: Tensor) -> int:
    """Of fp32 and bf16, which have 8 bits of it; flipped, it makes twice or half."""
    return 8 * values.element_size() - 9


def noise_like(values: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Draw random numbers of ``size`` times the norm of ``values``, and of their type."""
    noise = torch.randn(values.shape, generator=generator)
    return (noise * (size * float(values.float().norm()) / float(noise.norm()))).to(values)


def add_noise(values: Tensor, size: float, generator: torch.Generator) -> None:
    """Add noise of ``size`` times the norm of ``values``, in place."""
    values.add_(noise_like(values, size, generator))
