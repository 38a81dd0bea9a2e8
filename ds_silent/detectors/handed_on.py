"""What becomes of the reduced gradient before it reaches the optimizers, on all ranks alike.

Where a norm is clipped, both look like any other clipping at a single step, so both take steps in a row:

* The norm that is applied times the loss scale stays the same while the scale and the gradient change: the gradient was
  clipped before the loss scale was taken out, and each update is too small by the loss scale. Nobody means that.
* The gradient is multiplied or divided by the number of ranks, over which the reduction has taken the mean: reduced
  twice, or divided twice. A script may mean that, so it is a note, and none where the labels' weights show that the
  product is a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.lifecycle import APPLIED
from ds_silent.measure.evidence import Evidence, HandedOn
from ds_silent.records import Event, StepRecord

STEPS, CLIPPED_STEPS = 3, 8
SAME, OTHER = 1e-3, 1.05  # relative: a norm that stays; the ratio of two that do not


class HandedOnTest(Detector):
    """Follow what is handed on, see the module docstring."""

    key = "handed_on"
    stored = ("product", "steps", "scales", "norms", "in_row", "noted")

    def __init__(self) -> None:
        self._product, self._steps = 0.0, 0  # of norm and loss scale, and for how many steps it has stayed
        self._scales = self._norms = (0.0, 0.0)  # least and largest of these steps
        self._in_row, self._noted = 0, False

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes = ()
        seen, norm = None if evidence.reduction is None else evidence.reduction.handed_on, record.grad_norm.aggregated
        if seen is None or norm is None or not (math.isfinite(norm) and math.isfinite(seen.norm) and seen.norm > 0.0):
            self._steps = self._in_row = 0
            return []
        self._note(record, evidence, seen)
        product = seen.norm * seen.scale
        if not self._steps or not math.isclose(product, self._product, rel_tol=SAME):
            self._product, self._steps = product, 0
            self._scales, self._norms = (seen.scale, seen.scale), (norm, norm)
        self._steps += 1
        self._scales = min(self._scales[0], seen.scale), max(self._scales[1], seen.scale)
        self._norms = min(self._norms[0], norm), max(self._norms[1], norm)
        moved = all(most >= OTHER * least for least, most in (self._scales, self._norms))
        return [self._finding(record, seen)] if moved and self._steps >= CLIPPED_STEPS else []

    def _finding(self, record: StepRecord, seen: HandedOn) -> Finding:
        message = (
            f"The gradient is clipped before the loss scale is taken out, on all ranks alike: what is applied has the "
            f"norm {self._product:.4g} divided by the loss scale ({seen.norm:.3g} at this step), whatever the "
            "gradient's own norm is."
        )
        remedy = "Take the loss scale out first: call scaler.unscale_(optimizer) before clip_grad_norm_."
        key, since = "handed-on:scaled", record.step - self._steps + 1
        return Finding(key, "update-mismatch", "warning", (), APPLIED, None, None, message, remedy, since)

    def _note(self, record: StepRecord, evidence: Evidence, seen: HandedOn) -> None:
        ranks, weights = record.world_size, evidence.label_weights
        by_ranks = next((times for times in (ranks, 1.0 / ranks) if math.isclose(seen.factor, times, rel_tol=SAME)), 0)
        mean = weights is not None and seen.makes_mean(float(weights.totals.mean()))
        self._in_row = self._in_row + 1 if by_ranks and not mean and ranks > 2 else 0
        if self._in_row < STEPS or self._noted:
            return
        self._noted = True
        done, twice = ("multiplied", "reduced twice") if by_ranks > 1 else ("divided", "divided twice")
        message = (
            f"Between the reduction and the step the gradient is {done} by {ranks}, the number of ranks, on all of "
            f"them alike; the reduction has taken their mean already. A gradient that is {twice} looks like this."
        )
        remedy = "Do nothing if that is meant. Else leave out what the script does after the reduction."
        event = Event(record.step, "gradient-changed", "info", (), APPLIED, None, None, message, remedy)
        self.notes = (event,)
