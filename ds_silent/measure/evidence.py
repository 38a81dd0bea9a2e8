"""What is known of a step's reduction, of what the optimizer made of it, and of the replicas: for detectors, responses.

seen = audit.examine(gathered)           # Examined: of one observation, before the optimizer runs
stats, evidence = audit.step(gathered, drift, told)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_silent.maths.causes import Cause, OwnWeights
from ds_silent.maths.micro_batches import MicroBatches
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.ranks.parts import Parts
from ds_silent.records import Repair
from ds_silent.replicas.compare import Drift


@dataclass(frozen=True)
class AppliedCheck:
    """What the optimizer applied, against what came out of the reduction. ``factor`` is that of the clipping."""

    step: int
    expected: float  # factor on the aggregated gradient: clipping over loss scale
    factors: tuple[float | None, ...]  # of each rank's share; None where the share is empty
    tolerance: float  # of a factor, relative
    relative_error: float  # what no factor explains, relative to the applied gradient
    bound: float  # what rounding explains of it
    noisy: tuple[int, ...]  # ranks whose share alone has a larger error than rounding explains of the whole
    idle: tuple[int, ...]  # ranks whose optimizer did not step although others' did
    rescaled: float | None = None  # what the factor is with the loss scale of the step after, where that is another
    changed: bool = False  # the script changed gradients before the step, unseen: other factors and noise may be meant
    note: bool = False  # and this is the first step at which that shows

    @property
    def wrong_factor(self) -> tuple[int, ...]:
        """Ranks that applied another multiple of the aggregate; noise makes factors of its own size."""
        return self._other_than(self.expected)

    @property
    def unscaled_late(self) -> bool:
        """Whether every rank divided by the loss scale of the step after, as a framework does that lets the scale grow
        before it unscales: the step is too small by the growth."""
        return self.rescaled is not None and bool(self.wrong_factor) and not self._other_than(self.rescaled)

    @property
    def alike(self) -> bool:
        """Whether every rank applied the same multiple of the aggregate, and nothing else."""
        known = [factor for factor in self.factors if factor is not None]
        return self.relative_error <= self.bound and factors_alike(known, self.tolerance)

    @property
    def unlike(self) -> bool:
        """Whether each rank applied a multiple of the aggregate, and not all the same one."""
        known = [factor for factor in self.factors if factor is not None]
        return self.relative_error <= self.bound and not factors_alike(known, self.tolerance)

    def _other_than(self, expected: float) -> tuple[int, ...]:
        tolerance = self.tolerance + (self.relative_error if self.relative_error > self.bound else 0.0)
        return tuple(
            rank
            for rank, factor in enumerate(self.factors)
            if factor is not None and abs(factor - expected) > tolerance * abs(expected)
        )


def factors_alike(factors: Sequence[float], tolerance: float) -> bool:
    """Whether they are one factor, each of them known to a relative ``tolerance``."""
    return not factors or max(factors) - min(factors) <= 2.0 * tolerance * max(map(abs, factors))


@dataclass(frozen=True)
class Examined:
    """The reduction of one step. None: not checked at this step, or it cannot be seen.

    ``handed``: how many times the aggregate each rank's script gave to its optimizer, where they are not alike;
    ``overflows``: fp16 gradients that are finite may add up to infinity; the loss scale answers that.
    """

    check: AggregateCheck | None
    cause: Cause | None  # where the check failed
    received: dict[int, Parts] | None  # layer -> ranks by equal bits of the aggregate, where they differ
    overflows: bool = False
    changed: bool = False  # the script has changed it since: a repetition would lose that
    handed: tuple[float, ...] | None = None

    @property
    def wrong(self) -> bool:
        """Whether the reduction has to be repeated; also where finite gradients came out as NaN or infinity."""
        if self.check is None or not math.isfinite(self.check.expected):
            return False  # NaN that goes in comes out, and its bits need not be the same everywhere
        broken = not math.isfinite(self.check.error) and not self.overflows
        return broken or bool(self.received) or self.check.wrong


@dataclass(frozen=True)
class Told:
    """What :mod:`ds_silent.respond.responder` has found and done since the last record."""

    reduction: Examined | None = None  # the first attempt, where it was wrong
    replicas: Parts | None = None  # of the last comparison, or of the first that found a difference
    drift: Drift | None = None
    repairs: tuple[Repair, ...] = ()


@dataclass(frozen=True)
class ReductionEvidence:
    """What the detectors see. None: not checked at this step, or it cannot be seen."""

    check: AggregateCheck | None = None
    cause: Cause | None = None  # where the check failed
    received: dict[int, Parts] | None = None  # layer -> ranks by equal bits of the aggregate, where they differ
    applied: AppliedCheck | None = None
    replicas: Parts | None = None
    drift: Drift | None = None
    layers: tuple[str, ...] = ()  # names
    repeated: bool | None = None  # whether the reduction was right when it was repeated; None: it was not
    micro_batches: MicroBatches | None = None  # of a step since which the check has failed
    result: str = "mean"  # what the aggregate should be, of the ranks' gradients
    handed: tuple[float, ...] | None = None  # see :class:`Examined`
    changed: bool = False  # the script has changed the aggregate since the reduction
    own: OwnWeights | None = None  # above the gather limit: what each rank has found of its weight in the aggregate
