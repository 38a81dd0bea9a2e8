"""Read what a DeepSpeed engine holds: groups, replicas, the gradients that it keeps and those that it applies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from ds_silent.framework import Part
from ds_silent.frameworks import torch_common as replicated
from ds_silent.frameworks.deepspeed.gradients import accumulated_gradients, numel_of, pieces_dealt, whole_on_every_rank
from ds_silent.frameworks.deepspeed.shapes import expert_group
from ds_silent.frameworks.torch_common import Slice
from ds_silent.kernels.checksums import Items, Replica

# ----------------------------------------------------------------------------------------------------------------------
# Joining a process group that is there, and what the ranks of an engine must have alike.


def join() -> None:
    """Make DeepSpeed use the gloo process group that is there, without a word."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def load_operator() -> None:
    """Load DeepSpeed's communication operator of the CPU, so that processes forked from this one need not look for it.

    Where it cannot be built, a rank that joins says so itself.
    """
    with suppress(Exception):
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible():
            builder.load(verbose=False)


def engine_facts(engine: Any) -> dict[str, Any]:
    """What the ranks' collectives follow from, by the names that a person would look for; JSON values."""
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    listed = hashlib.sha256(repr([(name, numel_of(p)) for name, p in named]).encode()).hexdigest()[:8]
    return {
        "ZeRO stage": int(engine.zero_optimization_stage()),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "the optimizer's wrapper": type(engine.optimizer).__name__,
        "the dtypes of the trainable parameters": sorted({str(p.dtype) for _, p in named}),
        "the list of trainable parameters": f"{len(named)} [{listed}]",
    }


def parameters_held(engine: Any) -> list[list[Any]]:
    """The model's parameters by the groups of the optimizer; a wrapper's own groups hold flat copies of them.

    Stages 1 and 2 have ``bit16_groups``, ``BF16_Optimizer`` ``bf16_groups``, fp16 wrappers and stage 3 ``fp16_groups``
    (0.16.9 to 0.19.8).
    """
    optimizer = engine.optimizer
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, name, None)
        if groups:
            return list(groups)
    own: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
    return own


# ----------------------------------------------------------------------------------------------------------------------
# What every rank holds whole: parameters, buffers and, in stage 0, the optimizer's state.


def replicated_parameters(engine: Any) -> Items:
    """Every parameter, trainable or not, where each rank holds all of it; nothing under stage 3, no other's experts."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [(name, p) for name, p in replicated.parameters_of(engine.module) if expert_group(p) is None]


def replicated_state(engine: Any) -> Items:
    """Buffers, and in stage 0 without partitions the optimizer's tensors and its fp32 masters."""
    if engine.zero_optimization_stage() == 3:
        return []
    experts = any(expert_group(parameter) for parameter in engine.module.parameters())
    optimizers = [] if experts else _whole_optimizers(engine)
    return replicated.rest_of(engine.module, optimizers)


def replica_of(engine: Any, optimizer_state: bool, buffers: bool) -> Replica:
    """All that makes one replica in stage 0; without the optimizer's own state, or buffers, if they are not wanted.

    ``FusedAdam`` counts its steps in ``param_groups[...]["step"]``, ``DeepSpeedCPUAdam`` in ``state[...]["step"]``.
    """
    return replicated.replica_of(engine.module, _whole_optimizers(engine), optimizer_state, buffers)


def _whole_optimizers(engine: Any) -> list[Any]:
    """The base optimizer where each rank's steps all parameters."""
    sharded = engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer)
    return [] if sharded or engine.basic_optimizer is None else [engine.basic_optimizer]


# ----------------------------------------------------------------------------------------------------------------------
# A copy of the local gradient from before the reduction, so that the reduction can be repeated.


class KeptGradients:
    """The gradients that go into the reduction of stages 0 and 1, kept until the optimizer has run.

    Takes as much memory as the gradients, from the first step on.
    """

    def __init__(self, engine: Any, parameters: list[Tensor]):
        self._engine, self._parameters = engine, parameters
        self._held = accumulated_gradients(engine, parameters)
        self.in_place = whole_on_every_rank(engine)  # the reduction writes where the gradients accumulate
        self._copies: list[Tensor | None] = [None] * len(parameters)
        self._present = [False] * len(parameters)

    def keep(self) -> None:
        """At the boundary, before the reduction."""
        for index in range(len(self._parameters)):
            gradient = self._held(index)
            self._present[index] = gradient is not None
            if gradient is None:
                continue
            copy = self._copies[index]
            if copy is None or copy.dtype != gradient.dtype:
                self._copies[index] = gradient.detach().clone()
            else:
                copy.copy_(gradient.detach())

    @property
    def bytes(self) -> int:
        """Of the gradients that were kept."""
        return sum(
            copy.numel() * copy.element_size()
            for copy, present in zip(self._copies, self._present, strict=True)
            if present and copy is not None
        )

    def put_back(self) -> None:
        """Everything as it was before the reduction, which may then be called again."""
        if self.in_place:
            self._put_back_in_place()
        else:
            self._put_back_freed()

    def _put_back_in_place(self) -> None:
        """Stage 0 reduces where the gradients accumulate; it gives zeros to parameters without a gradient."""
        for index, parameter in enumerate(self._parameters):
            gradient, copy = self._held(index), self._copies[index]
            if self._present[index]:
                assert gradient is not None
                assert copy is not None
                gradient.copy_(copy)
            elif gradient is not None and parameter.grad is gradient:
                parameter.grad = None

    def _put_back_freed(self) -> None:
        """``DeepSpeedZeroOptimizer`` of stage 1 frees what it has reduced and keeps ``averaged_gradients`` (0.16.9 to
        0.19.8: a list or a tensor per group, None once the step is over)."""
        optimizer = self._engine.optimizer
        assert isinstance(optimizer, ZeROOptimizer)
        name = "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"
        for index, parameter in enumerate(self._parameters):
            copy = self._copies[index]
            setattr(parameter, name, copy.clone() if self._present[index] and copy is not None else None)
        averaged = optimizer.averaged_gradients
        for group in list(averaged):
            averaged[group] = None


# ----------------------------------------------------------------------------------------------------------------------
# What DeepSpeed's base optimizer is about to apply: unscaled, clipped, in the fp32 masters.


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
