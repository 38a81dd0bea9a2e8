"""Which tensor and layer of one training is which of another's; what has no counterpart is said.

    pairs = pair_tensors(head_a, head_b, weights_a, weights_b, names={})
    pairs.tensors, pairs.layers, pairs.left_out

Tensors are paired by the user's map, by equal names, by names that differ in wrappers' prefixes, by the samples of
their first weights (bits that are equal are no accident; also of q, k and v that one of the trainings has fused), and
last by shape and order. Only samples of tensors that are laid out alike can be compared: of a transposed tensor that
is next to none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.trace import Floats, Head, Tensor, sampled

Places = npt.NDArray[np.int64]
WRAPPERS = {
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module"
}  # fmt: skip
"""Parts of names that wrappers of torch, DeepSpeed and Lightning add."""
ALIGNMENT = 8
"""Elements: of each tensor's offset in the sketch's long vector, as ``maths.sketch.offsets_of`` lays them."""
LEAST_SHARED = 3
"""Different sampled values that two tensors of other shapes must share, to be held for the same numbers."""
Key = Callable[[Tensor], Any]


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
        name: in A.
        a, b: places in the heads' layers.
        order: in which the forward comes to it.
        sketched: whether their sketches subtract; else only their norms are compared.
    """

    name: str
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
        left_out.append(f"the direction of the gradient in {listed(by_norm)}: its tensors lie elsewhere, norms only")
    if blurred:
        left_out.append(f"gradients of {listed(blurred)}: not all of its tensors have a counterpart")
    of = {(one.a, one.b): place for place, one in enumerate(layers)}
    tensors = []
    for (i, j), (how, own, other) in sorted(found.items()):
        one, two = here.head.tensors[i], there.head.tensors[j]
        place, order = of.get((one.layer, two.layer), -1), i if one.order is None else one.order
        where = here.head.layers[one.layer].name
        tensors.append(TensorPair(one.name, two.name, place, where, order, own, other, how, (one.dtype, two.dtype)))
    unseen = [one.name for one in tensors if not len(one.here)]
    if unseen:
        left_out.append(f"weights of {listed(unseen)}: laid out otherwise, no sampled element is in both")
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
    order = _order(here.head)
    pairs = [LayerPair(here.head.layers[a].name, a, b, order[a], sketched) for a, b, sketched in sorted(chosen)]
    return tuple(pairs), blurred


def _order(head: Head) -> dict[int, int]:
    """Where the forward comes to each layer first; where that is not known, where its first tensor is listed."""
    first: dict[int, int] = {}
    for place, one in enumerate(head.tensors):
        at = place if one.order is None else one.order
        first[one.layer] = min(first.get(one.layer, at), at)
    return first


def _missing(alone: Mapping[int, Tensor], side: str) -> list[str]:
    return [f"only {side} trains {listed([one.name for one in alone.values()])}"] if alone else []


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# -- the pairs, one way after the other --------------------------------------------------------------------------------


@dataclass
class Side:
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

    def values(self, index: int) -> Floats:
        assert self.weights is not None
        return self.weights[self.starts[index] : self.starts[index + 1]]

    def offsets(self) -> list[int]:
        sizes = [-(-one.numel // ALIGNMENT) * ALIGNMENT for one in self.head.tensors]
        return np.cumsum([0, *sizes]).tolist()[:-1]  # type: ignore[no-any-return]


_NONE: Places = np.zeros(0, dtype=np.int64)
Match = tuple[str, int, int, Places, Places]
"""How, the two tensors, and the places of the elements that both have sampled."""


def matched(here: Side, there: Side, names: Mapping[str, str]) -> Iterator[Match]:
    """Yield the pairs, the surest first; ComparisonError where the map names what is not there."""

    def together(how: str, pairs: Iterable[tuple[int, int]]) -> Iterator[Match]:
        for i, j in list(pairs):
            one, other = here.alone.pop(i), there.alone.pop(j)
            alike = one.shape == other.shape and one.samples == other.samples
            yield how, i, j, *((here.places(i), there.places(j)) if alike else (_NONE, _NONE))

    yield from together("map", _mapped(here, there, names))
    yield from together("name", _unique(here, there, lambda one: (one.name, one.shape)))
    yield from together("prefix", _unique(here, there, lambda one: (unwrapped(one.name), one.shape)))
    yield from together("prefix", _by_suffix(here.alone, there.alone))
    yield from together("weights", _by_weights(here, there))
    for parts, wholes in ((here, there), (there, here)):
        for found, whole in _fused(parts, wholes):
            wholes.alone.pop(whole)
            for part, own, shared in found:
                parts.alone.pop(part)
                yield ("fused", part, whole, own, shared) if parts is here else ("fused", whole, part, shared, own)
    orders: dict[str, Key] = {"order": lambda one: one.shape, "transposed": lambda one: tuple(sorted(one.shape))}
    for how, key in orders.items():
        yield from together(how, _in_order(_keys(here, key), _keys(there, key)))


def _mapped(here: Side, there: Side, names: Mapping[str, str]) -> list[tuple[int, int]]:
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


def _first(side: Side) -> str:
    return ascii(side.head.tensors[0].name) if side.head.tensors else "not there"


def unwrapped(name: str) -> str:
    """Return a tensor's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _keys(side: Side, key: Key) -> dict[int, Any]:
    return {index: key(one) for index, one in side.alone.items()}


def _unique(here: Side, there: Side, key: Key) -> list[tuple[int, int]]:
    """Pairs whose keys are equal, and each the only one of its side."""
    return [(a[0], b[0]) for a, b in _groups(_keys(here, key), _keys(there, key)) if len(a) == len(b) == 1]


def _in_order(ones: Mapping[int, Any], others: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Pairs of what has one key, one after the other, where both sides have it as often."""
    both = _groups(ones, others)
    return [pair for mine, theirs in both if len(mine) == len(theirs) for pair in zip(mine, theirs, strict=True)]


def _groups(ones: Mapping[int, Any], others: Mapping[int, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """The tensors of each key: of A, and of B; of both sides the keys by tensor."""
    mine, theirs = (defaultdict[Any, list[int]](list) for _ in range(2))
    for found, keys in ((mine, ones), (theirs, others)):
        for index, key in keys.items():
            found[key].append(index)
    return ((own, theirs.get(key, [])) for key, own in mine.items())


def _by_suffix(ones: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Pairs of which one name is the other's end, behind a dot, and no third could be meant."""
    ends: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for side, tensors in enumerate((ones, others)):
        for index, one in tensors.items():
            parts = one.name.split(".")
            for begin in range(len(parts)):
                ends[".".join(parts[begin:]), one.shape].append((side, index))
    pairs: dict[int, int] = {}
    for one in (*ones.values(), *others.values()):
        found = ends[one.name, one.shape]
        if [side for side, _ in found] == [0, 1]:
            pairs.setdefault(found[0][1], found[1][1])
    return [(i, j) for j, i in {j: i for i, j in pairs.items()}.items()]


def _by_weights(here: Side, there: Side) -> list[tuple[int, int]]:
    """Pairs of one shape whose samples have the same bits, as coarse as the coarser of the two dtypes."""
    if here.weights is None or there.weights is None:
        return []
    rounds = any("16" in one.dtype for one in (*here.alone.values(), *there.alone.values()))
    sides: tuple[dict[int, Any], ...] = ({}, {})
    for side, keys in zip((here, there), sides, strict=True):
        for index, one in side.alone.items():
            values = side.values(index)
            if len(np.unique(values)) >= LEAST_SHARED:
                keys[index] = one.shape, (coarse(values) if rounds else values).tobytes()
    return _in_order(*sides)


def coarse(values: Floats) -> Floats:
    """Rounded to the 8 significant bits of bf16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


Part = tuple[int, Places, Places]
"""A tensor that is part of another, with the places of elements that both have sampled: of the part, of the whole."""


def _fused(parts: Side, wholes: Side) -> list[tuple[list[Part], int]]:
    """Tensors that lie one behind the other in one of the other training, as q, k and v do."""
    if parts.weights is None or wholes.weights is None:
        return []
    found, used = [], set[int]()
    for j, whole in wholes.alone.items():
        for run in _runs(parts, whole, used):
            shared = _shared(parts, run, wholes, j)
            if shared is not None:
                used.update(run)
                found.append((shared, j))
                break
    return found


def _runs(parts: Side, whole: Tensor, used: set[int]) -> Iterable[list[int]]:
    """Two to four tensors of one kind whose rows add up to those of ``whole``; q, k, v may have biases in between."""
    indices = [i for i, one in parts.alone.items() if one.shape[1:] == whole.shape[1:] and i not in used and one.shape]
    for begin in range(len(indices)):
        for count in (2, 3, 4):
            run = indices[begin : begin + count]
            if len(run) == count and sum(parts.alone[i].numel for i in run) == whole.numel:
                yield run


def _shared(parts: Side, run: Sequence[int], wholes: Side, j: int) -> list[Part] | None:
    """The elements that both have sampled, if there are enough of them and all are equal."""
    whole = wholes.head.tensors[j]
    at = {place: k for k, place in enumerate(sampled(whole.numel, whole.samples).tolist())}
    offset, found, values = 0, [], list[float]()
    for i in run:
        one = parts.head.tensors[i]
        places = enumerate((offset + sampled(one.numel, one.samples)).tolist())
        own, other = np.array([(k, at[p]) for k, p in places if p in at], dtype=np.int64).reshape(-1, 2).T
        mine, theirs = parts.values(i), wholes.values(j)
        if not np.array_equal(mine[own], theirs[other]):
            return None
        values += mine[own].tolist()
        found.append((i, own + parts.starts[i], other + wholes.starts[j]))
        offset += one.numel
    return found if len(set(values)) >= LEAST_SHARED else None


def untied(side: Side) -> list[int]:
    """Tensors with a counterpart that began as one without: they are one tensor in the other training."""
    if side.weights is None:
        return []
    lonely = {values.tobytes() for i in side.alone if len(np.unique(values := side.values(i))) >= LEAST_SHARED}
    return [i for i in range(len(side.head.tensors)) if i not in side.alone and side.values(i).tobytes() in lonely]
