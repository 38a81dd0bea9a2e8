"""Why two trainings part: what the numbers of the first step that parts, the settings and the rows say.

    cause, factor, layers = explain(Case(parting, apart, pairs, ...))
    # "this layer's gradient alone, times 1.001", 1.001, ("layers.1",)

Every sentence says what was measured; what it comes from is named only where a setting says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ds_silent.comparison.defaults import SettingDifference, explaining, setting_of
from ds_silent.comparison.differences import Array, Differences, common_factor, multiple_of, relative, values_at
from ds_silent.comparison.levels import Bounds, Parting
from ds_silent.comparison.matching import Pairs, coarse, listed
from ds_silent.trace import Head, Rows, Trace

Said = tuple[str, float | None, str]
"""The sentence, the factor, and a part of the name of the setting that would explain it best."""
LOOKED_AROUND = 32  # steps, for the rows of this one
LOOKED_BEHIND = 1000  # steps, for how many have other rows
AHEAD = 2  # steps at which a schedule must be a step ahead
SIMPLE = 1e-3  # relative, of a factor that is a simple ratio


@dataclass(frozen=True)
class Case:
    """All that is known when a link parts."""

    parting: Parting
    apart: Differences
    pairs: Pairs
    bounds: Bounds
    heads: tuple[Head, Head]
    traces: tuple[Trace, Trace]
    settings: tuple[SettingDifference, ...]
    loaded: str = ""  # A, B or both went on from a checkpoint right before
    first: bool = False
    early: bool = False  # at the first step, or at the next, where its update is first used
    later: tuple[tuple[int, int], ...] = ()  # the pairs of steps behind it


def explain(case: Case) -> tuple[str, float | None, tuple[str, ...]]:
    """Say what parted, with the setting that explains it; the factor; and the layers in the order of computation."""
    asked: dict[str, Callable[[Case], Said]] = {
        "rows": _rows, "weights": _weights, "loss": _loss, "local": _gradient, "reduced": _reduced,
        "applied": _applied, "update": _update, "rates": _rates,
    }  # fmt: skip
    is_bias = case.parting.kind == "bias"
    cause, factor, likely = _leans(case) if is_bias else asked[case.parting.link](case)
    if case.loaded and not is_bias:
        cause += f"; {case.loaded} went on from a checkpoint right before"
    if lonely := _lonely(case):
        cause = f"{cause}; {lonely}" if factor is not None else f"{lonely}; {cause}"
    setting = explaining(case.parting.link, case.settings, likely)
    if setting is not None:
        cause += f" ({setting.sentence})"
    return cause, factor, _layers(case)


def _layers(case: Case) -> tuple[str, ...]:
    """Names of the layers that part: gradients come in the order of the backward, all else in that of the forward."""
    if case.parting.link in ("weights", "update"):
        tensors = sorted((case.pairs.tensors[place] for place in case.parting.places), key=lambda one: one.order)
        return tuple(dict.fromkeys(one.where for one in tensors))
    layers = sorted((case.pairs.layers[place] for place in case.parting.places), key=lambda one: one.order)
    names = [one.name for one in layers]
    return tuple(names[::-1] if case.parting.link == "local" else names)


# -- rows and weights --------------------------------------------------------------------------------------------------


def _rows(case: Case) -> Said:
    one, other = case.apart.a.rows, case.apart.b.rows
    assert one is not None
    assert other is not None
    if one.count != other.count:
        taken = zip((one.count, other.count), case.heads, "AB", strict=True)
        said = [f"{count} rows in {name} ({_shared_by(head)})" for count, head, name in taken]
        return f"a step takes {said[0]} and {said[1]}", None, "batch"
    for here, wanted, names in ((0, other, "BA"), (1, one, "AB")):
        at = (case.apart.a, case.apart.b)[here].step
        if (found := _step_with(case.traces[here], wanted, at)) is not None:
            whose = f"{names[0]}'s rows of this step are those of {names[1]}'s step {found}"
            return f"{whose}: the order is shifted", None, ""
    later = [case.traces[0].at(here).rows == case.traces[1].at(there).rows for here, there in case.later]
    others = later.count(False)
    if later and not others:
        return f"other rows in this step alone; the next {len(later)} have the same", None, ""
    if 0 < others < len(later) / 2:
        some = f"other rows in this step and in {others} of the next {len(later)}"
        return f"{some}, as where some of the data changed", None, ""
    return "other rows from this step on" if not case.first else "other rows: another seed, order or data", None, "seed"


def _shared_by(head: Head) -> str:
    ranks = f"{head.ranks} rank{'s' * (head.ranks != 1)}"
    return f"{ranks}, {head.micro_batches} micro-batch{'es' * (head.micro_batches != 1)}"


def _step_with(trace: Trace, rows: Rows, near: int) -> int | None:
    for number in sorted(trace.steps, key=lambda n: abs(n - near))[: 2 * LOOKED_AROUND]:
        if number != near and trace.at(number).rows == rows:
            return number
    return None


def _weights(case: Case) -> Said:
    chosen = [case.pairs.tensors[place] for place in case.parting.places]
    ones = [values_at(case.apart.a, one.here) for one in chosen]
    others = [values_at(case.apart.b, one.there) for one in chosen]
    what = "initial weights" if case.apart.a.step <= 1 else "weights"
    total = sum(len(one.here) > 0 for one in case.pairs.tensors)
    many = f"in {len(chosen)} of {total} tensors" if len(chosen) < total else "in all tensors"
    for i, one in enumerate(chosen):
        for j, other in enumerate(chosen):
            if i != j and len(np.unique(ones[i])) > 2 and np.array_equal(ones[i], others[j]):
                return f"other {what}: B's {other.other} holds A's {one.name}", None, ""
    factor = multiple_of(np.concatenate(ones), np.concatenate(others))
    if factor is not None:
        return f"{what} {_times(factor)} A's, {many}", factor, "init"
    if all(np.array_equal(_bf16(one), _bf16(other)) for one, other in zip(ones, others, strict=True)):
        return f"{what} that agree in 8 binary digits only: one training rounds them to bf16", None, "precision"
    return f"other {what}, {many}", None, "seed"


def _bf16(values: Array) -> Array:
    return np.asarray(coarse(values.astype(np.float32)), dtype=np.float64)


# -- loss and gradients ------------------------------------------------------------------------------------------------


def _lonely(case: Case) -> str:
    """What only one of the two trains, where that can be why they part."""
    return case.pairs.lonely if case.early and case.parting.link in ("loss", "local", "reduced", "update") else ""


def _loss(case: Case) -> Said:
    one, other = case.apart.a.loss, case.apart.b.loss
    assert one is not None
    assert other is not None
    if not (math.isfinite(one) and math.isfinite(other)):
        return f"the loss is {one:.6g} in A and {other:.6g} in B", None, ""
    ratio = other / one if one else math.inf
    common = common_factor(case.apart.local, case.bounds.gradient)
    weighed = _objective(case)
    if common is not None and relative(common, ratio) < min(0.01, 0.2 * abs(ratio - 1.0)):
        return f"the loss and every gradient are {_times(ratio)} A's{_named(ratio, case)}{weighed}", ratio, "loss"
    if simple := _ratio(ratio, case):
        return f"the loss is {_times(ratio)} A's{simple}{weighed}", ratio, "loss"
    if weighed:
        return f"the loss {one:.6g} is {other:.6g}{weighed}", ratio, "loss"
    size = f"the loss {one:.7g} is {other:.7g} in B on the same rows and weights"
    local = case.apart.local
    if case.first and local is not None and case.parting.size < 1e-2 and np.nanmax(local.relative) < 0.1:
        return f"{size}: as a forward in another precision does (TF32, bf16)", None, "precision"
    if _lonely(case):
        return f"the loss {one:.7g} is {other:.7g} in B", None, ""
    drops = [setting_of(head.settings, "dropout")[0] for head in case.heads]
    masks = f"; dropout ({drops[0]}) draws other masks with another seed or number of ranks" if all(drops) else ""
    what = "another forward or another loss" if case.first else "another forward, or other labels"
    return f"{size}: {what}{masks}", None, ""


def _objective(case: Case) -> str:
    one, other = case.apart.a.objective, case.apart.b.objective
    if one is None or other is None:
        return ""
    if relative(one.weight_sum, other.weight_sum) > SIMPLE:
        return f"; its labels' weights add up to {one.weight_sum:.4g} in A, {other.weight_sum:.4g} in B"
    if relative(one.weight_max, other.weight_max) > SIMPLE or relative(one.weight_min, other.weight_min) > SIMPLE:
        spans = [f"{each.weight_min:.4g} to {each.weight_max:.4g}" for each in (one, other)]
        return f"; a label counts {spans[0]} in A, {spans[1]} in B"
    return ""


def _gradient(case: Case) -> Said:
    gradient = getattr(case.apart, case.parting.link)
    weighed = _objective(case)
    common = common_factor(gradient, case.bounds.gradient)
    if common is not None and len(case.parting.places) == len(gradient.ratio):
        return f"the gradient of every layer is {_times(common)} A's{_named(common, case)}{weighed}", common, "accum"
    places = list(case.parting.places)
    if not np.isfinite(gradient.relative[places]).all():
        return "one of the two gradients is not finite", None, "loss scale"
    only = "this layer's gradient alone" if len(places) == 1 else f"the gradient of {len(places)} layers"
    shared = common_factor(gradient, case.bounds.gradient, places)
    if shared is not None:
        return f"{only}, {_times(shared)} A's{_named(shared, case)}", shared, ""
    cosine = gradient.cosine[places[0] if len(places) == 1 else int(np.nanargmin(gradient.cosine))]
    turned = "" if math.isnan(cosine) or cosine > 0.9999 else f", in another direction (cosine {cosine:.4g})"
    far = f", by {case.parting.size:.2g} of its length"
    if len(places) == len(gradient.ratio):
        return f"the same loss, and another gradient in all layers{turned or far}{weighed}", None, ""
    return (f"{only}{turned}{far}" if turned else f"{only} differs{far[1:]}"), None, ""


def _reduced(case: Case) -> Said:
    if case.parting.kind != "own":
        return _gradient(case)
    side = 0 if case.parting.culprit == "A" else 1
    step = (case.apart.a, case.apart.b)[side]
    assert step.local is not None
    assert step.reduced is not None
    layer = case.pairs.layers[case.parting.places[0]]
    place = (layer.a, layer.b)[side]
    local, reduced = (each.layer_sketches[place].astype(float) for each in (step.local, step.reduced))
    factor = multiple_of(local, reduced)
    what = f"{case.parting.culprit}'s reduced gradient is not the mean of its ranks' gradients"
    if factor is None:
        return f"{what}: it is off by {case.parting.size:.2g} of its length", None, ""
    return f"{what}, but {factor:.5g} times it{_named(factor, case)}", factor if side else 1.0 / factor, ""


def _applied(case: Case) -> Said:
    if case.parting.kind == "own":
        who = case.parting.culprit
        rest = f"{case.parting.size:.2g} of its length are left"
        return f"what {who}'s optimizer used is no multiple of its reduced gradient: {rest}", None, ""
    said = []
    for name, step in (("A", case.apart.a), ("B", case.apart.b)):
        assert step.applied is not None
        c, reduced = step.applied.factor, step.reduced
        clips = f"clips to {c * reduced.norm:.4g}" if 0.0 < c < 1.0 and reduced is not None else f"uses {c:.4g} of it"
        said.append(f"{name} {clips if c else 'leaves the step out'}")
    return f"another clip factor: {', '.join(said)}", case.apart.factor, "clip"


# -- the update --------------------------------------------------------------------------------------------------------


def _update(case: Case) -> Said:
    moved, places = case.apart.update, case.parting.places
    assert moved is not None
    if case.parting.kind == "way":
        far = f"by {case.parting.size:.0%} of the way since the first step"
        what = f"no single update shows it, but the weights have come apart {far}: {_names(case)}"
        return what, None, "precision of what"
    still = [name for name, size in zip("AB", moved.size, strict=True) if not size[list(places)].any()]
    if len(still) == 1:
        return f"{still[0]} does not move these weights: {_names(case)}", None, ""
    chosen = [case.pairs.tensors[place] for place in places]
    here, there = np.concatenate([pair.here for pair in chosen]), np.concatenate([pair.there for pair in chosen])
    weights, after, end = values_at(case.apart.a, here), values_at(moved.ends[0], here), values_at(moved.ends[1], there)
    one, other = after - weights, end - values_at(case.apart.b, there)
    if fewer := _fewer_digits(after, end):
        return f"{fewer} keeps 8 binary digits of the weights (bf16), the other more", None, "precision of what"
    factor = multiple_of(one, other)
    if factor is not None:
        return f"the update is {_times(factor)} A's, from the same gradient: {_names(case)}", factor, "lr"
    apart = other - one
    decay = multiple_of(weights, weights + apart)
    rate = next((rate for rate in case.apart.a.rates if rate), None)
    if decay is not None and _explained(apart, weights) > 0.9:
        larger = "smaller" if decay > 1.0 else "larger"
        more = "" if rate is None else f", as a weight decay that is {abs(decay - 1.0) / rate:.3g} {larger} in B does"
        return f"the updates differ by {abs(decay - 1.0):.2g} times the weights{more}: {_names(case)}", None, "decay"
    big = np.abs(one) > 0.05 * np.sqrt(np.mean(one**2))
    with np.errstate(all="ignore"):
        ratio = other[big] / one[big]
    for side, smaller in (("B", ratio < 1.0), ("A", ratio > 1.0)):
        if len(ratio) >= 8 and smaller.mean() > 0.9 and (ratio > 0.0).mean() > 0.95:
            what = f"every element moves less in {side}, each by a share of its own"
            return f"{what}, as with a larger epsilon", None, "eps"
    return f"another update from the same gradient: {_names(case)}", None, ""


def _explained(values: Array, by: Array) -> float:
    """Share of the squares of ``values`` that a multiple of ``by`` explains."""
    total = float(values @ values) * float(by @ by)
    return float(values @ by) ** 2 / total if total > 0.0 else 0.0


def _fewer_digits(one: Array, other: Array) -> str:
    """Which training's weights are all bf16 numbers, where the other's are not."""
    rounded = [bool(np.array_equal(_bf16(values), values)) for values in (one, other)]
    return "" if rounded[0] == rounded[1] else "A" if rounded[0] else "B"


def _names(case: Case) -> str:
    tensors = sorted((case.pairs.tensors[place] for place in case.parting.places), key=lambda one: one.order)
    return "all tensors" if len(tensors) == len(case.pairs.tensors) else listed([one.name for one in tensors], 2)


def _rates(case: Case) -> Said:
    ones = [rate for rate in case.apart.a.rates if rate is not None]
    others = [rate for rate in case.apart.b.rates if rate is not None]
    if len(ones) != len(others):
        return f"{len(ones)} groups in A, {len(others)} in B, with other rates", None, "lr"
    groups = [g for g, (x, y) in enumerate(zip(ones, others, strict=True)) if relative(x, y) > 1e-6]
    one, other = ones[groups[0]], others[groups[0]]
    where = f" of group {groups[0]}" if len(groups) == 1 else f" of groups {', '.join(map(str, groups))}"
    if len(groups) == len(ones):
        where = " of every group" if len(ones) > 1 else ""
    factor = other / one if one else None
    steps = case.apart.a.step, case.apart.b.step
    for ahead, behind in ((1, 0), (0, 1)):
        pairs = [
            (_rates_at(case.traces[behind], steps[behind] + 1 + k), _rates_at(case.traces[ahead], steps[ahead] + k))
            for k in range(AHEAD)
        ]
        if all(late is not None and late == early for late, early in pairs):
            said = f"{'AB'[ahead]}'s schedule is a step ahead of {'AB'[behind]}'s"
            return f"{said}: {one:.6g} in A, {other:.6g} in B", factor, "schedule"
    since = "" if case.first else " from this step on"
    alike = len({(ones[g], others[g]) for g in groups}) == 1
    these = "" if alike else f", as group {groups[0]}'s"
    return f"another rate{where}{since}: {one:.6g} in A, {other:.6g} in B{these}", factor, "lr"


def _rates_at(trace: Trace, step: int) -> tuple[float | None, ...] | None:
    return tuple(trace.at(step).rates) if step in trace else None


# -- factors -----------------------------------------------------------------------------------------------------------


def _leans(case: Case) -> Said:
    factor = case.parting.factor
    assert factor is not None
    what = "loss" if case.parting.link == "loss" else f"{case.parting.link} gradient's norm"
    leans = f"leans to one side from here on: it is {_times(factor)} A's"
    return f"each step is within rounding, but the {what} {leans}", factor, ""


def _named(factor: float, case: Case) -> str:
    """What the factor counts; where the labels' weights say it themselves, no other guess than accumulation."""
    found = _ratio(factor, case)
    return found if "micro-batches" in found or not _objective(case) else ""


def _times(factor: float) -> str:
    """``1.001 times``."""
    digits = f"{factor:.7f}".rstrip("0").rstrip(".") if 0.9 < abs(factor) < 1.1 else f"{factor:.5g}"
    return f"{digits} times"


def _ratio(factor: float, case: Case) -> str:
    """What a factor counts, or the simple fraction that it is; nothing where it is none."""
    if not math.isfinite(factor) or factor <= 0.0 or relative(factor, 1.0) < 0.02:
        return ""
    close = max(SIMPLE, case.bounds.gradient)
    for value, words in _counts(case):
        if relative(factor, value) <= close:
            return f", {words}"
    simple = Fraction(factor).limit_denominator(16)
    if simple and max(simple.numerator, simple.denominator) <= 64 and relative(factor, float(simple)) <= close:
        return f", a simple ratio ({simple})" if simple.denominator > 1 else ", a whole number"
    return ""


def _counts(case: Case) -> Iterator[tuple[float, str]]:
    """Factors that a forgotten division makes, and what each of them counts."""
    a, b = case.heads
    for count_a, count_b, what in (
        (a.micro_batches, b.micro_batches, "micro-batches"),
        (a.ranks, b.ranks, "ranks"),
        (a.ranks * a.micro_batches, b.ranks * b.micro_batches, "ranks times micro-batches"),
    ):
        for value, words in (
            (count_b, f"as many as B's {what}, as if B did not divide by them"),
            (1.0 / count_a, f"one over A's {what}, as if A did not divide by them"),
            (count_b / count_a, f"as B's {what} to A's, as if neither divided by them"),
            (1.0 / count_b, f"one over B's {what}, as if B divided by them twice"),
            (count_a, f"as many as A's {what}, as if A divided by them twice"),
        ):
            if value != 1.0:
                yield value, words
    one, other = case.apart.a.objective, case.apart.b.objective
    if one is not None and other is not None and one.labels > 0.0:
        if one.labels != other.labels:
            yield other.labels / one.labels, "as B's labels to A's"
        yield other.labels, "as many as B's labels of the step"
        yield 1.0 / one.labels, "one over A's labels"
