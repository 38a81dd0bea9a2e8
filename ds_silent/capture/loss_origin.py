"""Read what autograd has recorded above a loss: is it a forward's, a mean, a share, made of other ranks' rows?

comes_of(root, made_by(loss))                # root is a forward's loss, or computed from it
is_share(root, made_by(loss), parts=4)       # the script has divided it by the number of micro-batches
reduction_near(loss)                         # the function that made it added up, or took the mean
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor

NEAR = 16  # nodes between a forward's loss and the root: a division, a cast, the sum with another loss
NODES = 256  # from the root down where a collective is looked for: it stands before the loss, not deep in the model
BACKWARDS = 8  # whose graph is searched for one
Made = tuple[int, int]
"""The operation that made a tensor: its number in this thread, and which output the tensor is."""


def backward_is_compiled() -> bool:
    """Tell whether autograd is compiled: nodes and outputs of such a backward take no hooks."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def made_by(loss: Tensor | None) -> Made | None:
    """Identify the operation that made a loss, without keeping the graph alive."""
    made = None if loss is None else loss.grad_fn
    return None if loss is None or made is None else (int(made._sequence_nr()), loss.output_nr)


def comes_of(root: Tensor, made: Made | None) -> bool:
    """Tell whether ``root`` is the loss of :func:`made_by`, or made of it by a few operations on scalars.

    A model may return a loss that nobody trains on: TRL's DPO and GRPO pass labels to get log probabilities. If the
    wrapper's output passes a node with several outputs (DistributedDataParallel's search for unused parameters), only
    the output that leads to the root is followed.
    """
    waiting: deque[tuple[Any, int]] = deque([] if root.grad_fn is None else [(root.grad_fn, root.output_nr)])
    for _ in range(NEAR):
        if made is None or not waiting:
            return False
        node, place = waiting.popleft()
        if (node._sequence_nr(), place) == made:
            return True
        if elements(node, place) == 1:
            waiting += made_of(node, place)
    return False


def is_share(root: Tensor, made: Made | None, parts: int) -> bool:
    """Tell whether ``root`` is that loss, divided by ``parts`` and nothing more."""
    node = root.grad_fn
    if made is None or parts < 2 or node is None or node.name() != "DivBackward0":
        return False
    (inner, place), divisor = node.next_functions[0], getattr(node, "_saved_other", None)
    if inner is None or (inner._sequence_nr(), place) != made or not isinstance(divisor, Tensor):
        return False
    # a Python number lies on the host; do not wait for a device tensor
    return divisor.numel() == 1 and divisor.device.type == "cpu" and float(divisor) == parts


def reduction_near(loss: Tensor) -> int | None:
    """Return the reduction of the first torch loss near the root: 0 none, 1 mean, 2 sum; None if there is no loss."""
    saved = (getattr(node, "_saved_reduction", None) for node in islice(_operations(loss), NEAR))
    return next((int(reduction) for reduction in saved if reduction is not None), None)  # of NllLossBackward0 and such


class Crossing:
    """Find whether losses are made of other ranks' rows: a gather with a gradient, as in a contrastive loss.

    The gradient of such a rank holds what the others' losses say of its rows, so one rank's fault changes all
    gradients. Only the first backwards are read: a script's losses are alike at all steps.
    """

    def __init__(self) -> None:
        self.found, self._looked = False, 0

    def look(self, root: Any) -> None:
        """Read the graph of ``root`` as its backward begins; nothing of it is kept."""
        if not self.found and self._looked < BACKWARDS:
            self._looked += 1
            self.found = any(_gathers(node) for node in islice(_operations(root), NODES))


def _gathers(node: Any) -> bool:
    """Tell whether an operation is one of torch's collectives with a gradient."""
    of_torch = getattr(getattr(type(node), "_forward_cls", None), "__module__", "") == "torch.distributed.nn.functional"
    return of_torch or "_c10d_functional" in node.name()  # torch.distributed._functional_collectives, since torch 2.13


def _operations(root: Any) -> Iterator[Any]:
    """Yield each operation that ``root`` was made by, the nearest first."""
    waiting = deque([getattr(root, "grad_fn", None)])
    met = {None, *waiting}
    while waiting:
        node = waiting.popleft()
        if node is not None:
            yield node
            inner = {one: None for one, _ in node.next_functions if one not in met}
            met.update(inner)
            waiting.extend(inner)


def made_of(node: Any, place: int) -> list[tuple[Any, int]]:
    """Return the inputs of output ``place`` of a node; a wrapper with several outputs keeps them apart.

    DistributedDataParallel's has more outputs than inputs where a model returns what is no tensor. The first, which is
    the loss, comes of the first all the same.
    """
    inner, outputs = node.next_functions, getattr(node, "_input_metadata", ())
    first = place == 0 and node.name() == "_DDPSinkBackward"
    if len(outputs) > 1 and (first or len(outputs) == len(inner)):
        inner = inner[place : place + 1]
    return [(made, which) for made, which in inner if made is not None]


def elements(node: Any, place: int) -> int:
    """Count the elements of output ``place`` of a node; 1 if unknown."""
    outputs = getattr(node, "_input_metadata", ())  # of the incoming gradients: the outputs' shapes
    return math.prod(outputs[place].shape) if len(outputs) > place else 1
