"""From what all ranks sent to the numbers of one record: pure, float64, on the host.

    record = measure(gathered, layout, context)
    evidence = evidence_of(gathered, of_rows, context)      # what the detectors need besides

A gradient that was not captured whole on every rank gives null, never a number that describes only a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_silent.capture.loaders import Walk
from ds_silent.capture.loss_graph import Constants
from ds_silent.capture.objective import NO_OTHERS
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import BEHIND, EachRank, Gathered, on_all
from ds_silent.exchange.row_ids import Sampling
from ds_silent.framework import Promise
from ds_silent.maths import statistics
from ds_silent.maths.mixing import place_of
from ds_silent.measure.evidence import Evidence, LabelWeights, LayerValues, ScriptHookEvidence
from ds_silent.records import DirectionStats, GradNormStats, LayerStats, Method, ObjectiveStats, Seconds, StepRecord
from ds_silent.trace import Traced


@dataclass(frozen=True)
class Context:
    """What the writing rank knows of a step without asking the others."""

    samples: int  # rows consumed by all ranks, this step included
    batch: float  # rows per rank in this step
    epoch: float | None
    seconds: Seconds
    layer_names: tuple[str, ...] = ()
    rows_in_epoch: int | None = None
    skipped: bool = False  # the optimizer did not apply this step (fp16 overflow)
    update_skipped: bool = False  # the same, whatever the reason
    walk: Walk = field(default_factory=Walk)  # how its rows came
    sampling: Sampling | None = None  # of which rows the ids were sent; None: all
    constants: Constants | None = None  # between the loss and the root of backward; None: not known
    promise: Promise | None = None  # what the wrapper says that the loss was handed to
    trainer: Promise | None = None  # what the trainer around this training says
    by_items: bool = False  # see LabelWeights
    undivided: bool = False  # each micro-batch's backward began with a whole mean
    beside: int = 0  # see Evidence
    accumulation: int = 1  # micro-batches of a step, as the script says
    trace: Callable[[Gathered, StepRecord, Context], Traced] | None = None  # makes what the step adds to a trace
    traces: bool = False  # it gets a line there
    rates: tuple[float | None, ...] = ()  # of each parameter group, in such a step
    crosses: bool = False  # see Evidence
    script_hooks: tuple[str, ...] = ()  # names of those that have changed a gradient
    parameters: Sequence[str] = ()  # names of the trainable ones


@dataclass(frozen=True)
class _Gradients:
    """What is known of the ranks' gradients, by either form of the exchange."""

    norms: GradNormStats
    direction: DirectionStats
    squared_mean: float | None = None  # |mean of the local gradients|^2
    cosines: Tensor | None = None
    exact_check: float | None = None


SCALE = 2.0**52
"""Loss scale from which the square of a healthy gradient's norm (up to 4,096) may be more than fp32 holds."""

SMALL = 1e-30
"""Squared norm, below which fp32 has lost squares of some elements."""


def within_fp32(gathered: Gathered) -> Gathered:
    """Take norms from the sketches where fp32 holds these and not the squares; they are known to their error then.

    Where no rank's sketch is sent, a squared norm that only the loss scale has made infinite was not seen. A GradScaler
    whose gradients are fp32 doubles its scale up to 2^127. NaN is never made by it.
    """
    local, reduced, gram = gathered.local, gathered.reduced, gathered.gram
    if not (bool(_beyond(local.squared).any()) or bool(_beyond(reduced.squared.sum()))):
        return gathered  # nearly always
    if gathered.each is not None:
        own = gathered.each.sketches.square().sum(dim=1)
        whole = gathered.aggregate.square().sum() / gathered.ranks
        if bool(_lost(local.squared, own).any()):
            local = replace(local, norm_seen=torch.zeros_like(local.norm_seen))
        if bool(_lost(reduced.squared.sum(), whole)):
            reduced = replace(reduced, squared=whole.expand(gathered.ranks))
        if gram is not None and bool(_lost(gram.diagonal(), own).any()):
            gram = None
        gathered = replace(gathered, local=local, reduced=reduced, gram=gram)
    infinite = bool(torch.isinf(reduced.squared).any())
    infinite |= on_all(local.norm_seen) and bool(torch.isinf(local.squared).any())
    if not infinite or float(gathered.loss.scale.abs().max()) < SCALE:
        return gathered
    unseen = torch.zeros_like(local.seen)
    return replace(gathered, local=replace(local, seen=unseen), reduced=replace(reduced, seen=unseen))


def _beyond(squared: Tensor) -> Tensor:
    return torch.isinf(squared) | (squared < SMALL)


def _lost(squared: Tensor, sketched: Tensor) -> Tensor:
    """Whether squares are beyond what fp32 holds, by the squared norm of the sketch."""
    return _beyond(squared) & torch.isfinite(sketched) & (sketched > 0.0)


def measure(gathered: Gathered, layout: Layout, context: Context) -> StepRecord:
    """Make the record of one step, from (N, ...) float64 values of all ranks."""
    ranks = gathered.ranks
    losses = gathered.loss.total / gathered.loss.count if on_all(gathered.loss.count) else None
    seen = _gradients(gathered, layout)
    noise = None
    if seen.squared_mean is not None and seen.norms.per_rank is not None:
        mean_squared = float(torch.tensor(seen.norms.per_rank, dtype=torch.float64).square().mean())
        noise = statistics.noise_scale(mean_squared, seen.squared_mean, ranks, context.batch)
    return StepRecord(
        step=gathered.step,
        samples=context.samples,
        epoch=context.epoch,
        world_size=ranks,
        loss=statistics.loss_stats(losses),
        grad_norm=seen.norms,
        direction=seen.direction,
        noise_scale=noise,
        objective=_objective(gathered, layout),
        seconds=context.seconds,
        cosine_matrix=None if seen.cosines is None else tuple(tuple(row) for row in seen.cosines.tolist()),
        layers=_layers(gathered, layout, context.layer_names),
        exact_check=seen.exact_check,
    )


def _objective(gathered: Gathered, layout: Layout) -> ObjectiveStats:
    """Sum up all labels, in the mean of the ranks' losses."""
    own, ranks = gathered.objective, gathered.ranks
    if not on_all(own.known):
        return ObjectiveStats(known=False)
    times = gathered.loss.scale * ranks
    angle, error = _mean_of_means(gathered, layout) or (None, None)
    return ObjectiveStats(
        weight_sum=float((own.weight / times).sum()),
        weight_min=float((own.smallest / times).min()),
        weight_max=float((own.largest / times).max()),
        labels=round(float(own.labels.sum())),
        known=True,
        mean_of_means_angle=angle,
        mean_of_means_angle_error=error,
    )


ALIKE = 1e-3  # relative difference up to which a rank's labels weigh alike


def _mean_of_means(gathered: Gathered, layout: Layout) -> tuple[float, float] | None:
    """Return the angle from the ranks' mean to the gradient in which all labels weigh alike, and its error.

    Rank r's gradient g_r is a sum over its T_r labels, each of weight w_r: the sum of all labels' gradients is that of
    g_r / w_r. For means over the ranks' own labels w_r is 1 / T_r.
    """
    own, scale = gathered.objective, gathered.loss.scale
    alone = bool((own.others == NO_OTHERS).all()) and not bool(own.class_weights.any())
    within = on_all(own.smallest) and bool((own.largest <= own.smallest * (1.0 + ALIKE)).all())
    if not alone or not within or not on_all(own.labels) or not on_all(gathered.local.seen):
        return None
    gram, size = gathered.gram, 0
    if gram is None:
        if gathered.each is None or layout.size == 0:
            return None
        sketches, size = gathered.each.sketches, layout.size
        gram = sketches @ sketches.T
    elif gathered.leftover:  # sketches are of the step alone
        return None
    angle, error = statistics.angle_between(gram, 1.0 / scale, own.labels / own.weight, size)
    return (angle, error) if math.isfinite(angle) else None


def _gradients(gathered: Gathered, layout: Layout) -> _Gradients:
    scale, reduced = gathered.loss.scale, gathered.reduced
    aggregated = float(reduced.squared.sum().sqrt() / scale[0]) if on_all(reduced.seen) else None
    if not on_all(gathered.local.seen):
        return _Gradients(statistics.norm_stats(None, "exact", aggregated), DirectionStats())
    norms = gathered.local.squared.sqrt() / scale if gathered.norms_exact else None

    if gathered.gram is not None:
        gram = gathered.gram / torch.outer(scale, scale)
        cosines = statistics.normalised(gram)
        norm_stats = statistics.norm_stats(gram.diagonal().sqrt(), "exact", aggregated)
        direction = statistics.direction_stats(gram, cosines, "exact", layout.size)
        check = _exact_check(gathered.each, direction.mean_cosine)
        return _Gradients(norm_stats, direction, float(gram.mean()), cosines, check)
    if layout.size == 0:  # direction off
        return _Gradients(statistics.norm_stats(norms, "exact", aggregated), DirectionStats())

    method: Method = "sketch" if norms is None else "exact"
    if gathered.each is not None:
        sketches = gathered.each.sketches
        cosines = statistics.cosines_of(sketches)
        norms = sketches.norm(dim=1) / scale if norms is None else norms
        gram = statistics.gram_of(cosines, norms)
        direction = statistics.direction_stats(gram, cosines, "sketch", layout.size)
        return _Gradients(statistics.norm_stats(norms, method, aggregated), direction, float(gram.mean()), cosines)

    sums = gathered.sums
    assert sums is not None
    own = gathered.local.sketch_squared
    norms = own.sqrt() / scale if norms is None else norms
    of_pairs = None if sums.pairs is None else statistics.cosines_of(sums.pairs)
    with_rest = None if sums.late is None else sums.late.cosines_with_rest
    known = bool((own.isfinite() & (own > 0.0)).all())
    direction = statistics.constant_size_direction(
        sums.units, with_rest, len(scale), layout.units, known=known, pairs=of_pairs
    )
    squared_mean = float((sums.mean @ sums.mean) / scale[0] ** 2)
    return _Gradients(statistics.norm_stats(norms, method, aggregated), direction, squared_mean, of_pairs)


def _exact_check(each: EachRank | None, exact: float | None) -> float | None:
    """Return the mean cosine by sketch minus the exact one: what the sketch's error really was at this step."""
    if each is None or exact is None or each.sketches.shape[1] == 0:
        return None
    cosines = statistics.cosines_of(each.sketches)
    first, second = torch.triu_indices(len(cosines), len(cosines), offset=1)
    return float(cosines[first, second].mean()) - exact


def _layers(gathered: Gathered, layout: Layout, names: tuple[str, ...]) -> tuple[LayerStats, ...]:
    each = gathered.each
    if each is None or each.layer_sketches is None or not layout.layer_records or not on_all(gathered.local.seen):
        return ()
    scale = gathered.loss.scale
    sketches = each.layer_sketches / scale[:, None, None]
    exact = gathered.layer_squares.sqrt() / scale[:, None] if on_all(gathered.local.norm_seen) else None
    layers = []
    for index, name in enumerate(names):
        norms = sketches[:, index].norm(dim=1) if exact is None else exact[:, index]
        mean, std, _ = statistics.dispersion(norms)
        cosines = statistics.cosines_of(sketches[:, index])
        direction = statistics.direction_stats(statistics.gram_of(cosines, norms), cosines, "sketch", layout.layer_size)
        if direction.mean_cosine is None or direction.standard_error is None:
            return ()
        cv = std / mean if mean != 0.0 else float("nan")
        layers.append(LayerStats(name, mean, cv, direction.mean_cosine, direction.standard_error))
    return tuple(layers)


# -- what the detectors need besides the record ------------------------------------------------------------------------


def evidence_of(gathered: Gathered, of_rows: Evidence, context: Context) -> Evidence:
    """Add to what is known of the rows what the detectors need of everything else, besides the record."""
    local = gathered.local
    missed, zeros = local.fired.max() - local.fired, local.zeros - local.zeros.min()
    zeros_known = on_all(local.norm_seen) and bool((local.zeros >= 0).all())
    non_finite, zero = _broken(gathered, context.layer_names)
    return replace(
        of_rows,
        label_tokens=_label_tokens(gathered),
        input_sizes=tuple(gathered.loss.inputs.tolist()),
        label_weights=_label_weights(gathered, context),
        undivided=_undivided(gathered, context),
        crosses=context.crosses,
        script_hooks=_script_hooks(gathered, context),
        beside=context.beside if len(set(gathered.code.objective.tolist())) == 1 else 0,
        non_finite=non_finite,
        zero_gradient=zero,
        stale_parameters=tuple(missed.long().tolist()),
        stale_marks=tuple(local.missed_places.tolist()),
        stale_name=_one_more(missed, local.missed_places, context.parameters),
        zero_parameters=tuple(zeros.long().tolist()) if zeros_known else None,
        zero_marks=tuple(local.zero_places.tolist()),
        zero_names=_one_more(zeros, local.zero_places, context.parameters)
        or f"{int(zeros.max())} {'more ' * (float(local.zeros.min()) > 0)}parameters",
        step_skipped=context.skipped,
        update_skipped=context.update_skipped,
        micro_batches=tuple(gathered.loss.count.long().tolist()),
        layers=layer_values(gathered, context.layer_names),
        directions=_directions(gathered),
    )


def _one_more(more: Tensor, places: Tensor, names: Sequence[str]) -> str | None:
    """Name the parameter that some ranks count beyond the others' where it is one; ``places``: see ``place_of``."""
    if float(more.max()) != 1.0:  # nearly always
        return None
    found = set((places[more > 0] - places[int(more.argmin())]).tolist())
    return next((name for number, name in enumerate(names) if found == {place_of(number)}), None)


def _script_hooks(gathered: Gathered, context: Context) -> ScriptHookEvidence | None:
    local = gathered.local
    if not bool(local.hooked.any()):
        return None
    factors = torch.where(local.hooked > 0, local.hooked_behind / local.hooked_before, 1.0).sqrt()
    return ScriptHookEvidence(factors.numpy(), on_all(local.hooked == BEHIND), context.script_hooks)


def _label_tokens(gathered: Gathered) -> tuple[int, ...] | None:
    """Count each rank's label tokens: its batches', or where the forward gets no labels, its loss's."""
    tokens, own = gathered.loss.tokens, gathered.objective
    if not bool((tokens > 0).any()):
        if not on_all(own.known):
            return None
        tokens = own.labels
    return tuple(tokens.long().tolist())


def _label_weights(gathered: Gathered, context: Context) -> LabelWeights | None:
    own, scale = gathered.objective, gathered.loss.scale
    alone = bool((own.others == NO_OTHERS).all())
    if context.constants is None or not alone or not on_all(own.known) or not on_all(own.labels):
        return None
    return LabelWeights(
        totals=(own.weight / scale).numpy(),
        smallest=(own.smallest / scale).numpy(),
        largest=(own.largest / scale).numpy(),
        reductions=frozenset(own.reduction.tolist()),
        backwards=frozenset(int(count) for count in own.count.tolist()),
        constants=context.constants,
        promise=context.promise,
        trainer=context.trainer,
        by_items=context.by_items,
        passed=_passed(own.weight / scale, own.count * own.factor),
        labels=round(float(own.labels.sum())),
        accumulation=context.accumulation,
    )


def _passed(weight: Tensor, factor: Tensor) -> float:
    """Return what multiplies a mean beside the numbers that the graph shows; NaN where those are not known."""
    beside = weight / factor
    alike = bool(beside.isfinite().all()) and bool(torch.isclose(beside, beside.mean(), rtol=1e-3).all())
    return float(beside.mean()) if alike else math.nan


def _undivided(gathered: Gathered, context: Context) -> Promise | None:
    """Return the trainer that promises the mean of micro-batches whose losses nothing divides, a wrapper neither."""
    alike = len(set(gathered.objective.count.tolist())) == 1 and len(set(gathered.code.objective.tolist())) == 1
    return context.trainer if context.undivided and context.promise is None and alike else None


def _directions(gathered: Gathered) -> npt.NDArray[np.float64] | None:
    sums = gathered.sums
    return sums.probes.numpy() if sums is not None and sums.pairs is None and sums.probes.numel() else None


def layer_values(gathered: Gathered, names: tuple[str, ...]) -> LayerValues | None:
    """Return each layer's norm, exact or by sketch, and where sketches were sent its cosine with the others' mean."""
    if len(names) < 2 or not on_all(gathered.local.seen):
        return None
    squares, cosines = gathered.layer_squares, None
    sketches = None if gathered.each is None else gathered.each.layer_sketches
    exact = gathered.norms_exact
    if sketches is not None:
        rest = sketches.sum(0) - sketches
        own = sketches.square().sum(2)
        cosines = ((sketches * rest).sum(2) / (own * rest.square().sum(2)).sqrt()).numpy()
        squares = squares if exact else own
    elif not exact:
        return None
    elif gathered.sums is not None and gathered.sums.late is not None:
        known = gathered.sums.late.layer_cosines
        cosines = None if known is None else known.numpy()
    return LayerValues(names, squares.log().numpy() / 2.0, cosines)


def _broken(gathered: Gathered, names: tuple[str, ...]) -> tuple[dict[int, str | None], frozenset[int]]:
    """Return rank -> layer of non-finite gradients, and the ranks of zero ones.

    Backward runs from the last layer to the first, so a NaN is born in the last layer that has one.
    """
    if not on_all(gathered.local.seen):
        return {}, frozenset()
    squares: Tensor = gathered.layer_squares
    whole = gathered.local.squared
    if not on_all(gathered.local.norm_seen):
        if gathered.each is None:
            return {}, frozenset()
        squares, whole = squares[:, :0], gathered.each.sketches.square().sum(dim=1)
    non_finite: dict[int, str | None] = {}
    for rank in torch.nonzero(~torch.isfinite(whole)).flatten().tolist():
        layers = torch.nonzero(~torch.isfinite(squares[rank])).flatten().tolist()
        non_finite[rank] = names[layers[-1]] if layers else None
    return non_finite, frozenset(torch.nonzero(whole == 0.0).flatten().tolist())
