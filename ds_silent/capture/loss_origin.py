"""Find a forward's loss again in the root, the tensor that a backward begins with.

comes_of(root, made_by(loss))                # root is a forward's loss, or computed from it
is_share(root, made_by(loss), parts=4)       # the script has divided it by the number of micro-batches
is_a_mean(loss)                              # the function that made it took the mean
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from torch import Tensor

NEAR = 16  # nodes between a forward's loss and the root: a division, a cast, the sum with another loss
Made = tuple[int, int]
"""The operation that made a tensor: its number in this thread, and which output the tensor is."""


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


def is_a_mean(loss: Tensor) -> bool:
    """Tell whether the first torch loss near the root took the mean; False if there is none."""
    return reduction_near(loss) == 1


def reduction_near(loss: Tensor) -> int | None:
    """Return the reduction of the first torch loss near the root: 0 none, 1 mean, 2 sum; None if there is no loss."""
    waiting = [loss.grad_fn]
    for _ in range(NEAR):
        node = waiting.pop(0) if waiting else None
        reduction = getattr(node, "_saved_reduction", None)  # of NllLossBackward0 and the like
        if reduction is not None:
            return int(reduction)
        waiting += [inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None]
    return None


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
