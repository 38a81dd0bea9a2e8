"""What is known of a step besides its record: of rows, labels, the reduction and the replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_silent.capture.loss_graph import Constants
from ds_silent.capture.untrained import Unlike
from ds_silent.distributed.parts import Parts
from ds_silent.framework import Promise
from ds_silent.maths.causes import Cause, MicroBatches, OwnWeights
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.records import Dealt, Repair, Severity
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
        return self.relative_error <= self.bound and factors_alike(self.known, self.tolerance)

    @property
    def unlike(self) -> bool:
        """Whether each rank applied a multiple of the aggregate, and not all the same one."""
        return self.relative_error <= self.bound and not factors_alike(self.known, self.tolerance)

    @property
    def known(self) -> list[float]:
        """The factors of shares that are not empty."""
        return [factor for factor in self.factors if factor is not None]

    def _other_than(self, expected: float) -> tuple[int, ...]:
        tolerance = self.tolerance + (self.relative_error if self.relative_error > self.bound else 0.0)
        most, known = tolerance * abs(expected), self.known
        if not known or (max(known) - expected <= most and expected - min(known) <= most):  # nearly always
            return ()
        return tuple(
            rank for rank, factor in enumerate(self.factors) if factor is not None and abs(factor - expected) > most
        )


def factors_alike(factors: Sequence[float], tolerance: float) -> bool:
    """Whether they are one factor, each of them known to a relative ``tolerance``."""
    return not factors or max(factors) - min(factors) <= 2.0 * tolerance * max(map(abs, factors))


@dataclass(frozen=True)
class ReductionCheck:
    """The reduction of one step. None: not checked at this step, or it cannot be seen."""

    check: AggregateCheck | None = None
    cause: Cause | None = None  # where the check failed
    received: dict[int, Parts] | None = None  # layer -> ranks by equal bits of the aggregate, where they differ
    overflows: bool = False  # finite fp16 gradients may add up to infinity; the loss scale answers that
    changed: bool = False  # the script has changed it since: a repetition would lose that
    handed: tuple[float, ...] | None = None  # times the aggregate that each rank's script hands on, where not alike
    unsynchronised: bool = False  # no rank was to reduce a backward of the step, and yet the optimizer stepped
    more_came: bool = False  # behind the backward that was reduced others were not

    @property
    def wrong(self) -> bool:
        """Whether the reduction has to be repeated; also where finite gradients came out as NaN or infinity."""
        if self.check is None or not math.isfinite(self.check.expected):
            return False  # NaN that goes in comes out, and its bits need not be the same everywhere
        broken = not math.isfinite(self.check.error) and not self.overflows
        return broken or bool(self.received) or self.check.wrong


@dataclass(frozen=True)
class ResponseLog:
    """What :mod:`ds_silent.respond.responder` has found and done since the last record."""

    reduction: ReductionCheck | None = None  # the first attempt, where it was wrong
    replicas: Parts | None = None  # of the last comparison, or of the first that found a difference
    drift: Drift | None = None
    repairs: tuple[Repair, ...] = ()


@dataclass(frozen=True)
class HandedOn:
    """What the script has made of the aggregate before the step, on all ranks alike, without the loss scale."""

    factor: float  # times the aggregate, which is the mean of the ranks' gradients
    norm: float
    scale: float

    def makes_mean(self, total: float) -> bool:
        """Tell whether what all labels weigh together, ``total``, is 1 behind it: within 2 %, as bf16 rounds."""
        return math.isclose(total * self.factor, 1.0, rel_tol=0.02)


@dataclass(frozen=True)
class ReductionEvidence(ReductionCheck):
    """What the detectors see. None: not checked at this step, or it cannot be seen."""

    applied: AppliedCheck | None = None
    replicas: Parts | None = None
    drift: Drift | None = None
    layers: tuple[str, ...] = ()  # names
    repeated: bool | None = None  # whether the reduction was right when it was repeated; None: it was not
    micro_batches: MicroBatches | None = None  # of a step since which the check has failed
    result: str = "mean"  # what the aggregate should be, of the ranks' gradients
    handed_on: HandedOn | None = None  # None also where the script leaves it as it is
    own: OwnWeights | None = None  # above the gather limit: what each rank has found of its weight in the aggregate


@dataclass(frozen=True)
class Coverage:
    """The current epoch so far, over all ranks; shares of the epoch's rows.

    ``epoch`` is what was consumed (1.0 = as many rows as the epoch has), ``seen`` what was visited at least once,
    ``repeated`` what was consumed although it had been seen in this epoch: epoch = seen + repeated, but for the rows
    that a sampler fills the epoch up with.
    """

    epoch: float
    seen: float
    repeated: float
    rows: int  # of one epoch
    error: float = 0.0  # standard error of the shares, where they come from a sketch
    told: bool = True  # by ids; else rows are known by their content, and those that the data hold twice are one
    sampled: float = 1.0  # share of the rows that are known, by which the others are estimated
    anew: Severity | None = None  # a resumed run has begun the epoch again from its first rows; how grave that is
    once: bool = False  # all ranks' samplers have dealt one order of all rows since the epoch began: each comes once
    filled: float = 0.0  # share of rows that a pass deals once more, by its loader's own length


LONG_TRAIL = 8
"""Observations; fewer prove nothing."""


class Trail(NamedTuple):
    """Hold whose rows a rank takes one by one, how many rows behind that rank, and in how many observations lately."""

    leader: int
    lag: int
    times: int


@dataclass(frozen=True)
class OwnPasses:
    """What tells a pass over a rank's own rows from a loader that is stuck, per rank and of the rows that were sent."""

    window: tuple[int, ...]  # rows since the last measured step, and in the one before
    distinct: tuple[float, ...]  # different rows so far, about
    again: float | None = None  # share of the rows that had come before, on any rank, that the same rank had taken then
    taken: tuple[int, ...] = ()  # rows so far
    shared: npt.NDArray[np.int64] | None = field(default=None, compare=False)  # (N,) see RowOwners
    trails: Mapping[int, Trail] = field(default_factory=dict)  # by the rank that follows, where the leader's are new


@dataclass(frozen=True)
class OrderAgain:
    """Whether the rows come in the order of an earlier epoch."""

    again: bool
    log_odds: float  # against chance, over all passes that were alike
    rows: int  # of all ranks, from one pass to the next
    shuffled: bool  # the rows are not in the order of their ids
    promised: bool = True  # a sampler says that it shuffles them


class CutPasses(NamedTuple):
    """Count passes over the data that were broken off and begun again in the same order."""

    orders: int  # in which that came
    times: int  # in the newest of them
    rows: int  # of all ranks, until the newest was broken off
    alone: tuple[int, ...] = ()  # ranks, where others of those that are followed do not
    promised: bool = False  # a sampler says that it shuffles them


@dataclass(frozen=True)
class LayerValues:
    """What the ranks' gradients are layer by layer; NaN where it is not known."""

    names: tuple[str, ...]
    log_norms: npt.NDArray[np.float64]  # (N, L), minus infinity for a layer without gradient
    cosines: npt.NDArray[np.float64] | None  # (N, L) with the other ranks' mean; None where no sketches were sent


@dataclass(frozen=True)
class LabelWeights:
    """What the labels weigh in each rank's loss, (N,), and what the writing rank makes the root of backward of it."""

    totals: npt.NDArray[np.float64]  # of all labels; 1 for a mean over them
    smallest: npt.NDArray[np.float64]  # of one label
    largest: npt.NDArray[np.float64]
    reductions: frozenset[float]  # of the ranks, see ds_silent.capture.loss_graph
    backwards: frozenset[int]  # numbers of them in this step
    constants: Constants
    promise: Promise | None = None  # of the wrapper that the loss was handed to
    trainer: Promise | None = None  # of the trainer
    by_items: bool = False  # its forwards were given the items of the step to divide by: each label counts alike
    passed: float = 1.0  # what multiplies a mean beside the numbers that the graph shows; NaN: not known
    labels: int = 0  # of all ranks
    accumulation: int = 1  # micro-batches of a step, as the script says; the last window of an epoch may have fewer


@dataclass(frozen=True)
class ScriptHookEvidence:
    """What the script's own hooks do to the ranks' gradients."""

    factors: npt.NDArray[np.float64]  # (N,) norm of the gradients that they change, behind over before; NaN: unknown
    unchecked: bool  # they change gradients behind the observer's hooks, on every rank
    names: tuple[str, ...]  # of those of the writing rank that have changed a gradient


@dataclass(frozen=True)
class Evidence:
    """What a :class:`~ds_silent.records.StepRecord` lacks; None (or an empty mapping) is "not known" or "none"."""

    duplicates: Mapping[tuple[int, int], int] | None = None  # rows that ranks i < j both hold in this step
    rows_per_rank: tuple[int, ...] | None = None  # rows of this step
    no_rows: bool = False  # no rank took any since the last measured step, and all had before
    own_rows: tuple[int, ...] | None = None  # rows since the last measured step, per rank
    own_repeats: tuple[int, ...] | None = None  # those of own_rows that the same rank had taken just before
    passes: OwnPasses | None = None  # what tells those of a small shard of its own
    stuck: tuple[int, ...] = ()  # ranks that take one batch again and again; then nothing else of the rows is known
    rows_taken: tuple[int, ...] | None = None  # the same as own_rows, and those that were not sent
    rows_sampled: float = 1.0  # share of the rows that are sent: all counts of rows but rows_taken are of those
    dealt: Dealt = "unknown"  # the ranks are exchangeable only where this is "random"
    rounds: int = 0  # how often a buffer of rows that ends was trained, on every rank alike; 0: none ends
    pass_rows: int | None = None  # of the first rank's data set, of which each of its passes takes every row
    whole_data: npt.NDArray[np.float64] | None = None  # (N, 2) hashes of it and of the pass's order; 0: not known
    label_tokens: tuple[int, ...] | None = None  # tokens with a label, of this step
    input_sizes: tuple[float, ...] | None = None  # root mean squares of inputs that are no ids; 0: not known
    coverage: Coverage | None = None
    same_order: OrderAgain | None = None  # an earlier epoch's order has come again, or has not
    cut_passes: CutPasses | None = None
    passes_alike: int = 1  # in a row, as the sampler's own epoch says; 1 where the script's ids show the order
    non_finite: Mapping[int, str | None] = field(default_factory=dict)  # rank → layer where it began, if known
    zero_gradient: frozenset[int] = frozenset()  # ranks
    stale_parameters: tuple[int, ...] | None = None  # trainable, without gradient here, with one on another rank
    stale_marks: tuple[float, ...] = ()  # which they are, as a hash
    stale_name: str | None = None  # where it is one
    zero_parameters: tuple[int, ...] | None = None  # with a gradient of exactly zero, more than where they are fewest
    zero_marks: tuple[float, ...] = ()  # which they are, as a hash
    zero_names: str = ""  # for people
    reduction: ReductionEvidence | None = None  # of the reduction, the optimizer's input and the replicas
    label_weights: LabelWeights | None = None  # where every rank's loss is one that can be read, and nothing beside it
    undivided: Promise | None = None  # of the mean, although each micro-batch's whole loss is added up
    beside: int = 0  # how often other terms count beside labels that num_items_in_batch divides; 0: not known, or none
    crosses: bool = False  # a rank's gradient holds what the others' losses say of its rows
    script_hooks: ScriptHookEvidence | None = None  # None where none changes a gradient
    unlike: tuple[Unlike, ...] = ()  # what the ranks' code does not do alike
    layers: LayerValues | None = None  # of the ranks' own gradients
    directions: npt.NDArray[np.float64] | None = None  # (N, P) a few numbers of each rank's, where no pairs are known
    step_skipped: bool = False  # fp16: the dynamic loss scale was too high and the step was not applied, as designed
    update_skipped: bool = False  # the optimizer did not apply the step, whatever the reason
    batch_again: bool = False  # every rank has taken its batch before once more: no rows are new
    independent: bool = True  # of the step before; not where a batch is taken again although a loader has others
    left_out: bool = False  # all ranks' scripts have thrown its gradient away
    micro_batches: tuple[int, ...] | None = None  # losses that each rank took this step
