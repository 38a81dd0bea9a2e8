"""Read what autograd has recorded between a loss and the root, the tensor that backward begins with.

    terms = losses_in(root)                      # torch's losses that root is made of, and the way to each

Where the graph shows nothing (a fused or compiled loss, more than ``NODES`` operations) nothing is guessed. Tensors
that a script's own hooks have packed (checkpoints, tensors moved to the host) are not unpacked.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ds_silent.capture.loss_origin import Made, elements, made_of

NODES = 64  # nodes that are read, from the root down
BELOW = 12  # nodes between a sum or mean and the per-label losses that it adds up, or between a loss and a layer
MEAN, SUM, EACH = 1.0, 2.0, 3.0
"""How a term reduces its labels; EACH: a sum whose addends have weights of their own."""
_REDUCTIONS = ("none", "mean", "sum")
_LOSSES = ("Loss", "Entropy", "Margin")
_PLAIN = (
    "Add View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Alias Clone ToCopy Expand Stack Cat Select _DDPSink "
    "Transpose T Permute Slice Detach"
)
_NEUTRAL = frozenset(_PLAIN.split())
"""Operations that multiply nothing; their number may depend on the data."""
_OTHERS = "Mul Div Neg Sub Rsub Pow Exp Index MaskedSelect MaskedFill Where Abs Clamp"
_ELEMENTWISE = _NEUTRAL | frozenset(_OTHERS.split())
_BELOW = _ELEMENTWISE | frozenset(("LogSoftmax", "Softmax", "LogSigmoid", "Sigmoid"))
_MASKS = frozenset(("MulBackward0", "MaskedFillBackward0", "MaskedFillBackward1", "WhereBackward0"))
_NARROWER = {torch.float64: torch.tensor(0.0), torch.int64: torch.tensor(0, dtype=torch.int32)}
_OWN = "MulBackward1"  # by an argument of a torch function, such as label smoothing; independent of rows
_HOOKS_SHOWN = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # since torch 2.7


@dataclass(frozen=True, slots=True)
class Constants:
    """Collect the script's own numbers on a way, and those of a wrapper that the script has handed its loss to."""

    divisors: tuple[float, ...] = ()  # other than 1
    times: float = 1.0  # product of the numbers that multiply
    by_tensor: bool = False  # a tensor multiplies or divides, too
    wrapper: float | None = None  # the loss that was handed over times this is the root; None: no wrapper
    of_each: bool = False  # its labels' weights are their own, and those that are ignored count in a mean, too
    by_hand: bool = False  # a script's own sum or mean: some numbers may belong to what it adds up
    by_items: bool = False  # what torch adds up over its labels is divided by num_items_in_batch, once

    def through(self, operation: str, number: float | None) -> Constants:
        """Return the numbers with one operation more; ``number``: by which it multiplies."""
        if number is None and operation in ("Mul", "Div"):
            return replace(self, by_tensor=True)
        if number is None or number == 1.0:
            return self
        if operation == "Div":
            return replace(self, divisors=(*self.divisors, 1.0 / number if number else math.inf))
        return replace(self, times=self.times * number)


@dataclass(frozen=True, slots=True)
class _Filled:
    """Describe a sum by hand from which one mask leaves elements out, to recognise two over the same labels."""

    mask: int  # where it lies
    made_of: Made  # of the tensor that is gathered, or added up over the classes
    classes: int  # over which the elements are added up; 0: gathered
    by_items: bool


@dataclass(slots=True)
class Term:
    """Describe a loss and one way from the root to it. ``kind`` is 0 if its reduction is unknown."""

    node: Any
    kind: float
    averaged: bool
    names: tuple[str, ...]  # of the operations on the way, without numbers
    shown: tuple[str, ...]  # the same with numbers
    factor: float  # product of the script's own numbers on the way
    labels: int | Tensor | None = None  # None: as many as weights come in, or unknown; EACH: a mask of those that count
    weights: Tensor | None = None  # one number for all class weights
    constants: Constants = Constants()
    by_hand: bool = False  # the script's own mean or sum; a minus before it belongs to what it adds up, as in -log p
    flowed: bool = False  # its gradient has come
    above: Constants = Constants()  # the numbers down to where it is no scalar
    below: tuple[str, ...] = ()  # the script's own numbers in what the loss is made of, such as a temperature
    filled: _Filled | None = None
    smoothing: Term | None = None  # what smooths the same labels: a sum over the classes
    left: float = 1.0  # of a label's weight 1 to its own class, by cross_entropy's label_smoothing

    @property
    def nodes(self) -> list[tuple[Any, Term]]:
        """Return what is to be hooked, with its term."""
        return [(one.node, one) for one in (self, self.smoothing) if one is not None]


@dataclass(slots=True)
class _Way:
    """Describe the way from the root to a node."""

    node: Any
    place: int = 0  # which output of the node
    names: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    factor: float = 1.0
    constants: Constants = Constants()

    def through(self, name: str, operation: str, items: Any = None) -> _Way:
        """Return the way with this node's own operation; ``items``: num_items_in_batch, which is known by identity."""
        if operation in _NEUTRAL:
            return self
        times = _number_of(self.node, operation)
        if operation == "Div" and not self.constants.by_items and _is_divided_by(self.node, times, items):
            constants = replace(self.constants, by_items=True)
            return _Way(self.node, self.place, (*self.names, name), (*self.shown, name), self.factor, constants)
        shown = name if times is None else f"{name} x {times:.6g}"
        factor = self.factor * (1.0 if times is None else times)
        constants = self.constants if name == _OWN else self.constants.through(operation, times)
        name = shown if name == _OWN else name
        return _Way(self.node, self.place, (*self.names, name), (*self.shown, shown), factor, constants)

    def on(self) -> Iterable[_Way]:
        """Return the ways to what the node was made of."""
        inner = made_of(self.node, self.place)
        return [_Way(node, place, self.names, self.shown, self.factor, self.constants) for node, place in inner]


def losses_in(root: Tensor, handed: Made | None = None, items: Any = None) -> list[Term] | None:
    """Return :func:`terms_of`; None where a torch release has other nodes, which must not end the observation."""
    try:
        return terms_of(root, handed, items)
    except Exception:
        return None


def terms_of(root: Tensor, handed: Made | None = None, items: Any = None) -> list[Term] | None:
    """Return the losses that ``root`` is made of, nearest first; None if they are too far or too many.

    Args:
        handed: identifies the loss that the script has handed to a wrapper, which made the root of it.
        items: the num_items_in_batch that the forward was given.
    """
    waiting, found = deque([_Way(root.grad_fn, root.output_nr)]), list[Term]()
    for _ in range(NODES):
        if not waiting:
            return _smoothed(_without_own_smoothing(found))
        way = waiting.popleft()
        if handed is not None and (way.node._sequence_nr(), way.place) == handed:
            way = replace(way, constants=Constants(wrapper=way.factor))
        name = way.node.name()
        loss = _loss(way, name)
        if loss is not None:
            found.append(loss)
            continue
        operation = name.partition("Backward")[0]
        if elements(way.node, way.place) != 1:
            found.append(
                Term(None, 0.0, False, (*way.names, name), (*way.shown, name), way.factor, above=way.constants)
            )
        elif operation in ("Mean", "Sum") and math.prod(sizes := way.node._saved_self_sym_sizes) != 1:
            found += _added_up(way, name, math.prod(sizes))
        elif name != "torch::autograd::AccumulateGrad":  # a learned scalar is a weight, not a loss
            waiting.extend(way.through(name, operation, items).on())
    return None


def _added_up(way: _Way, name: str, count: int) -> list[Term]:
    """Return what a sum or mean adds up: per-label losses if they are near, else the script's own numbers."""
    mean = name.startswith("Mean")
    start = _Way(way.node, way.place, (*way.names, name), (*way.shown, name), way.factor, way.constants)
    waiting, losses, end = deque(start.on()), list[Term](), None
    masks, filled, one_way = 0, None, True
    for _ in range(BELOW):
        if not waiting:
            break
        inner = waiting.popleft()
        inner_name = inner.node.name()
        loss = _loss(inner, inner_name)
        operation = inner_name.partition("Backward")[0]
        if loss is not None:
            averaged = mean or loss.averaged
            share = loss.factor / count if mean and loss.kind == MEAN else loss.factor
            losses.append(replace(loss, averaged=averaged, factor=share))
        elif operation in _ELEMENTWISE:
            passed = inner.through(inner_name, operation)
            masks += operation not in _NEUTRAL and passed.shown[-1] in _MASKS
            filled = _saved(inner.node, "mask") if operation == "MaskedFill" else filled
            waiting.extend(passed.on())
            one_way = one_way and len(waiting) == 1
        elif end is None:
            end = inner
    if losses:
        return losses
    end = end or start
    # a mask multiplies or replaces, also within a script's own function: how many labels it leaves is unknown, but for
    # one mask by which a sum leaves elements out
    labels: int | Tensor | None = None if masks or isinstance(end.node, BackwardCFunction) else count
    if masks == 1 and one_way and not mean and isinstance(filled, Tensor) and filled.numel() == count:
        labels = count - filled.sum()
    kind = MEAN if mean else SUM
    constants = replace(end.constants, by_items=False)  # of elements, which need not be labels
    term = Term(way.node, kind, mean, end.names, end.shown, end.factor, labels, None, constants, by_hand=True)
    term.above, term.below = way.constants, _numbers_below(end.node)
    if isinstance(labels, Tensor) and isinstance(filled, Tensor):
        term.filled = _filled(end.node, filled, way.constants.by_items)
    return [term]


def _filled(node: Any, mask: Tensor, by_items: bool) -> _Filled | None:
    """Describe a masked sum of what ``node`` has gathered, or has added up over its classes; None for another."""
    operation, inner = node.name().partition("Backward")[0], node.next_functions
    if operation not in ("Gather", "Sum") or inner[0][0] is None:
        return None
    made_of = int(inner[0][0]._sequence_nr()), inner[0][1]
    sizes, dims = node._saved_self_sym_sizes if operation == "Sum" else (), getattr(node, "_saved_dim", ())
    classes = math.prod(sizes[dim - 2**64 if dim >= 2**63 else dim] for dim in dims) if operation == "Sum" else 0
    return _Filled(mask.data_ptr(), made_of, classes, by_items)


def _without_own_smoothing(terms: list[Term]) -> list[Term]:
    """Leave out the terms by which cross_entropy smooths its labels: they belong to those that it leaves less."""
    for own in [term for term in terms if term.left != 1.0]:
        place = next(place for place, name in enumerate(own.names) if name.startswith(_OWN))
        beside = [one for one in terms if one is not own and one.names[:place] == own.names[:place]]
        left_out = {id(one) for one in beside if one.names[place].startswith(_OWN)}
        terms = [one for one in terms if id(one) not in left_out]
    return terms


def _smoothed(terms: list[Term]) -> list[Term]:
    """Join a label's own term with the one that smooths it over the classes, as a Trainer's LabelSmoother makes them.

    A label weighs what flows into its own element, and once for each class what flows into the other.
    """
    for own in terms:
        for other in terms:
            one, two = own.filled, other.filled
            if one and two and one.classes == 0 < two.classes and one == replace(two, classes=0, by_items=one.by_items):
                times = own.constants.times + other.constants.times
                constants = replace(own.constants, times=times, by_items=one.by_items)
                factor = own.factor + other.factor
                joined = replace(own, factor=factor, constants=constants, filled=None, smoothing=other)
                return [joined if term is own else term for term in terms if term is not other]
    return terms


def _loss(way: _Way, name: str) -> Term | None:
    """Read a loss of torch; None if the node is not one."""
    node = way.node
    if not any(word in name for word in _LOSSES):  # reading a missing attribute costs more than the name
        return None
    reduction = getattr(node, "_saved_reduction", None)
    if not isinstance(reduction, int):
        return None
    said = [_REDUCTIONS[reduction]]
    labels: int | Tensor | None = None
    if name.startswith("NllLoss"):
        ignored = _ignored_by(node)
        said += [f"ignore_index {ignored}"] if ignored != -100 else []
        if reduction == 1 and _saved(node, "weight") is None:
            labels = _saved(node, "total_weight")  # each label weighs 1: torch has counted them
        else:
            target = _saved(node, "target")
            labels = None if target is None else target != ignored
            labels = labels.sum() if reduction and labels is not None else labels
    elif reduction:
        inner, place = node.next_functions[0]
        labels = None if inner is None else math.prod(inner._input_metadata[place].shape)
    operation = name.partition("Backward")[0]
    weights = [
        (words, saved) for which, words in _WEIGHTS.get(operation, ()) if (saved := _saved(node, which)) is not None
    ]
    said += [words for words, _ in weights]
    said += [f"{which} {getattr(node, f'_saved_{which}'):g}" for which in _SHAPES.get(operation, ())]
    name = f"{name} ({', '.join(said)})"
    unknown = name.startswith("NllLoss") and not reduction and labels is None  # which labels are ignored
    kind = 0.0 if unknown else (EACH, MEAN, SUM)[reduction]
    number = _one_number(weights[0][1]) if weights else None
    names, shown = (*way.names, name), (*way.shown, name)
    constants = replace(way.constants, by_items=way.constants.by_items and operation.startswith("NllLoss"))
    term = Term(node, kind, reduction == 1, names, shown, way.factor, labels, number, constants, above=way.constants)
    own = (float(one.rpartition(" ")[2]) for one in way.names if one.startswith(_OWN))
    term.below, term.left = _numbers_below(node), (math.prod(own) or 1.0) if operation.startswith("NllLoss") else 1.0
    term.factor /= term.left
    return term


def _numbers_below(node: Any) -> tuple[str, ...]:
    """Return the operations with the script's own numbers, from a loss down to where a model's layers begin."""
    found = []
    for _ in range(BELOW):
        inner = [one for one, _ in node.next_functions if one is not None]
        if len(inner) != 1:  # of several ways, or of none
            break
        [node] = inner
        name = node.name()
        operation = name.partition("Backward")[0]
        if operation not in _BELOW:
            break
        number = _number_of(node, operation)
        found += [] if number is None or abs(number) == 1.0 else [f"{name} x {number:.6g}"]
    return tuple(found)


_CLASSES, _POSITIVE = ("weight", "class weights"), ("pos_weight", "positive weights")
_WEIGHTS = {
    "NllLoss": (_CLASSES,),
    "NllLoss2D": (_CLASSES,),
    "BinaryCrossEntropy": (("weight", "weights"),),
    "BinaryCrossEntropyWithLogits": (("weight", "weights"), _POSITIVE),
}
_SHAPES = {"SmoothL1Loss": ("beta",), "HuberLoss": ("delta",)}


def _one_number(weights: Tensor) -> Tensor:
    flat = weights.detach().float().reshape(-1)
    return (flat * torch.arange(1.0, 1.0 + len(flat), device=flat.device)).sum()


def _saved(node: Any, which: str) -> Any:
    """Return a tensor that a node has saved; None if it saved none, or if hooks have packed it."""
    raw = getattr(node, f"_raw_saved_{which}", None)
    if raw is not None:
        if _HOOKS_SHOWN and raw.unpack_hook is not None:
            return None
        if not _HOOKS_SHOWN and which not in ("other", "self"):  # an operation's scalar is never packed
            return None
    return getattr(node, f"_saved_{which}", None)


def target_of(term: Term) -> tuple[Tensor, int] | None:
    """Return the labels of a term that is torch's cross entropy, and its ignore_index; None of any other."""
    node = term.node
    if node is None or not node.name().startswith("NllLoss"):
        return None
    target = _saved(node, "target")
    return (target, _ignored_by(node)) if type(target) is Tensor else None


def _ignored_by(node: Any) -> int:
    """Return the ignore_index of a cross entropy, which its node shows without a sign."""
    ignored = int(node._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored


def _number_of(node: Any, operation: str) -> float | None:
    """Return the Python number by which the script multiplies; None for a tensor."""
    if operation in ("Neg", "Rsub"):
        return -1.0
    if operation not in ("Mul", "Div"):
        return None
    for which in ("other", "self"):
        value = _saved(node, which)
        if isinstance(value, Tensor):
            narrower = _NARROWER.get(value.dtype) if value.dim() == 0 and value.device.type == "cpu" else None
            # a Python number yields to a tensor's dtype, another scalar tensor does not
            if narrower is None or torch.result_type(value, narrower) is value.dtype:
                continue
            value = value.item()
        if isinstance(value, (int, float)):
            number = float(value)
            return number if operation == "Mul" else (1.0 / number if number else math.inf)
    return None


def _is_divided_by(node: Any, times: float | None, items: Any) -> bool:
    """Tell whether a division is by ``items``: a tensor is known by its memory, which waits for no device."""
    if type(items) is Tensor:
        divisor = _saved(node, "other")
        return type(divisor) is Tensor and divisor.numel() == 1 and divisor.data_ptr() == items.data_ptr()
    return isinstance(items, int) and times is not None and math.isclose(times * items, 1.0, rel_tol=1e-6)
