"""The mean loss of a micro-batch, where a trainer has made its loss a share of the whole step's.

factor = times_its_share(module, kwargs)     # None: the forward's loss is the mean already
mean_of(loss, factor)
comes_of(root, made_by(loss))                # it is what the backward begins with, and not only by the way
is_share(root, made_by(loss), parts=4)       # a script has divided it by the number of micro-batches

transformers' Trainer counts the label tokens of all micro-batches of a step (and of all ranks) and hands their number
to the forward as ``num_items_in_batch``; the model then divides its sum by that number and not by its own tokens. Some
models take the number and take the mean all the same, which is seen in what autograd has recorded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[int, int]
"""What made a tensor: the number of the operation, in this thread, and which of its outputs the tensor is."""

NODES = 16  # between a loss and the function that made it: a division, a cast, the sum with another loss
IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss's default ignore_index, and Hugging Face's


def times_its_share(module: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """0-dim fp32: what makes a forward's loss the mean over the micro-batch's own label tokens.

    Args:
        module: whose ``loss_function`` says whether its labels are shifted (transformers' do).
        inputs: keyword arguments of the forward.
    """
    items, labels = inputs.get("num_items_in_batch"), inputs.get("shift_labels")
    if not isinstance(labels, Tensor):
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.ndim > 1 and shifts_labels(module):
            labels = labels[..., 1:]
    if items is None or not isinstance(labels, Tensor) or labels.dtype.is_floating_point:
        return None  # losses of floating labels (a regression's) are means whatever they are given
    total = torch.as_tensor(items, device=labels.device).float().reshape(-1)[0]
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def mean_of(loss: Tensor, factor: Tensor | None) -> Tensor:
    """A forward's loss, still with its graph, as the mean over the micro-batch's own tokens; without a graph."""
    return loss.detach() if factor is None or is_a_mean(loss) else loss.detach() * factor


def is_a_mean(loss: Tensor) -> bool:
    """Whether the first loss of torch's in the graph, near its root, took the mean; not where there is none."""
    waiting = [loss.grad_fn]
    for _ in range(NODES):
        node = waiting.pop(0) if waiting else None
        reduction = getattr(node, "_saved_reduction", None)  # of NllLossBackward0 and the like; 0 none, 1 mean, 2 sum
        if reduction is not None:
            return bool(reduction == 1)
        waiting += [inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None]
    return False


def shifts_labels(module: nn.Module) -> bool:
    """Whether position i of the labels is what position i - 1 predicts: in transformers' decoders."""
    causal = getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    encodes = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return causal is not None and getattr(module, "loss_function", None) is causal and not encodes


def made_by(loss: Tensor | None) -> Made | None:
    """What made a loss; it keeps no graph alive."""
    made = None if loss is None else loss.grad_fn
    return None if loss is None or made is None else (int(made._sequence_nr()), loss.output_nr)


def comes_of(root: Tensor, made: Made | None) -> bool:
    """Whether ``root`` is the loss that :func:`made_by` has named, or made of it by a few operations on single numbers.

    A model may return a loss by the way that nobody trains on: TRL's DPO and GRPO give it labels for the sake of its
    logarithms of probabilities. Where the wrapper's output goes through a node with several outputs (that of
    DistributedDataParallel looking for unused parameters), the one that leads to the root is followed.
    """
    waiting: list[tuple[Any, int]] = [(root.grad_fn, root.output_nr)]
    for _ in range(NODES):
        if made is None or not waiting:
            return False
        node, place = waiting.pop(0)
        if node is None:
            continue
        if (node._sequence_nr(), place) == made:
            return True
        outputs = getattr(node, "_input_metadata", ())  # of the gradients that come in: its outputs' shapes
        if len(outputs) > place and math.prod(outputs[place].shape) != 1:
            continue
        inner = list(node.next_functions)
        waiting += inner[place : place + 1] if 1 < len(outputs) == len(inner) else inner
    return False


def is_share(root: Tensor, made: Made | None, parts: int) -> bool:
    """Whether ``root`` is that loss, divided by ``parts`` and nothing more."""
    node = root.grad_fn
    if made is None or parts < 2 or node is None or node.name() != "DivBackward0":
        return False
    (inner, place), divisor = node.next_functions[0], getattr(node, "_saved_other", None)
    if inner is None or (inner._sequence_nr(), place) != made or not isinstance(divisor, Tensor):
        return False
    # a number of Python's lies on the host; another is not waited for
    return divisor.numel() == 1 and divisor.device.type == "cpu" and float(divisor) == parts
