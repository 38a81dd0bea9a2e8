"""Where DeepSpeed keeps the fp32 masters of this rank, the weights that are made of them, and what stage 3 gathers.

    masters_of(engine)      # [(name, weights, masters)]: flat, of the same elements, as they are now
    gathered_by(engine)     # of each parameter, in its module's forward: what was gathered, and this rank's shard
    shards_of(parameters, group)    # [(parameter, first element, values)]: stage 3's, of this rank

Between two updates the weights are the rounded masters. What cannot be found for certain is left out: states that are
swapped or were moved (``offload_states``), and pieces whose places speak of another order (``round_robin_gradients``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.framework import GatheredPiece, Part, WeightCopy


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


def gathered_by(engine: Any) -> list[GatheredPiece]:
    """Return stage 3's parameters, which DeepSpeed's pre-hook of their own module gathers (0.16.9 to 0.19.8).

    Weights that travel quantised are not those of the shards.
    """
    config = engine._config.zero_config
    names = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    if engine.zero_optimization_stage() != 3 or any(getattr(config, name, False) for name in names):
        return []
    return [
        GatheredPiece(
            f"{path}.{name}" if path else name,
            module,
            partial(_own_piece, parameter),
            partial(getattr, parameter, "comm_dtype", None),  # of torch_autocast, for what is not persistent (0.19.8)
        )
        for path, module in engine.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if hasattr(parameter, "ds_tensor")
    ]


def shards_of(parameters: Sequence[Any], among: dist.ProcessGroup) -> Iterator[Part]:
    """Yield this rank's shards of stage 3's parameters, as far as they are in memory.

    Args:
        among: those who hold all of them, each perhaps several times: who shares them with the first of these answers.
    """
    first, places = dist.get_process_group_ranks(among)[0], dict[int, int | None]()
    for index, parameter in enumerate(parameters):
        shard, group = parameter.ds_tensor, parameter.ds_process_group
        if id(group) not in places:
            places[id(group)] = dist.get_rank(group) if first in dist.get_process_group_ranks(group) else None
        place = places[id(group)]
        if place is not None and str(getattr(shard, "status", "")).endswith(".AVAILABLE"):
            start = int(shard.ds_numel) * place
            yield index, start, shard.data.view(-1)[: max(0, parameter.ds_numel - start)]


def _own_piece(parameter: Any) -> tuple[Tensor, Tensor] | None:
    shard, group = parameter.ds_tensor, parameter.ds_process_group
    there = all(str(one).endswith(".AVAILABLE") for one in (parameter.ds_status, getattr(shard, "status", "")))
    whole, each, ranks = parameter.data, int(shard.ds_numel), dist.get_world_size(group)
    padded = 0 <= each * ranks - parameter.ds_numel < ranks  # each rank has one piece: no subgroup keeps it all
    if not (there and padded and whole.is_contiguous() and whole.numel() == parameter.ds_numel):
        return None
    piece = whole.view(-1)[each * dist.get_rank(group) :][:each]
    return piece, shard.data.view(-1)[: piece.numel()]


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
    memory = [whole.untyped_storage().data_ptr() for whole in flat]
    groups: Any = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", ())
    for group in [] if getattr(optimizer, "round_robin_gradients", False) else groups:
        for parameter in group:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None or not parameter.data.is_contiguous():
                continue
            masters, number = mapping.hp_fragment, mapping.param_group_index
            if masters is None or number >= len(flat) or masters.untyped_storage().data_ptr() != memory[number]:
                continue
            begin, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            yield parameter, parameter.data.view(-1).narrow(0, begin, numel), masters.data


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
