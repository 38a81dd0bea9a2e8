"""How much each label counts, and what lies between a loss and the tensor that backward begins with.

    objective = LocalObjective()
    objective.begins(root)               # as a backward begins: its graph is read, its loss hooked
    objective.reached = True             # at a gradient of the model: that backward was the training's
    objective.text, objective.structure  # of the step so far
    objective.numbers()                  # an Observation's part; nothing was waited for

A loss of torch's own knows its reduction, and a hook on it gets the gradient that flows in: what each label, or the
mean of them, is multiplied by until it reaches the root. Between the two lie a few operations on single numbers. Those
with a number of Python's are a part of the script, and the same on all ranks; those with a tensor depend on data.

Where nothing is known (a fused loss, a compiled one, more than ``NODES`` operations) nothing is guessed. What a script
has packed with hooks of its own (checkpoints, tensors that were moved to the host) is not unpacked.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_silent.exchange.observation import Objective as Numbers
from ds_silent.maths.fingerprint import short_hash

NODES = 64  # that are looked at, from the root down
BELOW = 12  # between a sum or a mean and the losses of single labels that it adds up
MOST_LOSSES = 8  # of one backward that are hooked
MEAN, SUM, EACH = 1.0, 2.0, 3.0
"""What a term makes of its labels; EACH: a sum whose addends were weighed one by one."""
_REDUCTIONS = ("none", "mean", "sum")
_LOSSES = ("Loss", "Entropy", "Margin")
_PLAIN = (
    "Add View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Alias Clone ToCopy Expand Stack Cat Select _DDPSink "
    "Transpose T Permute Slice Detach"
)
_NEUTRAL = frozenset(_PLAIN.split())
"""Operations that multiply nothing: how many there are may depend on the data."""
_OTHERS = "Mul Div Neg Sub Rsub Pow Exp Index MaskedSelect MaskedFill Where Abs Clamp"
_ELEMENTWISE = _NEUTRAL | frozenset(_OTHERS.split())
_NARROWER = {torch.float64: torch.tensor(0.0), torch.int64: torch.tensor(0, dtype=torch.int32)}
_OWN = "MulBackward1"  # by a number that a function of torch's was given, as its label smoothing: of no rows
_HOOKS_SHOWN = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # since torch 2.7


@dataclass(slots=True)
class Term:
    """A loss, on one way from the root to it. ``kind`` is 0 where nobody knows what it makes of its labels."""

    node: Any
    kind: float
    averaged: bool
    names: tuple[str, ...]  # of the operations on the way, without their numbers
    shown: tuple[str, ...]  # with them
    factor: float  # product of the script's own numbers on the way
    labels: int | Tensor | None = None  # None: as many as weights come in, or not known
    weights: Tensor | None = None  # one number of the weights of its classes


@dataclass(slots=True)
class _Way:
    """From the root to a node."""

    node: Any
    place: int = 0  # which output of the node
    names: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    factor: float = 1.0

    def through(self, name: str, operation: str) -> _Way:
        """With this node's own operation."""
        if operation in _NEUTRAL:
            return self
        times = _number_of(self.node, operation)
        shown = name if times is None else f"{name} x {times:.6g}"
        factor = self.factor * (1.0 if times is None else times)
        name = shown if name == _OWN else name
        return _Way(self.node, self.place, (*self.names, name), (*self.shown, shown), factor)

    def on(self) -> Iterable[_Way]:
        """To what the node was made of."""
        inner, outputs = self.node.next_functions, getattr(self.node, "_input_metadata", ())
        if 1 < len(outputs) == len(inner):  # a wrapper of several outputs
            inner = inner[self.place : self.place + 1]
        return [_Way(node, place, self.names, self.shown, self.factor) for node, place in inner if node is not None]


def _tried(root: Tensor) -> list[Term] | None:
    """:func:`terms_of`; None where a release of torch's has other nodes: what is not known ends no observation."""
    try:
        return terms_of(root)
    except Exception:
        return None


def terms_of(root: Tensor) -> list[Term] | None:
    """The losses that ``root`` is made of, the nearest first; None where they are too far or too many."""
    waiting, found = deque([_Way(root.grad_fn, root.output_nr)]), list[Term]()
    for _ in range(NODES):
        if not waiting:
            return found
        way = waiting.popleft()
        name = way.node.name()
        loss = _loss(way, name)
        if loss is not None:
            found.append(loss)
            continue
        operation = name.partition("Backward")[0]
        outputs = getattr(way.node, "_input_metadata", ())
        if len(outputs) > way.place and math.prod(outputs[way.place].shape) != 1:
            found.append(Term(None, 0.0, False, (*way.names, name), (*way.shown, name), way.factor))
        elif operation in ("Mean", "Sum") and math.prod(sizes := way.node._saved_self_sym_sizes) != 1:
            found += _added_up(way, name, math.prod(sizes))
        elif name != "torch::autograd::AccumulateGrad":  # of a single number that is learned: a weight, and no loss
            waiting.extend(way.through(name, operation).on())
    return None


def _added_up(way: _Way, name: str, count: int) -> list[Term]:
    """What a sum or a mean adds up: losses of single labels where they are near, else numbers of the script's own."""
    mean = name.startswith("Mean")
    start = _Way(way.node, way.place, (*way.names, name), (*way.shown, name), way.factor)
    waiting, losses, end = deque(start.on()), list[Term](), None
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
            waiting.extend(inner.through(inner_name, operation).on())
        elif end is None:
            end = inner
    if losses:
        return losses
    end = end or start
    # a mask multiplies: how many are added up is not known
    labels = None if not mean and "MulBackward0" in end.shown[len(start.shown) :] else count
    return [Term(way.node, MEAN if mean else SUM, mean, end.names, end.shown, end.factor, labels)]


def _loss(way: _Way, name: str) -> Term | None:
    """A loss of torch's own."""
    node = way.node
    if not any(word in name for word in _LOSSES):  # an attribute that is not there costs more than its name
        return None
    reduction = getattr(node, "_saved_reduction", None)
    if not isinstance(reduction, int):
        return None
    said = [_REDUCTIONS[reduction]]
    labels: int | Tensor | None = None
    if name.startswith("NllLoss"):
        ignored = node._saved_ignore_index
        ignored -= 2**64 if ignored >= 2**63 else 0
        said += [f"ignore_index {ignored}"] if ignored != -100 else []
        if reduction == 1 and _saved(node, "weight") is None:
            labels = _saved(node, "total_weight")  # of 1 each: counted already
        else:
            target = _saved(node, "target")
            labels = None if target is None else (target != ignored).sum()
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
    kind = (EACH, MEAN, SUM)[reduction]
    number = _one_number(weights[0][1]) if weights else None
    return Term(node, kind, reduction == 1, (*way.names, name), (*way.shown, name), way.factor, labels, number)


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
    """What a node has kept; None where it has not, or where somebody's hooks have packed it."""
    raw = getattr(node, f"_raw_saved_{which}", None)
    if raw is not None:
        if _HOOKS_SHOWN and raw.unpack_hook is not None:
            return None
        if not _HOOKS_SHOWN and which not in ("other", "self"):  # the single number of an operation is never packed
            return None
    return getattr(node, f"_saved_{which}", None)


def _number_of(node: Any, operation: str) -> float | None:
    """What the script multiplies by: a number of Python's, and no tensor."""
    if operation in ("Neg", "Rsub"):
        return -1.0
    if operation not in ("Mul", "Div"):
        return None
    for which in ("other", "self"):
        value = _saved(node, which)
        if isinstance(value, Tensor):
            narrower = _NARROWER.get(value.dtype) if value.dim() == 0 and value.device.type == "cpu" else None
            # a number of Python's yields to a tensor's type, another tensor of no dimension does not
            if narrower is None or torch.result_type(value, narrower) is value.dtype:
                continue
            value = value.item()
        if isinstance(value, (int, float)):
            number = float(value)
            return number if operation == "Mul" else (1.0 / number if number else math.inf)
    return None


Weighed = tuple[Tensor, Tensor, Tensor, Tensor | float]
"""Of one term's labels: sum, smallest and largest of their weights, and how many."""


@dataclass
class _Backward:
    """One backward, until it is known whether it was the training's."""

    terms: list[Term] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    flows: list[tuple[Term, Tensor]] = field(default_factory=list)
    each: list[Weighed] = field(default_factory=list)
    known: bool = True  # all that flows in was understood


class LocalObjective:
    """Of one rank, over the micro-batches of a step.

    Attributes:
        reached: whether the backward under way has brought the model a gradient.
    """

    def __init__(self) -> None:
        self.reached = False
        self._under_way: _Backward | None = None
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._drop()
        self._texts, self._weighed = dict[tuple[str, ...], str](), list[Weighed]()
        self._known, self._readable, self._count = True, True, 0
        self._factors: list[float] = []
        self._others: set[tuple[str, ...]] = set()
        self._reduction = 0.0
        self._class_weights: float | Tensor = 0.0

    def begins(self, root: Any, own: bool = False) -> None:
        """A backward begins with ``root``, before anything of it has run; ``own``: it surely reaches the model."""
        self._settle()
        self.reached = own
        self._under_way = one = _Backward()
        single = isinstance(root, Tensor) and root.numel() == 1 and root.grad_fn is not None
        terms = _tried(root) if single and not _compiled() else None
        if not terms:
            one.known = False
            return
        names = next((term.names for term in terms if term.kind), None)
        weighed = [term for term in terms if term.names == names]
        one.known = 0 < len(weighed) <= MOST_LOSSES
        for term in weighed if one.known else ():
            one.handles.append(term.node.register_prehook(partial(_flows_in, one, term)))
        for term in terms:
            term.node = None  # nothing of the graph outlives its backward
        one.terms = terms

    @property
    def text(self) -> str:
        """What backward begins with, for people; empty where it is not known."""
        self._settle()
        if not self._readable:
            return ""
        mains = "; ".join(self._texts[names] for names in sorted(self._texts))
        return " + ".join([mains, *(" > ".join(shown) for shown in sorted(self._others))])

    @property
    def structure(self) -> tuple[tuple[str, ...], ...]:
        """The same without its numbers; empty where it is not known."""
        self._settle()
        return tuple(sorted(self._texts)) if self._readable else ()

    @property
    def factor(self) -> float:
        """The script's own numbers between root and loss; 0 where they are not known, or not one in all the step."""
        self._settle()
        low, high = min(self._factors, default=0.0), max(self._factors, default=0.0)
        return high if self._readable and math.isclose(low, high, rel_tol=1e-6) else 0.0

    def numbers(self) -> Numbers[float | Tensor]:
        """Of the step's backwards; device values stay there."""
        self._settle()
        own: dict[str, float | Tensor] = {
            "factor": self.factor,
            "reduction": self._reduction,
            "count": float(self._count),
            "others": short_hash(sorted(self._others)),
            "class_weights": self._class_weights,
        }
        if not self._known or not self._weighed:
            return Numbers(**own)
        totals, smallest, largest, labels = zip(*self._weighed, strict=True)
        return Numbers(
            known=1.0,
            labels=sum(labels),
            weight=torch.stack(totals).sum(),
            smallest=torch.stack(smallest).min(),
            largest=torch.stack(largest).max(),
            **own,
        )

    def _drop(self) -> None:
        for handle in () if self._under_way is None else self._under_way.handles:
            handle.remove()
        self._under_way, self.reached = None, False

    def _settle(self) -> None:
        """The backward under way is over; one that brought no gradient was another model's."""
        one, counts = self._under_way, self.reached
        self._drop()
        if one is None or not counts:
            return
        self._count += 1
        main = next((term for term in one.terms if term.kind), one.terms[0] if one.terms else None)
        if main is None or not math.isfinite(main.factor) or main.factor == 0.0:
            self._readable = self._known = False  # nothing is learned of such a loss: a script's way to skip rows
            return
        same = [term for term in one.terms if term.names == main.names]
        self._texts[main.names] = " > ".join(main.shown)
        # several means are added up; of several sums each label counts alone
        self._factors.append(sum(t.factor for t in same) / (1 if main.kind == MEAN else len(same)))
        self._reduction = MEAN if main.averaged else main.kind
        self._others |= {term.shown for term in one.terms if term.names != main.names}
        self._class_weights = self._class_weights if main.weights is None else main.weights
        weighed = [_of_all(term, flow) for term, flow in one.flows]
        self._known = self._known and one.known and all(each is not None for each in weighed)
        self._weighed += [*(each for each in weighed if each is not None), *one.each]


def _compiled() -> bool:  # its nodes take no hooks
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def _flows_in(one: _Backward, term: Term, gradients: tuple[Tensor | None, ...]) -> None:
    """A hook: what flows into a loss. It runs inside the backward, which must not end by it."""
    try:
        gradient = gradients[0]
        if type(gradient) is not Tensor:
            one.known = False
        elif term.kind == EACH:
            one.each.append(_of_each(gradient.detach()))
        else:
            one.flows.append((term, gradient.detach()))
    except Exception:
        one.known = False


def _of_each(weights: Tensor) -> Weighed:
    """Where a weight flows in for each label; one that has none counts nothing."""
    weights = weights.float()
    there = weights != 0.0
    low = torch.where(there, weights, math.inf).min()
    high = torch.where(there, weights, -math.inf).max()
    return weights.sum(), low, high, there.sum()


def _of_all(term: Term, flow: Tensor) -> Weighed | None:
    """Where one number flows in for all."""
    if term.labels is None or type(term.labels) not in (int, Tensor):  # one that is shared out says a part
        return None
    flow = flow.float().reshape(())
    labels = term.labels.float() if isinstance(term.labels, Tensor) else float(term.labels)
    if term.kind == SUM:
        return flow * labels, flow, flow, labels
    each = flow / (labels.clamp(min=1.0) if isinstance(labels, Tensor) else max(labels, 1.0))
    return flow, each, each, labels
