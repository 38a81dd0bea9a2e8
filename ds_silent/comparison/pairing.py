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

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.trace import Head, Tensor, Trace, sampled

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_original_module",
}
"""Parts of names that wrappers of torch, DeepSpeed and Lightning add."""
ALIGNMENT = 8
"""Elements: of each tensor's offset in the sketch's long vector, as ``maths.sketch.offsets_of`` lays them."""
LEAST_SHARED = 3
"""Different sampled values that two tensors of other shapes must share, to be held for the same numbers."""


class ComparisonError(ValueError):
    """What was given cannot be compared; the message is one sentence."""


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

    @property
    def by(self) -> dict[str, int]:
        """How many tensors were paired in which way."""
        found: dict[str, int] = defaultdict(int)
        for pair in self.tensors:
            found[pair.how] += 1
        return dict(found)


@dataclass
class _Side:
    """One training's tensors, and which of them are still alone."""

    head: Head
    weights: Floats | None
    alone: dict[int, Tensor] = field(init=False)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.alone = dict(enumerate(self.head.tensors))
        self.starts = np.cumsum([0, *(one.samples for one in self.head.tensors)]).tolist()

    def places(self, index: int) -> Places:
        return np.arange(self.starts[index], self.starts[index + 1])

    def values(self, index: int) -> Floats | None:
        return None if self.weights is None else self.weights[self.starts[index] : self.starts[index + 1]]

    def offsets(self) -> list[int]:
        sizes = [-(-one.numel // ALIGNMENT) * ALIGNMENT for one in self.head.tensors]
        return np.cumsum([0, *sizes]).tolist()[:-1]  # type: ignore[no-any-return]


def pair_tensors(a: Head, b: Head, first_a: Floats | None, first_b: Floats | None, names: Mapping[str, str]) -> Pairs:
    """Pair the tensors and layers of two trainings.

    Args:
        first_a, first_b: sampled weights of the first step that both have; None where they are not known.
        names: of A to names of B: tensors, or all that is below a name.

    Raises:
        ComparisonError: the map names what is not there.
    """
    here, there = _Side(a, first_a), _Side(b, first_b)
    found: dict[tuple[int, int], tuple[str, Places, Places]] = {}

    def together(i: int, j: int, how: str) -> None:
        one, other = here.alone.pop(i), there.alone.pop(j)
        alike = one.shape == other.shape and one.samples == other.samples
        places = (here.places(i), there.places(j)) if alike else (_NONE, _NONE)
        found[i, j] = (how, *places)

    for i, j in _mapped(here, there, names):
        together(i, j, "map")
    for how, form in (("name", str), ("prefix", _unwrapped)):
        for i, j in _unique(here.alone, there.alone, lambda _, one, form=form: (form(one.name), one.shape)):  # type: ignore[misc]
            together(i, j, how)
    for i, j in _by_suffix(here.alone, there.alone):
        together(i, j, "prefix")
    for i, j in _by_weights(here, there):
        together(i, j, "weights")
    for parts, whole, swapped in (*_fused(here, there, False), *_fused(there, here, True)):
        for part, own, shared in parts:
            pair = (whole, part) if swapped else (part, whole)
            found[pair] = ("fused", shared, own) if swapped else ("fused", own, shared)
            (there if swapped else here).alone.pop(part)
        (here if swapped else there).alone.pop(whole)
    for i, j in _in_order(here.alone, there.alone, lambda one: one.shape):
        together(i, j, "order")
    for i, j in _in_order(here.alone, there.alone, lambda one: tuple(sorted(one.shape))):
        together(i, j, "transposed")
    return _pairs(here, there, found)


def _pairs(here: _Side, there: _Side, found: dict[tuple[int, int], tuple[str, Places, Places]]) -> Pairs:
    left_out = [*_missing(here.alone, "A"), *_missing(there.alone, "B")]
    untied = {*_untied(here), *(-1 - j for j in _untied(there))}
    layers, blurred = _layers(here, there, found, untied)
    if untied:
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
    return Pairs(tuple(tensors), layers, tuple(left_out))


def _layers(
    here: _Side, there: _Side, found: Iterable[tuple[int, int]], untied: set[int]
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
        if i in untied or -1 - j in untied:
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
    first = {}
    for place, one in enumerate(head.tensors):
        at = place if one.order is None else one.order
        first[one.layer] = min(first.get(one.layer, at), at)
    return sorted(first, key=lambda layer: (first[layer], layer))


# -- tensor by tensor --------------------------------------------------------------------------------------------------

_NONE: Places = np.zeros(0, dtype=np.int64)


def _mapped(here: _Side, there: _Side, names: Mapping[str, str]) -> list[tuple[int, int]]:
    places = {one.name: j for j, one in enumerate(there.head.tensors)}
    pairs: dict[int, int] = {}
    for name, other in names.items():
        below = [
            (i, other + one.name[len(name) :])
            for i, one in enumerate(here.head.tensors)
            if one.name == name or one.name.startswith(f"{name}.")
        ]
        if not below:
            raise ComparisonError(f"--map names {name!a}, which A has not; its first tensor is {_first(here)}")
        for i, wanted in below:
            if wanted not in places:
                raise ComparisonError(f"--map names {wanted!a}, which B has not; its first tensor is {_first(there)}")
            if math.prod(here.head.tensors[i].shape) != math.prod(there.head.tensors[places[wanted]].shape):
                raise ComparisonError(f"--map pairs {here.head.tensors[i].name!a} with {wanted!a} of another size")
            pairs[i] = places[wanted]
    if len(set(pairs.values())) < len(pairs):
        raise ComparisonError("--map names one tensor of B for two of A; give each its own")
    return list(pairs.items())


def _first(side: _Side) -> str:
    return ascii(side.head.tensors[0].name) if side.head.tensors else "not there"


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _unique(ones: Mapping[int, Tensor], others: Mapping[int, Tensor], key: Any) -> list[tuple[int, int]]:
    """Pairs whose keys are equal and each the only one of its side; None is no key."""
    sides: list[dict[Any, list[int]]] = []
    for tensors in (ones, others):
        found: dict[Any, list[int]] = defaultdict(list)
        for index, one in tensors.items():
            if (value := key(index, one)) is not None:
                found[value].append(index)
        sides.append(found)
    return [(a[0], b[0]) for value, a in sides[0].items() if len(a) == 1 and len(b := sides[1].get(value, [])) == 1]


def _by_suffix(ones: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Pairs of which one name is the other's end, behind a dot, and no third could be meant."""
    ends: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for side, tensors in enumerate((ones, others)):
        for index, one in tensors.items():
            parts = one.name.split(".")
            for begin in range(len(parts)):
                ends[".".join(parts[begin:]), one.shape].append((side, index))
    pairs = {}
    for i, one in ones.items():
        found = ends[one.name, one.shape]
        if len(found) == 2 and found[0][0] != found[1][0]:
            pairs[i] = found[1][1] if found[1][0] else found[0][1]
    for j, other in others.items():
        found = ends[other.name, other.shape]
        if len(found) == 2 and found[0][0] != found[1][0]:
            pairs.setdefault(found[0][1] if not found[0][0] else found[1][1], j)
    taken: set[int] = set()
    return [(i, j) for i, j in pairs.items() if j not in taken and not taken.add(j)]  # type: ignore[func-returns-value]


def _by_weights(here: _Side, there: _Side) -> list[tuple[int, int]]:
    """Pairs of one shape whose samples have the same bits, as coarse as the coarser of the two dtypes."""
    if here.weights is None or there.weights is None:
        return []
    sides: list[dict[Any, list[int]]] = []
    coarse = any("16" in one.dtype for one in (*here.alone.values(), *there.alone.values()))
    for side in (here, there):
        found: dict[Any, list[int]] = defaultdict(list)
        for index, one in side.alone.items():
            values = side.values(index)
            if values is not None and len(np.unique(values)) >= LEAST_SHARED:
                found[one.shape, (coarse(values) if coarse else values).tobytes()].append(index)
        sides.append(found)
    pairs = [
        list(zip(mine, sides[1][key], strict=True))
        for key, mine in sides[0].items()
        if len(mine) == len(sides[1].get(key, ()))
    ]
    return [pair for several in pairs for pair in several]


def coarse(values: Floats) -> Floats:
    """Rounded to the 8 significant bits of bf16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


Part = tuple[int, Places, Places]
"""A tensor that is part of another, with the places of elements that both have sampled: of the part, of the whole."""


def _fused(parts: _Side, wholes: _Side, swapped: bool) -> list[tuple[list[Part], int, bool]]:
    """Tensors that lie one behind the other in one of the other training, as q, k and v do."""
    if parts.weights is None or wholes.weights is None:
        return []
    found, used = [], set[int]()
    for j, whole in wholes.alone.items():
        for run in _runs(parts, whole, used):
            shared = _shared(parts, run, wholes, j)
            if shared is not None:
                used.update(run)
                found.append((shared, j, swapped))
                break
    return found


def _runs(parts: _Side, whole: Tensor, used: set[int]) -> Iterable[list[int]]:
    """Two to four tensors of one kind whose rows add up to those of ``whole``; q, k, v may have biases in between."""
    indices = [i for i, one in parts.alone.items() if one.shape[1:] == whole.shape[1:] and i not in used and one.shape]
    for begin in range(len(indices)):
        for count in (2, 3, 4):
            run = indices[begin : begin + count]
            if len(run) == count and sum(parts.alone[i].numel for i in run) == whole.numel:
                yield run


def _shared(parts: _Side, run: Sequence[int], wholes: _Side, j: int) -> list[Part] | None:
    """The elements that both have sampled, if there are enough of them and all are equal."""
    whole = wholes.head.tensors[j]
    at = {int(place): k for k, place in enumerate(sampled(whole.numel, whole.samples))}
    offset, found, values = 0, [], list[float]()
    for i in run:
        one = parts.head.tensors[i]
        both = [(k, at[p]) for k, place in enumerate(sampled(one.numel, one.samples)) if (p := offset + int(place)) in at]
        own = np.array([k for k, _ in both], dtype=np.int64)
        other = np.array([k for _, k in both], dtype=np.int64)
        mine, theirs = parts.values(i), wholes.values(j)
        assert mine is not None
        assert theirs is not None
        if not np.array_equal(mine[own], theirs[other]):
            return None
        values += mine[own].tolist()
        found.append((i, own + parts.starts[i], other + wholes.starts[j]))
        offset += one.numel
    return found if len(set(values)) >= LEAST_SHARED else None


def _in_order(ones: Mapping[int, Tensor], others: Mapping[int, Tensor], key: Any) -> list[tuple[int, int]]:
    """Pairs of what is left, one after the other, of each shape that both have as often."""
    sides: list[dict[Any, list[int]]] = []
    for tensors in (ones, others):
        found: dict[Any, list[int]] = defaultdict(list)
        for index, one in tensors.items():
            found[key(one)].append(index)
        sides.append(found)
    both = [(mine, sides[1].get(value, [])) for value, mine in sides[0].items()]
    return [pair for mine, theirs in both if len(mine) == len(theirs) for pair in zip(mine, theirs, strict=True)]


def _untied(side: _Side) -> list[int]:
    """Tensors with a counterpart that began as one without: they are one tensor in the other training."""
    if side.weights is None:
        return []
    lonely = {values.tobytes() for i in side.alone if len(np.unique(values := side.values(i))) >= LEAST_SHARED}  # type: ignore[arg-type,union-attr]
    return [i for i in range(len(side.head.tensors)) if i not in side.alone and side.values(i).tobytes() in lonely]  # type: ignore[union-attr]


def _missing(alone: Mapping[int, Tensor], side: str) -> list[str]:
    names = [one.name for one in alone.values()]
    return [f"{_some(names)} of {side}: no counterpart"] if names else []


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
    """Pair steps by their number; where those have consumed other rows, by the rows consumed.

    Raises:
        ComparisonError: there is no step that both have.
    """
    numbers = sorted(set(a.steps) & set(b.steps))
    if numbers and all(_same_samples(a, b, number) for number in {numbers[0], numbers[-1]}):
        return StepPairs(tuple((n, n) for n in numbers), "number", _beyond(a, b, len(numbers), len(numbers)))
    consumed = [{one.samples: one.step for one in trace if one.samples is not None} for trace in (a, b)]
    both = sorted(set(consumed[0]) & set(consumed[1]))
    steps = tuple((consumed[0][samples], consumed[1][samples]) for samples in both)
    if len(steps) >= max(1, len(numbers) // 2):
        return StepPairs(steps, "samples", _beyond(a, b, len(steps), len(steps)))
    if numbers:
        return StepPairs(tuple((n, n) for n in numbers), "number", _beyond(a, b, len(numbers), len(numbers)))
    raise ComparisonError(f"A and B have no step in common: {_extent(a)} in A, {_extent(b)} in B; trace the same steps")


def _same_samples(a: Trace, b: Trace, number: int) -> bool:
    one, other = a.at(number).samples, b.at(number).samples
    return one is None or other is None or one == other


def _beyond(a: Trace, b: Trace, in_a: int, in_b: int) -> tuple[str, ...]:
    found = []
    for trace, used, name, other in ((a, in_a, "A", "B"), (b, in_b, "B", "A")):
        if len(trace) > used:
            found.append(f"{len(trace) - used} steps of {name} that {other} has not")
        if trace.skipped:
            found.append(f"{trace.skipped} torn or foreign lines of {name}'s trace")
    return tuple(found)


def _extent(trace: Trace) -> str:
    return f"steps {trace.steps[0]} to {trace.steps[-1]}" if trace.steps else "none"
