"""One model in ``DistributedDataParallel``: what it answers, and where its hooks are.

framework = DDPFramework(ddp, optimizers, config, micro_batch_rows=4, accumulation=1)
framework.connect(moments)
framework.close(ended=True)          # the module and its optimizers are as they were

No communication hook is registered: torch allows one, which is the user's. The local gradient is what a leaf hook sees
and what ``parameter.grad`` holds of earlier micro-batches; where a parameter may take part in an earlier micro-batch
only (``find_unused_parameters``), each micro-batch is looked at by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.frameworks import replicated
from ds_silent.frameworks.base import Moments, Part, Ranks
from ds_silent.frameworks.ddp.reduction import arithmetic_of, hook_of, keeps_the_mean
from ds_silent.frameworks.patches import Patches
from ds_silent.frameworks.shares import Slice, cut, nth_share
from ds_silent.frameworks.torch_loop import TorchLoop
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.ranks.communicator import own_group
from ds_silent.ranks.together import Together, UnevenInputsError
from ds_silent.replicas.checksums import Items, Replica
from ds_silent.words import TORCH

logger = logging.getLogger("ds_silent")


class DDPFramework:
    """See :class:`ds_silent.frameworks.base.Framework`. Making one is a collective."""

    def __init__(
        self,
        ddp: Any,
        optimizers: Sequence[Any],
        config: SilentConsistencyConfig,
        micro_batch_rows: int,
        accumulation: int,
    ):
        group = own_group(ddp.process_group)
        self.words = TORCH
        self._ddp, self._optimizers = ddp, list(optimizers)
        self.module = ddp.module
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad and name not in ignored]
        self.names = [name for name, _ in named]
        self._parameters: list[Tensor] = [p for _, p in named]
        self.numels = [p.numel() for p in self._parameters]
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self.ranks = Ranks(group, group, device)
        self.micro_batches = self.boundaries = accumulation
        self.micro_batch_rows = micro_batch_rows
        self.additive = bool(ddp.find_unused_parameters) or bool(ddp.static_graph)
        self.overlapped, self.whole_at_hook, self.clip = True, True, 0.0
        self.keeps_the_mean = keeps_the_mean(ddp)
        if not self.keeps_the_mean:
            logger.warning(
                "ds_silent: the communication hook %s may be lossy by design: the reduction is not checked",
                hook_of(ddp),
            )
        checks = config.integrity.aggregation and config.direction.method != "off" and self.keeps_the_mean
        self.observes_applied = self.aggregate_replicated = checks
        whole = nth_share(self.numels, dist.get_rank(group), dist.get_world_size(group))
        self._share = whole if self.keeps_the_mean else None
        self._pieces = {id(self._parameters[piece.index]): piece for piece in self._share or ()}
        self._loop = TorchLoop(self.module, self._optimizers, lambda: bool(ddp.require_backward_grad_sync))
        self._ranks = dist.get_world_size(group)
        self._patches = Patches()

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        return arithmetic_of(self._ddp, {p.dtype for p in self._parameters}, elements, width)

    @property
    def step(self) -> int:
        return self._loop.step

    @property
    def samples(self) -> int:
        return self._loop.rows * self._ranks

    @property
    def batch(self) -> float:
        return float(self._loop.batch)

    def skipped(self, applied: bool | None) -> bool:
        return self._loop.skipped

    @property
    def update_skipped(self) -> bool:
        return self._loop.skipped or self._loop.left_out

    @property
    def left_out(self) -> bool:
        return self._loop.left_out

    def counted(self) -> dict[str, int]:
        return {"step": self._loop.step, "rows": self._loop.rows}

    def count_on(self, counted: dict[str, int]) -> None:
        self._loop.step, self._loop.rows = int(counted["step"]), int(counted["rows"])

    def is_boundary(self) -> bool:
        return self._loop.is_boundary()

    def accumulated(self, index: int) -> Tensor | None:
        return self._parameters[index].grad

    def reduced(self, index: int) -> Tensor | None:
        return self._parameters[index].grad

    def aggregated(self) -> Iterator[Part] | None:
        if self._share is None:
            return None
        held = ((piece, cut(self._parameters[piece.index].grad, piece)) for piece in self._share)
        return ((piece.index, piece.start, values) for piece, values in held if values is not None)

    def applied(self, optimizer: Any) -> Iterator[Part]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                piece: Slice | None = self._pieces.get(id(parameter))
                values = None if piece is None else cut(parameter.grad, piece)
                if piece is not None and values is not None:
                    yield piece.index, piece.start, values

    def scale(self, seen: Tensor | None) -> float | Tensor:
        return 1.0 if seen is None else seen

    def gram(self) -> Tensor | None:
        return None

    def optimizers(self) -> list[Any]:
        return self._optimizers

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        module, optimizers = self.module, self._optimizers
        return replicated.parameters_of(module), lambda: [
            *replicated.buffers_of(module),
            *replicated.masters_of(module, optimizers),
            *replicated.states_of(optimizers),
        ]

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """Its tensors may be written between two steps."""
        return replicated.replica_of(self.module, self._optimizers, optimizer_state, buffers)

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self._patches.add(self._ddp.register_forward_pre_hook(partial(self._refuse_join, moments.together)))
        self._loop.connect(moments, self._parameters)

    def _refuse_join(self, together: Together, *_: Any) -> None:
        """Inside ``ddp.join()`` a rank without rows shadows the others' reductions and takes no step: whoever exchanged
        something there would wait for it. Read is ``_join_config`` (torch 2.4 to 2.13)."""
        if self._ddp._join_config.enable and torch.is_grad_enabled():
            together.fail(UnevenInputsError("inside DistributedDataParallel.join() nothing is observed"))

    def close(self, ended: bool) -> None:
        self._patches.undo()
        self._loop.close()
