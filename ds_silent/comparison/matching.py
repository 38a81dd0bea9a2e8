"""Which tensor of one training is which of another's, by names, by their first weights, by shape and order.

    sides = Side(head_a, first_weights_a), Side(head_b, first_weights_b)
    for how, i, j, here, there in matched(*sides, names={}): ...

What is paired leaves :attr:`Side.alone`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.trace import Head, Tensor, sampled

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
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

    def values(self, index: int) -> Floats | None:
        return None if self.weights is None else self.weights[self.starts[index] : self.starts[index + 1]]

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
            if values is not None and len(np.unique(values)) >= LEAST_SHARED:
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
        assert mine is not None
        assert theirs is not None
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
    lonely = {values.tobytes() for i in side.alone if len(np.unique(values := side.values(i))) >= LEAST_SHARED}  # type: ignore[arg-type,union-attr]
    return [i for i in range(len(side.head.tensors)) if i not in side.alone and side.values(i).tobytes() in lonely]  # type: ignore[union-attr]
