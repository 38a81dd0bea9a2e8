"""What the script does to gradients, beside its loss: by hooks before the reduction, and between that and the step.

**Hooks** that all ranks have may multiply the gradients of one alone (``gradient * weight[rank]``). Norms before and
behind the hooks show the factor. Where it stays the same on every rank while the gradients change, it is a number of
the script. What follows from the gradient itself, such as a clip, differs from step to step.

**Between the reduction and the step**, on all ranks alike. Where a norm is clipped, both look like any other clipping
at a single step, so both take steps in a row:

* The norm that is applied times the loss scale stays the same while the scale and the gradient change: the gradient was
  clipped before the loss scale was taken out, and each update is too small by the loss scale. Nobody means that.
* The gradient is multiplied or divided by the number of ranks, over which the reduction has taken the mean: reduced
  twice, or divided twice. A script may mean that, so it is a note, and none where the labels' weights show that the
  product is a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.lifecycle import APPLIED
from ds_silent.distributed.parts import outvoted, parts_of, ranks_of
from ds_silent.measure.evidence import Evidence, HandedOn, ScriptHookEvidence
from ds_silent.preflight.items import HOOKS
from ds_silent.records import Event, StepRecord

STEPS, CLIPPED_STEPS = 3, 8
SAME_FACTOR, OTHER_FACTOR = 1e-4, 0.01  # of hooks, relative: a factor that stays; two that are not one
SAME, OTHER = 1e-3, 1.05  # relative: a norm that stays; the ratio of two that do not


class ScriptHookFactors(Detector):
    """Follow the factors of one run's hooks before the reduction."""

    def __init__(self) -> None:
        self._noted = False
        self._recent: list[np.ndarray] = []  # (N,) of the newest steps
        self._since = 0

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes = ()
        hooks = evidence.script_hooks
        if hooks is None:
            self._recent = []
            return []
        if hooks.unchecked and not self._noted:
            self._noted, self.notes = True, (_hook_note(record.step, hooks),)
        self._recent = [*self._recent[-STEPS + 1 :], hooks.factors]
        recent = np.stack(self._recent)
        factors = np.median(recent, axis=0)  # NaN where one is
        known = np.isfinite(factors)
        steady = len(recent) == STEPS and bool((np.ptp(recent, axis=0) <= SAME_FACTOR * factors)[known].all())
        differ = known.any() and np.ptp(factors[known]) > OTHER_FACTOR * factors[known].max()
        told = any(finding.where == HOOKS or finding.kind == "aggregation-error" for finding in before)
        if not (steady and differ) or told:
            self._since = record.step + 1
            return []
        return [_hook_finding(factors, hooks, max(1, min(self._since, record.step)))]


def _hook_finding(factors: np.ndarray, hooks: ScriptHookEvidence, since: int) -> Finding:
    ranks = np.flatnonzero(np.isfinite(factors)).tolist()
    alike = parts_of([round(float(np.log(max(factors[rank], 1e-30))) / OTHER_FACTOR) for rank in ranks])
    parts = tuple(tuple(ranks[place] for place in part) for part in alike)
    odd = outvoted(parts) or tuple(ranks)
    shown = "; ".join(f"by {factors[part[0]]:.4g} on {ranks_of(part)}" for part in parts[:3])
    message = (
        f"{_hooks(hooks)} multiply gradients, {shown}{'; …' if len(parts) > 3 else ''}: the same numbers at every step."
    )
    remedy = "Let a hook do the same on every rank: look for a number, or a condition, that follows from the rank."
    key = f"script-hooks:{odd}"
    return Finding(key, "outlier-rank", "error", odd, HOOKS, None, None, message, remedy, since)


def _hook_note(step: int, hooks: ScriptHookEvidence) -> Event:
    message = (
        f"{_hooks(hooks)} change gradients behind the observer's hooks, on every rank. Norms and directions are those "
        "of the gradients before that, and whether the reduction is right is not checked."
    )
    remedy = (
        "Nothing is wrong. To have it checked, register these hooks on the parameters (register_hook) before the "
        "observer is attached."
    )
    return Event(step, "gradient-changed", "info", (), HOOKS, None, None, message, remedy)


def _hooks(hooks: ScriptHookEvidence) -> str:
    """Name them as the writing rank knows them."""
    shown = ", ".join(hooks.names[:3]) + (", …" if len(hooks.names) > 3 else "")
    return f"Hooks of the script ({shown})" if shown else "Hooks of the script"


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
