"""What the script's own hooks do to the ranks' gradients before the reduction: another factor on some ranks.

A hook that all ranks have may multiply the gradients of one alone (``gradient * weight[rank]``). Norms before and
behind the hooks show the factor. Where it stays the same on every rank while the gradients change, it is a number of
the script. What follows from the gradient itself, such as a clip, differs from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.distributed.parts import outvoted, parts_of, ranks_of
from ds_silent.measure.evidence import Evidence, ScriptHookEvidence
from ds_silent.preflight.items import HOOKS
from ds_silent.records import Event, StepRecord

STEPS = 3
SAME, OTHER = 1e-4, 0.01  # relative: a factor that stays; two that are not one


class ScriptHookFactors(Detector):
    """Follow the factors of one run's hooks."""

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
            self._noted, self.notes = True, (_note(record.step, hooks),)
        self._recent = [*self._recent[-STEPS + 1 :], hooks.factors]
        recent = np.stack(self._recent)
        factors = np.median(recent, axis=0)  # NaN where one is
        known = np.isfinite(factors)
        steady = len(recent) == STEPS and bool((np.ptp(recent, axis=0) <= SAME * factors)[known].all())
        differ = known.any() and np.ptp(factors[known]) > OTHER * factors[known].max()
        told = any(finding.where == HOOKS or finding.kind == "aggregation-error" for finding in before)
        if not (steady and differ) or told:
            self._since = record.step + 1
            return []
        return [_finding(factors, hooks, max(1, min(self._since, record.step)))]


def _finding(factors: np.ndarray, hooks: ScriptHookEvidence, since: int) -> Finding:
    ranks = np.flatnonzero(np.isfinite(factors)).tolist()
    alike = parts_of([round(float(np.log(max(factors[rank], 1e-30))) / OTHER) for rank in ranks])
    parts = tuple(tuple(ranks[place] for place in part) for part in alike)
    odd = outvoted(parts) or tuple(ranks)
    shown = "; ".join(f"by {factors[part[0]]:.4g} on {ranks_of(part)}" for part in parts[:3])
    message = (
        f"{_hooks(hooks)} multiply gradients, {shown}{'; …' if len(parts) > 3 else ''}: the same numbers at every step."
    )
    remedy = "Let a hook do the same on every rank: look for a number, or a condition, that follows from the rank."
    key = f"script-hooks:{odd}"
    return Finding(key, "outlier-rank", "error", odd, HOOKS, None, None, message, remedy, since)


def _note(step: int, hooks: ScriptHookEvidence) -> Event:
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
