"""How an engine divides its ranks: into data-parallel groups, pipeline stages, and parts of tensors, rows and experts.

    shape = shape_of(engine)
    shape.label                        # "tp1": below output_dir, where several groups are observed by themselves
    shape.aggregate_of(parameter)      # (this rank's place, how many) among those that hold its whole aggregate
    kept = list(duplicates_of(engine, every=100, writer=True))      # each: compare(step)

Everything is read from what the script has given - the mpu, the mesh, the model - and never from the optimizer, which
applies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.kernels.checksums import Items
from ds_silent.observing.start import Position, label_of
from ds_silent.replicas.duplicates import Duplicates


@dataclass(frozen=True)
class Shape:
    """Of one engine, as this rank sees it."""

    sequence: int = 1  # ranks that share each row
    tensor: Position = (0, 1)  # parts of each layer
    pipe: Position = (0, 1)  # stages
    meshed: Position | None = None  # among the ranks of a mesh that share a row; None without a mesh
    reduced: Position = (0, 1)  # among those whose gradients DeepSpeed reduces together
    experts: dict[str, Position] = field(default_factory=dict)  # the same of groups of experts that other ranks lack

    @property
    def label(self) -> str:
        """Of the data-parallel group, where there are several; else empty."""
        return label_of({"tp": self.tensor, "pp": self.pipe})

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other parameters of the model: nobody here knows the norm that it is clipped by."""
        return bool(self.label or self.experts)

    @property
    def alike(self) -> bool:
        """Whether each rank does the same work on rows of its own, so that those that differ are odd."""
        return self.sequence == 1 and not self.experts

    @property
    def sees_rows(self) -> bool:
        """Whether what goes into the module are whole rows, each on one rank."""
        return self.sequence == 1 and self.pipe[0] == 0

    @property
    def plain(self) -> bool:
        """Whether nothing but data parallelism is at work."""
        return self.sequence == 1 and not self.is_part

    @property
    def answers(self) -> bool:
        """Whether this rank's aggregate counts: ranks of a mesh that share a row should all hold the same."""
        return self.meshed is None or self.meshed[0] == 0

    def aggregate_of(self, parameter: Any) -> Position:
        """Among the ranks that hold its whole aggregate, where each holds it whole."""
        return self.experts.get(expert_group(parameter) or "", self.reduced)


def shape_of(engine: Any) -> Shape:
    """Of an engine whose process groups are there."""
    group, mpu = data_parallel_group(engine), engine.mpu
    reduced = getattr(engine, "seq_data_parallel_group", None) or group
    mesh = getattr(engine, "mesh_device", None)
    meshed = None if mesh is None else _place(mesh.get_group("sequence_parallel"))
    sequence = 1 if meshed is None else meshed[1]
    if mesh is None and hasattr(mpu, "get_sequence_parallel_world_size"):
        sequence = int(mpu.get_sequence_parallel_world_size())
    pipe, tensor = (0, 1), (0, 1)
    if is_pipeline(engine):
        pipe = int(engine.stage_id), int(engine.num_stages)
    elif engine.mp_world_size > 1:
        tensor = int(mpu.get_model_parallel_rank()), int(engine.mp_world_size)
    return Shape(sequence, tensor, pipe, meshed, _place(reduced), _experts(engine))


def data_parallel_group(engine: Any) -> dist.ProcessGroup | None:
    """The ranks that hold the same parameters and should average their gradients; None where there is no such group.

    With a mesh DeepSpeed itself reduces over a part of them only, see ``benchmarks/mesh_param_drift.py``.
    """
    if not dist.is_initialized():
        return None
    # engine.data_parallel_group may be None; the sequence-data-parallel group is the dense one
    group = getattr(engine, "seq_data_parallel_group", None)
    whole = group is None or getattr(engine, "mesh_device", None) is not None
    return dist.distributed_c10d._get_default_group() if whole else group


def is_pipeline(engine: Any) -> bool:
    """Whether the engine is DeepSpeed's ``PipelineEngine``."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def expert_group(parameter: Any) -> str | None:
    """The name of the expert-parallel group of a parameter that other ranks lack, else None.

    ``deepspeed.moe.experts`` marks them, before there is an engine.
    """
    name = getattr(parameter, "group_name", None)
    return None if getattr(parameter, "allreduce", True) or name in (None, "ep_size_1") else str(name)


def duplicates_of(engine: Any, every: int, writer: bool) -> Iterator[Duplicates]:
    """What ranks of different data-parallel groups hold alike, and experts, which only some ranks of a group hold.

    Args:
        every: steps between comparisons, from 1.
        writer: this rank writes for its data-parallel group; of other ranks only experts are looked at.
    """
    named = list(engine.module.named_parameters())
    if writer and is_pipeline(engine):
        for weight, group in engine.module.get_tied_weights_and_groups():
            tied = [(name, p) for name, p in named if p is weight]
            yield Duplicates("tied weights", dist.get_process_group_ranks(group), tied, every)
    elif writer and engine.mp_world_size > 1:
        split = {id(p) for p in _split(engine.module)}
        whole = [(name, p) for name, p in named if id(p) not in split]
        if split and whole:  # where nothing says what is split, nothing is known to be whole
            ranks = dist.get_process_group_ranks(engine.mpu.get_model_parallel_group())
            yield Duplicates("tensor-parallel duplicates", ranks, whole, every)
    yield from _expert_duplicates(named, every)


def _expert_duplicates(named: Items, every: int) -> Iterator[Duplicates]:
    """Of each group of experts: the first rank of all looks at what all ranks leave, it writes."""
    from deepspeed.utils import groups

    for key in sorted({name for _, p in named if (name := expert_group(p))}):
        held = [(name, p) for name, p in named if expert_group(p) == key]
        own = dist.get_process_group_ranks(groups._get_expert_data_parallel_group(key))
        if len(own) > 1:
            yield Duplicates("experts", range(dist.get_world_size()), held, every, own)


def _experts(engine: Any) -> dict[str, Position]:
    from deepspeed.utils import groups

    keys = {name for p in engine.module.parameters() if (name := expert_group(p))}
    return {key: _place(groups._get_expert_data_parallel_group(key)) for key in sorted(keys)}


def _place(group: dist.ProcessGroup | None) -> Position:
    return dist.get_rank(group), dist.get_world_size(group)


def _split(module: nn.Module) -> Iterator[Tensor]:
    """Parameters of which other ranks have other parts.

    They are marked, see ``deepspeed.runtime.utils.is_model_parallel_parameter``; only Domino's linear layers do not.
    """
    for inner in module.modules():
        marked = type(inner).__name__ in ("DominoAsyncColumnParallelLinear", "RowParallelLinearNoComm")
        for parameter in inner.parameters(recurse=False):
            marks = (getattr(parameter, name, False) for name in ("tensor_model_parallel", "model_parallel"))
            if marked or any(marks):
                yield parameter
