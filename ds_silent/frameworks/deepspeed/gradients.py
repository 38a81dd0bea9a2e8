"""Where DeepSpeed's optimizers keep the local gradient as it accumulates, and the aggregated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from ds_silent.capture.local_gradient import Accumulated
from ds_silent.framework import Part
from ds_silent.frameworks.deepspeed.shapes import Shape
from ds_silent.frameworks.torch_common import Slice, cut, nth_share, row_of


def accumulated_gradients(engine: Any, parameters: list[Tensor]) -> Accumulated:
    """Where a parameter's gradient of the step's earlier micro-batches lies, in stages 0 and 1.

    * ``BF16_Optimizer``: ``fp32_groups_gradients[group][i]``, valid when ``fp32_groups_has_gradients[group][i]``.
    * ``DeepSpeedZeroOptimizer`` with ``use_grad_accum_attribute``: ``parameter.grad_accum``.
    * everything else: ``parameter.grad``.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        place = {id(p): (g, i) for g, group in enumerate(optimizer.bf16_groups) for i, p in enumerate(group)}
        places = [place[id(p)] for p in parameters]

        def of_bf16(index: int) -> Tensor | None:
            group, i = places[index]
            held: Tensor = optimizer.fp32_groups_gradients[group][i]
            return held if optimizer.fp32_groups_has_gradients[group][i] else None

        return of_bf16
    if getattr(optimizer, "use_grad_accum_attribute", False):
        return lambda index: getattr(parameters[index], "grad_accum", None)
    return lambda index: parameters[index].grad


def share_of(engine: Any, parameters: list[Tensor], shape: Shape) -> list[Slice] | None:
    """What of the gradient this rank answers for; the ranks' shares make up the whole, once. None where it is hidden.

    * Stage 0 holds all of it on every rank: each rank takes an N-th. Of experts those that have the same.
    * ``BF16_Optimizer`` does too, but its optimizer is partitioned: the partition, by ``parameter._hp_mapping``.
    * Stages 1 and 2: what this rank owns, by ``parameter._hp_mapping`` (``deepspeed/utils/tensor_fragment.py``);
      with ``round_robin_gradients`` that speaks of the order before (0.16.9 to 0.19.8), see :func:`_dealt`.
    * Stage 3: this rank's shard, of what the optimizer has got.
    """
    if not shape.answers:
        return []
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    rank, ranks = shape.reduced
    if stage == 3:
        if ranks != getattr(optimizer, "partition_count", None) or not hasattr(optimizer, _SHARDS):
            return None
        shards, kept = [], getattr(optimizer, _SHARDS)
        for index, parameter in enumerate(parameters):
            if kept and parameter.ds_id not in kept:  # type: ignore[attr-defined]
                return None  # trainable, and in no parameter group: nobody reduces its gradient
            size: int = parameter.partition_numel()  # type: ignore[attr-defined]  # set by DeepSpeed
            shards.append(Slice(index, rank * size, min(size, numel_of(parameter) - rank * size)))
        return [shard for shard in shards if shard.numel > 0]
    if isinstance(optimizer, ZeROOptimizer):
        if not all(hasattr(parameter, "_hp_mapping") for parameter in parameters):
            return None
        if getattr(optimizer, "round_robin_gradients", False):
            if optimizer.cpu_offload:
                return None
            index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
            return [Slice(index_of[id(d.parameter)], d.start, d.numel) for d in pieces_dealt(optimizer)]
        mappings = ((index, parameter._hp_mapping) for index, parameter in enumerate(parameters))  # type: ignore[attr-defined]
        addresses = [(index, mapping.lp_fragment_address) for index, mapping in mappings if mapping is not None]
        return [Slice(index, int(address.start), int(address.numel)) for index, address in addresses]
    places = [shape.aggregate_of(parameter) for parameter in parameters]
    shares = []
    for place in dict.fromkeys(places):
        own = [numel_of(p) if other == place else 0 for p, other in zip(parameters, places, strict=True)]
        shares += nth_share(own, *place, [row_of(p) for p in parameters])
    return shares


@dataclass(frozen=True)
class _Dealt:
    """A parameter's piece in this rank's partition."""

    group: int
    number: int  # in the partition
    parameter: Any
    start: int  # first element of the parameter
    numel: int
    begin: int  # first element of the partition


def pieces_dealt(optimizer: Any) -> Iterator[_Dealt]:
    """What this rank owns under ``round_robin_gradients``: ``params_in_partition``, one after the other.

    The first begins at its element ``first_offset``, the last ends with the partition, ``partition_size`` elements.
    """
    for group, parameters in enumerate(optimizer.params_in_partition):
        begin = 0
        for number, parameter in enumerate(parameters):
            start = int(optimizer.first_offset[group]) if number == 0 else 0
            numel = min(parameter.numel() - start, int(optimizer.partition_size[group]) - begin)
            yield _Dealt(group, number, parameter, start, numel, begin)
            begin += numel


_SHARDS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # ds_id -> shard of the gradient


def whole_on_every_rank(engine: Any) -> bool:
    """Whether each rank holds the whole aggregated gradient after the reduction."""
    # 0.17.6 to 0.18.3 give stage 1 with grad_accum_dtype an FP16_UnfusedOptimizer, as stage 0 has
    return not isinstance(engine.optimizer, ZeROOptimizer) or isinstance(engine.optimizer, BF16_Optimizer)


def reduced_after_backward(engine: Any) -> bool:
    """Whether the aggregated gradient is there when the boundary's ``engine.backward`` returns.

    Every stage ends its reduction in ``allreduce_gradients`` and waits for it, with ``overlap_comm`` too
    (``independent_gradient_partition_epilogue``, 0.16.9 to 0.19.8). Copies to the host are only waited for in the step.
    """
    optimizer = engine.optimizer
    return not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def aggregated_gradients(engine: Any, parameters: list[Any], share: list[Slice] | None) -> Iterator[Part] | None:
    """This rank's share of the aggregated gradient; valid between the boundary's backward and the optimizer step.

    * Stage 0 and ``BF16_Optimizer``: where gradients accumulate, the reduction puts its result.
    * Stages 1 and 2: ``_hp_mapping.get_lp_grad_fragment``.
    * Stage 3: ``__param_id_to_grad_partition`` of ``DeepSpeedZeroOptimizer_Stage3``.
    """
    if share is None:
        return None
    read = _reader(engine, parameters)
    return ((piece.index, piece.start, values) for piece in share if (values := read(piece)) is not None)


def _reader(engine: Any, parameters: list[Any]) -> Callable[[Slice], Tensor | None]:
    """Where a slice of the aggregated gradient lies."""
    optimizer = engine.optimizer
    if whole_on_every_rank(engine):
        held = accumulated_gradients(engine, parameters)
        return lambda piece: cut(held(piece.index), piece)
    if engine.zero_optimization_stage() == 3:
        shards = getattr(optimizer, _SHARDS)
        return lambda piece: _begin(shards.get(parameters[piece.index].ds_id), piece.numel)
    if getattr(optimizer, "round_robin_gradients", False):
        groups = optimizer.averaged_gradients
        dealt = [d for d in pieces_dealt(optimizer) if groups.get(d.group) is not None]
        averaged = {id(d.parameter): groups[d.group][d.number] for d in dealt}
        return lambda piece: _begin(averaged.get(id(parameters[piece.index])), piece.numel)
    return lambda piece: _fragment(parameters[piece.index], piece.numel)


def _begin(values: Tensor | None, numel: int) -> Tensor | None:
    return None if values is None else values.reshape(-1)[:numel]


def _fragment(parameter: Any, numel: int) -> Tensor | None:
    """None where the script has cleared the gradients: a part of the aggregate is missing then, and is told so."""
    mapping = parameter._hp_mapping
    held = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict  # 0.16.9 to 0.19.8
    if held.get(mapping.param_group_index) is None:  # get_lp_grad_fragment raises then
        return None
    return _begin(mapping.get_lp_grad_fragment(parameter._index_in_param_group), numel)


def numel_of(parameter: Any) -> int:
    """Elements of the whole parameter; under ZeRO-3 the tensor itself is empty and ``ds_numel`` knows."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
