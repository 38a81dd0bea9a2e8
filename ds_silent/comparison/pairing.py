"""Which step, layer and tensor of one training is which of another's; what has no counterpart is said.

    pairs = pair_tensors(head_a, head_b, weights_a, weights_b, names={})
    pairs.tensors, pairs.layers, pairs.left_out
    pair_steps(trace_a, trace_b)                 # ((1, 1), (2, 2), ...), and how

Tensors are paired by the user's map, by equal names, by names that differ in wrappers' prefixes, by the samples of
their first weights (bits that are equal are no accident; also of q, k and v that one of the trainings has fused), and
last by shape and order. Only samples of tensors that are laid out alike can be compared: of a transposed tensor that
is next to none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_silent.comparison.matching import ComparisonError, Floats, Places, Side, matched, untied
from ds_silent.trace import Head, Tensor, Trace


@dataclass(frozen=True)
class TensorPair:
    """A tensor of A and one of B.

    Attributes:
        layer: place in :attr:`Pairs.layers`; -1 where gradients of its layer cannot be compared.
        where: name of its layer in A.
        order: in which the forward comes to it.
        here, there: places of the same elements in the two steps' ``weights``.
        how: map, name, prefix, weights, fused, order or transposed.
    """

    name: str
    other: str
    layer: int
    where: str
    order: int
    here: Places
    there: Places
    how: str
    dtypes: tuple[str, str]


@dataclass(frozen=True)
class LayerPair:
    """A layer of A and one of B that hold the same parameters.

    Attributes:
        a, b: places in the heads' layers.
        order: in which the forward comes to it, among the pairs.
        sketched: whether their sketches subtract; else only their norms are compared.
    """

    name: str
    other: str
    a: int
    b: int
    order: int
    sketched: bool


@dataclass(frozen=True)
class Pairs:
    """All that can be compared, and sentences on what cannot."""

    tensors: tuple[TensorPair, ...]
    layers: tuple[LayerPair, ...]
    left_out: tuple[str, ...]
    lonely: str = ""  # the first sentence on tensors without a counterpart


def pair_tensors(a: Head, b: Head, first_a: Floats | None, first_b: Floats | None, names: Mapping[str, str]) -> Pairs:
    """Pair the tensors and layers of two trainings.

    Args:
        first_a, first_b: sampled weights of the first step that both have; None where they are not known.
        names: of A to names of B: tensors, or all that is below a name.

    Raises:
        ComparisonError: the map names what is not there.
    """
    here, there = Side(a, first_a), Side(b, first_b)
    found = {(i, j): (how, own, other) for how, i, j, own, other in matched(here, there, names)}
    lonely = [*_missing(here.alone, "A"), *_missing(there.alone, "B")]
    left_out = list(lonely)
    sums = {*untied(here), *(-1 - j for j in untied(there))}
    layers, blurred = _layers(here, there, found, sums)
    if sums:
        left_out.append("gradients of weights that are tied in one training only: they are sums in that one")
    by_norm = [one.name for one in layers if not one.sketched]
    if by_norm:
        left_out.append(f"the direction of the gradient in {_some(by_norm)}: its tensors lie elsewhere, norms only")
    if blurred:
        left_out.append(f"gradients of {_some(blurred)}: not all of its tensors have a counterpart")
    of = {(one.a, one.b): place for place, one in enumerate(layers)}
    tensors = []
    for (i, j), (how, own, other) in sorted(found.items()):
        one, two = here.head.tensors[i], there.head.tensors[j]
        place, order = of.get((one.layer, two.layer), -1), i if one.order is None else one.order
        where = here.head.layers[one.layer].name
        tensors.append(TensorPair(one.name, two.name, place, where, order, own, other, how, (one.dtype, two.dtype)))
    unseen = [one.name for one in tensors if not len(one.here)]
    if unseen:
        left_out.append(f"weights of {_some(unseen)}: laid out otherwise, no sampled element is in both")
    return Pairs(tuple(tensors), layers, tuple(left_out), lonely[0] if lonely else "")


def _layers(
    here: Side, there: Side, found: Iterable[tuple[int, int]], sums: set[int]
) -> tuple[tuple[LayerPair, ...], list[str]]:
    """The layers whose tensors are each other's, and the names of the others of A."""
    places = (here.offsets(), there.offsets())
    of_a: dict[int, set[int]] = defaultdict(set)
    of_b: dict[int, set[int]] = defaultdict(set)
    same: dict[tuple[int, int], bool] = defaultdict(lambda: True)
    broken_a = {here.head.tensors[i].layer for i in here.alone}
    broken_b = {there.head.tensors[j].layer for j in there.alone}
    for i, j in found:
        one, two = here.head.tensors[i], there.head.tensors[j]
        of_a[one.layer].add(two.layer)
        of_b[two.layer].add(one.layer)
        same[one.layer, two.layer] &= one.shape == two.shape and places[0][i] == places[1][j]
        if i in sums or -1 - j in sums:
            broken_a.add(one.layer)
    sizes = min(here.head.layer_size, there.head.layer_size) and here.head.sketch_size == there.head.sketch_size
    chosen, blurred = [], []
    for a, others in of_a.items():
        b = next(iter(others))
        if len(others) == 1 and of_b[b] == {a} and a not in broken_a and b not in broken_b:
            chosen.append((a, b, bool(sizes) and same[a, b]))
        else:
            blurred.append(here.head.layers[a].name)
    order = {layer: place for place, layer in enumerate(_order(here.head))}
    rank = {a: place for place, a in enumerate(sorted((a for a, _, _ in chosen), key=order.__getitem__))}
    return tuple(
        LayerPair(here.head.layers[a].name, there.head.layers[b].name, a, b, rank[a], sketched)
        for a, b, sketched in sorted(chosen)
    ), blurred


def _order(head: Head) -> list[int]:
    """The layers in the order in which the forward comes to them; where that is not known, as they are listed."""
    first: dict[int, int] = {}
    for place, one in enumerate(head.tensors):
        at = place if one.order is None else one.order
        first[one.layer] = min(first.get(one.layer, at), at)
    return sorted(first, key=lambda layer: (first[layer], layer))


def _missing(alone: Mapping[int, Tensor], side: str) -> list[str]:
    return [f"only {side} trains {_some([one.name for one in alone.values()])}"] if alone else []


def _some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPairs:
    """Steps of A and of B, in their order."""

    steps: tuple[tuple[int, int], ...]
    by: str  # number, samples
    left_out: tuple[str, ...]


def pair_steps(a: Trace, b: Trace) -> StepPairs:
    """Pair steps by their number; where the first have consumed other numbers of rows, by the rows consumed.

    Raises ComparisonError where there is no step that both have.
    """
    steps, by = [(n, n) for n in sorted(set(a.steps) & set(b.steps))], "number"
    first = {trace.at(steps[0][0]).samples for trace in (a, b)} - {None} if steps else set()
    if not steps or len(first) == 2:  # a later step with another number is another step of rows
        consumed = [{one.samples: one.step for one in trace if one.samples is not None} for trace in (a, b)]
        both = sorted(set(consumed[0]) & set(consumed[1]))
        if len(both) >= max(1, len(steps) // 2):
            steps, by = [(consumed[0][samples], consumed[1][samples]) for samples in both], "samples"
    if not steps:
        extents = f"{_extent(a)} in A, {_extent(b)} in B"
        raise ComparisonError(f"A and B have no step in common: {extents}; trace the same steps")
    return StepPairs(tuple(steps), by, _beyond(a, b, len(steps)))


def _beyond(a: Trace, b: Trace, used: int) -> tuple[str, ...]:
    found = []
    for trace, name, other in ((a, "A", "B"), (b, "B", "A")):
        if more := len(trace) - used:
            found.append(f"{more} step{'s' * (more != 1)} of {name} that {other} has not")
        if trace.skipped:
            found.append(f"{trace.skipped} torn or foreign line{'s' * (trace.skipped != 1)} of {name}'s trace")
    return tuple(found)


def _extent(trace: Trace) -> str:
    return f"steps {trace.steps[0]} to {trace.steps[-1]}" if trace.steps else "none"
