"""One model under ``fully_shard``: what it answers, and where its hooks are.

framework = FSDP2Framework(model, optimizers, config, micro_batch_rows=4, accumulation=1)
framework.connect(moments)
framework.close(ended=True)          # the modules and their optimizers are as they were

A backward sees plain, whole parameters, which hold each micro-batch's local gradient until their group is reduced and
freed; where one holds something from before, a hook gives it. What comes out is this rank's rows of ``parameter.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.device import local_of
from ds_silent.framework import GatheredPiece, Moments, Part
from ds_silent.frameworks.torch_common import Slice, Wrapped, attach_wrapped, idle_or_refused
from ds_silent.frameworks.torch_framework import TorchFramework
from ds_silent.kernels.checksums import Items
from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF, Arithmetic, coarsest
from ds_silent.observing.observe import Given
from ds_silent.observing.observer import Observer

# ----------------------------------------------------------------------------------------------------------------------
# What ``fully_shard`` has made of a module, by public names where there are some (torch 2.6 to 2.13).


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the wrapped modules, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Go back to the parameters that optimizers hold: behind a forward without gradients the root's are whole."""
    for module in reversed(fsdp_modules(model)):
        module.reshard()


def synchronises(modules: Sequence[Any]) -> bool:
    """Tell whether a backward reduces now: ``set_requires_gradient_sync`` may have come before the attach."""
    return all(group.reduce_grads for group in groups_of(modules))


def groups_of(modules: Sequence[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered and reduced together."""
    groups: list[Any] = []
    for state in (module._get_fsdp_state() for module in modules):
        held = getattr(state, "_fsdp_param_groups", None)  # of torch 2.13; one or none before
        groups += [state._fsdp_param_group] if held is None else held
    return [group for group in groups if group is not None]


def mesh_of(parameters: Sequence[tuple[str, Tensor]]) -> Any:
    """Return the one device mesh of all trainable parameters.

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
                "needs Shard(0), with replicas of it at most: fully_shard without tensor parallelism"
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
    """Return all ranks of a mesh: those whose gradients make one aggregate.

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
    """Return what of the aggregate this rank answers for: its rows; nothing where it holds a replica of them."""
    place = mesh.get_coordinate()
    return [] if place is None or any(place[:-1]) else rows_of(parameters, mesh)


def rows_of(parameters: list[Any], mesh: Any) -> list[Slice]:
    """Return this rank's rows of each parameter."""
    rank, ranks = mesh.get_coordinate()[-1], mesh.size(mesh.ndim - 1)
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
    """Return the parameters that forward and backward see: whole, and the same objects in every step."""
    for module in modules:
        module.unshard()
    try:
        held = dict(model.named_parameters())
        return [held[name] for name in names]
    finally:
        reshard(model)


class FSDP2Framework(TorchFramework):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

    reduces_every_micro_batch, forwards_alone, weights_sharded, reads_together = True, False, True, True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        config: SilentConsistencyConfig,
        micro_batch_rows: int,
        accumulation: int,
    ):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._mesh, self._modules = mesh_of(named), fsdp_modules(model)
        super().__init__(
            model,
            named,
            group_of(self._mesh),
            optimizers,
            config,
            micro_batch_rows,
            accumulation,
            synchronises=lambda: synchronises(self._modules),
            device=local_of(named[0][1]).device,
        )
        self.aggregate_replicated, self._rows = False, self.share()
        self.hooked = plain_parameters(model, self._modules, self.names)
        self.loop.backwards.left, self.script_hooks.adds_up = self._left, False

    def connect(self, moments: Moments) -> None:
        """Hook the parameters that a backward sees, and the moment before a group of them is reduced and freed."""
        local = moments.guard.local
        super().connect(replace(moments, on_gradient=partial(local, self._gradient, moments)))
        for group in groups_of(self._modules):
            self.patches.around(group, "post_backward", partial(local, self._group_accumulated, moments))

    def _gradient(self, moments: Moments, index: int, gradient: Tensor) -> None:
        if moments.on_gradient(index, gradient):
            self.script_hooks.leave_rest()

    def _group_accumulated(self, moments: Moments, *_: Any) -> None:
        self.script_hooks.take_left(goes_on=True)
        moments.on_accumulated()

    def accumulated(self, index: int) -> Tensor | None:
        """Return what a backward has brought of the whole parameter, until its group's end."""
        held: Tensor | None = self.hooked[index].grad
        return held

    def _left(self) -> Iterator[tuple[int, Tensor]]:
        """Yield what this rank's rows of the gradients hold as a backward begins: nobody has cleared it."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                yield index, local_of(parameter.grad)

    def share(self) -> list[Slice]:
        return share_of(self.parameters, self._mesh)

    def values(self, gradient: Tensor | None, piece: Slice) -> Tensor | None:
        return None if gradient is None else local_of(gradient).detach().reshape(-1)[: piece.numel]

    def weights(self) -> Iterator[Part]:
        """Yield this rank's rows; nothing where it holds a replica of them."""
        for rows in self._rows:
            yield rows.index, rows.start, local_of(self.parameters[rows.index]).detach().reshape(-1)[: rows.numel]

    def gathered(self) -> list[GatheredPiece]:
        """Return this rank's rows of what each module under ``fully_shard`` gathers in its own pre-hook."""
        owners: dict[int, Any] = {}
        for module in reversed(self._modules):  # a module of modules gathers what those inside do not
            for parameter in module.parameters():
                owners.setdefault(id(parameter), module)
        return [
            GatheredPiece(self.names[rows.index], owners[id(parameter)], partial(_own_rows, whole, parameter, rows))
            for rows in rows_of(self.parameters, self._mesh)
            for parameter, whole in [(self.parameters[rows.index], self.hooked[rows.index])]
            if id(parameter) in owners
        ]

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Return nothing: each number has one owner, or replicas that only some ranks hold."""
        return [], list

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """Gradients travel in the policy's ``reduce_dtype``, else in that of the forward, else in their own."""
        own = coarsest(p.dtype for p in self.parameters)
        policies = [module._get_fsdp_state()._mp_policy for module in self._modules]  # torch 2.6 to 2.13
        travelling = [policy.reduce_dtype or policy.param_dtype or own for policy in policies]
        seen = [policy.param_dtype or own for policy in policies]
        communication = coarsest(travelling)
        narrows = UNIT_ROUNDOFF[communication] > min(UNIT_ROUNDOFF[dtype] for dtype in seen)
        after = (communication, *((own,) if UNIT_ROUNDOFF[own] > UNIT_ROUNDOFF[communication] else ()))
        return Arithmetic(
            communication,
            before=1 + narrows,
            after=after,
            reductions=self.micro_batches,
            accumulation=own,
            applied=own,
            norm=own,
            elements=elements,
            width=width,
            handed_unscaled=True,
            writes_hidden=True,  # neither a DTensor's version nor its shard's moves when it is clipped
        )


def _own_rows(whole: Tensor, parameter: Any, rows: Slice) -> tuple[Tensor, Tensor] | None:
    """None where it is not gathered now, or is of another kind than a plain tensor, such as 8-bit floats."""
    gathered, shard = whole.detach(), local_of(parameter).detach()
    if type(gathered) is not Tensor or type(shard) is not Tensor or not gathered.untyped_storage().size():
        return None
    return gathered.reshape(-1)[rows.start : rows.start + rows.numel], shard.reshape(-1)[: rows.numel]


def attach_fsdp2(
    model: nn.Module,
    optimizer: Any,
    config: Given = None,
    *,
    loader: Any = None,
    accumulation: int = 1,
) -> Observer | None:
    """Observe an FSDP2 training as :func:`ds_silent.attach` does. A collective: it unshards once."""
    if not isinstance(model, FSDPModule):
        sentence = f"attach_fsdp2 takes a module under fully_shard, got {type(model).__name__}"
        return idle_or_refused(model, config, sentence)
    reshard(model)
    wrapped = Wrapped(
        name="fully_shard",
        held=model,
        module=model,
        group=lambda: group_of(mesh_of([(name, p) for name, p in model.named_parameters() if p.requires_grad])),
        framework=lambda optimizers, config, rows, steps: FSDP2Framework(model, optimizers, config, rows, steps),
        sharded=True,
    )
    return attach_wrapped(wrapped, optimizer, config, loader, accumulation)
