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
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.communicator import own_group
from ds_silent.distributed.together import Together, UnevenInputsError
from ds_silent.framework import Covers, Moments, Part, Ranks
from ds_silent.frameworks import replicated
from ds_silent.frameworks.counts import CountsItself
from ds_silent.frameworks.ddp.reduction import WHOLE, arithmetic_of, hook_of, keeps_the_mean, reduced_parameters
from ds_silent.frameworks.shares import Applied, cut, nth_share, row_of
from ds_silent.frameworks.torch_loop import TorchLoop
from ds_silent.kernels.checksums import Items, Replica
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.patches import Patches
from ds_silent.text import TORCH

logger = logging.getLogger("ds_silent")


class DDPFramework(CountsItself, Covers):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

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
        self._reduced = reduced_parameters(ddp)
        self._ignored = {id(p) for name, p in self.module.named_parameters() if name in ignored}
        named = [
            (name, p)
            for name, p in self.module.named_parameters()
            if p.requires_grad and name not in ignored and (self._reduced is None or id(p) in self._reduced)
        ]
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
        rows = [row_of(p) for p in self._parameters]
        whole = nth_share(self.numels, dist.get_rank(group), dist.get_world_size(group), rows)
        self._share = whole if self.keeps_the_mean else None
        pieces = [(self._parameters[piece.index], piece) for piece in self._share or ()]
        self._applied = Applied(pieces, self._optimizers)
        self._loop = TorchLoop(self.module, self._optimizers, lambda: bool(ddp.require_backward_grad_sync))
        self._counts = self._loop.counts
        self._data_ranks = dist.get_world_size(group)
        self._patches = Patches()

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        return arithmetic_of(self._ddp, {p.dtype for p in self._parameters}, elements, width)

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
        for parameter, piece in self._applied.by(optimizer):
            values = cut(parameter.grad, piece)
            if values is not None:
                yield piece.index, piece.start, values

    def optimizers(self) -> list[Any]:
        return self._optimizers

    def held(self) -> list[list[Tensor]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def reduced_ids(self) -> Set[int] | None:
        return None if self._reduced is None else self._reduced | self._ignored

    def is_own(self, wrapper: object) -> bool:
        return wrapper is self._ddp

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        return replicated.parameters_of(self.module), lambda: replicated.rest_of(self.module, self._optimizers)

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """Its tensors may be written between two steps."""
        return replicated.replica_of(self.module, self._optimizers, optimizer_state, buffers)

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self._patches.add(self._ddp.register_forward_pre_hook(partial(self._refuse_join, moments.together)))
        self._loop.connect(moments, self._parameters)
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            self._patches.wrap(self._ddp, name, self._hook_registered)
        if hasattr(self._ddp, "reducer"):  # none where all reductions are delayed
            self._patches.wrap_method(type(self._ddp.reducer), "_delay_all_reduce", self._reduce_late)

    def _hook_registered(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The bound on rounding is that of the reduction as it was when the observer was attached."""
        before = hook_of(self._ddp)
        result = original(*args, **kwargs)
        hook = hook_of(self._ddp)
        if hook != before and not (hook in WHOLE and before in WHOLE) and self._share is not None:
            self._share, self._applied = None, Applied((), self._optimizers)
            logger.warning(
                "ds_silent: the communication hook %s came after the observer: the reduction is not checked from now "
                "on; register it before the observer is attached",
                hook,
            )
        return result

    def _reduce_late(self, original: Callable[..., Any], reducer: Any) -> Any:
        """The first step of a static graph: torch reduces at the end of the backward, Lightning's manual optimization
        behind it (2.6.6)."""
        result = original(reducer)
        if reducer is self._ddp.reducer:
            self._loop.reduced_behind()
        return result

    def _refuse_join(self, together: Together, *_: Any) -> None:
        """Inside ``ddp.join()`` a rank without rows shadows the others' reductions and takes no step: whoever exchanged
        something there would wait for it. Read is ``_join_config`` (torch 2.4 to 2.13)."""
        if self._ddp._join_config.enable and torch.is_grad_enabled():
            together.fail(UnevenInputsError("inside DistributedDataParallel.join() nothing is observed"))

    def close(self, ended: bool) -> None:
        self._patches.undo()
        self._loop.close()
