"""One model under ``fully_shard``: what it answers, and where its hooks are.

framework = FSDP2Framework(model, optimizers, config, micro_batch_rows=4, accumulation=1)
framework.connect(moments)
framework.close(ended=True)          # the modules and their optimizers are as they were

A backward sees plain, whole parameters, whose hooks give each micro-batch's local gradient; it is reduced and freed at
once. What comes out is this rank's rows of ``parameter.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.communicator import own_group
from ds_silent.framework import Covers, Moments, Part, Ranks
from ds_silent.frameworks.counts import CountsItself
from ds_silent.frameworks.fsdp2.modules import fsdp_modules, group_of, mesh_of, plain_parameters, share_of, synchronises
from ds_silent.frameworks.shares import Applied
from ds_silent.frameworks.torch_loop import TorchLoop
from ds_silent.kernels.checksums import Items
from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF, Arithmetic, coarsest
from ds_silent.text import TORCH


class FSDP2Framework(CountsItself, Covers):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        config: SilentConsistencyConfig,
        micro_batch_rows: int,
        accumulation: int,
    ):
        self.words, self.module = TORCH, model
        self._optimizers, self._modules = list(optimizers), fsdp_modules(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self._shards = [name for name, _ in named], [p for _, p in named]
        self.numels = [p.numel() for p in self._shards]
        mesh = mesh_of(named)
        group = own_group(group_of(mesh))
        self.ranks = Ranks(group, group, torch.device(self._local(self._shards[0]).device))
        self._data_ranks = dist.get_world_size(group)
        self.micro_batches = self.boundaries = accumulation
        self.micro_batch_rows = micro_batch_rows
        self.additive = self.overlapped = self.whole_at_hook = True
        self.aggregate_replicated, self.clip = False, 0.0
        self.observes_applied = config.integrity.aggregation and config.direction.method != "off"
        self._share = share_of(self._shards, mesh)
        self._applied = Applied([(self._shards[piece.index], piece) for piece in self._share], self._optimizers)
        self._plain = plain_parameters(model, self._modules, self.names)
        self._loop = TorchLoop(model, self._optimizers, lambda: synchronises(self._modules))
        self._counts = self._loop.counts

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """Gradients travel in the policy's ``reduce_dtype``, else in that of the forward, else in their own."""
        own = coarsest(p.dtype for p in self._shards)
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

    def is_boundary(self) -> bool:
        return self._loop.is_boundary()

    def accumulated(self, index: int) -> Tensor | None:
        return None

    def reduced(self, index: int) -> Tensor | None:
        return None

    @staticmethod
    def _local(tensor: Any) -> Tensor:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local

    def aggregated(self) -> Iterator[Part] | None:
        held = ((piece, self._shards[piece.index].grad) for piece in self._share)
        return (
            (piece.index, piece.start, self._local(grad).detach().reshape(-1)[: piece.numel])
            for piece, grad in held
            if grad is not None
        )

    def applied(self, optimizer: Any) -> Iterator[Part]:
        for parameter, piece in self._applied.by(optimizer):
            if parameter.grad is not None:
                yield piece.index, piece.start, self._local(parameter.grad).detach().reshape(-1)[: piece.numel]

    def optimizers(self) -> list[Any]:
        return self._optimizers

    def held(self) -> list[list[Tensor]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Each number has one owner, or replicas that only some ranks hold."""
        return [], list

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self._loop.connect(moments, self._plain)

    def close(self, ended: bool) -> None:
        self._loop.close()
