"""What ``fully_shard`` has made of a module, by public names where there are some (torch 2.6 to 2.13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from ds_silent.config import ConfigError
from ds_silent.frameworks.shares import Slice


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The wrapped modules, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Back to the parameters that optimizers hold: behind a forward without gradients the root's are whole."""
    for module in reversed(fsdp_modules(model)):
        module.reshard()


def synchronises(modules: Sequence[Any]) -> bool:
    """Whether a backward reduces now: what ``set_requires_gradient_sync`` was given last, maybe before the attach."""
    groups: list[Any] = []
    for state in (module._get_fsdp_state() for module in modules):
        held = getattr(state, "_fsdp_param_groups", None)  # of torch 2.13; one or none before
        groups += [state._fsdp_param_group] if held is None else held
    return all(group.reduce_grads for group in groups if group is not None)


def mesh_of(parameters: Sequence[tuple[str, Tensor]]) -> Any:
    """The one device mesh of all trainable parameters.

    Raises:
        ConfigError: there are others, or a parameter is not sharded over its first dimension alone.
    """
    meshes = []
    for name, parameter in parameters:
        if not isinstance(parameter, DTensor):
            raise ConfigError(
                f"silent_consistency cannot observe parameter {name}, which no fully_shard holds; call fully_shard on "
                "the root module too"
            )
        *outer, last = parameter.placements
        if not (isinstance(last, Shard) and last.dim == 0 and all(isinstance(one, Replicate) for one in outer)):
            raise ConfigError(
                f"silent_consistency cannot observe parameter {name}, which is placed as {parameter.placements}; it "
                "needs Shard(0), with replicas of it at most"
            )
        if parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    if len(meshes) != 1:
        raise ConfigError(
            f"silent_consistency needs one device mesh for all trainable parameters, got {len(meshes)}; observe each "
            "part of the model by itself"
        )
    return meshes[0]


def group_of(mesh: Any) -> dist.ProcessGroup:
    """All ranks of a mesh: those whose gradients make one aggregate.

    Raises:
        ConfigError: the mesh has replicas and does not span all ranks.
    """
    if mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group()
        return group
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"silent_consistency needs a mesh of replicas that spans all {dist.get_world_size()} ranks, got one of "
            f"{mesh.size()}"
        )
    return dist.distributed_c10d._get_default_group()


def share_of(parameters: list[Any], mesh: Any) -> list[Slice]:
    """What of the reduced gradient this rank answers for: its rows; nothing on ranks that hold a replica of them."""
    place = mesh.get_coordinate()
    if place is None or any(place[:-1]):
        return []
    rank, ranks = place[-1], mesh.size(mesh.ndim - 1)
    slices = []
    for index, parameter in enumerate(parameters):
        rows = parameter.shape[0] if parameter.ndim else 1
        size = -(-rows // ranks)  # as torch.chunk cuts
        begin, end = min(rank * size, rows), min((rank + 1) * size, rows)
        width = parameter.numel() // rows if rows else 0
        if end > begin and width:
            slices.append(Slice(index, begin * width, (end - begin) * width))
    return slices


def plain_parameters(model: nn.Module, modules: list[Any], names: list[str]) -> list[Tensor]:
    """The parameters that forward and backward see: whole, and the same objects in every step."""
    for module in modules:
        module.unshard()
    try:
        held = dict(model.named_parameters())
        return [held[name] for name in names]
    finally:
        reshard(model)
