"""Check that a loss of torch is given what its documentation asks for: logits, or log-probabilities.

``cross_entropy`` and ``binary_cross_entropy_with_logits`` make probabilities of their input themselves; where a model's
softmax or sigmoid has made some already, no class of C can come above e / (e + C - 1), and the model learns slowly, on
every rank alike: a warning. ``nll_loss`` and ``kl_div`` want logarithms: a note, as minus a probability is a loss, too.
All are read from autograd's graph, where the two operations are neighbours. So is a view in place of a transposition,
by which the classes of (B, T, C) are to come second: a warning. So are ``log_softmax`` over the rows before
``nll_loss``, ``cross_entropy`` over one class, where it is the whole loss, and (B, 1) against (B) in ``mse_loss`` and
its like, which compare each row with every row: a note where the script subtracts and squares them itself. A softmax of
a softmax in another term of a loss is a note: a router's balance, for example, of probabilities in place of logits.
Silent: anything between them that computes (a temperature, a logarithm), other losses, and graphs that are compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.records import Severity
from ds_silent.rules.rule import Breach, Rule

_LOOKS = 8  # backwards from the first on: a script's loss stays what it is
_NODES = 64  # that are read of each, from the root down
_BELOW = 6  # views between a loss and what made its input
_VIEWS = re.compile(
    r"(Unsafe)?View|Cat|Reshape(Alias)?|(Uns|S)queeze|Alias|Clone|ToCopy|Expand|T|Transpose|Permute|Slice|Select|Index(Select)?|"
    "MaskedSelect"
)
_COMPUTES = re.compile("Add|Mul|Div|Neg|Sub|Sum|Mean|MaskedFill|Where|_DDPSink|Stack|Pow|Abs")
"""What a script and torch make a loss of behind it, beside views."""
_NLL = ("NllLoss", "NllLoss2D")
_OF_PAIRS = {
    "MseLoss": "mse_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "Sub": "the script's loss",
}
_WANTS = {
    "LogSoftmax": ("cross_entropy", ("Softmax",), "logits"),
    "BinaryCrossEntropyWithLogits": ("binary_cross_entropy_with_logits", ("Sigmoid", "Softmax"), "logits"),
    **dict.fromkeys(_NLL, ("nll_loss", ("Softmax", "Sigmoid"), "log-probabilities")),
}
"""Of each loss: its name, what may not make its input, and what it wants."""


class LossInput(Rule):
    """Look at what this rank's first losses are made of."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._looks = 0
        self._broken: dict[str, Breach] = {}

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at what each backward begins with."""
        patches.before_backward(partial(safely, self._begins))

    def _begins(self, root: Any) -> None:
        if self._looks == _LOOKS or not isinstance(root, Tensor):
            return
        self._looks += 1
        for loss, made_by, wants in misfits(root):
            self._broken.setdefault(loss, _breach(loss, made_by, wants, self._framework.step))

    def breaches(self) -> tuple[Breach, ...]:
        return tuple(self._broken.values())


def misfits(root: Tensor) -> Iterator[tuple[str, str, str]]:
    """Yield each loss in a root whose input is of the wrong kind: its name, what has made the input, what it wants."""
    seen: set[Any] = set()
    waiting: list[Any] = [root.grad_fn]
    alone = True  # the root has one term
    while waiting and len(seen) < _NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        operation = _operation(node)
        if operation in _WANTS:
            loss, wrong, wants = _WANTS[operation]
            made_by = _operation(_behind_views(_first(node)))
            if made_by in wrong:
                yield loss, made_by.lower(), wants
            elif operation == "NllLoss" and made_by == "LogSoftmax" and _over_rows(_first(node)):
                yield loss, "log_softmax", "rows"
            elif operation == "LogSoftmax" and _mixes_classes(_first(node)):
                yield loss, "view", "classes"
            elif operation == "LogSoftmax" and alone and _has_one_class(node):
                yield loss, "single output", "several classes"
        elif operation in _OF_PAIRS and _broadcasts(node):
            yield _OF_PAIRS[operation], "broadcast", "pairs" if operation == "Sub" else "one shape"
        elif operation == "Softmax" and _operation(_behind_views(_first(node))) == "Softmax":
            yield "softmax", "softmax", "once"
        elif operation == "Sub" and _subtracts_product_with_softmax(node):  # torch's kl_div: xlogy(t, t) - t * input
            yield "kl_div", "softmax", "log-probabilities"
        if operation in _NLL or _VIEWS.fullmatch(operation) or _COMPUTES.fullmatch(operation):
            inputs = [inner for inner, _ in node.next_functions if inner is not None]
            waiting, alone = [*waiting, *inputs], alone and len(inputs) == 1


def _operation(node: Any) -> str:
    return "" if node is None else str(node.name()).partition("Backward")[0]


def _first(node: Any) -> Any:
    """Return the node that a loss's input comes from; its targets come behind it."""
    return node.next_functions[0][0] if node.next_functions else None


def _subtracts_product_with_softmax(node: Any) -> bool:
    (first, _), *others = node.next_functions
    if first is not None or len(others) != 1 or _operation(product := others[0][0]) != "Mul":
        return False
    target, *inputs = (inner for inner, _ in product.next_functions)
    return target is None and len(inputs) == 1 and _operation(_behind_views(inputs[0])) == "Softmax"


def _behind_views(node: Any) -> Any:
    for _ in range(_BELOW):
        if not _VIEWS.fullmatch(_operation(node)):
            break
        node = _first(node)
    return node


def _mixes_classes(view: Any) -> bool:
    """Tell whether a view gives (B, T, C) the sizes of (B, C, T), and so mixes classes with places."""
    before = tuple(getattr(view, "_saved_self_sym_sizes", ()))
    after = _shape_of(view) if before else ()
    return len(before) > 2 and after != before and after == (before[0], before[-1], *before[1:-1])


def _over_rows(log_softmax: Any) -> bool:
    dimension, shape = getattr(log_softmax, "_saved_dim", None), _shape_of(log_softmax)
    return len(shape) == 2 and dimension in (0, 2**64 - 2)  # which stands for -2


def _has_one_class(log_softmax: Any) -> bool:
    dimension, shape = getattr(log_softmax, "_saved_dim", None), _shape_of(log_softmax)
    return len(shape) > 1 and shape[0] > 1 and dimension in (1, 2**64 - len(shape) + 1) and shape[1] == 1


def _broadcasts(node: Any) -> bool:
    """Tell whether (B, 1) and (B) have become (B, B), of which one needs no gradient."""
    inputs = [inner for inner, _ in node.next_functions if inner is not None]
    if len(inputs) != 1:
        return False
    expanded = inputs[0] if _operation(inputs[0]) == "Expand" else node  # as torch's own losses do
    after, before = _shape_of(expanded), _shape_of(_first(inputs[0]) if expanded is inputs[0] else inputs[0])
    return len(after) == 2 and after[0] == after[1] > 1 and before in ((after[0], 1), after[:1])


def _shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of what a node has made; empty where it is not known."""
    return tuple(node._input_metadata[0].shape) if getattr(node, "_input_metadata", None) else ()


def _breach(loss: str, made_by: str, wants: str, step: int) -> Breach:
    message = f"{loss} is given probabilities, the output of a {made_by}, and its documentation asks for {wants}: "
    severity: Severity = "warning"
    if wants == "classes":
        message = (
            f"{loss} is given a view that exchanges the sizes of classes and places, and not their values: "
            "the numbers of one place lie in the rows of several classes."
        )
        remedy = "Exchange the dimensions by transpose(1, 2) or permute, and not by view or reshape."
    elif wants == "several classes":
        message = f"{loss} is given one class: it is 0 whatever the model says, and so is its gradient."
        remedy = f"Give {loss} one output per class; of one output take mse_loss, or binary_cross_entropy_with_logits."
    elif wants == "rows":
        message = f"{loss} is given a log_softmax over the rows of the batch (dim=0), and not over the classes."
        remedy = "Take log_softmax over the dimension of the classes, dim=1, or use cross_entropy."
    elif wants in ("one shape", "pairs"):
        severity = "warning" if wants == "one shape" else "info"
        first = loss if wants == "one shape" else loss.capitalize()
        message = f"{first} takes (B, 1) and (B): broadcast to (B, B), every row is compared with each row's target."
        remedy = "Give both one shape: output.squeeze(1), or target.unsqueeze(1)."
        remedy = remedy if wants == "one shape" else f"If that is meant, do nothing. {remedy}"
    elif wants == "once":
        severity, message = "info", "A term of the loss takes the softmax of a softmax: what it sees is nearly uniform."
        remedy = "If that is meant, do nothing. Else give that term the logits, before their first softmax."
    elif wants == "log-probabilities":
        severity = "info"
        message += "what is made small is minus a probability, not minus its logarithm."
        remedy = f"If that is meant, do nothing. Else give {loss} the output of log_softmax, in place of the {made_by}."
    else:
        message += "it makes probabilities of them once more, so that its gradient is small and the loss stays above 0."
        remedy = f"Take the {made_by} out of what stands before the loss, and keep it for predictions."
    key, effects = f"loss input:{loss}:{made_by}", ("zero-gradient",) if wants == "several classes" else ()
    return Breach(key, "objective-mismatch", severity, loss, message, remedy, step, effects=effects)
