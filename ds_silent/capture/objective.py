"""How much each label counts, on this rank; :mod:`ds_silent.capture.same_objective` compares the ranks.

    objective = LocalObjective()
    objective.begins(root)               # as a backward begins: reads its graph, hooks its loss
    objective.reached = True             # at a gradient of the model: this backward trains it
    objective.text, objective.structure  # of the step so far
    objective.numbers()                  # an Observation's part; without waiting for the device

A loss function of torch stores its reduction. A hook on it gets the gradient that flows in: the factor by which each
label, or the labels' mean, enters the root. Between loss and root lie a few operations on scalars. An operation with a
Python number belongs to the script and is the same on all ranks; one with a tensor depends on data.
:mod:`ds_silent.capture.loss_graph` reads both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.capture.label_places import LabelPlaces
from ds_silent.capture.loss_graph import EACH, MEAN, SUM, Constants, Term, losses_in
from ds_silent.capture.loss_origin import Crossing, Made, backward_is_compiled, made_by
from ds_silent.exchange.observation import Objective as Numbers
from ds_silent.framework import Promise
from ds_silent.maths.fingerprint import short_hash

MOST_LOSSES = 8  # hooked losses of one backward
NO_OTHERS = short_hash([])  # of the loss's other terms, where it has none

Weighed = tuple[Tensor, Tensor, Tensor, Tensor | float]
"""One term's labels: sum, smallest and largest of their weights, and their number."""


@dataclass
class _Backward:
    """Hold one backward until it is known whether it trains this model."""

    terms: list[Term] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    flows: list[tuple[Term, Tensor]] = field(default_factory=list)
    each: list[Weighed] = field(default_factory=list)
    known: bool = True  # whether every gradient that flows in was understood
    below: float = 1.0  # what a wrapper's hooks multiply gradients by on their way from the loss to the model


class LocalObjective:
    """Follow one rank's objective over the micro-batches of a step.

    Attributes:
        reached: whether the current backward has brought the model a gradient.
        promise: of the wrapper that the script has handed a loss of this step to.
        items: num_items_in_batch, by which a forward of this step was told to divide (transformers).
    """

    def __init__(self, module: nn.Module | None = None):
        self.reached, self.crossing, self.places = False, Crossing(), LabelPlaces(module)
        self.promise: Promise | None = None
        self.items: Any = None
        self._under_way: _Backward | None = None
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._drop()
        self.places.drop()
        self._texts, self._weighed = dict[tuple[str, ...], str](), list[Weighed]()
        self._known, self._readable, self._count = True, True, 0
        self._factors: list[float] = []
        self._others: dict[tuple[str, ...], tuple[str, ...]] = {}  # with the numbers below them
        self._inputs: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
        self._reduction = 0.0
        self._class_weights: float | Tensor = 0.0
        self._constants: set[Constants] = set()
        self._besides: set[tuple[str, Constants]] = set()
        self._handed: Made | None = None
        self._below = 1.0
        self._ways: set[frozenset[tuple[str, ...]]] = set()
        self.promise = self.items = None

    def handed(self, loss: Any, promise: Promise | None, below: float = 1.0) -> None:
        """Take the loss that a wrapper is given, before its backward begins.

        Args:
            loss: None where the script begins the backward itself.
            below: by which the wrapper multiplies gradients between that loss and the model.
        """
        self._handed = made_by(loss) if isinstance(loss, Tensor) else None
        self.promise, self._below = promise, below

    def begins(self, root: Any, own: bool = False) -> None:
        """Read the root of a backward before the backward runs; ``own``: it surely reaches the model."""
        self._settle()
        self.reached = own
        self._under_way = one = _Backward()
        self.crossing.look(root)
        handed, self._handed = self._handed, None
        one.below, self._below = self._below, 1.0
        single = isinstance(root, Tensor) and root.numel() == 1 and root.grad_fn is not None
        terms = losses_in(root, handed, self.items) if single and not backward_is_compiled() else None
        if not terms:
            one.known = False
            return
        names = next((term.names for term in terms if term.kind), None)
        weighed = [term for term in terms if term.names == names]
        one.known = 0 < len(weighed) <= MOST_LOSSES
        for term in weighed if one.known else ():
            one.handles += [node.register_prehook(partial(_flows_in, one, part)) for node, part in term.nodes]
        self.places.begins(terms)
        for part in [part for term in terms for _, part in term.nodes]:
            part.node = None  # nothing of the graph outlives its backward
        one.terms = terms

    @property
    def text(self) -> str:
        """Describe the root of backward for people; empty if unknown."""
        self._settle()
        if not self._readable:
            return ""
        mains = "; ".join(self._texts[names] for names in sorted(self._texts))
        return " + ".join([mains, *(" > ".join((*shown, *self._others[shown])) for shown in sorted(self._others))])

    @property
    def structure(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the operations, without their numbers; empty if unknown."""
        self._settle()
        return tuple(sorted(self._texts)) if self._readable else ()

    @property
    def inputs(self) -> str:
        """Describe the script's own numbers in what the losses are made of, such as a temperature; empty if unknown."""
        self._settle()
        numbers = [" > ".join((names[-1], *below)) for names, below in sorted(self._inputs) if below]
        return ("; ".join(numbers) or "none") if self._readable and self._inputs else ""

    @property
    def factor(self) -> float:
        """Multiply the script's own factors between root and loss; 0 if unknown or not constant over the step."""
        self._settle()
        low, high = min(self._factors, default=0.0), max(self._factors, default=0.0)
        return high if self._readable and math.isclose(low, high, rel_tol=1e-6) else 0.0

    @property
    def constants(self) -> Constants | None:
        """Return the numbers between root and loss; None if unknown or not the same in all backwards of the step."""
        self._settle()
        return next(iter(self._constants)) if self._readable and len(self._constants) == 1 else None

    @property
    def backwards(self) -> int:
        """Return how many backwards of the step have brought the model a gradient."""
        self._settle()
        return self._count

    def counted_beside(self, ranks: int) -> int:
        """Return how often other terms count where the labels' mean counts once; 0 if there are none, or unknown.

        num_items_in_batch divides the labels' sum, and nothing divides the others: each counts once per backward, and
        where the whole loss is multiplied by the ranks, once per rank.
        """
        self._settle()
        constants = self.constants
        if constants is None or not constants.by_items or constants.by_tensor or constants.divisors:
            return 0
        if not self._besides or any(one.by_tensor or one.by_items or one.divisors for _, one in self._besides):
            return 0
        times, whole = abs(constants.times), {first for first, _ in self._besides}
        if math.isclose(times, 1.0):
            return self._count
        all_of_it = len(whole) == 1 and whole == {next(iter(self._texts.values())).partition(" > ")[0]}
        return self._count * ranks if all_of_it and math.isclose(times, ranks) else 0

    def is_undivided(self, parts: int) -> bool:
        """Tell whether each of ``parts`` backwards surely began with a whole mean, and not with its share."""
        self._settle()
        return self._count == parts > 1 and bool(self._ways) and all(_is_undivided(one, parts) for one in self._ways)

    def measured(self, step: int) -> None:
        """Take the labels of a measured step, whose backwards have ended."""
        self._settle()
        self.places.measured(step)

    def numbers(self) -> Numbers[float | Tensor]:
        """Return the numbers of the step's backwards; device values stay on the device."""
        self._settle()
        count, others = float(self._count), short_hash(sorted(self._others))
        own = Numbers[float | Tensor](
            factor=self.factor, reduction=self._reduction, count=count, others=others, class_weights=self._class_weights
        )
        if not self._known or not self._weighed:
            return own
        totals, smallest, largest, labels = zip(*self._weighed, strict=True)
        return replace(
            own,
            known=1.0,
            labels=sum(labels),
            weight=_joined(totals, Tensor.sum),
            smallest=_joined(smallest, Tensor.min),
            largest=_joined(largest, Tensor.max),
        )

    def _drop(self) -> None:
        for handle in () if self._under_way is None else self._under_way.handles:
            handle.remove()
        self._under_way, self.reached = None, False

    def _settle(self) -> None:
        """End the current backward; one that brought no gradient trained another model."""
        one, counts = self._under_way, self.reached
        self._drop()
        self.places.ended(counts)
        if one is None or not counts:
            return
        self._count += 1
        if one.below == 1.0:
            self._ways.add(frozenset(term.shown if term.kind else term.shown[:-1] for term in one.terms))
        main = next((term for term in one.terms if term.kind), one.terms[0] if one.terms else None)
        if main is None or not math.isfinite(main.factor) or main.factor == 0.0:
            self._readable = self._known = False  # a script skips rows with such a loss
            return
        same = [term for term in one.terms if term.names == main.names]
        self._texts[main.names] = " > ".join((*main.shown, *main.below))
        self._inputs |= {(term.names, term.below) for term in one.terms}
        self._constants.add(replace(main.constants, of_each=main.kind == EACH, by_hand=main.by_hand))
        # several means add up; with several sums each label counts once
        self._factors.append(sum(t.factor for t in same) / (1 if main.kind == MEAN else len(same)))
        self._reduction = MEAN if main.averaged else main.kind
        others = [term for term in one.terms if term.names != main.names]
        self._others |= {term.shown: term.below for term in others}
        self._besides |= {(term.shown[0], term.above) for term in others}
        self._class_weights = self._class_weights if main.weights is None else main.weights
        weighed = [_of_all(term, flow) for term, flow in _with_smoothing(one.flows)]
        self._known = self._known and one.known and all(each is not None for each in weighed)
        each = [*(each for each in weighed if each is not None), *one.each]
        self._weighed += [(one.below * w, one.below * low, one.below * high, count) for w, low, high, count in each]


def _joined(values: tuple[Tensor, ...], join: Callable[[Tensor], Tensor]) -> Tensor:
    """Join the numbers of the losses of a step, most often of one."""
    return values[0] if len(values) == 1 else join(torch.stack(values))


def _flows_in(one: _Backward, term: Term, gradients: tuple[Tensor | None, ...]) -> None:
    """Take the gradient that flows into a loss. The hook runs inside the backward, which it must not end.

    Later ones are not the backward's: the script asks ``torch.autograd.grad`` of a graph that it has retained.
    """
    try:
        if term.flowed:
            return
        term.flowed = True
        gradient = gradients[0]
        if type(gradient) is not Tensor:
            one.known = False
            return
        flow = gradient.detach() if term.left == 1.0 else gradient.detach() / term.left
        if term.kind == EACH:
            one.each.append(_of_each(flow, term.labels))
        else:
            one.flows.append((term, flow.abs() if term.by_hand else flow))
    except Exception:
        one.known = False


def _with_smoothing(flows: list[tuple[Term, Tensor]]) -> list[tuple[Term, Tensor]]:
    """Add to what flows into the labels what smooths them: once for each class."""
    into = {id(term): flow.float() * term.filled.classes for term, flow in flows if term.filled is not None}
    smoothing = {id(term.smoothing) for term, _ in flows}
    return [
        (term, flow if term.smoothing is None else flow.float() + into.get(id(term.smoothing), math.nan))
        for term, flow in flows
        if id(term) not in smoothing
    ]


def _of_each(weights: Tensor, labels: int | Tensor | None) -> Weighed:
    """Sum up the labels' weights; one that is ignored, or has weight 0, counts nothing."""
    weights = weights.float()
    if isinstance(labels, Tensor):
        weights = weights * labels
    there = weights != 0.0
    low = torch.where(there, weights, math.inf).min()
    high = torch.where(there, weights, -math.inf).max()
    return weights.sum(), low, high, there.sum()


def _of_all(term: Term, flow: Tensor) -> Weighed | None:
    """Sum up the weights when one number flows in for all labels."""
    if term.labels is None or type(term.labels) not in (int, Tensor):  # a sharded tensor holds only a part
        return None
    flow = flow.float().reshape(())
    labels = term.labels.float() if isinstance(term.labels, Tensor) else float(term.labels)
    if term.kind == SUM:
        return flow * labels, flow, flow, labels
    each = flow / (labels.clamp(min=1.0) if isinstance(labels, Tensor) else max(labels, 1.0))
    return flow, each, each, labels


def _is_undivided(ways: Iterable[tuple[str, ...]], parts: int) -> bool:
    """Tell whether a mean enters the root with weight 1, and nothing on any way may be a division by ``parts``.

    A division, the number 1/parts, a tensor, a sum, and a function of the script's own may each be that division.

    Args:
        ways: of one root, the ``shown`` of each term down to where it is no scalar.
    """
    whole = False
    for shown in ways:
        linear = weighs_1 = True
        mean = any(name.startswith("Mean") or "(mean" in name for name in shown)
        for name in shown:
            native = _NATIVE.match(name)
            if native is None:
                return False
            operation, number = native[1], None if native[2] is None else abs(float(native[2]))
            divides = (
                operation == "Sum" or (operation == "Mul" and number is None) or (operation == "Div" and number != 1)
            )
            if divides or (number is not None and math.isclose(number * parts, 1.0, rel_tol=1e-3)):
                return False
            linear = linear and operation in _LINEAR
            weighs_1 = weighs_1 and (not linear or number in (None, 1.0))
        whole = whole or (mean and weighs_1)
    return whole


_NATIVE = re.compile(r"(\w+?)Backward\d+(?: x (\S+))?")  # the name of a script's own function has no number
_LINEAR = frozenset(("Add", "Sub", "Mul", "Div", "Neg", "Rsub", "Mean"))
