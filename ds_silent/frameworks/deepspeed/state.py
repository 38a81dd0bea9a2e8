"""What a DeepSpeed engine holds, and how it divides its ranks: groups, pipeline stages, parts of tensors and experts.

    shape = shape_of(engine)
    shape.label                        # "tp1": below output_dir, where several groups are observed by themselves
    shape.aggregate_of(parameter)      # (this rank's place, how many) among those that hold its whole aggregate
    kept = list(duplicates_of(engine, every=100, writer=True))      # each: compare(step)
    before = weights_hash(model, is_sharded)     # before deepspeed.initialize, which broadcasts rank 0's parameters
    training = training_of(engine, ds_config)    # for ds_silent.preflight.inventory.local_items

Shapes are read from what the script has given - the mpu, the mesh, the model - and never from the optimizer, which
applies it. Importing this imports no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import BLOCK, WRITERS_ALONE
from ds_silent.frameworks import torch_common
from ds_silent.kernels.checksums import Items, Replica
from ds_silent.observing.start import Position, label_of
from ds_silent.preflight.inventory import Training, config_item
from ds_silent.preflight.items import Item
from ds_silent.replicas.duplicates import Duplicates
from ds_silent.text import Words

WORDS = Words(
    framework="DeepSpeed",
    training="engine",
    config="ds_config",
    begin="ds_silent.initialize or ds_silent.attach",
    step="engine.step()",
    another_reduction="try another DeepSpeed version, overlap_comm false, or another communication_data_type",
    not_reduced="",
    not_cleared="",
    stale="Under ZeRO-3 let each parameter take part in every step's loss, as by adding 0 * parameter.sum(): DeepSpeed "
    "0.19.8 applies the last gradient again of one that a step leaves out",
    update_settings="gradient_clipping, the loss scale and gradient_accumulation_steps",
    batch_size="train_micro_batch_size_per_gpu",
    accumulation="gradient_accumulation_steps",
    hidden_writes="tensor.data or safe_set_full_grad",
    own_sampler=" (engine.training_dataloader.data_sampler of a loader that DeepSpeed has made)",
    same_draws="layers that are skipped under ZeRO-3",
)
OF_A_MESH = replace(
    WORDS,
    another_reduction="give initialize an mpu (deepspeed.runtime.sequence_parallel.parallel_state_sp) instead of "
    "mesh_param, with which DeepSpeed 0.19.8 does not reduce over the ranks that share a row",
)


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
        """Name the data-parallel group, where there are several; else empty."""
        return label_of({"tp": self.tensor, "pp": self.pipe})

    @property
    def is_part(self) -> bool:
        """Tell whether other ranks hold other parameters: the norm that the model is clipped by is then not known."""
        return bool(self.label or self.experts)

    @property
    def alike(self) -> bool:
        """Tell whether each rank does the same work on rows of its own, so that those that differ are odd."""
        return self.sequence == 1 and not self.experts

    @property
    def sees_rows(self) -> bool:
        """Tell whether what goes into the module are whole rows, each on one rank."""
        return self.sequence == 1 and self.pipe[0] == 0

    @property
    def plain(self) -> bool:
        """Tell whether nothing but data parallelism is at work."""
        return self.sequence == 1 and not self.is_part

    @property
    def answers(self) -> bool:
        """Tell whether this rank's aggregate counts: ranks of a mesh that share a row should all hold the same."""
        return self.meshed is None or self.meshed[0] == 0

    def aggregate_of(self, parameter: Any) -> Position:
        """Return this rank's place among those that hold its whole aggregate, where each holds it whole."""
        return self.experts.get(expert_group(parameter) or "", self.reduced)


def shape_of(engine: Any) -> Shape:
    """Return the shape of an engine whose process groups are there."""
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
    """Return the ranks that hold the same parameters and should average their gradients; None without such a group.

    With a mesh DeepSpeed itself reduces over a part of them only, see ``benchmarks/mesh_param_drift.py``.
    """
    if not dist.is_initialized():
        return None
    # engine.data_parallel_group may be None; the sequence-data-parallel group is the dense one
    group = getattr(engine, "seq_data_parallel_group", None)
    whole = group is None or getattr(engine, "mesh_device", None) is not None
    return dist.distributed_c10d._get_default_group() if whole else group


def is_pipeline(engine: Any) -> bool:
    """Tell whether the engine is DeepSpeed's ``PipelineEngine``."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def expert_group(parameter: Any) -> str | None:
    """Return the name of the expert-parallel group of a parameter that other ranks lack, else None.

    ``deepspeed.moe.experts`` marks them, before there is an engine.
    """
    name = getattr(parameter, "group_name", None)
    return None if getattr(parameter, "allreduce", True) or name in (None, "ep_size_1") else str(name)


def duplicates_of(engine: Any, every: int, writer: bool) -> Iterator[Duplicates]:
    """Yield what ranks of several data-parallel groups hold alike, and experts, which only some ranks of one hold.

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
    """Yield each group of experts: the first rank of all looks at what all ranks leave, it writes."""
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
    """Yield parameters of which other ranks have other parts.

    They are marked, see ``deepspeed.runtime.utils.is_model_parallel_parameter``; only Domino's linear layers do not.
    """
    for inner in module.modules():
        marked = type(inner).__name__ in ("DominoAsyncColumnParallelLinear", "RowParallelLinearNoComm")
        for parameter in inner.parameters(recurse=False):
            marks = (getattr(parameter, name, False) for name in ("tensor_model_parallel", "model_parallel"))
            if marked or any(marks):
                yield parameter


# -- what all ranks of an engine must have alike, and what each holds whole -------------------------------------------


def join() -> None:
    """Make DeepSpeed use the gloo process group that is there, without a word."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def load_operator() -> None:
    """Load DeepSpeed's communication operator of the CPU, so that processes forked from this one need not look for it.

    Where it cannot be built, a rank that joins says so itself.
    """
    with suppress(Exception):
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible():
            builder.load(verbose=False)


def engine_facts(engine: Any) -> dict[str, Any]:
    """Return what the ranks' collectives follow from, by the names that a person would look for; JSON values."""
    return {
        "ZeRO stage": int(engine.zero_optimization_stage()),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "the optimizer's wrapper": type(engine.optimizer).__name__,
        **torch_common.parameter_facts(engine.module, numel_of),
    }


def numel_of(parameter: Any) -> int:
    """Count the elements of a whole parameter; under ZeRO-3 the tensor itself is empty and ``ds_numel`` knows."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def parameter_groups(optimizer: Any) -> list[list[Any]]:
    """Return the model's parameters by the groups of the optimizer; a wrapper's own groups hold flat copies of them.

    Stages 1 and 2 have ``bit16_groups``, ``BF16_Optimizer`` ``bf16_groups``, fp16 wrappers and stage 3 ``fp16_groups``
    (0.16.9 to 0.19.8).
    """
    names = ("bit16_groups", "bf16_groups", "fp16_groups")
    held = next((getattr(optimizer, name) for name in names if getattr(optimizer, name, None)), None)
    return [group["params"] for group in optimizer.param_groups] if held is None else list(held)


def replicated_parameters(engine: Any) -> Items:
    """Return every parameter where each rank holds all of it; none under stage 3, and no other rank's experts."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [(name, p) for name, p in torch_common.parameters_of(engine.module) if expert_group(p) is None]


def replicated_state(engine: Any) -> Items:
    """Return buffers, and in stage 0 without partitions the optimizer's tensors and its fp32 masters."""
    if engine.zero_optimization_stage() == 3:
        return []
    experts = any(expert_group(parameter) for parameter in engine.module.parameters())
    optimizers = [] if experts else _whole_optimizers(engine)
    return torch_common.rest_of(engine.module, optimizers)


def replica_of(engine: Any, optimizer_state: bool, buffers: bool) -> Replica:
    """Return what makes one replica in stage 0; without the optimizer's own state, or buffers, if they are not wanted.

    ``FusedAdam`` counts its steps in ``param_groups[...]["step"]``, ``DeepSpeedCPUAdam`` in ``state[...]["step"]``.
    """
    return torch_common.replica_of(engine.module, _whole_optimizers(engine), optimizer_state, buffers)


def _whole_optimizers(engine: Any) -> list[Any]:
    """Return the base optimizer where each rank's steps all parameters."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    sharded = engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer)
    return [] if sharded or engine.basic_optimizer is None else [engine.basic_optimizer]


# -- what the preflight compares, of the engine and of the model before there is an engine ----------------------------


_SECTIONS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "data_types",
    "zero_optimization",
    "activation_checkpointing",
    "silent_consistency",
)
# Where a run writes and what it prints is a rank's own business.
_IGNORED_SECTIONS = {
    *("tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler", "autotuning"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "local_rank"),
}


def training_of(engine: Any, ds_config: Mapping[str, Any]) -> Training:
    """Return what is compared of a DeepSpeedEngine before its first step.

    Args:
        ds_config: its configuration as a dictionary.
    """
    return Training(
        framework=WORDS.framework,
        module=engine.module,
        optimizer=engine.optimizer,
        scheduler=getattr(engine, "lr_scheduler", None),
        config=partial(config_items, ds_config),
        sharded=is_sharded,
        shape=whole_shape,
        packages=("deepspeed",),
        groups=partial(parameter_groups, engine.optimizer),
    )


def config_items(ds_config: Mapping[str, Any]) -> list[Item]:
    """Return the DeepSpeed configuration by section, without monitors, output paths and local paths."""
    kept = {key: value for key, value in ds_config.items() if key not in _IGNORED_SECTIONS}
    if isinstance(kept.get(BLOCK), Mapping):  # its alerts hold secrets, and what is compared is written down
        kept[BLOCK] = {key: value for key, value in kept[BLOCK].items() if key not in WRITERS_ALONE}
    rest = {key: value for key, value in kept.items() if key not in _SECTIONS}
    parts = [(f"ds_config {section}", kept.get(section)) for section in _SECTIONS] + [("ds_config: the rest", rest)]
    return [config_item(name, value) for name, value in parts]


def is_sharded(tensor: Tensor) -> bool:
    """ZeRO-3 marks its parameters so (``deepspeed/runtime/zero/partition_parameters.py``); experts have few owners."""
    return hasattr(tensor, "ds_id") or expert_group(tensor) is not None


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
