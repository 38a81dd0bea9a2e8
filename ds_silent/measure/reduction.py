"""From what all ranks sent to what is known of the reduction, the optimizer's input and the replicas.

    audit = Audit(layout, arithmetic, clip, log_rate)        # on every rank: each may examine
    stats, findings = audit.step(gathered, drift)            # once per gathered sample, in order

What the optimizer applied is known one measurement later than the rest: it is compared with the aggregate of the step
that it belongs to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_silent.exchange.gather import Gathered, Layout
from ds_silent.maths.causes import Cause, Pieces, explain
from ds_silent.maths.micro_batches import MicroBatches, explain_micro_batches
from ds_silent.maths.rounding_bound import (
    AggregateCheck,
    Arithmetic,
    Terms,
    applied_tolerance,
    check_aggregate,
    factor_tolerance,
    rounding_tolerance,
    terms_of,
    terms_of_sums,
)
from ds_silent.measure.record import on_all
from ds_silent.ranks.parts import Parts, parts_of
from ds_silent.records import IntegrityStats, Repair
from ds_silent.replicas.compare import Drift

CLIP_EPSILON = 1e-6  # DeepSpeed and torch.nn.utils.clip_grad_norm_ add it to the norm


@dataclass(frozen=True)
class Applied:
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
        """Whether every rank divided by the loss scale of the step after, which DeepSpeed 0.16.9 to 0.19.8 does in
        stages 1 to 3 when the scale grows: the step is too small by the growth."""
        return self.rescaled is not None and bool(self.wrong_factor) and not self._other_than(self.rescaled)

    def _other_than(self, expected: float) -> tuple[int, ...]:
        tolerance = self.tolerance + (self.relative_error if self.relative_error > self.bound else 0.0)
        return tuple(
            rank
            for rank, factor in enumerate(self.factors)
            if factor is not None and abs(factor - expected) > tolerance * abs(expected)
        )


@dataclass(frozen=True)
class Examined:
    """One sample's reduction. None: not checked at this step, or it cannot be seen.

    ``overflows``: fp16 gradients that are finite may add up to infinity; the loss scale answers that.
    """

    check: AggregateCheck | None
    cause: Cause | None  # where the check failed
    received: dict[int, Parts] | None  # layer -> ranks by equal bits of the aggregate, where they differ
    overflows: bool = False
    changed: bool = False  # the script has changed it since: a repetition would lose that

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
class Integrity:
    """What the detectors see. None: not checked at this step, or it cannot be seen."""

    check: AggregateCheck | None = None
    cause: Cause | None = None  # where the check failed
    received: dict[int, Parts] | None = None  # layer -> ranks by equal bits of the aggregate, where they differ
    applied: Applied | None = None
    replicas: Parts | None = None
    drift: Drift | None = None
    layers: tuple[str, ...] = ()  # names
    repeated: bool | None = None  # whether the reduction was right when it was repeated; None: it was not
    micro_batches: MicroBatches | None = None  # of a step since which the check has failed
    result: str = "mean"  # what the aggregate should be, of the ranks' gradients


@dataclass(frozen=True)
class _Past:
    """Of the measurement before: what its optimizer should have applied."""

    step: int
    aggregate: Tensor  # (k,)
    norm: float  # unscaled
    scale: float
    known: bool  # finite, and the same on all ranks
    changed: bool  # before the step, unseen


class Audit:
    """Keeps the measurement before, and what is known of an error that goes on.

    Args:
        layout: of the exchange.
        arithmetic: of the reduction.
        clip: ``gradient_clipping``; 0 is none.
        log_rate: minus the natural logarithm of the rate of false alarms per measured step.
        layers: names.
    """

    def __init__(
        self, layout: Layout, arithmetic: Arithmetic, clip: float, log_rate: float, layers: tuple[str, ...] = ()
    ):
        self._layout, self._arithmetic, self._clip, self._log_rate = layout, arithmetic, clip, log_rate
        self._layers = layers
        self._past: _Past | None = None
        self._previous: Tensor | None = None
        self._applied_before = False
        self._noted = False
        self._wanted = self._diagnosed = False
        self._micro_batches: tuple[int, Tensor] | None = None
        self._found: MicroBatches | None = None

    def step(
        self, gathered: Gathered, drift: Drift | None, told: Told | None = None
    ) -> tuple[IntegrityStats, Integrity]:
        """The record's part and the detectors' evidence of one sample.

        Args:
            gathered: the sample; of a reduction that was repeated, the last.
            drift: where the replicas differ, if the sample compared them.
            told: what was found and perhaps repaired apart from the samples: the detectors see the fault, the record
                what was applied.
        """
        told = told or Told()
        examined = self.examine(gathered)
        check = examined.check
        micro_batches = self._diagnose(gathered, check)
        replicas = told.replicas
        if gathered.hashes is not None and bool((gathered.scalars["replica_seen"] > 0).all()):
            replicas = parts_of(gathered.hashes[:, 0].tolist())
        applied = self._applied(gathered)
        self._remember(gathered, alike=not examined.received)
        stats = IntegrityStats(
            None if check is None else check.relative_error, None if check is None else check.rounding_bound, replicas
        )
        seen = told.reduction or examined
        repeated = next((repair.done for repair in told.repairs if repair.method == "retry"), None)
        apart = drift or told.drift
        return stats, Integrity(
            seen.check,
            seen.cause,
            seen.received,
            applied,
            replicas,
            apart,
            self._layers,
            repeated,
            micro_batches,
            self._arithmetic.result(len(gathered.scalars["failed"])),
        )

    # -- the reduction -------------------------------------------------------------------------------------------------

    def examine(self, gathered: Gathered) -> Examined:
        """The reduction of one sample, without remembering anything of it."""
        overflows = self._arithmetic.communication == torch.float16
        changed = bool((gathered.scalars["handed_seen"] != 0.0).any())
        return Examined(*self._aggregation(gathered), self._received(gathered), overflows, changed)

    def _aggregation(self, gathered: Gathered) -> tuple[AggregateCheck | None, Cause | None]:
        scalars = gathered.scalars
        if not self._layout.size or not on_all(scalars["gradient_seen"]) or not on_all(scalars["aggregate_seen"]):
            return None, None
        terms, squared = self._terms(gathered)
        spread = 1.0
        if self._arithmetic.reductions > 1 and squared > 0.0:
            spread = float(scalars["micro_squared"].sum()) / (squared * terms.ranks)
        check = check_aggregate(terms, gathered.aggregate, self._arithmetic, self._log_rate, spread)
        return check, self._cause(gathered, terms, spread) if check.wrong else None

    def _terms(self, gathered: Gathered) -> tuple[Terms, float]:
        """And the ranks' mean squared norm."""
        if gathered.sketches is not None:
            squared = float(gathered.sketches.square().sum()) / len(gathered.sketches)
            return terms_of(gathered.sketches, self._arithmetic.total), squared
        assert gathered.mean_sketch is not None
        squared = float(gathered.scalars["sketch_squared"].mean())
        ranks = len(gathered.scalars["failed"])
        return terms_of_sums(gathered.mean_sketch, squared, ranks, self._arithmetic.total), squared

    def _cause(self, gathered: Gathered, whole: Terms, spread: float) -> Cause | None:
        if gathered.layer_sketches is None or gathered.layer_aggregate is None:
            return None
        layers, total = gathered.layer_sketches, self._arithmetic.total
        tolerances = [
            rounding_tolerance(terms_of(layers[:, layer], total), self._arithmetic, self._log_rate, spread)
            for layer in range(layers.shape[1])
        ]
        leftover = bool((gathered.scalars["leftover_squared"] != 0.0).any())
        error = gathered.aggregate - whole.expected
        sketches = None if gathered.sketches is None else gathered.sketches * total
        pieces = Pieces(
            layers * total, gathered.layer_aggregate, error, whole.expected, self._previous, sketches, total
        )
        return explain(pieces, torch.tensor(tolerances), leftover)

    def _received(self, gathered: Gathered) -> dict[int, Parts] | None:
        """Bits are compared, so no threshold is needed; a NaN equals itself here."""
        if self._layout.hashes < 2 or gathered.hashes is None or not on_all(gathered.scalars["aggregate_seen"]):
            return None
        layers = gathered.hashes[:, 1:]
        apart = (layers != layers[0]).any(0).nonzero().flatten().tolist()
        return {layer: parts_of(layers[:, layer].tolist()) for layer in apart}

    # -- micro-batches, where the reduction was wrong ------------------------------------------------------------------

    @property
    def wants_micro_batches(self) -> bool:
        """Whether the sketches of single micro-batches would tell more about an error that goes on."""
        return self._wanted

    def micro_batches(self, step: int, sketches: Tensor) -> None:
        """(N, A, L, m) float64 of ``step``, ahead of its sample."""
        self._micro_batches = step, sketches

    def _diagnose(self, gathered: Gathered, check: AggregateCheck | None) -> MicroBatches | None:
        if check is None or not check.wrong or gathered.layer_aggregate is None:
            self._wanted, self._diagnosed, self._found = False, False, None
            return None
        if self._micro_batches is not None and self._micro_batches[0] == gathered.step and not self._diagnosed:
            step, sketches = self._micro_batches
            expected = sketches * self._arithmetic.total
            self._found = explain_micro_batches(step, expected, gathered.layer_aggregate, check.tolerance)
            self._diagnosed = True
        self._wanted = self._layout.micro_batches > 0 and not self._diagnosed
        return self._found

    # -- the optimizer's input -----------------------------------------------------------------------------------

    def _applied(self, gathered: Gathered) -> Applied | None:
        past, scalars = self._past, gathered.scalars
        seen = scalars["applied_seen"]
        if past is None or not bool((seen != 0.0).all()) or not past.known or past.norm == 0.0:
            return None
        stepped = seen > 0
        if not bool(stepped.any()) and not self._applied_before:
            return None  # its calls were never seen: not observed
        self._applied_before |= bool(stepped.any())
        expected = self._factor(past, past.scale)
        scale = float(scalars["loss_scale"][0])
        rescaled = self._factor(past, scale) if scale not in (0.0, past.scale) else None
        squares, errors = scalars["applied_squared"], scalars["applied_error"]
        factors = [
            float(factor) if square > 0.0 and ok else None
            for factor, square, ok in zip(scalars["applied_factor"], squares, stepped, strict=True)
        ]
        total = float(squares[stepped].sum())
        error = math.sqrt(float(errors[stepped].sum()) / total) if total > 0.0 else 0.0
        bound = applied_tolerance(past.aggregate, self._arithmetic, self._log_rate)
        idle = tuple((~stepped).nonzero().flatten().tolist())
        tolerance = factor_tolerance(self._arithmetic)
        noisy = tuple((stepped & (errors > bound**2 * total)).nonzero().flatten().tolist())
        applied = Applied(past.step, expected, tuple(factors), tolerance, error, bound, noisy, idle, rescaled)
        if not past.changed:
            return applied
        note = not self._noted and bool(applied.wrong_factor or error > bound)
        self._noted |= note
        return replace(applied, changed=True, note=note)

    def _factor(self, past: _Past, scale: float) -> float:
        """Of a step that unscales by ``scale`` and then clips."""
        norm = past.norm * past.scale / scale
        return (min(1.0, self._clip / (norm + CLIP_EPSILON)) if self._clip > 0.0 else 1.0) / scale

    def _remember(self, gathered: Gathered, alike: bool) -> None:
        """``alike``: all ranks hold the same aggregate; else each clips by a norm of its own, which nobody knows."""
        self._previous = gathered.layer_aggregate
        self._past = None
        if self._layout.size and on_all(gathered.scalars["aggregate_seen"]):
            scale = float(gathered.scalars["loss_scale"][0])
            handed = gathered.scalars["handed_seen"]
            squares = torch.where(handed > 0, gathered.scalars["handed_squared"], gathered.scalars["aggregate_squared"])
            norm = math.sqrt(float(squares.sum())) / scale
            known, changed = math.isfinite(norm) and alike, bool((handed < 0).any())
            self._past = _Past(gathered.step, gathered.aggregate, norm, scale, known, changed)
