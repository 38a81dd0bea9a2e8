"""From what all ranks sent to what is known of the reduction, the optimizer's input and the replicas.

    checker = ReductionChecker(ReductionSettings(layout, arithmetic, log_rate))   # on every rank: each may examine
    stats, evidence = checker.step(gathered, drift)                               # once per gathered step, in order

What the optimizer applied travels with the next measured step's observation. It is compared with the aggregate of the
step that it belongs to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_silent.distributed.parts import Parts, parts_of
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import BEHIND, LEFT_OUT, MORE_CAME, PARTLY, Gathered, on_all, replica_checksums
from ds_silent.maths.causes import Cause, MicroBatches, OwnWeights, Pieces, explain, explain_micro_batches, own_weights
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
from ds_silent.measure.evidence import (
    AppliedCheck,
    HandedOn,
    ReductionCheck,
    ReductionEvidence,
    ResponseLog,
    factors_alike,
)
from ds_silent.records import IntegrityStats
from ds_silent.replicas.compare import Drift

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, and the frameworks do likewise
_FEW = 4  # steps whose micro-batches wait for their observations


@dataclass(frozen=True)
class ReductionSettings:
    """State what a training's reduction and optimizer's input are checked against.

    Attributes:
        log_rate: minus the natural logarithm of the rate of false alarms per measured step.
        clip: largest norm of the applied gradient; 0 is none.
        whole_norm: of a step, of the whole model's gradient, where this group holds a part of it; None: not known.
    """

    layout: Layout
    arithmetic: Arithmetic
    log_rate: float
    layers: tuple[str, ...] = ()
    clip: float = 0.0
    whole_norm: Callable[[int], float | None] | None = None


class ReductionChecker:
    """Keep the measurement before, and what is known of an error that goes on.

    Attributes:
        wants_micro_batches: whether the sketches of single micro-batches would tell more about such an error.
    """

    def __init__(self, settings: ReductionSettings):
        self._layout, self._arithmetic, self._log_rate = settings.layout, settings.arithmetic, settings.log_rate
        self._settings, self._applied = settings, AppliedChecker(settings)
        self._previous: Tensor | None = None
        self._named: Cause | None = None  # of an error that goes on, where ranks were named
        self.wants_micro_batches = self._diagnosed = False
        self._micro_batches: dict[int, Tensor] = {}  # by step, of the newest
        self._found: MicroBatches | None = None

    def step(
        self, gathered: Gathered, drift: Drift | None, told: ResponseLog | None = None
    ) -> tuple[IntegrityStats, ReductionEvidence]:
        """Return the record's part and the detectors' evidence of one step.

        Args:
            gathered: the observations of all ranks; of a reduction that was repeated, the last.
            drift: where the replicas differ, if the observations compared them.
            told: what was found and perhaps repaired apart from them: the detectors see the fault, the record
                what was applied.
        """
        told = told or ResponseLog()
        examined = self.examine(gathered)
        check = examined.check
        micro_batches = self._diagnose(gathered, check)
        checksums = replica_checksums(gathered)
        replicas = told.replicas if checksums is None else parts_of(checksums.tolist())
        replicas = None if drift is not None and drift.says_nothing else replicas
        applied = self._applied.check(gathered)
        self._previous = gathered.layer_aggregate
        self._applied.remember(gathered, alike=not examined.received)
        self._named = examined.cause if examined.cause is not None and examined.cause.ranks else None
        of_check = (None, None) if check is None else (check.relative_error, check.rounding_bound)
        seen = told.reduction or examined
        repeated = next((repair.done for repair in told.repairs if repair.method == "retry"), None)
        return IntegrityStats(*of_check, replicas), ReductionEvidence(
            seen.check,
            seen.cause,
            seen.received,
            changed=examined.changed,
            handed=examined.handed,
            unsynchronised=examined.unsynchronised,
            more_came=examined.more_came,
            applied=applied,
            replicas=replicas,
            drift=drift or told.drift,
            layers=self._settings.layers,
            repeated=repeated,
            micro_batches=micro_batches,
            result=self._arithmetic.result(gathered.ranks),
            handed_on=handed_on(gathered, self._settings),
            own=None if check is None or gathered.each is not None else self._own_weights(gathered),
        )

    # -- the reduction -------------------------------------------------------------------------------------------------

    def examine(self, gathered: Gathered) -> ReductionCheck:
        """Examine the reduction of one step, without remembering anything of it."""
        received, (check, cause) = _received(gathered, self._layout), self._aggregation(gathered)
        if cause is not None and received == {} and _reduced_by_script(gathered, cause):
            check = cause = None  # not where the ranks' bits are not known, as of shards
        return ReductionCheck(
            check,
            cause,
            received=received,
            overflows=self._arithmetic.communication == torch.float16,
            changed=bool((gathered.reduced.handed_seen != 0.0).any()),
            handed=handed_factors(gathered, self._settings),
            unsynchronised=not bool(gathered.local.seen.any()) and on_all(gathered.reduced.seen),
            more_came=bool((gathered.local.seen == MORE_CAME).any()),
        )

    def _aggregation(self, gathered: Gathered) -> tuple[AggregateCheck | None, Cause | None]:
        if not self._layout.size or not on_all(gathered.local.seen) or not on_all(gathered.reduced.seen):
            return None, None
        if on_all(gathered.local.hooked == BEHIND):
            return None, None  # what enters the reduction is another gradient than the one seen
        terms, squared = self._terms(gathered)
        spread = 1.0
        if self._arithmetic.reductions > 1 and squared > 0.0:
            spread = float(gathered.local.micro_squared.sum()) / (squared * terms.ranks)
        check = check_aggregate(terms, gathered.aggregate, self._arithmetic, self._log_rate, spread)
        cause = self._cause(gathered, terms, spread) if check.wrong else None
        if check.wrong and applied_partly(gathered) and (cause is None or cause.kind in ("leftover", "stale", "noise")):
            return None, None  # what an optimizer that did not step holds may be of before
        return check, cause

    def _terms(self, gathered: Gathered) -> tuple[Terms, float]:
        """Return them, and the ranks' mean squared norm."""
        if gathered.each is not None:
            sketches = gathered.each.sketches
            squared = float(sketches.square().sum()) / len(sketches)
            return terms_of(sketches, self._arithmetic.total), squared
        assert gathered.sums is not None
        squared = float(gathered.local.sketch_squared.mean())
        return terms_of_sums(gathered.sums.mean, squared, gathered.ranks, self._arithmetic.total), squared

    def _cause(self, gathered: Gathered, whole: Terms, spread: float) -> Cause | None:
        each = gathered.each
        if gathered.layer_aggregate is None:
            return None
        if each is None:
            return self._cause_by_sums(gathered, whole, spread)
        if each.layer_sketches is None:
            return None
        layers, total = each.layer_sketches, self._arithmetic.total
        tolerances = [self._tolerance(terms_of(layer, total), spread) for layer in layers.unbind(1)]
        error, sketches = gathered.aggregate - whole.expected, each.sketches * total
        aggregate, before = gathered.layer_aggregate, self._previous
        pieces = Pieces(layers * total, aggregate, error, whole.expected, before, sketches, total)
        return explain(pieces, torch.tensor(tolerances), gathered.leftover)

    def _cause_by_sums(self, gathered: Gathered, whole: Terms, spread: float) -> Cause | None:
        """Above the gather limit: all ranks together are one, and each knows its own weight."""
        sums = gathered.sums
        if sums is None or sums.layers is None or sums.layer_aggregate is None:
            return None
        ranks, total = gathered.ranks, self._arithmetic.total
        squares = gathered.layer_squares.mean(0)
        tolerances = [
            self._tolerance(terms_of_sums(mean, float(square), ranks, total), spread)
            for mean, square in zip(sums.layers, squares, strict=True)
        ]
        error = gathered.aggregate - whole.expected
        own = self._own_weights(gathered)
        pieces = Pieces((sums.layers * total)[None], sums.layer_aggregate, error, whole.expected, self._previous)
        cause = explain(pieces, torch.tensor(tolerances), gathered.leftover, own)
        if own is None and cause.kind == "noise":  # whose it is comes with the next observation, if there is one
            return self._named
        return cause

    def _tolerance(self, terms: Terms, spread: float) -> float:
        return rounding_tolerance(terms, self._arithmetic, self._log_rate, spread)

    def _own_weights(self, gathered: Gathered) -> OwnWeights | None:
        """Return what the ranks have found of their own weights, above the gather limit."""
        sums = gathered.sums
        if sums is None or sums.late is None or sums.late.weights is None:
            return None
        weights, squares, total = sums.late.weights, gathered.layer_squares, self._arithmetic.total
        expected = sums.mean * total
        error = gathered.aggregate - expected
        return own_weights(weights.found, weights.own_squared, squares, error, expected, total, self._log_rate)

    # -- micro-batches, where the reduction was wrong ------------------------------------------------------------------

    def micro_batches(self, step: int, sketches: Tensor) -> None:
        """(N, A, L, m) float64 of ``step``, ahead of its observations."""
        self._micro_batches.pop(step, None)  # a step that is taken again is new
        self._micro_batches[step] = sketches
        for old in list(self._micro_batches)[:-_FEW]:
            del self._micro_batches[old]

    def _diagnose(self, gathered: Gathered, check: AggregateCheck | None) -> MicroBatches | None:
        aggregate = gathered.layer_aggregate
        if check is None or not check.wrong or aggregate is None:
            self.wants_micro_batches, self._diagnosed, self._found = False, False, None
            return None
        sketches = self._micro_batches.get(gathered.step)
        if sketches is not None and not self._diagnosed:
            expected = sketches * self._arithmetic.total
            self._found = explain_micro_batches(gathered.step, expected, aggregate, check.tolerance)
            self._diagnosed = True
        self.wants_micro_batches = self._layout.micro_batches > 0 and not self._diagnosed
        return self._found


def _received(gathered: Gathered, layout: Layout) -> dict[int, Parts] | None:
    """Group the ranks by the bits of each layer, so that no threshold is needed; a NaN equals itself here."""
    if layout.hashes < 2 or gathered.hashes is None or not on_all(gathered.reduced.seen):
        return None
    layers = gathered.hashes[:, 1:]
    apart = (layers != layers[0]).any(0).nonzero().flatten().tolist()
    return {layer: parts_of(layers[:, layer].tolist()) for layer in apart}


def _reduced_by_script(gathered: Gathered, cause: Cause) -> bool:
    """Tell whether the script has reduced what a backward had left to each rank, where all ranks hold the same bits.

    So does gradient surgery: of several backwards behind one forward DDP reduces the first alone.
    """
    parts = (cause, *cause.elsewhere)
    own = all(part.kind == "unreduced" for part in parts) and len({part.ranks for part in parts}) > 1
    return own and on_all(gathered.reduced.handed_seen > 0)


# -- what was applied --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Past:
    """Of the measurement before: what its optimizer should have applied."""

    step: int
    aggregate: Tensor  # (k,)
    norm: float  # unscaled
    scale: float
    known: bool  # finite, and the same on all ranks
    changed: bool  # before the step, unseen


class AppliedChecker:
    """Compare what the optimizers applied with what came out of the reduction, at the next measured step."""

    def __init__(self, settings: ReductionSettings):
        self._settings, self._arithmetic, self._clip = settings, settings.arithmetic, settings.clip
        self._past: _Past | None = None
        self._applied_before = self._noted = False

    def check(self, gathered: Gathered) -> AppliedCheck | None:
        """Return what this observation says of the step before; None where nothing can be said."""
        past, seen = self._past, gathered.applied.seen
        if past is None or past.step >= gathered.step:
            return None  # the training has gone back: what was applied last is not in its weights any more
        if not bool((seen != 0.0).all()) or not past.known or past.norm == 0.0:
            return None
        if self._clip > 0.0 and self._settings.whole_norm is not None:
            norm = self._settings.whole_norm(past.step)
            if norm is None or not math.isfinite(norm):
                return None
            past = replace(past, norm=norm)
        if not bool((seen > 0).any()) and not self._applied_before:
            return None  # its calls were never seen: not observed
        self._applied_before |= bool((seen > 0).any())
        if bool((seen == LEFT_OUT).all()) or applied_partly(gathered):
            return None  # the scripts of all ranks wanted that, of all of the gradient or of some
        stepped = seen == 1.0
        expected = self._factor(past, past.scale)
        scale = float(gathered.loss.scale[0])
        rescaled = self._factor(past, scale) if scale not in (0.0, past.scale) else None
        squares, errors = gathered.applied.squared, gathered.applied.error
        known = (stepped & (squares > 0.0)).tolist()
        factors = [factor if ok else None for factor, ok in zip(gathered.applied.factor.tolist(), known, strict=True)]
        total = float(squares[stepped].sum())
        error = math.sqrt(float(errors[stepped].sum()) / total) if total > 0.0 else 0.0
        bound = applied_tolerance(past.aggregate, self._arithmetic, self._settings.log_rate)
        idle = tuple((~stepped).nonzero().flatten().tolist())
        tolerance = factor_tolerance(self._arithmetic)
        noisy = tuple((stepped & (errors > bound**2 * total)).nonzero().flatten().tolist())
        applied = AppliedCheck(past.step, expected, tuple(factors), tolerance, error, bound, noisy, idle, rescaled)
        if not past.changed:
            return applied
        meant = self._arithmetic.writes_hidden and applied.alike  # clipped or scaled, as may be seen elsewhere
        note = not (self._noted or meant or applied.unlike) and bool(applied.wrong_factor or error > bound)
        self._noted |= note
        return replace(applied, changed=True, note=note)

    def _factor(self, past: _Past, scale: float) -> float:
        """Of a step that unscales by ``scale`` and then clips."""
        norm = past.norm * past.scale / scale
        clipped = min(1.0, self._clip / (norm + CLIP_EPSILON)) if self._clip > 0.0 else 1.0
        return clipped if self._arithmetic.handed_unscaled else clipped / scale

    def remember(self, gathered: Gathered, alike: bool) -> None:
        """Keep what the optimizer should apply; ranks that are not ``alike`` clip each by a norm that is not known."""
        self._past = None
        if self._settings.layout.size and on_all(gathered.reduced.seen):
            scale = float(gathered.loss.scale[0])
            handed = gathered.reduced.handed_seen
            squares = torch.where(handed > 0, gathered.reduced.handed_squared, gathered.reduced.squared)
            norm = math.sqrt(float(squares.sum())) / scale
            known, changed = math.isfinite(norm) and alike, bool((handed < 0).any())
            self._past = _Past(gathered.step, gathered.aggregate, norm, scale, known, changed)


def applied_partly(gathered: Gathered) -> bool:
    """Tell whether not all optimizers took the step before, on any rank: the others' gradients may be of before."""
    return bool((gathered.applied.seen == PARTLY).all())


def handed_factors(gathered: Gathered, settings: ReductionSettings) -> tuple[float, ...] | None:
    """Return by which factor each rank's script has changed the gradient before the step; None where they are alike.

    Other changes are not compared: what is written to one parameter may lie in one rank's share alone.
    """
    factors = _factors_of_ranks(gathered, settings)
    return None if factors is None or factors_alike(factors, factor_tolerance(settings.arithmetic)) else factors


def handed_on(gathered: Gathered, settings: ReductionSettings) -> HandedOn | None:
    """Return what all ranks' scripts have made of the mean; None where they leave it, or are not alike."""
    arithmetic, seen = settings.arithmetic, gathered.reduced
    factors = _factors_of_ranks(gathered, settings)
    if factors is None or not factors_alike(factors, factor_tolerance(arithmetic)):
        return None
    if not arithmetic.handed_unscaled or arithmetic.result(gathered.ranks) != "mean":
        return None
    scale = float(gathered.loss.scale[0])
    norm = torch.where(seen.handed_seen > 0, seen.handed_squared, seen.squared).sum().sqrt()
    return HandedOn(statistics.median_low(factors), float(norm), scale)


def _factors_of_ranks(gathered: Gathered, settings: ReductionSettings) -> tuple[float, ...] | None:
    """Return each rank's factor, without the loss scale; None where no rank's script has changed the gradient, or by
    more than a factor."""
    seen = gathered.reduced
    moved = seen.handed_seen > 0
    if applied_partly(gathered):
        return None  # each of several optimizers has its own step, and its own clipping
    known = settings.layout.size > 0 and on_all(seen.seen) and bool((seen.handed_seen >= 0).all())
    if not known or not bool(moved.any()):
        return None
    factors = torch.where(moved & (seen.squared > 0.0), seen.handed_factor, torch.ones_like(seen.handed_factor))
    if bool((seen.squared > 0.0).any()):  # an empty share goes with the others
        factors = torch.where(seen.squared > 0.0, factors, factors[seen.squared > 0.0].median())
    squares = torch.where(moved, seen.handed_squared, seen.squared)
    if not bool(torch.isfinite(torch.stack((factors, squares))).all()) or not bool((squares > 0.0).any()):
        return None
    bound = applied_tolerance(gathered.aggregate, settings.arithmetic, settings.log_rate)
    if bool((torch.where(moved, seen.handed_error, 0.0) > bound**2 * squares.sum()).any()):
        return None
    return tuple((factors * gathered.loss.scale[0] if settings.arithmetic.handed_unscaled else factors).tolist())
