"""From what all ranks sent to what is known of the reduction, the optimizer's input and the replicas.

    checker = ReductionChecker(layout, arithmetic, clip, log_rate)      # on every rank: each may examine
    stats, evidence = checker.step(gathered, drift)          # once per gathered step, in order

What the optimizer applied travels with the next measured step's observation. It is compared with the aggregate of the
step that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_silent.distributed.parts import Parts, parts_of
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import Gathered, Sums, on_all
from ds_silent.maths.causes import Cause, OwnWeights, Pieces, explain, own_weights
from ds_silent.maths.micro_batches import MicroBatches, explain_micro_batches
from ds_silent.maths.rounding_bound import (
    AggregateCheck,
    Arithmetic,
    Terms,
    check_aggregate,
    rounding_tolerance,
    terms_of,
    terms_of_sums,
)
from ds_silent.measure.applied import AppliedChecker
from ds_silent.measure.evidence import ReductionCheck, ReductionEvidence, ResponseLog
from ds_silent.records import IntegrityStats
from ds_silent.replicas.compare import Drift

_FEW = 4  # steps whose micro-batches wait for their observations


class ReductionChecker:
    """Keep the measurement before, and what is known of an error that goes on.

    Args:
        layout: of the exchange.
        arithmetic: of the reduction.
        clip: largest norm of the applied gradient; 0 is none.
        log_rate: minus the natural logarithm of the rate of false alarms per measured step.
        layers: names.
        whole_norm: of a step, of the whole model's gradient, where this group holds a part of it; None: not known.
    """

    def __init__(
        self,
        layout: Layout,
        arithmetic: Arithmetic,
        clip: float,
        log_rate: float,
        layers: tuple[str, ...] = (),
        whole_norm: Callable[[int], float | None] | None = None,
    ):
        self._layout, self._arithmetic, self._log_rate, self._layers = layout, arithmetic, log_rate, layers
        self._applied = AppliedChecker(layout, arithmetic, clip, log_rate, whole_norm)
        self._previous: Tensor | None = None
        self._named: Cause | None = None  # of an error that goes on, where ranks were named
        self._wanted = self._diagnosed = False
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
        replicas = told.replicas
        if gathered.hashes is not None and on_all(gathered.reduced.replica_seen):
            replicas = parts_of(gathered.hashes[:, 0].tolist())
        applied = self._applied.check(gathered)
        self._previous = gathered.layer_aggregate
        self._applied.remember(gathered, alike=not examined.received)
        self._named = examined.cause if examined.cause is not None and examined.cause.ranks else None
        stats = IntegrityStats(
            None if check is None else check.relative_error, None if check is None else check.rounding_bound, replicas
        )
        seen = told.reduction or examined
        repeated = next((repair.done for repair in told.repairs if repair.method == "retry"), None)
        return stats, ReductionEvidence(
            seen.check,
            seen.cause,
            seen.received,
            changed=examined.changed,
            handed=examined.handed,
            unsynchronised=examined.unsynchronised,
            applied=applied,
            replicas=replicas,
            drift=drift or told.drift,
            layers=self._layers,
            repeated=repeated,
            micro_batches=micro_batches,
            result=self._arithmetic.result(len(gathered.status.failed)),
            own=None if check is None or gathered.each is not None else self._own_weights(gathered),
        )

    # -- the reduction -------------------------------------------------------------------------------------------------

    def examine(self, gathered: Gathered) -> ReductionCheck:
        """Examine the reduction of one step, without remembering anything of it."""
        overflows = self._arithmetic.communication == torch.float16
        changed = bool((gathered.reduced.handed_seen != 0.0).any())
        check, cause = self._aggregation(gathered)
        return ReductionCheck(
            check,
            cause,
            _received(gathered, self._layout),
            overflows,
            changed,
            self._applied.handed(gathered),
            unsynchronised=not bool(gathered.local.seen.any()) and on_all(gathered.reduced.seen),
        )

    def _aggregation(self, gathered: Gathered) -> tuple[AggregateCheck | None, Cause | None]:
        if not self._layout.size or not on_all(gathered.local.seen) or not on_all(gathered.reduced.seen):
            return None, None
        terms, squared = self._terms(gathered)
        spread = 1.0
        if self._arithmetic.reductions > 1 and squared > 0.0:
            spread = float(gathered.local.micro_squared.sum()) / (squared * terms.ranks)
        check = check_aggregate(terms, gathered.aggregate, self._arithmetic, self._log_rate, spread)
        return check, self._cause(gathered, terms, check, spread) if check.wrong else None

    def _terms(self, gathered: Gathered) -> tuple[Terms, float]:
        """Return them, and the ranks' mean squared norm."""
        if gathered.each is not None:
            sketches = gathered.each.sketches
            squared = float(sketches.square().sum()) / len(sketches)
            return terms_of(sketches, self._arithmetic.total), squared
        sums = gathered.directions
        assert isinstance(sums, Sums)
        squared = float(gathered.local.sketch_squared.mean())
        ranks = len(gathered.status.failed)
        return terms_of_sums(sums.mean, squared, ranks, self._arithmetic.total), squared

    def _cause(self, gathered: Gathered, whole: Terms, check: AggregateCheck, spread: float) -> Cause | None:
        if gathered.layer_aggregate is None:
            return None
        if gathered.each is None:
            return self._cause_by_sums(gathered, whole, spread)
        each = gathered.each
        if each.layer_sketches is None:
            return None
        layers, total = each.layer_sketches, self._arithmetic.total
        tolerances = [
            rounding_tolerance(terms_of(layers[:, layer], total), self._arithmetic, self._log_rate, spread)
            for layer in range(layers.shape[1])
        ]
        leftover = gathered.leftover
        error = gathered.aggregate - whole.expected
        sketches = each.sketches * total
        pieces = Pieces(
            layers * total, gathered.layer_aggregate, error, whole.expected, self._previous, sketches, total
        )
        return explain(pieces, torch.tensor(tolerances), leftover)

    def _cause_by_sums(self, gathered: Gathered, whole: Terms, spread: float) -> Cause | None:
        """Above the gather limit: all ranks together are one, and each knows its own weight."""
        sums = gathered.directions
        assert isinstance(sums, Sums)
        if sums.layers is None or sums.layer_aggregate is None:
            return None
        ranks, total = gathered.ranks, self._arithmetic.total
        squares = gathered.layer_squares.mean(0)
        tolerances = [
            rounding_tolerance(
                terms_of_sums(mean, float(square), ranks, total), self._arithmetic, self._log_rate, spread
            )
            for mean, square in zip(sums.layers, squares, strict=True)
        ]
        error = gathered.aggregate - whole.expected
        own = self._own_weights(gathered)
        pieces = Pieces((sums.layers * total)[None], sums.layer_aggregate, error, whole.expected, self._previous)
        cause = explain(pieces, torch.tensor(tolerances), gathered.leftover, own)
        if own is None and cause.kind == "noise":  # whose it is comes with the next observation, if there is one
            return self._named
        return cause

    def _own_weights(self, gathered: Gathered) -> OwnWeights | None:
        """Return what the ranks have found of their own weights, above the gather limit."""
        sums = gathered.directions
        late = sums.late if isinstance(sums, Sums) else None
        if not isinstance(sums, Sums) or late is None or late.weights is None:
            return None
        squares, total = gathered.layer_squares, self._arithmetic.total
        expected = sums.mean * total
        error = gathered.aggregate - expected
        return own_weights(
            late.weights.found, late.weights.own_squared, squares, error, expected, total, self._log_rate
        )

    # -- micro-batches, where the reduction was wrong ------------------------------------------------------------------

    @property
    def wants_micro_batches(self) -> bool:
        """Tell whether the sketches of single micro-batches would tell more about an error that goes on."""
        return self._wanted

    def micro_batches(self, step: int, sketches: Tensor) -> None:
        """(N, A, L, m) float64 of ``step``, ahead of its observations."""
        self._micro_batches.pop(step, None)  # a step that is taken again is new
        self._micro_batches[step] = sketches
        for old in list(self._micro_batches)[:-_FEW]:
            del self._micro_batches[old]

    def _diagnose(self, gathered: Gathered, check: AggregateCheck | None) -> MicroBatches | None:
        aggregate = gathered.layer_aggregate
        if check is None or not check.wrong or aggregate is None:
            self._wanted, self._diagnosed, self._found = False, False, None
            return None
        sketches = self._micro_batches.get(gathered.step)
        if sketches is not None and not self._diagnosed:
            expected = sketches * self._arithmetic.total
            self._found = explain_micro_batches(gathered.step, expected, aggregate, check.tolerance)
            self._diagnosed = True
        self._wanted = self._layout.micro_batches > 0 and not self._diagnosed
        return self._found


def _received(gathered: Gathered, layout: Layout) -> dict[int, Parts] | None:
    """Group the ranks by the bits of each layer, so that no threshold is needed; a NaN equals itself here."""
    if layout.hashes < 2 or gathered.hashes is None or not on_all(gathered.reduced.seen):
        return None
    layers = gathered.hashes[:, 1:]
    apart = (layers != layers[0]).any(0).nonzero().flatten().tolist()
    return {layer: parts_of(layers[:, layer].tolist()) for layer in apart}
