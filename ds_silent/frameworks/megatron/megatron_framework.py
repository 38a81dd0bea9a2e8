"""The chunks of one model in Megatron-core's ``DistributedDataParallel``: what they answer, and where the hooks are.

framework = MegatronFramework(chunks, optimizer, config, rows=4, accumulation=8)
framework.connect(moments)
framework.close(ended=True)          # chunks, buckets and optimizers are as they were

Gradients accumulate in ``parameter.main_grad``, where fused kernels write too: so each is looked at once per step,
whole, as the reduction of its bucket starts. The factor that it should be reduced with follows from the configuration,
never from the bucket's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.communicator import own_group
from ds_silent.framework import Moments, Part, Ranks
from ds_silent.frameworks import torch_common as replicated
from ds_silent.frameworks.megatron.buffers import Buffers, inner_optimizers, trained_by
from ds_silent.frameworks.megatron.peers import Peers
from ds_silent.frameworks.torch_common import CountsItself, StepCounts
from ds_silent.frameworks.torch_loop import rows_in
from ds_silent.kernels.checksums import Items
from ds_silent.maths.rounding_bound import Arithmetic, coarsest
from ds_silent.patches import Patches
from ds_silent.records import Event
from ds_silent.text import Words

# ----------------------------------------------------------------------------------------------------------------------
# The losses of Megatron's schedules, which no module returns: the script's ``forward_step`` names a function for
# them.
#
# ``schedules.forward_step`` is looked up by every schedule when it is called; it is the only place that all go
# through.


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def watch_losses(patches: Patches, chunks: Sequence[Any], tell: Callable[[Tensor], object]) -> None:
    """Call ``tell`` with the loss of each micro-batch of these chunks, on the ranks that compute one."""
    own = {id(chunk) for chunk in chunks}

    def forward_step(original: Callable[..., Any], script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = args[1] if len(args) > 1 else kwargs.get("model")
        return original(_told(script, tell) if id(model) in own else script, *args, **kwargs)

    schedules = sys.modules.get(_SCHEDULES)
    if hasattr(schedules, "forward_step"):
        patches.wrap(schedules, "forward_step", forward_step)


def _told(script: Callable[..., Any], tell: Callable[[Tensor], object]) -> Callable[..., Any]:
    """The script's ``forward_step``, whose loss function tells what it returns."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = script(*args, **kwargs)
        if loss_function is None or not torch.is_grad_enabled():
            return output, loss_function

        def told(*given: Any, **named: Any) -> Any:
            result = loss_function(*given, **named)
            if isinstance(result, tuple) and isinstance(result[0], Tensor) and result[0].numel() == 1:
                tell(_mean(result))
            return result

        return output, told

    return forward_step


def _mean(result: tuple[Any, ...]) -> Tensor:
    """(mean, ..), or (sum over tokens, tokens, ..): a copy, because the schedule divides it in place."""
    loss: Tensor = result[0].detach().clone()
    return loss / torch.as_tensor(result[1], device=loss.device).clamp(min=1) if len(result) == 3 else loss


# -- The chunks of one model in Megatron-core's ``DistributedDataParallel`` --------------------------------------------


WORDS = Words(
    framework="Megatron-core",
    begin="ds_silent.attach_megatron",
    another_reduction="try another megatron-core version, or without overlap_grad_reduce",
    not_cleared="Call zero_grad_buffer() and optimizer.zero_grad() between a step and the next backward",
    update_settings="clip_grad and the loss scale",
    batch_size="micro_batch_size",
)


class MegatronFramework(CountsItself):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, config: SilentConsistencyConfig, rows: int, accumulation: int
    ):
        self.words, self._optimizer, self._chunks = WORDS, optimizer, list(chunks)
        self._buffers = buffers = Buffers(chunks)
        self.module, self.names = module_of(chunks), buffers.names
        self.numels = [parameter.numel() for parameter in buffers.parameters]
        group = own_group(chunks[0].dp_cp_group)
        self.ranks = Ranks(group, group, buffers.parameters[0].device)
        self._counts, self._data_ranks = StepCounts(), chunks[0].dp_group.size()
        self.micro_batch_rows = rows * accumulation
        self.micro_batches = self.boundaries = 1  # looked at once per step, so that nothing is known of each
        self.additive, self.overlapped, self.whole_at_hook = False, True, True
        self.aggregate_replicated = not buffers.distributed and not buffers.experts
        self.clip = float(optimizer.config.clip_grad)
        self.observes_applied = config.integrity.aggregation and config.direction.method != "off"
        self._peers = Peers(chunks, buffers, config.integrity.replica_interval)
        self.model = self._peers.model
        self.in_norm = self._peers.in_norm() if self.clip and self._peers.is_part else None
        self._patches = Patches()
        self._moments: Moments | None = None
        self._rows = 0  # of the step under way
        self._forwards = 0  # of them: whose backward is to come
        self._begun: set[int] = set()  # chunks that have had a forward in it
        self._looked: set[int] = set()  # parameters, in it
        self._finished: set[int] = set()  # chunks whose reduction has ended in it

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """A bucket is multiplied by 1/N in place and added up, in its own dtype."""
        own, ranks = coarsest(self._buffers.dtypes), float(dist.get_world_size(self.ranks.reduced))
        sums = bool(self._chunks[0].config.calculate_per_token_loss)
        return Arithmetic(own, accumulation=own, elements=elements, width=width, total=ranks if sums else 1.0)

    def skipped(self, applied: bool | None) -> bool:
        return self._counts.skipped and bool(self._optimizer.config.fp16)

    def is_boundary(self) -> bool:
        return True

    def accumulated(self, index: int) -> Tensor | None:
        """A gradient comes whole: nothing is to be added to it."""
        return None

    def reduced(self, index: int) -> Tensor | None:
        return self._buffers.whole(index) if self.aggregate_replicated else None

    def aggregated(self) -> Iterator[Part] | None:
        return ((piece.index, piece.start, self._buffers.values(piece)) for piece in self._buffers.share)

    def applied(self, optimizer: Any) -> Iterator[Part]:
        for outer, inner in inner_optimizers(self._optimizer):
            if inner is optimizer:
                yield from ((piece.index, piece.start, part) for piece, part in self._buffers.applied_of(outer))

    def scale(self, seen: Tensor | None) -> float | Tensor:
        factor: Tensor = self._optimizer.get_loss_scale()
        return factor.detach().float().reshape(())

    def optimizers(self) -> list[Any]:
        return [inner for _, inner in inner_optimizers(self._optimizer)]

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """All but experts: those of other ranks are others."""
        experts = self._buffers.experts
        alike = [pair for pair in replicated.parameters_of(self.module) if id(pair[1]) not in experts]
        inner = [
            inner
            for outer, inner in inner_optimizers(self._optimizer)
            if not self._buffers.distributed and not any(id(parameter) in experts for parameter, _ in trained_by(outer))
        ]
        return alike, lambda: replicated.rest_of(self.module, inner)

    def beside(self, step: int) -> list[Event]:
        """See :class:`ds_silent.framework.HasPeers`."""
        return self._peers.compare(step)

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self._moments, patches = moments, self._patches
        patches.add(self._chunks[0].module.register_forward_pre_hook(self._forward, with_kwargs=True))
        patches.add(self._chunks[-1].module.register_forward_hook(moments.forwarded))
        watch_losses(patches, self._chunks, moments.loss)
        patches.before_backward(self._backward_begins)
        for group in self._buffers.bucket_groups:
            patches.wrap(group, "start_grad_sync", partial(self._reduction_starts, group))
        for chunk in self._chunks:
            # a buffer that weights are gathered through is empty when the forward has used them
            shared = getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
            register = chunk.module.register_forward_hook if shared else chunk.module.register_forward_pre_hook
            patches.add(register(partial(self._chunk_begins, chunk)))
            patches.around(chunk, "finish_grad_sync", _nothing, partial(self._chunk_finished, chunk))
        for optimizer in self.optimizers():
            patches.add(optimizer.register_step_pre_hook(moments.applying))
        patches.wrap(self._optimizer, "step", self._step)

    def close(self, ended: bool) -> None:
        self._patches.undo()

    def _chunk_begins(self, chunk: Any, *given: Any) -> None:
        assert self._moments is not None
        if torch.is_grad_enabled() and id(chunk) not in self._begun:
            self._begun.add(id(chunk))
            self._moments.begins(partial(self._buffers.filled, chunk))

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._moments is not None
        self.module.training = module.training
        if torch.is_grad_enabled():
            self._rows += self._moments.guard.local(rows_in, args, kwargs) or 0
            self._forwards += 1
        self._moments.forward(module, args, kwargs)

    def _backward_begins(self, root: Any) -> None:
        """Its gradients are looked at later; it is the chunks' where a forward of theirs waits for one."""
        assert self._moments is not None
        if self._forwards:
            self._forwards -= 1
            self._moments.root(root, own=True)

    def _reduction_starts(self, group: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        under_way = getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None
        if not under_way:  # else the call does nothing
            self._look_at(self._buffers.indices(group))
        return original(*args, **kwargs)

    def _look_at(self, indices: Sequence[int]) -> None:
        assert self._moments is not None
        for index in indices:
            if index not in self._looked:
                self._looked.add(index)
                self._moments.gradient(index, self._buffers.accumulated(index))

    def _chunk_finished(self, chunk: Any) -> None:
        self._finished.add(id(chunk))
        if len(self._finished) == len(self._chunks):
            self._reduction_ended()

    def _reduction_ended(self) -> None:
        assert self._moments is not None
        self._finished.clear()
        if self._looked:
            self._look_at(range(len(self.numels)))  # what was not reduced at all
            self._looked.clear()
            self._moments.micro_batch_ended()
            self._moments.reduced()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._moments is not None
        self._reduction_ended()
        if self._peers.is_part:  # Megatron has gone on: layer norms, tied embeddings, in ways that torch does not count
            increment_version(self._buffers.gradients)
        self._moments.before_update()
        result = original(*args, **kwargs)
        self._counts.take(self._rows, skipped=isinstance(result, tuple) and result[0] is False)
        self._rows = self._forwards = 0
        self._begun.clear()
        self._moments.updated()
        return result


def module_of(chunks: Sequence[Any]) -> nn.Module:
    """The only chunk's module, or one that holds all chunks'."""
    if len(chunks) == 1:
        module: nn.Module = chunks[0].module
        return module
    return nn.ModuleDict({f"chunk{number}": chunk.module for number, chunk in enumerate(chunks)})


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
