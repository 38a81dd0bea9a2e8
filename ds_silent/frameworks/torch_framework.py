"""Answer for a training whose script writes the loop: where its gradients, its weights and its aggregate lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import SilentConsistencyConfig
from ds_silent.framework import Framework, Moments, Part
from ds_silent.frameworks import torch_common
from ds_silent.frameworks.torch_common import AppliedGradients, Slice
from ds_silent.frameworks.torch_loop import TorchLoop
from ds_silent.kernels.checksums import Items, Replica


class TorchFramework(Framework):
    """Adapt a training whose script writes the loop; by default every rank holds the whole model, as under DDP.

    Each rank answers for a share of the aggregate; together the shares cover it once.

    Args:
        module, parameters, group, optimizers, device: see :class:`ds_silent.framework.Framework`.
        rows: of a micro-batch.
        accumulation: micro-batches per step.
        synchronises, reduces_in_backward: see :class:`TorchLoop`.
        checks: whether the reduction's result should be what :meth:`arithmetic` says, up to rounding.
    """

    forwards_alone = True

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        optimizers: Sequence[Any],
        config: SilentConsistencyConfig,
        rows: int,
        accumulation: int,
        synchronises: Callable[[], bool],
        reduces_in_backward: bool = True,
        checks: bool = True,
        device: torch.device | None = None,
    ):
        super().__init__(module, parameters, group, optimizers, device)
        self.micro_batches, self.micro_batches_told = accumulation, accumulation > 1
        self.max_reductions_per_step = accumulation
        self.micro_batch_rows, self.overlaps_backward = rows, reduces_in_backward
        self.observes_applied = config.integrity.aggregation and config.direction.method != "off" and checks
        self.aggregate_replicated = self.observes_applied
        self.loop = TorchLoop(module, self._optimizers, self.counts, self.patches, synchronises, reduces_in_backward)
        self.hooked: Sequence[Any] = self.parameters  # as a backward sees them
        self._share = self.share() if checks else None
        pieces = [(self.parameters[piece.index], piece) for piece in self._share or ()]
        self._applied = AppliedGradients(pieces, self._optimizers)

    # -- where the aggregate lies ----------------------------------------------------------------------------------

    def share(self) -> list[Slice]:
        """Return this rank's share of the aggregate: an N-th if every rank holds all of it."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        return torch_common.nth_share(self.numels, rank, ranks, list(map(torch_common.row_of, self.parameters)))

    def values(self, gradient: Tensor | None, piece: Slice) -> Tensor | None:
        """Return a piece of a parameter's gradient, as a view if possible."""
        return torch_common.cut(gradient, piece)

    def stop_checking(self) -> None:
        """Hide the aggregate from now on."""
        self._share, self._applied = None, AppliedGradients((), self._optimizers)

    # -- answers ---------------------------------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self.loop.connect(moments, self.hooked, self.parameters, self.names, self.script_hooks)

    def is_boundary(self) -> bool:
        return self.loop.backwards.is_boundary()

    def accumulated(self, index: int) -> Tensor | None:
        return None if index in self.loop.backwards.frozen else self.parameters[index].grad

    def reduced(self, index: int) -> Tensor | None:
        return self.parameters[index].grad

    def aggregated(self) -> Iterator[Part] | None:
        if self._share is None:
            return None
        moving = (piece for piece in self._share if piece.index not in self.loop.backwards.frozen)
        held = ((piece, self.values(self.parameters[piece.index].grad, piece)) for piece in moving)
        return ((piece.index, piece.start, values) for piece, values in held if values is not None)

    def applied(self, optimizer: Any) -> Iterator[Part]:
        for parameter, piece in self._applied.by(optimizer):
            values = self.values(parameter.grad, piece)
            if values is not None:
                yield piece.index, piece.start, values

    def parameter_groups(self) -> list[list[Tensor]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        return torch_common.parameters_of(self.module), lambda: torch_common.rest_of(self.module, self._optimizers)

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        return torch_common.replica_of(self.module, self._optimizers, optimizer_state, buffers)
