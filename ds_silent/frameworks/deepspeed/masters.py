"""Where DeepSpeed keeps the fp32 masters of this rank, and the low-precision weights that are made of them.

    masters_of(engine)      # [(name, weights, masters)]: flat, of the same elements, as they are now

Between two updates the weights are the rounded masters. What cannot be found for certain is left out: states that are
swapped or were moved (``offload_states``), and pieces whose places speak of another order (``round_robin_gradients``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ds_silent.framework import WeightCopy


def masters_of(engine: Any) -> list[WeightCopy]:
    """Return each piece; none where parameters are fp32 themselves. It communicates nothing and copies nothing."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    pieces = _partitioned(optimizer) if engine.zero_optimization_stage() == 3 else _whole_or_fragments(optimizer)
    return [
        WeightCopy(names[id(parameter)], weights, masters)
        for parameter, weights, masters in pieces
        if id(parameter) in names and weights.dtype != masters.dtype and weights.numel() == masters.numel()
    ]


Pieces = Iterator[tuple[Any, Tensor, Tensor]]


def _partitioned(optimizer: Any) -> Pieces:
    """Stage 3: ``grad_position`` says where a parameter's shard lies in its group (0.16.9 to 0.19.8)."""
    swaps = getattr(optimizer, "swap_optimizer", True) or getattr(optimizer, "offloaded_states", None)
    for group in [] if swaps else optimizer.fp16_groups:
        for parameter in group:
            number, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            shard = parameter.ds_tensor
            if numel and shard.numel() == numel and str(getattr(shard, "status", "")).endswith(".AVAILABLE"):
                masters = optimizer.fp32_partitioned_groups_flat[number]
                yield parameter, shard.data.reshape(-1), masters.data[start : start + numel]


def _whole_or_fragments(optimizer: Any) -> Pieces:
    """Stages 1 and 2 and ``BF16_Optimizer`` have ``_hp_mapping``; stage 0's fp16 wrappers whole groups."""
    if hasattr(optimizer, "fp16_groups"):
        yield from _whole(optimizer)
        return
    names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    flat = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), ())
    groups: Any = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", ())
    for group in [] if getattr(optimizer, "round_robin_gradients", False) else groups:
        for parameter in group:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None or not parameter.data.is_contiguous():
                continue
            masters, number = mapping.hp_fragment, mapping.param_group_index
            if masters is None or number >= len(flat) or not _same_memory(masters, flat[number]):
                continue
            begin, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            yield parameter, parameter.data.view(-1)[begin : begin + numel], masters.data


def _whole(optimizer: Any) -> Pieces:
    flat = getattr(optimizer, "fp32_groups_flat", None)
    for number, group in enumerate(optimizer.fp16_groups):
        start = 0
        for place, parameter in enumerate(group):
            numel = parameter.numel()
            if flat is None:
                masters = optimizer.fp32_groups[number][place].data.reshape(-1)
            else:
                masters = flat[number].data[start : start + numel]
            start += numel
            if parameter.data.is_contiguous():
                yield parameter, parameter.data.view(-1), masters


def _same_memory(piece: Tensor, whole: Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
