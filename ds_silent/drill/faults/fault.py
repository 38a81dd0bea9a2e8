"""Describe one fault of the drill, and what must come of it: the kind of event, the ranks, the cause, the repair.

fault = Fault(name, one(from_on(scaled_gradient)), description, "the rank", kinds, "gradient", size=1.5)
target = Target(rank=2, ranks=4, step=21, size=fault.size)
injection = fault.inject(target, 2)             # what rank 2 does differently
fault.expected_ranks(target)                    # ((2,),)
MEAN.compared(4), MEAN.settled(4)               # 6, 6: when a fault of step 4 is seen, and when it is repaired

A fault that is answered has a response. The healthy training with the same response is the reference: it must be
silent, and bit for bit what it is without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ds_silent.drill.faults.injection import Maker, Target
from ds_silent.records import EventKind

Where = Literal[
    "data", "seed", "weights", "hyper-parameter", "environment", "gradient", "loss", "reduction", "update", "replica"
]
Who = Literal[
    "the rank",
    "the odd rank",
    "the rank or all",
    "the pair",
    "the pair or nobody",
    "all ranks",
    "nobody",
    "the receiver",
    "an owner",
]
"""``the odd rank`` is found by comparison, and two ranks cannot outvote each other: then both are named, or none.
``the rank or all``: rows that come again are known without knowing whose fault it is; the sampler's own facts, where
the observer has them, name the rank. ``nobody``: the same on all ranks, so there is nobody to accuse. ``the receiver``
holds the wrong piece; in stage 0 the others hold the right one, under ZeRO nobody else does and nobody can be named.
``the pair or nobody``: two ranks with different damage, where the others may or may not be more than half of all.
``an owner``: where ZeRO gives a piece to one rank, it is that rank's own gradient; in stage 0 each has its own."""

WARM = 21  # the statistical detectors have a history by then
REPLICAS_COMPARED = 3  # optimizer steps between two averagings, so that a drift lasts before it is found
EARLY = 4  # facts and rounding bounds need none
LANGUAGE_MODEL = "healthy-language-model"  # the healthy training of a model whose batches promise something


@dataclass(frozen=True)
class Response:
    """One response.

    ``block``: what it needs of the ``silent_consistency`` block. ``interval``: optimizer steps between its
    comparisons, counted from ``first``. ``delay``: steps from its finding a fault to the end of the repair.
    ``exact``: what it leaves is the healthy training's state, bit for bit; else the same on all ranks. ``reference``:
    the healthy training to compare with. ``least_ranks``: with fewer it is refused. ``names_ranks``: its ``repaired``
    events say who got others' bits.
    """

    name: str
    block: Mapping[str, Any] = field(default_factory=dict)
    interval: int = 1
    first: int = 0
    delay: int = 0
    exact: bool = True
    reference: str = "healthy"
    least_ranks: int = 2
    names_ranks: bool = False

    @property
    def healthy(self) -> str:
        """The training without a fault that has this response."""
        return f"healthy-{self.name}"

    def compared(self, step: int) -> int:
        """The first comparison that sees what happened at ``step``."""
        return self.first + -(-(step - self.first) // self.interval) * self.interval

    def settled(self, step: int) -> int:
        """The step at which it is repaired."""
        return self.compared(step) + self.delay


def _drift(method: str, interval: int) -> dict[str, Any]:
    return {"respond": {"on_replica_drift": method}, "integrity": {"replica_interval": interval}}


def _resync(mode: str) -> dict[str, Any]:
    return {"resync": {"mode": mode, "interval": REPLICAS_COMPARED}, "integrity": {"replica_interval": 0}}


RETRY = Response("retry", {"respond": {"on_aggregation_error": "retry"}})
MAJORITY = Response("majority", _drift("majority", 1), least_ranks=3, names_ranks=True)
MEAN = Response("mean", _drift("mean", REPLICAS_COMPARED), REPLICAS_COMPARED, exact=False)
PERIODIC = Response("periodic", _resync("periodic"), REPLICAS_COMPARED, exact=False)
DYNAMIC = Response("dynamic", _resync("dynamic"), REPLICAS_COMPARED, first=1, delay=1, exact=False)
# its order of addition gives bits of its own
ORDERED = Response("ordered", {"reduction": "ordered"}, reference="healthy-ordered")
ORDERED_RETRY = replace(ORDERED, name="ordered-retry", block={**RETRY.block, **ORDERED.block})


@dataclass(frozen=True)
class Fault:
    """One way in which a data-parallel training goes wrong, and what must be said about it.

    ``kinds``: the event that must come; each is right where a fault has several faces (a NaN loss also has a zero or
    NaN gradient). ``first_step``: 0 is before the training. ``deterministic``: no chance in it, so the event must be
    at the first measured step, or at the ``comparisons``-th of the replicas. ``steps``: how long a training may go on
    after the first step, in measured steps; ``stages``, ``dtypes``, least ``accumulation``: where DeepSpeed survives
    the fault and it means something.
    ``says``: words of the right cause and place that the event must hold; {rank}, {ranks}, {step} are the target's.

    ``response``: switched on in this fault's training, which must then be repaired, at one step or at every step
    (``again``), or, where ``repaired`` is False, be left as it is with an error that says so. ``repair_says``: words of
    the ``repaired`` event, or of that error.

    Exceptions by framework: ``ddp``, ``fsdp2``, ``megatron-0`` (its plain optimizer), ``megatron-1`` (its distributed
    one). ``not_applicable``: why the fault means nothing there; ``expected_overrides``: fields that have another value
    there, because its ranks hold other things. ``wrapper_options``: what the wrapper of ``ddp`` or ``megatron`` must be
    given for the fault to mean something; ``groups``: how many the optimizer is given, but by ``megatron``, which makes
    two. ``healthy``: the training that the loss is compared with.
    """

    name: str
    inject: Maker
    description: str
    who: Who
    kinds: tuple[EventKind, ...]
    strikes: Where
    deterministic: bool = True
    first_step: int = WARM
    steps: int = 6
    size: float = 1.0
    ids: bool = True  # whether the script tells the row ids
    stages: tuple[int, ...] = (0, 1, 2, 3)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    accumulation: int = 1
    comparisons: int = 1  # of the replicas, until it must be told
    says: tuple[str, ...] = ()
    response: Response | None = None
    repaired: bool = True
    again: bool = False
    repair_says: tuple[str, ...] = ()
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    expected_overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrapper_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: int = 1
    healthy: str = "healthy"

    def under(self, variant: str) -> Fault:
        """Return the fault with what must be said of it under this framework."""
        return replace(self, **self.expected_overrides.get(variant, {}))

    @property
    def kind(self) -> EventKind:
        """The event to expect, as a table says it."""
        return self.kinds[0]

    def expected_ranks(self, target: Target) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that the event may name, the best answer first; none without a majority."""
        everyone, rank = tuple(range(target.ranks)), (target.rank,)
        sharded = target.stage > 0
        if self.who == "nobody" or (self.who == "the receiver" and sharded):
            return ((),)
        if self.who == "an owner":
            return ((), *((owner,) for owner in everyone if sharded))
        if self.who in ("the pair", "the pair or nobody"):
            pair = tuple(sorted((target.rank, target.partner)))
            return (pair,) if self.who == "the pair" else ((), pair)
        if self.who == "all ranks" or (self.who in ("the odd rank", "the receiver") and target.ranks == 2):
            return (everyone, ())
        return (rank, everyone) if self.who == "the rank or all" else (rank,)

    def mended_ranks(self, target: Target) -> tuple[int, ...]:
        """Return the ranks that the response's event must name: those that should have got a majority's bits."""
        if self.response is None or not self.response.names_ranks or self.who == "nobody":
            return ()
        return tuple(sorted((target.rank, target.partner))) if self.who == "the pair or nobody" else (target.rank,)
