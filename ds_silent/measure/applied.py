"""Compare what the optimizers applied with what came out of the reduction, when the next measured step is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import LEFT_OUT, Gathered, on_all
from ds_silent.maths.rounding_bound import Arithmetic, applied_tolerance, factor_tolerance
from ds_silent.measure.evidence import AppliedCheck, factors_alike

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, and the frameworks do likewise


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
    """Keep the measurement before, whose optimizer the next observation tells of."""

    def __init__(
        self,
        layout: Layout,
        arithmetic: Arithmetic,
        clip: float,
        log_rate: float,
        whole_norm: Callable[[int], float | None] | None,
    ):
        self._layout, self._arithmetic, self._clip, self._log_rate = layout, arithmetic, clip, log_rate
        self._whole_norm = whole_norm
        self._past: _Past | None = None
        self._applied_before = self._noted = False

    def check(self, gathered: Gathered) -> AppliedCheck | None:
        """Return what this observation says of the step before; None where nothing can be said."""
        past, seen = self._past, gathered.applied.seen
        if past is None or past.step >= gathered.step:
            return None  # the training has gone back: what was applied last is not in its weights any more
        if not bool((seen != 0.0).all()) or not past.known or past.norm == 0.0:
            return None
        if self._clip > 0.0 and self._whole_norm is not None:
            norm = self._whole_norm(past.step)
            if norm is None or not math.isfinite(norm):
                return None
            past = replace(past, norm=norm)
        stepped = seen > 0
        if not bool(stepped.any()) and not self._applied_before:
            return None  # its calls were never seen: not observed
        if bool((seen == LEFT_OUT).all()):
            return None  # the scripts of all ranks have thrown the gradient away together
        self._applied_before |= bool(stepped.any())
        expected = self._factor(past, past.scale)
        scale = float(gathered.loss.scale[0])
        rescaled = self._factor(past, scale) if scale not in (0.0, past.scale) else None
        squares, errors = gathered.applied.squared, gathered.applied.error
        known = (stepped & (squares > 0.0)).tolist()
        factors = [factor if ok else None for factor, ok in zip(gathered.applied.factor.tolist(), known, strict=True)]
        total = float(squares[stepped].sum())
        error = math.sqrt(float(errors[stepped].sum()) / total) if total > 0.0 else 0.0
        bound = applied_tolerance(past.aggregate, self._arithmetic, self._log_rate)
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
        """Keep what the optimizer of this step should apply.

        Args:
            alike: all ranks hold the same aggregate; else each clips by a norm of its own, which is not known.
        """
        self._past = None
        if self._layout.size and on_all(gathered.reduced.seen):
            scale = float(gathered.loss.scale[0])
            handed = gathered.reduced.handed_seen
            squares = torch.where(handed > 0, gathered.reduced.handed_squared, gathered.reduced.squared)
            norm = math.sqrt(float(squares.sum())) / scale
            known, changed = math.isfinite(norm) and alike, bool((handed < 0).any())
            self._past = _Past(gathered.step, gathered.aggregate, norm, scale, known, changed)

    def handed(self, gathered: Gathered) -> tuple[float, ...] | None:
        """Scripts clip and scale between the reduction and the step: on all ranks alike, or it is a fault.

        Other changes are not compared: what is written to one parameter may lie in one rank's share alone.
        """
        seen = gathered.reduced
        moved = seen.handed_seen > 0
        known = self._layout.size > 0 and on_all(seen.seen) and bool((seen.handed_seen >= 0).all())
        if not known or not bool(moved.any()):
            return None
        factors = torch.where(moved & (seen.squared > 0.0), seen.handed_factor, torch.ones_like(seen.handed_factor))
        if moved.all():  # an empty share goes with the others
            factors = torch.where(seen.squared > 0.0, factors, factors[seen.squared > 0.0].median())
        squares = torch.where(moved, seen.handed_squared, seen.squared)
        if not bool(torch.isfinite(torch.stack((factors, squares))).all()) or not bool((squares > 0.0).any()):
            return None
        bound = applied_tolerance(gathered.aggregate, self._arithmetic, self._log_rate)
        if bool((torch.where(moved, seen.handed_error, 0.0) > bound**2 * squares.sum()).any()):
            return None
        of_ranks = tuple(factors.tolist())
        return None if factors_alike(of_ranks, factor_tolerance(self._arithmetic)) else of_ranks
