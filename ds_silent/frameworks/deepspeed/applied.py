"""What DeepSpeed's base optimizer is about to apply: unscaled, clipped, in the fp32 masters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ds_silent.framework import Part
from ds_silent.frameworks.deepspeed.gradients import pieces_dealt
from ds_silent.frameworks.shares import Slice

Places = dict[int, list[tuple[Slice, int]]]
"""id of a parameter of the base optimizer -> pieces of model parameters in it, and at which element they begin."""


def base_optimizers(engine: Any) -> list[Any]:
    """The torch optimizers that really step. ZeRO-3's offload has a second one, for what stays on the device."""
    found = [engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None)]
    return [optimizer for optimizer in found if optimizer is not None]


def applied_places(engine: Any, parameters: list[Tensor], share: list[Slice] | None) -> Places | None:
    """Where this rank's share of the gradient lies when the base optimizer steps; None where a wrapper hides it.

    * no wrapper: the model's own parameters;
    * ``FP16_UnfusedOptimizer``: ``fp32_groups`` beside ``fp16_groups``;
    * ``FP16_Optimizer``: ``fp32_groups_flat``, the group's parameters one after the other;
    * ``BF16_Optimizer``: ``fp32_groups_flat_partition``; stages 1 and 2: ``single_partition_of_fp32_groups``; in both
      ``_hp_mapping.hp_fragment_address`` says where;
    * stage 3: ``fp32_partitioned_groups_flat`` beside ``fp16_groups``, shards one after the other.

    Muon changes the gradient before it reaches the optimizer, so there is nothing to compare.
    """
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    if share is None or not hasattr(basic, "register_step_pre_hook") or "muon" in type(basic).__name__.lower():
        return None
    pieces = {piece.index: piece for piece in share}
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    places: Places = {}

    def put(flat: Any, parameter: Any, begin: int, whole: bool = False) -> None:
        """``begin``: of the piece in ``flat``, or of the whole parameter."""
        piece = pieces.get(index_of.get(id(parameter), -1))
        if piece is not None:
            places.setdefault(id(flat), []).append((piece, begin + piece.start if whole else begin))

    if engine.zero_optimization_stage() == 3:
        if getattr(optimizer, "swap_optimizer", False):
            return None
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            begin = 0
            for parameter in group:
                put(flat, parameter, begin)
                begin += parameter.partition_numel()
    elif isinstance(optimizer, ZeROOptimizer):
        names = ("fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        flats = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)
        groups = getattr(optimizer, "bf16_groups", None) or getattr(optimizer, "bit16_groups", None)
        if flats is None or groups is None:
            return None
        if getattr(optimizer, "round_robin_gradients", False):
            for dealt in pieces_dealt(optimizer):
                put(flats[dealt.group], dealt.parameter, dealt.begin)
            return places
        for flat, group in zip(flats, groups, strict=True):
            for parameter in group:
                if getattr(parameter, "_hp_mapping", None) is not None:
                    put(flat, parameter, int(parameter._hp_mapping.hp_fragment_address.start))
    elif hasattr(optimizer, "fp32_groups_flat"):
        for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            begin = 0
            for parameter in group:
                put(flat, parameter, begin, whole=True)
                begin += parameter.numel()
    else:
        pairs = [(parameter, parameter) for parameter in parameters]
        if hasattr(optimizer, "fp32_groups"):
            groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
            pairs = [pair for masters, models in groups for pair in zip(masters, models, strict=True)]
        for master, parameter in pairs:
            put(master, parameter, 0, whole=True)
    return places


def applied_gradients(optimizer: Any, places: Places) -> Iterator[Part]:
    """What a base optimizer holds as gradients right now, of this rank's share."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            for piece, begin in places.get(id(parameter), ()) if gradient is not None else ():
                yield piece.index, piece.start, gradient.detach().reshape(-1)[begin : begin + piece.numel]
